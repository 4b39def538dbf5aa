"""Steps of one token more than whole tiles: pairs of sizes, and steps that hold one prompt each."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.engine.tile_steps import COUNTED, UNCOUNTED, compared, step_times


class Clocked:
    """An engine whose steps take a millisecond for each tile of 128 tokens, and a tenth more for each step before."""

    def __init__(self, segments: Any = None) -> None:
        self._segments = segments
        self.served: list[int] = []

    def serve(self, config: Any, prompts: Any, *, make_policy: Any) -> tuple[list[Any], list[Any]]:
        size = make_policy(None).token_budget
        self.served.append(size)
        tiles = 1e-3 * -(-size // 128)
        segments = self._segments or ((size, size),)
        return [], [
            SimpleNamespace(segments=segments, seconds=tiles * (1 + 0.1 * number)) for number in range(len(prompts))
        ]


def test_step_times_leave_out_the_first_steps_and_turn_the_order_around() -> None:
    engine = Clocked()
    times = step_times(engine, [128, 129], rounds=2)  # type: ignore[arg-type]
    middle = 1 + 0.1 * (UNCOUNTED + (COUNTED - 1) / 2)
    assert times == {128: pytest.approx(1e-3 * middle), 129: pytest.approx(2e-3 * middle)}
    assert engine.served == [128, 129, 129, 128]


def test_a_step_that_holds_anything_but_one_prompt_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a step of 257 tokens was planned otherwise"):
        step_times(Clocked(((256, 256),)), [257], rounds=1)  # type: ignore[arg-type]


def test_rows_compare_whole_tiles_with_one_token_more() -> None:
    assert compared({256: 2e-3, 257: 3e-3}, [256]) == [{"tokens": 256, "ms": 2.0, "one_more_ms": 3.0, "ratio": 1.5}]
