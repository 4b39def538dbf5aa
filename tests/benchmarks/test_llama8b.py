"""Tests of the options with which the offline rows of a Llama-3-8B shape run."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.llama8b import offline, options_of
from holdfast.core.types import NO_OUTPUT, FinishReason, Request, SequenceOutput


def test_offline_rows_take_large_steps_as_offline_generation_does() -> None:
    assert options_of(["bs128", "prefill"], {})["token_budget"] == "large"
    assert options_of(["prefill"], {"token_budget": 1024})["token_budget"] == 1024


def test_rows_that_a_server_is_judged_by_take_its_steps() -> None:
    assert "token_budget" not in options_of(["bs1", "stall"], {})
    assert "token_budget" not in options_of(["first"], {})
    assert "token_budget" not in options_of(["prefill"], {"tbt_target": 0.025})


class OneTokenEach:
    """A loop whose steps give each request that was added one token."""

    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.rows: list[int] = []

    def add(self, request: Request) -> None:
        self.left[request.id] = request.params.max_tokens

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[SequenceOutput]:
        self.rows.append(len(self.left))
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = {name for name, left in self.left.items() if not left}
        outputs = [
            NO_OUTPUT._replace(
                request_id=name, tokens=(7,), finish_reason=FinishReason.LENGTH if name in ended else None
            )
            for name in self.left
        ]
        self.left = {name: left for name, left in self.left.items() if left}
        return outputs


@pytest.mark.parametrize(("spread", "most"), [(True, 125), (False, 200)])
def test_offline_rows_run_as_many_requests_at_once_as_offline_generation(spread: bool, most: int) -> None:
    loop: Any = OneTokenEach()
    found = offline(loop, "row", [(3, 40)] * 50 + [(3, 16)] * 150, spread=spread)
    assert max(loop.rows) == loop.rows[0] == pytest.approx(most, abs=3)
    assert sum(loop.rows) == 50 * 40 + 150 * 16 and found["requests"] == 200
    assert found["steps"] == 40
