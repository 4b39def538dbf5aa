"""Crowds of the benchmark of equal bits: each engine has a share of the requests, and answers are found by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.engine.same_bits import Crowd, Told, differing, shares

CROWDS = {"fast": Crowd(6, {}), "slow": Crowd(2, {}), "slower": Crowd(1, {})}


@pytest.mark.parametrize("requests", [1, 3, 10, 400, 10_000])
def test_crowds_share_the_requests_by_weight_and_each_has_one(requests: int) -> None:
    found = shares(requests, CROWDS)
    assert sum(found.values()) == max(requests, 3) and min(found.values()) >= 1
    assert found["fast"] >= found["slow"] >= found["slower"]
    assert requests < 400 or found["slow"] == pytest.approx(requests * 2 / 9, abs=1)


def test_an_answer_is_compared_with_that_of_its_number_alone() -> None:
    told: Any = SimpleNamespace(answers={"0-1": "b", "1-0": "a", "2-1": "x", "10-2": "c"})
    assert differing(cast(Told, told), ["a", "b", "c"]) == 1
