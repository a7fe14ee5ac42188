"""Which requests the console answers, and the headers of every answer. Pure ASGI, no I/O.

A browser on this machine also runs the pages of others. So a request must name the console in
`Host` (a name that was rebound to loopback is another one), come from no other page (`Origin`,
`Sec-Fetch-Site`), and carry the token where there is one. What changes something must be asked for
by the page: with its `Origin` and a header that no form can send. The page itself holds no data and
needs none: it asks for the token, and keeps it for the tab.

https://datatracker.ietf.org/doc/html/rfc9110#section-7.2, https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# No inline script or style, no other server, no frame around it, no form.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
# Requests that need the token: all that answer with anything of the pipeline.
DATA: Final = ("/api/", "/stream/")
# Requests that change something. A form of another site can send neither of these headers.
CHANGES: Final = ("/api/act",)
ASKED_BY_PAGE: Final = (b"x-lockstep-console", "1")
# A browser sends a tenth of it.
MOST_HEADER_BYTES: Final = 16_384
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Guard:
    """Answers in place of `app` what must not reach it, and adds the headers to every answer."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], token: str | None) -> None:
        """`hosts` are the names, without ports, by which the console may be called."""
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither WebSockets nor a lifespan

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
            await send(message)

        refused = self.refusal(scope["path"], scope["headers"])
        if refused is None:
            await self._app(scope, receive, answer)
            return
        status, why = refused
        headers = [(b"content-type", b"application/json")]
        if status == 401:  # noqa: PLR2004 - as in the RFC
            headers.append((b"www-authenticate", b"Bearer"))
        await answer({"type": "http.response.start", "status": status, "headers": headers})
        await answer({"type": "http.response.body", "body": orjson.dumps({"error": why})})

    def refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Return status and reason where a request is refused; the reason repeats nothing of it."""
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            return 431, "the headers are too large"
        hosts, origins = _all(headers, b"host"), _all(headers, b"origin")
        if len(hosts) != 1 or name_of(hosts[0]) not in self._hosts:
            return 421, "this is not a name of the console; `cdc console --host NAME` adds one"
        if any(urlsplit(origin).netloc.lower() != hosts[0].lower() for origin in origins):
            return 403, "a page of another origin asks"
        sites = _all(headers, b"sec-fetch-site")
        data = path.startswith(DATA)
        if data and any(site not in {"same-origin", "none"} for site in sites):
            return 403, "a page of another site asks"
        if path.startswith(CHANGES) and not _is_asked_by_page(headers):
            return 403, "only the console's own page asks for this"
        needed = data and self._token is not None and not self._is_authorized(headers)
        return (401, "the token is missing or wrong") if needed else None

    def _is_authorized(self, headers: list[tuple[bytes, bytes]]) -> bool:
        assert self._token is not None
        given = _all(headers, b"authorization")
        scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
        right = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return scheme.lower() == "bearer" and right


def _is_asked_by_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the console's page sent this; the origin is compared elsewhere."""
    return (
        bool(_all(headers, b"origin"))
        and _all(headers, b"sec-fetch-site") in ([], ["same-origin"])
        and _all(headers, ASKED_BY_PAGE[0]) == [ASKED_BY_PAGE[1]]
        and _all(headers, b"content-type") == ["application/json"]
    )


def name_of(host: str) -> str:
    """Return the name in a Host header, without its port: `[::1]:8600` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _all(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]
