"""A source transaction far larger than a batch: split, killed in its middle, complete after."""

from __future__ import annotations

import signal

from tests.fixtures.converge import converge
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.witness import Witness, data_records

_ROWS = 300_000
_TABLE = "CREATE TABLE users (id int PRIMARY KEY, n int NOT NULL, note text)"
_INSERT = f"INSERT INTO users SELECT i, 1, repeat('x', 60) FROM generate_series(1, {_ROWS}) i"
_BATCH = {"max_events": 5_000, "max_wait_ms": 100}
_LIMIT_MB = 150


def test_killed_in_its_middle_it_arrives_once_and_complete_in_little_memory(
    pipeline: NewPipeline,
) -> None:
    line = pipeline(_TABLE, batch=_BATCH)
    # The transaction takes thirty commits and more; an idle slot takes one every ten seconds while
    # Postgres writes it.
    daemon = line.start("after_commit:20").wait_ready()
    line.database.execute(
        "INSERT INTO users VALUES (-1, 1, 'before')",
        _INSERT,
        "INSERT INTO users VALUES (-2, 1, 'after')",
    )
    assert daemon.wait_exit() == -signal.SIGKILL
    position = line.resume()[1]
    assert position.open
    assert 1 < position.seq < _ROWS, "it died before or after the transaction"
    # Keepalives arrive, and require a reply, while a restarted walsender decodes all of it again.
    line.database.execute(f"ALTER DATABASE {line.database.name} SET wal_sender_timeout = '3s'")
    daemon = line.start("before_commit:7")
    assert daemon.wait_exit() == -signal.SIGKILL
    assert line.resume()[1].seq > position.seq
    daemon = line.start()
    wait_until(lambda: line.resume()[1].seq == _ROWS + 2, "it does not arrive", pause=0.3)
    peak_mb = daemon.peak_rss_mb
    assert converge(line.config).events == _ROWS + 2
    # The complete transaction is between two frontiers, in any number of Kafka transactions; an
    # idle slot may have had a frontier before all of them.
    assert {0, 1, _ROWS + 1, _ROWS + 2} >= {each.seq for each in line.frontiers()}
    assert peak_mb <= _LIMIT_MB


def test_rolled_back_it_leaves_nothing(pipeline: NewPipeline) -> None:
    line = pipeline(_TABLE, batch=_BATCH)
    daemon = line.start().wait_ready()
    with line.database.connect() as connection, connection.transaction(force_rollback=True):
        connection.execute(_INSERT.encode())
    line.database.execute("INSERT INTO users VALUES (1, 1, 'kept')")
    wait_until(lambda: daemon.metric("lockstep_events_total") >= 1, "it does not arrive")
    assert converge(line.config).events == 1
    assert len(data_records(line)) == 1
    assert daemon.metric("lockstep_events_total") == 1


def test_stopped_in_its_middle_it_is_not_published_again(pipeline: NewPipeline) -> None:
    rows = 60_000
    line = pipeline(_TABLE, batch=_BATCH)
    witness = Witness(line)
    daemon = line.start().wait_ready()
    line.database.execute(_INSERT.replace(str(_ROWS), str(rows)))
    wait_until(lambda: daemon.metric("lockstep_seq") > 20_000, "nothing moves", pause=0.02)
    assert daemon.term() == 0
    stopped_at = line.resume()[1].seq
    assert stopped_at > 20_000
    daemon = line.start()
    wait_until(lambda: line.resume()[1].seq == rows, "it does not arrive", pause=0.3)
    witness.check()
    assert daemon.metric("lockstep_events_total") == rows - stopped_at
