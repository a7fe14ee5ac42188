"""Rounds of kills in archive, compactions and followers; the topics keep a minute of the log.

One round: a client that writes without pause, the archive's job, compactions, two followers. The
seed determines load, faults and the pauses between them. After it, the archive must hold every
event once, with the topics' bytes, and prove it; the newest base, the two followers, and one that
is only then filled, from base, archive and topics, must equal the database.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any, Final

import pytest

from cdc import failpoints
from cdc.log import reader
from cdc.playground.servers.stack import LocalStack
from lockstep.jobs.archiving import proving as archive_proving
from lockstep.jobs.archiving.running import opened
from lockstep.jobs.compacting import proving as base_proving
from lockstep.jobs.compacting.bases import bases_of
from lockstep.jobs.compacting.runs import BaseFile
from tests.fixtures.commands import CommandSession, completed
from tests.fixtures.daemon import wait_until
from tests.integration.test_bootstrap import TABLES, Past, State
from tests.integration.test_compaction import rows_of
from tests.integration.test_compaction import source as source_of
from tests.integration.test_past_lsns import Workload, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from cdc.events import LSN
    from tests.fixtures.archived import Archived, Record
    from tests.fixtures.daemon import NewPipeline, PipelineUnderTest

RETENTION_SECONDS: Final = 60.0
LATE: Final = "late"
# Segments are short, so that they expire soon after their last record.
_FORGETFUL: Final = {"log.retention.check.interval.ms": "1000", "log.roll.ms": "5000"}
_WRITE_PAUSE_SECONDS: Final = 0.05
_PAUSE_SECONDS: Final = (0.2, 4.0)
# How long a process may take to reach its failpoint before it is killed anywhere.
_FAILPOINT_SECONDS: Final = 15.0
_CONVERGE_SECONDS: Final = 300.0
_SHOWN_CHARACTERS: Final = 4_000
# A table that is large for what changes in it: its bases have several runs.
_STOCK: Final = (
    "CREATE TABLE stock (id int PRIMARY KEY, name text)",
    (
        "CREATE FUNCTION sold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " UPDATE stock SET name = name || 's' WHERE id = 1 + floor(random() * 4000)::int;"
        " RETURN NULL; END $$"
    ),
    "CREATE TRIGGER sold AFTER INSERT ON users EXECUTE FUNCTION sold()",
)
_FILLED: Final = (
    "INSERT INTO stock SELECT g, md5(g::text) || md5('s' || g) FROM generate_series(1, 4000) g"
)
_ARCHIVE: Final = ("archive", "run")
_COMPACT: Final = ("archive", "compact")
_FOLLOW: Final = ("follow", "--followers", "cache,copy")


def archive_pipeline(new: NewPipeline, folder: Path, redis_url: str) -> PipelineUnderTest:
    """Return the pipeline of a round, which is not started."""
    return new(
        *TABLES,
        *_STOCK,
        followers={
            "cache": {"redis": {"url": redis_url}},
            "copy": {"sql": {"url": f"sqlite:///{folder}/copy.db"}},
            LATE: {"sql": {"url": f"sqlite:///{folder}/{LATE}.db"}},
        },
        archive={
            "path": str(folder / "archive"),
            "every_seconds": 0.3,
            "optimize_minutes": 0.05,
            "bases_kept": 2,
        },
        batch={"max_wait_ms": 30},
        log={
            "kafka": {"message.max.bytes": 60_000},
            "retention_hours": RETENTION_SECONDS / 3_600,
        },
    )


@contextmanager
def forgetful_kafka(folder: Path) -> Iterator[str]:
    """Yield the address of a broker whose retention deletes what has expired within seconds."""
    stack = LocalStack(folder, tied=True)
    stack.home.make()
    try:
        bootstrap = stack.up(["kafka"], settings={"kafka": _FORGETFUL}).kafka_bootstrap
        assert bootstrap is not None
        yield bootstrap
    finally:
        stack.down()


def deleted(line: PipelineUnderTest) -> int:
    """Return how many offsets of the tables' topics retention has deleted."""
    parts = [(each, n) for each, many in line.resume()[0].partitions.items() for n in range(many)]
    return sum(start for start, _ in reader.offsets(line.config, parts).values())


class ArchiveRound:
    """Call `run`, then `report`; `close` leaves nothing running."""

    def __init__(self, kept: Past, seed: int, seconds: float) -> None:
        """Load and faults last for so many seconds; the daemon runs."""
        self._kept, self._seed, self._seconds = kept, seed, seconds
        self._archived: Archived = kept.archived
        self._chance = Random(f"{seed}/kills")
        self._workload = Workload(self._archived, Random(seed), _WRITE_PAUSE_SECONDS)
        self._began = time.monotonic()
        kept.pipeline.database.execute(_FILLED)
        self._started: list[CommandSession] = []
        self.kinds: Counter[str] = Counter()
        self.events = self.bases = self.runs = 0
        self._job = self._start(*_ARCHIVE)
        self._followers = self._start(*_FOLLOW)

    def run(self) -> None:
        with self._workload.running():
            until = time.monotonic() + self._seconds
            while time.monotonic() < until:
                kind = self._chance.choice(list(INJURIES))
                INJURIES[kind](self)
                self.kinds[kind] += 1
                self._expect_running(self._job, self._followers)
                time.sleep(self._chance.uniform(*_PAUSE_SECONDS))
        self._expect_bases(self._expect_archive())
        self._expect_followers()

    def report(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "faults": self.kinds.total(),
            "kinds": dict(self.kinds.most_common()),
            "writes": self._workload.writes,
            "events": self.events,
            "bases": self.bases,
            "runs": self.runs,
            "deleted": deleted(self._kept.pipeline),
            "seconds": round(time.monotonic() - self._began, 1),
        }

    def close(self) -> None:
        for each in self._started:
            each.kill()

    # -- the faults -----------------------------------------------------------------------------

    def job_killed(self) -> None:
        self._job.kill()
        self._job = self._start(*_ARCHIVE)

    def job_died(self) -> None:
        """At a failpoint, if it gets there in time."""
        point, many = self._chance.choice(failpoints.ARCHIVE_NAMES), self._chance.randint(1, 4)
        self._job.kill()
        self._dies(self._start(*_ARCHIVE, failpoint=f"{point}:{many}"))
        self._job = self._start(*_ARCHIVE)

    def job_doubled(self) -> None:
        """One of two copies is killed after a while."""
        other = self._start(*_ARCHIVE)
        time.sleep(self._chance.uniform(*_PAUSE_SECONDS))
        killed, self._job = self._chance.sample([self._job, other], 2)
        killed.kill()

    def compaction_killed(self) -> None:
        compaction = self._start(*_COMPACT)
        time.sleep(self._chance.uniform(0.5, 4.0))
        compaction.kill()

    def compaction_died(self) -> None:
        point = self._chance.choice(failpoints.COMPACT_NAMES)
        self._dies(self._start(*_COMPACT, failpoint=point))

    def compacted(self) -> None:
        done = completed(self._kept.pipeline.config_file, *_COMPACT, "--json")
        # Nothing is archived yet, or another compaction that is presumed dead was quicker.
        assert done.returncode in {0, 78}, done.stderr.decode()

    def followers_killed(self) -> None:
        self._followers.kill()
        self._followers = self._start(*_FOLLOW)

    def daemon_killed(self) -> None:
        self._kept.pipeline.daemon.kill()
        self._kept.pipeline.start()

    def _dies(self, session: CommandSession) -> None:
        deadline = time.monotonic() + _FAILPOINT_SECONDS
        while session.running and time.monotonic() < deadline:
            time.sleep(0.1)
        session.kill()

    # -- what must hold -------------------------------------------------------------------------

    @staticmethod
    def _expect_running(*sessions: CommandSession) -> None:
        """Fail if a process has ended by itself: nothing here needs a person."""
        for each in sessions:
            if not each.running:
                code = each.process.returncode
                pytest.fail(f"{each.command} ended with {code}: {each.log[-_SHOWN_CHARACTERS:]}")

    def _expect_archive(self) -> dict[tuple[LSN, int], str]:
        """Compare archive and topics; return the chains of the newest frontiers."""
        self._job.kill()
        self._archived.reach()
        position, stored = self._archived.position(), self._archived.stored()
        logged = self._archived.logged(position)
        held: dict[tuple[str, int, int], Record] = {each[:3]: each for each in stored}
        assert len(held) == len(stored), "a record is archived twice"
        assert [each for each in logged if held.get(each[:3]) != each] == []
        proof = archive_proving.prove(self._kept.config, opened(self._kept.config))
        assert proof.findings == ()
        assert proof.events == proof.seq == position.applied.seq
        self.events = proof.events
        return proof.chains

    def _expect_bases(self, chains: dict[tuple[LSN, int], str]) -> None:
        done = completed(self._kept.pipeline.config_file, *_COMPACT, "--json")
        assert done.returncode == 0, done.stderr.decode()
        source = self._kept.source()
        found: State = {table: rows_of(self._archived, table) for table in source}
        assert differences(found, source) == {}, "the base"
        assert rows_of(self._archived, "stock") == source_of(self._archived, "stock")
        bases = bases_of(self._kept.config)
        assert bases.find()
        self.runs = len({BaseFile.of(add).run for add in bases.added().values()})
        proof = base_proving.prove(self._kept.config, chains)
        assert proof is not None
        assert proof.findings == ()
        self.bases = proof.number

    def _expect_followers(self) -> None:
        """Compare the stores; one of them has nothing yet, and most of the log is deleted."""
        source = self._kept.source()
        for name, read in (("cache", self._kept.in_redis), ("copy", self._kept.in_sqlite)):

            def equal(read: Callable[[], State] = read) -> bool:
                self._expect_running(self._followers)
                return differences(read(), source) == {}

            wait_until(equal, f"{name} is not the database", _CONVERGE_SECONDS, pause=0.5)
        self._followers.kill()
        done = completed(self._kept.pipeline.config_file, "rebuild", LATE)
        assert done.returncode == 0, done.stderr.decode()
        found = self._kept.in_sqlite(LATE)
        assert differences(found, source) == {}, "filled from base, archive and topics"

    def _start(self, *command: str, failpoint: str = "") -> CommandSession:
        name = f"{len(self._started)}-{command[-1]}"
        folder = self._kept.folder
        session = CommandSession(
            self._kept.pipeline.config_file,
            *command,
            log=folder / f"{name}.log",
            scratch=folder / name,
            failpoint=failpoint,
        )
        self._started.append(session)
        return session


# By what reports call them.
INJURIES: Final[dict[str, Callable[[ArchiveRound], None]]] = {
    "archive killed": ArchiveRound.job_killed,
    "archive died": ArchiveRound.job_died,
    "archive doubled": ArchiveRound.job_doubled,
    "compaction killed": ArchiveRound.compaction_killed,
    "compaction died": ArchiveRound.compaction_died,
    "compacted": ArchiveRound.compacted,
    "followers killed": ArchiveRound.followers_killed,
    "daemon killed": ArchiveRound.daemon_killed,
}
