"""Names, `_id`s and fields of OpenSearch, as docs/FOLLOWERS.md describes them."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from cdc.decode.types import TYPE_NAMES
from cdc.errors import ConfigError
from lockstep.conformance.store import USERS, VALUES
from lockstep.sinks.contract import Column, Version
from lockstep.sinks.opensearch.mapping import (
    Documents,
    Ids,
    alias,
    digest,
    field,
    field_name,
    properties,
)
from lockstep.sinks.opensearch.sink import OpenSearchSink
from lockstep.sinks.opensearch.tables import OpenSearchOptions

_PAGE = (Path(__file__).parents[2] / "docs" / "FOLLOWERS.md").read_text("utf-8")
_ROWS = dict(
    re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \|[^|]*\|$",
        _PAGE.partition("### Fields by type")[2].partition("###")[0],
        re.MULTILINE,
    )[2:]
)

_TEXTS = "text, varchar, char(n), citext, json, jsonb, xml, tsvector, hstore"


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale & 0x7FF) + 4


# A row of the page, a type and modifier in it, and whether the row has `.exact`.
OF_THE_PAGE = (
    ("smallint, integer", "int2", -1, "integer", False),
    ("smallint, integer", "int4", -1, "integer", False),
    ("bigint, oid", "int8", -1, "long", False),
    ("real; double precision", "float4", -1, "float", True),
    ("real; double precision", "float8", -1, "double", True),
    ("numeric(p,s), s > 0, up to 15 digits", "numeric", numeric(15, 2), "scaled_float", True),
    ("numeric(p), up to 18 digits", "numeric", numeric(18, 0), "long", True),
    ("numeric(p), up to 18 digits", "numeric", numeric(16, -2), "long", True),
    ("other numeric, money", "numeric", numeric(16, 2), "double", True),
    ("other numeric, money", "numeric", numeric(19, 0), "double", True),
    ("other numeric, money", "numeric", -1, "double", True),
    ("other numeric, money", "money", -1, "double", True),
    ("boolean", "bool", -1, "boolean", False),
    ("date", "date", -1, "integer", True),
    ("timestamp(0..3)", "timestamp", 3, "date", True),
    ("timestamp", "timestamp", -1, "long", True),
    ("timestamp", "timestamp", 6, "long", True),
    ("timestamptz", "timestamptz", -1, "date", True),
    ("time", "time", -1, "long", True),
    (_TEXTS, "jsonb", -1, "text", True),
    (_TEXTS, "x.citext", -1, "text", True),
    (_TEXTS, "x.hstore", -1, "text", True),
    ("inet", "inet", -1, "ip", True),
    ("bytea", "bytea", -1, "binary", False),
    ("arrays", "_int4", -1, "integer", True),
    ("arrays", "_bool", -1, "keyword", False),
)  # fmt: skip


@pytest.mark.parametrize("each", OF_THE_PAGE, ids=str)
def test_the_page_has_each_type_as_it_is(each: tuple[str, str, int, str, bool]) -> None:
    row, kind, modifier, shown, exact = each
    made = field(kind, modifier, VALUES)
    assert made["type"] == shown
    assert ("exact" in made.get("fields", {})) is exact
    assert row == "arrays" or f"`{shown}`" in _ROWS[row]


def test_every_type_has_a_field_and_only_those_of_the_page_are_no_keywords() -> None:
    known = {kind for _, kind, *_ in OF_THE_PAGE}
    known |= {"oid", "text", "varchar", "bpchar", "json", "xml", "tsvector"}
    for name in TYPE_NAMES.values():
        if name not in known and not name.startswith("_"):
            assert field(name, -1, VALUES)["type"] == "keyword", name
    assert field("public.date", -1, VALUES)["type"] == "keyword"  # user-defined
    assert field("x._hstore", -1, VALUES | {"hstore.handling.mode": "map"})["enabled"] is False
    iso = VALUES | {"time.precision.mode": "isostring"}
    assert [field(kind, -1, iso)["type"] for kind in ("date", "timestamp", "time")] == [
        "date", "date", "keyword",
    ]  # fmt: skip
    masked = Column("m", "int4", 23, -1, nullable=True, mask="hmac:1")
    assert properties(USERS._replace(columns=(masked,)), {})["m"]["type"] == "keyword"
    assert properties(USERS, {"name": {"type": "x"}})["name"] == {"type": "x"}
    assert digest(properties(USERS, {})) != digest(properties(USERS, {"name": {"type": "x"}}))


def test_names_are_distinct_and_reversible() -> None:
    names = ["a.b", "a_x2Eb", "a_x5Fx2Eb", "", " ", "_id", "_x5Fid", "_own", "ä", "_version", "."]
    assert len({field_name(name) for name in names}) == len(names)
    assert [field_name(each) for each in ("a.b", "_own", "ä")] == ["a_x2Eb", "_own", "ä"]
    columns = [Column(name, "text", 25, -1, nullable=True) for name in names]
    row = msgspec.json.encode(dict.fromkeys(names, "v"))
    documents = Documents(columns)
    assert documents.document(row) != row
    assert documents.row(documents.document(row)) == row
    assert Documents(columns[-2:-4:-1]).document(row) is not None
    plain = USERS._replace(schema="S", table="Tä.b")
    assert alias("shop", plain) == "shop-_x53._x54_xc3_xa4_x2eb"
    longest = [alias("p", USERS._replace(table="Ä" * n)) for n in (40, 41, 60)]
    assert len(set(longest)) == 3
    assert max(map(len, longest)) <= 200


@pytest.mark.parametrize(
    ("key", "made"),
    [
        ({"id": 7}, "7"),
        ({"id": "ada@x"}, "ada@x"),
        ({"id": True}, "true"),
        ({"id": 'q"\\ü'}, 'q"\\ü'),
        ({"id": ""}, None),
        ({"id": "sha256:1"}, None),
        ({"id": "ü" * 256}, "ü" * 256),
        ({"id": "ü" * 257}, None),
        ({"id": [1, 2]}, None),
        ({"sha256": "ab"}, None),
        ({"no": 1, "id": 7}, '{"no":1,"id":7}'),
        ({"no": "x" * 600, "id": 7}, None),
    ],
)
def test_an_id_is_the_key_if_possible(key: dict[str, object], made: str | None) -> None:
    ids = Ids(("no", "id") if "no" in key else ("id",))
    found = msgspec.json.decode(ids.of(msgspec.json.encode(key)))
    assert found == made or (made is None and re.fullmatch(r"sha256:[0-9a-f]{64}", found))


def test_settings_that_would_lose_documents_are_refused() -> None:
    options = OpenSearchOptions(
        *("http://localhost:1", "shop", "search", "shop"),
        settings={"translog": {"durability": "async"}},
    )
    with pytest.raises(ConfigError, match="async"):
        OpenSearchSink(options)
    assert "secret" not in repr(OpenSearchOptions("u", "p", "f", "x", "me", "secret"))


def test_a_version_of_a_document_has_fields_within_fields() -> None:
    line = {"columns": [["no", "int4", -1], ["amount", "numeric", -1]], "many": True, "fields": {}}
    person = {"columns": [["name", "text", -1]], "many": False, "fields": {"lines": line}}
    columns = (
        Column("id", "int8", 20, -1, nullable=False),
        Column("buyer", "document", 0, -1, nullable=True),
    )
    made = Version(
        1, "documents", "order", "", ("id",), columns, VALUES | {"document": {"buyer": person}}
    )
    buyer = properties(made, {})["buyer"]
    assert buyer["type"] == "object"
    assert buyer["properties"]["lines"]["type"] == "nested"
    assert buyer["properties"]["lines"]["properties"]["no"]["type"] == "integer"
