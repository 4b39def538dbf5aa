"""The plain values: which inputs they refuse, and what they count."""

import hashlib
import struct

import pytest

from holdfast.core.columns import Columns
from holdfast.core.types import (
    MAX_ALLOWED,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_GRAMMAR_LENGTH,
    MAX_LOGPROB_TOKEN_IDS,
    Grammar,
    Identity,
    Request,
    SamplingParams,
    ThinkingBudget,
)
from holdfast.lm.types import PENDING, Sampling, Segment, Sequence, StepPlan

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("max_tokens", 0),
        ("stop", ("",)),
        ("bad_words", ((),)),
        ("bad_words", ((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
        ("bad_words", ((1,),) * (MAX_BAD_WORDS + 1)),
        ("allowed_token_ids", (1,) * (MAX_ALLOWED + 1)),
        ("logprob_token_ids", (1,) * (MAX_LOGPROB_TOKEN_IDS + 1)),
        ("logprobs", 21),
    ],
)
def test_sampling_params_name_the_field_out_of_range(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(("given", "reason"), [((-1, 3, 4), "allows -1 tokens"), ((9, 3, 3), "ends with token 3")])
def test_a_limit_of_thinking_needs_two_tags_and_no_less_than_no_tokens(given, reason):
    with pytest.raises(ValueError, match=reason):
        ThinkingBudget(*given)


def test_named_tokens_exclude_another_number_of_alternatives():
    most = tuple(range(MAX_LOGPROB_TOKEN_IDS))
    for count in (None, len(most)):
        assert SamplingParams(logprob_token_ids=most, logprobs=count).reports_logprobs
    with pytest.raises(ValueError, match="logprobs is 2, and logprob_token_ids holds 3 tokens"):
        SamplingParams(logprob_token_ids=(5, 6, 7), logprobs=2)
    assert [SamplingParams(logprobs=count).reports_logprobs for count in (None, 0)] == [False, True]


@pytest.mark.parametrize("text", ["", "a" * (MAX_GRAMMAR_LENGTH + 1)])
def test_a_grammar_of_no_or_too_many_characters_is_refused_with_both_numbers(text):
    with pytest.raises(ValueError, match=rf"{len(text)} characters.* {MAX_GRAMMAR_LENGTH}"):
        Grammar("regex", text)


@pytest.mark.parametrize(
    ("options", "fixed"),
    [
        (dict(), False),
        (dict(ignore_eos=True), True),
        (dict(ignore_eos=True, stop=("end",)), False),
        (dict(ignore_eos=True, stop_token_ids=(5,)), False),
        (dict(min_tokens=7), False),
        (dict(min_tokens=8), True),
        (dict(min_tokens=8, stop=("end",)), True),
        (dict(ignore_eos=True, grammar=Grammar("regex", "a*")), False),
    ],
)
def test_a_length_is_fixed_if_nothing_may_end_the_answer_before(options, fixed):
    assert SamplingParams(max_tokens=8, **options).fixed_length is fixed


def test_a_plan_counts_query_tokens_and_the_segments_that_sample():
    decode = Segment("a", row=0, start=7, stop=8, tokens=(PENDING,), sampling=GREEDY)
    chunk = Segment("b", row=1, start=0, stop=5, tokens=(1, 2, 3, 4, 5), sampling=None)
    plan = StepPlan(step=3, segments=(decode, chunk))
    assert plan.num_tokens == 6
    assert plan.num_sampled == 1


def test_a_sequence_counts_tokens_in_flight_as_positions_until_they_are_rolled_back():
    sequence = Sequence(Request("a", prompt=(5, 6, 7), params=SamplingParams()), seed=1)
    sequence.tokens.append(9)
    sequence.length = 5
    assert sequence.in_flight == 1
    assert sequence.request.prompt == (5, 6, 7), "the request is not touched by what is generated"
    sequence.rollback(4)
    assert (sequence.length, sequence.in_flight) == (4, 0)


def test_columns_are_built_and_read_by_name_and_give_rows():
    rows = [Segment("a", 0, 7, 8, (PENDING,), GREEDY), Segment("b", 1, 0, 2, (1, 2), None)]
    columns = Columns(
        Segment,
        stop=[8, 2],
        start=[7, 0],
        row=[0, 1],
        sequence_id=["a", "b"],
        sampling=[GREEDY, None],
        tokens=[(PENDING,), (1, 2)],
    )
    assert columns == Columns.of(Segment, rows) == rows and columns[1] == rows[1]
    assert columns.column("start") == [7, 0]
    with pytest.raises(TypeError, match="rows"):
        Columns(Segment, rows=[0, 1])


def test_a_salt_and_each_other_field_of_an_identity_change_its_root():
    fields = ("model", "adapter", "dtype", "tenant", "salt")
    roots = [Identity().root(), *(Identity(**{field: "a"}).root() for field in fields)]
    assert len(set(roots)) == 6
    assert Identity(tenant="a", salt="b").root() != Identity(tenant="ab").root()


def test_the_root_without_a_salt_is_that_of_versions_that_know_none():
    assert Identity("m", "", "float32", "t").root() == _root_of_four("m", "", "float32", "t")


def _root_of_four(*texts):
    parts = [struct.pack("<Q", len(text)) + text.encode() for text in texts]
    return hashlib.sha256(b"".join(parts)).digest()
