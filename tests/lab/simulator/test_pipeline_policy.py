"""PipelineLatencyTarget: the target bounds a stream's wait for all stages, and steps stay small when rows are busy."""

import pytest

from holdfast.lab.simulator.pipeline_policy import PipelineLatencyTarget
from tests.lm.scheduler.test_latency_target import COST, TILE, beside_a_stream, step
from tests.scheduling import create_requests, spans


def with_target(target_ms, ceiling=256):
    return PipelineLatencyTarget(COST, target_ms / 1e3, tile=TILE, ceiling=ceiling, stages=2)


def test_the_target_holds_for_a_stream_whose_token_is_in_flight():
    scheduler = beside_a_stream(with_target(0.001), micro_batches=2)
    assert spans(scheduler.schedule(0.0)) == [("0", 1, 2)]
    (_, late) = create_requests(1, 100)
    scheduler.add(late)
    assert spans(scheduler.schedule(0.0)) == [("1", 0, 16)]


@pytest.mark.parametrize(("rows", "tokens"), [(3, 688), (64, 1024)])
def test_steps_are_capped_at_the_efficient_size_when_most_rows_are_busy(rows, tokens):
    policy = with_target(1000.0, ceiling=1024)
    assert policy.efficient_tokens == 688
    fastest = COST.linear(1024) / 1024
    assert COST.linear(688) / 688 <= 1.1 * fastest < COST.linear(688 - TILE) / (688 - TILE)
    scheduler = beside_a_stream(policy, 1500, 1500, max_sequences=rows, micro_batches=2)
    step(scheduler)
    assert sum(segment.length for segment in step(scheduler).segments) == tokens


def test_no_step_exceeds_the_ceiling_even_where_decodes_leave_less_than_a_tile():
    scheduler = beside_a_stream(with_target(1000.0, ceiling=TILE), 100, 100, max_sequences=3, micro_batches=2)
    steps = [step(scheduler).num_tokens for _ in range(20)]
    assert max(steps) == TILE
