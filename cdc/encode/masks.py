"""Masks: what replaces a column's value, compiled into the row encoders.

A mask replaces the type's form, so it applies to everything made from a row: before, after, keys,
tombstones, dead letters. It works on Postgres' own text of the value, whatever the type:

- `null`: always null
- `fixed`: always the given JSON value, even if the column is NULL
- `truncate`: a string, the text's first n characters; null for NULL
- `hmac`: a string, HMAC-SHA256 of the text in hex; null for NULL. The same value is the same string
  in every table that has the same key, so that rows can still be joined.
- `encrypt`: a string, the text encrypted by the key of the row's subject (`cdc.keyring`); null for
  NULL, and once the subject is forgotten

A column that is not captured but that Postgres sends anyway is `excluded`: always null.

A key must distinguish rows, so a key's column takes `hmac` or none: two values with the same mask
would make two rows one, and a changed key would look the same.
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from orjson import dumps

from cdc.decode.types import ValueKind, names_of, type_name
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cdc.config import TableSelection
    from cdc.keyring.ciphers import Ciphers

EXCLUDED: Final = "excluded"
# What a schema record has of an HMAC's key: enough to see that it has changed.
_KEY_ID: Final = b"lockstep key id"
_KEY_ID_LENGTH: Final = 8
# What may name a subject: values of these are never stored apart from their row.
_SUBJECT_TYPES: Final = names_of(ValueKind.INTEGER, ValueKind.UUID)


class _Column(Protocol):
    """A column, as the catalog or a table version describes it."""

    @property
    def name(self) -> str: ...
    @property
    def type_id(self) -> int: ...


class ColumnMask(NamedTuple):
    """A column's mask: how the schema record names it, and what it computes."""

    label: str
    kind: str  # null, fixed, truncate, hmac, encrypt
    value: str | int | float | bool | None = None
    subject: tuple[str, str] | None = None  # of an encrypted one, as `Mask.subject`

    def __repr__(self) -> str:
        """Return it without its value, which may be a key."""
        return f"ColumnMask({self.label})"


def column_mask(selection: TableSelection, column: str) -> ColumnMask | None:
    """Return how the column is masked; None if its value is written as it is."""
    if not selection.captures(column):
        return ColumnMask(EXCLUDED, "null")
    mask = selection.mask(column)
    if mask is None or mask.kind == "keep":
        return None
    label: str = mask.kind
    if mask.kind == "truncate":
        label = f"truncate:{mask.value}"
    elif mask.kind == "hmac":
        key_id = hmac.digest(str(mask.value).encode(), _KEY_ID, "sha256").hex()[:_KEY_ID_LENGTH]
        label = f"hmac:{key_id}"
    elif mask.kind == "encrypt":
        label = f"encrypt:{mask.value}"
    return ColumnMask(label, mask.kind, mask.value, mask.subject)


class Masked(NamedTuple):
    """A masked column in an encoder's source: what a value and a NULL become, and the names."""

    value: str  # an expression over b[p:q], as `cdc.encode.values.form` gives one
    null: str
    names: dict[str, Any]


def subject_column(columns: Sequence[_Column], column: str, mask: ColumnMask) -> int:
    """Return the number of the column that names whose key encrypts `column`, by its mask.

    Raises ConfigError if there is none, or its values may be missing: those of other types can be
    stored apart, and Postgres does not send them again with each update.
    """
    assert mask.subject is not None, "it is an encrypted one"
    _, named = mask.subject
    for number, each in enumerate(columns):
        if each.name == named and type_name(each.type_id) in _SUBJECT_TYPES:
            return number
    raise ConfigError(
        f"{column} is encrypted by the key of {named}, which is no column that is sent with every"
        f" row: an {', '.join(_SUBJECT_TYPES)}",
        hint="correct the mask: {encrypt: KIND:COLUMN}",
    )


def encryptor(mask: ColumnMask, ciphers: Ciphers | None) -> Callable[[bytes, bytes], bytes]:
    """Return the function of a subject's text and a value's that gives the encrypted JSON."""
    assert mask.subject is not None, "it is an encrypted one"
    assert ciphers is not None, "the configuration has a keyring"
    return ciphers.encryptor(mask.subject[0])


def masked(mask: ColumnMask, index: int, ciphers: Ciphers | None = None) -> Masked:
    """Return the source of the mask of column `index`.

    An encrypted one is a function of the subject's text and the value's, in `names`.
    """
    name = f"MASK{index}"
    match mask.kind:
        case "fixed":
            return Masked(name, name, {name: dumps(mask.value)})
        case "truncate":
            return Masked(f"dumps(b[p:q].decode()[:{name}])", "NULL", {name: mask.value})
        case "hmac":
            return Masked(f"{name}(b[p:q])", "NULL", {name: _digester(str(mask.value).encode())})
        case "encrypt":
            return Masked("b[p:q]", "NULL", {name: encryptor(mask, ciphers)})
        case _:
            return Masked("NULL", "NULL", {})


def _digester(key: bytes) -> Callable[[bytes], bytes]:
    """Return the function that gives a text's HMAC as a JSON string."""
    # Copying a state that has hashed the key costs half of hashing the key for each value.
    keyed = hmac.new(key, digestmod="sha256")

    def digest(text: bytes) -> bytes:
        one = keyed.copy()
        one.update(text)
        return b'"%b"' % one.hexdigest().encode()

    return digest
