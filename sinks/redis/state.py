"""The follower's own key in Redis: the frontier that readers ask for, and what each generation is.

A hash. For readers: `generation`, `seq`, `lsn`, `committed_at_us` of the applied frontier, and
`applying`, which is empty unless rows of a later seq may be there already. For us, by generation
`1:…`: `token` (another in each one that is begun, so that no copy goes on in data that is not its
own), `builds`, `stand` and `applied`, `reached`; and by build and table `layout:`, `key:` (empty
while it is not known) and `floor:`.
`current` is the generation, and while it is being switched where from and where to: `1>2`, then
`1>2+`; `step` counts these turns. `sentinel` is the token that a cluster's sentinels have; behind
it they have the step, so that each slot keeps writers out.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from cdc.errors import StoreLostError, SwitchedError
from sinks.contract import Applied, Standing
from sinks.redis.calls import Filling, Layout, layout_of
from sinks.redis.client import Call, Client, Script
from sinks.redis.names import Names, slot_of

Fields = dict[bytes, bytes]
ALL: Final = "*"  # of builds: that of every table that is not named
LOST: Final = 0  # the build of a generation of which nothing is known any more

# KEYS the follower's key. ARGV: generation, token, builds, the sentinels' token.
_CREATE: Final = Script("""
local call, main, g = redis.call, KEYS[1], ARGV[1]
if call('HSETNX', main, g .. ':token', ARGV[2]) == 1 then
  call('HSET', main, g .. ':builds', ARGV[3])
end
if call('HSETNX', main, 'current', g) == 1 then
  call('HSET', main, 'generation', g, 'applying', '', 'sentinel', ARGV[4])
end
return call('HGETALL', main)
""")


@dataclasses.dataclass
class State:
    """What a sink knows of its generation since it opened it."""

    generation: int
    token: bytes
    current: bytes
    sentinel: bytes
    builds: dict[str, int]
    seen: dict[str, int]  # the builds of the generation that readers see
    stand: bytes  # the applied frontier, as the scripts compare it
    standing: Standing | None

    def holds(self, table: str) -> bool:
        """Return whether the generation has the table; one of some tables leaves the rest alone."""
        return ALL in self.builds or table in self.builds

    def filling(self, table: str) -> Filling:
        """Return where a table's rows are written."""
        seen = build_of(self.seen, table)
        build = self.builds.get(table, self.builds.get(ALL, seen))
        return Filling(build, build == seen)


def build_of(builds: Mapping[str, int], table: str) -> int:
    return builds.get(table, builds.get(ALL, 0))


def fields_of(client: Client, names: Names) -> Fields:
    """Return the whole key."""
    return pairs(client.ask("HGETALL", names.main))


def pairs(answer: Any) -> Fields:  # noqa: ANN401 - the client makes a dict of it, a script does not
    """Return a hash as a dict."""
    if isinstance(answer, dict):
        return answer
    return dict(zip(answer[::2], answer[1::2], strict=True))


def create(client: Client, names: Names, generation: int, builds: Mapping[str, int]) -> Fields:
    """Make a generation where it is missing; readers see it where they saw none."""
    arguments = (
        b"%d" % generation,
        secrets.token_hex(8).encode(),
        msgspec.json.encode(dict(builds)),
        secrets.token_hex(8).encode(),
    )
    slot = slot_of(names.main) if names.cluster else 0
    (answer,) = client.run(_CREATE, [Call(slot, (names.main,), arguments)])
    return pairs(answer)


def state_of(fields: Fields, generation: int) -> State:
    """Return the state of a generation that is there."""
    mark = b"%d:" % generation
    applied = fields.get(mark + b"applied")
    reached = int(fields.get(mark + b"reached", b"0"), 16)
    return State(
        generation,
        fields[mark + b"token"],
        fields[b"current"],
        sentinel_of(fields),
        builds_of(fields, generation),
        builds_of(fields, int(fields[b"generation"])),
        fields.get(mark + b"stand", b""),
        _standing(applied, reached, generation),
    )


def again(client: Client, names: Names, state: State) -> State:
    """Return the state of the same generation as it is by now, for who stays with it."""
    fields = fields_of(client, names)
    if fields.get(b"%d:token" % state.generation) != state.token:
        raise StoreLostError("the generation that was built is gone", hint="build it again")
    if b">" in fields[b"current"]:
        raise SwitchedError(
            "a switch of the follower's generations is under way",
            hint="whoever opens the store goes on with it",
        )
    found = state_of(fields, state.generation)
    return dataclasses.replace(found, stand=max(found.stand, state.stand))


def sentinel_of(fields: Fields, *, turns: int = 0) -> bytes:
    """Return what a slot's sentinel says, at this step or some turns on."""
    return fields[b"sentinel"] + step_of(fields, turns=turns)


def step_of(fields: Fields, *, turns: int) -> bytes:
    """Return the step, at which a switch stands, as text that is ordered; the first is empty."""
    step = int(fields.get(b"step") or b"0", 16) + turns
    return b"%016x" % step if step else b""


def builds_of(fields: Fields, generation: int) -> dict[str, int]:
    return msgspec.json.decode(fields.get(b"%d:builds" % generation, b"{}"), type=dict[str, int])


def generations_of(fields: Fields) -> dict[int, Applied | None]:
    """Return every generation with its applied frontier."""
    found = [int(name.partition(b":")[0]) for name in fields if name.endswith(b":token")]
    stored = {number: fields.get(b"%d:applied" % number) for number in sorted(found)}
    return {number: None if each is None else _frontier(each) for number, each in stored.items()}


def layouts_of(fields: Fields, build: int) -> dict[str, Layout]:
    """Return how a build's tables lie, by table."""
    mark = layout_field(build, "")
    return {
        name[len(mark) :].decode(): layout_of(stored)
        for name, stored in fields.items()
        if name.startswith(mark)
    }


def layout_field(build: int, table: str) -> bytes:
    return b"layout:%d:%b" % (build, table.encode())


def key_field(build: int, table: str) -> bytes:
    return b"key:%d:%b" % (build, table.encode())


def floor_field(build: int, table: str) -> bytes:
    return b"floor:%d:%b" % (build, table.encode())


def stand_of(applied: Applied) -> bytes:
    """Return a frontier as text that is ordered as frontiers are."""
    return b"%016x%016x" % (applied.seq, applied.lsn)


def stored_of(applied: Applied) -> bytes:
    """Return a frontier as JSON."""
    ends = {topic: tuple(each) for topic, each in applied.ends.items()}
    return msgspec.json.encode(applied._replace(lsn=int(applied.lsn), ends=ends)._asdict())  # type: ignore[arg-type]


def _standing(applied: bytes | None, reached: int, generation: int) -> Standing | None:
    if applied is None and not reached:
        return None
    nothing = Applied.beginning("", generation)
    return Standing(nothing if applied is None else _frontier(applied), reached)


def _frontier(stored: bytes) -> Applied:
    return Applied.told(msgspec.json.decode(stored))
