"""Kill -9 daemon, broker, Postgres and followers, one after the other, while changes flow.

Each round takes them in another order. The next kill waits until the previous one has been
recovered from, and the time of each recovery is shown. Servers are started again after a moment;
daemon and followers are restarted by their supervisor. The times of kills follow from the seed, and
from how fast the machine recovers.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final

from cdc.errors import CDCError
from cdc.playground.demo.background import DemoThread
from cdc.playground.demo.flow import Flow, Kill

if TYPE_CHECKING:
    from cdc.playground.demo.child import Child, DaemonChild, FollowersChild
    from cdc.playground.servers.stack import LocalStack

_FOLLOWERS: Final = "followers"
_SERVERS: Final = {"broker": "kafka", "Postgres": "postgres"}
_FIRST_SECONDS: Final = (2.0, 4.0)
_PAUSE_SECONDS: Final = (1.5, 4.0)
_DOWN_SECONDS: Final = (0.0, 1.0)
# A killed broker is admitted again when its session of a few seconds has expired; Spark takes
# fifteen seconds of a core to start, and minutes where ten other processes use the core. The wait
# is visible on the screen.
_PATIENCE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.1


class NotRecoveredError(CDCError):
    """Changes do not arrive again after a kill."""


class Chaos(DemoThread):
    """Kills until `over`; the thread ends when the last kill has been recovered from."""

    def __init__(
        self,
        stack: LocalStack,
        daemon: DaemonChild,
        followers: FollowersChild | None,
        flow: Flow,
        seed: int,
    ) -> None:
        super().__init__("chaos")
        self._stack = stack
        self._children: dict[str, Child] = {"daemon": daemon}
        if followers is not None:
            self._children[_FOLLOWERS] = followers
        self._flow = flow
        self._random = random.Random(f"{seed}/chaos")  # noqa: S311 - to be repeated, not secret

    def work(self) -> None:
        if self.over.wait(self._random.uniform(*_FIRST_SECONDS)):
            return
        while True:
            victims = [*self._children, *_SERVERS]
            for victim in self._random.sample(victims, len(victims)):
                self._kill(victim)
                if self.over.wait(self._random.uniform(*_PAUSE_SECONDS)):
                    return

    def _kill(self, victim: str) -> None:
        kill = Kill(victim, time.time(), followed=victim == _FOLLOWERS)
        server = _SERVERS.get(victim)
        if server is None:
            self._children[victim].kill()
        else:
            self._stack[server].kill()
        # Counted from when it is certainly dead: a change committed after that proves recovery.
        kill.at = time.time()
        self._flow.kills.append(kill)
        if server is not None:
            time.sleep(self._random.uniform(*_DOWN_SECONDS))
            self._stack.start(server)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while kill.recovered_seconds is None:
            if time.monotonic() > deadline:
                raise NotRecoveredError(
                    f"no change arrived within {_PATIENCE_SECONDS:.0f} s of killing the {victim}",
                    hint="see the logs of children and servers, in the demo's folder",
                )
            time.sleep(_POLL_SECONDS)
