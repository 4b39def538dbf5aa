"""Decoders whose tokens are computed one after the other have the same bits wherever a prompt is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from tests.checkpoints import GEMMA_4_MIXTURE, VOCAB, make
from tests.lm.models.cut_prompts import logits_of


@pytest.mark.parametrize(
    ("family", "differences"),
    [("Gemma4Text", {}), ("Gemma4Text", GEMMA_4_MIXTURE), ("DeepseekV2", {}), ("DeepseekV3", {})],
    ids=["Gemma 4 E2B", "Gemma 4 mixture", "DeepSeek-V2", "DeepSeek-V3"],
)
def test_a_token_has_the_same_bits_wherever_a_prompt_is_cut(
    tmp_path: Path, family: str, differences: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    make(tmp_path, family, **differences)
    model, plain = (load(tmp_path, device="cpu", invariant=invariant) for invariant in (True, False))
    assert isinstance(model, Decoder) and isinstance(plain, Decoder)
    ids = torch.arange(40) * 7 % VOCAB
    whole = logits_of(model, ids)
    assert torch.equal(logits_of(model, ids, 3, 20, 21), whole)
    torch.testing.assert_close(whole, logits_of(plain, ids), rtol=0, atol=2e-4)
