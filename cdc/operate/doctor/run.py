"""Check source and log, and report what would stop the pipeline, with the exact fix.

Gathers the facts once, and pure checks judge them. A server that does not answer is itself a
finding; the checks of the other one still run. Changes nothing, and may be run at any time, also
while a daemon runs.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from cdc.config import Config, without_passwords
from cdc.errors import CDCError
from cdc.log import inspection as log_inspection
from cdc.log import reader, topics
from cdc.log.client import reach
from cdc.log.inspection import TRANSACTION_LOG
from cdc.log.topic_monitor import TopicMonitor
from cdc.operate import facts
from cdc.operate.doctor import (
    authority,
    continuity,
    failover,
    followers,
    migrations,
    requirements,
    verdict,
)
from cdc.operate.doctor.log import LogFacts, check_log
from cdc.operate.doctor.source import check_source
from cdc.operate.doctor.tables import check_tables
from cdc.operate.facts import SourceFacts
from cdc.operate.findings import Finding, error, warning
from cdc.publication.plan import has_topic
from cdc.source.connection import connect, translated
from cdc.source.tables import SourceTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from cdc.source.connection import Connection


# A table that is locked exclusively, as by VACUUM FULL, holds up nothing: what can't be read for it
# is reported.
_LOCK_TIMEOUT: Final = b"SET lock_timeout = '3s'"


def examine(config: Config) -> list[Finding]:
    """Return every finding, also the good ones: source first, then log, then how they match."""
    findings: list[Finding] = []
    with ExitStack() as stack:
        connection = source = None
        try:
            connection = stack.enter_context(connect(config))
            with translated("limiting how long a lock is waited for"):
                connection.execute(_LOCK_TIMEOUT)
            source = facts.source_facts(connection, config)
        except CDCError as failure:
            where = without_passwords(config.source.dsn)
            findings.append(error("postgres", f"{failure.what} ({where})", failure.hint))
        log = _log_facts(config, source.tables if source else [], findings)
        if connection is not None and source is not None:
            source = source._replace(set_up=log is not None and log.resume is not None)
            findings += _source(connection, config, source, log)
    if log is not None:
        findings += check_log(config, log)
    if source is not None and log is not None:
        known = {each.what for each in findings}  # what the daemon warns of, too
        findings += [each for each in verdict.examine(config) if each.what not in known]
        matched = continuity.examine(config, source.slot, log.resume)
        findings += _reported("continuity", matched)
    return findings


def _source(
    connection: Connection, config: Config, source: SourceFacts, log: LogFacts | None
) -> Iterator[Finding]:
    """Yield the findings of the source: its requirements, tables, rights and followers."""
    tables, unread = None, list[Finding]()
    try:
        tables = facts.tables_facts(
            connection, config, source.server, source.tables, source.publication
        )
        refused = facts.publication_refusal(connection, config, tables)
        source = source._replace(able=source.able._replace(publication=refused))
    except CDCError as failure:
        unread.append(error("tables", failure.what, failure.hint))
    try:
        if log is not None:  # the log shows whether an initial snapshot is due
            snapshot = facts.snapshot_facts(connection, config, source.tables)
            source = source._replace(snapshot=snapshot)
    except CDCError as failure:
        unread.append(error("snapshot", failure.what, failure.hint))
    yield from requirements.check(config, source)
    yield from check_source(config, source)
    yield from unread
    if tables is not None:
        yield from check_tables(config, tables)
    yield from _reported("migrations", migrations.examine(connection, config), warning)
    yield from _reported("rights", authority.examine(connection, config), warning)
    yield from _reported("failover", failover.examine(connection, config, source))
    if tables is not None and log is not None:
        captured = {str(each): each for each in source.tables if has_topic(config, each)}
        following = followers.CapturedTables(captured, tables.columns)
        yield from followers.check_followers(config, following)


def _reported(
    check: str,
    findings: Iterable[Finding],
    kind: Callable[[str, str, str], Finding] = error,
) -> Iterator[Finding]:
    """Yield the findings; what prevents the check is one itself."""
    try:
        yield from findings
    except CDCError as failure:
        yield kind(check, failure.what, failure.hint)


def _log_facts(
    config: Config, tables: list[SourceTable], findings: list[Finding]
) -> LogFacts | None:
    try:
        reach(config)
        client = topics.admin(config)
        cluster = log_inspection.cluster(client)
        wanted = facts.wanted_topics(config, tables)
        names = [*(topic.name for topic in wanted), TRANSACTION_LOG]
        # Before the topics are described: the first transaction ever creates the brokers' own
        # topic.
        transactions, resume = _probe(config), reader.read_resume(config)
        described = log_inspection.topics(client, names)
        return LogFacts(
            cluster=cluster,
            wanted=wanted,
            transaction_log=described.pop(TRANSACTION_LOG, None),
            topics=described,
            transactions=transactions,
            resume=resume,
            examined=TopicMonitor(config, client).examine(*resume) if resume else None,
        )
    except CDCError as failure:
        findings.append(
            error("kafka", f"{failure.what} ({config.log.bootstrap_servers})", failure.hint)
        )
        return None


def _probe(config: Config) -> str | None:
    try:
        log_inspection.probe_transactions(config)
    except CDCError as failure:
        return failure.what
    return None
