"""Shared by tests of planned training: jobs as sizes, and a trainer that checks every slice and its memory."""

from collections import Counter, deque
from zlib import crc32

from holdfast.core.cost import CostModel
from holdfast.core.training_cost import PLAIN, TrainingCost, TrainingShape
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.parts.tuning.training_room import TrainingRoom
from holdfast.lm.parts.tuning.tuner import Tuner
from holdfast.lm.parts.tuning.values import TrainingPlan, TrainingReport
from holdfast.lm.types import StepResult, TierCopied
from holdfast.training.jobs import Hyperparameters, JobSteps, TrainingJob

LAYERS = 2
SHAPE = TrainingShape(num_layers=LAYERS, attention_weights=10, mlp_weights=20, head_weights=20)


def cost_model(slope=0.001, base=0.004, deviation=0.0):
    """Steps of `base` seconds and `slope` for each token; attention takes a hundredth of that for each position."""
    tokens = (1, 64, 4096)
    return CostModel(
        model="m",
        device="d",
        linear_tokens=tokens,
        linear_seconds=tuple(base + slope * count for count in tokens),
        attention_queries=(1, 4096),
        attention_contexts=(1, 4096),
        attention_seconds=((slope / 100, slope / 100), (slope / 100, slope)),
        deviation=deviation,
    )


def make_steps(lengths, *, name="job", epochs=1, batch_size=2, micro_batch=16, validation=()):
    """The steps of a job over examples of these lengths."""
    chosen = Hyperparameters(epochs=epochs, batch_size=batch_size, micro_batch=micro_batch)
    job = TrainingJob(id=name, hyperparameters=chosen, base_model="base", base_digest="b", data_digest="d")
    return JobSteps(job, (PLAIN,) * LAYERS, lengths, validation)


def blocks_of(vectors, tokens_per_block=8):
    """Number of blocks that a job takes. Kept activations take three times as much as the inputs."""
    return lambda tokens, keep: vectors + (3 if keep else 1) * -(-tokens // tokens_per_block)


def make_tuner(cost=None, *, max_blocks=1 << 20, room=None, **options):
    return Tuner(TrainingCost(cost or cost_model(), SHAPE, **options), max_blocks=max_blocks, room=room)


def room_of(seconds, *, step=0.0, **options):
    """The room for units that take this many seconds, next to a step of 32 decodes that takes `step` seconds."""
    return TrainingRoom(seconds + step, 1.0, 32, step, **options)


class FakeTrainer:
    """A trainer that follows slices without numbers. It checks their order and room, like the real one.

    `slots` are the device's blocks (`FakeDevice.slots`). The trainer writes to the lent ones that it uses, and checks
    at every slice that nobody else has written there.
    """

    def __init__(self, slots, block_size, seconds=None):
        self.slots, self.block_size = slots, block_size
        self.num_blocks = len(slots) // block_size
        self.seconds = seconds or (lambda slice_: 0.0)
        self.jobs = {}
        self.resident = None
        self.trained = {}
        """The micro-batches of each job that were computed to their ends, in order."""
        self.seen = Counter()
        self._written = 0

    def open(self, name, steps, blocks):
        self.jobs[name] = dict(steps=steps, blocks=blocks, step=0, micro_batch=0, at=0, kept=set())
        self.trained.setdefault(name, [])

    def close(self, name):
        assert self.resident != name, "its vectors are still on the device"
        del self.jobs[name]

    def run(self, slice_, lent):
        job = self.jobs[slice_.job]
        self.seen[slice_.action] += 1
        assert (slice_.step, slice_.micro_batch) == (job["step"], job["micro_batch"])
        if slice_.action in ("release", "drop", "offload"):  # the plan may have overwritten this memory
            stays = self._batch(job).lengths if slice_.action == "release" else ()
            self._written = min(self._written, job["blocks"](sum(stays), False))
        top = range((self.num_blocks - self._written) * self.block_size, len(self.slots))
        assert all(self.slots[slot] == "training" for slot in top), "somebody wrote to a block that training uses"
        tokens, loss, vectors = 0, None, job["blocks"](0, False)
        if slice_.action == "restore":
            assert self.resident is None
            self.resident = slice_.job
            self._use(vectors, lent)
        else:
            assert self.resident == slice_.job
            if slice_.action == "run":
                tokens, loss = self._compute(job, slice_, lent)
            elif slice_.action == "release":
                assert job["kept"]
                job["kept"].clear()
                self._use(job["blocks"](sum(self._batch(job).lengths), False), lent)
            else:
                job["at"], job["kept"] = 0, set()
                if slice_.action == "offload":
                    assert lent >= vectors, "they are read in this plan"
                    self.resident = None
                self._use(0 if slice_.action == "offload" else vectors, lent)
        return TrainingReport(
            slice_.job, slice_.step, slice_.micro_batch, slice_.action, slice_.first, slice_.stop,
            self.seconds(slice_), tokens, loss,
        )  # fmt: skip

    def _batch(self, job):
        return job["steps"].micro_batches(job["step"])[job["micro_batch"]]

    def _compute(self, job, slice_, lent):
        batches = job["steps"].micro_batches(job["step"])
        batch = batches[job["micro_batch"]]
        assert job["at"] == slice_.first < slice_.stop <= len(batch.units)
        assert not (slice_.keep and batch.validation)
        for unit in batch.units[slice_.first : slice_.stop]:
            if slice_.keep and unit.kind in ("attention", "mlp"):
                job["kept"].add((unit.kind, unit.number))
            elif unit.kind.endswith("_backward"):
                job["kept"].discard((unit.kind.removesuffix("_backward"), unit.number))
        kept_here = slice_.keep and any(
            unit.kind in ("attention", "mlp") for unit in batch.units[slice_.first : slice_.stop]
        )
        count = sum(batch.lengths)
        self._use(job["blocks"](count, bool(kept_here or job["kept"])), lent)
        self.seen["kept" if slice_.keep else "recomputed"] += 1
        job["at"] = slice_.stop
        if slice_.stop < len(batch.units):
            self._use(job["blocks"](count, bool(job["kept"])), lent)
            return 0, None
        assert not job["kept"] or batch.validation
        self.trained[slice_.job].append((job["step"], job["micro_batch"]))
        job["at"], job["kept"] = 0, set()
        job["micro_batch"] += 1
        self._use(job["blocks"](0, False), lent)
        if job["micro_batch"] < len(batches):
            return count, None
        job["step"], job["micro_batch"] = job["step"] + 1, 0
        return count, 1.0

    def _use(self, blocks, lent):
        assert blocks <= lent <= self.num_blocks, f"{blocks} blocks are used, {lent} are lent"
        first = (self.num_blocks - blocks) * self.block_size
        self.slots[first:] = ["training"] * (len(self.slots) - first)
        self._written = blocks


def a_request(name, *, arrival=0.0, prompt=4, tokens=2, priority=0):
    own = crc32(name.encode()) % 10_000
    return Request(
        id=name,
        prompt=tuple(range(own, own + prompt)),
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        priority=priority,
        arrival=arrival,
    )


class FakeEngine:
    """A scheduler and a device in virtual time: steps of inference and slices follow each other."""

    def __init__(self, scheduler, tuner, step_seconds):
        self.scheduler, self.tuner, self.step_seconds = scheduler, tuner, step_seconds
        self.steps_in_flight = 1
        self.step_share = self.training_share = lambda: 1.0
        self.predict = None
        """A function from spans to a step's seconds; None: `step_seconds`."""
        self.now = 0.0
        self.due = deque()
        """Requests to come, in order of arrival."""
        self.plans = []
        """Every plan, with the time at which it was made."""
        self.started = {}
        """The time at which each request was first planned to start."""
        self.in_flight = deque()
        self.free_at = 0.0
        self.jobs = {}
        self.tokens = {}

    def open(self, name, steps, blocks):
        self.jobs[name] = steps
        self.tuner.add(name, steps, blocks)

    def add(self, request):
        self.scheduler.add(request)

    def run(self, steps):
        """Run this many steps, or until there is nothing to do."""
        for _ in range(steps):
            self._step()

    def run_until(self, name):
        for _ in range(10_000):
            if name in self.started:
                return
            self._step()
        raise AssertionError(f"{name} never starts")

    def slice_seconds(self, slice_):
        if slice_.action != "run":
            return 0.0
        batch = self.jobs[slice_.job].micro_batches(slice_.step)[slice_.micro_batch]
        units = batch.units[slice_.first : slice_.stop]
        return sum(self.tuner.cost.unit(unit.kind, batch.lengths, recompute=not slice_.keep) for unit in units)

    def _step(self):
        while self.due and self.due[0].arrival <= self.now:
            self.scheduler.add(self.due.popleft())
        while len(self.in_flight) < self.steps_in_flight:
            plan = self.scheduler.schedule(self.now)
            for entry in self.scheduler._entries.values():
                if entry.sequence.scheduled_at is not None:
                    self.started.setdefault(entry.id, entry.sequence.scheduled_at)
            if plan is None:
                break
            seconds = self.step_seconds * self.step_share() if plan.segments else 0.0
            if plan.segments and self.predict is not None:
                seconds = self.predict([(s.start, s.stop) for s in plan.segments]) * self.step_share()
            trained = None
            if plan.part(TrainingPlan).slice:
                trained = self.slice_seconds(plan.part(TrainingPlan).slice) * self.training_share()
            self.free_at = max(self.free_at, self.now) + seconds + (trained or 0.0)
            self.plans.append((self.now, plan))
            self.in_flight.append((plan, seconds, trained, self.free_at))
        if not self.in_flight:
            self.now = max(self.now, self.due[0].arrival) if self.due else self.now
            return
        plan, seconds, trained, self.now = self.in_flight.popleft()
        given = plan.part(TrainingPlan).slice
        parts = ()
        if given:
            report = TrainingReport(
                given.job, given.step, given.micro_batch, given.action, given.first, given.stop, trained
            )
            parts = (report,)
        done = StepResult(
            plan.step,
            (7,) * plan.num_sampled,
            seconds,
            copied=TierCopied(swapped_out=plan.step, swapped_in=plan.step),
            parts=parts,
        )
        self.scheduler.update(plan, done, self.now)
