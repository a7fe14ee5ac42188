"""Write the file of `cdc init`: every field with its meaning, optional ones commented out.

Generated from the model, so that it is never outdated; a test loads what it writes.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import yaml

from cdc.config.schema import ROOT, Schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_HEAD = """\
# Lockstep's configuration: one pipeline, from one Postgres database into one log.
# Check it with `cdc config check`. Any text may hold ${VARIABLE} or ${file:PATH}; every field can
# also be set by an environment variable, such as LOCKSTEP_SOURCE_DSN for source.dsn.
"""


def render(values: Mapping[str, object]) -> str:
    """Return a configuration that sets `values` (by dotted path) and explains everything else."""
    return _HEAD + "\n".join(_lines(ROOT, "", values)) + "\n"


def _lines(section: Schema, path: str, values: Mapping[str, object]) -> Iterator[str]:
    indent = "  " * path.count(".")
    for name, field in section.fields.items():
        at = f"{path}{name}"
        if field.fields:
            # A section without a value would be null; one with comments only is allowed.
            meaning = (field.type.__doc__ or "").strip()
            yield f"\n{indent}# {meaning}\n{indent}{name}:"
            yield from _lines(field, f"{at}.", values)
            continue
        if path == "":
            yield ""
        meaning = (field.meta.description or "").replace("`", "")
        yield from (f"{indent}# {line}" for line in textwrap.wrap(meaning, 90))
        if at in values:
            yield f"{indent}{name}: {_flow(values[at])}"
        else:
            has_default = isinstance(field.default, str | int | float)
            shown = field.default if has_default else (field.meta.examples or [field.default])[0]
            yield f"{indent}# {name}: {_flow(shown)}"


def _flow(value: object) -> str:
    value = list(value) if isinstance(value, tuple) else value
    # Flow style never wraps, so that a line can be enabled by removing its comment mark.
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()
