"""LocalSpawner: engines on this machine, each in its own process. They share the GPUs, or the cores and memory."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.client.warming import started_warm
from holdfast.engine.spawn import EngineProcess
from holdfast.lm.config import EngineConfig

CPU_CACHE_GB = 4.0
"""Default maximum size in GB of the KV cache of an engine on a CPU."""
CPU_HOST_TIER_GB = 1.0
"""Default maximum size in GB of the host tier of an engine on a CPU."""
HOST_TIER_GB = 32.0
"""Default maximum size in GB of the host tier of an engine on a GPU."""


class LocalSpawner:
    """Starts engines on this machine."""

    kind = "local"
    lasting = False

    def __init__(
        self,
        config: EngineConfig,
        most: int,
        process: EngineProcess | None = None,
        ledger: str = "",
        listen: Sequence[str] = (),
    ) -> None:
        """Prepare for at most `most` engines at the same time.

        `process` is the first engine's process, if it was started before; the caller ends it. `ledger` is the page for
        applications on the CPU or on the first engine's GPUs. `listen` has the address, by number, at which clients
        attach to each engine; without any, none can. Raises EngineStartError if there are too few GPUs.
        """
        self._process, self._ledger, self._listen = process, ledger, listen or [""] * most
        self._gpus = [] if config.device == "cpu" else visible_gpus()
        self._each = config.layout.ranks
        self.most: int | None = most
        if self._gpus and len(self._gpus) < most * self._each:
            raise EngineStartError(
                f"{most} replicas of {self._each} GPUs need {most * self._each}, and there are {len(self._gpus)}; ask "
                "for fewer replicas, or for --device cpu"
            )
        self.config = share(config, most, on_gpus=bool(self._gpus))
        """Configuration of each engine."""
        self._secret = secrets.token_bytes(32)
        self._measured = asyncio.Event()
        """Set when the first engine has measured its speed. No other engine may use the cores during that."""
        if self._gpus:
            self._measured.set()

    def place(self, number: int) -> str:
        """See `Spawner.place`."""
        return f"GPU {','.join(self._gpus_of(number))}" if self._gpus else "CPU"

    async def first(self, count: int, most: int) -> Sequence[int]:
        """See `Spawner.first`."""
        return range(count)

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """See `Spawner.start`."""
        if number:
            await self._measured.wait()
        process, self._process = self._process, None
        if process is None:
            process = EngineProcess(self.config.first_device, environment=self.environment(number))
        try:
            start = EngineClient.start(
                with_own_files(self.config, number),
                on_progress=on_progress,
                process=process,
                priced=number == 0,
                chunk_secret=self._secret,
                ledger="" if number and self._gpus else self._ledger,
                listen=self._listen[number],
            )
            return await started_warm(start)
        finally:
            self._measured.set()

    async def stop(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.stop`."""
        await engine.close()

    async def leave(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.leave`."""
        await engine.close()

    async def close(self) -> None:
        """See `Spawner.close`."""

    def environment(self, number: int) -> dict[str, str]:
        """Return the environment variables that give an engine its GPUs."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus_of(number))} if self._gpus else {}

    def _gpus_of(self, number: int) -> list[str]:
        return self._gpus[number * self._each : (number + 1) * self._each]


def with_own_files(config: EngineConfig, number: int) -> EngineConfig:
    """Return a replica's configuration, with files and directories that no other replica writes to."""
    if config.trace and number:
        config = replace(config, trace=f"{config.trace}.{number}")
    if config.disk_cache_dir is not None:
        config = replace(config, disk_cache_dir=str(Path(config.disk_cache_dir) / str(number)))
    return config


def share(config: EngineConfig, engines: int, *, on_gpus: bool) -> EngineConfig:
    """Return the configuration of one of several engines on this machine, with its share of cores and free memory.

    Configured sizes in GB apply to each engine. `threads` is divided among the engines, like all measured values.
    """
    changes: dict[str, object] = {}
    if config.prefix_sharing and not config.chunk_host:
        changes["chunk_host"] = "127.0.0.1"  # State moves between the engines of this machine.
    if not on_gpus:
        changes["threads"] = max(1, (config.threads or cores()) // engines)
        if config.cache_gb is None:
            changes["cache_gb"] = min(CPU_CACHE_GB, free_gb() / 2 / engines)
        if config.host_cache_gb == "auto" and config.prefix_sharing:
            changes["host_cache_gb"] = min(CPU_HOST_TIER_GB, free_gb() / 8 / engines)
    elif config.host_cache_gb == "auto" and config.prefix_sharing:
        changes["host_cache_gb"] = min(HOST_TIER_GB, free_gb() / 4 / engines)
    return replace(config, **changes)  # type: ignore[arg-type]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_gb() -> float:
    """Return the free memory of this machine in GB."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024 / 1e9
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 1e9


def visible_gpus() -> list[str]:
    """Return the GPUs that PyTorch would use, in the form of CUDA_VISIBLE_DEVICES. Starts neither PyTorch nor CUDA."""
    torch = importlib.util.find_spec("torch")  # Finds the package without importing it.
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return []
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [each.strip() for each in given.split(",") if each.strip() and each.strip() != "-1"]
    count = ctypes.c_uint()
    with suppress(OSError, AttributeError):  # There is no driver.
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() == 0:
            library.nvmlDeviceGetCount_v2(ctypes.byref(count))
            library.nvmlShutdown()
    return [str(number) for number in range(count.value)]
