"""Fields of sampling and the cache's salt from end to end: a server process and the built-in model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.served import Serving, started

MODEL = "holdfast-tiny"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with started("--device", "cpu", "--cache-gb", "0.1", "--store", "memory") as serving:
        yield serving


def complete(serving: Serving, prompt: str = "Once upon a time", **more: Any) -> Any:
    with serving.client() as client:
        return client.completions.create(model=MODEL, prompt=prompt, **({"max_tokens": 24, "temperature": 0} | more))


def test_an_answer_has_no_bad_word_and_only_allowed_tokens(serving: Serving) -> None:
    text = complete(serving).choices[0].text
    words = [word for word in re.findall(r"[a-z]{3,}", text) if f" {word}" in text][:3]
    assert words
    changed = complete(serving, extra_body={"bad_words": words}).choices[0].text
    assert changed != text and not any(f" {word} " in changed for word in words)
    ids = complete(serving, extra_body={"return_token_ids": True}).choices[0].token_ids
    allowed = sorted(set(ids))[:5]
    only = complete(serving, temperature=1, n=3, extra_body={"allowed_token_ids": allowed, "return_token_ids": True})
    assert {token for choice in only.choices for token in choice.token_ids} <= set(allowed)


def test_a_stop_string_is_kept_on_request(serving: Serving) -> None:
    text = complete(serving).choices[0].text
    stop = text[6:9]
    cut = text[: text.index(stop)]
    assert complete(serving, stop=stop).choices[0].text == cut
    kept = complete(serving, stop=stop, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert (kept.text, kept.finish_reason) == (cut + stop, "stop")


def test_special_tokens_have_their_names_as_text_on_request(serving: Serving) -> None:
    ends = {"allowed_token_ids": [1], "ignore_eos": True}
    assert complete(serving, max_tokens=3, extra_body=ends).choices[0].text == ""
    named = complete(serving, max_tokens=3, extra_body={**ends, "skip_special_tokens": False})
    assert named.choices[0].text == "<|end|>" * 3
    plain = complete(serving, extra_body={"skip_special_tokens": False})
    assert plain.choices[0].text == complete(serving).choices[0].text, "the token that ends an answer is no part of it"


def test_state_is_shared_only_between_requests_with_the_same_salt(serving: Serving) -> None:
    prompt = "The lighthouse keeper counted the ships that passed in the night. " * 4

    def cached(**body: Any) -> int:
        usage = complete(serving, prompt, max_tokens=1, extra_body=body).usage
        return int(usage.prompt_tokens_details.cached_tokens)

    assert cached() == 0 and cached() > 0
    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0


def test_a_begun_answer_is_continued(serving: Serving) -> None:
    asked: list[Any] = [{"role": "user", "content": "Tell me of the sea."}]
    with serving.client() as client:
        chat: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(messages=asked, **chat).choices[0].message.content
        assert whole and len(whole) > 8
        begun = [*asked, {"role": "assistant", "content": whole[: len(whole) // 2]}]
        rest = client.chat.completions.create(
            messages=begun, extra_body={"continue_final_message": True, "return_token_ids": True}, **chat
        )
    assert rest.choices[0].message.content
    assert rest.model_extra and rest.model_extra["prompt_token_ids"]


@pytest.mark.parametrize("route", ["completions", "chat.completions"])
def test_a_choice_says_which_stop_string_or_token_ended_it(serving: Serving, route: str) -> None:
    given = {"prompt": "Once upon a time"}
    if route == "chat.completions":
        given = {"messages": [{"role": "user", "content": "What is 2 plus 2?"}], "store": True}

    with serving.client() as client:
        create = (client.completions if route == "completions" else client.chat.completions).create

        def ends(**more: Any) -> list[Any]:
            asked = {"model": MODEL, "max_tokens": 24, "temperature": 0, **given, **more}
            whole = create(**asked)
            streamed = list(create(**asked, stream=True))
            chunks = [chunk.choices[0].model_dump() for chunk in streamed]
            last = next(choice for choice in chunks if choice["finish_reason"])
            assert not any("stop_reason" in choice for choice in chunks if choice is not last)
            found = [whole.choices[0].model_dump(), last]
            if route == "chat.completions":
                stored = [client.chat.completions.retrieve(answer.id) for answer in (whole, streamed[0])]
                found += [kept.choices[0].model_dump() for kept in stored]
            return [choice.get("stop_reason", "none") for choice in found]

        each, word = (2, "w") if route == "completions" else (4, "2")
        ids = create(**given, model=MODEL, max_tokens=24, temperature=0, extra_body={"return_token_ids": True})
        third = ids.choices[0].token_ids[2]
        assert ends(stop=["zzz", word]) == [word] * each
        assert ends(stop="zzz", extra_body={"stop_token_ids": [5, third]}) == [third] * each
        assert ends(stop="zzz", max_tokens=2) == ends(stop="zzz") == [None] * each
        assert ends() == ["none"] * each
