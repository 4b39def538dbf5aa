"""The whole engine over padded rows: memory that runs out, aborts, urgent requests, states of ended sequences."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.core.cost import PaddedCost
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build, pace_of
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.driver import Driver
from tests.engine.conftest import SMALL
from tests.engine.process.test_build import beside_a_stream
from tests.lm.padded.test_abilities import phi3
from tests.padded_checks import draw_prompts, generate_alone, write_tiny

BLOOM_ROW = 256 * 2 * 2 * 64 * 4
"""Bytes of a row of the tiny Bloom, rounded up: positions, layers, keys and values, numbers, bytes of each."""


@pytest.fixture(scope="module", params=["bloom", "mamba2"])
def family(request, tmp_path_factory):
    """A checkpoint directory and its module."""
    directory = tmp_path_factory.mktemp("models") / request.param
    return directory, write_tiny(directory, request.param)


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "bloom"
    return directory, write_tiny(directory, "bloom")


def make(directory, **options):
    return build(EngineConfig(model=str(directory), **{**SMALL, "executor": "padded", **options}))[0]


def request(name, prompt, max_tokens, **more):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(str(name), tuple(prompt), params, **more)


def serve(loop, requests, given=None):
    """Run to the end. Returns the tokens and the final reason of each request."""
    given = {} if given is None else given
    for each in requests:
        loop.add(each)
    while loop.has_work():
        take(loop, given)
    return given


def take(loop, given):
    for output in loop.step() or ():
        tokens, _ = given.setdefault(output.request_id, ([], None))
        given[output.request_id] = [*tokens, *output.tokens], output.finish_reason


def check_empty(loop):
    stats = loop.stats()
    pool = loop.planner.pool
    assert (stats.waiting, stats.running) == (0, 0)
    if loop.planner.pool.to_completion:  # rows of the last batch leave when the next one begins
        assert not pool.members
        return
    assert stats.blocks_used == 0
    assert pool.kept.device_bytes + pool.in_use <= pool.memory
    assert pool.kept.host_bytes + pool.host_used <= pool.shape.host_memory
    assert not pool._leaving and not pool.members and not pool.ahead and not pool.ended


@pytest.mark.each_value
@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("scheduler", ["stall-free", "embedding", "run-to-completion"])
def test_if_memory_runs_out_the_batch_shrinks_and_no_request_fails(bloom, monkeypatch, scheduler, steps_in_flight):
    directory, module = bloom
    loop = make(
        directory,
        scheduler=scheduler,
        cache_gb=8.5 * BLOOM_ROW / 1e9,
        steps_in_flight=steps_in_flight,
        prefill_ahead=2 if scheduler == "embedding" else None,
    )
    failed, inner = [], Driver.forward

    def tight(self, inputs, state):
        if inputs.mask.numel() > 5 * 45:
            failed.append(inputs.mask.shape)
            raise torch.OutOfMemoryError("the device is full")
        return inner(self, inputs, state)

    monkeypatch.setattr(Driver, "forward", tight)
    prompts = draw_prompts(*([20] * 10))
    given = serve(loop, [request(n, prompt, 20) for n, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert tuple(given[str(number)][0]) == generate_alone(module, prompt, 20)
    assert failed and loop.stats().shrinks >= 1
    assert loop.planner.pool.memory < loop.planner.pool.shape.memory
    check_empty(loop)
    loop.close()


def test_an_urgent_request_takes_a_row_at_once_and_everybody_gets_their_own_tokens(family):
    directory, module = family
    prompts = draw_prompts(30, 41, 12)
    loop = make(directory, max_sequences=2, host_cache_gb=0.01)
    given = {}
    for number in (0, 1):
        loop.add(request(number, prompts[number], 40, priority=1))
    for _ in range(8):
        take(loop, given)
    before = len(given["0"][0])
    loop.add(request(2, prompts[2], 6, priority=0))
    while "2" not in given:
        take(loop, given)
    assert len(given["0"][0]) <= before + 4
    serve(loop, [], given)
    for number, length in ((0, 40), (1, 40), (2, 6)):
        assert tuple(given[str(number)][0]) == generate_alone(module, prompts[number], length)
    stats = loop.stats()
    assert stats.preemptions == stats.suspensions == 1
    check_empty(loop)
    loop.close()


@pytest.mark.each_value
@pytest.mark.parametrize("scheduler", ["stall-free", "embedding", "prefill-apart", "padded-batches"])
def test_conversations_with_aborts_in_little_memory_get_the_tokens_of_the_model_alone(family, scheduler):
    directory, module = family
    choose = random.Random(5)
    row = BLOOM_ROW if "bloom" in directory.name else 18_000
    loop = make(
        directory,
        scheduler=scheduler,
        max_sequences=3,
        cache_gb=4.2 * row / 1e9,
        host_cache_gb=3 * row / 1e9,
        prefill_ahead=1 if scheduler in ("embedding", "prefill-apart") else None,
        steps_in_flight=choose.choice((1, 2, 3)),
    )
    talks = [list(prompt) for prompt in draw_prompts(*(choose.randint(3, 30) for _ in range(7)))]
    for turn in range(4):
        requests = [request(f"{turn}-{n}", talk, 5) for n, talk in enumerate(talks)]
        leaving = {each.id for each in requests if choose.random() < 0.25}
        given = {}
        for each in requests:
            loop.add(each)
            if choose.random() < 0.5:
                take(loop, given)
        for name in leaving:
            loop.abort(name)
        serve(loop, [], given)
        for each, talk in zip(requests, talks, strict=True):
            if each.id in leaving:
                continue
            tokens = given[each.id][0]
            assert tuple(tokens) == generate_alone(module, each.prompt, 5)
            talk += [*tokens, *draw_prompts(choose.randint(1, 4), seed=choose.randrange(99))[0]]
        check_empty(loop)
    # Rows that stay until their batch ends have continued by then, so no state of them is of use.
    assert (loop.stats().prefix_hits > 0) != loop.planner.pool.to_completion
    loop.close()


def test_the_state_of_one_tenant_serves_no_other(bloom):
    directory, module = bloom
    loop = make(directory)
    (prompt,) = draw_prompts(40)
    first = request(0, prompt, 4)
    identity = replace(first.identity, tenant="other")
    assert serve(loop, [first])["0"][0] == list(generate_alone(module, prompt, 4))
    for number, own, hits in ((1, identity, 0), (2, first.identity, 32)):
        serve(loop, [replace(first, id=str(number), identity=own)])
        assert loop.stats().prefix_hits == hits
    loop.close()


def test_without_prefix_sharing_nothing_is_kept(bloom):
    loop = make(bloom[0], prefix_sharing=False)
    (prompt,) = draw_prompts(40)
    for number in range(2):
        serve(loop, [request(number, prompt, 4)])
    assert loop.stats().prefix_hits == loop.stats().blocks_cached == 0
    loop.close()


def test_a_loop_closes_with_steps_in_flight(bloom):
    loop = make(bloom[0], steps_in_flight=3)
    loop.add(request(0, draw_prompts(60)[0], 50))
    for _ in range(4):
        loop.step()
    loop.close()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Profiles are stored in the test's own directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def with_target(directory, **options):
    defaults = {**SMALL, "executor": "padded", "token_budget": None, "steps_in_flight": 1, "tbt_target": 60_000.0}
    return EngineConfig(model=str(directory), **{**defaults, **options})


def start(config, *, measure=False):
    """An engine, its EngineInfo, its profile, and whether it took the device's pace."""
    stages = []
    loop, info = build(config, on_progress=stages.append, measure=measure)
    return loop, info, CostProfile.load(Path(info.profile_path)), [each for each in stages if "pace" in each]


def test_a_tbt_target_cuts_prompts_while_a_stream_runs_on_rows(bloom, own_cache):
    assert beside_a_stream(with_target(bloom[0])) == 61
    assert beside_a_stream(with_target(bloom[0], tbt_target=0.001)) == 17, "a tile beside a decode"
    assert beside_a_stream(with_target(bloom[0], tbt_target=0.001, token_budget="auto")) == 8 + 16


def test_no_stream_waits_for_a_long_prompt_and_all_get_the_tokens_of_the_model_alone(bloom, own_cache):
    directory, module = bloom
    loop = build(with_target(directory, tbt_target=0.001))[0]
    stream, prompt = draw_prompts(6, 90)
    given, taken = {}, []
    loop.add(request(0, stream, 30))
    while "0" not in given:
        take(loop, given)
    loop.add(request(1, prompt, 3))
    while "1" not in given:
        before, computed = len(given["0"][0]), loop.stats().tokens_computed
        take(loop, given)
        taken.append((len(given["0"][0]) - before, loop.stats().tokens_computed - computed))
    assert len(taken) >= 6 and all(tokens == 1 and computed <= 17 for tokens, computed in taken)
    serve(loop, [], given)
    assert tuple(given["0"][0]) == generate_alone(module, stream, 30)
    assert tuple(given["1"][0]) == generate_alone(module, prompt, 3)
    loop.close()


def test_an_engine_whose_cache_cannot_be_written_starts_and_names_no_profile(bloom, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file in place of the directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    loop, info = build(with_target(bloom[0], tbt_target=50.0))
    loop.close()
    assert info.profile_path == ""


def test_a_profile_of_rows_is_estimated_corrected_in_service_and_used_by_the_next_start(bloom, own_cache):
    directory, _ = bloom
    loop, _, estimate, stages = start(with_target(directory, tbt_target=50.0))
    assert stages == ["estimating the device's pace"] and not estimate.measured
    assert isinstance(estimate.cost, PaddedCost) and estimate.rows == loop.planner.pool.shape
    stream, *prompts = draw_prompts(5, *([70] * 6))
    serve(loop, [request(0, stream, 40), *(request(n, each, 2) for n, each in enumerate(prompts, 1))])
    policy = loop.planner._policy
    loop.close()
    loop, _, corrected, stages = start(with_target(directory, tbt_target=50.0))
    loop.close()
    assert not stages and corrected.cost == policy.corrected != estimate.cost
    loop, paged, _, _ = start(replace(with_target(directory, tbt_target=50.0), model="holdfast-tiny", executor="paged"))
    loop.close()
    loop, rows, _, _ = start(replace(with_target(directory, tbt_target=50.0), model="holdfast-tiny"))
    loop.close()
    assert paged.profile_path != rows.profile_path, "each executor has its own"
    assert pace_of(EngineConfig(), "cuda", "H200", "padded") == "H200, padded rows"


@pytest.mark.always("mamba")
@pytest.mark.parametrize("name", ["bloom", "mamba", "rwkv"])
def test_a_profile_measured_in_full_leaves_no_state_behind(tmp_path, own_cache, monkeypatch, name):
    monkeypatch.setattr("holdfast.engine.process.in_service.SECONDS", 0.3)
    directory = tmp_path / name
    module = write_tiny(directory, name)
    loop, info, profile, stages = start(with_target(directory), measure=True)
    assert stages == ["measuring the device's pace, which takes a minute or two"] and profile.measured
    assert all(seconds > 0 for seconds in (*profile.cost.linear_seconds, *profile.cost.decode_seconds))
    whole = "the TBT target does not bind prompts, which the model cannot compute in chunks"
    assert (whole in info.executor_reason) != profile.rows.abilities.chunks
    prompts = draw_prompts(9, 30, 4)
    given = serve(loop, [request(n, prompt, 5) for n, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert tuple(given[str(number)][0]) == generate_alone(module, prompt, 5)
    loop.close()


def test_sequences_too_short_to_be_measured_are_refused_with_the_limit(bloom, own_cache):
    with pytest.raises(ValueError, match="max_model_len is 8; to measure decodes of up to 8 rows"):
        build(with_target(bloom[0], max_model_len=8))


def test_sequences_of_longrope_go_on_past_the_change_of_frequencies_with_the_tokens_of_generate(tmp_path):
    module = phi3()
    module.save_pretrained(tmp_path)
    prompts = draw_prompts(58, 20, 90)
    loop, info = build(EngineConfig(model=str(tmp_path), **{**SMALL, "executor": "padded"}))
    assert info.max_model_len == 64 and "sequences end at 64 tokens" in info.executor_reason
    assert serve(loop, [request(0, prompts[1], 20)])["0"][0] == list(generate_alone(module, prompts[1], 20))
    loop.close()
    loop, info = build(EngineConfig(model=str(tmp_path), **{**SMALL, "executor": "padded", "max_model_len": 200}))
    assert info.max_model_len == 200 and "computed again from its first token" in info.executor_reason
    given = serve(loop, [request(n, prompt, 16) for n, prompt in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert tuple(given[str(number)][0]) == generate_alone(module, prompt, 16)
    loop.close()
