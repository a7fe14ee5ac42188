"""A monitor that cannot read says so, for as long as that lasts."""

from __future__ import annotations

import time
from contextlib import closing

from cdc.errors import PermissionDeniedError
from cdc.operate.monitor import Monitor
from tests.fixtures.daemon import wait_until


class Reading:
    """Reads a number, unless it is refused."""

    def __init__(self) -> None:
        self.refused = True
        self.is_closed = False

    def read(self) -> int:
        if self.refused:
            raise PermissionDeniedError("not allowed", hint="allow it")
        return 7

    def close(self) -> None:
        self.is_closed = True


def test_what_cannot_be_read_is_kept_with_its_error_until_it_is_read() -> None:
    reading = Reading()
    with closing(Monitor("webhooks", 0.01, reading, reading.read, 0)) as monitor:
        wait_until(lambda: monitor.unread, "it is not reported")
        assert monitor.unread is not None
        since = time.monotonic() - monitor.unread.seconds
        assert monitor.unread[:3] == ("webhooks", "not allowed", "allow it")
        reading.refused = False
        wait_until(lambda: monitor.newest == 7, "it is not read")
        wait_until(lambda: monitor.unread is None, "the error stays")
        reading.refused = True
        wait_until(lambda: monitor.unread, "it is not reported again")
        assert monitor.unread is not None
        assert time.monotonic() - monitor.unread.seconds > since
    wait_until(lambda: reading.is_closed, "its connections stay")


def test_what_nobody_expects_is_no_trouble() -> None:
    reading = Reading()
    with closing(Monitor("followers", 0.01, reading, reading.read, 0, expected=False)) as monitor:
        reading.refused = False
        wait_until(lambda: monitor.newest == 7, "it is not read")
        assert monitor.unread is None
