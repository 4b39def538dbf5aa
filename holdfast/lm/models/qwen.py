"""Qwen2 and Qwen3 as differences from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.decoder import DecoderSpec
from holdfast.lm.models.llama import shared


def qwen2(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen2 and 2.5: biases on queries, keys and values."""
    fields = shared(config)
    return DecoderSpec(**fields, windows=windows_of(config, fields["num_layers"]), qkv_bias=True)


def qwen3(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3: queries and keys normed within each head, whose size is 128 unless the config says otherwise."""
    fields = shared({**config, "head_dim": config.get("head_dim") or 128})
    biased = bool(config.get("attention_bias", False))
    return DecoderSpec(
        **fields, windows=windows_of(config, fields["num_layers"]), qk_norm=True, qkv_bias=biased, o_bias=biased
    )


def windows_of(config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """By layer, from `layer_types`, or from `max_window_layers` for configs older than it."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    kinds = config.get("layer_types")
    if kinds is None:
        full = config.get("max_window_layers", 28)
        return tuple(window if index >= full else None for index in range(num_layers))
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise UnsupportedCheckpoint(f"layer type {min(unknown)!r} is not supported")
    if len(kinds) != num_layers:
        raise UnsupportedCheckpoint(f"layer_types lists {len(kinds)} layers of {num_layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
