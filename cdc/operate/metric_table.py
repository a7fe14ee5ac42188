"""Every metric of the daemon, its meaning and its labels: the one table. Pure.

`metrics` exports what is here under `lockstep_`; docs/METRICS.md lists it, and `alerts` may use
nothing else. A counter's samples end in `_total`, a histogram's in `_bucket`, `_sum` and `_count`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

GAUGES: Final = {
    "wal_end_lsn": "The server's WAL end, as last reported by the walsender.",
    "received_lsn": "The newest WAL position received.",
    "published_lsn": "The end LSN of the newest source transaction that is complete in the log.",
    "confirmed_lsn": "The LSN confirmed to Postgres, up to which it may discard WAL.",
    "frontier_lsn": "The LSN of the newest frontier record.",
    "seq": "The newest event's seq.",
    "lag_bytes": "WAL between the server's end and the published LSN.",
    "lag_seconds": "How old the newest published commit was then, or for how long none has followed"
    " it though there is WAL for it; 0 when caught up.",
    "held_seconds": "For how long an open transaction in a topic of ours has held readers back.",
    "unknown_type_columns": "Columns of types of which nothing but their text is known.",
    "pending_events": "Events in the Kafka transaction that is open.",
    "pending_bytes": "Bytes in the Kafka transaction that is open.",
}
COUNTERS: Final = {
    "events": "Events published.",
    "dead_letter_events": "Events too large for their topics, complete in the dead letter topic.",
    "kafka_transactions": "Kafka transactions committed.",
    "direct_transactions": "Kafka transactions committed that our own client wrote (log.direct).",
    "bytes": "Bytes of events published.",
}
SOURCE: Final = {
    "timeline": "The source's timeline; another after a promotion.",
    "slot_retained_bytes": "WAL that the server keeps for the slot.",
    "slot_safe_bytes": "WAL that may still be written before the slot is lost; absent: no limit.",
    "slot_stalled_seconds": "Time since the slot's restart LSN moved while WAL was written.",
    "slot_lost_in_seconds": "Time until the slot is lost if it does not move from now on.",
    "wal_bytes_per_second": "Rate at which the server writes WAL, smoothed over a minute.",
    "oldest_transaction_seconds": "Age of the oldest open transaction that writes, of any client.",
    "oldest_prepared_seconds": "Age of the oldest prepared transaction.",
}
SNAPSHOT: Final = {
    "generation": "How often the initial snapshot was started.",
    "rows": "Rows that it has copied.",
    "bytes": "Bytes of them, as Postgres sent them.",
    "percent": "Share of the tables' pages that is copied.",
    "estimated_rows": "Rows to copy, by the last ANALYZE.",
    "estimated_bytes": "Bytes of the tables' pages.",
    "rows_per_second": "Rate of the last half minute.",
    "seconds_left": "Time left at the rate so far.",
}
INCREMENTAL_SNAPSHOT: Final = {"errors": "Errors in a row.", "rows": "Rows published."}
FOLLOWER: Final = {
    "lag_bytes": "WAL between its end and what the follower has applied.",
    "lag_seconds": "For how long the log has held what it has not applied; 0 where it has all.",
    "canary_age_seconds": "How long ago the newest canary that it has applied was sent.",
}
REPORTED: Final = {
    "lsn": "The LSN of its applied frontier.",
    "seq": "The seq of its applied frontier.",
    "generation": "How often its store was built.",
    "events_per_second": "Rate at which it has recently applied events.",
    "batch_seconds": "How long its batches have recently taken.",
}
COUNTED: Final = {
    "events": "Events that its job has applied.",
    "batches": "Batches that its job has applied.",
    "errors": "Errors that its job has had.",
}
WEBHOOK: Final = {
    "lag_seconds": "For how long the log has held what its receiver has not acknowledged.",
    "stalled_seconds": "For how long it has delivered nothing although the log has more for it.",
    "failing": "Keys that its receiver refuses.",
    "undelivered": "Events that it gave up and nobody has decided on.",
}
# Metrics on their own, most of them with labels.
OTHERS: Final = {
    "kafka_commit_seconds": "Duration of Kafka transactions' commits.",
    "batch_events": "Events of a Kafka transaction.",
    "batch_bytes": "Bytes of a Kafka transaction.",
    "feedback_age_seconds": "Time since the last feedback.",
    "pipeline": "1, by the pipeline's name.",
    "state": "1 for what it is doing.",
    "batch_stage_seconds": "Duration of each stage of a batch on its way into the log.",
    "reconnects": "Reconnects.",
    "refused_messages": "Logical messages with the pipeline's prefix and no valid signature.",
    "verdict": "1 for the level of the verdict that `cdc status` shows.",
    "verdict_causes": "Causes of a verdict that is not ok.",
    "incremental_snapshots": "Incremental snapshots that run or are paused.",
    "incomplete_topics": "Captured tables whose topics lack changes, until read again.",
    "slot_wal_status": "1 for the slot's wal_status.",
    "source_check_age_seconds": "Time since the source was last checked.",
    "follower_state": "1 for what it is doing.",
    "webhook_state": "1 for what it is doing.",
}
_LABELS: Final[dict[str, tuple[str, ...]]] = {
    "pipeline": ("pipeline",),
    "state": ("state",),
    "batch_stage_seconds": ("stage",),
    "reconnects": ("reason",),
    "refused_messages": ("kind", "reason"),
    "verdict": ("level",),
    "verdict_causes": ("level", "about"),
    "slot_wal_status": ("wal_status",),
    "follower_state": ("follower", "state"),
    "webhook_state": ("webhook", "state"),
}
_COUNTERS: Final = {"reconnects", "refused_messages"}
_HISTOGRAMS: Final = {"kafka_commit_seconds", "batch_events", "batch_bytes", "batch_stage_seconds"}


class MetricInfo(NamedTuple):
    kind: str  # gauge, counter or histogram
    labels: tuple[str, ...]
    meaning: str

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What its samples' names end in."""
        by_kind = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        return by_kind.get(self.kind, ("",))


def _every() -> dict[str, MetricInfo]:
    found: dict[str, MetricInfo] = {}

    def add(part: dict[str, str], kind: str, prefix: str = "", *labels: str) -> None:
        for name, meaning in part.items():
            found[f"lockstep_{prefix}{name}"] = MetricInfo(kind, labels, meaning)

    add(GAUGES, "gauge")
    add(COUNTERS, "counter")
    add(SOURCE, "gauge")
    add(SNAPSHOT, "gauge", "snapshot_")
    add(INCREMENTAL_SNAPSHOT, "gauge", "incremental_snapshot_", "id", "table")
    add(FOLLOWER | REPORTED, "gauge", "follower_", "follower")
    add(COUNTED, "counter", "follower_", "follower")
    add(WEBHOOK, "gauge", "webhook_", "webhook")
    for name in OTHERS:
        kind = "counter" if name in _COUNTERS else "gauge"
        kind = "histogram" if name in _HISTOGRAMS else kind
        add({name: OTHERS[name]}, kind, "", *_LABELS.get(name, ()))
    return found


# By full name, without suffixes.
EVERY: Final = _every()
