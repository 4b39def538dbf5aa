"""Functions that benchmarks of padded rows share: one unmodified model in memory, and engines over it, one by one."""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.in_real_time import WallClock
from holdfast.core.stages import Stages
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.run import Clients
from holdfast.lab.workloads import Conversation, Turn, Workload
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.device import PaddedDevice, Probed
from holdfast.lm.padded.loading import UnmodifiedModel, load_unmodified
from holdfast.lm.types import EngineShape, LanguageExecutor, LanguageLoop, SchedulerStats
from holdfast.loop.loop import Loop

LLAMA_2_7B: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=11008,
    num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, head_dim=128, vocab_size=32000,
    max_position_embeddings=16384, rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, hidden_act="silu",
    tie_word_embeddings=False, torch_dtype="float16",
)  # fmt: skip
LLAMA_3_8B = LLAMA_2_7B | dict(
    intermediate_size=14336, num_key_value_heads=8, vocab_size=128256, rope_theta=500000.0, torch_dtype="bfloat16"
)
TINY = LLAMA_2_7B | dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    head_dim=16, vocab_size=512,
)  # fmt: skip
"""A shape for a trial on a CPU."""


GRACE = 60.0
"""Seconds after the limit of a run at which the process ends, with its stack, because a step has not come back."""


@dataclass(frozen=True)
class Served:
    """The result of a workload that an engine has served here."""

    records: list[Record]
    """Records of the requests that ended."""
    seconds: float
    """Seconds from the start until the last request ended, or until the run was cut."""
    steps: int
    stats: SchedulerStats
    cut: bool = False
    """Whether the run took longer than allowed. Requests that had not ended were aborted."""


@contextmanager
def directory_of(config: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint directory with only this config.json, for random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        yield directory


class RowEngines:
    """One unmodified model with random weights, on the GPU if there is one, and engines over it, one after another.

    The first engine probes the model; later ones use its findings.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        began = time.monotonic()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with directory_of(config) as directory:
            self.model: UnmodifiedModel = load_unmodified(directory, device=device, load_format="random")
        self.vocab_size = self.model.vocab_size
        self._probed: Probed | None = None
        progress(f"loaded in {time.monotonic() - began:.1f} s")

    @contextmanager
    def engine(
        self,
        longest: int,
        *,
        wrap: Callable[[LanguageExecutor], LanguageExecutor] = lambda executor: executor,
        **options: Any,
    ) -> Iterator[tuple[LanguageLoop, EngineShape, PaddedDevice]]:
        """An engine for rows of up to `longest` tokens. Its memory is given back at the end."""
        began = time.monotonic()
        stages = Stages(began, time.monotonic)
        config = EngineConfig(
            **{"executor": "padded", "prefix_sharing": False, "host_cache_gb": 0, "max_model_len": longest, **options}
        )
        model = replace(self.model, max_model_len=longest)
        device = PaddedDevice(model, config, name=model.architecture, stages=stages, probed=self._probed)
        self._probed = device.probed
        shape = device.allocate(device.measure())
        scheduler = make_scheduler(config, shape, None)
        executor: LanguageExecutor = device.executor
        loop: LanguageLoop = Loop(
            scheduler, wrap(executor), config.steps_in_flight, time.monotonic, prepare=device.executor.prepare
        )
        probes = sum(stage.end - stage.begin for stage in stages.done)
        progress(
            f"engine in {time.monotonic() - began:.1f} s, of which probes {probes:.1f}; "
            f"{'captured' if device.captures else 'not captured'} {device.abilities.not_captured}"
        )
        try:
            yield loop, shape, device
        finally:
            executor.close()
            loop.executor = executor
            del loop, scheduler, device, executor
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


STARTED = time.monotonic()


def progress(text: str) -> None:
    """Print a line with the seconds since the process began."""
    print(f"[{time.monotonic() - STARTED:6.1f}] {text}", flush=True)


def serve(loop: LanguageLoop, workload: Workload, vocab_size: int, *, limit: float = math.inf) -> Served:
    """Serve the workload through the loop, in this thread, in real time. Answers have their full length.

    After `limit` seconds the run is cut. A step that has not come back `GRACE` seconds later ends the process.
    """
    clock = WallClock()
    clients = Clients(workload, loop, clock, vocab_size=vocab_size, concurrency=None)
    if limit < math.inf:
        faulthandler.dump_traceback_later(limit + GRACE, exit=True)
    try:
        going = clients.advance()
        while going and clock() < limit:
            going = clients.advance()
        seconds = clock()
        unfinished = {id(each.record) for each in clients._open.values()}
        for name in list(clients._open):
            loop.abort(name)
        while loop.has_work():
            loop.step()
    finally:
        faulthandler.cancel_dump_traceback_later()
    records = [record for record in clients.records if id(record) not in unfinished]
    return Served(records, seconds, clients.steps, loop.stats(), cut=going)


def warm(loop: LanguageLoop, rows: int, longest: int, vocab_size: int, *, limit: float = math.inf) -> None:
    """Load kernels and capture graphs: let batches of each width drain row by row."""
    ends = [2 + 2 * row for row in range(rows)]
    for columns in range(256, longest + 256, 256):
        prompt = min(columns - 64, longest) - ends[-1]
        if prompt > 0:
            serve(loop, [Conversation(0.0, (Turn(prompt, end),)) for end in ends], vocab_size, limit=limit)
        while loop.prepare():
            pass
