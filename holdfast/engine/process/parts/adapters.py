"""Adapters: read before the first request, and loaded and unloaded while the engine serves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.core.types import AdapterInfo
from holdfast.engine import messages
from holdfast.engine.link import one_line
from holdfast.engine.process.handler import Handler, refusal
from holdfast.engine.process.part_builder import PartBuilder, Served, Site
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.parts.adapters.device import AdapterDevice
from holdfast.lm.parts.adapters.messages import (
    AdapterLoaded,
    AdapterRefused,
    AdapterUnloaded,
    LoadAdapter,
    UnloadAdapter,
)
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.adapters.values import AdapterForgotten, AdapterKnown
from holdfast.lm.types import LanguageDevice


class AdapterFiles(Protocol):
    """Reads adapters and keeps them for the device: `lm.parts.adapters.device.AdapterStore`."""

    def read(self, name: str, directory: str) -> Any:
        """Read an adapter, in any thread. Raises ValueError."""

    def register(self, read: Any) -> AdapterInfo:
        """Keep an adapter that was read: plans may load it from now on."""

    def forget(self, adapter: str) -> None:
        """Give an adapter up."""


class FilesOfRanks(AdapterFiles):
    """Adapters of a model that several ranks share. Rank 0 reads and checks each first, and lets the others know it."""

    def __init__(self, own: AdapterFiles, device: ManyDevice) -> None:
        self.own, self._device = own, device

    def read(self, name: str, directory: str) -> Any:
        return self.own.read(name, directory)

    def register(self, read: Any) -> AdapterInfo:
        info = self.own.register(read)
        self._device.announce(AdapterKnown(info.id, info.name, str(read.directory.absolute())))
        return info

    def forget(self, adapter: str) -> None:
        self.own.forget(adapter)
        self._device.announce(AdapterForgotten(adapter))


class AdapterHandler(Handler):
    """Loads and unloads adapters. Reading them takes a thread, not the loop's time."""

    receives = (LoadAdapter, UnloadAdapter)

    def __init__(self, part: AdapterPart, store: AdapterFiles, wake: Callable[[], None]) -> None:
        """`wake` is called in another thread when an adapter has been read."""
        self._part, self._store, self._wake = part, store, wake
        self.read = store.read
        """Reads an adapter for `register`, in any thread. Raises ValueError, which names no directory."""
        self._reader = ThreadPoolExecutor(1, "holdfast-load-adapter")
        self._reading: deque[tuple[int, str, Future[Any]]] = deque()
        """Loads in the order in which they were asked for: number, name, and the adapter once it is read."""
        self._unloading: dict[str, list[int]] = {}
        """By adapter, the numbers of the messages that unload it."""

    @property
    def busy(self) -> bool:
        return bool(self._reading)

    def receive(self, message: LoadAdapter | UnloadAdapter) -> None:
        if isinstance(message, LoadAdapter):
            self.load(message.number, message.name, message.path)
        else:
            self.unload(message.number, message.adapter)

    def load(self, number: int, name: str, path: str) -> None:
        """Begin to read an adapter; `answers` reports the result."""
        reading = self._reader.submit(self._store.read, name, path)
        self._reading.append((number, name, reading))
        reading.add_done_callback(lambda _: self._wake())

    def register(self, read: Any) -> AdapterInfo:
        """Serve an adapter that `AdapterFiles.read` gave."""
        info = self._store.register(read)
        self._part.add(info.id)
        return info

    def unload(self, number: int, adapter: str) -> None:
        """Forget an adapter once its requests have ended; `answers` reports when."""
        self._unloading.setdefault(adapter, []).append(number)
        self._part.remove(adapter)

    def answers(self) -> Iterator[messages.FromEngine]:
        """Results of loads and unloads, and failures of requests whose adapter can no longer be read."""
        while self._part.refused:
            request, adapter = self._part.refused.popleft()
            name = adapter.partition("@")[0]
            yield messages.Refused(request, f"the files of adapter {name} have changed or are gone; load it again")
        while self._part.retired:
            adapter = self._part.retired.popleft()
            self._store.forget(adapter)
            yield from self._unloaded(adapter)
        while self._reading and self._reading[0][2].done():
            number, _, reading = self._reading.popleft()
            try:
                info = self.register(reading.result())
            except ValueError as error:
                yield AdapterRefused(number, one_line(error))
                continue
            yield AdapterLoaded(number, info)
            yield from self._unloaded(info.id)  # it stays after all

    def stop(self) -> None:
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _unloaded(self, adapter: str) -> Iterator[messages.FromEngine]:
        """The answers to the messages that unload an adapter."""
        for number in self._unloading.pop(adapter, ()):
            yield AdapterUnloaded(number)


def files_of(device: LanguageDevice) -> AdapterFiles:
    """The adapters of a device with slots for them, on all its ranks. Raises LookupError if it has no slots."""
    if isinstance(device, PagedDevice | ManyDevice):
        own: AdapterFiles = device.part(AdapterDevice).store
        return FilesOfRanks(own, device) if isinstance(device, ManyDevice) else own
    from holdfast.lm.parts.adapters.rows import RowAdapters  # it imports Transformers, which takes a second

    return device.part(RowAdapters).store


class AdapterBuilder(PartBuilder):
    """Builds the store and handler of adapters, and reads the adapters that the configuration names."""

    name = "adapters"
    refusals = dict.fromkeys(
        (LoadAdapter, UnloadAdapter),
        refusal(AdapterRefused, "this engine serves no adapters; give it max_adapters"),
    )

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        return config.adapter_slots > 0

    def __init__(self, site: Site) -> None:
        """Raises ValueError naming the adapter that cannot be served."""
        super().__init__(site)
        self._store, self._served = files_of(site.device), list[AdapterInfo]()
        site.order.on_progress("reading adapters")
        with site.order.stages.stage("adapters"):
            for name, path in site.config.adapters:
                self._served.append(self._read(name, path))

    def handlers(self, served: Served) -> Iterable[Handler]:
        part = served.scheduler.part(AdapterPart)
        for adapter in self._served:
            part.add(adapter.id)
        return (AdapterHandler(part, self._store, self.site.order.wake),)

    def facts(self) -> Mapping[str, Any]:
        return {"adapters": tuple(self._served)}

    def _read(self, name: str, path: str) -> AdapterInfo:
        if name == self.site.checkpoint.name:
            raise ValueError(f"adapter {name} has the name of the model; give it another one")
        try:
            return self._store.register(self._store.read(name, path))
        except ValueError as error:
            raise ValueError(f"adapter {name} in {path}: {error}") from error
