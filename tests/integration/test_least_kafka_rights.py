"""The Kafka principals of docs/SECURITY.md, with its rights: each does its work, and needs each."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from cdc.cli.main import run
from cdc.config import Config, load
from cdc.errors import Exit, PermissionDeniedError
from cdc.log import absence, topics
from cdc.log.follower_reports import Reports
from cdc.log.reader import read_resume
from cdc.log.tail import tail
from cdc.operate.commands.setup import set_up, survey, tear_down
from cdc.operate.doctor.run import examine
from cdc.operate.findings import Severity
from lockstep.conformance.memory import STORES, MemorySink
from lockstep.jobs.apply import positions
from lockstep.jobs.apply.following import Batches
from lockstep.jobs.apply.running import Run
from lockstep.jobs.cuts.tail import CutTail
from lockstep.jobs.spark.starting import SparkStart
from tests.fixtures.daemon import PipelineUnderTest, wait_until
from tests.fixtures.guarded import PASSWORD, USER, GuardedBroker
from tests.fixtures.reported import reported

_DOCUMENT = Path(__file__).parents[2] / "docs" / "SECURITY.md"


class Right(NamedTuple):
    user: str
    what: str  # TOPIC or TRANSACTIONAL_ID
    name: str  # without the prefix: what the document's `shop` is
    pattern: str
    operation: str

    def __str__(self) -> str:
        return f"{self.user}-{self.operation}-{self.what}{self.name}"


def documented() -> list[Right]:
    """Return the rights that the document's kafka-acls.sh lines give."""
    text = _DOCUMENT.read_text("utf-8").split("## The least that each role needs")[1]
    lines = text.split("```sh\n")[1].split("```")[0].splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        if not words or words[0] != "$acl":
            continue
        given = list(zip(words[1::2], words[2::2], strict=True))
        options = dict(given)
        kind = "--topic" if "--topic" in options else "--transactional-id"
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


_RIGHTS = documented()


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
            name = each.name if each.what == "TOPIC" else f".{self.prefix}"
            self.broker.allow(
                f"{self.prefix}{name}",
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
    run = Run(config, "copy", "redis", lambda _: None)
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
