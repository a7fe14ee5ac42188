"""Each refusal at the start: what differs, and an exit code on which no supervisor restarts."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cdc.config import Config, Log, Source
from cdc.continuity import Found, check
from cdc.errors import CDCError, ConfigError, Exit, GapError, Policy
from cdc.events import LSN
from cdc.log.records import Publication, ResumeIdentity
from cdc.source.catalog import Slot
from tests.property.stream import position

CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql://localhost/shop"),
    log=Log(bootstrap_servers="localhost:9092"),
)
PUBLICATION = Publication("lockstep_shop", 16411, {"public.follows": 501, "public.users": 502})
IDENTITY = ResumeIdentity(
    pipeline="shop",
    epoch=1,
    system_identifier="7431",
    timeline=1,
    database="shop",
    slot="lockstep_shop",
    publication=PUBLICATION,
    partitions={"shop.public.users": 4},
    topic_ids={"shop.public.users": "aXb"},
)
POSITION = position(end_lsn=0x5000)
SLOT = Slot("pgoutput", "shop", "reserved", LSN(0x5000), None)
FOUND = Found(
    "7431",
    1,
    "shop",
    SLOT,
    PUBLICATION,
    {"shop.public.users": 4},
    {"shop.public.users": "aXb"},
    frozenset(PUBLICATION.tables),
)


def members(**tables: int) -> Publication:
    """Return the publication with these tables of `public`, by the oid of their membership."""
    return replace(PUBLICATION, tables={f"public.{name}": oid for name, oid in tables.items()})


def test_slot_log_and_source_that_meet_are_accepted() -> None:
    check(CONFIG, IDENTITY, POSITION, FOUND)


@pytest.mark.parametrize(
    "found",
    [
        FOUND._replace(slot=SLOT._replace(confirmed_lsn=LSN(0))),  # all is replayed, and skipped
        FOUND._replace(slot=SLOT._replace(wal_status="extended")),
        FOUND._replace(publication=members(follows=501, users=502, new=503)),
        FOUND._replace(publication=members(people=502, follows=501)),  # renamed: the same member
        FOUND._replace(
            publication=members(users=502), tables=frozenset({"public.users"})
        ),  # dropped, with all it held
        FOUND._replace(publication=replace(PUBLICATION, name="renamed")),
        FOUND._replace(partitions={"shop.public.users": 4, "shop.public.new": 9}),
        FOUND._replace(topic_ids={}),  # a broker too old to tell
    ],
)
def test_what_loses_nothing_is_accepted(found: Found) -> None:
    check(CONFIG, IDENTITY, POSITION, found)


def test_a_new_pipeline_that_pins_no_topic_is_accepted() -> None:
    check(CONFIG, replace(IDENTITY, partitions={}), POSITION, FOUND._replace(partitions={}))


REFUSED: list[tuple[Found, type[CDCError], str, str]] = [
    (
        FOUND._replace(slot=SLOT._replace(plugin="wal2json")),
        ConfigError,
        'slot "lockstep_shop" uses the plugin wal2json',
        "source.slot",
    ),
    (
        FOUND._replace(slot=SLOT._replace(confirmed_lsn=LSN(0x5001))),
        GapError,
        'slot "lockstep_shop" is at 0/5001, the log only at 0/5000',
        "moved or recreated",
    ),
    (
        FOUND._replace(system_identifier="7432"),
        GapError,
        "the log comes from database shop of system 7431, this is shop of 7432",
        "source.dsn",
    ),
    (
        FOUND._replace(database="other"),
        GapError,
        "the log comes from database shop of system 7431, this is other of 7431",
        "source.dsn",
    ),
    (
        FOUND._replace(timeline=2),
        GapError,
        "the server is on timeline 2, the log was written from 1",
        "cdc teardown --topics",
    ),
    (
        FOUND._replace(publication=replace(PUBLICATION, oid=16999)),
        GapError,
        'publication "lockstep_shop" was dropped and created again',
        "not streamed",
    ),
    (
        FOUND._replace(publication=members(users=502)),
        GapError,
        'publication "lockstep_shop" no longer has public.follows',
        "cdc setup",
    ),
    (
        FOUND._replace(publication=members(follows=777, users=502)),
        GapError,
        'public.follows left the publication "lockstep_shop" and came back',
        "in no stream",
    ),
    (
        FOUND._replace(topic_ids={"shop.public.users": "cYd"}),
        GapError,
        "topic shop.public.users was deleted and created again",
        "lost downstream",
    ),
    (
        FOUND._replace(partitions={}),
        GapError,
        "topic shop.public.users is gone",
        "lost downstream",
    ),
    (
        FOUND._replace(partitions={"shop.public.users": 8}),
        ConfigError,
        "topic shop.public.users has 8 partitions, the resume record pins 4",
        "cdc teardown --topics",
    ),
]


@pytest.mark.parametrize(
    ("found", "kind", "what", "hint"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_what_would_lose_changes_is_refused(
    found: Found, kind: type[CDCError], what: str, hint: str
) -> None:
    with pytest.raises(CDCError) as raised:
        check(CONFIG, IDENTITY, POSITION, found)
    assert type(raised.value) is kind
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG
    assert raised.value.policy is Policy.HALT


def test_a_table_that_is_published_by_its_schema_may_not_leave() -> None:
    """Members by schema and by ALL TABLES have no membership of their own, and so no oid."""
    whole = members(follows=0, users=0)
    identity = replace(IDENTITY, publication=whole)
    check(CONFIG, identity, POSITION, FOUND._replace(publication=whole))
    with pytest.raises(GapError, match=r"no longer has public\.follows"):
        check(CONFIG, identity, POSITION, FOUND._replace(publication=members(users=0)))


def test_a_log_that_knew_no_topic_ids_is_accepted() -> None:
    check(CONFIG, replace(IDENTITY, topic_ids={}), POSITION, FOUND)


def test_a_log_written_from_another_slot_is_refused() -> None:
    config = replace(CONFIG, source=replace(CONFIG.source, slot="mine"))
    with pytest.raises(ConfigError) as raised:
        check(config, IDENTITY, POSITION, FOUND)
    assert 'written from slot "lockstep_shop", the configuration names "mine"' in raised.value.what
    assert "log.prefix" in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG
