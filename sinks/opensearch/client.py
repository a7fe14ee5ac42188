"""The client of OpenSearch: send a request, return the answer's bytes, translate errors.

Bodies are bytes: rows are already JSON, and answers are decoded by type where they are used.
Nothing is retried here. Temporary errors are UnavailableError, errors that need a person have a
hint; no error shows row values, which OpenSearch's own reasons do.

https://docs.opensearch.org/2.19/api-reference/
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final, NamedTuple

import msgspec
from opensearchpy import OpenSearch
from opensearchpy.exceptions import (
    ConnectionError as NoConnection,
)
from opensearchpy.exceptions import (
    ConnectionTimeout,
    OpenSearchException,
    SSLError,
    TransportError,
)
from opensearchpy.serializer import JSONSerializer

from cdc.errors import (
    CDCError,
    ConfigError,
    InvariantError,
    PermissionDeniedError,
    StoreLostError,
    UnavailableError,
)

# In seconds. A server that needs longer for a bulk request is in trouble.
_PATIENCE_SECONDS: Final = 60.0
_CONNECTIONS: Final = 4
_NDJSON: Final = "application/x-ndjson"
_JSON: Final = "application/json"
# It logs every request at INFO and every refusal, with the document in it, at WARNING.
logging.getLogger("opensearch").setLevel(logging.CRITICAL)


class IndexAnswer(NamedTuple):
    """An accepted status, and the body."""

    status: int  # 200 stands for every 2xx
    body: str


class _Bytes(JSONSerializer):
    """Passes bodies through unchanged."""

    def loads(self, s: str) -> Any:  # noqa: ANN401 - the base's
        return s

    def dumps(self, data: Any) -> Any:  # noqa: ANN401 - the base's
        return data


class OpenSearchClient:
    """Connections to one cluster, opened by the first request; thread-safe."""

    def __init__(self, url: str, user: str | None, password: str | None, ca: str | None) -> None:
        given: dict[str, Any] = {"ca_certs": ca} if ca is not None else {}
        if user is not None:
            given["http_auth"] = (user, password or "")
        # The URL for errors, which go into logs and topics: without user and password.
        self._shown = re.sub(r"//.*@", "//", url)
        try:
            self._client = OpenSearch(
                url,
                timeout=_PATIENCE_SECONDS,
                max_retries=0,
                retry_on_timeout=False,
                pool_maxsize=_CONNECTIONS,
                serializer=_Bytes(),
                ssl_show_warn=False,
                **given,
            )
        except ValueError:  # its text shows a part of the URL
            raise ConfigError(
                "the url of a follower in OpenSearch is not a URL",
                hint="as https://host:9200; in a user or password `/`, `?`, `#` and `@` are"
                " written as %2F, %3F, %23 and %40, or set `user` and `password` instead",
            ) from None

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        fine: tuple[int, ...] = (),
        **parameters: str,
    ) -> IndexAnswer:
        """Return the answer if its status is 2xx or `fine`; raise otherwise.

        A body of bytes is sent unchanged, as lines of JSON; any other as JSON.
        """
        kind = _NDJSON if isinstance(body, bytes) else _JSON
        raw = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        try:
            text = self._client.transport.perform_request(
                method, path, params=parameters, body=raw, headers={"content-type": kind}
            )
        except TransportError as error:
            status = error.status_code
            if isinstance(status, int) and status in fine:
                return IndexAnswer(status, _body(error))
            raise self._translated(error, f"{method} {path}") from error
        except OpenSearchException as error:
            raise InvariantError(
                f"the client of OpenSearch raised {type(error).__name__}"
            ) from error
        return IndexAnswer(200, text or "")

    def create_index(self, name: str, settings: object, mappings: object, *aliases: str) -> None:
        """Create an index with its aliases in one request, unless it exists."""
        body = {
            "settings": settings,
            "mappings": mappings,
            "aliases": {alias: {} for alias in aliases},
        }
        answer = self.call("PUT", f"/{name}", body, fine=(400,))
        if answer.status == 400:  # noqa: PLR2004
            why = reason_of(answer.body)
            if why.type != "resource_already_exists_exception":
                raise refusal(400, why, f"the index {name}")

    def get_all(self, alias: str, ids: bytes) -> list[Got]:
        """Return the results for several `_id`s, given as a JSON array."""
        answer = self.call("POST", f"/{alias}/_mget", msgspec.Raw(b'{"ids":%b}' % ids))
        return _decode_gots(answer.body).docs

    def close(self) -> None:
        self._client.close()

    def _translated(self, error: TransportError, request: str) -> CDCError:
        if isinstance(error, SSLError):
            return ConfigError(
                f"no TLS connection to OpenSearch at {self._shown}: {_cause(error)}",
                hint="ca_file must hold the authority that signed its certificate, and the URL "
                "the name that the certificate is for",
            )
        if isinstance(error, ConnectionTimeout):
            return UnavailableError(
                f"OpenSearch at {self._shown} has not answered {request} "
                f"within {_PATIENCE_SECONDS:.0f} s",
                hint="see whether its nodes are overloaded or collecting garbage",
            )
        if isinstance(error, NoConnection):
            return UnavailableError(
                f"OpenSearch at {self._shown} can't be reached: {_cause(error)}",
                hint="start it, or correct the follower's url",
            )
        assert isinstance(error.status_code, int)
        return refusal(error.status_code, reason_of(_body(error)), request)


class Reason(msgspec.Struct, frozen=True):
    """Why a request or an item of one was refused."""

    type: str = ""
    reason: str | None = None
    caused_by: Reason | None = None

    def text(self) -> str:
        """Return the complete reason; it may show the document's values."""
        below = f": {self.caused_by.text()}" if self.caused_by else ""
        return f"{self.type}: {self.reason}{below}"


class Got(msgspec.Struct):
    """One of several documents requested by `_id`.

    An answer with status 200 may report that some could not be read, for example while a shard
    recovers.
    """

    id: str = msgspec.field(name="_id")
    version: int = msgspec.field(name="_version", default=0)
    source: msgspec.Raw = msgspec.field(name="_source", default=msgspec.Raw())
    found: bool | None = None
    error: Reason | None = None

    def is_there(self, what: str) -> bool:
        """Return whether there is such a document; raise if it is not known."""
        if self.found is None:
            why = self.error or Reason("an item has neither `found` nor `error`")
            status = 404 if why.type == "index_not_found_exception" else 503
            raise refusal(status, why, what)
        return self.found


class _Gots(msgspec.Struct):
    docs: list[Got]


class Shards(msgspec.Struct):
    """On how many shards a request had to run, and on how many it failed."""

    total: int
    failed: int

    def expect_all(self, what: str) -> None:
        """Raise unless all shards succeeded: some may have failed even with status 200."""
        if self.failed:
            why = Reason("shards", f"{self.failed} of {self.total} shards failed")
            raise refusal(503, why, what)


class _Refused(msgspec.Struct):
    error: Reason | str = ""


_decode_gots: Final = msgspec.json.Decoder(_Gots).decode
_decode_refused: Final = msgspec.json.Decoder(_Refused).decode


def reason_of(body: str) -> Reason:
    """Return the reason in a refusal's body; an empty one if it is not JSON, as from a proxy."""
    try:
        error = _decode_refused(body).error
    except msgspec.MsgspecError:
        return Reason()
    return error if isinstance(error, Reason) else Reason(reason=error)


def refusal(status: int, why: Reason, what: str) -> CDCError:  # noqa: PLR0911 - one a row
    """Return the error for a status; `what` names the request."""
    text = f"OpenSearch refuses {what}: {status} {why.type}".rstrip()
    if why.type == "cluster_block_exception":
        return _blocked(why, what)
    if status == 401:  # noqa: PLR2004 - HTTP's numbers are their own names, here and below
        return PermissionDeniedError(
            f"OpenSearch refuses the user or the password: {what}",
            hint="set the follower's user and password",
        )
    if status == 403:  # noqa: PLR2004
        return PermissionDeniedError(
            text, hint="give the follower's user the rights that docs/FOLLOWERS.md lists"
        )
    if status == 404 and why.type in {"index_not_found_exception", "aliases_not_found_exception"}:  # noqa: PLR2004
        return StoreLostError(f"an index of the follower is missing: {why.reason}")
    if status == 413:  # noqa: PLR2004
        return ConfigError(text, hint="raise http.max_content_length of OpenSearch, or a proxy's")
    if status == 429 or status >= 500:  # noqa: PLR2004
        return UnavailableError(text, hint="OpenSearch is overloaded: wait, or add nodes")
    if "maximum shards open" in (why.reason or ""):
        return ConfigError(
            f"OpenSearch refuses {what}: {why.reason}",
            hint="delete indices, follow fewer tables, add nodes, or raise the cluster setting "
            "cluster.max_shards_per_node",
        )
    # For a request that creates an index the reason is about settings and mappings; for any other
    # it may quote a value.
    shown = f": {why.text()}" if what.startswith("the index ") else ""
    return ConfigError(
        f"{text}{shown}", hint="see the follower's settings and mappings in the configuration"
    )


def _blocked(why: Reason, what: str) -> CDCError:
    reason = why.reason or ""
    if "flood-stage" in reason:
        hint = "a node's disk is almost full: free some space, and OpenSearch lifts the block"
    else:
        hint = "it was blocked by a setting: remove index.blocks.* or cluster.blocks.*"
    return UnavailableError(f"OpenSearch refuses {what}: {reason}", hint=hint)


def _body(error: TransportError) -> str:
    return msgspec.json.encode(error.info).decode()  # the client has already parsed it


def _cause(error: TransportError) -> str:
    """Return the text of the network's error, which the client wraps twice."""
    cause = error.info if isinstance(error.info, Exception) else error
    inner = getattr(cause, "reason", None) or cause
    return type(inner).__name__ if not str(inner) else str(inner).rpartition(": ")[2]
