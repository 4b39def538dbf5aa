"""Workloads that only benchmarks use: Baton's, lengths that authors of papers publish, and long conversations."""

from __future__ import annotations

import csv
import json
import pickle
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import ByteLevelBPETokenizer

from holdfast.lab.workloads import SHAREGPT, Conversation, Lengths, Turn, Workload, multi_turn

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


AUTHORS_SEED = 42
"""Seed of the lengths and of the arrivals in every run of Sarathi-Serve's authors."""
LONGEST_GAP = 3.0
"""Longest time between two arrivals in those runs, as a multiple of the asked mean. It makes the mean 5% shorter."""


def sarathi_lengths(path: Path, limit: int) -> list[Conversation]:
    """The requests of a file of Sarathi-Serve's authors, in its order, all at once; none above `limit` tokens.

    Raises ValueError for a file without whole numbers in columns num_prefill_tokens and num_decode_tokens.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if missing := {"num_prefill_tokens", "num_decode_tokens"} - set(rows.fieldnames or ()):
            raise ValueError(f"{path} has no column {', '.join(sorted(missing))}")
        try:
            turns = [Turn(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: {error}") from None
    return [Conversation(0.0, (turn,)) for turn in turns if turn.prompt + turn.output <= limit]


def write_lengths(path: Path, turns: Iterable[Turn]) -> None:
    """Write a file that `sarathi_lengths` reads, with a row for each turn."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("num_prefill_tokens", "num_decode_tokens"))
        rows.writerows((turn.prompt, turn.output) for turn in turns)


class _PlainValues(pickle.Unpickler):
    """Reads plain values. A pickle that names a class or a function could run any code, and is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def vllm_lengths(path: Path) -> list[Turn]:
    """The lengths in a file of vLLM's authors, in its order: a pickled list of pairs, tokens in and out.

    Raises ValueError for a file with anything else.
    """
    with path.open("rb") as file:
        try:
            pairs = _PlainValues(file).load()
        except Exception as error:  # a damaged pickle raises almost anything
            raise ValueError(f"{path} is not a pickle of lengths: {error}") from None
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f"{path} is not a list of pairs")
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(each) is int and each > 0 for each in pair)):
            raise ValueError(f"{path} has {pair!r}; each item must be two whole numbers above 0")
    return [Turn(*pair) for pair in pairs]


def alpaca_lengths(paths: Sequence[Path], tokenizer: Path) -> list[Turn]:
    """The lengths of the instructions in files of Stanford Alpaca's format, each instruction once.

    A prompt is the instruction and, in the next line, its input. `tokenizer` is a folder with GPT-2's vocab.json and
    merges.txt, which are OPT's too. As OPT's tokenizer does, each text gets a token in front. Raises OSError without a
    file, and ValueError for one of another format.
    """
    vocabulary = [tokenizer / name for name in ("vocab.json", "merges.txt")]
    if missing := [path for path in vocabulary if not path.is_file()]:
        raise FileNotFoundError(f"there is no {missing[0]}")
    encode = ByteLevelBPETokenizer(*map(str, vocabulary)).encode
    texts: dict[tuple[str, str], None] = {}
    for path in paths:
        try:
            for row in json.loads(path.read_text()):
                prompt, answer = "\n".join(filter(None, (row["instruction"], row["input"]))), row["output"]
                texts[prompt, answer] = None
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a list of instruction, input and output: {type(error).__name__}, {error}"
            ) from None
    return [Turn(*(1 + len(encode(text).ids) for text in pair)) for pair in texts]


def in_authors_order(requests: Sequence[Conversation], count: int) -> list[Conversation]:
    """The first `count` requests of the authors' draw, all at once. Raises ValueError if there are fewer.

    They shuffle the file by `pandas.DataFrame.sample(frac=1, random_state=42)`, which is this choice
    (sarathi/benchmark/request_generator/trace_request_length_generator.py, branch osdi-sarathi-serve).
    """
    if count > len(requests):
        raise ValueError(f"count is {count}; there are {len(requests)} requests")
    order = np.random.RandomState(AUTHORS_SEED).choice(len(requests), len(requests), replace=False)
    return [requests[at] for at in order[:count]]


def authors_arrivals(workload: Workload, rate: float) -> list[Conversation]:
    """These requests at the arrival times of the authors' runs at `rate` requests per second.

    Times between arrivals are exponential, drawn with one seed at every rate, and none is longer than LONGEST_GAP means
    (poisson_request_interval_generator.py). Raises ValueError for a rate that is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    choose, now, arriving = random.Random(AUTHORS_SEED), 0.0, []
    for request in workload:
        now += min(-log(1.0 - choose.random()), LONGEST_GAP) / rate
        arriving.append(replace(request, arrival=now))
    return arriving


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
