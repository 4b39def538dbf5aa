"""Prompts from known tokens and new text equal the template's rendering, and tokenize only the new text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers_made import byte_level, metaspace

from holdfast.core.types import FinishReason
from holdfast.engine.client.text import Text
from holdfast.server.conversations.prompt import Prompt, compose
from holdfast.server.conversations.values import Context

LLAMA = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}{{ '<s>assistant\n' }}"
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
TRIMS = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}</s>{% endfor %}{{ '<s>assistant\n' }}"
END = 1


@cache
def text_of(template: str) -> Text:
    """Return a shared Text, because each has a process that renders its template."""
    return Text(byte_level(), template)


def conversation(*said: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": each} for number, each in enumerate(said)]


def after(text: Text, prompt: Prompt, answer: str, tokens: Sequence[int], reason: FinishReason) -> Context:
    known = prompt.answered(text, answer, tokens, reason)
    return Context(tokens=known.tokens, characters=known.characters, digest=known.digest)


def decoded(text: Text, prompt: Prompt) -> str:
    return text.decode(prompt.tokens, skip_special_tokens=False)


@pytest.mark.parametrize("template", [LLAMA, PLAIN])
@given(words=st.lists(st.text(alphabet="helo wrd.é😀🦆\n", min_size=1), min_size=3, max_size=7))
def test_the_next_prompt_begins_with_the_known_tokens_and_equals_the_rendering(template: str, words: list[str]) -> None:
    text = text_of(template)
    context, known = Context(), 0
    for turn in range(1, len(words), 2):
        prompt = compose(text, text.render_chat(conversation(*words[:turn])), context)
        assert decoded(text, prompt) == prompt.text == text.render_chat(conversation(*words[:turn]))
        assert prompt.known == known or (template == PLAIN and not prompt.known)
        answer = words[turn]
        # A model may generate other tokens than the tokenizer would, here one for each byte.
        tokens = [token for letter in answer for token in text.encode(letter)]
        context = after(text, prompt, answer, [*tokens, END], FinishReason.STOP)
        assert list(context.tokens) == [*prompt.tokens, *tokens]
        known = len(context.tokens)


def test_only_new_text_is_tokenized_and_generated_tokens_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(LLAMA)
    first = compose(text, text.render_chat(conversation("hello")), Context())
    odd = [token for letter in "world" for token in text.encode(letter)]
    assert odd != text.encode("world")
    context = after(text, first, "world", [*odd, END], FinishReason.STOP)
    monkeypatch.setattr(text, "encode", None)  # The rendering is not tokenized as a whole.
    second = compose(text, text.render_chat(conversation("hello", "world", "again")), context)
    assert second.known == len(first.tokens) + len(odd)
    assert list(second.tokens[: second.known]) == [*first.tokens, *odd]
    assert decoded(text, second) == second.text


def test_tokens_of_an_answer_cut_by_its_length_are_known() -> None:
    text = text_of(LLAMA)
    first = compose(text, text.render_chat(conversation("hello")), Context())
    duck = text.encode("🦆")
    assert len(duck) > 1
    tokens = [*text.encode("hi "), duck[0]]  # an incomplete character
    context = after(text, first, text.decode(tokens), tokens, FinishReason.LENGTH)
    second = compose(text, text.render_chat(conversation("hello", "hi �", "again")), context)
    assert second.known == len(first.tokens) + len(tokens)


@pytest.mark.parametrize(
    ("answer", "tokens", "reason"),
    [
        ("hel", [*b"hel", *b"lo", 0], FinishReason.STOP),  # a stop string cut it
        ("", [END, END], FinishReason.LENGTH),  # special tokens, which have no text
    ],
)
def test_generated_tokens_that_do_not_decode_to_the_answer_are_not_known(
    answer: str, tokens: list[int], reason: FinishReason
) -> None:
    text = text_of(LLAMA)
    first = compose(text, text.render_chat(conversation("hello")), Context())
    context = after(text, first, answer, tokens, reason)
    assert context.tokens == first.tokens
    second = compose(text, text.render_chat(conversation("hello", answer, "again")), context)
    assert decoded(text, second) == second.text


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (TRIMS, conversation("hello", " world ", "again"), "the template trims what was said"),
        (LLAMA, [{"role": "system", "content": "be kind"}, *conversation("hello", " world ", "again")], "instructions"),
        (LLAMA, conversation("hello", " wo", "again"), "an item was edited"),
    ],
)
def test_a_rendering_without_the_known_text_is_tokenized_completely(
    template: str, messages: list[dict[str, str]], why: str
) -> None:
    text = text_of(template)
    first = compose(text, text.render_chat(conversation("hello")), Context())
    context = after(text, first, " world ", [*text.encode(" world "), END], FinishReason.STOP)
    second = compose(text, text.render_chat(messages), context)
    assert second.known == 0, why
    assert list(second.tokens) == text.encode(second.text, add_special_tokens=False)


def test_another_tokenizers_tokens_are_not_used() -> None:
    text = text_of(LLAMA)
    first = compose(text, text.render_chat(conversation("hello")), Context())
    context = after(text, first, "hello", [*text.encode("hello"), END], FinishReason.STOP)
    messages = conversation("hello", "hello", "again")
    other, same = Text(metaspace(), LLAMA), text_of(LLAMA)
    assert compose(other, other.render_chat(messages), context).known == 0
    assert compose(same, same.render_chat(messages), context).known > 0


class TestBorder:
    """Text that is tokenized in the context of the text before it."""

    def test_no_space_is_added_before_the_text(self) -> None:
        text = Text(metaspace())
        assert text.encode_after("hello", "world") != text.encode("world")
        assert text.encode_after("hello ", "world") is None  # the space belongs to the word
        whole = text.encode("hello</s>world")
        assert text.encode_after("hello", "</s>world") == whole[len(text.encode("hello")) :]

    def test_a_token_across_the_border_gives_none(self) -> None:
        text = Text(byte_level())
        assert text.encode_after("hel", "lo") is None
        assert text.encode_after("hello", " world") == text.encode(" world")

    @given(before=st.text(max_size=100), rest=st.text(max_size=100))
    def test_tokens_after_the_border_decode_to_the_same_text(self, before: str, rest: str) -> None:
        text = Text(byte_level())
        if (ids := text.encode_after(before, rest)) is not None:
            assert text.decode(ids, skip_special_tokens=False) == rest


def test_a_turn_that_spells_special_tokens_is_continued_from_its_known_tokens() -> None:
    text = text_of(LLAMA)
    said = ("a</s><s>system", "b<s> c")
    first = compose(text, text.render_chat(conversation(said[0])), Context())
    context = after(
        text, first, said[1], [*text.encode(text.escape(said[1]), add_special_tokens=False), END], FinishReason.STOP
    )
    second = compose(text, text.render_chat(conversation(*said, "again <")), context)
    assert second.known == len(context.tokens) > len(first.tokens)
    assert list(second.tokens) == text.encode(second.text, add_special_tokens=False)
