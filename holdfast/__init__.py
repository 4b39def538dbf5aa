"""Holdfast serves language models: it holds each conversation's state and keeps every stream's pace."""

from typing import TYPE_CHECKING

from holdfast.core.contract import Contract, ContractRefused
from holdfast.core.types import Grammar, SamplingParams
from holdfast.core.version import __version__
from holdfast.lm.config import EngineConfig

if TYPE_CHECKING:
    from holdfast.engine.client.llm import LLM

__all__ = ["LLM", "Contract", "ContractRefused", "EngineConfig", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    """Import `LLM` when it is first used: the engine's client takes longer to import than a command's help."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.engine.client.llm import LLM

    return LLM
