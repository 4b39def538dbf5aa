"""The losses and the optimizer of calls as values: what they take, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdfast.training.losses import LOSSES, REFUSED, Adam, Loss
from tests.losses import DEFINED


def test_a_loss_has_its_settings_and_defaults() -> None:
    assert Loss(name="ppo", settings={"clip_low_threshold": 0.9}).setting("clip_low_threshold") == 0.9
    assert Loss(name="ppo").setting("clip_high_threshold") == 1.2
    assert [Loss(name="cispo").setting(name) for name in LOSSES["cispo"].settings] == [0.0, 4.0]
    assert {*LOSSES} == {*DEFINED}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_cannot_be_computed_are_refused_with_a_reason(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^loss {name} cannot be computed: .+"):
        Loss(name=name)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mse", {}, "loss is 'mse'; choose from cross_entropy, importance_sampling"),
        ("ppo", {"beta": 0.1}, "'beta' is no setting of ppo; it has clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 0.1}, "'beta' is no setting of cross_entropy; it has none"),
        ("dro", {"beta": -0.1}, "beta is -0.1; it must be from 0 to 1e\\+06"),
        ("dro", {"beta": math.nan}, "beta is nan; it must be from 0"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold is 1.3, which is above clip_high_threshold of 1.2"),
    ],
)
def test_other_losses_and_settings_are_refused(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loss(name=name, settings=settings)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"learning_rate": -1e-4}, "learning_rate is -0.0001; it must be from 0 to 1000"),
        ({"learning_rate": math.nan}, "learning_rate is nan; it must be from 0"),
        ({"beta1": 1.0}, "beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": math.nan}, "beta2 is nan; it must be at least 0"),
        ({"eps": 0.0}, "eps is 0.0; it must be from 1e-30 to 1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0; it must be from 0"),
        ({"grad_clip_norm": math.inf}, "grad_clip_norm is inf; it must be from 0"),
        ({"learning_rate": 1.0, "weight_decay": 2.0}, "weight_decay is 2.0; times the learning rate"),
    ],
)
def test_parameters_of_adam_out_of_their_limits_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adam(**wrong)


def test_no_clipping_is_an_infinite_norm() -> None:
    assert Adam().max_norm == math.inf and Adam(grad_clip_norm=0.5).max_norm == 0.5
