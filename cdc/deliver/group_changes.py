"""Changes as an iterator, for the members of an application's own group.

Each group sees every change, and its members share them by partition. A change counts as done when
it is acknowledged, in any order; after a crash what was not is received again.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import orjson

from cdc.errors import ConfigError
from cdc.events import LSN, table_name
from cdc.log import names, reader
from cdc.log.groups import NOW, Group

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cdc.config import Config
    from cdc.log.groups import Received, Start
    from cdc.log.partitions import Partition

_WAIT_SECONDS: Final = 0.2


class GroupChange(NamedTuple):
    """A change of a row, with JSON values as docs/EVENTS.md has them; `op` as there: c, u, d, r, t.

    `seq` orders all changes of a pipeline. `key` is None in a table without one, and `before` where
    the table's replica identity does not send it.
    """

    table: str
    op: str
    seq: int
    lsn: LSN
    committed_at: datetime
    key: dict[str, Any] | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    partition: Partition
    offset: int


class GroupChanges:
    """Yields changes until it is closed; belongs to one thread."""

    def __init__(
        self, config: Config, tables: Sequence[str], group: str, start: Start = NOW
    ) -> None:
        """Join the group, which starts at `start` if it is new."""
        self._config = config
        # Received, and not taken: a loop over the changes may end before it has taken them all.
        self._left = deque[GroupChange]()
        self._group = Group(
            config, group, topics_of(config, tables), start, released=self._give_away
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[GroupChange]:
        while True:
            while self._left:
                yield self._left.popleft()
            arrived = self.receive(_WAIT_SECONDS)
            self._left.extend(arrived)

    def receive(self, seconds: float) -> list[GroupChange]:
        """Return the changes that have arrived; wait up to `seconds` for some."""
        arrived = self._group.receive(0.0 if self._left else seconds)
        changes = [*self._left, *map(self._change, arrived)]
        self._left.clear()
        return changes

    def acknowledge(self, change: GroupChange) -> None:
        """Note that a change is done.

        It is committed by the next `receive` that is a second after the last commit, and by
        `close`; until then a crash brings it again.
        """
        self._group.acknowledge(change.partition, change.offset)

    def close(self) -> None:
        """Commit what is acknowledged; other members get the partitions at once."""
        try:
            self._group.commit()
        finally:
            self._group.close()

    def _give_away(self, leaving: set[Partition]) -> None:
        """Drop what was not taken of partitions that go to other members, which receive it."""
        left = [each for each in self._left if each.partition not in leaving]
        self._left.clear()
        self._left.extend(left)

    def _change(self, received: Received) -> GroupChange:
        return change_of(
            self._config, received.partition, received.offset, received.key, received.value
        )


def change_of(
    config: Config, partition: Partition, offset: int, key: bytes | None, value: bytes
) -> GroupChange:
    """Return the change in a record of a table's topic."""
    event = orjson.loads(value)
    source = event["source"]
    return GroupChange(
        table=names.table_name(config.prefix, partition[0]),
        op=event["op"],
        seq=source["seq"],
        lsn=LSN.parse(source["commit_lsn"]),
        committed_at=datetime.fromtimestamp(source["ts_us"] / 1e6, UTC),
        key=None if key is None else orjson.loads(key),
        before=event.get("before"),
        after=event.get("after"),
        partition=partition,
        offset=offset,
    )


def topics_of(config: Config, tables: Sequence[str]) -> list[str]:
    """Return the topics of captured tables; raise ConfigError for a table that is not captured."""
    known = {
        table_name(each.schema, each.table): each.topic for each in reader.read_schemas(config)
    }
    if missing := [each for each in tables if each not in known]:
        raise ConfigError(
            f"the log has no table {missing[0]}",
            hint="`cdc table list` lists the captured tables; the log has a table from its first"
            " change or snapshot on",
        )
    return [known[each] for each in tables]
