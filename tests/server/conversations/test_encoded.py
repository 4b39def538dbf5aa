"""Encoded turns: the same bytes as if each part was encoded whole, made once and before the transaction."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from storing import AMPLE, item, turn

from holdfast.server.conversations.encoded import tokens_from_bytes
from holdfast.server.conversations.store import SMALL, AsyncStore, Store
from holdfast.server.conversations.values import Context
from holdfast.server.conversations.write_lock import FileLock


def test_the_bytes_are_those_of_the_parts_encoded_whole() -> None:
    made = turn("hello", tokens=[1, 2, 70_000], conversation="conv")
    assert made.encoded.response == msgspec.json.encode(made.response)
    assert made.encoded.input == msgspec.json.encode(made.input)
    assert [each.data for each in made.encoded.items] == [
        msgspec.json.encode(each) for each in (*made.input, *made.response["output"])
    ]
    assert tokens_from_bytes(made.encoded.tokens).tolist() == [1, 2, 70_000]
    assert made.encoded.said == len(made.encoded.input) + len(msgspec.json.encode(made.response["output"]))
    parts = (made.encoded.response, made.encoded.input, made.encoded.history, made.encoded.tokens)
    assert made.encoded.size == sum(map(len, parts)) + sum(len(each.data) for each in made.encoded.items)


def test_items_have_their_words_and_only_a_finished_turn_of_a_conversation_has_items() -> None:
    finished = turn("red fox", conversation="conv")
    assert [each.words for each in finished.encoded.items] == [{"red", "fox"}, {"red", "fox"}]
    assert not turn("red fox").encoded.items
    assert not turn("red fox", conversation="conv", status="queued").encoded.items


@pytest.mark.parametrize(("tokens", "known", "start"), [((1, 2, 3, 4), 3, 3), ((1, 2, 9, 4), 0, 2), ((1, 2), 0, 2)])
def test_only_tokens_that_differ_from_the_parent_s_are_encoded(tokens: tuple[int, ...], known: int, start: int) -> None:
    after = Context(thread="t", parent="p", tokens=[1, 2, 3], items=[item("before")])
    made = replace(turn("x", after), tokens=list(tokens), known=known)
    assert made.encoded.start == start
    assert tokens_from_bytes(made.encoded.tokens).tolist() == list(tokens[start:])
    assert made.encoded.history == b"[]", "a parent has the items"
    first = replace(made, context=Context(items=[item("before")]))
    assert first.encoded.start == 0 and first.encoded.history == msgspec.json.encode([item("before")])


LOGPROBS = {"type": "output_text", "text": "a", "logprobs": [{"token": "a", "logprob": -0.5}]}


@pytest.mark.parametrize(
    ("said", "fields", "early"),
    [
        ("x", {}, True),
        ("x" * SMALL, {}, False),
        ("x", {"instructions": "x" * SMALL}, False),
        ("x", {"tools": [{"type": "function", "name": "f"}]}, False),
        ("x", {"output": [{**item("a"), "content": [LOGPROBS]}]}, False),
    ],
    ids=["small", "input", "instructions", "tools", "logprobs"],
)
async def test_only_a_small_turn_is_encoded_before_its_transaction(
    tmp_path: Path, said: str, fields: dict[str, Any], early: bool
) -> None:
    store = Store.open(str(tmp_path / "store.sqlite"), AMPLE, lambda: 1000.0)
    server, other = AsyncStore(store), FileLock(tmp_path / "store.sqlite")
    made = turn("one")
    made = replace(made, input=[item(said)], response={**made.response, **fields})
    with other.held():
        storing = asyncio.create_task(server.commit(made))
        await asyncio.sleep(0)  # It waits for the lock now.
        assert ("encoded" in vars(made)) is early
    await storing
    assert await server.read(lambda store: store.turns.input("a", "one")) == made.input
    server.close()
