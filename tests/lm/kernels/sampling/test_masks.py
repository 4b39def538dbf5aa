"""Masks: tokens that a row's grammar forbids are never drawn, on one device and on several."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.types import Grammar
from holdfast.lm.kernels.collectives.torch_group import TorchGroup
from holdfast.lm.kernels.sampling.mask_kernels import BLOCK, forbid_rows
from holdfast.lm.kernels.sampling.masks import forbid
from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler, Wishes
from holdfast.lm.types import Sampling, Shaping
from tests.ranks import in_group

VOCAB = 101
GRAMMAR = Grammar("regex", "any")


def drawn_masks(rows: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random masks [rows, W] int32 with an even W, and their bits as booleans [rows, vocab]."""
    allowed = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed)) < 0.3
    allowed[:, vocab // 2] = True
    padded = np.zeros((rows, 64 * -(-vocab // 64)), np.uint8)
    padded[:, :vocab] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy()), allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "first"), [(64, 0), (VOCAB, 0), (BLOCK + 77, 0), (37, 51), (BLOCK, 5)])
def test_the_kernel_and_pytorch_forbid_the_same_logits(vocab: int, first: int, dtype: torch.dtype, device: str) -> None:
    masks, allowed = drawn_masks(3, first + vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    at = np.array([4, 0, 3])
    expected = logits.clone()
    for mask, row in zip(allowed[:, first:], at.tolist(), strict=True):
        expected[row, ~mask] = -torch.inf
    on_cpu = forbid(logits.clone(), masks, at, first=first)
    assert torch.equal(on_cpu, expected)
    rows = torch.from_numpy(at).to(device)
    on_device = forbid_rows(logits.clone().to(device), masks.to(device), rows, first)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.gpu
def test_a_wide_batch_is_masked_on_the_device_in_bfloat16() -> None:
    rows, vocab = 256, 128_256
    masks, allowed = drawn_masks(rows, vocab)
    logits = torch.randn(rows, vocab, device="cuda").to(torch.bfloat16)
    expected = logits.masked_fill(~allowed.to("cuda"), -torch.inf)
    assert torch.equal(forbid(logits, masks.to("cuda"), np.arange(rows)), expected)


def given(rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[Sampling], torch.Tensor, torch.Tensor]:
    """Logits and columns, records of which every other one has a grammar, and the masks of those rows."""
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(2))
    records = [
        Sampling((0.0, 0.7, 1.5)[row % 3], (0, 9)[row % 2], 1.0, 7919 * row, grammar=GRAMMAR if row % 2 else None)
        for row in range(rows)
    ]
    columns = {
        "temperature": torch.tensor([each.temperature for each in records]),
        "top_k": torch.tensor([each.top_k for each in records]),
        "top_p": torch.tensor([each.top_p for each in records]),
        "seed": torch.tensor([each.seed for each in records]),
        "position": torch.arange(rows) + 3,
    }
    masks, allowed = drawn_masks(rows // 2, VOCAB)
    return logits, columns, records, masks, allowed


def wishes_of(records: list[Sampling]) -> Wishes:
    wishes = Wishes.of(records, range(len(records)), [9] * len(records))
    assert wishes is not None
    return wishes


def draw(sampler: Sampler, logits: torch.Tensor, columns: Any, wishes: Wishes, masks: torch.Tensor) -> Drawn:
    options = {"any_random": True, "any_filtered": True}
    return sampler.draw(logits, columns, wishes, **options, masks=masks)  # type: ignore[arg-type]


def asked(records: list[Sampling], kind: str) -> list[Sampling]:
    """The records, with further options in some of them."""
    shaping = Shaping(min_p=0.01, bias=((3, 2.0),))
    return [
        replace(
            each,
            logprobs=2 if kind == "told" and at % 3 else None,
            shaping=shaping if kind == "shaped" and at % 3 else None,
        )
        for at, each in enumerate(records)
    ]


@pytest.mark.parametrize("kind", ["plain", "told", "shaped"])
def test_rows_draw_only_allowed_tokens_and_others_draw_as_before(kind: str) -> None:
    logits, columns, records, masks, allowed = given(12)
    wishes, before = wishes_of(asked(records, kind)), logits.clone()
    result = draw(Sampler(), logits.clone(), columns, wishes, masks)
    plain = Sampler().draw(
        before, columns, wishes_of(asked([replace(each, grammar=None) for each in records], kind))
        if kind != "plain" else None, any_random=True, any_filtered=True,
    )  # fmt: skip
    for at, token in enumerate(result.tokens.tolist()):
        assert allowed[at // 2, token] if at % 2 else token == plain.tokens[at]
    if kind == "told":
        expected = before.double().log_softmax(-1)
        told = [each for each in result.told(wishes) if each is not None]
        rows = [at for at, count in enumerate(wishes.logprobs) if count is not None]
        for at, each in zip(rows, told, strict=True):
            assert each.logprob == pytest.approx(float(expected[at, result.tokens[at]]), abs=1e-5), "without a mask"


@pytest.mark.parametrize("kind", ["plain", "told", "shaped"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_first_device_of_a_group_gives_the_others_its_masks(size: int, kind: str) -> None:
    logits, columns, records, masks, _ = given(9 if size == 4 else 12)
    masks = masks[: len(wishes_of(records).masked)]
    wishes, share = wishes_of(asked(records, kind)), -(-VOCAB // size)
    expected = draw(Sampler(), logits.clone(), columns, wishes, masks)

    def work(group: TorchGroup) -> Drawn:
        own = logits[:, group.rank * share : (group.rank + 1) * share].contiguous()
        return draw(Sampler(group, VOCAB), own, columns, wishes, masks if group.rank == 0 else torch.zeros_like(masks))

    for result in in_group(size, work):
        assert torch.equal(result.tokens, expected.tokens)
        assert result.told(wishes) == expected.told(wishes)
    columns_off = {"any_random": True, "any_filtered": False}
    unfiltered = Sampler().draw(logits.clone(), columns, wishes, **columns_off, masks=masks)  # type: ignore[arg-type]
    assert torch.equal(
        in_group(
            size,
            lambda group: Sampler(group, VOCAB).draw(
                logits[:, group.rank * share : (group.rank + 1) * share].contiguous(), columns, wishes,
                **columns_off, masks=masks if group.rank == 0 else torch.zeros_like(masks),  # type: ignore[arg-type]
            ),
        )[1].tokens,
        unfiltered.tokens,
    )  # fmt: skip
