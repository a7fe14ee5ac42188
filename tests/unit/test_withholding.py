"""What the log must not contain of an incremental snapshot's record, and the effects. Pure."""

from __future__ import annotations

import json

import pytest

from cdc.config import Config, Log, Mask, Source, TableRule
from cdc.log import records
from cdc.snapshot.incremental.job import Job
from cdc.snapshot.incremental.records import IncrementalRecord
from cdc.snapshot.incremental.redaction import (
    NOTHING,
    Withheld,
    before_publishing,
    logged,
    restored,
)

ADA = ("ada@x.org",)
RECORD = IncrementalRecord(pipeline="shop", id="1", schema="public", table="users", state="running")
WALK = IncrementalRecord(
    pipeline="shop", id="1", schema="public", table="users", state="running",
    last=ADA, up_to=ADA, pending_keys=(ADA,), range_done=True, rows=7,
)  # fmt: skip


def config(partitions: str = "root") -> Config:
    return Config(
        pipeline="shop",
        source=Source(dsn="postgresql://a@b/c", partitions=partitions),  # type: ignore[arg-type]
        log=Log(bootstrap_servers="x:1"),
        tables={"public.users": TableRule(mask={"email": Mask("null")}, exclude=("token",))},
    )


def of(table: str = "users", where: str | None = None, partitions: str = "root") -> Withheld:
    record = IncrementalRecord(
        pipeline="shop", id="1", schema="public", table=table, state="running", where=where
    )
    return before_publishing(config(partitions), record)


@pytest.mark.parametrize(
    ("where", "withheld"),
    [
        (None, False),
        ("plain = 1", False),
        ("email = 'ada@x.org'", True),
        ("EMAIL = 'ada@x.org'", True),
        ("token IS NULL OR plain = 1", True),
        ("lower(email) = 'ada@x.org'", True),  # not parsed: its columns are unknown
    ],
)
def test_a_condition_is_withheld_where_it_may_quote_hidden_columns(
    where: str | None, *, withheld: bool
) -> None:
    assert of(where=where) == Withheld(keys=True, where=withheld)
    assert of("orders", where) == NOTHING


def test_a_partition_may_be_hidden_as_its_table() -> None:
    assert of("users_2024", partitions="leaf") == Withheld(keys=True, where=True)
    assert of("users_2024") == NOTHING


def test_no_withheld_key_is_in_the_record() -> None:
    seen = logged(WALK, Withheld(keys=True, where=False))
    assert b"ada" not in records.encode(seen)
    assert (seen.rows, seen.range_done, seen.withheld) == (7, False, False)
    assert logged(WALK, NOTHING) == WALK


def test_a_record_has_the_same_names_in_every_version() -> None:
    written = json.loads(records.encode(WALK))
    assert (written["last"], written["to"], written["again"]) == ([*ADA], [*ADA], [[*ADA]])
    assert (written["swept"], written["anew"]) == (True, False)
    assert records.decode(IncrementalRecord, records.encode(WALK), "t") == WALK


def test_a_table_is_read_from_the_start_and_given_keys_are_required_again() -> None:
    walk = logged(WALK, Withheld(keys=True, where=False))
    assert restored(walk, None) == walk
    given = IncrementalRecord(
        pipeline="shop", id="1", schema="public", table="users", state="running",
        keys=True, pending_keys=(ADA,),
    )  # fmt: skip
    seen = logged(given, Withheld(keys=True, where=False))
    assert b"ada" not in records.encode(seen)
    assert restored(seen, None) is None
    assert restored(seen, given) == given


def test_a_record_is_written_again_only_where_it_holds_what_is_withheld() -> None:
    """Each session checks every record, including those of snapshots that have ended."""
    for record, written in ((WALK, True), (RECORD, False)):
        job = Job(record)
        job.withhold(Withheld(keys=True, where=True))
        assert job.dirty is written
        assert b"ada" not in records.encode(job.take())
