"""RequestLimits: what an engine refuses, and the parameter and the code that it names."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from holdfast.core.types import SamplingParams, ThinkingBudget
from holdfast.lm.limits import RequestLimits, RequestRefused

LIMITS = RequestLimits(max_model_len=100, vocab_size=50, cache_tokens=64)


@pytest.mark.parametrize(
    ("prompt", "params", "others", "param", "code", "message"),
    [
        ([], {}, {}, "prompt", "invalid_value", "empty"),
        ([1] * 100, {}, {}, "prompt", "context_length_exceeded", "100 tokens; .* limit of 100"),
        ([1, 50], {}, {}, "prompt", "invalid_value", "token id 50; this model's lie between 0 and 49"),
        (["a"], {}, {}, "prompt", "invalid_value", "prompt holds something that is not a token id"),
        ([1], {"stop_token_ids": (50,)}, {}, "stop_token_ids", "invalid_value", "token id 50"),
        ([1], {"allowed_token_ids": (3, 50)}, {}, "allowed_token_ids", "invalid_value", "token id 50"),
        ([1], {"logprob_token_ids": (3, 50)}, {}, "logprob_token_ids", "invalid_value", "token id 50"),
        ([1], {"thinking": ThinkingBudget(9, 3, 50)}, {}, "thinking", "invalid_value", "token id 50"),
        ([1], {"bad_words": ((1,), (2, 50))}, {}, "bad_words", "invalid_value", "token id 50"),
        ([1] * 60, {"max_tokens": 6}, {}, "max_tokens", "invalid_value", "65 positions of the KV cache, which has 64"),
        ([1], {}, {"priority": 1 << 31}, "priority", "invalid_value", "priority is 2147483648"),
        ([1], {}, {"deadline": 0.0}, "deadline_ms", "invalid_value", "deadline is 0.0 s"),
    ],
)
def test_a_refusal_names_the_parameter_the_value_and_the_limit(
    prompt: Any, params: dict[str, Any], others: dict[str, Any], param: str, code: str, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message) as refusal:
        LIMITS.check(prompt, SamplingParams(**params), **others)
    assert (refusal.value.param, refusal.value.code) == (param, code)


def test_a_packed_prompt_is_not_copied() -> None:
    prompt = array("I", [1, 2])
    assert LIMITS.check(prompt, SamplingParams()) is prompt
    assert LIMITS.check((1, 2), SamplingParams()) == prompt


def test_max_tokens_beyond_the_context_is_refused_only_where_the_answers_length_is_checked() -> None:
    RequestLimits(max_model_len=100, vocab_size=50, cache_tokens=99).check([1] * 90, SamplingParams(max_tokens=500))
    LIMITS.check_length(90, 10)
    with pytest.raises(RequestRefused, match=r"max_output_tokens asks for 11 more.*ask for at most 10") as refusal:
        LIMITS.check_length(90, 11, "max_output_tokens")
    assert (refusal.value.param, refusal.value.code) == ("max_output_tokens", "context_length_exceeded")


def test_the_longest_prompt_leaves_room_for_one_generated_token() -> None:
    limits = RequestLimits(max_model_len=100, vocab_size=50, cache_tokens=1000)
    assert len(limits.check([1] * 99, SamplingParams(max_tokens=5))) == 99
    with pytest.raises(RequestRefused, match="100 tokens; with one generated token it exceeds the limit of 100"):
        limits.check([1] * 100, SamplingParams(max_tokens=5))
    with pytest.raises(RequestRefused, match="100 tokens; with one generated token"):
        limits.check_length(100)


def test_a_sequence_may_fill_the_cache_to_the_last_position() -> None:
    """The last token ends the sequence, so its position is never computed."""
    LIMITS.check([1] * 60, SamplingParams(max_tokens=5))
    with pytest.raises(RequestRefused, match="65 positions"):
        LIMITS.check([1] * 60, SamplingParams(max_tokens=6))
