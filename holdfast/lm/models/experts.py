"""Mixtures of experts in checkpoints: how each family describes and names them, and how their tensors are read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Protocol

import torch

from holdfast.lm.kernels.linear.experts.experts import ALL_EXPERTS, ExpertRule, Experts, Groups
from holdfast.lm.kernels.mxfp4 import ExpertWeights, Mxfp4Matrices
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
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
GRANITE = ExpertNames(
    router="block_sparse_moe.router.layer",
    gate_up=("block_sparse_moe.input_linear.weight",),
    down="block_sparse_moe.output_linear.weight",
    fused="rows",
)

LLAMA4 = ExpertNames(
    router="feed_forward.router",
    gate_up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    fused="halves",
    shared=tuple(f"feed_forward.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")),
)

NEMOTRON = ExpertNames(
    router="mixer.gate",
    gate_up=("mixer.experts.{}.up_proj.weight",),
    down="mixer.experts.{}.down_proj.weight",
    correction="mixer.gate.e_score_correction_bias",
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


def phimoe_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in every layer, two of which a token chooses by SparseMixer."""
    chosen = _size(config, "num_experts_per_tok", 2)
    if chosen != 2:
        raise UnsupportedCheckpoint(f"num_experts_per_tok is {chosen}; SparseMixer chooses 2 experts")
    jitter = float(config.get("router_jitter_noise", 0.01))
    if jitter < 0:
        raise UnsupportedCheckpoint(f"router_jitter_noise is {jitter:g}; it must be at least 0")
    return _spec(
        config,
        names=MIXTRAL,
        count=_size(config, "num_local_experts", 16),
        inner=_size(config, "intermediate_size"),
        sparse=(True,) * num_layers,
        rule=ExpertRule(top_k=2, normalized=False, jitter=jitter),
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


def granite_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec | None:
    """Experts in every layer of a Granite 4, besides a shared one; shares are normalized. None for one without any."""
    if config.get("num_local_experts") == 0:
        return None
    experts = _spec(
        config,
        names=QWEN3_MOE if config.get("separate_tensors") else GRANITE,
        count=_size(config, "num_local_experts", 8),
        inner=_size(config, "intermediate_size", 11_008),
        sparse=(True,) * num_layers,
        rule=ExpertRule(top_k=_size(config, "num_experts_per_tok", 2)),
    )
    return replace(experts, shared_size=_size(config, "shared_intermediate_size"), shared_gate=False)


def deepseek_v2_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts of DeepSeek-V2: shares of a softmax that are not normalized, of all groups or of the best ones."""
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedCheckpoint(f"topk_method {method!r} is not supported; known: greedy, group_limited_greedy")
    groups = ALL_EXPERTS if method == "greedy" else _groups(config, best=1)
    return _deepseek_experts(config, num_layers, QWEN3_MOE, normalized=False, groups=groups)


def deepseek_v3_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts of DeepSeek-V3: sigmoids, groups ranked by their two best scores, and a correction of the choice."""
    names = replace(QWEN3_MOE, correction="mlp.gate.e_score_correction_bias")
    normalized, groups = bool(config.get("norm_topk_prob", True)), _groups(config, best=2)
    return _deepseek_experts(config, num_layers, names, normalized=normalized, groups=groups, sigmoid=True)


def nemotron_experts(config: Mapping[str, Any], kinds: Sequence[str]) -> ExpertSpec:
    """Experts of Nemotron 3, chosen as DeepSeek-V3's, in the layers of kind moe. None of them has a gate."""
    chosen, factor = _size(config, "num_experts_per_tok"), float(config["routed_scaling_factor"])
    rule = ExpertRule(
        top_k=chosen,
        normalized=bool(config["norm_topk_prob"]),
        groups=_groups(config, best=2),
        factor=factor,
        sigmoid=True,
        gated=False,
    )
    experts = _spec(
        config,
        names=NEMOTRON,
        count=_size(config, "n_routed_experts"),
        inner=_size(config, "moe_intermediate_size"),
        sparse=tuple(kind == "moe" for kind in kinds),
        rule=rule,
    )
    shared = _size(config, "moe_shared_expert_intermediate_size")
    return replace(experts, shared_gate=False, shared_size=shared)


def _deepseek_experts(
    config: Mapping[str, Any], num_layers: int, names: ExpertNames, *, normalized: bool, **rule: Any
) -> ExpertSpec:
    """Experts besides a shared one without a gate. The first `first_k_dense_replace` layers have an MLP."""
    inner, dense = _size(config, "moe_intermediate_size"), _size(config, "first_k_dense_replace", 0)
    kinds = config.get("mlp_layer_types") or ["dense" if layer < dense else "sparse" for layer in range(num_layers)]
    if len(kinds) != num_layers:
        raise UnsupportedCheckpoint(f"mlp_layer_types lists {len(kinds)} layers of {num_layers}")
    chosen, factor = _size(config, "num_experts_per_tok"), float(config.get("routed_scaling_factor") or 1.0)
    experts = _spec(
        config,
        names=names,
        count=_size(config, "n_routed_experts"),
        inner=inner,
        sparse=tuple(kind == "sparse" for kind in kinds),
        rule=ExpertRule(top_k=chosen, normalized=normalized, factor=factor, **rule),
    )
    return replace(experts, shared_gate=False, shared_size=inner * _size(config, "n_shared_experts", 0))


def _groups(config: Mapping[str, Any], *, best: int) -> Groups:
    """The groups of a config's experts, ranked by the sum of their `best` highest scores.

    Raises UnsupportedCheckpoint for groups that are not equal, or hold too few experts.
    """
    count, experts = at_least_one(config, "n_group", 1), _size(config, "n_routed_experts")
    kept, chosen = at_least_one(config, "topk_group", count), _size(config, "num_experts_per_tok")
    if experts % count or kept > count:
        raise UnsupportedCheckpoint(
            f"n_group is {count} and topk_group is {kept}; {experts} experts have no such groups"
        )
    if kept == count:
        return ALL_EXPERTS
    if experts // count < best or chosen > kept * (experts // count):
        raise UnsupportedCheckpoint(
            f"n_group is {count} and topk_group is {kept}; {kept} groups of {experts // count} experts are too few for "
            f"num_experts_per_tok {chosen}"
        )
    return Groups(count, kept, best)


def with_stored_names(spec: DecoderSpec, stored: Collection[str]) -> DecoderSpec:
    """The decoder's spec, with fused experts if the checkpoint with these tensor names has them instead of single ones.

    Transformers reads both forms of Qwen3's mixtures.
    """
    fused, experts = QWEN3_VL_MOE, spec.experts
    single = experts is not None and experts.names.gate_up == QWEN3_MOE.gate_up
    if experts is None or not single or not any(map(str.endswith, stored, repeat("." + fused.gate_up[0]))):
        return spec
    names = replace(experts.names, gate_up=fused.gate_up, down=fused.down, fused=fused.fused)
    return replace(spec, experts=replace(experts, names=names))


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


def llama4_experts(config: Mapping[str, Any], num_layers: int) -> ExpertSpec:
    """Experts in the listed layers or in every `interleave_moe_layer_step`-th, all of which a shared expert joins."""
    step, listed = at_least_one(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    sparse = range(step - 1, num_layers, step) if listed is None else listed
    return _spec(
        config,
        names=LLAMA4,
        count=_size(config, "num_local_experts", 16),
        inner=_size(config, "intermediate_size"),
        sparse=tuple(layer in sparse for layer in range(num_layers)),
        rule=ExpertRule(
            top_k=_size(config, "num_experts_per_tok", 1), normalized=False, scales_input=True, shared=True
        ),
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


def at_least_one(config: Mapping[str, Any], key: str, default: int) -> int:
    """A size of the config. Raises UnsupportedCheckpoint naming it if it is below 1."""
    value = _size(config, key, default)
    if value < 1:
        raise UnsupportedCheckpoint(f"{key} is {value}; it must be at least 1")
    return value


class Source(Protocol):
    """The source of a model's weights; see `decoder.WeightSource`."""

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None: ...

    def packed_experts(
        self, name: str, piece: Piece, device: torch.device, dtype: torch.dtype
    ) -> Mxfp4Matrices | None: ...

    def packed_matrices(
        self, names: Sequence[tuple[str, ...]], pieces: tuple[Piece, ...], device: torch.device
    ) -> PackedWeight | None: ...


def read_experts(
    spec: DecoderSpec, layer: int, shard: Shard, source: Source, *, device: torch.device, dtype: torch.dtype
) -> Experts:
    """The experts of one layer; for a shard, its share of each expert's columns.

    Only the shard's first device has the bias of the second product, because the devices' results are added.
    """
    reader = _Reader(spec, layer, shard, source, device, dtype)
    return Experts(rule=reader.spec.rule, gate_up=reader.gate_up(), down=reader.down(), **reader.router_and_biases())


class _Reader:
    """Reads the experts of one layer, or a shard's share of them."""

    def __init__(
        self, spec: DecoderSpec, layer: int, shard: Shard, source: Source, device: torch.device, dtype: torch.dtype
    ) -> None:
        assert spec.experts is not None
        self.spec, self._names, self._source = spec.experts, spec.experts.names, source
        self._device, self._dtype = device, dtype
        self._prefix, self._shapes = spec.names.layer.format(layer), expert_shapes(spec)
        self._hidden, self._inner = range(spec.hidden_size), spec.experts.intermediate_size
        self._own, self._leads = shard.part(self._inner), shard.index == 0

    def gate_up(self) -> ExpertWeights:
        """The weights [E, 2 inner, hidden] of the first products; without a gate [E, inner, hidden]."""
        if self._names.fused == "alternating":
            both = range(2 * self._own.start, 2 * self._own.stop)
            packed = self._packed(self._names.gate_up[0], self._hidden, both)
            if packed is not None:
                parts = (packed.data, packed.scale)
                return Mxfp4Matrices(*(torch.cat((each[:, ::2], each[:, 1::2]), 1) for each in parts))
        single = self._packed_single(self._names.gate_up, self._of_rows)
        if single is not None:
            return single
        whole = self._empty(self._every, (1 + self.spec.rule.gated) * len(self._own), len(self._hidden))
        for expert, into in enumerate(whole):
            self._fill_gate_up(expert, torch.split(into, len(self._own)))
        return whole

    def down(self) -> ExpertWeights:
        """The weights [E, hidden, inner] of the second products."""
        if self._names.fused == "alternating":
            packed = self._packed(self._names.down, self._own, self._hidden)
            if packed is not None:
                return Mxfp4Matrices(packed.data.contiguous(), packed.scale.contiguous())
        single = self._packed_single((self._names.down,), self._of_columns)
        if single is not None:
            return single
        whole = self._empty(self._every, len(self._hidden), len(self._own))
        for expert, into in enumerate(whole):
            self._fill_down(expert, into)
        return whole

    def router_and_biases(self) -> dict[str, Any]:
        """The other fields of `Experts`."""
        names = self._names
        router = self._filled(names.router + ".weight")
        if names.correction:
            return {"router": router, "correction": self._correction()}
        if not self.spec.biased:
            return {"router": router}
        router_bias = self._filled(names.router + ".bias")
        if not names.fused:
            return {"router": router, "router_bias": router_bias}
        return {
            "router": router,
            "router_bias": router_bias,
            "gate_up_bias": torch.cat(self._halves(names.gate_up[0] + "_bias"), 1),
            "down_bias": self._filled(names.down + "_bias") if self._leads else None,
        }

    def _correction(self) -> torch.Tensor:
        """The correction of scores, in float32: differences of a thousandth decide between experts."""
        name = self._names.correction
        into = torch.empty(self._shapes[name], device=self._device, dtype=torch.float32)
        self._source.fill(self._prefix + name, Piece.all_of(*self._shapes[name]), into)
        return into

    def _fill_gate_up(self, expert: int, parts: Sequence[torch.Tensor]) -> None:
        """Write one expert's rows of gate and of up, or of up alone."""
        names, one, of_up = self._names, range(expert, expert + 1), self._of_up
        if expert == self.spec.count:
            self._fill_rows(names.shared[:2], parts)
        elif names.fused == "rows":
            for part, into in zip((self._own, of_up), parts, strict=True):
                into.copy_(self._filled(names.gate_up[0], one, part, self._hidden)[0])
        elif names.fused:
            for half, into in zip(self._halves(names.gate_up[0], one, self._hidden), parts, strict=True):
                into.copy_(half[0].t())
        else:
            self._fill_rows([name.format(expert) for name in names.gate_up], parts)

    def _fill_rows(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> None:
        """Read gate and up of an expert whose tensors are its own."""
        for name, into in zip(names, parts, strict=True):
            self._source.fill(self._prefix + name, self._of_rows, into)

    def _fill_down(self, expert: int, into: torch.Tensor) -> None:
        """Write one expert's rows of down."""
        names, one = self._names, range(expert, expert + 1)
        is_shared = expert == self.spec.count
        name = names.shared[2] if is_shared else names.down
        if names.fused == "rows" and not is_shared:
            into.copy_(self._filled(name, one, self._hidden, self._own)[0])
        elif names.fused and not is_shared:
            into.copy_(self._filled(name, one, self._own, self._hidden)[0].t())
        else:
            self._source.fill(self._prefix + name.format(expert), self._of_columns, into)

    def _packed_single(self, names: Sequence[str], piece: Piece) -> PackedWeight | None:
        """The weights of all experts whose tensors are their own, if kernels read them as they are stored."""
        if self._names.fused:
            return None
        every = [tuple(self._prefix + name.format(expert) for name in names) for expert in range(self.spec.count)]
        return self._source.packed_matrices(every, (piece,) * len(names), self._device)

    @property
    def _of_rows(self) -> Piece:
        """This device's piece of an expert's gate or up."""
        return Piece((self._inner, len(self._hidden)), (self._own, self._hidden))

    @property
    def _of_columns(self) -> Piece:
        """This device's piece of an expert's down."""
        return Piece((len(self._hidden), self._inner), (self._hidden, self._own))

    @property
    def _every(self) -> int:
        """Number of experts with the shared one, which comes last."""
        return self.spec.count + self.spec.rule.shared

    @property
    def _of_up(self) -> range:
        """This device's columns of up in a fused tensor that has all of gate's columns first."""
        return range(self._inner + self._own.start, self._inner + self._own.stop)

    def _halves(self, name: str, *parts: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of gate and those of up, of a fused tensor that is cut to the ranges `parts` before them."""
        if self._names.fused == "halves":
            return self._filled(name, *parts, self._own), self._filled(name, *parts, self._of_up)
        both = self._filled(name, *parts, range(2 * self._own.start, 2 * self._own.stop))
        return both[..., ::2], both[..., 1::2]

    def _packed(self, name: str, *parts: range) -> Mxfp4Matrices | None:
        """A fused tensor, cut to the ranges `parts`, if kernels read it as it is stored."""
        piece = Piece(self._shapes[name], (range(self.spec.count), *parts))
        return self._source.packed_experts(self._prefix + name, piece, self._device, self._dtype)

    def _filled(self, name: str, *parts: range) -> torch.Tensor:
        """A tensor, cut to the ranges `parts` of its last dimensions."""
        whole = self._shapes[name]
        piece = Piece(whole, (*map(range, whole[: len(whole) - len(parts)]), *parts))
        into = self._empty(*piece.shape)
        self._source.fill(self._prefix + name, piece, into)
        return into

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self._device, dtype=self._dtype)
