"""Which topics lack changes of their tables, or have rows of another, from the log's own records.

Each name has a topic, and the stream has no message for a rename or a drop. The table versions show
both, at the first row that follows: a relation that had another name, or a name that another
relation had. They also show a change of columns that rewrote rows (`SchemaRecord.stale`). From
there on the topic does not equal the table, until a snapshot with `--replace` has emptied it and
read the table again (`Replacement`). What was changed under another name before a row follows under
any is in no record, and is not found here.

A snapshot with `--replace` that ended early has emptied the topic and not filled it
(`EmptiedTopic`): that lasts, too, until another one is done.

Pure, and the same whether the records are added one by one or read back. An addition costs the same
however many tables there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cdc.events import LSN
    from cdc.log.records import Replacement, SchemaRecord

Name: TypeAlias = "tuple[str, str]"  # schema and table, which a topic is named by


class IncompleteTopic(NamedTuple):
    """A topic that does not equal the table of its name; `since_lsn` is the first row after it."""

    name: str
    topic: str
    since_lsn: LSN
    why: str
    remedy: str
    captured: bool  # whether the publication has a table of this name

    @property
    def what(self) -> str:
        return f"the topic of {self.name} is incomplete since LSN {self.since_lsn}: {self.why}"

    def fields(self) -> dict[str, object]:
        return {**self._asdict(), "since_lsn": str(self.since_lsn)}


class EmptiedTopic(NamedTuple):
    """A topic that a snapshot has emptied and not filled; by which version and transaction."""

    name: Name
    schema_id: int
    since_lsn: LSN
    snapshot: str


class _Break(NamedTuple):
    schema_id: int  # of the version that shows it
    since_lsn: LSN
    why: str


class Completeness:
    """The topics that a rename, a rewrite, another table or a snapshot has left incomplete."""

    def __init__(
        self, versions: Iterable[SchemaRecord] = (), replacements: Iterable[Replacement] = ()
    ) -> None:
        """Start with what the log has; `versions` are in the order of their ids."""
        self._of_relation: dict[int, SchemaRecord] = {}  # each one's newest version
        self._of_name: dict[Name, SchemaRecord] = {}
        self._breaks: dict[Name, tuple[_Break, ...]] = {}  # oldest first, never empty
        for version in versions:
            self.add(version)
        for replacement in replacements:
            self.replace(replacement)

    def add(self, version: SchemaRecord) -> IncompleteTopic | None:
        """Add the newest version; return its topic if the version shows that it is incomplete."""
        name = version.schema, version.table
        before, here = self._of_relation.get(version.relation_id), self._of_name.get(name)
        self._of_relation[version.relation_id] = self._of_name[name] = version
        moved = before is not None and (before.schema, before.table) != name
        if before is not None and moved:
            left = before.schema, before.table
            if self._of_name[left].relation_id == version.relation_id:
                why = (
                    f"its table was renamed to {'.'.join(name)}, whose topic has what changed then"
                )
                self._note(left, version, why)
        if here is not None and here.relation_id != version.relation_id:
            why = "another table took this name, and the topic has rows of the one before"
        elif before is not None and moved:
            why = f"its table was {before.schema}.{before.table}, whose topic has what it held"
        elif version.stale:
            why = f"rows were changed without events: {version.stale}"
        else:
            return None
        self._note(name, version, why)
        return _incomplete(version, self._breaks[name][0], captured=True)

    def replace(self, replacement: Replacement) -> None:
        """Add a snapshot that has emptied a topic and read its table: what was before is over."""
        name = replacement.schema, replacement.table
        later = tuple(
            each for each in self._breaks.get(name, ()) if each.schema_id > replacement.schema_id
        )
        self._breaks.pop(name, None)
        if later:
            self._breaks[name] = later

    def empty(self, emptied: EmptiedTopic) -> None:
        """Add a snapshot that has emptied a topic, and ended before it had read the table."""
        if emptied.name in self._of_name:
            why = f"the snapshot {emptied.snapshot} has emptied it, and ended before it was full"
            new = _Break(emptied.schema_id, emptied.since_lsn, why)
            breaks = (*self._breaks.get(emptied.name, ()), new)
            self._breaks[emptied.name] = tuple(sorted(breaks, key=lambda each: each.since_lsn))

    def newest_versions(self) -> list[SchemaRecord]:
        """Return the newest version of every relation."""
        return list(self._of_relation.copy().values())

    @property
    def incomplete_names(self) -> list[Name]:
        """The names whose topics are incomplete, captured or not."""
        return sorted(self._breaks.copy())

    def incomplete(self, captured: Collection[Name] | None) -> list[IncompleteTopic]:
        """Return the topics that are incomplete, given the names that the publication has.

        None if that is not known: a table counts as captured under the newest name that it had.
        """
        found = []
        for name, breaks in sorted(self._breaks.copy().items()):
            version = self._of_name[name]
            is_there = self._of_relation[version.relation_id].topic == version.topic
            known = is_there if captured is None else name in captured
            found.append(_incomplete(version, breaks[0], captured=known))
        return found

    def _note(self, name: Name, version: SchemaRecord, why: str) -> None:
        new = _Break(version.schema_id, version.from_lsn, why)
        self._breaks[name] = (*self._breaks.get(name, ()), new)


def _incomplete(version: SchemaRecord, since: _Break, *, captured: bool) -> IncompleteTopic:
    name = f"{version.schema}.{version.table}"
    remedy = f"cdc snapshot {name} --replace"
    if not captured:
        remedy = (
            f"`cdc table add {name}` if there is such a table; otherwise followers keep the rows"
            " that it had: leave it out of their `tables`"
        )
    elif not version.key:
        remedy = f'give it a primary key, or set tables."{name}".key; then `{remedy}`'
    return IncompleteTopic(name, version.topic, since.since_lsn, since.why, remedy, captured)
