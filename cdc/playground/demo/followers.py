"""The followers as the demo's child: one `cdc follow` for all three; and their reports.

Delta mirrors are in the demo's folder. A table without a key can be followed by mirrors only.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cdc.errors import CDCError
from cdc.log.follower_reports import Readings
from cdc.playground.demo.child import FOLLOWERS, Child
from cdc.playground.demo.schema import KEYLESS, TABLES
from cdc.playground.servers.java import spark_home, system_java

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.playground.demo.flow import Flow
    from cdc.playground.servers.home import Home
    from cdc.playground.servers.stack import Endpoints

_READ_SECONDS: Final = 0.2


def settings(home: Home, ends: Endpoints) -> dict[str, Any]:
    """Return the section `followers` of the demo's configuration."""
    keyed = [f"public.{name}" for name in TABLES if name not in KEYLESS]
    return {
        "mirror": {"delta": {"path": str(home.data / "delta")}},
        "cache": {"tables": keyed, "redis": {"url": ends.redis_url}},
        "search": {"tables": keyed, "opensearch": {"url": ends.opensearch_url}},
    }


class Followers(Child):
    """One `cdc follow`."""

    def __init__(self, home: Home, config_file: Path) -> None:
        super().__init__(home, FOLLOWERS, "follow", "--config", str(config_file))
        if system_java() is None:
            self.env["JAVA_HOME"] = str(spark_home(home.run / "java"))


class Reader(threading.Thread):
    """Feeds the flow with the followers' reports; none where there are no followers."""

    def __init__(self, config: Config, flow: Flow) -> None:
        super().__init__(name="followers", daemon=True)
        self._config = config
        self._flow = flow
        self._over = threading.Event()

    def run(self) -> None:
        readings = Readings(self._config)
        while not self._over.is_set():
            try:
                readings.wait(_READ_SECONDS)
            except CDCError:
                # A killed broker comes back; the listener reports it when it does not.
                self._over.wait(_READ_SECONDS)
                continue
            with self._flow.lock:
                self._flow.note_followers(readings.newest, time.time())
        readings.close()

    def close(self) -> None:
        self._over.set()
        self.join(5)
