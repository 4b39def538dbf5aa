"""The order of a model's requests. They are carried out by their numbers, in whatever order they arrive.

A request whose turn has come gets the number of the next call, and its file is written for the engine. One that arrives
before its turn is held in a file of its own until the requests before it are there. Both are stored before the client
gets an answer, because the client does not send them again.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.engine.client.tuning import Call, CallData, Datum, Limits, call_path, read_call, write_call
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.protocol import invalid
from holdfast.server.tinker.calls import MOST_CALL_TOKENS, Wanted
from holdfast.server.tinker.futures import Futures
from holdfast.server.tinker.tables import FutureTable
from holdfast.server.tinker.values import Checkpoint, Future, Model

HELD = "held"
"""Name of the folder, in a model's directory, of requests that wait for earlier ones."""
GAP_SECONDS = 120.0
"""Seconds that requests wait for one that has not arrived. Then they fail, and the numbers after them go on."""
AGAIN = Limits(vocabulary=1 << 31, tokens=MOST_CALL_TOKENS)
"""Limits for reading a held request, which was checked when it arrived."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request for a model as it arrives."""

    seq: int
    digest: str
    wanted: Wanted
    detail: Mapping[str, Any] = field(default_factory=dict)
    saves: Sequence[Checkpoint] = ()

    @property
    def whole_detail(self) -> dict[str, Any]:
        """The request's detail, with the reason why it cannot be carried out, if there is one."""
        return {**self.detail, "fault": self.wanted.fault} if self.wanted.fault else dict(self.detail)


class CallOrder:
    """The order of the requests of one model, kept by the server that drives it."""

    def __init__(
        self,
        model: Model,
        directory: Path,
        futures: Futures,
        store: AsyncStore,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        """`directory` is the model's. `in_thread` runs work that uses the disk."""
        self._model, self._directory, self._futures, self._store, self._in_thread = (
            model, directory, futures, store, in_thread,
        )  # fmt: skip
        self.lock = asyncio.Lock()
        """Held while a request gets its place."""
        self.next_seq = 1
        self.next_call = 0
        self.held: dict[int, Future] = {}
        """Requests that wait for earlier ones, by their numbers."""

    async def load(self) -> list[Future]:
        """Read the order from the store. Returns the pending requests that have the number of a call, in order."""
        async with self.lock:
            model = self._model.id
            seq, call, _ = await self._store.read(lambda store: FutureTable(store.database).last(model))
            self.next_seq, self.next_call = max(1, seq + 1), call + 1
            pending = await self._pending()
            for future in pending:
                if future.call is None and future.seq > 0:
                    self.held[future.seq] = future
            return [future for future in pending if future.call is not None] + await self._release()

    async def add(self, arrival: Arrival) -> tuple[Future, list[Future]]:
        """Give a request its place, or find the one that was sent before. Returns it, and those whose turn has come.

        Raises ApiError: 400 for a number that had another content or comes too late, 429 if too many wait.
        """
        async with self.lock:
            known = await self._known(arrival.seq)
            if known is None and arrival.seq < self.next_seq:
                reason = f"seq_id {arrival.seq} comes too late: requests up to {self.next_seq - 1} have had their turn"
                raise invalid(reason, "seq_id", "seq_id_passed")
            if known is None and arrival.seq == self.next_seq and arrival.wanted.call is not None:
                return await self._number(arrival)
            future, new = await hold(self._model, self._directory, arrival, self._futures, self._in_thread, known)
            if new:
                self.held[arrival.seq] = future
            return future, await self._release()

    async def take_held(self) -> list[Future]:
        """Find requests that other servers have accepted for the model. Returns those whose turn has come."""
        async with self.lock:
            for future in await self._pending():
                if future.call is None and future.seq >= self.next_seq:
                    self.held.setdefault(future.seq, future)
            return await self._release()

    async def skip_gap(self) -> None:
        """Fail all requests that are held, and go on with the numbers after them."""
        async with self.lock:
            reason = f"seq_id {self.next_seq} has not arrived within {GAP_SECONDS:.0f} s, so this request had no turn"
            for seq, future in sorted(self.held.items()):
                await self._futures.fail(future.id, reason, "user")
                self.next_seq = seq + 1
            self.held.clear()

    def overdue(self, now: float) -> bool:
        """Whether held requests have waited for GAP_SECONDS for one that has not arrived."""
        return bool(self.held) and now - min(each.created for each in self.held.values()) > GAP_SECONDS

    async def _number(self, arrival: Arrival) -> tuple[Future, list[Future]]:
        """Make a request the next call. Returns it, and the requests whose turn has come."""
        assert arrival.wanted.call is not None
        call = self.next_call
        await self._write(arrival.wanted.call, call, arrival.wanted.data)
        try:
            future, _ = await self._futures.begin(
                self._model.tenant, self._model.id, arrival.seq, arrival.wanted.kind, arrival.digest,
                call=call, detail=arrival.detail, saves=arrival.saves,
            )  # fmt: skip
        except BaseException:
            # The engine must not find a call that no client waits for.
            call_path(self._directory, call).unlink(missing_ok=True)
            raise
        self.next_seq, self.next_call = arrival.seq + 1, call + 1
        return future, [future, *await self._release()]

    async def _release(self) -> list[Future]:
        """Make calls of the held requests whose turn has come. Returns them."""
        released = []
        while (future := self.held.get(self.next_seq)) is not None:
            if (numbered := await self._release_one(future)) is not None:
                released.append(numbered)
            del self.held[self.next_seq]
            self.next_seq += 1
        return released

    async def _release_one(self, future: Future) -> Future | None:
        """Make a held request the next call. Returns None for one that fails instead."""
        if fault := future.detail.get("fault"):
            await self._futures.fail(future.id, fault, "user")
            return None
        held, number = held_in(self._directory, future.seq, future.digest), self.next_call
        try:
            call, data = await self._in_thread(lambda: read_call(held, 0, AGAIN))
        except (OSError, ValueError):
            await self._futures.fail(future.id, "the request's data were lost; send it again", "server")
            return None
        await self._write(call, number, split(data))
        id = future.id
        numbered = await self._store.run(lambda store: FutureTable(store.database).number(id, number))
        await self._in_thread(lambda: shutil.rmtree(held, ignore_errors=True))
        self.next_call += 1
        return numbered

    async def _write(self, call: Call, number: int, data: Sequence[Datum]) -> None:
        numbered = replace(call, number=number)
        await self._in_thread(lambda: write_in(self._directory, numbered, data))

    async def _pending(self) -> list[Future]:
        model = self._model.id
        return await self._store.read(lambda store: FutureTable(store.database).of_item(model, pending=True))

    async def _known(self, seq: int) -> Future | None:
        model = self._model.id
        return await self._store.read(lambda store: FutureTable(store.database).known(model, seq))


async def hold(
    model: Model,
    directory: Path,
    arrival: Arrival,
    futures: Futures,
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    known: Future | None = None,
) -> tuple[Future, bool]:
    """Store a request until its turn comes. Returns it, or the earlier one with its number, and whether it is new.

    Any server may do this; the one that drives the model finds the request in the store. `known` is the earlier
    request with its number. Raises ApiError.
    """
    call = arrival.wanted.call
    if call is not None and known is None:
        held = held_in(directory, arrival.seq, arrival.digest)
        await in_thread(lambda: write_in(held, call, arrival.wanted.data))
    return await futures.begin(
        model.tenant, model.id, arrival.seq, arrival.wanted.kind, arrival.digest,
        detail=arrival.whole_detail, saves=arrival.saves,
    )  # fmt: skip


def write_in(directory: Path, call: Call, data: Sequence[Datum]) -> None:
    """Write a call's file into a directory, which is made if it is missing, as is the one above the call's own."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if call.directory:
        Path(call.directory).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_call(directory, call, data)


def held_in(directory: Path, seq: int, digest: str) -> Path:
    """Return the directory of a held request. Two requests of one number do not share it."""
    return directory / HELD / f"{seq}-{digest[:16]}"


def split(data: CallData) -> list[Datum]:
    """Return the data of a call one by one."""
    arrays = {name: data.trimmed(array) for name, array in data.arrays.items()}
    both = zip(data.trimmed(data.tokens), data.trimmed(data.targets), strict=True)
    return [
        Datum(tokens, targets, {name: parts[number] for name, parts in arrays.items()})
        for number, (tokens, targets) in enumerate(both)
    ]
