"""The sizes of recurrent layers that determine their time and memory, from the config.json of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CHUNK = 64
"""Number of tokens of a prompt that kernels compute as one product."""
STATE_NUMBER, NUMBER = 4, 2
"""Bytes of a number in a recurrent state, and of a 16-bit number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """The recurrent layers of a decoder. All are of one size."""

    layers: int
    """Number of recurrent layers."""
    weights: int
    """Number of weights in one layer's projections and convolution."""
    state_bytes: int
    """Bytes that one layer keeps of a sequence."""
    scan_operations: int
    """Operations of one token of a prompt in one layer, besides the products with weights."""
    convolved_bytes: int
    """Bytes that the convolution of one layer reads and writes for one token of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """The layers of a decoder by kind, and what differs in them."""

    recurrent: RecurrentShape
    layers: int
    """Number of layers."""
    attention: int
    """Number of layers with attention."""
    mlps: int
    """Number of layers with an MLP."""
    intermediate: int
    """Width of an MLP."""
    gated_attention: bool = False
    """Whether heads of attention have output gates."""


Size = Callable[..., int]
"""Reads a size of at least 1 from the config: the names of its keys, and `default`. Raises ValueError."""


def layer_kinds(said: Mapping[str, Any], size: Size) -> LayerKinds | None:
    """The layers of a model with recurrent layers; None for any other. Raises ValueError as `size` does."""
    family = FAMILIES.get(str(said.get("model_type")))
    return None if family is None else family(said, size)


def has_experts(said: Mapping[str, Any]) -> bool:
    """Whether a model is a mixture of experts. A Nemotron-H without experts has a number of them nevertheless."""
    if said.get("model_type") == "nemotron_h":
        return any(kind in ("E", "moe") for kind in _nemotron_layers(said))
    return any(said.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))


def _nemotron_layers(said: Mapping[str, Any]) -> Sequence[str]:
    """The kind of each layer of a Nemotron-H."""
    return said.get("layers_block_type") or said.get("layer_types") or said.get("hybrid_override_pattern") or ()


def _delta(said: Mapping[str, Any], size: Size) -> LayerKinds:
    """Qwen3.5 and Qwen3-Next: gated delta nets."""
    count, hidden, every = size("num_hidden_layers"), size("hidden_size"), size("full_attention_interval", default=4)
    kinds = said.get("layer_types") or [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(count)
    ]
    keys, values = size("linear_num_key_heads", default=16), size("linear_num_value_heads", default=32)
    key, value = size("linear_key_head_dim", default=128), size("linear_value_head_dim", default=128)
    width, channels = size("linear_conv_kernel_dim", default=4), 2 * keys * key + values * value
    projections = hidden * (channels + 2 * values * value + 2 * values)
    attention = sum(kind == "full_attention" for kind in kinds)
    shape = RecurrentShape(
        layers=count - attention,
        weights=projections + channels * width,
        state_bytes=channels * (width - 1) * NUMBER + values * key * value * STATE_NUMBER,
        # Products with the state: keys, queries and updates. Within a chunk: keys with keys and queries, and results.
        scan_operations=values * (6 * key * value + 2 * CHUNK * (3 * key + 2 * value)),
        convolved_bytes=2 * channels * NUMBER,
    )
    return LayerKinds(
        recurrent=shape,
        layers=count,
        attention=attention,
        mlps=count,
        intermediate=size("intermediate_size"),
        gated_attention=True,
    )


def _mamba_shape(
    layers: int, hidden: int, *, heads: int, dim: int, groups: int, state: int, width: int
) -> RecurrentShape:
    """Layers of Mamba-2."""
    inner = heads * dim
    channels = inner + 2 * groups * state
    return RecurrentShape(
        layers=layers,
        weights=hidden * (inner + channels + heads) + inner * hidden + channels * width,
        state_bytes=channels * (width - 1) * NUMBER + inner * state * STATE_NUMBER,
        scan_operations=heads * (4 * dim * state + 2 * CHUNK * dim) + groups * 2 * CHUNK * state,
        convolved_bytes=2 * channels * NUMBER,
    )


def _mamba(size: Size, layers: int, inner: int | None = None) -> RecurrentShape:
    """Mamba-2 of Bamba, Granite 4 and Falcon-H1. `inner` is the width of all heads, unless it follows from others."""
    hidden, heads = size("hidden_size"), size("mamba_n_heads", default=128)
    inner = inner or size("mamba_expand", default=2) * hidden
    return _mamba_shape(
        layers,
        hidden,
        heads=heads,
        dim=inner // heads,
        groups=size("mamba_n_groups", default=1),
        state=size("mamba_d_state", default=256),
        width=size("mamba_d_conv", default=4),
    )


def _bamba(said: Mapping[str, Any], size: Size) -> LayerKinds:
    count, attention = size("num_hidden_layers"), len(said.get("attn_layer_indices") or ())
    return LayerKinds(
        recurrent=_mamba(size, count - attention),
        layers=count,
        attention=attention,
        mlps=count,
        intermediate=size("intermediate_size"),
    )


def _granite(said: Mapping[str, Any], size: Size) -> LayerKinds:
    count, kinds = size("num_hidden_layers"), said.get("layer_types") or said.get("layers_block_type") or ()
    attention = sum(kind in ("attention", "full_attention") for kind in kinds)
    return LayerKinds(
        recurrent=_mamba(size, count - attention),
        layers=count,
        attention=attention,
        mlps=count,
        intermediate=size("shared_intermediate_size", default=1024),
    )


def _falcon(said: Mapping[str, Any], size: Size) -> LayerKinds:
    """Falcon-H1, whose layers have attention and Mamba-2 side by side."""
    count, inner = size("num_hidden_layers"), said.get("mamba_d_ssm")
    return LayerKinds(
        recurrent=_mamba(size, count, inner=None if inner is None else size("mamba_d_ssm")),
        layers=count,
        attention=count,
        mlps=count,
        intermediate=size("intermediate_size"),
    )


def _nemotron(said: Mapping[str, Any], size: Size) -> LayerKinds:
    """Nemotron-H, whose layers are Mamba-2, attention or an MLP alone."""
    kinds = _nemotron_layers(said)
    mamba, attention = (
        sum(kind in names for kind in kinds)
        for names in (("M", "mamba", "linear_attention"), ("*", "attention", "full_attention"))
    )
    shape = _mamba_shape(
        mamba,
        size("hidden_size"),
        heads=size("mamba_num_heads", default=128),
        dim=size("mamba_head_dim", default=64),
        groups=size("n_groups", "mamba_n_groups", default=8),
        state=size("ssm_state_size", default=128),
        width=size("conv_kernel", "mamba_d_conv", default=4),
    )
    return LayerKinds(
        recurrent=shape,
        layers=len(kinds),
        attention=attention,
        mlps=len(kinds) - mamba - attention,
        intermediate=size("intermediate_size"),
    )


def _lfm2(said: Mapping[str, Any], size: Size) -> LayerKinds:
    """LFM2: short convolutions, whose result is gated."""
    count, hidden, width = size("num_hidden_layers"), size("hidden_size"), size("conv_L_cache", default=3)
    full, kinds = said.get("full_attn_idxs"), said.get("layer_types")
    attention = len(full or ()) if kinds is None else sum(kind == "full_attention" for kind in kinds)
    shape = RecurrentShape(
        layers=count - attention,
        weights=hidden * (4 * hidden + width),
        state_bytes=hidden * (width - 1) * NUMBER,
        scan_operations=0,
        convolved_bytes=4 * hidden * NUMBER,
    )
    given = size("block_ff_dim", "intermediate_size", default=12_288)
    intermediate = _lfm2_width(said, given) if said.get("block_auto_adjust_ff_dim", True) else given
    return LayerKinds(recurrent=shape, layers=count, attention=attention, mlps=count, intermediate=intermediate)


def _lfm2_width(said: Mapping[str, Any], given: int) -> int:
    """The width of LFM2's MLP, which has as many weights as one of the given width without a gate."""
    factor = said.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return int(2 * given / 3)
    multiple = int(said.get("block_multiple_of") or 256)
    return -(-int(factor * int(2 * given / 3)) // multiple) * multiple


FAMILIES: dict[str, Callable[[Mapping[str, Any], Size], LayerKinds]] = {
    "qwen3_next": _delta,
    "qwen3_5": _delta,
    "qwen3_5_text": _delta,
    "lfm2": _lfm2,
    "bamba": _bamba,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "nemotron_h": _nemotron,
}
"""For each `model_type`, the function that reads its layers."""
