"""Read the topic of dead letters: which letters it holds, and one letter's complete event.

Reads the topic from its beginning: letters are rare, and the topic keeps them only as long as the
data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import ConfigError
from cdc.log import absence, names
from cdc.log.dead_letters import Head, Letters, part_of
from cdc.log.reader import read_to_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config


def heads(config: Config) -> Iterator[Head]:
    """Yield the head of every complete letter, in the order of the topic."""
    letters = Letters()
    for key, value in _records(config):
        if head := letters.add(key, value):
            letters.drop(head.id)
            yield head


def event(config: Config, letter_id: str) -> bytes:
    """Return a letter's event; raise ConfigError if there is none, GapError if it is incomplete."""
    letters = Letters()
    for key, value in _records(config):
        if part_of(key).id == letter_id:
            letters.add(key, value)
    if letter_id not in letters.left():
        raise ConfigError(
            f"there is no dead letter {letter_id} in {names.dead_topic(config.prefix)}",
            hint="`cdc dead list` tells which there are; they are kept for log.retention_hours",
        )
    return letters.take(letter_id)


def _records(config: Config) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield key and value of every record of the topic."""
    topic = names.dead_topic(config.prefix)
    if absence.absent(config, [topic]):
        raise ConfigError(f"there is no topic {topic}", hint="`cdc setup` creates it")
    for record in read_to_end(config, {topic: 1}):
        yield record.key(), record.value()
