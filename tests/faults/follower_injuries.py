"""Faults in followers and their stores: functions of the world that return what they did.

None of them waits for recovery: the campaign does that at times. A temporary fault is over when the
function returns.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import requests

from cdc import failpoints
from tests.faults.follower_rows import REWRITTEN

if TYPE_CHECKING:
    from tests.faults.follower_copies import Copies
    from tests.faults.follower_world import World

# Parts of the command lines by which processes are found.
_DRIVER: Final = "follow.py"
_JAVA: Final = "java"
_WORKER: Final = "pyspark.daemon"
_SECONDS: Final = 30.0
# A text becomes its length; back again it is a number's text.
_RETYPE: Final = """
DO $$ BEGIN
  IF pg_typeof((SELECT v FROM {0} LIMIT 1))::text = 'text' THEN
    ALTER TABLE {0} ALTER v TYPE int USING length(v);
  ELSE
    ALTER TABLE {0} ALTER v TYPE text;
  END IF;
END $$
"""
_A_WHILE: Final = (1.0, 6.0)


def _kill(*words: str) -> Callable[[Copies], str]:
    """Kill all processes of one copy, or those whose command line has these words."""

    def injury(world: Copies) -> str:
        copy = world.chance.choice(world.copies)
        hit = copy.signal(signal.SIGKILL, *words)
        return f"kill {words[0] if words else 'all'}" + ("" if hit else " (none there)")

    return injury


def one_worker(world: Copies) -> str:
    """Kill one of Spark's Python workers, not the daemon that forks them."""
    copy = world.chance.choice(world.copies)
    workers = [each for each in copy.members(_WORKER) if each.ppid() != copy.process.pid]
    if not workers:
        return "kill a worker (none there)"
    world.chance.choice(workers).kill()
    return "kill a worker"


def at_a_failpoint(names: Sequence[str], counts: Sequence[int]) -> Callable[[Copies], str]:
    """Replace all copies by one with a failpoint, and wait for it to kill itself there.

    `counts`: at which hit.
    """

    def injury(world: Copies) -> str:
        name = world.chance.choice(names)
        for copy in list(world.copies):
            world.drop(copy)
        copy = world.follow(f"{name}:{world.chance.choice(counts)}")
        deadline = time.monotonic() + 90
        while copy.running and time.monotonic() < deadline:
            time.sleep(0.1)
        reached = "" if copy.running else f", ended with {copy.process.returncode}"
        return f"failpoint {name}" + reached.replace(f" {-signal.SIGKILL}", " SIGKILL")

    return injury


def no_checkpoint(world: Copies) -> str:
    """Delete everything that a job has on disk, Spark's checkpoint too, and kill it."""
    import shutil  # noqa: PLC0415 - of this injury alone

    copy = world.chance.choice(world.copies)
    shutil.rmtree(copy.scratch, ignore_errors=True)
    time.sleep(world.chance.uniform(0, 3))
    copy.signal(signal.SIGKILL)
    return "checkpoint deleted"


def two_copies(world: Copies) -> str:
    """Run a second copy alongside the first for a while, then kill one of the two."""
    if len(world.copies) < 2:
        world.follow()
    time.sleep(world.chance.uniform(10, 30))
    world.look()
    if len(world.copies) > 1:
        world.drop(world.chance.choice(world.copies))
    return "two copies"


def frozen_copy(world: Copies) -> str:
    """Freeze a copy at any point, run another one, and thaw the first: its writes are stale."""
    copy = world.chance.choice(world.copies)
    copy.signal(signal.SIGSTOP)
    other = world.follow()
    time.sleep(world.chance.uniform(20, 40))
    copy.signal(signal.SIGCONT)
    time.sleep(world.chance.uniform(2, 8))
    world.drop(world.chance.choice([copy, other]))
    return "frozen copy"


def redis_flushed(world: World) -> str:
    world.redis.client.flushall()
    return "Redis flushed"


def _server(name: str) -> Callable[[World], str]:
    """Kill a server and start it again after a while."""

    def injury(world: World) -> str:
        world.stack[name].kill()
        time.sleep(world.chance.uniform(0, 4))
        world.stack.start(name)
        return f"{name} killed"

    return injury


def daemon_killed(world: Copies) -> str:
    world.daemon.kill()
    return "daemon killed"


def _refused(status: int, *, items: bool = False) -> Callable[[World], str]:
    """Have OpenSearch refuse some requests, or some items of bulks, for a while."""

    def injury(world: World) -> str:
        world.http.status, world.http.items = status, items
        world.http.share = world.chance.choice((0.1, 0.5, 0.9, 1.0))
        if items:
            world.http.share = min(world.http.share, 0.5)
        time.sleep(world.chance.uniform(*_A_WHILE))
        world.http.repair()
        return f"OpenSearch {status}" + (" for items" if items else "")

    return injury


def index_deleted(world: World) -> str:
    """Delete one of the indices, or all of them."""
    url = world.search.url
    listed = requests.get(f"{url}/_cat/indices?format=json&h=index", timeout=_SECONDS).json()
    prefix = f"{world.line.config.prefix}-public."
    ours = sorted(each["index"] for each in listed if each["index"].startswith(prefix))
    if not ours:
        return "index deleted (none there)"
    chosen = ours if world.chance.random() < 0.2 else [world.chance.choice(ours)]
    for index in chosen:
        requests.delete(f"{url}/{index}", timeout=_SECONDS)
    return "index deleted" if len(chosen) == 1 else "all indices deleted"


def storm(world: World) -> str:
    """Have the load write a transaction that executors apply, and return while they do."""
    assert world.load is not None
    world.load.storm()
    time.sleep(world.chance.uniform(0, 8))
    return "storm"


def rewritten(world: World) -> str:
    """Rewrite rows without events: a type changes with other values, or a default is volatile."""
    table = world.chance.choice(REWRITTEN)
    if world.chance.random() < 0.5:
        what = f"ALTER TABLE {table} DROP r, ADD r float DEFAULT random()"
    else:
        what = _RETYPE.format(table)
    world.alter(what, f"UPDATE {table} SET r = 0.25 WHERE id = (SELECT min(id) FROM {table})")
    return "rows rewritten"


def renamed(world: World) -> str:
    """Exchange the names of two tables."""
    one, other = REWRITTEN
    world.alter(
        f"ALTER TABLE {one} RENAME TO autumn",
        f"ALTER TABLE {other} RENAME TO {one}",
        f"ALTER TABLE autumn RENAME TO {other}",
    )
    return "tables renamed"


# By name, so that one of them can be tried alone.
KILLS: Final[dict[str, Callable[[Copies], str]]] = {
    "all": _kill(),
    "driver": _kill(_DRIVER),
    "java": _kill(_JAVA),
    "workers": _kill(_WORKER),
    "one_worker": one_worker,
}
INJURIES: Final[dict[str, Callable[[World], str]]] = {
    **KILLS,
    "failpoint": at_a_failpoint(
        (*failpoints.FOLLOWER_NAMES, *failpoints.TOPIC_NAMES), (1, 1, 2, 3, 6)
    ),
    "checkpoint": no_checkpoint,
    "two_copies": two_copies,
    "frozen": frozen_copy,
    "flush": redis_flushed,
    "redis": _server("redis"),
    "opensearch": _server("opensearch"),
    "kafka": _server("kafka"),
    "postgres": _server("postgres"),
    "daemon": daemon_killed,
    "429": _refused(429),
    "503": _refused(503),
    "429_items": _refused(429, items=True),
    "index": index_deleted,
    "storm": storm,
    "rewritten": rewritten,
    "renamed": renamed,
}
WEIGHTS: Final = {"failpoint": 6, "frozen": 1, "two_copies": 2, "driver": 2, "java": 2}
