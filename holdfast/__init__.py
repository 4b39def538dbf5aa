"""Holdfast serves language models: it holds each conversation's state and keeps every stream's pace."""

from holdfast.core.config import EngineConfig
from holdfast.core.types import SamplingParams
from holdfast.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

__version__ = "0.1.0"
