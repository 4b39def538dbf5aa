"""Padded rows in the simulator: the width of the batch, the time of forwards, and whole simulated runs."""

from dataclasses import replace

import pytest

from holdfast.core.cost import PaddedCost
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.padded import Batch, PaddedStepTimes, RowSoftware
from holdfast.lab.simulator.run import context_length, engine_shape
from holdfast.lab.workloads import Conversation, Turn, fixed
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import Forward, RowBytes, RowMove, RowPlan, RowShape, Sampling, Segment, StepPlan
from tests.lab.simulator.simulation import COST, PROFILE, run
from tests.padded_rows import ABLE

ROWS = replace(PROFILE, token_bytes=1000, copy_rate=1e6)
GREEDY = Sampling(0.0, 0, 1.0, 0)
PADDED = PaddedCost.of(COST)


def padded(work, scheduler, *, software=None, batch=4, **config):
    options = {"executor": "padded", "scheduler": scheduler, "max_sequences": batch, "headroom": 0.0, **config}
    more = {} if software is None else {"software": software}
    return run(work, config=options, profile=ROWS, **more)


def plan(segments, *forwards, moves=(), step=0):
    return StepPlan(
        step,
        [Segment(str(row), row, start, stop, (1,) * (stop - start), GREEDY) for row, start, stop in segments],
        parts=(RowPlan(forwards=forwards, moves=moves),),
    )


def test_a_batch_is_as_wide_as_its_longest_row():
    batch = Batch()
    assert batch.forward([(0, 5), (1, 9)]) == (2, 9, 9)
    assert batch.forward() == (2, 1, 10)
    batch.drop(1)
    assert (batch.width, batch.positions) == (6, 6)
    batch.embed(2, 20)
    assert (batch.width, batch.positions) == (20, 40)


def test_a_shaped_prompt_widens_its_own_forward_and_leaves_junk_only_as_printed():
    ours, printed = Batch(), Batch(junk=True)
    for batch in (ours, printed):
        batch.forward([(0, 10), (1, 10)])
        batch.drop(1)
        assert batch.forward([(1, 7)]) == (2, 7, 17)
    assert (ours.width, printed.width) == (11, 17)


def test_placeholders_that_all_rows_share_are_released_before_an_insertion():
    batch = Batch(junk=True)
    batch.forward([(0, 10), (1, 3)])
    batch.drop(0)
    assert batch.width == 10
    assert batch.forward([(0, 2)]) == (2, 2, 5)


def test_each_forward_of_a_plan_takes_its_rows_times_its_padded_length():
    times = PaddedStepTimes(COST)
    first = plan([(0, 0, 64), (1, 0, 32)], Forward(2, apart=True))
    assert times.stages(first) == [pytest.approx(PADDED.forward(2, 64, 64))]
    moves = (RowMove(0, "embed", 0, length=64), RowMove(0, "embed", 1, length=32))
    then = plan([(0, 64, 65), (1, 32, 33), (2, 0, 100)], Forward(2), Forward(3, apart=True), moves=moves)
    both = PADDED.forward(2, 1, 65), PADDED.forward(1, 100, 100)
    assert times.stages(then) == [pytest.approx(sum(both))]
    assert times.batch.positions == 130


def test_a_row_whose_sequence_has_ended_is_still_paid_for():
    times = PaddedStepTimes(COST)
    times.stages(plan([(0, 0, 64), (1, 0, 64)], Forward(2)))
    assert times.stages(plan([(0, 64, 65)], Forward(1, ended=(1,)))) == [pytest.approx(PADDED.forward(2, 1, 65))]


def test_a_loaded_state_delays_the_step_by_its_copy():
    times = PaddedStepTimes(COST, token_bytes=1000, copy_rate=1e6)
    loads = (RowMove(0, "load", 0, 3, 64), RowMove(0, "embed", 0, length=64))
    assert times.stages(plan([(0, 64, 65)], Forward(1), moves=loads)) == [
        pytest.approx(0.064 + PADDED.forward(1, 1, 65))
    ]


def test_software_adds_copied_caches_a_least_time_and_a_second_stream():
    def seconds(**software):
        times = PaddedStepTimes(COST, token_bytes=1000, software=RowSoftware(**software))
        times.stages(plan([(0, 0, 512)], Forward(1)))
        return times.stages(plan([(0, 512, 513), (1, 0, 512)], Forward(1), Forward(2, apart=True)))[0]

    batch, apart = PADDED.forward(1, 1, 513), PADDED.forward(1, 512, 512)
    assert seconds() == pytest.approx(batch + apart)
    assert seconds(cat_rate=1e9) == pytest.approx(batch + apart + 2 * 513 * 1000 / 1e9)
    assert seconds(forward_seconds=1.0) == 2.0
    assert seconds(concurrent=True) == pytest.approx(max(batch, apart))


@pytest.mark.parametrize(("name", "value"), [("cat_rate", -1.0), ("forward_seconds", float("inf"))])
def test_impossible_software_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        RowSoftware(**{name: value})


def test_packed_plans_are_refused():
    with pytest.raises(ValueError, match="has no forwards"):
        PaddedStepTimes(COST).stages(plan([(0, 0, 4)]))


def test_a_profile_without_the_size_of_a_position_is_refused():
    with pytest.raises(ValueError, match="size of a position"):
        engine_shape(EngineConfig(executor="padded", max_sequences=4), PROFILE)


def test_run_to_completion_takes_as_many_steps_as_the_longest_answer_of_each_batch():
    work = [Conversation(0.0, (Turn(32, output),)) for output in (4, 20, 7, 9)]
    outcome = padded(work, "run-to-completion", batch=2, steps_in_flight=1)
    assert outcome.steps == 20 + 9
    assert outcome.stats.idle_tokens == (20 - 4) + (9 - 7)


def test_an_insertion_by_shaping_computes_idle_tokens_for_every_other_row():
    work = [Conversation(0.0, (Turn(30, output),)) for output in (5, 50, 50, 50, 10)]
    shaped = padded(work, "shaping", steps_in_flight=1)
    assert shaped.stats.idle_tokens == 3 * 29
    assert padded(work, "embedding", steps_in_flight=1).stats.idle_tokens == 0


def test_every_policy_of_rows_serves_every_request_in_full():
    work = [Conversation(0.1 * at, (Turn(20 + 7 * at, 3 + at % 5),)) for at in range(12)]
    for name in ("run-to-completion", "prefill-apart", "shaping", "embedding", "orca", "padded-batches", "stall-free"):
        outcome = padded(work, name)
        assert [len(record.token_times) for record in outcome.records] == [3 + at % 5 for at in range(12)], name
        assert outcome.seconds > 0


def test_unequal_answers_make_embedding_faster_than_run_to_completion_and_equal_ones_do_not():
    unequal = [Conversation(0.0, (Turn(32, output),)) for output in (8, 200) * 8]
    slow, fast = (padded(unequal, name).seconds for name in ("run-to-completion", "embedding"))
    assert fast < 0.7 * slow
    slow, fast = (padded(fixed(16, 32, 100), name).seconds for name in ("run-to-completion", "embedding"))
    assert fast == pytest.approx(slow, rel=0.1)


def test_columns_that_are_kept_go_once_the_batch_would_be_too_large():
    batch = Batch(kept=30)
    batch.forward([(0, 10), (1, 3)])
    batch.drop(0)
    assert batch.width == 10
    batch.embed(2, 2)
    assert batch.width == 10
    for _ in range(6):
        batch.forward()
    assert batch.width == 9  # 2 x 16 would be above 30; the longest row has 3 + 6 columns


def test_the_host_adds_to_forwards_and_to_each_row_that_joins_a_running_batch():
    first = plan([(0, 0, 8)], Forward(1))
    joins = plan([(0, 8, 9), (1, 0, 4)], Forward(2), step=1)
    plain, slow = (
        PaddedStepTimes(COST, token_bytes=1000, software=software)
        for software in (RowSoftware(), RowSoftware(forward_seconds=2.0, host_adds=True, joining_seconds=5.0))
    )
    for each, waits in ((first, 2.0), (joins, 7.0)):
        assert slow.stages(each)[0] == pytest.approx(plain.stages(each)[0] + waits)


def test_a_state_that_comes_from_the_host_delays_its_embedding():
    apart = plan([(0, 0, 8)], Forward(1, apart=True))
    decode = plan([(0, 8, 9)], Forward(1), moves=[RowMove(0, "embed", 0, length=8)], step=1)
    near, far = (
        PaddedStepTimes(COST, token_bytes=1000, software=RowSoftware(embed_rate=rate)) for rate in (0.0, 4000.0)
    )
    for times in (near, far):
        times.stages(apart)
    assert far.stages(decode)[0] == pytest.approx(near.stages(decode)[0] + 2.0)


FULL = RowBytes(growing=((1000, None),))


def measured(*, chunks=True, size=FULL):
    """A profile of padded rows, as a device of that model would store it."""
    able = replace(ABLE, chunks=chunks)
    rows = RowShape(memory=65_536 * 1000, bytes=size, abilities=able)
    exact = replace(COST, deviation=0.0)
    sizes = {"cache_tokens": rows.positions, "token_bytes": size.position, "token_budget": 1024}
    return replace(PROFILE, cost=exact, **sizes, rows=rows)


class Watched:
    """Notes the seconds of each step, whether a stream waited for it, and its prompts' lengths."""

    def __init__(self):
        self.plans, self.steps = [], []

    def planned(self, plan):
        self.plans.append(plan)

    def ended(self, result):
        plan = self.plans.pop(0)
        prompts = [each.length for each in plan.segments if each.length > 1]
        self.steps.append((result.seconds, len(prompts) < len(list(plan.segments)), prompts))

    def close(self):
        pass


STREAMS = [Conversation(0.0, (Turn(20, 200),)) for _ in range(6)]


def steps_with_streams(prompts, profile, target):
    """The steps in which prompts that arrive later are computed with streams: seconds, and lengths."""
    seen = Watched()
    late = [Conversation(0.4, (Turn(length, 4),)) for length in prompts]

    config = {"tbt_target": target, "max_sequences": 16}
    outcome = run([*STREAMS, *late], config=config, profile=profile, watch=lambda *made: [seen])
    assert all(len(record.token_times) for record in outcome.records)
    return [(seconds, prompts) for seconds, decodes, prompts in seen.steps if decodes and prompts]


def test_a_tbt_target_holds_on_rows_whether_prompts_are_long_or_many():
    for prompts in ([1900] * 4, [40, 31, 35] * 8, [300, 17, 900, 60, 3] * 3):
        steps = steps_with_streams(prompts, measured(), 20.0)
        assert len(steps) > 3
        assert max(seconds for seconds, _ in steps) <= 0.0205
        assert max(seconds for seconds, _ in steps) > (0.018 if max(prompts) > 100 else 0.01), "it is made use of"


def test_where_prompts_are_whole_a_step_has_one_that_exceeds_the_target_or_several_that_fit():
    steps = steps_with_streams([1500, 1500, 40, 31, 35, 28] * 2, measured(chunks=False), 20.0)
    assert all(len(prompts) == 1 for seconds, prompts in steps if seconds > 0.0205)
    assert any(prompts == [1500] for _, prompts in steps), "long prompts are served"
    assert any(len(prompts) > 1 for _, prompts in steps)


def test_a_profile_of_rows_gives_the_rows_it_was_measured_on():
    config = EngineConfig(max_sequences=4)
    shape = engine_shape(config, measured())
    assert (shape.executor, shape.rows) == ("padded", measured().rows)
    whole = engine_shape(config, measured(chunks=False))
    assert whole.max_step_tokens == 2048 + 4, "a step has room for the longest prompt"
    recurrent = measured(size=RowBytes(fixed=1_000_000))
    assert context_length(config, recurrent) == 2048, "its memory holds 65 rows of any length"
    assert context_length(config, replace(measured(), cache_tokens=700)) == 512


def test_a_profile_of_rows_is_read_as_it_was_stored(tmp_path):
    path = tmp_path / "rows.json"
    profile = measured(chunks=False, size=RowBytes(fixed=7, growing=((1000, None), (8, 128))))
    profile.save(path)
    assert CostProfile.load(path) == profile
    assert isinstance(CostProfile.load(path).cost, PaddedCost)
