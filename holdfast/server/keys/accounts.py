"""Accounts: charges requests to their keys, and exchanges what was charged with other servers through the store."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter as Counts
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial

from prometheus_client import CollectorRegistry, Counter

from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.jobs.values import Batch, Usage
from holdfast.server.keys.limits import Account, Charge
from holdfast.server.keys.stream_table import StreamTable
from holdfast.server.keys.usage_table import Exchanged, Slot, UsageTable, Used
from holdfast.server.keys.values import Key
from holdfast.server.protocol import ApiError

EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges with the store.

Servers with one store know each other's charges after at most twice this time. Until then, each of them may admit what
its own bucket still holds, at most a minute's limit. Later requests pay for it, so the rate over a longer time is that
of the limit, whatever the number of servers.
"""
RETRIES = (0.0, 0.05, 0.2)
"""Seconds before each attempt to count a request of a key whose number of requests is limited."""
FIRST_SECONDS = 1.0
"""Maximum number of seconds for which the first request waits for the month's usage."""
MOST_LABELS = 256
"""Maximum number of pairs of key and model with metrics of their own. All further ones have those of `other`."""
OTHER = "other"


class KeyMetrics:
    """Metrics of keys, for operators. They count from the start of the server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "holdfast_key_requests", "Requests by API key and model", ("key", "model"), registry=registry
        )
        self._tokens = Counter(
            "holdfast_key_tokens",
            "Tokens by API key, model and kind: prompt, cached (part of the prompts), output",
            ("key", "model", "kind"),
            registry=registry,
        )
        self._refused = Counter(
            "holdfast_key_refused", "Requests that a limit of their API key refused", ("key",), registry=registry
        )
        self._labels: set[tuple[str, str]] = set()

    def used(self, key: str, model: str, used: Used) -> None:
        """Count the usage of a key."""
        key, model = self._bounded(key, model)
        self._requests.labels(key, model).inc(used.requests)
        for kind in ("prompt", "cached", "output"):
            self._tokens.labels(key, model, kind).inc(getattr(used, kind))

    def refused(self, key: str) -> None:
        """Count a request that a limit refused."""
        self._refused.labels(self._bounded(key, "")[0]).inc()

    def _bounded(self, key: str, model: str) -> tuple[str, str]:
        if (key, model) not in self._labels and len(self._labels) >= MOST_LABELS:
            return OTHER, OTHER
        self._labels.add((key, model))
        return key, model


class Accounts:
    """The accounts of all keys in this server process. Usage of the last second is lost if the process is killed."""

    def __init__(
        self,
        store: AsyncStore,
        metrics: KeyMetrics,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._now = now
        self._clock = clock
        self._server = uuid.uuid4().hex
        self._accounts: dict[str, Account] = {}
        self._unwritten: dict[Slot, Used] = {}
        self._written: dict[str, tuple[int, int]] = {}
        """Charges of this server by key, as they are in the store."""
        self._known = Exchanged()
        """Result of the last exchange."""
        self._leaving: set[asyncio.Task[None]] = set()
        """Tasks that write the number of requests that are left."""
        self._exchanging: asyncio.Task[None] | None = None
        self._first = asyncio.Event()
        """Set after the first exchange."""
        self._closing = asyncio.Event()

    async def admit(self, key: Key, tokens: int | None) -> Charge:
        """Charge an arriving request to its key, with its estimated prompt tokens. Raises ApiError 429.

        `tokens` is None for a request that computes no tokens. The first request starts the exchange with the store,
        which ends with `close`.
        """
        self._begin()
        if not self._first.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._first.wait(), FIRST_SECONDS)
        account = self.account(key)
        try:
            charge = account.admit(tokens, self._clock())
            await self._count_in(charge)
        except ApiError:
            self._metrics.refused(key.name)
            raise
        return charge

    async def _count_in(self, charge: Charge) -> None:
        """Count a request at all servers, if its key limits them. Raises ApiError 429 and takes the charge back.

        A request that ends is counted out a moment after its client sees the end, so a full key is tried again.
        """
        account = charge.account
        if account.limits.streams is None:
            return
        for seconds in RETRIES:
            await asyncio.sleep(seconds)
            enter = partial(
                _enter, self._server, account.name, account.in_progress, account.limits.streams, self._now()
            )
            try:
                if await self._store.run(enter):
                    return
            except ApiError:
                return  # The store failed, and has logged the reason. Each server counts its own requests meanwhile.
            except BaseException:
                self._uncount(charge)
                raise
        raise self._uncount(charge)

    def _uncount(self, charge: Charge) -> ApiError:
        """Take back the charge of a request that is not admitted. Returns the error for its client."""
        error = charge.account.cancel(charge, self._clock())
        self._count_out(charge.account)
        return error

    def _count_out(self, account: Account) -> None:
        """Let other servers know how many requests of a key are left here, if its number is limited."""
        if account.limits.streams is not None:
            left = asyncio.create_task(self._write_left(account))
            self._leaving.add(left)
            left.add_done_callback(self._leaving.discard)

    async def _write_left(self, account: Account) -> None:
        with suppress(ApiError):  # The store failed. The next request of the key writes the number.
            await self._store.run(partial(_leave, self._server, account.name, account, self._now()))

    def account(self, key: Key) -> Account:
        """Return the account of a key, with the key's current limits."""
        now = self._clock()
        account = self._accounts.get(key.name)
        if account is None:
            spent = self._known.spent.get(key.name, 0)
            account = self._accounts[key.name] = Account(key.name, key.limits, now, spent)
        account.follow(key.limits, now)
        return account

    def headers(self, key: Key) -> dict[str, str]:
        """Return the headers of a key's limits."""
        return self.account(key).headers(self._clock())

    def settle(self, charge: Charge, kind: str, model: str, used: Used) -> None:
        """End a request with its usage. A request that computed nothing is not part of the usage."""
        charge.account.settle(charge, used.prompt + used.output, self._clock())
        self._count_out(charge.account)
        if used.prompt:
            self._record(kind, charge.account.name, model, used)

    def charge_batch(self, batch: Batch, usage: Usage) -> None:
        """Charge a line of a batch to the key that created the batch. It counts for the budget, not for the rates."""
        if batch.key and usage.prompt:
            self._begin()
            used = Used(1, usage.prompt, usage.cached, usage.completion)
            self._record("completions", batch.key, batch.model, used)
            if batch.key in self._accounts:
                self._accounts[batch.key].spend(used.prompt + used.output)

    def _begin(self) -> None:
        if self._exchanging is None:
            self._exchanging = asyncio.create_task(self._exchange_until_closed())

    def _record(self, kind: str, key: str, model: str, used: Used) -> None:
        self._metrics.used(key, model, used)
        now = self._now()
        slot = Slot(kind, key, model, int(now // 60) * 60, month_of(now))
        self._unwritten.setdefault(slot, Used()).add(used)

    async def exchange(self) -> None:
        """Write usage and charges, and learn those of other servers. Raises ApiError, after which nothing is lost."""
        now, server = self._now(), self._server
        month = month_of(now)
        writing, self._unwritten = self._unwritten, {}
        charged = {name: (each.requests, each.tokens) for name, each in self._accounts.items()}
        changed = {name: each for name, each in charged.items() if self._written.get(name, (0, 0)) != each}
        try:
            if writing or changed:
                found = await self._store.run(partial(_write, server, writing, changed, now, month))
            else:
                found = await self._store.read(partial(_read, server, month))
        except ApiError:
            for slot, used in writing.items():
                self._unwritten.setdefault(slot, Used()).add(used)
            raise
        self._written |= changed
        self._learn(found, month)

    def _learn(self, found: Exchanged, month: str) -> None:
        """Apply what the store says. The charges that the first exchange finds are earlier ones, and cost nothing."""
        known, self._known = self._known, found
        if self._first.is_set():
            for (name, server), (requests, tokens) in found.others.items():
                earlier = known.others.get((name, server), (0, 0))
                if name in self._accounts:
                    self._accounts[name].take_late(requests - earlier[0], tokens - earlier[1], self._clock())
        unwritten: Counts[str] = Counts()
        for slot, used in self._unwritten.items():
            if slot.month == month:
                unwritten[slot.key] += used.prompt + used.output
        for name, account in self._accounts.items():
            account.correct(found.spent.get(name, 0) + unwritten[name])
        self._first.set()

    async def _exchange_until_closed(self) -> None:
        while not self._closing.is_set():
            with suppress(ApiError):  # The store failed, and has logged the reason.
                await self.exchange()
                if any(each.in_progress and each.limits.streams is not None for each in self._accounts.values()):
                    await self._store.run(partial(_renew, self._server, self._now()))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), EXCHANGE_SECONDS)

    async def close(self) -> None:
        """Write what is unwritten, and end the exchange. Loses it if the store fails."""
        self._closing.set()
        await asyncio.gather(*self._leaving)
        if self._exchanging is not None:
            await self._exchanging
            with suppress(ApiError):
                await self.exchange()


def month_of(seconds: float) -> str:
    """Return the month of a time in UTC, as 2026-11."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m")


def _enter(server: str, key: str, streams: int, limit: int, now: float, store: Store) -> bool:
    return StreamTable(store.database).enter(server, key, streams, limit, now)


def _leave(server: str, key: str, account: Account, now: float, store: Store) -> None:
    StreamTable(store.database).leave(server, key, account.in_progress, now)


def _renew(server: str, now: float, store: Store) -> None:
    StreamTable(store.database).renew(server, now)


def _write(
    server: str, used: dict[Slot, Used], charged: dict[str, tuple[int, int]], now: float, month: str, store: Store
) -> Exchanged:
    return UsageTable(store.database).write(server, used, charged, now, month)


def _read(server: str, month: str, store: Store) -> Exchanged:
    return UsageTable(store.database).exchange(server, month)
