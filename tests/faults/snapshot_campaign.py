"""An initial snapshot under constant writes, with kills at random points; then the account.

One round: filled tables, writers whose transactions overlap everything, `cdc setup`, daemons that
take the snapshot, and a few faults meanwhile. The seed determines load, settings, kinds of faults
and pauses; the exact moments depend on the machine.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

import psutil
import psycopg
import pytest

from cdc import failpoints
from tests.faults import snapshot_account
from tests.faults.crew import Crew
from tests.faults.snapshot_load import FILL, TABLES, Hands
from tests.fixtures.converge import converge
from tests.fixtures.daemon import Daemon, PipelineUnderTest, wait_until
from tests.fixtures.load import Load
from tests.fixtures.witness import Witness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cdc.playground.servers.stack import LocalStack
    from tests.fixtures.servers import Database

_COMMAND_SECONDS: Final = 120.0
_SNAPSHOT_SECONDS: Final = 240.0
_BATCH: Final[dict[str, object]] = {"max_events": 200, "max_wait_ms": 30}
_STEPS_PER_SECOND: Final = 120.0
_PAUSE_SECONDS: Final = (0.0, 2.5)
# At which hit of its failpoint a process of the snapshot kills itself. A task does so again in each
# process that replaces it, so only at a hit by which it has made progress.
_COUNTS: Final = (2, 3, 7)
_POINTS: Final = (*failpoints.COORDINATOR_NAMES, *failpoints.SNAPSHOT_NAMES)


class SnapshotCrew(Crew):
    """A daemon that works and a standby, with the snapshot's failpoints."""

    points: tuple[str, ...] = _POINTS

    def __init__(self, pipeline: PipelineUnderTest, chance: random.Random) -> None:
        super().__init__(pipeline, pipeline.config_file, chance)

    def _start(self) -> Daemon:
        if not self.failpoints or self._chance.random() < 0.6:
            return self._pipeline.start()
        point = self._chance.choice(self.points)
        count = self._chance.choice(_COUNTS) if "range" in point else 1
        daemon = self._pipeline.start(f"{point}:{count}")
        self._places[id(daemon)] = point
        return daemon

    def spare_workers(self) -> None:
        """Replace daemons whose workers kill themselves again and again."""
        for daemon in list(self._alive):
            if "range" in self._places.get(id(daemon), ""):
                self.forgive(daemon)
                daemon.kill()
        self.look()

    def children(self) -> list[psutil.Process]:
        """Return all descendant processes of the daemons: those that copy."""
        found = []
        for daemon in self._alive:
            with suppress(psutil.Error):
                found += psutil.Process(daemon.process.pid).children(recursive=True)
        return found

    @property
    def working(self) -> Daemon:
        """The daemon that takes the snapshot; else the one that streams."""
        self.look()
        taking = [each for each in self._alive if each.state == "snapshotting"]
        return taking[0] if taking else super().working


class Round:
    """One snapshot of one database; `run`, then `report`."""

    injuries: tuple[tuple[int, Callable[[Any], str]], ...]

    def __init__(
        self,
        stack: LocalStack,
        database: Database,
        bootstrap: str,
        prefix: str,
        folder: Path,
        *,
        seed: int,
        runner: str = "local",
    ) -> None:
        self._chance = chance = random.Random(f"{seed}/snapshot")
        self._seed = seed
        self._stack = stack
        self._began = time.monotonic()
        self.kinds: Counter[str] = Counter()
        # Three rounds of four have no truncates: each of them restarts the snapshot.
        self._truncates = chance.choice((0, 0, 0, 2))
        self.pipeline = PipelineUnderTest(
            database,
            bootstrap,
            prefix,
            folder,
            batch=_BATCH,
            snapshot={
                "mode": "initial",
                "runner": runner,
                "max_parallel": chance.choice((1, 2, 3)),
                "range_bytes": chance.choice((8_192, 32_768, 131_072, 1 << 20)),
                "rows_per_second": chance.choice((0, 1_000, 1_500, 3_000)),
            },
        )
        database.execute(*TABLES, *FILL)
        database.execute(f"ALTER DATABASE {database.name} SET wal_sender_timeout = '3s'")
        self._crew = SnapshotCrew(self.pipeline, chance)
        self._injuries = chance.choice((0, 1, 1, 2, 2, 3, 4))

    def run(self) -> None:
        """Set up, copy and inject faults under load, until the daemon has streamed for a while."""
        with self._written() as load:
            wait_until(lambda: load.commits > 20, "no load")
            self.witness = Witness(self.pipeline)
            self._set_up()
            self._first_lsn = self.pipeline.resume()[1].end_lsn
            self._attack()
            self._crew.quiesce()
            self._crew.recovered()

    def _attack(self) -> None:
        self._crew.failpoints = True
        self._crew.look()
        for _ in range(self._injuries):
            self._injure()
        self._crew.points = failpoints.COORDINATOR_NAMES
        self._crew.spare_workers()
        wait_until(self._streams, "the snapshot does not end", _SNAPSHOT_SECONDS, pause=0.2)
        # At times a fault comes just after the hand-over too.
        if self._chance.random() < 0.4:
            self._injure()

    @contextmanager
    def _written(self) -> Iterator[Load]:
        """Write to all tables, all the time."""
        dsn, seed = self.pipeline.database.dsn, self._seed
        with ExitStack() as closing:
            load = Load(dsn, seed, steps_per_second=_STEPS_PER_SECOND, truncates=0.0)
            closing.enter_context(load)
            for name, open_seconds in (("short", (0.0, 0.2)), ("long", (0.5, 2.5))):
                closing.enter_context(
                    Hands(
                        dsn,
                        f"{seed}/{name}",
                        open_seconds=open_seconds,
                        truncates=self._truncates // 2,
                    )
                )
            yield load

    def _set_up(self) -> None:
        """Run `cdc setup` as a person would."""
        done = self.cdc("setup")
        assert done.returncode == 0, done.stderr

    def cdc(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `cdc`."""
        command = [sys.executable, "-m", "cdc.cli.main", *arguments]
        command += ["-c", str(self.pipeline.config_file)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )

    def _streams(self) -> bool:
        """Whether one of them streams, which none does before the hand-over."""
        return self._crew.working.state == "streaming"

    # -- faults ---------------------------------------------------------------------------------

    def _injure(self) -> None:
        if self._chance.random() < 0.8:
            # While rows are copied; otherwise at any moment, also before and after.
            at_work = lambda: self._crew.children() or self._streams()  # noqa: E731
            wait_until(at_work, "nobody takes the snapshot", _SNAPSHOT_SECONDS)
        time.sleep(self._chance.uniform(*_PAUSE_SECONDS))
        injury = self._chance.choices([i for _, i in self.injuries], [w for w, _ in self.injuries])
        self.kinds[injury[0](self)] += 1
        self._crew.look()

    def kill_worker(self) -> str:
        """Kill one of the processes that copy, or all at once; the daemon where there are none."""
        children = self._crew.children()
        if not children:
            return self.kill_daemon()
        chosen = children if self._chance.random() < 0.3 else [self._chance.choice(children)]
        for child in chosen:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        return "worker killed" if len(chosen) == 1 else "all workers killed"

    def freeze_worker(self) -> str:
        """Stop one for a while: long enough for a replacement to be started, or not."""
        children = self._crew.children()
        if not children:
            return self.kill_daemon()
        child = self._chance.choice(children)
        with suppress(psutil.NoSuchProcess):
            child.suspend()
            time.sleep(self._chance.uniform(0.2, 2.0))
            child.resume()
        return "worker stopped and continued"

    def kill_daemon(self) -> str:
        daemon = self._crew.working
        self._crew.forgive(daemon)
        daemon.kill()
        return "daemon killed"

    def freeze_daemon(self) -> str:
        """Stop it while its workers continue; mostly end its walsender: another takes over."""
        daemon = self._crew.working
        daemon.freeze()
        try:
            if self._chance.random() < 0.6:
                self._terminate("backend_type = 'walsender'")
            time.sleep(self._chance.uniform(0.3, 3.0))
        finally:
            daemon.thaw()
        return "daemon stopped and continued"

    def kill_postgres(self) -> str:
        self._stack["postgres"].kill()
        time.sleep(self._chance.uniform(0.0, 0.4))
        self._stack.start("postgres")
        return "postgres killed"

    def kill_kafka(self) -> str:
        self._stack["kafka"].kill()
        time.sleep(self._chance.uniform(0.0, 0.4))
        self._stack.start("kafka")
        return "kafka killed"

    def terminate_exporter(self) -> str:
        """End the connection that holds the exported snapshot."""
        self._terminate("pid IN (SELECT active_pid FROM pg_replication_slots WHERE temporary)")
        return "export ended"

    def terminate_reader(self) -> str:
        """End one of the connections that read rows, whichever the server names first."""
        self._terminate("query LIKE 'COPY%' OR query LIKE '%TRANSACTION SNAPSHOT%'", limit=1)
        return "reader ended"

    def _terminate(self, which: str, limit: int = 10) -> None:
        query = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            f" AND (datname = current_database() OR datname IS NULL) AND ({which}) LIMIT {limit}"
        )
        with suppress(psycopg.Error), self.pipeline.database.connect() as connection:
            connection.execute(query.encode())

    # -- the account ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Compare the log with the source; fail on what is wrong, return the figures."""
        proof = converge(self.pipeline.config)
        account = snapshot_account.take(self.pipeline)
        since = max(account.point, self._first_lsn)
        difference = self.witness.difference(since)
        findings = list(account.findings)
        if any(difference):
            findings.append(f"after {since} the log is not the stream: {difference}")
        if findings:
            pytest.fail(f"seed {self._seed}: " + "\n  ".join(findings))
        return {
            "seed": self._seed,
            "injuries": dict(self.kinds + self._crew.died),
            "generations": account.generations,
            "snapshot_rows": account.snapshot_rows,
            "gone": account.deleted,
            "changes": account.changes,
            "read_again": account.read_again,
            "rows": proof.rows,
            "lost": difference.lost,
            "duplicate": difference.duplicate,
            "reordered": difference.reordered,
            "truncates": self._truncates,
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def close(self) -> None:
        self.pipeline.close()


Round.injuries = (
    (8, Round.kill_worker),
    (4, Round.freeze_worker),
    (6, Round.kill_daemon),
    (3, Round.freeze_daemon),
    (4, Round.kill_postgres),
    (1, Round.kill_kafka),
    (3, Round.terminate_exporter),
    (4, Round.terminate_reader),
)
