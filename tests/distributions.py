"""How answers must be distributed: each token's chances in float64, by the formulas that are documented, and a test.

Nothing here is taken from the sampler. Chances follow from the logits of Transformers' own module and a request's
parameters. Contexts differ from draw to draw, so a draw is turned into a number that is uniform on [0, 1) whatever its
context is (the randomized probability integral transform); those of all draws go into one chi-square test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast import SamplingParams
from holdfast.core.types import ThinkingBudget

Floats = npt.NDArray[np.float64]
Allowed = Callable[[Sequence[int]], Sequence[int]]
"""The tokens that may follow the tokens of an answer."""

BINS = 20
LEAST_CHANCE = 1e-4
"""A right sampler's draws are refused with this chance. Seeds are fixed, so that a test does so always or never."""
LEAST_EXPECTED = 5.0
"""Tokens that are expected less often share a cell of the chi-square test."""
CLEAR, CLEAR_SUM = 2e-5, 4e-6
"""Nearer to the limit of top-k or min-p than this, as a share of the limit, float32 may decide either way; the same for
the sum of top-p. Such draws are left out."""


@dataclass(frozen=True, slots=True)
class Draws:
    """An answer of one request, and what it was asked by."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    params: SamplingParams
    allowed: Allowed | None = None


def chances(logits: Floats, draws: Draws, at: int) -> tuple[Floats, bool]:
    """The chance [V] of each token at place `at` of the answer, and whether no limit is too near to be sure of it.

    `logits` [V] are the model's own after the prompt and the tokens before that place.
    """
    params, before = draws.params, draws.answer[:at]
    logits = logits.copy()
    if draws.allowed is not None:
        forbidden = np.ones(len(logits), bool)
        forbidden[list(draws.allowed(before))] = False
        logits[forbidden] = -np.inf
    elif at < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    if (limit := params.thinking) is not None and thought(before, limit) >= limit.tokens:
        return (np.arange(len(logits)) == limit.end).astype(float), True
    for token, bias in params.logit_bias:
        logits[token] += bias
    for token in {*draws.prompt, *before}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(before):
        logits[token] -= params.frequency_penalty * before.count(token) + params.presence_penalty
    if params.temperature == 0:
        best = np.sort(logits)[::-1]
        return (np.arange(len(logits)) == logits.argmax()).astype(float), bool(best[0] - best[1] > CLEAR)
    share = softmax(logits / params.temperature)
    clear = math.inf
    if params.min_p:
        clear = float(np.abs(share / share.max() / params.min_p - 1).min())
        share = normal(np.where(share >= params.min_p * share.max(), share, 0.0))
    order = np.argsort(-share, kind="stable")
    if params.top_k:
        ranked = share[order]
        if ranked[params.top_k]:
            clear = min(clear, float(1 - ranked[params.top_k] / ranked[params.top_k - 1]))
        share[order[params.top_k :]] = 0.0
        share = normal(share)
    if params.top_p < 1:
        reached = np.cumsum(share[order])
        clear = min(clear, float(np.abs(reached - params.top_p).min()) * CLEAR / CLEAR_SUM)
        kept = int(np.searchsorted(reached, params.top_p)) + 1  # the fewest tokens that reach it
        share[order[kept:]] = 0.0
        share = normal(share)
    return share, clear > CLEAR


def thought(answer: Sequence[int], limit: ThinkingBudget) -> int:
    """The number of tokens of reasoning that goes on after an answer's tokens; -1 if none does."""
    text = list(answer)
    if not limit.opened:
        if limit.start not in text:
            return -1
        text = text[text.index(limit.start) + 1 :]
    return -1 if limit.end in text else len(text)


def softmax(logits: Floats) -> Floats:
    """The shares [V] of logits [V]."""
    return normal(np.exp(logits - logits.max()))


def normal(share: Floats) -> Floats:
    """Shares that sum to 1."""
    whole: Floats = share / share.sum()
    return whole


@torch.inference_mode()
def reference_logits(module: Any, answers: Sequence[Draws]) -> list[Floats]:
    """For each answer, the logits [n, V] at the places of its n tokens, by Transformers in float64."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, each in enumerate(answers):
        by_shape.setdefault((len(each.prompt), len(each.answer)), []).append(index)
    result: dict[int, Floats] = {}
    for (prompt, length), alike in by_shape.items():
        for begin in range(0, len(alike), 256):
            some = alike[begin : begin + 256]
            ids = torch.tensor([[*answers[index].prompt, *answers[index].answer[: length - 1]] for index in some])
            logits = module(ids).logits[:, prompt - 1 :].numpy()
            result.update(zip(some, logits, strict=True))
    return [result[index] for index in range(len(answers))]


def faults(module: Any, answers: Sequence[Draws], *, seed: int = 0) -> list[str]:
    """What shows that these answers are not drawn as their requests ask; empty for a right sampler.

    `module` is Transformers' own in float64. Checks that no token was drawn that has no chance, that the ranks of
    the drawn tokens have their chances, and that each token comes as often as it should.
    """
    found: list[str] = []
    uniform: list[float] = []
    expected, seen = np.zeros(0), np.zeros(0)
    noise = np.random.default_rng(seed)
    unsure = 0
    for each, logits in zip(answers, reference_logits(module, answers), strict=True):
        for at, token in enumerate(each.answer):
            share, sure = chances(logits[at], each, at)
            fraction = noise.random()
            if not sure:
                unsure += 1
                continue
            if not len(expected):
                expected, seen = np.zeros(len(share)), np.zeros(len(share))
            if share[token] == 0:
                found.append(f"token {token} was drawn at place {at} after {each.prompt}, and has no chance there")
            order = np.argsort(-share, kind="stable")
            rank = int(np.flatnonzero(order == token)[0])
            uniform.append(float(share[order[:rank]].sum() + fraction * share[token]))
            expected += share
            seen[token] += 1
    total = sum(len(each.answer) for each in answers)
    if unsure > 0.05 * total:
        found.append(f"{unsure} of {total} draws are too near to a limit; the request is not fit for this test")
    ranks, _ = np.histogram(uniform, BINS, (0.0, 1.0))
    if (chance := chi_square(ranks, np.full(BINS, len(uniform) / BINS))) < LEAST_CHANCE:
        found.append(f"the ranks of the drawn tokens are as {ranks.tolist()}, which has a chance of {chance:.1e}")
    common = expected >= LEAST_EXPECTED
    cells = np.append(seen[common], seen[~common].sum()), np.append(expected[common], expected[~common].sum())
    if (chance := chi_square(*cells)) < LEAST_CHANCE:
        found.append(f"tokens come in other numbers than expected, which has a chance of {chance:.1e}")
    return found


def chi_square(seen: npt.NDArray[Any], expected: Floats) -> float:
    """The chance of counts that differ from the expected ones as much as these."""
    some = expected > 0
    if some.sum() < 2:
        return 1.0
    statistic = float(((seen[some] - expected[some]) ** 2 / expected[some]).sum())
    freedom = float(some.sum() - 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))
