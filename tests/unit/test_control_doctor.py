"""Every problem that would stop the pipeline is found, and comes with its fix."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cdc.config import Config, Log, Source
from cdc.config.model import Migrations
from cdc.errors import ConfigError, GapError, PermissionDeniedError
from cdc.events import LSN
from cdc.log.inspection import InspectedCluster, TopicFacts
from cdc.log.records import PinnedPublication, ResumeIdentity, ResumePosition
from cdc.log.topic_monitor import Examined
from cdc.log.topics import data_topic, internal_topics
from cdc.operate.doctor import requirements
from cdc.operate.doctor.continuity import check_continuity, check_slot_without_log
from cdc.operate.doctor.log import LogFacts, check_log
from cdc.operate.doctor.source import check_source
from cdc.operate.facts import SourceFacts
from cdc.operate.findings import Finding, Severity, worst
from cdc.operate.readable import size
from cdc.runtime import extras
from cdc.source.abilities import Abilities, PublicationRefusal
from cdc.source.catalog import SourceState
from cdc.source.publication_note import PublicationNote
from cdc.source.publications import Publication, PublicationEntry, PublishedTable
from cdc.source.server import OpenTransaction, Server
from cdc.source.slots import Slot
from cdc.source.tables import SourceTable
from cdc.source.timelines import Ancestor, System

CONFIG = Config(
    pipeline="shop",
    source=Source(dsn="postgresql://me@localhost/shop"),
    log=Log(bootstrap_servers="localhost:9092"),
)
SETTINGS = {
    "wal_level": "logical",
    "max_replication_slots": "10",
    "max_wal_senders": "10",
    "max_slot_wal_keep_size": "4096",
    "wal_sender_timeout": "60000",
}
SERVER = Server(
    version=170011,
    version_text="17.11",
    in_recovery=False,
    system_identifier="7",
    timeline=1,
    wal_lsn=LSN(1000),
    database="shop",
    role="me",
    superuser=False,
    may_create=True,
    settings=SETTINGS,
    slots_in_use=1,
    senders_in_use=1,
)
SLOT = Slot(
    name="lockstep_shop",
    plugin="pgoutput",
    database="shop",
    active_pid=None,
    restart_lsn=LSN(400),
    confirmed_flush_lsn=LSN(500),
    wal_status="reserved",
    safe_wal_bytes=None,
    invalidation_reason=None,
    two_phase=False,
    retained_bytes=600,
)
TABLE = SourceTable(
    oid=1,
    schema="public",
    name="users",
    kind="r",
    persistence="p",
    replica_identity="d",
    has_primary_key=True,
    identifies_rows=True,
    owner="me",
    owned=True,
    may_select=True,
    estimated_rows=0,
    catalog_name="public.users",
)
PUBLICATION = Publication(
    name="lockstep_shop",
    oid=99,
    owner="me",
    operations=frozenset({"insert", "update", "delete", "truncate"}),
    via_root=True,
    generated="none",
    all_tables=False,
    version=700,
    note=PublicationNote({}, {}),
    entries={1: PublicationEntry(1, "public", "users", "public.users")},
    schemas={},
    published={1: PublishedTable("public", "users", "public.users", 1)},
)
FACTS = SourceFacts(SERVER, SLOT, PUBLICATION, [TABLE], [], set_up=True)


def check_all(config: Config, facts: SourceFacts) -> list[Finding]:
    """Return the doctor's findings about the source: requirements, and all others."""
    return requirements.check(config, facts) + check_source(config, facts)


def found(findings: list[Finding], check: str) -> Finding:
    return next(each for each in findings if each.check == check)


def test_a_source_in_order_gives_no_complaint() -> None:
    assert worst(check_all(CONFIG, FACTS)) is Severity.OK


def test_migrations_need_their_extra_before_anything_is_created(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    wanted = replace(CONFIG, migrations=Migrations(signal_table=True))
    missing = found(check_all(wanted, FACTS), "migrations")
    assert missing.severity is Severity.ERROR
    assert "pip install 'lockstep-cdc[migrations]'" in missing.fix
    with pytest.raises(ConfigError, match="migrations"):
        requirements.refuse(wanted, FACTS)
    assert worst(check_all(CONFIG, FACTS)) is Severity.OK, "who wants none needs none"


def server(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    return {"server": SERVER._replace(**changes)}


def setting(name: str, value: str) -> dict[str, Any]:
    return server(settings=SETTINGS | {name: value})


DENIED = PublicationRefusal(
    PermissionDeniedError("must be owner", hint="x"), "CREATE PUBLICATION p;"
)


def able(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    return {"able": Abilities(**changes)}


def slot(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    return {"slot": SLOT._replace(**changes)}


def publication(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    return {"publication": PUBLICATION._replace(**changes)}


def table(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    return {"tables": [TABLE._replace(**changes)]}


SOURCE_CASES: list[tuple[dict[str, Any], str, str, str]] = [
    (server(version=130020), "version", "error", "upgrade Postgres"),
    (server(version=190000), "version", "warning", "newer Lockstep"),
    (server(in_recovery=True), "primary", "error", "target_session_attrs"),
    (setting("wal_level", "replica"), "wal_level", "error", "SET wal_level = 'logical'"),
    (setting("wal_sender_timeout", "5000"), "wal_sender_timeout", "warning", "'60s'"),
    (setting("max_slot_wal_keep_size", "-1"), "max_slot_wal_keep_size", "warning", "ALTER SYSTEM"),
    (
        setting("idle_replication_slot_timeout", "60"),
        "idle_replication_slot_timeout",
        "warning",
        "= 0",
    ),
    (
        server(slots_in_use=10) | {"slot": None, "set_up": False},
        "max_replication_slots",
        "error",
        "= 20",
    ),
    (server(senders_in_use=10), "max_wal_senders", "error", "= 20"),
    (
        able(slot="must have REPLICATION") | {"slot": None},
        "replication",
        "error",
        'ALTER ROLE "me" REPLICATION;',
    ),
    (
        able(slot="denied", managed="rds.logical_replication") | {"slot": None},
        "replication",
        "error",
        'GRANT rds_replication TO "me";',
    ),
    (
        server(may_create=False, settings=SETTINGS)
        | able(publication=DENIED)
        | {"publication": None, "set_up": False},
        "create",
        "error",
        'GRANT CREATE ON DATABASE "shop" TO "me";',
    ),
    (table(may_select=False), "select", "warning", 'GRANT SELECT ON "public"."users" TO "me";'),
    (
        table(owned=False, owner="app") | able(publication=DENIED),
        "owner",
        "error",
        'GRANT "app" TO "me";',
    ),
    (
        table(owned=False, owner="root") | able(publication=DENIED, superusers=frozenset({"root"})),
        "owner",
        "error",
        "CREATE PUBLICATION p;",
    ),
    (
        setting("wal_level", "replica") | able(pending=frozenset({"wal_level"})),
        "wal_level",
        "error",
        "restart Postgres",
    ),
    (
        setting("wal_level", "replica") | able(settable=frozenset(), managed="the parameter group"),
        "wal_level",
        "error",
        "set wal_level = logical in the parameter group, then restart it",
    ),
    (
        setting("wal_level", "replica") | able(settable=frozenset()),
        "wal_level",
        "error",
        "as a superuser: ALTER SYSTEM",
    ),
    (
        setting("wal_level", "replica") | able(settable=frozenset({"wal_level"})),
        "wal_level",
        "error",
        "ALTER SYSTEM SET wal_level = 'logical'; SELECT pg_reload_conf();  -- then restart",
    ),
    ({"tables": []}, "tables", "error", "source.tables"),
    (table(persistence="u"), "unlogged", "note", 'ALTER TABLE "public"."users" SET LOGGED;'),
    (
        table(has_primary_key=False, identifies_rows=False),
        "replica_identity",
        "warning",
        "REPLICA IDENTITY FULL",
    ),
    (
        table(replica_identity="n", identifies_rows=False),
        "replica_identity",
        "warning",
        "REPLICA IDENTITY DEFAULT",
    ),
    (
        table(replica_identity="i", identifies_rows=False),
        "replica_identity",
        "warning",
        "REPLICA IDENTITY DEFAULT",
    ),
    (table(replica_identity="f"), "replica_identity_full", "note", ""),
    ({"publication": None}, "publication", "error", "cdc teardown --topics"),
    ({"publication": None, "set_up": False}, "publication", "note", "cdc setup"),
    (
        publication(operations=frozenset({"insert"})),
        "publish",
        "error",
        "SET (publish = 'insert, update, delete, truncate')",
    ),
    ({"slot": None}, "slot", "error", "cdc teardown --topics"),
    ({"slot": None, "set_up": False}, "slot", "note", "cdc setup"),
    (slot(plugin="test_decoding"), "slot", "error", "pg_drop_replication_slot"),
    (slot(database="other"), "slot", "error", "source.slot"),
    (slot(wal_status="lost"), "slot", "error", "cdc teardown --topics"),
    (slot(invalidation_reason="wal_removed"), "slot", "error", "cdc teardown --topics"),
    (slot(wal_status="unreserved"), "slot", "error", "cdc run"),
    (slot(safe_wal_bytes=1000), "slot", "warning", "cdc run"),
    (slot(two_phase=True), "slot_two_phase", "error", "cdc teardown --topics"),
    ({"holders": [OpenTransaction(7, None, 4000.0)]}, "open_transaction", "warning", "backend(7)"),
    (
        {"holders": [OpenTransaction(None, "it's", 4000.0)]},
        "prepared",
        "warning",
        "COMMIT PREPARED 'it''s'",
    ),
]


@pytest.mark.parametrize(("changes", "check", "severity", "fix"), SOURCE_CASES)
def test_what_is_wrong_with_the_source_is_found(
    changes: dict[str, Any], check: str, severity: str, fix: str
) -> None:
    finding = found(check_all(CONFIG, FACTS._replace(**changes)), check)
    assert finding.severity.value == severity
    assert fix in finding.fix


def test_a_transaction_of_a_minute_is_no_finding() -> None:
    facts = FACTS._replace(holders=[OpenTransaction(7, None, 60.0)])
    assert worst(check_all(CONFIG, facts)) is Severity.OK


WANTED = [*internal_topics(CONFIG), data_topic(CONFIG, "public", "users")]
TOPICS = {
    topic.name: TopicFacts(topic.name, topic.partitions, 1, 1, 0, topic.config) for topic in WANTED
}
IDENTITY = ResumeIdentity(
    pipeline="shop",
    epoch=1,
    system_identifier="7",
    timeline=1,
    database="shop",
    slot="lockstep_shop",
    publication=PinnedPublication("lockstep_shop", 99, {"public.users": 72}),
    partitions={"shop.public.users": 4},
)
POSITION = ResumePosition(
    end_lsn=LSN(500),
    commit_lsn=LSN(490),
    ordinal=1,
    open=False,
    seq=3,
    committed_at_us=0,
    schema_id=1,
    owner="x",
    at_us=0,
)
LOG = LogFacts(
    cluster=InspectedCluster("c", 1, {"transaction.max.timeout.ms": "900000"}),
    wanted=WANTED,
    topics=TOPICS,
    transactions=None,
    resume=(IDENTITY, POSITION),
    transaction_log=None,
    examined=Examined([], {}, {}),
)


def users(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of a tuple
    name = "shop.public.users"
    return {"topics": TOPICS | {name: TOPICS[name]._replace(**changes)}}


def copies(replicas: int, in_sync: int, least: int) -> dict[str, Any]:
    """A data topic with `replicas` copies, of which `least` must be in sync."""
    settings = {"min.insync.replicas": str(least)}
    return users(replicas=replicas, in_sync=in_sync, settings=settings)


def transaction_log(replicas: int, least: int) -> dict[str, Any]:
    """Three brokers, and their own topic with `replicas` copies."""
    settings = {"min.insync.replicas": str(least)}
    state = TopicFacts("__transaction_state", 50, replicas, replicas, 0, settings)
    return {"cluster": InspectedCluster("c", 3, {}), "transaction_log": state}


LOG_CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"transactions": "denied"}, "transactions", "error", "transactional ids"),
    (
        {"cluster": InspectedCluster("c", 1, {"transaction.max.timeout.ms": "1000"})},
        "transaction.max.timeout.ms",
        "error",
        "transaction.timeout.ms: 1000",
    ),
    (
        {"cluster": InspectedCluster("c", 3, {})},
        "replication_factor",
        "warning",
        "replication_factor: 3",
    ),
    ({"topics": {}, "resume": None}, "topics", "note", "cdc setup"),
    (users(partitions=6) | {"resume": None}, "topic_partitions", "error", "log.partitions: 6"),
    (users(leaderless=1), "topic_leader", "error", "brokers"),
    (
        users(settings={"cleanup.policy": "compact"}),
        "cleanup.policy",
        "error",
        "--add-config cleanup.policy=delete",
    ),
    (
        users(settings={"retention.ms": "1000"}),
        "topic_settings",
        "warning",
        "--add-config retention.ms=604800000",
    ),
    (
        users(settings={"retention.ms": "-1"}),
        "frontier_retention",
        "warning",
        "--entity-name shop.cdc.frontier --add-config retention.ms=-1",
    ),
    (users(settings={"retention.bytes": "99"}), "retention.bytes", "warning", "bytes=-1"),
    (
        users(settings={"unclean.leader.election.enable": "true"}),
        "unclean.leader.election.enable",
        "warning",
        "unclean.leader.election.enable=false",
    ),
    (copies(3, 3, 1), "min.insync.replicas", "warning", "min.insync.replicas=2"),
    (copies(3, 3, 3), "min.insync.replicas", "warning", "min.insync.replicas=2"),
    (copies(1, 1, 2), "min.insync.replicas", "error", "min.insync.replicas=1"),
    (copies(3, 1, 2), "topic_in_sync", "error", "start the brokers"),
    (transaction_log(1, 1), "transaction.state.log", "warning", "kafka-reassign-partitions.sh"),
    (transaction_log(3, 3), "transaction.state.log", "warning", "min.insync.replicas=2"),
    (transaction_log(3, 2), "transaction.state.log", "ok", ""),
    (
        {"examined": Examined([GapError("lost", hint="start over")], {}, {})},
        "log",
        "error",
        "start over",
    ),
    (
        {"examined": Examined([], {}, {("shop.public.users", 2): 77})},
        "open_transaction",
        "warning",
        "abort --topic shop.public.users --partition 2 --start-offset 77",
    ),
]


def test_a_log_in_order_gives_no_complaint() -> None:
    assert worst(check_log(CONFIG, LOG)) in (Severity.OK, Severity.NOTE)


@pytest.mark.parametrize(("changes", "check", "severity", "fix"), LOG_CASES)
def test_what_is_wrong_with_the_log_is_found(
    changes: dict[str, Any], check: str, severity: str, fix: str
) -> None:
    finding = found(check_log(CONFIG, LOG._replace(**changes)), check)
    assert finding.severity.value == severity
    assert fix in finding.fix


SYSTEM = System("7", 1)
SOURCE = SourceState(
    "shop", frozenset({"shop"}), LSN(1000), SLOT, IDENTITY.publication, frozenset({"public.users"})
)


def meeting(system: System = SYSTEM, **changes: Any) -> Finding:  # noqa: ANN401 - fields of a tuple
    source = SOURCE._replace(**changes)
    return check_continuity(CONFIG, (IDENTITY, POSITION), system, source)


def test_a_slot_that_reaches_back_to_the_log_continues_it() -> None:
    assert meeting().severity is Severity.OK
    assert "lost none" not in meeting().what


def test_a_promotion_that_lost_nothing_is_ok() -> None:
    finding = meeting(System("7", 2, (Ancestor(1, LSN(500)),)))
    assert finding.severity is Severity.OK
    assert "the promotion to timeline 2 lost none of it" in finding.what


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (meeting(slot=SLOT._replace(confirmed_flush_lsn=LSN(501))), "are no longer in the stream"),
        (meeting(System("8", 1)), "another cluster"),
        (meeting(System("7", 2, (Ancestor(1, LSN(499)),))), "1 bytes of WAL ahead"),
        (meeting(database="other"), "this is other"),
        (meeting(publication=replace(IDENTITY.publication, oid=100)), "dropped and created again"),
    ],
)
def test_a_gap_between_source_and_log_is_found_as_the_daemon_would(
    finding: Finding, words: str
) -> None:
    assert (finding.check, finding.severity) == ("continuity", Severity.ERROR)
    assert words in finding.what
    assert finding.fix


def test_a_slot_without_a_record_is_found_and_nothing_yet_is_no_gap() -> None:
    (finding,) = check_slot_without_log(SLOT)
    assert (finding.check, finding.severity) == ("resume", Severity.ERROR)
    assert list(check_slot_without_log(None)) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB")],
)
def test_sizes_are_readable(count: int, text: str) -> None:
    assert size(count) == text
