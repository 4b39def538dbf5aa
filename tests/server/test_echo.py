"""Completions that begin with their prompt, and log probabilities of prompts, through a real engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import openai
import pytest

from tests.served import Serving, make_checkpoint, serve

PROMPT = "Tell me of the sea, é."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(make_checkpoint(tmp_path_factory.mktemp("models") / "bytes"), "--store", "memory") as serving:
        yield serving


@pytest.fixture(scope="module")
def api(serving: Serving) -> Iterator[openai.OpenAI]:
    with serving.client() as client:
        yield client


def columns(choice: Any) -> tuple[Any, ...]:
    found = choice.logprobs
    return found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset


def test_an_echoed_prompt_has_its_text_and_the_log_probability_of_each_token_but_the_first(api: openai.OpenAI) -> None:
    asked: Any = {"model": "bytes", "prompt": PROMPT, "logprobs": 1, **GREEDY}
    echoed = api.completions.create(**asked, echo=True)
    plain = api.completions.create(**asked)
    size = len(PROMPT.encode())
    (choice,) = echoed.choices
    assert choice.text == PROMPT + plain.choices[0].text
    tokens, own, top, offsets = columns(choice)
    assert len(tokens) == len(own) == len(top) == len(offsets) == size + 3
    assert tokens[:5] == ["T", "e", "l", "l", " "] and tokens[size - 3 : size] == ["bytes:\\xc3", "bytes:\\xa9", "."]
    assert own[0] is None and top[0] is None and offsets[: size : size - 1] == [0, len(PROMPT) - 1]
    assert own[size:] == pytest.approx(plain.choices[0].logprobs.token_logprobs, abs=1e-4)  # type: ignore[union-attr]
    for each, likely, token in zip(own[1:], top[1:], tokens[1:], strict=True):
        assert likely[token] == each and 1 <= len(likely) <= 2 and max(likely.values()) >= each
    assert echoed.usage is not None and plain.usage is not None
    assert (echoed.usage.total_tokens, echoed.usage.completion_tokens) == (plain.usage.total_tokens, 3)


def test_max_tokens_0_with_echo_returns_only_the_prompt(api: openai.OpenAI) -> None:
    asked: Any = {"model": "bytes", "prompt": [PROMPT, "other"], "logprobs": 1, "echo": True}
    none = api.completions.create(**asked, max_tokens=0)
    one = api.completions.create(**asked, max_tokens=1, temperature=0)
    assert [choice.text for choice in none.choices] == [PROMPT, "other"]
    assert [choice.finish_reason for choice in none.choices] == ["length"] * 2
    assert none.usage is not None and none.usage.completion_tokens == 0
    for first, second in zip(none.choices, one.choices, strict=True):
        assert columns(first) == tuple(column[:-1] for column in columns(second))


def test_a_streamed_echo_adds_up_to_the_whole_one(api: openai.OpenAI) -> None:
    asked: Any = {"model": "bytes", "prompt": list(range(65, 90)), "echo": True, "logprobs": 2, "n": 2, "seed": 1}
    whole = api.completions.create(**asked, max_tokens=4)
    chunks = list(api.completions.create(**asked, max_tokens=4, stream=True))
    for choice in whole.choices:
        own = [each.choices[0] for each in chunks if each.choices[0].index == choice.index]
        assert "".join(each.text for each in own) == choice.text
        parts = [columns(each) for each in own if each.logprobs]
        tokens, logprobs, top, offsets = (list(chain(*column)) for column in zip(*parts, strict=True))
        whole_tokens, whole_logprobs, whole_top, whole_offsets = columns(choice)
        assert (tokens, offsets) == (whole_tokens, whole_offsets)
        # Steps of other sizes round differently.
        assert logprobs == pytest.approx(whole_logprobs, abs=1e-4)
        assert [top[0], whole_top[0]] == [None, None]
        for one, other in zip(top[1:], whole_top[1:], strict=True):
            assert one == pytest.approx(other, abs=1e-4)


def test_prompt_logprobs_have_the_form_of_vllm_in_completions_and_chats(api: openai.OpenAI) -> None:
    more: Any = {"extra_body": {"prompt_logprobs": 2}, "max_tokens": 1}
    text: Any = api.completions.create(model="bytes", prompt="sea", **more).choices[0]
    first, second, third = text.prompt_logprobs
    assert first is None
    for record, letter in ((second, "e"), (third, "a")):
        assert 2 <= len(record) <= 3
        own = [each for each in record.values() if each["decoded_token"] == letter]
        assert len(own) == 1 and own[0]["logprob"] < 0
        ranks = sorted(each["rank"] for each in record.values())
        assert ranks[:2] == [1, 2] and len(set(ranks)) == len(ranks), "each token has a rank, listed or not"
        assert own[0]["rank"] > 2 or len(ranks) == 2
    said: Any = [{"role": "user", "content": "hi"}]
    chat: Any = api.chat.completions.create(model="bytes", messages=said, **more)
    assert len(chat.prompt_logprobs) == len("<user>hi<assistant>") and chat.prompt_logprobs[0] is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, which needs echo: true"),
        ({"echo": True, "extra_body": {"best_of": 2}}, "with echo: true they must be equal"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "leave out stream"),
        ({"extra_body": {"prompt_logprobs": 21}}, "prompt_logprobs: "),
    ],
)
def test_unavailable_log_probabilities_are_refused_by_name(api: openai.OpenAI, asked: Any, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        api.completions.create(model="bytes", prompt="a", **asked)
