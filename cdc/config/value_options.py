"""How values are written: the options that Debezium's users know, by the same names.

One struct is both the configuration's section `values` and a part of a table version's schema
record, so that a reader of the log needs no configuration to know what a value means. Every choice
is lossless unless its description says otherwise.

https://debezium.io/documentation/reference/stable/connectors/postgresql.html
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


def _dotted(field: str) -> str:
    return field.replace("_", ".")


class Values(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=_dotted):
    """How values are written; Debezium's names. The table is in docs/EVENTS.md."""

    decimal_handling_mode: Annotated[
        Literal["string", "precise", "double"],
        Meta(
            description="How `numeric` and `money` are written. `string` is exact decimal text; "
            "`precise` is base64 of the unscaled value's bytes, with its scale where the column "
            "declares none; `double` is a JSON number with every digit, which most readers round."
        ),
    ] = "string"
    time_precision_mode: Annotated[
        Literal[
            "adaptive",
            "adaptive_time_microseconds",
            "connect",
            "isostring",
            "microseconds",
            "nanoseconds",
        ],
        Meta(
            description="How `date`, `time` and `timestamp` are written. Numbers in the unit that "
            "the column's precision needs (`adaptive`), or always in the unit named, milliseconds "
            "with `connect`; or ISO 8601 text. What does not fit stays Postgres' own text."
        ),
    ] = "adaptive"
    binary_handling_mode: Annotated[
        Literal["bytes", "base64", "base64-url-safe", "hex"],
        Meta(description="How `bytea` is written. `bytes` is base64, as in Debezium's JSON."),
    ] = "bytes"
    interval_handling_mode: Annotated[
        Literal["postgres", "string", "numeric"],
        Meta(
            description="How `interval` is written. Postgres' own text, ISO 8601 "
            "(`P1Y2M3DT4H5M6.7S`), or microseconds with 30.4375 days a month, **which loses** "
            "what months and days were."
        ),
    ] = "postgres"
    hstore_handling_mode: Annotated[
        Literal["text", "json", "map"],
        Meta(
            description="How `hstore` is written. Postgres' own text, a string that holds a JSON "
            "object, or a JSON object."
        ),
    ] = "text"
    bigint_handling_mode: Annotated[
        Literal["number", "string"],
        Meta(
            description="How `bigint` is written. Always a number, or a string beyond 2^53 either "
            "way, where readers that hold numbers as doubles would round."
        ),
    ] = "number"
    money_fraction_digits: Annotated[
        int,
        Meta(
            ge=0,
            le=18,
            description="How many digits of a `money` follow the decimal point: the database's "
            "`lc_monetary` determines it, and Postgres does not send it.",
        ),
    ] = 2
    unavailable_value_placeholder: Annotated[
        str,
        Meta(
            description="What replaces a value that Postgres did not send. Read "
            "`source.unchanged`, not this."
        ),
    ] = "__debezium_unavailable_value"
    invalid_text_handling_mode: Annotated[
        Literal["fail", "base64"],
        Meta(
            description="What is done about text that is not UTF-8, which only a database of "
            'encoding SQL_ASCII can hold. Stop, or write `{"base64": "…"}` in its place.'
        ),
    ] = "fail"
