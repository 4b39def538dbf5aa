"""PaddedDevice: probes an unmodified model, measures its memory, and makes the executor of its rows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch

from holdfast.core.config import CoreConfig
from holdfast.core.stages import Stages
from holdfast.lm.copy_streams import stream_for
from holdfast.lm.devices import describe_device, memory_of, memory_of_others, taken_memory
from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.decode_graphs import (
    DecodeGraphs,
    MaskKind,
    position_bytes,
    probe_graphs,
)
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.encoder_decoder import EncoderDecoderDriver
from holdfast.lm.padded.executor import PaddedExecutor
from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.row_parts import RowPart
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.state_bytes import StateBytes
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import (
    BUDGET_TILE,
    QUANTUM,
    Abilities,
    EngineShape,
    LanguageDevice,
    MemoryMeasurement,
    RowBytes,
    RowShape,
    padded_columns,
    padded_rows,
    token_budget_of,
    whole_quanta,
)

CPU_STATE_BYTES = 4_000_000_000
"""Bytes for the states of all rows on a CPU, unless the config says otherwise."""
HOST_STATE_BYTES = 32_000_000_000
"""Most bytes for states on the host, unless the config says otherwise: other processes need memory."""
TRANSIT_BYTES = 1_000_000_000
"""Most bytes of host memory for states on a CPU if they go to tiers below, unless the config says otherwise."""
GRAPH_SHARE = 0.45
"""Largest share of the memory for states that captured decodes get for the batch. A row that joins uses the rest."""
WRITTEN_LENGTHS = (5, 21)
"""Lengths in tokens of the states that show whether a state can be written as bytes and read again."""
CHUNKED = ("stall-free", "chunked-only")
"""Schedulers that cut prompts into chunks, if the model can compute them that way."""
TOGETHER = ("run-to-completion", "request-level", "orca", "padded-batches")
"""Schedulers that put any number of whole prompts into a step."""
MEASURED_ROWS, MEASURED_WIDTH = 16, 256
"""Number of rows of measured decodes, and their width; decodes are also measured at twice the width. Memory grows
linearly in both.
"""
MEASURED_PROMPT = 4096
"""Longest whole prompt that is measured; half of it is measured, too. Longer ones are extrapolated linearly."""


Kind = TypeVar("Kind")


class Probed(NamedTuple):
    """The results of probing a model. They hold for every config."""

    driver: Driver
    layout: StateLayout
    abilities: Abilities
    masks: MaskKind | None
    """The kind of mask for captured decodes; None if decodes are not captured."""


class PaddedDevice(LanguageDevice):
    """`lm.types.LanguageDevice` for a model of Transformers, unmodified, on padded rows."""

    def __init__(
        self,
        model: UnmodifiedModel,
        config: CoreConfig,
        *,
        name: str = "",
        stages: Stages | None = None,
        probed: Probed | None = None,
        parts: Callable[[Driver], Sequence[RowPart]] = lambda driver: (),
    ) -> None:
        """`name` is the name under which the model is served. `stages` records the time of probing and measuring.

        `parts` makes the parts of steps, once it is known how the model is called. Raises ValueError as it does.

        Given `probed`, of another device over the same module, nothing is probed. Raises UnsupportedCheckpoint for a
        model that gives no right logits even alone.
        """
        self.model, self.config, self.name = model, config, name
        self._stages = stages or Stages(0.0, time.monotonic)
        self._sizes: MemoryMeasurement | None = None
        if probed is None:
            with self._stages.stage("probes"):
                probed = self._probe()
        self.driver, self.layout, self.abilities, self._masks = probed
        self.probed = probed
        """The results of probing, for other devices over this module."""
        if self.driver.model is not model:
            self.driver = copy.copy(self.driver)
            self.driver.model = model
        self.parts = tuple(parts(self.driver))
        self._settled = 0
        """Positions in the memory where captured decodes keep the batch, set by `measure`; 0 without that memory."""
        self.token_budget = token_budget_of(config, self.kind)

    def _probe(self) -> Probed:
        """Find out how the model is called, which parts its state has, and which ways to run it are right."""
        if self.model.is_encoder_decoder:
            encoder_decoder = EncoderDecoderDriver(self.model)
            return Probed(encoder_decoder, encoder_decoder.layout, encoder_decoder.probe(), None)
        driver = Driver(self.model)
        layout = StateLayout(()) if driver.keyword is None else StateLayout.discover(driver.run)
        abilities, masks = probe(driver, layout), None
        if self.kind == "cuda" and self.config.cuda_graphs and abilities.batched_decode:
            masks, why = probe_graphs(driver, layout)
            abilities = replace(abilities, graphs=masks is not None, not_captured=why)
        return Probed(driver, layout, abilities, masks)

    @property
    def kind(self) -> str:
        """ "cuda" or "cpu"."""
        return self.model.device.type

    @property
    def description(self) -> str:
        """The device in words."""
        return describe_device(self.model.device)

    @property
    def precision(self) -> str:
        """The type of weights, activations and state, in words."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def captures(self) -> bool:
        """Whether decodes run as captured CUDA graphs."""
        return self.abilities.graphs

    def part(self, kind: type[Kind]) -> Kind:
        """The part of this class. Raises LookupError if the device has none."""
        for part in self.parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"there is no {kind.__name__}")

    @property
    def host(self) -> None:
        """Always None: memory for states on the host is locked when it is needed."""
        return None

    @cached_property
    def row_bytes(self) -> RowBytes:
        """Bytes of the state of one row, or of its tokens, which are kept instead if the model gives no state out."""
        if self.abilities.keeps_state:
            return self.layout.row_bytes()
        return RowBytes(growing=((torch.int64.itemsize, None),))

    @property
    def chunked(self) -> bool:
        """Whether prompts are cut into chunks, so that a step has at most the token budget."""
        return self.abilities.chunks and self.config.scheduler in CHUNKED

    def compile(self) -> None:
        """Run each kind of forward once, because kernels are loaded and compiled at their first run."""
        self._decode_bytes(1, 1)

    def measure(self) -> MemoryMeasurement:
        """Measure the memory of the longest prefill and the widest decode, without weights and states. Sizes in bytes.

        `block` is one position (`RowBytes.position`). Raises MemoryError if not even one row would fit.
        """
        device, on_gpu = self.model.device, self.kind == "cuda"
        before = taken_memory(device)
        self.compile()
        if on_gpu:
            prefill, (fixed, share) = self._prefill_bytes(), self._decode_shares()
            torch.cuda.empty_cache()
            # Graphs share no working memory with other forwards.
            activations = max(prefill, fixed) + (fixed if self._masks else 0)
        else:
            self._prefill_bytes()
            activations, share = max(0, taken_memory(device) - before), 0.0
        free, total = memory_of(device)
        cache = self._state_bytes(free, total, activations, share)
        graphs = self._graph_bytes(cache)
        return MemoryMeasurement(
            device=describe_device(device),
            total=total,
            weights=self.model.weight_bytes,
            activations=activations + graphs,
            cache=cache - graphs,
            block=self.row_bytes.position,
            host_cache=self._host_bytes(),
        )

    def allocate(self, sizes: MemoryMeasurement) -> EngineShape:
        """Make the executor for these sizes, once. Returns the shape, with `rows`. Raises MemoryError."""
        shape = RowShape(
            memory=sizes.cache,
            bytes=self.row_bytes,
            abilities=self.abilities,
            host_memory=sizes.host_cache,
            quantum=QUANTUM,
            settled=self._settled,
            longest=self.model.max_model_len,
        )
        self._check_one_row(sizes.cache, "")
        self._sizes = sizes
        spec = self.model
        engine = EngineShape(
            model=self.name,
            precision=self.precision,
            num_blocks=shape.positions,
            num_host_blocks=sizes.host_cache // self.row_bytes.position,
            token_budget=self.token_budget,
            max_step_tokens=self._max_step_tokens(sizes),
            max_model_len=shape.longest_row(self.model.max_model_len),
            vocab_size=spec.vocab_size,
            eos_token_ids=spec.eos_token_ids,
            tile=BUDGET_TILE[self.kind],
            executor="padded",
            rows=shape,
        )
        for part in self.parts:
            engine = part.shaped(engine)
        return engine

    @cached_property
    def executor(self) -> PaddedExecutor:
        """The executor over the allocated rows. Raises RuntimeError before `allocate`."""
        if self._sizes is None:
            raise RuntimeError("the device has no memory for rows yet: call allocate first")
        device, room = self.model.device, self._sizes.host_cache
        host = HostRows(self.layout, room, device, row_bytes=self.row_bytes) if room else None
        rows = RunningRows(self.layout, self.config.plan_rows, device)
        graphs = None
        if self._masks is not None and self._settled:
            graphs = DecodeGraphs(
                self.driver, self.layout, self.config.most_sequences, self._settled, masks=self._masks
            )
        rules = [each for part in self.parts for each in part.row_rules(self.config.plan_rows, device)]
        work = [each for part in self.parts for each in part.row_work(lambda: stream_for(device))]
        return PaddedExecutor(self.driver, self.abilities, rows, host, graphs=graphs, rules=rules, work=work)

    def host_states(self) -> tuple[StateBytes, HostRows]:
        """How states on the host are written as bytes, and where they are. For tiers below the host.

        Raises ValueError for a state that cannot be written, or that is another one once it is read again, and
        RuntimeError without memory for states on the host.
        """
        host, cpu = self.executor.host, torch.device("cpu")
        if host is None:
            raise RuntimeError("the device keeps no states on the host")
        template, other = (self.layout.to(self.driver.run(1, tokens), cpu) for tokens in WRITTEN_LENGTHS)
        codec = StateBytes(self.layout, template)
        codec.check(other, WRITTEN_LENGTHS[1])
        return codec, host

    def _max_step_tokens(self, sizes: MemoryMeasurement) -> int:
        """Largest number of tokens in one step; above the budget if prompts are computed whole.

        Many prompts may use up to half of the memory for states for their activations. Then fewer rows run in that
        step.
        """
        longest, most = self.model.max_model_len, self.config.most_sequences
        if self.chunked:
            return self.token_budget
        least = max(self.token_budget, longest + most)
        if self.config.scheduler not in TOGETHER:
            return least
        token = max(1, sizes.activations // longest)
        return max(least, min(longest * most, sizes.cache // 2 // token))

    def _row(self, length: int) -> int:
        """Bytes of a row of `length` positions in the batch."""
        return self.row_bytes.of(whole_quanta(length))

    def _forward_bytes(self, rows: int, tokens: int, start: int = 0) -> int:
        """Temporary bytes of a forward of these rows after `start` positions; 0 on a CPU.

        A forward of one token is measured with a mask, because decodes have rows of different lengths.
        """
        ids = self.driver.text(rows, start + tokens)
        on_gpu, device = self.kind == "cuda", self.model.device
        state = None
        if start and self.abilities.keeps_state:
            state = self.driver.forward(self.driver.inputs(ids[:, :start]), None)[1]
            ids = ids[:, start:]
        else:
            start = 0
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        inputs = self.driver.inputs(ids, start)._replace(padded=tokens == 1)
        logits, state = self.driver.forward(inputs, state)
        logits.argmax(-1).tolist()
        if not on_gpu:
            return 0
        kept = torch.cuda.memory_allocated(device)
        return max(0, torch.cuda.max_memory_allocated(device) - max(before, kept))

    def _prefill_bytes(self) -> int:
        """Temporary bytes of the longest prefill: measured at two lengths and extrapolated linearly."""
        most = self.model.max_model_len
        if self.chunked:
            chunk = max(1, min(self.token_budget, most // 2))
            first, second, rest = self._forward_bytes(1, chunk), self._forward_bytes(1, chunk, chunk), most - 2 * chunk
        else:
            chunk = max(1, min(MEASURED_PROMPT, most) // 2)
            first, second, rest = self._forward_bytes(1, chunk), self._forward_bytes(1, 2 * chunk), most - 2 * chunk
        return max(first, second + max(0, second - first) * rest // chunk)

    def _decode_bytes(self, rows: int, width: int) -> int:
        """Temporary bytes of a decode of `rows` rows of this width."""
        return self._forward_bytes(rows, 1, width)

    def _decode_shares(self) -> tuple[int, float]:
        """Temporary bytes of a decode of `max_sequences` rows at any width, and those per byte of the rows' states."""
        most = self.config.most_sequences
        rows = min(MEASURED_ROWS, most) if self.abilities.batched_decode else 1
        width = max(1, min(MEASURED_WIDTH, self.model.max_model_len // 2 - 1))
        narrow, wide = self._decode_bytes(rows, width), self._decode_bytes(rows, 2 * width)
        grown = rows * (self.row_bytes.of(2 * width) - self.row_bytes.of(width))
        share = max(0, wide - narrow) / grown if grown else 0.0
        fixed = max(0, narrow - int(share * rows * self.row_bytes.of(width)))
        return fixed * (most if self.abilities.batched_decode else 1) // rows, share

    def _state_bytes(self, free: int, total: int, activations: int, share: float) -> int:
        """Bytes for the states of all rows. Raises MemoryError for a size that is not free, or is less than a row."""
        config, device = self.config, self.model.device
        if config.cache_bytes is not None:
            size = config.cache_bytes
        elif self.kind == "cuda":
            left = int(total * config.memory_fraction) - memory_of_others(device, free, total, config.memory_reserved)
            # A prompt of the longest kind may need more than there is. Then fewer rows run at the same time.
            size = int((left - min(activations, max(0, left) // 2)) / (1 + share))
        else:
            size = min(CPU_STATE_BYTES, free // 2)
        place = f"of {total / 1e9:.1f} GB on {describe_device(device)} {free / 1e9:.1f} are free"
        if size > free:
            raise MemoryError(f"cache_gb is {config.cache_gb}: {place}; lower it, or leave it out")
        self._check_one_row(size, f": {place} and a step takes {activations / 1e9:.2f}")
        return size

    def _graph_bytes(self, cache: int) -> int:
        """Bytes, out of those for states, of the memory in which captured decodes keep the batch.

        States are counted without it: a batch that outgrows it, or is on its way in, is outside.
        """
        self._settled = 0
        rows, each = padded_rows(self.config.most_sequences), position_bytes(self.layout)
        fixed = rows * self.row_bytes.fixed
        room = int(cache * GRAPH_SHARE) - fixed
        if self._masks is None or room < 0:
            return 0
        if not each:
            self._settled = 1
            return fixed
        positions = min(room // each, rows * padded_columns(self.model.max_model_len, 1 << 60))
        if positions < padded_columns(1, self.model.max_model_len):
            return 0
        self._settled = positions
        return positions * each + fixed

    def _check_one_row(self, size: int, why: str) -> None:
        least = self._row(1)
        if size < least:
            raise MemoryError(
                f"{max(size, 0) / 1e9:.4f} GB are left for the states of rows, and one row takes at least "
                f"{least / 1e9:.4f} GB{why}; raise cache_gb or memory_fraction, or lower token_budget"
            )

    def _host_bytes(self) -> int:
        """Bytes for states on the host. Raises MemoryError for more than the host has."""
        wanted, size = self.config.host_cache_gb, self.config.host_cache_bytes
        free, total = memory_of(torch.device("cpu"))
        if size is None:
            if self.kind == "cuda":
                return min(HOST_STATE_BYTES, free // 4)
            # On a CPU both tiers are the same memory, and the host tier is only where states pass through.
            return min(TRANSIT_BYTES, free // 4) if self.config.moves_blocks else 0
        if size > free:
            raise MemoryError(
                f"host_cache_gb is {wanted}: of {total / 1e9:.1f} GB of host memory {free / 1e9:.1f} are free; choose "
                "a smaller size, 0 for none, or auto"
            )
        return size
