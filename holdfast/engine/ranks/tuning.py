"""Tuning on the devices of an engine: the trainer of each rank, and how those of other ranks follow rank 0's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from holdfast.core.training_cost import MICRO_BATCHES
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.part import Allocated, DevicePart, Launched, part_of
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.parts.adapters.device import AdapterDevice
from holdfast.lm.parts.tuning.device import Training, TuningDevice, TuningExecutor
from holdfast.lm.parts.tuning.values import CallTaken, JobClosed, JobOpened, TrainingSlice
from holdfast.lm.types.news import PartNews
from holdfast.training.base import digest_of_shards
from holdfast.training.iteration import arena_of, workspace_bytes
from holdfast.training.state import mirror_directory
from holdfast.training.trainer import Trainer


def make_trainer(
    config: EngineConfig,
    model: Decoder,
    adapters: AdapterDevice,
    allocated: Allocated,
    *,
    wake: Callable[[], None] = lambda: None,
    leads: bool = True,
) -> Trainer:
    """The trainer of one rank. All ranks make theirs at the same time. For `wake` and `leads`, see `Trainer`."""
    return Trainer(
        model,
        arena_of(allocated.memory.cache, shared=config.layout.ranks > 1),
        base_digest=digest_of_shards(model, allocated.link),
        mirror=mirror_directory(config.tuning_mirror),
        pinning=adapters.store.packing,
        wake=wake,
        link=allocated.link,
        leads=leads,
        alone=longest_alone(config),
    )


def longest_alone(config: EngineConfig) -> int:
    """Most tokens of a datum that is a micro-batch by itself. A given micro-batch bounds it; a chosen one does not."""
    return config.tuning_micro_batch if config.tuning_micro_batch != "auto" else MICRO_BATCHES[-1]


def training_workspace(config: EngineConfig, model: Decoder) -> int:
    """Most bytes that units of the largest micro-batch take besides the cache. Measured for one sequence."""
    most = longest_alone(config)
    tokens = min(most, model.decoder.max_positions)
    return workspace_bytes(model, tokens, config.max_adapter_rank, dora=config.dora) * most // tokens


class Follower(Training):
    """A rank's trainer with the jobs that rank 0 has open. It opens each in a thread, and no slice of it runs before.

    News and slices come from one thread or two. A job is closed when no slice of it is under way.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._opener = ThreadPoolExecutor(1, "holdfast-open-job")
        self._opening: dict[str, Future[None]] = {}
        """The last thing that is read for a job; the thread does all in order."""

    def launch(self, slice_: TrainingSlice, lent: int) -> Launched:
        """`Trainer.launch`. Raises the error of opening the job."""
        self._wait(slice_.job)
        return self._trainer.launch(slice_, lent)

    def learn(self, news: PartNews) -> None:
        """Open or close a job, or take a call of one, if the news says so."""
        if isinstance(news, JobOpened):
            self._opening[news.job] = self._opener.submit(self._open, news)
        elif isinstance(news, CallTaken):
            before = [self._opening[news.job]] if news.job in self._opening else []
            self._opening[news.job] = self._opener.submit(self._take, news, before)
        elif isinstance(news, JobClosed):
            self._wait(news.job)
            self._trainer.close(news.job)

    def close(self) -> None:
        """End the thread."""
        self._opener.shutdown(wait=True, cancel_futures=True)

    def _open(self, news: JobOpened) -> None:
        self._trainer.open(Path(news.directory))
        step, _, _ = self._trainer.next_slice(news.job)
        if step != news.step:
            raise ValueError(f"job {news.job} is at step {step} on this rank, and at step {news.step} on rank 0")

    def _take(self, news: CallTaken, before: Sequence[Future[None]]) -> None:
        """Take a call as rank 0 did. Raises the error of what was read before, so that no slice runs after it."""
        for earlier in before:
            earlier.result()
        if news.refusal:
            self._trainer.refuse_call(news.job, news.number, news.refusal)
            return
        prepared = self._trainer.prepare_call(news.job, news.number)
        if prepared.loads:
            prepared = self._trainer.prepare_load(news.job, prepared)
        self._trainer.add_call(news.job, prepared)

    def _wait(self, job: str) -> None:
        if job in self._opening:
            self._opening.pop(job).result()


class FollowingExecutor(TuningExecutor[Follower]):
    """The training of a rank that follows rank 0."""

    def learn(self, news: PartNews) -> None:
        self.training.learn(news)

    def close(self) -> None:
        self.training.close()


class FollowingDevice(TuningDevice[Follower]):
    """The training of a rank other than the first, on its device."""

    def __init__(self, config: EngineConfig, model: Decoder, adapters: AdapterDevice) -> None:
        def follow(allocated: Allocated) -> Follower:
            return Follower(make_trainer(config, model, adapters, allocated, leads=False))

        super().__init__(follow, partial(training_workspace, config, model))

    def executor(self, allocated: Allocated) -> FollowingExecutor:
        return FollowingExecutor(allocated.memory.cache, self.make_training(allocated))


def following_parts(config: EngineConfig, model: Model, parts: Sequence[DevicePart]) -> Sequence[DevicePart]:
    """The tuning of a rank other than the first, if the configuration asks for it. `parts` are the rank's others."""
    if not config.tuning or not isinstance(model, Decoder):
        return []
    return [FollowingDevice(config, model, part_of(parts, AdapterDevice))]
