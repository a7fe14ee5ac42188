"""Shared by several commands: the options, and how they print results and the next step."""

from __future__ import annotations

import re
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cdc.operate.commands.steps import Step


def config_file(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the option --config, passed as the argument `name`."""
    return click.option(
        "-c",
        "--config",
        name,
        type=click.Path(path_type=Path),
        default=Path("lockstep.yaml"),
        show_default=True,
        envvar="LOCKSTEP_CONFIG",
        show_envvar=True,
        help="The configuration file.",
    )


def with_config(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` the option --config and, as its first argument, the checked configuration."""

    @config_file("config_path")
    @wraps(command)
    def wrapped(*args: Any, config_path: Path, **kwargs: Any) -> Any:  # noqa: ANN401 - any command's
        from cdc.config import load  # noqa: PLC0415 - as above
        from cdc.runtime import waiting  # noqa: PLC0415 - not for --help

        waiting.tell_with(_waits)
        return command(load(config_path), *args, **kwargs)

    return wrapped


def _waits(text: str) -> None:
    click.echo(text, err=True)


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for a program.")
yes = click.option("--yes", is_flag=True, help="Do not ask.")


_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, or a number with one of the units ms, s, m and h."""

    name = "duration"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|[smh])?", str(value))
        if match is None or float(match[1]) == 0:
            self.fail(f"{value!r} is no duration; write it like 60s or 5m", param, ctx)
        return float(match[1]) * _UNITS[match[2] or ""]


def waited(line: str) -> None:
    """Print on stderr what the command waits for: output may be piped."""
    click.echo(f"{click.style('·', dim=True)} {line}", err=True)


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
        raise click.UsageError("nobody answered, so nothing was changed; --yes answers") from error
    if not agreed:
        click.echo("nothing was changed", err=True)
        raise click.exceptions.Exit(1)


def did(what: str) -> None:
    """Print one thing that was done."""
    click.echo(f"{click.style('✓', fg='green')} {what}")


def left(what: str) -> None:
    """Print one thing that was already right, or was left unchanged."""
    click.echo(f"{click.style('·', dim=True)} {what}")


def warn(what: str) -> None:
    """Print one warning to read before going on."""
    click.echo(f"{click.style('!', fg='yellow', bold=True)} {what}")


def progress(what: str) -> None:
    """Print the progress of a long step, on stderr."""
    click.echo(f"{click.style('…', dim=True)} {what}", err=True)


def tell(step: Step) -> None:
    """Print a step of setting up or tearing down."""
    shown = {"done": did, "left": left, "warn": warn, "progress": progress}
    shown[step.did.value](step.what)


def tell_all(steps: Iterable[Step], *, as_json: bool) -> None:
    """Print steps as they are done; with `as_json` all of them at the end."""
    if as_json:
        done = [step for step in steps if step.did.value != "progress"]
        print_json([{"did": step.did.value, "what": step.what} for step in done])
        return
    for step in steps:
        tell(step)


def next_step(what: str) -> None:
    """Print what to do next; every command ends with it, on stderr, so that output can be piped."""
    click.echo(f"{click.style('next:', bold=True)} {what}", err=True)


def example(*lines: str) -> str:
    """Return an epilog that shows `lines` as they are typed."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)
