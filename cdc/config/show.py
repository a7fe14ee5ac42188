"""Show the effective configuration: every value, where it came from, and no secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.config.schema import ROOT, FieldPath, Schema
from cdc.config.tables import Mask, TableRule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config.check import Effective


def show(effective: Effective) -> list[tuple[str, object, str]]:
    """Return path, value and origin of every field, in the model's order, secrets masked.

    The origin is `file:line`, the variable's name or `default`; slot, publication and prefix are
    shown with their effective values.
    """
    config = effective.config
    derived: dict[FieldPath, object] = {
        ("source", "slot"): config.slot,
        ("source", "publication"): config.publication,
        ("log", "prefix"): config.prefix,
    }
    rows: list[tuple[str, object, str]] = []
    for at, schema, value in _values(ROOT, config, ()):
        shown = schema.shown(derived.get(at, value))
        shown = list(shown) if isinstance(shown, tuple) else shown
        rows.append((".".join(at), shown, effective.origins.get(at, "default")))
    return rows


def _values(
    schema: Schema, value: object, at: FieldPath
) -> Iterator[tuple[FieldPath, Schema, object]]:
    """Yield every value that is shown: no defaults of a table, no None of a follower."""
    if isinstance(value, Mask):
        if value.kind in {"null", "keep"}:
            yield at, schema, value.kind
        else:
            yield (*at, value.kind), schema.fields[value.kind], value.value
    elif schema.fields:
        for name, field in schema.fields.items():
            each = getattr(value, field.attribute)
            is_silent = schema.type is TableRule and each == field.default
            if not is_silent and not (each is None and schema.in_file_only):
                yield from _values(field, each, (*at, name))
    elif isinstance(value, dict) and schema.is_map:
        for name, each in value.items():
            entry = schema.below(name)
            assert entry is not None
            yield from _values(entry, each, (*at, name))
    else:
        yield at, schema, value
