"""Views as a job: what `cdc view` does; `apply`, `rebuild` and `drop` need Spark."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from cdc.cli.options import as_json as json_option
from cdc.cli.options import echo, print_json, with_config
from cdc.errors import ConfigError, Exit, UnavailableError
from cdc.events import LSN
from cdc.log import follower_reports
from lockstep.jobs.apply import app

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from cdc.config import Config
    from cdc.log.follower_reports import FollowerRecord
    from lockstep.jobs.views.planning import ViewStep
    from lockstep.jobs.views.plans import ViewPlan
    from lockstep.jobs.views.verifying import StoredView
    from lockstep.sinks.contract import Applied, Version

_POLL_SECONDS: Final = 0.3
# Postgres' answer must be the same before and after a comparison: after so many in which it was
# not, the complete mirrors are compared with, which have a state for each frontier. So are the
# view's other stores, after one.
_TRIES: Final = 5
_ALL: Final = LSN((1 << 64) - 1)

_names = click.argument("names", nargs=-1)


@click.group("view", epilog="\b\nExample:\n  python jobs/view.py check --config lockstep.yaml")
def main() -> None:
    """Check, explain, plan, verify or change maintained views."""


@main.command()
@with_config
@_names
@json_option
def check(config: Config, names: tuple[str, ...], *, as_json: bool) -> Exit:
    """Find what is wrong in views; see `cdc view check`."""
    found = list(_checked(config, names))
    if as_json:
        print_json(found)
    for each in () if as_json else found:
        what = f"{each['view']}: {each['refused'] or 'ok'}"
        echo(what + (f"\n  what to do: {each['hint']}" if each["hint"] else ""))
        for table, columns in each["unclustered"].items():
            echo(f"  reads {table} by {', '.join(columns)}: cluster its mirror by them")
    return Exit.CONFIG if any(each["refused"] for each in found) else Exit.OK


def _checked(config: Config, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    from lockstep.jobs.documents.mirror_cuts import LogVersions  # noqa: PLC0415 - not for --help
    from lockstep.jobs.views import code  # noqa: PLC0415 - as above
    from lockstep.jobs.views.plans import plan  # noqa: PLC0415 - as above

    versions = LogVersions(config)(_ALL)
    for name in names or config.views:
        try:
            found = plan(name, config.views, versions)
            if found.code is not None:
                code.loaded(name, found.code.task.source)
        except ConfigError as error:
            yield {"view": name, "refused": error.what, "hint": error.hint, "unclustered": {}}
        else:
            unclustered = _unclustered(config, found, versions)
            yield {"view": name, "refused": None, "hint": "", "unclustered": unclustered}


def _unclustered(
    config: Config, view: ViewPlan, versions: Mapping[str, Version]
) -> dict[str, list[str]]:
    """Return by which columns a view reads tables, of those that a mirror does not cluster."""
    from lockstep.jobs.views.paths import read_by  # noqa: PLC0415 - not for --help

    of_views = [each for each in config.followers.values() if view.name in each.views]
    mirrors = (config.followers[each.mirror].delta for each in of_views if each.mirror)
    clustered = [each.cluster for each in mirrors if each is not None]
    found = {
        table: [
            column
            for column in columns
            if column not in versions[table].key
            and any(column not in each.get(table, ()) for each in clustered)
        ]
        for table, columns in read_by(view.routes).items()
    }
    return {table: columns for table, columns in found.items() if columns}


def _plans(config: Config, names: Sequence[str]) -> list[ViewPlan]:
    from lockstep.jobs.documents.mirror_cuts import LogVersions  # noqa: PLC0415 - not for --help
    from lockstep.jobs.views.plans import plan  # noqa: PLC0415 - as above

    versions = LogVersions(config)(_ALL)
    return [plan(name, config.views, versions) for name in names or config.views]


@main.command()
@with_config
@_names
@json_option
def explain(config: Config, names: tuple[str, ...], *, as_json: bool) -> None:
    """Show how a view is maintained; see `cdc view explain`."""
    reports = follower_reports.read(config)
    found = [
        {**_explained(each), "last": _last(reports, each.name)} for each in _plans(config, names)
    ]
    if as_json:
        print_json(found)
        return
    for each in found:
        echo(f"{each['view']}: key {', '.join(each['key'])}")
        for table, how in each["tables"].items():
            echo(f"  changes of {table}: {how}")
        for follower, last in each["last"].items():
            took = f"{last['how']} in {last['seconds']:.1f} s, {last['why']}"
            echo(f"  last computed in {follower}, at {last['lsn']}: {took}")
        echo(f"  Spark runs: {each['sql']}")


def _last(reports: Mapping[str, FollowerRecord], view: str) -> dict[str, dict[str, Any]]:
    """Return how each follower's job computed a view the last time."""
    found = {name: each.views.get(view) for name, each in reports.items()}
    return {name: msgspec.structs.asdict(each) for name, each in found.items() if each is not None}


def _explained(view: ViewPlan) -> dict[str, Any]:
    return {
        "view": view.name,
        "key": list(view.key),
        "columns": {name: kind.title for name, kind in view.columns.items()},
        "tables": {table: _way(view, table) for table in sorted(view.tables)},
        "sql": view.new
        if view.code is None
        else "; ".join(f"{each.new} (for {each.name})" for each in view.code.inputs),
        "affected": [{"table": each.table, "sql": each.sql} for each in view.affected],
    }


def _way(view: ViewPlan, table: str) -> str:
    """Return how changes of a table are followed."""
    if table not in view.full_for:
        return f"the affected {', '.join(view.anchor)}"
    complete = f"complete recompute, because {view.full_for[table]}"
    if view.ranked is None or table in view.ranked.all.full_for:
        return complete
    anchor = ", ".join(view.ranked.all.anchor)
    return f"the affected {anchor} of all rows, while these fit in memory; otherwise {complete}"


@main.command()
@with_config
@_names
@click.option("--timeout", type=float, default=60.0)
@json_option
def verify(config: Config, names: tuple[str, ...], timeout: float, *, as_json: bool) -> Exit:
    """Compare views with Postgres; see `cdc view verify`."""
    changing = set[str]()
    found = [
        each
        for name, follower in config.followers.items()
        for each in _verified(
            config, name, [view for view in follower.views if view in (names or follower.views)],
            timeout, changing,
        )
    ]  # fmt: skip
    if not found:
        raise ConfigError(
            "no follower holds these views in a store whose rows can be compared",
            hint="`cdc view list` shows which followers hold a view",
        )
    if as_json:
        print_json(found)
    for each in () if as_json else found:
        differ = each["missing"] or each["extra"]
        what = f"{each['missing']} rows are missing, {each['extra']} should not be there"
        with_what = (
            "" if each["compared_with"] == "postgres" else f", at {each['lsn']} of the mirrors"
        )
        echo(f"{each['view']} in {each['follower']}: {what if differ else 'equal'}{with_what}")
    return Exit.FAILED if any(each["missing"] or each["extra"] for each in found) else Exit.OK


def _verified(
    config: Config, follower: str, views: Sequence[str], timeout: float, changing: set[str]
) -> Iterator[dict[str, Any]]:
    """Yield what is found of a follower's views; add to `changing` those that always change."""
    from cdc.source import token  # noqa: PLC0415 - not for --help
    from cdc.source.connection import connect  # noqa: PLC0415 - as above
    from lockstep.jobs.apply import stores  # noqa: PLC0415 - as above
    from lockstep.jobs.views.verifying import StoredView  # noqa: PLC0415 - as above

    with closing(connect(config)) as connection:
        for view in _plans(config, views) if views else ():
            shape = stores.shape(config.followers[follower], view.version.name)
            of_view = StoredView(config, view, shape)
            if why := of_view.incomparable or _unlisted(config, follower):
                echo(f"{view.name} in {follower} is not compared: {why}", err=True)
                continue
            deadline = time.monotonic() + timeout
            tries = 0 if view.is_of_mirrors else 1 if view.name in changing else _TRIES
            found = _asked(config, follower, of_view, deadline, tries)
            if found is None:
                changing.add(view.name)
                lsn, deadline = token.take(connection).lsn, time.monotonic() + timeout
                found = _recomputed(config, follower, of_view, lsn, deadline)
            yield {"view": view.name, "follower": follower, **found}


def _asked(
    config: Config, follower: str, of_view: StoredView, deadline: float, tries: int
) -> dict[str, Any] | None:
    """Compare a view with Postgres' answer; return None if that changes in each of the tries."""
    from cdc.source import answers, token  # noqa: PLC0415 - not for --help
    from cdc.source.connection import connect  # noqa: PLC0415 - as above

    asked = of_view.question()
    with closing(connect(config)) as connection:
        for _ in range(tries):
            before, lsn = answers.digest(connection, asked), token.take(connection).lsn
            with _sink(config, follower) as sink:
                _await(sink, follower, lsn, deadline)
                stored = of_view.as_text(of_view.rows(sink))
                found = answers.compare(connection, asked, stored)
            if answers.digest(connection, asked) == before:
                return {"lsn": str(lsn), "compared_with": "postgres", **found._asdict()}
    return None


def _unlisted(config: Config, follower: str) -> str:
    """Return why a store's rows can't be read; empty if they can."""
    from lockstep.sinks.contract import Listable  # noqa: PLC0415 - not for --help

    with _sink(config, follower) as sink:
        return "" if isinstance(sink, Listable) else "its sink does not list its rows"


def _sink(config: Config, follower: str) -> AbstractContextManager[Any]:
    from lockstep.jobs.apply import stores  # noqa: PLC0415 - not for --help

    return closing(stores.sink(config, follower, config.followers[follower]))


def _recomputed(
    config: Config, follower: str, of_view: StoredView, lsn: LSN, deadline: float
) -> dict[str, Any]:
    """Compare a view with one computed of the complete mirrors, at a frontier of its store."""
    from lockstep.jobs.spark.session import with_jars, work_session  # noqa: PLC0415 - not for --help
    from lockstep.jobs.views.cuts import ViewCuts  # noqa: PLC0415 - as above

    name = of_view.view.name
    title = f"lockstep verify of view {name}"
    cuts = ViewCuts(
        config, follower, lambda: work_session(with_jars(title), title, threading.Event())
    )
    with _sink(config, follower) as sink:
        seconds = deadline - time.monotonic()
        applied, stored = of_view.rows_at_frontier(sink, seconds, lsn)
    found = of_view.differing(of_view.shown(cuts.every_row(name, applied)), stored)
    return {"lsn": str(applied.lsn), "compared_with": "mirrors", **found._asdict()}


def _await(sink: Any, follower: str, lsn: LSN, deadline: float) -> Applied:  # noqa: ANN401 - a sink
    """Return what the store has applied, once that includes the LSN."""
    while (state := sink.open()) is None or state.applied.lsn < lsn:
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"follower {follower} has not applied {lsn} in time",
                hint="its job must run, and that of its mirror: `cdc follow`; or give --timeout",
            )
        time.sleep(_POLL_SECONDS)
    applied: Applied = state.applied
    return applied


@main.command()
@with_config
@click.argument("name")
@click.option("--timeout", type=float, default=600.0)
@json_option
def rebuild(config: Config, name: str, timeout: float, *, as_json: bool) -> Exit:
    """Compute a view's rows again; see `cdc view rebuild`."""
    from lockstep.jobs import changing_views as changing  # noqa: PLC0415 - not for --help

    app.begin(config)
    holders = [each for each, follower in config.followers.items() if name in follower.views]
    changing.rebuild(config, holders, name, changing.Patience(timeout))
    for each in () if as_json else holders:
        echo(f"{name} in {each}: computed again")
    if as_json:
        print_json([{"view": name, "follower": each} for each in holders])
    return Exit.OK


@main.command()
@with_config
@json_option
def plan(config: Config, *, as_json: bool) -> Exit:
    """Compare the stores with the declared views; see `cdc view plan`."""
    from lockstep.jobs.changing_views import planned  # noqa: PLC0415 - not for --help

    found = planned(config)
    if as_json:
        print_json([each._asdict() for each in found])
    for each in () if as_json else found:
        echo(_planned(each))
    if any(each.state == "refused" for each in found):
        return Exit.CONFIG
    return Exit.OK if all(each.state == "unchanged" for each in found) else Exit.FAILED


def _planned(step: ViewStep) -> str:
    effects = {
        "new": "all its rows are computed",
        "changed": "all its rows are computed, and replace the old ones in one commit",
        "dropped": "its rows stay until you drop it",
    }
    what = f"{step.view} in {step.follower}: {step.state}"
    if step.why:
        what += f" ({step.why})"
    if step.state in effects:
        what += f": {effects[step.state]}"
    return what + (f"\n  what to do: {step.command}" if step.command else "")


@main.command()
@with_config
@click.option("--timeout", type=float, default=600.0)
@json_option
def apply(config: Config, timeout: float, *, as_json: bool) -> Exit:
    """Build what is declared in every store; see `cdc view apply`."""
    from lockstep.jobs import changing_views as changing  # noqa: PLC0415 - not for --help

    app.begin(config)
    refused = [each for each in _checked(config, ()) if each["refused"]]
    if refused:
        lines = "".join(f"\n  view {each['view']}: {each['refused']}" for each in refused)
        raise ConfigError(
            f"nothing was changed, because views are refused:{lines}",
            hint="`cdc view check` says what to write instead",
        )
    found = changing.planned(config)
    changing.build(config, changing.Patience(timeout))
    was = {(each.view, each.follower): each.state for each in found}
    after = [
        {**each._asdict(), "was": was.get((each.view, each.follower), "new")}
        for each in changing.planned(config)
    ]
    if as_json:
        print_json(after)
    for each in () if as_json else after:
        echo(f"{each['view']} in {each['follower']}: {_applied(each)}")
    return Exit.OK


def _applied(step: dict[str, Any]) -> str:
    if step["state"] == "dropped":
        return f"no longer declared; to delete its rows: {step['command']}"
    return {"new": "built", "changed": "built again"}.get(step["was"], "unchanged")


@main.command()
@with_config
@click.argument("name")
@click.option("--follower", "followers", multiple=True)
@click.option("--timeout", type=float, default=600.0)
@json_option
def drop(
    config: Config, name: str, followers: tuple[str, ...], timeout: float, *, as_json: bool
) -> Exit:
    """Delete the rows of a view that is not declared; see `cdc view drop`."""
    from lockstep.jobs import changing_views as changing  # noqa: PLC0415 - not for --help

    app.begin(config)
    holders = [each for each, follower in config.followers.items() if follower.views]
    chosen = followers or holders
    had = changing.drop(config, chosen, name, changing.Patience(timeout))
    found = [{"view": name, "follower": each, "dropped": each in had} for each in chosen]
    for each in () if as_json else found:
        what = "its rows are deleted" if each["dropped"] else "not there"
        echo(f"{name} in {each['follower']}: {what}")
    if as_json:
        print_json(found)
    return Exit.OK


if __name__ == "__main__":
    app.run(main)
