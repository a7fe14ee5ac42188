"""The embedded stack: one call starts it, after any stop too; data is kept, nothing else."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from cdc.errors import LocalStackError
from cdc.playground.servers.process import ProcessId
from cdc.playground.servers.server import probe
from cdc.playground.servers.stack import Endpoints, LocalStack
from tests.fixtures.servers import Database, KafkaServer, fresh_database


def dsn_of(ends: Endpoints) -> str:
    assert ends.postgres_dsn is not None
    return ends.postgres_dsn


def bootstrap_of(ends: Endpoints) -> str:
    assert ends.kafka_bootstrap is not None
    return ends.kafka_bootstrap


def write(ends: Endpoints, text: str) -> None:
    """Write the text to a table and, in a transaction, to a topic."""
    with psycopg.connect(dsn_of(ends), autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (text text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [text])
    admin = AdminClient({"bootstrap.servers": bootstrap_of(ends)})
    if "kept" not in admin.list_topics(timeout=60).topics:
        admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(120)
    producer = Producer({"bootstrap.servers": bootstrap_of(ends), "transactional.id": "kept"})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce("kept", text)
    producer.commit_transaction(120)


def read(ends: Endpoints, count: int) -> tuple[list[str], list[str]]:
    with psycopg.connect(dsn_of(ends)) as connection:
        rows = [text for (text,) in connection.execute("SELECT text FROM kept")]
    settings = {
        "bootstrap.servers": bootstrap_of(ends),
        "group.id": "reader",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
    with closing(Consumer(settings)) as consumer:
        consumer.subscribe(["kept"])
        messages = consumer.consume(count, timeout=120)
        texts = [(message.value() or b"").decode() for message in messages]
    return rows, texts


def test_up_again_after_kill_9_of_all_keeps_data_and_ports(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    ends = stack.up()
    write(ends, "first")
    # Only the main process, as the kernel's own OOM killer would: its children must notice.
    for name in ("postgres", "kafka"):
        os.kill(stack[name].pid, signal.SIGKILL)
    again = LocalStack(stack_home).up()
    assert again == ends
    write(again, "second")
    assert read(again, 2) == (["first", "second"], ["first", "second"])


def redis(port: int, *words: str) -> bytes:
    lines = [f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word))]
    return probe(port, "".join(f"{line}\r\n" for line in lines).encode())


def opensearch(port: int, method: str, path: str, body: object = None) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer: dict[str, Any] = json.load(connection.getresponse())
    return answer


@pytest.mark.long("the demo's servers; the first tier has Postgres and Kafka")
def test_redis_and_opensearch_keep_their_data_over_kill_9(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    ends = stack.up(["redis", "opensearch"])
    ports = {name: stack[name].port for name in ("redis", "opensearch")}
    assert redis(ports["redis"], "SET", "key", "kept").startswith(b"+OK")
    document = {"text": "kept"}
    opensearch(ports["opensearch"], "PUT", "/i", {"settings": {"number_of_replicas": 0}})
    made = opensearch(
        ports["opensearch"], "PUT", "/i/_doc/1?version=7&version_type=external", document
    )
    assert made["result"] == "created"
    for name in ports:
        stack[name].kill()
    assert stack.up(["redis", "opensearch"]) == ends
    assert redis(ports["redis"], "GET", "key") == b"$4\r\nkept\r\n"
    assert opensearch(ports["opensearch"], "GET", "/i/_doc/1")["_source"] == document
    late = opensearch(
        ports["opensearch"], "PUT", "/i/_doc/1?version=6&version_type=external", document
    )
    assert late["status"] == 409
    assert sorted(stack.down()) == ["opensearch", "redis"]


def test_the_command_brings_up_shows_and_takes_down(stack_home: Path) -> None:
    def cdc(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "cdc.cli.main", "local", *arguments, "--home", stack_home],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    assert cdc("status")[0] == 1
    code, _, reported = cdc("up", "postgres", "redis")
    assert code == 0, reported
    assert "next:" in reported
    code, output, _ = cdc("status", "--json")
    assert code == 0
    up = {each["name"]: each["url"] for each in json.loads(output) if each["running"]}
    assert up.keys() == {"postgres", "redis"}
    psycopg.connect(up["postgres"]).close()
    assert "ready to accept connections" in cdc("logs", "postgres", "-n", "5")[1]
    assert "stopped postgres, redis" in cdc("down")[1]
    assert cdc("status")[0] == 1


def test_down_leaves_no_process_and_up_finds_the_data(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    with fresh_database(dsn_of(stack.up(["postgres"]))):
        process = stack["postgres"].state.process
        family = [process, *process.descendants()]
        assert len(family) > 3
        assert stack.down() == ["postgres"]
        assert not [each for each in family if each.alive]
        stack.up(["postgres"])
    assert [each.name for each in stack.status() if each.running] == ["postgres"]


def test_two_ups_at_once_start_one_of_each(stack_home: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from cdc.playground.servers.stack import LocalStack\n"
        "s = LocalStack(Path(sys.argv[1])); print(s.up(['postgres']), s['postgres'].pid)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, stack_home], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    output = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(output) == 1


def test_a_port_taken_meanwhile_is_given_up(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    stack.up(["postgres"])
    port = stack["postgres"].port
    stack.down()
    with socket.create_server(("127.0.0.1", port)):
        ends = stack.up(["postgres"])
        assert stack["postgres"].port != port
        psycopg.connect(dsn_of(ends)).close()


def test_a_stale_pid_of_a_stranger_is_left_alone(stack_home: Path) -> None:
    """After a reboot, our pid and the one in Postgres' own pid file may be another process's."""
    stack = LocalStack(stack_home)
    stack.up(["postgres"])
    stack["postgres"].kill()
    state = stack["postgres"].state
    state.pid = os.getpid()
    stack.home.remember("postgres", state)
    pid_file = stack_home / "data" / "postgres-17" / "postmaster.pid"
    lines = pid_file.read_text(encoding="utf-8").split("\n")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]), encoding="utf-8")
    assert not stack["postgres"].running
    psycopg.connect(dsn_of(stack.up(["postgres"]))).close()


def test_settings_are_kept_over_restarts_and_changed_by_one(stack_home: Path) -> None:
    stack = LocalStack(stack_home)

    def work_mem() -> str:
        with psycopg.connect(dsn_of(stack.endpoints())) as connection:
            row = connection.execute("SHOW work_mem").fetchone()
            assert row is not None
            return str(row[0])

    stack.up(["postgres"], settings={"postgres": {"work_mem": "5MB"}})
    assert work_mem() == "5MB"
    stack["postgres"].kill()
    stack.start("postgres")
    assert work_mem() == "5MB"
    pid = stack["postgres"].pid
    stack.up(["postgres"])
    assert stack["postgres"].pid == pid
    stack.up(["postgres"], settings={"postgres": {"work_mem": "6MB"}})
    assert work_mem() == "6MB"


def test_another_major_is_refused_while_one_runs(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    stack.up(["postgres"], pg_major=17)
    with pytest.raises(LocalStackError, match="postgres 17 is running"):
        stack.up(["postgres"], pg_major=16)


def test_a_server_that_cannot_start_shows_its_log(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    with pytest.raises(LocalStackError, match='invalid value for parameter "wal_level"'):
        stack.up(["postgres"], settings={"postgres": {"wal_level": "nonsense"}})


def test_a_tied_stack_goes_down_with_its_process(stack_home: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from cdc.playground.servers.stack import LocalStack\n"
        "s = LocalStack(Path(sys.argv[1]), tied=True); s.up(['postgres'])\n"
        "print(s['postgres'].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, stack_home], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        server = ProcessId.of(int(process.stdout.readline()))
        assert server is not None
        process.kill()
    assert server.wait(120)


def test_stacks_in_two_homes_are_strangers(stack_home: Path, tmp_path: Path) -> None:
    other = LocalStack(tmp_path / "other")
    try:
        stack = LocalStack(stack_home)
        ready: list[Endpoints] = []
        threads = [
            threading.Thread(target=lambda each=each: ready.append(each.up(["postgres"])))
            for each in (stack, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        identifiers = set()
        for ends in ready:
            with psycopg.connect(dsn_of(ends)) as connection:
                query = "SELECT system_identifier FROM pg_control_system()"
                identifiers.add(connection.execute(query).fetchone())
        assert len(identifiers) == 2
    finally:
        other.down()


def test_servers_listen_on_loopback_only(stack_home: Path) -> None:
    stack = LocalStack(stack_home)
    stack.up()
    ours = {port for name in ("postgres", "kafka") for port in stack[name].state.ports}
    seen = set()
    for table in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        for fields in (line.split() for line in lines):
            address, port = fields[1].split(":")
            if fields[3] == "0A" and int(port, 16) in ours:
                assert address in ("0100007F", "0000000000000000FFFF00000100007F")
                seen.add(int(port, 16))
    assert seen == ours


@pytest.mark.pg(">= 14")
def test_each_test_has_a_database_of_its_own(database: Database) -> None:
    database.execute("CREATE TABLE mine (id int)")
    with database.connect() as connection:
        slot = "SELECT lsn FROM pg_create_logical_replication_slot(%s, 'pgoutput')"
        assert connection.execute(slot, [database.name]).fetchone() is not None


def test_each_test_has_topics_of_its_own(kafka_server: KafkaServer, topic_prefix: str) -> None:
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    admin.create_topics([NewTopic(f"{topic_prefix}.one", 1, 1)])[f"{topic_prefix}.one"].result(120)


def test_a_killed_server_comes_back_where_it_was(killable_stack: LocalStack) -> None:
    for name in ("postgres", "kafka"):
        url = killable_stack[name].url()
        killable_stack[name].kill()
        assert not killable_stack[name].running
        killable_stack.start(name)
        assert killable_stack[name].url() == url
