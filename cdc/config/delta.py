"""The section `delta`: where mirrors in Delta Lake are stored."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from cdc.config.secrecy import Address, described


class Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Delta Lake: one mirror of each table below a path."""

    __repr__ = described

    path: Annotated[
        Address | None,
        Meta(
            description="Where the mirrors lie, as Spark names it: a table's is "
            "`<path>/<schema>.<table>`, named as its topic is. `tables.<table>.snapshot: direct` "
            "needs it.",
            examples=["s3a://lake/shop"],
        ),
    ] = None
