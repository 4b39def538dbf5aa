"""The cost of training: the time of each unit of a micro-batch, from the measurements made for inference.

A unit is half a layer, forward or backward, a chunk of the head, or the optimizer. No measurement is made for it: a
forward half is its share of the linear layers of a step of as many tokens, by weights, plus the attention of each
sequence. Measured times correct the error of this estimate (`lm.parts.tuning.tuner`).

The first half of a layer is attention, a recurrence, or both in parallel; the second one is the MLP. Some models have
layers of one half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.core.cost import CostModel

HalfKind = Literal["attention", "recurrence", "parallel", "mlp"]
"""The kind of half a layer. In "parallel", attention and a recurrence read the same stream."""
BackwardKind = Literal["attention_backward", "recurrence_backward", "parallel_backward", "mlp_backward"]
UnitKind = HalfKind | BackwardKind | Literal["head", "optimizer"]
HALVES: tuple[HalfKind, ...] = get_args(HalfKind)
BACKWARDS: dict[HalfKind, BackwardKind] = dict(zip(HALVES, get_args(BackwardKind), strict=True))
"""For each kind of half, the kind of its backward."""
KINDS: tuple[UnitKind, ...] = (*HALVES, *BACKWARDS.values(), "head", "optimizer")
LayerHalves = tuple[HalfKind, ...]
"""The halves of one layer, in order."""
PLAIN: LayerHalves = ("attention", "mlp")
"""The halves of each layer of a model without recurrent layers."""
HALF_OF: dict[UnitKind, HalfKind] = {kind: half for half, back in BACKWARDS.items() for kind in (half, back)}
"""The kind of half that a unit computes, forward or backward, by the kind of unit."""

LORA, LORA_ATTENTION = 1.1, 1.6
"""Time of a half's linear layers with adapters, divided by the time without: for the MLP, and for attention, whose
products are smaller. This and the factors below were measured on an H200 with rank 16 and 8,192 tokens."""
RECURRENCE, RECURRENCE_BACKWARD = 2.5, 7.0
"""Time of a recurrent layer's half in training, and of its backward, divided by the time of its share of weights in a
step. The backward runs the recurrence once more. These were measured on one core of a CPU, with rank 16, four sequences
of 512 tokens and a stream of 512 numbers: 2.8 and 7.2 for gated delta nets, 2.2 and 7.6 for Mamba-2, 1.1 and 2.3 for
short convolutions. Measured slices correct them."""
BACKWARD = 1.1
"""Time of a backward half divided by that of its forward. The products with the base weights are computed once, because
base weights have no gradients, and those with the adapters twice."""
ATTENTION, ATTENTION_BACKWARD = 2.0, 5.5
"""Time of attention in training, and of its backward, divided by the time in inference, which has another kernel."""
HEAD = 2.0
"""Time of the head with its backward, divided by the time of its forward."""
HEAD_TOKENS = 1024
"""Largest number of tokens in one unit of the head."""
MICRO_BATCHES = (512, 1024, 2048, 4096, 8192)
"""Micro-batch sizes, in tokens, to choose from for jobs that give none."""
OPTIMIZER = 0.25
"""Time of the optimizer's unit divided by that of a step of one token, which reads all weights once."""


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """The sizes of a model that the cost of training depends on. Raises ValueError if one that it needs is below 1."""

    num_layers: int
    attention_weights: int
    """Number of weights of one layer's attention: queries, keys, values and output."""
    mlp_weights: int
    """Number of weights of one layer's MLP: gate, up and down."""
    head_weights: int
    """Number of weights of the LM head."""
    recurrence_weights: int = 0
    """Number of weights of one layer's recurrence, between the stream and the stream; 0 for none."""
    layers: tuple[LayerHalves, ...] = ()
    """The halves of each layer; empty: all are PLAIN."""

    def __post_init__(self) -> None:
        recurrent = ("recurrence_weights",) * any({*halves} & {"recurrence", "parallel"} for halves in self.layers)
        for name in ("num_layers", "attention_weights", "mlp_weights", "head_weights", *recurrent):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if len(self.layers) not in (0, self.num_layers):
            raise ValueError(f"layers are {len(self.layers)}; num_layers is {self.num_layers}")

    def count(self, half: HalfKind) -> int:
        """Number of layers with this half."""
        if not self.layers:
            return self.num_layers * (half in PLAIN)
        return sum(halves.count(half) for halves in self.layers)

    def weights(self, half: HalfKind) -> int:
        """Number of weights of one such half."""
        return {
            "attention": self.attention_weights,
            "recurrence": self.recurrence_weights,
            "parallel": self.attention_weights + self.recurrence_weights,
            "mlp": self.mlp_weights,
        }[half]

    @property
    def kinds(self) -> tuple[UnitKind, ...]:
        """The kinds of units that a micro-batch has."""
        return tuple(kind for kind in KINDS if kind not in HALF_OF or self.count(HALF_OF[kind]))

    @property
    def layers_share(self) -> float:
        """Share of the layers in all weights that a forward multiplies by."""
        layers = sum(self.count(half) * self.weights(half) for half in HALVES)
        return layers / (layers + self.head_weights)

    def share(self, half: HalfKind) -> float:
        """Share of one such half in the weights of all layers."""
        return self.weights(half) / sum(self.count(each) * self.weights(each) for each in HALVES)


class TrainingCost:
    """Predicts the seconds of training over a model whose inference a CostModel predicts."""

    def __init__(self, cost: CostModel, shape: TrainingShape, *, block_seconds: float = 0.0) -> None:
        """`block_seconds` is the time to copy one block of the cache between host and device; 0 if it is unknown."""
        self.cost, self.shape, self.block_seconds = cost, shape, block_seconds

    def unit(self, kind: UnitKind, lengths: Sequence[int], *, recompute: bool = False) -> float:
        """Seconds of one unit of a micro-batch of sequences of these lengths, in tokens.

        `recompute` adds the forward of a half to its backward, which then computes it again first.
        """
        shape, tokens = self.shape, sum(lengths)
        linear = self.cost.linear(tokens)
        if kind == "optimizer":
            return OPTIMIZER * self.cost.linear(1)
        if kind == "head":
            return HEAD * linear * (1 - shape.layers_share) / self.head_units(tokens)
        half = HALF_OF[kind]
        forward, backward = self._half(half, lengths, linear * shape.layers_share * shape.share(half))
        if kind == half:
            return forward
        return backward + forward * recompute

    def _half(self, half: HalfKind, lengths: Sequence[int], plain: float) -> tuple[float, float]:
        """Seconds of a half, forward and backward. `plain` is the time of its linear layers in a step."""
        if half == "mlp":
            return LORA * plain, BACKWARD * LORA * plain
        attention, linear = 0.0, LORA_ATTENTION * plain
        backward = BACKWARD * linear
        if half != "recurrence":
            layers = self.shape.count("attention") + self.shape.count("parallel")
            attention = sum(self.cost.attention(length, length) for length in lengths) / max(1, layers)
        if half != "attention":
            recurrent = plain * self.shape.recurrence_weights / max(1, self.shape.weights(half))
            linear = LORA_ATTENTION * (plain - recurrent) + RECURRENCE * recurrent
            backward = BACKWARD * LORA_ATTENTION * (plain - recurrent) + RECURRENCE_BACKWARD * recurrent
        return linear + ATTENTION * attention, backward + ATTENTION_BACKWARD * attention

    def head_units(self, tokens: int) -> int:
        """Number of head units in a micro-batch of `tokens` tokens."""
        return max(1, -(-tokens // HEAD_TOKENS))

    def largest_unit(self, tokens: int) -> float:
        """Seconds of the longest unit of a micro-batch of one sequence of `tokens` tokens, with its recomputation."""
        return max(self.unit(kind, (tokens,), recompute=True) for kind in self.shape.kinds)

    def iteration(self, lengths: Sequence[int], *, recompute: bool = False) -> float:
        """Seconds of a whole micro-batch, forward and backward, with the optimizer."""
        layers = sum(
            self.shape.count(half)
            * (self.unit(half, lengths) + self.unit(BACKWARDS[half], lengths, recompute=recompute))
            for half in HALVES
            if self.shape.count(half)
        )
        head = self.unit("head", lengths) * self.head_units(sum(lengths))
        return layers + head + self.unit("optimizer", lengths)

    def auto_micro_batch(self, target: float | None, longest: int) -> int:
        """Largest number of tokens in a micro-batch of a job that gives none: a power of two from 512 to 8,192.

        It is the largest size whose longest unit takes at most a sixth of `target` seconds; without a target, 8,192. It
        is at least `longest`, the number of tokens of the longest example.
        """
        sizes = [size for size in MICRO_BATCHES if target is None or 6 * self.largest_unit(size) <= target]
        return max(longest, max(sizes, default=MICRO_BATCHES[0]))
