"""The files of deploy/: each command line, option, route and metric in them is one of this version."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import serving
import yaml
from deployed import (
    DEPLOY,
    ROOT,
    check_command_line,
    check_options,
    metrics_in,
    option,
    paths_of_probes,
    pods,
    program,
)
from fake_engine import FakeClient
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cli.flags import UsageError
from holdfast.cluster.replicas import Counts
from holdfast.lm.types import SchedulerStats
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.keys.accounts import KeyMetrics
from holdfast.server.metrics import Metrics
from holdfast.server.replica_metrics import ReplicaMetrics
from holdfast.server.run import open_store
from tests.served import free_port

COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yml").read_text())
RAY = [*yaml.safe_load_all((DEPLOY / "ray" / "raycluster.yaml").read_text())]
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ALERTS = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]


@pytest.fixture
def listening() -> Callable[..., Any]:
    """The real server over a fake engine, on a free port."""
    return partial(serving.listening, FakeClient())


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """The paths of a server's routes."""
    config = ServerConfig(store=MEMORY)
    app = create_app(FakeClient(), config, open_store(config))  # type: ignore[arg-type]
    try:
        return {route.path for route in app.routes}  # type: ignore[attr-defined]
    finally:
        app.state.jobs[0].files.close()
        app.state.responses.store.close()


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """The names of all metrics of a server with replicas and keys, as Prometheus stores them."""
    own, operators = Metrics("tiny"), CollectorRegistry()
    KeyMetrics(operators)
    replica = SimpleNamespace(name="0", taken=1, serves=True, running=(), restarts=0, stats=None)
    counts = Counts()
    operators.register(ReplicaMetrics(SimpleNamespace(members=[replica], counts=counts)))  # type: ignore[arg-type]
    own.stats = SchedulerStats(0, 0, 1, 0, 0, 0, 0, 0, 0)
    text = generate_latest(own.registry).decode() + generate_latest(operators).decode()
    ends = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
    return {
        f"{family.name}{end}" for family in text_string_to_metric_families(text) for end in ends.get(family.type, ())
    }


@contextmanager
def running(prometheus: str, place: Path) -> Iterator[str]:
    """Run Prometheus with the configuration in a directory. Yields its URL."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        prometheus, "--config.file=prometheus.yml", f"--web.listen-address={address}",
        "--storage.tsdb.path=data", "--log.level=error",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=place, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://{address}"
        finally:
            process.kill()


async def eventually(api: httpx.AsyncClient, query: str, count: int) -> list[Any]:
    """Wait until a query has this number of results, and return them."""
    while True:
        with suppress(httpx.TransportError):
            answer = (await api.get("/api/v1/query", params={"query": query})).json()
            found: list[Any] = answer.get("data", {}).get("result", [])
            if len(found) >= count:
                return found
        await asyncio.sleep(0.1)


class TestCompose:
    """The file for Docker Compose."""

    def test_the_commands_of_server_and_engine_are_accepted(self) -> None:
        for name in ("server", "engine"):
            check_command_line(COMPOSE["services"][name]["command"])

    def test_a_wrong_option_would_be_noticed(self) -> None:
        with pytest.raises(UsageError, match="does not know --drain-second"):
            check_command_line(["serve", "--drain-second", "3"])
        with pytest.raises(UsageError, match="drain_seconds is -1"):
            check_command_line(["serve", "--drain-seconds=-1"])

    def test_each_service_has_time_to_drain_before_it_is_killed(self) -> None:
        server, engine = COMPOSE["services"]["server"], COMPOSE["services"]["engine"]
        needed = sum(int(option(server["command"], f"--{name}-seconds")) for name in ("lame-duck", "drain"))
        assert seconds(server["stop_grace_period"]) > needed + 10
        assert seconds(engine["stop_grace_period"]) > int(option(engine["command"], "--drain-seconds")) + 10

    def test_files_that_are_mounted_exist_and_variables_are_in_the_example(self) -> None:
        text = (DEPLOY / "compose" / "compose.yml").read_text()
        for volume in [each for service in COMPOSE["services"].values() for each in service.get("volumes", ())]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
        example = (DEPLOY / "compose" / "example.env").read_text()
        for variable in re.findall(r"\$\{(\w+):\?\}", text):
            assert re.search(rf"^{variable}=.", example, re.MULTILINE), variable

    def test_no_service_but_the_proxy_is_open_to_other_machines(self) -> None:
        ports = {name: each["ports"] for name, each in COMPOSE["services"].items() if "ports" in each}
        assert all(port.startswith("127.0.0.1:") for name in ports if name != "proxy" for port in ports[name])

    def test_secrets_are_on_no_command_line(self) -> None:
        for service in COMPOSE["services"].values():
            assert not re.search(r"_KEY|PASSWORD", " ".join(service.get("command", ())))


def seconds(text: str) -> int:
    """Return a time of Compose or systemd, in seconds."""
    return int(text.removesuffix("s"))


class TestSystemd:
    """The units, and their files of options."""

    @pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
    def test_the_command_and_its_options_are_accepted(self, unit: Path, tmp_path: Path) -> None:
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        path, *words = shlex.split(line)
        assert path.endswith("/holdfast")
        check_command_line(words)
        check_options(DEPLOY / "systemd" / Path(option(words, "--config")).name, words[0], tmp_path)

    @pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
    def test_a_unit_has_time_to_drain(self, unit: Path) -> None:
        (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
        (line,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        options = yaml.safe_load((DEPLOY / "systemd" / Path(line.split()[-1]).name).read_text())
        assert int(stop) > options.get("lame_duck_seconds", 0) + options["drain_seconds"] + 10

    def test_both_units_meet_at_one_socket_in_the_directory_that_the_engine_has(self) -> None:
        engine, server = (
            yaml.safe_load((DEPLOY / "systemd" / name).read_text()) for name in ("engine.yml", "serve.yml")
        )
        assert [engine["listen"]] == server["engines"] == ["/run/holdfast/engine.sock"]
        assert "RuntimeDirectory=holdfast" in (DEPLOY / "systemd" / "holdfast-engine.service").read_text()

    def test_systemd_accepts_the_units(self, tmp_path: Path) -> None:
        analyze = program("systemd-analyze")
        for unit in UNITS:
            text = unit.read_text().replace("/opt/holdfast/bin/holdfast", shutil.which("true") or "/bin/true")
            (tmp_path / unit.name).write_text(re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE))
        done = subprocess.run(
            [analyze, "verify", *map(str, tmp_path.glob("*.service"))], capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (0, "")


class TestRay:
    """The manifest for KubeRay."""

    def test_the_server_of_a_ray_cluster_is_accepted_and_its_probes_exist(self, routes: set[str]) -> None:
        ((pod, container),) = pods(RAY)
        check_command_line(container["args"])
        assert paths_of_probes(container) <= routes and paths_of_probes(container)
        arguments = container["args"]
        needed = sum(int(option(arguments, f"--{name}-seconds")) for name in ("lame-duck", "drain"))
        assert pod["terminationGracePeriodSeconds"] > needed + 10

    def test_the_server_finds_the_head_of_the_cluster(self) -> None:
        cluster = next(each for each in RAY if each["kind"] == "RayCluster")
        ((_, container),) = pods(RAY)
        head = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        port = {each["name"]: each["containerPort"] for each in head["ports"]}["gcs-server"]
        assert option(container["args"], "--ray") == f"{cluster['metadata']['name']}-head-svc:{port}"


class TestPrometheus:
    """Scraping and alerts."""

    def test_each_metric_of_an_alert_is_exported(self, metrics: set[str]) -> None:
        rules = [rule for group in ALERTS for rule in group["rules"]]
        named = {name for rule in rules for name in metrics_in(rule["expr"])}
        assert len(named) > 12
        assert sorted(named - metrics) == []

    def test_each_alert_has_a_severity_and_a_sentence(self) -> None:
        for rule in [rule for group in ALERTS for rule in group["rules"]]:
            assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
            assert rule["annotations"]["summary"].endswith("."), rule["alert"]

    def test_the_scrape_sends_a_key_from_a_file_to_a_route_that_exists(self, routes: set[str]) -> None:
        (scrape,) = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
        assert scrape["metrics_path"] in routes
        assert scrape["authorization"]["credentials_file"] == "/run/secrets/operator-key"
        assert "operator-key" in COMPOSE["services"]["prometheus"]["secrets"]

    def test_the_alerts_fire_when_they_should(self) -> None:
        promtool = program("promtool")
        for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
            done = subprocess.run([promtool, *command], cwd=DEPLOY / "prometheus", capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    async def test_prometheus_scrapes_a_server_with_the_key_and_not_without(
        self, listening: Callable[..., Any], tmp_path: Path
    ) -> None:
        prometheus = program("prometheus")
        shutil.copy(DEPLOY / "prometheus" / "alerts.yml", tmp_path)
        keys = {"right": tmp_path / "right", "wrong": tmp_path / "wrong"}
        for name, path in keys.items():
            path.write_text(f"{name}-key\n")
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        (scrape,) = config["scrape_configs"]
        config["global"]["scrape_interval"] = "500ms"
        async with listening(api_key=("user",), operator_key=("right-key",)) as server:
            target = [{"targets": [server.url.removeprefix("http://")]}]
            config["scrape_configs"] = [
                {
                    **scrape, "job_name": name, "static_configs": target,
                    "authorization": {"type": "Bearer", "credentials_file": str(path)},
                }
                for name, path in keys.items()
            ]  # fmt: skip
            (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
            with running(prometheus, tmp_path) as url:
                async with httpx.AsyncClient(base_url=url) as api:
                    up = await eventually(api, "up", 2)
                    named = await eventually(api, "holdfast_engine_up", 1)
        assert {each["metric"]["job"]: each["value"][1] for each in up} == {"right": "1", "wrong": "0"}
        assert [each["metric"]["job"] for each in named] == ["right"]


def test_grafanas_board_and_its_provisioning_are_where_compose_mounts_them() -> None:
    mounts = dict(each.split(":")[:2] for each in COMPOSE["services"]["grafana"]["volumes"])
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/holdfast.yml").read_text())["providers"][0]
    assert mounts["../grafana.json"].startswith(provider["options"]["path"] + "/")
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in COMPOSE["services"]


def test_each_metric_of_the_board_is_exported_by_a_server_with_replicas(metrics: set[str]) -> None:
    board = json.loads((DEPLOY / "grafana.json").read_text())
    named = {
        name for panel in board["panels"] for target in panel.get("targets", ()) for name in metrics_in(target["expr"])
    }
    assert sorted(named - metrics) == []
    assert {name for name in named if name.startswith("holdfast_replica_")}


def test_the_collector_takes_traces_where_the_server_of_compose_sends_them() -> None:
    collector = yaml.safe_load((DEPLOY / "otel" / "collector.yml").read_text())
    endpoint = option(COMPOSE["services"]["server"]["command"], "--otlp-traces-endpoint")
    assert endpoint.startswith("http://otel-collector:")
    port = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert httpx.URL(endpoint).port == int(port)
    for name, parts in collector["service"]["pipelines"]["traces"].items():
        assert set(parts) <= collector[name].keys()


def test_paths_that_the_proxies_hide_or_ask_for_are_routes(routes: set[str]) -> None:
    nginx, caddy = (DEPLOY / "nginx/holdfast.conf").read_text(), (DEPLOY / "caddy/Caddyfile").read_text()
    hidden = set(re.findall(r"location (?:= )?(/\w+) ", nginx))
    (line,) = re.findall(r"@operators path (.*)", caddy)
    assert hidden == {path.removesuffix("/*") for path in line.split()} == {"/metrics", "/replicas"}
    asked = set(re.findall(r"health_uri (\S+)", caddy))
    assert asked | {"/metrics"} <= routes


def test_files_of_deploy_name_no_key_and_no_place_of_a_developer() -> None:
    for path in [*DEPLOY.rglob("*"), ROOT / "docs" / "deploying.md"]:
        if path.is_file():
            text = path.read_text()
            assert not re.search(r"/work/|/root/|/home/\w|index-url", text), path
