"""A part that the package does not know joins an engine by one line: its builder in the engine's list of parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.engine.messages import Outputs, Refused, Submit
from holdfast.engine.process.build import PARTS, Engine, build_engine
from holdfast.engine.process.serve import serve
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import StepPlan, StepResult
from tests.engine.process.test_serve import ShutdownWhenIdle
from tests.tally.builder import TallyBuilder
from tests.tally.messages import AskTally, Tallied, TallyRefused
from tests.tally.options import TallyOptions
from tests.tally.planner import LONGEST
from tests.tally.values import TallyPlan


@dataclass(frozen=True, kw_only=True)
class OwnConfig(TallyOptions, EngineConfig):
    """The settings of an engine that may have the tally."""


def own_engine(**options: int) -> Engine:
    config = OwnConfig(model="holdfast-tiny", device="cpu", threads=1, cache_gb=0.02, steps_in_flight=1, **options)
    return build_engine(config, parts=(*PARTS, TallyBuilder))


@pytest.fixture(scope="module")
def counting() -> Iterator[Engine]:
    engine = own_engine(tally_every=2)
    yield engine
    engine.close()


def request(engine: Engine, name: str, prompt: int, answer: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    return Request(name, tuple(range(1, prompt + 1)), params, identity=Identity(engine.info.model))


class Plans:
    """Notes the positions of each plan, and whether it is counted."""

    def __init__(self) -> None:
        self.computed: dict[int, int] = {}
        self.counted: dict[int, int] = {}
        """Both by the number of the step; a step that is not counted is not in the second."""

    def planned(self, plan: StepPlan) -> None:
        self.computed[plan.step] = sum(segment.stop - segment.start for segment in plan.segments)
        if lengths := plan.part(TallyPlan).lengths:
            self.counted[plan.step] = sum(lengths)

    def ended(self, result: StepResult) -> None:
        pass

    def close(self) -> None:
        pass


def test_its_plans_reach_the_device_and_its_message_gets_the_count(counting: Engine) -> None:
    plans = Plans()
    counting.loop.observe(plans)
    parent = ShutdownWhenIdle(Submit(request(counting, "a", 9, 6)), *[None] * 12, AskTally(7))
    serve(counting.loop, parent, counting.handlers)
    every_second = {step: positions for step, positions in plans.computed.items() if step % 2 == 0}
    assert plans.counted == every_second and 0 < len(every_second) < len(plans.computed)
    (tallied,) = [message for message in parent.sent if isinstance(message, Tallied)]
    assert tallied == Tallied(7, len(every_second), sum(every_second.values()))
    outputs = [output for message in parent.sent if isinstance(message, Outputs) for output in message.outputs]
    assert sum(len(output.tokens) for output in outputs) == 6


def test_a_request_that_it_refuses_is_answered_and_holds_up_no_other(counting: Engine) -> None:
    long, short = request(counting, "long", LONGEST + 1, 2), request(counting, "short", 3, 2)
    parent = ShutdownWhenIdle(Submit(long), Submit(short))
    serve(counting.loop, parent, counting.handlers)
    (refused,) = [message for message in parent.sent if isinstance(message, Refused)]
    assert (refused.request_id, f"{LONGEST + 1} tokens" in refused.reason) == ("long", True)
    assert {output.request_id for m in parent.sent if isinstance(m, Outputs) for output in m.outputs} == {"short"}


def test_an_engine_that_does_not_want_it_plans_without_it_and_refuses_its_messages() -> None:
    engine, plans = own_engine(), Plans()
    try:
        engine.loop.observe(plans)
        parent = ShutdownWhenIdle(Submit(request(engine, "a", 9, 3)), AskTally(1))
        serve(engine.loop, parent, engine.handlers)
    finally:
        engine.close()
    assert len(plans.computed) == 3 and not plans.counted
    assert [m for m in parent.sent if isinstance(m, TallyRefused)] == [
        TallyRefused(1, "this engine counts nothing; give it tally_every")
    ]


def test_its_options_are_checked_like_all_others() -> None:
    with pytest.raises(ValueError, match="tally_every is 65; it must lie between 0 and 64"):
        OwnConfig(tally_every=65)
    with pytest.raises(ValueError, match="tp is 2, and tally_every counts on one device"):
        OwnConfig(tally_every=1, tp=2)
    with pytest.raises(ValueError, match="tally_every is 1, which is for the paged executor, and executor is padded"):
        OwnConfig(tally_every=1, executor="padded")


def test_a_configuration_without_its_options_is_refused_by_name() -> None:
    with pytest.raises(LookupError, match="the configuration has no TallyOptions; make it a base of EngineConfig"):
        TallyBuilder.wanted(EngineConfig())
