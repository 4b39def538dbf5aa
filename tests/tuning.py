"""Tiny base models and jobs, and a driver that cuts training into slices, for tests of tuning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.parts.tuning.values import TrainingAction, TrainingReport, TrainingSlice
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, write_examples
from holdfast.training.done import JobFailure, StepReport
from holdfast.training.iteration import Arena, arena_of
from holdfast.training.jobs import Hyperparameters, TrainingJob
from holdfast.training.state import write_job
from holdfast.training.trainer import Trainer
from tests.checkpoints import TINY_VOCAB, tiny

BLOCKS = 400
BASE = "base-digest"


def native(family: str, directory: Path, **differences: Any) -> tuple[Any, Decoder]:
    """Transformers' module of a tiny model, and the native decoder with the same float32 weights."""
    module = tiny(family, **differences)
    module.save_pretrained(directory)
    model = load(directory, device="cpu", dtype="float32")
    assert isinstance(model, Decoder)
    return module, model


def cache_of(model: Decoder, num_blocks: int = BLOCKS) -> KVCache:
    spec = model.spec
    return KVCache.allocate(
        layers=spec.num_layers, num_blocks=num_blocks, block_size=16, num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, dtype=spec.dtype, device=spec.device,
    )  # fmt: skip


def arena_for(model: Decoder, num_blocks: int = BLOCKS) -> Arena:
    return arena_of(cache_of(model, num_blocks))


def drawn_examples(count: int, seed: int = 1, longest: int = 30) -> list[tuple[list[int], list[float]]]:
    """Random tokens; of each example a part at the end is learned."""
    chance = random.Random(seed)
    examples = []
    for _ in range(count):
        length = chance.randint(4, longest)
        ids = [chance.randrange(1, TINY_VOCAB) for _ in range(length)]
        begin = chance.randrange(0, length - 1)
        examples.append((ids, [0.0] * begin + [1.0] * (length - begin)))
    return examples


def new_job(
    directory: Path,
    *,
    name: str = "job",
    examples: Sequence[tuple[list[int], list[float]]] | None = None,
    validation: Sequence[tuple[list[int], list[float]]] = (),
    **chosen: Any,
) -> Path:
    """A job's directory, ready to be opened."""
    directory = directory / name
    directory.mkdir(parents=True)
    data = write_examples(directory / EXAMPLES_FILE, drawn_examples(10) if examples is None else examples)
    held_out = write_examples(directory / VALIDATION_FILE, validation) if validation else ""
    values: dict[str, Any] = dict(epochs=2, batch_size=4, micro_batch=60, rank=4, alpha=8.0, learning_rate=0.01)
    job = TrainingJob(
        id=name,
        hyperparameters=Hyperparameters(**{**values, **chosen}),
        base_model="base",
        base_digest=BASE,
        data_digest=data,
        validation_digest=held_out,
        threads=torch.get_num_threads(),
    )
    write_job(directory, job)
    return directory


def trainer_for(
    model: Decoder,
    *,
    mirror: Path | None = None,
    arena: Arena | None = None,
    wake: Callable[[], None] = lambda: None,
    alone: int = 0,
) -> Trainer:
    return Trainer(model, arena or arena_for(model), base_digest=BASE, mirror=mirror, wake=wake, alone=alone)


def act(trainer: Trainer, job: str, action: TrainingAction, lent: int = BLOCKS) -> TrainingReport:
    """An action on a job, where it stands."""
    step, micro_batch, _ = trainer.next_slice(job)
    return trainer.run(TrainingSlice(job, step, micro_batch, action), lent)


def advance(
    trainer: Trainer,
    job: str,
    units: int | None = None,
    *,
    keep: bool = True,
    lent: int = BLOCKS,
) -> TrainingReport:
    """The next units of a resident job's micro-batch; None: all that are left of it."""
    step, micro_batch, first = trainer.next_slice(job)
    last = len(trainer.steps(job).micro_batches(step)[micro_batch].units)
    stop = last if units is None else min(last, first + units)
    return trainer.run(TrainingSlice(job, step, micro_batch, "run", first, stop, keep), lent)


def finish(trainer: Trainer, job: str, between: Callable[[], None] = lambda: None) -> list[float]:
    """Run a resident job to its end, a micro-batch at a time; the losses of its steps."""
    losses = []
    while trainer.next_slice(job)[0] < trainer.steps(job).count:
        if (loss := advance(trainer, job).loss) is not None:
            losses.append(loss)
        between()
    return losses


def vectors_of(trainer: Trainer, job: str) -> list[torch.Tensor]:
    """Copies of the stored parameters and moments of an open job."""
    act(trainer, job, "offload")
    return [trainer.host_vector(job, name).clone() for name in ("params", "means", "variances")]


def step_reports(trainer: Trainer) -> list[StepReport]:
    """The stored steps since the last call, of jobs that have not failed."""
    reports = trainer.reports()
    assert not [report for report in reports if isinstance(report, JobFailure)]
    return [report for report in reports if isinstance(report, StepReport)]


def diverge(params: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
    """An update that makes parameters that are not finite, in place of `adamw_step`."""
    for each in params:
        each.fill_(torch.inf)
    return torch.ones(())
