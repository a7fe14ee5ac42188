"""The follower's own key in Redis: the frontier for readers, and each generation's state.

A hash. For readers: `generation`, `seq`, `lsn`, `committed_at_us` of the applied frontier, and
`applying`, which is empty unless rows with a later seq may exist. For us, by generation `1:…`:
`token` (a new one for each generation that starts, so that no copy continues in other data),
`builds`, `stand` (the frontier) and `applied`, `reached`, `replacing` (the newest `reached` of a
cut that is no difference from the frontier); and by build and table `layout:`, `key:` (empty while
unknown), `floor:`, and `buckets:`, a bitmap of those that may have an index. `current` is the
generation, and during a switch the old and the new one: `1>2`, then `1>2+`; `step` counts these
steps. `sentinel` is the token of a cluster's sentinels, which also have the step, so that each slot
rejects old writers.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cdc.errors import StoreLostError, SwitchedError
from lockstep.sinks.contract import Applied, StoreState
from lockstep.sinks.redis.calls import Layout, TargetBuild, decoded_layout
from lockstep.sinks.redis.client import Call, RedisClient, Script
from lockstep.sinks.redis.names import Names
from lockstep.sinks.redis.scripts import CREATE_GENERATION

Fields = dict[bytes, bytes]
ALL: Final = "*"  # in builds: the build of every table that is not named
LOST: Final = 0  # the build of a generation whose state was lost

_SEQ_DIGITS: Final = 16
_CREATE: Final = Script(CREATE_GENERATION)


@dataclasses.dataclass
class GenerationState:
    """A generation's state, as the sink read it when it opened it."""

    generation: int
    token: bytes
    current: bytes
    sentinel: bytes
    builds: dict[str, int]
    seen: dict[str, int]  # the builds of the generation that readers see
    frontier: bytes  # the applied frontier, as the scripts compare it
    stored: StoreState | None

    def holds(self, table: str) -> bool:
        """Return whether the generation has the table; it may be for some tables only."""
        return ALL in self.builds or table in self.builds

    def target(self, table: str) -> TargetBuild:
        """Return the build to which a table's rows are written."""
        seen = build_of(self.seen, table)
        build = self.builds.get(table, self.builds.get(ALL, seen))
        return TargetBuild(build, build == seen)


def build_of(builds: Mapping[str, int], table: str) -> int:
    return builds.get(table, builds.get(ALL, 0))


def fields_of(client: RedisClient, names: Names) -> Fields:
    """Return all fields of the key."""
    return pairs(client.ask("HGETALL", names.main))


def pairs(answer: Any) -> Fields:  # noqa: ANN401 - the client makes a dict of it, a script does not
    """Return a hash as a dict."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def create(client: RedisClient, names: Names, generation: int, builds: Mapping[str, int]) -> Fields:
    """Create a generation if it is missing; make it current if there is none."""
    arguments = (
        b"%d" % generation,
        secrets.token_hex(8).encode(),
        msgspec.json.encode(dict(builds)),
        secrets.token_hex(8).encode(),
    )
    (answer,) = client.run(_CREATE, [Call(names.slot(names.main), (names.main,), arguments)])
    return pairs(answer)


def state_of(fields: Fields, generation: int) -> GenerationState:
    """Return the state of an existing generation."""
    mark = b"%d:" % generation
    applied = fields.get(mark + b"applied")
    reached = int(fields.get(mark + b"reached", b"0"), 16)
    replacing = int(fields.get(mark + b"replacing", b"0"), 16)
    return GenerationState(
        generation,
        fields[mark + b"token"],
        fields[b"current"],
        sentinel_of(fields),
        builds_of(fields, generation),
        builds_of(fields, int(fields[b"generation"])),
        fields.get(mark + b"stand", b""),
        _stored_state(applied, reached, replacing, generation),
    )


def reread(client: RedisClient, names: Names, state: GenerationState) -> GenerationState:
    """Return the current state of the same generation, for a sink that keeps it."""
    fields = fields_of(client, names)
    if fields.get(b"%d:token" % state.generation) != state.token:
        raise StoreLostError("the generation that was built is missing", hint="build it again")
    if b">" in fields[b"current"]:
        raise SwitchedError(
            "a switch of the follower's generations is under way",
            hint="the next process that opens the store continues it",
        )
    found = state_of(fields, state.generation)
    return dataclasses.replace(found, frontier=max(found.frontier, state.frontier))


def sentinel_of(fields: Fields, *, turns: int = 0) -> bytes:
    """Return a slot's sentinel, at this step or `turns` steps later."""
    return fields[b"sentinel"] + step_of(fields, turns=turns)


def step_of(fields: Fields, *, turns: int) -> bytes:
    """Return the step of a switch as sortable text; the first is empty."""
    step = int(fields.get(b"step") or b"0", 16) + turns
    return b"%016x" % step if step else b""


def builds_of(fields: Fields, generation: int) -> dict[str, int]:
    return msgspec.json.decode(fields.get(b"%d:builds" % generation, b"{}"), type=dict[str, int])


def generations_of(fields: Fields) -> dict[int, Applied | None]:
    """Return every generation with its applied frontier."""
    found = [int(name.partition(b":")[0]) for name in fields if name.endswith(b":token")]
    stored = {number: fields.get(b"%d:applied" % number) for number in sorted(found)}
    return {number: frontier_of(each) for number, each in stored.items()}


def layouts_of(fields: Fields, build: int) -> dict[str, Layout]:
    """Return the layouts of a build, by table."""
    mark = layout_field(build, "")
    return {
        name[len(mark) :].decode(): decoded_layout(stored)
        for name, stored in fields.items()
        if name.startswith(mark)
    }


def layout_field(build: int, table: str) -> bytes:
    return b"layout:%d:%b" % (build, table.encode())


def key_field(build: int, table: str) -> bytes:
    return b"key:%d:%b" % (build, table.encode())


def seq_of_floor(floor: bytes) -> int:
    """Return the seq up to which nothing is written: a truncate's floor has no digit after it."""
    digits = floor[:_SEQ_DIGITS]
    return int(digits, 16) - (len(floor) == _SEQ_DIGITS)


def floor_field(build: int, table: str) -> bytes:
    return b"floor:%d:%b" % (build, table.encode())


def buckets_field(build: int, table: str) -> bytes:
    return b"buckets:%d:%b" % (build, table.encode())


def sortable(applied: Applied) -> bytes:
    """Return a frontier as text that sorts like frontiers."""
    return b"%016x%016x" % (applied.seq, applied.lsn)


def frontier_as_json(applied: Applied) -> bytes:
    """Return a frontier as JSON."""
    ends = {topic: tuple(each) for topic, each in applied.ends.items()}
    return msgspec.json.encode(applied._replace(lsn=int(applied.lsn), ends=ends)._asdict())  # type: ignore[arg-type]


def _stored_state(
    stored: bytes | None, reached: int, replacing: int, generation: int
) -> StoreState | None:
    if stored is None and not reached:
        return None
    applied = frontier_of(stored) or Applied.beginning("", generation)
    return StoreState(applied, reached, replacing > applied.seq)


def frontier_of(stored: bytes | None) -> Applied | None:
    """Return the frontier that a field has, if any."""
    return Applied.from_fields(msgspec.json.decode(stored)) if stored else None
