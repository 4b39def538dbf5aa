"""Layout: the division of a model among the ranks of one engine, by shards of each layer and by stages of layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Layout:
    """A division into `pp` stages, each a part of the layers, with `tp` shards of each layer. One rank is one device.

    Raises ValueError if `tp` or `pp` is below 1.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")

    @property
    def ranks(self) -> int:
        """Number of ranks: rank = stage * tp + shard."""
        return self.tp * self.pp

    @property
    def suffix(self) -> str:
        """The end of a file's name for this layout: `-tp2-pp2`; empty for one device."""
        return "".join(f"-{name}{size}" for name, size in (("tp", self.tp), ("pp", self.pp)) if size > 1)

    def shard_of(self, rank: int) -> int:
        """Index of the shard that a rank has of each of its layers."""
        return rank % self.tp

    def stage_of(self, rank: int) -> int:
        """Index of the stage that a rank belongs to."""
        return rank // self.tp

    @property
    def drawing_rank(self) -> int:
        """The first rank of the last stage, which draws the tokens."""
        return (self.pp - 1) * self.tp

    def ranks_of(self, stage: int) -> range:
        """The ranks that share the layers of a stage."""
        return range(stage * self.tp, (stage + 1) * self.tp)


def split_layers(
    num_layers: int, stages: int, *, layer_cost: float, embedding_cost: float, head_cost: float
) -> tuple[range, ...]:
    """The layers of each stage, so that the slowest stage is as fast as possible.

    The first stage also computes the embedding, and the last one the LM head. Costs are in any unit. Each stage has at
    least one layer. Raises ValueError for more stages than layers.
    """
    if not 0 < stages <= num_layers:
        raise ValueError(f"pp is {stages}; the model has {num_layers} layers, and each stage takes at least one")
    counts, costs = [1] * stages, [layer_cost] * stages
    costs[0] += embedding_cost
    costs[-1] += head_cost
    # Layers cost the same, so each may go where the sum is lowest; the maximum is then the least possible.
    for _ in range(num_layers - stages):
        stage = costs.index(min(costs))
        counts[stage] += 1
        costs[stage] += layer_cost
    return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))
