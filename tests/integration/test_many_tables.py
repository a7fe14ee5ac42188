"""Thousands of tables: setup in one command, and one query for all their hidden columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cdc.decode.messages import Relation, RelationColumn, ReplicaIdentity
from cdc.events import LSN
from cdc.log import names, reader, topics
from cdc.log.batch import Batch
from cdc.log.completeness import Completeness
from cdc.log.records import SchemaRecord, decode
from cdc.operate.commands.setup import set_up, survey, tear_down
from cdc.operate.commands.setup_columns import HiddenColumns
from cdc.operate.commands.steps import Did
from cdc.publication import objects as source_setup
from cdc.sequence.lookahead import Upcoming
from cdc.sequence.relations import Relations
from cdc.sequence.table_versions import TableVersions
from cdc.source.connection import connect
from cdc.source.members import read_members
from cdc.source.tables import read_tables
from tests.fixtures.daemon import NewPipeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fixtures.daemon import PipelineUnderTest

# With its settings and its partition, each topic is five controller records. The controller
# refuses more than 10,000 of them in one request.
_MANY = 2_100


def tables(count: int) -> str:
    """Return the statement that creates `count` tables."""
    return (
        "DO $$ BEGIN FOR i IN 1.." + str(count) + " LOOP EXECUTE format("
        "'CREATE TABLE many_%s (id int PRIMARY KEY, n int)', i); END LOOP; END $$"
    )


@pytest.fixture
def line(pipeline: NewPipeline) -> PipelineUnderTest:
    """A pipeline of one table, with one partition per topic."""
    return pipeline("CREATE TABLE users (id int PRIMARY KEY, n int)", log={"partitions": 1})


@pytest.mark.long("volume")
def test_thousands_of_tables_are_set_up_in_one_command(line: PipelineUnderTest) -> None:
    """One request for all topics would be refused, so they are created in several."""
    line.database.execute(tables(_MANY))
    steps = list(set_up(line.config))
    assert any(step.did is Did.PROGRESS for step in steps)
    assert any(f"created {_MANY} data topics" in step.what for step in steps)
    found = topics.existing(topics.admin(line.config), line.config.prefix)
    assert sum("many_" in name for name in found) == _MANY
    list(tear_down(line.config, survey(line.config), with_topics=True))
    assert not topics.existing(topics.admin(line.config), line.config.prefix)


def counted(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[str]:
    """Record each call of a method, which still runs."""
    calls: list[str] = []
    real: Callable[..., object] = getattr(owner, name)

    def call(*args: object, **named: object) -> object:
        calls.append(name)
        return real(*args, **named)

    patch.setattr(owner, name, call)
    return calls


def test_the_hidden_columns_of_many_tables_take_one_query(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = pipeline(tables(50), tables={"public.many_*": {"mask": {"n": "null"}}})
    with connect(line.config) as connection:
        found = source_setup.matched_tables(
            line.config, read_tables(connection, line.config.selection)
        )
        hidden = HiddenColumns(connection, line.config, found, [])
        queries = counted(monkeypatch, connection, "execute")
        hidden.read_numbers()
    assert len(queries) == 1
    assert sum(bool(each.hidden) for each in reader.read_column_numbers(line.config)) == 50


def test_new_relations_cost_a_constant_number_of_queries_also_after_a_restart(
    pipeline: NewPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that arrive together; row filters are written out together, too."""
    line = pipeline(tables(50), tables={"public.many_*": {"where": "id > 0"}})
    config = line.config
    identity, _ = line.resume()
    admin = topics.admin(config)
    schemas: list[SchemaRecord] = []
    with connect(config) as connection:
        found = read_members(connection, config.publication)
        queries = counted(monkeypatch, connection, "execute")
        relations = [
            Relation(each.oid, each.schema, each.table, ReplicaIdentity.DEFAULT, _COLUMNS)
            for each in found
        ]

        def described(chosen: list[Relation]) -> tuple[int, int]:
            """Describe them in a session of its own; return how many queries, new versions."""
            known = Relations(config.prefix, schemas, len(schemas))
            versions = TableVersions(
                config, connection, admin, Batch(), known, identity, Completeness(schemas, [])
            )
            before, upcoming = len(queries), Together(chosen)
            for each in chosen:
                versions.describe(each, {}, LSN(1), replaying=False, upcoming=upcoming)
            new = [r for t, _, r in versions.take() if t == names.schema_topic(config.prefix)]
            schemas.extend(decode(SchemaRecord, each or b"", "") for each in new)
            return len(queries) - before, len(new)

        few, count = described(relations[:2])
        assert count == 2
        many, count = described(relations)
        assert (many, count) == (few, 48)
        again, count = described(relations)
        assert count == 0
        assert again <= few, "what the log knows costs more than what it does not"


_COLUMNS = (RelationColumn(True, "id", 23, -1), RelationColumn(False, "n", 23, -1))  # noqa: FBT003 - of the key


class Together(Upcoming):
    """Relations that arrived together."""

    def __init__(self, found: list[Relation]) -> None:
        self._found = found

    def relations(self) -> list[Relation]:
        return self._found
