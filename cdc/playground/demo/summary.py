"""Report how the demo ended: in a line or two for people, as JSON for programs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import orjson

from cdc.playground.demo.view import grouped

if TYPE_CHECKING:
    from cdc.playground.demo.proof import DemoProof
    from cdc.playground.demo.stage import DemoOutcome


def closing_lines(outcome: DemoOutcome) -> list[str]:
    lines = _chaos_lines(outcome)
    proof = outcome.proof
    if proof is None:
        return [*lines, f"demo: stopped after {outcome.seconds:.0f} s without a proof"]
    if not proof.equal:
        count = len(proof.findings)
        lines.append(f"demo: the log is NOT proved equal to the database, {count} findings:")
        return [*lines, *(f"  {finding}" for finding in proof.findings)]
    lines += [f"demo: {_summary(outcome, proof)}"]
    lines += [f"demo: not in the log: {each}" for each in proof.not_in_log]
    return [*lines, *_follower_lines(outcome)]


def _follower_lines(outcome: DemoOutcome) -> list[str]:
    proof = outcome.followers
    if proof is None:
        return []
    if not proof.equal:
        reported = f"NOT proved equal to the database, {len(proof.findings)} findings:"
        return [f"demo: the followers are {reported}", *(f"  {each}" for each in proof.findings)]
    each = ", ".join(f"{name} {grouped(rows)}" for name, rows in proof.rows.items())
    lines = [f"demo: every follower equals the database at {proof.lsn} (rows: {each})"]
    lines += [f"  {each}" for each in proof.examples]
    if outcome.first_change_seconds is not None and outcome.every_store_seconds is not None:
        lines.append(
            f"demo: changes were in the log {outcome.first_change_seconds:.0f} s after the start,"
            f" in every store after {outcome.every_store_seconds:.0f} s"
        )
    return lines


def _summary(outcome: DemoOutcome, proof: DemoProof) -> str:
    frontier = f"frontier {proof.frontier.lsn}, " if proof.frontier else ""
    return (
        f"{f'{grouped(proof.initial)} rows read, ' if proof.initial else ''}"
        f"{grouped(proof.events - proof.initial)} changes in {outcome.seconds:.0f} s,"
        f" {proof.tables} tables,"
        f" {grouped(proof.rows)} rows: the log equals the database ({frontier}seq {proof.seq})"
    )


def _chaos_lines(outcome: DemoOutcome) -> list[str]:
    if not outcome.options.chaos:
        return []
    kills = outcome.kills
    counts = Counter(kill.what for kill in kills)
    each = ", ".join(f"{count} {what}" for what, count in counts.items()) or "none"
    slowest = max((kill.recovered_seconds or 0 for kill in kills), default=0)
    verdict = "nothing lost, twice or out of order; " if outcome.equal else ""
    kinds = f"{len(kills)} kill -9 ({each}), seed {outcome.options.seed}"
    return [f"chaos: {kinds}: {verdict}slowest recovery {slowest:.1f} s"]


def closing_json(outcome: DemoOutcome) -> str:
    """Return the outcome as one line of JSON."""
    proof = outcome.proof
    median, high, worst = outcome.late_ms
    result: dict[str, Any] = {
        "equal": outcome.equal if proof else None,
        "seed": outcome.options.seed,
        "rate": outcome.options.rate,
        "seconds": round(outcome.seconds, 1),
        "first_change_seconds": _rounded(outcome.first_change_seconds),
        "every_store_seconds": _rounded(outcome.every_store_seconds),
        "late": {"p50_ms": median, "p99_ms": high, "max_ms": worst},
        "kills": [
            {"what": kill.what, "recovered_seconds": _rounded(kill.recovered_seconds)}
            for kill in outcome.kills
        ],
    }
    if proof:
        result |= {
            "initial": proof.initial,
            "changes": proof.events - proof.initial,
            "tables": proof.tables,
            "rows": proof.rows,
            "seq": proof.seq,
            "frontier": str(proof.frontier.lsn) if proof.frontier else None,
            "not_in_log": proof.not_in_log,
            "findings": proof.findings,
        }
    if outcome.followers:
        followers = outcome.followers
        result |= {
            "followers": followers.rows,
            "examples": followers.examples,
            "findings": (*result["findings"], *followers.findings),
        }
    return orjson.dumps(result).decode()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
