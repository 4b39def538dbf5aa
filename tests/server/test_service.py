"""Choices in parallel: their order, their errors, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from holdfast.engine.client.stream import Delta
from holdfast.server.service import side_by_side


class Streams:
    """Streams that log when they begin and end."""

    def __init__(self) -> None:
        self.log: list[str] = []

    async def stream(self, name: str, *words: str, error: Exception | None = None) -> AsyncGenerator[Delta, None]:
        self.log.append(f"{name} begins")
        try:
            for word in words:
                await asyncio.sleep(0)
                self.log.append(f"{name} {word}")
                yield Delta(word, (1,), None)
            if error is not None:
                raise error
        finally:
            self.log.append(f"{name} ends")


async def test_other_choices_start_at_the_first_delta_of_the_first() -> None:
    streams = Streams()
    group = [streams.stream("a", "x", "y"), streams.stream("b", "x"), streams.stream("c", "x")]
    seen = [(index, delta.text) async for index, delta in side_by_side([group])]
    assert sorted(seen) == [(0, "x"), (0, "y"), (1, "x"), (2, "x")]
    assert streams.log[:2] == ["a begins", "a x"]


async def test_choice_numbers_run_through_all_prompts() -> None:
    streams = Streams()
    groups = [
        [streams.stream("a", "1"), streams.stream("b", "2")],
        [streams.stream("c", "3"), streams.stream("d", "4")],
    ]
    seen = sorted([(index, delta.text) async for index, delta in side_by_side(groups)])
    assert seen == [(0, "1"), (1, "2"), (2, "3"), (3, "4")]


async def test_a_failing_choice_ends_all_others() -> None:
    streams = Streams()
    group = [streams.stream("a", *"xyzxyz"), streams.stream("b", error=RuntimeError("b broke"))]
    with pytest.raises(RuntimeError, match="b broke"):
        async for _ in side_by_side([group]):
            pass
    assert {"a ends", "b ends"} <= set(streams.log)


async def test_closing_early_ends_all_choices() -> None:
    streams = Streams()
    group = [streams.stream("a", *"xyzxyz"), streams.stream("b", *"xyzxyz")]
    async with aclosing(side_by_side([group])) as merged:
        async for index, _ in merged:
            if index == 1:
                break
    assert {"a ends", "b ends"} <= set(streams.log)


async def test_other_choices_start_when_the_first_ends_without_deltas() -> None:
    streams = Streams()
    seen = [index async for index, _ in side_by_side([[streams.stream("a"), streams.stream("b", "x")]])]
    assert seen == [1]
