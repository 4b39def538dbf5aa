"""Through the real scheduler every request gets greedily what the model's own `generate` gives it alone."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from holdfast.lm.types import RowResult
from tests import checkpoints
from tests.lm.padded.parity import Case, device_of, serve
from tests.long import long_unless
from tests.padded_checks import FAMILIES, tiny

SCHEDULERS = (
    "stall-free", "embedding", "shaping", "run-to-completion", "prefill-apart", "padded-batches", "orca",
    "request-level", "prefill-first",
)  # fmt: skip


@cache
def case_of(family: str) -> Case:
    """Requests for the tiny model of a family, made once."""
    torch.set_num_threads(1)
    return Case(device_of(tiny(family)))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


WAYS = [("stall-free", 1), *((name, 2 - number % 2) for number, name in enumerate(SCHEDULERS))]
"""Schedulers, each with a number of steps in flight."""


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("case", "scheduler", "steps_in_flight"),
    long_unless(
        # Each family has a third of the schedulers, and each scheduler a third of the families.
        lambda at: at % len(WAYS) == 0 or (at // len(WAYS) + at) % 3 == 0,
        [(family, *way) for family in FAMILIES for way in WAYS],
    ),
    indirect=["case"],
    scope="module",
)
def test_tokens_are_those_of_each_request_alone(case: Case, scheduler: str, steps_in_flight: int) -> None:
    if scheduler in ("shaping", "orca") and not case.device.abilities.shaping:
        pytest.skip("the model is refused there: its prompts cannot be computed beside decodes")
    tokens, watched = serve(case, scheduler=scheduler, steps_in_flight=steps_in_flight)
    assert tokens == case.expected
    seen = watched.happened
    assert ("embed" in seen) == (scheduler not in ("shaping", "orca", "run-to-completion", "request-level"))
    assert ("shape" in seen) == (scheduler in ("shaping", "orca"))
    assert ("chunk" in seen) == (scheduler == "stall-free" and case.device.abilities.chunks)


@pytest.mark.each_value("mpt-padded-batches")
@pytest.mark.parametrize("scheduler", ["stall-free", "embedding", "padded-batches"])
def test_tokens_are_equal_when_the_device_runs_out_of_memory_now_and_then(case: Case, scheduler: str) -> None:
    tokens, watched = serve(case, scheduler=scheduler, fails=0.05)
    assert tokens == case.expected
    assert any(result.part(RowResult).lost for result in watched.results)


@pytest.mark.each_value("mpt-10", "rwkv-10")
@pytest.mark.parametrize("host_rows", [0, 10])
def test_tokens_are_equal_when_rows_are_displaced_by_more_urgent_ones(case: Case, host_rows: int) -> None:
    tokens, watched = serve(case, rows_in_memory=2, host_rows=host_rows, headroom=0.0, seed=5)
    assert tokens == case.expected
    seen = watched.happened
    assert any(plan.preempted for plan in watched.plans)
    assert ("store" in seen) == ("load" in seen) == bool(host_rows)


@pytest.mark.each_value
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "qwen2"])
def test_tokens_are_equal_with_each_attention_of_transformers(family: str, attention: str) -> None:
    module = checkpoints.tiny(family)
    module.set_attn_implementation(attention)
    case = Case(device_of(module), requests=6)
    for scheduler in ("stall-free", "shaping"):
        assert serve(case, scheduler=scheduler)[0] == case.expected
    assert module.config._attn_implementation == attention
