"""Options of tuning: the training of adapters in the gaps of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.core.config import option, own_options
from holdfast.lm.parts.adapters.options import DEFAULT_ADAPTERS, AdapterOptions

DEFAULT_BOUND = 1.0
"""Default deferral bound in seconds."""


@dataclass(frozen=True, kw_only=True)
class TuningOptions(AdapterOptions):
    """Whether tuning jobs are taken, and what they may cost requests.

    Tuning serves what it has trained as an adapter.
    """

    topic = "tuning"

    tuning: bool = option(
        False, "take tuning jobs: train LoRA adapters on the weights that serve, next to inference", executor="paged"
    )
    deferral_bound: float | None = option(
        None,
        "seconds that a request may wait for training at most, or for one iteration if that takes longer; 0 is "
        "inference first, inf training first; not with tbt_target, which trains in slices between streams; default: 1",
    )
    tuning_memory_fraction: float = option(
        0.5,
        "share of the KV cache that may be lent to training; inference takes it back when it needs it",
        between=(0.01, 0.95),
    )
    tuning_micro_batch: int | Literal["auto"] = option(
        "auto",
        "tokens that training computes at once, where a job does not say; auto: as many as fit into the target or "
        "the deferral bound, 512 to 8192",
        between=(16, 1 << 20),
    )
    tuning_share: float = option(
        0.05,
        "share of the device's time that training takes at most while a batch has work; 0: none, 1: no bound; beside "
        "chats alone, training takes what their target leaves",
        between=(0.0, 1.0),
    )
    tuning_progress: bool = option(
        False, "with tbt_target, train a little every 2 seconds even while requests take all of the device"
    )
    tuning_mirror: str = option(
        "auto",
        "directory in the host's memory where the state of jobs is stored after each step; auto is one in /dev/shm, if "
        "there is one; off: on the disk only, at least once a minute",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deferral_bound is not None and not self.deferral_bound >= 0:
            raise ValueError(f"deferral_bound is {self.deferral_bound}; it must be at least 0, or inf")
        if self.tuning:
            self._check_others()
            return
        for each in own_options(TuningOptions):
            if (value := getattr(self, each.name)) != each.default:
                raise ValueError(f"{each.name} is {value}, which is for tuning, and tuning is off; drop one")

    def _check_others(self) -> None:
        """Raises ValueError for options of tuning that exclude each other or others."""
        if self.deferral_bound is not None and self.tbt_target is not None:
            raise ValueError(
                f"deferral_bound is {self.deferral_bound} and tbt_target is {self.tbt_target}: with a target, training "
                "runs in slices between streams and nothing is deferred; drop one"
            )
        if self.scheduler != "stall-free":
            raise ValueError(f"tuning is for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")
        if not self.tuning_mirror:
            raise ValueError("tuning_mirror is empty; it must be auto, off, or a directory")

    @property
    def adapter_slots(self) -> int:
        return super().adapter_slots or (DEFAULT_ADAPTERS if self.tuning else 0)

    @property
    def deferral_seconds(self) -> float:
        """Seconds that a request may wait for training at most, or for one iteration if that takes longer."""
        return DEFAULT_BOUND if self.deferral_bound is None else self.deferral_bound
