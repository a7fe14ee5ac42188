"""A large cut that alters its table, or has keys in several forms: tasks write the small path's."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.events import LSN
from lockstep.jobs.apply.applying import Applying
from lockstep.jobs.apply.cut_events import TableShare
from lockstep.jobs.cuts.altered import alterations, parts
from lockstep.jobs.cuts.reduce import Bounds, Events, parsed
from lockstep.jobs.cuts.schemas import version
from lockstep.sinks.contract import Altered, Applied, Version
from lockstep.sinks.delta.settings import DeltaSettings
from lockstep.sinks.delta.sink import DeltaSink
from tests.fixtures.seeds import examples
from tests.property.altered_world import TOPIC, AlteredTable, Row
from tests.property.delta_tasks import TINY, by_tasks, truncates_of
from tests.property.test_delta_appliers import seen
from tests.property.test_reduce import Partitions

KEYS = {
    "integer": ("int4",),
    "float": ("float8",),
    "decimal": ("numeric(5,2)",),
    "pair": ("float8", "int4"),
    "none": (),
}
NAME = "public.t"


class Lake:
    """A lake that is moved from frontier to frontier: large cuts by tasks, others by the driver."""

    def __init__(
        self, table: AlteredTable, chance: Random, settings: DeltaSettings, large: float
    ) -> None:
        self.table, self.chance, self.settings, self.large = table, chance, settings, large
        self.above = self.written = 0
        self.open()

    def open(self) -> None:
        self.sink = DeltaSink(self.settings)
        self.sink.open()
        self.applying = Applying(self.sink, self.versions)

    @property
    def known(self) -> dict[int, Version]:
        return {each.schema_id: version(each) for each in self.table.versions}

    def versions(self, _: str, ids: Any) -> tuple[Version, ...]:  # noqa: ANN401 - any collection
        known = self.known
        return tuple(known[each] for each in sorted({*ids, max(known)}))

    def take(self) -> None:
        """Take what the log has above the last cut."""
        is_large = self.chance.random() < self.large
        while is_large and self.chance.random() < 0.3:
            self.write(is_large=True)
            self.open()  # killed before the commit
        self.write(is_large=is_large)
        upto = self.table.seq
        self.sink.commit(Applied("shop", 1, 1, LSN(upto), upto, 0, 0, {}))
        self.above = upto

    def write(self, *, is_large: bool) -> None:
        bounds = Bounds(self.above, self.table.seq)
        messages = self.read(self.table.messages, bounds)
        altered = alterations(messages[0], lambda _: True, self.versions).get(TOPIC, [])
        events = self.read(self.table.events, bounds)
        ids = [parsed(value).source.schema_id for value in events[0][1]]
        versions = self.versions(TOPIC, range(min(ids), max(ids) + 1)) if ids else ()
        self.applying.begin(bounds.upto, versions, [altered] if altered else [])
        share = self.share(events, bounds, versions, altered) if is_large else None
        if share is not None:
            self.written += 1
            by_tasks(self.sink, share, events, bounds, self.chance, {})
        elif altered:
            some = partial(parts, events)
            self.applying.alter(TOPIC, some, bounds, altered, letter=_no_letter)
        else:
            table = self.applying.reduce(TOPIC, events, bounds, name=NAME, letter=_no_letter)
            self.applying.write_table(table)

    @staticmethod
    def read(records: Any, bounds: Bounds) -> Partitions:  # noqa: ANN401 - with or without keys
        every = [key for key, _ in records], [value for _, value in records]
        found: list[Events] = next(parts([every], bounds), [([], [])])
        return [(list(keys), list(values)) for keys, values in found]

    def share(
        self,
        events: Partitions,
        bounds: Bounds,
        versions: tuple[Version, ...],
        altered: list[Altered],
    ) -> TableShare | None:
        found = [parsed(value) for value in events[0][1]]
        if not found or any(each.op == "c" and each.source.unchanged for each in found):
            return None
        truncated = max((each.source.seq for each in found if each.op == "t"), default=None)
        truncates = truncates_of(events, bounds)
        target = self.sink.target(versions, bounds.upto, truncated, truncates, altered)
        has_old = any(each.op in {"u", "d"} for each in found)
        return target and TableShare(target, self.known, truncated, 0, has_old, altered)

    def rows(self) -> list[str]:
        """Return the rows that the source has, without columns that it dropped."""
        (newest,) = self.versions(TOPIC, ())
        rows = (orjson.loads(row) for _, _, row in self.sink.contents(newest))
        return shown([{c.name: row.get(c.name) for c in newest.columns} for row in rows])


def shown(rows: list[Row]) -> list[str]:
    """Return rows in any order; 0 is -0."""
    plain = [{n: v + 0.0 if isinstance(v, float) else v for n, v in row.items()} for row in rows]
    return sorted(str(sorted(row.items())) for row in plain)


def _no_letter(_: object) -> bytes:
    raise AssertionError


@pytest.mark.parametrize(
    ("key", "history"),
    [(key, history) for key in KEYS for history in (False, True) if key != "none" or not history],
)
@settings(max_examples=examples(8))
@given(
    seed=st.integers(0, 2**32),
    cuts=st.integers(3, 5),
    tiny=st.lists(st.sampled_from([1, 2, 5, 1_000]), min_size=4, max_size=4),
)
def test_tasks_write_what_the_driver_does(
    *, key: str, history: bool, seed: int, cuts: int, tiny: list[int]
) -> None:
    """Large cuts and small ones in turns, one process after another."""
    with ExitStack() as limits:
        for (module, name), value in zip(TINY, tiny, strict=True):
            limits.enter_context(patch.object(module, name, value))
        follow(Random(seed), cuts, KEYS[key], history=history)


def follow(chance: Random, cuts: int, key: tuple[str, ...], *, history: bool) -> int:
    """Play cuts into two lakes, which stay alike; return how many were written by tasks."""
    table = AlteredTable(chance, *key)
    with TemporaryDirectory() as folder:
        lakes = []
        for name, how, large in (
            ("mixed", chance.choice(("auto", "vectors")), 0.8),
            ("small", "vectors", 0),
        ):
            made = DeltaSettings(
                "shop", "mirror", "shop", str(Path(folder, name)), applier=how,
                history=frozenset({NAME} if history else ()),
            )  # fmt: skip
            lakes.append(Lake(table, Random(chance.random()), made, large))
        for _ in range(cuts):
            before = table.seq
            while table.seq == before or chance.random() < 0.95:
                table.step()
            table.describe()
            for lake in lakes:
                lake.take()
                assert lake.rows() == shown(table.shown())
            # Of equal rows without a key any may be deleted, whatever is in dropped columns.
            if table.key:
                mixed, small = (seen(lake.settings.path, "t") for lake in lakes)
                assert mixed == small
    return lakes[0].written
