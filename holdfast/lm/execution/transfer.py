"""Transfers: copies of blocks between device and host, on their own streams, during the computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch

from holdfast.lm.copy_streams import CopiesInFlight, CopyEvent, CopyInFlight, CopyStream
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.models.base import LayerCache, LayerCaches
from holdfast.lm.types import BlockCopy, StepPlan, TierCopied


class SwappingInLayers:
    """The layers' caches while they are swapping in. Reading a layer makes the computation wait for that layer's copy.

    So the first layers compute while later ones are still being copied (Pensieve §4.3.3). A plan that awaits its own
    copies does it: one that has nothing else to compute, one of a policy of whole prompts, or each if the scheduler
    lets sequences join by layer.
    """

    def __init__(self, layers: Sequence[LayerCache], events: Sequence[CopyEvent]) -> None:
        self._layers, self._events = layers, events

    def __getitem__(self, layer: int) -> LayerCache:
        self._events[layer].wait()
        return self._layers[layer]


class Transfers:
    """Begins the copies of each plan, in plan order, and reports which are complete.

    This order keeps copies correct, given the guarantees of `StepPlan`:

    - A swap-in runs after the computation begun so far, which may still read the old contents of its blocks. Only a
      plan that awaits a swap-in waits for it: for an earlier plan's all at once, for its own layer by layer.
    - A swap-out runs after the computation begun so far, which writes what it copies. Nothing writes to its blocks
      before `completed` reports it. It also waits for every swap-in begun so far: these may read the host block that
      it writes to, and copying both ways at once would slow down the urgent direction (Pensieve §5; by 38% on an H200,
      docs/notes/2026-11-21-swap-copies.md).
    """

    def __init__(
        self,
        device: KVCache,
        host: KVCache,
        layers: Sequence[LayerCache],
        make_stream: Callable[[], CopyStream],
        groups: int,
    ) -> None:
        """`layers` are the device's caches by layer.

        A plan that awaits its own swap-in has it copied in `groups` groups of layers, or in one for each layer if there
        are fewer. It starts once the first group is complete.
        """
        self._device, self._host, self._layers = device, host, layers
        self._inward, self._outward = make_stream(), make_stream()
        self._last_in: CopyEvent | None = None
        self._copies = CopiesInFlight()
        self._begun = -1
        self._block_bytes = device.block_bytes
        step = -(-len(layers) // groups)
        self._groups = [slice(first, first + step) for first in range(0, len(layers), step)]

    def begin(self, plan: StepPlan) -> LayerCaches:
        """Start a plan's copies. Returns the layers' caches for its computation, which must be started next.

        These are the caches given to `Transfers`, unless the plan awaits its own copies.
        """
        layers: LayerCaches = self._layers
        copies = plan.copies
        self.follow(copies.awaits)
        if copies.swap_in:
            own = copies.awaits >= plan.step
            self._inward.follow()
            places, blocks = self._inward.upload(block_numbers(copies.swap_in))
            copy = partial(copy_blocks, self._host, places, self._device, blocks)
            groups = self._groups if own else [slice(0, len(self._layers))]
            parts = tuple(self._inward.copy(partial(copy, group)) for group in groups)
            self._last_in = parts[-1]
            self._copies.inward.append(CopyInFlight(plan.step, len(places) * self._block_bytes, parts))
            if own:
                events = [parts[at // groups[0].stop] for at in range(len(self._layers))]
                layers = SwappingInLayers(self._layers, events)
        if copies.swap_out:
            self._outward.follow()
            blocks, places = self._outward.upload(block_numbers(copies.swap_out))
            work = partial(copy_blocks, self._device, blocks, self._host, places)
            event = self._outward.copy(work, after=self._last_in)
            self._copies.outward.append(CopyInFlight(plan.step, len(places) * self._block_bytes, (event,)))
        self._begun = plan.step
        return layers

    def follow(self, step: int) -> None:
        """Let the current stream wait for the swap-ins that plans up to this one have begun."""
        for earlier in tuple(self._copies.inward):  # on a rank, another thread takes complete copies out meanwhile
            if earlier.step <= step:
                earlier.end.wait()

    def completed(self, *, wait: bool) -> TierCopied:
        """Copies that have completed. With `wait`, block until all copies begun so far have completed."""
        return self._copies.completed(self._begun, wait=wait)


def block_numbers(copies: Sequence[BlockCopy]) -> torch.Tensor:
    """Sources and targets of copies, int64 [2, n]. `torch.tensor` takes 10 times as long, while a device waits."""
    flat = np.fromiter(chain.from_iterable(copies), np.int64, 2 * len(copies))
    return torch.from_numpy(flat.reshape(-1, 2).T.copy())
