"""Which files of a base a compaction folds again: few, and seldom the large ones."""

from __future__ import annotations

import json
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.jobs.compacting import runs
from lockstep.jobs.compacting.layout import TableCount, total
from lockstep.jobs.compacting.runs import BaseFile, merging

ZEROS = "0" * 64


def file(path: str, run: int, *, size: int = 1 << 20, **rows: int) -> BaseFile:
    counts = tuple(TableCount(topic, many, 0, ZEROS) for topic, many in rows.items())
    add = {"path": path, "size": size, "tags": runs.tags(counts, run)}
    assert BaseFile.of(add) == BaseFile(path, size, run, frozenset(rows), counts)
    return BaseFile.of(add)


def merged(files: list[BaseFile], *truncated: str, **events: int) -> runs.Merging:
    held = total(each for its in files for each in its.tables or ())
    return merging(files, events, truncated, held, 9)


def test_only_files_of_tables_that_share_files_with_a_changed_one_are_folded() -> None:
    files = [
        file("small", 1, a=10, b=10),
        file("both", 2, b=5, c=5),
        file("other", 1, d=10),
        file("large", 1, e=9_000),
    ]
    found = merged(files, a=20)
    assert found.files == {"small", "both"}
    assert found.complete == {"a", "b", "c"}
    assert found.rows == {"a": 30, "b": 15, "c": 5}
    assert merged(files, f=1).rows == {"f": 1}
    assert merged(files).files == set()


def test_a_large_run_stays_and_its_table_is_folded_in_part() -> None:
    files = [file("one", 1, a=9_000), file("two", 2, a=200), file("three", 3, a=20)]
    assert merged(files, a=5).files == set()
    assert merged(files, a=6).files == {"three"}
    assert merged(files, a=6).partly == {"a": "a"}
    assert merged(files, a=6).rows == {"a": 26}
    assert merged(files, a=31).files == {"two", "three"}
    assert merged(files, a=2_031).complete == {"a"}


def test_a_run_that_all_newer_ones_outgrow_together_is_folded_with_them() -> None:
    files = [file("one", 1, a=1_000), file("two", 2, a=240)]
    assert merged(files, a=10).files == set()
    assert merged(files, a=11).files == {"one", "two"}


def test_small_runs_truncated_tables_and_files_without_runs_never_stay() -> None:
    small = [file("one", 1, a=900), file("two", 2, size=runs.LEAST_BYTES - 1, a=100)]
    assert merged(small, a=1).files == {"two"}
    cut = merged([file("one", 1, a=900, b=7)], "a", a=1)
    assert cut.complete == {"a", "b"}
    assert cut.rows == {"a": 1, "b": 7}
    tags = {"lockstep.topics": json.dumps(["a", "b"])}
    old = BaseFile.of({"path": "old", "size": 1 << 20, "tags": tags})
    found = merging([old, file("two", 2, a=900)], {"a": 1}, (), [TableCount("a", 950, 0, ZEROS)], 3)
    assert found.files == {"old", "two"}
    assert found.rows == {"a": 951, "b": 0}


@given(seed=st.integers(0, 2**32), most=st.sampled_from([10, 1_000]))
def test_runs_are_few_superseded_rows_a_quarter_and_each_change_is_written_a_few_times(
    seed: int, most: int
) -> None:
    """Whatever the changes: a table of 100,000 rows that are updated again and again."""
    chance, patched = Random(seed), pytest.MonkeyPatch()
    with patched.context() as patch:
        patch.setattr(runs, "LEAST_BYTES", 0)
        files, changed, written = [file("0", 0, a=100_000)], 0, 0
        for number in range(1, 400):
            events = chance.randint(1, most)
            found = merged(files, a=events)
            files = [each for each in files if each.path not in found.files]
            rows = found.rows["a"] if files else 100_000
            files.append(file(str(number), number, a=rows))
            changed, written = changed + events, written + rows
            newer = sum(each.rows("a") for each in files[1:])
            assert newer * runs.RATIO <= files[0].rows("a")
        depth = 1 + log(100_000, 1 + runs.RATIO)
        assert len(files) <= depth + 1
        assert written <= changed * (1 + runs.RATIO) * depth + 100_000
