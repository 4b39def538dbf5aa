"""What benchmarks of padded rows share: one unmodified model in memory, and engines over it, one after another."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from in_real_time import WallClock

from holdfast.core.config import EngineConfig
from holdfast.core.stages import Stages
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.run import Clients
from holdfast.lab.workloads import Workload
from holdfast.lm.padded.device import PaddedDevice
from holdfast.lm.padded.loading import UnmodifiedModel, load_unmodified
from holdfast.lm.scheduler.choice import make_scheduler
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
"""For a trial on a CPU."""


@dataclass(frozen=True)
class Served:
    """A workload as an engine has served it here."""

    records: list[Record]
    seconds: float
    """From the start until the last request ended."""
    steps: int
    stats: SchedulerStats


@contextmanager
def directory_of(config: dict[str, Any]) -> Iterator[Path]:
    """A checkpoint directory with this config.json alone, for random weights."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        yield directory


def load_rows(config: dict[str, Any]) -> UnmodifiedModel:
    """The model of this config.json with random weights, in its own type, on the GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with directory_of(config) as directory:
        return load_unmodified(directory, device=device, load_format="random")


@contextmanager
def row_engine(
    model: UnmodifiedModel,
    *,
    wrap: Callable[[LanguageExecutor], LanguageExecutor] = lambda executor: executor,
    **options: Any,
) -> Iterator[tuple[LanguageLoop, EngineShape, PaddedDevice]]:
    """An engine over the model with these options. Its memory is given back at the end."""
    config = EngineConfig(**{"executor": "padded", "prefix_sharing": False, "host_cache_gb": 0, **options})
    device = PaddedDevice(model, config, name=model.architecture, stages=Stages(0.0, time.monotonic))
    if device.captures:
        device.compile()
    shape = device.allocate(device.measure())
    scheduler = make_scheduler(config, shape, None)
    executor: LanguageExecutor = device.executor
    loop: LanguageLoop = Loop(
        scheduler, wrap(executor), config.steps_in_flight, time.monotonic, prepare=device.executor.prepare
    )
    try:
        while loop.prepare():  # graphs that a server would capture in its first pause
            pass
        yield loop, shape, device
    finally:
        executor.close()
        loop.executor = executor
        del loop, scheduler, device, executor
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def serve(loop: LanguageLoop, workload: Workload, vocab_size: int) -> Served:
    """Serve the workload through the loop, in this thread, in real time. Answers have their full length."""
    clock = WallClock()
    clients = Clients(workload, loop, clock, vocab_size=vocab_size, concurrency=None)
    while clients.advance():
        pass
    return Served(clients.records, clock(), clients.steps, loop.stats())
