"""The messages of training between the stages of a pipeline: streams go on, gradients and vectors go back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.models.shard import Shard


class Stages:
    """One rank's place among the stages of a model. Without a link there is one stage, and nothing is sent.

    Every message is received in the unit in which it is sent, so none is under way between two slices. All ranks make
    the calls of one step in the same order.
    """

    def __init__(self, shard: Shard, num_layers: int, link: StageLink | None) -> None:
        """`num_layers` are those of the whole model. Raises ValueError for a part of the layers without a link."""
        if link is None and not (shard.first and shard.last):
            raise ValueError("training over stages needs a link between them")
        self.layers, self.num_layers = shard.layers, num_layers
        self.first, self.last = shard.first, shard.last
        self._speaks, self._link = shard.index == 0, link

    @property
    def several(self) -> bool:
        """Whether there are several stages."""
        return self._link is not None

    def send_on(self, stream: torch.Tensor) -> None:
        """Send a stream [T, hidden] to the next stage."""
        assert self._link is not None
        self._link.send(stream)

    def receive_on(self, into: torch.Tensor) -> None:
        """Write the next stream of the stage before to `into` [T, hidden]."""
        assert self._link is not None
        self._link.receive(into)

    def send_back(self, tensor: torch.Tensor) -> None:
        """Send a tensor to the stage before."""
        assert self._link is not None
        self._link.send_back(tensor)

    def receive_back(self, into: torch.Tensor) -> None:
        """Write the next tensor that the next stage sent back to `into`, of the same size."""
        assert self._link is not None
        self._link.receive_back(into)

    def total(self, number: torch.Tensor) -> torch.Tensor:
        """The sum of a number [1] over all stages, on all stages."""
        whole = number.clone()
        self._add_back(whole)
        if self.several:
            if not self.first:
                self.receive_on(whole)
            if not self.last:
                self.send_on(whole)
        return whole

    def at_first(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sums of numbers over all stages, on the first stage. On others they mean nothing."""
        whole = numbers.clone()
        self._add_back(whole)
        return whole

    def gather(self, layers: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Bring a tensor of every layer to the first rank. Yields there those of later stages, in order.

        `layers` are those of this stage, and `sizes` are the numbers of elements of those of later stages. Must be
        iterated to the end, on every rank.
        """
        if not self.several or not self._speaks:
            return
        if not self.first:
            for tensor in layers:
                self.send_back(tensor)
        for size in sizes:
            tensor = layers[0].new_empty(size)
            self.receive_back(tensor)
            if self.first:
                yield tensor
            else:
                self.send_back(tensor)

    def _add_back(self, whole: torch.Tensor) -> None:
        """Add the numbers of later stages to this stage's, in place, and send the sum to the stage before."""
        if self.several:
            if not self.last:
                later = torch.empty_like(whole)
                self.receive_back(later)
                whole += later
            if not self.first:
                self.send_back(whole)
