"""The Helm chart: helm lints and renders it, and Kubernetes' schemas accept what it renders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cdc.operate import alerts
from scripts import manifests
from tests.fixtures.go_tools import go_tool

pytestmark = [
    pytest.mark.timeout(1500),
    # What the chart makes by default is checked by test_kubernetes in every commit's tests.
    pytest.mark.long("the first of them builds helm, where it is not on PATH: two minutes"),
]

_CONFIG = yaml.safe_load((manifests.CHART / "values.yaml").read_text("utf-8"))["config"]
_DIGEST = f"sha256:{'a' * 64}"
# Everything that is off by default, and every list that is empty.
_ALL: dict[str, Any] = {
    "existingSecret": "shop-secrets",
    "image": {
        "registry": "registry.example.com/team/",
        "tag": "0.2.0",
        "pullPolicy": "Always",
        "pullSecrets": [{"name": "registry"}],
    },
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/lake"}},
    "daemon": {
        "digest": _DIGEST,
        "replicas": 3,
        "scratch": {"sizeLimit": "20Gi"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "cdc", "operator": "Exists"}],
    },
    "followers": {"args": ["follow", "lake"], "nodeSelector": {"disk": "ssd"}},
    "console": {
        "enabled": True,
        "tokenSecret": "shop-console",
        "hosts": ["cdc.example.com"],
        "from": [{"podSelector": {"matchLabels": {"app": "ingress"}}}],
    },
    "volumes": [{"name": "ca", "configMap": {"name": "ca"}}],
    "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
    "monitoring": {"podMonitor": True, "rules": True, "labels": {"release": "prometheus"}},
}
_FEW: dict[str, Any] = {
    "followers": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "serviceAccount": {"create": False, "name": "cdc"},
    "config": _CONFIG.replace("0.0.0.0:8080", "'[::]:9100'"),
}
VALUES = {"default": {}, "all": _ALL, "few": _FEW, "plain": {"setup": {"hook": False}}}
# Of Prometheus' operator: Kubernetes' own schemas do not have them.
_CUSTOM = {"PodMonitor", "PrometheusRule"}


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(go_tool("helm")), *arguments], capture_output=True, text=True, check=False
    )


def rendered(folder: Path, values: dict[str, Any], release: str = "lockstep") -> str:
    file = folder / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    done = helm("template", release, str(manifests.CHART), "-n", "cdc", "-f", str(file))
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    found = [each for each in yaml.safe_load_all(text) if each]
    named = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(named) == len(found)
    return named


def containers(found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    pods = [each["spec"]["template"]["spec"] for each in found.values() if _has_pods(each)]
    return {each["containers"][0]["name"]: each["containers"][0] for each in pods}


def _has_pods(each: dict[str, Any]) -> bool:
    return each["kind"] in {"Deployment", "Job"}


def test_the_plain_manifests_are_what_the_chart_renders(tmp_path: Path) -> None:
    made = manifests.MANIFESTS.read_text("utf-8")
    assert manifests.manifests(str(go_tool("helm"))) == made, "make manifests"
    plain, with_hooks = objects(made), objects(rendered(tmp_path, {}))
    assert plain == objects(rendered(tmp_path, VALUES["plain"]))
    # With Helm there are the hook's own ConfigMap, and annotations; nothing else differs.
    assert with_hooks.keys() - plain.keys() == {("ConfigMap", "lockstep-setup")}
    for key, each in plain.items():
        assert _without_helm(with_hooks[key]) == _without_helm(each), key


def _without_helm(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object without what only an installed release needs."""
    copy: dict[str, Any] = json.loads(json.dumps(found))
    copy["metadata"].pop("annotations", None)
    if copy["kind"] == "Job":
        copy["spec"].pop("ttlSecondsAfterFinished", None)
        spec = copy["spec"]["template"]["spec"]
        spec.pop("serviceAccountName", None)
        spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "config"]
    if _has_pods(copy):
        kept = copy["spec"]["template"]["metadata"].pop("annotations", {})
        kept.pop("checksum/config", None)
        copy["spec"]["template"]["metadata"] |= {"annotations": kept} if kept else {}
    return copy


@pytest.mark.parametrize("name", VALUES)
def test_helm_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(VALUES[name]), "utf-8")
    done = helm("lint", "--strict", str(manifests.CHART), "-f", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VALUES)
def test_kubernetes_accepts_every_object(name: str, tmp_path: Path) -> None:
    for (kind, _), each in objects(rendered(tmp_path, VALUES[name])).items():
        if kind not in _CUSTOM:
            for version in ("1.28", "1.37"):
                kubernetes_validate.validate(each, version, strict=True)


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give Kubernetes' schemas, which refer to each other by addresses, as files that do not."""
    folder = tmp_path_factory.mktemp("schemas")
    given = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
    for path in given.glob("v1.37.0-local-strict/*.json"):
        text = path.read_text("utf-8").replace('"/api/', f'"{folder.as_uri()}/')
        (folder / path.name).write_text(text, "utf-8")
    return folder


@pytest.mark.parametrize("name", VALUES)
def test_kubeconform_accepts_every_object_and_refuses_a_wrong_one(
    name: str, schemas: Path, tmp_path: Path
) -> None:
    text = rendered(tmp_path, VALUES[name])
    location = f"{schemas}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    asked = [
        *(str(go_tool("kubeconform")), "-strict", "-summary", "-kubernetes-version", "1.37.0"),
        *("-skip", ",".join(_CUSTOM), "-schema-location", location),
    ]
    right = subprocess.run(asked, input=text, capture_output=True, text=True, check=False)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "Invalid: 0, Errors: 0" in right.stdout
    wrong = text.replace("strategy: {type: Recreate}", "strategy: {kind: Recreate}")
    assert wrong != text
    assert subprocess.run(
        asked, input=wrong, capture_output=True, text=True, check=False
    ).returncode


def test_setup_runs_before_anything_is_changed_and_stops_the_change_if_it_fails(
    tmp_path: Path,
) -> None:
    found = objects(rendered(tmp_path, {}))
    job, config = found["Job", "lockstep-setup"], found["ConfigMap", "lockstep-setup"]
    notes, earlier = (each["metadata"]["annotations"] for each in (job, config))
    assert notes["helm.sh/hook"] == "pre-install,pre-upgrade,pre-rollback"
    assert earlier["helm.sh/hook"] == notes["helm.sh/hook"]
    assert int(earlier["helm.sh/hook-weight"]) < int(notes.get("helm.sh/hook-weight", 0))
    # What it needs is there before the release is: its own configuration, no account of the chart.
    spec = job["spec"]["template"]["spec"]
    assert {"name": "config", "configMap": {"name": "lockstep-setup"}} in spec["volumes"]
    assert "serviceAccountName" not in spec
    assert config["data"] == found["ConfigMap", "lockstep"]["data"]


def test_another_configuration_restarts_the_pods(tmp_path: Path) -> None:
    other = {"config": _CONFIG.replace("pipeline: shop", "pipeline: other")}
    before, after = objects(rendered(tmp_path, {})), objects(rendered(tmp_path, other))
    for name in ("lockstep-daemon", "lockstep-followers"):
        first, then = (
            each["Deployment", name]["spec"]["template"]["metadata"]["annotations"]
            for each in (before, after)
        )
        assert first["checksum/config"] != then["checksum/config"]


def test_two_releases_in_a_namespace_share_nothing(tmp_path: Path) -> None:
    shop, other = (objects(rendered(tmp_path, _ALL, name)) for name in ("shop", "other"))
    assert not shop.keys() & other.keys()
    selectors = [
        {tuple(sorted(s.items())) for s in map(_selector, each.values()) if s}
        for each in (shop, other)
    ]
    assert selectors[0]
    assert not selectors[0] & selectors[1]


def _selector(each: dict[str, Any]) -> dict[str, str] | None:
    spec = each.get("spec", {})
    found = spec.get("selector") or spec.get("podSelector") or {}
    return dict(found.get("matchLabels", found)) or None


def test_all_values_reach_their_objects(tmp_path: Path) -> None:
    found = objects(rendered(tmp_path, _ALL, "shop"))
    made = containers(found)
    image = f"registry.example.com/team/lockstep-daemon:0.2.0@{_DIGEST}"
    for name in ("setup", "daemon", "console"):
        assert made[name]["image"] == image
    assert made["followers"]["image"] == "registry.example.com/team/lockstep-followers:0.2.0"
    assert made["followers"]["args"] == ["follow", "lake"]
    for each in made.values():
        assert each["envFrom"] == [{"secretRef": {"name": "shop-secrets"}}]
        assert {"name": "ca", "mountPath": "/etc/ca", "readOnly": True} in each["volumeMounts"]
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
    daemon = found["Deployment", "shop-daemon"]["spec"]
    assert daemon["replicas"] == 3
    assert daemon["template"]["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert daemon["template"]["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    scratch = {"name": "scratch", "emptyDir": {"sizeLimit": "20Gi"}}
    assert scratch in daemon["template"]["spec"]["volumes"]
    rules = found["PrometheusRule", "shop"]
    assert rules["spec"] == yaml.safe_load(alerts.rules())
    assert rules["metadata"]["labels"] == {"release": "prometheus"}


def test_the_console_asks_for_a_token_and_is_reached_by_those_who_are_named(tmp_path: Path) -> None:
    found = objects(rendered(tmp_path, _ALL, "shop"))
    console = containers(found)["console"]
    assert "--host=cdc.example.com" in console["args"]
    [token] = [each for each in console["args"] if each.startswith("--token-file=")]
    [mount] = [each for each in console["volumeMounts"] if each["name"] == "token"]
    assert token == f"--token-file={mount['mountPath']}/token"
    # kubelet asks by the pod's address, which is no name of the console.
    probe = console["readinessProbe"]["httpGet"]
    assert probe["httpHeaders"] == [{"name": "Host", "value": "localhost"}]
    admitted = found["NetworkPolicy", "shop"]["spec"]["ingress"]
    assert [rule["ports"] for rule in admitted] == [[{"port": 8080}], [{"port": 8600}]]
    assert admitted[1]["from"] == _ALL["console"]["from"]


def test_a_console_whose_viewers_have_names_needs_no_token(tmp_path: Path) -> None:
    oidc = {"issuer": "https://accounts.example.com", "audience": "lockstep"}
    config = yaml.safe_load(_CONFIG) | {"console": {"oidc": oidc}}
    values = {"config": yaml.safe_dump(config), "console": {"enabled": True}}
    text = rendered(tmp_path, values, "shop")
    console = containers(objects(text))["console"]
    assert console["args"] == ["console", "--listen=0.0.0.0:8600"]
    assert "/run/secrets/lockstep" not in text


def test_the_port_of_the_configuration_is_the_one_that_is_probed(tmp_path: Path) -> None:
    found = objects(rendered(tmp_path, _FEW))
    assert ("NetworkPolicy", "lockstep") not in found
    assert ("Deployment", "lockstep-followers") not in found
    assert containers(found)["daemon"]["ports"] == [{"name": "http", "containerPort": 9100}]
    assert found["Service", "lockstep-daemon"]["spec"]["ports"][0]["port"] == 9100
    # An account of one's own is there before the release, so setup has it, too.
    assert found["Job", "lockstep-setup"]["spec"]["template"]["spec"]["serviceAccountName"] == "cdc"


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"daemon": {"replica": 2}}, "replica"),
        ({"daemon": {"replicas": "two"}}, "replicas"),
        ({"console": {"enabled": True}}, "console.tokenSecret is empty"),
        ({"image": {"tag": "0.1.0@sha256:abc"}}, "tag"),
        ({"networkPolicy": {"from": []}}, "from"),
        ({"config": ""}, "config"),
        ({"config": "a: [b"}, "this is no YAML"),
        ({"config": "pipeline: shop\n"}, "http.listen is 127.0.0.1:8080"),
        ({"config": "http: {listen: 127.0.0.1:9000}\n"}, "http.listen is 127.0.0.1:9000"),
    ],
    ids=lambda each: None if isinstance(each, str) else json.dumps(each)[:40],
)
def test_wrong_values_are_refused(values: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values), "utf-8")
    done = helm("template", "lockstep", str(manifests.CHART), "-f", str(file))
    assert done.returncode
    assert complaint in done.stderr
