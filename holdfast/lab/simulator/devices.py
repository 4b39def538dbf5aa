"""Data sheets of devices and links, with the share of each peak figure that is reached in practice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

Sheet = TypeVar("Sheet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """FP8 figures of a device: the peak from the data sheet, and the shares of it that are reached, as in `Device`."""

    flops: float
    """Peak dense FP8 operations per second."""
    matmul: float
    """Share of these `flops` that large matrix products reach."""
    weights: float
    """Share of the device's `bandwidth` at which FP8 weights are read."""
    round_seconds: float
    """Seconds per layer to round activations, in steps of more than one token."""
    attention: float
    """Share of the device's 16-bit `flops` that attention reaches: its kernel converts keys and values to 16 bits."""
    cache: float
    """Share of the device's `bandwidth` at which an FP8 cache is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator: peak figures from the data sheet, and the shares that serving kernels reach."""

    name: str
    flops: float
    """Peak dense 16-bit operations per second."""
    bandwidth: float
    """Peak bytes per second of device memory."""
    memory: float
    """Bytes of device memory."""
    copy_rate: float
    """Bytes per second to or from pinned host memory, as reached in practice."""
    matmul: float
    """Share of `flops` that large matrix products reach."""
    attention: float
    """Share of `flops` that the attention of long prefills reaches."""
    weights: float
    """Share of `bandwidth` at which weights are read."""
    cache: float
    """Share of `bandwidth` at which the KV cache is read."""
    step_seconds: float
    """Fixed seconds of each step: launching, sampling, host work."""
    layer_seconds: float
    """Fixed seconds of each layer, besides its matrices and its attention."""
    link: str
    """The link between devices of one host."""
    scan: float = 0.066
    """Share of `flops` that the recurrence of long prompts reaches."""
    states: float = 0.78
    """Share of `bandwidth` at which decodes read and write recurrent states."""
    convolution: float = 0.30
    """Share of `bandwidth` that the convolutions of recurrent layers reach in long prompts.

    These three are of an H100, by layers of gated delta nets and of Mamba-2 (docs/benchmarks/hybrids.md). Other devices
    were not measured.
    """
    fp8: Fp8 | None = None
    """FP8 figures of the device. None before Hopper: the engine's FP8 weights and FP8 cache need Hopper."""


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices."""

    name: str
    rate: float
    """Bytes per second in one direction, as reached by collectives."""
    latency: float
    """Seconds that the shortest message takes."""

    def send(self, size: float) -> float:
        """Seconds to send a message of `size` bytes."""
        return self.latency + size / self.rate

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce of `size` bytes over `ranks` devices: 2 (n - 1) messages of 1/n each."""
        return 2 * (ranks - 1) * self.send(size / ranks) if ranks > 1 else 0.0


# Fitted to the measured gain of FP8 for a Llama-3-8B shape on an H200 (docs/notes/2026-11-21-fp8.md): `weights` and
# `round_seconds` to one and to many decodes, `matmul` to long prefills, `cache` to decode attention, `attention` to the
# attention of 8,192 tokens.
HOPPER_FP8 = Fp8(flops=1979e12, matmul=0.52, weights=0.66, round_seconds=8e-6, attention=0.31, cache=0.58)

# Fitted to measured profiles of three models: within 7% of them for 14 kinds of step, and 5 to 11% too fast for a
# prefill of 128 tokens alone; docs/notes/2026-11-21-derived-profiles.md has the table.
H200 = Device(
    name="h200", flops=989e12, bandwidth=4.8e12, memory=141e9, copy_rate=50e9,
    matmul=0.63, attention=0.55, weights=0.84, cache=0.91,
    step_seconds=0.25e-3, layer_seconds=9e-6, link="nvlink4", fp8=HOPPER_FP8,
)  # fmt: skip
# The PCIe card of Azure's NC A100 v4 with the papers' software of 2023 (PyTorch, xFormers, no graphs).
# `attention` is fitted to Vidur's measurements of chunks at contexts of 2k to 4k (the same page).
A100 = Device(
    name="a100-80gb", flops=312e12, bandwidth=1.935e12, memory=80e9, copy_rate=24e9,
    matmul=0.62, attention=0.34, weights=0.85, cache=0.85,
    step_seconds=0.5e-3, layer_seconds=30e-6, link="nvlink3",
)  # fmt: skip
DEVICES = {
    device.name: device
    for device in (
        H200,
        # Not measured: the H200's shares, applied to this device's peaks.
        replace(H200, name="h100", bandwidth=3.35e12, memory=80e9),
        A100,
        # `matmul` and `weights` are fitted to Vidur's measurements of Llama-2-70B layers, including the small kernels
        # between the matrices (docs/notes/2026-11-21-derived-profiles.md). The rest are the A100's shares.
        replace(
            A100, name="a40", flops=149.7e12, bandwidth=0.696e12, memory=48e9, matmul=0.67, weights=0.75, link="pcie4"
        ),
        # Not measured: the A100's shares.
        replace(A100, name="rtx-3090", flops=71e12, bandwidth=0.936e12, memory=24e9, link="pcie4"),
        replace(A100, name="rtx-4090", flops=165.2e12, bandwidth=1.008e12, memory=24e9, link="pcie4"),
        replace(A100, name="a6000", flops=154.8e12, bandwidth=0.768e12, memory=48e9, link="pcie4"),
    )
}

LINKS = {
    link.name: link
    for link in (
        Link("nvlink3", 230e9, 8e-6),
        Link("nvlink4", 370e9, 6e-6),
        # Measured by Vidur (the same page): all-reduces of four A100s bridged in pairs; all-reduces of four A40s
        # bridged in pairs; sends between A40s without a bridge; sends between nodes.
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


def look_up(kind: str, known: Mapping[str, Sheet], name: str) -> Sheet:
    """The entry of this name. Raises ValueError that lists the known names; `kind` names the kind of entry."""
    if name not in known:
        raise ValueError(f"{kind} {name} is unknown; there are {', '.join(sorted(known))}")
    return known[name]


def fp8_of(device: Device, option: str) -> Fp8:
    """The device's FP8 figures. Raises ValueError, naming the option that needs them, if it has none."""
    if device.fp8 is None:
        able = ", ".join(sorted(name for name, other in DEVICES.items() if other.fp8))
        raise ValueError(
            f"{option} is fp8, which takes a Hopper GPU or later ({able}), not {device.name}: leave it out"
        )
    return device.fp8
