"""Ports: free at the moment, and outside the range of later outgoing connections."""

from __future__ import annotations

import socket
from pathlib import Path

from cdc.playground.servers import ports


def test_a_chosen_port_can_be_bound_and_is_not_ephemeral() -> None:
    port = ports.choose()
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    assert port < low or low <= 20000
    assert ports.is_free(port)


def test_a_port_that_someone_listens_on_is_not_free() -> None:
    with socket.create_server((ports.LOOPBACK, 0)) as listener:
        assert not ports.is_free(listener.getsockname()[1])


def test_a_port_whose_last_connection_lingers_is_free() -> None:
    """A killed server's port is in TIME_WAIT and must be available to the same server again."""
    with socket.create_server((ports.LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        client = socket.create_connection((ports.LOOPBACK, port))
        accepted, _ = listener.accept()
        accepted.close()  # closing first leaves this side in TIME_WAIT
        client.close()
    assert ports.is_free(port)


def test_taken_ports_are_not_chosen_again() -> None:
    chosen: set[int] = set()
    for _ in range(50):
        chosen.add(ports.choose(chosen))
    assert len(chosen) == 50
