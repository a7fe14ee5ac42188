"""Which addresses a webhook may be sent to: public ones, and networks that are allowed by name.

A URL's host is looked up once for each connection, its addresses are judged, and the connection is
made to the address that was judged: an answer that changes in between has no effect.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from cdc.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Prefixes in which an IPv4 address is embedded that a gateway may connect to (RFC 6052, RFC 3056).
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR: Final = ipaddress.IPv6Network("2002::/16")


def networks(allowed: Iterable[str]) -> tuple[Network, ...]:
    """Return networks written like 10.0.0.0/8; raise ConfigError for another text."""
    found = []
    for each in allowed:
        try:
            found.append(ipaddress.ip_network(each))
        except ValueError as error:
            raise ConfigError(
                f"{each} in a webhook's `allow` is no network",
                hint="write it like 10.1.2.0/24, or one address like 10.1.2.3",
            ) from error
    return tuple(found)


def may_reach(address: Address, allowed: Sequence[Network], *, public: bool = True) -> bool:
    """Return whether an address is in an allowed network or, unless not `public`, a public one."""
    inner = _embedded(address)
    if any(inner in network for network in allowed):
        return True
    return public and inner.is_global and not inner.is_multicast and not inner.is_reserved


def resolve(host: str, port: int, allowed: Sequence[Network], *, public: bool = True) -> str:
    """Return an address of a host that may be reached. Blocks.

    Raises ConfigError if it has none, UnavailableError if the host is not found.
    """
    try:
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(
            f"the host {host} is not found", hint="check the webhook's url, and DNS"
        ) from error
    found = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    for address in found:
        if may_reach(address, allowed, public=public):
            return str(address)
    what = "are not public" if public else "are in no network that may be sent to without TLS"
    raise ConfigError(
        f"{host} has only addresses that {what}, such as {found[0]}",
        hint="if the webhook's receiver is there, list its network in the webhook's `allow`",
    )


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address stands for, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if address in _SIX_TO_FOUR and address.sixtofour is not None:
            return address.sixtofour
    return address
