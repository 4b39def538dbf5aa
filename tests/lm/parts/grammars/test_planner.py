"""Tokens that a grammar forces: each request gets what it gets alone, in fewer steps, and matchers miss no token."""

from collections import Counter
from dataclasses import replace

import pytest

from holdfast.core.types import Grammar, Request, SamplingParams, TokenLogprobs
from holdfast.lm.grammar.rows import Forced
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.types import StepResult
from tests.lm.scheduler.test_histories import STEPS, History, check
from tests.scheduling import FakeDevice, create_scheduler, sampled, sampled_from, spans

GRAMMAR = Grammar("regex", "any")
MOST_FORCED = 9


class ForcingDevice(FakeDevice):
    """A device whose results at times report which tokens must follow: those that it would sample.

    It keeps the same as matchers: the answer in each row, from the answers of plans, the tokens of segments that
    sample, and results.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.answers = {}
        self.seen = Counter()

    def collect(self):
        plan = self.plans[0]
        for answer in plan.part(GrammarPlan).answers:
            self.answers[answer.row] = answer.start, list(answer.tokens)
        result = super().collect()
        constrained = [
            (at, segment) for at, segment in enumerate(sampled(plan)) if segment.sampling.grammar is not None
        ]
        forced = [(at, self._follow(segment)) for at, segment in constrained if segment.sampling.skips]
        return replace(
            result, parts=(GrammarResult(forced=tuple(Forced(at, tokens) for at, tokens in forced if tokens)),)
        )

    def _states_of(self, segment, draft):
        stream, states = self.streams[segment.sequence_id], self.states[segment.sequence_id]
        while len(stream) < segment.stop - len(draft):  # the segment's tokens must be these
            stream.append(sampled_from(states[-1]))
            states.append(hash((states[-1], stream[-1])))
            self.seen["skipped"] += 1
        return super()._states_of(segment, draft)

    def _sample(self, segment, draft):
        if segment.sampling.grammar is None:
            return super()._sample(segment, draft)
        start, answer = self.answers[segment.row]
        position = start + len(answer)
        if position < segment.stop:
            assert position >= segment.start, "the matcher has missed tokens"
            answer += segment.tokens[position - segment.start :]
        assert answer == self.streams[segment.sequence_id][start : segment.stop]
        tokens = super()._sample(segment, draft)
        answer += tokens
        return tokens

    def _follow(self, segment):
        state, tokens = self.states[segment.sequence_id][-1], []
        for _ in range(self.choose.choice((0, 0, 1, 3, MOST_FORCED))):
            tokens.append(sampled_from(state))
            state = hash((state, tokens[-1]))
        return tuple(tokens)


class ForcingHistory(History):
    """A history in which most requests have a grammar."""

    def __init__(self, seed, name="stall-free", stages=1):
        super().__init__(seed, name, stages=stages)
        self.device = ForcingDevice(self.blocks, self.block_size, self.host_blocks, self.random)
        add = self.scheduler.add

        def with_grammar(request):
            if self.random.random() < 0.7:
                logprobs = self.random.choice((None, None, None, 0))
                request = replace(request, params=replace(request.params, grammar=GRAMMAR, logprobs=logprobs))
                self.requests[request.id] = request
            add(request)

        self.scheduler.add = with_grammar


def play(seed, name, stages=1):
    history = ForcingHistory(seed, name, stages)
    while history.steps < STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.drain()
    return history


@pytest.mark.always("request-level-*", "prefill-first-*", "latency-target-*", "speculating-*")
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("stall-free", 30),
        *(
            (name, 10)
            for name in (
                "request-level",
                "orca",
                "prefill-first",
                "chunked-only",
                "unified",
                "latency-target",
                "speculating",
            )
        ),
    ],
)
def test_every_request_gets_the_tokens_it_gets_alone_where_some_are_forced(name, seeds):
    seen = Counter()
    for seed in range(seeds):
        history = play(seed, name)
        check(history)
        seen += history.seen + history.device.seen
    assert seen["skipped"] > 3 * seeds
    assert seen["several"] > 3 * seeds
    assert name in ("request-level", "orca") or seen["preempted"] > seeds / 5


@pytest.mark.always("3")
@pytest.mark.parametrize("stages", [2, 3])
def test_every_request_gets_the_tokens_it_gets_alone_where_some_are_forced_in_a_pipeline(stages):
    seen = Counter()
    for seed in range(15):
        history = play(seed, "stall-free", stages)
        check(history)
        seen += history.seen + history.device.seen
    assert seen["skipped"] > 45 and seen["before its token is known"] > 45 and seen["preempted"] > 3


def started(**params):
    """A scheduler with one sequence of 5 known tokens, and its plan in flight for the next."""
    scheduler = create_scheduler(blocks=8, block_size=4)
    request = Request("a", (1, 2, 3, 4), SamplingParams(**{"max_tokens": 20, "grammar": GRAMMAR} | params))
    scheduler.add(request)
    return scheduler, scheduler.schedule(0.0)


def result(plan, token, *forced):
    logprobs = (TokenLogprobs(0.0, (), ()),) if sampled(plan)[0].sampling.logprobs is not None else ()
    return StepResult(
        plan.step,
        (token,),
        0.0,
        logprobs=logprobs,
        parts=(GrammarResult(forced=(Forced(0, forced),) if forced else ()),),
    )


def test_forced_tokens_come_out_at_once_and_are_computed_as_one_segment():
    scheduler, first = started()
    (output,) = scheduler.update(first, result(first, 5, 6, 7, 8), 0.0)
    assert output.tokens == (5, 6, 7, 8)
    plan = scheduler.schedule(0.0)
    assert spans(plan) == [("a", 4, 8)]
    assert plan.segments[0].tokens == (5, 6, 7, 8) and plan.segments[0].sampling is not None


def test_what_a_step_in_flight_samples_of_them_is_known_already():
    scheduler, first = started()
    second = scheduler.schedule(0.0)
    (output,) = scheduler.update(first, result(first, 5, 6, 7, 8), 0.0)
    assert output.tokens == (5, 6, 7, 8)
    third = scheduler.schedule(0.0)
    assert spans(second) == [("a", 4, 5)] and spans(third) == [("a", 5, 8)]
    assert not list(scheduler.update(second, result(second, 6, 7, 8), 0.0))
    (output,) = scheduler.update(third, result(third, 9), 0.0)
    assert output.tokens == (9,)


def test_one_token_to_skip_is_sampled_instead():
    scheduler, first = started()
    (output,) = scheduler.update(first, result(first, 5, 6), 0.0)
    assert output.tokens == (5,)


def test_tokens_that_steps_in_flight_sample_anyway_are_no_gain():
    scheduler, first = started()
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    (output,) = scheduler.update(first, result(first, 5, 6, 7, 8), 0.0)
    assert output.tokens == (5,), "two of the three are under way, and one alone is sampled"
    for token, plan in zip((6, 7), plans, strict=True):
        (output,) = scheduler.update(plan, result(plan, token), 0.0)
        assert output.tokens == (token,)


@pytest.mark.parametrize("params", [{"logprobs": 2}, {"presence_penalty": 0.5}])
def test_no_draw_is_skipped_where_each_is_told_or_counts(params):
    scheduler, first = started(**params)
    (output,) = scheduler.update(first, result(first, 5, 6, 7, 8), 0.0)
    assert output.tokens == (5,)


def test_forced_tokens_count_against_max_tokens():
    scheduler, first = started(max_tokens=3)
    (output,) = scheduler.update(first, result(first, 5, 6, 7, 8), 0.0)
    assert (output.tokens, output.finish_reason) == ((5, 6, 7), "length")
    assert not scheduler.has_work()
