"""The section `tables`: what is captured of single tables, and which rules contradict themselves.

What only the database can show, such as whether a column exists, is left to `cdc doctor` and `cdc
setup`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cdc.config.patterns import parse_name, parse_table_pattern
from cdc.config.secrecy import Secret, Section
from cdc.config.snapshot import SnapshotKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Complaint = tuple[tuple[str, ...], str]  # the path, and what is wrong there

# What Kafka may remove from a topic: what retention allows, older events of each key, or both.
Cleanup: TypeAlias = Literal["delete", "compact", "both"]

# With fewer characters the key can be found by trying, and with the key every value.
MIN_HMAC_KEY = 16
# The kind of subject, and the column that says which one.
_SUBJECT: Final = re.compile("[a-z0-9_]{1,40}:.+", re.DOTALL)


class Mask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What replaces a column's value.

    `value` is the hmac's key, the length, the fixed value, or KIND:COLUMN of an encrypted one.
    """

    kind: Literal["keep", "null", "fixed", "truncate", "hmac", "encrypt"]
    value: str | int | float | bool | None = None

    def __repr__(self) -> str:
        """Return it without its value, which may be a key."""
        return f"Mask({self.kind})"

    @property
    def subject(self) -> tuple[str, str] | None:
        """The kind of subject whose key encrypts a column, and the column that names the subject.

        None for other masks.
        """
        if self.kind != "encrypt":
            return None
        kind, _, column = str(self.value).partition(":")
        return kind, column


class WrittenMask(msgspec.Struct):
    """A mask as the file has it, where it is not one of the words `null` and `keep`: one field."""

    fixed: str | int | float | bool
    truncate: int
    hmac: Secret
    encrypt: str


class TableRule(Section, frozen=True, kw_only=True):
    """What is captured of a table, and how."""

    columns: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="The only columns captured; `*` stands for any text. Must hold the key.",
            examples=[["id", "name"]],
        ),
    ] = None
    exclude: Annotated[
        tuple[str, ...],
        Meta(
            description="Columns left out; not together with `columns`. Where Postgres sends one "
            "nevertheless (14, REPLICA IDENTITY FULL), it is null in every event.",
            examples=[["password_*"]],
        ),
    ] = ()
    where: Annotated[
        str | None,
        Meta(
            description="The publication's row filter (Postgres 15 and later), in SQL. May name "
            "columns of the replica identity only.",
            examples=["region = 'eu'"],
        ),
    ] = None
    key: Annotated[
        tuple[str, ...] | None,
        Meta(
            description="The key's columns, in this order, instead of the primary key's. The "
            "replica identity must hold them.",
            examples=[["tenant", "id"]],
        ),
    ] = None
    mask: Annotated[
        dict[str, Mask],
        Meta(
            description="How columns are hidden, in every event, key, dead letter and log line: "
            "`null`; `{fixed: value}`; `{truncate: n}`, the first n characters; `{hmac: key}`, "
            "the HMAC-SHA256 in hex, with a key of 16 characters or more; `{encrypt: "
            "KIND:COLUMN}`, by the key of the subject of that kind in COLUMN; `keep`, as it is.",
            examples=[{"email": {"hmac": "${HMAC_KEY}"}}],
        ),
    ] = {}
    snapshot: Annotated[
        SnapshotKind | None,
        Meta(
            description="How the initial snapshot copies the table: into the `log`; `direct` into "
            "Delta Lake, without the log; or `none` of it. Default `log`.",
            examples=["none"],
        ),
    ] = None
    snapshot_where: Annotated[
        str | None,
        Meta(
            description="The rows that the initial snapshot copies, in SQL, of those that `where` "
            "allows. May name any column.",
            examples=["created_at > now() - interval '90 days'"],
        ),
    ] = None
    cleanup: Annotated[
        Cleanup | None,
        Meta(
            description="What Kafka removes from the table's topic, as `log.cleanup`, whose value "
            "is the default. A table without a key takes `delete` only.",
            examples=["compact"],
        ),
    ] = None

    @property
    def hides(self) -> bool:
        """Whether it may hide a column."""
        return bool(self.columns is not None or self.exclude or self.mask)


def complaints(rules: Mapping[str, TableRule | None]) -> Iterator[Complaint]:
    """Yield what is wrong with rules of the right types; None is already reported."""
    for name, rule in rules.items():
        at = ("tables", name)
        try:
            parse_table_pattern(name)
        except ValueError:
            yield at, "names no table; expected schema.table or schema.*"
        if rule is not None:
            for what in _contradictions(rule):
                yield at, what


def mask_complaints(mask: Mask) -> Iterator[str]:
    """Yield what is wrong with a mask's value; None is already reported."""
    value = mask.value
    if mask.kind == "hmac" and isinstance(value, str) and len(value) < MIN_HMAC_KEY:
        yield f"a key of {len(value)} characters can be found by trying; use {MIN_HMAC_KEY} or more"
    if mask.kind == "encrypt" and not _SUBJECT.fullmatch(str(value)):
        yield "expected whose key encrypts it: a kind, 1 to 40 of a-z 0-9 _, and a column, user:id"
    if mask.kind == "truncate" and isinstance(value, int) and value < 0:
        yield "a length is not negative"


def _contradictions(rule: TableRule) -> Iterator[str]:
    if rule.columns is not None and rule.exclude:
        yield "columns and exclude are alternatives; keep one of them"
    for name, given in (
        ("columns", rule.columns),
        ("where", rule.where),
        ("key", rule.key),
        ("snapshot_where", rule.snapshot_where),
    ):
        if given is not None and not given:
            yield f"{name} is empty; leave it out"
    key = rule.key or ()
    if len(set(key)) != len(key):
        yield "key names a column twice"
    for column in key:
        if rule.columns is not None and not any(
            parse_name(c).matches(column) for c in rule.columns
        ):
            yield f"key names {column}, which columns leaves out"
        if any(parse_name(each).matches(column) for each in rule.exclude):
            yield f"key names {column}, which exclude leaves out"
        masks = [mask for name, mask in rule.mask.items() if parse_name(name).matches(column)]
        if masks and masks[-1].kind not in {"keep", "hmac"}:
            yield (
                f"key names {column}, whose mask {masks[-1].kind} makes rows alike; "
                "a key column takes hmac only"
            )
