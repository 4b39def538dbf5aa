"""Workloads that only benchmarks draw: Baton's data sets, and conversations of which a share is very long."""

from __future__ import annotations

import random
from collections.abc import Sequence

from holdfast.lab.workloads import SHAREGPT, Conversation, Lengths, Turn, multi_turn

LONG, SHORT, SHORTER = (3600, 4400), (36, 400), (36, 200)
"""Shortest and longest of Baton's queries (§5.1): "around 4,000 words", "a few dozen to 400", "a few dozen to 200". A
word counts as one token.
"""


def baton_target_1(seed: int, *, count: int = 120, scale: float = 1.0) -> list[Conversation]:
    """Baton's data set for throughput (§5.1), all at once, in random order; lengths in tokens.

    A quarter has a long prompt and a short answer, a quarter a short prompt and a long answer, and half are short in
    both. `scale` multiplies all lengths: 2 is the paper's batch of 4, whose sequences are doubled. Raises ValueError
    for a count that is not a multiple of 4, and for a scale that is not above 0.
    """
    if count < 4 or count % 4:
        raise ValueError(f"count is {count}; it must be a multiple of 4, as the kinds of query are 1:1:2")
    quarter = count // 4
    kinds = [(LONG, SHORT)] * quarter + [(SHORT, LONG)] * quarter
    return _baton(f"baton/1/{seed}", kinds + [(SHORT, SHORT)] * 2 * quarter, scale)


def baton_target_2(seed: int, *, count: int = 30, scale: float = 1.0) -> list[Conversation]:
    """Baton's data set for details (§5.1): short prompts and answers, all at once; lengths in tokens.

    `scale` multiplies all lengths. Raises ValueError for a count below 1, and for a scale that is not above 0.
    """
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    return _baton(f"baton/2/{seed}", [(SHORTER, SHORTER)] * count, scale)


def _baton(seed: str, kinds: Sequence[tuple[tuple[int, int], tuple[int, int]]], scale: float) -> list[Conversation]:
    """Requests with prompts and answers of these lengths, uniform between least and most, in random order."""
    if not scale > 0:
        raise ValueError(f"scale is {scale}; it must be above 0")
    choose = random.Random(seed)

    def tokens(lengths: tuple[int, int]) -> int:
        return max(1, round(choose.uniform(*lengths) * scale))

    requests = [Conversation(0.0, (Turn(tokens(prompt), tokens(answer)),)) for prompt, answer in kinds]
    choose.shuffle(requests)
    return requests


def skewed(count: int, think: float, seed: int, *, long_share: float = 0.08) -> list[Conversation]:
    """Conversations like those of `multi_turn`, of which a share is very long, all arriving at once.

    A long one has 12 to 30 turns. It begins with 8,000 to 32,000 tokens, as if over a document. Each further turn adds
    500 to 4,000, as the results of a tool do. Its answers and think times are like those of the others.
    """
    choose, outputs = random.Random(f"skewed/{seed}"), Lengths.of_mean(SHAREGPT.output, 0.8, 4, 1024)
    conversations = multi_turn(count, think, seed)
    for number in choose.sample(range(count), round(count * long_share)):
        turns = [Turn(choose.randint(8000, 32_000), outputs.draw(choose))]
        for _ in range(choose.randint(11, 29)):
            turns.append(Turn(choose.randint(500, 4000), outputs.draw(choose), choose.expovariate(1 / think)))
        conversations[number] = Conversation(0.0, tuple(turns))
    return conversations
