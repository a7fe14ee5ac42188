"""Incremental snapshots add little latency to the stream; a distant broker does not slow them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from cdc.snapshot.incremental.governor import Governor

if TYPE_CHECKING:
    from collections.abc import Callable

_STEP = 0.001
_QUIESCED = 5.0
_SECONDS = 15.0
_READ_SECONDS = 0.005
# How many seconds nine chunks in ten may add at most.
_ADDED = 0.1


def play(alone: Callable[[float], float], row_seconds: float) -> tuple[float, list[float]]:
    """Read chunks alongside a stream whose own latency is `alone`, at each time.

    Return the rows per second, and what each chunk has added, once it is steady.
    """
    governor = Governor()
    now = free_at = 0.0
    lsn = committed = rows = asked = 0
    reading: float | None = None
    added: list[float] = []
    out: list[tuple[float, int, int]] = []  # in order: when it is committed, LSN, rows
    while now < _SECONDS:
        now += _STEP
        while out and out[0][0] <= now:
            _, committed, many = out.pop(0)
            rows += many if now >= _QUIESCED else 0
        governor.committed(committed + 1, now)
        if reading is not None and reading <= now:
            reading, lsn = None, lsn + 1
            free_at = max(free_at, now) + asked * row_seconds
            done_at = max(free_at + alone(now), out[-1][0] if out else 0.0)
            out.append((done_at, lsn, asked))
            governor.sent(lsn, now, asked, asked * 240)
            if now >= _QUIESCED:
                added.append(done_at - now - alone(now))
        if reading is None and not governor.full(0, now):
            asked, reading = governor.rows, now + _READ_SECONDS
    return rows / (_SECONDS - _QUIESCED), sorted(added)


@given(st.floats(0.002, 0.2), st.floats(5e-6, 5e-5))
def test_chunks_add_little_however_long_the_stream_takes_by_itself(
    alone: float, row_seconds: float
) -> None:
    rate, added = play(lambda _: alone, row_seconds)
    assert added[len(added) * 9 // 10] <= _ADDED
    # A hundred rows at a time and a pause would be 250 per second.
    assert rate >= 2_000


def test_a_stream_that_lags_gets_the_capacity() -> None:
    """Its latency keeps growing: the cause is not a distant broker."""
    rate, _ = play(lambda now: now, 1e-5)
    assert 0 < rate < 200


def test_a_slow_period_has_no_lasting_effect() -> None:
    rate, added = play(lambda now: 0.2 if now < _QUIESCED - 1 else 0.01, 5e-5)
    assert added[len(added) * 9 // 10] <= _ADDED
    assert rate >= 2_000
