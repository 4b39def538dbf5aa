"""Simulated training: jobs of a given size with a simulated engine's requests, and the time of their slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from holdfast.core.training_cost import HEAD_TOKENS, TrainingCost, TrainingShape, UnitKind
from holdfast.lab.simulator.shapes import BYTES, ModelShape
from holdfast.lm.parts.tuning.values import TrainingReport, TrainingSlice

NUMBER = 4
"""Bytes of a 32-bit number."""


class SimulatedUnit(NamedTuple):
    kind: UnitKind
    number: int


@dataclass(frozen=True)
class SimulatedBatch:
    """A micro-batch of sequences of these lengths, with its own optimizer step."""

    lengths: tuple[int, ...]
    num_layers: int
    validation = False

    @cached_property
    def units(self) -> tuple[SimulatedUnit, ...]:
        """The batch's units in order, like those of `holdfast.training.jobs.units_of`."""
        layers, chunks = range(self.num_layers), -(-sum(self.lengths) // HEAD_TOKENS)
        forward: tuple[UnitKind, ...] = ("attention", "mlp")
        backward: tuple[UnitKind, ...] = ("mlp_backward", "attention_backward")
        return (
            *(SimulatedUnit(kind, layer) for layer in layers for kind in forward),
            *(SimulatedUnit("head", chunk) for chunk in range(chunks)),
            *(SimulatedUnit(kind, layer) for layer in reversed(layers) for kind in backward),
            SimulatedUnit("optimizer", 0),
        )


@dataclass(frozen=True)
class SimulatedJob:
    """A job whose optimizer steps are all alike, with one micro-batch each."""

    lengths: tuple[int, ...]
    """Number of tokens in each example of a micro-batch."""
    num_layers: int
    vector_bytes: int
    """Bytes of the job's vectors: parameters, gradients, moments."""
    input_bytes: int
    """Bytes per token of the inputs of all halves."""
    kept_bytes: int
    """Bytes per token of the other activations that the halves keep."""
    count: int = 1 << 40
    """Number of steps. By default the job never ends."""
    final: ClassVar[bool] = True
    """Whether the job is complete after `count` steps."""

    @property
    def most_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def _batch(self) -> SimulatedBatch:
        return SimulatedBatch(self.lengths, self.num_layers)

    def micro_batches(self, step: int) -> Sequence[SimulatedBatch]:
        return (self._batch,)

    def blocks(self, tokens: int, keep: bool, *, block_bytes: int) -> int:
        """Number of cache blocks that the job takes on the device with a micro-batch of `tokens` tokens."""
        token = self.input_bytes + (self.kept_bytes if keep else 0)
        return -(-(self.vector_bytes + tokens * token) // block_bytes)


def job_of(shape: ModelShape, lengths: Sequence[int], *, rank: int = 16, count: int = 1 << 40) -> SimulatedJob:
    """A LoRA job over all linear layers of a decoder of this shape, with activations in 16 bits."""
    if shape.kinds is not None:
        raise ValueError(f"{shape.name} has recurrent layers, and such models are not tuned; give another one")
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    products = (  # inputs, outputs of all parts, number of parts with their own adapters
        (shape.hidden, query + 2 * key, 3),
        (query, shape.hidden, 1),
        (shape.hidden, 2 * shape.intermediate, 2),
        (shape.intermediate, shape.hidden, 1),
    )
    numbers = rank * sum(parts * inputs + outputs for inputs, outputs, parts in products)
    halves = 2 * shape.hidden
    kept = query + 2 * key + query + 2 * shape.intermediate + 7 * rank
    return SimulatedJob(
        tuple(lengths),
        shape.layers,
        vector_bytes=shape.layers * numbers * (5 * NUMBER + BYTES),  # parameters, two gradients, two moments, a copy
        input_bytes=shape.layers * halves * BYTES,
        kept_bytes=shape.layers * (kept * BYTES + shape.heads * NUMBER),
        count=count,
    )


def training_shape(shape: ModelShape) -> TrainingShape:
    """The sizes that the cost of training depends on."""
    return TrainingShape(shape.layers, shape.attention_weights, shape.mlp_weights, shape.head_weights)


@dataclass(frozen=True)
class Tuning:
    """Training jobs that run with a simulated engine's requests."""

    jobs: Sequence[SimulatedJob]
    """Jobs in the order of their arrival. All arrive at the start."""
    shape: TrainingShape
    deferral_bound: float | None = None
    """Seconds that a request may wait for training. None: the default, or slices if there is a `tbt_target`."""
    memory_fraction: float = 0.5
    progress: bool = False
    error: float = 1.0
    """Ratio of the real time of units to the predicted one, before any correction."""


class SimulatedTrainer:
    """Computes the time of slices on the device, and counts the trained tokens."""

    def __init__(self, cost: TrainingCost, jobs: dict[str, SimulatedJob], block_bytes: int, error: float = 1.0) -> None:
        self._cost, self._jobs, self._block_bytes, self._error = cost, jobs, block_bytes, error
        self._kept: set[int] = set()
        """Indices of forward units of the current micro-batch whose activations are kept."""
        self.seconds = 0.0
        """Device time of all slices."""
        self.tokens = 0
        """Number of tokens in complete micro-batches."""
        self.slices = 0

    def time(self, slice_: TrainingSlice) -> TrainingReport:
        """The result of a slice, with the seconds that it takes. Slices come in order."""
        job = self._jobs[slice_.job]
        (batch,) = job.micro_batches(slice_.step)
        seconds, tokens, loss = 0.0, 0, None
        if slice_.action in ("offload", "restore"):
            seconds = self._cost.block_seconds * job.blocks(0, False, block_bytes=self._block_bytes)
        if slice_.action != "run":
            self._kept.clear()
        layers = 2 * job.num_layers
        for index in range(slice_.first, slice_.stop):
            kind = batch.units[index].kind
            if index < layers and slice_.keep:
                self._kept.add(index)
            # Backward units come in the reverse order of forward ones.
            forward = len(batch.units) - 2 - index
            seconds += self._error * self._cost.unit(kind, job.lengths, recompute=forward not in self._kept)
        if slice_.action == "run":
            self.slices += 1
            if slice_.stop == len(batch.units):
                self._kept.clear()
                tokens, loss = job.most_tokens, 0.0
                self.tokens += tokens
        self.seconds += seconds
        return TrainingReport(
            slice_.job, slice_.step, slice_.micro_batch, slice_.action, slice_.first, slice_.stop, seconds, tokens, loss
        )
