"""Ask for the topics' cleanup.policy in turn, without waiting: a wrong one loses events.

Compaction of a data topic deletes events from the middle of a partition, and retention of a
compacted topic deletes its oldest records. The topic monitor compares no offset that compaction
moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Future

    from cdc.log.topics import Admin

_SETTING: Final = "cleanup.policy"
# Topics in one question; an answer has every setting of each.
_TOPICS: Final = 50
_TIMEOUT_SECONDS: Final = 5.0


class Policies:
    """One question at a time; `wrong` has the topics whose policy was another one when asked."""

    def __init__(self, expected: Callable[[str], str]) -> None:
        """`expected` returns the policy that a topic should have."""
        self._expected = expected
        self.wrong: dict[str, str] = {}  # the policy by topic
        self._asked: dict[ConfigResource, Future[dict[str, object]]] = {}
        self._next = 0

    def ask(self, admin: Admin, topics: Iterable[str]) -> None:
        """Ask about some of `topics`, starting with the next in turn."""
        names = list(topics)
        self.wrong = {name: its for name, its in self.wrong.items() if name in set(names)}
        self._next %= max(1, len(names))
        chosen = names[self._next : self._next + _TOPICS]
        self._next += len(chosen)
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in chosen]
        if resources:
            self._asked = admin.describe_configs(resources, request_timeout=_TIMEOUT_SECONDS)

    def is_waiting(self) -> bool:
        """Return whether a question is open; otherwise its answer is in `wrong`.

        A topic that the brokers do not answer for, or where we may not ask, keeps its last answer.
        """
        if not all(future.done() for future in self._asked.values()):
            return True
        answered, self._asked = self._asked, {}
        for resource, future in answered.items():
            try:
                found = str(getattr(future.result().get(_SETTING), "value", None) or "")
            except KafkaException:
                continue
            self.wrong.pop(resource.name, None)
            if found and parts(found) != parts(self._expected(resource.name)):
                self.wrong[resource.name] = found
        return False


def parts(policy: str) -> set[str]:
    """Return what a cleanup.policy lists, in any order."""
    return {each.strip() for each in policy.split(",")}
