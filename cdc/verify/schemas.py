"""Compare the records of the schema topic with the digests that frontier records state.

Pure: it gets what each frontier states and, in the order of their offsets, the topic's records.
Versions, and statements of the audit, are all stated. Column numbers that `cdc table add` writes
next to a running daemon are stated by the next one that starts, so those may be unstated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.log import digests, records

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class SchemaCheck:
    """Takes statements and records in any order; `finish` compares them."""

    def __init__(self, topic: str) -> None:
        self._topic = topic
        # By key and digest: which frontier states it, and at which offset it is.
        self._stated: dict[str, dict[str, str]] = {}
        self._held: dict[str, dict[str, int]] = {}

    def state(self, stated: Iterable[tuple[str, str]], where: str) -> None:
        """Take keys and digests; `where` names the record that states them."""
        for key, digest in stated:
            self._stated.setdefault(key, {}).setdefault(digest, where)

    def add(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        """Take a record of the topic."""
        name, digest = digests.stated(key or b"", value)
        self._held.setdefault(name, {})[digest] = offset

    def finish(self, *, all_stated: bool) -> list[str]:
        """Return what differs; with `all_stated` each version of the topic must be stated."""
        return [
            f"{self._topic} [0] {what}"
            for what in (*self._missing(), *self._others(all_stated=all_stated))
        ]

    def _missing(self) -> Iterator[str]:
        for key, stated in self._stated.items():
            held = self._held.get(key, {})
            for digest, where in stated.items():
                if digest not in held:
                    yield f"lacks the record {key} as {where} states it: it was altered or deleted"

    def _others(self, *, all_stated: bool) -> Iterator[str]:
        """Yield what is wrong with the records that are there. No two versions have one key."""
        for key, held in self._held.items():
            if records.is_numbers_key(key.encode()):
                continue
            stated = self._stated.get(key, {})
            if stated or all_stated:
                for digest, offset in held.items():
                    if digest not in stated:
                        yield f"offset {offset}: no frontier states this record {key}"
