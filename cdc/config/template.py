"""Write the file of `cdc init`: every field with its meaning, optional ones commented out.

Generated from the model, so that it is never outdated; a test loads what it writes.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from cdc.config.model import Config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = """\
# Lockstep's configuration: one pipeline, from one Postgres database into one log.
# Check it with `cdc config check`. Any text may hold ${VARIABLE} or ${file:PATH}; every field can
# also be set by an environment variable, such as LOCKSTEP_SOURCE_DSN for source.dsn.
"""


def render(values: Mapping[str, object]) -> str:
    """Return a configuration that sets `values` (by dotted path) and explains everything else."""
    return _HEAD + "\n".join(_lines(Config, "", values)) + "\n"


def _lines(struct: type[msgspec.Struct], path: str, values: Mapping[str, object]) -> Iterator[str]:
    indent = "  " * path.count(".")
    for field in msgspec.structs.fields(struct):
        name = field.encode_name
        at = f"{path}{name}"
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            # A section without a value would be null; one with comments only is allowed.
            yield f"\n# {(field.type.__doc__ or '').strip()}\n{name}:"
            yield from _lines(field.type, f"{at}.", values)
            continue
        if path == "":
            yield ""
        description, examples = described(field.type)
        yield from (f"{indent}# {line}" for line in textwrap.wrap(description.replace("`", ""), 90))
        if at in values:
            yield f"{indent}{name}: {_flow(values[at])}"
        else:
            default = field.default if isinstance(field.default, str | int | float) else None
            shown = examples[0] if default is None and examples else field.default
            yield f"{indent}# {name}: {_flow(shown)}"


def described(kind: Any) -> tuple[str, list[Any]]:  # noqa: ANN401 - a type as a value
    """Return the description and the examples in a field type's annotations."""
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, msgspec.Meta):
            return note.description or "", list(note.examples or ())
    return "", []


def _flow(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    # Flow style never wraps, so that a line can be enabled by removing its comment mark.
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()
