"""Options of sleep mode."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import option
from holdfast.lm.parts.tuning.options import TuningOptions


@dataclass(frozen=True, kw_only=True)
class SleepOptions(TuningOptions):
    """Whether the engine can be put to sleep."""

    enable_sleep_mode: bool = option(
        False,
        "let POST /sleep return the memory of the weights and of the KV cache to the device, and POST /wake_up take it "
        "back; for one device and a model with a native decoder",
        executor="paged",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.enable_sleep_mode:
            return
        if self.layout.ranks > 1:
            raise ValueError(
                f"enable_sleep_mode is on, and tp {self.tp} times pp {self.pp} takes {self.layout.ranks} devices: an "
                "engine that sleeps has one; drop one of them"
            )
        if self.tuning:
            raise ValueError(
                "enable_sleep_mode and tuning are on, and a tuning job keeps memory that cannot be returned; drop one"
            )
