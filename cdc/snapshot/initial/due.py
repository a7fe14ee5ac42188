"""Whether the initial snapshot is still due: what must be known before anything streams.

The resume record has it (`ResumeIdentity.snapshot`); the snapshot's own state has the progress.
Logs of older versions have the state only.

Both are written in one transaction, which becomes visible in one topic after the other. Where they
disagree, the resume record is right: `done` is never reverted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from cdc.errors import FencedError, GapError
from cdc.log import absence, names, reader
from cdc.snapshot.initial import topic

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.snapshot.initial.records import SnapshotState

    Resume = tuple[ResumeIdentity, ResumePosition]


def state(config: Config) -> SnapshotState | None:
    """Return the state of the initial snapshot; None of a pipeline that takes none.

    Raises GapError where by the resume record a snapshot is due but its state is lost.
    """
    name = names.snapshot_topic(config.prefix)
    found = topic.read_state(config)
    if found is not None and found.stage == "done":
        return found
    resumed = reader.read_resume(config)
    if found is not None:
        return corrected(found, resumed)
    if resumed and resumed[0].snapshot == "due":
        absence.wait_for_markers(config, name)
        if found := topic.read_state(config):
            return found
        raise GapError(
            f"topic {name} holds no state of the initial snapshot,"
            " which the resume record says is due: the topic was emptied, or created again",
            hint="nothing was streamed: `cdc teardown --topics`, then `cdc setup`, start over",
        )
    return None


def corrected(found: SnapshotState, resumed: Resume | None) -> SnapshotState:
    """Return the state, as `done` where the resume record shows the hand-over."""
    if resumed and resumed[0].snapshot == "done":
        return replace(found, stage="done")
    return found


def expect_done(config: Config, identity: ResumeIdentity) -> None:
    """Raise FencedError while the initial snapshot is not handed over. Call it when fenced."""
    due = identity.snapshot == "due"
    if not identity.snapshot:
        found = topic.read_state(config)
        due = found is not None and found.stage != "done"
    if due:
        raise FencedError(
            "the initial snapshot is not handed over, so nothing may be streamed",
            hint="the daemon goes back and takes it",
        )


def expect_open(resumed: Resume) -> None:
    """Raise FencedError where the snapshot was handed over meanwhile.

    Raises GapError where changes were streamed into the log without it.
    """
    identity, position = resumed
    if identity.snapshot == "done":
        raise FencedError(
            "another process has handed the initial snapshot over",
            hint="this one starts over and finds what there is to do",
        )
    if position.seq or position.open or position.pending:
        raise GapError(
            f"changes up to seq {position.seq} ({position.end_lsn}) were streamed into the log,"
            " though its initial snapshot was never finished: rows are missing in it",
            hint="a version before this one could do so; `cdc teardown --topics`, then `cdc setup`"
            " and a snapshot start over",
        )
