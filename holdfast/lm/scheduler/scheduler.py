"""Scheduler: takes requests, decides steps, and applies their results to the sequences."""

from __future__ import annotations

import hashlib
from collections import abc, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from holdfast.core.columns import Columns
from holdfast.core.tokens import VOCABULARY_LIMIT
from holdfast.core.types import MAX_SEED, FinishReason, Identity, Request, SequenceOutput, TokenLogprobs
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.protocol import AnyMemory, AnyState
from holdfast.lm.memory.sequence_cache import SequenceCache
from holdfast.lm.scheduler.builder import Policy, StepBuilder
from holdfast.lm.scheduler.entries import NO_ROW, Entry
from holdfast.lm.scheduler.order import Order, Priority
from holdfast.lm.scheduler.part import Hooks, Part
from holdfast.lm.scheduler.queues import Queues
from holdfast.lm.types import History, PartPlan, Sampling, SchedulerStats, Sequence, StepPlan, StepResult
from holdfast.lm.types.grammars import Answer, Forced, GrammarPlan, GrammarResult
from holdfast.lm.types.penalties import PenaltyPlan
from holdfast.lm.types.prompts import PromptResult
from holdfast.lm.types.vectors import VectorResult

P = TypeVar("P", bound=Part)

LEAST_FORCED = 2
"""Fewer tokens that a grammar forces are sampled one by one: a step of decodes alone is faster."""


class Scheduler:
    """Holds each sequence, with its blocks, from its request to its end.

    `schedule` may be called again before the results of earlier plans are known. Plans must run in the order in which
    they were made, and their results come back to `update` in that order.
    """

    _sends_all = False
    """Whether each plan has the histories of all its rows that need one."""

    def __init__(
        self,
        policy: Policy,
        pool: AnyMemory,
        parts: abc.Collection[Part] = (),
        *,
        max_sequences: int,
        max_model_len: int,
        vocab_size: int = VOCABULARY_LIMIT,
        eos_token_ids: abc.Collection[int] = (),
        headroom: float = 0.1,
        sharing: bool = False,
        served: Identity | None = None,
        order: Order | None = None,
        seed: int = 0,
        stages: int = 1,
        make_state: Callable[[Any, bytes | None], AnyState] = SequenceCache,
        make_queues: Callable[[Any, int, float, Order, int, Hooks], Queues] = Queues,
        make_builder: Callable[[Any, int, float], StepBuilder] = StepBuilder,
    ) -> None:
        """`parts` are called in their order. `sharing` lets requests of one identity share the state of equal prefixes.
        `served` names the model, adapter and dtype of the executor; `add` refuses any other, unless a part serves it.
        None refuses nothing.

        `headroom` is the share of the blocks that admission leaves to running sequences. `order` ranks requests, by
        default by priority class. `seed` makes seeds for requests that bring none. `stages` is the number of stages of
        a pipeline: a sequence sampled in step k may be in step k + stages before the host knows its token, and in no
        step between unless the host knows it. Each step takes its share of the decodes.

        `make_state` makes the state of one sequence, given the pool and the root of its chain of digests
        (`Identity.root`), or None where it shares nothing. `make_queues` and `make_builder` make the queues, and the
        builder of each plan. The three go with the kind of pool.
        """
        self._limits = RequestLimits(max_model_len, vocab_size, pool.num_blocks * pool.block_size, served)
        self._policy = policy
        self._order = order or Priority()
        self._sharing = sharing
        self._make_state = make_state
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._hooks = Hooks(parts)
        self._queues = make_queues(pool, max_sequences, headroom, self._order, stages, self._hooks)
        for part in parts:
            part.attach(self._queues)
        self._make_builder = make_builder
        self._entries: dict[str, Entry] = {}
        self._in_flight: deque[tuple[int, list[Entry], int, list[Entry]]] = deque()
        """Of each plan: its number, the sequences it samples for, how many sequences had ended when it was made, and
        those of whose prompts it tells."""
        self._told: dict[Entry, tuple[TokenLogprobs, ...]] = {}
        """What the present result tells of prompts."""
        self._vectors: dict[Entry, bytes] = {}
        """The embeddings that the present result gives."""
        self._requests = 0
        self._counting = 0
        """Requests whose draws depend on the tokens so far, by penalties or by a grammar."""
        self._known_before = 0
        """The largest `Entry.known_before`."""
        self._steps = 0
        self._ended = 0
        self._now = 0.0
        """The latest time that any call gave; `abort` gives none."""
        self._tokens_computed = 0

    @property
    def memory(self) -> AnyMemory:
        """The memory behind the sequences, as it stands with the plans in flight."""
        return self._queues.pool

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it could never run to its end, or if its id is taken."""
        params, pool = request.params, self._queues.pool
        if request.id in self._entries:
            raise ValueError(f"request {request.id} is already being served; give each request an id of its own")
        identity = request.identity
        for part in self._hooks.base_identity:
            identity = part.base_identity(identity)
        self._limits.check(
            request.prompt,
            params,
            identity=identity,
            priority=request.priority,
            deadline=request.deadline,
            answered=request.answered,
        )
        for part in self._hooks.check:
            part.check(request)
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        limit = min(request.answer_start + params.max_tokens, self._limits.max_model_len)
        seed = self._draw_seed() if params.seed is None else params.seed
        entry = Entry(
            sequence=Sequence(request, seed),
            id=request.id,
            rank=self._order.rank(request, self._requests),
            cache=self._make_state(pool, request.identity.root() if self._sharing else None),
            sampling=Sampling.of(params, seed, prompt=request.answer_start, ends=ends),
            limit=limit,
            ends=ends,
            tells=params.prompt_logprobs,
        )
        for part in self._hooks.added:
            part.added(entry)
        self._requests += 1
        self._counting += depends(entry.sampling)
        self._entries[request.id] = entry
        if self._queues.num_waiting:
            self._now = max(self._now, request.arrival)
            entry.cache.touch(request.prompt, self._now)  # it will wait: its conversation is active again from now on
        soon = len(self._queues.free_rows) > self._queues.num_waiting
        self._queues.add(entry)
        if soon and entry not in self._queues.held:
            self._queues.is_held_back(entry, max(self._now, request.arrival))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in their order."""
        return self._hooks.parts

    def part(self, kind: type[P]) -> P:
        """The part of this class. Raises LookupError where there is none."""
        for part in self._hooks.parts:
            if isinstance(part, kind):
                return part
        raise LookupError(f"this scheduler has no {kind.__name__}")

    def abort(self, request_id: str) -> None:
        """End a request at once; tokens that steps in flight give for it are dropped. Ignores requests that ended."""
        entry = self._entries.get(request_id)
        if entry is not None:
            self._end(entry, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request at once."""
        for name in tuple(self._entries):
            self.abort(name)

    def schedule(self, now: float) -> StepPlan | None:
        """Decide the next step; it counts as submitted. None if nothing can run before a step in flight ends."""
        self._now = now
        hooks = self._hooks
        for part in hooks.advance:
            part.advance(now)
        step = self._make_builder(self._queues, self._steps, now)
        step.in_flight = bool(self._in_flight)
        for part in hooks.begin:
            part.begin(step)
        self._policy.plan(step)
        plan = step.finish(in_flight=bool(self._in_flight))
        if plan is not None:
            if self._counting and (parts := self._histories(step.sampling)):
                plan = replace(plan, parts=(*plan.parts, *parts))
            self._in_flight.append((self._steps, step.sampling, self._ended, step.telling))
            self._steps += 1
            self._tokens_computed += step.num_tokens
            for part in hooks.planned:
                part.planned(plan)
        return plan

    def _histories(self, sampling: list[Entry]) -> list[PartPlan]:
        """The tokens of those sequences whose draws depend on them, where they are new in their row."""
        histories, answers = [], []
        for entry in sampling:
            record, place = entry.sampling, (entry.row, entry.sequence.preemptions)
            if depends(record) and (self._sends_all or entry.history_in != place):
                entry.history_in = place
                tokens, request = entry.sequence.tokens, entry.sequence.request
                start = request.answer_start
                if record.counts:
                    histories.append(History(entry.row, tuple(tokens)))
                if record.grammar is not None:
                    answers.append(Answer(entry.row, start, tuple(tokens[start:]), request.identity.tenant))
        parts: list[PartPlan] = [PenaltyPlan(tuple(histories))] if histories else []
        return [*parts, GrammarPlan(tuple(answers))] if answers else parts

    def update(self, plan: StepPlan, result: StepResult, now: float) -> Columns[SequenceOutput]:
        """Apply the result of the oldest plan in flight; returns the new tokens, and which sequences ended.

        Raises RuntimeError if the result is another plan's, or does not hold the tokens that its plan samples.
        """
        number, sampling, ended, telling = self._in_flight.popleft()
        ragged = plan.samples is not None or result.counts is not None
        if not plan.step == result.step == number or not (
            valid_counts(plan, result, sampling) if ragged else len(result.tokens) == len(sampling)
        ):
            raise RuntimeError(
                f"step {number} with {len(sampling)} sampled tokens is due; got plan {plan.step}, "
                f"result {result.step} with {len(result.tokens)}"
            )
        of_prompts = result.part(PromptResult).logprobs
        if len(of_prompts) != len(telling):
            raise RuntimeError(f"step {number} tells of {len(telling)} prompts; got {len(of_prompts)}")
        if telling:
            pairs = zip(telling, of_prompts, strict=True)
            self._told = {entry: told for entry, told in pairs if entry.sequence.finish_reason is None}
        if vectors := result.part(VectorResult).vectors:
            self._vectors = dict(zip(sampling, vectors, strict=True))
        pool = self._queues.pool
        self._now = now
        pool.finish_swap_out(result.copied.swapped_out)
        pool.copies.finish_swap_in(result.copied.swapped_in)
        for copy in result.copied.times:
            if copy.inward and isinstance(pool, BlockPool):
                pool.host_link.observe(copy.bytes, copy.seconds)
        for part in self._hooks.apply:
            for entry in part.apply(plan, result, now):
                self._end(entry, FinishReason.ABORT)
        self._policy.observe(plan, result)
        if (stages := self._queues.stages) > 1:
            for entry in sampling:
                if entry.next_step == number + stages:  # no later step has planned it
                    entry.next_step = 0
        if ragged:
            return self._read_ragged(sampling, plan, result)
        self._order.sampled(sampling)
        tokens: abc.Sequence[int] = result.tokens
        told: abc.Sequence[TokenLogprobs | None] = result.logprobs
        forced = [(sampling[each.at], each) for each in result.part(GrammarResult).forced]
        # Some of them may have ended since the step was planned, or may know what it gives.
        if ended < self._ended or number < self._known_before:
            kept = [
                place
                for place, entry in enumerate(sampling)
                if entry.sequence.finish_reason is None and number >= entry.known_before
            ]
            sampling, tokens = [sampling[place] for place in kept], [tokens[place] for place in kept]
            told = [told[place] for place in kept] if told else told
        before = self._ended
        self._append(sampling, tokens)
        logprobs = [() if each is None else (each,) for each in told]
        added: list[tuple[int, ...]] = list(zip(tokens))
        for entry, tail in forced:
            if number >= entry.known_before and (more := self._follow(entry, tail)):
                added[sampling.index(entry)] += more
        return self._outputs(sampling, added, logprobs, some_ended=self._ended > before)

    def _read_ragged(self, sampling: list[Entry], plan: StepPlan, result: StepResult) -> Columns[SequenceOutput]:
        """Apply a result with no, one or several tokens for each sampling segment."""
        rest, before, grown = iter(result.tokens), self._ended, dict[Entry, int]()
        told, logprobs = iter(result.logprobs), dict[Entry, list[TokenLogprobs]]()
        for place, entry in enumerate(sampling):
            count = result.counts[place] if result.counts is not None else 1
            tokens, of_tokens = tuple(islice(rest, count)), tuple(islice(told, count))
            self._order.sampled([entry] * len(tokens))
            sequence, cache, known = entry.sequence, entry.cache, len(entry.sequence.tokens)
            if sequence.finish_reason is not None or plan.step < entry.known_before:
                continue
            if plan.samples is not None and plan.samples[place] > 1:  # a draft: all but the last token is computed
                sequence.rollback(known + len(tokens))
                if tokens:
                    cache.plan(cache.planned, cache.planned + len(tokens))
                entry.next_step = 0
                entry.drawn_last = False
            for index, token in enumerate(tokens):
                if sequence.finish_reason is None:
                    self._append([entry], [token])
                    if of_tokens and (each := of_tokens[index]) is not None:
                        logprobs.setdefault(entry, []).append(each)
            if tokens:
                grown.setdefault(entry, known)
        for tail in result.part(GrammarResult).forced:
            entry = sampling[tail.at]
            if plan.step >= entry.known_before:
                self._follow(entry, tail)
        added = [tuple(entry.sequence.tokens[known:]) for entry, known in grown.items()]
        of_entries = [tuple(logprobs.get(entry, ())) for entry in grown] if logprobs else []
        return self._outputs([*grown], added, of_entries, some_ended=self._ended > before)

    def _append(self, entries: list[Entry], tokens: abc.Sequence[int]) -> None:
        """Append one token to each of these sequences, and end those it is the last token of."""
        for entry, token in zip(entries, tokens, strict=True):
            known = entry.sequence.tokens
            known.append(token)
            if len(known) >= entry.next_check:
                entry.cache.cache_blocks(known)
                entry.next_check = min(entry.cache.next_full, entry.limit)
                if len(known) == entry.limit and token not in entry.ends:
                    self._end(entry, FinishReason.LENGTH)
            if token in entry.ends:
                self._end(entry, FinishReason.STOP)

    def _follow(self, entry: Entry, forced: Forced) -> tuple[int, ...]:
        """Append what must follow a sequence's last token. The next step computes it, as it does tokens of a prompt.

        Steps in flight sample the first of these tokens, too; what they give is known then. Returns the tokens.
        """
        sequence = entry.sequence
        if (
            sequence.finish_reason is not None
            or entry.row == NO_ROW
            or not entry.decoding
            or not entry.sampling.skips
            or len(forced.tokens) - sequence.in_flight < LEAST_FORCED
        ):
            return ()
        known, length = len(sequence.tokens), sequence.length
        for token in forced.tokens:
            if sequence.finish_reason is None:
                self._append([entry], [token])
        added = tuple(sequence.tokens[known:])
        self._order.sampled([entry] * len(added))
        if sequence.finish_reason is None:
            sequence.length = len(sequence.tokens)
            entry.decoding = False
            self._queues.forced.add(entry)
            if length > known:
                entry.known_before = self._known_before = self._steps
        return added

    def _outputs(
        self,
        entries: list[Entry],
        tokens: list[tuple[int, ...]],
        logprobs: abc.Sequence[tuple[TokenLogprobs, ...]],
        *,
        some_ended: bool,
    ) -> Columns[SequenceOutput]:
        """The outputs of these sequences, whose new tokens are given, with their log probabilities if any ask.

        Sequences of whose prompts the result tells have an output, too.
        """
        prompts: abc.Sequence[tuple[TokenLogprobs, ...]] = ()
        if self._told:
            others = [entry for entry in self._told if entry not in entries]
            entries, tokens = entries + others, tokens + [()] * len(others)
            logprobs = [*logprobs, *[()] * len(others)] if logprobs else ()
            prompts = [self._told.get(entry, ()) for entry in entries]
            self._told = {}
        vectors = [self._vectors.get(entry, b"") for entry in entries] if self._vectors else [b""] * len(entries)
        self._vectors = {}
        sequences = [entry.sequence for entry in entries]
        return Columns(
            SequenceOutput,
            request_id=[entry.id for entry in entries],
            tokens=tokens,
            finish_reason=[sequence.finish_reason for sequence in sequences] if some_ended else [None] * len(entries),
            cached_tokens=[sequence.cached_tokens for sequence in sequences],
            scheduled_at=[sequence.scheduled_at for sequence in sequences],
            preemptions=[sequence.preemptions for sequence in sequences],
            logprobs=logprobs or [()] * len(entries),
            prompt_logprobs=prompts or [()] * len(entries),
            vector=vectors,
            cached_by_tier=[sequence.cached_by_tier for sequence in sequences],
        )

    @property
    def queues(self) -> Queues:
        """The waiting and the running sequences, to look at."""
        return self._queues

    @property
    def entries(self) -> abc.Mapping[str, Entry]:
        """The sequences that have not ended, by id, to look at."""
        return self._entries

    def has_work(self) -> bool:
        """Whether any request has not ended, a part has work without any, or others wait for copies."""
        return (
            bool(self._entries)
            or any(part.has_work for part in self._hooks.has_work)
            or bool(self._queues.pool.copies.wanted)
        )

    @property
    def pool(self) -> AnyMemory:
        """The memory. Between two plans, others may hold, reserve and fill blocks of its host tier."""
        return self._queues.pool

    def stats(self) -> SchedulerStats:
        """Queues and memory now, with plans in flight counted as done."""
        queues, pool = self._queues, self._queues.pool
        return SchedulerStats(
            waiting=queues.num_waiting,
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
            host_blocks_ready=pool.host.ready if pool.host else 0,
            host_blocks_cached=pool.host.cached if pool.host else 0,
            host_blocks_dropped=pool.host.dropped if pool.host else 0,
            blocks_swapped_in=pool.swapped_in,
            blocks_swapped_out=pool.swapped_out,
            prefix_hits_on_host=queues.prefix_hits_on_host,
            suspensions=queues.preemptions if pool.host else 0,
            tokens_dropped=pool.dropped * pool.block_size,
            tokens_drafted=self._policy.tokens_drafted,
            drafts_accepted=self._policy.drafts_accepted,
            **self._stats_of_parts(),
        )

    def _stats_of_parts(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part in self._hooks.stats:
            found.update(part.stats())
        return found

    def _end(self, entry: Entry, reason: FinishReason) -> None:
        entry.sequence.finish_reason = reason
        self._ended += 1
        self._counting -= depends(entry.sampling)
        del self._entries[entry.id]
        self._queues.stop(entry, self._now)
        self._policy.ended(entry)
        for part in self._hooks.ended:
            part.ended(entry)

    def _draw_seed(self) -> int:
        """The next seed for a request that brings none, the same in every run."""
        digest = hashlib.sha256(f"{self._seed}/{self._requests}".encode()).digest()
        return int.from_bytes(digest[:8], "little") & MAX_SEED


def depends(sampling: Sampling) -> bool:
    """Whether a draw depends on the tokens so far."""
    return sampling.counts or sampling.grammar is not None


def valid_counts(plan: StepPlan, result: StepResult, sampling: list[Entry]) -> bool:
    """Whether a ragged result gives each sampling segment as many tokens as its plan allows.

    Those of a sequence whose state was lost may give none.
    """
    counts = [1] * len(sampling) if result.counts is None else result.counts
    most = [1] * len(sampling) if plan.samples is None else plan.samples
    return (
        len(counts) == len(most) == len(sampling)
        and sum(counts) == len(result.tokens)
        and all(
            count == 1 or (limit > 1 and 0 <= count <= limit) or (count == 0 and plan.step < entry.lost_before)
            for count, limit, entry in zip(counts, most, sampling, strict=True)
        )
    )
