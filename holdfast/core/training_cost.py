"""The cost of training: the time of each unit of a micro-batch, from the measurements made for inference.

A unit is half a layer, forward or backward, a chunk of the head, or the optimizer. No measurement is made for it: a
forward half is its share of the linear layers of a step of as many tokens, by weights, plus the attention of each
sequence. Measured times correct the error of this estimate (`lm.parts.tuning.tuner`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.core.cost import CostModel

UnitKind = Literal["attention", "mlp", "head", "mlp_backward", "attention_backward", "optimizer"]
KINDS: tuple[UnitKind, ...] = get_args(UnitKind)

LORA, LORA_ATTENTION = 1.1, 1.6
"""Time of a half's linear layers with adapters, divided by the time without: for the MLP, and for attention, whose
products are smaller. This and the factors below were measured on an H200 with rank 16 and 8,192 tokens."""
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
    """The sizes of a model that the cost of training depends on. Raises ValueError if one is below 1."""

    num_layers: int
    attention_weights: int
    """Number of weights of one layer's attention: queries, keys, values and output."""
    mlp_weights: int
    """Number of weights of one layer's MLP: gate, up and down."""
    head_weights: int
    """Number of weights of the LM head."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "attention_weights", "mlp_weights", "head_weights"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def layers_share(self) -> float:
        """Share of the layers in all weights that a forward multiplies by."""
        layers = self.num_layers * (self.attention_weights + self.mlp_weights)
        return layers / (layers + self.head_weights)

    @property
    def attention_share(self) -> float:
        """Share of the attention half in the weights of a layer."""
        return self.attention_weights / (self.attention_weights + self.mlp_weights)


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
        layer = linear * shape.layers_share / shape.num_layers
        if kind in ("mlp", "mlp_backward"):
            forward = LORA * (1 - shape.attention_share) * layer
            backward = BACKWARD * forward
        else:
            half = LORA_ATTENTION * shape.attention_share * layer
            attention = sum(self.cost.attention(length, length) for length in lengths) / shape.num_layers
            forward = half + ATTENTION * attention
            backward = BACKWARD * half + ATTENTION_BACKWARD * attention
        if kind in ("mlp", "attention"):
            return forward
        return backward + forward * recompute

    def head_units(self, tokens: int) -> int:
        """Number of head units in a micro-batch of `tokens` tokens."""
        return max(1, -(-tokens // HEAD_TOKENS))

    def largest_unit(self, tokens: int) -> float:
        """Seconds of the longest unit of a micro-batch of one sequence of `tokens` tokens, with its recomputation."""
        return max(self.unit(kind, (tokens,), recompute=True) for kind in KINDS)

    def iteration(self, lengths: Sequence[int], *, recompute: bool = False) -> float:
        """Seconds of a whole micro-batch, forward and backward, with the optimizer."""
        halves: tuple[UnitKind, ...] = ("attention", "mlp", "mlp_backward", "attention_backward")
        layer = sum(self.unit(kind, lengths, recompute=recompute) for kind in halves)
        head = self.unit("head", lengths) * self.head_units(sum(lengths))
        return self.shape.num_layers * layer + head + self.unit("optimizer", lengths)

    def auto_micro_batch(self, target: float | None, longest: int) -> int:
        """Largest number of tokens in a micro-batch of a job that gives none: a power of two from 512 to 8,192.

        It is the largest size whose longest unit takes at most a sixth of `target` seconds; without a target, 8,192. It
        is at least `longest`, the number of tokens of the longest example.
        """
        sizes = [size for size in MICRO_BATCHES if target is None or 6 * self.largest_unit(size) <= target]
        return max(longest, max(sizes, default=MICRO_BATCHES[0]))
