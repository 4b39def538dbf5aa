"""Short convolutions in checkpoints: how LFM2 describes them, and where their tensors are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import Part
from holdfast.lm.models.short_convolution import ConvolutionSpec

CONV = "conv.weight"
"""The name of the convolution's weight as a matrix. A checkpoint stores it with a dimension of 1 in the middle."""

FIELDS = {
    "input_norm": ("operator_norm.weight",),
    "q_norm": ("self_attn.q_layernorm.weight",),
    "k_norm": ("self_attn.k_layernorm.weight",),
    "o": ("self_attn.out_proj.weight",),
    "mixer_in": ("conv.in_proj.weight",),
    "mixer_in_bias": ("conv.in_proj.bias",),
    "conv": (CONV,),
    "conv_bias": ("conv.conv.bias",),
    "mixer_out": ("conv.out_proj.weight",),
    "mixer_out_bias": ("conv.out_proj.bias",),
    "post_norm": ("ffn_norm.weight",),
    "gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "down": ("feed_forward.w2.weight",),
}
"""The tensor names after the layer's prefix, for each field whose name is not Llama's."""


def lfm2_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """An LFM2's config.json with Llama's keys, and Transformers' defaults for those that it lacks."""
    defaults: dict[str, Any] = dict(
        num_key_value_heads=8,
        intermediate_size=12_288,
        max_position_embeddings=128_000,
        norm_eps=1e-5,
        rope_theta=1e6,
        tie_word_embeddings=True,
    )
    config = {**defaults, **config, "hidden_act": "silu"}
    config["rms_norm_eps"] = config["norm_eps"]
    config["tie_word_embeddings"] = config.get("tie_embedding", config["tie_word_embeddings"])
    config["intermediate_size"] = mlp_width(config, int(config.get("block_ff_dim") or config["intermediate_size"]))
    return config


def mlp_width(config: Mapping[str, Any], given: int) -> int:
    """The width of the MLP. By default the given one is for an MLP without a gate, of as many weights."""
    if not config.get("block_auto_adjust_ff_dim", True):
        return given
    width, factor, multiple = int(2 * given / 3), config.get("block_ffn_dim_multiplier", 1.0), 1
    if factor is not None:
        width, multiple = int(factor * width), int(config.get("block_multiple_of") or 256)
    return -(-width // multiple) * multiple


def convolutional(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The DecoderSpec fields of an LFM2, from those that all families read.

    Raises NotNative for other kinds of layers, and for a model without attention.
    """
    count, hidden, full = fields["num_layers"], fields["hidden_size"], config.get("full_attn_idxs")
    attention = range(count) if full is None else full
    kinds = config.get("layer_types") or ["full_attention" if layer in attention else "conv" for layer in range(count)]
    if unknown := set(kinds) - {"full_attention", "conv"}:
        raise NotNative(f"layer type {min(unknown)!r} is neither full_attention nor conv")
    if len(kinds) != count:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {count}")
    if "full_attention" not in kinds:
        raise NotNative("none of its layers has attention")
    width = int(config.get("conv_L_cache") or 3)
    if width < 2:
        raise NotNative(f"conv_L_cache is {width}; it must be at least 2")
    layers = tuple(kind == "conv" for kind in kinds)
    convolution = ConvolutionSpec(
        layers=layers, channels=hidden, width=width, bias=bool(config.get("conv_bias", False))
    )
    names = replace(
        fields["names"],
        norm="model.embedding_norm.weight",
        fields={**fields["names"].fields, **FIELDS},
        parts={CONV: Part("conv.conv.weight", (hidden, 1, width))},
    )
    return {**fields, "names": names, "recurrence": convolution if any(layers) else None, "qk_norm": True}
