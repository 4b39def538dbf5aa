"""Conversations longer than the context: which turns are left out, and how much of the rest is cached."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fake_engine import FakeText
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.limits import RequestRefused
from holdfast.server.truncation import ANSWER_SHARE, Truncation, first_kept, last_turn
from tests.served import Serving, make_checkpoint, serve

CONTEXT = 1024
TURNS = 30


def grown(turns: int, size: int) -> tuple[list[str], list[int]]:
    """Return a conversation of equal messages whose last turn waits for its answer."""
    roles = ["system", *["user", "assistant"] * turns][: 2 * turns]
    return roles, [size] * len(roles)


def test_a_conversation_that_fits_is_whole() -> None:
    roles, sizes = grown(5, 10)
    assert first_kept(roles, sizes, sum(sizes)) == 0


def test_a_cut_leaves_half_and_stays_for_many_turns() -> None:
    cuts = [first_kept(*grown(turns, 10), 200) for turns in range(1, 60)]
    assert all(before <= after for before, after in itertools.pairwise(cuts))
    changes = [at for at, (before, after) in enumerate(itertools.pairwise(cuts)) if before != after]
    assert 8 <= len(changes) <= 58 * 20 // 100, "one cut whenever half of the room was filled"
    assert min(later - earlier for earlier, later in itertools.pairwise(changes)) >= 4


@given(
    st.lists(st.tuples(st.sampled_from(["system", "user", "assistant", "tool"]), st.integers(1, 60)), min_size=1),
    st.integers(1, 300),
)
def test_system_messages_and_the_last_turn_stay_and_the_rest_fits(said: list[tuple[str, int]], budget: int) -> None:
    roles, sizes = [role for role, _ in said], [size for _, size in said]
    first = first_kept(roles, sizes, budget)
    assert first <= last_turn(roles)
    assert first == 0 or roles[first] == "user", "a cut is between turns"
    kept = [size for at, (role, size) in enumerate(said) if at >= first or role == "system"]
    if first < last_turn(roles) and roles[-1] not in ("assistant", "system"):
        assert sum(kept) <= budget
    for length in range(1, len(said)):
        assert first_kept(roles[:length], sizes[:length], budget) <= first, "what has left stays away"


def test_calls_and_results_of_a_message_count_towards_its_size() -> None:
    """Messages of the same text have different sizes if their calls differ."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 300}}
    said: list[dict[str, Any]] = []
    for number in range(4):
        said += [
            {"role": "user", "content": f"{number}"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [call] * number},
        ]
    said.append({"role": "user", "content": "and now?"})
    tried: list[int] = []

    def build(kept: Any) -> str:
        tried.append(len(kept))
        return "".join(json.dumps(each) for each in kept)

    composed = Truncation(FakeText(), 2000).compose(said, 100, build)  # type: ignore[arg-type]
    assert len(composed) <= 1900 and composed.endswith('"and now?"}') and len(tried) == 1


def test_a_template_larger_than_estimated_costs_more_turns() -> None:
    said = [{"role": ("user", "assistant")[at % 2], "content": "word " * 8} for at in range(21)]
    built: list[int] = []

    def build(kept: Any) -> str:
        built.append(len(kept))
        return "x" * 100 * len(kept)

    assert len(Truncation(FakeText(), 1000).compose(said, None, build)) < 1000  # type: ignore[arg-type]
    assert len(built) > 1

    def refuse(kept: Any) -> str:
        raise RequestRefused("too long", "prompt")

    with pytest.raises(RequestRefused):
        Truncation(FakeText(), 1000).compose(said, None, refuse)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("models") / "bytes")
    with serve(checkpoint, "--store", "memory", "--max-model-len", str(CONTEXT)) as serving:
        yield serving


@pytest.fixture(scope="module")
def api(serving: Serving) -> Iterator[openai.OpenAI]:
    with serving.client() as client:
        yield client


SAID = "This is turn {} of a long conversation, and it has some length to it."
WHITE: Any = {"logit_bias": {str(token): (100 if token == 64 else -100) for token in range(60, 70)}}
"""Sampling options that make answers text."""


def check_reuse(turns: list[tuple[int, int]]) -> None:
    """Check the prompt and cached tokens of each turn: few are cut, and between cuts the previous turn is reused."""
    cuts = 0
    for (before, _), (prompt, cached) in itertools.pairwise(turns):
        assert prompt <= CONTEXT
        if prompt < before:
            cuts += 1
        else:
            assert cached >= before - 2 * 16, "all but the last blocks of the prompt before"
    assert 2 <= cuts <= TURNS // 5
    assert sum(cached for _, cached in turns) > 0.7 * sum(prompt for prompt, _ in turns)


def test_a_stored_conversation_continues_past_the_context_and_keeps_all_its_items(api: openai.OpenAI) -> None:
    conversation = api.conversations.create(items=[{"type": "message", "role": "developer", "content": "Be kind."}])
    turns = []
    for number in range(TURNS):
        answer = api.responses.create(
            model="bytes", conversation=conversation.id, input=SAID.format(number), truncation="auto",
            max_output_tokens=16, extra_body=WHITE, temperature=0,
        )  # fmt: skip
        assert answer.usage is not None and answer.truncation == "auto"
        turns.append((answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens))
    check_reuse(turns)
    assert len(list(api.conversations.items.list(conversation.id))) == 1 + 2 * TURNS
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as refused:
        api.responses.create(model="bytes", conversation=conversation.id, input="More.", truncation="disabled")
    assert refused.value.code == "context_length_exceeded"


def test_a_chat_that_is_sent_whole_is_cut_at_the_same_place_for_many_turns(api: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "system", "content": "Be brave."}]
    turns = []
    for number in range(TURNS):
        said.append({"role": "user", "content": SAID.format(number)})
        more: Any = {"extra_body": {**WHITE, "truncation": "auto"}, "max_tokens": 16, "temperature": 0}
        answer = api.chat.completions.create(model="bytes", messages=said, **more)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        turns.append((answer.usage.prompt_tokens, answer.usage.prompt_tokens_details.cached_tokens or 0))
        said.append({"role": "assistant", "content": answer.choices[0].message.content})
    check_reuse(turns)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        api.chat.completions.create(model="bytes", messages=said)


def test_a_last_turn_that_does_not_fit_is_refused(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens"):
        api.responses.create(model="bytes", input="x" * CONTEXT, truncation="auto")


def test_truncate_prompt_tokens_keeps_the_end_of_a_prompt_or_its_start(api: openai.OpenAI) -> None:
    prompt, more = "ab" * CONTEXT + "the end", {"max_tokens": 4, "echo": True, "temperature": 0}
    kept: Any = api.completions.create(model="bytes", prompt=prompt, extra_body={"truncate_prompt_tokens": 7}, **more)
    assert kept.choices[0].text.startswith("the end") and kept.usage.prompt_tokens == 7
    most: Any = api.completions.create(model="bytes", prompt=prompt, extra_body={"truncate_prompt_tokens": -1}, **more)
    assert most.usage.prompt_tokens == CONTEXT - 4
    start = {"truncate_prompt_tokens": 7, "truncation_side": "right"}
    first: Any = api.completions.create(model="bytes", prompt=prompt, extra_body=start, **more)
    assert first.choices[0].text.startswith("abababa") and first.usage.prompt_tokens == 7
    short: Any = api.completions.create(model="bytes", prompt="hi", extra_body={"truncate_prompt_tokens": 7}, **more)
    assert short.choices[0].text.startswith("hi")
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens is 0"):
        api.completions.create(model="bytes", prompt=prompt, extra_body={"truncate_prompt_tokens": 0})


@pytest.mark.parametrize("answer", [None, 100, 1500])
def test_a_cut_leaves_room_for_the_answer_or_for_a_share_of_the_context_if_its_length_is_unknown(
    answer: int | None,
) -> None:
    context, cuts = 4000, 0
    room = max(answer or 0, context // ANSWER_SHARE)
    truncation = Truncation(FakeText(), context)  # type: ignore[arg-type]
    said: list[dict[str, Any]] = []
    for _ in range(40):
        said.append({"role": "user", "content": "x" * 400})
        kept = truncation.compose(said, answer, lambda kept: "".join(each["content"] for each in kept))
        assert len(kept) <= context - room
        cuts += len(kept) < sum(len(each["content"]) for each in said)
        said.append({"role": "assistant", "content": "y" * 400})
    assert cuts > 5


def test_of_known_messages_the_one_that_was_met_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.server.truncation.KNOWN_SIZES", 2)
    text = FakeText()
    truncation = Truncation(text, 4000)  # type: ignore[arg-type]

    def tokenized(content: str) -> bool:
        before = text.encoded
        truncation.compose([{"role": "user", "content": content}], None, lambda kept: "")
        return text.encoded > before

    assert [tokenized(each) for each in ("a", "b", "a", "c", "a", "b")] == [True, True, False, True, False, True]
