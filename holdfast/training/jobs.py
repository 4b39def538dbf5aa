"""A tuning job as values: its hyperparameters, its steps and micro-batches, and the units of a micro-batch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from holdfast.core.training_cost import BACKWARDS, LayerHalves, UnitKind
from holdfast.training.losses import Adam
from holdfast.training.order import Order, pack

ALL_MODULES = ("q", "k", "v", "o", "gate", "up", "down")
"""The modules of a layer like Llama's, as most families have."""
RECURRENT_MODULES = (
    *("in_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "out_proj"),
)
"""The modules of recurrent layers. Each family has some of them."""
KNOWN_MODULES = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down", *RECURRENT_MODULES)
"""The modules of all families. Which of them a model has is known when a job begins."""
MLP_MODULES = ("gate", "up", "gate_up", "down")
"""The modules of the MLP. All others belong to attention, or to a recurrence in its place."""
HEAD_ROWS = 1024
"""Number of tokens whose logits one unit computes. With 128,256 words, the logits take 263 MB in 16 bits."""
VALIDATION_STEPS = 100
"""Number of steps between validations. The last step of each epoch also has one."""
VALIDATION_EXAMPLES = 64
"""The most examples of a validation: the first ones of the file."""


def short_module(name: str) -> str:
    """The short name of a module that has PEFT's name, such as q_proj; other names stay as they are."""
    return name if name in KNOWN_MODULES else name.removesuffix("_proj")


def modules_of(known: Sequence[str], *, attention: bool, mlp: bool) -> tuple[str, ...]:
    """The modules among `known` that are of attention, of the MLP, or both.

    A recurrence in the place of attention counts as attention. Raises ValueError if there is none.
    """
    chosen = tuple(name for name in known if (mlp if name in MLP_MODULES else attention))
    if not chosen:
        wanted = " and ".join(each for each, on in (("attention", attention), ("the MLP", mlp)) if on) or "nothing"
        raise ValueError(f"modules to tune are those of {wanted}; the model has {', '.join(known)}")
    return chosen


class Unit(NamedTuple):
    """The smallest piece of work that a slice can hold."""

    kind: UnitKind
    number: int
    """The number of the layer; for the head, of the chunk of HEAD_ROWS tokens; 0 for the optimizer.

    Where the head computes the chunks again, it counts on.
    """


def units_of(
    layers: Sequence[LayerHalves], tokens: int, *, backward: bool, optimizer: bool, passes: int = 1
) -> tuple[Unit, ...]:
    """The units of a micro-batch, in order, from the halves of each layer. A validation has no `backward`.

    With `optimizer`, the last unit is its update. `passes` says how often the loss needs the head.
    """
    halves = [(kind, layer) for layer, kinds in enumerate(layers) for kind in kinds]
    units = [Unit(kind, layer) for kind, layer in halves]
    units += [Unit("head", chunk) for chunk in range(passes * -(-tokens // HEAD_ROWS))]
    if backward:
        units += [Unit(BACKWARDS[kind], layer) for kind, layer in reversed(halves)]
    if optimizer:
        units.append(Unit("optimizer", 0))
    return tuple(units)


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The settings of a job. Two runs with equal settings, data and base model compute the same."""

    epochs: int
    batch_size: int
    """Number of examples in one optimizer step."""
    learning_rate: float = 2e-4
    """The learning rate at its peak."""
    rank: int = 16
    alpha: float = 32.0
    """LoRA's alpha: the adapter adds alpha / rank times B A x."""
    modules: tuple[str, ...] = ALL_MODULES
    dora: bool = False
    """Whether magnitudes are trained as well (DoRA)."""
    micro_batch: int = 8192
    """The most tokens that are computed at once. It is a setting of the job, because the last bits depend on it."""
    warmup: float = 0.03
    """The share of the steps in which the learning rate rises."""
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
            or (unknown := {*self.modules} - {*KNOWN_MODULES})
            or len({*self.modules}) < len(self.modules)
        ):
            shown = ", ".join(sorted(unknown)) if self.modules and unknown else ", ".join(self.modules) or "none"
            raise ValueError(f"modules are {shown}; choose each once from {', '.join(KNOWN_MODULES)}")
        if not isinstance(self.dora, bool):
            raise ValueError(f"dora is {self.dora!r}; it must be true or false")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def adam(self) -> Adam:
        """The optimizer's parameters at the peak of the learning rate."""
        return Adam(
            learning_rate=self.learning_rate,
            beta2=0.999,
            eps=1e-8,
            weight_decay=self.weight_decay,
            grad_clip_norm=self.max_grad_norm,
        )

    @property
    def scale(self) -> float:
        """LoRA's factor alpha / rank."""
        return self.alpha / self.rank


def auto_batch_size(examples: int) -> int:
    """The default batch size: 8 below 2,048 examples, otherwise a 256th of the examples, at most 64."""
    return 8 if examples < 2048 else min(64, examples // 256)


def auto_epochs(examples: int, batch_size: int) -> int:
    """The default number of epochs: 1 to 10, for about 200 steps in all, and at least 3 below 100 examples."""
    wanted = min(10, max(1, -(-200 * batch_size // examples)))
    return max(3, wanted) if examples < 100 else wanted


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One job. It never changes; its progress is in its state."""

    id: str
    hyperparameters: Hyperparameters
    base_model: str
    """The name that checkpoints give as their base model."""
    base_digest: str
    """The digest of the base model's weights. A job does not resume over other weights."""
    data_digest: str = ""
    """SHA-256 of the file of examples; empty for a driven job."""
    validation_digest: str = ""
    """SHA-256 of the file of validation examples; empty without one."""
    threads: int = 0
    """Number of CPU threads that the job began with, on which the last bits depend; 0 on a GPU."""
    driven: bool = False
    """Whether its work comes as calls of its owner. It then has no examples, and epochs and batches mean nothing."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TrainingJob:
        """Parse the text of `to_json`. Raises ValueError for any other text."""
        try:
            values: dict[str, Any] = json.loads(text)
            given: Mapping[str, Any] = values.pop("hyperparameters")
            chosen = Hyperparameters(**{**given, "modules": tuple(given["modules"])})
            return cls(hyperparameters=chosen, **values)
        except (json.JSONDecodeError, RecursionError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a job: {error}") from None

    def digest(self) -> bytes:
        """SHA-256 of everything that the job's result depends on. A state belongs to the job with its digest."""
        values = asdict(self)
        del values["threads"]
        if not self.driven:
            del values["driven"]
        if not self.hyperparameters.dora:  # states of jobs from before there was a choice have a digest without it
            del values["hyperparameters"]["dora"]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@dataclass(frozen=True)
class MicroBatch:
    """Examples that are computed together."""

    examples: tuple[int, ...]
    lengths: tuple[int, ...]
    """Number of tokens of each example."""
    units: tuple[Unit, ...] = field(repr=False)
    validation: bool = False
    """Whether the examples are from the validation file. They have no backward then."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class JobSteps:
    """The optimizer steps of a job, computed from the lengths of its examples without their tokens."""

    job: TrainingJob
    layers: tuple[LayerHalves, ...]
    """The halves of each layer of the base model."""
    lengths: Sequence[int]
    """Number of tokens of each example."""
    validation_lengths: Sequence[int] = ()
    final: ClassVar[bool] = True
    """Whether `count` is the number of all steps: the examples and the epochs say it."""

    def __post_init__(self) -> None:
        limit = self.job.hyperparameters.micro_batch
        if not len(self.lengths):
            raise ValueError("the job has no examples")
        longest = max(map(int, [*self.lengths, *self.validation_lengths]))
        if longest > limit:
            raise ValueError(f"the longest example has {longest} tokens; micro_batch is {limit}: make it {longest}")

    @property
    def num_layers(self) -> int:
        """Number of layers of the base model."""
        return len(self.layers)

    @cached_property
    def order(self) -> Order:
        chosen = self.job.hyperparameters
        return Order(len(self.lengths), chosen.batch_size, chosen.epochs, chosen.seed)

    @property
    def count(self) -> int:
        """Number of optimizer steps in the whole job."""
        return self.order.steps

    @cached_property
    def most_tokens(self) -> int:
        """An upper bound on the tokens of any micro-batch."""
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
        """Whether the adapter is written after the step. It is written at the end of each epoch."""
        return self.order.ends_epoch(step)

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step, in order: those of training, then those of a validation, if there is one.

        The last micro-batch of training has the optimizer's unit.
        """
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
        units = units_of(self.layers, sum(lengths), backward=backward, optimizer=optimizer)
        return MicroBatch(examples, lengths, units, validation=not backward)
