"""The account that every tier of recurrent states below the host keeps, on its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.lm.memory.prices import Link
from holdfast.lm.parts.tiers.lower_states import LowerStates
from holdfast.lm.parts.tiers.lower_tiers import WRITE_BYTES


def lower_states(**changes: Any) -> LowerStates:
    """An account in which two states may be written at a time."""
    pool: Any = SimpleNamespace(**dict(host_slots=3, slot_bytes=WRITE_BYTES // 2) | changes)
    return LowerStates(pool, Link(latency=1e-3, rate=1e9))


def test_snapshots_that_wait_and_those_being_written_are_unwritten() -> None:
    states, snapshot = lower_states(), object()
    assert (states.unwritten, states.backlog, states.has_news) == (0, False, False)
    states.offer(snapshot)  # type: ignore[arg-type]
    assert (states.unwritten, states.backlog, states.has_news) == (1, False, True)
    states._writing.add(b"another")
    assert (states.unwritten, states.backlog) == (2, True)


def test_a_host_without_slots_for_states_is_refused() -> None:
    with pytest.raises(ValueError, match="raise host_cache_gb or snapshot_share"):
        lower_states(host_slots=0)
