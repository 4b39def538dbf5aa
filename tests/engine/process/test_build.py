"""Building an engine: it measures, allocates and reports, and its loop serves requests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.types import FinishReason, SamplingParams
from holdfast.engine.process.build import MEASURING, build, build_engine, library_of, pace_of
from holdfast.engine.process.parts.moves import MoveHandler
from holdfast.engine.profiles import CostProfile
from tests.built import without_contracts
from tests.checkpoints import NEMOTRON_3, make
from tests.scheduling import create_requests


def run_to_the_end(loop):
    """Tokens of each request."""
    tokens = {}
    while loop.has_work():
        for output in loop.step() or ():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return tokens


@pytest.mark.parametrize(
    ("family", "differences", "reason"),
    [
        ("Gemma4Text", {}, "a model whose layers differ in heads"),
        ("NemotronH", NEMOTRON_3, "a model with layers that are experts alone"),
    ],
)
def test_a_model_whose_layers_tuning_does_not_know_is_not_tuned(small, tmp_path, family, differences, reason):
    make(tmp_path, family, **differences)
    with pytest.raises(ValueError, match=f"{reason} cannot be tuned; leave tuning out"):
        build_engine(small(model=str(tmp_path), tuning=True)).loop.close()


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_chat_request_displaces_a_batch_request_and_both_get_the_tokens_they_get_alone(
    small, monkeypatch, steps_in_flight
):
    config = small(max_sequences=2, steps_in_flight=steps_in_flight)
    first, second, chat = (
        replace(request, priority=priority, arrival=float(number))
        for number, (request, priority) in enumerate(
            zip(
                create_requests(*(tuple(range(n, n + 21)) for n in (0, 50, 100)), temperature=0.0, max_tokens=30),
                (1, 1, 0),
                strict=True,
            )
        )
    )
    alone = {}
    for request in (first, second, chat):
        loop, _ = build(config)
        loop.add(request)
        alone |= run_to_the_end(loop)

    loop, _ = build(config)
    plans, submit = [], loop.executor.submit
    monkeypatch.setattr(loop.executor, "submit", lambda plan: (plans.append(plan), submit(plan)))
    loop.add(first)
    loop.add(second)
    given = {}
    for _ in range(12):
        for output in loop.step() or ():
            given.setdefault(output.request_id, []).extend(output.tokens)
    before = len(plans)
    loop.add(chat)
    for name, tokens in run_to_the_end(loop).items():
        given.setdefault(name, []).extend(tokens)
    assert plans[before].preempted == (second.id,)
    assert chat.id in {segment.sequence_id for segment in plans[before].segments}
    resumed = next(segment for plan in plans[before:] for segment in plan.segments if segment.sequence_id == second.id)
    assert resumed.start == 32, "two full blocks stayed where they were; only the third is computed again"
    assert given == alone
    assert loop.stats().preemptions == 1


def test_build_gives_the_measured_memory_to_the_cache(small, checkpoint):
    stages = []
    loop, info = build(small(), on_progress=stages.append)
    assert stages == ["loading random-llama", "measuring memory"]
    assert info.model == "random-llama" and info.precision == "float32"
    assert (info.block_size, info.token_budget, info.max_model_len, info.vocab_size) == (16, 64, 4096, 384)
    assert [stage.name for stage in info.stages] == ["weights", "memory"]
    assert info.num_blocks == loop.stats().blocks_total == info.memory.cache // info.memory.block > 0
    (request,) = create_requests((5, 6, 7), temperature=0.0, max_tokens=3)
    loop.add(request)
    outputs = []
    while loop.has_work():
        outputs += loop.step() or ()
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]


def test_blocks_swapped_out_to_the_host_are_found_again(small):
    stages = []
    block = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head size, bytes
    sizes = {"cache_gb": 12 * block / 1e9, "host_cache_gb": 100 * block / 1e9}
    loop, info = build(small(chunk_size=16, **sizes), on_progress=stages.append)
    assert stages[-1] == "estimating the device's pace"
    assert (info.num_blocks, info.num_host_blocks) == (12, 100)
    answers, from_host = [], {}
    for turn in range(2):
        for request in create_requests(*(tuple(range(n, n + 100)) for n in range(6)), temperature=0.0, max_tokens=3):
            loop.add(request)
            tokens = []
            while loop.has_work():
                for output in loop.step() or ():
                    tokens += output.tokens
                    from_host[turn, output.request_id] = output.cached_by_tier[0]
            answers.append(tokens)
        assert turn or loop.stats().blocks_swapped_out >= 24
    assert answers[:6] == answers[6:]
    assert loop.stats().blocks_swapped_in >= 24
    stats = loop.stats()
    assert stats.tokens_recovered == stats.tokens_dropped == 0
    assert stats.prefix_hits_on_host == sum(from_host.values()) == 16 * stats.blocks_swapped_in


def test_a_cpu_engine_has_no_host_tier_by_default(small):
    assert build(small())[1].num_host_blocks == 0


def test_an_engine_that_moves_state_has_a_host_tier_on_a_cpu_too_unless_it_is_off(small):
    engine = build_engine(small(chunk_host="127.0.0.1"))
    assert engine.info.num_host_blocks > 1000
    assert engine.info.chunk_address == engine.handler(MoveHandler).address and not engine.info.chunk_reason
    with pytest.raises(ValueError, match=r"chunk_host is 127.0.0.1:\d+: Address already in use"):
        build_engine(small(chunk_host=engine.info.chunk_address))
    engine.close()
    engine = build_engine(small(chunk_host="127.0.0.1", host_cache_gb=0))
    assert engine.info.chunk_address == "" and "no host tier" in engine.info.chunk_reason
    engine.loop.close()


def test_fp8_weights_take_less_memory_and_have_their_own_profile(small):
    (_, plain), (loop, quantized) = (
        build(small(max_model_len=64, quantization=kind), measure=True) for kind in ("none", "fp8")
    )
    assert quantized.memory.weights < plain.memory.weights
    assert (plain.precision, quantized.precision) == ("float32", "float32, fp8 weights")
    assert quantized.profile_path != plain.profile_path
    kept = [CostProfile.load(Path(info.profile_path)) for info in (plain, quantized)]
    assert [profile.quantization for profile in kept] == ["none", "fp8"]
    (request,) = create_requests(tuple(range(60)), max_tokens=4)
    loop.add(request)
    tokens = []
    while loop.has_work():
        tokens += [token for output in loop.step() or () for token in output.tokens]
    assert len(tokens) == 4


def first_step(config):
    """Tokens of the first step over a prompt of 60."""
    loop, _ = build(config)
    (request,) = create_requests(tuple(range(60)), max_tokens=2)
    loop.add(request)
    loop.step()
    return loop.stats().tokens_computed


def beside_a_stream(config):
    """Tokens of a step over a stream and a prompt of 60."""
    loop, _ = build(config)
    stream, prompt = create_requests((1,), tuple(range(60)), max_tokens=9)
    loop.add(stream)
    loop.step()
    before = loop.stats().tokens_computed
    loop.add(prompt)
    loop.step()
    return loop.stats().tokens_computed - before


def test_a_tbt_target_sets_the_budget_of_each_step(small):
    target = {"token_budget": None, "max_model_len": 64, "steps_in_flight": 1}
    assert beside_a_stream(small(**target, tbt_target=60_000.0)) == 61
    assert beside_a_stream(small(**target, tbt_target=0.001)) == 16


def test_an_automatic_budget_is_computed_once_from_the_target(small):
    options = {"token_budget": "auto", "max_model_len": 64, "steps_in_flight": 1}
    assert beside_a_stream(small(**options, tbt_target=60_000.0)) == 61
    assert beside_a_stream(small(**options, tbt_target=0.001)) == 16


def test_orca_steps_hold_the_longest_prompt_of_every_row_unless_a_budget_is_given(small):
    def most_tokens(**options):
        return build(small(scheduler="orca", max_model_len=64, **options))[1].token_budget

    assert most_tokens(token_budget=None, max_sequences=16) == 64 * 16
    assert most_tokens(token_budget=16, max_sequences=16) == 64 + 16


def test_steps_of_a_cpu_that_computes_token_by_token_are_short_unless_a_budget_is_given(small, tmp_path):
    make(tmp_path, "Mixtral")
    for deterministic, budget in ((True, 64), (False, 512)):
        config = small(model=str(tmp_path), deterministic=deterministic, token_budget=None)
        loop, info = build(config)
        assert info.token_budget == budget
        loop.close()


def test_a_profile_is_measured_once_and_stored_for_the_next_engine(small, caplog):
    def start(**options):
        stages = []
        _, info = build(small(token_budget=None, max_model_len=64), on_progress=stages.append, **options)
        return info.profile_path, MEASURING in stages

    assert start() == ("", False), "without a target nobody needs one"
    path, measured = start(measure=True)
    assert measured
    profile = CostProfile.load(Path(path))
    assert (profile.cost.model, profile.dtype, profile.max_model_len, profile.tile) == (
        "random-llama",
        "float32",
        64,
        16,
    )
    assert all(seconds > 0 for seconds in profile.cost.linear_seconds)
    stages = []
    loop, info = build(small(token_budget=None, tbt_target=50, max_model_len=64), on_progress=stages.append)
    assert info.profile_path == path and not any("pace" in stage for stage in stages)
    loop.close()
    assert CostProfile.load(Path(path)) == profile, "what was measured in full stays as it is"
    Path(path).write_text("{}")
    loop, info = build(small(token_budget=None, tbt_target=50, max_model_len=64), on_progress=stages.append)
    loop.close()
    assert "estimating the device's pace" in stages and info.profile_path != path
    assert f"{path} is not a profile" in caplog.text


def test_an_engine_with_more_sequences_than_the_stored_profile_measured_gets_its_own(small):
    """A profile of one sequence says that a batch of 16 decodes as fast as one."""
    stages = []

    def start(most):
        stages.clear()
        options = {"tbt_target": 50, "max_model_len": 64, "max_sequences": most, "token_budget": None}
        loop, info = build(small(**options), on_progress=stages.append)
        loop.close()
        return info.profile_path, any("pace" in stage for stage in stages)

    few, estimated = start(1)
    assert estimated and CostProfile.load(Path(few)).cost.decode_rows == (1,)
    many, estimated = start(16)
    assert estimated and many != few
    profile = CostProfile.load(Path(many))
    assert profile.cost.decode_rows[-1] == 16 and profile.extent == (16, 512, 64)
    assert start(5) == (many, False), "the larger one prices its steps, too"
    assert start(1) == (few, False)


def test_a_start_with_a_target_estimates_the_pace_and_leaves_what_it_learned_to_the_next(small):
    options = {"token_budget": None, "max_model_len": 256}
    stages = []
    loop, info = build(small(tbt_target=50.0, **options), on_progress=stages.append)
    path = Path(info.profile_path)
    estimate = CostProfile.load(path)
    assert "estimating the device's pace" in stages and not estimate.measured
    for request in create_requests(*[tuple(range(100))] * 8, max_tokens=2):
        loop.add(request)
    while loop.has_work():
        loop.step()
    loop.close()
    corrected = CostProfile.load(path)
    assert corrected.cost.deviation != estimate.cost.deviation
    assert corrected.cost == without_contracts(loop.planner._policy).corrected
    assert replace(corrected, cost=estimate.cost) == estimate
    stages = []
    build(small(tbt_target=50.0, **options), on_progress=stages.append)
    assert not any("pace" in stage for stage in stages)
    _, info = build(small(tbt_target=50.0, **(options | {"token_budget": "auto"})), on_progress=stages.append)
    assert MEASURING in stages and CostProfile.load(Path(info.profile_path)).measured, (
        "a fixed budget is never corrected, so it takes a full measurement"
    )


def test_a_corrected_profile_that_cannot_be_stored_is_told_in_one_line(small, caplog):
    loop, info = build(small(token_budget=None, tbt_target=50.0, max_model_len=64))
    path = Path(info.profile_path)
    path.unlink()
    path.mkdir()
    (path / "file").touch()
    loop.close()
    (record,) = caplog.records
    assert str(path) in record.getMessage()


def test_gpu_profiles_differ_by_attention_backend_and_graphs(small):
    options = ({}, {"attention_backend": "torch"}, {"cuda_graphs": False})
    assert [pace_of(small(**each), "cuda", "H200") for each in options] == ["H200", "H200, torch", "H200, no graphs"]
    assert pace_of(small(attention_backend="holdfast"), "cuda", "H200") == "H200"


def test_cpu_profiles_differ_by_what_computes_whole_steps(small):
    options = ({}, {"attention_backend": "torch"}, {"cuda_graphs": False})
    assert [pace_of(small(**each), "cpu", "CPU") for each in options] == ["CPU", "CPU, torch", "CPU"]
    assert library_of("cpu", "paged", present=True) != library_of("cpu", "paged", present=False) != ""
    assert {library_of(*where, present=True) for where in (("cuda", "paged"), ("cpu", "padded"))} == {""}


def test_a_profile_is_made_anew_once_the_library_in_c_is_gone(small, monkeypatch):
    paths = set()
    for present in (object(), None):
        monkeypatch.setattr("holdfast.engine.process.build.library", lambda present=present: present)
        paths.add(build(small(max_model_len=64), measure=True)[1].profile_path)
    assert len(paths) == 2


def test_an_fp8_cache_holds_four_times_the_blocks_and_has_its_own_profile(small):
    (_, plain), (loop, fp8) = (
        build(small(max_model_len=64, kv_cache_dtype=kind), measure=True) for kind in ("auto", "fp8")
    )
    assert (plain.precision, fp8.precision) == ("float32", "float32, fp8 cache")
    assert fp8.num_blocks // 4 == plain.num_blocks
    profiles = [CostProfile.load(Path(info.profile_path)) for info in (plain, fp8)]
    assert profiles[1].token_bytes * 4 == profiles[0].token_bytes
    assert [profile.kv_cache_dtype for profile in profiles] == ["auto", "fp8"]
    assert all(seconds > 0 for row in profiles[1].cost.attention_seconds for seconds in row)
    requests = [create_requests(tuple(range(n, n + 30)), temperature=0.0, max_tokens=4)[0] for n in (0, 0)]
    answers = []
    for request in requests:  # the second finds what the first has left
        loop.add(request)
        answers.append([])
        while loop.has_work():
            answers[-1] += [token for output in loop.step() or () for token in output.tokens]
    assert answers[0] == answers[1]
    assert loop.stats().prefix_hits == 16


def test_the_configured_scheduler_runs(small):
    assert first_step(small(max_model_len=64, steps_in_flight=1, token_budget=32)) == 32
    assert first_step(small(max_model_len=64, steps_in_flight=1, token_budget=32, scheduler="orca")) == 60


def test_stop_tokens_of_a_request_end_it(small):
    loop, _ = build(small())
    (free,) = create_requests((5, 6, 7), temperature=0.0, max_tokens=8, ignore_eos=True)
    loop.add(free)
    tokens = []
    while loop.has_work():
        tokens += [token for output in loop.step() or () for token in output.tokens]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(tokens[4],))
    (stopped,) = [type(free)(id="stopped", prompt=free.prompt, params=params)]
    loop.add(stopped)
    outputs = []
    while loop.has_work():
        outputs += loop.step() or ()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert [token for output in outputs for token in output.tokens] == tokens[: tokens.index(tokens[4]) + 1]


WITHOUT_TRANSFORMERS = """\
import sys
sys.modules["transformers"] = None
from holdfast.lm.config import EngineConfig
from holdfast.engine.process.build import build
small = dict(cache_gb=0.01, threads=1, device="cpu")
loop, info = build(EngineConfig(**small))
loop.close()
assert not [name for name in sys.modules if name.startswith("transformers.")]
try:
    build(EngineConfig(executor="padded", **small))
except ValueError as error:
    print(info.executor, error)
"""


def test_the_builtin_model_needs_no_transformers_and_padded_rows_say_that_they_do():
    command = [sys.executable, "-c", WITHOUT_TRANSFORMERS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "paged padded rows need Transformers: pip install 'holdfast[hf]'\n"
