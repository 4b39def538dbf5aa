"""The metrics: the totals of the engine's steps, and the names that vLLM's users know."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.cluster.fleet import GAUGES
from holdfast.engine.client.stream import Timings
from holdfast.engine.messages import Steps
from holdfast.engine.spawn import child_environment
from holdfast.lm.types import SchedulerStats
from holdfast.server.metrics import SHARED_VARIABLE, STATS, VLLM, Metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Return each sample by its name and its labels except vLLM's own, as in the exposition."""
    return {
        " ".join([sample.name, *(f"{k}={v}" for k, v in sample.labels.items() if k not in ("model_name", "engine"))]): (
            sample.value
        )
        for family in text_string_to_metric_families(generate_latest(metrics.registry).decode())
        for sample in family.samples
    }


def test_steps_are_counted_by_their_tokens_and_their_time() -> None:
    metrics = Metrics("tiny")
    metrics.steps(Steps([5, 1, 600], [0.02, 0.003, 0.2]))
    metrics.steps(Steps([1], [0.003]))
    found = samples(metrics)
    assert found["holdfast_step_tokens_count"] == found["holdfast_step_seconds_count"] == 4
    assert found["holdfast_step_tokens_sum"] == 607
    assert found["holdfast_step_seconds_sum"] == pytest.approx(0.226)
    assert found["holdfast_step_tokens_bucket le=1.0"] == 2
    assert found["holdfast_step_tokens_bucket le=512.0"] == 3
    assert found["holdfast_step_seconds_bucket le=0.005"] == 2


def test_the_idle_share_of_each_stage_follows_from_its_time_and_that_of_steps_in_flight() -> None:
    metrics = Metrics("tiny")
    metrics.steps(Steps([5], [0.02], 0.5, (0.4, 0.2)))
    metrics.steps(Steps([5], [0.02], 0.5, (0.4, 0.3)))
    found = samples(metrics)
    under_way = found["holdfast_under_way_seconds_total"]
    idle = [1 - found[f"holdfast_stage_seconds_total stage={stage}"] / under_way for stage in (0, 1)]
    assert idle == [pytest.approx(0.2), pytest.approx(0.5)]


def test_metrics_that_vllm_also_has_appear_under_its_names_with_the_same_value() -> None:
    metrics = Metrics("tiny")
    metrics.stats = SchedulerStats(
        waiting=3, running=2, blocks_total=100, blocks_used=25, blocks_cached=0, preemptions=1, prefix_queries=40,
        prefix_hits=16, tokens_computed=0,
    )  # fmt: skip
    metrics.ttft.observe(0.3)
    metrics.tbt.observe(0.02)
    metrics.steps(Steps([5], [0.02]))
    metrics.generated_tokens.inc(7)
    metrics.finished.labels("stop").inc()
    found = samples(metrics)
    assert found["vllm:time_to_first_token_seconds_sum"] == 0.3
    assert found["vllm:inter_token_latency_seconds_bucket le=0.025"] == 1
    assert found["vllm:iteration_tokens_total_sum"] == 5
    assert found["vllm:generation_tokens_total"] == 7
    assert found["vllm:request_success_total finished_reason=stop"] == 1
    assert (found["vllm:num_requests_running"], found["vllm:num_requests_waiting"]) == (2, 3)
    assert found["vllm:kv_cache_usage_perc"] == 0.25
    assert (found["vllm:prefix_cache_queries_total"], found["vllm:prefix_cache_hits_total"]) == (40, 16)
    names = {name.partition(" ")[0] for name in found}
    assert all(any(name.startswith(f"vllm:{theirs}") for name in names) for theirs in VLLM.values())


def test_each_finished_choice_is_observed_under_vllms_names_for_its_times_and_lengths() -> None:
    metrics = Metrics("tiny")
    timings = Timings(arrival=1.0, scheduled=1.5, first_token=2.75, finish=4.75, tokens=5)
    metrics.choice(timings, prompt=30, limit=200)
    found = {name: each for name, each in samples(metrics).items() if name.startswith("vllm:request_")}
    assert {name: each for name, each in found.items() if name.endswith("_sum") and each} == {
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_prefill_time_seconds_sum": 1.25,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:request_inference_time_seconds_sum": 3.25,
        "vllm:request_time_per_output_token_seconds_sum": 0.5,
        "vllm:request_prompt_tokens_sum": 30,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_params_max_tokens_sum": 200,
    }
    assert found["vllm:request_prompt_tokens_bucket le=20.0"] == 0
    assert found["vllm:request_prompt_tokens_bucket le=50.0"] == 1


REFUSING = """
import sys
from prometheus_client import generate_latest
from holdfast.lm.types import SchedulerStats
from holdfast.server.metrics import Metrics

metrics = Metrics("tiny")
for _ in range(int(sys.argv[1])):
    metrics.contract("refused", "")
sizes = dict.fromkeys(("waiting", "running", "blocks_total", "blocks_used", "blocks_cached", "preemptions"), 0)
known = dict(contracts_refused=int(sys.argv[1]), contracts_kept=5)
metrics.stats = SchedulerStats(**sizes, prefix_queries=0, prefix_hits=0, tokens_computed=0, **known)
print(generate_latest(metrics.registry).decode())
"""
"""A process that refuses some contracts, and is then scraped. Its stats have its refusals."""


@pytest.mark.parametrize(("shared", "refused"), [(True, [3.0, 5.0]), (False, [3.0, 2.0])])
def test_a_scrape_of_any_api_process_has_the_refused_contracts_of_all(
    shared: bool, refused: list[float], tmp_path: Path
) -> None:
    found = []
    for number in (3, 2):
        given = {SHARED_VARIABLE: str(tmp_path)} if shared else {}
        ran = subprocess.run(
            [sys.executable, "-c", REFUSING, str(number)],
            env=child_environment() | given,
            capture_output=True,
            check=True,
        )
        families = {each.name: each for each in text_string_to_metric_families(ran.stdout.decode())}
        counts = {each.labels["outcome"]: each.value for each in families["holdfast_contracts"].samples}
        assert counts["kept"] == 5
        found.append(counts["refused"])
    assert found == refused


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    metrics = Metrics("tiny")
    metrics.choice(Timings(1.0, 1.5, 2.0, 2.0, tokens=1), prompt=3, limit=1)
    found = samples(metrics)
    assert found["holdfast_mean_tbt_seconds_count"] == 0
    assert found["holdfast_decode_seconds_count"] == 1


def test_the_number_of_choices_is_observed_for_each_prompt_of_a_request() -> None:
    metrics = Metrics("tiny")
    metrics.asked(3, 2)
    found = samples(metrics)
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (2, 6)


def test_an_engine_that_does_not_answer_has_no_gauges_under_either_name() -> None:
    found = samples(Metrics("tiny"))
    assert found["holdfast_engine_up"] == 0
    assert not any("requests_running" in name or "kv_cache" in name for name in found)


def test_gauges_do_not_include_an_ended_replica() -> None:
    assert {name for name, (kind, *_) in STATS.items() if kind == "gauge"} == GAUGES


async def test_a_request_over_http_counts_its_choices_once_and_each_choice_with_its_limit(
    http: Callable[..., httpx.AsyncClient],
) -> None:
    wanted = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "n": 3, "max_tokens": 2}
    async with http() as api:
        await api.post("/v1/chat/completions", json=wanted)
        text = (await api.get("/metrics")).text
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert (found["vllm:request_params_n_count"], found["vllm:request_params_n_sum"]) == (1, 3)
    assert (found["vllm:request_params_max_tokens_count"], found["vllm:request_params_max_tokens_sum"]) == (3, 6)
    assert found["vllm:request_generation_tokens_sum"] == 6
