"""The section `archive`: where every record of the log is kept."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cdc.config.secrecy import STORAGE, Address, OptionMap, Section


class Archive(Section, frozen=True, kw_only=True):
    """The archive: every record of the log, in one Delta table (docs/ARCHIVE.md)."""

    path: Annotated[
        Address | None,
        Meta(
            description="Where the table is: a folder, or a place in a bucket. There is no archive "
            "without it.",
            examples=["s3a://lake/shop-archive"],
        ),
    ] = None
    storage: Annotated[
        dict[str, str],
        OptionMap(STORAGE),
        Meta(
            description="Options of the bucket, as delta-rs names them. A login belongs in the "
            "environment, where it is found, too.",
            examples=[{"AWS_REGION": "eu-central-1"}],
        ),
    ] = {}
    every_seconds: Annotated[
        float,
        Meta(ge=0, description="The least time between two commits, unless a cut is full."),
    ] = 10.0
    max_events: Annotated[
        int,
        Meta(
            ge=1, description="The most events in a commit, unless one source transaction has more."
        ),
    ] = 1_000_000
    max_bytes: Annotated[
        int, Meta(ge=1, description="The most bytes of the log in a commit; an estimate.")
    ] = 512 << 20
    optimize_minutes: Annotated[
        float, Meta(ge=0, description="How often small files are joined to large ones; 0: never.")
    ] = 60.0
    vacuum_hours: Annotated[
        float,
        Meta(ge=0, description="How long a replaced file is kept; 0: none is deleted."),
    ] = 168.0
    bases_kept: Annotated[
        int, Meta(ge=1, description="How many bases are kept: see `cdc archive compact`.")
    ] = 2
    tombstone_hours: Annotated[
        float,
        Meta(
            ge=0,
            description="How long before its frontier a base has the delete of a row, at least.",
        ),
    ] = 168.0
    gb_month_price: Annotated[
        float,
        Meta(
            ge=0,
            description="The price of a gigabyte (10^9 bytes) for a month where the table is, for "
            "`cdc archive status`; in any currency.",
        ),
    ] = 0.023
