"""Show the effective configuration: every value, where it came from, and no secret.

What is secret is annotated on the model's types: `cdc.config.secrecy`. A mask's HMAC key is secret,
too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args, get_origin

import msgspec

from cdc.config import nested
from cdc.config.model import Config, Mask, TableRule
from cdc.config.secrecy import Never, Note, note_of

if TYPE_CHECKING:
    from cdc.config.check import Effective


def note_at(at: tuple[str, ...]) -> tuple[Note | None, tuple[str, ...]]:
    """Return the annotation on the field that a path leads to, and the names below that field.

    A path that the model does not have is secret: what is given there is unknown.
    """
    kind: Any = Config
    for depth, name in enumerate(at):
        kind = nested.plain(kind)
        if kind is Mask:
            return Never() if name == "hmac" else None, ()
        if nested.is_struct(kind):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
            if name not in fields:
                return Never(), ()
            kind = fields[name]
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
        if (note := note_of(kind)) is not None:
            return note, at[depth + 1 :]
    return None, ()


def is_secret(at: tuple[str, ...]) -> bool:
    """Return whether the value at `at` may hold a secret, so that no message quotes it."""
    return note_at(at)[0] is not None


def mask(path: tuple[str, ...], value: object) -> object:
    """Return `value`, or what may be shown instead."""
    note, names = note_at(path)
    return value if note is None else note.shown(names, value)


def _is_silent(struct: msgspec.Struct, value: object, default: object, at: tuple[str, ...]) -> bool:
    """Return whether a field is not shown: of a table a default, of a follower an absent store."""
    if at[:1] == (nested.SECTION,):
        return value is None
    return isinstance(struct, TableRule) and value == default


def show(effective: Effective) -> list[tuple[str, object, str]]:
    """Return path, value and origin of every field, in the model's order, secrets masked.

    The origin is `file:line`, the variable's name or `default`; slot, publication and prefix are
    shown with their effective values.
    """
    config = effective.config
    derived: dict[tuple[str, ...], object] = {
        ("source", "slot"): config.slot,
        ("source", "publication"): config.publication,
        ("log", "prefix"): config.prefix,
    }
    rows: list[tuple[str, object, str]] = []

    def walk(value: object, path: tuple[str, ...]) -> None:
        if isinstance(value, Mask):
            plain = value.kind in {"null", "keep"}
            walk(value.kind if plain else value.value, path if plain else (*path, value.kind))
        elif isinstance(value, msgspec.Struct):
            for field in msgspec.structs.fields(value):
                each = getattr(value, field.name)
                if not _is_silent(value, each, field.default, path):
                    walk(each, (*path, field.encode_name))
        elif isinstance(value, dict) and nested.kind_at(path) is not object:
            for name, each in value.items():
                walk(each, (*path, name))
        else:
            shown = mask(path, derived.get(path, value))
            shown = list(shown) if isinstance(shown, tuple) else shown
            rows.append((".".join(path), shown, effective.origins.get(path, "default")))

    walk(config, ())
    return rows
