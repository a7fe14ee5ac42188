"""Write the numbers of hidden columns to the schema topic, from outside of the daemon.

`cdc setup` and `cdc table add` do this, even while a daemon runs: so not in a transaction of the
pipeline, which would fence it. The daemon writes its own with its current batch
(`cdc.sequence.table_versions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log import acknowledged, names, records

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cdc.config import Config


def record(config: Config, numbers: records.ColumnNumbers) -> tuple[str, bytes, bytes]:
    """Return topic, key and value."""
    topic = names.schema_topic(config.prefix)
    return topic, records.numbers_key(numbers), records.encode(numbers)


def write(config: Config, numbers: Iterable[records.ColumnNumbers]) -> None:
    """Return once the log holds them. Blocks."""
    made = [record(config, each) for each in numbers]
    acknowledged.write(config, names.schema_topic(config.prefix), [each[1:] for each in made])
