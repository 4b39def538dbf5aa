"""A world whose costs are exact: an engine with contracts on a virtual device, and clients that come at random."""

from dataclasses import replace

from holdfast.core.contract import NO_CONTRACT, ContractRefused
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lab.simulator.deployment import FREE, Pipeline
from holdfast.lab.simulator.executor import SimulatedExecutor, StepTimes, VirtualClock
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import EngineShape
from holdfast.lm.types.states import StateShape
from holdfast.loop.loop import Loop
from tests.lab.simulator.simulation import COST

EXACT = replace(COST, deviation=0.0)
"""A cost model that says that steps take exactly as long as it predicts."""


BLOCK_BYTES = 1 << 20


def pipeline(stages):
    """Stages that take equal shares of a step; None for one."""
    stage = EXACT.slower(1 / stages, 1 / stages)
    return Pipeline((stage,) * stages, FREE, token_bytes=1) if stages > 1 else None


class World:
    """An engine, its clock, and the times at which each client gets tokens, in seconds from its arrival."""

    def __init__(
        self, *, blocks=400, block_size=16, model_len=2048, steps_in_flight=2, budget=256, tile=32, stages=1,
        snapshots=None, host_blocks=0, copy_seconds=0.0, pace=lambda now: 1.0, **config,
    ):  # fmt: skip
        """`snapshots` is the number of kept recurrent states, for a model that has any. A block is copied from the host
        in `copy_seconds`. A step that starts at a time t takes `pace(t)` times as long as predicted.
        """
        self.config = EngineConfig(
            model="m", block_size=block_size, steps_in_flight=steps_in_flight, **{"max_sequences": 16, **config}
        )
        shape = EngineShape(
            model="m", precision="bfloat16", num_blocks=blocks, token_budget=budget, max_step_tokens=budget,
            max_model_len=model_len, vocab_size=1000, tile=tile, num_host_blocks=host_blocks,
            block_bytes=BLOCK_BYTES if host_blocks else 0, copies_ahead=8, copies_for_others=8,
            states=None if snapshots is None else StateShape(snapshots=snapshots, slot_bytes=1),
        )  # fmt: skip
        self.clock = VirtualClock()
        self.scheduler = make_scheduler(self.config, shape, EXACT, stages=stages)
        times = StepTimes(EXACT, pipeline(stages), copy_seconds, BLOCK_BYTES)
        executor = SimulatedExecutor(times, self.clock, pace=pace)
        self.loop = Loop(self.scheduler, executor, steps_in_flight + stages - 1, self.clock)
        self.arrivals, self.contracts = {}, {}
        self.deliveries, self.reasons = {}, {}
        self.refusals = {}

    def add(self, name, prompt, tokens, contract=NO_CONTRACT, *, at=None, priority=0, tenant="", **params):
        """A request with this contract. `prompt` is a number of tokens of its own, or the tokens.

        Returns whether it is accepted.
        """
        if isinstance(prompt, int):
            prompt = tuple((hash(name) + place) % 997 for place in range(prompt))
        arrival = self.clock.now if at is None else at
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **params})
        own = {"identity": Identity("m", dtype="bfloat16", tenant=tenant), "priority": priority}
        try:
            self.loop.add(Request(name, prompt, params, arrival=arrival, contract=contract, **own))
        except ContractRefused as error:
            self.refusals[name] = error.refusal
            return False
        self.arrivals[name], self.contracts[name], self.deliveries[name] = arrival, contract, []
        return True

    def step(self):
        """One step, or nothing if there is none to do."""
        for name, tokens, reason, *_ in self.loop.step() or ():
            self.deliveries[name] += [self.clock.now - self.arrivals[name]] * len(tokens)
            if reason is not None:
                self.reasons[name] = reason

    def run(self, arrivals=()):
        """Play `arrivals`, each a time and a function of the world, until all requests have ended."""
        due = sorted(arrivals, key=lambda arrival: arrival[0])
        while due or self.loop.has_work():
            if not self.loop.has_work():
                self.clock.advance_to(due[0][0])
            while due and due[0][0] <= self.clock.now:
                at, come = due.pop(0)
                come(self, at)
            self.step()
        return self

    @property
    def broken(self):
        """The accepted contracts that were broken, with the broken term."""
        found = {name: self.contracts[name].broken(times) for name, times in self.deliveries.items() if times}
        return {name: term for name, term in found.items() if term is not None}
