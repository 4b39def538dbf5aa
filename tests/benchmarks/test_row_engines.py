"""Benchmarks of rows: a run that takes too long is cut, and its loop can be used again."""

from benchmarks.lib.row_engines import serve
from holdfast.lab.simulator.executor import SimulatedExecutor, StepTimes, VirtualClock
from holdfast.lab.simulator.run import engine_shape
from holdfast.lab.workloads import fixed
from holdfast.lm.choice import make_scheduler
from holdfast.lm.config import EngineConfig
from holdfast.loop.loop import Loop
from tests.lab.simulator.simulation import COST, PROFILE


def test_a_run_that_takes_too_long_is_cut_and_the_next_one_is_whole():
    config, clock = EngineConfig(max_sequences=2, prefix_sharing=False), VirtualClock()
    executor = SimulatedExecutor(StepTimes(COST), clock)
    loop = Loop(make_scheduler(config, engine_shape(config, PROFILE), COST), executor, 2, clock)
    cut = serve(loop, fixed(4, 8, 50), 1000, limit=0.0)
    assert cut.cut and cut.records == [] and not loop.has_work()
    whole = serve(loop, fixed(4, 8, 50), 1000, limit=60.0)
    assert not whole.cut and [len(record.token_times) for record in whole.records] == [50] * 4
