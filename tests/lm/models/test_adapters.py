"""AdapterSlots: what is written to a slot, which other slots stay as they are, and slots that are full or empty."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.adapters import AdapterSlots
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=8, intermediate_size=12, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=16, max_position_embeddings=32,
    rms_norm_eps=1e-5, tie_word_embeddings=False,
)  # fmt: skip
MODULES = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "gate": (12, 8), "up": (12, 8), "down": (8, 12)}
"""Outputs and inputs of each module."""
PARTS = {"q": ("qkv", 0), "k": ("qkv", 1), "v": ("qkv", 2), "o": ("o", 0), "gate": ("gate_up", 0), "up": ("gate_up", 1),
         "down": ("down", 0)}  # fmt: skip
"""The field of each module, and its place among the field's modules."""


def slots_of(slots: int = 3) -> AdapterSlots:
    base = adapted_modules(NATIVE["LlamaForCausalLM"](CONFIG))
    return AdapterSlots(base, slots=slots, max_rank=4, dtype=torch.float32, device=torch.device("cpu"))


def pair(module: str, rank: int, seed: int) -> LoraPair:
    outputs, inputs = MODULES[module]
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator)
    return LoraPair(a, b, 0.5 * seed)


def added(slots: AdapterSlots, slot: int, layer: int, module: str) -> torch.Tensor:
    """The matrix that a slot adds to a module's weights: scale times B A."""
    field, part = PARTS[module]
    stack = getattr(slots.layers[layer], field)
    rank, start = int(stack.rank[slot, part]), stack.ends[part] - MODULES[module][0]
    b = stack.b[slot, :rank, start : stack.ends[part]].t()
    return float(stack.scale[slot, part]) * b @ stack.a[slot, part, :rank]


@pytest.mark.parametrize("ranks", [{"q": 4, "k": 1, "v": 2, "o": 3, "gate": 1, "up": 4, "down": 2}, {"k": 3, "up": 1}])
def test_a_slot_adds_what_its_adapter_says_and_others_stay_as_they_are(ranks: dict[str, int]) -> None:
    slots = slots_of()
    pairs = {(layer, name): pair(name, rank, 1 + layer) for layer in (0, 1) for name, rank in ranks.items()}
    slots.write(1, slots.pack(AdapterWeights(pairs), (), pinned=False))
    for layer in (0, 1):
        for name in MODULES:
            given = pairs.get((layer, name))
            expected = torch.zeros(MODULES[name]) if given is None else given.scale * given.b @ given.a
            torch.testing.assert_close(added(slots, 1, layer, name), expected)
            assert not added(slots, 0, layer, name).any() and not added(slots, 2, layer, name).any()


def test_a_smaller_adapter_leaves_nothing_of_the_one_before_it() -> None:
    slots = slots_of()
    whole = {(layer, name): pair(name, 4, 3) for layer in (0, 1) for name in MODULES}
    slots.write(0, slots.pack(AdapterWeights(whole), (), pinned=False))
    small = pair("k", 1, 5)
    slots.write(0, slots.pack(AdapterWeights({(1, "k"): small}), (), pinned=False))
    for layer in (0, 1):
        for name in MODULES:
            expected = small.scale * small.b @ small.a if (layer, name) == (1, "k") else torch.zeros(MODULES[name])
            torch.testing.assert_close(added(slots, 0, layer, name), expected)


def test_full_slots_have_the_largest_rank_everywhere_and_add_nothing_and_empty_ones_have_none() -> None:
    slots = slots_of()
    slots.write(0, slots.pack(AdapterWeights({(0, "q"): pair("q", 2, 1)}), (), pinned=False))
    for made, rank in ((slots.fill, 4), (slots.clear, 0)):
        made()
        for layer in (0, 1):
            for field in ("qkv", "o", "gate_up", "down"):
                assert (getattr(slots.layers[layer], field).rank == rank).all()
            assert not any(added(slots, slot, layer, name).any() for slot in range(3) for name in MODULES)
    assert len(slots) == 3 and slots.nbytes > 0
