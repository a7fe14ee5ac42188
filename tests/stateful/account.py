"""Postgres' own account of every committed change, compared with the log event by event.

A slot with the plugin `test_decoding` reports, in commit order, each change with the columns and
values that it had at its LSN. Only this module parses its text; the log's events are converted to
the same form, where a changed key is one update again.
"""

from __future__ import annotations

import base64
import re
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import orjson

from cdc.log.records import ALTERED
from tests.fixtures.daemon import PipelineUnderTest
from tests.fixtures.witness import records_of
from tests.stateful.source import SCHEMAS

_ROW: Final = re.compile(r"table (\S+)\.(\S+): (INSERT|UPDATE|DELETE): (.*)", re.DOTALL)
_TRUNCATE: Final = re.compile(r"table (.+): TRUNCATE: ")
_MESSAGE: Final = re.compile(r"message: transactional: (\d) prefix: ([\w.]+), sz: \d+ content:(.*)")
_COLUMN: Final = re.compile(
    r"""(\w+)\[([^\]]+)\]:(null|unchanged-toast-datum|'(?:[^']|'')*'|\S+)(?: |$)""", re.DOTALL
)
_UNSENT: Final = "unchanged-toast-datum"
# A partitioned table's rows have the table's own name, and only that name's truncates count.
_PARTS: Final = {"app.part_0": "app.part", "app.part_1": "app.part"}

Row = dict[str, str | None]


class Change(NamedTuple):
    """One change: `old` and `new` as far as they are sent; `unsent` are `new`'s missing columns."""

    kind: str
    table: str
    old: Row
    new: Row
    unsent: frozenset[str] = frozenset()


def reported(pipeline: PipelineUnderTest, slot: str) -> list[Change]:
    """Return every change of a captured table, in commit order."""
    with pipeline.database.connect() as connection:
        rows = connection.execute(
            "SELECT data FROM pg_logical_slot_get_changes(%s, NULL, NULL, 'include-xids', '0',"
            " 'skip-empty-xacts', '1')",
            (slot,),
        ).fetchall()
    return [change for (text,) in rows for change in _parsed(text)]


def _parsed(text: str) -> list[Change]:
    if found := _ROW.match(text):
        table = _PARTS.get(f"{found[1]}.{found[2]}", f"{found[1]}.{found[2]}")
        if found[1] not in SCHEMAS:
            return []
        return [_change(found[3][0].lower(), table, found[4])]
    if found := _TRUNCATE.match(text):
        names = [name for name in found[1].split(", ") if name not in _PARTS]
        return [Change("t", name, {}, {}) for name in names if name.split(".")[0] in SCHEMAS]
    if found := _MESSAGE.match(text):
        if found[2].startswith("lockstep."):  # for the daemon, which does not publish it
            return []
        return [Change("m", "", {}, {found[2]: found[3]})]
    assert text.startswith(("BEGIN", "COMMIT")), text[:40]
    return []


def _change(kind: str, table: str, text: str) -> Change:
    old: Row = {}
    if text.startswith("old-key: "):
        before, _, text = text.removeprefix("old-key: ").partition(" new-tuple: ")
        old = _columns(before)
    columns = _columns(text)
    unsent = frozenset(name for name, value in columns.items() if value == _UNSENT)
    if kind == "d":
        return Change(kind, table, columns, {})
    known = {name: value for name, value in columns.items() if name not in unsent}
    return Change(kind, table, old, known, unsent)


def _columns(text: str) -> Row:
    columns: Row = {}
    for name, _, value in _COLUMN.findall(text):
        quoted = value.startswith("'")
        plain = value[1:-1].replace("''", "'") if quoted else value
        columns[name] = None if value == "null" else plain
    return columns


def events(pipeline: PipelineUnderTest) -> list[dict[str, Any]]:
    """Return every event of the log by seq, which must be dense, and each partition in order."""
    found: list[dict[str, Any]] = []
    own = f"{pipeline.config.prefix}.cdc."
    newest: dict[tuple[str, int], int] = {}
    records = records_of(
        pipeline, lambda topic: pipeline.is_data(topic) or topic == f"{own}messages"
    )
    for record in records:
        if record.value is None:
            continue
        event = orjson.loads(record.value)
        place = (record.topic, record.partition)
        assert event["source"]["seq"] > newest.get(place, 0), f"out of order in {place}"
        newest[place] = event["source"]["seq"]
        found.append(event)
    found.sort(key=lambda event: event["source"]["seq"])
    assert [event["source"]["seq"] for event in found] == list(range(1, len(found) + 1))
    return found


def alters(event: dict[str, Any]) -> bool:
    """Whether the event is Lockstep's own about changed columns: no transaction contains it."""
    return event["op"] == "m" and bool(event["message"]["prefix"] == ALTERED)


def logged(found: list[dict[str, Any]]) -> list[Change]:
    """Return events as changes; a delete and a create of one ordinal are a changed key."""
    changes: list[Change] = []
    moved: tuple[str, int] | None = None
    for event in found:
        source, op = event["source"], event["op"]
        place = (source["commit_lsn"], source["ordinal"])
        table = f"{source['schema']}.{source['table']}"
        change = Change("t", table, {}, {})
        if op == "m":
            if alters(event):
                continue
            message = event["message"]
            content = base64.b64decode(message["content"]).decode()
            change = Change("m", "", {}, {message["prefix"]: content})
        elif op != "t":
            unsent = frozenset(source.get("unchanged", ()))
            new = {k: v for k, v in _texts(event["after"]).items() if k not in unsent}
            kind = {"c": "i"}.get(op, op)
            change = Change(kind, table, _texts(event["before"]), new, unsent)
        if op == "c" and place == moved:
            changes[-1] = change._replace(kind="u", old=changes[-1].old)
        else:
            changes.append(change)
        moved = place if op == "d" else None
    return changes


def _texts(row: dict[str, Any] | None) -> Row:
    return {k: None if v is None else str(v) for k, v in (row or {}).items()}


def differences(wanted: list[Change], found: list[Change]) -> list[str]:
    """Return the first places where the log differs from what was committed."""
    lines = []
    for index, (want, have) in enumerate(zip_longest(wanted, found)):
        if want is None or have is None or not _alike(want, have):
            lines.append(f"change {index}: committed {_short(want)}, logged {_short(have)}")
        if len(lines) == 3:
            break
    return lines


def _alike(want: Change, have: Change) -> bool:
    if (want.kind, want.table) != (have.kind, have.table):
        return False
    # An old image may fill what was not sent, and contains at least the columns of the identity.
    filled = {name: have.new.get(name) for name in want.unsent - have.unsent}
    if have.unsent - want.unsent or have.new != want.new | filled:
        return False
    if filled and not have.old:
        return False
    return all(want.old.get(name) == value for name, value in have.old.items())


def _short(change: Change | None) -> str:
    """Return a change with its long values cut; the model's values are not secret."""
    if change is None:
        return "nothing"
    rows = [{k: v and v[:12] for k, v in row.items()} for row in (change.old, change.new)]
    return f"{change.kind} {change.table} {rows[0]} -> {rows[1]} unsent {sorted(change.unsent)}"
