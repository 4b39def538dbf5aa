"""Sums over the devices that share a layer, with the same bits for any number of devices.

The inputs of a projection that adds to the stream are cut into as many slices as there may be devices, a power of two.
Each slice is added up by itself, and the slices are added in a binary tree. A device has neighbouring slices, whose sum
is a subtree, so the tree is the same however the slices are divided.
"""

from __future__ import annotations

import torch

from holdfast.lm.kernels.collectives.protocol import Group


def tree_sum(partials: torch.Tensor) -> torch.Tensor:
    """The sum [...] of partials [P, ...], where P is a power of two, by adding neighbours."""
    while len(partials) > 1:
        partials = partials[0::2] + partials[1::2]
    return partials[0]


def sum_over_devices(partials: torch.Tensor, group: Group | None) -> torch.Tensor:
    """The sum [T, N] of a device's partials [P, T, N] float32 over P and over all devices of the group.

    A sum over devices moves the numbers. Every device has zeros in the places of others, so no order changes it.
    """
    own = tree_sum(partials)
    if group is None:
        return own
    rows, width = own.shape
    places = own.new_zeros(group.size * rows, width)
    places[group.rank * rows : (group.rank + 1) * rows] = own
    return tree_sum(group.all_reduce(places).view(group.size, rows, width))
