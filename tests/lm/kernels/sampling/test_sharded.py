"""Sampling over shards of the vocabulary gives the tokens of `sample` on whole rows, on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.lm.kernels.collectives.torch_group import TorchGroup
from holdfast.lm.kernels.sampling.sample import best_tokens, sample
from holdfast.lm.kernels.sampling.sampler import sample_sharded
from tests.ranks import in_group

KINDS = {
    "greedy": dict(temperature=(0.0,), top_k=(0,), top_p=(1.0,)),
    "random": dict(temperature=(1.0, 0.7, 3.0), top_k=(0,), top_p=(1.0,)),
    "mixed": dict(temperature=(0.0, 1.3), top_k=(0,), top_p=(1.0,)),
    "filtered": dict(temperature=(0.0, 1.0, 2.0, 0.8), top_k=(0, 5, 0, 40), top_p=(1.0, 1.0, 0.7, 0.9)),
}


def settings(rows: int, kind: str) -> dict[str, Any]:
    """The sampling columns of `rows` rows, and which work the step needs."""

    def column(values: tuple[float, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([values[row % len(values)] for row in range(rows)], dtype=dtype)

    chosen = KINDS[kind]
    return dict(
        temperature=column(chosen["temperature"], torch.float32),
        top_k=column(chosen["top_k"], torch.int64),
        top_p=column(chosen["top_p"], torch.float32),
        seed=torch.arange(rows) * 7919,
        position=torch.arange(rows) + 3,
        any_random=kind != "greedy",
        any_filtered=kind == "filtered",
    )


def sharded(logits: torch.Tensor, size: int, how: dict[str, Any]) -> list[torch.Tensor]:
    """The tokens that each of `size` devices gets, from its part of the logits."""
    vocab_size = logits.shape[1]
    share = -(-vocab_size // size)

    def work(group: TorchGroup) -> torch.Tensor:
        own = logits[:, group.rank * share : (group.rank + 1) * share].contiguous()
        return sample_sharded(own, group, vocab_size, **how)

    return in_group(size, work)


@pytest.mark.each_pair
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("rows", "vocab_size"), [(1, 64), (13, 101), (64, 1000)])
def test_tokens_equal_those_of_whole_rows(kind: str, size: int, rows: int, vocab_size: int) -> None:
    logits = 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows))
    how = settings(rows, kind)
    expected = sample(logits, **how)
    assert len(expected.unique()) > 1 or rows == 1
    for tokens in sharded(logits, size, how):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("kind", ["greedy", "filtered"])
def test_the_lowest_token_wins_among_equal_logits_of_several_devices(kind: str) -> None:
    logits = torch.zeros(4, 40)
    logits[1, [11, 29, 39]] = 2.0
    logits[2, [30, 31]] = 2.0
    how = settings(4, kind) | dict(temperature=torch.zeros(4), top_k=torch.zeros(4, dtype=torch.int64))
    for tokens in sharded(logits, 4, how):
        assert tokens.tolist() == [0, 11, 30, 0]


def test_a_step_without_sampled_rows_gives_no_tokens() -> None:
    for kind in KINDS:
        assert [len(tokens) for tokens in sharded(torch.zeros(0, 32), 2, settings(0, kind))] == [0, 0]


def test_noise_is_that_of_the_token_whichever_part_holds_it() -> None:
    logits, how = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)), settings(3, "random")
    options = {name: how[name] for name in ("temperature", "seed", "position", "any_random")}
    values, tokens = best_tokens(logits, **options)
    for row, token in enumerate(tokens.tolist()):
        value, same = best_tokens(logits[:, token : token + 1], **options, first=token)
        assert value[row] == values[row] and same[row] == token
