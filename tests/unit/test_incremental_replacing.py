"""A snapshot that replaces a table empties each topic that it fills. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from cdc.snapshot.incremental.job import Job
from cdc.snapshot.incremental.records import IncrementalRecord, TableName

RECORD = IncrementalRecord(
    pipeline="p", id="a1", schema="public", table="t", state="running", last=("7",), up_to=("9",)
)
OTHER = TableName("public", "u")


def test_a_table_that_is_renamed_while_it_is_replaced_is_emptied_under_its_new_name() -> None:
    for record in replace(RECORD, emptied_under=3), replace(RECORD, empty_first=True):
        job = Job(record)
        job.continue_as(OTHER)
        job.retry("the table was renamed", from_the_start=True)
        found = job.record
        assert (found.name, found.last, found.replaces) == ("public.u", None, True)
        assert (found.empty_first, found.emptied_under) == (True, 0)
        assert job.request(1, None, 100).empties_table
        assert not job.over


def test_a_snapshot_that_ended_early_has_left_its_topic_empty_until_another_replaces_it() -> None:
    job = Job(replace(RECORD, emptied_under=3, state="stopped", at_us=5))
    assert job.record.left_empty
    job.replaced_by(replace(RECORD, table="u"))
    assert job.record.left_empty
    job.replaced_by(RECORD)
    assert (job.record.left_empty, job.record.at_us, job.dirty) == (False, 5, True)
    for record in replace(RECORD, emptied_under=3), replace(RECORD, emptied_under=3, state="done"):
        assert not record.left_empty


def test_a_snapshot_that_replaces_nothing_empties_no_topic() -> None:
    job = Job(RECORD)
    job.continue_as(OTHER)
    assert not job.record.replaces


def test_a_table_whose_key_has_changed_is_not_emptied_twice() -> None:
    job = Job(replace(RECORD, emptied_under=3))
    job.continue_as(TableName("public", "t"))
    assert (job.record.empty_first, job.record.emptied_under) == (False, 3)
