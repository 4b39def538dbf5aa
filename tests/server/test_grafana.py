"""The Grafana board: every expression names metrics and labels that the server exports."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from holdfast.server.metrics import Metrics

BOARD = json.loads((Path(__file__).parents[2] / "deploy" / "grafana.json").read_text())
ENDINGS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}
FOR_OPERATORS = (
    "holdfast_replica_", "holdfast_key_", "holdfast_requests_resumed", "holdfast_requests_not_resumed",
    "holdfast_moved_tokens", "holdfast_routed_tokens",
)  # fmt: skip
"""Beginnings of the names of metrics that only operators see."""
TARGETS = {"job", "instance", "le"}
"""Labels that Prometheus adds, and the label of histogram buckets."""

Http = Callable[..., httpx.AsyncClient]


def expressions() -> list[str]:
    """Return all expressions of the board, including those of its variables."""
    found = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    return [
        *found,
        *(each["query"]["query"] for each in BOARD["templating"]["list"] if isinstance(each["query"], dict)),
    ]


def labels_of(metrics: Metrics) -> set[str]:
    """Return the labels of all the server's own metrics."""
    return {label for each in vars(metrics).values() for label in getattr(each, "_labelnames", ())}


async def test_each_metric_of_the_board_is_exported(http: Http) -> None:
    async with http() as api:
        text = (await api.get("/metrics")).text
    exported = {
        f"{family.name}{ending}"
        for family in text_string_to_metric_families(text)
        for ending in ENDINGS.get(family.type, ())
    }
    named = {name for expr in expressions() for name in re.findall(r"holdfast_\w+", expr)}
    named = {name for name in named if not name.startswith(FOR_OPERATORS)}  # tests/deploy looks at these
    assert len(named) > 40
    assert sorted(named - exported) == []


async def test_each_label_of_the_board_is_one_of_the_metrics(http: Http) -> None:
    async with http() as api:
        families = [*text_string_to_metric_families((await api.get("/metrics")).text)]
    exported = {label for family in families for sample in family.samples for label in sample.labels}
    used: set[str] = set()
    for expr in expressions():
        used |= {name.strip() for names in re.findall(r"by \(([\w, ]+)\)", expr) for name in names.split(",")}
        used |= set(re.findall(r"[{,](\w+)(?:=|!)", expr))
    legends = [target["legendFormat"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    used |= {name for legend in legends for name in re.findall(r"{{(\w+)}}", legend)}
    assert used <= labels_of(Metrics()) | exported | TARGETS | {"replica", "key", "kind"}


def test_expressions_are_balanced_and_panels_do_not_overlap() -> None:
    for expr in expressions():
        for left, right in ("()", "{}", "[]"):
            assert expr.count(left) == expr.count(right), expr
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place: dict[str, Any] = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
