"""The messages of ranks: a plan arrives as it was sent, and a sampling record is sent once."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.columns import Columns
from holdfast.core.types import Grammar, TokenLogprobs
from holdfast.engine.ranks.messages import (
    Allocate,
    Announce,
    CompileGrammar,
    Copied,
    Failed,
    Loaded,
    Measure,
    Measured,
    PlanReader,
    PlanWriter,
    Reported,
    StartRank,
    Stepped,
    decode_answer,
    decode_command,
    encode,
    read_parts,
    write_parts,
)
from holdfast.lm.config import EngineConfig
from holdfast.lm.grammar.rows import Answer, Forced
from holdfast.lm.parts.adapters.values import AdapterForgotten, AdapterKnown, AdapterResult
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.parts.prompts.values import PromptPlan, PromptReport, PromptResult
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.parts.values import VALUES
from holdfast.lm.parts.vectors.values import VectorResult
from holdfast.lm.types import (
    PENDING,
    BlockCopy,
    BlockMove,
    CopyTime,
    MemoryMeasurement,
    Sampling,
    Segment,
    StepPlan,
    TableWrite,
    TierCopies,
)

RECORDS = [
    Sampling(temperature=0.5 * seed, top_k=seed, top_p=0.9, seed=seed, logprobs=0, named=(7,) * seed)
    for seed in range(3)
]
numbers = st.integers(0, 1 << 40)
named = st.sampled_from([(), ((7, 1 << 20), (9,)), ((), ())])
copies = st.lists(st.builds(BlockCopy, numbers, numbers), max_size=3).map(tuple)


@st.composite
def segments(draw):
    start, length = draw(numbers), draw(st.integers(1, 5))
    tokens = draw(st.lists(st.integers(PENDING, 1 << 20), min_size=length, max_size=length))
    return Segment(
        "", draw(st.integers(0, 4)), start, start + length, tuple(tokens), draw(st.sampled_from([None, *RECORDS]))
    )


plans = st.builds(
    StepPlan,
    numbers,
    st.lists(segments(), max_size=6),
    st.lists(st.builds(TableWrite, numbers, numbers, st.lists(numbers, max_size=4).map(tuple)), max_size=3).map(tuple),
    copies=st.builds(TierCopies, copies, copies, st.integers(-1, 100)),
    samples=st.none() | st.lists(st.integers(1, 8), max_size=6).map(tuple),
    parts=st.tuples(
        st.builds(TrainingPlan, moves=st.lists(st.builds(BlockMove, numbers, numbers), max_size=3).map(tuple)),
        st.builds(GrammarPlan, st.lists(st.builds(Answer, numbers, numbers, st.just((3, 4))), max_size=2).map(tuple)),
        st.builds(
            PromptPlan,
            st.lists(st.builds(PromptReport, numbers, numbers, st.just((3, 4)), st.just(5), named), max_size=2).map(
                tuple
            ),
        ),
    )
    | st.just(()),
)


@given(st.lists(plans, max_size=5))
def test_plans_arrive_as_they_were_sent(sent):
    writer, reader = PlanWriter(), PlanReader()
    for plan in sent:
        read = reader.read(decode_command(encode(writer.write(plan))))
        assert isinstance(read.segments, Columns)
        assert read == dataclasses.replace(plan, segments=read.segments)
        assert list(read.segments) == list(plan.segments)


def test_a_decode_is_sent_without_the_record_that_its_row_has_already():
    record = RECORDS[2]
    plan = StepPlan(3, [Segment("a name", 1, 9, 10, (PENDING,), record)])
    writer, reader = PlanWriter(), PlanReader()
    first, second = writer.write(plan), writer.write(plan)
    assert (first.drawn, second.drawn) == ({0: record}, {})
    assert len(encode(second)) < 40
    read = [reader.read(decode_command(encode(message))) for message in (first, second)]
    assert read[1].segments[0].sampling is read[0].segments[0].sampling, "so the batch need not look at it again"


def test_commands_and_answers_arrive_as_they_were_sent():
    memory = MemoryMeasurement(device="cpu", total=9, weights=1, activations=1, cache=4, block=2, host_cache=6)
    for command in (
        StartRank(EngineConfig(tp=2, cache_gb=0.5), "/tmp/x"),
        Measure(64, 32),
        Allocate(3, 4, 5, 6),
        CompileGrammar(Grammar("regex", "a")),
        Announce(write_parts([AdapterKnown("a@1", "a", "/somewhere")])),
    ):
        assert decode_command(encode(command)) == command
    for answer in (
        Loaded(64, "a digest", 32),
        Measured(memory),
        Stepped((1, 2), 0.25),
        Stepped((), 0.25, (), write_parts([PromptResult(((TokenLogprobs(-0.5, (1,), (-0.5,)),), ()), ((3,), ()))])),
        Stepped((1, 2), 0.25, parts=write_parts([GrammarResult((Forced(1, (5, 6)),))])),
        Stepped((1, 2), 0.25, counts=[2, 0]),
        Reported(7, write_parts([AdapterResult(6, ("a@1",))])),
        Copied((CopyTime(3, True, 64, 0.5),)),
        Failed("out of memory", 12.5),
    ):
        assert decode_answer(encode(answer)) == answer


def test_the_values_of_parts_arrive_as_they_were_sent():
    parts = (
        TrainingReport("job", 1, 2, "run", 3, 4, 0.5, loss=0.25),
        PromptResult(((TokenLogprobs(-0.5, (1,), (-0.5,)),), ()), ((3,), ())),
        VectorResult((b"", b"state")),
        GrammarResult((Forced(1, (5, 6)),)),
        AdapterForgotten("a@1"),
    )
    assert read_parts(write_parts(parts)) == parts
    assert len({kind.__name__ for kind in VALUES}) == len(VALUES)
