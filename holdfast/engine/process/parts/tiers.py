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
from holdfast.lm.execution.host_memory import HostBlocks, HostPart, HostStates, StatesPart
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.remote_states import RemoteStateStore
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.execution.state_pieces import StatePieces
from holdfast.lm.execution.tier_threads import TierThreads
from holdfast.lm.memory.retention import EVICTIONS
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tiers.state_tiers import whole_bytes
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.tiers import LowerShape, Outcome, TierDone, TierJob, TierName, piece_bytes
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

    def __init__(self, blocks: TierThreads, states: Mapping[TierName, TierThreads]) -> None:
        """`states` are the threads of each tier, by its name: the tiers keep states in pieces of different sizes."""
        self._blocks, self._states = blocks, states

    @property
    def busy(self) -> bool:
        """Whether a job is under way, or has ended and was not taken."""
        return self._blocks.busy or any(each.busy for each in self._states.values())

    @property
    def trouble(self) -> str:
        """The reason why the remote tier does not work; empty if it works, or if there is none."""
        return self._blocks.trouble

    def start(self, jobs: Iterable[TierJob]) -> None:
        """Begin these jobs. A job of a state, or of a question for states, says how many pieces a state has."""
        for job in jobs:
            threads = self._states[job.tier] if job.state.pieces else self._blocks
            threads.start([job])

    def take(self) -> list[TierDone]:
        """The jobs that have ended since the last call."""
        return [done for each in (*self._states.values(), self._blocks) for done in each.take()]

    def close(self) -> None:
        """Stop after the jobs that have begun."""
        for each in (*self._states.values(), self._blocks):
            each.close()


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
    own = int(config.disk_cache_bytes * config.snapshot_share) if shape.states else 0
    if isinstance(config.disk_cache_dir, str):
        directory, size = Path(config.disk_cache_dir).expanduser(), config.disk_cache_bytes
        disk = DiskStore(directory, size - own, device.block_bytes, identity, besides=own)
        lower = replace(lower, disk_blocks=disk.num_blocks, stored=tuple(disk.stored()))
    blocks = TierThreads(HostBlocks(parts), disk, remote, site.clock, site.order.wake)
    if lower.remote_down:
        blocks.log_failure("remote", "does not work")
    if shape.states:
        try:
            states, snapshots = open_state_tiers(site, shape.states, disk, own, identity)
        except BaseException:
            blocks.close()
            raise
        return JoinedThreads(blocks, states), replace(shape, lower=replace(lower, snapshots=snapshots))
    return blocks, replace(shape, lower=lower)


def open_state_tiers(
    site: Site, shape: StateShape, disk: DiskStore | None, size: int, identity: dict[str, str]
) -> tuple[dict[TierName, TierThreads], LowerShape]:
    """The threads of the tiers of recurrent states, and the shape of these tiers. Raises ValueError and OSError.

    A disk has a store of `size` bytes for them, in a directory below that of the blocks. Their share of the disk is the
    one that they have of the cache. A remote tier has them next to the blocks, under other names.
    """
    config, device, clock, wake = site.config, site.blocks, site.clock, site.order.wake
    slots, piece = HostStates(device.state_parts), piece_bytes(lambda length: shape.slot_bytes)
    identity = identity | {"states": layout_of_states(device, device.state_parts)}
    threads, lower = dict[TierName, TierThreads](), LowerShape(piece, remote=isinstance(config.remote_cache, str))
    if disk:
        kept = DiskStore(disk.directory / "states", size, piece, identity)
        found, damaged = kept.states()
        if damaged:
            log.warning("holdfast: %d recurrent states in %s were not whole and are dropped", damaged, disk.directory)
        threads["disk"] = TierThreads(StatePieces(slots, piece), kept, None, clock, wake)
        lower = replace(lower, disk_blocks=kept.num_blocks, states=tuple(found))
    if isinstance(config.remote_cache, str):
        whole = whole_bytes(shape.slot_bytes, config.block_size)
        store = RemoteStateStore(config.remote_cache, whole, identity)
        threads["remote"] = TierThreads(StatePieces(slots, whole), None, store, clock, wake)
    return threads, lower


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


def layout_of_states(device: PagedDevice | ManyDevice, parts: Sequence[StatesPart]) -> str:
    """The layout of a recurrent state on the host, in words: the bytes of each rank, and the tensors of rank 0's."""
    spec, sizes = device.model.spec, "+".join(str(part.state_bytes) for part in parts)
    return f"{sizes} bytes, {spec.recurrent_layers} layers of {spec.state}, the widest numbers first"


def versions_of_files(checkpoint: Checkpoint) -> str:
    """Names, sizes and times of a checkpoint's files. They distinguish weights that `digest_of_model` does not read."""
    files = sorted(checkpoint.directory.glob("*.safetensors"))
    return repr([(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files])
