"""The manifests: valid for Kubernetes, without secrets, not as root, with probes that exist.

And what can be checked of the Helm chart without helm; tests/e2e/test_helm_chart.py has the rest.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft7Validator

import cdc
from cdc.config import load
from cdc.operate import http
from scripts.manifests import CHART, MANIFESTS, digest

SECRETS = ("KAFKA_PASSWORD", "LOCKSTEP_SECRET", "REDIS_PASSWORD")


@cache
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")))


def named(kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests() if (m["kind"], m["metadata"]["name"]) == (kind, name))


def pods() -> dict[str, dict[str, Any]]:
    return {
        m["metadata"]["name"]: m["spec"]["template"]["spec"]
        for m in manifests()
        if m["kind"] in {"Deployment", "Job"}
    }


@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_each_is_valid(version: str) -> None:
    for manifest in manifests():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_one_would_be_found() -> None:
    wrong = {**named("Deployment", "lockstep-daemon"), "spec": {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_configuration_loads_and_each_secret_comes_from_the_environment(tmp_path: Path) -> None:
    text = named("ConfigMap", "lockstep")["data"]["lockstep.yaml"]
    file = tmp_path / "lockstep.yaml"
    file.write_text(text, encoding="utf-8")
    config = load(file, dict.fromkeys(SECRETS, "x" * 32))
    assert config.followers.keys() == {"lake", "cache"}
    for name in SECRETS:
        assert f"${{{name}}}" in text
    for spec in pods().values():
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "lockstep"}}]
        assert "env" not in container


def test_nothing_runs_as_root_or_writes_to_its_image() -> None:
    for spec in pods().values():
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is False
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]


def test_the_daemon_is_probed_where_it_answers() -> None:
    (container,) = pods()["lockstep-daemon"]["containers"]
    probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/readyz"]
    assert {probe["path"] for probe in probes} <= set(http.PATHS)
    port = next(p["containerPort"] for p in container["ports"] if p["name"] == "http")
    text = named("ConfigMap", "lockstep")["data"]["lockstep.yaml"]
    assert f"listen: 0.0.0.0:{port}" in text


def test_one_version_at_a_time_and_one_pod_at_a_time() -> None:
    daemon = named("Deployment", "lockstep-daemon")["spec"]
    assert (daemon["strategy"], daemon["replicas"]) == ({"type": "Recreate"}, 2)
    budget = named("PodDisruptionBudget", "lockstep-daemon")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == daemon["selector"]
    followers = named("Deployment", "lockstep-followers")["spec"]
    assert (followers["strategy"], followers["replicas"]) == ({"type": "Recreate"}, 1)


def test_the_manifests_were_made_from_this_chart() -> None:
    assert f"sha256 {digest()}." in MANIFESTS.read_text(encoding="utf-8"), "make manifests"


def test_the_chart_deploys_images_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert (chart["version"], chart["appVersion"]) == (cdc.__version__, cdc.__version__)
    images = {spec["containers"][0]["image"].partition(":")[2] for spec in pods().values()}
    assert images == {cdc.__version__}


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return found


@cache
def values_schema() -> Draft7Validator:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def test_the_charts_schema_has_the_values_of_its_file_and_no_others() -> None:
    values_schema().validate(values())
    properties: dict[str, Any] = values_schema().schema["properties"]
    assert properties.keys() - {"global"} == values().keys()
    for name, part in values().items():
        known = properties[name]
        if known.get("additionalProperties") is False:
            assert known["properties"].keys() == part.keys(), name


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("daemon", {"replica": 2}),
        ("daemon", {"replicas": 0}),
        ("daemon", {"digest": "sha256:abc"}),
        ("followers", {"replicas": 2}),
        ("image", {"tag": "0.1.0@sha256:abc"}),
        ("image", {"pullSecrets": ["registry"]}),
        ("console", {"tokenSecret": "A Secret"}),
        ("networkPolicy", {"from": []}),
        ("setup", {"hook": "no"}),
        ("monitoring", {"rule": True}),
    ],
)
def test_wrong_values_are_refused(part: str, wrong: dict[str, Any]) -> None:
    given = values()
    given[part] = {**given[part], **wrong}
    assert not values_schema().is_valid(given)
