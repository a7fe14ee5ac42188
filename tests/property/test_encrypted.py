"""An encrypted column decrypts to what an unmasked one has, and everything else is the same."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdc.config import Mask
from cdc.decode.messages import (
    UNCHANGED,
    Delete,
    Insert,
    KeyTuple,
    OldTuple,
    Relation,
    RelationColumn,
    ReplicaIdentity,
    Update,
    Value,
)
from cdc.keyring import file
from cdc.keyring.ciphers import Ciphers
from tests.property.reference import PLACEHOLDER, RowMessage
from tests.property.rows import Table
from tests.property.test_masks import events, published, select

_FOLDER = TemporaryDirectory()
RING = Path(_FOLDER.name) / "keys.sqlite"
file.create(RING)
CIPHERS = Ciphers(file.FileKeyring(RING))
MASK = Mask("encrypt", "user:owner")
# In front of the column that names their subject, and after it.
ENCRYPTED = ("before", "after")
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)
OWNERS = st.none() | st.integers(1, 3).map(lambda n: b"%d" % n)


@st.composite
def changes(draw: st.DrawFn) -> tuple[Table, list[RowMessage]]:
    full = draw(st.booleans())
    identity = ReplicaIdentity.FULL if full else ReplicaIdentity.DEFAULT
    columns = (
        RelationColumn(True, "id", 23, -1),  # noqa: FBT003 - as the message has it
        RelationColumn(full, "before", 25, -1),
        RelationColumn(full, "owner", 23, -1),
        RelationColumn(full, "after", draw(st.sampled_from([25, 1043])), -1),
        RelationColumn(full, "plain", 25, -1),
    )
    table = Table(Relation(16_402, "public", "t", identity, columns), ("id",))
    value = st.none() | TEXTS.map(str.encode)
    new = st.none() | TEXTS.map(str.encode) | st.just(UNCHANGED)

    def row(texts: st.SearchStrategy[Value]) -> tuple[Value, ...]:
        return b"7", draw(texts), draw(OWNERS), draw(texts), draw(texts)

    def old() -> KeyTuple | OldTuple:
        return OldTuple(row(value)) if full else KeyTuple((b"7", None, None, None, None))

    of = table.relation.relation_id
    made: list[RowMessage] = []
    for kind in draw(st.lists(st.sampled_from("iud"), min_size=1, max_size=4)):
        if kind == "i":
            made.append(Insert(of, row(value)))
        elif kind == "u":
            made.append(Update(of, old(), row(new)))
        else:
            made.append(Delete(of, old()))
    return table, made


def decrypted(row: dict[str, Any] | None) -> dict[str, Any] | None:
    return row and {
        name: CIPHERS.decrypt(value)
        if name in ENCRYPTED and value != PLACEHOLDER
        else value
        for name, value in row.items()
    }  # fmt: skip


@given(changes())
def test_what_is_encrypted_decrypts_to_the_value(case: tuple[Table, list[RowMessage]]) -> None:
    """Old rows by their own subject, unsent values from the old row, rows without a subject too."""
    table, rows = case
    plain = published(table, rows, select({}))
    hidden = published(table, rows, select(dict.fromkeys(ENCRYPTED, MASK)), CIPHERS)
    assert [record.key for record in hidden] == [record.key for record in plain]
    for (_, event), (_, expected) in zip(events(hidden), events(plain), strict=True):
        for part in ("before", "after"):
            assert decrypted(event.pop(part)) == expected.pop(part)
        assert event == expected


@given(TEXTS.filter(lambda text: len(text) > 8), st.integers(1, 3), st.integers(1, 3))
def test_no_value_that_is_encrypted_is_in_an_event(text: str, one: int, other: int) -> None:
    columns = [RelationColumn(name == "id", name, 23, -1) for name in ("id", "owner")]
    columns += [RelationColumn(False, "after", 25, -1)]  # noqa: FBT003 - as the message has it
    relation = Relation(16_402, "public", "t", ReplicaIdentity.FULL, tuple(columns))
    first, second = (b"7", b"%d" % one, text.encode()), (b"7", b"%d" % other, text.encode())
    rows: list[RowMessage] = [Insert(16_402, first), Update(16_402, OldTuple(first), second)]
    found = published(Table(relation, ("id",)), rows, select({"after": MASK}), CIPHERS)
    shown = json.dumps(text).encode()[1:-1]
    values = [record.value or b"" for record in found]
    assert not [each for each in values if text.encode() in each or shown in each]
    first_value, second_value = (event["after"]["after"] for _, event in events(found))
    # Of one subject the same value looks the same; of two, different.
    assert (first_value == second_value) == (one == other)
