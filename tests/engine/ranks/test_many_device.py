"""Engines of several ranks, each in a process of its own: their requests get the tokens of one process."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.core.layout import Layout
from holdfast.core.types import Grammar, Identity, Request, SamplingParams
from holdfast.engine.process import in_service
from holdfast.engine.process.build import build_engine
from holdfast.engine.process.parts.moves import ChunkFinder, MoveHandler
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.engine.process.step_log import StepLog
from holdfast.engine.profiles import CostProfile
from holdfast.engine.ranks import many_device
from holdfast.engine.ranks.many_device import ManyDevice, ManyExecutor, ManyHost, combined
from holdfast.engine.ranks.messages import Copied, Loaded
from holdfast.engine.ranks.paged import threads_of
from holdfast.engine.ranks.ranks import HOST_BLOCKS, HOST_READY, PART_SECONDS, STEP_SECONDS
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import cost_profile
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.moves.messages import ChunksFetched, ChunksFound, FetchChunks, StopFetch
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingSlice
from holdfast.lm.types import (
    BlockCopy,
    CopyTime,
    MemoryMeasurement,
    Sampling,
    Segment,
    StateCopy,
    StatePlan,
    StepPlan,
    StepResult,
    TierCopied,
    TierCopies,
)
from tests.checkpoints import VOCAB, make
from tests.engine.conftest import SMALL
from tests.invariants import check_scheduler
from tests.long import then_long
from tests.tokenizers_made import byte_level

BLOCK = 4 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block: layers, keys and values, tokens, heads, head size, bytes."""
TIERS = {"cache_gb": 24.5 * BLOCK / 1e9, "host_cache_gb": 60.5 * BLOCK / 1e9, "chunk_size": 16, "headroom": 0.0}
"""Tiers so small that running sequences are suspended to the host."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG, SHORTER = (replace(GREEDY, max_tokens=count) for count in (45, 30))
FILTERED = SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True)
ROWS = Grammar("regex", r'(\{"identifier": [0-9]{1,2}, "valid": (true|false)\}, ){20}')
"""A grammar by which most of the text is forced."""
FORCED = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True, grammar=ROWS)
TOLD = replace(FORCED, seed=4, max_tokens=12, top_k=9, logprobs=1)
"""Sampling in which each token is drawn."""
COUNTED = replace(TOLD, seed=6, logprobs=None, repetition_penalty=1.3, logit_bias=((40, 2.0),))
KINDS = GREEDY, FILTERED, DRAWN, FORCED, TOLD, COUNTED


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    """Makes engines of one small model, by the options in which they differ."""
    directory = tmp_path_factory.mktemp("models") / "four-layers"
    make(directory, "Llama", num_hidden_layers=4, max_position_embeddings=512, eos_token_id=1)
    byte_level().save(str(directory / "tokenizer.json"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_profile, "SECONDS_A_POINT", 0.0)
        patch.setitem(cost_profile.ROUNDS, "cpu", 1)
        patch.setattr(in_service, "SECONDS", 0.3)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        options = {**SMALL, "model": str(directory), "token_budget": 48}
        yield lambda **changes: build_engine(EngineConfig(**{**options, **changes}), chunk_secret=b"for tests only")


@pytest.fixture(scope="module")
def alone(make_engine):
    """The tokens that one process gives a request, with no other request."""
    loop = make_engine().loop

    @cache
    def tokens(prompt, params):
        loop.add(Request("alone", prompt, params))
        return run_to_the_end(loop)["alone"]

    yield tokens
    loop.close()


@pytest.fixture(scope="module")
def engine(request, make_engine):
    """An engine with this layout, and far too little memory."""
    tp, pp = request.param
    engine = make_engine(**TIERS, tp=tp, pp=pp, chunk_host="127.0.0.1")
    yield engine
    engine.loop.close()


def run_to_the_end(loop, tokens=None):
    """Tokens of each request."""
    tokens = {} if tokens is None else tokens
    while loop.has_work():
        for output in loop.step() or ():
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    return tokens


def prompt_of(choose, length):
    return tuple(choose.choices(range(1, VOCAB), k=length))


def layouts(*sizes):
    """Run a test with the engine of each of these layouts (tp, pp)."""
    return pytest.mark.parametrize("engine", sizes, ids=str, indirect=True, scope="module")


@pytest.mark.always("*(2, 1)*", "*(1, 2)*")
@layouts((2, 1), (1, 2), (2, 2), (4, 1))
def test_the_ranks_hold_the_blocks_that_one_process_would(engine):
    info = engine.info
    assert (info.num_blocks, info.num_host_blocks) == (24, 60) if info.tp < 4 else (12, 30), (
        "4 ranks keep 2 heads twice"
    )
    assert info.memory.device.startswith(f"{info.tp * info.pp} × CPU")
    assert len(engine.ranks.pids) == info.tp * info.pp - 1
    assert info.chunk_address and not info.chunk_reason
    assert engine.loop._steps_in_flight == 1 + info.pp


# Tests of the sampler draw with shards of four.
@pytest.mark.always("greedy-(2, 1)", "filtered-(1, 2)", "drawn-(2, 1)")
@layouts((2, 1), (1, 2), (2, 2), pytest.param((4, 1), marks=pytest.mark.long))
@pytest.mark.parametrize("params", [GREEDY, FILTERED, DRAWN], ids=["greedy", "filtered", "drawn"])
def test_requests_get_the_tokens_of_one_process(engine, alone, params):
    check_requests(engine, alone, params)


@pytest.mark.long
@layouts((4, 1))
def test_four_ranks_give_greedy_requests_the_tokens_of_one_process(engine, alone):
    check_requests(engine, alone, GREEDY)


def check_requests(engine, alone, params):
    choose = random.Random(1)
    prompts = {f"{params.seed}-{number}": prompt_of(choose, choose.randint(1, 90)) for number in range(5)}
    for name, prompt in prompts.items():
        engine.loop.add(Request(name, prompt, params))
    assert run_to_the_end(engine.loop) == {name: alone(prompt, params) for name, prompt in prompts.items()}


@layouts((2, 1), (1, 2))
def test_the_log_of_steps_has_the_time_that_each_stage_computed_and_that_of_steps_in_flight(engine):
    log = StepLog(time.monotonic)
    engine.loop.observe(log)
    for number in range(4):
        engine.loop.add(Request(str(number), prompt_of(random.Random(number), 30), GREEDY))
    began = time.monotonic()
    run_to_the_end(engine.loop)
    took = time.monotonic() - began
    engine.loop.ignore(log)
    steps = log.take()
    assert len(steps.stages) == engine.info.pp
    assert all(0.0 < busy < steps.under_way <= took for busy in steps.stages)


@pytest.mark.always("(1, 2)")
@layouts((1, 2), (2, 2))
def test_answers_by_grammars_are_those_of_one_process_and_forced_tokens_come_at_once(engine, alone):
    choose, given, longest = random.Random(3), {}, 0
    requests = {f"{number}": (prompt_of(choose, choose.randint(1, 60)), KINDS[number % 6]) for number in range(9)}
    for name, (prompt, params) in requests.items():
        engine.loop.add(Request(name, prompt, params))
    while engine.loop.has_work():
        for output in engine.loop.step() or ():
            given.setdefault(output.request_id, []).extend(output.tokens)
            longest = max(longest, len(output.tokens))
    assert given == {name: alone(*request) for name, request in requests.items()}
    assert longest > 10


@pytest.mark.always("(2, 1)")
@layouts((2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.long))
def test_conversations_that_go_to_the_host_and_come_back_get_the_tokens_of_one_process(engine, alone):
    choose, before = random.Random(2), engine.loop.stats()
    talks = {f"talk-{number}": prompt_of(choose, 20) for number in range(7)}
    for turn in range(2):
        for name, tokens in talks.items():
            engine.loop.add(Request(f"{name}-{turn}", tokens, SHORTER))
        given = run_to_the_end(engine.loop)
        for name, tokens in talks.items():
            answer = given[f"{name}-{turn}"]
            assert answer == alone(tokens, SHORTER)
            talks[name] = (*tokens, *answer, *prompt_of(choose, 5))
        check_scheduler(engine.loop.planner)
    after = engine.loop.stats()
    assert after.blocks_swapped_out > before.blocks_swapped_out
    assert after.blocks_swapped_in > before.blocks_swapped_in
    assert after.preemptions > before.preemptions


@pytest.mark.always("0-(1, 2)")
@layouts(pytest.param((2, 1), marks=pytest.mark.long), (1, 2), (2, 2))
@pytest.mark.parametrize("seed", then_long(1, range(2)))
def test_a_random_history_with_aborts_gives_the_tokens_of_one_process(engine, alone, seed):
    choose, loop, given, requests, aborted = random.Random(seed), engine.loop, {}, {}, set()
    for step in range(50):
        if choose.random() < 0.3:
            known = choose.choice([(), *(request.prompt for request in requests.values())])
            prompt = (*known[: choose.randint(0, 60)], *prompt_of(choose, choose.randint(1, 40)))
            params = choose.choice(KINDS)
            request = Request(f"{seed}-{step}", prompt, params, priority=choose.randint(0, 1))
            requests[request.id] = request
            loop.add(request)
        if requests and choose.random() < 0.1:
            name = choose.choice([*requests])
            loop.abort(name)
            aborted.add(name)
        for output in loop.step() or ():
            given.setdefault(output.request_id, []).extend(output.tokens)
        check_scheduler(loop.planner)
    run_to_the_end(loop, given)
    for name, request in requests.items():
        expected = alone(request.prompt, request.params)
        got = given.get(name, [])
        assert got == (expected[: len(got)] if name in aborted else expected)
    assert (loop.stats().running, loop.stats().waiting, loop.stats().blocks_used) == (0, 0, 0)


def chain_of(tokens):
    """The digests of the full blocks of these tokens."""
    return block_digests(Identity().root(), tokens[: len(tokens) // 16 * 16], 16)


def turn(engine, tokens):
    """The greedy answer to a prompt, and how many of the prompt's tokens were cached."""
    engine.loop.add(Request("turn", tokens, LONG, arrival=time.monotonic()))
    answer, cached = [], 0
    while engine.loop.stats().waiting or engine.loop.stats().running:
        for output in engine.loop.step() or ():
            answer += output.tokens
            cached = output.cached_tokens
    return tuple(answer), cached


def fetch(source, target, tokens, stop=False):
    """Fetch the state of these tokens from an engine, or stop once that has begun. Returns the target's answer."""
    chain, told, deadline = chain_of(tokens), [], time.monotonic() + 200
    target.handler(MoveHandler).receive(FetchChunks(1, chain, list(range(len(chain))), source.info.chunk_address, 16))
    if stop:
        target.handler(MoveHandler).receive(StopFetch(1))
    while not told or source.handler(MoveHandler).ready or target.handler(MoveHandler).ready:
        assert time.monotonic() < deadline
        for engine in (source, target):
            told += engine.handler(MoveHandler).answers()
            if engine.loop.has_work():
                engine.loop.step()
    for engine in (source, target):
        check_scheduler(engine.loop.planner)
        assert engine.handler(MoveHandler).moves._filling == engine.loop.planner.pool.host.held == 0
    (answer,) = told
    return answer


def talk(alone, seed, turns):
    """The prompts of a conversation's turns, each with one process's answer."""
    choose, tokens = random.Random(seed), ()
    for _ in range(turns):
        tokens += prompt_of(choose, 150 if not tokens else 5)
        answer = tuple(alone(tokens, LONG))
        yield tokens, answer
        tokens += answer


@pytest.mark.always("(2, 1)")
@layouts((2, 1), (1, 2))
def test_a_conversation_moves_to_an_engine_of_its_layout_then_to_disk_and_goes_on(engine, alone, make_engine, tmp_path):
    first, second, third = talk(alone, 20, 3)
    layout = {"tp": engine.info.tp, "pp": engine.info.pp}
    disk = {"disk_cache_dir": str(tmp_path), "disk_cache_gb": 400 * BLOCK / 1e9}
    config = {**TIERS, **disk, "chunk_host": "127.0.0.1", "eviction": "lru"}  # nothing is priced
    assert turn(engine, first[0])[0] == first[1]
    target = make_engine(**config, **layout)
    assert fetch(engine, target, second[0], stop=True) == ChunksFetched(1, 0, "the move was stopped")
    assert fetch(engine, target, second[0]) == ChunksFetched(1, 192, "")
    assert turn(target, second[0]) == (second[1], 192)
    target.handler(TierHandler).flush(target.loop, 200)
    target.close()
    if layout["pp"] > 1:
        return  # the rest is alike for all layouts
    again = make_engine(**config, **layout)
    assert again.handler(ChunkFinder).find(1, chain_of(third[0])) == ChunksFound(1, device=0, host=0, lower=240)
    assert turn(again, third[0]) == (third[1], 240)
    assert again.loop.stats().blocks_corrupt == 0
    again.close()
    whole = make_engine(**config)
    found = whole.handler(ChunkFinder).find(1, chain_of(third[0]))
    assert found == ChunksFound(1, 0, 0, 0), "files of two ranks are not read"
    refused = fetch(engine, whole, second[0])
    assert refused.tokens == 0
    assert "ours are four-layers, float32, tp 2, pp 1, 8192+8192 bytes" in refused.reason
    assert "its blocks are four-layers, float32, tp 1, pp 1, 16384 bytes" in refused.reason
    whole.close()


def test_the_digest_of_the_weights_is_of_all_ranks(monkeypatch):
    monkeypatch.setattr(many_device, "weights_of", lambda own: "first")
    model = SimpleNamespace(spec=SimpleNamespace(state_bytes=0))
    own = SimpleNamespace(block_bytes=1, max_step_tokens=1, model=model)
    ranks = [("a", "b", "c"), ("a", "c", "b"), ("a", "b", "d")]
    found = {ManyDevice(own, None, [Loaded(1, each) for each in weights]).weights for weights in ranks}
    assert len(found) == 3


def test_the_precision_names_what_computes_other_ranks_if_it_is_not_what_computes_the_first():
    """State of an engine with a stage that adds up in another order is not that of one without."""
    model = SimpleNamespace(spec=SimpleNamespace(state_bytes=0, arithmetic="H200"))
    own = SimpleNamespace(block_bytes=1, max_step_tokens=1, model=model, precision="bfloat16, deterministic (H200)")

    def named(*others):
        return ManyDevice(own, None, [Loaded(1, arithmetic=each) for each in others]).precision

    assert named("H200", "H200") == "bfloat16, deterministic (H200)"
    assert named("H200", "H200, one tile") == "bfloat16, deterministic (H200), and on other ranks H200, one tile"


def test_ranks_share_the_threads():
    assert [threads_of(EngineConfig(threads=threads, tp=2, pp=2)) for threads in (1, 8, 11)] == [1, 2, 2]


def test_a_block_is_what_all_ranks_keep_of_it_and_the_least_rank_counts():
    first = MemoryMeasurement(
        device="GPU", total=100, weights=10, activations=3, cache=30, block=3, host_cache=9, adapters=0
    )
    second = MemoryMeasurement(device="GPU", total=100, weights=20, activations=5, cache=16, block=2, host_cache=20)
    assert combined([first, second], Layout(pp=2), "cuda") == MemoryMeasurement(
        device="2 × GPU (pp 2)", total=200, weights=30, activations=8, cache=40, block=5, host_cache=15
    )
    assert combined([first, second], Layout(tp=2), "cpu").total == 100, "they share it"
    states = [
        replace(first, rows=40, snapshots=3, host_snapshots=9),
        replace(second, rows=24, snapshots=5, host_snapshots=6),
    ]
    both = combined(states, Layout(pp=2), "cuda")
    assert (both.rows, both.snapshots, both.host_snapshots) == (64, 3, 6)


@pytest.mark.parametrize(
    ("part", "seconds"),
    [
        (StatePlan(saves=(StateCopy(0, 4),)), STEP_SECONDS),
        (TrainingPlan(slice=TrainingSlice("job", 0, 0, "run")), PART_SECONDS),
    ],
)
def test_only_training_lets_a_step_take_longer(part, seconds):
    executor = ManyExecutor(Rank0(), OtherRanks(Layout(tp=2)), captures=False)
    executor.submit(replace(plan_of(0), parts=(part,)))
    (flight,) = executor._in_flight
    assert (flight.seconds, flight.waits) == (seconds, False)


class Rank0:
    """Rank 0's executor: every step has ended, and its copies are complete once the next step ends."""

    def __init__(self):
        self.plans, self.copies = [], []

    def submit(self, plan):
        self.plans.append(plan)

    def wait(self, seconds):
        return True

    def collect(self):
        plan, done = self.plans.pop(0), tuple(self.copies)
        self.copies = copied(plan, 0.001)
        if not plan.segments:
            done, self.copies = (*done, *self.copies), []
        last = plan.step if not plan.segments else plan.step - 1
        return StepResult(
            plan.step, (7,) * plan.num_sampled, 0.01, copied=TierCopied(swapped_out=last, swapped_in=last, times=done)
        )


class OtherRanks:
    """The other ranks as rank 0 sees them. The test sets their answers."""

    def __init__(self, layout, **words):
        self.layout, self.said, self.waited, self.words = layout, [], [], words

    def send(self, command):
        pass

    def check(self):
        pass

    def of_steps(self):
        said, self.said = self.said, []
        return said

    def wait(self, seconds):
        self.said = self.waited.pop(0)

    def least(self, word):
        return self.words[{HOST_READY: "ready", HOST_BLOCKS: "blocks"}[word]]


def copied(plan, seconds):
    """The copies of a plan, complete on a rank."""
    both = ((True, plan.copies.swap_in), (False, plan.copies.swap_out))
    return [CopyTime(plan.step, inward, 100 * len(copies), seconds) for inward, copies in both if copies]


def plan_of(step, *, swap_in=0, swap_out=0, segments=True):
    """A plan of one decode, unless it waits for copies alone."""
    segment = Segment("a", 0, 4, 5, (3,), Sampling(0.0, 0, 1.0, 0))
    copies = [tuple(BlockCopy(at, at) for at in range(count)) for count in (swap_in, swap_out)]
    return StepPlan(step, (segment,) if segments else (), copies=TierCopies(swap_in=copies[0], swap_out=copies[1]))


@pytest.mark.parametrize("inward", [True, False], ids=["in", "out"])
def test_a_copy_counts_as_complete_once_the_last_rank_has_made_it_and_took_as_long_as_there(inward):
    ranks = OtherRanks(Layout(tp=3))
    executor = ManyExecutor(Rank0(), ranks, captures=False)
    plans = [plan_of(0), plan_of(1, **{"swap_in" if inward else "swap_out": 2}), *map(plan_of, range(2, 5))]
    name = "swapped_in" if inward else "swapped_out"

    def step(plan, *said):
        executor.submit(plan)
        ranks.said = [(rank, Copied(tuple(copied(plans[1], seconds)))) for rank, seconds in said]
        result = executor.collect()
        return getattr(result.copied, name), result.copied.times

    assert [step(plan) for plan in plans[:3]] == [(-1, ()), (0, ()), (0, ())], "rank 0 alone has made the copy"
    assert step(plans[3], (2, 0.5)) == (0, ()), "one is missing"
    assert step(plans[4], (1, 0.002)) == (3, (CopyTime(1, inward, 600, 0.5),))


def test_a_plan_of_copies_alone_ends_when_all_ranks_have_made_them_and_those_before():
    ranks = OtherRanks(Layout(tp=2))
    executor = ManyExecutor(Rank0(), ranks, captures=False)
    plans = [plan_of(0, swap_out=1), plan_of(1, swap_in=1, segments=False)]
    for plan in plans:
        executor.submit(plan)
    assert executor.collect().copied.swapped_out == -1
    ranks.waited = [[(1, Copied(tuple(copied(plan, 0.02))))] for plan in reversed(plans)]
    result = executor.collect()
    assert (result.copied.swapped_in, result.copied.swapped_out, ranks.waited) == (1, 1, [])
    assert sorted(result.copied.times) == [CopyTime(0, False, 200, 0.02), CopyTime(1, True, 200, 0.02)]


def test_the_host_tier_is_as_large_as_that_of_the_least_rank():
    own = SimpleNamespace(ready=10, blocks=60)
    for ready, blocks in ((4, 30), (20, 90)):
        host = ManyHost(own, OtherRanks(Layout(tp=2), ready=ready, blocks=blocks))
        assert (host.ready, host.blocks) == (min(10, ready), min(60, blocks))


def test_a_measured_profile_has_the_layout_its_links_and_the_shares_of_its_stages(make_engine):
    engine = make_engine(tp=2, pp=2, tbt_target=50.0, token_budget="auto", max_model_len=128, max_sequences=2)
    engine.loop.close()
    profile = CostProfile.load(Path(engine.info.profile_path))
    assert "tp-2-pp-2" in engine.info.profile_path
    assert profile.measured and profile.layout == Layout(2, 2)
    assert len(profile.cost.stage_shares) == 2 and min(profile.cost.stage_shares) > 0.0
    assert profile.stream_bytes == 64 * 4 and profile.all_reduce.sizes == profile.send.sizes
    assert profile.send.sizes[0] == profile.stream_bytes
