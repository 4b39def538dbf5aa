"""The Helm chart, rendered by Helm's own code: what is made fits together, and wrong values are refused."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import yaml
from deployed import DEPLOY, PROBED, check_command_line, option, paths_of_probes, pods

from holdfast.core.version import __version__

CHART = DEPLOY / "helm" / "holdfast"
LEAST = {
    "engineKey": {"existingSecret": "engine"},
    "postgresql": {"url": "postgresql://holdfast@db:5432/holdfast"},
}
"""The values that have no default."""
WHOLE: dict[str, Any] = {
    "model": "/models/a",
    "models": {"existingClaim": "models"},
    "engineKey": {"existingSecret": "engine"},
    "postgresql": {"url": "postgresql://holdfast@db:5432/holdfast", "existingSecret": "database"},
    "keys": {"existingSecret": "keys"},
    "files": {"existingClaim": "files"},
    "imagePullSecrets": [{"name": "registry"}],
    "server": {
        "replicas": 3,
        "slowMs": 10000,
        "otlpTracesEndpoint": "http://collector:4318",
        "drainSeconds": 300,
        "extraArgs": ["--max-body-mb", "16"],
        "nodeSelector": {"pool": "cpu"},
    },
    "engine": {
        "replicas": 2,
        "extraArgs": ["--max-model-len", "4096"],
        "runtimeClassName": "nvidia",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "cache": {"size": "", "storageClassName": ""},
    },
    "autoscaling": {"enabled": True, "podsMetric": {"name": "busy", "averageValue": "10"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"serverFrom": [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]},
}
"""Values that turn everything on."""


def render(values: Mapping[str, Any], name: str = "chat") -> list[dict[str, Any]]:
    """Return the manifests of a release, without notes. Skips the test without Helm's library."""
    helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed (make deploy-test)")
    chart = helm.Chart.load(CHART)
    chart.validate_schema(values)
    made = chart.render(values, name=name, namespace="llm")
    texts = [text for path, text in made.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def by_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the manifests of a kind."""
    return [each for each in manifests if each["kind"] == kind]


@pytest.mark.parametrize("values", [LEAST, WHOLE], ids=["least", "whole"])
class TestRendered:
    """The manifests, with as few and as many values as there are."""

    def test_helm_finds_nothing_wrong(self, values: dict[str, Any]) -> None:
        helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed (make deploy-test)")
        report = helm.lint(CHART, values, strict=True)
        assert report["errors"] == [] and [each for each in report["messages"] if each["severity"] > 1] == []

    def test_kubernetes_schemas_accept_each_manifest(self, values: dict[str, Any]) -> None:
        kubernetes = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
        for manifest in render(values):
            if manifest["kind"] != "ServiceMonitor":  # a kind of the Prometheus operator
                kubernetes.validate(manifest, "1.30", strict=True)

    def test_command_lines_are_accepted(self, values: dict[str, Any]) -> None:
        found = [container["args"] for _, container in pods(render(values))]
        assert sorted(each[0] for each in found) == ["engine", "serve"]
        for arguments in found:
            check_command_line(arguments)

    def test_each_pod_has_time_to_drain_before_it_is_killed(self, values: dict[str, Any]) -> None:
        for pod, container in pods(render(values)):
            needed = int(option(container["args"], "--drain-seconds"))
            if container["args"][0] == "serve":
                needed += int(option(container["args"], "--lame-duck-seconds"))
                needed += int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert pod["terminationGracePeriodSeconds"] >= needed + 10

    def test_servers_are_probed_by_routes_of_life_and_readiness(self, values: dict[str, Any]) -> None:
        (server,) = [container for _, container in pods(render(values)) if container["args"][0] == "serve"]
        assert paths_of_probes(server) == PROBED
        assert server["livenessProbe"]["httpGet"]["path"] == "/health/live", "a busy server must not be killed"
        assert server["readinessProbe"]["httpGet"]["path"] == "/health/ready"

    def test_each_selector_finds_the_pods_of_one_component(self, values: dict[str, Any]) -> None:
        manifests = render(values)
        labels = {
            each["kind"]: each["spec"]["template"]["metadata"]["labels"]
            for each in manifests
            if each["kind"] in ("Deployment", "StatefulSet")
        }
        selectors = [each["spec"]["selector"] for each in by_kind(manifests, "Service")]
        selectors += [each["spec"]["selector"]["matchLabels"] for each in by_kind(manifests, "PodDisruptionBudget")]
        selectors += [each["spec"]["podSelector"]["matchLabels"] for each in by_kind(manifests, "NetworkPolicy")]
        assert len(selectors) == 6
        for selector in selectors:
            assert [kind for kind, found in labels.items() if selector.items() <= found.items()] in (
                ["Deployment"], ["StatefulSet"],
            )  # fmt: skip

    def test_servers_name_each_engine_by_its_own_address(self, values: dict[str, Any]) -> None:
        manifests = render(values)
        (engines,) = by_kind(manifests, "StatefulSet")
        service = next(each for each in by_kind(manifests, "Service") if each["spec"].get("clusterIP") == "None")
        (server,) = [container for _, container in pods(manifests) if container["args"][0] == "serve"]
        assert service["metadata"]["name"] == engines["spec"]["serviceName"]
        expected = [
            f"{engines['metadata']['name']}-{number}.{service['metadata']['name']}.llm.svc:7000"
            for number in range(engines["spec"]["replicas"])
        ]
        assert option(server["args"], "--engines").split(",") == expected

    def test_containers_run_without_root_and_without_writing_to_the_image(self, values: dict[str, Any]) -> None:
        for pod, _ in pods(render(values)):
            assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
            assert not pod["automountServiceAccountToken"]
            for container in pod["containers"] + pod["initContainers"]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"] and rights["capabilities"]["drop"] == ["ALL"]

    def test_each_mounted_volume_is_there(self, values: dict[str, Any]) -> None:
        for each in render(values):
            if each["kind"] in ("Deployment", "StatefulSet"):
                pod = each["spec"]["template"]["spec"]
                there = {volume["name"] for volume in pod["volumes"]}
                there |= {claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())}
                for container in pod["containers"] + pod["initContainers"]:
                    assert {mount["name"] for mount in container.get("volumeMounts", ())} <= there

    def test_no_secret_is_an_argument(self, values: dict[str, Any]) -> None:
        for _, container in pods(render(values)):
            assert not any("$(PG" in word or "API_KEY" in word for word in container["args"])


def test_secrets_reach_the_server_as_environment_variables() -> None:
    (server,) = [container for _, container in pods(render(WHOLE)) if container["args"][0] == "serve"]
    given = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in server["env"] if "valueFrom" in each}
    assert given == {
        "PGPASSWORD": {"name": "database", "key": "password"},
        "HOLDFAST_API_KEY": {"name": "keys", "key": "api-key"},
        "HOLDFAST_OPERATOR_KEY": {"name": "keys", "key": "operator-key"},
    }


def test_a_server_starts_once_all_engines_listen() -> None:
    (pod,) = [pod for pod, container in pods(render(WHOLE)) if container["args"][0] == "serve"]
    waiting = next(each["command"] for each in pod["initContainers"] if each["name"] == "engines")
    assert waiting[-1] == option(pod["containers"][0]["args"], "--engines")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        engines = ",".join(f"127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
        command = [sys.executable, *waiting[1:-1], engines]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith(f"{engines.split(',')[1]} does not listen yet")
            other.listen()
            assert process.wait(timeout=30) == 0


def test_the_monitor_scrapes_the_servers_port_with_the_operators_key() -> None:
    manifests = render(WHOLE)
    (monitor,) = by_kind(manifests, "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "operator-key"}
    service = next(each for each in by_kind(manifests, "Service") if "clusterIP" not in each["spec"])
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_an_autoscaled_deployment_leaves_the_number_of_replicas_to_the_scaler() -> None:
    manifests = render(WHOLE)
    (scaler,), (servers,) = by_kind(manifests, "HorizontalPodAutoscaler"), by_kind(manifests, "Deployment")
    assert scaler["spec"]["scaleTargetRef"]["name"] == servers["metadata"]["name"]
    assert "replicas" not in servers["spec"]
    assert [each["type"] for each in scaler["spec"]["metrics"]] == ["Resource", "Pods"]
    assert by_kind(render(LEAST), "HorizontalPodAutoscaler") == []


def test_only_servers_and_engines_of_the_release_reach_engines() -> None:
    engine = next(each for each in by_kind(render(WHOLE), "NetworkPolicy") if "engine" in each["metadata"]["name"])
    allowed = [peer["podSelector"]["matchLabels"] for rule in engine["spec"]["ingress"] for peer in rule["from"]]
    assert [each["app.kubernetes.io/component"] for each in allowed] == ["server", "engine"]
    assert {each["app.kubernetes.io/instance"] for each in allowed} == {"chat"}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"engineKey": {"existingSecret": ""}}, "engineKey.existingSecret is empty"),
        ({"postgresql": {"url": ""}}, "postgresql.url is empty"),
        ({"autoscaling": {"enabled": True, "cpuPercent": None}}, "autoscaling has no metric"),
    ],
)
def test_a_missing_value_is_named(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        render({**LEAST, **values})


SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


class TestSchema:
    """The schema of values, which needs no Helm."""

    def test_the_defaults_are_valid(self) -> None:
        jsonschema.validate(DEFAULTS, SCHEMA)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"server": {"replicas": 0}},
            {"server": {"drainSeconds": -1}},
            {"server": {"logFormat": "xml"}},
            {"engine": {"port": 70000}},
            {"engine": {"replica": 2}},
            {"postgresql": {"url": "postgresql://user:password@host/database"}},
            {"unknown": 1},
        ],
    )
    def test_wrong_values_are_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**DEFAULTS, **wrong}, SCHEMA)

    def test_the_schema_knows_exactly_the_values_that_there_are(self) -> None:
        def compare(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
            known = schema.get("properties", {})
            assert known.keys() - {"global"} == values.keys(), path
            for name, value in values.items():
                if isinstance(value, dict) and "properties" in known[name]:
                    compare(known[name], value, f"{path}.{name}")

        compare(SCHEMA, DEFAULTS, "values")


def test_the_chart_has_the_version_of_holdfast() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
