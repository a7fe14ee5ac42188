"""Whatever becomes of the tables' names: a topic that differs from its table is reported.

Tables are renamed, swapped, dropped, recreated and read again while rows are written, and each row
goes to the topic of the name that its table has then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from cdc.decode.messages import Relation, RelationColumn, ReplicaIdentity
from cdc.events import LSN
from cdc.log.completeness import Completeness, Name
from cdc.log.records import Replacement, SchemaRecord
from cdc.sequence.relation_request import RelationRequest
from cdc.sequence.relations import Relations
from cdc.source.lookups import TableFacts

_NAMES = [("public", name) for name in "tuv"]


@dataclass
class Table:
    oid: int
    rows: dict[int, int] = field(default_factory=dict)
    written: Name | None = None  # the name that it had at its last row


class World:
    """A database, its log, and what is known of the log's topics."""

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.tables: dict[Name, Table] = {}
        self.topics: dict[Name, dict[int, int]] = {}
        self.last: dict[Name, int] = {}  # which table wrote to a topic last
        self.completeness = Completeness()
        self.versions: list[SchemaRecord] = []
        self.replacements: dict[Name, Replacement] = {}
        self._relations = Relations("shop", [], 0)
        self._at = 0

    def step(self) -> None:
        self._at += 1
        name = self.chance.choice(_NAMES)
        match self.chance.choice("wwwrrssssdccx"):
            case "w":
                self.write(name)
            case "r":
                self.rename(name, self.chance.choice(_NAMES))
            case "s":
                other = self.chance.choice(_NAMES)
                if name in self.tables and other in self.tables:
                    swapped = self.tables[other], self.tables[name]
                    self.tables[name], self.tables[other] = swapped
            case "d":
                self.tables.pop(name, None)
            case "c":
                self.tables.setdefault(name, Table(self._at))
            case "x":
                self.replace(name)

    def write(self, name: Name) -> None:
        if (table := self.tables.get(name)) is not None:
            self._describe(name, table)
            key = self.chance.randrange(4)
            table.rows[key] = self.topics.setdefault(name, {})[key] = self._at
            self.last[name], table.written = table.oid, name

    def rename(self, name: Name, other: Name) -> None:
        if name in self.tables and other not in self.tables:
            self.tables[other] = self.tables.pop(name)

    def replace(self, name: Name) -> None:
        if (table := self.tables.get(name)) is None:
            return
        schema_id = self._describe(name, table)
        self.topics[name] = dict(table.rows)
        self.last[name], table.written = table.oid, name
        done = Replacement(
            pipeline="p", schema=name[0], table=name[1], schema_id=schema_id, snapshot="", at_us=0
        )
        self.replacements[name] = done
        self.completeness.replace(done)

    def _describe(self, name: Name, table: Table) -> int:
        columns = (RelationColumn(True, "id", 23, -1),)  # noqa: FBT003 - of the key
        relation = Relation(table.oid, *name, ReplicaIdentity.DEFAULT, columns)
        request = RelationRequest(relation, TableFacts(("id",), {}), {}, LSN(self._at))
        version, new = self._relations.version(request, replaying=False)
        if new:
            self.versions.append(version)
            self.completeness.add(version)
        return version.schema_id

    @property
    def incomplete(self) -> set[str]:
        found = self.completeness.incomplete(self.tables.keys())
        return {each.name for each in found if each.captured}

    def differing(self) -> set[str]:
        """Return the topics that differ from their tables, as far as a row has shown it."""
        return {
            ".".join(name)
            for name, table in self.tables.items()
            if name in self.topics
            and table.rows != self.topics[name]
            and (self.last[name] == table.oid)
        }


@given(st.integers(0, 2**32 - 1))
def test_a_topic_that_differs_from_its_table_is_reported_until_it_is_replaced(seed: int) -> None:
    world = World(Random(seed))
    for _ in range(40):
        world.step()
        assert world.differing() <= world.incomplete
    # What is read back gives the same, also the sentence and the LSN.
    again = Completeness(world.versions, world.replacements.values())
    assert again.incomplete(None) == world.completeness.incomplete(None)
    for name in world.tables:
        world.replace(name)
    assert not world.incomplete
    assert all(world.topics[name] == table.rows for name, table in world.tables.items())


@given(st.integers(0, 2**32 - 1))
def test_a_table_that_keeps_its_name_is_never_reported(seed: int) -> None:
    chance = Random(seed)
    world = World(chance)
    for number, name in enumerate(_NAMES, 1):
        world.tables[name] = Table(number)
    for _ in range(20):
        chance.choice([world.write, world.replace])(chance.choice(_NAMES))
    assert not world.completeness.incomplete_names
