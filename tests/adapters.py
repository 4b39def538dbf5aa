"""LoRA adapters for tests, in PEFT's format, and an oracle: the base model with the adapter merged into it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, write_peft


def drawn(
    decoder: DecoderSpec,
    rank: int,
    *,
    seed: int,
    modules: tuple[str, ...] = (),
    scale: float = 2.0,
    strength: float = 0.5,
) -> AdapterWeights:
    """A random adapter of one rank for these modules of every layer that has them, or for all of them.

    It is strong enough to change what is said.
    """
    draw, base = torch.Generator().manual_seed(seed), adapted_modules(decoder)
    pairs = {}
    for layer in range(base.num_layers):
        for module in modules or base.modules:
            if not base.has(layer, module):
                continue
            own = base.of_layer(layer)[module]
            outputs, inputs = own.outputs, own.inputs
            a = torch.randn(rank, inputs, generator=draw) * (strength / inputs**0.5)
            b = torch.randn(outputs, rank, generator=draw) * (strength / rank**0.5)
            pairs[layer, module] = LoraPair(a, b, scale)
    return AdapterWeights(pairs, base.names)


def write(directory: Path, weights: AdapterWeights) -> Path:
    """Write an adapter; its directory."""
    write_peft(directory, weights, base_model="base")
    return directory


def merged(module: Any, weights: AdapterWeights) -> Any:
    """A copy of Transformers' module with an adapter added to its weights: W + scale · B A."""
    module = copy.deepcopy(module)
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for (layer, name), pair in weights.pairs.items():
            stored = next(each for each in weights.names.all_of(layer, name) if f"{each}.weight" in parameters)
            parameters[f"{stored}.weight"] += pair.scale * (pair.b @ pair.a)
    return module


def generated(module: Any, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """What Transformers generates greedily after a prompt."""
    with torch.inference_mode():
        found = module.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False)
    return tuple(found[0, len(prompt) :].tolist())
