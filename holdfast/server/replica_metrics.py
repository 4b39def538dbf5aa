"""State of an engine's replicas: metrics for each replica, and a description for operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.cluster.replica import Replica, State
from holdfast.cluster.replicas import Replicas

STATS = {
    "waiting": ("replica_requests_waiting", "Requests waiting for their first step, by replica"),
    "running": ("replica_requests_running", "Requests with blocks in the cache, by replica"),
    "blocks_used": ("replica_blocks_used", "Blocks of the KV cache that running requests own, by replica"),
    "blocks_cached": ("replica_blocks_cached", "Unowned blocks that still hold a reusable prefix, by replica"),
}
"""Name and help of the gauges that each replica has, by field of SchedulerStats. Other fields have only a total."""


class ReplicaMetrics(Collector):
    """Metrics of each replica, and of events between replicas. `Metrics` has the totals of all engines."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as of the last check of each replica, at most a second ago."""
        members = self._replicas.members
        up = GaugeMetricFamily("holdfast_replica_up", "1 if the replica takes requests", labels=["replica"])
        requests = GaugeMetricFamily(
            "holdfast_replica_requests", "Requests in progress on the replica", labels=["replica"]
        )
        restarts = CounterMetricFamily(
            "holdfast_replica_restarts", "Times that the replica's engine ended unexpectedly", labels=["replica"]
        )
        taken = CounterMetricFamily(
            "holdfast_replica_requests_taken", "Requests that were sent to the replica", labels=["replica"]
        )
        for replica in members:
            taken.add_metric([replica.name], replica.taken)
            up.add_metric([replica.name], replica.serves)
            requests.add_metric([replica.name], len(replica.running))
            restarts.add_metric([replica.name], replica.restarts)
        yield from (up, requests, taken, restarts)
        for field, (name, help) in STATS.items():
            gauge = GaugeMetricFamily(f"holdfast_{name}", help, labels=["replica"])
            for replica in members:
                if replica.stats is not None:
                    gauge.add_metric([replica.name], getattr(replica.stats, field))
            yield gauge
        counts = self._replicas.counts
        for name, help, value in (
            ("requests_resumed", "Times that a request continued on another replica", counts.resumed),
            ("requests_not_resumed", "Requests that could not continue on another replica", counts.lost),
            ("routed_tokens", "Prompt tokens of the requests that were routed", counts.routed_tokens),
            ("moves", "Conversations whose state was copied to another replica", counts.moves),
            ("moved_tokens", "Tokens of state that were copied from one replica to another", counts.moved_tokens),
        ):
            yield CounterMetricFamily(f"holdfast_{name}", help, value=value)


def describe(replica: Replica) -> dict[str, Any]:
    """Return a replica's state for operators."""
    described = {"name": replica.name, "state": str(replica.state), "place": replica.place}
    if replica.state is not State.READY and replica.reason:
        described["reason"] = replica.reason
    return {**described, "requests": len(replica.running), "taken": replica.taken, "restarts": replica.restarts}
