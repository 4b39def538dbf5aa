"""Holdfast serves language models: it holds each conversation's state and keeps every stream's pace."""

from holdfast.core.config import EngineConfig
from holdfast.core.types import SamplingParams
from holdfast.core.version import __version__
from holdfast.engine.llm import LLM

__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]
