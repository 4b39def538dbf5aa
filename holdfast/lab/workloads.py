"""Workloads: conversations with lengths and arrival times, from traces, fitted distributions or fixed lengths."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import exp, log
from pathlib import Path
from typing import Any, Literal

from holdfast.core.config import option
from holdfast.files.regular import read_text

HASH_BLOCK = 512
"""Number of tokens that each hash id of a Mooncake trace stands for."""
DEFAULT_REQUESTS = 100
"""Default number of conversations in a generated workload."""
CHARACTERS_PER_TOKEN = 4
"""Number of characters per token, to estimate the length of a text without a tokenizer."""
MIN_VARIATION, MAX_VARIATION = 0.01, 100.0
"""Bounds of the variation of arrivals. Beyond them, the gamma distribution leaves the range of floats."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: new prompt tokens after the whole history, and tokens to generate."""

    prompt: int
    output: int
    think: float = 0.0
    """Seconds between the end of the previous turn and this one."""
    hashes: tuple[int, ...] = ()
    """Ids of the turn's blocks of HASH_BLOCK tokens. Equal ids mean equal tokens. If empty, no other turn has these
    tokens."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: turns, each of which continues the previous one."""

    arrival: float
    """Seconds from the workload's start to the first turn."""
    turns: tuple[Turn, ...]


Workload = Sequence[Conversation]

LongerName = Literal["cut", "drop"]
"""A conversation longer than the context has its later turns cut, or is dropped whole."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths in tokens, clipped to [least, most]."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    least: int = 1
    most: int = 1 << 20

    @classmethod
    def of_mean(cls, mean: float, sigma: float, least: int = 1, most: int = 1 << 20) -> Lengths:
        """The distribution whose mean, before clipping, is `mean`."""
        return cls(mean / exp(sigma * sigma / 2), sigma, least, most)

    def draw(self, choose: random.Random) -> int:
        """Draw one length."""
        return max(self.least, min(self.most, round(choose.lognormvariate(log(self.median), self.sigma))))


@dataclass(frozen=True, slots=True)
class Dataset:
    """Lengths of prompts and outputs. A request longer than `limit` in total is drawn again."""

    prompt: Lengths
    output: Lengths
    limit: int


DATASETS = {
    # Sarathi-Serve, Table 2: median and P90 after removing outliers above 8,192 and 16,384 tokens. The parameters of
    # the
    # prompts are those of the lognormal distribution that has these quantiles once truncated there.
    "openchat_sharegpt4": Dataset(Lengths(3566.9, 1.7229), Lengths(415, 0.5446), 8192),
    "arxiv_summarization": Dataset(Lengths(7867.9, 0.6479), Lengths(208, 0.4515), 16384),
}


@dataclass(frozen=True, slots=True)
class ConversationMeans:
    """Means of a data set: requests per conversation, new prompt tokens per request, generated tokens per request."""

    turns: float
    prompt: float
    output: float


SHAREGPT, ULTRACHAT = ConversationMeans(5.56, 37.77, 204.58), ConversationMeans(3.86, 51.78, 257.81)
"""Means of Pensieve's data sets (Table 2)."""


def fixed(count: int, prompt: int, output: int) -> list[Conversation]:
    """Requests of equal lengths, all arriving at once."""
    return [Conversation(0.0, (Turn(prompt, output),))] * count


def sample_dataset(name: str, count: int, seed: int) -> list[Conversation]:
    """Requests with lengths drawn from one of the DATASETS, all arriving at once. Raises ValueError if unknown."""
    if name not in DATASETS:
        raise ValueError(f"data set {name} is unknown; there are {', '.join(DATASETS)}")
    dataset, choose = DATASETS[name], random.Random(f"{name}/{seed}")
    requests: list[Conversation] = []
    while len(requests) < count:
        turn = Turn(dataset.prompt.draw(choose), dataset.output.draw(choose))
        if turn.prompt + turn.output <= dataset.limit:
            requests.append(Conversation(0.0, (turn,)))
    return requests


def multi_turn(count: int, think: float, seed: int, means: ConversationMeans = SHAREGPT) -> list[Conversation]:
    """Conversations with the means of a data set, all arriving at once.

    The number of turns is geometric (at most 40) and lengths are lognormal. Each turn but the first has an exponential
    think time before it, `think` seconds on average.
    """
    choose = random.Random(seed)
    prompts, outputs = Lengths.of_mean(means.prompt, 1.0, 4, 2048), Lengths.of_mean(means.output, 0.8, 4, 1024)
    conversations = []
    for _ in range(count):
        turns = min(40, 1 + int(log(1 - choose.random()) / log(1 - 1 / means.turns)))
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
    """Read an Azure LLM inference trace: TIMESTAMP, ContextTokens, GeneratedTokens. Raises ValueError with the line."""
    requests: list[Conversation] = []
    first: datetime | None = None
    rows = csv.DictReader(io.StringIO(_read_text(path)))
    try:
        for row in rows:
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
            turn = Turn(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            first = first or stamp
            requests.append(_request((stamp - first).total_seconds(), turn))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise ValueError(
            f"{path}, line {rows.reader.line_num}: {error}; the columns are TIMESTAMP, ContextTokens, GeneratedTokens"
        ) from None
    return requests


def mooncake_jsonl(path: str | Path) -> list[Conversation]:
    """Read a Mooncake trace: timestamp (ms), input_length, output_length, hash_ids. Raises ValueError with the line."""
    requests: list[Conversation] = []
    for number, line in enumerate(io.StringIO(_read_text(path)), start=1):
        try:
            row = json.loads(line)
            turn = Turn(int(row["input_length"]), int(row["output_length"]), hashes=tuple(row["hash_ids"]))
            requests.append(_request(row["timestamp"] / 1000, turn))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}, line {number}: {error!r}; it must be a line of a Mooncake trace") from None
    return requests


def sharegpt_json(path: str | Path, count_tokens: Callable[[str], int]) -> list[Conversation]:
    """Read a ShareGPT file, all conversations arriving at once. A turn is a human's message and its answer.

    `count_tokens` returns the length of a text in tokens. Raises ValueError for a file of another form.
    """
    text = _read_text(path)
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


def gamma_arrivals(workload: Workload, rate: float, seed: int, variation: float = 1.0) -> list[Conversation]:
    """These conversations, arriving at `rate` per second with gamma-distributed intervals.

    `variation` is the standard deviation of the intervals divided by their mean. 1 is a Poisson process; above it,
    arrivals come in bursts.
    """
    if not (rate > 0 and variation > 0):
        raise ValueError(f"rate is {rate} and variation {variation}; both must be above 0")
    choose, shape = random.Random(f"arrivals/{seed}"), variation**-2
    now, arriving = 0.0, []
    for conversation in workload:
        now += choose.gammavariate(shape, 1 / (shape * rate))
        arriving.append(replace(conversation, arrival=now))
    return arriving


def speed_up(workload: Workload, factor: float) -> list[Conversation]:
    """Return the conversations of a workload with all arrival times divided by `factor`."""
    if not factor > 0:
        raise ValueError(f"the factor is {factor}; it must be above 0")
    return [replace(conversation, arrival=conversation.arrival / factor) for conversation in workload]


def fit_context(workload: Workload, max_model_len: int, longer: LongerName = "cut") -> list[Conversation]:
    """Return the conversations of which each has at most `max_model_len` tokens in all.

    A longer one is cut before the first turn that exceeds the limit, and dropped if no turn is left. Or it is dropped
    whole, as in Pensieve's evaluation (§6.1).
    """
    fit = {"cut": _turns_within, "drop": _all_turns_or_none}[longer]
    fitting = [replace(conversation, turns=fit(conversation.turns, max_model_len)) for conversation in workload]
    return [conversation for conversation in fitting if conversation.turns]


def _turns_within(turns: tuple[Turn, ...], most: int) -> tuple[Turn, ...]:
    """The first turns, as long as they have at most `most` tokens together."""
    lengths = accumulate(turn.prompt + turn.output for turn in turns)
    return tuple(turn for turn, length in zip(turns, lengths, strict=True) if length <= most)


def _all_turns_or_none(turns: tuple[Turn, ...], most: int) -> tuple[Turn, ...]:
    """All turns if they have at most `most` tokens together, and no turn otherwise."""
    return turns if sum(turn.prompt + turn.output for turn in turns) <= most else ()


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The part of a workload that is left out because it is longer than the context."""

    requests: int
    """Number of requests that are left out."""
    of_requests: int
    """Number of requests of the whole workload."""
    conversations: int
    """Number of conversations of which no request is left."""
    of_conversations: int
    """Number of conversations of the whole workload."""

    @classmethod
    def of(cls, workload: Workload, fitting: Workload) -> LeftOut:
        """Compare a workload, which is not empty, with what `fit_context` returned for it."""
        asked = num_requests(workload)
        return cls(asked - num_requests(fitting), asked, len(workload) - len(fitting), len(workload))

    def figures(self) -> dict[str, float]:
        """The shares of the workload's requests and of its conversations, by the names that a run's metrics use."""
        return {
            "left_out_requests_share": self.requests / self.of_requests,
            "left_out_conversations_share": self.conversations / self.of_conversations,
        }

    def __str__(self) -> str:
        return (
            f"{self.requests:,} of {self.of_requests:,} requests ({self.requests / self.of_requests:.1%}), "
            f"{self.conversations:,} of {self.of_conversations:,} conversations whole "
            f"({self.conversations / self.of_conversations:.1%})"
        )


def num_requests(workload: Workload) -> int:
    """Number of requests in all conversations together."""
    return sum(len(conversation.turns) for conversation in workload)


@lru_cache(maxsize=4)
def _base_tokens(vocab_size: int, length: int) -> tuple[int, ...]:
    """`length` random tokens, then the same again. Texts are cut from them. Cached for capacity searches."""
    return tuple(random.Random(0).choices(range(16, vocab_size), k=length)) * 2


class PromptTokens:
    """Token ids for prompts, equal in every run. No two turns have equal tokens, unless they have equal hash ids."""

    BASE = 1 << 16

    def __init__(self, vocab_size: int, salt: str = "") -> None:
        """Tokens lie in [16, vocab_size), because many models use the first ids for control.

        Each `salt` gives other tokens.
        """
        if vocab_size < 64:
            raise ValueError(f"vocab_size is {vocab_size}; it must be at least 64")
        self._salt = salt
        self._vocabulary = range(16, vocab_size)
        self._base = _base_tokens(vocab_size, self.BASE)
        self._block = lru_cache(maxsize=1 << 14)(lambda block: self._text(f"#{block}", HASH_BLOCK))
        """The tokens of a hash id. Cached, because prefixes occur again and again."""

    def prompt(self, conversation: int, index: int, turn: Turn) -> tuple[int, ...]:
        """The new prompt tokens of turn number `index` of conversation number `conversation`."""
        if not turn.hashes:
            return self._text(f"{conversation}/{index}", turn.prompt)
        return tuple(chain.from_iterable(map(self._block, turn.hashes)))[: turn.prompt]

    def answer(self, conversation: int, index: int, turn: Turn) -> tuple[int, ...]:
        """Tokens in place of an answer whose ids are unknown."""
        return self._text(f"{conversation}/{index}/answer", turn.output)

    def _text(self, name: str, length: int) -> tuple[int, ...]:
        """Tokens determined by `name`. The first 12 are drawn from it alone, so that different names differ at once."""
        choose = random.Random(self._salt + name)
        start = choose.randrange(self.BASE)
        first = tuple(choose.choices(self._vocabulary, k=min(length, 12)))
        whole, rest = divmod(length - len(first), self.BASE)
        return first + self._base[start : start + self.BASE] * whole + self._base[start : start + rest]


def _read_text(path: str | Path) -> str:
    """The text of a workload's file. Raises ValueError, naming the file."""
    try:
        return read_text(path)
    except OSError as error:
        raise ValueError(f"workload {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"workload {path} is not text: {error}") from None


def _request(arrival: float, turn: Turn) -> Conversation:
    """A request of a trace. Raises ValueError for an invalid time or length."""
    if not 0 <= arrival < float("inf"):
        raise ValueError(f"it arrives {arrival:g} s after the first")
    if turn.prompt < 1 or turn.output < 1 or (turn.hashes and len(turn.hashes) * HASH_BLOCK < turn.prompt):
        raise ValueError(f"{turn.prompt} and {turn.output} tokens with {len(turn.hashes)} hash ids")
    return Conversation(arrival, (turn,))


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The workload that the options of a command describe. Raises ValueError for invalid values."""

    workload: str = option(
        "fixed",
        f"fixed, multi-turn, {', '.join(DATASETS)}, or a file: an Azure .csv, a Mooncake .jsonl, a ShareGPT .json",
    )
    requests: int | None = option(None, "number of conversations; default: 100, or the whole file")
    prompt_tokens: int = option(256, "length of each prompt, for fixed")
    output_tokens: int = option(64, "length of each answer, for fixed")
    think: float = option(5.0, "mean think time in seconds, for multi-turn")
    variation: float = option(
        1.0, "standard deviation of the intervals between arrivals, divided by their mean; above 1 gives bursts"
    )
    longer: Literal["cut", "drop"] = option(
        "cut", "a conversation longer than the context: cut before the turn that exceeds it, or drop it whole"
    )

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 < self.think < float("inf"):
            raise ValueError(f"think is {self.think}; it must be above 0")
        if not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise ValueError(
                f"variation is {self.variation}; it must lie between {MIN_VARIATION} and {MAX_VARIATION:g}"
            )

    @property
    def title(self) -> str:
        """The workload's name for a report; a file without its directory."""
        return "fixed lengths" if self.workload == "fixed" else self.workload.rpartition("/")[2]

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts of one run have tokens in common."""
        return self.workload != "fixed" and self.workload not in DATASETS

    def read(self, seed: int) -> Workload:
        """Read or generate the conversations. Raises ValueError, naming the file if there is one."""
        name, count = self.workload, self.requests or DEFAULT_REQUESTS
        if name == "fixed":
            return fixed(count, self.prompt_tokens, self.output_tokens)
        if name == "multi-turn":
            return multi_turn(count, self.think, seed)
        if name in DATASETS:
            return sample_dataset(name, count, seed)
        match Path(name).suffix:
            case ".csv":
                workload: Workload = azure_csv(name)
            case ".jsonl":
                workload = mooncake_jsonl(name)
            case ".json":
                workload = sharegpt_json(name, lambda text: -(-len(text) // CHARACTERS_PER_TOKEN))
            case _:
                known = ", ".join(("fixed", "multi-turn", *DATASETS))
                raise ValueError(f"workload {name} is unknown; there are {known}, and .csv, .jsonl and .json files")
        if not workload:
            raise ValueError(f"{name} holds no requests")
        return workload[: self.requests]
