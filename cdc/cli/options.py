"""Shared by several commands: the options, and how they print results and the next step."""

from __future__ import annotations

import re
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cdc.errors import printable
from cdc.runtime import waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cdc.operate.commands.steps import CommandStep


config_file = click.option(
    "-c",
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    default=Path("lockstep.yaml"),
    show_default=True,
    envvar="LOCKSTEP_CONFIG",
    show_envvar=True,
    help="The configuration file.",
)


def with_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the option --config and, as its first argument, the checked configuration."""

    @config_file
    @wraps(command)
    def wrapped(*args: Any, config_path: Path, **kwargs: Any) -> Any:  # noqa: ANN401 - any command's
        from cdc.config import load  # noqa: PLC0415 - as above

        waiting.show_with(partial(echo, err=True))
        return command(load(config_path), *args, **kwargs)

    return wrapped


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
yes = click.option("--yes", is_flag=True, help="Do not ask.")


def time_limit(default: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option --timeout of a command that waits."""
    return click.option(
        "--timeout",
        type=Duration(),
        default=default,
        show_default=True,
        help="Give up after this time: 500ms, 5s, 1m, or a number of seconds.",
    )


# What `click.style` writes, and nothing that could hide text or move the cursor.
_STYLES = re.compile(r"(\x1b\[(?:[012]|3[0-7]|9[0-7])m)")


def echo(line: str, *, err: bool = False) -> None:
    """Print a line, which may be styled; whatever names it holds, it stays one line."""
    parts = _STYLES.split(line)
    parts[::2] = map(printable, parts[::2])
    click.echo("".join(parts), err=err)


_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, or a number with one of the units ms, s, m and h."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smh])?", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(
                f"{value!r} is no duration; write it like 60s or 5m (a number alone: seconds)",
                param,
                ctx,
            )
        return float(match[1]) * _UNITS[match[2] or ""]


def wait_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command that asks for snapshots the options --wait and --timeout."""
    timeout = click.option(
        "--timeout",
        type=Duration(),
        help="With --wait: give up after this time: 30s, 5m, or a number of seconds.",
    )
    wait = click.option(
        "--wait", is_flag=True, help="Return when it is done; print progress meanwhile."
    )
    return wait(timeout(command))


def print_json(value: object) -> None:
    """Print `value` as indented JSON, LSNs and paths as text."""
    import orjson  # noqa: PLC0415 - not for --help

    options = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS
    click.echo(orjson.dumps(value, default=str, option=options).decode())


def confirm(question: str) -> None:
    """Ask, and exit with code 1 on anything but yes; no answer at all is a usage error."""
    try:
        agreed = click.confirm(question, err=True)
    except click.Abort as error:
        click.echo(err=True)
        raise click.UsageError(
            "there was no answer, so nothing was changed; --yes skips the question"
        ) from error
    if not agreed:
        click.echo("nothing was changed", err=True)
        raise click.exceptions.Exit(1)


def confirm_differences(found: Iterable[str], question: str, *, yes: bool, as_json: bool) -> None:
    """Show what differs and is about to be accepted, and ask, unless `yes`."""
    if not as_json:
        for each in found:
            print_warning(each)
    if not yes:
        confirm(question)


def _printer(mark: str, *, err: bool = False, **style: Any) -> Callable[[str], None]:  # noqa: ANN401 - click's own
    return lambda what: echo(f"{click.style(mark, **style)} {what}", err=err)


print_done = _printer("✓", fg="green")
print_unchanged = _printer("·", dim=True)  # already right, or left unchanged
print_warning = _printer("!", fg="yellow", bold=True)
# On stderr, since output may be piped: what the command waits for, and how far it is.
print_waiting = _printer("·", dim=True, err=True)
_print_progress = _printer("…", dim=True, err=True)
_PRINTED = {"done": print_done, "left": print_unchanged, "warn": print_warning}


def print_steps(steps: Iterable[CommandStep], *, as_json: bool) -> None:
    """Print steps as they are done; with `as_json` all of them at the end."""
    if as_json:
        done = [step for step in steps if step.did.value != "progress"]
        print_json([{"did": step.did.value, "what": step.what} for step in done])
        return
    for step in steps:
        _PRINTED.get(step.did.value, _print_progress)(step.what)


def next_step(what: str) -> None:
    """Print what to do next; every command ends with it, on stderr, so that output can be piped."""
    echo(f"{click.style('next:', bold=True)} {what}", err=True)


def example(*lines: str) -> str:
    """Return an epilog that shows `lines` as they are typed."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
