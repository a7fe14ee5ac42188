"""Which requests the console answers, and the headers of every answer. Pure ASGI.

A browser on this machine also runs the pages of others. So a request must name the console in
`Host` (a name that was rebound to loopback is another one), come from no other page (`Origin`,
`Sec-Fetch-Site`), and carry the token where there is one. What changes something must be asked for
by the page: with its `Origin` and a header that no form can send. The page itself holds no data and
needs none: it asks for the token, and keeps it for the tab.

A proxy that knows its users forwards a token that their issuer has signed. That token is verified;
a header with a name is no authority, since who reaches the console can send one. What takes long,
such as a stream, ends when its token does.

https://datatracker.ietf.org/doc/html/rfc9110#section-7.2, https://www.w3.org/TR/CSP3/
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import orjson

from cdc.console.tokens import TokenError, Viewer
from cdc.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cdc.console.issuer import Issuer

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
# Who asks, in the scope of a request.
VIEWER: Final = "lockstep.viewer"
_LAST_SECONDS: Final = 1.0


class Guard:
    """Answers in place of `app` what must not reach it, and adds the headers to every answer."""

    def __init__(
        self,
        app: ASGIApp,
        hosts: Collection[str],
        token: str | None,
        issuer: Issuer | None = None,
    ) -> None:
        """`hosts` are the names, without ports, by which the console may be called.

        Viewers need the `token`, or one of the `issuer`; with neither, none.
        """
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)
        self._token = token
        self._issuer = issuer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither WebSockets nor a lifespan
        answer = _Answer(send)
        path, headers = scope["path"], scope["headers"]
        refused = self.refusal(path, headers)
        viewer = Viewer("", acts=True)
        if refused is None and path.startswith(DATA):
            try:
                viewer = await self._viewer(headers)
            except TokenError as error:
                refused = error.status, str(error)
            except UnavailableError as error:
                refused = 503, f"{error.what}; {error.hint}"
        if refused is not None:
            await self._refuse(*refused, answer)
            return
        scope[VIEWER] = viewer
        if viewer.seconds is None:
            await self._app(scope, receive, answer)
            return
        await self._app(scope, _until(receive, viewer.seconds), answer)
        await answer.end()

    async def _refuse(self, status: int, why: str, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        if status == 401:  # noqa: PLR2004 - as in the RFC
            headers.append((b"www-authenticate", b"Bearer"))
        body = {"error": why, "by_proxy": self._issuer is not None}
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(body)})

    def refusal(self, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        """Return status and reason where a request is refused; the reason repeats nothing of it."""
        if sum(len(name) + len(value) for name, value in headers) > MOST_HEADER_BYTES:
            return 431, "the headers are too large"
        hosts, origins = _all(headers, b"host"), _all(headers, b"origin")
        if len(hosts) != 1 or name_of(hosts[0]) not in self._hosts:
            return 421, "this is not a name of the console; `cdc console --host NAME` adds one"
        if any(_host_of(origin) != hosts[0].lower() for origin in origins):
            return 403, "a page of another origin asks"
        sites = _all(headers, b"sec-fetch-site")
        if path.startswith(DATA) and any(site not in {"same-origin", "none"} for site in sites):
            return 403, "a page of another site asks"
        if path.startswith(CHANGES) and not _is_asked_by_page(headers):
            return 403, "only the console's own page asks for this"
        return None

    async def _viewer(self, headers: list[tuple[bytes, bytes]]) -> Viewer:
        """Return who asks; raise TokenError where that is not known and must be.

        Raises UnavailableError where a token can't be verified yet.
        """
        if self._token is not None and _is_token(headers, self._token):
            return Viewer("", acts=True)
        if self._issuer is not None:
            return await self._issuer.viewer(_all(headers, self._issuer.header))
        if self._token is not None:
            raise TokenError("the token is missing or wrong")
        return Viewer("", acts=True)


class _Answer:
    """Sends an answer with the headers of every answer."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_open = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *HEADERS]}
        self._is_open = message["type"] == "http.response.start" or message.get("more_body", False)
        await self._send(message)

    async def end(self) -> None:
        """End an answer that was not sent completely, as that of a stream."""
        if self._is_open:
            with suppress(TimeoutError):  # the client reads nothing
                async with asyncio.timeout(_LAST_SECONDS):
                    await self({"type": "http.response.body", "body": b"", "more_body": False})


def _until(receive: Receive, seconds: float) -> Receive:
    """Return `receive`, by which the client leaves after that time."""
    until = asyncio.get_running_loop().time() + seconds

    async def limited() -> Message:
        try:
            async with asyncio.timeout_at(until):
                return await receive()
        except TimeoutError:
            return {"type": "http.disconnect"}

    return limited


def _is_token(headers: list[tuple[bytes, bytes]], wanted: str) -> bool:
    given = _all(headers, b"authorization")
    scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
    right = hmac.compare_digest(token.strip().encode(), wanted.encode())
    return scheme.lower() == "bearer" and right


def _is_asked_by_page(headers: list[tuple[bytes, bytes]]) -> bool:
    """Return whether the console's page sent this; the origin is compared elsewhere."""
    return (
        bool(_all(headers, b"origin"))
        and _all(headers, b"sec-fetch-site") in ([], ["same-origin"])
        and _all(headers, ASKED_BY_PAGE[0]) == [ASKED_BY_PAGE[1]]
        and _all(headers, b"content-type") == ["application/json"]
    )


def _host_of(origin: str) -> str | None:
    """Return the host and port in an Origin header; None where it can't be parsed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def name_of(host: str) -> str:
    """Return the name in a Host header, without its port: `[::1]:8600` is `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _all(headers: list[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]
