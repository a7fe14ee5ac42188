"""Show the effective configuration: every value, where it came from, and no secret.

A secret is a password, alone or in a DSN or URL, a mask's HMAC key and any Kafka setting that is
named like one; a setting whose name tells nothing is shown.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from cdc.config import nested
from cdc.config.model import Mask, TableRule

if TYPE_CHECKING:
    from cdc.config.check import Effective

MASK = "***"

_SECRET_SETTING = re.compile(r"password|secret|token|jaas|\bpem\b|oauthbearer\.config|\bkey$")
_URL_PASSWORD = re.compile(r"^(\w+://[^:/?@]*):[^?]*@")
# `password=`, `sslpassword=`, of a keyword string or of a URL's query.
_KEYWORD_PASSWORD = re.compile(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&]*)", re.IGNORECASE)


def mask_dsn(dsn: str) -> str:
    """Return `dsn` with each password in it replaced by `***`."""
    return _KEYWORD_PASSWORD.sub(rf"\1{MASK}", _URL_PASSWORD.sub(rf"\1:{MASK}@", dsn))


def has_password(dsn: str) -> bool:
    """Return whether `dsn` itself carries a password."""
    return bool(_URL_PASSWORD.search(dsn) or re.search(r"(?<!ssl)password\s*=", dsn, re.IGNORECASE))


def is_secret(path: tuple[str, ...]) -> bool:
    """Return whether the whole value at `path` must not be shown."""
    if path[0] == "tables":
        return path[-1] == "hmac" and path[-3:-2] == ("mask",)
    if path[0] == nested.SECTION:
        return path[2:] == ("opensearch", "password")
    return path[:2] == ("log", "kafka") and bool(_SECRET_SETTING.search(path[-1].lower()))


def mask(path: tuple[str, ...], value: object) -> object:
    """Return `value`, or what may be shown in its place."""
    if is_secret(path):
        return MASK
    return mask_dsn(value) if path[-1] in {"dsn", "url"} and isinstance(value, str) else value


def _is_silent(struct: msgspec.Struct, value: object, default: object, at: tuple[str, ...]) -> bool:
    """Return whether a field says nothing: of a table by default, of a follower an absent store."""
    if at[:1] == (nested.SECTION,):
        return value is None
    return isinstance(struct, TableRule) and value == default


def show(effective: Effective) -> list[tuple[str, object, str]]:
    """Return path, value and origin of every field, in the model's order, secrets masked.

    The origin is `file:line`, the variable's name or `default`; slot, publication and prefix are
    shown as they take effect.
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
