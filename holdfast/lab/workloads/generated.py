"""Generated workloads: fixed lengths, and lengths of published data sets."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import log

from holdfast.lab.workloads.values import Conversation, Lengths, Turn


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
