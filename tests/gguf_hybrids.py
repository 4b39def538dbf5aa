"""GGUF files of small hybrid models, with the names, keys and changes of llama.cpp's converter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter, get_tensor_name_map
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tests.gguf_files import Encode, add_tensors, add_tokenizer, by_numbers, permuted

Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, torch.Tensor]]
"""Tensors with the names by which the package's map knows them, ending included."""


def with_suffix(name: str) -> str:
    """The name of a parameter without an ending as the converter gives it one."""
    for old, new in ((".dt_bias", ".dt_proj.bias"), ("e_score_correction_bias", "e_score_correction.bias")):
        name = name.replace(old, new)
    return name


def of_mamba(name: str, tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """A tensor of Mamba-2 as it is stored."""
    if name.endswith("conv1d.weight"):
        return tensor.squeeze()
    if name.endswith(".A_log"):
        return -torch.exp(tensor)[:, None]
    if name.endswith(".D"):
        return tensor[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return tensor.reshape(groups, -1)
    return tensor


def tiled(tensor: torch.Tensor, dim: int, keys: int, values: int) -> torch.Tensor:
    """Value heads along a dimension, in the order in which ggml repeats key heads."""
    parts = tensor.unflatten(dim, (keys, values // keys, -1))
    return parts.transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


def of_delta(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """A tensor of Qwen3.5's recurrent layers, with the value heads in ggml's order."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if "linear_attn." not in name or keys == values:
        return tensor
    first = 2 * keys * config["linear_key_head_dim"]
    if name.endswith((".in_proj_qkv.weight", ".conv1d.weight")):
        return torch.cat((tensor[:first], tiled(tensor[first:], 0, keys, values)))
    if name.endswith((".in_proj_z.weight", ".in_proj_a.weight", ".in_proj_b.weight", ".A_log", ".dt_bias")):
        return tiled(tensor, 0, keys, values)
    return tiled(tensor, 1, keys, values) if name.endswith(".out_proj.weight") else tensor


def qwen3_next(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if name.endswith(".in_proj_qkvz.weight"):
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        wide, of_values = config["linear_key_head_dim"], values // keys * config["linear_value_head_dim"]
        q, k, v, z = tensor.view(keys, -1, tensor.shape[1]).split([wide, wide, of_values, of_values], 1)
        stem = name.removesuffix("qkvz.weight")
        yield f"{stem}qkv.weight", torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        yield f"{stem}z.weight", z.flatten(0, 1)
    elif name.endswith(".A_log"):
        yield name, -torch.exp(tensor)
    elif "conv1d" in name:
        yield name, tensor.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, tensor + 1
    else:
        yield with_suffix(name), tensor


def qwen3_5(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    yield from qwen3_next(name, of_delta(name, tensor, config), config)


def granite(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    mixture = bool(config.get("num_local_experts"))
    layer = ".".join(name.split(".")[:3])
    if name.endswith("block_sparse_moe.input_linear.weight"):
        for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
            yield f"{layer}.mlp.experts.{part}_proj.weight", half
    elif name.endswith("shared_mlp.input_linear.weight"):
        own = "mlp.shared_mlp" if mixture else "mlp"
        for part, half in zip(("gate", "up"), tensor.chunk(2, 0), strict=True):
            yield f"{layer}.{own}.{part}_proj.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield name if mixture else f"{layer}.mlp.down_proj.weight", tensor
    elif match := re.search(r"\.(q|k)_proj\.", name):
        yield name, permuted(tensor, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
    else:
        yield with_suffix(name), of_mamba(name, tensor, config["mamba_n_groups"])


def falcon(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    read = config["attention_in_multiplier"]
    factors = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * read,
        "q_proj": read,
        "v_proj": read,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = next((part for part in name.split(".") if part in factors), None)
    if name.endswith("in_proj.weight"):
        inner, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
        counts = torch.tensor((inner, inner, shared, shared, config["mamba_n_heads"]))
        of_rows = torch.tensor(config["ssm_multipliers"]).repeat_interleave(counts)
        tensor = tensor * config["ssm_in_multiplier"] * of_rows[:, None]
    tensor = tensor * factors[part] if part else tensor
    yield with_suffix(name), of_mamba(name, tensor, config["mamba_n_groups"])


def nemotron(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    if match := re.search(r"\.(q|k)_proj\.", name):
        heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
        yield name, permuted(tensor, heads)
    else:
        yield with_suffix(name), of_mamba(name, tensor, config["n_groups"])


CONVERTERS: dict[str, Callable[[str, torch.Tensor, Config], Tensors]] = {
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5,
    "qwen3next": qwen3_next,
    "granitehybrid": granite,
    "falcon-h1": falcon,
    "nemotron_h": nemotron,
    "nemotron_h_moe": nemotron,
}
SINGLE_EXPERT = re.compile(r".*layers\.(\d+)\.(?:mlp|mixer)\.experts\.(\d+)\.(\w+_proj)\.weight")


def add_keys(writer: GGUFWriter, architecture: str, config: Config) -> None:
    """Add the keys of a hybrid."""
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    count, heads = len(kinds) or config["num_hidden_layers"], config["num_attention_heads"]
    writer.add_block_count(count)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(heads)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["layer_norm_epsilon"])
    writer.add_vocab_size(config["vocab_size"])
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv(
        [kv_heads if kind == "full_attention" else 0 for kind in kinds]
        if architecture in ("granitehybrid", "nemotron_h", "nemotron_h_moe")
        else kv_heads
    )
    if architecture != "granitehybrid":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", 10_000.0))
    if architecture.startswith("qwen"):
        _add_delta(writer, config, rope)
    else:
        _add_mamba(writer, architecture, config)
    if architecture.startswith("nemotron"):
        _add_nemotron(writer, architecture, config, kinds)
    else:
        writer.add_feed_forward_length(config["intermediate_size"])


def _add_delta(writer: GGUFWriter, config: Config, rope: Config) -> None:
    writer.add_rope_dimension_count(int(config["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_full_attention_interval(2)
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_mamba(writer: GGUFWriter, architecture: str, config: Config) -> None:
    def own(*names: str) -> int:
        return int(next(config[name] for name in names if name in config))

    heads, width = own("mamba_n_heads", "mamba_num_heads"), own("mamba_d_head", "mamba_head_dim")
    writer.add_ssm_conv_kernel(own("mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(own("mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(own("mamba_n_groups", "n_groups"))
    writer.add_ssm_inner_size(heads * width)
    writer.add_ssm_time_step_rank(heads)
    if architecture != "granitehybrid":
        return
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])


def _add_nemotron(writer: GGUFWriter, architecture: str, config: Config, kinds: list[str]) -> None:
    mixture = architecture == "nemotron_h_moe"
    width, own = config["moe_intermediate_size" if mixture else "intermediate_size"], "moe" if mixture else "mlp"
    writer.add_feed_forward_length([width if kind == own else 0 for kind in kinds])
    if mixture:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


def write_hybrid(
    path: Path,
    checkpoint: Path,
    architecture: str,
    *,
    kind: str = "F32",
    encode: Encode | None = None,
    tokenizer: Tokenizer | None = None,
    drafts: int = 0,
) -> None:
    """Write the hybrid in a Hugging Face directory as a GGUF file. `kind` and `encode` are those of `write_gguf`.

    With `drafts`, the file says that it has as many layers more, which only predict drafts.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    add_keys(writer, architecture, config)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
    names = get_tensor_name_map({name: kind for kind, name in MODEL_ARCH_NAMES.items()}[architecture], layers)
    stored: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items(), key=by_numbers):
        if match := SINGLE_EXPERT.fullmatch(name):
            experts.setdefault(f"model.layers.{match[1]}.mlp.experts.{match[3]}.weight", []).append(tensor)
            continue
        for own, changed in CONVERTERS[architecture](name, tensor, config):
            stored[_stored_name(own, names)] = changed
    stored |= {_stored_name(name, names): torch.stack(parts) for name, parts in experts.items()}
    if drafts:
        writer.add_nextn_predict_layers(drafts)
        writer.add_block_count(layers + drafts)
        stored[f"blk.{layers}.nextn.eh_proj.weight"] = torch.ones(4, 8)
    add_tensors(writer, stored, kind, encode)


def _stored_name(name: str, names: Any) -> str:
    """The name in GGUF of a tensor, by that of `Tensors`."""
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)
