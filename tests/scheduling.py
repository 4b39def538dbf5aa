"""Shared by tests of scheduler, memory and loop: requests, a device that checks every read, a sequential oracle."""

from collections import deque
from itertools import repeat

from holdfast.core.types import FinishReason, Identity, Request, SamplingParams
from holdfast.lm.memory.ahead import NO_STATES_AHEAD
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.prices import Prices
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.parts.grammars.planner import GrammarPart
from holdfast.lm.parts.pauses.observed import observed
from holdfast.lm.parts.pauses.planner import AheadPart
from holdfast.lm.parts.penalties.planner import PenaltyPart
from holdfast.lm.parts.prompts.planner import PromptPart
from holdfast.lm.parts.tiers.hybrid_tiers import hybrid_tiers
from holdfast.lm.parts.tiers.lower_tiers import LowerTiers
from holdfast.lm.parts.tiers.planner import TierPart
from holdfast.lm.parts.tuning.values import TrainingPlan
from holdfast.lm.parts.vectors.planner import VectorPart
from holdfast.lm.scheduler.hybrid import HybridKind
from holdfast.lm.scheduler.paged import PagedKind
from holdfast.lm.scheduler.policies import StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import PENDING, StateShape, StepPlan, StepResult, TierCopied

EOS = 0
VOCABULARY = 50
NOBODY = Identity()


def create_scheduler(
    *,
    budget=64,
    blocks=64,
    block_size=4,
    max_sequences=8,
    max_model_len=128,
    headroom=0.0,
    sharing=True,
    eos=(),
    policy=None,
    host_blocks=0,
    host_ready=None,
    eviction="retention",
    chunk_blocks=1,
    low_water=0.25,
    lower=None,
    parts=(),
    by_layer=False,
    snapshots=0,
    host_snapshots=0,
    places=0,
    forks=True,
    pauses=False,
    **options,
):
    rule = RetentionRule(
        EVICTIONS[eviction], cost=float, chunk_blocks=chunk_blocks, block_size=block_size, turns=make_turns(eviction)
    )
    kept = rule.from_the_end() if snapshots else rule
    pool = BlockPool(blocks, block_size, rule=kept, host_blocks=host_blocks, host_ready=host_ready, low_water=low_water)
    kind = PagedKind(pool, by_layer=by_layer)
    if snapshots:
        sizes = {"snapshots": snapshots, "host_snapshots": host_snapshots, "places": places}
        shape = StateShape(**sizes, slot_bytes=1 << 20)
        states = StatePool(shape, max_sequences, pool, rule, low_water=low_water)
        kind = HybridKind(pool, states, by_layer=by_layer, forks=forks)
    if lower is not None and lower.snapshots is not None:
        parts = [*parts, TierPart(hybrid_tiers(pool, states, lower, lower.snapshots, None, 0.0))]
    elif lower is not None:
        prices = Prices(None, block_size=block_size, block_bytes=lower.block_bytes)
        parts = [*parts, TierPart(LowerTiers(pool, lower, prices, 0.0))]
    if pauses:
        gaps, kept_states = observed(eviction, pool.rule.turns, block_size), states if snapshots else NO_STATES_AHEAD
        parts = [*parts, AheadPart(pool, gaps, block_bytes=1 << 20, states=kept_states)]
    return Scheduler(
        policy or StallFree(budget),
        kind,
        (*parts, PromptPart(), VectorPart(), PenaltyPart(), GrammarPart()),
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        headroom=headroom,
        eos_token_ids=eos,
        sharing=sharing,
        **options,
    )


def create_requests(*prompts, max_tokens=4, priority=0, identity=NOBODY, **params):
    """Requests "0", "1", …; a prompt given as a number is that many tokens of its own."""
    return [
        Request(
            id=str(index),
            prompt=tuple(range(1000 * (index + 1), 1000 * (index + 1) + prompt)) if isinstance(prompt, int) else prompt,
            params=SamplingParams(max_tokens=max_tokens, **params),
            priority=priority,
            identity=identity,
        )
        for index, prompt in enumerate(prompts)
    ]


def spans(plan):
    """The segments of a plan in short: (sequence, start, stop) of each."""
    return [(segment.sequence_id, segment.start, segment.stop) for segment in plan.segments]


def sampled(plan):
    """The sampling segments of a plan, in the order of StepResult.tokens."""
    return [segment for segment in plan.segments if segment.sampling is not None]


def answer(plan, token=7, swapped_out=None, swapped_in=None):
    """A result that gives each sampling segment the same token. All copies are complete unless given."""
    tokens = (token,) * plan.num_sampled
    done = [plan.step if step is None else step for step in (swapped_out, swapped_in)]
    return StepResult(plan.step, tokens, 0.0, copied=TierCopied(*done))


def model_state(tokens):
    """What a model holds at each position: a value that depends on every token up to it."""
    states, state = [], 0
    for token in tokens:
        state = hash((state, token))
        states.append(state)
    return states


def sampled_from(state):
    """The model's next token."""
    return hash((state, -1)) % VOCABULARY


def run_alone(request, eos=(), max_model_len=128):
    """The oracle: the tokens of a request, and why it ends, when it is computed in one go with no cache at all."""
    tokens, generated = list(request.prompt), []
    while True:
        token = sampled_from(model_state(tokens)[-1])
        tokens.append(token)
        generated.append(token)
        if token in request.params.stop_token_ids or (token in eos and not request.params.ignore_eos):
            return tuple(generated), FinishReason.STOP
        if len(generated) == request.params.max_tokens or len(tokens) == max_model_len:
            return tuple(generated), FinishReason.LENGTH


class FakeDevice:
    """An executor that stores, in blocks, what a model would, and checks that each segment reads its own context.

    It learns block tables from table writes only, and knows each sequence's true tokens: the prompt that it was told
    with `expect`, and what it sampled itself. A step writes all its positions before it reads any, as a layer does.

    Its copies to the host are as late as they may be: the contents arrive only when a result says so, by then the block
    must still hold what it held, and until then the place on the host holds nothing. Those from the host arrive when a
    plan awaits them or a result says so; before that nobody may touch their blocks. `choose` draws how many steps that
    takes; without it, the step that begins a copy completes it.

    It does a plan's block moves before all else, and its slice of training after the segments, with `trainer`.

    It verifies drafted tokens as a model does, and `choose` draws how many of the accepted ones it gives, down to none.
    """

    def __init__(self, num_blocks, block_size, host_blocks=0, choose=None):
        self.block_size = block_size
        self.slots = [None] * (num_blocks * block_size)
        self.host = [None] * host_blocks
        self.leaving = deque()
        self.coming = deque()
        self.choose = choose
        self.tables = {}
        self.last_sampled = {}
        self.streams = {}
        self.states = {}
        self.plans = deque()
        self.trainer = None
        self.refused = 0
        """Segments with drafted tokens that gave none."""

    def expect(self, request):
        self.streams[request.id] = list(request.prompt)
        self.states[request.id] = model_state(request.prompt)

    def close(self):
        self.plans.clear()

    def submit(self, plan: StepPlan):
        self.plans.append(plan)

    def collect(self) -> StepResult:
        plan = self.plans.popleft()
        self._move_blocks(plan)
        for write in plan.table_writes:
            table = self.tables.setdefault(write.row, [])
            assert write.start <= len(table), "a table has no holes"
            table[write.start : write.start + len(write.blocks)] = write.blocks
        self._begin_to_swap_in(plan)
        while self.coming and self.coming[0][0] <= plan.copies.awaits:
            self._arrive()
        self._begin_to_swap_out(plan)
        samples = plan.samples or repeat(1)
        drafts = {segment: segment.tokens[1:most] for segment, most in zip(sampled(plan), samples, strict=False)}
        states = {segment: self._states_of(segment, drafts.get(segment, ())) for segment in plan.segments}
        written = [slot for segment, states_at in states.items() for slot in self._write(segment, states_at)]
        assert len(set(written)) == len(written), "two segments of a step write to one place"
        for segment, states_at in states.items():
            self._read(segment, states_at)
        given = [self._sample(segment, draft) for segment, draft in drafts.items()]
        tokens = tuple(token for each in given for token in each)
        counts = None if plan.samples is None else tuple(map(len, given))
        copied = self._complete_copies(plan), self._complete_arrivals(plan)
        training = plan.part(TrainingPlan)
        trained = (self.trainer.run(training.slice, training.lent),) if training.slice else ()
        return StepResult(plan.step, tokens, 0.0, counts, TierCopied(*copied), parts=trained)

    def _move_blocks(self, plan):
        """All at once: no move reads what another writes."""
        sources, targets = ({move[side] for move in plan.part(TrainingPlan).moves} for side in (0, 1))
        assert len(sources) == len(targets) == len(plan.part(TrainingPlan).moves) and not sources & targets
        under_copy = {source for _, copies in self.leaving for (source, _), _ in copies}
        for source, target in plan.part(TrainingPlan).moves:
            assert self._untouched(source) and self._untouched(target) and source not in under_copy
            size = self.block_size
            self.slots[target * size : (target + 1) * size] = self._contents(source)

    def _contents(self, block):
        return self.slots[block * self.block_size : (block + 1) * self.block_size]

    def _begin_to_swap_in(self, plan):
        targets = {target for _, target in plan.copies.swap_in}
        assert len(targets) == len(plan.copies.swap_in), "two copies write to one block"
        for source, _ in plan.copies.swap_in:
            assert self.host[source] is not None, f"place {source} of the host is read, but nothing is there"
        self.coming.append((plan.step, [(target, self.host[source]) for source, target in plan.copies.swap_in]))

    def _arrive(self):
        number, copies = self.coming.popleft()
        for target, contents in copies:
            self.slots[target * self.block_size : (target + 1) * self.block_size] = contents
        return number

    def _complete_arrivals(self, plan):
        """Let some of the copies from the host arrive, the oldest first; all, where there is nothing else to do."""
        done = plan.step
        while self.coming:
            if self._goes_on(plan) and self.choose.random() < 0.4:
                return self.coming[0][0] - 1
            done = self._arrive()
        return done

    def _untouched(self, block):
        """Whether nothing is on its way to the block."""
        return all(block != target for _, copies in self.coming for target, _ in copies)

    def _begin_to_swap_out(self, plan):
        under_way = {target for _, copies in self.leaving for (_, target), _ in copies}
        for source, target in plan.copies.swap_out:
            assert self._untouched(source), f"block {source} is copied before it is there"
            assert target not in under_way, "two copies write to one place"
            under_way.add(target)
            self.host[target] = None
        self.leaving.append((plan.step, [(copy, self._contents(copy.source)) for copy in plan.copies.swap_out]))

    def _complete_copies(self, plan):
        """Let some of the copies arrive, the oldest first; all, where there is nothing else to do."""
        done = plan.step
        while self.leaving:
            if self._goes_on(plan) and self.choose.random() < 0.4:
                return self.leaving[0][0] - 1
            done, copies = self.leaving.popleft()
            for (source, target), contents in copies:
                assert self._contents(source) == contents, f"block {source} changed while it was copied"
                self.host[target] = contents
        return done

    def _goes_on(self, plan):
        """Whether a plan's result need not wait for copies."""
        return (plan.segments or plan.part(TrainingPlan).slice) and self.choose is not None

    def _slots_of(self, row, start, stop):
        size, table = self.block_size, self.tables[row]
        return [table[position // size] * size + position % size for position in range(start, stop)]

    def _states_of(self, segment, draft):
        """What a model holds at each position up to the segment's end, given the drafted tokens at its end."""
        stream, known = self.streams[segment.sequence_id], segment.stop - len(draft)
        tokens = segment.tokens[: len(segment.tokens) - len(draft)]
        if tokens == (PENDING,):
            assert self.last_sampled[segment.row] == stream[segment.start], "the row is not the sequence's any more"
        else:
            assert list(tokens) == stream[segment.start : known]
        return [*self.states[segment.sequence_id][:known], *model_state((*stream[:known], *draft))[known:]]

    def _write(self, segment, states):
        slots = self._slots_of(segment.row, segment.start, segment.stop)
        assert all(self._untouched(slot // self.block_size) for slot in slots), f"{segment} writes under a copy"
        for slot, state in zip(slots, states[segment.start :], strict=True):
            self.slots[slot] = state
        return slots

    def _read(self, segment, states):
        seen = [self.slots[slot] for slot in self._slots_of(segment.row, 0, segment.stop)]
        assert seen == states, f"{segment} reads what is not its own context"

    def _sample(self, segment, draft):
        """The tokens that follow a segment: one for each drafted token that is right, and one more."""
        stream, states = self.streams[segment.sequence_id], self.states[segment.sequence_id]
        assert len(stream) == segment.stop - len(draft), "each position is sampled once, the last one"
        tokens, state = [], states[-1]
        for guess in (*draft, None):
            tokens.append(sampled_from(state))
            state = hash((state, tokens[-1]))
            if tokens[-1] != guess:
                break
        if draft and self.choose is not None:
            del tokens[self.choose.randint(0, len(tokens)) :]
            self.refused += not tokens
        for token in tokens:
            stream.append(token)
            states.append(hash((states[-1], token)))
            self.last_sampled[segment.row] = token
        return tokens
