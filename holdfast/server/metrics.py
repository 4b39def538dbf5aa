"""Metrics at /metrics: the server's requests, latencies and tokens, and the engine's queues and memory."""

from __future__ import annotations

import os
from collections import Counter as Counted
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, multiprocess
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.engine.messages import Steps
from holdfast.lm.types import SchedulerStats

if TYPE_CHECKING:
    from holdfast.engine.client.stream import Timings

SHARED_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the directory in which API processes of one port keep their metrics. The client library
reads it when it is imported.
"""
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
PACE = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.075, 0.1),
    *(0.25, 0.5, 1, 2.5, 5, 10),
)
"""Upper bounds of times between tokens, with usual targets and what lies a little above them."""
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
LENGTHS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Upper bounds of the numbers of tokens of a prompt or an answer, as in vLLM."""
COUNTS = (1, 2, 5, 10, 20)
SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MOST_LOSSES = 16
"""Maximum number of tuning jobs that have a gauge of their own."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

STATS = {
    "waiting": ("gauge", "requests_waiting", "Requests waiting for their first step"),
    "running": ("gauge", "requests_running", "Requests with blocks in the cache"),
    "blocks_total": ("gauge", "blocks", "Blocks of the KV cache"),
    "blocks_used": ("gauge", "blocks_used", "Blocks that running requests own"),
    "blocks_cached": ("gauge", "blocks_cached", "Unowned blocks that still hold a reusable prefix"),
    "host_blocks_total": ("gauge", "host_blocks", "Blocks of the host tier, including those that are not usable yet"),
    "host_blocks_ready": ("gauge", "host_blocks_ready", "Blocks of the host tier that are usable now"),
    "host_blocks_cached": ("gauge", "host_blocks_cached", "Blocks of the host tier that hold state"),
    "warming": ("gauge", "engines_warming", "Engines with graphs to capture or host memory to pin"),
    "sleep_level": ("gauge", "sleep_level", "Level at which the engine sleeps; 0 while it is awake"),
    "preemptions": ("counter", "preemptions", "Requests that lost their blocks to make room"),
    "suspensions": ("counter", "suspensions", "Preempted requests whose state went to the host tier"),
    "prefix_queries": ("counter", "prefix_tokens_queried", "Prompt tokens looked up in the prefix cache"),
    "prefix_hits": ("counter", "prefix_tokens_hit", "Prompt tokens found in the prefix cache"),
    "prefix_hits_on_host": ("counter", "prefix_tokens_hit_on_host", "Prompt tokens found in the host tier"),
    "prefix_hits_on_disk": ("counter", "prefix_tokens_hit_on_disk", "Prompt tokens read from the disk for a request"),
    "prefix_hits_on_remote": ("counter", "prefix_tokens_hit_on_remote", "Prompt tokens read from the remote tier"),
    "disk_blocks_total": ("gauge", "disk_blocks", "Blocks of the disk tier"),
    "disk_blocks_cached": ("gauge", "disk_blocks_cached", "Blocks of the disk tier that hold state"),
    "disk_blocks_dropped": ("counter", "disk_blocks_dropped", "Blocks dropped from the disk tier for others"),
    "disk_bytes_written": ("counter", "disk_bytes_written", "Bytes of state written to the disk"),
    "disk_bytes_read": ("counter", "disk_bytes_read", "Bytes of state read from the disk"),
    "remote_down": ("gauge", "remote_down", "Engines whose remote tier fails now"),
    "remote_bytes_written": ("counter", "remote_bytes_written", "Bytes of state written to the remote tier"),
    "remote_bytes_read": ("counter", "remote_bytes_read", "Bytes of state read from the remote tier"),
    "blocks_corrupt": ("counter", "blocks_corrupt", "Blocks found corrupt on the disk or in the remote tier"),
    "tier_failures": ("counter", "tier_failures", "Blocks that the disk or the remote tier could not write or read"),
    "blocks_cheaper_computed": (
        "counter", "blocks_cheaper_computed", "Blocks computed although a lower tier has them, because that is faster"
    ),
    "fetches_given_up": ("counter", "fetches_given_up", "Requests that stopped waiting for their blocks"),
    "blocks_swapped_in": ("counter", "blocks_swapped_in", "Blocks copied from the host to the device"),
    "blocks_swapped_out": ("counter", "blocks_swapped_out", "Blocks copied from the device to the host"),
    "blocks_swapped_in_ahead": (
        "counter", "blocks_swapped_in_ahead", "Blocks copied to the device before any request asked for them"
    ),
    "blocks_ahead_used": ("counter", "blocks_ahead_used", "Blocks copied ahead that a request then used"),
    "blocks_ahead_wasted": (
        "counter", "blocks_ahead_wasted", "Blocks copied ahead that were given to others before any request used them"
    ),
    "pauses_noted": ("counter", "pauses_noted", "Ended answers of which it is known what they wait for"),
    "turns_expected": ("gauge", "turns_expected", "Conversations whose next turn is expected"),
    "tokens_dropped": ("counter", "tokens_dropped", "Tokens whose state was dropped from every tier"),
    "tokens_recovered": (
        "counter", "tokens_recovered", "Dropped positions computed again before cached state of their sequence"
    ),
    "tokens_computed": ("counter", "tokens_computed", "Query tokens that steps computed"),
    "tokens_drafted": ("counter", "tokens_drafted", "Guessed tokens that steps have verified"),
    "drafts_accepted": ("counter", "drafts_accepted", "Guessed tokens that were correct"),
    "adapters_known": ("gauge", "adapters", "LoRA adapters that requests may name"),
    "adapters_resident": ("gauge", "adapters_resident", "LoRA adapters in a slot on the device"),
    "adapter_loads": ("counter", "adapter_loads", "Copies of LoRA adapters to a slot on the device"),
    "blocks_training": ("gauge", "blocks_training", "Blocks of the KV cache that are lent to training"),
    "training_tokens": ("counter", "training_tokens", "Tokens of the micro-batches that tuning jobs have computed"),
    "training_seconds": ("counter", "training_seconds", "Device time that tuning jobs have used"),
    "deferred_seconds": ("counter", "deferred_seconds", "Time that training deferred requests"),
    "chunk_bytes_in": ("counter", "chunk_bytes_in", "Bytes of KV blocks received from other engines"),
    "chunk_bytes_out": ("counter", "chunk_bytes_out", "Bytes of KV blocks sent to other engines"),
    "chunk_rate": ("gauge", "chunk_rate_bytes", "Bytes per second of recent moves from other engines"),
    "chunk_failures": ("counter", "chunk_failures", "Moves from other engines that failed"),
    "forwards": ("counter", "forwards", "Runs of a model on padded rows; a step may have several"),
    "idle_tokens": ("counter", "idle_tokens", "Tokens computed on padded rows that belong to no request"),
    "rows_wide": ("gauge", "row_width", "Positions of the longest padded row"),
    "rows_prefilled": ("gauge", "rows_prefilled", "Prompts computed before a place among the padded rows is free"),
    "snapshots_total": ("gauge", "snapshots", "Slots on the device for snapshots of recurrent states"),
    "snapshots_used": ("gauge", "snapshots_used", "Snapshots that the next step reads or writes"),
    "snapshots_kept": ("gauge", "snapshots_kept", "Other snapshots on the device"),
    "host_snapshots_total": ("gauge", "host_snapshots", "Slots on the host for snapshots of recurrent states"),
    "host_snapshots_kept": ("gauge", "host_snapshots_kept", "Snapshots on the host"),
    "disk_snapshots_total": ("gauge", "disk_snapshots", "Places on the disk for snapshots of recurrent states"),
    "disk_snapshots_kept": ("gauge", "disk_snapshots_kept", "Snapshots on the disk"),
    "snapshots_saved": ("counter", "snapshots_saved", "Snapshots made"),
    "snapshots_dropped": ("counter", "snapshots_dropped", "Snapshots dropped from both tiers"),
    "snapshots_swapped_out": ("counter", "snapshots_swapped_out", "Snapshots copied to the host"),
    "snapshots_swapped_in": ("counter", "snapshots_swapped_in", "Snapshots copied from the host"),
    "snapshot_hits": ("counter", "snapshot_hits", "Starts of requests from a snapshot"),
    "snapshot_tokens": ("counter", "snapshot_tokens_hit", "Tokens that these requests did not compute"),
    "contracts_accepted": ("counter", "contracts_accepted", "Requests whose contract was accepted"),
    "shrinks": ("counter", "shrinks", "Times that the device ran out of memory for padded rows"),
}  # fmt: skip
"""Kind, name and help of the metric for each field of SchedulerStats."""


CONTRACTS = {
    "contracts_kept": ("kept", ""),
    "contracts_refused": ("refused", ""),
    "contracts_broken_ttft": ("broken", "ttft"),
    "contracts_broken_tbt": ("broken", "tbt"),
    "contracts_broken_complete": ("broken", "complete"),
}
"""Outcome and broken term of the contracts that each field of SchedulerStats counts."""

VLLM = {
    "ttft_seconds": "time_to_first_token_seconds",
    "tbt_seconds": "inter_token_latency_seconds",
    "e2e_seconds": "e2e_request_latency_seconds",
    "queue_seconds": "request_queue_time_seconds",
    "prefill_seconds": "request_prefill_time_seconds",
    "decode_seconds": "request_decode_time_seconds",
    "inference_seconds": "request_inference_time_seconds",
    "mean_tbt_seconds": "request_time_per_output_token_seconds",
    "choice_prompt_tokens": "request_prompt_tokens",
    "choice_generated_tokens": "request_generation_tokens",
    "choice_max_tokens": "request_params_max_tokens",
    "request_choices": "request_params_n",
    "step_tokens": "iteration_tokens_total",
    "prompt_tokens": "prompt_tokens",
    "generated_tokens": "generation_tokens",
    "choices_finished": "request_success",
    "requests_running": "num_requests_running",
    "requests_waiting": "num_requests_waiting",
    "preemptions": "num_preemptions",
    "prefix_tokens_queried": "prefix_cache_queries",
    "prefix_tokens_hit": "prefix_cache_hits",
    "tokens_drafted": "spec_decode_num_draft_tokens",
    "drafts_accepted": "spec_decode_num_accepted_tokens",
}
"""vLLM's names for Holdfast's metrics, so that vLLM's dashboards work. Counters are named without _total."""


class Metrics(Collector):
    """All metrics of one server, in their own registry. Times are in seconds.

    With several API processes on one port, a scrape of any of them shows the sums over all, ended ones included.
    """

    def __init__(self, model: str = "") -> None:
        """`model` is the label of the metrics under vLLM's names."""
        self.model = model
        self.registry = CollectorRegistry()
        """All that a scrape shows."""
        self._shared = os.environ.get(SHARED_VARIABLE, "")
        """Directory of the metrics of all API processes; empty if there is only this one."""
        self._own = CollectorRegistry() if self._shared else self.registry
        """The metrics that this process counts."""
        self._vllm: list[Histogram | Counter] = []
        """The metrics among them that vLLM has, too."""
        self.registry.register(self)
        self.stats: SchedulerStats | None = None
        """State of the engine's queues and memory at the last scrape; None if the engine did not answer."""
        self.requests = self._counter(
            "requests",
            "HTTP requests for generation by outcome: ok, refused (4xx), unavailable (503), left, failed",
            "route",
            "outcome",
        )
        self.store_up = self._gauge(
            "store_up", "1 if the last read and write of the conversation store worked", over_all="livemin"
        )
        self.store_bytes = self._gauge(
            "store_bytes", "Tokens and items in the conversation store, in bytes", over_all="livemax"
        )
        self.store_operations = self._counter(
            "store_operations", "Operations on the conversation store by outcome: ok, refused, failed, left", "outcome"
        )
        self.store_seconds = self._histogram(
            "store_seconds", "Time that an operation on the conversation store waited and ran", SHORT
        )
        self.batch_lines = self._gauge(
            "batch_lines", "Lines of batches in progress by state: waiting, running", "state"
        )
        self.batch_lines_answered = self._counter(
            "batch_lines_answered", "Answered lines of batches by outcome: completed, failed", "outcome"
        )
        self._training_loss = self._gauge(
            "training_loss",
            "Loss of the last step of each of the most recently active tuning jobs",
            "job",
            over_all="mostrecent",
        )
        self._with_loss: dict[str, None] = {}
        """Jobs that have a gauge. The job whose last step is oldest is first."""
        self.ttft = self._histogram("ttft_seconds", "Time from a request's arrival to its first token", LONG)
        self.tbt = self._histogram("tbt_seconds", "Time between tokens of one choice", PACE)
        self.e2e = self._histogram("e2e_seconds", "Time from a request's arrival to its last token", LONG)
        self.queue = self._histogram("queue_seconds", "Time from a request's arrival to its first step", LONG)
        self.prefill = self._histogram("prefill_seconds", "Time from a choice's first step to its first token", LONG)
        self.decode = self._histogram("decode_seconds", "Time from a choice's first token to its last one", LONG)
        self.inference = self._histogram("inference_seconds", "Time from a choice's first step to its last token", LONG)
        self.mean_tbt = self._histogram("mean_tbt_seconds", "Mean time between the tokens of a choice", SHORT)
        self.choice_prompt = self._histogram("choice_prompt_tokens", "Prompt tokens of a choice", LENGTHS)
        self.choice_generated = self._histogram("choice_generated_tokens", "Generated tokens of a choice", LENGTHS)
        self.choice_limit = self._histogram("choice_max_tokens", "Limit of the tokens of a choice", LENGTHS)
        self.request_choices = self._histogram("request_choices", "Choices that a request asks for", COUNTS)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished choices")
        self.generated_tokens = self._counter("generated_tokens", "Tokens generated")
        self.step_seconds = self._histogram("step_seconds", "Time that the device spent on a step", SHORT)
        self.step_tokens = self._histogram("step_tokens", "Query tokens of a step", SIZES)
        self.under_way = self._counter("under_way_seconds", "Time in which steps were in flight")
        self.stage_seconds = self._counter(
            "stage_seconds", "Time in which each stage of the pipeline computed; one stage is the whole device", "stage"
        )
        self.finished = self._counter("choices_finished", "Finished choices by reason", "finished_reason")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self._server_contracts = self._counter(
            "server_contracts", "Contracts whose outcome no single engine knows, by outcome", "outcome", "term"
        )
        self._contracts_here = Counted[tuple[str, str]]()
        """Number of them that this process counted."""

    def steps(self, steps: Steps) -> None:
        """Count steps of the engine: the tokens and the seconds of each, and how long each stage computed."""
        for size, time in zip(steps.tokens, steps.seconds, strict=True):
            self.step_tokens.observe(size)
            self.step_seconds.observe(time)
        self.under_way.inc(steps.under_way)
        for stage, time in enumerate(steps.stages):
            self.stage_seconds.labels(str(stage)).inc(time)

    def choice(self, timings: Timings, prompt: int, limit: int) -> None:
        """Observe a finished choice: its times, the number of the prompt's tokens, and the limit of the answer's."""
        self.queue.observe(timings.queued)
        self.prefill.observe(timings.prefill)
        self.decode.observe(timings.decode)
        self.inference.observe(timings.prefill + timings.decode)
        if timings.tokens > 1:
            self.mean_tbt.observe(timings.decode / (timings.tokens - 1))
        self.choice_prompt.observe(prompt)
        self.choice_generated.observe(timings.tokens)
        self.choice_limit.observe(limit)

    def asked(self, choices: int, prompts: int) -> None:
        """Observe a finished request with this number of choices for each of its prompts."""
        for _ in range(prompts):
            self.request_choices.observe(choices)

    def loss_of(self, job: str, loss: float) -> None:
        """Set the loss of a tuning job's last step."""
        self._with_loss.pop(job, None)
        self._with_loss[job] = None
        self._training_loss.labels(job).set(loss)
        if len(self._with_loss) > MOST_LOSSES:
            oldest = next(iter(self._with_loss))
            del self._with_loss[oldest]
            self._training_loss.remove(oldest)

    def contract(self, outcome: str, term: str) -> None:
        """Count a contract whose outcome no single engine knows; `term` is the broken one, or empty."""
        self._contracts_here[outcome, term] += 1
        self._server_contracts.labels(outcome, term).inc()

    def outcome(self, route: str, outcome: str) -> None:
        """Count how one HTTP request ended."""
        self.requests.labels(route, outcome).inc()

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(f"holdfast_{name}", help, buckets=buckets, registry=self._own)
        self._vllm += [made] if name in VLLM else []
        return made

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        made = Counter(f"holdfast_{name}", help, labels, registry=self._own)
        self._vllm += [made] if name in VLLM else []
        return made

    def _gauge(
        self,
        name: str,
        help: str,
        *labels: str,
        over_all: Literal["livesum", "livemin", "livemax", "mostrecent"] = "livesum",
    ) -> Gauge:
        """A gauge. `over_all` is its value over several API processes."""
        return Gauge(f"holdfast_{name}", help, labels, registry=self._own, multiprocess_mode=over_all)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics, and all metrics that have vLLM names, to the registry."""
        counted = self._counted()
        engine = [*self._engine(), *self._contracts(counted)]
        yield from engine
        if self._shared:
            yield from counted
        for metric in [*engine, *counted]:
            if (name := VLLM.get(metric.name.removeprefix("holdfast_"))) is not None:
                yield renamed(metric, f"vllm:{name}", {"model_name": self.model, "engine": "0"})
        if (stats := self.stats) is not None:
            used = GaugeMetricFamily(
                "vllm:kv_cache_usage_perc", "Share of the KV cache that running requests own", labels=["model_name"]
            )
            used.add_metric([self.model], stats.blocks_used / max(1, stats.blocks_total))
            yield used

    def _counted(self) -> list[Metric]:
        """The metrics that API processes count, over all of them."""
        if self._shared:
            return [*multiprocess.MultiProcessCollector(None, self._shared).collect()]  # type: ignore[no-untyped-call]
        return [found for each in self._vllm for found in each.collect()]

    def _engine(self) -> Iterator[Metric]:
        """Yield the engine's metrics of the last scrape; without stats, only that the engine does not answer."""
        stats = self.stats
        yield GaugeMetricFamily("holdfast_engine_up", "1 if the engine answered this scrape", value=stats is not None)
        if stats is None:
            return
        for field, (kind, name, help) in STATS.items():
            family = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
            yield family(f"holdfast_{name}", help, value=getattr(stats, field))

    def _contracts(self, counted: list[Metric]) -> Iterator[Metric]:
        """Yield the contracts that engines and API processes count. The stats have those of this process alone."""
        stats = self.stats
        if stats is None:
            return
        family = CounterMetricFamily(
            "holdfast_contracts", "Requests with a contract, by what became of it", labels=["outcome", "term"]
        )
        others = Counted[tuple[str, str]]()
        if self._shared:
            others.subtract(self._contracts_here)
            everyones = [
                each for metric in counted if metric.name == "holdfast_server_contracts" for each in metric.samples
            ]
            for each in everyones:
                others[each.labels["outcome"], each.labels["term"]] += int(each.value)
        for field, (outcome, term) in CONTRACTS.items():
            family.add_metric((outcome, term), getattr(stats, field) + others[outcome, term])
        yield family


def renamed(metric: Metric, name: str, labels: dict[str, str]) -> Metric:
    """Return a copy of a metric with another name and more labels."""
    copy = Metric(name, metric.documentation, metric.type)
    for sample in metric.samples:
        if not sample.name.endswith("_created"):
            copy.add_sample(name + sample.name.removeprefix(metric.name), {**sample.labels, **labels}, sample.value)
    return copy
