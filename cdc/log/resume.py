"""The resume record as it goes into the log, and how it is written while no daemon streams.

All others are written by the daemon, in the same Kafka transaction as the data they describe. A
resume record never moves back: its writer first fences all others, reads the current record, and
writes only what continues it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from cdc.errors import FencedError, InvariantError, UnavailableError
from cdc.log import names, reader, records
from cdc.log.publisher import fence

if TYPE_CHECKING:
    from cdc.config import Config

Resume: TypeAlias = "tuple[records.ResumeIdentity, records.ResumePosition]"


def write_fenced(
    config: Config,
    identity: records.ResumeIdentity,
    position: records.ResumePosition,
    *more: tuple[str, bytes, bytes | None],
    read: Resume | None,
) -> None:
    """Commit both parts and `more` records. Fences a daemon: call only while none may run.

    `read` is the resume record that the caller's decision is based on. Raises FencedError, and has
    written nothing, if the log holds another one by now.
    """
    publisher = fence(config)
    found = reader.read_last_resume(config)
    if found != read:
        at = f"at seq {found[1].seq} ({found[1].end_lsn})" if found else "not there"
        raise FencedError(
            "another process has written to the log since this one read the resume record, which"
            f" is {at} now: nothing was written",
            hint="run the command again: it then sees the log as it is",
        )
    if found is not None:
        forward(found[1], position)
    publisher.add(*record(config, identity))
    publisher.add(*record(config, position))
    for each in more:
        publisher.add(*each)
    publisher.commit()


def record(
    config: Config, part: records.ResumeIdentity | records.ResumePosition
) -> tuple[str, bytes, bytes]:
    """Return topic, key and value of a part of the resume record."""
    kind = "identity" if isinstance(part, records.ResumeIdentity) else "position"
    key = records.resume_key(config.pipeline, kind)
    return names.resume_topic(config.prefix), key, records.encode(part)


def forward(
    before: records.ResumePosition, position: records.ResumePosition
) -> records.ResumePosition:
    """Return `position`; raise InvariantError if it is lower than what the log holds."""
    if position.seq < before.seq or position.end_lsn < before.end_lsn:
        raise InvariantError(
            f"a resume record at seq {position.seq} ({position.end_lsn}) would follow one at seq"
            f" {before.seq} ({before.end_lsn}): nothing was written"
        )
    return position


def expect_not_older(before: Resume | None, found: Resume | None) -> None:
    """Raise UnavailableError if a later read finds less than an earlier one did."""
    if before is None:
        return
    if found is None or found[1].seq < before[1].seq or found[1].end_lsn < before[1].end_lsn:
        at = f"seq {found[1].seq} ({found[1].end_lsn})" if found else "no resume record"
        raise UnavailableError(
            f"the brokers show {at}, where they showed seq {before[1].seq} ({before[1].end_lsn}) a"
            " moment ago",
            hint="a broker answers from before; the log is read again",
        )
