"""The recurrent layers of a CPU, compared with a float64 loop over tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.lm.kernels.recurrent.torch_recurrence import WIDTHS, TorchRecurrence
from tests.lm.kernels.recurrent_oracle import (
    CASES,
    ConvolutionCase,
    DeltaCase,
    LayerCase,
    ScanCase,
    assert_close,
    check_kept,
    check_same_bits,
    kept_like,
    scattered,
    segments_of,
    with_drafts,
)

MIXED = [1, 70, 3, 130, 1, 64, 17, 16, 2]
BACKEND = TorchRecurrence(torch.device("cpu"))


@pytest.mark.parametrize("kind", CASES)
def test_a_mixed_batch_equals_the_oracle(kind: Any) -> None:
    assert_close(kind.random(scattered(MIXED)), BACKEND)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches_equal_the_oracle(seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = [1 if random.random() < 0.4 else int(random.integers(1, 301)) for _ in range(random.integers(1, 8))]
    segments = scattered(lengths, seed)
    groups, shared = int(random.integers(1, 4)), int(random.integers(1, 4))
    key_dim, value_dim = (int(random.integers(16, 129)) for _ in range(2))
    sizes = {"heads": groups * shared, "seed": seed}
    normalize = bool(random.integers(2))
    delta = {"key_heads": groups, "key_dim": key_dim, "value_dim": value_dim, "normalize": normalize}
    scan = {"groups": groups, "state_dim": key_dim, "head_dim": value_dim, "with_skip": bool(random.integers(2))}
    assert_close(DeltaCase.random(segments, **sizes, **delta), BACKEND)
    assert_close(ScanCase.random(segments, **sizes, **scan), BACKEND)
    channels, width = int(random.integers(1, 100)), int(random.integers(2, 6))
    assert_close(ConvolutionCase.random(segments, channels=channels, width=width, seed=seed), BACKEND)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("silu", [False, True])
def test_convolutions_apply_bias_and_activation_only_if_given(with_bias: bool, silu: bool) -> None:
    assert_close(ConvolutionCase.random(scattered(MIXED), with_bias=with_bias, silu=silu), BACKEND)


@pytest.mark.each_value
@pytest.mark.parametrize("least", [-1e-4, -30.0, -1e6])
@pytest.mark.parametrize("kind", [DeltaCase, ScanCase])
def test_weak_and_strong_decays_stay_exact_over_long_segments(kind: Any, least: float) -> None:
    assert_close(kind.random(scattered([1024, 1]), heads=2, least=least), BACKEND)


def test_infinite_decays_leave_their_neighbours_exact() -> None:
    case = DeltaCase.random(scattered([300, 1]), least=-1e-3)
    case.log_decay[::7] = -torch.inf
    assert_close(case, BACKEND)


def test_equal_keys_without_decay_do_not_overflow() -> None:
    """The powers of the chunk's matrix of products would exceed float32 here."""
    case = DeltaCase.random(scattered([4096]), heads=2, least=0.0)
    case.key[:] = case.key[0]
    case.beta[:] = 1.0
    assert_close(case, BACKEND)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("cut", [WIDTHS[-1], 3 * WIDTHS[-1]])
def test_a_segment_cut_between_chunks_gives_the_same_bits(kind: Any, cut: int) -> None:
    whole: LayerCase = kind.random(segments_of([250], [1]))
    state = whole.state.clone()
    parts = [whole.part(0, cut, state), whole.part(cut, 250, state)]
    found = torch.cat([part.run(BACKEND) for part in parts])
    assert torch.equal(found, whole.run(BACKEND))
    assert torch.equal(state, whole.state)


@pytest.mark.parametrize("kind", CASES)
def test_a_sequence_gives_the_same_numbers_in_pieces_of_any_length(kind: Any) -> None:
    whole: LayerCase = kind.random(segments_of([211], [2]))
    expected, states = whole.expected()
    found, start = [], 0
    for length in (1, 1, 5, 64, 70, 1, 69):
        found.append(whole.part(start, start + length, whole.state).run(BACKEND))
        start += length
    torch.testing.assert_close(torch.cat(found).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.state.double(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_tokens_computed_one_by_one_have_the_same_bits_wherever_a_sequence_is_cut(kind: Any) -> None:
    whole: LayerCase = kind.random(segments_of([211], [2]))
    check_same_bits(TorchRecurrence(torch.device("cpu"), one_by_one=True), whole, (1, 1, 5, 64, 70, 1, 69))


@pytest.mark.parametrize("kind", CASES)
def test_states_of_other_slots_may_hold_nan(kind: Any) -> None:
    case: LayerCase = kind.random(scattered([3, 80]))
    idle = [slot for slot in range(len(case.state)) if slot not in case.segments.row]
    case.state[idle] = torch.nan
    assert case.run(BACKEND).isfinite().all()
    assert case.state[idle].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CASES)
def test_narrow_inputs_are_rounded_once(kind: Any, dtype: torch.dtype) -> None:
    case: LayerCase = kind.random(scattered(MIXED))
    exact = ("log_decay", "dt", "decay") if kind is not ConvolutionCase else ()
    kept = {name: getattr(case, name) for name in (*exact, "state") if hasattr(case, name)}
    narrow = case.each(lambda tensor: tensor.to(dtype))
    if kind is not ConvolutionCase:
        narrow = replace(narrow, **kept)
    expected, _ = narrow.expected()
    found = narrow.run(BACKEND)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=0.01, atol=1e-3)


@pytest.mark.parametrize("kind", CASES)
def test_tokens_after_the_last_segment_change_no_state(kind: Any) -> None:
    case: LayerCase = kind.random(scattered([5, 1, 30]))
    longer = case.each(lambda tensor: torch.cat([tensor, tensor[:4]]) if len(tensor) == 36 else tensor)
    found, state = longer.run(BACKEND), longer.state
    case = kind.random(scattered([5, 1, 30]))
    assert torch.equal(found[:36], case.run(BACKEND))
    assert torch.equal(state, case.state)


@pytest.mark.parametrize("kind", CASES)
def test_segments_that_verify_drafts_leave_their_states(kind: Any) -> None:
    assert_close(kind.random(with_drafts(scattered(MIXED), [1, 2, 4, 7])), BACKEND)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("accepted", [1, 3, 12])
def test_a_draft_and_a_replay_of_its_accepted_tokens_give_the_state_of_these_tokens(kind: Any, accepted: int) -> None:
    whole: LayerCase = kind.random(segments_of([16], [1]))
    expected = whole.part(0, accepted, whole.state.clone())
    _, states = expected.expected()
    replace(whole, segments=with_drafts(whole.segments, [0])).run(BACKEND)
    whole.part(0, accepted, whole.state).run(BACKEND)
    torch.testing.assert_close(whole.state.double().cpu(), states, rtol=1e-4, atol=1e-4)


def test_a_shift_updates_a_convolution_as_a_whole_call_does() -> None:
    case = ConvolutionCase.random(scattered(MIXED))
    _, states = case.expected()
    BACKEND.shift(case.x, case.state, BACKEND.make_metadata(case.segments))
    torch.testing.assert_close(case.state.double().cpu(), states, rtol=0, atol=0)


def test_a_scan_takes_decays_by_token() -> None:
    case = ScanCase.random(with_drafts(scattered(MIXED), [3]))
    by_token = replace(case, decay=-2 * torch.rand(case.dt.shape, generator=torch.Generator().manual_seed(1)))
    assert_close(by_token, BACKEND)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_drafted_tokens_are_kept_at_their_places(dtype: torch.dtype) -> None:
    segments = with_drafts(scattered([3, 1, 7, 70]), [0, 2])
    noise = torch.randn(81, 5000)
    wide, narrow = noise.split([4990, 10], 1)  # strided views of one tensor
    inputs = [wide.to(dtype), narrow.view(81, 5, 2), noise[0, :3].expand(81, 3)]
    kept = kept_like(inputs, 81)
    BACKEND.keep(inputs, kept, BACKEND.make_metadata(segments))
    check_kept(inputs, kept, segments)


def test_more_inputs_than_a_call_can_keep_are_refused() -> None:
    segments, inputs = with_drafts(scattered([2]), [0]), [torch.zeros(2, 1)] * 6
    with pytest.raises(ValueError, match="6 inputs of a recurrent layer are to be kept; at most 5"):
        BACKEND.keep(inputs, inputs, BACKEND.make_metadata(segments))
