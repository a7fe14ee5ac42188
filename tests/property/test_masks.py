"""A masked column's values are in no record, and everything else is as without the mask."""

from __future__ import annotations

import hmac
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from cdc.config import Mask
from cdc.config.patterns import NamePattern
from cdc.config.selection import ALL, TableSelection
from cdc.decode.messages import (
    Delete,
    Insert,
    KeyTuple,
    OldTuple,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Truncate,
    TupleData,
    Update,
)
from cdc.encode.encoder import Encoder
from cdc.encode.masks import column_mask
from cdc.encode.routes import TableRoute as Route
from cdc.keyring.ciphers import Ciphers
from cdc.log.records import SchemaRecord
from cdc.sequence.relation_request import RelationRequest
from cdc.source.lookups import TableFacts
from tests.property.reference import RowMessage
from tests.property.rows import Table, messages, tables
from tests.property.stream import (
    DATABASE,
    PARTITIONS,
    PREFIX,
    Published,
    Session,
    begin,
    frame,
    position,
)

HMAC_KEY = "a key of the tests' own"
Row = dict[str, Any] | None  # a key, before or after
FIXED = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3))


class Masking(Session):
    """A session with a selection."""

    def __init__(
        self, table: Table, selection: TableSelection, ciphers: Ciphers | None = None
    ) -> None:
        super().__init__(position(), {table.relation.relation_id: table.primary_key})
        self.selection = selection
        self.ciphers = ciphers

    def describe(self, relation: Relation) -> SchemaRecord:
        sequencer = self.sequencer
        facts = TableFacts(self.keys.get(relation.relation_id, ()), {})
        types, lsn = sequencer.types, sequencer.transaction_lsn
        request = RelationRequest(relation, facts, types, lsn, selection=self.selection)
        version, _ = self.relations.version(request, replaying=False)
        masks = [column_mask(self.selection, column.name) for column in version.columns]
        encoder = Encoder(version, DATABASE, PREFIX, PARTITIONS, masks, self.ciphers)
        route = Route(encoder, self.batch.topic(version.topic, encoder.partitions), self.dead)
        sequencer.describe(relation.relation_id, route)
        return version


def published(
    table: Table,
    rows: list[RowMessage],
    selection: TableSelection,
    ciphers: Ciphers | None = None,
) -> list[Published]:
    session = Masking(table, selection, ciphers)
    session.feed([begin(), frame(table.relation), *(frame(row) for row in rows)])
    return session.waiting()


def events(records: list[Published]) -> list[tuple[Any, Any]]:
    """Return key and event of every record that is an event, by seq."""
    pairs = [
        (None if r.key is None else json.loads(r.key), json.loads(r.value))
        for r in records
        if r.value is not None
    ]
    return sorted(pairs, key=lambda pair: pair[1]["source"]["seq"])


@st.composite
def masks(draw: st.DrawFn, table: Table) -> dict[str, Mask]:
    chosen: dict[str, Mask] = {}
    for column in table.relation.columns:
        kinds = ["hmac", "keep"]
        if column.name not in table.key:
            kinds += ["null", "fixed", "truncate"]
        kind = draw(st.sampled_from(kinds))
        value: object = {"hmac": HMAC_KEY, "truncate": 3, "fixed": draw(FIXED)}.get(kind)
        chosen[column.name] = convert({"kind": kind, "value": value}, Mask)
    return chosen


def select(chosen: dict[str, Mask]) -> TableSelection:
    # Exact: a drawn name may contain stars and quotes.
    return ALL._replace(masks=tuple((NamePattern(n, n, None), m) for n, m in chosen.items()))


@st.composite
def masked_histories(draw: st.DrawFn) -> tuple[Table, list[RowMessage], dict[str, Mask]]:
    table = draw(tables())
    rows = draw(st.lists(messages(table), min_size=1, max_size=4))
    return table, rows, draw(masks(table))


def tuples(row: RowMessage) -> list[TupleData]:
    if isinstance(row, Truncate):
        return []
    parts: list[TupleData] = []
    if isinstance(row, Insert | Update):
        parts.append(row.new)
    if isinstance(row, Update | Delete) and isinstance(row.old, KeyTuple | OldTuple):
        parts.append(row.old.values)
    return parts


def texts_of(rows: list[RowMessage], index: int) -> list[bytes]:
    values = (part[index] for row in rows for part in tuples(row))
    return [value for value in values if isinstance(value, bytes)]


def check_row(
    table: Table, rows: list[RowMessage], mask: dict[str, Mask], plain: Row, row: Row
) -> None:
    """Compare a masked key, before or after with its unmasked counterpart."""
    if plain is None or row is None:
        assert row is plain
        return
    assert list(row) == list(plain)
    for index, column in enumerate(table.relation.columns):
        if column.name not in plain:
            continue
        value, clear, kind = row[column.name], plain[column.name], mask[column.name].kind
        if clear == "__debezium_unavailable_value" and value == clear:
            continue
        texts = texts_of(rows, index)
        if kind == "keep":
            assert value == clear
        elif kind == "null":
            assert value is None
        elif kind == "fixed":
            assert value == mask[column.name].value
        elif clear is None:
            assert value is None
        elif kind == "truncate":
            assert value in {text.decode()[:3] for text in texts}
        else:
            key = HMAC_KEY.encode()
            assert value in {hmac.digest(key, text, "sha256").hex() for text in texts}


@given(masked_histories())
def test_a_mask_changes_its_column_and_nothing_else(
    case: tuple[Table, list[RowMessage], dict[str, Mask]],
) -> None:
    """It also changes neither which changes are key changes nor the number of events."""
    table, rows, chosen = case
    plain = events(published(table, rows, ALL))
    masked = events(published(table, rows, select(chosen)))
    assert len(masked) == len(plain)
    for (plain_key, plain_event), (key, event) in zip(plain, masked, strict=True):
        check_row(table, rows, chosen, plain_key, key)
        check_row(table, rows, chosen, plain_event.pop("before"), event.pop("before"))
        check_row(table, rows, chosen, plain_event.pop("after"), event.pop("after"))
        assert event == plain_event


# --- secrets ---

# Type and a way to write a value that never occurs by chance.
SECRETS: dict[int, st.SearchStrategy[str]] = {
    25: st.text('sécret"\\%{}😀\n', min_size=12, max_size=20).map(lambda t: f"<<{t}>>"),
    20: st.integers(10**17, 9 * 10**17).map(str),
    1700: st.integers(10**30, 10**31).map(lambda n: f"{n}.50"),
    701: st.integers(10**15, 10**16).map(lambda n: f"{n}.5"),
    17: st.binary(min_size=12, max_size=20).map(lambda b: "\\x" + b.hex()),
    2950: st.uuids().map(str),
    1009: st.lists(st.text("abc", min_size=12), min_size=1, max_size=2).map(
        lambda parts: "{" + ",".join(parts) + "}"
    ),
    3802: st.integers(10**17, 10**18).map(lambda n: f'{{"n": {n}}}'),
    1184: st.datetimes().map(lambda d: f"{d:%Y-%m-%d %H:%M:%S.%f}".rjust(26, "0") + "+00"),
    90001: st.integers(10**17, 10**18).map(lambda n: f"label{n}"),
}


@st.composite
def secrets(draw: st.DrawFn) -> tuple[Table, list[RowMessage], dict[str, Mask]]:
    """Draw changes of a table whose columns except the first are masked and hold secrets."""
    identity = draw(st.sampled_from([ReplicaIdentity.DEFAULT, ReplicaIdentity.FULL]))
    key = ("id", "s0")
    types = draw(st.lists(st.sampled_from(sorted(SECRETS)), min_size=2, max_size=5))
    full = identity is ReplicaIdentity.FULL
    columns = [RelationColumn(True, "id", 23, -1)]  # noqa: FBT003 - as the message has it
    columns += [RelationColumn(full or i == 0, f"s{i}", kind, -1) for i, kind in enumerate(types)]
    table = Table(Relation(16_402, "public", "t", identity, tuple(columns)), key)

    def row() -> tuple[bytes, ...]:
        return (b"7", *(draw(SECRETS[kind]).encode() for kind in types))

    def old() -> KeyTuple | OldTuple:
        values = row()
        return OldTuple(values) if full else KeyTuple((*values[:2], *[None] * (len(types) - 1)))

    relation_id = table.relation.relation_id
    rows: list[RowMessage] = [
        Insert(relation_id, row()),
        Update(relation_id, old(), row()),
        Delete(relation_id, old()),
    ]
    chosen = {"id": Mask("keep"), "s0": Mask("hmac", HMAC_KEY)}
    for i in range(1, len(types)):
        kind = draw(
            st.sampled_from(
                [Mask("null"), Mask("fixed", "*"), Mask("hmac", HMAC_KEY), Mask("truncate", 2)]
            )
        )
        chosen[f"s{i}"] = kind
    return table, rows, chosen


@given(secrets())
def test_no_clear_value_of_a_masked_column_is_in_any_record(
    case: tuple[Table, list[RowMessage], dict[str, Mask]],
) -> None:
    """Neither as Postgres wrote it nor as an event without the mask would show it."""
    table, rows, chosen = case
    forbidden = {text for i in range(1, len(chosen)) for text in texts_of(rows, i)}
    for _, event in events(published(table, rows, ALL)):
        for row in (event["before"], event["after"]):
            shown = (value for name, value in (row or {}).items() if name != "id")
            forbidden |= {
                json.dumps(v, ensure_ascii=False).encode() for v in shown if v is not None
            }
    records = published(table, rows, select(chosen))
    assert len(records) >= len(rows)
    for record in records:
        for part in (record.key or b"", record.value or b""):
            assert not [text for text in forbidden if text in part]
