"""The text decoder inside a published model that also takes images. Only the decoder is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.lm.models.checkpoint_errors import NotNative, UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec

WITH_IMAGES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
"""Architectures whose text decoder may be a native one."""
BASES = ("model.language_model.", "language_model.model.")
"""Beginnings of the decoder's tensor names, besides `model.`: those of today's and of older checkpoints."""
HEAD = "language_model.lm_head.weight"
"""The LM head's name in older checkpoints."""
TOWERS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "image_newline")
"""Beginnings of the names of tensors that only images need."""
OTHERS = (*TOWERS, *(f"model.{tower}" for tower in TOWERS))
"""Beginnings of the names of those tensors in all checkpoints, old and new."""
INNER_NAMES = {**{f"^{re.escape(base)}": "model." for base in BASES}, f"^{re.escape(HEAD)}": "lm_head.weight"}
"""Patterns of the decoder's tensor names, each with the beginning of its name in a checkpoint of the decoder alone."""
TIED = ("gemma3", "gemma4", "gemma4_unified", "internvl", "mistral3")
"""Model types whose LM head is the embedding unless the config says otherwise, as in Transformers."""


def text_decoder(
    config: Mapping[str, Any], families: Mapping[str, Callable[[Mapping[str, Any]], DecoderSpec]]
) -> DecoderSpec:
    """The spec of the text decoder in a model with images. `families` reads text configs, by their model_type.

    Raises NotNative if the decoder is of another family.
    """
    text = text_config(config)
    if text is None:
        raise UnsupportedCheckpoint("config.json has no 'text_config'")
    kind = str(text.get("model_type"))
    if kind not in families:
        raise NotNative(f"its text decoder is of type {kind!r}, and native ones are {', '.join(families)}")
    tied = config.get("tie_word_embeddings", config.get("model_type") in TIED)
    given = {**text, "architectures": config["architectures"], "tie_word_embeddings": tied}
    spec = families[kind](without_sections(given))
    others = (*spec.names.others, *OTHERS)
    return replace(spec, names=replace(spec.names, base="model.", bases=BASES, heads=(HEAD,), others=others))


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the text decoder in a model with images. None for a model of text alone."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        return text
    if "vision_config" in config and "hidden_size" in config:
        # The first checkpoints of Qwen2-VL and Qwen2.5-VL have the decoder's entries next to vision_config.
        return {**config, "model_type": f"{config.get('model_type')}_text"}
    return None


def without_sections(text: Mapping[str, Any]) -> dict[str, Any]:
    """A text config whose rotation has no sections (mrope).

    Sections rotate by a token's time, height and width (Qwen2-VL, arXiv 2409.12191, §2.1). In a text all three are the
    token's position, so the rotation is the usual one.
    """
    changed: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = text.get(key)
        if isinstance(given, Mapping) and "mrope_section" in given:
            kind = given.get("rope_type", given.get("type"))
            rest = {name: value for name, value in given.items() if name != "type"}
            changed[key] = rest | {"rope_type": "default" if kind in (None, "mrope") else kind}
    return {**text, **changed}
