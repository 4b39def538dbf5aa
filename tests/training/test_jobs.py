"""Jobs as values: refused values, the automatic choices, steps and units."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.training_cost import PLAIN
from holdfast.training.jobs import (
    HEAD_ROWS,
    Hyperparameters,
    JobSteps,
    TrainingJob,
    Unit,
    auto_batch_size,
    auto_epochs,
    modules_of,
    short_module,
    units_of,
)

CHOSEN = Hyperparameters(epochs=2, batch_size=3, micro_batch=20)
JOB = TrainingJob(id="j", hyperparameters=CHOSEN, base_model="base", base_digest="b", data_digest="d")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (dict(epochs=0), "epochs is 0"),
        (dict(batch_size=5000), "batch_size is 5000"),
        (dict(rank=129), "rank is 129"),
        (dict(rank=8.5), "rank is 8.5"),
        (dict(learning_rate=float("nan")), "learning_rate is nan"),
        (dict(learning_rate=0.0), "learning_rate is 0.0; it must be above 0"),
        (dict(alpha=-1.0), "alpha is -1.0"),
        (dict(warmup=1.0), "warmup is 1.0"),
        (dict(modules=()), "modules are none"),
        (dict(modules=("q", "lm_head")), "modules are lm_head"),
        (dict(modules=("q", "q")), "modules are q, q; choose each once"),
        (dict(dora="yes"), "dora is 'yes'; it must be true or false"),
        (dict(seed=-1), "seed is -1"),
    ],
)
def test_a_hyperparameter_out_of_range_is_refused_with_its_limit(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(CHOSEN, **wrong)


@pytest.mark.parametrize(
    ("examples", "batch", "epochs"), [(10, 8, 10), (99, 8, 10), (160, 8, 10), (1000, 8, 2), (2047, 8, 1), (2048, 8, 1), (10_000, 39, 1), (10**6, 64, 1)]  # noqa: E501
)  # fmt: skip
def test_automatic_choices_make_about_200_steps(examples: int, batch: int, epochs: int) -> None:
    assert auto_batch_size(examples) == batch
    assert auto_epochs(examples, batch) == epochs


@pytest.mark.parametrize(
    ("given", "short"), [("q_proj", "q"), ("gate_up_proj", "gate_up"), ("in_proj", "in_proj"), ("out_proj", "out_proj")]
)
def test_a_module_may_have_peft_s_name(given: str, short: str) -> None:
    assert short_module(given) == short


def test_few_examples_are_repeated_at_least_three_times() -> None:
    assert auto_epochs(99, 1) == 3


def test_units_go_up_the_layers_over_the_head_and_down_again() -> None:
    units = units_of([PLAIN] * 2, HEAD_ROWS + 1, backward=True, optimizer=True)
    assert [(unit.kind, unit.number) for unit in units] == [
        ("attention", 0), ("mlp", 0), ("attention", 1), ("mlp", 1), ("head", 0), ("head", 1),
        ("mlp_backward", 1), ("attention_backward", 1), ("mlp_backward", 0), ("attention_backward", 0),
        ("optimizer", 0),
    ]  # fmt: skip
    assert units_of([("recurrence",), ("parallel", "mlp")], 5, backward=True, optimizer=False) == (
        Unit("recurrence", 0),
        Unit("parallel", 1),
        Unit("mlp", 1),
        Unit("head", 0),
        Unit("mlp_backward", 1),
        Unit("parallel_backward", 1),
        Unit("recurrence_backward", 0),
    )
    assert units_of([PLAIN], 5, backward=False, optimizer=False) == (
        Unit("attention", 0),
        Unit("mlp", 0),
        Unit("head", 0),
    )


def test_a_job_is_read_back_from_its_json() -> None:
    assert TrainingJob.from_json(JOB.to_json()) == JOB


def test_a_job_from_before_there_were_doras_is_a_lora_and_finds_its_states() -> None:
    values = json.loads(JOB.to_json())
    del values["hyperparameters"]["dora"], values["driven"]
    job = TrainingJob.from_json(json.dumps(values))
    del values["threads"]
    assert job == JOB and job.digest() == hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "[" * 100_000, '{"hyperparameters": {}}', JOB.to_json().replace("rank", "rang")]
)
def test_what_is_not_a_job_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a job"):
        TrainingJob.from_json(text)


def test_a_job_s_digest_changes_with_what_its_result_depends_on() -> None:
    others = [
        replace(JOB, data_digest="e"),
        replace(JOB, base_digest="e"),
        replace(JOB, hyperparameters=replace(CHOSEN, seed=1)),
        replace(JOB, hyperparameters=replace(CHOSEN, micro_batch=21)),
        replace(JOB, hyperparameters=replace(CHOSEN, dora=True)),
    ]
    assert len({job.digest() for job in [JOB, *others]}) == 6
    assert replace(JOB, threads=4).digest() == JOB.digest()


def test_micro_batches_hold_the_step_s_examples_and_the_last_one_the_optimizer() -> None:
    lengths = [9, 8, 7, 6, 5]
    steps = JobSteps(JOB, (PLAIN, PLAIN), lengths)
    assert steps.count == 4
    for step in range(4):
        batches = steps.micro_batches(step)
        assert tuple(e for batch in batches for e in batch.examples) == steps.order.examples(step)
        assert all(
            batch.tokens <= 20 and batch.lengths == tuple(lengths[e] for e in batch.examples) for batch in batches
        )
        assert [batch.units[-1].kind == "optimizer" for batch in batches] == [False] * (len(batches) - 1) + [True]


def test_a_validation_follows_the_update_of_an_epoch_s_last_step_without_a_backward() -> None:
    steps = JobSteps(JOB, (PLAIN,), [5, 5, 5, 5], [19, 2, 3])
    kinds = [[batch.validation for batch in steps.micro_batches(step)] for step in range(steps.count)]
    assert kinds == [[False], [False, True, True], [False], [False, True, True]]
    assert steps.micro_batches(1)[1].examples == (0,) and steps.micro_batches(1)[2].examples == (1, 2)
    assert {unit.kind for unit in steps.micro_batches(1)[1].units} == {"attention", "mlp", "head"}


def test_an_example_longer_than_a_micro_batch_is_refused_with_what_to_choose() -> None:
    with pytest.raises(ValueError, match=r"longest example has 21 tokens; micro_batch is 20: make it 21"):
        JobSteps(JOB, (PLAIN,), [3, 21])
    with pytest.raises(ValueError, match="no examples"):
        JobSteps(JOB, (PLAIN,), [])


def test_modules_are_chosen_by_the_half_of_a_layer_that_has_them() -> None:
    known = ("q", "v", "out_proj", "gate_up", "down")
    assert modules_of(known, attention=True, mlp=True) == known
    assert modules_of(known, attention=True, mlp=False) == ("q", "v", "out_proj")
    assert modules_of(known, attention=False, mlp=True) == ("gate_up", "down")
    with pytest.raises(ValueError, match="those of nothing; the model has q, v, out_proj, gate_up, down"):
        modules_of(known, attention=False, mlp=False)
    with pytest.raises(ValueError, match="those of the MLP; the model has q, k"):
        modules_of(("q", "k"), attention=False, mlp=True)
