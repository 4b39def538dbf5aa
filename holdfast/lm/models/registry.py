"""Which architectures run natively, and what each makes of its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.lm.models.decoder import DecoderSpec
from holdfast.lm.models.llama import llama, mistral
from holdfast.lm.models.qwen import qwen2, qwen3

NATIVE: dict[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
