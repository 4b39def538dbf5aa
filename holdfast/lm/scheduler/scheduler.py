"""Scheduler: takes requests, decides the steps, and reads their results back into the sequences."""

from __future__ import annotations

import hashlib
from collections import abc, deque

from holdfast.core.columns import Columns
from holdfast.core.tokens import VOCABULARY_LIMIT
from holdfast.core.types import MAX_SEED, FinishReason, Request, SequenceOutput
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_pool import BlockPool, StateIdentity
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.order import Order, Priority
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import Sampling, SchedulerStats, Sequence, StepPlan, StepResult


class Scheduler:
    """Holds each sequence from its request to its end, and its place in memory.

    `schedule` may be called again before the results of earlier plans are known. Plans must run in the order in which
    they were made, and their results come back to `update` in that order.
    """

    def __init__(
        self,
        policy: Policy,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int = VOCABULARY_LIMIT,
        eos_token_ids: abc.Collection[int] = (),
        headroom: float = 0.1,
        sharing: StateIdentity | None = None,
        order: Order | None = None,
        seed: int = 0,
        micro_batches: int = 1,
    ) -> None:
        """`sharing` identifies the state in the cache, for requests to share equal prefixes; None: they do not.

        `headroom` is the share of the blocks that admission leaves to running sequences; `order` says who goes
        first, by default the priority class; `seed` makes the seeds of requests that bring none. With more than one of
        `micro_batches`, the stages of a pipeline, so many steps are in flight that share no sequence whose token is
        being sampled: each takes its share of the decodes.
        """
        self._limits = RequestLimits(max_model_len, vocab_size, pool.num_blocks * pool.block_size)
        self._policy = policy
        self._order = order or Priority()
        self._sharing = sharing
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._queues = Queues(pool, max_sequences, headroom, self._order, micro_batches)
        self._entries: dict[str, Entry] = {}
        self._in_flight: deque[tuple[int, list[Entry], int]] = deque()
        """Of each plan its number, whose tokens it samples, and how many sequences had ended when it was made."""
        self._requests = 0
        self._steps = 0
        self._ended = 0
        self._tokens_computed = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run to its end, or if its id is taken."""
        params, pool = request.params, self._queues.pool
        if request.id in self._entries:
            raise ValueError(f"request {request.id} is already being served; give each request an id of its own")
        self._limits.check(request.prompt, params, priority=request.priority, deadline=request.deadline)
        limit = min(len(request.prompt) + params.max_tokens, self._limits.max_model_len)
        seed = self._draw_seed() if params.seed is None else params.seed
        entry = Entry(
            sequence=Sequence(request, seed),
            id=request.id,
            rank=self._order.rank(request, self._requests),
            cache=SequenceCache(pool, self._sharing.root(request.tenant) if self._sharing else None),
            sampling=Sampling(params.temperature, params.top_k, params.top_p, seed),
            limit=limit,
            ends=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos),
        )
        self._requests += 1
        self._entries[request.id] = entry
        if self._queues.waiting:
            pool.now = max(pool.now, request.arrival)
            entry.cache.touch(request.prompt)  # it will wait: its conversation is active again from now on
        self._queues.waiting.add(entry)

    def abort(self, request_id: str) -> None:
        """Let go of a request at once; what steps in flight bring for it is dropped. Unknown ids have ended before."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._end(entry, FinishReason.ABORT)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; it counts as submitted. None if nothing can run before a step in flight ends."""
        self._queues.pool.now = now
        step = StepBuilder(self._queues, self._steps, now)
        self._policy.plan(step)
        plan = step.finish(in_flight=bool(self._in_flight))
        if plan is not None:
            self._in_flight.append((self._steps, step.sampling, self._ended))
            self._steps += 1
            self._tokens_computed += step.num_tokens
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        """Read in the result of the oldest plan in flight: the tokens that became known, and which sequences ended."""
        number, sampling, ended = self._in_flight.popleft()
        if not plan.step == result.step == number or len(result.tokens) != len(sampling):
            raise RuntimeError(
                f"step {number} with {len(sampling)} sampled tokens is due; got plan {plan.step}, "
                f"result {result.step} with {len(result.tokens)}"
            )
        pool = self._queues.pool
        pool.now = now
        pool.finish_swap_out(result.swapped_out)
        pool.finish_swap_in(result.swapped_in)
        self._policy.observe(plan, result)
        return self._read(sampling, result.tokens, some_ended=ended < self._ended)

    def _read(self, sampling: list[Entry], tokens: abc.Sequence[int], some_ended: bool) -> Columns[SequenceOutput]:
        """Add a token to each of these sequences, except to those that ended since their step was planned, if any."""
        self._order.sampled(sampling)
        alive = sampling
        if some_ended:
            pairs = [pair for pair in zip(sampling, tokens, strict=True) if pair[0].sequence.finish_reason is None]
            alive, tokens = [entry for entry, _ in pairs], [token for _, token in pairs]
        before = self._ended
        for entry, token in zip(alive, tokens, strict=True):
            known = entry.sequence.tokens
            known.append(token)
            if len(known) >= entry.next_check:
                entry.cache.cache_blocks(known)
                entry.next_check = min(entry.cache.next_full, entry.limit)
                if len(known) == entry.limit and token not in entry.ends:
                    self._end(entry, FinishReason.LENGTH)
            if token in entry.ends:
                self._end(entry, FinishReason.STOP)
        sequences = [entry.sequence for entry in alive]
        columns = (
            [entry.id for entry in alive],
            list(zip(tokens)),
            [sequence.finish_reason for sequence in sequences] if self._ended > before else [None] * len(alive),
            [sequence.cached_tokens for sequence in sequences],
            [sequence.scheduled_at for sequence in sequences],
            [sequence.preemptions for sequence in sequences],
        )
        return Columns(SequenceOutput, columns)

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._entries)

    def stats(self) -> SchedulerStats:
        """Queues and memory as they stand, plans in flight counted as done."""
        queues = self._queues
        pool = queues.pool
        return SchedulerStats(
            waiting=len(queues.waiting),
            running=len(queues.running) + len(queues.swapping_in),
            blocks_total=pool.num_blocks,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            preemptions=queues.preemptions,
            prefix_queries=queues.prefix_queries,
            prefix_hits=queues.prefix_hits,
            tokens_computed=self._tokens_computed,
            tokens_recovered=queues.recovered,
            host_blocks_total=pool.host.num_blocks if pool.host else 0,
            host_blocks_cached=pool.host.cached if pool.host else 0,
            host_blocks_dropped=pool.host.dropped if pool.host else 0,
            blocks_swapped_in=pool.swapped_in,
            blocks_swapped_out=pool.swapped_out,
            prefix_hits_on_host=queues.prefix_hits_on_host,
            suspensions=queues.preemptions if pool.host else 0,
            tokens_dropped=pool.dropped * pool.block_size,
        )

    def check(self) -> None:
        """Raise RuntimeError if a block is lost, or has two owners that do not share it. For tests and idle times."""
        self._queues.pool.check([entry.cache.blocks for entry in self._entries.values()])

    def _end(self, entry: Entry, reason: FinishReason) -> None:
        entry.sequence.finish_reason = reason
        self._ended += 1
        del self._entries[entry.id]
        self._queues.stop(entry)

    def _draw_seed(self) -> int:
        """The next seed for a request that brings none, the same in every run."""
        digest = hashlib.sha256(f"{self._seed}/{self._requests}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED
