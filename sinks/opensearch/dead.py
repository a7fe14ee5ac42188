"""Dead letters: complete documents that OpenSearch refuses, in `<prefix>-dead`.

A refused document neither stops the follower nor is lost. It is stored with the reason in an index
whose mapping accepts any document; and because the previous version is no longer what the database
has, the document is deleted from the table's index, at the refused seq. When a newer version of the
key is accepted, or the row is deleted, the dead letter is deleted. Dead letters have their seq as
external version, like all documents.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from lockstep.sinks.opensearch.bulk import Action, Refused, send
from lockstep.sinks.opensearch.client import Shards, refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from lockstep.sinks.opensearch.client import OpenSearchClient

log: Final = logging.getLogger("lockstep.sinks.opensearch.sink")

# How many dead letters a page has when they are listed.
_PAGE: Final = 1_000
_MISSING: Final = (404,)
_MAPPING: Final = {
    "dynamic": False,
    "properties": {
        **{name: {"type": "keyword"} for name in ("follower", "table", "index", "id", "error")},
        **{name: {"type": "long"} for name in ("generation", "seq", "bytes")},
        "reason": {"type": "text"},
        "refused_at": {"type": "date", "format": "epoch_millis"},
        # The document as text, so that this index accepts any content.
        "document": {"type": "keyword", "index": False, "doc_values": False},
    },
}


class LetterOwner(NamedTuple):
    """The owner of dead letters: a table of one generation."""

    generation: int
    table: str


class _Letter(msgspec.Struct):
    generation: int
    table: str
    id: str
    seq: int


class _LetterHit(msgspec.Struct):
    source: _Letter = msgspec.field(name="_source")
    sort: list[Any] = []


class _Text(msgspec.Struct):
    document: str | None


class _LetterHits(msgspec.Struct):
    hits: list[_LetterHit]


class _LetterPage(msgspec.Struct):
    hits: _LetterHits
    shards: Shards = msgspec.field(name="_shards")


_decode_text: Final = msgspec.json.Decoder(_Text).decode
_decode_page: Final = msgspec.json.Decoder(_LetterPage).decode


class DeadLetterIndex:
    """The dead letters of a follower, by owner and `_id`."""

    def __init__(self, client: OpenSearchClient, alias: str, follower: str) -> None:
        self._client, self._alias, self._follower = client, alias, follower
        self._known: defaultdict[LetterOwner, dict[bytes, int]] = defaultdict(dict)

    def of(self, owner: LetterOwner) -> Mapping[bytes, int]:
        """Return the seqs of a owner's dead letters, by `_id` as JSON."""
        return self._known[owner]

    def clear(self) -> None:
        self._known.clear()

    def load(self) -> None:
        """Load all dead letters; before that, only this copy's own are known."""
        self.clear()
        for letter in self._stored():
            owner = LetterOwner(letter.generation, letter.table)
            self._known[owner][msgspec.json.encode(letter.id)] = letter.seq

    def put(self, owner: LetterOwner, index: str, refused: Sequence[Refused]) -> None:
        """Store refused documents; a newer dead letter of the same row is kept instead."""
        self._prepare()
        names = {self._name(owner, each.action.id): each.action for each in refused}
        outcome = send(self._client, self._alias, [self._letter(owner, index, r) for r in refused])
        # What an attempt before has stored, with the same seq, is there.
        late = {each.id for each, there in outcome.stale if there > each.version}
        # Larger than a request may be: stored without the document, which the log still has.
        unfit = {each.action.id for each in outcome.refused}
        shorter = [self._letter(owner, index, each, complete=False) for each in refused]
        outcome = send(self._client, self._alias, [each for each in shorter if each.id in unfit])
        late |= {each.id for each, there in outcome.stale if there > each.version}
        for each in outcome.refused:
            raise refusal(400, each.why, f"a dead letter in {self._alias}")
        self._refresh()
        for name in names.keys() - late:
            self._known[owner][names[name].id] = names[name].version
        log.warning(
            "%d documents of %s were refused and are in %s: %s",
            *(len(refused), owner.table, self._alias),
            ", ".join(sorted({each.why.type for each in refused})),
        )

    def delete(self, owner: LetterOwner, versions: Iterable[tuple[bytes, int]]) -> None:
        """Delete the dead letters of these ids up to these versions."""
        known = self._known[owner]
        stored = {
            id_: version for id_, version in versions if known.get(id_, version + 1) <= version
        }
        if stored:
            names = ((self._name(owner, id_), version) for id_, version in stored.items())
            actions = [Action(name, version, None, equal=True) for name, version in names]
            send(self._client, self._alias, actions)
            self._refresh()
        for id_ in stored:
            del known[id_]

    def documents(self, owner: LetterOwner, ids: Iterable[bytes]) -> Mapping[bytes, bytes]:
        """Return the refused documents of those ids that have dead letters."""
        names = {self._name(owner, id_): id_ for id_ in ids if id_ in self._known[owner]}
        if not names:
            return {}
        letters = {}
        for each in self._client.get_all(self._alias, b"[%b]" % b",".join(names)):
            if each.is_there(f"an item of /{self._alias}/_mget"):
                text = _decode_text(each.source).document
                if text is not None:
                    letters[names[msgspec.json.encode(each.id)]] = text.encode()
        return letters

    def _prepare(self) -> None:
        if self._client.call("GET", f"/_alias/{self._alias}", fine=_MISSING).status in _MISSING:
            settings = {"number_of_shards": 1, "auto_expand_replicas": "0-1"}
            self._client.create_index(f"{self._alias}-1", settings, _MAPPING, self._alias)

    def _refresh(self) -> None:
        """Make dead letters visible to searches."""
        self._client.call("POST", f"/{self._alias}/_refresh")

    def _stored(self) -> Iterable[_Letter]:
        body: dict[str, Any] = {
            "query": {"term": {"follower": self._follower}},
            "size": _PAGE,
            "_source": ["generation", "table", "id", "seq"],
            "sort": ["generation", "table", "id"],
        }
        while True:
            answer = self._client.call("POST", f"/{self._alias}/_search", body, fine=_MISSING)
            if answer.status in _MISSING:
                return
            page = _decode_page(answer.body)
            page.shards.expect_all(f"a search of {self._alias}")
            hits = page.hits.hits
            yield from (hit.source for hit in hits)
            if len(hits) < _PAGE:
                return
            body["search_after"] = hits[-1].sort

    def _letter(
        self, owner: LetterOwner, index: str, refused: Refused, *, complete: bool = True
    ) -> Action:
        action, why = refused
        document = action.document or b""
        text = msgspec.json.encode(
            {
                "follower": self._follower,
                "generation": owner.generation,
                "table": owner.table,
                "index": index,
                "id": msgspec.json.decode(action.id),
                "seq": action.version,
                "error": why.type,
                "reason": why.text() if complete else why.type,
                "refused_at": int(time.time() * 1000),
                "bytes": len(document),
                "document": document.decode() if complete else None,
            }
        )
        return Action(self._name(owner, action.id), action.version, text)

    def _name(self, owner: LetterOwner, id_: bytes) -> bytes:
        parts = [self._follower, *owner, msgspec.json.decode(id_)]
        return b'"%b"' % hashlib.sha256(msgspec.json.encode(parts)).hexdigest().encode()
