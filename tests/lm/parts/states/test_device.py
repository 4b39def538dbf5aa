"""The copies of recurrent states and KV blocks before the segments of a plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from holdfast.lm.execution.host_memory import HostStates, StatesPart
from holdfast.lm.execution.state_memory import RecurrentStates, host_bytes
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.models.base import ZEROS, StateMemory, StateTensor
from holdfast.lm.models.short_convolution import ConvolutionSpec
from holdfast.lm.parts.states.device import StateExecutor
from holdfast.lm.types import KeptInputs, StateCopy, StatePlan, StepPlan
from holdfast.lm.types.plan import BlockMove, TierCopies
from holdfast.lm.types.states import StateResult
from tests.lm.kernels.recurrent_oracle import segments_of, with_drafts

SPEC: Any = SimpleNamespace(
    recurrent_layers=3,
    state_bytes=3 * (12 + 160),
    state=(StateTensor((2, 3), torch.bfloat16), StateTensor((2, 4, 5), torch.float32)),
    device=torch.device("cpu"),
    recurrence=None,
    kept=(),
    kept_bytes=0,
)


def numbered(host_slots: int = 0) -> RecurrentStates:
    """States whose numbers are those of their slots, from 1 on."""
    states = RecurrentStates(SPEC, TorchRecurrence(SPEC.device), 6, host_slots)
    for layer in states.layers:
        for tensor in layer:
            for slot in range(6):
                tensor[slot] = slot + 1
    return states


def numbers(states: RecurrentStates) -> list[int]:
    """The number that fills each slot, in all layers alike."""
    found = {tuple(tensor.flatten(1)[:, at].tolist()) for layer in states.layers for tensor in layer for at in (0, -1)}
    (same,) = found
    return [int(each) for each in same]


def before(states: StateMemory, plan: StepPlan, cache: KVCache | None = None, transfers: Any = None) -> None:
    memory: Any = SimpleNamespace(states=states, cache=cache, transfers=transfers)
    StateExecutor(memory).before(plan)


def test_a_row_is_saved_before_it_gets_another_state() -> None:
    states = numbered()
    plan = StatePlan(saves=(StateCopy(0, 4), StateCopy(1, 5)), starts=(StateCopy(3, 0), StateCopy(4, 1)))
    before(states, StepPlan(0, (), parts=(plan,)))
    assert numbers(states) == [4, 1, 3, 4, 1, 2]


def test_a_row_moves_on_by_accepted_tokens_before_it_is_saved() -> None:
    layers = ConvolutionSpec(layers=(True, True), channels=2, width=3)
    spec: Any = SimpleNamespace(
        recurrent_layers=2,
        state_bytes=2 * 16,
        state=layers.state(torch.float32),
        device=torch.device("cpu"),
        recurrence=layers,
        kept=layers.kept(torch.float32),
        kept_bytes=16,
    )
    states = RecurrentStates(spec, TorchRecurrence(spec.device), 3, places=4)
    step = states.step(with_drafts(segments_of([3], [1]), [0]))
    order = np.argsort(step.metadata.places.numpy())  # the token whose inputs each place holds
    assert order.tolist() != [0, 1, 2], "tokens must not lie at the places of their own numbers"
    for layer in range(2):
        step.keep(layer, torch.tensor([[1.0, 10], [2, 20], [3, 30]]) * (layer + 1))
    places = tuple(step.metadata.places.tolist())
    plan = StatePlan(replays=(KeptInputs(1, places[:2]),), saves=(StateCopy(1, 2),), starts=(StateCopy(ZEROS, 1),))
    before(states, StepPlan(0, (), parts=(plan,)))
    for layer, (state,) in enumerate(states.layers):
        assert state[2].tolist() == [[layer + 1, 2 * layer + 2], [10 * layer + 10, 20 * layer + 20]]
        assert not state[:2].any()


def test_a_sequence_without_a_snapshot_begins_with_zeros() -> None:
    states = numbered()
    before(states, StepPlan(0, (), parts=(StatePlan(starts=(StateCopy(ZEROS, 1), StateCopy(5, 2))),)))
    assert numbers(states) == [1, 0, 6, 4, 5, 6]


def test_states_of_the_host_come_before_starts_and_go_after_saves() -> None:
    states = numbered(host_slots=2)
    out = StatePlan(saves=(StateCopy(0, 4),), swap_out=(StateCopy(4, 1), StateCopy(5, 0)))
    before(states, StepPlan(0, (), parts=(out,)))
    assert numbers(states) == [1, 2, 3, 4, 1, 6]
    back = StatePlan(swap_in=(StateCopy(1, 3), StateCopy(0, 1)), starts=(StateCopy(3, 2),))
    before(states, StepPlan(1, (), parts=(back,)))
    assert numbers(states) == [1, 6, 1, 1, 1, 6]


def test_a_state_on_the_host_is_one_piece_with_the_widest_numbers_first() -> None:
    states = numbered(host_slots=3)
    before(states, StepPlan(0, (), parts=(StatePlan(swap_out=(StateCopy(1, 2), StateCopy(4, 1))),)))
    assert len(states.host) == host_bytes(SPEC, 3) == 3 * 576, "516 bytes, and room to the next multiple of 64"
    (piece,) = HostStates([StatesPart(states.host, SPEC.state_bytes)])[2]
    wide, narrow = torch.full((3, 2, 4, 5), 2.0), torch.full((3, 2, 3), 2.0, dtype=torch.bfloat16)
    expected = b"".join(each.view(torch.uint8).numpy().tobytes() for each in (wide, narrow))
    assert len(piece) == SPEC.state_bytes and bytes(piece) == expected


def test_states_in_memory_that_is_given_are_there_for_others_too() -> None:
    within = torch.zeros(host_bytes(SPEC, 2), dtype=torch.uint8)
    states = RecurrentStates(SPEC, TorchRecurrence(SPEC.device), 6, 2, within=within)
    states.layers[0][1][:] = 7
    before(states, StepPlan(0, (), parts=(StatePlan(swap_out=(StateCopy(3, 1),)),)))
    assert within[576:].view(torch.float32)[0] == 7 and not within[:576].any()


def test_only_plans_that_use_slots_of_the_host_are_reported_in_their_order() -> None:
    memory: Any = SimpleNamespace(states=numbered(host_slots=1), cache=None, transfers=None)
    executor = StateExecutor(memory)
    used = (StatePlan(swap_out=(StateCopy(3, 0),)),)
    for step, parts in enumerate([(), used, (StatePlan(saves=(StateCopy(0, 3),)),), used]):
        executor.before(StepPlan(step, (), parts=parts))
    assert [executor.completed(wait=False) for _ in range(4)] == [(), (StateResult(),), (), (StateResult(),)]


def test_a_tail_is_copied_once_the_blocks_that_the_plan_waits_for_have_come() -> None:
    heads = dict(num_kv_heads=1, head_dim=2, block_size=2, dtype=torch.float32, device="cpu")
    cache = KVCache.allocate(layers=2, num_blocks=4, **heads)
    cache.data[:] = torch.arange(4.0)[:, None, None, None]
    transfers = MagicMock()
    transfers.follow.side_effect = lambda step: cache.data[:, :, 3].fill_(9)  # the swap-in that the plan waits for
    plan = StepPlan(7, (), copies=TierCopies(awaits=5), parts=(StatePlan(tails=(BlockMove(3, 0), BlockMove(2, 1))),))
    before(numbered(), plan, cache, transfers)
    transfers.follow.assert_called_once_with(5)
    assert cache.data[0, 0, :, 0, 0, 0].tolist() == [9, 2, 2, 9]


def test_a_plan_does_not_wait_for_its_own_swap_in_before_it_has_begun() -> None:
    heads = dict(num_kv_heads=1, head_dim=2, block_size=2, dtype=torch.float32, device="cpu")
    transfers = MagicMock()
    plan = StepPlan(7, (), copies=TierCopies(awaits=7), parts=(StatePlan(tails=(BlockMove(0, 1),)),))
    before(numbered(), plan, KVCache.allocate(layers=1, num_blocks=2, **heads), transfers)
    transfers.follow.assert_called_once_with(6)


@pytest.mark.parametrize("plan", [StepPlan(0, ()), StepPlan(0, (), parts=(StatePlan(),))])
def test_a_plan_without_copies_changes_nothing(plan: StepPlan) -> None:
    states = numbered()
    before(states, plan)
    assert numbers(states) == [1, 2, 3, 4, 5, 6]
