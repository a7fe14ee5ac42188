"""What the console reads of the log: everything that arrives, in few answers of the brokers."""

from __future__ import annotations

import time
from contextlib import closing
from threading import Thread

from cdc.log.sample import sample
from tests.fixtures.daemon import NewPipeline, wait_until
from tests.fixtures.servers import Database

_COMMITS = 150
_SHOWN = 20  # a second


def test_commits_arrive_together_and_all_of_them_are_counted(pipeline: NewPipeline) -> None:
    """An answer to each commit costs the broker a look at every partition of the log."""
    line = pipeline("CREATE TABLE t (id int PRIMARY KEY)")
    line.start().wait_ready()
    line.database.execute("INSERT INTO t VALUES (0)")
    wait_until(lambda: line.resume()[1].seq == 1, "the first row does not arrive")
    counts, shown = list[int](), list[int]()
    with closing(sample(line.config, _SHOWN)) as samples:
        until = time.monotonic() + 2.0  # the client looks up where the topics end
        while time.monotonic() < until:
            next(samples)
        writing = Thread(target=_write, args=(line.database,))
        began = time.monotonic()
        writing.start()
        while sum(counts) < _COMMITS:
            found = next(samples)
            counts += [sum(each.events for each in found.topics.values())]
            shown += [each.event["after"]["id"] for each in found.arrived]
        took = time.monotonic() - began
    writing.join()
    assert sum(counts) == _COMMITS
    # Two answers a second, however long the commits take.
    assert len([count for count in counts if count]) <= 2 + 2 * took
    assert shown == sorted(set(shown))
    assert 1 <= len(shown) <= min(_COMMITS, _SHOWN * (took + 2))


def _write(database: Database) -> None:
    """Commit a row each 10 ms, in the server: a client has to wait for a processor in between."""
    database.execute(
        f"DO $$ BEGIN FOR number IN 1..{_COMMITS} LOOP INSERT INTO t VALUES (number); COMMIT;"
        " PERFORM pg_sleep(0.01); END LOOP; END $$"
    )
