"""A request that begins with tokens of its answer continues as the engine that wrote them would have continued."""

from __future__ import annotations

import dataclasses
from contextlib import aclosing

import pytest
import pytest_asyncio

from holdfast.core.types import SamplingParams, ThinkingBudget
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.stream import prepare
from holdfast.lm.config import EngineConfig
from holdfast.lm.grammar.dialects import schema_grammar
from holdfast.lm.limits import RequestRefused
from tests.engine.conftest import SMALL

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 400, "maxItems": 400})
ASKED = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
    "told": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    "penalties": SamplingParams(
        temperature=0.0, max_tokens=24, ignore_eos=True, presence_penalty=1.0, frequency_penalty=1.5,
        repetition_penalty=1.3,
    ),
    "min_tokens": SamplingParams(temperature=1.0, seed=5, max_tokens=24, min_tokens=20),
    "thinking": SamplingParams(
        temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, thinking=ThinkingBudget(9, 5, 6, opened=True)
    ),
    "grammar": SamplingParams(temperature=1.0, seed=1, max_tokens=200, grammar=NUMBERS),
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint):
    client = await EngineClient.start(EngineConfig(model=str(checkpoint), **SMALL))
    yield client
    await client.close()


def asked(client: EngineClient, name: str, params: SamplingParams):
    prompt = client.text.encode("one two three, and so on and so on")
    return prepare(client.info, client.text, prompt, params, name)


async def read(client: EngineClient, stream, tokens: int = 1 << 30):
    """The deltas of a stream, which is left after `tokens` tokens."""
    seen = []
    async with aclosing(client.run(stream)) as deltas:
        async for delta in deltas:
            seen.append(delta)
            if len(stream.answer) >= tokens:
                break
    return seen


async def left(client: EngineClient, name: str, params: SamplingParams, tokens: int):
    """A stream that is left after about `tokens` tokens, and its deltas. A slow reader may get all of it at once."""
    for attempt in range(20):
        stream = asked(client, f"{name}-{attempt}", params)
        deltas = await read(client, stream, tokens)
        if deltas[-1].finish_reason is None:
            return stream, deltas
    raise AssertionError(f"all answers had ended before their reader had {tokens} tokens")


def resume(stream) -> None:
    """Let a stream continue. As this is the same engine, it needs an id that the engine has no output for."""
    stream.resume()
    stream.request = dataclasses.replace(stream.request, id=f"{stream.request.id}-again")


def told(deltas):
    """All output that a reader has received: text, tokens, and log probabilities of both, rounded."""
    rounded = [
        [round(each.logprob, 4) for delta in deltas for each in getattr(delta, kind)]
        for kind in ("logprobs", "prompt_logprobs")
    ]
    text, tokens = "".join(delta.text for delta in deltas), [token for delta in deltas for token in delta.tokens]
    return text, tokens, rounded, deltas[-1].finish_reason


@pytest.mark.parametrize("name", ASKED)
async def test_a_request_goes_on_with_the_same_tokens_text_and_log_probabilities(client, name):
    whole = await read(client, asked(client, f"{name}-whole", ASKED[name]))
    for cut in (1, 7):
        stream, before = await left(client, f"{name}-{cut}", ASKED[name], cut)
        resume(stream)
        assert stream.request.answered == len(stream.answer) >= cut
        after = await read(client, stream)
        assert told([*before, *after]) == told(whole)
        last, first = after[-1].usage, whole[-1].usage
        assert (last.prompt_tokens, last.completion_tokens) == (first.prompt_tokens, first.completion_tokens)
        assert after[-1].timings.arrival == stream.request.arrival


async def test_a_stop_string_is_found_across_the_place_where_a_request_goes_on(client):
    params = ASKED["greedy"]
    text, tokens, _, _ = told(await read(client, asked(client, "unstopped", params)))
    middle = len(client.text.decode(tokens[:7]))
    stop = text[middle - 2 : middle + 2]
    stream, before = await left(client, "stopped", dataclasses.replace(params, stop=(stop,)), 7)
    resume(stream)
    cut, _, _, reason = told([*before, *await read(client, stream)])
    assert (cut, reason) == (text[: text.index(stop)], "stop")


async def test_more_of_an_answer_than_it_may_have_is_refused(client):
    stream = asked(client, "long", ASKED["greedy"])
    stream.request = dataclasses.replace(stream.request, answered=24, prompt=[*stream.request.prompt] * 2)
    with pytest.raises(RequestRefused, match="24 tokens of the answer are given, and max_tokens is 24"):
        await read(client, stream)
