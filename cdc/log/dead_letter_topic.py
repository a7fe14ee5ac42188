"""Read the topic of dead letters: which letters it holds, and one letter's complete event.

Reads the topic from its beginning: letters are rare, and the topic keeps them only as long as the
data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cdc.errors import ConfigError
from cdc.log import absence, names
from cdc.log.dead_letters import DeadLetterAssembler, DeadLetterHead, chunk_key
from cdc.log.reader import read_partition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cdc.config import Config


def heads(config: Config) -> Iterator[DeadLetterHead]:
    """Yield the head of every complete letter, in the order of the topic."""
    letters = DeadLetterAssembler()
    for key, value in _records(config):
        if head := letters.add(key, value):
            letters.drop(head.id)
            yield head


def event(config: Config, letter_id: str) -> bytes:
    """Return a letter's event; raise ConfigError if there is none, GapError if it is incomplete."""
    letters = DeadLetterAssembler()
    for key, value in _records(config):
        if chunk_key(key).id == letter_id:
            letters.add(key, value)
    if letter_id not in letters.pending():
        raise ConfigError(
            f"there is no dead letter {letter_id} in {names.dead_topic(config.prefix)}",
            hint="`cdc dead list` lists them; they are kept for log.retention_hours",
        )
    return letters.take(letter_id)


def _records(config: Config) -> Iterator[tuple[bytes | None, bytes | None]]:
    topic = names.dead_topic(config.prefix)
    if absence.absent(config, [topic]):
        raise ConfigError(f"there is no topic {topic}", hint="`cdc setup` creates it")
    yield from read_partition(config, topic, 0)
