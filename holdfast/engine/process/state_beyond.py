"""Where a model's KV state goes beyond its engine's memory: the tiers behind the host tier, and other engines."""

from __future__ import annotations

import hashlib
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.core.config import EngineConfig
from holdfast.core.version import __version__
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.chunk_service import ChunkService
from holdfast.engine.process.chunk_wire import Terms
from holdfast.engine.process.move_desk import MoveDesk
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.paged import weights_of
from holdfast.files.regular import open_file, read_bytes
from holdfast.lm.execution.disk_store import DiskStore
from holdfast.lm.execution.host_memory import HostBlocks, HostPart
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.execution.tier_threads import TierThreads
from holdfast.lm.tiers import LowerShape, Outcome
from holdfast.lm.types import EngineShape

SAMPLES, SAMPLE_BYTES = 64, 1 << 14
"""Of each file of weights, what tells models of one name apart."""
CHECK_SECONDS = 3.0
"""How long a start waits for the remote tier's first answer."""


def open_tiers(
    config: EngineConfig, checkpoint: Checkpoint, device: PagedDevice | ManyDevice, shape: EngineShape
) -> tuple[TierThreads, EngineShape]:
    """The threads of the tiers behind the host tier, and the engine's shape with them.

    State of other weights or another layout is never read. Raises ValueError and OSError.
    """
    parts = device.host_parts
    if not parts:
        raise ValueError("a disk or remote cache lies behind the host tier, and there is none; set host_cache_gb")
    identity = {
        "version": __version__,
        "weights": device.weights if isinstance(device, ManyDevice) else weights_of(device),
        "files": versions_of_files(checkpoint) if config.quantization != "none" else "",
        "precision": shape.precision,
        "layout": layout_of(config, device, parts),
        "byte order": sys.byteorder,
    }
    disk = remote = None
    if config.remote_cache is not None:
        remote = RemoteStore(config.remote_cache, device.block_bytes, identity)
    if config.disk_cache_dir is not None:
        directory = Path(config.disk_cache_dir).expanduser()
        disk = DiskStore(directory, int(config.disk_cache_gb * 1e9), device.block_bytes, identity)
    lower = LowerShape(
        device.block_bytes,
        disk_blocks=0 if disk is None else disk.num_blocks,
        stored=() if disk is None else tuple(disk.stored()),
        remote=remote is not None,
        remote_down=remote is not None and not answers_now(remote),
    )
    threads = TierThreads(HostBlocks(parts), disk, remote, time.monotonic)
    if lower.remote_down:
        threads.tell_failure("remote", "does not work")
    return threads, replace(shape, lower=lower)


def answers_now(remote: RemoteStore) -> bool:
    """Whether the remote tier works, as it says within CHECK_SECONDS. A start does not wait longer for a slow DNS."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(remote.check()), name="holdfast-check", daemon=True)
    thread.start()
    thread.join(CHECK_SECONDS)
    return found not in ([], ["failed"])


def layout_of(config: EngineConfig, device: PagedDevice | ManyDevice, parts: Sequence[HostPart]) -> str:
    """What a block is made of, in words: the bytes of each rank, and what rank 0's are."""
    data = device.memory.cache.data
    sizes = "+".join(str(part.block_bytes) for part in parts)
    return f"tp {config.tp}, pp {config.pp}, {sizes} bytes, {data.dtype} {tuple(data[:, :, 0].shape)}"


def versions_of_files(checkpoint: Checkpoint) -> str:
    """What tells a checkpoint's weights from others that `digest_of_model` does not read."""
    files = sorted(checkpoint.directory.glob("*.safetensors"))
    return repr([(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files])


def begin_moves(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: PagedDevice | ManyDevice,
    shape: EngineShape,
    moves: MoveDesk,
    secret: bytes,
) -> str:
    """Let KV blocks move between this engine and others. Returns why none can; empty if they do.

    Raises ValueError for an address that cannot be listened at.
    """
    parts = device.host_parts
    if not parts:
        return "there is no host tier, through which blocks move"
    block = layout_of(config, device, parts)
    layout = f"{shape.model}, {shape.precision}, {block}, {digest_of_files(config, checkpoint)}"
    terms = Terms(secret or secrets.token_bytes(32), layout, device.block_bytes)
    try:
        moves.service = ChunkService(moves, terms, HostBlocks(parts), config.chunk_host)
    except OSError as error:
        raise ValueError(f"chunk_host is {config.chunk_host}: {error.strerror or error}") from None
    return ""


def digest_of_files(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """A digest of a model's configuration, and of samples of its weights' files: cheap, for engines that run now."""
    found = hashlib.sha256(f"{config.load_format} {config.quantization} {config.max_model_len}".encode())
    found.update(read_bytes(checkpoint.directory / "config.json"))
    for path in sorted(checkpoint.directory.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth") and config.load_format != "random":
            size = path.stat().st_size
            found.update(f"{path.name} {size}".encode())
            with open_file(path) as file:
                for part in range(SAMPLES):
                    file.seek(size * part // SAMPLES)
                    found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()
