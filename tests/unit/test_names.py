"""Topic names: reversible, in Kafka's alphabet, one per table."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc import events
from cdc.errors import ConfigError, Exit
from cdc.log import names

# What Postgres allows in a name: any character but zero; surrogates are not characters.
characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
any_names = st.one_of(
    st.text(characters, min_size=1, max_size=12),
    st.text("_x04AFaf.é-", min_size=1, max_size=12),
)
short_names = st.text(characters, min_size=1, max_size=6) | st.sampled_from(["cdc", "_x63dc"])


@given(any_names)
def test_escape_is_reversible_and_legal(name: str) -> None:
    escaped = names.escape(name)
    assert events.unescape(escaped) == name
    assert re.fullmatch(r"[A-Za-z0-9_-]+", escaped)


@given(short_names, short_names)
def test_a_topic_name_gives_its_table(schema: str, table: str) -> None:
    topic = names.data_topic("shop", schema, table)
    assert names.table_of("shop", topic) == (schema, table)
    assert re.fullmatch(r"shop\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", topic)
    assert len(topic) <= names.MAX_TOPIC_LENGTH


@given(short_names, short_names, short_names, short_names)
def test_no_two_tables_share_a_topic(schema: str, table: str, other: str, another: str) -> None:
    same = (schema, table) == (other, another)
    topics = names.data_topic("p", schema, table), names.data_topic("p", other, another)
    assert (topics[0] == topics[1]) == same


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ("users", "users"),
        ("Order-Lines_2", "Order-Lines_2"),
        ("a.b", "a_x2Eb"),
        ('Quoted_" . Schema', "Quoted_" + "_x22_x20_x2E_x20Schema"),
        ("é", "_xC3_xA9"),
        ("𝄞", "_xF0_x9D_x84_x9E"),
        ("_x41", "_x5Fx41"),  # looks escaped, so its underscore is
        ("_x4", "_x4"),
        ("_xc3", "_xc3"),  # escapes are upper case
        ("__x41", "__x5Fx41"),
        ("_é", "__xC3_xA9"),
        ("a\\b", "a_x5Cb"),
    ],
)
def test_escapes(name: str, escaped: str) -> None:
    assert names.escape(name) == escaped
    assert events.unescape(escaped) == name


@pytest.mark.parametrize("table", ["resume", "frontier", "schema", "dead"])
def test_a_schema_named_cdc_keeps_out_of_the_pipelines_own_topics(table: str) -> None:
    ours = (names.resume_topic, names.frontier_topic, names.schema_topic, names.dead_topic)
    own = {topic("p") for topic in ours}
    topic = names.data_topic("p", "cdc", table)
    assert topic not in own
    assert topic == f"p._x63dc.{table}"
    assert names.table_of("p", topic) == ("cdc", table)


def test_the_longest_name_fits_and_one_more_is_refused_with_the_remedy() -> None:
    longest = "t" * (names.MAX_TOPIC_LENGTH - len("shop.public."))
    assert len(names.data_topic("shop", "public", longest)) == names.MAX_TOPIC_LENGTH
    with pytest.raises(ConfigError) as raised:
        names.data_topic("shop", "public", longest + "t")
    assert "public." in raised.value.what
    assert "250 characters" in raised.value.what
    assert "log.prefix" in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG


def test_postgres_longest_names_in_four_byte_characters_are_refused() -> None:
    """63 bytes of name are 252 characters of escapes: refused before anything is created."""
    with pytest.raises(ConfigError):
        names.data_topic("p", "public", "𝄞" * 15 + "abc")
