"""Passes of a draft head by the kernels of a GPU give the guesses of its plain formula, in padded batches, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.attention.row_attention import RowAttention, TritonRows
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.models import head_layer
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.draft_head import DraftHead
from holdfast.lm.models.head_layer import HeadLayer
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.passes import HeadPasses, Last
from tests.drafted import CONFIG
from tests.heads import make_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, ROWS, GUESSES = 24, 5, 4


def head_of(directory: Path, **settings: Any) -> DraftHead:
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))
    target = load(directory / "model", device=DEVICE, load_format="random")
    assert isinstance(target, Decoder)
    head = make_head(directory / "head", target, tuple(range(3, 60)), **settings)
    assert isinstance(head, DraftHead)
    return head


def formula(head: DraftHead, hidden: torch.Tensor, following: torch.Tensor, first: int) -> list[int]:
    """GUESSES tokens after a sequence of these hidden states [T, hidden], whose first position is `first`."""
    for _ in range(GUESSES):
        positions = torch.arange(first, first + len(following), device=hidden.device)
        entered, residual = head.enter(hidden, following)
        keys, values = head.keys_values(entered, positions)
        seen = torch.ones(1, len(following), dtype=torch.bool, device=hidden.device)
        attended = head.attend(head.queries(entered[-1:], positions[-1:]), keys[None], values[None], seen)
        out = head.leave(attended, residual[-1:])
        hidden, following = torch.cat((hidden, out)), torch.cat((following, head.guess(out)))
    return following[-GUESSES:].tolist()


@pytest.mark.parametrize("before", [False, True], ids=["hidden state goes on", "normed one goes on"])
@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "triton"])
@torch.inference_mode()
def test_rounds_of_any_rows_give_the_guesses_of_the_formula(
    before: bool, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels:
        monkeypatch.setattr(head_layer, "LayerOps", FusedLayerOps)
        monkeypatch.setattr(RowAttention, "of", TritonRows)
    head = head_of(tmp_path, norm_before_residual=before)
    layer, spec = HeadLayer(head), head.spec
    caches = tuple(torch.full((ROWS, SLOTS, spec.kv_heads, spec.dim), 9.0, device=DEVICE) for _ in range(2))
    passes = HeadPasses(layer, caches, GUESSES, captured=kernels)  # type: ignore[arg-type]
    if DEVICE == "cuda":
        passes.prepare()
    made = torch.Generator().manual_seed(3)
    for rows, lengths in (([3], [7]), ([4, 0, 2], [5, 1, 16]), ([1, 2], [20, 2]), ([0, 1, 2, 3, 4], [3, 9, 4, 1, 20])):
        texts = [
            (torch.randn(length, spec.hidden, generator=made).to(DEVICE),
             torch.randint(64, (length,), generator=made).to(DEVICE), 11 * row)
            for row, length in zip(rows, lengths, strict=True)
        ]  # fmt: skip
        for row, (hidden, following, first) in zip(rows, texts, strict=True):
            numbers = torch.arange(len(following), device=DEVICE)
            layer.keep(hidden, following, first + numbers, row * SLOTS + numbers, caches)  # type: ignore[arg-type]
        last = Last(
            torch.stack([hidden[-1] for hidden, _, _ in texts]),
            torch.stack([following[-1] for _, following, _ in texts]),
            torch.tensor([first + len(hidden) - 1 for hidden, _, first in texts], device=DEVICE),
            torch.tensor(rows, device=DEVICE),
            torch.tensor([length - 1 for length in lengths], device=DEVICE),
        )
        expected = [formula(head, *text) for text in texts]
        for count in (GUESSES, 1):
            assert passes.guess(last, count).tolist() == [tokens[:count] for tokens in expected]
