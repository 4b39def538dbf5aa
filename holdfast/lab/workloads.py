"""Workloads: conversations with their lengths and arrivals, from traces, from fitted distributions, or all alike."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

HASH_BLOCK = 512
"""Tokens for each hash id of a Mooncake trace."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: so many new tokens after all that was said before, so many generated ones."""

    prompt: int
    output: int
    think: float = 0.0
    """Seconds from the end of the turn before."""
    hashes: tuple[int, ...] = ()
    """Ids of the prompt's blocks of HASH_BLOCK tokens: equal ids are equal tokens. Empty: tokens of its own."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that continue one another."""

    arrival: float
    """Seconds from the workload's start to the first turn."""
    turns: tuple[Turn, ...]


Workload = Sequence[Conversation]


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths in tokens, cut to [least, most]."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    least: int = 1
    most: int = 1 << 20

    @classmethod
    def of_mean(cls, mean: float, sigma: float, least: int = 1, most: int = 1 << 20) -> Lengths:
        """The distribution with this mean."""
        return cls(mean / exp(sigma * sigma / 2), sigma, least, most)

    def draw(self, choose: random.Random) -> int:
        """One length."""
        return max(self.least, min(self.most, round(choose.lognormvariate(log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of prompts and outputs; what is longer than `limit` in all is drawn again."""

    prompt: Lengths
    output: Lengths
    limit: int


DATASETS = {
    # Sarathi-Serve, Table 2: median and P90 of what is left after outliers above 8,192 and 16,384 tokens are removed.
    # The prompts' parameters are those of the lognormal that has these quantiles once it is cut there.
    "openchat_sharegpt4": Dataset(Lengths(3566.9, 1.7229), Lengths(415, 0.5446), 8192),
    "arxiv_summarization": Dataset(Lengths(7867.9, 0.6479), Lengths(208, 0.4515), 16384),
}


@dataclass(frozen=True, slots=True)
class Talks:
    """Means of a data set of conversations."""

    turns: float
    """Requests of a conversation."""
    prompt: float
    """New tokens of a request."""
    output: float
    """Generated ones."""


SHAREGPT, ULTRACHAT = Talks(5.56, 37.77, 204.58), Talks(3.86, 51.78, 257.81)
"""Pensieve, Table 2."""


def fixed(count: int, prompt: int, output: int) -> list[Conversation]:
    """Requests that are all alike, all at once."""
    return [Conversation(0.0, (Turn(prompt, output),))] * count


def drawn(name: str, count: int, seed: int) -> list[Conversation]:
    """Requests with the lengths of one of the DATASETS, all at once. Raises ValueError for an unknown one."""
    if name not in DATASETS:
        raise ValueError(f"data set {name} is unknown; there are {', '.join(DATASETS)}")
    dataset, choose = DATASETS[name], random.Random(f"{name}/{seed}")
    requests: list[Conversation] = []
    while len(requests) < count:
        turn = Turn(dataset.prompt.draw(choose), dataset.output.draw(choose))
        if turn.prompt + turn.output <= dataset.limit:
            requests.append(Conversation(0.0, (turn,)))
    return requests


def multi_turn(count: int, think: float, seed: int, talks: Talks = SHAREGPT) -> list[Conversation]:
    """Conversations with the means of a data set, all at once.

    A geometric number of turns (40 at most), lognormal lengths, and exponential think times of `think` seconds in the
    mean before each turn but the first.
    """
    choose = random.Random(seed)
    prompts, outputs = Lengths.of_mean(talks.prompt, 1.0, 4, 2048), Lengths.of_mean(talks.output, 0.8, 4, 1024)
    conversations = []
    for _ in range(count):
        turns = min(40, 1 + int(log(1 - choose.random()) / log(1 - 1 / talks.turns)))
        conversations.append(
            Conversation(
                0.0,
                tuple(
                    Turn(prompts.draw(choose), outputs.draw(choose), choose.expovariate(1 / think) if turn else 0.0)
                    for turn in range(turns)
                ),
            )
        )
    return conversations


def azure_csv(path: str | Path) -> list[Conversation]:
    """An Azure LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens. Raises ValueError with the line."""
    requests: list[Conversation] = []
    first: datetime | None = None
    rows = csv.DictReader(io.StringIO(text_of(path)))
    try:
        for row in rows:
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
            turn = Turn(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            first = first or stamp
            requests.append(request((stamp - first).total_seconds(), turn))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {rows.reader.line_num}: {error}; the columns are TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from None
    return requests


def mooncake_jsonl(path: str | Path) -> list[Conversation]:
    """A Mooncake trace: timestamp (ms), input_length, output_length, hash_ids. Raises ValueError with the line."""
    requests: list[Conversation] = []
    for number, line in enumerate(io.StringIO(text_of(path)), start=1):
        try:
            row = json.loads(line)
            turn = Turn(int(row["input_length"]), int(row["output_length"]), hashes=tuple(row["hash_ids"]))
            requests.append(request(row["timestamp"] / 1000, turn))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; it must be a line of a Mooncake trace") from None
    return requests


def sharegpt_json(path: str | Path, count_tokens: Callable[[str], int]) -> list[Conversation]:
    """Conversations of a ShareGPT file, all at once: a turn is a human's message and the answer to it.

    `count_tokens` gives a text's length in tokens. Raises ValueError for a file of another form.
    """
    text = text_of(path)
    try:
        rows: list[dict[str, Any]] = json.loads(text)
        said = [[(message["from"], message["value"]) for message in row["conversations"]] for row in rows]
        if not all(isinstance(value, str) for messages in said for _, value in messages):
            raise TypeError("a value is not text")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: {error!r}; it must hold a list of {{id, conversations: [{{from, value}}]}}"
        ) from None
    conversations = []
    for messages in said:
        turns = [
            Turn(count_tokens(asked), count_tokens(answered))
            for (who, asked), (other, answered) in pairwise(messages)
            if (who, other) == ("human", "gpt") and asked and answered
        ]
        if turns:
            conversations.append(Conversation(0.0, tuple(turns)))
    return conversations


def poisson(workload: Workload, rate: float, seed: int) -> list[Conversation]:
    """The same conversations, `rate` a second by a Poisson process."""
    return gamma(workload, rate, 1.0, seed)


def gamma(workload: Workload, rate: float, variation: float, seed: int) -> list[Conversation]:
    """The same conversations, `rate` a second with gamma intervals: a `variation` above 1 comes in bursts.

    `variation` is the intervals' standard deviation over their mean.
    """
    if not (rate > 0 and variation > 0):
        raise ValueError(f"rate is {rate} and variation {variation}; both must be above 0")
    choose, shape = random.Random(f"arrivals/{seed}"), variation**-2
    now, arriving = 0.0, []
    for conversation in workload:
        now += choose.gammavariate(shape, 1 / (shape * rate))
        arriving.append(replace(conversation, arrival=now))
    return arriving


def scaled(workload: Workload, factor: float) -> list[Conversation]:
    """The same conversations at the trace's own times, `factor` times as fast."""
    if not factor > 0:
        raise ValueError(f"the factor is {factor}; it must be above 0")
    return [replace(conversation, arrival=conversation.arrival / factor) for conversation in workload]


def cut(workload: Workload, max_model_len: int) -> list[Conversation]:
    """What fits a context of `max_model_len` tokens: turns are left out from the first that does not fit."""
    fitting = []
    for conversation in workload:
        length, turns = 0, []
        for turn in conversation.turns:
            length += turn.prompt + turn.output
            if length > max_model_len:
                break
            turns.append(turn)
        if turns:
            fitting.append(replace(conversation, turns=tuple(turns)))
    return fitting


@lru_cache(maxsize=4)
def base_text(vocab_size: int, length: int) -> tuple[int, ...]:
    """Random tokens of which texts are cut, twice over. Kept, as searches of a capacity ask for the same often."""
    return tuple(random.Random(0).choices(range(16, vocab_size), k=length)) * 2


class Words:
    """Token ids for prompts: each turn has its own, and equal hash ids equal ones. The same in every run."""

    BASE = 1 << 16

    def __init__(self, vocab_size: int, salt: str = "") -> None:
        """Tokens lie in [16, vocab_size): the first ones mean something to most models. Another salt, other tokens."""
        if vocab_size < 64:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 64")
        self._salt = salt
        self._letters = range(16, vocab_size)
        self._base = base_text(vocab_size, self.BASE)

    def prompt(self, conversation: int, turn: int, wanted: Turn) -> tuple[int, ...]:
        """The new tokens of turn number `turn` of conversation number `conversation`."""
        if not wanted.hashes:
            return self._text(f"{conversation}/{turn}", wanted.prompt)
        blocks = (self._text(f"#{block}", HASH_BLOCK) for block in wanted.hashes)
        return tuple(token for block in blocks for token in block)[: wanted.prompt]

    def answer(self, conversation: int, turn: int, wanted: Turn) -> tuple[int, ...]:
        """Tokens that stand for an answer whose ids are unknown."""
        return self._text(f"{conversation}/{turn}/answer", wanted.output)

    def _text(self, name: str, length: int) -> tuple[int, ...]:
        """Tokens for a name; the first ones spell it, in as many of few letters as it takes to tell all apart."""
        choose = random.Random(self._salt + name)
        start = choose.randrange(self.BASE)
        first = tuple(choose.choices(self._letters, k=min(length, 12)))
        whole, rest = divmod(length - len(first), self.BASE)
        return first + self._base[start : start + self.BASE] * whole + self._base[start : start + rest]


def text_of(path: str | Path) -> str:
    """The text of a workload's file. Raises ValueError that names it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"workload {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"workload {path} is not text: {error}") from None


def request(arrival: float, turn: Turn) -> Conversation:
    """A request of a trace. Raises ValueError for a time and for lengths that cannot be."""
    if not 0 <= arrival < float("inf"):
        raise ValueError(f"it arrives {arrival:g} s after the first")
    if turn.prompt < 1 or turn.output < 1 or (turn.hashes and len(turn.hashes) * HASH_BLOCK < turn.prompt):
        raise ValueError(f"{turn.prompt} and {turn.output} tokens with {len(turn.hashes)} hash ids")
    return Conversation(arrival, (turn,))
