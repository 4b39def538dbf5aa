"""GGUF files of small models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(w[123]|\w+_proj)\.weight")
MERGED = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"} | {
    f"{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")
}
Encode = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of heads in the order of llama.cpp's rotation."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    checkpoint: Path,
    architecture: str,
    *,
    kind: str = "F32",
    tokenizer: Tokenizer | None = None,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, list[float]] | None = None,
    encode: Encode | None = None,
    others: Mapping[str, tuple[str, Encode | None]] | None = None,
) -> None:
    """Write the model in a Hugging Face directory as a GGUF file.

    `kind` is the format of the layers' matrices, and `encode` makes their bytes, by default those of `gguf.quantize`.
    `others` are the formats and encoders of matrices whose names hold a word. `more` are further keys after the
    architecture's prefix, and `tensors` further small tensors.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    kinds_of_layers = config.get("layer_types") or ()
    convolutional = "conv" in kinds_of_layers
    writer.add_head_count_kv(
        [0 if kind == "conv" else kv_heads for kind in kinds_of_layers] if convolutional else kv_heads
    )
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_layer_norm_rms_eps(config["norm_eps" if convolutional else "rms_norm_eps"])
    for key, value in (more or {}).items():
        name = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_float32(name, value)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    kinds = {name: kind for kind, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(kinds[architecture], config["num_hidden_layers"])
    stored: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(load_file(checkpoint / "model.safetensors").items(), key=by_numbers):
        if match := EXPERT.fullmatch(name):
            layer = name.split(".")[2]
            experts.setdefault(f"blk.{layer}.{MERGED[match[3]]}.weight", []).append(tensor)
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, kv_heads)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if name.endswith("conv.conv.weight"):
            tensor = tensor.squeeze(1)
        stem, _, ending = name.rpartition(".")
        stored[f"{names.get_name(stem)}.{ending}"] = tensor
    stored |= {name: torch.stack(parts) for name, parts in experts.items()}
    for name, numbers in (tensors or {}).items():
        stored[name] = torch.tensor(numbers)
    add_tensors(writer, stored, kind, encode, others)


PLAIN = ("ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")
"""Words in the names of matrices that the converter never quantizes."""


def add_tensors(
    writer: GGUFWriter,
    stored: Mapping[str, torch.Tensor],
    kind: str,
    encode: Encode | None = None,
    others: Mapping[str, tuple[str, Encode | None]] | None = None,
) -> None:
    """Add tensors in the formats of `write_gguf`, and write the file."""
    for name, tensor in stored.items():
        data = tensor.float().numpy()
        if kind != "F32" and tensor.ndim > 1 and not any(word in name for word in PLAIN):
            own, encoder = next((each for word, each in (others or {}).items() if word in name), (kind, encode))
            data = encoder(data) if encoder else quantize(data, GGMLQuantizationType[own])
            writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[own])
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def by_numbers(item: tuple[str, Any]) -> list[Any]:
    """A key by which the numbers in names are ordered as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add a byte-level BPE tokenizer."""
    given = json.loads(tokenizer.to_str())
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    special = {token["content"] for token in given["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in given["model"]["merges"]])
    writer.add_bos_token_id(tokenizer.token_to_id("<s>"))
    writer.add_eos_token_id(tokenizer.token_to_id("</s>"))
    writer.add_chat_template("{% for message in messages %}<s>{{ message.content }}</s>{% endfor %}")
