"""AdapterHolds: who uses which version of an adapter, so that a replaced version stays until its last user ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from holdfast.core.types import AdapterInfo
from holdfast.lm.limits import RequestRefused


class AdapterHolds:
    """The held versions of one client's adapters, by content id.

    A version is held while a request may still begin with it. The engine itself counts the requests that it has.
    """

    def __init__(self, adapters: Mapping[str, AdapterInfo], forget: Callable[[str], None]) -> None:
        """`adapters` are those that requests may name now. `forget` lets the engine forget a version."""
        self._adapters, self._forget = adapters, forget
        self._held: Counter[str] = Counter()
        """Number of holds of each version that has any."""
        self._given_up: set[str] = set()
        """Held versions that are forgotten at the end of the last hold."""
        self._free: dict[str, asyncio.Event] = {}
        """For held versions that somebody waits for, the event of their last release."""

    def content_of(self, adapter: str) -> str:
        """The content id that a request's `adapter` means; empty if it has none.

        It is the name of an adapter, which means its present version, or the content id of a present or held version.
        Raises RequestRefused for anything else.
        """
        if adapter in self._adapters:
            return self._adapters[adapter].id
        if adapter and adapter not in self._held and all(info.id != adapter for info in self._adapters.values()):
            raise RequestRefused(f"there is no adapter {adapter}", "model")
        return adapter

    def is_held(self, content: str) -> bool:
        """Whether anybody holds this version."""
        return content in self._held

    @contextmanager
    def hold(self, adapter: str) -> Iterator[str]:
        """Hold the version that `adapter` means now, and give its content id. Empty: no adapter is held.

        Raises RequestRefused if there is no such adapter.
        """
        content = self.content_of(adapter)
        if not content:
            yield ""
            return
        self._held[content] += 1
        try:
            yield content
        finally:
            self._release(content)

    async def released(self, content: str) -> None:
        """Wait until nobody holds this version."""
        while content in self._held:
            await self._free.setdefault(content, asyncio.Event()).wait()

    def keep(self, content: str) -> None:
        """Keep a version that was given up: it was loaded again."""
        self._given_up.discard(content)

    def give_up(self, content: str) -> None:
        """Let the engine forget a version: now, or once nobody holds it."""
        if content in self._held:
            self._given_up.add(content)
        else:
            self._forget(content)

    def _release(self, content: str) -> None:
        self._held[content] -= 1
        if self._held[content]:
            return
        del self._held[content]
        if content in self._free:
            self._free.pop(content).set()
        if content in self._given_up:
            self._given_up.discard(content)
            self._forget(content)
