"""Shapes of models: the sizes that determine the time of a step and the size of a cache. Some are known by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.config import CacheTypeName, QuantizationName
from holdfast.lab.simulator.recurrent_shapes import FAMILIES, LayerKinds, has_experts, layer_kinds

BYTES = 2
"""Bytes of a 16-bit number."""
NATIVE = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "opt", "gpt2", "falcon",
    "stablelm", "nemotron", "mixtral", "phimoe", "qwen3_moe", "gpt_oss", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl",
    "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "llama4_text", *FAMILIES,
)  # fmt: skip
"""Values of `model_type` of text decoders that are native in the engine and have FP8 weights on demand.

Decoders whose layers differ in heads are not simulated.
"""


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """How a checkpoint stores the weights of layers, as far as the engine keeps them so."""

    bytes: float = float(BYTES)
    """Bytes of a quantized weight, with its share of scales and zeros."""
    plain: tuple[str, ...] = ()
    """The parts of layers that are not quantized: attention, recurrent, mlp."""

    @property
    def packed(self) -> bool:
        """Whether products of many tokens must dequantize the weights first."""
        return self.bytes < 1

    def bytes_of(self, part: str) -> float:
        """Bytes of a weight of a part of the layers."""
        return float(BYTES) if part in self.plain else self.bytes


PLAIN = StoredWeights()
"""Weights in 16 bits."""

SAMPLES = {
    "attention": ("self_attn.q_proj",),
    "recurrent": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_qkvz", "mamba.in_proj", "conv.in_proj"),
    "mlp": ("mlp.down_proj",),
}
"""For each part of layers, the names of modules that stand for all of it, after a layer's prefix."""


def stored_weights(config: Mapping[str, Any], hidden: int) -> StoredWeights:
    """How the checkpoint of a config.json stores its weights.

    4-bit weights have a scale of two bytes and a zero of one for each group of inputs. FP8 weights with one scale for a
    block are dequantized by the engine.
    """
    given = config.get("quantization_config") or {}
    method, group, excluded = given.get("quant_method"), given.get("group_size", 128), _exclusions(given)
    weights = next((each.get("weights") or {} for each in (given.get("config_groups") or {}).values()), {})
    if method == "compressed-tensors" and given.get("format") == "pack-quantized":
        method, group = "packed", weights.get("group_size") or -1
    plain = tuple(part for part, names in SAMPLES.items() if any(map(excluded, names)))
    if method in ("awq", "gptq", "packed"):
        return StoredWeights(0.5 + 3 / (hidden if group == -1 else int(group)), plain)
    blocks = given.get("weight_block_size") or weights.get("strategy") == "block"
    if method in ("fp8", "compressed-tensors") and not blocks:
        return StoredWeights(1.0, plain)
    return PLAIN


def _exclusions(given: Mapping[str, Any]) -> Callable[[str], bool]:
    """A function that says whether a quantization leaves a module out, by its name after a layer's prefix."""
    patterns = [key[2:] for key in given.get("dynamic") or {} if key.startswith("-:")]
    names = [*(given.get("ignore") or ()), *(given.get("modules_to_not_convert") or ())]
    patterns += [name.removeprefix("re:") for name in names if name.startswith("re:")]
    plain = [name for name in names if not name.startswith("re:")]

    def excludes(module: str) -> bool:
        full = [f"model.layers.{layer}.{module}" for layer in range(8)]
        return any(re.match(pattern, name) for pattern in patterns for name in full) or any(
            name in each for name in plain for each in full
        )

    return excludes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_model_len: int
    gated: bool = True
    """Whether the feed-forward part has three matrices (gate, up, down) rather than two."""
    window: int | None = None
    """Size of the sliding attention window in positions; None for full attention."""
    reductions: int = 2
    """Number of all-reduces per layer under tensor parallelism: one if attention and feed-forward run in parallel, else
    two.
    """
    native: bool = True
    """Whether the engine has a native decoder for the model."""
    quantization: QuantizationName = "none"
    """Type of the layers' weights. Embeddings and the LM head stay in 16 bits."""
    kv_cache_dtype: CacheTypeName = "auto"
    kinds: LayerKinds | None = None
    """The layers by kind; None: each has attention and an MLP."""
    stored: StoredWeights = PLAIN
    """How the checkpoint stores the layers' weights."""

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        return self.layers if self.kinds is None else self.kinds.attention

    @property
    def attention_weights(self) -> int:
        """Number of weights in the matrices of one layer's attention."""
        heads = 2 * self.heads + 2 * self.kv_heads
        if self.kinds is not None and self.kinds.gated_attention:
            heads += self.heads
        return self.hidden * self.head_dim * heads

    @property
    def mlp_weights(self) -> int:
        """Number of weights in the matrices of one layer's MLP."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def weights(self) -> dict[str, int]:
        """Number of weights in the matrices of all layers, by the part of the layers that they belong to."""
        kinds = self.kinds
        if kinds is None:
            return {"attention": self.layers * self.attention_weights, "mlp": self.layers * self.mlp_weights}
        return {
            "attention": kinds.attention * self.attention_weights,
            "recurrent": kinds.recurrent.layers * kinds.recurrent.weights,
            "mlp": kinds.mlps * self.mlp_weights,
        }

    @property
    def layer_weights(self) -> int:
        """Number of weights in one layer's matrices; the mean if layers differ."""
        return sum(self.weights.values()) // self.layers

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence, all layers together."""
        return 0 if self.kinds is None else self.kinds.recurrent.layers * self.kinds.recurrent.state_bytes

    @property
    def head_weights(self) -> int:
        """Number of weights in the LM head."""
        return self.vocab * self.hidden

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's matrices; the mean if layers differ."""
        if self.quantization == "fp8":
            return self.layer_weights
        return int(sum(self.stored.bytes_of(part) * count for part, count in self.weights.items())) // self.layers

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, including the embedding."""
        return self.layers * self.layer_bytes + 2 * BYTES * self.head_weights

    @property
    def token_bytes(self) -> int:
        """Bytes of one position in the KV cache, all layers together."""
        return (
            (1 if self.kv_cache_dtype == "fp8" else BYTES) * 2 * self.attention_layers * self.kv_heads * self.head_dim
        )


def _llama(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, **rest: int
) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=128,
        intermediate=intermediate, vocab=rest.get("vocab", 32_000), max_model_len=rest.get("max_model_len", 4096),
        window=rest.get("window"),
    )  # fmt: skip


def _opt(name: str, layers: int, hidden: int) -> ModelShape:
    return ModelShape(
        name=name, layers=layers, hidden=hidden, heads=hidden // 128, kv_heads=hidden // 128, head_dim=128,
        intermediate=4 * hidden, vocab=50_272, max_model_len=2048, gated=False,
    )  # fmt: skip


FALCON = ModelShape(
    name="falcon-180b", layers=80, hidden=14_848, heads=232, kv_heads=8, head_dim=64, intermediate=4 * 14_848,
    vocab=65_024, max_model_len=2048, gated=False, reductions=1,
)  # fmt: skip
BLOOM = ModelShape(
    name="bloom-176b", layers=70, hidden=14_336, heads=112, kv_heads=112, head_dim=128, intermediate=4 * 14_336,
    vocab=250_880, max_model_len=2048, gated=False, native=False,
)  # fmt: skip
MODELS = {
    shape.name: shape
    for shape in (
        _llama("mistral-7b", 32, 4096, 32, 8, 14_336, max_model_len=32_768, window=4096),
        _llama("mistral-7b-v0.3", 32, 4096, 32, 8, 14_336, vocab=32_768, max_model_len=32_768),
        _llama("llama-3-8b", 32, 4096, 32, 8, 14_336, vocab=128_256, max_model_len=8192),
        _llama("llama-2-7b", 32, 4096, 32, 32, 11_008),
        _llama("llama-2-13b", 40, 5120, 40, 40, 13_824),
        _llama("llama-2-13b-gqa", 40, 5120, 40, 10, 13_824),  # Pensieve §6.1: 10 KV heads in place of 40
        _llama("yi-34b", 60, 7168, 56, 8, 20_480, vocab=64_000, max_model_len=200_000),
        _llama("llama-2-70b", 80, 8192, 64, 8, 28_672),
        _opt("opt-13b", 40, 5120),
        _opt("opt-66b", 64, 9216),
        FALCON,
        BLOOM,
    )
}


def shape_from_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape described by a Hugging Face config.json. Raises ValueError for missing or invalid sizes."""
    said = config.get("text_config", config)

    def size(*keys: str, default: int | None = None) -> int:
        value = next((said[key] for key in keys if said.get(key) is not None), default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {keys[0]} is {value}; a config.json of a decoder gives it as a whole number")
        return value

    if has_experts(said):
        raise ValueError(f"{name} is a mixture of experts, which the simulator does not support; give a dense model")
    if str(said.get("model_type")).startswith("gemma4"):
        raise ValueError(f"{name} has layers that differ in heads, which the simulator does not support")
    if said.get("kv_lora_rank"):
        raise ValueError(f"{name} has latent attention, which the simulator does not support; give another model")
    heads, hidden = size("num_attention_heads", "n_head"), size("hidden_size", "n_embd")
    kind = said.get("model_type")
    gated = kind not in UNGATED
    kinds = layer_kinds(said, size)
    return ModelShape(
        name=name,
        layers=size("num_hidden_layers", "n_layer") if kinds is None else kinds.layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=size("head_dim", default=max(1, hidden // heads)),
        intermediate=size("intermediate_size", "ffn_dim", "n_inner", default=None if gated else 4 * hidden)
        if kinds is None
        else kinds.intermediate,
        vocab=size("vocab_size"),
        max_model_len=size("max_position_embeddings", "n_positions", "max_sequence_length"),
        gated=gated,
        native=kind is None or kind in NATIVE,
        window=said.get("sliding_window") if said.get("use_sliding_window", True) else None,
        kinds=kinds,
        stored=stored_weights(config, hidden),
    )


UNGATED = (
    "opt",
    "falcon",
    "gpt2",
    "gpt_neox",
    "gptj",
    "bloom",
    "phi",
    "gpt_bigcode",
    "starcoder2",
    "nemotron",
    "nemotron_h",
)
"""Values of `model_type` whose feed-forward part has two matrices."""
