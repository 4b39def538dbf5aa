"""Cost profiles: a model's measured speed on a device, in one file per model, precision and device. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from holdfast.core.config import CacheTypeName, EngineConfig, QuantizationName
from holdfast.core.cost import CostModel
from holdfast.engine.checkpoint import JSON_LIMIT, read_json, read_text
from holdfast.lm.types import precision_of

DTYPES = ("float32", "bfloat16", "float16")

MEASURED = 4
"""Version of the measurement. A profile of an earlier version is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """A cost model, and the sizes of the engine in which it was measured."""

    cost: CostModel
    dtype: str
    """The type of activations, and of everything that is not in FP8."""
    quantization: QuantizationName = "none"
    kv_cache_dtype: CacheTypeName = "auto"
    cache_tokens: int
    """Positions in the KV cache."""
    max_model_len: int
    token_budget: int
    """The device's default for the most tokens of a step."""
    tile: int
    """A computed token budget is a multiple of this many tokens."""
    token_bytes: int = 0
    """Bytes of one position in the KV cache, over all layers; 0 if unknown."""
    copy_rate: float = 0.0
    """Bytes a second between device and host memory; 0 if it was not measured."""
    measured: bool = True
    """Whether it was measured in full. Otherwise it was estimated by a few steps, and perhaps corrected in service."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}, not one of {', '.join(DTYPES)}")
        if min(self.cache_tokens, self.max_model_len, self.token_budget, self.tile) < 1:
            raise ValueError("a size is below 1")

    @property
    def precision(self) -> str:
        """The types of its numbers, for people."""
        return precision_of(self.dtype, self.quantization, self.kv_cache_dtype)

    def require(self, config: EngineConfig) -> None:
        """Raises ValueError naming both values, if the engine's weights or cache differ in type from the profile's."""
        names = [name for name in ("quantization", "kv_cache_dtype") if getattr(config, name) != getattr(self, name)]
        if names:
            asked = " and ".join(f"{name} is {getattr(config, name)}" for name in names)
            measured = " and ".join(getattr(self, name) for name in names)
            flags = " ".join(f"--{name.replace('_', '-')} {getattr(self, name)}" for name in names)
            raise ValueError(
                f"{asked}, and the profile of {self.cost.model} on {self.cost.device} was measured with {measured}; "
                f"give {flags}, or another profile"
            )

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / "profile.json"
            fresh.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
            fresh.replace(path)

    @classmethod
    def load(cls, path: Path) -> CostProfile:
        """Read what `save` wrote. Raises ValueError that names the file and the fault."""
        data = read_json(path)
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"{path} is not a profile: {error}; measure again with `holdfast profile`") from None


def cached_profile_path(directory: Path, precision: str, device: str) -> Path:
    """The file of the profile of the checkpoint in `directory`, for this precision and this device.

    Its name is readable and ends with a digest of config.json and the rest, which keeps models of one name apart.
    """
    state = json.dumps([read_text(directory / "config.json", JSON_LIMIT), precision, device, MEASURED])
    digest = hashlib.sha256(state.encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{directory.name} {precision} {device}").strip("-")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "holdfast" / "profiles" / f"{name}-{digest}.json"
