"""Time the kernels of recurrent layers on a GPU: decode steps against the device's bandwidth, and prompts.

    python -m benchmarks.kernels.recurrent [--decodes 1 32 128] [--prompts 2048 8192] [--layer delta mamba] [--tune]
                                           [--out result.jsonl]
    TRITON_INTERPRET=1 python -m benchmarks.kernels.recurrent --tiny      # a trial on a CPU

The gated delta rule has Qwen3.5's sizes (16 key heads, 32 value heads, 128 dimensions, convolutions of 4 tokens over
8,192 channels), Mamba-2 those of Mamba-2 2.7B (80 heads of 64 dimensions, states of 128, 5,376 channels). Inputs are
random, in bf16. A figure is the median of 20 replays of one CUDA graph, whose calls go through the states of as many
layers as pass by L2, as a model does.

For a decode step, `share` is the time of copying its states, read and written, over that of the kernel. For a prompt,
`tokens_per_s` counts one layer with its convolution. `--tune` times launches other than the rule's. Writes one JSON
line for each measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.gemv_gpu import RING_BYTES, captured, copy_rate, milliseconds
from benchmarks.lib.invocation import provenance
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.recurrent.tiles import WorkLists
from holdfast.lm.kernels.recurrent.triton_recurrence import Inputs, Launch, TritonRecurrence

STEP_LAUNCHES = [Launch(block, warps) for block in (8, 16, 32, 64, 128) for warps in (1, 2, 4, 8)]
SCAN_LAUNCHES = [Launch(block, 4, stages) for block in (16, 32, 64) for stages in (1, 2, 3)]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one kind of layer."""

    delta: bool
    groups: int
    heads: int
    key_dim: int
    value_dim: int
    width: int = 4

    @property
    def channels(self) -> int:
        """Channels of the convolution: those of all queries, keys and values."""
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in one layer, without the convolution's."""
        return 4 * self.heads * self.key_dim * self.value_dim


LAYERS = {"delta": Sizes(True, 16, 32, 128, 128), "mamba": Sizes(False, 1, 80, 128, 64)}
TINY = {"delta": Sizes(True, 1, 2, 16, 16), "mamba": Sizes(False, 1, 2, 16, 16)}


class Tuned(TritonRecurrence):
    """The backend with other launch settings; None leaves those of the rule."""

    def __init__(self, device: torch.device, step: Launch | None = None, scan: Launch | None = None) -> None:
        super().__init__(device)
        self.step, self.scan = step, scan

    def step_launch(self, inputs: Inputs) -> Launch:
        return self.step or super().step_launch(inputs)

    def scan_launch(self, inputs: Inputs) -> Launch:
        return self.scan or super().scan_launch(inputs)


class Work:
    """Segments of one batch, with the states of several layers."""

    def __init__(self, sizes: Sizes, lengths: Sequence[int], device: torch.device, ring_bytes: int) -> None:
        self.sizes, self.device, rows = sizes, device, len(lengths)
        # Triton's interpreter has no products of bfloat16.
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.segments = Segments(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            np.array(lengths, np.int32),
            np.arange(rows, dtype=np.int32),
        )
        self.tokens = sum(lengths)
        self.layers = max(2, -(-ring_bytes // (rows * sizes.state_bytes))) if self.tokens == rows else 2
        shape = (sizes.key_dim, sizes.value_dim) if sizes.delta else (sizes.value_dim, sizes.key_dim)
        self.states = torch.zeros(self.layers, rows, sizes.heads, *shape, device=device)
        self.kept = self.random(self.layers, rows, sizes.channels, sizes.width - 1)
        self.x, self.weight = self.random(self.tokens, sizes.channels), self.random(sizes.channels, sizes.width)

    def random(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=self.device).normal_()

    def convolutions(self, backend: TritonRecurrence, metadata: WorkLists) -> list[Call]:
        return [
            partial(backend.convolve, self.x, self.weight, None, state, metadata, activation="silu")
            for state in self.kept
        ]

    def recurrences(self, backend: TritonRecurrence, metadata: WorkLists) -> list[Call]:
        """One call for each layer; queries, keys and values are views of one tensor, as after a convolution."""
        sizes, tokens = self.sizes, self.tokens
        width = sizes.groups * sizes.key_dim
        first, second, last = self.random(tokens, sizes.channels).split([width, width, sizes.channels - 2 * width], 1)
        query, key = (each.view(tokens, sizes.groups, sizes.key_dim) for each in (first, second))
        value = last.view(tokens, sizes.heads, sizes.value_dim)
        rate = torch.rand(tokens, sizes.heads, device=self.device)
        if sizes.delta:
            decay, beta = -rate, rate.to(self.dtype)
            arguments = dict(scale=sizes.key_dim**-0.5, normalize=True)
            return [
                partial(backend.gated_delta, query, key, value, decay, beta, state, metadata, **arguments)
                for state in self.states
            ]
        decay, skip = -torch.rand(sizes.heads, device=self.device), torch.rand(sizes.heads, device=self.device)
        return [
            partial(backend.selective_scan, value, rate, decay, key, query, skip, state, metadata)
            for state in self.states
        ]

    def microseconds(self, calls: Sequence[Call]) -> float:
        """Microseconds of one call, with all calls in turn."""

        def run() -> None:
            for call in calls:
                call()

        if self.device.type == "cuda":
            return 1e3 * milliseconds(captured(run)) / len(calls)
        began = time.perf_counter()
        run()
        return 1e6 * (time.perf_counter() - began) / len(calls)

    def metadata(self, backend: TritonRecurrence, *, reserved: bool) -> WorkLists:
        """Metadata as a decode graph's, of just this size, or as an eager step's."""
        if not reserved:
            return backend.make_metadata(self.segments)
        metadata = backend.reserve(len(self.segments.row))
        if not backend.refill(metadata, self.segments):
            raise RuntimeError(f"metadata reserved for {len(self.segments.row)} segments has no room for them")
        return metadata


def decode(work: Work, rate: float | None, launches: Sequence[Launch | None]) -> Iterator[dict[str, Any]]:
    """A decode step by launch. `rate` is the rate of a copy in TB/s, if there is a GPU."""
    for launch in launches:
        backend = Tuned(work.device, step=launch)
        metadata = work.metadata(backend, reserved=True)
        us = work.microseconds(work.recurrences(backend, metadata))
        line: dict[str, Any] = dict(kind="decode", batch=work.tokens, launch=str(launch), us=round(us, 2))
        moved = 2 * work.tokens * work.sizes.state_bytes
        if rate is not None:
            line |= dict(TB_per_s=round(moved / us / 1e6, 3), share=round(moved / rate / 1e6 / us, 3))
        if launch is None:
            line["convolution_us"] = round(work.microseconds(work.convolutions(backend, metadata)), 2)
        yield line


def prompt(work: Work, launches: Sequence[Launch | None]) -> Iterator[dict[str, Any]]:
    """A step of one prompt by launch."""
    for launch in launches:
        backend = Tuned(work.device, scan=launch)
        metadata = work.metadata(backend, reserved=False)
        try:
            us = work.microseconds(work.recurrences(backend, metadata))
        except OutOfResources:
            continue
        line: dict[str, Any] = dict(kind="prompt", tokens=work.tokens, launch=str(launch), us=round(us, 1))
        if launch is None:
            convolution = work.microseconds(work.convolutions(backend, metadata))
            line |= dict(
                convolution_us=round(convolution, 1), tokens_per_s=round(1e6 * work.tokens / (us + convolution))
            )
        yield line


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decodes", nargs="*", type=int, default=[1, 32, 128], help="sequences of a decode step")
    parser.add_argument("--prompts", nargs="*", type=int, default=[2048, 8192], help="tokens of a prompt")
    parser.add_argument("--layer", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tune", action="store_true", help="also time other launches than the rule's")
    parser.add_argument("--tiny", action="store_true", help="little of everything: a trial on a CPU")
    parser.add_argument("--out", type=Path, help="write every measurement here, a JSON line each")
    args = parser.parse_args()
    if not all(size > 0 for size in (*args.decodes, *args.prompts)):
        parser.error(f"--decodes is {args.decodes} and --prompts is {args.prompts}; each must be at least 1")
    torch.manual_seed(0)
    device = torch.device("cpu" if args.tiny else "cuda")
    rate = None if args.tiny else copy_rate()
    lines = [provenance() | (dict() if rate is None else dict(copy_TB_per_s=round(rate, 3)))]
    print(json.dumps(lines[0]), flush=True)

    def report(layer: str, found: Iterator[dict[str, Any]]) -> None:
        for line in found:
            lines.append(dict(layer=layer, **line))
            print(json.dumps(lines[-1]), flush=True)

    step_launches = [None, *(STEP_LAUNCHES if args.tune else ())]
    scan_launches = [None, *(SCAN_LAUNCHES if args.tune else ())]
    for layer in args.layer:
        sizes, ring = (TINY[layer], 0) if args.tiny else (LAYERS[layer], RING_BYTES)
        for batch in args.decodes:
            report(layer, decode(Work(sizes, [1] * batch, device, ring), rate, step_launches))
        for tokens in args.prompts:
            report(layer, prompt(Work(sizes, [tokens], device, ring), scan_launches))
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
