"""The command `cdc`: its commands by name, and the code that turns errors into exit codes.

Commands are in one module each and are imported when used, so that `cdc --help` answers at once. An
error with a remedy (`CDCError`) prints one sentence and the remedy on stderr and exits with the
error's code. Everything else is a bug: only a bug prints its location, and exits 70.
"""

from __future__ import annotations

from cdc.cli import stopping

if __name__ != "__mp_main__":
    stopping.install()

import os
import sys
from importlib import import_module

import click

from cdc import __version__
from cdc.errors import CDCError, Exit
from cdc.runtime import extras

# Each is the object of the same name in the module of that name. In the order in which a new user
# needs them.
COMMANDS = {
    "demo": "Watch a live database arrive in the log.",
    "init": "Write a commented lockstep.yaml.",
    "config": "Check or show the configuration.",
    "doctor": "Find what would stop the pipeline.",
    "setup": "Create publication, slot and topics.",
    "run": "Run the daemon: from the slot into the log.",
    "follow": "Keep stores equal to the source, on Spark.",
    "rebuild": "Build a follower again, alongside the current one.",
    "view": "Keep SQL queries' rows equal to Postgres' own answer.",
    "archive": "Keep every record of the log in a Delta table.",
    "prove": "Prove that log and archive are complete and unaltered.",
    "history": "Print every version of one row.",
    "diff": "Print which rows of a table differ between two states.",
    "replay": "Publish a range of the past to a topic of its own.",
    "erase": "Erase a row from archive, topics and Delta lakes.",
    "keys": "Make the keyring of encrypted columns, forget a subject.",
    "snapshot": "Read tables again while the daemon streams.",
    "table": "Add tables, remove or list them.",
    "status": "Show how far the log is, and what is wrong.",
    "console": "Show the pipeline in a browser.",
    "webhook": "Send changes to receivers over HTTP.",
    "group": "List or move groups of readers that acknowledge changes.",
    "queue": "List work queues, and what they gave up.",
    "trace": "Send traces of transactions to OpenTelemetry.",
    "metrics": "Print metrics, alert rules and a dashboard.",
    "token": "Print the LSN up to which the source is written.",
    "wait": "Wait until followers have applied a commit.",
    "tail": "Print events as they arrive in the log.",
    "dead": "List events too large for their topics, or show one.",
    "slot": "Show, alter or drop the replication slot.",
    "publication": "Continue with a publication that was altered.",
    "topics": "Continue with topics that have changed.",
    "upgrade": "Check that this version can take over.",
    "migrations": "Optional objects in the source database.",
    "teardown": "Drop slot, publication and topics.",
    "spark": "Prepare spark-submit: applications, jars, code.",
    "local": "Run Postgres, Kafka and stores here, to try out.",
}


class LazyCommands(click.Group):
    """A group that imports a command when it is used, and lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - as the base class
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"cdc.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise OutputClosedError from error  # click itself would exit 1

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


class OutputClosedError(Exception):
    """The reader of our output has closed it, as in `cdc tail | head`: no error."""


@click.group(
    cls=LazyCommands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage, 69 a server is unavailable, 70 a bug, "
    "75 try again, 77 permission, 78 configuration or a gap that needs a person.",
)
@click.version_option(__version__, prog_name="lockstep-cdc", message="%(prog)s %(version)s")
def cdc() -> None:
    """Keep a partitioned log in lockstep with Postgres, each change exactly once.

    \b
    New here:        cdc demo
    Your database:   cdc init, cdc doctor, cdc setup, cdc run
    """  # noqa: D301 - click reads the real character as: keep the lines below as they are


def main(arguments: list[str] | None = None) -> None:
    """Run `cdc` and exit the process with the exit code of the outcome."""
    from cdc.runtime import bugs  # noqa: PLC0415 - not for tests that run commands in their own process

    bugs.install()
    code = run(arguments)
    if arguments is not None:
        sys.exit(code)  # a caller's process, which has threads of its own
    stopping.leave(code)


def run(arguments: list[str] | None = None) -> int:
    """Run `cdc` with `arguments` (default: the process's) and return the exit code."""
    try:
        result = cdc.main(arguments, prog_name="cdc", standalone_mode=False)
    except Exception as error:  # noqa: BLE001 - the one place where an error becomes an exit code
        return _exit_code(error)
    except KeyboardInterrupt:
        return _exit_code(click.Abort())
    return int(result) if isinstance(result, int) else Exit.OK


def _exit_code(error: Exception) -> int:
    """Print what happened, and return the exit code for it."""
    match error:
        case click.ClickException():
            error.show()
            code = int(Exit.USAGE)
        case click.Abort():
            click.echo("cdc: interrupted", err=True)
            code = 128 + 2  # as in shells: ended by SIGINT
        case OutputClosedError():
            # Python would report it again when it flushes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = Exit.OK
        case CDCError():
            code = _explain(error)
        case ModuleNotFoundError() if (absent := extras.missing(error)) is not None:
            code = _explain(absent)
        case _:
            code = _report_bug(error)
    return code


def _explain(error: CDCError) -> int:
    click.echo(f"{click.style('cdc:', fg='red', bold=True)} {error.what}", err=True)
    click.echo(f"{click.style('what to do:', bold=True)} {error.hint}", err=True)
    return error.exit_code


def _report_bug(error: Exception) -> int:
    import platform  # noqa: PLC0415 - only a bug pays for them

    from cdc.runtime import bugs  # noqa: PLC0415 - as above

    click.echo(bugs.where(error), err=True, nl=False)
    click.echo(
        f"cdc: this is a bug in Lockstep {__version__} (Python {platform.python_version()}, "
        f"{platform.system()}). Nothing outside the log was confirmed, so nothing is lost.\n"
        "what to do: report it with the lines above; they hold no values",
        err=True,
    )
    return Exit.BUG


if __name__ == "__main__":
    main()
