"""The Compose file: what it publishes, what runs as which user, and that Compose's parsers read it.

`make up` is tested by hand: it builds images of more than a gigabyte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import load
from cdc.playground.servers.kafka import Kafka
from tests.fixtures.alerting import need_promtool
from tests.fixtures.commands import environment
from tests.fixtures.console import ConsoleClient, port_in
from tests.fixtures.daemon import wait_until
from tests.fixtures.go_tools import go_tool
from tests.fixtures.tiers import missing

_FOLDER = Path(__file__).parents[2] / "compose"
_PROFILES = {"console": ["ui"], "prometheus": ["observability"], "grafana": ["observability"]}
_SERVERS = {"postgres", "kafka", "redis", "opensearch", "prometheus", "grafana"}
_IMAGE = (
    r"\$\{LOCKSTEP_([A-Z]+)_IMAGE:-([\w./-]+):v?(\d+\.\d+(?:\.\d+)?[\w-]*)@sha256:[0-9a-f]{64}\}"
)
_SECRETS = {"LOCKSTEP_SECRET": "s" * 32, "LOCKSTEP_CONSOLE_TOKEN": "t" * 32}


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = _read("compose.yaml")["services"]
    return found


def _read(name: str) -> Any:  # noqa: ANN401 - YAML
    return yaml.safe_load((_FOLDER / name).read_text("utf-8"))


def test_ports_are_published_on_loopback_alone(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert len(ports) == 8
    assert all(port.startswith("127.0.0.1:${LOCKSTEP_") for port in ports)


def test_the_core_runs_without_a_profile(services: dict[str, dict[str, Any]]) -> None:
    """So that a plain `up` is the pipeline, and nothing of it needs what a profile adds."""
    assert {n: each["profiles"] for n, each in services.items() if "profiles" in each} == _PROFILES
    for name in services.keys() - _PROFILES.keys():
        assert not services[name].get("depends_on", {}).keys() & _PROFILES.keys()


def test_everything_that_stays_reports_its_health_and_is_waited_for(
    services: dict[str, dict[str, Any]],
) -> None:
    assert {name for name, each in services.items() if "build" not in each} == _SERVERS
    # The images of daemon and followers have their own; setup ends.
    for name in services.keys() - {"daemon", "followers", "setup"}:
        assert services[name]["healthcheck"]["test"][0] == "CMD"
    for each in services.values():
        for name, awaited in each.get("depends_on", {}).items():
            assert name in services
            healthy = "service_healthy" if name in _SERVERS else "service_completed_successfully"
            assert awaited == {"condition": healthy}


def test_images_are_pinned_by_digest_and_can_be_replaced(
    services: dict[str, dict[str, Any]],
) -> None:
    pinned = {}
    for name in _SERVERS:
        found = re.fullmatch(_IMAGE, services[name]["image"])
        assert found, services[name]["image"]
        assert found[1] == name.upper()
        pinned[name] = found[3]
    assert pinned["kafka"] == Kafka.default_version, "as `make demo` and the tests run it"
    base = services["daemon"]["build"]["args"]["BASE"]
    assert re.fullmatch(_IMAGE, base)
    default = re.search(
        r"^ARG BASE=(\S+)$", (_FOLDER / "Dockerfile").read_text("utf-8"), re.MULTILINE
    )
    assert default
    assert base == f"${{LOCKSTEP_BASE_IMAGE:-{default[1]}}}"
    for name in services.keys() - _SERVERS:
        assert services[name]["build"]["args"] == services["daemon"]["build"]["args"]


def test_nothing_runs_as_root_or_becomes_it(services: dict[str, dict[str, Any]]) -> None:
    for each in services.values():
        assert each["cap_drop"] == ["ALL"]
        assert each["security_opt"] == ["no-new-privileges:true"]
        assert not each.get("privileged")
    # Only these two images begin as root.
    users = {name: each["user"] for name, each in services.items() if "user" in each}
    assert users == {"postgres": "postgres", "redis": "redis"}


def test_our_images_run_as_nobody_in_particular_and_report_their_health() -> None:
    text = (_FOLDER / "Dockerfile").read_text("utf-8")
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    for name in ("daemon", "followers"):
        assert re.findall(r"^USER (.*)$", stages[name], re.MULTILINE) == ["lockstep"]
        assert "HEALTHCHECK" in stages[name]
        assert not re.search(r"pip|COPY \. ", stages[name]), "what builds is in no image"


def test_the_pipeline_of_the_containers_is_a_configuration() -> None:
    config = load(_FOLDER / "shop.yaml", {"POSTGRES_PASSWORD": "x", "LOCKSTEP_SECRET": "x" * 32})
    assert config.followers.keys() == {"mirror", "cache", "search"}


def test_one_broker_is_enough_for_transactions_and_queues(
    services: dict[str, dict[str, Any]],
) -> None:
    settings = services["kafka"]["environment"]
    for topic in ("OFFSETS_TOPIC", "TRANSACTION_STATE_LOG", "SHARE_COORDINATOR_STATE_TOPIC"):
        assert settings[f"KAFKA_{topic}_REPLICATION_FACTOR"] == "1"
    for topic in ("TRANSACTION_STATE_LOG", "SHARE_COORDINATOR_STATE_TOPIC"):
        assert settings[f"KAFKA_{topic}_MIN_ISR"] == "1"


def test_the_console_asks_for_its_token_and_its_health_check_does_not(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    console = services["console"]
    *shell, script = console["entrypoint"][2:]
    assert shell == ["sh", "-euc"]
    script = script.replace("$$", "$").replace("/tmp/token", str(tmp_path / "token"))  # noqa: S108
    assert "--listen 0.0.0.0:8600" in script
    script = script.replace("0.0.0.0:8600", "127.0.0.1:0")
    env = environment() | {"POSTGRES_PASSWORD": "x", "LOCKSTEP_SECRET": "s" * 32}
    env |= {"LOCKSTEP_CONFIG": str(_FOLDER / "shop.yaml")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    without = subprocess.run([*shell, script], env=env, capture_output=True, text=True, check=False)
    assert without.returncode
    assert "LOCKSTEP_CONSOLE_TOKEN" in without.stderr

    env["CONSOLE_TOKEN"] = "t" * 32
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([*shell, script], env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: port_in(log.read_text("utf-8")), "the console does not listen")
        port = port_in(log.read_text("utf-8"))
        client = ConsoleClient(port)
        assert client.ask("/api/tables")[0] == 401
        assert client.ask("/api/tables", authorization=f"Bearer {'t' * 32}")[0] == 200
        checked = [
            sys.executable if part == "python" else part.replace(":8600/", f":{port}/")
            for part in console["healthcheck"]["test"][1:]
        ]
        assert subprocess.run(checked, env=env, check=False, capture_output=True).returncode == 0
    finally:
        process.terminate()
        process.wait(30)


def test_prometheus_reads_the_daemon_and_the_rules(
    services: dict[str, dict[str, Any]],
) -> None:
    need_promtool()
    [job] = _read("prometheus.yaml")["scrape_configs"]
    listen = _read("shop.yaml")["http"]["listen"]
    assert job["static_configs"] == [{"targets": [f"daemon:{listen.rpartition(':')[2]}"]}]
    mounted = {v.split(":")[0]: v.split(":")[1] for v in services["prometheus"]["volumes"]}
    assert f"--config.file={mounted['./prometheus.yaml']}" in services["prometheus"]["command"]
    # As in the container, both files are in one folder.
    assert {Path(v).parent for k, v in mounted.items() if k[0] == "."} == {Path("/etc/prometheus")}
    checked = subprocess.run(
        ["promtool", "check", "config", str(_FOLDER / "prometheus.yaml")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "1 rule files found" in checked.stdout


def test_grafana_finds_its_source_and_the_dashboard(services: dict[str, dict[str, Any]]) -> None:
    grafana = services["grafana"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    [source] = _read("grafana/datasource.yaml")["datasources"]
    assert (source["url"], source["isDefault"]) == ("http://prometheus:9090", True)
    [provider] = _read("grafana/dashboard.yaml")["providers"]
    board = Path(mounted["./grafana-dashboard.json"])
    assert provider["options"]["path"] == str(board.parent)
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == str(board)
    assert all((_FOLDER / name).is_file() for name in mounted)


def test_composes_parser_accepts_the_file_but_not_without_a_secret(tmp_path: Path) -> None:
    """Its program is given a file without variables: it passes none of its own to the parser."""
    text = (_FOLDER / "compose.yaml").read_text("utf-8")
    without = _parsed(tmp_path, text)
    assert without.returncode
    assert 'run "make up"' in without.stderr

    filled = _filled(text)
    read = _parsed(tmp_path, filled)
    assert read.returncode == 0, read.stderr
    found = json.loads(read.stdout)["services"]
    assert found.keys() == yaml.safe_load(text)["services"].keys()
    assert {port["host_ip"] for each in found.values() for port in each.get("ports", ())} == {
        "127.0.0.1"
    }
    assert _parsed(tmp_path, filled.replace("healthcheck:", "healtcheck:", 1)).returncode


def _filled(text: str) -> str:
    """Return the file with the default of each variable, or a secret where there is none."""
    return re.sub(
        r"(?<!\$)\$\{(\w+):([-?])([^}]*)\}",
        lambda found: found[3] if found[2] == "-" else _SECRETS[found[1]],
        text,
    )


def _parsed(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    file = folder / "compose.yaml"
    file.write_text(text, "utf-8")
    asked = [str(go_tool("compose-spec")), "--format=json", str(file)]
    return subprocess.run(asked, env=environment(), capture_output=True, text=True, check=False)


@pytest.mark.parametrize("profiles", ["", "ui", "ui,observability"])
@pytest.mark.parametrize("command", [("docker-compose",), ("docker", "compose")])
def test_compose_starts_the_core_and_the_profiles(command: tuple[str, ...], profiles: str) -> None:
    """By those of the two that are installed."""
    if shutil.which(command[0]) is None:
        missing("docker-compose", f"no {command[0]} here")
    if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        missing("docker-compose", f"no {' '.join(command)} here")
    asked = [*command, "-f", str(_FOLDER / "compose.yaml"), "config", "--services"]
    env = os.environ | _SECRETS | {"COMPOSE_PROFILES": profiles}
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=True)
    core = {"setup", "daemon", "followers", "postgres", "kafka", "redis", "opensearch"}
    added = {name for name, [profile] in _PROFILES.items() if profile in profiles.split(",")}
    found = set(done.stdout.split())
    # Compose 1.29 lists the services of all profiles.
    assert found == core | added or (command == ("docker-compose",) and found > core | added)
