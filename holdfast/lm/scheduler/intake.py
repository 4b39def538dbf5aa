"""Intake: makes the entry of a new request, once nothing speaks against it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from holdfast.core.types import MAX_SEED, Request
from holdfast.lm.limits import RequestLimits
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.kind import MemoryKind
from holdfast.lm.scheduler.order import Order
from holdfast.lm.scheduler.part import Hooks
from holdfast.lm.types import Sampling, Sequence


class Intake:
    """Checks requests against the engine's limits and its parts, and makes their entries."""

    def __init__(
        self,
        limits: RequestLimits,
        order: Order,
        hooks: Hooks,
        kind: MemoryKind,
        *,
        eos_token_ids: Collection[int],
        sharing: bool,
        seed: int,
    ) -> None:
        """The arguments are those of `Scheduler` of the same names; `limits` come from the sizes among them."""
        self.limits = limits
        self.order = order
        self.sharing = sharing
        self.seed = seed
        self._hooks = hooks
        self._kind = kind
        self._eos = frozenset(eos_token_ids)
        self._taken = 0
        """Number of requests accepted so far."""

    def take(self, request: Request) -> Entry:
        """The entry of this request. Raises ValueError if it could never run to its end."""
        params, hooks = request.params, self._hooks
        identity = request.identity
        for part in hooks.base_identity:
            identity = part.base_identity(identity)
        self.limits.check(
            request.prompt,
            params,
            identity=identity,
            priority=request.priority,
            deadline=request.deadline,
            answered=request.answered,
        )
        for part in hooks.check:
            part.check(request)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        seed = self._draw_seed() if params.seed is None else params.seed
        entry = Entry(
            sequence=Sequence(request, seed),
            id=request.id,
            rank=self.order.rank(request, self._taken),
            cache=self._kind.state(request.id, request.identity.root() if self.sharing else None),
            sampling=Sampling.of(params, seed, prompt=request.answer_start, ends=ends),
            limit=min(request.answer_start + params.max_tokens, self.limits.max_model_len),
            ends=ends,
            uses_kept=all(part.uses_kept(request) for part in hooks.uses_kept),
        )
        for part in hooks.accept:
            part.accept(entry)
        for part in hooks.added:
            part.added(entry)
        self._taken += 1
        return entry

    def _draw_seed(self) -> int:
        """The next seed for a request that brings none, the same in every run."""
        digest = hashlib.sha256(f"{self.seed}/{self._taken}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED
