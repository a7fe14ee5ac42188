"""The Compose file: what it publishes, as which user it runs, and that both Composes read it.

`make up` is tested by hand: it builds images of more than a gigabyte.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import load

_FOLDER = Path(__file__).parents[2] / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        (_FOLDER / "compose.yaml").read_text("utf-8")
    )["services"]
    return found


def test_ports_are_published_on_loopback_alone(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for each in services.values() for port in each.get("ports", ())]
    assert len(ports) == 5
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_servers_are_waited_for_until_they_are_healthy(services: dict[str, dict[str, Any]]) -> None:
    servers = {name for name, each in services.items() if "build" not in each}
    assert servers == {"postgres", "kafka", "redis", "opensearch"}
    assert all("test" in services[name]["healthcheck"] for name in servers)
    for each in services.values():
        for name, awaited in each.get("depends_on", {}).items():
            healthy = "service_healthy" if name in servers else "service_completed_successfully"
            assert awaited == {"condition": healthy}


def test_images_run_as_nobody_in_particular_and_say_how_they_are() -> None:
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


@pytest.mark.parametrize("command", [("docker-compose",), ("docker", "compose")])
def test_compose_reads_the_file(command: tuple[str, ...]) -> None:
    """By those of the two that are installed."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    if subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
        pytest.skip(f"no {' '.join(command)} here")
    asked = [*command, "-f", str(_FOLDER / "compose.yaml"), "config", "--services"]
    reported = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert {"setup", "daemon", "followers"} < set(reported.split())
