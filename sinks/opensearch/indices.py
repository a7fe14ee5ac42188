"""The indices of one generation: create, fill from the previous one, check, show to readers.

An index is written through its own write alias, never by name, so that a write to a deleted index
fails instead of recreating it with guessed fields. All indices of a generation share another alias,
by which they are found. Readers use the table's alias: it moves from one index to the next in one
step with those of all other tables.

Documents become visible by the refresh of a commit and not before (`refresh_interval: -1`).
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cdc.errors import ConfigError, StoreLostError
from lockstep.sinks.opensearch.bulk import Action, Refused
from lockstep.sinks.opensearch.client import Got, OpenSearchClient, Reason, Shards, refusal
from lockstep.sinks.opensearch.mapping import Properties

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from lockstep.sinks.opensearch.record import Build, TableIndex

# How long OpenSearch remembers the version of a deleted document, in memory: no request of a writer
# that is presumed dead takes longer.
_GC_DELETES: Final = "2h"
_MISSING: Final = (404,)
# A field, its `exact`, and room for later columns.
_FIELDS_A_COLUMN: Final = 3
_FEWEST_FIELDS: Final = 1_000
# In bytes: the server limits a request's first line to 4 KiB.
_LINE_BYTES: Final = 3_000
_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 5.0
# How many documents a page has when a complete index is read, and how long the scroll is kept.
_PAGE: Final = 1_000
_SCROLL_KEPT: Final = "5m"
# How many rounds of excluding documents that the new fields refuse; each round finds some of them.
_MOST_ROUNDS: Final = 20


class _Task(msgspec.Struct):
    completed: bool
    response: _Copied | None = None
    error: Reason | None = None


class _Copied(msgspec.Struct):
    failures: list[_Failure] = []


class _Failure(msgspec.Struct):
    id: str
    status: int
    cause: Reason = Reason()


class IndexedDocument(msgspec.Struct):
    id: str = msgspec.field(name="_id")
    version: int = msgspec.field(name="_version", default=0)
    source: msgspec.Raw = msgspec.field(name="_source", default=msgspec.Raw())


class _Hits(msgspec.Struct):
    hits: list[IndexedDocument]


class _Page(msgspec.Struct):
    hits: _Hits
    shards: Shards = msgspec.field(name="_shards")
    scroll_id: str = msgspec.field(name="_scroll_id")


class _Refreshed(msgspec.Struct):
    shards: Shards = msgspec.field(name="_shards")


_decode_task: Final = msgspec.json.Decoder(_Task).decode
_decode_page: Final = msgspec.json.Decoder(_Page).decode
_decode_refreshed: Final = msgspec.json.Decoder(_Refreshed).decode


class Indices:
    """Requests about indices; the follower's record defines which must exist."""

    def __init__(
        self, client: OpenSearchClient, group: str, settings: Mapping[str, object]
    ) -> None:
        self._client, self._group = client, group
        self._settings = {f"index.{n.removeprefix('index.')}": v for n, v in _flat(settings)}
        if self._settings.get("index.translog.durability", "request") != "request":
            raise ConfigError(
                "index.translog.durability: async loses documents that were acknowledged",
                hint="remove it from the follower's settings: a frontier must hold for everything "
                "below it, also after a crash",
            )

    def name(self, generation: int) -> str:
        """Return the alias of all indices of a generation."""
        return f"{self._group}-g{generation}"

    def create(self, index: TableIndex, fields: Properties, *aliases: str) -> str:
        """Create an index unless it exists; return its uuid."""
        total = max(_FEWEST_FIELDS, _FIELDS_A_COLUMN * len(fields))
        settings = {
            "index.refresh_interval": "-1",
            "index.gc_deletes": _GC_DELETES,
            "index.mapping.total_fields.limit": total,
            **self._settings,
        }
        self._client.create_index(
            index.name, settings, _mapping(fields), index.write_alias, *aliases
        )
        return self._uuids(f"/{index.name}").get(index.name, "")

    def fields(self, index: TableIndex) -> Properties:
        """Return the fields with which an index was created, as they were written."""
        answer = self._client.call("GET", f"/{index.name}/_mapping")
        found = msgspec.json.decode(answer.body, type=dict[str, Any])
        meta = found[index.name]["mappings"].get("_meta", {})
        given = meta.get("lockstep", {}).get("properties", "{}")
        fields: Properties = msgspec.json.decode(given)
        return fields

    def add_fields(self, index: TableIndex, fields: Properties) -> None:
        """Add fields that no document has yet."""
        self._client.call("PUT", f"/{index.name}/_mapping", _mapping(fields))

    def present(self) -> Mapping[str, str]:
        """Return the indices of every generation, with the generation's number."""
        answer = self._client.call("GET", f"/_alias/{self._group}-g*", fine=_MISSING)
        if answer.status in _MISSING:
            return {}
        found = msgspec.json.decode(answer.body, type=dict[str, dict[str, dict[str, Any]]])
        ours = re.compile(re.escape(self._group) + r"-g(\d+)")
        return {
            index: match[1]
            for index, about in found.items()
            for alias in about["aliases"]
            if (match := ours.fullmatch(alias))
        }

    def check(self, build: Build) -> None:
        """Raise StoreLostError if an index is not the one that was created."""
        if not build.tables:
            return
        found = self._uuids(f"/{self._group}-g*")
        missing = {
            name: index.name
            for name, table in build.tables.items()
            for index in filter(None, (table.now, table.next))
            if index.uuid is not None and found.get(index.name) != index.uuid
        }
        if missing:
            name, index = next(iter(missing.items()))
            more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise StoreLostError(
                f"the index {index} of {name} is missing{more}", tables=frozenset(missing)
            )

    def _uuids(self, path: str) -> Mapping[str, str]:
        answer = self._client.call(
            "GET", f"{path}/_settings", fine=_MISSING, filter_path="*.settings.index.uuid"
        )
        if answer.status in _MISSING:
            return {}
        found = msgspec.json.decode(answer.body or "{}", type=dict[str, Any])
        return {index: about["settings"]["index"]["uuid"] for index, about in found.items()}

    def contents(self, index: TableIndex) -> Iterator[IndexedDocument]:
        """Yield every document of an index, with its version."""
        self.refresh([index.name])
        body = {"size": _PAGE, "sort": ["_doc"], "version": True}
        answer = self._client.call("POST", f"/{index.name}/_search", body, scroll=_SCROLL_KEPT)
        try:
            while True:
                page = _decode_page(answer.body)
                page.shards.expect_all(f"a search of {index.name}")
                if not page.hits.hits:
                    return
                yield from page.hits.hits
                body = {"scroll_id": page.scroll_id, "scroll": _SCROLL_KEPT}
                answer = self._client.call("POST", "/_search/scroll", body)
        finally:
            given = {"scroll_id": _decode_page(answer.body).scroll_id}
            self._client.call("DELETE", "/_search/scroll", given, fine=_MISSING)

    def refresh(self, names: Iterable[str]) -> None:
        """Make written documents visible to searches, in all indices at about the same time."""
        for some in _lines(names):
            answer = self._client.call("POST", f"/{some}/_refresh")
            _decode_refreshed(answer.body).shards.expect_all("_refresh")

    def show(self, moves: Iterable[tuple[str, str | None, Iterable[str]]]) -> None:
        """Add each alias to one index, or none, and remove it from others, in one request."""
        actions = [
            action
            for alias, to, others in moves
            for action in (
                *({"remove": {"index": each, "alias": alias}} for each in others if each != to),
                *([{"add": {"index": to, "alias": alias}}] if to else []),
            )
        ]
        if actions:
            self._client.call("POST", "/_aliases", {"actions": actions})

    def shown(self, aliases: Iterable[str]) -> Mapping[str, list[str]]:
        """Return the indices that have each of these aliases."""
        held: dict[str, list[str]] = {alias: [] for alias in aliases}
        for some in _lines(held):
            answer = self._client.call("GET", f"/_alias/{some}", fine=_MISSING)
            answered = msgspec.json.decode(answer.body, type=dict[str, Any])
            for index, found in answered.items():
                if isinstance(found, dict):  # not `error` and `status`
                    for alias in found["aliases"].keys() & held.keys():
                        held[alias].append(index)
        return held

    def delete(self, names: Iterable[str]) -> None:
        """Delete indices that the record does not name; another copy may have deleted them."""
        for some in _lines(names):
            self._client.call("DELETE", f"/{some}", fine=_MISSING, ignore_unavailable="true")

    # --- filling one from another ---

    def fill(self, old: TableIndex, new: TableIndex) -> Iterator[list[Refused]]:
        """Copy the documents with their versions; yield those that the new fields refuse.

        Refused documents are excluded, so that each is tried once. Existing documents stay
        unchanged.
        """
        self.refresh([old.name])
        excluded = list[str]()
        for _ in range(_MOST_ROUNDS):
            failures = self._copy(old, new, excluded).failures
            if not failures:
                return
            refused = [each for each in failures if each.status == 400]  # noqa: PLR2004
            for each in failures:
                if each not in refused:
                    raise refusal(each.status, each.cause, f"_reindex into {new.name}")
            excluded += [each.id for each in refused]
            yield self._refused(old, refused)
        raise ConfigError(
            f"the fields of {new.name} refuse {len(excluded)} documents of {old.name} and more",
            hint="the follower's `mappings` do not fit the table's values: correct them",
        )

    def _copy(self, old: TableIndex, new: TableIndex, excluded: list[str]) -> _Copied:
        query = (
            {"bool": {"must_not": {"ids": {"values": excluded}}}} if excluded else {"match_all": {}}
        )
        body = {
            "conflicts": "proceed",
            "source": {"index": old.name, "query": query},
            "dest": {"index": new.write_alias, "version_type": "external"},
        }
        answer = self._client.call(
            "POST", "/_reindex", body, wait_for_completion="false", require_alias="true"
        )
        task = msgspec.json.decode(answer.body, type=dict[str, str])["task"]
        pause = _PAUSE_SECONDS
        while True:
            answer = self._client.call("GET", f"/_tasks/{task}", fine=_MISSING)
            if answer.status in _MISSING:
                raise refusal(
                    503, Reason("task", "a node has left the cluster"), f"_reindex {new.name}"
                )
            task_state = _decode_task(answer.body)
            if task_state.completed:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if task_state.error is not None or task_state.response is None:
            raise refusal(503, task_state.error or Reason(), f"_reindex into {new.name}")
        return task_state.response

    def _refused(self, old: TableIndex, failures: list[_Failure]) -> list[Refused]:
        why = {msgspec.json.encode(each.id): each.cause for each in failures}
        found = {msgspec.json.encode(each.id): each for each in self.documents(old, list(why))}
        return [
            Refused(Action(id_, each.version, bytes(each.source)), why[id_])
            for id_, each in found.items()
        ]

    def documents(self, index: TableIndex, ids: list[bytes]) -> list[Got]:
        """Return the existing documents of some ids, visible to searches or not."""
        found = self._client.get_all(index.write_alias, b"[%b]" % b",".join(ids))
        return [each for each in found if each.is_there(f"an item of /{index.write_alias}/_mget")]


def _flat(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield settings by their full names, however they are nested, except those of analysis."""
    for name, value in settings.items():
        if isinstance(value, dict) and name.rpartition(".")[2] != "analysis":
            yield from ((f"{name}.{below}", each) for below, each in _flat(value))
        else:
            yield name, value


def _mapping(fields: Properties) -> dict[str, Any]:
    # The original fields, as text: the server returns them with its defaults.
    given = {"lockstep": {"properties": msgspec.json.encode(fields).decode()}}
    return {"dynamic": False, "_meta": given, "properties": fields}


def _lines(names: Iterable[str]) -> Iterator[str]:
    """Yield comma-separated names, as many as fit into a request's first line."""
    line = ""
    for name in names:
        if line and len(line) + len(name) > _LINE_BYTES:
            yield line
            line = ""
        line = f"{line},{name}" if line else name
    if line:
        yield line
