"""From a scheduler's name to its policy and the size of its steps."""

import pytest

from holdfast.core.config import EngineConfig
from holdfast.lm.scheduler.choice import CHUNKED, NAMES, capacity_of, make_policy
from tests.scheduling import create_requests, create_scheduler


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_a_policy_whose_steps_hold_what_it_needs(name):
    capacity = capacity_of(name, token_budget=8, max_model_len=64, max_sequences=3)
    assert capacity == (8 if name in CHUNKED else 67)
    scheduler = create_scheduler(
        policy=make_policy(name, token_budget=8, capacity=capacity), max_sequences=3, max_model_len=64
    )
    for request in create_requests(63, 63, 63, max_tokens=1):
        scheduler.add(request)
    plan = scheduler.schedule(0.0)
    assert plan.num_tokens == (8 if name in CHUNKED else 63)


def test_names_mean_policies_of_their_own():
    assert len({type(make_policy(name, token_budget=8, capacity=67)) for name in NAMES}) == len(NAMES)


def test_a_target_is_for_the_default_alone():
    assert EngineConfig(tbt_target=50).scheduler == "stall-free"
    with pytest.raises(ValueError, match="scheduler is orca"):
        EngineConfig(tbt_target=50, scheduler="orca")
