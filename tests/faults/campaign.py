"""A campaign: random faults on every boundary, under load, and one comparison at the end.

Two daemons reach Postgres and Kafka through proxies. A fault may come before recovery from the
previous one has ended: two times in three the campaign does not wait for that. The seed determines
the load, the kinds of faults and the pauses; the exact moments depend on the machine.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import psycopg

from tests.faults.crew import Crew
from tests.faults.injuries import FAULTS, HEAVY, Ward
from tests.fixtures.daemon import wait_until
from tests.fixtures.load import TABLES, Load
from tests.fixtures.shared import KAFKA_SETTINGS
from tests.fixtures.witness import Witness

if TYPE_CHECKING:
    from cdc.playground.servers.stack import LocalStack
    from tests.fixtures.daemon import NewPipeline, PipelineUnderTest
    from tests.fixtures.proxy import Proxy

_BATCH: Final = {"max_events": 200, "max_wait_ms": 30}
# To notice a dead peer within seconds, not within a minute.
_WAL_SENDER_TIMEOUT: Final = "3s"
_KAFKA: Final = {
    "socket.timeout.ms": 3_000,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
}
_STEPS_PER_SECOND: Final = 150.0
_PAUSE_SECONDS: Final = (0.02, 0.35)
_REPORTED: Final = 100  # faults per line of progress


class Campaign:
    """`run` injects faults until there were `faults`; `report` compares the log with the source."""

    def __init__(
        self,
        new: NewPipeline,
        stack: LocalStack,
        new_proxy: Callable[[str, int], Proxy],
        *,
        seed: int,
        faults: int,
        show: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._chance = random.Random(f"{seed}/faults")
        self._seed = seed
        self._faults = faults
        self._report = show
        self._began = time.monotonic()
        self._first = [fault for _, fault in FAULTS] if faults >= 2 * len(FAULTS) else []
        self._chance.shuffle(self._first)
        self.counts: Counter[str] = Counter()
        self.pipeline: PipelineUnderTest = new(*TABLES, batch=_BATCH, log={"kafka": _KAFKA})
        database = self.pipeline.database
        database.execute(
            f"ALTER DATABASE {database.name} SET wal_sender_timeout = '{_WAL_SENDER_TIMEOUT}'"
        )
        self.witness = Witness(self.pipeline)
        proxies = self._between(stack, new_proxy)
        dsn = psycopg.conninfo.make_conninfo(
            database.dsn, host="127.0.0.1", port=proxies["postgres"].port
        )
        config = self.pipeline.write(
            "proxied.yaml",
            source__dsn=dsn,
            log__bootstrap_servers=f"127.0.0.1:{proxies['kafka'].port}",
        )
        self._crew = Crew(self.pipeline, config, self._chance)
        self._ward = Ward(self.pipeline, stack, self._crew, proxies, self._chance)

    def _between(
        self, stack: LocalStack, new_proxy: Callable[[str, int], Proxy]
    ) -> dict[str, Proxy]:
        """Route the daemons' connections through proxies, also those to advertised listeners."""
        postgres = stack["postgres"].port
        assert postgres is not None
        return {
            "postgres": new_proxy("127.0.0.1", postgres),
            "kafka": proxied_kafka(stack, new_proxy),
        }

    def run(self) -> None:
        with Load(
            self.pipeline.database.dsn, self._seed, steps_per_second=_STEPS_PER_SECOND
        ) as load:
            self._crew.recovered()
            self._crew.failpoints = True
            while self.total < self._faults:
                self._one()
            self._crew.quiesce()
            wait_until(lambda: load.commits > 50, "no load")
            self._crew.recovered()

    @property
    def total(self) -> int:
        return self.counts.total() + self._crew.died.total()

    def _one(self) -> None:
        """Inject one fault and, at times, wait until the pipeline has recovered."""
        time.sleep(self._chance.uniform(*_PAUSE_SECONDS))
        reported = self.total // _REPORTED
        kind = self._next()(self._ward)
        self.counts[kind] += 1
        self._crew.look()
        if kind in HEAVY or self._chance.random() < 1 / 3:
            self._crew.recovered()
        if self.total // _REPORTED > reported:
            self._report(self.line())

    def _next(self) -> Callable[[Ward], str]:
        """Return the next fault: each of them once, where there are enough, then by weight."""
        if self._first:
            return self._first.pop()
        return self._chance.choices([f for _, f in FAULTS], [weight for weight, _ in FAULTS])[0]

    def line(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in self.kinds.most_common())
        return f"{self.total} faults in {time.monotonic() - self._began:.0f} s: {kinds}"

    @property
    def kinds(self) -> Counter[str]:
        return self.counts + self._crew.died

    def report(self) -> dict[str, Any]:
        """Compare the log with the source; return the campaign's figures."""
        proof = self.witness.check()
        difference = self.witness.difference()
        return {
            "faults": self.total,
            "kinds": dict(self.kinds.most_common()),
            "seed": self._seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "events": proof.events,
            "rows": proof.rows,
            "lost": difference.lost,
            "duplicate": difference.duplicate,
            "reordered": difference.reordered,
        }


def proxied_kafka(stack: LocalStack, new_proxy: Callable[[str, int], Proxy]) -> Proxy:
    """Add a listener that the broker advertises with a proxy's port, and return that proxy."""
    from cdc.playground.servers import ports  # noqa: PLC0415 - only a campaign needs one

    kafka = stack["kafka"]
    broker, controller = kafka.state.ports
    own = ports.choose({broker, controller})
    proxy = new_proxy("127.0.0.1", own)
    names = {"PLAINTEXT": broker, "DAEMON": own}
    reported = {"PLAINTEXT": broker, "DAEMON": proxy.port}
    settings = {
        **KAFKA_SETTINGS,
        "listeners": ",".join(
            [f"{name}://127.0.0.1:{port}" for name, port in names.items()]
            + [f"CONTROLLER://127.0.0.1:{controller}"]
        ),
        "advertised.listeners": ",".join(
            f"{name}://127.0.0.1:{port}" for name, port in reported.items()
        ),
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,DAEMON:PLAINTEXT"
        ),
    }
    stack.up(["kafka"], settings={"kafka": settings})
    return proxy
