"""Check whether a follower's store can be refilled from the beginning of its source.

Called before anything is deleted from a store that lost a part. A log that retention shortened does
not have all rows; no log has the rows of tables that were copied directly, or the identity of rows
that had another key before. Then the store is left as it is, so that its remaining data can be
read, and the follower halts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cdc.errors import GapError
from cdc.log import names, reader
from lockstep.jobs.cuts.chosen import Chosen
from lockstep.jobs.cuts.direct_tables import direct, recorded
from lockstep.jobs.cuts.schemas import key_forms

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from cdc.config import Config
    from cdc.errors import StoreLostError

_NAMED: Final = 5


def refuse_unfillable(config: Config, name: str, error: StoreLostError) -> None:
    """Raise GapError if the store of the follower `name` can't be refilled."""
    found = unfillable(config, name)
    if not found:
        return
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    raise GapError(
        f"{error.what}. The store can't be refilled from the log: {'; '.join(found[:_NAMED])}"
        f"{more}. The store's remaining data was left as it is",
        hint=f"restore what is missing and start the follower; or start `cdc run` and call `cdc"
        f" rebuild {name}`: it reads the rows again through the stream (`cdc snapshot`), in a"
        " shadow build, and switches when that has all of them; then start the follower",
    )


def unfillable(config: Config, name: str) -> list[str]:
    """Return the reasons why the follower can't read all of its rows from the beginning."""
    if config.followers[name].is_derived:
        return _without_mirror(config, name)
    resume = reader.read_resume(config)
    if resume is None:
        return [f'there is no log of pipeline "{config.pipeline}"']
    followed = Chosen(config, config.followers[name]).among(resume[0].partitions)
    found = [
        f"{_of(config, topic)} starts at offset {first} of {topic} [{number}]"
        for (topic, number), first in shortened(config, followed).items()
    ]
    prefix = config.prefix
    if config.followers[name].delta is not None:
        found += [
            f"{table} was copied directly, not through the log"
            for table in direct(config, followed, recorded(config))
        ]
    return found + [
        f"{names.table_name(prefix, topic)} had another key before"
        for topic in rekeyed(config, followed)
    ]


def shortened(config: Config, topics: Mapping[str, int]) -> dict[tuple[str, int], int]:
    """Return the partitions that have lost their beginning, and each one's first offset.

    Checks the data `topics`, given with their numbers of partitions, and the topics that every
    follower reads.
    """
    prefix = config.prefix
    own = (names.frontier_topic(prefix), names.messages_topic(prefix), names.dead_topic(prefix))
    parts = [(topic, number) for topic, count in topics.items() for number in range(count)]
    held = reader.offsets(config, [*((topic, 0) for topic in own), *parts])
    return {place: first for place, (first, _) in sorted(held.items()) if first}


def rekeyed(config: Config, topics: Iterable[str]) -> list[str]:
    """Return the topics whose tables have had more than one key."""
    keys = key_forms(reader.read_schemas(config))
    return sorted(topic for topic in topics if len(keys.get(topic, ())) > 1)


def _of(config: Config, topic: str) -> str:
    """Return a readable name for a topic's content."""
    own = f"{config.prefix}.cdc."
    if topic.startswith(own):
        return topic.removeprefix(own)
    return names.table_name(config.prefix, topic)


def _without_mirror(config: Config, name: str) -> list[str]:
    from lockstep.jobs.documents.mirror_cuts import MirrorCuts  # noqa: PLC0415 - Delta's client, for documents alone

    if MirrorCuts(config, name).cut(None) is None:
        return [f"its mirror {config.followers[name].mirror} has no frontier"]
    return []
