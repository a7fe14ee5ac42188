"""Every shape in Redis: in any order, repeated or late, changes end in the model's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any, Final

import pytest
import redis

from lockstep.conformance.store import VALUES, applied
from lockstep.sinks.contract import Change, Changes, Column, Version
from lockstep.sinks.redis.sink import RedisSettings, RedisSink
from lockstep.sinks.shapes import RowShape
from tests.fixtures.seeds import first_seed
from tests.fixtures.store_redis import expect_indexed

Row = dict[str, Any]
Keyspace = dict[str, Any]

_COLUMNS: Final = {
    "id": "int8",
    "email": "text",
    "team": "text",
    "name": "text",
    "score": "numeric",
    "joined": "timestamptz",
}
MEMBERS: Final = Version(
    7,
    "public",
    "members",
    "t.public.members",
    ("id",),
    tuple(Column(name, kind, 0, -1, nullable=name != "id") for name, kind in _COLUMNS.items()),
    VALUES,
)
SHAPES: Final = {
    "row": RowShape(),
    "row that moves": RowShape(key="by:{email}"),
    "fields": RowShape(key="f:{id}", form="fields", fields=("name", "score")),
    "fields that move": RowShape(key="f:{email}", form="fields", fields=("name",)),
    "text": RowShape(key="t:{id}", form="text", value="{name} {{{score}}}"),
    "text that moves": RowShape(key="{team}/{email}", form="text", value="{id}"),
    "hash": RowShape(key="h:{id}", form="hash"),
    "hash that moves": RowShape(key="h:{email}", form="hash", fields=("id", "name")),
    "set": RowShape(key="team:{team}", form="set", member="{name}"),
    "zset": RowShape(key="team:{team}", form="zset", member="{name}", score="score"),
    "zset by time": RowShape(key="all", form="zset", member="{id}", score="joined"),
}
# Text that templates, key names, patterns or Lua could misread.
_ODD: Final = ['a"b', "{x}", "}{", "*", "[a-z]?", "é😀", "a:b", "%3A", "\\", "\x01", "", "a b", ">"]


def change(seq: int, number: int, row: Row | None, *, unchanged: tuple[str, ...] = ()) -> Change:
    body = None if row is None else json.dumps(row, ensure_ascii=False).encode()
    return Change(b'{"id":%d}' % number, seq, body, 7, seq, seq, unchanged, op="u" if row else "d")


def expected(shape: RowShape, prefix: str, rows: dict[int, tuple[int, Row]]) -> Keyspace:
    """Return what readers should see, computed in the simplest way."""
    found: Keyspace = {}
    for number, (_, row) in sorted(rows.items(), key=lambda item: item[1][0]):
        texts = {name: None if value is None else str(value) for name, value in row.items()}
        templates = [shape.key, shape.member, shape.value, shape.score and f"{{{shape.score}}}"]
        if any(v is None and f"{{{n}}}" in (t or "") for n, v in row.items() for t in templates):
            continue
        key = (shape.key or f"{prefix}:public.members:{number}").format(**texts)
        if shape.form == "row":
            found[key] = row
        elif shape.form == "fields":
            found[key] = {name: row[name] for name in shape.fields}
        elif shape.form == "text":
            found[key] = (shape.value or "").format(**texts)
        elif shape.form == "hash":
            named = shape.fields or tuple(row)
            found[key] = {name: texts[name] for name in named if texts[name] is not None}
        elif shape.form == "set":
            found.setdefault(key, set()).add((shape.member or "").format(**texts))
        else:
            score = row[shape.score or ""]
            number_of = 1767225600.0 + row["id"] if shape.score == "joined" else float(score)
            found.setdefault(key, {})[(shape.member or "").format(**texts)] = number_of
    return found


def seen(client: Any, prefix: str, shape: RowShape) -> Keyspace:  # noqa: ANN401 - untyped enough
    """Return all that is in Redis except the follower's own keys."""
    found: Keyspace = {}
    for name in client.scan_iter(count=1000):
        key = name.decode()
        if key.startswith((f"{prefix}:~", f"{prefix}:cdc:")):
            continue
        kind = client.type(name)
        if kind == b"string":
            text = client.get(name)
            found[key] = text.decode() if shape.form == "text" else json.loads(text)
        elif kind == b"hash":
            found[key] = {n.decode(): v.decode() for n, v in client.hgetall(name).items()}
        elif kind == b"set":
            found[key] = {member.decode() for member in client.smembers(name)}
        else:
            found[key] = {
                m.decode(): score for m, score in client.zrange(name, 0, -1, withscores=True)
            }
    return found


class History:
    """A table's changes in order, with an `email` that no two rows have at the same time."""

    def __init__(self, chance: Random) -> None:
        self.rows: dict[int, tuple[int, Row]] = {}
        self.changes: list[Change] = []
        self.truncates: list[int] = []
        self._chance, self._seq = chance, 0

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self._seq += 1
            number = self._chance.randrange(6)
            kind = self._chance.random()
            if kind < 0.03:
                self.truncates.append(self._seq)
                self.rows.clear()
            elif kind < 0.25:
                self.rows.pop(number, None)
                self.changes.append(change(self._seq, number, None))
            else:
                self._write(number)

    def swap(self) -> None:
        """Let two rows swap their emails in one transaction."""
        if len(self.rows) > 1:
            one, other = self._chance.sample(sorted(self.rows), 2)
            emails = self.rows[one][1]["email"], self.rows[other][1]["email"]
            for number, email in zip((other, one), emails, strict=True):
                self._seq += 1
                self._write(number, email)

    def _write(self, number: int, email: str | None = "") -> None:
        chance = self._chance
        taken = {row["email"] for n, (_, row) in self.rows.items() if n != number}
        free = [text for text in (*_ODD, "a@x", "b@x", None) if text is None or text not in taken]
        row: Row = {
            "id": number,
            "email": chance.choice(free) if email == "" else email,
            "team": chance.choice(["red", "blue", "{", None]),
            "name": chance.choice(_ODD[:5]),
            "score": chance.choice(["1.50", "-2", "3e3", None]),
            "joined": f"2026-01-01T00:00:0{number}Z",
        }
        self.rows[number] = (self._seq, row)
        self.changes.append(change(self._seq, number, row))


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> RowShape:
    return SHAPES[request.param]


@pytest.fixture
def settings(redis_url: str, redis_client: redis.Redis, shape: RowShape) -> RedisSettings:
    return RedisSettings(redis_url, "t", "cache", shapes={"public.members": shape})


def _parts(chance: Random, items: list[Change | int]) -> Iterator[Changes]:
    """Split items, in their order, so that no key is twice in a part."""
    part: list[Change] = []
    for item in items:
        if isinstance(item, int):
            yield Changes((MEMBERS,), [], item)
        elif item.key in {each.key for each in part} or chance.random() < 0.2:
            yield Changes((MEMBERS,), part)
            part = [item]
        else:
            part.append(item)
    yield Changes((MEMBERS,), part)


def test_any_order_and_any_repetition_end_as_the_model(
    settings: RedisSettings, shape: RowShape, redis_client: redis.Redis
) -> None:
    """Single changes, late ones and truncates among them, in one or several commits."""
    for seed in range(first_seed(), first_seed() + 12):
        chance = Random(seed)
        redis_client.flushall()
        history = History(chance)
        history.go_on(30)
        items: list[Change | int] = [*history.changes, *history.truncates]
        items += chance.choices(items, k=15)
        chance.shuffle(items)
        sink = RedisSink(settings)
        sink.open()
        sink.begin(100, [MEMBERS])
        for part in _parts(chance, items):
            sink.write(part)
            if chance.random() < 0.2:
                sink.commit(applied(100))
                sink.begin(100, [MEMBERS])
        sink.commit(applied(100))
        sink.close()
        assert seen(redis_client, "t", shape) == expected(shape, "t", history.rows), seed
        expect_indexed(redis_client)


def test_cuts_torn_off_and_written_again_end_as_the_model(
    settings: RedisSettings, shape: RowShape, redis_client: redis.Redis
) -> None:
    """The newest of each key, rows that swap emails, and columns filled from the store."""
    for seed in range(first_seed(), first_seed() + 8):
        chance = Random(seed)
        redis_client.flushall()
        history, done = History(chance), 0
        sink = RedisSink(settings)
        sink.open()
        for _ in range(6):
            history.go_on(chance.randint(1, 8))
            history.swap()
            cut = {each.key: each for each in history.changes[done:]}
            newest = list(cut.values())
            chance.shuffle(newest)
            truncated = max(history.truncates, default=None)
            reached = history.changes[-1].seq
            if chance.random() < 0.5:
                sink.begin(reached, [MEMBERS])
                sink.rows(MEMBERS, [])  # from here on changes are not gathered but written at once
                sink.write(Changes((MEMBERS,), newest[: len(newest) // 2], truncated))
                sink.close()
                sink = RedisSink(settings)
                sink.open()
                if chance.random() < 0.5:  # the next cut is a larger one
                    continue
            sink.begin(reached, [MEMBERS])
            sink.write(Changes((MEMBERS,), newest, truncated))
            sink.commit(applied(reached))
            done = len(history.changes)
            assert seen(redis_client, "t", shape) == expected(shape, "t", history.rows), seed
            expect_indexed(redis_client)
            _rows_are_found_again(sink, shape, history)
        sink.close()


def _rows_are_found_again(sink: RedisSink, shape: RowShape, history: History) -> None:
    """What a shape shows of a row can be read back, to fill what an update does not send."""
    keys = [b'{"id":%d}' % number for number in range(6)]
    stored = sink.rows(MEMBERS, keys)
    assert not {key for key in stored if int(key[6:-1]) not in history.rows}
    for number, (_, row) in history.rows.items():
        found = stored.get(b'{"id":%d}' % number)
        if found is not None:
            for name, value in json.loads(found).items():
                assert str(value) == str(row[name]), (shape, name)
