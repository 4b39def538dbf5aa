"""Metrics of applications: for Prometheus at /metrics, and for the protocol's own statistics."""

from __future__ import annotations

import time
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.engine.client.app_client import Inference
from holdfast.engine.messages import AppStats
from holdfast.server.metrics import LONG, SHORT

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Upper bounds of the histogram buckets for the number of nodes of a task."""
GAUGES = {
    "waiting": ("requests_waiting", "Requests of an application that have no place on a device yet"),
    "running": ("requests_running", "Requests of an application that have their places"),
    "rows_used": ("rows_used", "Places for nodes that are used, on all devices of an application"),
    "rows_total": ("rows", "Places for nodes on all devices of an application"),
}
"""Metric name and help by field of AppStats."""


@dataclass
class Totals:
    """Numbers and times of one application's requests since the server's start. Times are in seconds."""

    outcomes: Counts[str] = field(default_factory=Counts)
    succeeded: float = 0.0
    failed: float = 0.0
    queued: float = 0.0
    computed: float = 0.0
    last: float = 0.0
    """Time of the last request, in seconds since the epoch."""


class AppMetrics(Collector):
    """Metrics of all applications of a server. Times are in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        registry.register(self)
        self.stats: Mapping[str, AppStats | None] = {}
        """State of each application's planner at the last scrape; None if the engine did not answer."""
        self.totals: dict[str, Totals] = {}
        self.requests = Counter(
            "holdfast_app_requests",
            "Inference requests by outcome: ok, refused (4xx), unavailable (503), left, failed",
            ["app", "outcome"],
            registry=registry,
        )
        self.queue = Histogram(
            "holdfast_app_queue_seconds", "Time from a request's arrival until its first node is planned",
            ["app"], buckets=SHORT, registry=registry,
        )  # fmt: skip
        self.compute = Histogram(
            "holdfast_app_compute_seconds", "Time from the plan of a request's first node to its result",
            ["app"], buckets=LONG, registry=registry,
        )  # fmt: skip

    def ended(self, app: str, outcome: str, seconds: float) -> None:
        """Count an ended request. `seconds` is its duration."""
        self.requests.labels(app, outcome).inc()
        totals = self.totals.setdefault(app, Totals())
        totals.outcomes[outcome] += 1
        totals.last = time.time()
        if outcome == "ok":
            totals.succeeded += seconds
        else:
            totals.failed += seconds

    def computed(self, app: str, done: Inference) -> None:
        """Count the waiting and computing times of a request that has a result."""
        queued, computed = done.scheduled - done.arrival, done.finish - done.scheduled
        self.queue.labels(app).observe(queued)
        self.compute.labels(app).observe(computed)
        totals = self.totals.setdefault(app, Totals())
        totals.queued += queued
        totals.computed += computed

    def statistics(self, app: str, version: str, stats: AppStats) -> dict[str, Any]:
        """Return the protocol's statistics of one application. Each task counts as one batch execution."""
        totals = self.totals.get(app, Totals())
        count = totals.outcomes["ok"]
        batches: Counts[int] = Counts()
        for cell in stats.cells:
            batches.update(cell.batches)
        nothing = {"count": 0, "ns": 0}
        return {
            "name": app,
            "version": version,
            "last_inference": int(totals.last * 1e3),
            "inference_count": count,
            "execution_count": batches.total(),
            "inference_stats": {
                "success": duration(count, totals.succeeded),
                "fail": duration(totals.outcomes.total() - count, totals.failed),
                "queue": duration(count, totals.queued),
                "compute_input": nothing,
                "compute_infer": duration(count, totals.computed),
                "compute_output": nothing,
                "cache_hit": nothing,
                "cache_miss": nothing,
            },
            "batch_stats": [
                {
                    "batch_size": size,
                    "compute_input": nothing,
                    "compute_infer": {"count": number, "ns": 0},
                    "compute_output": nothing,
                }
                for size, number in sorted(batches.items())
            ],
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the planners' metrics to the registry."""
        up = GaugeMetricFamily("holdfast_app_engine_up", "1 if the engine answered this scrape", labels=["app"])
        for app, stats in self.stats.items():
            up.add_metric([app], stats is not None)
        yield up
        answered = {app: stats for app, stats in self.stats.items() if stats is not None}
        for name, (metric, help) in GAUGES.items():
            family = GaugeMetricFamily(f"holdfast_app_{metric}", help, labels=["app"])
            for app, stats in answered.items():
                family.add_metric([app], getattr(stats, name))
            yield family
        labels = ["app", "cell"]
        ready = GaugeMetricFamily("holdfast_app_nodes_ready", "Nodes that could run now, by cell type", labels=labels)
        tasks = GaugeMetricFamily("holdfast_app_tasks_in_flight", "Tasks in flight, by cell type", labels=labels)
        sizes = HistogramMetricFamily("holdfast_app_batch_size", "Nodes of each task, by cell type", labels=labels)
        for app, stats in answered.items():
            for cell in stats.cells:
                ready.add_metric([app, cell.cell], cell.ready)
                tasks.add_metric([app, cell.cell], cell.tasks)
                sizes.add_metric([app, cell.cell], *histogram(cell.batches))
        yield from (ready, tasks, sizes)


def duration(count: int, seconds: float) -> dict[str, int]:
    """Return a duration in the form of the protocol's statistics."""
    return {"count": count, "ns": int(seconds * 1e9)}


def histogram(batches: Mapping[int, int]) -> tuple[list[tuple[str, float]], float]:
    """Return the cumulative histogram buckets of tasks by their number of nodes, and the total number of nodes."""
    buckets = [
        (str(float(bound)), float(sum(number for size, number in batches.items() if size <= bound)))
        for bound in BATCHES
    ]
    return [*buckets, ("+Inf", float(sum(batches.values())))], float(sum(s * n for s, n in batches.items()))
