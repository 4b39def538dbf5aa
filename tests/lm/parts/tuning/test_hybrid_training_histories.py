"""Random histories of hybrid models with jobs of training: blocks that are lent come back, and every state stays exact.

As in `test_hybrid_histories`, each segment begins with the state of the tokens before it. As in
`test_training_histories`, free + cached + used + lent = total, and each job computes each of its micro-batches once.
"""

from collections import Counter
from functools import cache

import pytest

from tests.lm.parts.tuning.test_training_histories import NAMES, TrainingHistory, play_history
from tests.lm.scheduler.test_hybrid_histories import HybridHistory

SEEDS = range(2, 14)


class HybridTrainingHistory(TrainingHistory, HybridHistory):
    """A random run with jobs, over blocks and recurrent states."""


@cache
def seen_in(seed, name):
    """The events of a history in which every request and every job got the results that it gets alone."""
    history = play_history(HybridTrainingHistory(seed, name))
    return history.seen + Counter(tails=history.device.tails)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_states_stay_exact_while_blocks_are_lent_and_taken_back(seed, name):
    seen_in(seed, name)


@pytest.mark.long
def test_histories_lend_move_and_take_back_blocks_beside_snapshots():
    seen = sum((seen_in(seed, name) for seed in SEEDS for name in NAMES), Counter())
    assert seen["jobs done"] > 50 and seen["moved"] > 100 and seen["tails"] > 50
    assert min(seen[name] for name in ("drop", "offload", "restore")) > 5 and seen["release"]
