"""The daemon as the demo's child, and the state that it reports."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final

import orjson

from cdc.playground.demo.child import DAEMON, Child

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.playground.servers.home import Home

_PROBE_SECONDS: Final = 0.5


class Daemon(Child):
    """One `cdc run`."""

    def __init__(self, home: Home, config_file: Path, config: Config) -> None:
        super().__init__(home, DAEMON, "run", "--config", str(config_file))
        self._ready_url = f"http://{config.http.listen}/readyz"

    def state(self) -> str:
        """Return the state that the daemon reports, in a word. Takes half a second at most."""
        if not self.running:
            return "down"
        try:
            with urllib.request.urlopen(self._ready_url, timeout=_PROBE_SECONDS) as answer:  # noqa: S310 - http
                body = answer.read()
        except urllib.error.HTTPError as error:
            body = error.read()
        except OSError:
            return "starting"
        try:
            return str(orjson.loads(body)["state"])
        except (ValueError, KeyError):
            return "unknown"
