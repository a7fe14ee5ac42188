"""Note the chain of the log's newest frontier in a place that the archive's writer can't change.

An object a frontier, which is created and never replaced: with a login that may only create objects
in a bucket with object lock, nobody who writes the log or the archive can change what was noted.
What is noted is in the object's name, so that a proof reads a listing and no object.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Final

import msgspec

from cdc.errors import ConfigError, GapError
from cdc.events import LSN
from cdc.log import digests, reader
from cdc.verify.noted import NotedChain
from lockstep.sinks.delta.actions import Files
from lockstep.sinks.delta.lake import ConflictError

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import FrontierRecord

FORMAT: Final = 1
# S3 takes no object into a bucket with object lock without a checksum in a header.
_CHECKSUM: Final = {"aws_checksum_algorithm": "sha256"}
_NAME: Final = re.compile(r"(\d{20})-([0-9A-F]{16})-([A-Za-z0-9_-]{43})\.json")


class NotedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An object's content: what its name has, and when it was noted."""

    format: int = FORMAT
    pipeline: str
    epoch: int
    lsn: str
    seq: int
    committed_at_us: int
    chain: str
    noted_at_us: int


class Notes:
    """The place where one pipeline's chains are noted."""

    def __init__(self, config: Config, place: str) -> None:
        """`place` is a folder or the URL of a bucket, whose login is in the environment."""
        self._config, self.place = config, place
        self._files = Files(place, _CHECKSUM if place.startswith(("s3://", "s3a://")) else {})

    def note(self) -> tuple[NotedChain, bool]:
        """Note the newest frontier; return it, and whether it was not there yet.

        Raises GapError if its record was altered, ConfigError if there is none with a chain.
        """
        tail = reader.read_frontier_tail(self._config, 1)
        record = tail[-1][0] if tail else None
        if record is None or record.pipeline != self._config.pipeline or not record.chain:
            raise ConfigError(
                "the log has no frontier with a chain that could be noted",
                hint="run the daemon (`cdc run`); the first change, or an idle minute, writes one",
            )
        if digests.chain(record) != record.chain:
            raise GapError(
                f"the frontier {record.lsn} (seq {record.seq}) does not match its own chain",
                hint="it was altered: `cdc prove` names what else was; nothing was noted",
            )
        return NotedChain(record.seq, record.lsn, record.chain), self._put(record)

    def _put(self, record: FrontierRecord) -> bool:
        name = f"{record.seq:020d}-{int(record.lsn):016X}-{record.chain}.json"
        content = NotedRecord(
            pipeline=record.pipeline,
            epoch=record.epoch,
            lsn=str(record.lsn),
            seq=record.seq,
            committed_at_us=record.committed_at_us,
            chain=record.chain,
            noted_at_us=time.time_ns() // 1_000,
        )
        try:
            self._files.put_new(f"{record.pipeline}/{name}", msgspec.json.encode(content))
        except ConflictError:
            return False
        return True

    def read(self) -> list[NotedChain]:
        """Return all that was noted; raise ConfigError if nothing was."""
        found = []
        for name in self._files.names(self._config.pipeline):
            if match := _NAME.fullmatch(name):
                seq, lsn, chain = match.groups()
                found.append(NotedChain(int(seq), LSN(int(lsn, 16)), chain))
        if not found:
            raise ConfigError(
                f"{self.place} has no digests of pipeline {self._config.pipeline}",
                hint="`cdc archive digests --into` writes them; give the same place",
            )
        return found
