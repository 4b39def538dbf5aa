"""OpenAI's `system_fingerprint`: a short digest of what decides an answer besides the request."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

from holdfast.core.version import __version__
from holdfast.engine.messages import EngineInfo
from holdfast.lm.config import EngineConfig
from holdfast.server.replies import encode

PLACES = ("model", "revision", "adapter", "trace", "disk_cache_dir", "remote_cache", "chunk_host", "devices")
"""Options that say where something is. They do not change an answer."""


def system_fingerprint(info: EngineInfo, config: EngineConfig, weights: str, adapter: str) -> str:
    """Return the fingerprint of a model, its weights, its adapter and the engine's settings: `fp_` and 12 digits.

    `weights` is the digest of the checkpoint's files. `adapter` is the id of the adapter, with its content's digest;
    empty for the model itself. Equal servers on different hosts have the same fingerprint.
    """
    settings = {name: repr(value) for name, value in asdict(config).items() if name not in PLACES}
    whole = encode([__version__, info.model, info.precision, weights, adapter, sorted(settings.items())])
    return f"fp_{hashlib.sha256(whole).hexdigest()[:12]}"
