"""Data sheets of devices and of the links between them, with the share of each figure that is really reached."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: the makers' figures, and what the kernels of a serving stack reach of them."""

    name: str
    flops: float
    """Peak operations a second in dense 16-bit matrix products."""
    bandwidth: float
    """Bytes a second of its memory."""
    memory: float
    """Bytes."""
    copy_rate: float
    """Bytes a second to or from pinned host memory, as reached."""
    matmul: float
    """Share of `flops` that large matrix products reach."""
    attention: float
    """The same for the attention of long prefills."""
    weights: float
    """Share of `bandwidth` at which weights are read."""
    cache: float
    """The same for the KV cache."""
    step_seconds: float
    """What a step takes besides: launching, sampling, what the host does meanwhile."""
    layer_seconds: float
    """What each layer takes besides its matrices and its attention."""
    link: str
    """The link between devices of one host."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way between devices."""

    name: str
    rate: float
    """Bytes a second in one direction, as collectives reach it."""
    latency: float
    """Seconds until a message arrives, however short."""

    def send(self, size: float) -> float:
        """Seconds of one message of `size` bytes."""
        return self.latency + size / self.rate

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes over `ranks` devices: 2 (n - 1) messages of 1/n each."""
        return 2 * (ranks - 1) * self.send(size / ranks) if ranks > 1 else 0.0


DEVICES = {
    device.name: device
    for device in (
        # Fitted to the profile of a Llama-3-8B shape that was measured on one: within 6% of it for 16 kinds of step,
        # 10% too fast for a prefill of 128 tokens alone; docs/benchmarks.md has the table.
        Device(
            name="h200",
            flops=989e12,
            bandwidth=4.8e12,
            memory=141e9,
            copy_rate=50e9,
            matmul=0.62,
            attention=0.58,
            weights=0.82,
            cache=0.86,
            step_seconds=0.25e-3,
            layer_seconds=9e-6,
            link="nvlink4",
        ),
        # Not measured: the H200's shares of its own figures.
        Device(
            name="h100",
            flops=989e12,
            bandwidth=3.35e12,
            memory=80e9,
            copy_rate=50e9,
            matmul=0.62,
            attention=0.58,
            weights=0.82,
            cache=0.86,
            step_seconds=0.25e-3,
            layer_seconds=9e-6,
            link="nvlink4",
        ),
        # The PCIe card of Azure's NC A100 v4, under the papers' software of 2023 (PyTorch, xFormers, no graphs).
        # attention fitted to chunks at contexts of 2k to 4k as Vidur measured them (docs/benchmarks.md).
        Device(
            name="a100-80gb",
            flops=312e12,
            bandwidth=1.935e12,
            memory=80e9,
            copy_rate=24e9,
            matmul=0.62,
            attention=0.34,
            weights=0.85,
            cache=0.85,
            step_seconds=0.5e-3,
            layer_seconds=30e-6,
            link="nvlink3",
        ),
        # matmul and weights fitted to layers of Llama-2-70B as Vidur measured them (docs/benchmarks.md), the small
        # kernels between the matrices included; attention and cache are the A100's.
        Device(
            name="a40",
            flops=149.7e12,
            bandwidth=0.696e12,
            memory=48e9,
            copy_rate=24e9,
            matmul=0.67,
            attention=0.34,
            weights=0.75,
            cache=0.85,
            step_seconds=0.5e-3,
            layer_seconds=30e-6,
            link="pcie4",
        ),
        Device(
            name="rtx-3090",
            flops=71e12,
            bandwidth=0.936e12,
            memory=24e9,
            copy_rate=24e9,
            matmul=0.62,
            attention=0.34,
            weights=0.85,
            cache=0.85,
            step_seconds=0.5e-3,
            layer_seconds=30e-6,
            link="pcie4",
        ),
    )
}

LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 230e9, 8e-6),
        Link("nvlink4", 370e9, 6e-6),
        # As Vidur measured them (docs/benchmarks.md): all-reduces of four A100s bridged in pairs, of four A40s so
        # bridged, what an A40 sends to one that it is not bridged to, what a node sends to another.
        Link("pcie4", 24e9, 10e-6),
        Link("nvlink-pairs", 40e9, 6e-6),
        Link("pcie4-staged", 4.1e9, 30e-6),
        Link("ethernet-100g-tcp", 2.5e9, 60e-6),
        # Not measured.
        Link("pcie5", 48e9, 10e-6),
        Link("ethernet-100g", 11e9, 40e-6),
        Link("ethernet-25g", 2.8e9, 50e-6),
    )
}


def device_named(name: str) -> Device:
    """The device of this name. Raises ValueError that lists those that there are."""
    if name not in DEVICES:
        raise ValueError(f"device {name} is unknown; there are {', '.join(sorted(DEVICES))}")
    return DEVICES[name]


def link_named(name: str) -> Link:
    """The link of this name. Raises ValueError that lists those that there are."""
    if name not in LINKS:
        raise ValueError(f"link {name} is unknown; there are {', '.join(sorted(LINKS))}")
    return LINKS[name]
