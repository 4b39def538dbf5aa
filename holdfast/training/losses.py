"""The losses and the optimizer of calls as values: names, arrays, settings, limits. No arithmetic and no tensors.

Every loss is a sum over positions. Position i of a datum reads token i and scores the datum's target i.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Setting(NamedTuple):
    """A number that a loss can be configured with."""

    default: float
    least: float
    most: float


@dataclass(frozen=True)
class LossKind:
    """The inputs of a loss."""

    needs: tuple[str, ...] = ()
    """Names of the arrays that every datum must have."""
    takes: tuple[str, ...] = ()
    """Names of the arrays that a datum may have. All data of a call have the same ones."""
    settings: Mapping[str, Setting] = field(default_factory=dict)
    passes: int = 1
    """How often the head computes each position."""
    several: tuple[str, ...] | None = None
    """Names of the arrays that have a number for each target; None if a position has one target."""

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of all arrays that the loss reads."""
        return (*self.needs, *self.takes)


POLICY = ("logprobs", "advantages")
"""Arrays of policy gradients: the log probability of each target when it was sampled, and its advantage."""
CLIPS = ("clip_low_threshold", "clip_high_threshold")
"""The least and the most that a ratio of probabilities counts for: settings, or arrays with a number per position."""

MASK = "sequence_ratio_mask"
"""Array that is not 0 at those positions whose ratios make the ratio of the sequence."""


def _clips(low: float, high: float) -> dict[str, Setting]:
    return dict(zip(CLIPS, (Setting(low, 0.0, 1e6), Setting(high, 0.0, 1e6)), strict=True))


LOSSES: Mapping[str, LossKind] = {
    "cross_entropy": LossKind(takes=("weights",), several=("weights",)),
    "importance_sampling": LossKind(POLICY),
    "ppo": LossKind(POLICY, CLIPS, _clips(0.8, 1.2)),
    "cispo": LossKind(POLICY, CLIPS, _clips(0.0, 4.0)),
    "dro": LossKind(POLICY, settings={"beta": Setting(0.05, 0.0, 1e6)}),
    "gspo": LossKind((*POLICY, MASK), CLIPS, _clips(1 - 3e-4, 1 + 4e-4), passes=2),
}
"""The losses by name. Their definitions and defaults are those of Tinker.

It gives no default for beta, nor for the thresholds of gspo, which are those of the paper (Zheng et al., 2025, §5.1).
"""

MOST_TARGETS = 128
"""Most targets of one position."""

REFUSED: Mapping[str, str] = {
    "stable_reinforce": "its definition is not public; use ppo or cispo",
    "custom": "the engine runs no code of clients; give forward_backward_custom a Python function instead of a handle",
}
"""Losses that Tinker names and that cannot be computed here, each with the reason."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss with its settings. Raises ValueError for an unknown name or setting, naming those that exist."""

    name: str = "cross_entropy"
    settings: Mapping[str, float] = field(default_factory=dict)
    """Settings that differ from the defaults."""

    def __post_init__(self) -> None:
        if self.name in REFUSED:
            raise ValueError(f"loss {self.name} cannot be computed: {REFUSED[self.name]}")
        if self.name not in LOSSES:
            raise ValueError(f"loss is {self.name!r}; choose from {', '.join(LOSSES)}")
        known = self.kind.settings
        for name, value in self.settings.items():
            if name not in known:
                raise ValueError(f"{name!r} is no setting of {self.name}; it has {', '.join(known) or 'none'}")
            if not known[name].least <= value <= known[name].most:  # false for NaN
                raise ValueError(
                    f"{name} is {value!r}; it must be from {known[name].least:g} to {known[name].most:g}"
                )  # fmt: skip
        if CLIPS[0] in known and self.setting(CLIPS[0]) > self.setting(CLIPS[1]):
            low, high = map(self.setting, CLIPS)
            raise ValueError(f"{CLIPS[0]} is {low:g}, which is above {CLIPS[1]} of {high:g}")

    @property
    def kind(self) -> LossKind:
        return LOSSES[self.name]

    def setting(self, name: str) -> float:
        """A setting's value, which is the default if it was not given."""
        return float(self.settings.get(name, self.kind.settings[name].default))

    def check_targets(self, count: int) -> None:
        """Raise ValueError if a position cannot have this many targets."""
        if count > 1 and self.kind.several is None:
            raise ValueError(f"loss {self.name} takes one target for a token, not {count}; cross_entropy takes several")
        if not 1 <= count <= MOST_TARGETS:
            raise ValueError(f"there are {count} targets for a token; there must be 1 to {MOST_TARGETS}")

    def check_arrays(self, names: Iterable[str]) -> None:
        """Raise ValueError if arrays of these names are not those that the loss reads."""
        given = {*names}
        if missing := {*self.kind.needs} - given:
            raise ValueError(f"loss {self.name} needs {', '.join(sorted(missing))} for each position")
        if others := given - {*self.kind.arrays}:
            shown = ", ".join(self.kind.arrays)
            raise ValueError(f"loss {self.name} reads {shown}; it cannot take {', '.join(sorted(others))}")


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The parameters of one update by AdamW. Raises ValueError for one that is out of its limits.

    The defaults are those of Tinker.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    """Term added to the root of the running mean of squares."""
    weight_decay: float = 0.0
    """Decoupled weight decay: the parameters lose this share of themselves, times the learning rate."""
    grad_clip_norm: float = 0.0
    """Most norm of all gradients together; 0: gradients are not clipped."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("learning_rate", 0.0, 1e3), ("eps", 1e-30, 1.0), ("weight_decay", 0.0, 1e3), ("grad_clip_norm", 0.0, 1e9),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be from {least:g} to {most:g}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be at least 0 and below 1")
        if self.learning_rate * self.weight_decay > 1.0:
            raise ValueError(f"weight_decay is {self.weight_decay!r}; times the learning rate it must be at most 1")

    @property
    def max_norm(self) -> float:
        """Most norm of all gradients together; infinite if they are not clipped."""
        return self.grad_clip_norm or math.inf
