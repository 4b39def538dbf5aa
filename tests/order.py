"""Which test files the processes of pytest-xdist begin with."""

from __future__ import annotations

import pytest

LONGEST = (
    "server/page/test_chat_page.py",
    "server/page/test_engine_view.py",
    "server/page/test_answers_page.py",
    "server/test_rolling_upgrade.py",
    "server/test_supervisor.py",
    "lm/execution/test_shard_parity.py",
    "server/test_padded.py",
    "combinations/test_triples.py",
    "cli/test_bench.py",
    "cli/test_plan.py",
    "server/test_killed_together.py",
    "server/inference/test_end_to_end.py",
    "engine/ranks/test_many_device.py",
    "training/test_ranks.py",
    "engine/ranks/test_ranks.py",
    "server/conversations/test_histories.py",
)
"""Files whose tests take more than 16 s together, the longest first. One that began last would keep one core alone."""


def longest_first(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first, all others after them as they are."""
    rank = {f"tests/{name}": at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.nodeid.partition("::")[0], len(rank)))
