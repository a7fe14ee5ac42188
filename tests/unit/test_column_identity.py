"""Where a column may be in a relation message, according to two reads of the catalog."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cdc.config import Mask
from cdc.config.patterns import parse_name
from cdc.config.selection import ALL, TableSelection
from cdc.decode.messages import RelationColumn
from cdc.errors import ConfigError
from cdc.events import LSN
from cdc.log.records import ColumnNumbers, NumberedColumn
from cdc.publication.column_identity import (
    attnums,
    exposed_columns,
    hidden_columns,
    possible_positions,
)
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.source.lookups import TableFacts
from tests.unit.test_relations import relation


def numbers(columns: str, lsn: int = 1, *, changed: str = "", **more: object) -> ColumnNumbers:
    """Return column numbers: a letter is a column, `.` a dropped one; capitals are not sent."""
    found = tuple(
        NumberedColumn(
            at, "" if name == "." else name.lower(), type_id=23, sent=not name.isupper(),
            xmin=lsn if name in changed else 0, dropped=name == ".",
        )
        for at, name in enumerate(columns, 1)
    )  # fmt: skip
    return ColumnNumbers(relation_id=16402, lsn=LSN(lsn), columns=found, **more)  # type: ignore[arg-type]


def message(columns: str) -> list[RelationColumn]:
    return [RelationColumn(False, name, 23, -1) for name in columns]  # noqa: FBT003 - of no key


def hiding(*names: str, keep: str = "") -> TableSelection:
    masks = [(parse_name(name), Mask("null")) for name in names]
    masks += [(parse_name(name), Mask("keep")) for name in keep]
    return ALL._replace(masks=tuple(masks))


@pytest.mark.parametrize(
    ("before", "reported", "today", "attnum", "expected"),
    [
        # before, the message, today; `changed` columns have another catalog row
        ("iem", "iem", numbers("iem", 9), 2, {1}),
        ("iem", "ime", numbers("ime", 9, changed="me"), 2, {1}),
        ("iem", "ioem", numbers("iomex", 9, changed="oemx"), 2, {1}),
        ("ine", "ine", numbers("i.ne", 9, changed="ne"), 3, {1, 2}),
        ("ine", "ie", numbers("i.e", 9), 3, {1}),
        ("ine", "iez", numbers("i.ez", 9, changed="z"), 3, {1}),
        ("ien", "inp", numbers("i.np", 9, changed="p"), 2, set()),
        ("ien", "inp", numbers("i.np", 9, changed="np"), 2, {1}),
        ("ie", "ie", numbers("", 9), 2, {0, 1}),
    ],
)
def test_a_column_is_where_the_catalog_and_the_order_allow_it(
    before: str, reported: str, today: ColumnNumbers, attnum: int, expected: set[int]
) -> None:
    found = possible_positions(message(reported), numbers(before), today)
    assert found.get(attnum, frozenset()) == expected


def test_without_an_earlier_look_the_list_itself_or_the_order_says() -> None:
    today = numbers("i.ne", 9)
    assert attnums(message("ine"), possible_positions(message("ine"), None, today, [today])) == (
        1,
        3,
        4,
    )
    assert possible_positions(message("ine"), None, today)[3] == {1, 2}
    assert possible_positions(message("iem"), None, numbers("iem", 9))[2] == {1}


def test_what_cannot_be_leaves_every_place_open() -> None:
    before, today = numbers("iem"), numbers("iem", 9, changed="iem")
    assert possible_positions(message("im"), before, today)[3] == {0, 1}


def test_another_membership_may_have_sent_other_columns() -> None:
    before, today = numbers("iem"), numbers("iem", 9, changed="em")
    assert possible_positions(message("iem"), before, today)[3] == {2}
    found = possible_positions(message("im"), before, replace(today, membership=7))
    assert found[2] == found[3] == {1}
    assert attnums(message("im"), found) == (1, None)


def test_keep_speaks_of_the_hidden_column_only_by_the_name_it_was_hidden_by() -> None:
    """`*: null, n: keep` referred to another column n."""
    star = hiding("*", keep="in")
    first = numbers("ine")
    known = hidden_columns(star, {}, first)
    assert known == {3: "e"}
    swapped = message("ien")
    found = possible_positions(swapped, first, numbers("ien", 9, changed="en"))
    assert [(s.attnum, s.name) for s in exposed_columns(star, swapped, found, known)] == [(3, "n")]
    meant = hiding(keep="e")
    assert hidden_columns(meant, known, numbers("ine", 9)) == {}
    same = message("ine")
    assert exposed_columns(meant, same, possible_positions(same, first, first), known) == []


def test_a_dropped_column_stays_hidden_for_those_who_lag() -> None:
    assert hidden_columns(hiding("e"), {2: "e"}, numbers("i.", 9)) == {2: "e"}


def reported(relations: Relations, columns: str, today: ColumnNumbers, at: int) -> None:
    facts = TableFacts(("i",), dict.fromkeys(columns, True), today)
    seen = relation(columns=columns, marked="i")
    request = RelationRequest(seen, facts, {}, LSN(at), selection=hiding("e"))
    relations.version(request, replaying=False)


def test_a_hidden_column_that_a_log_of_an_older_version_has_takes_setup() -> None:
    old = Relations("shop", [], 0)
    without = TableFacts(("i",), {}, None)
    seen = relation(columns="ien", marked="i")
    request = RelationRequest(seen, without, {}, LSN(1), selection=hiding("e"))
    first, _ = old.version(request, replaying=False)
    assert [column.attnum for column in first.columns] == [None, None, None]
    upgraded = Relations("shop", [first], 1)
    reported(
        upgraded, "ien", numbers("ien", 9), 5
    )  # no column was ever dropped: the order is enough
    upgraded = Relations("shop", [first], 1)
    with pytest.raises(ConfigError, match="may be n") as raised:
        reported(upgraded, "ien", numbers("i.en", 9), 5)
    assert "cdc setup" in raised.value.hint
    confirmed = numbers("i.en", 8, hidden={3: "e"})
    reported(Relations("shop", [first], 1, [confirmed]), "ien", numbers("i.en", 9), 5)


def test_a_mask_that_names_no_column_is_an_error_also_of_a_known_table() -> None:
    relations = Relations("shop", [], 0, [numbers("in", hidden={})])
    selection = hiding("e")._replace(hidden=frozenset({"e"}))
    seen, facts = relation(columns="in", marked="i"), TableFacts(("i",), {}, numbers("in", 9))
    request = RelationRequest(seen, facts, {}, LSN(5), selection=selection)
    with pytest.raises(ConfigError, match="the table has none of that name"):
        relations.version(request, replaying=False)
