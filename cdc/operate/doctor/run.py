"""Check source and log, and report what would stop the pipeline, with the exact fix.

Gathers the facts once, and pure checks judge them. A server that does not answer is itself a
finding; the checks of the other one still run. Changes nothing, and may be run at any time, also
while a daemon runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.config import without_passwords
from cdc.errors import CDCError
from cdc.log import inspection as log_inspection
from cdc.log import reader, topics
from cdc.log.client import reach
from cdc.log.inspection import TRANSACTION_LOG
from cdc.log.topic_monitor import LogWatch
from cdc.operate import start_checks as readiness
from cdc.operate.doctor import authority as doctor_authority
from cdc.operate.doctor import continuity as doctor_meeting
from cdc.operate.doctor import failover as doctor_failover
from cdc.operate.doctor import followers as doctor_followers
from cdc.operate.doctor import migrations as doctor_migrations
from cdc.operate.doctor import requirements
from cdc.operate.doctor import tables as doctor_tables
from cdc.operate.doctor import verdict as doctor_verdict
from cdc.operate.doctor.log import LogFacts, check_log
from cdc.operate.doctor.source import SourceFacts, check_source
from cdc.operate.findings import Finding, error
from cdc.publication.plan import has_topic
from cdc.source import server as source_inspection
from cdc.source.connection import connect

if TYPE_CHECKING:
    from cdc.config import Config


def examine(config: Config) -> list[Finding]:
    """Return every finding, also the good ones: source first, then log, then how they match."""
    findings: list[Finding] = []
    source = _source_facts(config, findings)
    log = _log_facts(config, source.tables if source else [], findings)
    if source is not None:
        source = source._replace(set_up=log is not None and log.resume is not None)
        findings += _requirements(config, source, log)
        findings += check_source(config, source)
        findings += _tables(config, source)
        findings += doctor_migrations.examine(config)
        findings += doctor_authority.examine(config)
        findings += doctor_failover.examine(config, source.server, source.slot)
    if log is not None:
        findings += check_log(config, log)
    if source is not None and log is not None:
        findings += doctor_followers.examine(config, source.tables)
        findings += doctor_verdict.examine(config)
        findings += doctor_meeting.examine(config, source.slot, log.resume)
    return findings


def _source_facts(config: Config, findings: list[Finding]) -> SourceFacts | None:
    try:
        with connect(config) as connection:
            return readiness.gather(connection, config, set_up=False)
    except CDCError as failure:
        where = without_passwords(config.source.dsn)
        findings.append(error("postgres", f"{failure.what} ({where})", failure.hint))
        return None


def _requirements(config: Config, source: SourceFacts, log: LogFacts | None) -> list[Finding]:
    """Return the findings on what `cdc setup` requires."""
    if log is None:  # the log shows whether an initial snapshot is due
        return requirements.check(config, requirements.Facts(source, None))
    try:
        facts = readiness.with_snapshot(config, source)
    except CDCError as failure:
        facts = requirements.Facts(source, None)
        return [
            *requirements.check(config, facts),
            error("snapshot", failure.what, failure.hint),
        ]
    return requirements.check(config, facts)


def _tables(config: Config, source: SourceFacts) -> list[Finding]:
    try:
        return doctor_tables.examine(config, source.server, source.tables)
    except CDCError as failure:
        return [error("tables", failure.what, failure.hint)]


def _log_facts(
    config: Config, tables: list[source_inspection.Table], findings: list[Finding]
) -> LogFacts | None:
    try:
        reach(config)
        client = topics.admin(config)
        cluster = log_inspection.cluster(client)
        wanted = topics.internal_topics(config) + [
            topics.data_topic(config, table.schema, table.name)
            for table in tables
            if has_topic(config, table)
        ]
        names = [*(topic.name for topic in wanted), TRANSACTION_LOG]
        # Before the topics are described: the first transaction ever creates the brokers' own
        # topic.
        transactions, resume = _probe(config), reader.read_resume(config)
        facts = log_inspection.topics(client, names)
        return LogFacts(
            cluster=cluster,
            wanted=wanted,
            transaction_log=facts.pop(TRANSACTION_LOG, None),
            topics=facts,
            transactions=transactions,
            resume=resume,
            examined=LogWatch(config, client).examine(*resume) if resume else None,
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
