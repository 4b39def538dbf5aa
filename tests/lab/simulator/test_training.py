"""Simulated training: what slices cost, what they leave to requests, and the deferral rule's extremes."""

from math import inf

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.training_cost import PLAIN, TrainingCost
from holdfast.engine.profiles import CostProfile
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.simulator.training import SimulatedJob, SimulatedTrainer, Tuning, job_of, training_shape
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.parts.tuning.values import TrainingSlice
from holdfast.training.jobs import units_of
from tests.lab.simulator.simulation import run
from tests.training_plans import SHAPE

COST = CostModel(
    model="m",
    device="d",
    linear_tokens=(1, 64, 1024),
    linear_seconds=(0.004, 0.005, 0.020),
    attention_queries=(1, 1024),
    attention_contexts=(64, 1024),
    attention_seconds=((0.00001, 0.0001), (0.0005, 0.008)),
    deviation=0.0,
)
PROFILE = CostProfile(
    cost=COST, dtype="float32", cache_tokens=8192, max_model_len=2048, token_budget=256, tile=16, token_bytes=100,
    copy_rate=1e6,
)  # fmt: skip
BLOCK = 16 * 100


def a_job(count=1 << 40, lengths=(128, 128)):
    return SimulatedJob(
        lengths, 2, vector_bytes=20 * BLOCK, input_bytes=BLOCK // 16, kept_bytes=BLOCK // 8, count=count
    )


def train(requests, *, count=1 << 40, tbt=None, **options):
    config = {"tbt_target": tbt} if tbt is not None else {}
    return run(requests, config=config, profile=PROFILE, tuning=Tuning([a_job(count)], SHAPE, **options))


def chats(count, gap=0.2, prompt=100, output=20):
    return [Conversation(gap * number, (Turn(prompt, output),)) for number in range(count)]


def test_a_simulated_micro_batch_has_the_units_that_the_trainer_computes():
    for lengths in ((5,), (1000, 1000), (512, 512, 1)):
        units = a_job(lengths=lengths).micro_batches(0)[0].units
        assert [tuple(unit) for unit in units] == [
            tuple(unit) for unit in units_of([PLAIN] * 2, sum(lengths), backward=True, optimizer=True)
        ]


def test_slices_take_the_sum_of_their_units_and_more_where_nothing_was_kept():
    cost = TrainingCost(COST, SHAPE, block_seconds=0.5)
    trainer = SimulatedTrainer(cost, {"job": a_job()}, BLOCK)
    units = len(a_job().micro_batches(0)[0].units)

    def run_units(first, stop, keep, step):
        return trainer.time(TrainingSlice("job", step, 0, "run", first, stop, keep)).seconds

    assert trainer.time(TrainingSlice("job", 0, 0, "restore")).seconds == 10.0
    kept = run_units(0, 3, True, 0) + run_units(3, units, True, 0)
    assert kept == pytest.approx(cost.iteration((128, 128)))
    assert run_units(0, units, False, 1) == pytest.approx(cost.iteration((128, 128), recompute=True))
    partly = run_units(0, 2, True, 2) + run_units(2, units, False, 2)
    assert kept < partly < cost.iteration((128, 128), recompute=True)
    run_units(0, 4, True, 3)
    trainer.time(TrainingSlice("job", 3, 0, "release"))
    rest = run_units(4, units, True, 3)
    assert rest > kept - run_units(0, 4, True, 4)
    assert (trainer.tokens, trainer.slices) == (4 * 256, 8)


def test_slices_fill_the_device_and_keep_the_target_between_tokens():
    without = run(chats(10), config={"tbt_target": 30}, profile=PROFILE)
    beside = train(chats(10), tbt=30)
    assert without.busy / without.seconds < 0.8
    assert beside.trained > 0.4 * beside.seconds and beside.trained_tokens > 0
    assert beside.busy + beside.trained == pytest.approx(beside.seconds, rel=0.05), "hardly any time is idle"
    gaps = sorted(
        later - earlier
        for record in beside.records
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
    )
    assert gaps[int(0.99 * len(gaps))] <= 0.030


def test_the_deferral_bound_trades_the_wait_of_requests_for_training():
    waits, trained = [], []
    for bound in (0.0, 0.5, 1.0):
        outcome = train(chats(20), deferral_bound=bound)
        waits.append(max(record.scheduled - record.arrival for record in outcome.records))
        trained.append(outcome.trained_tokens / outcome.seconds)
    assert waits == sorted(waits) and trained == sorted(trained)
    iteration = 1.4 * TrainingCost(COST, SHAPE).iteration((128, 128), recompute=True)
    for bound, wait in zip((0.0, 0.5, 1.0), waits, strict=True):
        assert wait <= max(bound, iteration) + 0.03


def test_with_an_infinite_bound_requests_wait_until_the_job_is_complete():
    outcome = train(chats(3), count=5, deferral_bound=inf)
    assert outcome.trained_tokens == 5 * 256
    leaving = 20 * BLOCK / PROFILE.copy_rate
    assert min(record.scheduled for record in outcome.records) == pytest.approx(outcome.trained - leaving)


def test_memory_that_training_had_is_free_in_the_end():
    outcome = train(chats(5), count=3, tbt=30)
    assert outcome.trained_tokens == 3 * 256 and outcome.stats.blocks_training == 0


def test_a_profile_without_the_size_of_a_position_cannot_tune():
    with pytest.raises(ValueError, match="does not say the size of a position"):
        run(chats(1), tuning=Tuning([a_job()], SHAPE))


def test_an_8b_job_of_rank_16_takes_the_calculated_bytes():
    shape = MODELS["llama-3-8b"]
    job = job_of(shape, (4096, 4096))
    assert job.vector_bytes == pytest.approx(41.94e6 * (5 * 4 + 2), rel=0.001)
    assert (job.input_bytes + job.kept_bytes) == pytest.approx(3.03e6, rel=0.01)
    assert job.input_bytes == 32 * 16_384
    sizes = training_shape(shape)
    assert sizes.num_layers * (sizes.attention_weights + sizes.mlp_weights) == pytest.approx(6.98e9, rel=0.01)
