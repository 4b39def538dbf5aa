"""Pooling: whether a checkpoint gives embeddings, and how. The files of sentence-transformers say so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.engine.checkpoint import JSON_LIMIT, read_json, read_text

Convert = Literal["auto", "none", "embed", "rerank"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """The way in which a prompt's embedding is made from the last hidden state of its last token."""

    normalize: bool = True
    """Whether the embedding is scaled to length 1."""
    refused: str = ""
    """The reason why the model gives no embeddings; empty if it does."""
    judges: bool = False
    """Whether the model is a causal reranker, whose answer is yes or no."""


NONE = Pooling(
    refused="this model is not made for embeddings; serve one that is, or add --convert embed, which takes the last "
    "token's state of any model"
)


def find_pooling(directory: Path, convert: Convert = "auto") -> Pooling:
    """The pooling of a checkpoint. `convert` "embed" takes the last token's state of any model.

    "rerank" ranks documents by the model's answers yes and no. Raises ValueError.
    """
    if convert == "none":
        return Pooling(refused="this server gives no embeddings (--convert none)")
    if convert == "rerank":
        return Pooling(refused="this model ranks, and gives no embeddings (--convert rerank)", judges=True)
    path = directory / "modules.json"
    if not path.is_file():
        return Pooling() if convert == "embed" else NONE
    try:
        modules: Any = json.loads(read_text(path, JSON_LIMIT))
        found = [(str(each["type"]).rpartition(".")[2], str(each.get("path", ""))) for each in modules]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a list of modules: {error}") from error
    kinds = [kind for kind, _ in found]
    if others := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        return Pooling(refused=f"this model's embeddings need a module that is not supported: {others[0]}")
    for kind, place in found:
        if kind == "Pooling":
            if Path(place).name != place:
                raise ValueError(f"{path} names {place!r}, which is not a directory next to it")
            settings = read_json(directory / place / "config.json")
            modes = [name for name, on in settings.items() if name.startswith("pooling_mode_") and on is True]
            if modes != ["pooling_mode_lasttoken"]:
                shown = ", ".join(name.removeprefix("pooling_mode_") for name in modes) or "none"
                return Pooling(refused=f"this model pools by {shown}; only lasttoken is supported")
    return Pooling(normalize="Normalize" in kinds)
