"""The Kafka principals of docs/SECURITY.md, with its rights: each does its work, and needs each."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import lockstep
from cdc.cli.main import run
from cdc.config import Config, load
from cdc.deliver.webhooks import WebhookRun
from cdc.errors import Exit, PermissionDeniedError
from cdc.log import absence, topics
from cdc.log.follower_reports import Reports
from cdc.log.reader import read_resume
from cdc.log.tail import tail
from cdc.operate.commands.setup import set_up, survey, tear_down
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from cdc.operate.webhooks import WebhooksReader
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.conformance.store import USERS, apply, change, row
from lockstep.jobs.apply import positions, stores
from lockstep.jobs.apply.following import Batches
from lockstep.jobs.apply.running import FollowerRun
from lockstep.jobs.cuts.tail import CutTail
from lockstep.jobs.spark.starting import SparkStart
from lockstep.sinks.contract import Changes
from tests.fixtures.daemon import START_SECONDS, PipelineUnderTest, wait_until
from tests.fixtures.guarded import PASSWORD, USER, GuardedBroker
from tests.fixtures.reported import reported

_KINDS = ("--topic", "--transactional-id", "--group")
_DOCUMENT = Path(__file__).parents[2] / "docs" / "SECURITY.md"


class Right(NamedTuple):
    user: str
    what: str  # TOPIC, TRANSACTIONAL_ID or GROUP
    name: str  # without the prefix: what the document's `shop` is
    pattern: str
    operation: str

    def __str__(self) -> str:
        return f"{self.user}-{self.operation}-{self.what}{self.name}"


def documented(block: int) -> list[Right]:
    """Return the rights that the kafka-acls.sh lines of one of the document's blocks give."""
    text = _DOCUMENT.read_text("utf-8").split("## The least that each role needs")[1]
    lines = text.split("```sh\n")[block].split("```")[0].splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        if not words or words[0] != "$acl":
            continue
        given = list(zip(words[1::2], words[2::2], strict=True))
        options = dict(given)
        kind = next(each for each in _KINDS if each in options)
        found += [
            Right(
                options["--allow-principal"].removeprefix("User:"),
                kind.removeprefix("--").replace("-", "_").upper(),
                options[kind].removeprefix("shop"),
                options.get("--resource-pattern-type", "literal").upper(),
                value,
            )
            for option, value in given
            if option == "--operation"
        ]
    return found


_RIGHTS = documented(1)
_ADDED_RIGHTS = documented(2)  # where they are used


class Guarded:
    """A pipeline on the listener that asks who it is, with the document's rights."""

    def __init__(self, broker: GuardedBroker, line: PipelineUnderTest) -> None:
        self.broker, self.line = broker, line
        self.prefix = line.config.prefix
        line.settings["followers"] = {"copy": {"redis": {"url": "redis://localhost"}}}
        line.config_file = line.write("open.yaml")
        line.database.execute("CREATE TABLE users (id int PRIMARY KEY, name text)")

    def file(self, user: str) -> Path:
        """Write the configuration of a principal."""
        keys = {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": PASSWORD,
        }
        return self.line.write(
            f"{user}.yaml",
            log__bootstrap_servers=self.broker.locked,
            log__kafka=keys,
        )

    def config(self, user: str) -> Config:
        return load(self.file(user), {})

    def allow(self, *rights: Right) -> None:
        for each in rights:
            self.broker.allow(
                self.prefix + each.name.replace(".shop", f".{self.prefix}"),
                _acl(each),
                what=each.what,
                user=each.user,
                pattern=each.pattern,
            )

    def commands(self, user: str, *lines: str) -> None:
        for line in lines:
            assert run([*line.split(), "-c", str(self.file(user))]) == Exit.OK, line


def _acl(right: Right) -> str:
    """Return the operation as the client names it: DescribeConfigs is DESCRIBE_CONFIGS."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", right.operation).upper()


def report(config: Config) -> None:
    """Write a follower's report; raise what refuses it."""
    reports = Reports(config)
    for _ in range(2):  # the second call raises the first one's error
        reports.write(reported(pipeline=config.pipeline, follower="copy"))
        reports.flush()


def follow(config: Config, rows: int = 0) -> None:
    """Open a store, report, and apply cuts up to so many rows, as before Spark has started."""
    run = FollowerRun(config, "copy", "redis", lambda _: None)
    sink = MemorySink(config.prefix)
    state = positions.open_in_log(run, sink)
    report(config)
    spark = SparkStart(lambda: pytest.fail("no Spark here"), set())
    batches = Batches(spark, config, sink, run, state.applied)
    with closing(batches), closing(CutTail(config, "copy", state, None)) as cuts:
        while len(STORES[config.prefix].rows("public.users")) < rows:
            cut = cuts.next(1.0)
            if cut is not None:
                batches.apply(cut, torn=False)


@pytest.fixture
def guarded(
    guarded_broker: GuardedBroker, guarded_line: PipelineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> Guarded:
    # The broker has run for long: a topic that is missing does not exist.
    monkeypatch.setattr(absence, "AGAIN_SECONDS", 0.02)
    return Guarded(guarded_broker, guarded_line)


def test_each_principal_does_its_work_with_what_the_document_gives_it(guarded: Guarded) -> None:
    guarded.allow(*_RIGHTS)
    line = guarded.line
    guarded.commands(USER, "setup")
    daemon = line.start(config_file=guarded.file(USER)).wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'one')")
    wait_until(lambda: line.resume()[1].seq >= 1, "the row does not arrive")
    follow(guarded.config("follower"), rows=1)
    guarded.commands("reader", "tail --from-beginning --limit 1", "status --json")
    guarded.commands(USER, "tail --from-beginning --limit 1", "status --json")
    wrong = [each for each in examine(guarded.config(USER)) if each.severity is Severity.ERROR]
    assert wrong == []
    assert "AUTHORIZATION_FAILED" not in daemon.log
    assert daemon.term() == Exit.OK
    guarded.commands("owner", "teardown --topics --yes")
    admin = topics.admin(line.config)
    assert topics.existing(admin, guarded.prefix) == {}


def judged(config: Config) -> None:
    """Raise the doctor's first error about Kafka."""
    for each in examine(config):
        if each.severity is Severity.ERROR and "AUTHORIZATION_FAILED" in each.what:
            raise PermissionDeniedError(each.what, hint=each.fix)


def administer(config: Config) -> None:
    """Set up, write, read and judge, as the daemon's principal does."""
    list(set_up(config))
    judged(config)
    look(config)


def look(config: Config) -> None:
    """Read the log as `cdc tail` and `cdc status` do."""
    next(tail(config, [], from_beginning=True))
    read_resume(config)


@pytest.mark.long(
    "each principal's other rights",
    sample=[
        *("lockstep-Create-TOPIC.", "lockstep-Write-TRANSACTIONAL_ID.shop"),
        *("follower-Read-TOPIC.", "reader-Read-TOPIC.", "owner-Delete-TOPIC."),
    ],
)
@pytest.mark.parametrize("left_out", _RIGHTS, ids=str)
def test_a_principal_without_one_of_its_rights_learns_which(
    left_out: Right, guarded: Guarded
) -> None:
    if left_out.user != USER:
        guarded.line.set_up()
    work: dict[str, Callable[[Config], object]] = {
        USER: administer,
        "follower": follow,
        "reader": look,
        "owner": lambda config: list(tear_down(config, survey(config), with_topics=True)),
    }
    guarded.allow(*(each for each in _RIGHTS if each != left_out))
    with pytest.raises(PermissionDeniedError) as refused:
        work[left_out.user](guarded.config(left_out.user))
    assert "AUTHORIZATION_FAILED" in refused.value.what
    kind = "--transactional-id" if left_out.what == "TRANSACTIONAL_ID" else "--topic"
    named = refused.value.hint.partition(":")[0]
    assert re.search(rf"\b{left_out.operation}\b", named), named
    assert kind in refused.value.hint


# -- where they are used ------------------------------------------------------------------------


def fill_topics(config: Config) -> None:
    """Apply two cuts in topics, each by a process that begins."""
    for seq in (1, 2):
        with closing(stores.sink(config, "stream", config.followers["stream"])) as sink:
            sink.open()
            apply(sink, seq, Changes((USERS,), [change(USERS, seq, row(USERS, seq, 1), 1)]))


def take_part(config: Config) -> None:
    """Receive and acknowledge a change as a member of a group."""
    with (
        lockstep.Client(config) as client,
        client.changes(["public.users"], "app", "beginning") as changes,
    ):
        changes.acknowledge(received(changes.receive)[0])


def work(config: Config) -> None:
    """Receive and acknowledge a change as a member of a queue."""
    with (
        lockstep.Client(config) as client,
        client.queue(["public.users"], "mails", "beginning") as queue,
    ):
        queue.acknowledge(received(queue.receive)[0])


def received(receive: Callable[[float], Sequence[Any]]) -> Sequence[Any]:
    """Return the first changes that a member is given."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if found := receive(0.2):
            return found
    pytest.fail("nothing is delivered")


def test_topics_groups_and_queues_work_with_what_the_document_adds(guarded: Guarded) -> None:
    line = guarded.line
    line.settings["followers"]["stream"] = {"topic": {}}
    url, secret = "http://127.0.0.1:9/", "whsec_" + "A" * 32
    hook = {"url": url, "allow": ["127.0.0.1/32"], "secrets": [secret], "tables": ["public.users"]}
    line.settings["webhooks"] = {"hook": hook}
    guarded.allow(*_RIGHTS, *_ADDED_RIGHTS)
    guarded.commands(USER, "setup")
    daemon = line.start(config_file=guarded.file(USER)).wait_ready()
    line.database.execute("INSERT INTO users VALUES (1, 'one')")
    wait_until(lambda: line.resume()[1].seq >= 1, "the row does not arrive")
    fill_topics(guarded.config("follower"))
    take_part(guarded.config("app"))
    work(guarded.config("app"))
    guarded.commands("owner", "group remove app")
    WebhookRun(guarded.config("app"), "hook").close()
    wait_until(lambda: daemon.health()["webhooks"][0]["state"] != "new", "the webhook is not seen")
    with closing(WebhooksReader(guarded.config("reader"))) as webhooks:
        assert webhooks.read()[0].group is not None
    assert "AUTHORIZATION_FAILED" not in daemon.log
