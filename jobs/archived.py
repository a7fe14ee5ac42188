"""Read the archive: `cdc archive status`, `prove`, `history`, `diff`. No Spark is needed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cdc.cli import stopping
from cdc.cli.options import as_json as json_option
from cdc.cli.options import echo, next_step, print_json, print_warning, with_config
from cdc.errors import CDCError, CompactedError, Exit, Policy
from cdc.events import LSN
from cdc.operate.readable import duration, size
from lockstep.jobs.apply import app

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.verify.noted import NotedChain
    from cdc.verify.topics import TopicsProof
    from lockstep.jobs.archiving.proving import ArchiveProof
    from lockstep.jobs.compacting.proving import BasesProof


@click.group("archived", epilog="\b\nExample:\n  python jobs/archived.py prove --offline")
def main() -> None:
    """Read the archive."""


@main.command()
@with_config
@json_option
def status(config: Config, *, as_json: bool) -> None:
    """Show what the archive holds; see `cdc archive status`."""
    from lockstep.jobs.archiving.describing import describe  # noqa: PLC0415 - not for --help
    from lockstep.jobs.compacting import describing as bases  # noqa: PLC0415 - as above

    found = describe(config)
    found["bases"] = bases.describe(config, found["seq"])
    if as_json:
        print_json(found)
        return
    at = datetime.fromtimestamp(found["committed_at_us"] / 1e6, UTC)
    echo(f"archive    {found['path']}")
    echo(f"frontier   {found['lsn']}, seq {found['seq']}, committed {at:%Y-%m-%d %H:%M:%S} UTC")
    echo(f"lag        {_lag(found)}")
    echo(f"holds      {found['records']:,} records in {found['cuts']:,} cuts")
    echo(
        f"size       {size(found['bytes'])} in {found['files']} files ({found['small_files']}"
        f" small), {found['bytes_per_record']} bytes a record"
    )
    echo(f"growth     {found['records_per_day']:,} records, {size(found['bytes_per_day'])} a day")
    echo(
        f"price      {found['price_per_month']} a month, in a year"
        f" {found['price_per_month_in_a_year']}"
    )
    echo(f"bases      {_bases(found['bases'])}")
    next_step("`cdc prove` checks it; `cdc doctor` shows how short Kafka may keep the log")


def _bases(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none: `cdc archive compact` makes one"
    at = datetime.fromtimestamp(found["committed_at_us"] / 1e6, UTC)
    return (
        f"{found['kept']}, {size(found['bytes'])}; the newest, {found['number']}, at"
        f" {found['lsn']} ({at:%Y-%m-%d %H:%M:%S} UTC), {found['events_since']:,} events since"
    )


def _lag(found: dict[str, Any]) -> str:
    if found["lag_events"] is None:
        return f"unknown: {found['log']}"
    if not found["lag_events"]:
        return "none"
    return f"{found['lag_events']:,} events, {duration(found['lag_seconds'])}"


@main.command()
@with_config
@click.option("--lsn", type=LSN.parse)
@click.option("--offline", is_flag=True)
@click.option("--chain")
@click.option("--digests", "place")
@json_option
def prove(
    config: Config,
    lsn: LSN | None,
    chain: str | None,
    place: str | None,
    *,
    offline: bool,
    as_json: bool,
) -> Exit:
    """Recompute every digest; see `cdc prove`."""
    from cdc.log import follower_reports  # noqa: PLC0415 - not for --help
    from cdc.operate.followers import ARCHIVE, BASES  # noqa: PLC0415 - as above
    from cdc.verify import topics  # noqa: PLC0415 - as above
    from lockstep.jobs.archiving import proving  # noqa: PLC0415 - as above
    from lockstep.jobs.archiving.running import opened  # noqa: PLC0415 - as above
    from lockstep.jobs.compacting import proving as bases_proving  # noqa: PLC0415 - as above

    # Read before log and tables, which may only grow meanwhile.
    noted = _noted(config, place)
    reports = {} if offline or not config.archive.path else follower_reports.read(config)
    kept = None
    if config.archive.path:
        witness = reports.get(ARCHIVE)
        theirs = proving.Noted(noted, has_log=not offline)
        kept = proving.prove(config, opened(config), lsn, chain, witness, theirs)
    known = topics.KnownChains(kept.chains if kept else {}, chain, noted)
    live = None if offline else topics.prove(config, lsn, known)
    findings = [f"log: {each}" for each in (live.findings if live else ())]
    findings += [f"archive: {each}" for each in (kept.findings if kept else ())]
    if live and kept and live.above is not None and live.above > kept.seq:
        lost = f"seq {kept.seq + 1} to {live.above} are in neither archive nor log"
        findings.append(f"archive: it ends at {kept.lsn}, and the log begins later: {lost}")
    bases = None
    if kept:
        chains, witness, folds = kept.chains, reports.get(BASES), not kept.findings
        bases = bases_proving.prove(config, chains, witness, upto=lsn, folds=folds)
    findings += [f"bases: {each}" for each in (bases.findings if bases else ())]
    if chain is not None and not any(each.anchored for each in (live, kept) if each):
        findings.append(f"no frontier up to there has the chain {chain}")
    if as_json:
        print_json({"complete": not findings, "findings": findings, **_proofs(live, kept, bases)})
    else:
        _print_proof(findings, live, kept, bases)
    return Exit.FAILED if findings else Exit.OK


def _noted(config: Config, place: str | None) -> list[NotedChain]:
    from lockstep.jobs.archiving.noting import Notes  # noqa: PLC0415 - not for --help

    return Notes(config, place).read() if place else []


@main.command()
@with_config
@click.option("--into", required=True)
@click.option("--follow", is_flag=True)
@click.option("--every", type=float, default=60.0)
@json_option
def digests(config: Config, into: str, every: float, *, follow: bool, as_json: bool) -> None:
    """Note the newest chain; see `cdc archive digests`."""
    from lockstep.jobs.archiving.noting import Notes  # noqa: PLC0415 - not for --help

    over, notes, backoff = stopping.requested(), Notes(config, into), False
    while not over.is_set():
        try:
            found, is_new = notes.note()
        except CDCError as error:
            if not follow or error.policy is not Policy.BACKOFF:
                raise
            if not backoff:
                print_warning(f"{error.what}; tried again every {every:g} s")
            backoff = True
        else:
            backoff = False
            if as_json:
                print_json({**found._asdict(), "lsn": str(found.lsn), "new": is_new})
            else:
                echo(f"{found}: chain {found.chain}{'' if is_new else ', noted before'}")
        if not follow:
            if not as_json:
                next_step(f"`cdc prove --digests {into}` compares log and archive with it")
            return
        over.wait(every)


def _proofs(
    live: TopicsProof | None, kept: ArchiveProof | None, bases: BasesProof | None
) -> dict[str, Any]:
    left_out = {"findings", "chains"}
    return {
        name: proof
        and {key: value for key, value in proof._asdict().items() if key not in left_out}
        for name, proof in (("log", live), ("archive", kept), ("bases", bases))
    }


def _print_proof(
    findings: list[str],
    live: TopicsProof | None,
    kept: ArchiveProof | None,
    bases: BasesProof | None,
) -> None:
    for each in findings:
        echo(f"{click.style('✗', fg='red')} {each}")
    for each in live.compacted if live else ():
        echo(f"- log: {each}: not compared, Kafka has compacted it")
    if live is not None:
        since = "nothing" if live.seq_from is None else f"seq {live.seq_from} to {live.seq}"
        echo(f"log        {since}, {live.events:,} events{_without(live.undigested)}")
        echo(f"           at {live.lsn}: chain {live.chain}")
    if kept is not None:
        erased = f", {kept.erased_events:,} events erased" if kept.erased_events else ""
        echo(
            f"archive    seq 1 to {kept.seq}, {kept.events:,} events in {kept.cuts:,}"
            f" cuts{_without(kept.undigested)}{erased}"
        )
        echo(f"           at {kept.lsn}: chain {kept.chain}, digest {kept.digest}")
        for name in kept.unnamed:
            echo(f"- archive: no commit names {name}: its job is writing it, or was killed before")
    if bases is not None and bases.bases:
        echo(f"bases      {bases.bases}; the newest, {bases.number}, has {bases.rows:,} rows")
        echo(f"           at {bases.lsn}")
    for name, proof in (("log", live), ("archive", kept)):
        if proof is not None and proof.noted:
            echo(f"noted      {proof.noted:,} chains are those of the {name}")
    if findings:
        next_step("restore what is named from a copy; a log without a gap archives it again")
    else:
        echo(f"{click.style('✓', fg='green')} complete and unaltered")
        next_step(
            "`cdc archive digests` notes the chain where the archive's writer can't change it"
        )


def _without(undigested: int) -> str:
    return f" ({undigested:,} without digests: counted)" if undigested else ""


@main.command()
@with_config
@click.argument("table")
@click.argument("key")
@json_option
def history(config: Config, table: str, key: str, *, as_json: bool) -> Exit:
    """Print every version of one row; see `cdc history`."""
    from msgspec.structs import asdict  # noqa: PLC0415 - not for --help

    from lockstep.jobs.archiving import versions  # noqa: PLC0415 - as above
    from lockstep.jobs.compacting.bases import with_base  # noqa: PLC0415 - as above

    try:
        found = versions.history(config, table, key)
    except CompactedError as error:
        raise with_base(config, error) from error
    if as_json:
        print_json([asdict(each) for each in found])
        return Exit.OK if found else Exit.FAILED
    for each in found:
        author = f"  by {each.author}" if each.author is not None else ""
        where = f"{each.lsn} seq {each.seq} transaction {each.transaction}"
        echo(f"{click.style(each.at, bold=True)}  {each.op}  {where}{author}")
        for name in dict.fromkeys([*(each.before or {}), *(each.after or {})]):
            old, new = (each.before or {}).get(name), (each.after or {}).get(name)
            if old != new or each.before is None:
                echo(f"    {name}: {old!r} → {new!r}")
        if each.unknown:
            echo(f"    not known: {', '.join(each.unknown)}")
    if not found:
        echo("neither archive nor log has a version of it")
    return Exit.OK if found else Exit.FAILED


@main.command()
@with_config
@click.argument("table")
@click.option("--from", "first", required=True)
@click.option("--to", "last", required=True)
@json_option
def diff(config: Config, table: str, first: str, last: str, *, as_json: bool) -> Exit:
    """Print what differs between two states; see `cdc diff`."""
    import msgspec  # noqa: PLC0415 - not for --help

    from cdc.log.row_keys import one_table  # noqa: PLC0415 - as above
    from lockstep.jobs.compacting.differences import differences  # noqa: PLC0415 - as above
    from lockstep.jobs.cuts.direct_tables import recorded_if_reachable  # noqa: PLC0415 - as above
    from lockstep.jobs.cuts.frontiers import parse  # noqa: PLC0415 - as above

    many, known = 0, recorded_if_reachable(config)
    for each in differences(config, one_table(table), parse(first), parse(last), known):
        many += 1
        if as_json:
            click.echo(msgspec.json.encode(each))
            continue
        echo(f"{click.style(str(each.key), bold=True)}  {each.op}")
        for name in dict.fromkeys([*(each.before or {}), *(each.after or {})]):
            old, new = (each.before or {}).get(name), (each.after or {}).get(name)
            if old != new or each.op != "update":
                echo(f"    {name}: {old!r} → {new!r}")
    if not many and not as_json:
        echo("no row differs")
    return Exit.OK if many else Exit.FAILED


@main.command()
@with_config
@click.option("--from", "first", required=True)
@click.option("--to", "last", required=True)
@click.option("--into", required=True)
@click.option("--table", "tables", multiple=True)
@json_option
def replay(
    config: Config, first: str, last: str, into: str, tables: tuple[str, ...], *, as_json: bool
) -> None:
    """Publish a range of the past to a topic; see `cdc replay`."""
    from lockstep.jobs.cuts.frontiers import parse  # noqa: PLC0415 - not for --help
    from lockstep.jobs.replaying import RangeReplay  # noqa: PLC0415 - as above

    found = RangeReplay(config, into, parse(first), parse(last), tables).run()
    if as_json:
        print_json(found._asdict())
        return
    if found.continued > found.first:
        echo(f"{into} had this replay up to seq {found.continued}")
    echo(f"{found.events:,} events published, seq {found.continued + 1} to {found.last}")
    if found.erased:
        echo(f"{found.erased:,} events of the range are erased")
    next_step(f"read {into} from its beginning; delete the topic when it is no longer needed")


@main.command()
@with_config
@click.argument("table")
@click.argument("key")
@click.option("--topics", is_flag=True)
@click.option("--mirrors", is_flag=True)
@click.option("--messages", "prefixes", multiple=True)
@json_option
def erase(
    config: Config,
    table: str,
    key: str,
    *,
    topics: bool,
    mirrors: bool,
    prefixes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Erase a row's events; see `cdc erase`."""
    from msgspec.structs import asdict  # noqa: PLC0415 - not for --help

    from lockstep.jobs.erasing import Erasing  # noqa: PLC0415 - as above

    found = Erasing(
        config, table, key, with_topics=topics, with_mirrors=mirrors, messages=prefixes
    ).run()
    erasure = found.erasure
    if as_json:
        left = [
            {"topic": topic, "partition": number, "first": first, "last": last}
            for (topic, number), (first, last) in found.topics.items()
        ]
        described = found._asdict() | {"topics": left, "erasure": erasure and asdict(erasure)}
        print_json(described)
        return
    if erasure is None:
        echo("the archive has nothing of the row; what earlier erasures left is completed")
    else:
        echo(
            f"{erasure.events:,} events ({erasure.records:,} records) of {erasure.table} erased,"
            f" seq {erasure.first_seq} to {erasure.last_seq}"
        )
    for (topic, number), (_, last) in found.topics.items():
        print_warning(f"{topic} [{number}] has records of it up to offset {last}, until retention")
    if found.epoch is not None:
        echo(f"the topics' records are deleted; epoch {found.epoch} has started")
    for name, written in found.mirrors.items():
        echo(f"{name}: {', '.join(written) or 'no mirror'} without it, and without older versions")
    for name, what in found.stores.items():
        print_warning(f"{name}: {what}")
    for prefix, many in found.messages.items():
        print_warning(
            f"{many:,} logical messages {prefix!r} of its transactions are kept;"
            f" --messages {prefix} erases them"
        )
    for name in found.unread:
        print_warning(f"{name} is named by no version and can't be read: erase again in an hour")
    next_step("`cdc prove` still passes, and shows how many events are erased")


if __name__ == "__main__":
    app.run(main)
