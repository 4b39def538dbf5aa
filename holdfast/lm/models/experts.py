"""Mixtures of experts in checkpoints: how each family describes and names them, and how their tensors are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any, Protocol

import torch

from holdfast.lm.kernels.linear.experts.experts import ExpertRule, Experts
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec, ExpertNames, ExpertSpec, expert_shapes
from holdfast.lm.models.shard import Piece, Shard

MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
    down="block_sparse_moe.experts.{}.w2.weight",
)
QWEN3_MOE = ExpertNames(
    router="mlp.gate",
    gate_up=("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    down="mlp.experts.{}.down_proj.weight",
)
GPT_OSS = ExpertNames(
    router="mlp.router", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj", fused="alternating"
)
QWEN3_VL_MOE = ExpertNames(
    router="mlp.gate", gate_up=("mlp.experts.gate_up_proj",), down="mlp.experts.down_proj", fused="halves"
)

MOST_CHOSEN = 32
"""Largest number of experts that a token may choose. Kernels unroll their loops over them."""


def mixtral_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in every layer; shares are normalized."""
    return _spec(
        config,
        names=MIXTRAL,
        count=_size(config, "num_local_experts", 8),
        inner=_size(config, "intermediate_size"),
        sparse=(True,) * num_layers,
        rule=ExpertRule(top_k=_size(config, "num_experts_per_tok", 2)),
    )


def qwen3_moe_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in every `decoder_sparse_step`-th layer except `mlp_only_layers`; shares may be normalized."""
    step, dense = _size(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    rule = ExpertRule(
        top_k=_size(config, "num_experts_per_tok", 8), normalized=bool(config.get("norm_topk_prob", False))
    )
    return _spec(
        config,
        names=QWEN3_MOE,
        count=_size(config, "num_experts", _size(config, "num_local_experts", 128)),
        inner=_size(config, "moe_intermediate_size", 768),
        sparse=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers)),
        rule=rule,
    )


def qwen3_vl_moe_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in the layers of a Qwen3-MoE; shares are always normalized."""
    defaults: dict[str, Any] = dict(num_experts_per_tok=4, moe_intermediate_size=1408, num_local_experts=60)
    config = {**defaults, **config, "norm_topk_prob": True}
    return replace(qwen3_moe_experts(config, num_layers), names=QWEN3_VL_MOE)


def qwen3_next_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec | None:
    """Experts in the layers of a Qwen3-MoE, besides a shared one. None for a model without any."""
    if config.get("num_experts") == 0:
        return None
    config = {"num_experts": 512, "num_experts_per_tok": 10, **config}
    shared = _size(config, "shared_expert_intermediate_size")
    return replace(qwen3_moe_experts(config, num_layers), shared_size=shared)


def qwen3_5_moe_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in every layer, besides a shared one; shares are normalized."""
    config = {"num_experts": 256, **config, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": ()}
    shared = _size(config, "shared_expert_intermediate_size")
    return replace(qwen3_moe_experts(config, num_layers), shared_size=shared)


def with_stored_names(spec: DecoderSpec, stored: Collection[str]) -> DecoderSpec:
    """The decoder's spec, with fused experts if the checkpoint with these tensor names has them instead of single ones.

    Transformers reads both forms of Qwen3's mixtures.
    """
    fused = "." + QWEN3_VL_MOE.gate_up[0]
    if spec.experts is None or spec.experts.names is not QWEN3_MOE or not any(map(str.endswith, stored, repeat(fused))):
        return spec
    return replace(spec, experts=replace(spec.experts, names=QWEN3_VL_MOE))


def gpt_oss_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts with biases in every layer, and a clamped gate; shares are normalized."""
    clamp = float(config.get("swiglu_alpha") or 1.702), float(config.get("swiglu_limit") or 7.0)
    return _spec(
        config,
        names=GPT_OSS,
        count=_size(config, "num_local_experts", 128),
        inner=_size(config, "intermediate_size"),
        sparse=(True,) * num_layers,
        rule=ExpertRule(top_k=_size(config, "num_experts_per_tok", 4), clamp=clamp),
        biased=True,
    )


def _spec(
    config: Mapping[str, Any],
    *,
    names: ExpertNames,
    count: int,
    inner: int,
    sparse: tuple[bool, ...],
    rule: ExpertRule,
    biased: bool = False,
) -> ExpertSpec:
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedCheckpoint(f"hidden_act {activation!r} is not supported for experts; known: silu")
    if not 0 < rule.top_k <= min(count, MOST_CHOSEN):
        raise UnsupportedCheckpoint(
            f"num_experts_per_tok is {rule.top_k}; of {count} experts, at most {min(count, MOST_CHOSEN)} can be chosen"
        )
    return ExpertSpec(count=count, intermediate_size=inner, sparse=sparse, rule=rule, biased=biased, names=names)


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise UnsupportedCheckpoint(f"config.json has no {key!r}")
    return int(value)


class Source(Protocol):
    """The source of a model's weights; see `decoder.WeightSource`."""

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None: ...


def read_experts(
    spec: DecoderSpec, layer: int, shard: Shard, source: Source, *, device: torch.device, dtype: torch.dtype
) -> Experts:
    """The experts of one layer; for a shard, its share of each expert's columns.

    Only the shard's first device has the bias of the second product, because the devices' results are added.
    """
    experts = spec.experts
    assert experts is not None
    names, count, hidden, inner = experts.names, experts.count, spec.hidden_size, experts.intermediate_size
    prefix, shapes = spec.names.layer.format(layer), expert_shapes(spec)
    own = shard.part(inner)
    of_up = range(inner + own.start, inner + own.stop)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def filled(name: str, *parts: range) -> torch.Tensor:
        """Read a tensor, cut to the ranges `parts` of its last dimensions."""
        whole = shapes[name]
        piece = Piece(whole, (*map(range, whole[: len(whole) - len(parts)]), *parts))
        into = empty(*piece.shape)
        source.fill(prefix + name, piece, into)
        return into

    biases: dict[str, torch.Tensor | None] = {}
    gate_up, down = empty(count, 2 * len(own), hidden), empty(count, hidden, len(own))

    def halves(name: str, *parts: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of gate and those of up, of a fused tensor that is cut to the ranges `parts` before them."""
        if names.fused == "halves":
            return filled(name, *parts, own), filled(name, *parts, of_up)
        both = filled(name, *parts, range(2 * own.start, 2 * own.stop))
        return both[..., ::2], both[..., 1::2]

    def of_expert(expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One expert's rows of gate, of up, and of down, from fused tensors."""
        one, all_hidden = range(expert, expert + 1), range(hidden)
        if names.fused == "rows":
            gate, up = (filled(names.gate_up[0], one, part, all_hidden)[0] for part in (own, of_up))
            return gate, up, filled(names.down, one, all_hidden, own)[0]
        gate, up = (half[0].t() for half in halves(names.gate_up[0], one, all_hidden))
        return gate, up, filled(names.down, one, own, all_hidden)[0].t()

    if names.fused:
        for expert in range(count):
            gate, up, down[expert] = of_expert(expert)
            torch.cat((gate, up), out=gate_up[expert])
        if experts.biased:
            biases["gate_up_bias"] = torch.cat(halves(names.gate_up[0] + "_bias"), 1)
            biases["down_bias"] = filled(names.down + "_bias") if shard.index == 0 else None
    else:
        for expert in range(count):
            for name, rows in zip(names.gate_up, torch.split(gate_up[expert], len(own)), strict=True):
                source.fill(prefix + name.format(expert), Piece((inner, hidden), (own, range(hidden))), rows)
            piece = Piece((hidden, inner), (range(hidden), own))
            source.fill(prefix + names.down.format(expert), piece, down[expert])
    if experts.biased:
        biases["router_bias"] = filled(names.router + ".bias")
    return Experts(rule=experts.rule, router=filled(names.router + ".weight"), gate_up=gate_up, down=down, **biases)
