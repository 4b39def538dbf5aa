"""The tiers below the host tier: threads move their blocks, and their jobs are handed over between two steps."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.handler import Handler
from holdfast.engine.process.part_builder import PartBuilder, Served, Site, refuse_excluded
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.paged import code_of, weights_of
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.disk_store import DiskStore
from holdfast.lm.execution.host_memory import HostBlocks, HostPart
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.execution.state_pieces import StatePieces
from holdfast.lm.execution.tier_threads import TierThreads
from holdfast.lm.memory.retention import EVICTIONS
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.tiers import LowerShape, Outcome, TierDone, TierJob, piece_bytes
from holdfast.lm.types import EngineShape, LanguageLoop, StateShape
from holdfast.loop.contracts import Clock
from holdfast.training.base import digest_of_module

log = logging.getLogger("holdfast.engine")

CHECK_SECONDS = 3.0
"""How long a start waits for the remote tier's first answer."""
PAUSE = 0.002
"""Seconds between two looks at the threads while state is flushed."""


class Threads(Protocol):
    """Does jobs while the loop runs: `holdfast.lm.execution.tier_threads.TierThreads`."""

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and was not taken."""
        ...

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs."""
        ...

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        ...

    @property
    def trouble(self) -> str:
        """The reason why the remote tier does not work; empty if it works, or if there is none."""
        ...

    def close(self) -> None:
        """Stop after the jobs that have begun."""
        ...


class TierHandler(Handler):
    """Connects a scheduler, which decides what to move, and the threads that move it."""

    def __init__(self, scheduler: Scheduler, threads: Threads, clock: Clock) -> None:
        self._scheduler, self._threads, self._clock = scheduler, threads, clock
        self._part = scheduler.part(TierPart)

    @property
    def busy(self) -> bool:
        return self._threads.busy

    @property
    def ready(self) -> bool:
        return self._part.has_news

    @property
    def awaited(self) -> bool:
        return self._part.awaited

    def exchange(self) -> None:
        """Report moved blocks to the scheduler, and begin the moves that it wants."""
        now, ended = self._clock(), self._threads.take()
        if ended:
            self._part.done(ended, now)
        self._threads.start(self._part.jobs(now))

    def answers(self) -> Sequence[messages.FromEngine]:
        self.exchange()
        return ()

    def flush(self, loop: LanguageLoop, seconds: float) -> None:
        """End all requests, and write idle state to the tiers below the host, for at most this long.

        Then the disk's files get the last use of each block, for the next start. Logs a warning if the time did not
        suffice.
        """
        self._scheduler.abort_all()
        lower, deadline = self._part.lower, time.monotonic() + seconds
        self._work(loop, deadline)
        lower.renew()
        self._work(loop, deadline)
        if time.monotonic() >= deadline and (lower.unwritten or lower.unflushed):
            log.warning(
                "holdfast: %g s did not suffice to write all state to the lower tiers: %d blocks or states of the "
                "host%s are left; they are computed again after a restart",
                seconds, lower.unwritten, " and more of the device" if lower.unflushed else "",
            )  # fmt: skip

    def _work(self, loop: LanguageLoop, deadline: float) -> None:
        """Move state until none is left to move, or until the deadline."""
        while time.monotonic() < deadline:
            self.exchange()
            if loop.has_work():
                loop.step()
            elif self.busy:
                time.sleep(PAUSE)
            else:
                return


class JoinedThreads:
    """The threads that move KV blocks, and those that move recurrent states (`Threads`)."""

    def __init__(self, blocks: TierThreads, states: TierThreads) -> None:
        self._blocks, self._states = blocks, states

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and was not taken."""
        return self._blocks.busy or self._states.busy

    @property
    def trouble(self) -> str:
        """The reason why the remote tier does not work; empty if it works, or if there is none."""
        return self._blocks.trouble

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs. A job of a state names its state."""
        jobs = [*jobs]
        self._states.start([job for job in jobs if job.state.pieces])
        self._blocks.start([job for job in jobs if not job.state.pieces])

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        return [*self._states.take(), *self._blocks.take()]

    def close(self) -> None:
        """Stop after the jobs that have begun."""
        self._states.close()
        self._blocks.close()


class RemoteBuilder(PartBuilder):
    """Refuses a remote tier to an engine that cannot have one. `TierBuilder` builds it with the disk."""

    name = "remote tier"

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return bool(config.remote_cache)

    def allocated(self, shape: EngineShape) -> EngineShape:
        """Raises ValueError."""
        refuse_excluded([RemoteBuilder], self.site)
        return shape


class TierBuilder(PartBuilder):
    """Builds the threads that move blocks between the host tier and the tiers below it."""

    name = "lower tiers"

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.lower_tiers

    def allocated(self, shape: EngineShape) -> EngineShape:
        """Raises ValueError and OSError."""
        with self.site.order.stages.stage("tiers"):
            self._threads, shape = open_tiers(self.site, shape)
        return shape

    def is_priced(self, shape: EngineShape) -> bool:
        """Reading a row's state is compared with computing it. A host tier of blocks has its own need of a profile."""
        return shape.executor == "padded" and EVICTIONS[self.site.config.eviction].by_cost

    def handlers(self, served: Served) -> Iterable[Handler]:
        self._handler = TierHandler(served.scheduler, self._threads, self.site.clock)
        return (self._handler,)

    def facts(self) -> Mapping[str, Any]:
        return {"remote_trouble": self._threads.trouble}

    def refresh(self) -> None:
        self._handler.exchange()

    def close(self) -> None:
        """Stop the moves. The host's memory may be freed then."""
        self._threads.close()


def open_tiers(site: Site, shape: EngineShape) -> tuple[Threads, EngineShape]:
    """The threads of the tiers below the host tier, and the engine's shape with them.

    State of other weights or another layout is never read. Raises ValueError and OSError.
    """
    refuse_excluded([TierBuilder], site, host_tier=shape.num_host_blocks > 0)
    if shape.executor == "padded":
        return open_row_tiers(site, shape)
    config, device = site.config, site.blocks
    parts = device.host_parts
    identity = {
        **same_engine(shape),
        "weights": device.weights if isinstance(device, ManyDevice) else weights_of(device),
        "files": versions_of_files(site.checkpoint) if config.quantization != "none" else "",
        "layout": layout_of(config, device, parts),
    }
    disk = remote = None
    lower = LowerShape(device.block_bytes, disk_blocks=0, stored=(), remote=isinstance(config.remote_cache, str))
    if isinstance(config.remote_cache, str):
        remote = RemoteStore(config.remote_cache, device.block_bytes, identity)
        lower = replace(lower, remote_down=not answers_now(remote))
    if isinstance(config.disk_cache_dir, str):
        directory, size = Path(config.disk_cache_dir).expanduser(), config.disk_cache_bytes
        if shape.states is not None:
            return open_hybrid_tiers(site, shape, shape.states, directory, identity)
        disk = DiskStore(directory, size, device.block_bytes, identity)
        lower = replace(lower, disk_blocks=disk.num_blocks, stored=tuple(disk.stored()))
    threads = TierThreads(HostBlocks(parts), disk, remote, site.clock, site.order.wake)
    if lower.remote_down:
        threads.log_failure("remote", "does not work")
    return threads, replace(shape, lower=lower)


def open_hybrid_tiers(
    site: Site, shape: EngineShape, states: StateShape, directory: Path, identity: dict[str, str]
) -> tuple[Threads, EngineShape]:
    """`open_tiers` for a model with recurrent layers: a store of blocks, and one of states in a directory below it.

    The states have the share of the disk's size that they have of the cache.
    """
    config, device, memory = site.config, site.paged, site.paged.memory
    own = int(config.disk_cache_bytes * config.snapshot_share)
    piece = piece_bytes(lambda length: states.slot_bytes)
    disk = DiskStore(directory, config.disk_cache_bytes - own, device.block_bytes, identity, besides=own)
    try:
        description = {"states": f"{device.model.spec.recurrent_layers} layers of {device.model.spec.state}"}
        kept = DiskStore(disk.directory / "states", own, piece, identity | description)
    except BaseException:
        disk.close()
        raise
    found, damaged = kept.states()
    if damaged:
        log.warning("holdfast: %d recurrent states in %s were not whole and are dropped", damaged, directory)
    snapshots = LowerShape(piece, disk_blocks=kept.num_blocks, states=tuple(found))
    lower = LowerShape(device.block_bytes, disk.num_blocks, stored=tuple(disk.stored()), snapshots=snapshots)
    clock, wake = site.clock, site.order.wake
    threads = JoinedThreads(
        TierThreads(HostBlocks(device.host_parts), disk, None, clock, wake),
        TierThreads(StatePieces(memory.states, piece), kept, None, clock, wake),
    )
    return threads, replace(shape, lower=lower)


def open_row_tiers(site: Site, shape: EngineShape) -> tuple[TierThreads, EngineShape]:
    """`open_tiers` for padded rows, whose states go to a disk."""
    from holdfast.lm.padded.row_pieces import RowPieces  # it imports Transformers, which takes a second

    config, device = site.config, site.rows
    try:
        codec, host = device.host_states()
    except ValueError as error:
        raise ValueError(f"disk_cache_dir is {config.disk_cache_dir}, and {error}; leave it out") from None
    model, size = device.model, piece_bytes(codec.size)
    identity = {
        **same_engine(shape),
        "weights": digest_of_module(model.module, f"{model.architecture} by {code_of(model.module)}"),
        "layout": f"rows of {codec.description}, up to {model.max_model_len} positions",
    }
    disk = DiskStore(Path(str(config.disk_cache_dir)).expanduser(), config.disk_cache_bytes, size, identity)
    states, damaged = disk.states()
    if damaged:
        log.warning("holdfast: %d states in %s were not whole and are dropped", damaged, config.disk_cache_dir)
    threads = TierThreads(
        RowPieces(host, codec, size, pinned=device.kind == "cuda"), disk, None, site.clock, site.order.wake
    )
    return threads, replace(shape, lower=LowerShape(size, disk_blocks=disk.num_blocks, states=tuple(states)))


def same_engine(shape: EngineShape) -> dict[str, str]:
    """The properties of an engine that its state depends on, besides weights and layout."""
    return {"version": __version__, "precision": shape.precision, "byte order": sys.byteorder}


def answers_now(remote: RemoteStore) -> bool:
    """Whether the remote tier works, as it says within CHECK_SECONDS. A start does not wait longer for a slow DNS."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(remote.check()), name="holdfast-check", daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    return found not in ([], ["failed"])


def layout_of(config: EngineConfig, device: PagedDevice | ManyDevice, parts: Sequence[HostPart]) -> str:
    """The layout of a block, in words: the bytes of each rank, and the contents of rank 0's."""
    cache = device.memory.cache
    sizes = "+".join(str(part.block_bytes) for part in parts)
    contents = " and ".join(map(str, cache.block_shapes))
    return f"tp {config.tp}, pp {config.pp}, {sizes} bytes, {cache.dtype} {contents}"


def versions_of_files(checkpoint: Checkpoint) -> str:
    """Names, sizes and times of a checkpoint's files. They distinguish weights that `digest_of_model` does not read."""
    files = sorted(checkpoint.directory.glob("*.safetensors"))
    return repr([(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files])
