"""Files of chats: ShareGPT's, those of vLLM's multi-turn benchmark, and that benchmark's settings of a generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from math import exp, floor, log, sqrt
from pathlib import Path
from typing import Any

from holdfast.lab.workloads.fields import MAX_TOKENS, CountTokens, Fields, length_of, read_workload
from holdfast.lab.workloads.values import NOTHING_COMMON, Common, Conversation, Turn

Draw = Callable[[random.Random], float]
"""Function that draws one number."""
GENERATOR = "generate_conversations"
"""The `filetype` of the settings of vLLM's generator."""
MAX_CONVERSATIONS, MAX_MESSAGES = 1_000_000, 10_000
"""Largest number of conversations that settings may ask for, and of messages in one of them."""
MOST_KNUTH = 30.0
"""Largest mean of a Poisson distribution that is drawn at once. A larger one is drawn as the sum of two halves."""


def chats_json(path: str | Path, count_tokens: CountTokens, seed: int) -> list[Conversation]:
    """Read a JSON file of chats, all conversations arriving at once. Raises ValueError, naming the place.

    The file holds ShareGPT's `[{conversations: [{from, value}]}]`, the `[{messages: [{role, content}]}]` of vLLM's
    multi-turn benchmark, or the settings of that benchmark's generator, from which conversations are drawn with `seed`.
    """
    text = read_workload(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: it is not JSON ({error}); it must hold chats") from None
    if isinstance(value, dict):
        return generated_chats(str(path), value, seed)
    if isinstance(value, list) and value and isinstance(value[0], dict) and "messages" in value[0]:
        return messages_of(str(path), value, count_tokens)
    return sharegpt(str(path), value, count_tokens)


def sharegpt(where: str, rows: Any, count_tokens: CountTokens) -> list[Conversation]:
    """The conversations of a ShareGPT file. A turn is a human's message and its answer."""
    try:
        said = [[(message["from"], message["value"]) for message in row["conversations"]] for row in rows]
        if not all(isinstance(value, str) for messages in said for _, value in messages):
            raise TypeError("a value is not text")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{where}: {error!r}; it must hold a list of {{id, conversations: [{{from, value}}]}}"
        ) from None
    return _talks(
        [
            Turn(count_tokens(asked), count_tokens(answered))
            for (who, asked), (other, answered) in pairwise(messages)
            if (who, other) == ("human", "gpt") and asked and answered
        ]
        for messages in said
    )


def messages_of(where: str, rows: list[Any], count_tokens: CountTokens) -> list[Conversation]:
    """The conversations of vLLM's multi-turn benchmark. A turn is an assistant's message and those before it."""
    talks = []
    for number, row in enumerate(rows):
        turns, prompt = list[Turn](), 0
        for message in Fields(f"{where}, conversation {number}", row, "a conversation").objects("messages", "message"):
            length = length_of(message.get("content"), count_tokens)
            if message.text("role") != "assistant":
                prompt += length
            elif prompt and length:
                turns.append(Turn(prompt, length))
                prompt = 0
        talks.append(turns)
    return _talks(talks)


def _talks(talks: Iterable[list[Turn]]) -> list[Conversation]:
    """Conversations of these turns, all arriving at once. Conversations without a turn are left out."""
    return [Conversation(0.0, tuple(turns)) for turns in talks if turns]


def generated_chats(where: str, settings: dict[str, Any], seed: int) -> list[Conversation]:
    """Draw the conversations that settings of vLLM's generator describe.

    `num_turns` counts messages, of which every other one is an answer. All conversations begin with the same
    `common_prefix_num_tokens`, which count for the first message. `prefix_num_tokens` of its own come on top.
    """
    fields = Fields(where, settings, "settings of a generator")
    if fields.get("filetype") != GENERATOR:
        raise fields.wrong("filetype", GENERATOR)
    asks, answers = (
        Fields(f"{where}, {name}", fields.get(name), "a section") for name in ("prompt_input", "prompt_output")
    )
    messages, tokens, prefix = (distribution(asks, name) for name in ("num_turns", "num_tokens", "prefix_num_tokens"))
    common_name = "common_prefix_num_tokens"
    common = distribution(asks, common_name) if common_name in asks else constant(0)
    output = distribution(answers, "num_tokens")
    choose = random.Random(f"{GENERATOR}/{seed}")
    shared = Common(GENERATOR, _tokens(common(choose), 0))
    talks = []
    for _ in range(int(fields.number("num_conversations", least=1, most=MAX_CONVERSATIONS))):
        count = -(-min(max(2, int(messages(choose))), MAX_MESSAGES) // 2)
        turns = [Turn(_tokens(tokens(choose), 1), _tokens(output(choose), 1)) for _ in range(count)]
        first = max(turns[0].prompt, shared.tokens) + _tokens(prefix(choose), 0)
        turns[0] = replace(turns[0], prompt=first, common=shared if shared.tokens else NOTHING_COMMON)
        talks.append(turns)
    return _talks(talks)


def _tokens(drawn: float, least: int) -> int:
    """A drawn number as a number of tokens."""
    return int(max(least, min(round(drawn), MAX_TOKENS)))


def distribution(section: Fields, name: str) -> Draw:
    """The distribution that a field of the settings describes. Raises ValueError, naming the field and its value."""
    fields = Fields(f"{section.where}, {name}", section.get(name), "a distribution")
    kind = fields.get("distribution")
    most = fields.number("max", most=MAX_TOKENS, default=MAX_TOKENS)
    match kind:
        case "constant":
            return constant(fields.number("value", most=MAX_TOKENS))
        case "uniform":
            low = fields.number("min", most=MAX_TOKENS)
            return uniform(low, fields.number("max", least=low, most=MAX_TOKENS))
        case "lognormal" if "average" in fields:
            average = fields.number("average", least=1, most=MAX_TOKENS)
            ratio = fields.number("median_ratio", least=0.001, most=0.999, default=0.85)
            return capped(lognormal(log(average * ratio), sqrt(-2 * log(ratio))), most)
        case "lognormal":
            return capped(lognormal(fields.number("mean", most=20), fields.number("sigma", most=20)), most)
        case "zipf":
            return capped(zipf(fields.number("alpha", least=1.01, most=100)), most)
        case "poisson":
            return capped(poisson(fields.number("alpha", most=1e5)), most)
    raise fields.wrong("distribution", "constant, uniform, lognormal, zipf or poisson")


def constant(value: float) -> Draw:
    """Always the same number."""
    return lambda choose: value


def uniform(low: float, high: float) -> Draw:
    """Any number from `low` to `high`; a whole number if both are."""
    if low == int(low) and high == int(high):
        return lambda choose: choose.randint(int(low), int(high))
    return lambda choose: choose.uniform(low, high)


def lognormal(mean: float, sigma: float) -> Draw:
    """A number whose logarithm has this mean and this standard deviation."""
    return lambda choose: choose.lognormvariate(mean, sigma)


def zipf(alpha: float) -> Draw:
    """A whole number k with a probability in proportion to k**-alpha (Devroye 1986, section X.6.1)."""
    power = alpha - 1
    bound = 2**power

    def draw(choose: random.Random) -> float:
        while True:
            found = floor((1 - choose.random()) ** (-1 / power))
            ratio = (1 + 1 / found) ** power
            if choose.random() * found * (ratio - 1) / (bound - 1) <= ratio / bound:
                return float(found)

    return draw


def poisson(mean: float) -> Draw:
    """A whole number of events, of which there are `mean` on average (Knuth's product of uniform numbers)."""
    if mean > MOST_KNUTH:
        half = poisson(mean / 2)
        return lambda choose: half(choose) + half(choose)
    least = exp(-mean)

    def draw(choose: random.Random) -> float:
        count, product = 0, choose.random()
        while product > least:
            count, product = count + 1, product * choose.random()
        return float(count)

    return draw


def capped(draw: Draw, most: float) -> Draw:
    """This distribution, with larger numbers replaced by `most`."""
    return lambda choose: min(draw(choose), most)
