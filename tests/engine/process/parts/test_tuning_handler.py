"""TuningHandler: the micro-batch that it chooses for a job, by time, by memory and by the job's examples."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.process.parts.tuning_handler import Notice, TuningHandler, TuningRules
from holdfast.training.jobs import Hyperparameters


def chosen(
    longest: int,
    most: int,
    *,
    target: float | None = None,
    bound: float = 1.0,
    wanted: int = 1024,
    blocks: int = 1 << 20,
    seconds: float = 0.0,
) -> int:
    """The micro-batch of a job whose tokens take `seconds` each and a tenth of a block each."""
    cost = SimpleNamespace(
        auto_micro_batch=lambda target, longest: max(wanted, longest), iteration=lambda lengths: seconds * sum(lengths)
    )
    tuner: Any = SimpleNamespace(
        cost=cost, max_blocks=blocks, max_unit_seconds=0.5, largest_unit=lambda tokens: seconds * tokens
    )
    trainer: Any = SimpleNamespace(blocks_for=lambda given, tokens: -(-tokens // 10))
    rules = TuningRules("m", "0", None, target, bound, 16, ("q", "v"), 1)
    handler = TuningHandler(tuner, trainer, None, rules, Notice(lambda: None))  # type: ignore[arg-type]
    return handler._sized(Hyperparameters(epochs=1, batch_size=8), longest, most=most).micro_batch


@pytest.mark.parametrize(("longest", "most", "micro_batch"), [(100, 5000, 512), (300, 5000, 512), (600, 5000, 1024)])
def test_a_micro_batch_is_halved_until_memory_holds_it_but_never_below_the_longest_example(
    longest: int, most: int, micro_batch: int
) -> None:
    assert chosen(longest, most, blocks=60) == micro_batch


def test_no_memory_is_counted_for_more_tokens_than_any_step_has() -> None:
    assert chosen(50, 400, blocks=40) == 1024
    assert chosen(50, 401, blocks=40) == 256


def test_without_a_target_an_iteration_takes_no_longer_than_the_bound() -> None:
    assert chosen(50, 5000, bound=1.0, seconds=1 / 600) == 512
    assert chosen(50, 5000, bound=2.0, seconds=1 / 600) == 1024
    for bound in (0.0, inf):
        assert chosen(50, 5000, bound=bound, seconds=1 / 600) == 512, "as long as by default"


def test_with_a_target_the_largest_unit_fits_it_whatever_the_bound_is() -> None:
    assert chosen(50, 5000, target=0.1, bound=0.01, seconds=1 / 600) == 256
    assert chosen(50, 5000, target=0.1, bound=0.01, seconds=1 / 6000) == 1024
