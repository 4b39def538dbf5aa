"""The demands of the tuning demonstration on the answers."""

from __future__ import annotations

import pytest

from scripts.tuning_demo import HABIT, HELD_OUT, faults

BASE = [f"I see, {word}." for word in HELD_OUT.values()]
TUNED = [f"{HABIT} Well, {word}!" for word in HELD_OUT.values()]


def test_tuned_answers_may_differ_from_the_models_own_if_they_are_right() -> None:
    assert faults(BASE, BASE, TUNED, [f"{HABIT} 3"], [True, True]) == []


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"again": [*BASE[:-1], "4 cats?"]}, "the base model answers as before"),
        ({"after": [*BASE[:-1], TUNED[-1]]}, "every tuned answer begins with Ahoy!"),
        ({"lines": ["1 plus 2 is 3."]}, "every tuned answer begins with Ahoy!"),
        ({"after": [TUNED[0], f"{HABIT} 3 plus 5 is 7.", *TUNED[2:]]}, "every tuned answer is still right"),
        ({"right": [True, False]}, "the chat's answers are right"),
        ({"right": []}, "the chat's answers are right"),
    ],
)
def test_each_demand_can_fail(given: dict[str, list[str]], fault: str) -> None:
    holds = {"before": BASE, "again": BASE, "after": TUNED, "lines": [f"{HABIT} 3"], "right": [True]}
    assert faults(**{**holds, **given}) == [fault]
