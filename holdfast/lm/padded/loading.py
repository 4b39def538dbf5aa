"""Loads a checkpoint as Transformers' own module, unmodified: for the padded executor."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.lm.models import hf
from holdfast.lm.models.base import limited
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.loader import (
    DTYPES,
    architecture_of,
    eos_token_ids,
    files_of,
    own_dtype,
    read_json,
    refuse_quantized,
)

log = logging.getLogger("holdfast.engine")

WITHOUT_LIMIT = 8192
"""Longest sequence of a model whose config names none, such as a recurrent one. `max_model_len` may set another."""
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "context_length", "n_ctx")
"""Config entries that give the longest sequence a model was made for, in tokens."""
CANNOT_GENERATE = {
    "XLNetLMHeadModel": "it predicts tokens in any order, and Transformers cannot generate with it",
    "ReformerModelWithLMHead": "its config does not say is_decoder, so it does not predict the next token",
}
"""Architectures that Transformers lists among causal decoders but that cannot generate, with the reason. Reformer can
with `is_decoder`.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmodifiedModel:
    """A module of Transformers, or of a checkpoint's own code, with its weights on the device, in eval mode."""

    module: Any
    """The `PreTrainedModel`. No part of it is replaced, neither its parameters nor its attention."""
    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest sequence in tokens. By default all of them have the same rotary frequencies (`switches_at`)."""
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    is_encoder_decoder: bool = False
    pad_token_id: int = 0
    """The id of placeholders. They are masked, so any id of the vocabulary works."""
    shortened: str = ""
    """The reason why sequences are shorter than the model was made for, if nobody asked for that; else empty."""


def load_unmodified(
    directory: Path,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_model_len: int | None = None,
    load_format: Literal["auto", "random"] = "auto",
    trust_remote_code: bool = False,
    module: Any = None,
) -> UnmodifiedModel:
    """The model of a Hugging Face checkpoint directory. The options are those of `models.loader.load`.

    `module` is one that `models.hf` has loaded from this directory and then refused (`hf.NotPaged`), so that weights
    are read once. A checkpoint's own code runs only with `trust_remote_code`; the log then names the directory. Weights
    come from safetensors files alone and must be finite. Raises UnsupportedCheckpoint with the reason, by name for
    architectures that cannot generate (XLNet, Reformer without `is_decoder`).
    """
    config = read_json(directory / "config.json")
    architecture = architecture_of(config)
    refuse_quantized(config)
    if (reason := CANNOT_GENERATE.get(architecture)) and not config.get("is_decoder"):
        raise UnsupportedCheckpoint(f"{architecture} cannot be served: {reason}")
    kind = DTYPES[dtype] if dtype != "auto" else own_dtype(config) if device.type == "cuda" else torch.float32
    if module is None:
        remote = trust_remote_code and "auto_map" in config
        if remote:
            _check_auto_map(directory, config)
            log.warning("holdfast: %s runs the code of the checkpoint in %s", architecture, directory)
        if load_format == "auto" and (directory / "model.safetensors.index.json").exists():
            files_of(directory)  # Transformers would follow an index to files outside
        module = hf.load_module(directory, config, device, kind, random=load_format == "random", own_code=remote)
    else:
        # Probing for the paged cache set another attention: go back to the model's own choice.
        module.set_attn_implementation(module.get_correct_attn_implementation(None))
    return as_unmodified(
        module, architecture=architecture, max_model_len=max_model_len, eos_token_ids=eos_token_ids(directory, config)
    )


def as_unmodified(
    module: Any,
    *,
    architecture: str | None = None,
    max_model_len: int | None = None,
    eos_token_ids: tuple[int, ...] = (),
) -> UnmodifiedModel:
    """Wrap a module in eval mode, with the facts that the executor needs.

    Raises ValueError if `max_model_len` is longer than the model was made for.
    """
    config = module.config.get_text_config()
    named = [getattr(config, name, None) for name in LIMITS]
    made_for = next((int(length) for length in named if isinstance(length, int) and length > 0), None)
    longest = limited(max_model_len, made_for) if made_for is not None else max_model_len or WITHOUT_LIMIT
    shortened, switch = "", switches_at(config)
    if max_model_len is None and switch is not None and switch < longest:
        shortened = (
            f"sequences end at {switch} tokens, beyond which a model of longrope has other frequencies for all "
            f"positions: max_model_len up to {longest} lets them go on, computed from the first token in every step"
        )
        longest = switch
    vocab_size, pad = int(config.vocab_size), getattr(config, "pad_token_id", None)
    return UnmodifiedModel(
        module=module,
        architecture=architecture or type(module).__name__,
        vocab_size=vocab_size,
        max_model_len=longest,
        eos_token_ids=eos_token_ids,
        dtype=module.dtype,
        device=module.device,
        weight_bytes=sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers())),
        is_encoder_decoder=bool(getattr(module.config, "is_encoder_decoder", False)),
        pad_token_id=pad if isinstance(pad, int) and 0 <= pad < vocab_size else 0,
        shortened=shortened,
    )


def switches_at(config: Any) -> int | None:
    """The length in tokens beyond which a model has other rotary frequencies for all of its positions; None: none.

    That is longrope (LongRoPE, arXiv 2402.13753), as in Phi-3. Keys that were computed before a sequence became longer
    are then useless. So a prompt is right in one forward only, and Transformers' `generate` computes the sequence
    again. Frequencies of the type dynamic change beyond `max_position_embeddings`, which no sequence exceeds.
    """
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    found = []
    for rope in (given, *(value for value in given.values() if isinstance(value, dict))):
        if rope.get("rope_type", rope.get("type")) == "longrope":
            length = rope.get("original_max_position_embeddings")
            found.append(length or getattr(config, "original_max_position_embeddings", None) or 0)
    return max(1, min(found)) if found else None


def _check_auto_map(directory: Path, config: Mapping[str, Any]) -> None:
    """Refuse code that is not in the directory: Transformers would fetch it from elsewhere."""
    for name, target in dict(config["auto_map"]).items():
        for reference in target if isinstance(target, list) else [target]:
            file = f"{str(reference).split('.')[0]}.py"
            if reference is not None and ("--" in str(reference) or not (directory / file).is_file()):
                raise UnsupportedCheckpoint(
                    f"auto_map names {reference!r} for {name}; only code in the directory itself is run, and it has no "
                    f"{file}"
                )
