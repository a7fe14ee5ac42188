"""For applications: wait until followers have applied a commit, and read changes in a group.

```python
from lockstep import Client

client = Client("lockstep.yaml")            # one per process; threads may share it
with psycopg.connect(...) as connection:
    connection.execute("INSERT ...")
    connection.commit()
    token = client.token(connection)        # covers every commit so far; str(token) as text
client.wait(token, ["cache"], timeout=2.0)  # after this the cache has it
client.wait(token, ["view:timeline"])       # or each follower that holds the view
```

It reads the followers' reports in the log and queries no store. One consumer stays open: a wait
that is already satisfied costs one request to the broker, and any other ends as soon as the report
arrives.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from cdc.config import Config, load
from cdc.config.followers import chosen_names
from cdc.deliver import queues
from cdc.deliver.crew import Crew
from cdc.deliver.group_changes import GroupChange, GroupChanges
from cdc.deliver.queues import ATTEMPTS, LOCK_SECONDS, Delivery, Queue
from cdc.errors import ConfigError, Exit, LagError, UnavailableError
from cdc.events import LSN
from cdc.log import reader
from cdc.log.follower_reports import Readings
from cdc.log.groups import NOW
from cdc.operate import incomplete_topics
from cdc.operate.readable import size
from cdc.source import token as tokens
from cdc.source.token import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime

    import psycopg

    from cdc.log.completeness import IncompleteTopic
    from cdc.log.follower_reports import FollowerRecord

__all__ = [
    "Client",
    "Delivery",
    "FollowerLag",
    "GroupChange",
    "GroupChanges",
    "LagError",
    "Queue",
    "Token",
]

# How long a thread reads before it yields to others; a report ends that at once.
_READ_SECONDS: Final = 0.1
# The least that even a call with timeout 0 waits: for an answer of the broker, and on the first
# call for the connection.
ASK_SECONDS: Final = 1.0
CONNECT_SECONDS: Final = 5.0
_APPLIED_SECONDS: Final = 15.0
# Names the followers that hold a view; no follower's name has a colon.
VIEW: Final = "view:"


class FollowerLag(NamedTuple):
    """Why a follower does not have what was waited for; `record` is its newest report, if any."""

    follower: str
    why: str
    hint: str
    exit_code: Exit
    hopeless: bool  # only a person can fix it
    record: FollowerRecord | None


class Client:
    """Reads how far the followers of one pipeline are. Close it, or use it in a `with`."""

    def __init__(self, config: Config | str | Path = "lockstep.yaml") -> None:
        self._config = config if isinstance(config, Config) else load(config)
        self._readings = Readings(self._config)
        self._lock = threading.Lock()
        self._connected = False
        self._source: tuple[str, str] | None = None  # system identifier and database

    def token(self, connection: psycopg.Connection[Any]) -> Token:
        """Return a token of everything committed; call it after your commit, on its connection.

        Without psycopg, use the LSN that `SELECT pg_current_wal_insert_lsn()` returns.
        """
        return tokens.take(connection)

    def applied(self, followers: Iterable[str] | None = None) -> dict[str, FollowerRecord]:
        """Return the newest reports, of all followers or of these; one that never ran has none."""
        names = waited_for(self._config, followers)
        newest = self._refreshed(_APPLIED_SECONDS)
        return {name: newest[name] for name in names if name in newest}

    def wait(
        self,
        lsn: Token | LSN | str,
        followers: Iterable[str] | None = None,
        timeout: float = 10.0,
    ) -> dict[str, FollowerRecord]:
        """Return when every follower named (default: all) has applied everything up to `lsn`.

        `view:NAME` names every follower that holds the view. A text may be a token or an LSN.
        Raises LagError, which is also a TimeoutError, if one has not in time, and at once if one
        has halted below `lsn`; UnavailableError if the brokers do not answer in time.
        """
        given, names = _given(lsn), waited_for(self._config, followers)
        began = time.monotonic()
        # First, because this call keeps to the timeout even if no broker answers.
        newest = self._refreshed(timeout)
        wanted = given if isinstance(given, LSN) else self._lsn(given)
        while late := lagging(wanted, names, newest):
            left = began + timeout - time.monotonic()
            if left <= 0 or any(each.hopeless for each in late):
                raise _error(wanted, late, time.monotonic() - began)
            if self._lock.acquire(timeout=left):
                try:
                    self._readings.wait(min(left, _READ_SECONDS))
                    newest = dict(self._readings.newest)
                finally:
                    self._lock.release()
        return {name: newest[name] for name in names}

    def incomplete(self) -> list[IncompleteTopic]:
        """Return the topics that lack changes of their tables, with why and what to do.

        A rewrite without events, or a rename, makes a topic incomplete until the table is read
        again: until then its rows in stores may differ from the source, at every frontier. Reads
        all table versions in the log.
        """
        found = incomplete_topics.incomplete_by_log(self._config)
        return [each for each in found if each.captured]

    def changes(
        self, tables: Sequence[str], group: str, start: LSN | datetime | str = NOW
    ) -> GroupChanges:
        """Return the changes of tables as an iterator, for a member of a group.

        Every group sees each change, and its members share them; what is not acknowledged comes
        again. A new group starts at `start`: `beginning` of the log, `now`, or at or shortly before
        an LSN or a time. Each iterator belongs to one thread.

        ```python
        with client.changes(["public.orders"], group="billing") as changes:
            for change in changes:
                bill(change.after)
                changes.acknowledge(change)
        ```
        """
        return GroupChanges(self._config, tables, group, start)

    def queue(
        self,
        tables: Sequence[str],
        name: str,
        start: LSN | datetime | str = NOW,
        *,
        attempts: int = ATTEMPTS,
        lock_seconds: float = LOCK_SECONDS,
    ) -> Queue:
        """Return the changes of tables as a work queue: each goes to one member until it is done.

        A change that is not acknowledged within `lock_seconds` is delivered again, to any member;
        after `attempts` deliveries it is given up (`cdc queue undelivered`). There is no order.
        Needs Kafka 4.3. Each queue object is a member and belongs to one thread.

        ```python
        with client.queue(["public.orders"], "emails") as queue:
            for delivery in queue:
                send(delivery.change.after)
                queue.acknowledge(delivery)
        ```
        """
        record = queues.started(self._config, tables, name, start, attempts, lock_seconds)
        return Queue(self._config, record, attempts)

    def work(
        self,
        tables: Sequence[str],
        name: str,
        handle: Callable[[Delivery], object],
        stopping: Callable[[], bool] = lambda: False,
        start: LSN | datetime | str = NOW,
        *,
        attempts: int = ATTEMPTS,
        lock_seconds: float = LOCK_SECONDS,
        workers: int | None = None,
    ) -> None:
        """Call `handle` for each change of a work queue in threads until `stopping()` is true.

        A change is acknowledged when `handle` returns, and delivered again when it raises. By
        default there are two threads for each partition, so that a slow change holds up no other.
        """
        record = queues.started(self._config, tables, name, start, attempts, lock_seconds)
        Crew(self._config, record, attempts, handle, stopping).work(workers)

    def close(self) -> None:
        """Close the connection to the broker."""
        with self._lock:
            self._readings.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refreshed(self, seconds: float) -> dict[str, FollowerRecord]:
        """Return the newest reports within `seconds`; threads take turns.

        Raises UnavailableError if the brokers do not answer in time.
        """
        seconds = max(seconds, ASK_SECONDS if self._connected else CONNECT_SECONDS)
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise UnavailableError(
                f"the brokers have not answered another thread for {seconds:.1f} s",
                hint="check that they run, or wait for longer",
            )
        try:
            left = max(deadline - time.monotonic(), _READ_SECONDS)
            newest = dict(self._readings.refresh(left))
            self._connected = True
        finally:
            self._lock.release()
        return newest

    def _lsn(self, given: Token) -> LSN:
        """Return a token's LSN; raise ConfigError if it is of another database than the log."""
        if self._source is None:
            resume = reader.read_resume(self._config)
            if resume is None:
                raise ConfigError(
                    f"the pipeline {self._config.pipeline} is not set up", hint="cdc setup"
                )
            self._source = resume[0].system_identifier, resume[0].database
        if (given.system_identifier, given.database) != self._source:
            raise ConfigError(
                f"the token {given} is of another database: this pipeline's is"
                f" {self._source[1]} of the server {self._source[0]}",
                hint="take it where the change was committed, and wait with that pipeline's"
                " configuration; it has no meaning on another server",
            )
        return given.lsn


def waited_for(config: Config, wanted: Iterable[str] | None) -> list[str]:
    """Return the followers that are named, each once, all for None: by name, or by `view:NAME`.

    Raises ConfigError for a name that is unknown, and for a view that no follower holds.
    """
    if wanted is None:
        return chosen_names(config.followers, None)
    names = list[str]()
    for each in wanted:
        names += _holders(config, each.removeprefix(VIEW)) if each.startswith(VIEW) else [each]
    return chosen_names(config.followers, names)


def _holders(config: Config, view: str) -> list[str]:
    holders = [name for name, each in config.followers.items() if view in each.views]
    if view not in config.views:
        raise ConfigError(
            f"there is no view {view}",
            hint=f"the views are {', '.join(config.views)}"
            if config.views
            else "none is declared: docs/VIEWS.md",
        )
    if not holders:
        raise ConfigError(
            f"no follower holds the view {view}", hint="name it in a follower's `views`"
        )
    return holders


def lagging(
    lsn: LSN, names: Sequence[str], newest: Mapping[str, FollowerRecord]
) -> tuple[FollowerLag, ...]:
    """Return which followers have not applied everything up to `lsn`, by `newest`, and why."""
    found = []
    for name in names:
        record = newest.get(name)
        if record is None:
            why, hint = "has never run", f"cdc follow --followers {name}"
            found.append(
                FollowerLag(name, why, hint, Exit.UNAVAILABLE, hopeless=False, record=None)
            )
        elif record.lsn < lsn or record.state == "rebuilding":
            # A rebuilding follower's store has lost what it had applied.
            found.append(_why(lsn, record))
    return tuple(found)


def _why(lsn: LSN, record: FollowerRecord) -> FollowerLag:
    name, at = record.follower, f"at {record.lsn}, with a lag of {size(max(0, lsn - record.lsn))}"
    if not record.lsn:
        at = "with nothing applied yet"
    if record.state == "halted":
        why = f"has halted {at}: {record.what}"
        return FollowerLag(name, why, record.hint, Exit.CONFIG, hopeless=True, record=record)
    if not record.runs:
        why = f"is not running, {at}; its last report is {record.age_seconds:.0f} s old"
        hint = f"cdc follow --followers {name}"
        return FollowerLag(name, why, hint, Exit.UNAVAILABLE, hopeless=False, record=record)
    why = f"is {record.state.replace('_', ' ')}, {at}" + (f": {record.what}" * bool(record.what))
    hint = record.hint or "wait for longer, or see `cdc status` for its lag"
    return FollowerLag(name, why, hint, Exit.TEMPORARY, hopeless=False, record=record)


def _error(lsn: LSN, late: Sequence[FollowerLag], seconds: float) -> LagError:
    reasons = "; ".join(f"{each.follower} {each.why}" for each in late)
    worst = max(late, key=lambda each: each.exit_code)
    error = LagError(f"not applied up to {lsn} after {seconds:.1f} s: {reasons}", hint=worst.hint)
    error.exit_code = worst.exit_code
    error.lagging = tuple(late)
    return error


def _given(given: Token | LSN | str) -> Token | LSN:
    if not isinstance(given, str):
        return given
    if "@" in given:
        return Token.parse(given)
    try:
        return LSN.parse(given)
    except ValueError as error:
        raise ConfigError(str(error), hint="an LSN is written as Postgres does: 0/16B3748") from (
            error
        )
