"""Each refusal at the start: what differs, and an exit code after which no supervisor restarts."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from cdc.config import Config, Log, Source
from cdc.errors import CDCError, ConfigError, Exit, GapError, Policy, ProtocolError
from cdc.events import LSN
from cdc.log.records import PinnedPublication, ResumeIdentity, ResumePosition
from cdc.publication.continuity import check
from cdc.source.catalog import SourceState
from cdc.source.slots import Slot
from cdc.source.timelines import Ancestor, System, parse_history

CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql://localhost/shop"),
    log=Log(bootstrap_servers="localhost:9092"),
)
PUBLICATION = PinnedPublication(
    "lockstep_shop", 16411, {"public.follows": 501, "public.users": 502}
)
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
POSITION = ResumePosition(
    end_lsn=LSN(0x5000),
    commit_lsn=LSN(0x4F80),
    ordinal=1,
    open=False,
    seq=1,
    committed_at_us=0,
    schema_id=1,
    owner="test",
    at_us=0,
)
SLOT = Slot(
    name="lockstep_shop",
    plugin="pgoutput",
    database="shop",
    active_pid=None,
    restart_lsn=LSN(0x4000),
    confirmed_flush_lsn=LSN(0x5000),
    wal_status="reserved",
    safe_wal_bytes=None,
    invalidation_reason=None,
    two_phase=False,
    retained_bytes=0,
)
SOURCE = SourceState(
    "shop",
    frozenset({"shop", "postgres"}),
    LSN(0x6000),
    SLOT,
    PUBLICATION,
    frozenset(PUBLICATION.tables),
)
SYSTEM = System("7431", 1)


class Found(NamedTuple):
    """The server and the source database as they are."""

    system: System
    source: SourceState


FOUND = Found(SYSTEM, SOURCE)


def source(**changes: object) -> Found:
    """Return what was found, with these facts of the source changed."""
    return FOUND._replace(source=SOURCE._replace(**changes))  # type: ignore[arg-type]


def slot(**changes: object) -> Found:
    """Return what was found, with these facts of the slot changed."""
    return source(slot=SLOT._replace(**changes))  # type: ignore[arg-type]


def promoted(left_at: int, **changes: object) -> Found:
    """Return what a server reports that left our timeline there."""
    system = System("7431", 3, (Ancestor(1, LSN(left_at)), Ancestor(2, LSN(left_at + 0x100))))
    return source(**changes)._replace(system=system)


def members(**tables: int) -> PinnedPublication:
    """Return the publication with these tables of `public`, by the oid of their membership."""
    return replace(PUBLICATION, tables={f"public.{name}": oid for name, oid in tables.items()})


def test_slot_log_and_source_that_meet_are_accepted() -> None:
    assert check(CONFIG, IDENTITY, POSITION, *FOUND) == IDENTITY


@pytest.mark.parametrize("left_at", [0x5000, 0x5001, 0x9000])
def test_a_promoted_server_that_has_all_of_the_log_is_followed(left_at: int) -> None:
    """The log records its timeline, so that the next start compares with this one."""
    going_on = check(CONFIG, IDENTITY, POSITION, *promoted(left_at, wal_end=LSN(left_at)))
    assert going_on == replace(IDENTITY, timeline=3)


def test_a_former_primary_is_refused() -> None:
    with pytest.raises(GapError, match="former primary") as raised:
        check(CONFIG, replace(IDENTITY, timeline=2), POSITION, *FOUND)
    assert "the primary of timeline 2" in raised.value.hint


def test_a_table_new_in_the_publication_goes_into_the_log() -> None:
    more = members(follows=501, users=502, new=503)
    going_on = check(CONFIG, IDENTITY, POSITION, *source(publication=more))
    assert going_on.publication == more


def test_a_history_file_names_each_ancestor() -> None:
    text = "1\t0/30001E8\tno recovery target specified\n\n# by hand\n2\t1A/FF\tbefore 2000-01-01\n"
    assert parse_history(text) == (Ancestor(1, LSN(0x30001E8)), Ancestor(2, LSN(0x1A000000FF)))
    with pytest.raises(ProtocolError):
        parse_history("1 nowhere")


@pytest.mark.parametrize(
    "found",
    [
        slot(confirmed_flush_lsn=LSN(0)),  # everything is replayed, and skipped
        slot(wal_status="extended"),
        source(publication=members(follows=501, users=502, new=503)),
        source(publication=members(people=502, follows=501)),  # renamed: the same member
        source(
            publication=members(users=502), tables=frozenset({"public.users"})
        ),  # dropped, with all its rows
        source(publication=replace(PUBLICATION, name="renamed")),
    ],
)
def test_what_loses_nothing_is_accepted(found: Found) -> None:
    check(CONFIG, IDENTITY, POSITION, *found)


REFUSED: list[tuple[Found, type[CDCError], str, str]] = [
    (
        slot(plugin="wal2json"),
        ConfigError,
        'slot "lockstep_shop" uses the plugin wal2json',
        "source.slot",
    ),
    (
        slot(confirmed_flush_lsn=LSN(0x5001)),
        GapError,
        'slot "lockstep_shop" is at 0/5001, the log only at 0/5000',
        "moved or recreated",
    ),
    (
        FOUND._replace(system=System("7432", 1)),
        GapError,
        "the log comes from system 7431, this is 7432: another cluster, as after pg_upgrade",
        "source.dsn",
    ),
    (
        source(database="other"),
        GapError,
        "the log comes from database shop, this is other; both exist",
        "source.dsn",
    ),
    (
        source(database="new", databases=frozenset({"new"}), slot=SLOT._replace(database="new")),
        GapError,
        "this is new; it was renamed, and the slot with it",
        "source.dsn",
    ),
    (
        source(database="other", databases=frozenset({"other"}), slot=None),
        GapError,
        "this is other; the former no longer exists",
        "source.dsn",
    ),
    (
        source(wal_end=LSN(0x4FFF)),
        GapError,
        "the server's WAL ends at 0/4FFF, the log holds it up to 0/5000: the server was set back",
        "no longer has",
    ),
    (
        promoted(0x4F00),
        GapError,
        "to timeline 3 at 0/4F00, the log holds timeline 1 up to 0/5000: it is 256 bytes of",
        "synchronized_standby_slots",
    ),
    (
        promoted(0x5000, slot=None),
        GapError,
        'slot "lockstep_shop" does not exist on this server, which was promoted',
        "failover = true",
    ),
    (
        source(slot=None),
        GapError,
        'slot "lockstep_shop" does not exist',
        "cdc setup",
    ),
    (
        slot(wal_status="lost", invalidation_reason="idle_timeout"),
        GapError,
        "was invalidated: no daemon read from it",
        "cdc setup",
    ),
    (
        slot(wal_status="lost"),  # before Postgres 17 there is no reason given
        GapError,
        "was invalidated: the WAL it needs was removed",
        "cdc setup",
    ),
    (
        slot(two_phase=True),
        ConfigError,
        "decodes prepared transactions before they are decided",
        "cdc slot alter --no-two-phase",
    ),
    (
        source(publication=None),
        GapError,
        'publication "lockstep_shop" does not exist',
        "not streamed",
    ),
    (
        FOUND._replace(system=System("7431", 2)),
        GapError,
        "the server is on timeline 2 and names no point where it left timeline 1",
        "cdc teardown --topics",
    ),
    (
        source(publication=replace(PUBLICATION, oid=16999)),
        GapError,
        'publication "lockstep_shop" was dropped and created again',
        "not streamed",
    ),
    (
        source(publication=members(users=502)),
        GapError,
        'publication "lockstep_shop" no longer has public.follows',
        "cdc setup",
    ),
    (
        source(publication=members(follows=777, users=502)),
        GapError,
        'public.follows left the publication "lockstep_shop" and came back',
        "in no stream",
    ),
]


@pytest.mark.parametrize(
    ("found", "kind", "what", "hint"), REFUSED, ids=lambda value: str(value)[:40]
)
def test_what_would_lose_changes_is_refused(
    found: Found, kind: type[CDCError], what: str, hint: str
) -> None:
    with pytest.raises(CDCError) as raised:
        check(CONFIG, IDENTITY, POSITION, *found)
    assert type(raised.value) is kind
    assert what in raised.value.what
    assert hint in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG
    assert raised.value.policy is Policy.HALT


def test_a_table_that_is_published_by_its_schema_may_not_leave() -> None:
    """Members by schema and by ALL TABLES have no membership of their own, and so no oid."""
    complete = members(follows=0, users=0)
    identity = replace(IDENTITY, publication=complete)
    check(CONFIG, identity, POSITION, *source(publication=complete))
    with pytest.raises(GapError, match=r"no longer has public\.follows"):
        check(CONFIG, identity, POSITION, *source(publication=members(users=0)))


def test_a_log_written_from_another_slot_is_refused() -> None:
    config = replace(CONFIG, source=replace(CONFIG.source, slot="mine"))
    with pytest.raises(ConfigError) as raised:
        check(config, IDENTITY, POSITION, *FOUND)
    assert 'written from slot "lockstep_shop", the configuration names "mine"' in raised.value.what
    assert "log.prefix" in raised.value.hint
    assert raised.value.exit_code is Exit.CONFIG
