"""What a tuning job is, as values: its hyperparameters, its steps and micro-batches, and the units of a micro-batch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from holdfast.training.order import Order, pack

ALL_MODULES = ("q", "k", "v", "o", "gate", "up", "down")
HEAD_ROWS = 1024
"""Tokens whose logits one unit computes: with 128,256 words, 263 MB in 16 bits."""
VALIDATION_STEPS = 100
"""A step of this many is followed by a validation, besides the last of each epoch."""
VALIDATION_EXAMPLES = 64
"""Most examples of a validation: the first ones of the file."""

UnitKind = Literal["attention", "mlp", "head", "mlp_backward", "attention_backward", "optimizer"]


class Unit(NamedTuple):
    """The least work that a slice can hold."""

    kind: UnitKind
    number: int
    """Of the layer; for the head, of the chunk of HEAD_ROWS tokens; 0 for the optimizer."""


def units_of(num_layers: int, tokens: int, *, backward: bool, optimizer: bool) -> tuple[Unit, ...]:
    """The units of a micro-batch, in order. Without `backward` it is of a validation. `optimizer`: one ends it."""
    units = [Unit(kind, layer) for layer in range(num_layers) for kind in _FORWARD]
    units += [Unit("head", chunk) for chunk in range(-(-tokens // HEAD_ROWS))]
    if backward:
        units += [Unit(kind, layer) for layer in reversed(range(num_layers)) for kind in _BACKWARD]
    if optimizer:
        units.append(Unit("optimizer", 0))
    return tuple(units)


_FORWARD: tuple[UnitKind, ...] = ("attention", "mlp")
_BACKWARD: tuple[UnitKind, ...] = ("mlp_backward", "attention_backward")


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """How a job is tuned. Two runs with equal values, data and base model compute the same."""

    epochs: int
    batch_size: int
    """Examples of one optimizer step."""
    learning_rate: float = 2e-4
    """At its peak."""
    rank: int = 16
    alpha: float = 32.0
    """LoRA adds alpha / rank times B A x."""
    modules: tuple[str, ...] = ALL_MODULES
    micro_batch: int = 8192
    """Most tokens that are computed at once. It is part of the job because the last bits depend on it."""
    warmup: float = 0.03
    """Share of the steps in which the learning rate rises."""
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("epochs", 1, 1000), ("batch_size", 1, 4096), ("rank", 1, 128), ("micro_batch", 1, 1 << 20),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}; it must be a whole number from {least} to {most}")
        for name, least_of, most_of in (
            ("learning_rate", 0.0, 1.0), ("alpha", 0.0, 1e6), ("max_grad_norm", 0.0, 1e9),
        ):  # fmt: skip
            value = getattr(self, name)
            if not (math.isfinite(value) and least_of < value <= most_of):
                raise ValueError(f"{name} is {value!r}; it must be above {least_of:g} and at most {most_of:g}")
        for name in ("warmup", "weight_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be at least 0 and below 1")
        if (
            not self.modules
            or (unknown := {*self.modules} - {*ALL_MODULES})
            or len({*self.modules}) < len(self.modules)
        ):
            shown = ", ".join(sorted(unknown)) if self.modules and unknown else ", ".join(self.modules) or "none"
            raise ValueError(f"modules are {shown}; choose each once from {', '.join(ALL_MODULES)}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def scale(self) -> float:
        """LoRA's factor."""
        return self.alpha / self.rank


def auto_batch_size(examples: int) -> int:
    """8 with few examples, else one of 256 of them, at most 64."""
    return 8 if examples < 2048 else min(64, examples // 256)


def auto_epochs(examples: int, batch_size: int) -> int:
    """So many that there are about 200 steps: 1 to 10, and at least 3 of fewer than 100 examples."""
    wanted = min(10, max(1, -(-200 * batch_size // examples)))
    return max(3, wanted) if examples < 100 else wanted


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One job. It never changes; how far it has come is in its state."""

    id: str
    hyperparameters: Hyperparameters
    base_model: str
    """What checkpoints name as their base."""
    base_digest: str
    """Of the base model's weights: a job does not go on over others."""
    data_digest: str
    """SHA-256 of the file of examples."""
    validation_digest: str = ""
    """Of the file of validation examples; empty without one."""
    threads: int = 0
    """CPU threads that it began with, on which the last bits depend; 0 on a GPU."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainingJob:
        """Raises ValueError for what `to_json` has not written."""
        try:
            values: dict[str, Any] = json.loads(text)
            given: Mapping[str, Any] = values.pop("hyperparameters")
            chosen = Hyperparameters(**{**given, "modules": tuple(given["modules"])})
            return cls(hyperparameters=chosen, **values)
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a job: {error}") from None

    def digest(self) -> bytes:
        """SHA-256 of everything that its result depends on. A state belongs to the job of its digest."""
        values = asdict(self)
        del values["threads"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class MicroBatch:
    """Examples that are computed together."""

    examples: tuple[int, ...]
    lengths: tuple[int, ...]
    """Tokens of each example."""
    units: tuple[Unit, ...] = field(repr=False)
    validation: bool = False
    """The examples are of the validation file, and have no backward."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class JobSteps:
    """The steps of a job over its data: sizes, and no numbers."""

    job: TrainingJob
    num_layers: int
    """Of the base model."""
    lengths: Sequence[int]
    """Tokens of each example."""
    validation_lengths: Sequence[int] = ()

    def __post_init__(self) -> None:
        limit = self.job.hyperparameters.micro_batch
        if not len(self.lengths):
            raise ValueError("the job has no examples")
        longest = max(map(int, [*self.lengths, *self.validation_lengths]))
        if longest > limit:
            raise ValueError(f"the longest example has {longest} tokens; micro_batch is {limit}: make it {longest}")

    @cached_property
    def order(self) -> Order:
        chosen = self.job.hyperparameters
        return Order(len(self.lengths), chosen.batch_size, chosen.epochs, chosen.seed)

    @property
    def count(self) -> int:
        """Optimizer steps of the whole job."""
        return self.order.steps

    @cached_property
    def most_tokens(self) -> int:
        """No micro-batch has more tokens."""
        chosen = self.job.hyperparameters
        batch = min(chosen.batch_size, len(self.lengths)) * int(max(self.lengths))
        held_out = min(VALIDATION_EXAMPLES, len(self.validation_lengths)) * int(max(self.validation_lengths, default=0))
        return min(chosen.micro_batch, max(batch, held_out))

    def validates(self, step: int) -> bool:
        """Whether a validation follows the step's update."""
        return bool(len(self.validation_lengths)) and (
            self.order.ends_epoch(step) or (step + 1) % VALIDATION_STEPS == 0
        )

    def checkpoint_after(self, step: int) -> bool:
        """Whether the adapter is written when the step is done: at each epoch's end."""
        return self.order.ends_epoch(step)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """Those of a step, in order: of training, the last of them with the optimizer's unit; then of validation."""
        limit = self.job.hyperparameters.micro_batch
        packed = pack(self.order.examples(step), self.lengths, limit)
        batches = [
            self._micro_batch(examples, self.lengths, backward=True, optimizer=index == len(packed) - 1)
            for index, examples in enumerate(packed)
        ]
        if self.validates(step):
            chosen = range(min(VALIDATION_EXAMPLES, len(self.validation_lengths)))
            batches += [
                self._micro_batch(examples, self.validation_lengths, backward=False, optimizer=False)
                for examples in pack(chosen, self.validation_lengths, limit)
            ]
        return tuple(batches)

    def _micro_batch(
        self, examples: tuple[int, ...], all_lengths: Sequence[int], *, backward: bool, optimizer: bool
    ) -> MicroBatch:
        lengths = tuple(int(all_lengths[example]) for example in examples)
        units = units_of(self.num_layers, sum(lengths), backward=backward, optimizer=optimizer)
        return MicroBatch(examples, lengths, units, validation=not backward)
