"""The section `snapshot`: whether and how the rows that tables already have are copied."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from cdc.config.secrecy import Address, Section

SnapshotMode = Literal["initial", "never"]
SnapshotRunner = Literal["auto", "spark", "local"]
SnapshotKind = Literal["log", "direct", "none"]


class Snapshot(Section, frozen=True, kw_only=True):
    """The initial snapshot: the rows that the tables have before their first change is captured."""

    mode: Annotated[
        SnapshotMode,
        Meta(
            description="Whether a new pipeline starts with the rows that its tables have: "
            "`initial`, or `never`. Read at the first `cdc setup`."
        ),
    ] = "initial"
    runner: Annotated[
        SnapshotRunner,
        Meta(
            description="What copies: `local`, processes that the daemon starts, or `spark`, by "
            "spark-submit. `auto`: Spark from 256 MB on, where pyspark is installed."
        ),
    ] = "auto"
    max_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="How many tasks copy at a time, each with its own connection.",
        ),
    ] = 2
    range_bytes: Annotated[
        int,
        Meta(
            ge=8_192,
            le=1 << 34,
            description="How much of a table is copied at a time, in bytes of its pages: copied "
            "again if interrupted. A change of the table's columns waits for it.",
        ),
    ] = 64 << 20
    rows_per_second: Annotated[
        int,
        Meta(
            ge=0,
            description="The most rows a second, of all tasks together; 0: no limit.",
        ),
    ] = 0
    bytes_per_second: Annotated[
        int,
        Meta(
            ge=0,
            description="The most bytes of values a second, of all tasks together; 0: no limit.",
        ),
    ] = 0
    dsn: Annotated[
        Address | None,
        Meta(
            description="Where rows are read, when not at `source.dsn`: a standby of it, Postgres "
            "16 or later, with hot_standby_feedback on. Its password is given in the same ways.",
            examples=["postgresql://lockstep@standby:5432/shop"],
        ),
    ] = None
