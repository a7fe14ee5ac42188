"""Start a new epoch for topics that differ from the resume record: `cdc topics acknowledge`.

A topic that got more partitions maps keys to other partitions, and a topic that was emptied leaves
followers that lagged without events to read. Neither loses an event of the log, so it may continue
after a person has acknowledged it. The new epoch marks where: all events before it, by `seq`,
follow the old partition counts, and all after it the new ones. What is lost for good can't be
acknowledged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from cdc.errors import ConfigError, GapError
from cdc.log import reader, resume, topics
from cdc.log.client import reach
from cdc.log.expected import EpochError
from cdc.log.topic_monitor import TopicMonitor
from cdc.source.connection import connect
from cdc.source.slots import read_slot

if TYPE_CHECKING:
    from cdc.config import Config
    from cdc.log.records import ResumeIdentity, ResumePosition
    from cdc.log.resume import Resume


class Changed(NamedTuple):
    """What can be acknowledged: a sentence for each topic, and the log's current records."""

    what: list[str]
    identity: ResumeIdentity
    position: ResumePosition
    partitions: dict[str, int]  # as they are now


def survey(config: Config) -> Changed:
    """Return what can be acknowledged; raise for what can't, and while a daemon runs."""
    identity, position = resume_record(config)
    admin = topics.admin(config)
    examined = TopicMonitor(config, admin).examine(identity, position)
    for problem in examined.problems:
        if not isinstance(problem, EpochError):
            raise problem
    partitions = {name: examined.topics[name][1] for name in identity.partitions}
    return Changed([problem.what for problem in examined.problems], identity, position, partitions)


def acknowledge(config: Config, changed: Changed) -> int:
    """Start a new epoch with the topics as they are; return its number.

    A daemon that starts at the same time is fenced, and then finds the new epoch.
    """
    refuse_while_streaming(config)
    epoch = changed.identity.epoch + 1
    identity = replace(changed.identity, epoch=epoch, partitions=changed.partitions)
    read = (changed.identity, changed.position)
    resume.write_fenced(config, identity, changed.position, read=read)
    return epoch


def resume_record(config: Config) -> Resume:
    """Return the log's resume record; raise where there is none, and while a daemon runs."""
    refuse_while_streaming(config)
    reach(config)
    record = reader.read_resume(config)
    if record is None:
        raise ConfigError(
            f'there is no resume record of pipeline "{config.pipeline}"',
            hint="`cdc setup` creates the log; there is nothing to acknowledge yet",
        )
    return record


def refuse_while_streaming(config: Config) -> None:
    """Raise where a daemon has the slot, or where there is no slot."""
    with connect(config) as connection:
        slot = read_slot(connection, config.slot)
    if slot is None:
        raise GapError(
            f"there is no slot {config.slot}: the log can't be continued",
            hint="`cdc doctor` shows what can be done",
        )
    if slot.active_pid is not None:
        raise ConfigError(
            f"a daemon streams from the slot {config.slot} (pid {slot.active_pid} of the server)",
            hint="stop the daemon and its standbys, acknowledge, start them again",
        )
