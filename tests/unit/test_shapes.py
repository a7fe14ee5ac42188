"""Templates and shapes, and the Redis keys that they produce."""

from __future__ import annotations

import math
import pickle

import pytest

from cdc.errors import ConfigError
from lockstep.conformance.store import LINES, USERS
from lockstep.sinks.contract import Change
from lockstep.sinks.redis.names import SLOTS, Names, slot_of, tags
from lockstep.sinks.shapes import Placer, RowShape, Shaper, Template, number_of, text_of


@pytest.mark.parametrize(
    ("text", "values", "filled"),
    [
        ("user:{id}", {"id": b"7"}, b"user:7"),
        (
            "{{{id}}}:{name}",
            {"id": b"7", "name": b'"A\\"\\u00e9"'},
            '{7}:A"é'.encode(),
        ),
        ("{a b}", {"a b": b"true"}, b"true"),
        ("{id}", {"id": b"null"}, None),
        ("{id}", {}, None),
        ("plain", {}, b"plain"),
        ("{x}{{}}", {"x": b"[1,2]"}, b"[1,2]{}"),
    ],
)
def test_a_template_is_filled_with_texts_of_values(
    text: str, values: dict[str, bytes], filled: bytes | None
) -> None:
    assert Template(text).fill(values) == filled


@pytest.mark.parametrize("text", ["{id", "id}", "{}", "{a{b}}", "a}b{"])
def test_a_brace_alone_is_no_template(text: str) -> None:
    with pytest.raises(ValueError, match="brace"):
        Template(text)


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("u:{id}", True),
        ("u:{name}", False),
        ("{{t}}:{name}", True),
        ("{{{id}}}:{name}", True),
        ("{name}{{t}}", False),
        ("{{}}:{name}", False),  # empty braces are no hash tag
        ("{{{name}}}:{id}", False),
    ],
)
def test_a_row_stays_in_its_slot_if_its_key_determines_it(text: str, *, fixed: bool) -> None:
    shape = RowShape(key=text)
    assert Shaper(shape, USERS, "p").slot_is_fixed is fixed
    if fixed:
        template, placer = Template(text), Placer(shape, "p", "t")
        for number in (1, 2):
            place = template.fill({"id": b"%d" % number, "name": b'"x}{y"'})
            assert place is not None
            assert slot_of(placer.anchor(b'{"id":%d}' % number)) == slot_of(place)


def test_slots_are_those_of_the_cluster_specification() -> None:
    assert slot_of(b"123456789") == 12739
    assert (
        slot_of(b"{user1000}.following") == slot_of(b"{user1000}.followers") == slot_of(b"user1000")
    )
    assert slot_of(b"foo{}{bar}") != slot_of(b"bar")
    assert slot_of(b"foo{{bar}}zap") == slot_of(b"{bar")
    assert [slot_of(b"x%b}{y" % tag) for tag in tags()] == list(range(SLOTS))


def test_all_keys_of_a_row_are_in_its_slot() -> None:
    names = Names("shop", "cache", cluster=True)
    for place in (b"shop:public.users:7", b"a}b{c}", b"{}", b"{tag}x", b"}", b"{"):
        slot = names.slot(place)
        for ours in (
            names.companions(1, "public.users", slot) + b'{"id":7}',
            names.holders(1, "public.users", slot) + place,
            names.shadow(1, slot) + place,
            names.sentinel(slot),
        ):
            assert slot_of(ours) == slot


@pytest.mark.parametrize(
    ("key", "place"),
    [
        (b'{"id":7}', b"p:t:7"),
        (b'{"id":-7}', b"p:t:-7"),
        (b'{"id":"a:b%"}', b"p:t:a:b%"),
        (b'{"id":"a\\"b"}', b'p:t:a"b'),
        (b'{"a:b":"c"}', b"p:t:c"),
        (b'{"a\\":\\"b":7}', b"p:t:7"),
        (b'{"id":null}', b"p:t:%N"),
        (b'{"id":true}', b"p:t:true"),
        (b'{"a":"x:y","b":null,"c":"%N"}', b"p:t:x%3Ay:%N:%25N"),
        (b'{"sha256":"ab"}', b"p:t:ab"),
    ],
)
def test_a_key_is_named_by_its_columns(key: bytes, place: bytes) -> None:
    assert Placer(RowShape(), "p", "t").place(key) == place


def test_no_row_is_in_the_place_of_a_stores_own_key() -> None:
    """The owner of a schema `~cache` writes no companions of the follower `cache`."""
    tables = ["~cache.1", "%7Ecache.1", "%25.1", "%.1", "~.1", "cache.1", "7Ecache.1"]
    key = b'{"id":"public.users:{}"}'
    placers = [Placer(RowShape(), "p", table) for table in tables]
    places = [placer.place(key) for placer in placers]
    assert len(set(places)) == len(tables)
    assert not any(place.startswith((b"p:~", b"p:cdc:")) for place in places)
    assert all(key in p.keys(place, ["id"]) for p, place in zip(placers, places, strict=True))


def test_a_key_that_is_a_digest_has_a_place_of_its_own() -> None:
    """Because the template's columns cannot be read from it."""
    assert (
        Placer(RowShape(key="u:{id}"), "p", "t").place(b'{"sha256":"ab"}') == b'p:t:{"sha256":"ab"}'
    )


@pytest.mark.parametrize(
    ("shape", "what"),
    [
        (RowShape(form="text", value="{missing}"), "no column missing"),
        (RowShape(key="{id"), "wrong template"),
        (RowShape(form="fields", fields=("missing",)), "no column missing"),
        (RowShape(key="s", form="set", member="{id}", ttl_seconds=9), "one by one"),
    ],
)
def test_a_shape_that_does_not_fit_its_table_is_refused(shape: RowShape, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Shaper(shape, USERS, "p")


def test_a_score_is_a_number_or_a_time() -> None:
    assert number_of("1970-01-01T00:00:01.5Z") == 1.5
    assert number_of("-infinity") < number_of("12.50")
    # As Postgres computes it: extract(epoch from …).
    assert number_of("0044-03-15 12:00:00.25+00 BC") == -63517780799.75
    assert number_of("0001-02-29 00:00:00+00 BC") == -62162121600
    assert number_of("10000-01-01 02:00:00+02") == 253402300800
    assert number_of("294276-12-31 23:59:59+00") == 9224318015999
    for no_zone in ("0044-03-15 BC", "10000-01-01 00:00:00"):
        assert math.isnan(number_of(no_zone))
    zset = Shaper(RowShape(key="z", form="zset", member="{id}", score="name"), USERS, "p")
    for text, score in ((b'"NaN"', None), (b'"7"', b"7.0")):
        shaped = zset.shaped(Change(b'{"id":1}', 1, b'{"id":1,"name":%b}' % text, 1, 1, 1))
        assert (shaped and shaped.value[1]) == score
    with pytest.raises(ConfigError, match="neither number nor time") as caught:
        zset.shaped(Change(b'{"id":1}', 1, b'{"id":1,"name":"secret"}', 1, 1, 1))
    assert "secret" not in str(caught.value)


def test_a_row_is_nowhere_while_a_column_is_unknown_that_its_shape_needs() -> None:
    row = b'{"id":1,"name":"n","body":"?","amount":"1","active":true}'
    change = Change(b'{"id":1}', 1, row, 1, 1, 1, unchanged=("body",))
    assert Shaper(RowShape(), USERS, "p").shaped(change) is None
    fields = Shaper(RowShape(form="fields", fields=("name",)), USERS, "p").shaped(change)
    assert fields is not None
    assert fields.value == (b'{"name":"n"}',)


def test_text_is_a_values_json_without_quotes() -> None:
    assert [text_of(v) for v in (b"7", b'"a\\nb"', b"null", b"true", b'"null"')] == [
        *(b"7", b"a\nb", None, b"true", b"null")
    ]
    assert pickle.loads(pickle.dumps(RowShape(key="x"))) == RowShape(key="x")  # noqa: S301 - ours
    assert Shaper(RowShape(), LINES, "p").plain
