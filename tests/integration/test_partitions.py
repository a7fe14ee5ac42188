"""Partitioned tables: one topic by root, one for each partition by leaf; rows that move."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.errors import ConfigError
from cdc.operate.commands.setup import set_up
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from tests.fixtures.daemon import NewPipeline, PipelineUnderTest, wait_until
from tests.fixtures.witness import data_records

_SALES = "CREATE TABLE sales (id int, year int, who text, PRIMARY KEY (id, year))"
PARTED = (
    f"{_SALES} PARTITION BY LIST (year)",
    "CREATE TABLE sales_24 PARTITION OF sales FOR VALUES IN (24)",
    "CREATE TABLE sales_25 PARTITION OF sales FOR VALUES IN (25)",
)
CHANGES = (
    "INSERT INTO sales VALUES (1, 24, 'ada'), (2, 25, 'bob')",
    "UPDATE sales SET who = 'eve' WHERE id = 1",
    "UPDATE sales SET year = 25 WHERE id = 1",  # moves to the other partition
    "DELETE FROM sales WHERE id = 2",
)


def reported(line: PipelineUnderTest, events: int) -> list[tuple[str, str, Any]]:
    """Return topic, op and id of this many events, by seq."""

    def found() -> list[Any]:
        return [r for r in data_records(line) if r.value is not None]

    wait_until(lambda: len(found()) >= events, "the log lacks events")
    prefix = f"{line.config.prefix}.public."
    return [
        (r.topic.removeprefix(prefix), r.event["op"], (r.event["after"] or r.event["before"])["id"])
        for r in sorted(found(), key=lambda r: r.event["source"]["seq"])
    ]


def test_by_root_a_partitioned_table_is_one_topic(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED)
    line.start().wait_ready()
    line.database.execute(*CHANGES)
    found = reported(line, 6)
    assert {topic for topic, _, _ in found} == {"sales"}
    assert [found[0], found[1], found[2], found[-1]] == [
        ("sales", "c", 1),
        ("sales", "c", 2),
        ("sales", "u", 1),
        ("sales", "d", 2),
    ]
    # A row that moves is deleted and inserted, or changes its key.
    assert [op for _, op, _ in found[3:5]] == ["d", "c"]


def test_by_leaf_each_partition_is_a_topic_also_a_later_one(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED, source={"partitions": "leaf"})
    assert not [each for each in examine(line.config) if each.check == "publication_tables"]
    line.start().wait_ready()
    line.database.execute(*CHANGES)
    assert reported(line, 6) == [
        ("sales_24", "c", 1),
        ("sales_25", "c", 2),
        ("sales_24", "u", 1),
        ("sales_24", "d", 1),
        ("sales_25", "c", 1),
        ("sales_25", "d", 2),
    ]
    line.database.execute(
        "CREATE TABLE sales_26 PARTITION OF sales FOR VALUES IN (26)",
        "INSERT INTO sales VALUES (3, 26, 'cid')",
    )
    assert reported(line, 7)[-1] == ("sales_26", "c", 3)


def test_by_leaf_a_partition_is_masked_as_its_table_is(pipeline: NewPipeline) -> None:
    line = pipeline(
        *PARTED,
        source={"partitions": "leaf"},
        tables={"public.sales": {"mask": {"who": None}}},
    )
    line.start().wait_ready()
    line.database.execute(
        *CHANGES,
        "CREATE TABLE sales_26 PARTITION OF sales FOR VALUES IN (26)",
        "INSERT INTO sales VALUES (3, 26, 'cid')",
    )
    reported(line, 7)
    values = b"".join(r.value or b"" for r in data_records(line))
    for name in (b"ada", b"bob", b"eve", b"cid"):
        assert name not in values


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["ALTER TABLE sales DETACH PARTITION s26", "DROP TABLE s26"])
def test_by_leaf_a_partition_that_has_left_shows_nothing_of_its_table(
    pipeline: NewPipeline, leaves: str
) -> None:
    """The catalog no longer has what it was a partition of, and so which columns are hidden."""
    settings, other = {"mask": {"who": None}}, "CREATE TABLE other (id int PRIMARY KEY)"
    line = pipeline(
        *PARTED, other, source={"partitions": "leaf"}, tables={"public.sales": settings}
    )
    line.start().wait_ready()
    line.database.execute(
        "BEGIN; CREATE TABLE s26 PARTITION OF sales FOR VALUES IN (26);"
        f" INSERT INTO sales VALUES (3, 26, 'cid'); {leaves}; COMMIT",
        "INSERT INTO sales VALUES (4, 24, 'ada')",
        # It was published by its own name, so it is no partition.
        "INSERT INTO other VALUES (5)",
        "DROP TABLE other",
    )
    line.ends(line.daemon, 78, "public.s26 may have been a partition", '"*": null')
    assert not data_records(line)
    own = {"mask": {"*": None, "id": "keep", "year": "keep"}}
    tables = {"public.sales": settings, "public.s26": own}
    line.config_file = line.write("remedy.yaml", tables=tables)
    line.start().wait_ready()
    assert reported(line, 3) == [("s26", "c", 3), ("sales_24", "c", 4), ("other", "c", 5)]
    values = b"".join(r.value or b"" for r in data_records(line))
    assert b"cid" not in values
    assert b"ada" not in values


@pytest.mark.pg(">= 15")
def test_what_a_partition_holds_may_be_detached_and_attached(pipeline: NewPipeline) -> None:
    """Postgres 14 continues to send its rows as the table's, within the session."""
    line = pipeline(*PARTED)
    line.start().wait_ready()
    line.database.execute(
        "INSERT INTO sales VALUES (1, 24, 'ada')",
        "ALTER TABLE sales DETACH PARTITION sales_24",
        "INSERT INTO sales_24 VALUES (9, 24, 'apart')",
        "INSERT INTO sales VALUES (2, 25, 'bob')",
        "ALTER TABLE sales ATTACH PARTITION sales_24 FOR VALUES IN (24)",
        "INSERT INTO sales VALUES (3, 24, 'cid')",
    )
    # While detached it was another table, which is not captured.
    assert reported(line, 3) == [("sales", "c", 1), ("sales", "c", 2), ("sales", "c", 3)]


def test_by_leaf_a_detached_partition_is_a_gap_until_it_is_excluded(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED, source={"partitions": "leaf"})
    line.start().wait_ready()
    line.database.execute("INSERT INTO sales VALUES (1, 24, 'ada')")
    assert reported(line, 1) == [("sales_24", "c", 1)]
    line.database.execute(
        "ALTER TABLE sales DETACH PARTITION sales_24", "INSERT INTO sales VALUES (2, 25, 'bob')"
    )
    line.ends(line.daemon, 78, "no longer has public.sales_24")
    line.config_file = line.write("lockstep.yaml", source__exclude=["public.sales_24"])
    assert "continues without public.sales_24" in " ".join(s.what for s in set_up(line.config))
    line.start().wait_ready()
    assert reported(line, 2)[1] == ("sales_25", "c", 2)


def test_by_leaf_a_partition_is_not_left_out_alone(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED, source={"partitions": "leaf"})
    line.config_file = line.write("lockstep.yaml", source__exclude=["public.sales_24"])
    found = [each for each in examine(line.config) if each.severity is Severity.ERROR]
    assert any("public.sales_24 is a partition" in each.what for each in found)
    with pytest.raises(ConfigError, match="is a partition"):
        list(set_up(line.config))


def test_the_flag_does_not_flip_within_a_log(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED)
    line.config_file = line.write("lockstep.yaml", source__partitions="leaf")
    found = [each for each in examine(line.config) if each.check == "publication_options"]
    assert "publish_via_partition_root is not false" in found[0].what
    with pytest.raises(ConfigError, match="the other way"):
        list(set_up(line.config))


@pytest.mark.pg(">= 15")
def test_by_leaf_a_row_filter_of_the_root_table_is_refused(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED, source={"partitions": "leaf"})
    line.config_file = line.write("lockstep.yaml", tables={"public.sales": {"where": "year > 24"}})
    found = [each for each in examine(line.config) if each.severity is Severity.ERROR]
    assert any("only through its root" in each.what for each in found)
    with pytest.raises(ConfigError, match="only through its root"):
        list(set_up(line.config))


@pytest.mark.pg(">= 15")
def test_by_root_filter_and_columns_hold_for_every_partition(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED, tables={"public.sales": {"where": "year > 24", "exclude": ["who"]}})
    line.start().wait_ready()
    line.database.execute(*CHANGES)
    # The row that moves into the filter's range is created there.
    assert reported(line, 3) == [("sales", "c", 2), ("sales", "c", 1), ("sales", "d", 2)]
    assert b"who" not in b"".join(r.value or b"" for r in data_records(line))


def test_partitions_without_an_identity_are_found_beforehand(pipeline: NewPipeline) -> None:
    line = pipeline(*PARTED)
    line.database.execute("ALTER TABLE sales_25 REPLICA IDENTITY NOTHING")
    found = [each for each in examine(line.config) if each.check == "partition_identity"]
    assert "public.sales_25" in found[0].what
