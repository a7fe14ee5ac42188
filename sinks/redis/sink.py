"""The Redis sink: plain values for any client's GET, written if and only if they are newer.

Each value has a companion key with its seq, and the follower's own key holds the applied frontier
(`sinks.redis.state`). A small cut is gathered and sent, with its frontier, in one call of a script:
readers see all of it or nothing. A larger one is written as it arrives, and `applying` shows that.
In a cluster every cut is written that way.

After a crash the data is in a state that this server had before, because it runs one command after
another: the frontier and the rows are lost together. A restart in the middle of a cut that several
processes write could lose one's writes; so a cut is only committed on the servers on which it
began.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple, Self

from cdc.errors import (
    ConfigError,
    InvariantError,
    StoreLostError,
    UnavailableError,
)
from lockstep.sinks.contract import (
    Applied,
    Changes,
    ShadowBuild,
    StoreState,
    Version,
    expect_key,
    expect_tables,
)
from lockstep.sinks.redis import health
from lockstep.sinks.redis import index as redis_index
from lockstep.sinks.redis.calls import (
    OpenCut,
    Operation,
    StoredTable,
    TargetBuild,
    decoded_key,
    decoded_layout,
    encoded_key,
    encoded_layout,
    gathered,
    key_of_rows,
    with_rows,
)
from lockstep.sinks.redis.client import Call, RedisClient, Script
from lockstep.sinks.redis.generations import UNENDED, clear, drop, finish_switch, switch
from lockstep.sinks.redis.names import Names
from lockstep.sinks.redis.rows import below_floor, count_newer, key_of, orphans, stored_rows
from lockstep.sinks.redis.scripts import (
    ADD_BUCKETS,
    ANNOUNCE,
    APPLY,
    BEGIN,
    DELETE_BELOW_FLOOR,
    DELETE_ORPHANS,
    RAISE_FLOOR,
    SET_ONCE,
)
from lockstep.sinks.redis.state import (
    ALL,
    LOST,
    Fields,
    GenerationState,
    buckets_field,
    builds_of,
    create,
    fields_of,
    floor_field,
    frontier_as_json,
    generations_of,
    key_field,
    layout_field,
    reread,
    sentinel_of,
    seq_of_floor,
    sortable,
    state_of,
)
from lockstep.sinks.shapes import RowShape

# The most changes in one call with the frontier: it blocks the server for about ten milliseconds.
SMALL_CHANGES: Final = 3_000
SMALL_BYTES: Final = 4 << 20

_APPLY, _BEGIN, _ANNOUNCE = Script(APPLY), Script(BEGIN), Script(ANNOUNCE)
_RAISE_FLOOR, _SET_ONCE = Script(RAISE_FLOOR), Script(SET_ONCE)
_ADD_BUCKETS = Script(ADD_BUCKETS)
_DELETE_BELOW_FLOOR, _DELETE_ORPHANS = Script(DELETE_BELOW_FLOOR), Script(DELETE_ORPHANS)


class RedisSettings(NamedTuple):
    """The configuration of a follower in Redis."""

    url: str
    prefix: str
    follower: str
    cluster: bool = False
    shapes: Mapping[str, RowShape] = {}
    tombstone_seconds: int = 24 * 3600
    answer_seconds: float = 60.0  # a server that forks to save is blocked for seconds


class RedisSink:
    """One follower's keys, of the generation that readers see or of another."""

    complete_rows = True
    parallel = True

    def __init__(self, settings: RedisSettings, shadow: ShadowBuild | None = None) -> None:
        self._settings, self._shadow = settings, shadow
        self._names = Names(settings.prefix, settings.follower, cluster=settings.cluster)
        self._client = self._connect()
        self._tables: dict[int, StoredTable] = {}
        # By build and table, whether the table has an index there; its layout has been checked.
        self._indexed: dict[tuple[int, str], bool] = {}
        # By build and table, the buckets that are recorded as having an index.
        self._buckets: dict[tuple[int, str], set[int]] = {}
        # By build and table, the rows' key, and the seq of the truncate from which on they have it.
        self._keys: dict[tuple[int, str], tuple[tuple[str, ...] | None, int]] = {}
        self._state: GenerationState | None = None
        self._cut: OpenCut | None = None
        self._evicts: health.Evicts = ""

    def __getstate__(self) -> dict[str, Any]:
        """Drop connections and unsent changes: a copy writes its changes immediately."""
        cut = self._cut and dataclasses.replace(
            self._cut, gathered=None, truncated={}, is_copy=True
        )
        return self.__dict__ | {"_client": None, "_tables": {}, "_cut": cut}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._client = self._connect()

    def _connect(self) -> RedisClient:
        settings = self._settings
        seconds = settings.answer_seconds
        return RedisClient(settings.url, cluster=settings.cluster, answer_seconds=seconds)

    def open(self) -> StoreState | None:
        self._cut, self._indexed, self._buckets, self._keys = None, {}, {}, {}
        self._tables = {}  # so that each is refused if the server evicts by now
        self._evicts = health.evicts(self._client)
        fields = fields_of(self._client, self._names)
        fields = finish_switch(self._client, self._names, self._settings.prefix, fields)
        if not fields and self._shadow is None:
            health.refuse_orphans(self._client, self._names)
        fields = self._created(fields)
        self._state = state_of(fields, self._generation(fields))
        self._check_slots(self._state.sentinel)
        health.expect_seq(self._client, self._names, self._state.generation, self._state.frontier)
        return self._state.stored

    def _check_slots(self, sentinel: bytes) -> None:
        """Raise StoreLostError if a server of a cluster was lost, unless this replaces that.

        A shadow build takes the lost slots, too. The generation that readers see stays lost by what
        its servers recorded of its seq, and shows readers no frontier until the switch.
        """
        try:
            health.check_slots(self._client, self._names, sentinel)
        except StoreLostError:
            if self._shadow is None:
                raise
            self._client.ask("HSET", self._names.main, b"applying", UNENDED)
            health.raise_sentinels(self._client, self._names, sentinel, new=True)

    def _created(self, fields: Fields) -> Fields:
        generation = self._generation(fields)
        tables = self._shadow.tables if self._shadow else None
        if b"%d:token" % generation in fields:
            if self._shadow:
                started = builds_of(fields, generation)
                expect_tables(generation, None if ALL in started else started, tables)
            return fields
        builds = dict.fromkeys(tables or (ALL,), generation)
        fresh = not fields
        if fresh and generation > 1 and self._shadow is not None:
            # The follower's own key was lost: the remaining values stay visible to readers until
            # this generation replaces them.
            create(self._client, self._names, 1, {ALL: LOST})
        fields = create(self._client, self._names, generation, builds)
        if fresh:
            health.raise_sentinels(self._client, self._names, sentinel_of(fields), new=True)
        return fields

    def _generation(self, fields: Fields) -> int:
        return self._shadow.generation if self._shadow else int(fields.get(b"generation", b"1"))

    def start_over(self, generation: int) -> None:
        self._cut = self._state = None
        clear(self._client, self._names, self._settings.prefix, self._settings.shapes)
        fields = create(self._client, self._names, generation, {ALL: generation})
        health.raise_sentinels(self._client, self._names, sentinel_of(fields), new=True)

    def histories(self) -> frozenset[str]:
        return frozenset()

    def begin(self, reached: int, versions: Sequence[Version], above: int | None = None) -> None:
        state = self._opened()
        for version in versions:
            if state.holds(version.name):
                self._table_of(version)
        if self._shadow is not None:  # it keeps its generation, whichever readers see
            self._state = state = reread(self._client, self._names, state)
        cut = (state.frontier, b"%016x" % reached, b"" if above is None else b"%016x" % above)
        stored = self._main(_BEGIN, b"%d" % state.generation, *cut)
        state.frontier = max(state.frontier, stored or b"")
        health.expect_seq(self._client, self._names, state.generation, stored or b"")
        servers = self._client.runs()
        self._cut = OpenCut(reached, servers, None if self._settings.cluster else [])

    def write(self, changes: Changes) -> int:
        cut = self._open_cut()
        if not self._opened().holds(changes.version.name):
            return 0
        stored_table = self._table_of(changes.version)
        if changes.truncated is not None:
            self._send_gathered(cut)
            self._raise_floor(cut, stored_table, changes, changes.truncated)
        self._expect_key(cut, changes)
        operations = self._operations(changes, stored_table)
        cut.changes += len(changes.changes)
        if cut.gathered is None or cut.changes > SMALL_CHANGES:
            self._send_gathered(cut)
            return self._send(cut, stored_table, operations)
        mine = list(operations)
        cut.bytes += sum(len(part) for each in mine for part in each[2])
        if cut.bytes > SMALL_BYTES:
            self._send_gathered(cut)
            return self._send(cut, stored_table, mine)
        target = self._target(stored_table.version.name)
        self._record_buckets(target, stored_table, with_rows(mine))
        cut.gathered.append((stored_table, mine))
        return count_newer(self._client, stored_table, target, mine)

    def commit(self, applied: Applied) -> None:
        cut, state = self._open_cut(), self._opened()
        for error in cut.refused.values():
            raise error
        self._delete_truncated(cut)
        # Checked on the connection that commits: a restart after the answer breaks that connection.
        if self._client.runs() != cut.servers:
            raise UnavailableError(
                "Redis was restarted, or another server took over, while a cut was written",
                hint="the follower writes the cut again; `appendfsync always` loses no writes",
            )
        keys, arguments = [self._names.main], self._guard()
        # The complete cut in one call; if an error interrupts it, `applying` stays set.
        if cut.gathered and state.generation == int(state.current):
            arguments += [b"applying", b"%016x" % cut.reached]
        for stored_table, operations in cut.gathered or ():
            target = self._target(stored_table.version.name)
            floor = floor_field(target.build, stored_table.version.name)
            for bucket, mine in gathered(operations):
                arguments += stored_table.group(target, bucket, floor, len(mine))
                for _, touched, given in mine:
                    keys += touched
                    arguments += given
        frontier = sortable(applied)
        seen = (b"%d" % applied.seq, str(applied.lsn).encode(), b"%d" % applied.committed_at_us)
        mark = b"%d" % state.generation
        arguments += [b"commit", mark, frontier, frontier_as_json(applied), *seen]
        health.raise_seq(self._client, self._names, state.generation, applied.seq)
        self._client.run(_APPLY, [Call(self._main_slot, keys, arguments)])
        state.frontier, self._cut = max(state.frontier, frontier), None

    def rows(self, version: Version, keys: Sequence[bytes]) -> Mapping[bytes, bytes]:
        stored_table = self._table_of(version)
        self._send_cut()
        found = stored_rows(self._client, stored_table, self._opened().target(version.name), keys)
        return {key: row for key, (_, row) in found.items() if row}

    def close(self) -> None:
        self._client.close()

    # --- generations ---

    def generations(self) -> Mapping[int, Applied | None]:
        """Return every generation in the store and its applied frontier."""
        return generations_of(fields_of(self._client, self._names))

    def current(self) -> int | None:
        """Return the generation that readers see."""
        fields = fields_of(self._client, self._names)
        return int(fields[b"generation"]) if fields else None

    def at(self, generation: int, tables: frozenset[str] | None = None) -> Self:
        """Return a sink of a generation, which `open` creates; of some tables only, if given."""
        return type(self)(self._settings, ShadowBuild(generation, tables))

    def switch(self, generation: int, former: Applied | None = None) -> None:
        """Switch readers to a generation, whose values get the names of the previous one's."""
        settings = self._settings
        names, prefix = self._names, settings.prefix
        switch(self._client, names, prefix, generation, settings.shapes, former)

    def drop(self, generation: int) -> None:
        """Delete what only that generation has."""
        drop(self._client, self._names, generation)

    def forgets(self, version: Version) -> bool:
        """Return whether rows may be evicted or expire, together with their companions."""
        return (
            self._evicts == "allkeys"
            or self._table_of(version).layout.shape.ttl_seconds is not None
        )

    def contents(self, version: Version) -> Iterator[tuple[bytes, int, bytes]]:
        """Yield each row's key, seq and stored value as JSON."""
        stored_table, target = self._table_of(version), self._opened().target(version.name)
        self._send_cut()
        pattern = self._names.pattern(target.build, version.name)
        for names in self._client.scan(pattern):
            keys = [key for key in (key_of(name, version.name) for name in names) if key]
            found = stored_rows(self._client, stored_table, target, keys, are_seen=True)
            for key, (seq, row) in found.items():
                yield key, seq, row

    # --- helpers ---

    def _opened(self) -> GenerationState:
        if self._state is None:
            raise InvariantError("a Redis sink is used that was not opened")
        return self._state

    def _target(self, table: str) -> TargetBuild:
        """Return the build of a table whose layout was checked."""
        target = self._opened().target(table)
        return target._replace(indexed=self._indexed[target.build, table])

    def _open_cut(self) -> OpenCut:
        if self._cut is None:
            raise InvariantError("a Redis sink is written to outside a cut")
        return self._cut

    @property
    def _main_slot(self) -> int:
        return self._names.slot(self._names.main)

    def _guard(self) -> list[bytes]:
        state = self._opened()
        return [b"%d:token" % state.generation, state.token, state.current]

    def _main(self, script: Script, *arguments: bytes) -> Any:  # noqa: ANN401 - the script's
        call = Call(self._main_slot, (self._names.main,), (*self._guard(), *arguments))
        (answer,) = self._client.run(script, [call])
        return answer

    def _table_of(self, version: Version) -> StoredTable:
        """Return a table's layout, which must be the same during all of its build."""
        stored_table = self._tables.get(version.schema_id)
        if stored_table is None or stored_table.version != version:
            settings = self._settings
            shape = settings.shapes.get(version.name, RowShape())
            life = settings.tombstone_seconds
            stored_table = StoredTable(self._names, settings.prefix, shape, version, life)
            health.refuse_eviction(stored_table, self._evicts)
            self._tables[version.schema_id] = stored_table
        build = self._opened().target(version.name).build
        if (build, version.name) not in self._indexed:
            # Rows that expire leave no trace, and sets can be evicted, as all keys can.
            indexed = stored_table.layout.shape.ttl_seconds is None and self._evicts != "allkeys"
            layout = encoded_layout(stored_table.layout._replace(indexed=indexed))
            stored = decoded_layout(
                self._main(_SET_ONCE, layout_field(build, version.name), layout)
            )
            if stored._replace(indexed=False) != stored_table.layout:
                raise ConfigError(
                    f"{version.name} has another shape than when it was filled",
                    hint=f"set the old one again, or `cdc rebuild {self._settings.follower}`",
                )
            self._indexed[build, version.name] = stored.indexed
        return stored_table

    def _expect_key(self, cut: OpenCut, changes: Changes) -> None:
        """Record an error for rows with another key than the stored ones.

        A later truncate in the cut clears the error, so only `commit` raises it. A task raises at
        once, because tasks never get a table with a truncate in the cut.
        """
        table, key = changes.version.name, key_of_rows(changes)
        at = (self._opened().target(table).build, table)
        if changes.truncated is not None:
            cut.refused.pop(table, None)
            self._keys.pop(at, None)
        if key is None:
            return
        if at not in self._keys:
            stored = self._main(_SET_ONCE, key_field(*at), encoded_key(key))
            floor = self._client.ask("HGET", self._names.main, floor_field(*at)) or b"0"
            self._keys[at] = decoded_key(stored), seq_of_floor(floor)
        try:
            expect_key(changes, *self._keys[at])
        except ConfigError as error:
            if cut.is_copy:
                raise
            cut.refused.setdefault(table, error)

    def _operations(self, changes: Changes, stored_table: StoredTable) -> Iterator[Operation]:
        """Yield the changes' operations, each with its own table version."""
        target = self._target(changes.version.name)
        if len(changes.versions) == 1:
            yield from stored_table.operations(target, changes.changes)
            return
        by_id = {version.schema_id: self._table_of(version) for version in changes.versions}
        for schema_id, each in groupby(changes.changes, lambda change: change.schema_id):
            yield from by_id[schema_id].operations(target, each)

    def _send_cut(self) -> None:
        """Send what the cut has so far, so that it can be read."""
        if self._cut is not None:
            self._send_gathered(self._cut)
            self._delete_truncated(self._cut)

    def _send_gathered(self, cut: OpenCut) -> None:
        """Send the gathered part of a cut; its further changes are then written as they arrive."""
        gathered_so_far, cut.gathered = cut.gathered or [], None
        for stored_table, operations in gathered_so_far:
            self._send(cut, stored_table, operations)

    def _send(
        self, cut: OpenCut, stored_table: StoredTable, operations: Iterable[Operation]
    ) -> int:
        """Apply operations, many keys per call; return how many were new to the store."""
        self._announce(cut)
        state = self._opened()
        target = self._target(stored_table.version.name)
        floor = field = floor_field(target.build, stored_table.version.name)
        guard = self._guard()
        if self._settings.cluster:
            floor = self._client.ask("HGET", self._names.main, field) or b""
            guard = [b"", state.sentinel, b""]

        groups: Iterable[tuple[int, Sequence[Operation]]] = gathered(operations)
        if target.indexed and self._lacks_buckets(target, stored_table):
            groups = list(groups)
            buckets = with_rows(each for _, some in groups for each in some)
            self._record_buckets(target, stored_table, buckets)

        def calls() -> Iterator[Call]:
            for slot, mine in groups:
                keys = [self._names.guard(slot)]
                arguments = guard + stored_table.group(target, slot, floor, len(mine))
                for _, touched, given in mine:
                    keys += touched
                    arguments += given
                yield Call(slot, keys, arguments)

        return sum(self._client.run(_APPLY, calls()))

    def _lacks_buckets(self, target: TargetBuild, stored_table: StoredTable) -> bool:
        """Return whether some bucket may not be recorded."""
        known = self._buckets.get((target.build, stored_table.version.name), ())
        return len(known) < self._names.buckets

    def _record_buckets(
        self, target: TargetBuild, stored_table: StoredTable, buckets: set[int]
    ) -> None:
        """Record in which buckets rows are about to be written."""
        at = (target.build, stored_table.version.name)
        known = self._buckets.setdefault(at, set())
        if target.indexed and not buckets <= known:
            self._main(_ADD_BUCKETS, buckets_field(*at), redis_index.bitmap(buckets - known))
            known |= buckets

    def _announce(self, cut: OpenCut) -> None:
        if not cut.announced:
            state = self._opened()
            self._main(_ANNOUNCE, b"%d" % state.generation, b"%016x" % cut.reached)
            cut.announced = True

    def _raise_floor(
        self, cut: OpenCut, stored_table: StoredTable, changes: Changes, seq: int
    ) -> None:
        """Reject rows below a seq from here on; those that exist are deleted later in the cut."""
        self._announce(cut)
        table = stored_table.version.name
        target, floor = self._target(table), b"%016x" % seq
        at = (target.build, table)
        self._main(
            _RAISE_FLOOR,
            *(floor_field(*at), floor, key_field(*at)),
            encoded_key(key_of_rows(changes)),
        )
        _, before = cut.truncated.get(table, (None, 0))
        cut.truncated[table] = stored_table, max(seq, before)

    def _delete_truncated(self, cut: OpenCut) -> None:
        """Delete the rows below the cut's truncates, after it has written those that follow them.

        So readers of a table whose rows are all replaced, as a view's are, never find it empty.
        """
        if cut.truncated:
            self._send_gathered(cut)
        while cut.truncated:
            table, (stored_table, seq) = next(iter(cut.truncated.items()))
            self._delete_below(stored_table, b"%016x" % seq)
            del cut.truncated[table]

    def _delete_below(self, stored_table: StoredTable, floor: bytes) -> None:
        """Delete a table's rows below a floor."""
        state, table = self._opened(), stored_table.version.name
        target = self._target(table)
        guard = [b"", state.sentinel, b""] if self._settings.cluster else self._guard()
        evicts = health.evicts(self._client)
        found = redis_index.companions(self._client, stored_table, target)
        if found is None or evicts == "allkeys":
            found = self._client.scan(self._names.pattern(target.build, table))
        for names in found:
            self._client.run(
                _DELETE_BELOW_FLOOR, below_floor(stored_table, target, guard, floor, names)
            )
        if evicts == "allkeys" and stored_table.placer.template is None:
            where = self._names.values(
                stored_table.placer.head, None if target.seen else target.build
            )
            for names in self._client.scan(where):
                self._client.run(_DELETE_ORPHANS, orphans(stored_table, target, guard, names))
