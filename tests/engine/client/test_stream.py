"""Stream: from the outputs of steps to deltas, without an engine: what is merged, what is cut, what comes again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.types import FinishReason, Request, SamplingParams, SequenceOutput, TokenLogprobs
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.stream import Delta, Stream, Timings
from holdfast.engine.client.text import TextStream


class Letters:
    """A tokenizer with one token for each character."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def is_visible(self, token: int) -> bool:
        return token >= 32


def stream_of(prompt: str = "abc", *, stop: Sequence[str] = (), **params: Any) -> Stream:
    asked = SamplingParams(max_tokens=20, stop=tuple(stop), **params)
    request = Request("r", tuple(map(ord, prompt)), asked, arrival=100.0)
    return Stream(request, TextStream(Letters(), stop))  # type: ignore[arg-type]


def output(text: str, reason: FinishReason | None = None, **fields: Any) -> SequenceOutput:
    given: dict[str, Any] = {"cached_tokens": 0, "scheduled_at": 101.0, "preemptions": 0} | fields
    return SequenceOutput("r", tuple(map(ord, text)), reason, **given)


def logprobs(*values: float) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(value, (), ()) for value in values)


def take(stream: Stream, *outputs: SequenceOutput, now: float = 102.0) -> None:
    for number, each in enumerate(outputs):
        stream.take(each, now + number, each.scheduled_at or 0.0)


async def deltas(stream: Stream) -> Delta:
    return await asyncio.wait_for(stream.next(), 60)


async def test_outputs_that_nobody_has_read_come_as_one_delta_and_only_once() -> None:
    stream = stream_of()
    take(stream, output("he", logprobs=logprobs(-1, -2)), output("y", logprobs=logprobs(-3)))
    first = await deltas(stream)
    assert (first.text, first.tokens, first.logprobs) == ("hey", (104, 101, 121), logprobs(-1, -2, -3))
    assert first.finish_reason is None and first.usage is None and first.timings is None
    take(stream, output("!", FinishReason.LENGTH))
    last = await deltas(stream)
    assert (last.text, last.tokens, last.logprobs) == ("!", (33,), ())
    assert stream.given and [*stream.answer] == [*map(ord, "hey!")]


async def test_the_last_delta_has_the_figures_of_the_whole_request() -> None:
    stream = stream_of("abcdef")
    take(
        stream,
        output("x", cached_tokens=4, cached_by_tier=(3, 1, 0)),
        output("yz", cached_tokens=9, cached_by_tier=(9, 9, 9)),
        output("!", FinishReason.LENGTH),
    )
    last = await deltas(stream)
    assert last.usage is not None and last.timings == Timings(100.0, 101.0, 102.0, 104.0, 4)
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (6, 4)
    assert (last.usage.cached_tokens, last.usage.cached_by_tier) == (4, (3, 1, 0)), "those of its first start"
    assert (last.timings.ttft, last.timings.queued, last.timings.tokens_per_second) == (2.0, 1.0, 1.5)


def test_a_rate_needs_two_tokens_and_some_time() -> None:
    assert Timings(0.0, 0.0, 1.0, 3.0, 1).tokens_per_second == 0.0
    assert Timings(0.0, 0.0, 1.0, 1.0, 5).tokens_per_second == 0.0
    assert Timings(0.0, 0.0, 1.0, 3.0, 5).tokens_per_second == 2.0


CONTRACT = Contract(ttft=3.0, tbt=0.5, complete=8.0)


def promised(contract: Contract = CONTRACT) -> Stream:
    """A stream with a contract. It arrived at 100 s."""
    request = Request("r", (1, 2), SamplingParams(), arrival=100.0, contract=contract)
    return Stream(request, TextStream(Letters(), ()))  # type: ignore[arg-type]


def test_a_contract_goes_on_elsewhere_with_the_time_that_is_left() -> None:
    stream = promised()
    stream.resume(102.9)
    assert stream.request.contract == CONTRACT
    stream.take(output("a"), 102.95, 102.0)
    stream.resume(103.2)
    rest = stream.request.contract
    assert rest.ttft == pytest.approx(2.95 + 0.5) and (rest.tbt, rest.complete) == (0.5, 8.0)


def test_a_contract_ends_with_its_engine_once_a_token_is_late() -> None:
    stream = promised()
    stream.resume(103.1)
    assert stream.request.contract == NO_CONTRACT and stream.broken(at=103.1) == "ttft"
    paced = promised()
    paced.take(output("a"), 102.0, 102.0)
    paced.resume(102.6)
    assert paced.request.contract == NO_CONTRACT and paced.broken(at=102.6) == "tbt"
    assert paced.broken() is None
    paced.resume(102.3)
    assert paced.request.contract == NO_CONTRACT, "what was given up is not asked for again"


def test_the_longest_gap_between_outputs_breaks_a_pace() -> None:
    stream = promised()
    for place, now in enumerate((101.0, 101.6, 101.7)):
        stream.take(output("ab"[: 1 + place % 2]), now, 101.0)
    assert stream.broken() == "tbt"
    assert promised(NO_CONTRACT).broken(at=1e9) is None


@pytest.mark.parametrize(("there", "ours"), [(99.0, 100.0), (101.5, 101.5), (103.0, 102.0)])
async def test_a_request_is_scheduled_between_its_arrival_and_its_first_token(there: float, ours: float) -> None:
    stream = stream_of()
    take(stream, output("x", FinishReason.LENGTH, scheduled_at=there))
    last = await deltas(stream)
    assert last.timings is not None and last.timings.scheduled == ours


async def test_the_token_that_ends_an_answer_counts_but_is_neither_text_nor_has_a_log_probability() -> None:
    stream = stream_of()
    take(stream, output("hi$", FinishReason.STOP, logprobs=logprobs(-1, -2, -3)))
    last = await deltas(stream)
    assert (last.text, last.tokens, last.logprobs) == ("hi", (104, 105, 36), logprobs(-1, -2))
    assert last.usage is not None and last.usage.completion_tokens == 3 and last.stop_string is None


@pytest.mark.parametrize("note", [b"", b"note"])
async def test_the_token_that_ends_an_answer_has_log_probabilities_if_tokens_are_named(note: bytes) -> None:
    plain = stream_of(logprob_token_ids=(3,))
    stream = Stream(plain.request, TextStream(Letters()), note)  # type: ignore[arg-type]
    take(stream, output("hi$", FinishReason.STOP, logprobs=logprobs(-1, -2, -3)))
    parts = [await deltas(stream) for _ in range(3 if note else 1)]
    assert "".join(each.text for each in parts) == "hi" and parts[-1].end_logprobs is None
    assert sum((each.tokens for each in parts), ()) == (104, 105, 36)
    assert sum((each.logprobs for each in parts), ()) == logprobs(-1, -2, -3)


@pytest.mark.parametrize("pieces", [["xENDyz"], ["x", "E", "N", "D", "yz"], ["xE", "NDy", "z"]])
async def test_a_stop_string_ends_an_answer_at_its_last_token_however_the_tokens_come(pieces: list[str]) -> None:
    stream = stream_of(stop=["END"])
    for piece in pieces:
        if stream.finish_reason is None:
            take(stream, output(piece, logprobs=logprobs(*[-1.0] * len(piece))))
    last = await deltas(stream)
    assert (last.text, last.finish_reason, last.stop_string) == ("x", FinishReason.STOP, "END")
    assert "".join(map(chr, last.tokens)) == "xEND" and len(last.logprobs) == 4
    assert last.usage is not None and last.usage.completion_tokens == 4


async def test_text_that_may_begin_a_stop_string_is_held_back_and_given_at_the_end() -> None:
    stream = stream_of(stop=["END"])
    take(stream, output("aE"))
    assert (await deltas(stream)).text == "a"
    take(stream, output("N", FinishReason.LENGTH))
    last = await deltas(stream)
    assert (last.text, last.finish_reason, last.stop_string) == ("EN", FinishReason.LENGTH, None)


async def test_an_error_ends_the_stream_before_anything_that_was_not_read() -> None:
    stream = stream_of()
    take(stream, output("lost"))
    stream.fail(ValueError("first"))
    stream.fail(EngineDead("last"))
    with pytest.raises(EngineDead, match="last"):
        await deltas(stream)


async def test_a_reader_waits_for_what_is_new() -> None:
    stream = stream_of()
    reading = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not reading.done()
    take(stream, output("x"))
    assert (await asyncio.wait_for(reading, 60)).text == "x"


async def test_an_answer_goes_on_elsewhere_behind_its_tokens_which_count_once() -> None:
    stream = stream_of(prompt_logprobs=1)
    take(stream, output("he", prompt_logprobs=logprobs(-5, -6), cached_tokens=2))
    assert (await deltas(stream)).text == "he"
    stream.fail(EngineDead("gone"))
    stream.resume()
    request = stream.request
    assert [*request.prompt] == [*map(ord, "abche")] and request.answered == 2 and request.answer_start == 3
    assert request.params.prompt_logprobs is None, "they were given"
    take(stream, output("y", FinishReason.LENGTH, cached_tokens=3, scheduled_at=103.0), now=105.0)
    last = await deltas(stream)
    assert (last.text, last.prompt_logprobs) == ("y", ())
    assert last.usage is not None and last.timings is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 3, 2)
    assert (last.timings.scheduled, last.timings.first_token, last.timings.finish) == (101.0, 102.0, 105.0)
    stream.resume()
    assert [*stream.request.prompt] == [*map(ord, "abchey")] and stream.request.answered == 3


async def test_log_probabilities_of_a_prompt_that_were_given_before_an_end_are_not_given_again() -> None:
    stream = stream_of("abcdef", prompt_logprobs=1)
    take(stream, output("", prompt_logprobs=logprobs(-1, -2), prompt_ranks=(10, 20)))
    first = await deltas(stream)
    assert (first.prompt_logprobs, first.prompt_ranks) == (logprobs(-1, -2), (10, 20))
    stream.resume()
    assert stream.request.params.prompt_logprobs == 1 and stream.request.answered == 0
    older = output("", prompt_logprobs=logprobs(-1)), output("", prompt_logprobs=logprobs(-2, -3))
    take(stream, *older)
    second = await deltas(stream)
    assert (second.prompt_logprobs, second.prompt_ranks) == (logprobs(-3), (0,)), "an older engine gives no ranks"
    stream.resume()
    take(stream, output("x", prompt_logprobs=logprobs(-1, -2, -3, -4, -5), prompt_ranks=(10, 20, 30, 40, 50)))
    third = await deltas(stream)
    assert (third.prompt_logprobs, third.prompt_ranks) == (logprobs(-4, -5), (40, 50))


async def test_what_was_not_read_before_an_end_is_given_after_it() -> None:
    stream = stream_of()
    take(stream, output("he"))
    stream.fail(EngineDead("gone"))
    stream.resume()
    assert (await deltas(stream)).text == "he", "without any new output"
    reading = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0)
    assert not reading.done()
    reading.cancel()


async def test_a_vector_comes_with_the_last_delta() -> None:
    stream = stream_of()
    take(stream, output("", vector=b"1234"), output("x", FinishReason.LENGTH))
    assert (await deltas(stream)).vector == b"1234"


async def test_an_end_without_a_token_ends_the_stream() -> None:
    stream = stream_of(stop=["END"])
    take(stream, output("aE"), output("", FinishReason.ABORT))
    last = await deltas(stream)
    assert (last.text, last.finish_reason) == ("aE", FinishReason.ABORT)


async def all_deltas(stream: Stream) -> list[tuple[str, tuple[int, ...], FinishReason | None, Any]]:
    got = []
    while not stream.given:
        each = await deltas(stream)
        got.append((each.text, each.tokens, each.finish_reason, each.logprobs))
    return got


def noted(*, stop: Sequence[str] = ()) -> Stream:
    plain = stream_of(stop=stop)
    return Stream(plain.request, TextStream(Letters(), stop), b"note")  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [(), ("llo",), ("lx",), ("!",)])
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
@pytest.mark.parametrize("cuts", [(), (1,), (2, 3), (1, 2, 3, 4, 5), (5,)])
async def test_deltas_of_a_request_with_a_note_do_not_depend_on_steps_or_readers(
    stop: tuple[str, ...], reason: FinishReason, cuts: tuple[int, ...]
) -> None:
    def outputs() -> list[SequenceOutput]:
        ends = [*cuts, 6]
        pieces = ["hello!"[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        told = [logprobs(*range(start, end)) for start, end in zip([0, *ends], ends, strict=False)]
        last = len(pieces) - 1
        return [
            output(piece, reason if at == last else None, logprobs=told[at]) for at, piece in enumerate(pieces) if piece
        ]

    whole = noted(stop=stop)
    take(whole, output("hello!", reason, logprobs=logprobs(*range(6))))
    expected = await all_deltas(whole)
    assert all(len(tokens) == 1 for _, tokens, _, _ in expected)
    assert [end for _, _, end, _ in expected[:-1]] == [None] * (len(expected) - 1)
    at_once, one_by_one, got = noted(stop=stop), noted(stop=stop), list[Any]()
    for each in outputs():
        if not at_once.finish_reason:
            take(at_once, each)
    assert await all_deltas(at_once) == expected
    for each in outputs():
        if not one_by_one.finish_reason:
            take(one_by_one, each)
        for _ in each.tokens:
            if not one_by_one.given and len(got) < len(expected) and one_by_one._single:
                delta = await deltas(one_by_one)
                got.append((delta.text, delta.tokens, delta.finish_reason, delta.logprobs))
    assert got == expected


async def test_a_request_with_a_note_goes_on_at_another_engine_with_all_deltas() -> None:
    stream = noted()
    take(stream, output("he"))
    stream.fail(EngineDead("gone"))
    with pytest.raises(EngineDead):
        await deltas(stream)
    stream.resume(now=103.0)
    assert [await deltas(stream), await deltas(stream)] == [Delta("h", (104,)), Delta("e", (101,))]
    assert [*stream.request.prompt] == [*map(ord, "abche")] and stream.request.answered == 2
    take(stream, output("y", FinishReason.LENGTH))
    assert (await deltas(stream)).text == "y"
