"""What bases there are, how large they are, and how much a reader has to fold after the newest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockstep.jobs.compacting.bases import bases_of
from lockstep.sinks.delta import log

if TYPE_CHECKING:
    from cdc.config import Config


def describe(config: Config, seq: int) -> dict[str, Any] | None:
    """Return the figures of the bases, for an archive up to `seq`; None if there is no base.

    `bytes` are those of all kept bases: a file that several of them share counts once.
    """
    bases = bases_of(config)
    kept = bases.kept(config.archive.bases_kept) if bases.find() else []
    if not kept:
        return None
    files: dict[str, int] = {}
    for record in kept:
        added = log.added(bases.version(record.number))
        files |= {path: int(add["size"]) for path, add in added.items()}
    newest = kept[0]
    return {
        "kept": len(kept),
        "number": newest.number,
        "lsn": newest.lsn,
        "seq": newest.seq,
        "committed_at_us": newest.committed_at_us,
        "rows": newest.rows,
        "bytes": sum(files.values()),
        "events_since": seq - newest.seq,
    }
