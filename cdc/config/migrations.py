"""The section `migrations`: optional objects that `cdc setup` may create in the source.

Field by field as in `cdc.config.model`. The names of the switches are those of the migrations.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class Migrations(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be created in the source database, in the schema `lockstep`; none is needed."""

    signal_table: Annotated[
        bool,
        Meta(
            description="A table `lockstep.signal` whose new rows are commands to the daemon, as "
            "`cdc snapshot` gives them.",
        ),
    ] = False
    heartbeat_table: Annotated[
        bool,
        Meta(
            description="A table `lockstep.heartbeat` that the daemon writes to while it streams. "
            "An idle slot moves without it.",
        ),
    ] = False
    heartbeat_seconds: Annotated[
        int,
        Meta(ge=5, le=3_600, description="How often it does; asked for every five seconds."),
    ] = 10
    ddl_audit: Annotated[
        bool,
        Meta(
            description="Event triggers that carry each DDL statement in the WAL, so that it "
            "stands in the schema topic in its place. Creating them takes a superuser.",
        ),
    ] = False
