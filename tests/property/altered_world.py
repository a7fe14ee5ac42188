"""A table whose DDL writes no row, the log that the daemon makes of it, and what Postgres shows.

Its columns are known by numbers, as in Postgres; a row has the values that were written to it. A
column of the key may be a float, whose 0 and -0 are one key, or a decimal; or there is no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from cdc.encode.alterations import compare
from cdc.events import LSN
from cdc.log.records import ALTERED, SchemaColumn, SchemaRecord
from tests.property.reference import PLACEHOLDER

TOPIC: Final = "shop.public.t"
Row = dict[str, Any]
Values = dict[int, Any]  # by the number of the column
# Type, oid and modifier.
_KINDS: Final = {
    "text": ("text", 25, -1),
    "int4": ("int4", 23, -1),
    "int8": ("int8", 20, -1),
    "float8": ("float8", 701, -1),
    "numeric(5,2)": ("numeric", 1700, (5 << 16 | 2) + 4),
    "numeric(8,2)": ("numeric", 1700, (8 << 16 | 2) + 4),
}
# Types of which every value keeps its text in the other.
_WIDER: Final = {"int4": ("int8", "text"), "int8": ("text",), "numeric(5,2)": ("numeric(8,2)",)}
_NAMES: Final = ("a", "b", "c", "d", "e", "f")
_INTEGERS: Final = (0, 1, 2)
_DECIMALS: Final = ("0.00", "1.50", "-1.50", "NaN")
_VALUES: Final = {
    "text": ("", "x", "1"),
    "int4": _INTEGERS,
    "int8": _INTEGERS,
    "float8": (0.0, -0.0, 0.0, -0.0, 1.5, "NaN", "Infinity", "-Infinity"),
    "numeric(5,2)": _DECIMALS,
    "numeric(8,2)": _DECIMALS,
}


@dataclass
class Column:
    name: str
    kind: str
    missing: Any = None  # what rows show that were not written since


class AlteredTable:
    """`events` and `messages` are the log; `shown` is the table."""

    def __init__(self, chance: Random, *key: str) -> None:
        """`key` has the types of the key's columns."""
        self.chance = chance
        self.key = range(1, len(key) + 1)
        kinds = dict(zip(self.key, key, strict=True))
        self.columns = {n: Column(f"k{n}", kind) for n, kind in kinds.items()}
        self.highest = len(key)
        self.rows: list[Values] = []
        self.versions: list[SchemaRecord] = []
        self.events: list[tuple[bytes | None, bytes]] = []
        self.messages: list[tuple[bytes, bytes]] = []
        self.seq = self.lsn = self.ordinal = 0
        for _ in range(2):
            self._add()

    def step(self) -> None:
        self.ordinal += 1
        if self.chance.random() < 0.5:
            self.lsn, self.ordinal = self.lsn + 1, 1
        kind = self.chance.random()
        if kind < 0.2:
            self._alter()
        elif kind < 0.35 and self.rows:
            self._delete()
        elif kind < 0.37:
            self._truncate()
        else:
            self._write()

    def shown(self) -> list[Row]:
        return [self._row(row) for row in self.rows]

    # -- rows --------------------------------------------------------------------------------------

    def _write(self) -> None:
        self.describe()
        new = {n: self._value(each.kind, n) for n, each in self.columns.items()}
        same = [row for row in self.rows if self._identity(row) == self._identity(new)]
        others = [row for row in self.rows if row not in same]
        if not self.key:
            same = [self.chance.choice(self.rows)] if self.rows else []
            same = same if self.chance.random() < 0.5 else []
        elif others and not same and self.chance.random() < 0.3:
            same = [self.chance.choice(others)]
        old = self._row(same[0]) if same else None
        if old is not None:
            self.rows.remove(same[0])
        moves = bool(same) and self._key(same[0]) != self._key(new)
        unchanged = [
            n
            for n, each in self.columns.items()
            if same and each.kind == "text" and n not in self.key
            and self.chance.random() < (0.1 if moves else 0.4)
        ]  # fmt: skip
        new |= {n: same[0].get(n, self.columns[n].missing) for n in unchanged}
        self.rows.append(new)
        if moves:
            self._event("d", self._key(same[0]), self._old(same[0]))
            self._event("c", self._key(new), None, self._row(new), unchanged)
        else:
            before = self._old(same[0]) if same and not self.key else None
            self._event("u" if same else "c", self._key(new), before, self._row(new), unchanged)

    def _delete(self) -> None:
        self.describe()
        row = self.rows.pop(self.chance.randrange(len(self.rows)))
        self._event("d", self._key(row), self._old(row))

    def _truncate(self) -> None:
        self.describe()
        self.rows.clear()
        self._event("t", None, None)

    def _value(self, kind: str, number: int) -> Any:  # noqa: ANN401 - any type's
        if number not in self.key and self.chance.random() < 0.3:
            return None
        return self.chance.choice(_VALUES[kind])

    def _row(self, row: Values) -> Row:
        return {c.name: row.get(n, c.missing) for n, c in sorted(self.columns.items())}

    def _old(self, row: Values) -> Row:
        old = self._row(row)
        names = [self.columns[n].name for n in self.key] or list(old)
        return {name: old[name] for name in names}

    def _key(self, row: Values) -> bytes | None:
        if not self.key:
            return None
        return msgspec.json.encode({self.columns[n].name: row[n] for n in self.key})

    def _identity(self, row: Values) -> list[Any]:
        return [row[n] for n in self.key]  # 0 and -0 are equal

    # -- DDL ---------------------------------------------------------------------------------------

    def _alter(self) -> None:
        for _ in range(self.chance.randint(1, 2)):
            do = (self._add, self._rename, self._exchange, self._drop, self._again, self._widen)
            self.chance.choice(do)()
        if self.chance.random() < 0.7:  # else it is noticed at the next row
            self.describe()

    def _add(self, name: str = "") -> None:
        name = name or self._free()
        if name:
            kind = self.chance.choice(("text", "int4", "numeric(5,2)"))
            self.highest += 1
            missing = self._value(kind, self.highest)
            self.columns[self.highest] = Column(name, kind, missing)

    def _free(self) -> str:
        free = {*_NAMES} - {each.name for each in self.columns.values()}
        return self.chance.choice(sorted(free)) if free else ""

    def _rename(self) -> None:
        """Give a column another name, perhaps one of the key."""
        column = self.chance.choice(list(self.columns.values()))
        column.name = self._free() or column.name

    def _exchange(self) -> None:
        one, other = self.chance.choices(list(self.columns.values()), k=2)
        one.name, other.name = other.name, one.name

    def _drop(self) -> str:
        free = [number for number in self.columns if number not in self.key]
        return self.columns.pop(self.chance.choice(free)).name if len(free) > 1 else ""

    def _again(self) -> None:
        """Drop a column and add one of its name."""
        self._add(self._drop())

    def _widen(self) -> None:
        """Give a column a larger type, perhaps one of the key."""
        number = self.chance.choice(list(self.columns))
        column = self.columns[number]
        if column.kind in _WIDER:
            column.kind = self.chance.choice(_WIDER[column.kind])
            if column.kind == "text":
                column.missing = _text(column.missing)
                for row in self.rows:
                    if number in row:
                        row[number] = _text(row[number])

    # -- the log -----------------------------------------------------------------------------------

    def describe(self) -> None:
        """Write the table's version, if it is another one, as the daemon does."""
        columns = []
        for number, each in sorted(self.columns.items()):
            kind, oid, modifier = _KINDS[each.kind]
            missing = None if each.missing is None else msgspec.json.encode(each.missing).decode()
            columns.append(SchemaColumn(
                name=each.name, type_id=oid, type=kind, type_modifier=modifier, attnum=number,
                nullable=number not in self.key, missing=missing,
            ))  # fmt: skip
        new = SchemaRecord(
            schema_id=len(self.versions) + 1, relation_id=1, schema="public", table="t",
            topic=TOPIC, replica_identity="d", from_lsn=LSN(self.lsn), columns=tuple(columns),
            key=tuple(self.columns[n].name for n in self.key), attributes=self.highest, storage="1",
        )  # fmt: skip
        if not self.versions:
            self.versions.append(new)
            return
        alteration = compare(self.versions[-1], new)
        if alteration is None:
            return
        assert alteration.stale == ""
        self.versions.append(new)
        content = msgspec.json.encode(alteration)
        event = {"op": "m", "source": self._source(), "message": {"content": content}}
        self.messages.append(
            (msgspec.json.encode({"prefix": ALTERED}), msgspec.json.encode(event))
        )  # fmt: skip

    def _source(self) -> Row:
        self.seq += 1
        return {
            "seq": self.seq, "commit_lsn": f"0/{self.lsn + 16:X}", "ordinal": self.ordinal,
            "ts_us": self.lsn, "schema_id": len(self.versions),
        }  # fmt: skip

    def _event(
        self,
        op: str,
        key: bytes | None,
        before: Row | None,
        after: Row | None = None,
        unchanged: list[int] | None = None,
    ) -> None:
        source = self._source()
        if unchanged:
            assert after is not None
            source["unchanged"] = [self.columns[n].name for n in unchanged]
            after |= dict.fromkeys(source["unchanged"], PLACEHOLDER)
        event = {"op": op, "source": source, "before": before, "after": after}
        self.events.append((key, msgspec.json.encode(event)))


def _text(value: Any) -> str | None:  # noqa: ANN401 - any type's
    return None if value is None else str(value)
