"""The text decoder of Qwen3.5 as a model of vLLM's own, so that a shape without images is served.

vLLM 0.25.1 registers only the class that also takes images. This one has its decoder and its description of states.
"""

from __future__ import annotations

from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

_PUBLISHED = Qwen3_5ForConditionalGeneration


class TextDecoder(Qwen3_5ForCausalLM, IsHybrid):
    """`Qwen3_5ForCausalLM`, with the sizes and types of its states."""

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config):  # type: ignore[no-untyped-def]
        return _PUBLISHED.get_mamba_state_dtype_from_config(vllm_config)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config):  # type: ignore[no-untyped-def]
        return _PUBLISHED.get_mamba_state_shape_from_config(vllm_config)

    @classmethod
    def get_mamba_state_copy_func(cls):  # type: ignore[no-untyped-def]
        return _PUBLISHED.get_mamba_state_copy_func()
