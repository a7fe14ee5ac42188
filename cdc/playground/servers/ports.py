"""Ports for servers: free on loopback, and still free when the server comes back after a kill.

They are below the kernel's ephemeral range. A port inside it may be taken, between a kill and the
restart, by any outgoing connection, and a fault test would fail by chance. Two stacks that choose
at the same time pick at random from thousands; a server whose port is taken gets another.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

from cdc.errors import LocalStackError

LOOPBACK: Final = "127.0.0.1"
_LOWEST: Final = 20000
_EPHEMERAL_DEFAULT: Final = 32768
_TRIES: Final = 200
# Not the shared generator: a seed, say in tests, would cause all stacks to choose the same ports.
_chance = random.SystemRandom()


def is_free(port: int) -> bool:
    """Return whether a server could listen there. A port in TIME_WAIT counts as free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose(taken: Collection[int] = ()) -> int:
    highest = max(_ephemeral_start(), _LOWEST + 1000)
    for _ in range(_TRIES):
        port = _chance.randrange(_LOWEST, highest)
        if port not in taken and is_free(port):
            return port
    raise LocalStackError(
        f"no free port on {LOOPBACK} between {_LOWEST} and {highest} in {_TRIES} tries",
        hint="see what listens (ss -ltn), and stop stacks that are not needed: cdc local down",
    )


def _ephemeral_start() -> int:
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    except OSError:
        return _EPHEMERAL_DEFAULT
    start = int(text.split()[0])
    return start if start > _LOWEST else _EPHEMERAL_DEFAULT
