"""AdapterDesk: loads and unloads adapters while an engine serves. Reading them takes a thread, not the loop's time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from holdfast.core.types import AdapterInfo
from holdfast.engine import messages
from holdfast.lm.parts.adapters.planner import AdapterPart


class AdapterFiles(Protocol):
    """Reads adapters and keeps them for the device: `lm.parts.adapters.device.AdapterStore`."""

    def read(self, name: str, directory: str) -> Any:
        """Read an adapter, in any thread. Raises ValueError."""

    def register(self, read: Any) -> AdapterInfo:
        """Keep an adapter that was read: plans may load it from now on."""

    def forget(self, adapter: str) -> None:
        """Give an adapter up."""


class AdapterDesk:
    """Answers the client's messages about adapters. For the thread of the loop, but for what reads files."""

    def __init__(self, part: AdapterPart, store: AdapterFiles) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Called in another thread when an adapter has been read."""
        self._part, self._store = part, store
        self.read = store.read
        """Reads an adapter for `register`, in any thread. Raises ValueError, which names no directory."""
        self._reader = ThreadPoolExecutor(1, "holdfast-load-adapter")
        self._reading: deque[tuple[int, str, Future[Any]]] = deque()
        """Loads in the order in which they were asked for: number, name, and the adapter once it is read."""
        self._unloading: dict[str, int] = {}
        """By adapter, the number of the message that unloads it."""

    @property
    def busy(self) -> bool:
        """Whether an answer will come without any step of the loop."""
        return bool(self._reading)

    def load(self, number: int, name: str, path: str) -> None:
        """Begin to read an adapter; `answers` says what became of it."""
        reading = self._reader.submit(self._store.read, name, path)
        self._reading.append((number, name, reading))
        reading.add_done_callback(lambda _: self.wake())

    def register(self, read: Any) -> AdapterInfo:
        """Serve an adapter that `AdapterFiles.read` gave."""
        info = self._store.register(read)
        self._part.add(info.id)
        return info

    def unload(self, number: int, adapter: str) -> None:
        """Forget an adapter once its requests have ended; `answers` says when."""
        self._unloading[adapter] = number
        self._part.remove(adapter)

    def answers(self) -> Iterator[messages.FromEngine]:
        """What has become of loads, unloads, and of requests whose adapter cannot be read any more."""
        while self._part.refused:
            request, adapter = self._part.refused.popleft()
            name = adapter.partition("@")[0]
            yield messages.Refused(request, f"the files of adapter {name} have changed or are gone; load it again")
        while self._part.retired:
            adapter = self._part.retired.popleft()
            self._store.forget(adapter)
            if (asked := self._unloading.pop(adapter, None)) is not None:
                yield messages.AdapterUnloaded(asked)
        while self._reading and self._reading[0][2].done():
            number, _, reading = self._reading.popleft()
            error = reading.exception()
            if error is None:
                info = self.register(reading.result())
                yield messages.AdapterLoaded(number, info)
                if (asked := self._unloading.pop(info.id, None)) is not None:  # it stays after all
                    yield messages.AdapterUnloaded(asked)
            elif isinstance(error, ValueError):
                yield messages.AdapterRefused(number, str(error))
            else:
                raise error

    def close(self) -> None:
        """Stop reading."""
        self._reader.shutdown(wait=False, cancel_futures=True)
