"""Transformers' own cache of keys and values, in FP8."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from holdfast.lm.kernels.fp8 import FP8
from tests.padded_checks import CACHE


class RoundedCache(DynamicCache):
    """A cache that rounds what it is given to FP8 before anybody reads it."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *where: Any, **options: Any) -> Any:
        rounded = (states.to(FP8).to(states.dtype) for states in (key_states, value_states))
        return super().update(*rounded, *where, **options)


def cache_for(module: Any, kv_cache_dtype: str) -> dict[str, Any]:
    """What to call Transformers' module with, for a cache in the precision that the engine's option asks for."""
    return {CACHE: RoundedCache(config=module.config), "use_cache": True} if kv_cache_dtype == "fp8" else {}
