"""The engine process without its process: how messages and steps take turns, and what is built from a configuration."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.config import EngineConfig
from holdfast.core.types import FinishReason, SamplingParams
from holdfast.engine import process
from holdfast.engine.__main__ import one_line
from holdfast.engine.build import build, pace_of, retention_cost, run, serve
from holdfast.engine.messages import Abort, Ask, Outputs, Refused, Shutdown, Start, Stats, Submit
from holdfast.engine.profiles import CostProfile
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.models.loader import load
from holdfast.loop.loop import Loop
from tests.scheduling import FakeDevice, create_requests, create_scheduler, run_alone


class Script:
    """A client that says what is scripted: all that stands before a `None` has arrived before the next step."""

    def __init__(self, *messages):
        self.messages = deque(messages)
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def receive(self):
        while self.messages[0] is None:
            self.messages.popleft()
        return self.messages.popleft()

    def waiting(self):
        while self.messages:
            message = self.messages.popleft()
            if message is None:
                return
            yield message


class ShutdownWhenIdle(Script):
    """Ends the engine where it would wait for a message."""

    def receive(self):
        return super().receive() if self.messages else Shutdown()


def engine(*requests, steps_in_flight=2):
    device = FakeDevice(64, 4)
    for request in requests:
        device.expect(request)
    return Loop(create_scheduler(), device, steps_in_flight, clock=lambda: 0.0)


def tokens_of(sent, request_id):
    outputs = [output for message in sent if isinstance(message, Outputs) for output in message.outputs]
    return tuple(token for output in outputs if output.request_id == request_id for token in output.tokens)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_requests_are_served_and_each_step_is_one_message(steps_in_flight):
    requests = create_requests(5, 9, max_tokens=6)
    parent = ShutdownWhenIdle(*map(Submit, requests))
    serve(engine(*requests, steps_in_flight=steps_in_flight), parent)
    assert len(parent.sent) == 6
    assert all(len(message.outputs) == 2 for message in parent.sent)
    for request in requests:
        assert tokens_of(parent.sent, request.id) == run_alone(request)[0]


def test_what_arrives_while_steps_run_is_taken_in_before_the_next():
    first, second = create_requests(5, 9, max_tokens=4)
    parent = ShutdownWhenIdle(Submit(first), None, Submit(second), Ask(1))
    serve(engine(first, second), parent)
    stats = next(message for message in parent.sent if isinstance(message, Stats))
    assert (stats.number, stats.stats.waiting, stats.stats.running) == (1, 1, 1)
    assert tokens_of(parent.sent, second.id) == run_alone(second)[0]


def test_an_abort_frees_the_blocks_before_the_next_step():
    (request,) = create_requests(9, max_tokens=50)
    parent = ShutdownWhenIdle(Submit(request), None, Ask(1), Abort(request.id), Ask(2))
    serve(engine(request), parent)
    before, after = (message.stats for message in parent.sent if isinstance(message, Stats))
    assert before.blocks_used > 0
    assert (after.running, after.blocks_used) == (0, 0)


def test_a_request_that_can_never_run_is_refused_and_others_go_on():
    good, endless = create_requests(5, 500)
    parent = ShutdownWhenIdle(Submit(endless), Submit(good), Submit(good))
    serve(engine(good), parent)
    refusals = [message for message in parent.sent if isinstance(message, Refused)]
    assert [refusal.request_id for refusal in refusals] == [endless.id, good.id]
    assert "500 tokens" in refusals[0].reason and "already being served" in refusals[1].reason
    assert tokens_of(parent.sent, good.id) == run_alone(good)[0]


def test_shutdown_ends_it_whatever_runs():
    (request,) = create_requests(5, max_tokens=50)
    parent = Script(Submit(request), None, Shutdown())
    serve(engine(request), parent)
    assert len(parent.sent) == 1


def test_what_a_step_raises_goes_through():
    class Broken(FakeDevice):
        def collect(self):
            raise RuntimeError("the device fell off the bus")

    (request,) = create_requests(5)
    loop = Loop(create_scheduler(), Broken(64, 4), 2, clock=lambda: 0.0)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        serve(loop, Script(Submit(request)))


@pytest.fixture
def collector():
    """The garbage collector, left as it was."""
    yield gc
    gc.enable()
    gc.unfreeze()


def test_garbage_is_collected_between_steps_alone(monkeypatch, collector):
    (request,) = create_requests(5)
    seen = []

    class Watching(FakeDevice):
        def submit(self, plan):
            seen.append((collector.isenabled(), collector.get_freeze_count() > 0))
            super().submit(plan)

    device = Watching(64, 4)
    device.expect(request)
    loop = Loop(create_scheduler(), device, 2, clock=lambda: 0.0)
    monkeypatch.setattr(process, "build", lambda config, **options: (loop, None))
    run(Start(EngineConfig(), 0.0), ShutdownWhenIdle(Submit(request)))
    assert seen == [(False, True)] * 4


def run_to_the_end(loop):
    """What each request was given."""
    tokens = {}
    while loop.has_work():
        for output in loop.step():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return tokens


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_chat_request_takes_a_batch_requests_row_and_both_get_the_tokens_they_get_alone(
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
    plans, submit = [], loop._executor.submit
    monkeypatch.setattr(loop._executor, "submit", lambda plan: (plans.append(plan), submit(plan)))
    loop.add(first)
    loop.add(second)
    given = {}
    for _ in range(12):
        for output in loop.step():
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


def test_build_divides_the_memory_that_the_device_has(small, checkpoint):
    stages = []
    loop, info = build(small(), on_progress=stages.append)
    assert stages == ["loading random-llama", "measuring memory"]
    assert info.model == "random-llama" and info.precision == "float32"
    assert (info.block_size, info.token_budget, info.max_model_len, info.vocab_size) == (16, 64, 4096, 384)
    assert info.num_blocks == loop.stats().blocks_total == info.memory.cache // info.memory.block > 0
    (request,) = create_requests((5, 6, 7), temperature=0.0, max_tokens=3)
    loop.add(request)
    outputs = []
    while loop.has_work():
        outputs += loop.step()
    assert [output.finish_reason for output in outputs] == [None, None, FinishReason.LENGTH]


def test_a_host_tier_holds_what_the_device_gives_up(small):
    stages = []
    block = 2 * 2 * 16 * 2 * 16 * 4  # layers, keys and values, tokens, heads, head size, bytes
    sizes = {"cache_gb": 12 * block / 1e9, "host_cache_gb": 100 * block / 1e9}
    loop, info = build(small(chunk_size=16, **sizes), on_progress=stages.append)
    assert stages[-1] == "measuring what recomputation costs"
    assert (info.num_blocks, info.num_host_blocks) == (12, 100)
    answers = []
    for turn in range(2):
        for request in create_requests(*(tuple(range(n, n + 100)) for n in range(6)), temperature=0.0, max_tokens=3):
            loop.add(request)
            tokens = []
            while loop.has_work():
                tokens += [token for output in loop.step() for token in output.tokens]
            answers.append(tokens)
        assert turn or loop.stats().blocks_swapped_out >= 24
    assert answers[:6] == answers[6:]
    assert loop.stats().blocks_swapped_in >= 24
    stats = loop.stats()
    assert stats.tokens_recovered == stats.tokens_dropped == 0
    assert stats.prefix_hits_on_host == 16 * stats.blocks_swapped_in


def test_by_default_on_a_cpu_there_is_no_host_tier(small):
    assert build(small())[1].num_host_blocks == 0


def test_what_is_not_measured_is_counted_from_the_models_sizes(small):
    executor = PagedExecutor(load(small().model, device="cpu"), small())
    weights = executor.model.spec.weight_bytes // 4
    assert retention_cost(executor, None)(weights // (2 * 2 * 4 * 16)) == pytest.approx(2.0, rel=1e-3)
    executor.close()


def test_fp8_weights_take_less_room_and_have_a_pace_of_their_own(small):
    (_, plain), (loop, quantized) = (build(small(quantization=kind), measure=True) for kind in ("none", "fp8"))
    assert quantized.memory.weights < plain.memory.weights
    assert (plain.precision, quantized.precision) == ("float32", "float32, fp8 weights")
    assert quantized.profile_path != plain.profile_path
    kept = [CostProfile.load(Path(info.profile_path)) for info in (plain, quantized)]
    assert [profile.quantization for profile in kept] == ["none", "fp8"]
    (request,) = create_requests(tuple(range(60)), max_tokens=4)
    loop.add(request)
    tokens = []
    while loop.has_work():
        tokens += [token for output in loop.step() for token in output.tokens]
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


def test_a_target_for_the_time_between_tokens_sets_each_steps_budget(small):
    target = {"token_budget": None, "max_model_len": 64, "steps_in_flight": 1}
    assert beside_a_stream(small(**target, tbt_target=60_000.0)) == 61
    assert beside_a_stream(small(**target, tbt_target=0.001)) == 16


def test_a_profile_is_measured_once_and_kept_for_the_next_engine(small):
    def start(**options):
        stages = []
        _, info = build(small(max_model_len=64), on_progress=stages.append, **options)
        return info.profile_path, "measuring the device's pace" in stages

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
    assert (
        build(small(token_budget=None, tbt_target=50, max_model_len=64), on_progress=stages.append)[1].profile_path
        == path
    )
    assert "measuring the device's pace" not in stages
    Path(path).write_text("{}")
    with pytest.raises(ValueError, match="is not a profile"):
        build(small(token_budget=None, tbt_target=50, max_model_len=64))


def test_on_a_gpu_a_profile_is_of_an_attention_backend_and_of_graphs_too(small):
    options = ({}, {"attention_backend": "torch"}, {"cuda_graphs": False})
    assert [pace_of(small(**each), "cuda", "H200") for each in options] == ["H200", "H200, torch", "H200, no graphs"]
    assert {pace_of(small(**each), "cpu", "CPU") for each in options} == {"CPU"}
    assert pace_of(small(attention_backend="holdfast"), "cuda", "H200") == "H200"


def test_a_cache_in_fp8_has_room_for_four_times_the_blocks_and_a_profile_of_its_own(small):
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
            answers[-1] += [token for output in loop.step() for token in output.tokens]
    assert answers[0] == answers[1]
    assert loop.stats().prefix_hits == 16


def test_the_scheduler_that_is_chosen_runs(small):
    assert first_step(small(max_model_len=64, steps_in_flight=1, token_budget=32)) == 32
    assert first_step(small(max_model_len=64, steps_in_flight=1, token_budget=32, scheduler="orca")) == 60


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (MemoryError("0.1 GB are left"), "0.1 GB are left"),
        (RuntimeError("CUDA error"), "RuntimeError: CUDA error"),
        (KeyError(), "KeyError"),
    ],
)
def test_an_error_is_told_in_one_line(error, line):
    assert one_line(error) == line


def test_sampling_params_reach_the_loop_with_their_stop_tokens(small):
    loop, _ = build(small())
    (free,) = create_requests((5, 6, 7), temperature=0.0, max_tokens=8, ignore_eos=True)
    loop.add(free)
    tokens = []
    while loop.has_work():
        tokens += [token for output in loop.step() for token in output.tokens]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=(tokens[4],))
    (stopped,) = [type(free)(id="stopped", prompt=free.prompt, params=params)]
    loop.add(stopped)
    outputs = []
    while loop.has_work():
        outputs += loop.step()
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert [token for output in outputs for token in output.tokens] == tokens[: tokens.index(tokens[4]) + 1]
