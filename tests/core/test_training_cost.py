"""The cost of training: units add up to the cost of a forward of as many tokens, and grow as they should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.core.cost import CostModel
from holdfast.core.training_cost import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BACKWARD,
    HEAD,
    HEAD_TOKENS,
    LORA,
    LORA_ATTENTION,
    RECURRENCE,
    RECURRENCE_BACKWARD,
    TrainingCost,
    TrainingShape,
)
from holdfast.lab.simulator.deployment import packaged_profile
from holdfast.lab.simulator.shapes import MODELS
from holdfast.training.jobs import HEAD_ROWS, units_of

SHAPE = TrainingShape(num_layers=4, attention_weights=10, mlp_weights=30, head_weights=40)


def a_cost(attention=0.0, **options):
    model = CostModel(
        model="m",
        device="d",
        linear_tokens=(1, 64, 8192),
        linear_seconds=(0.002, 0.002, 0.256),
        attention_queries=(1, 8192),
        attention_contexts=(1, 8192),
        attention_seconds=((0.0, attention), (0.0, attention)),
    )
    return TrainingCost(model, SHAPE, **options)


def test_forward_units_and_half_of_the_head_take_as_long_as_a_step_of_inference_and_the_adapters():
    cost, lengths = a_cost(), (1000, 1000)
    attention, mlp = cost.unit("attention", lengths) / LORA_ATTENTION, cost.unit("mlp", lengths) / LORA
    head = cost.head_units(2000) * cost.unit("head", lengths) / HEAD
    assert 4 * (attention + mlp) + head == pytest.approx(cost.cost.linear(2000))
    assert mlp == pytest.approx(3 * attention), "by weights"


def test_attention_is_priced_by_sequence_and_more_in_the_backward():
    cost = a_cost(attention=1.0)
    plain = a_cost()
    forward = cost.unit("attention", (8192,)) - plain.unit("attention", (8192,))
    backward = cost.unit("attention_backward", (8192,)) - plain.unit("attention_backward", (8192,))
    assert forward == pytest.approx(0.25 * ATTENTION) and backward == pytest.approx(0.25 * ATTENTION_BACKWARD)
    assert cost.unit("mlp", (8192,)) == plain.unit("mlp", (8192,))


def test_no_sequence_attends_to_another_one():
    model = replace(a_cost().cost, attention_seconds=((0.0, 0.0), (0.0, 1.0)))
    cost, plain = TrainingCost(model, SHAPE), a_cost()

    def attention(*lengths):
        return cost.unit("attention", lengths) - plain.unit("attention", lengths)

    assert attention(4096, 4096) == pytest.approx(2 * attention(4096))
    assert attention(8192) > 1.5 * attention(4096, 4096)


def test_the_longest_unit_is_a_backward_that_computes_its_forward_again():
    cost = a_cost()
    assert cost.largest_unit(2048) == cost.unit("mlp_backward", (2048,), recompute=True)


def test_a_backward_that_computes_its_forward_again_costs_both():
    cost = a_cost(attention=1.0)
    for half in ("attention", "mlp"):
        kept, again = (cost.unit(f"{half}_backward", (512,), recompute=each) for each in (False, True))
        assert again == pytest.approx(kept + cost.unit(half, (512,)))
    assert cost.unit("mlp_backward", (512,)) == pytest.approx(BACKWARD * cost.unit("mlp", (512,)))


def test_an_iteration_is_the_sum_of_its_units():
    cost, lengths = a_cost(attention=0.1), (700, 900)
    units = [(kind, 4) for kind in ("attention", "mlp", "mlp_backward", "attention_backward")]
    units += [("head", 2), ("optimizer", 1)]
    assert cost.iteration(lengths) == pytest.approx(sum(count * cost.unit(kind, lengths) for kind, count in units))
    assert cost.iteration(lengths, recompute=True) > cost.iteration(lengths)


def test_the_automatic_micro_batch_is_the_largest_whose_units_take_a_sixth_of_the_target():
    cost = a_cost()
    for target in (0.02, 0.05, 0.1, 0.4):
        chosen = cost.auto_micro_batch(target, 1)
        assert chosen == 512 or 6 * cost.largest_unit(chosen) <= target
        assert chosen == 8192 or 6 * cost.largest_unit(2 * chosen) > target
    assert cost.auto_micro_batch(0.02, 1) < cost.auto_micro_batch(0.4, 1)
    assert cost.auto_micro_batch(None, 1) == 8192
    assert cost.auto_micro_batch(0.001, 3000) == 3000, "no example is cut"


def test_a_unit_of_the_head_has_as_many_tokens_as_the_trainer_computes_at_once():
    assert HEAD_TOKENS == HEAD_ROWS
    assert [a_cost().head_units(tokens) for tokens in (1, 1024, 1025)] == [1, 1, 2]


HYBRID = TrainingShape(
    num_layers=4,
    attention_weights=10,
    mlp_weights=30,
    head_weights=40,
    recurrence_weights=20,
    layers=(("recurrence", "mlp"), ("recurrence", "mlp"), ("attention",), ("parallel", "mlp")),
)
"""Layers of all kinds, with 10 + 2 * 20 + 30 + 3 * 30 = 170 of 210 weights, and two of them with attention."""


def a_hybrid_cost(attention=0.0):
    return TrainingCost(a_cost(attention=attention).cost, HYBRID)


def test_a_recurrent_half_takes_its_share_of_a_step_times_its_own_factors():
    step = a_cost().cost.linear(8192)
    cost, of_recurrence, of_attention = a_hybrid_cost(), step * 20 / 210, step * 10 / 210
    assert cost.unit("recurrence", (8192,)) == pytest.approx(RECURRENCE * of_recurrence)
    assert cost.unit("recurrence_backward", (8192,)) == pytest.approx(RECURRENCE_BACKWARD * of_recurrence)
    both = LORA_ATTENTION * of_attention + RECURRENCE * of_recurrence
    assert cost.unit("parallel", (8192,)) == pytest.approx(both)
    both = BACKWARD * LORA_ATTENTION * of_attention + RECURRENCE_BACKWARD * of_recurrence
    assert cost.unit("parallel_backward", (8192,)) == pytest.approx(both)


def test_attention_is_priced_in_the_layers_that_have_it():
    with_attention, plain = a_hybrid_cost(attention=1.0), a_hybrid_cost()
    each = with_attention.cost.attention(4096, 4096) / 2
    for kind, factor in (("attention", ATTENTION), ("parallel", ATTENTION), ("recurrence", 0), ("mlp", 0)):
        added = with_attention.unit(kind, (4096,)) - plain.unit(kind, (4096,))
        assert added == pytest.approx(factor * each)


def test_an_iteration_of_a_hybrid_model_is_the_sum_of_its_units():
    cost, lengths = a_hybrid_cost(attention=0.1), (700, 900)
    units = units_of(HYBRID.layers, sum(lengths), backward=True, optimizer=True)
    assert cost.iteration(lengths) == pytest.approx(sum(cost.unit(unit.kind, lengths) for unit in units))
    assert {unit.kind for unit in units} == {*HYBRID.kinds}
    assert "recurrence" not in SHAPE.kinds and a_cost().largest_unit(512) > 0


def test_a_hybrid_shape_needs_the_weights_of_its_recurrence_and_all_of_its_layers():
    with pytest.raises(ValueError, match="recurrence_weights is 0; it must be at least 1"):
        TrainingShape(1, 1, 1, 1, layers=(("recurrence", "mlp"),))
    with pytest.raises(ValueError, match="layers are 1; num_layers is 2"):
        TrainingShape(2, 1, 1, 1, layers=(("attention", "mlp"),))


def test_sizes_below_one_are_refused_by_name():
    with pytest.raises(ValueError, match="mlp_weights is 0; it must be at least 1"):
        TrainingShape(1, 1, 0, 1)


MEASURED = {
    ("mlp", (8192,)): 1.1 * 0.75 * 0.8 * 0.256 / 4,
    ("attention", (8192,)): 1.6 * 0.25 * 0.8 * 0.256 / 4 + 2.0 * 1.0 / 4,
    ("mlp_backward", (8192,)): 1.1 * 1.1 * 0.75 * 0.8 * 0.256 / 4,
    ("attention_backward", (8192,)): 1.1 * 1.6 * 0.25 * 0.8 * 0.256 / 4 + 5.5 * 1.0 / 4,
    ("head", (8192,)): 2.0 * 0.2 * 0.256 / 8,
    ("optimizer", (8192,)): 0.25 * 0.002,
}
"""Seconds by hand, with factors as on an H200: layers have 160 of 200 weights, and attention has 10 of a layer's 40."""


@pytest.mark.parametrize(("kind", "lengths"), MEASURED)
def test_each_unit_takes_its_share_of_a_step_times_the_factor_measured_on_an_h200(kind, lengths):
    assert a_cost(attention=1.0).unit(kind, lengths) == pytest.approx(MEASURED[kind, lengths])


SITTING = Path(__file__).parents[2] / "benchmarks" / "engine" / "results" / "2026-11-23-tuning-units-h200.json"


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("attention", False), ("mlp", False), ("head", False), ("mlp_backward", False), ("attention_backward", False),
     ("attention_backward", True)],
)  # fmt: skip
def test_units_of_a_real_model_are_priced_as_they_were_timed_on_an_h200(kind, recompute):
    """The model is Llama-3-8B, with two sequences of 4,096 tokens."""
    sitting = json.loads(SITTING.read_text())
    assert (sitting["shape"], sitting["sequences"], sitting["length"]) == ("llama-3-8b", 2, 4096)
    shape = MODELS["llama-3-8b"]
    mlp = 3 * 4096 * 14336
    sizes = TrainingShape(shape.layers, shape.layer_weights - mlp, mlp, shape.head_weights)
    cost = TrainingCost(packaged_profile(shape, "h200").cost, sizes)
    timed, _ = sitting["units"]["recompute" if recompute else "keep"][kind]
    assert 1e3 * cost.unit(kind, (4096, 4096), recompute=recompute) == pytest.approx(timed, rel=0.15)
