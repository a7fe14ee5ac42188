"""Maintained views in the configuration: SQL or Python over captured tables (docs/VIEWS.md)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from cdc.config.secrecy import Section


class View(Section, frozen=True, kw_only=True):
    """A query whose rows followers keep equal to what Postgres would return."""

    sql: Annotated[
        str,
        Meta(
            min_length=1,
            description="A SELECT in Postgres' dialect over captured tables and other views.",
            examples=["SELECT customer_id, count(*) AS orders FROM orders GROUP BY customer_id"],
        ),
    ]
    key: Annotated[
        tuple[str, ...],
        Meta(
            min_length=1,
            description="Columns that it selects and that identify its rows.",
            examples=[["customer_id"]],
        ),
    ]
    refresh: Annotated[
        Literal["auto", "strict"],
        Meta(
            description="`auto`: by the affected keys, or completely where these can't be found "
            "(`cdc view explain` says which and why). `strict`: refused where they can't be."
        ),
    ] = "auto"
    freshness_seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(
            description="How late its rows may be. A follower makes cuts half the least one of its "
            "views apart, unless its `every_seconds` says otherwise; `cdc status` names a view "
            "that is later. Default: as soon as possible.",
            examples=[30.0],
        ),
    ] = None


class PythonView(View, frozen=True, kw_only=True):
    """A view whose rows a function in Python makes: what `cdc.config.view_code` reads from a file.

    Its `sql` is empty.
    """

    source: str  # of the file
    is_transform: bool
    reads: dict[str, str]  # by parameter: a table's or view's name, or a SELECT
    by: tuple[str, ...]
    columns: dict[str, str]  # their types in Postgres
