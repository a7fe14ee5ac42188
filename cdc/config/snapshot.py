"""The section `snapshot`: whether and how the rows that tables already have are copied."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cdc.config.secrecy import Address, described

SnapshotMode = Literal["initial", "never"]
SnapshotRunner = Literal["auto", "spark", "local"]
SnapshotKind = Literal["log", "direct", "none"]


class Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The initial snapshot: the rows that the tables have before their first change is captured."""

    __repr__ = described

    mode: Annotated[
        SnapshotMode,
        Meta(
            description="Whether a new pipeline begins with the rows that its tables have: "
            "`initial`, or `never`. Counts at the first `cdc setup`."
        ),
    ] = "initial"
    runner: Annotated[
        SnapshotRunner,
        Meta(
            description="Who copies: `local` processes beside the daemon, or `spark`, by "
            "spark-submit. `auto`: Spark from 256 MB on, where pyspark is installed."
        ),
    ] = "auto"
    max_parallel: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="How many tasks copy at a time, each by a connection of its own.",
        ),
    ] = 2
    range_bytes: Annotated[
        int,
        Meta(
            ge=8_192,
            le=1 << 34,
            description="How much of a table is copied at a time, in bytes of its pages: done "
            "again where it was interrupted. Whoever changes the table's columns waits as long.",
        ),
    ] = 64 << 20
    rows_per_second: Annotated[
        int,
        Meta(
            ge=0,
            description="No more than so many rows a second, of all tasks; 0: as many as come.",
        ),
    ] = 0
    bytes_per_second: Annotated[
        int,
        Meta(
            ge=0,
            description="No more than so many bytes of values a second, of all tasks; 0: as many "
            "as come.",
        ),
    ] = 0
    dsn: Annotated[
        Address | None,
        Meta(
            description="Where rows are read, when not at `source.dsn`: a standby of it, Postgres "
            "16 or later, with hot_standby_feedback on. Its password likewise.",
            examples=["postgresql://lockstep@standby:5432/shop"],
        ),
    ] = None
