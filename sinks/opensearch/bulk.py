"""Bulk requests: send changes of distinct keys, and return each one's outcome.

Rows are sent as raw bytes. Every change has its seq as an external version, so OpenSearch itself
drops late and repeated changes: 409 is success. Only items that it temporarily rejects for load are
sent again; those that it refuses permanently are returned with the reason.
"""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from cdc.errors import InvariantError
from lockstep.sinks.opensearch.client import Reason, reason_of, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from lockstep.sinks.opensearch.client import OpenSearchClient

# A request of a few megabytes costs the server less per document than smaller ones, and larger ones
# are no cheaper; enough concurrent requests to keep it busy while an answer is read.
_BYTES: Final = 3_000_000
_ITEMS: Final = 2_000
_AT_ONCE: Final = 2
# How many seconds items rejected for load are retried here; then the follower backs off.
PATIENCE_SECONDS: Final = 30.0
FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 5.0

_PASSING: Final = frozenset([429, 502, 503, 504])
_TOO_LARGE: Final = 413
_STALE: Final = 409
_CURRENT: Final = re.compile(r"current version \[(\d+)\]")


class Action(NamedTuple):
    """A document with an id, or its deletion, at a version."""

    id: bytes  # a JSON string
    version: int
    document: bytes | None
    equal: bool = False  # whether it also applies to a document of the same version

    @property
    def size(self) -> int:
        return len(self.id) + len(self.document or b"")

    def lines(self) -> bytes:
        kind = b"external_gte" if self.equal else b"external"
        head = b'{"%b":{"_id":%b,"version":%d,"version_type":"%b"}}\n'
        if self.document is None:
            return head % (b"delete", self.id, self.version, kind)
        return head % (b"index", self.id, self.version, kind) + self.document + b"\n"


class Refused(NamedTuple):
    """A document that OpenSearch permanently refuses."""

    action: Action
    why: Reason


class BulkOutcome(NamedTuple):
    """The outcome of actions: how many were applied, and the others."""

    applied: int
    stale: list[tuple[Action, int]]  # each with the stored version, 0 if it is not reported
    refused: list[Refused]


class _Item(msgspec.Struct):
    status: int
    error: Reason | None = None


class _Answer(msgspec.Struct):
    errors: bool
    items: list[dict[str, _Item]] = []


_ANSWER: Final = msgspec.json.Decoder(_Answer)


def send(
    client: OpenSearchClient, write_alias: str, actions: Iterable[Action], *, refresh: bool = False
) -> BulkOutcome:
    """Apply actions of distinct ids through the alias `write_alias`, several requests at a time."""
    parts = list(_parts(actions))
    if len(parts) <= 1:
        return _joined(_send_all(client, write_alias, part, refresh=refresh) for part in parts)
    with ThreadPoolExecutor(min(_AT_ONCE, len(parts))) as pool:
        return _joined(
            pool.map(lambda part: _send_all(client, write_alias, part, refresh=refresh), parts)
        )


def _parts(actions: Iterable[Action]) -> Iterator[list[Action]]:
    part, size = list[Action](), 0
    for action in actions:
        if part and (size + action.size > _BYTES or len(part) == _ITEMS):
            yield part
            part, size = [], 0
        part.append(action)
        size += action.size
    if part:
        yield part


def _joined(outcomes: Iterable[BulkOutcome]) -> BulkOutcome:
    applied, stale, refused = 0, list[tuple[Action, int]](), list[Refused]()
    for each in outcomes:
        applied += each.applied
        stale += each.stale
        refused += each.refused
    return BulkOutcome(applied, stale, refused)


def _send_all(
    client: OpenSearchClient, write_alias: str, part: list[Action], *, refresh: bool
) -> BulkOutcome:
    """Retry until every action is applied, stale or refused."""
    outcomes = list[BulkOutcome]()
    pause, patience = FIRST_PAUSE_SECONDS, time.monotonic() + PATIENCE_SECONDS
    while part:
        outcome, again, why = _once(client, write_alias, part, refresh=refresh)
        outcomes.append(outcome)
        part = again
        if part:
            if time.monotonic() > patience:
                raise refusal(429, why, f"{len(part)} items of /{write_alias}/_bulk")
            time.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311 - apart from other writers
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return _joined(outcomes)


def _once(
    client: OpenSearchClient, write_alias: str, part: list[Action], *, refresh: bool
) -> tuple[BulkOutcome, list[Action], Reason]:
    """Send one request; return its outcome, and the actions to send again, with a reason."""
    answer = client.call(
        "POST",
        f"/{write_alias}/_bulk",
        b"".join([action.lines() for action in part]),
        fine=(*_PASSING, _TOO_LARGE),
        require_alias="true",
        refresh="true" if refresh else "false",
        filter_path="errors,items.*.status,items.*.error",
    )
    if answer.status in _PASSING:
        why = reason_of(answer.body)
        if why.type == "cluster_block_exception":
            raise refusal(answer.status, why, f"/{write_alias}/_bulk")
        return BulkOutcome(0, [], []), part, why
    if answer.status == _TOO_LARGE:
        return _smaller(client, write_alias, part, refresh=refresh)
    answered = _ANSWER.decode(answer.body)
    if not answered.errors:
        return BulkOutcome(len(part), [], []), [], Reason()
    if len(answered.items) != len(part):
        raise InvariantError(
            f"/{write_alias}/_bulk answers {len(answered.items)} of {len(part)} items"
        )
    items = [next(iter(item.values())) for item in answered.items]
    return _sorted(write_alias, part, items)


def _smaller(
    client: OpenSearchClient, write_alias: str, part: list[Action], *, refresh: bool
) -> tuple[BulkOutcome, list[Action], Reason]:
    """Send each half separately; refuse a single document that is too large."""
    why = Reason("content_too_long", "larger than http.max_content_length, or a proxy's limit")
    if len(part) == 1:
        return BulkOutcome(0, [], [Refused(part[0], why)]), [], why
    half = len(part) // 2
    halves = (part[:half], part[half:])
    return (
        _joined(_send_all(client, write_alias, each, refresh=refresh) for each in halves),
        [],
        why,
    )


def _sorted(
    write_alias: str, part: Sequence[Action], items: Sequence[_Item]
) -> tuple[BulkOutcome, list[Action], Reason]:
    outcome, again, last = BulkOutcome(0, [], []), list[Action](), Reason()
    applied = 0
    for action, item in zip(part, items, strict=True):
        why = item.error
        if why is None:  # also a delete of a missing document: its version is stored
            applied += 1
        elif item.status == _STALE:
            found = _CURRENT.search(why.reason or "")
            outcome.stale.append((action, int(found[1]) if found else 0))
        elif item.status in _PASSING and why.type != "cluster_block_exception":
            again.append(action)
            last = why
        elif _is_the_documents(item.status, why):
            outcome.refused.append(Refused(action, why))
        else:
            raise refusal(item.status, why, f"an item of /{write_alias}/_bulk")
    return outcome._replace(applied=applied), again, last


def _is_the_documents(status: int, why: Reason) -> bool:
    """Return whether OpenSearch refuses this document only, and other documents would pass."""
    return status in {400, _TOO_LARGE} and "maximum shards open" not in (why.reason or "")
