"""The Triton kernels of recurrent layers: under the interpreter without a GPU, compiled with one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.lm.kernels.recurrent.tiles import CHUNK, FEW
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.kernels.recurrent.triton_recurrence import TritonRecurrence
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

MIXED = [1, FEW + 1, 3, CHUNK + 40, 1, CHUNK, FEW, 2 * CHUNK + 1]


def on_device(case: LayerCase, device: str) -> tuple[LayerCase, TritonRecurrence]:
    return case.each(lambda tensor: tensor.to(device)), TritonRecurrence(torch.device(device))


@pytest.mark.parametrize("kind", CASES)
def test_a_mixed_batch_equals_the_oracle(kind: Any, device: str) -> None:
    assert_close(*on_device(kind.random(scattered(MIXED)), device))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("groups", "heads", "key_dim", "value_dim"), [(1, 3, 48, 16), (3, 3, 16, 40), (1, 1, 128, 128), (1, 2, 20, 72)]
)
@pytest.mark.parametrize("normalize", [False, True])
def test_sizes_that_are_no_powers_of_two_are_padded(
    groups: int, heads: int, key_dim: int, value_dim: int, normalize: bool, device: str
) -> None:
    segments = scattered([2, 1, CHUNK + 21])
    sizes = {"key_heads": groups, "heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    assert_close(*on_device(DeltaCase.random(segments, normalize=normalize, **sizes), device))
    sizes = {"groups": groups, "heads": heads, "state_dim": key_dim, "head_dim": value_dim}
    assert_close(*on_device(ScanCase.random(segments, with_skip=normalize, **sizes), device))


@pytest.mark.each_value
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize(("with_bias", "silu"), [(False, True), (True, False)])
def test_convolutions_of_any_width_read_the_state(width: int, with_bias: bool, silu: bool, device: str) -> None:
    segments = scattered([1, 2, FEW, FEW + 1, CHUNK + 1])
    case = ConvolutionCase.random(segments, channels=300, width=width, with_bias=with_bias, silu=silu)
    assert_close(*on_device(case, device))


@pytest.mark.each_value
@pytest.mark.parametrize("least", [-1e-4, -30.0, -1e6])
@pytest.mark.parametrize("kind", [DeltaCase, ScanCase])
def test_weak_and_strong_decays_stay_exact(kind: Any, least: float, device: str) -> None:
    assert_close(*on_device(kind.random(scattered([300, FEW]), heads=2, least=least), device))


def test_infinite_decays_leave_their_neighbours_exact(device: str) -> None:
    case = DeltaCase.random(scattered([200, FEW]), heads=2, least=-1e-3)
    case.log_decay[::7] = -torch.inf
    assert_close(*on_device(case, device))


def test_equal_keys_without_decay_do_not_overflow(device: str) -> None:
    """The powers of the chunk's matrix of products would exceed float32 here."""
    case = DeltaCase.random(scattered([4096]), key_heads=1, heads=1, least=0.0)
    case.key[:] = case.key[0]
    case.beta[:] = 1.0
    assert_close(*on_device(case, device))


def test_strided_views_of_a_fused_projection_are_read_in_place(device: str) -> None:
    case, backend = on_device(DeltaCase.random(scattered([1, CHUNK + 3]), key_heads=2, heads=4), device)
    assert isinstance(case, DeltaCase)
    query, key, value = torch.cat([case.query, case.key, case.value], 1).split([2, 2, 4], 1)
    log_decay, beta = torch.cat([case.log_decay, case.beta], 1).split([4, 4], 1)
    views = replace(case, query=query, key=key, value=value, log_decay=log_decay, beta=beta)
    assert not any(view.is_contiguous() for view in (query, key, value, log_decay, beta))
    assert_close(views, backend)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("room", [(12, 400), (12, None)])
def test_reserved_metadata_serves_one_batch_after_another(kind: Any, room: tuple[int, int | None], device: str) -> None:
    metadata = None
    for lengths in ([1, 20, 3], [1] * 12, [CHUNK + 30, 1]):
        case, backend = on_device(kind.random(scattered(lengths)), device)
        metadata = backend.reserve(*room) if metadata is None else metadata
        assert backend.refill(metadata, case.segments)
        assert_close(case, backend, metadata)


@pytest.mark.parametrize("kind", CASES)
def test_metadata_without_a_batch_changes_nothing(kind: Any, device: str) -> None:
    case, backend = on_device(kind.random(scattered([3, 20])), device)
    before = case.state.clone()
    case.run(backend, backend.reserve(4, 100))
    assert torch.equal(case.state, before)


@pytest.mark.parametrize("kind", CASES)
def test_tokens_after_the_last_segment_change_no_state(kind: Any, device: str) -> None:
    case, backend = on_device(kind.random(scattered([5, 1, 30])), device)
    longer = case.each(lambda tensor: torch.cat([tensor, tensor[:4]]) if len(tensor) == 36 else tensor)
    assert_close(case, backend)
    assert len(longer.run(backend)) == 40


@pytest.mark.parametrize("kind", CASES)
def test_a_sequence_gives_the_same_numbers_in_pieces_of_any_length(kind: Any, device: str) -> None:
    whole, backend = on_device(kind.random(segments_of([150], [2])), device)
    expected, states = whole.expected()
    found, start = [], 0
    for length in (1, 1, 5, 64, 70, 1, 8):
        found.append(whole.part(start, start + length, whole.state).run(backend))
        start += length
    torch.testing.assert_close(torch.cat(found).double().cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(whole.state.double().cpu(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", CASES)
def test_tokens_computed_one_by_one_have_the_same_bits_wherever_a_sequence_is_cut(kind: Any, device: str) -> None:
    whole, _ = on_device(kind.random(segments_of([103], [2])), device)
    check_same_bits(TritonRecurrence(torch.device(device), one_by_one=True), whole, (1, 5, 65, 9, 1, 22))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_tokens_have_the_same_bits_wherever_a_sequence_is_cut(kind: Any, dtype: torch.dtype) -> None:
    whole, _ = on_device(kind.random(segments_of([400], [2])), "cuda")
    check_same_bits(TritonRecurrence(torch.device("cuda"), one_by_one=True), narrow(whole, dtype), (1, 5, 65, 300, 29))


def test_a_key_that_is_too_wide_is_refused(device: str) -> None:
    case, backend = on_device(DeltaCase.random(scattered([1]), key_dim=257), device)
    with pytest.raises(ValueError, match="257 dimensions; at most 256"):
        case.run(backend)


@pytest.mark.parametrize("kind", CASES)
def test_segments_that_verify_drafts_leave_their_states(kind: Any, device: str) -> None:
    assert_close(*on_device(kind.random(with_drafts(scattered(MIXED), [1, 2, 3, 6])), device))


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("accepted", [1, 3, 12])
def test_a_draft_and_a_replay_of_its_accepted_tokens_give_the_state_of_these_tokens(
    kind: Any, accepted: int, device: str
) -> None:
    whole, backend = on_device(kind.random(segments_of([16], [1])), device)
    expected = whole.part(0, accepted, whole.state.clone())
    _, states = expected.expected()
    replace(whole, segments=with_drafts(whole.segments, [0])).run(backend)
    whole.part(0, accepted, whole.state).run(backend)
    torch.testing.assert_close(whole.state.double().cpu(), states, rtol=1e-4, atol=1e-4)


def test_a_shift_updates_a_convolution_as_a_whole_call_does(device: str) -> None:
    case, backend = on_device(ConvolutionCase.random(scattered(MIXED)), device)
    assert isinstance(case, ConvolutionCase)
    _, states = case.expected()
    backend.shift(case.x, case.state, backend.make_metadata(case.segments))
    torch.testing.assert_close(case.state.double().cpu(), states, rtol=0, atol=0)


def test_a_scan_takes_decays_by_token(device: str) -> None:
    case = ScanCase.random(with_drafts(scattered(MIXED), [3]))
    by_token = replace(case, decay=-2 * torch.rand(case.dt.shape, generator=torch.Generator().manual_seed(1)))
    assert_close(*on_device(by_token, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_drafted_tokens_are_kept_at_their_places(dtype: torch.dtype, device: str) -> None:
    segments = with_drafts(scattered([3, 1, 7, 70]), [0, 2])
    noise = torch.randn(81, 5000, device=device)
    wide, narrow = noise.split([4990, 10], 1)  # strided views of one tensor
    inputs = [wide.to(dtype), narrow.view(81, 5, 2), noise[0, :3].expand(81, 3)]
    kept = kept_like(inputs, 81)
    TritonRecurrence(torch.device(device)).keep(
        inputs, kept, TritonRecurrence(torch.device(device)).make_metadata(segments)
    )
    check_kept(inputs, kept, segments)


def test_more_inputs_than_a_call_can_keep_are_refused(device: str) -> None:
    segments, inputs = with_drafts(scattered([2]), [0]), [torch.zeros(2, 1, device=device)] * 6
    with pytest.raises(ValueError, match="6 inputs of a recurrent layer are to be kept; at most 5"):
        TritonRecurrence(torch.device(device)).keep(
            inputs, inputs, TritonRecurrence(torch.device(device)).make_metadata(segments)
        )


def narrow(case: LayerCase, dtype: torch.dtype) -> LayerCase:
    """The case with inputs of this dtype. States of recurrences and decays stay in float32."""
    exact = ("log_decay", "dt", "decay") if isinstance(case, ConvolutionCase) else ("log_decay", "dt", "decay", "state")
    kept = {name: getattr(case, name) for name in exact if hasattr(case, name)}
    return replace(case.each(lambda tensor: tensor.to(dtype)), **kept)


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 3, 16), (5, 32, 128), (70, 7, 40)])
def test_gates_and_norms_around_a_rule_equal_pytorch(tokens: int, heads: int, dim: int, device: str) -> None:
    """All of them read columns of one projection."""
    noise = torch.Generator().manual_seed(tokens)
    projected = torch.randn(tokens, heads * dim + 2 * heads, generator=noise) * 20
    gate, rate, time = projected.to(device).split([heads * dim, heads, heads], 1)
    bias, decay, gain = (torch.randn(size, generator=noise).to(device) for size in (heads, heads, dim))
    x = torch.randn(tokens, heads, dim, generator=noise).to(device)
    triton, reference = TritonRecurrence(torch.device(device)), TorchRecurrence(torch.device(device))
    for found, expected in zip(
        (*triton.gates(time, rate, bias, decay), triton.gated_norm(x, gate, gain, 1e-6)),
        (*reference.gates(time, rate, bias, decay), reference.gated_norm(x, gate, gain, 1e-6)),
        strict=True,
    ):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("groups", "heads", "key_dim", "value_dim"), [(16, 32, 128, 128), (2, 6, 48, 40), (1, 5, 64, 128), (3, 3, 256, 64)]
)
@pytest.mark.parametrize("least", [-1e-3, -1.0, -100.0])
def test_compiled_kernels_stay_within_the_precision_of_the_type(
    dtype: torch.dtype, groups: int, heads: int, key_dim: int, value_dim: int, least: float
) -> None:
    segments = scattered([1, 1, 300, 5, 64, 1, 17, 129])
    cases: list[LayerCase] = [
        DeltaCase.random(
            segments, key_heads=groups, heads=heads, key_dim=key_dim, value_dim=value_dim, least=least
        ),
        ScanCase.random(
            segments, groups=groups, heads=heads, state_dim=key_dim, head_dim=value_dim, least=least
        ),
        ConvolutionCase.random(segments, channels=heads * value_dim),
    ]  # fmt: skip
    for case in cases:
        found, backend = on_device(narrow(case, dtype), "cuda")
        expected, states = found.expected()
        out = found.run(backend)
        assert out.dtype == dtype
        limit = 2e-5 if dtype == torch.float32 else 2e-2
        assert (out.double().cpu() - expected).norm() < limit * expected.norm()
        assert (found.state.double().cpu() - states).norm() < limit * states.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("least", [0.0, -1e-4, -30.0])
def test_long_prompts_stay_exact_compiled(least: float) -> None:
    case = DeltaCase.random(scattered([4096, 1, 4000]), key_heads=2, heads=4, key_dim=128, value_dim=128, least=least)
    case.key[:2048] = case.key[0]
    found, backend = on_device(narrow(case, torch.bfloat16), "cuda")
    expected, states = found.expected()
    out = found.run(backend)
    assert (out.double().cpu() - expected).norm() < 2e-2 * expected.norm()
    assert (found.state.double().cpu() - states).norm() < 2e-2 * states.norm()


@pytest.mark.gpu
def test_random_batches_compiled() -> None:
    random = np.random.default_rng(7)
    for trial in range(30):
        lengths = [1 if random.random() < 0.6 else int(random.integers(1, 301)) for _ in range(random.integers(1, 40))]
        for kind in CASES:
            assert_close(*on_device(kind.random(scattered(lengths, trial), seed=trial), "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("room", "tokens"), [((16, None), 16), ((16, 512), 512)])
def test_a_captured_graph_serves_one_batch_after_another(kind: Any, room: tuple[int, int | None], tokens: int) -> None:
    """Replays read the batch from the same memory; padding to the captured number of tokens is random numbers."""
    padded, backend = on_device(kind.random(scattered([tokens])), "cuda")
    padded = replace(padded, state=torch.cat([padded.state] * 6))
    metadata = backend.reserve(*room)
    padded.run(backend, metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = padded.run(backend, metadata)
    for lengths in ([1] * 16, [1, 2, 3, 4], [5, 1], [9, 1, 6] if room[1] is None else [300, 1, 70]):
        case = replace(padded, segments=scattered(lengths))
        expected, states = case.expected()
        assert backend.refill(metadata, case.segments)
        graph.replay()
        torch.testing.assert_close(out[: len(expected)].double().cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded.state.double().cpu(), states, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("room", "tokens"), [((16, None, 16), 16), ((16, 512, 128), 512)])
def test_a_captured_graph_serves_drafts_and_batches_without_any(
    kind: Any, room: tuple[int, int | None, int], tokens: int
) -> None:
    padded, backend = on_device(kind.random(scattered([tokens])), "cuda")
    padded = replace(padded, state=torch.cat([padded.state] * 6))
    metadata = backend.reserve(*room)
    inputs = [torch.randn(tokens, 3000, device="cuda")]
    kept = kept_like(inputs, tokens)

    def run() -> torch.Tensor:
        backend.keep(inputs, kept, metadata)
        return padded.run(backend, metadata)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths, drafted in (
        ([5, 1, 4], [0, 2]),
        ([1] * 16, []),
        ([9, 1, 6] if room[1] is None else [300, 1, 70], [2]),
    ):
        case = replace(padded, segments=with_drafts(scattered(lengths), drafted))
        expected, states = case.expected()
        assert backend.refill(metadata, case.segments)
        kept[0].fill_(-1.0)
        graph.replay()
        torch.testing.assert_close(out[: len(expected)].double().cpu(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(padded.state.double().cpu(), states, rtol=1e-4, atol=1e-4)
        check_kept(inputs, kept, case.segments)
