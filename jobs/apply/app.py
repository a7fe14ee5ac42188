"""The frame of an app that runs followers: its logs, and how the process ends."""

from __future__ import annotations

import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from cdc.errors import CDCError, Exit
from cdc.operate.logs import MessageFormatter
from cdc.runtime import bugs, extras, spark
from lockstep.jobs.spark.garbage import collect_seldom

if TYPE_CHECKING:
    from types import TracebackType

    from cdc.config import Config

# Python's own is 5 ms.
_TURN_SECONDS: Final = 0.000_5


def begin(config: Config) -> None:
    """Log as configured; end with the JVM of spark-submit."""
    spark.end_with_jvm()
    handler = logging.StreamHandler()
    handler.setFormatter(MessageFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # It prints a traceback of every error in a batch; `Run` reports the error.
    logging.getLogger("py4j.clientserver").setLevel(logging.CRITICAL)


def suit_followers() -> None:
    """Suit the interpreter to threads of which one reads a cut while another writes one.

    A thread that returns from Arrow's code waits for its turn.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
    sys.setswitchinterval(_TURN_SECONDS)


def _explain(name: str | None, error: CDCError) -> int:
    click.echo(f"{name}: {error.what}\nwhat to do: {error.hint}", err=True)
    return error.exit_code


def _uncaught(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
    """Explain an import that failed because an extra is missing; print where any other error is."""
    if isinstance(error, ModuleNotFoundError) and (absent := extras.missing(error)) is not None:
        sys.stdout.flush()
        os._exit(_explain(Path(sys.argv[0]).stem, absent))
    bugs.ended(kind, error, at)


bugs.install()
# An application imports Spark and the stores' clients before it can catch anything.
sys.excepthook = _uncaught


def run(command: click.Command) -> NoReturn:
    """Run an app's command; exit with the code that it returns, or with its error's."""
    try:
        code = command.main(standalone_mode=False) or Exit.OK
    except click.ClickException as error:
        error.show()
        code = Exit.USAGE
    except CDCError as error:
        code = _explain(command.name, error)
    except KeyboardInterrupt:  # by Spark's handler, which was in place while it started
        code = Exit.OK
    except Exception as error:  # noqa: BLE001 - Python would print its words
        absent = extras.missing(error) if isinstance(error, ModuleNotFoundError) else None
        if absent is not None:
            code = _explain(command.name, absent)
        else:
            click.echo(f"{command.name}: a bug in Lockstep:\n{bugs.where(error)}", err=True)
            code = Exit.BUG
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for a server, the JVM or a client must not keep the process alive: all data
    # is already written.
    os._exit(code)
