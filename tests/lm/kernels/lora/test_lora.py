"""Adapters of a batch against float64: PyTorch's by groups, and Triton's tiles, interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.launch import SideStream
from holdfast.lm.kernels.lora import groups
from holdfast.lm.kernels.lora.groups import groups_of, most_tiles, tile_size, tiles_of
from holdfast.lm.kernels.lora.protocol import LoraStack
from holdfast.lm.kernels.lora.shrink_expand import TiledLora
from holdfast.lm.kernels.lora.torch_lora import TorchLora

PRECISION = {torch.float32: 2e-6, torch.float16: 2e-3}


def stack_of(
    ranks: list[list[int]], inputs: int, widths: list[int], most_ranks: int, device: str, dtype: torch.dtype
) -> LoraStack:
    """Random adapters. Numbers beyond an adapter's rank are NaN, because they must not be read."""
    slots, parts = len(ranks), len(widths)
    a = torch.randn(slots, parts, most_ranks, inputs) * inputs**-0.5
    b = torch.randn(slots, most_ranks, sum(widths))
    ends = torch.tensor(widths).cumsum(0).tolist()
    for slot, of_parts in enumerate(ranks):
        for part, rank in enumerate(of_parts):
            a[slot, part, rank:] = float("nan")
            b[slot, rank:, ends[part] - widths[part] : ends[part]] = float("nan")
    return LoraStack(
        a=a.to(device, dtype),
        b=b.to(device, dtype),
        rank=torch.tensor(ranks, dtype=torch.int32, device=device),
        scale=torch.rand(slots, parts, device=device) + 0.5,
        ends=tuple(ends),
    )


def expected(out: torch.Tensor, x: torch.Tensor, stack: LoraStack, slots: list[int]) -> torch.Tensor:
    """The definition, token by token, in float64."""
    out, x = out.double().clone(), x.double()
    for token, slot in enumerate(slots):
        for part, place in enumerate(stack.parts):
            if slot >= 0 and (rank := int(stack.rank[slot, part])):
                low = stack.a[slot, part, :rank].double() @ x[token]
                out[token, place] += stack.scale[slot, part].double() * (stack.b[slot, :rank, place].double().t() @ low)
    return out


def tiled(slots: list[int], num_slots: int, device: str, padding: int = 0, *, fixed: bool = False) -> TiledLora:
    """The tiles as the batch uploads them.

    Lists have room for any step of this size, and unused entries are not zero.
    """
    tokens = len(slots) + padding
    room = most_tiles(tokens, num_slots, fixed=fixed)
    tiles = tiles_of(groups_of(np.array(slots)), tokens, fixed=fixed)
    lists = []
    for each, size in ((tiles.order, tokens), (tiles.slot, room), (tiles.start, room), (tiles.count, room)):
        lists.append(np.append(each, np.full(size - len(each), 10**6)))
    tensors = [torch.from_numpy(each).to(device) for each in (*lists, tiles.used)]
    return TiledLora(tokens, *tensors, torch.zeros(3 * room, dtype=torch.int32, device=device), fixed=fixed)


CASES: dict[str, dict[str, Any]] = {
    "one part": dict(ranks=[[4], [16], [7]], widths=[48], most_ranks=16, slots=[0, 1, 1, -1, 2, 0, -1]),
    "q, k and v of unequal widths and ranks": dict(
        ranks=[[4, 8, 16], [16, 0, 5]], widths=[200, 36, 36], most_ranks=16, slots=[1, 0, 0, 1, -1, 1]
    ),
    "gate and up of rank 128": dict(
        ranks=[[128, 128], [4, 4], [64, 32]], widths=[130, 130], most_ranks=128, slots=[0, 2, 1, 2]
    ),
    "several tiles of one adapter": dict(ranks=[[8], [8]], widths=[32], most_ranks=8, slots=[0] * 37 + [1, -1, 1]),
    "one token": dict(ranks=[[4]], widths=[32], most_ranks=4, slots=[0]),
    "no adapter": dict(ranks=[[4]], widths=[32], most_ranks=4, slots=[-1, -1]),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize("how", ["tiled", "by groups"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("inputs", [96, 640])
def test_each_token_gets_its_own_adapter_and_others_keep_their_bits(
    case: str, inputs: int, how: str, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    settings = dict(CASES[case])
    slots: list[int] = settings.pop("slots")
    stack = stack_of(inputs=inputs, device=device, dtype=dtype, **settings)
    x = torch.randn(len(slots), inputs, device=device).to(dtype)
    out = torch.randn(len(slots), stack.outputs, device=device).to(dtype)
    before = out.clone()
    wanted = expected(out, x, stack, slots)
    if how == "tiled":
        tiled(slots, len(stack.rank), device).add(out, x, stack)
    else:
        TorchLora(groups_of(np.array(slots)), torch.device(device)).add(out, x, stack)
    assert (out.double() - wanted).abs().max() <= PRECISION[dtype] * wanted.abs().max()
    without = torch.tensor(slots) < 0
    assert torch.equal(out[without], before[without])


def test_padding_tokens_and_programs_with_several_tiles_change_nothing(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.lm.kernels.lora.shrink_expand.PROGRAMS", 2)
    stack = stack_of([[4], [8], [16]], 300, [40], 16, device, torch.float32)
    slots = [2, -1, 0, 1, 2, 2, 0] * 6
    x, out = torch.randn(48, 300, device=device), torch.randn(48, 40, device=device)
    wanted = expected(out, x, stack, slots)
    tiled(slots, 3, device, padding=6).add(out, x, stack)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def test_a_step_of_many_tokens_has_larger_tiles(device: str) -> None:
    stack = stack_of([[4], [16]], 64, [32], 16, device, torch.float32)
    slots = [0] * 300 + [-1] * 30 + [1] * 200
    assert tile_size(len(slots)) == 64
    x, out = torch.randn(530, 64, device=device), torch.randn(530, 32, device=device)
    wanted = expected(out, x, stack, slots)
    tiled(slots, 2, device).add(out, x, stack)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("how", ["tiled", "by groups"])
def test_a_begun_addition_is_added_at_its_end(how: str, known: bool, device: str) -> None:
    stack = stack_of([[4], [16]], 640, [48], 16, device, torch.float32)
    slots = [0, 1, 1, -1, 0]
    where = torch.device(device)
    by_groups = TorchLora(groups_of(np.array(slots)), where)
    lora = replace(tiled(slots, 2, device), beside=SideStream(where)) if how == "tiled" else by_groups
    x, out = torch.randn(5, 640, device=device), torch.randn(5, 48, device=device)
    wanted = expected(out, x, stack, slots)
    if known:
        lora.begin(x, stack, out).add(out)
    else:
        finish, computed = lora.begin(x, stack), out.clone()
        finish.add(computed)
        out = computed
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=1e-5)


def check_same_bits(device: str, dtype: torch.dtype, *, inputs: int, widths: list[int], few: int, size: int) -> None:
    """Tokens alone, in crowds of few and of many tokens, and among other adapters have the same bits."""
    torch.manual_seed(0)
    ranks = [[12] * len(widths), [4, 0, 16][: len(widths)], [16] * len(widths)]
    stack = stack_of(ranks, inputs, widths, 16, device, dtype)
    draw = np.random.default_rng(0)
    slots = draw.integers(-1, 3, size).tolist()
    x, out = (torch.randn(size, width, device=device).to(dtype) for width in (inputs, stack.outputs))
    wanted = expected(out, x, stack, slots)

    def added(at: list[int], padding: int = 0) -> torch.Tensor:
        found = torch.cat((out[at], out.new_zeros(padding, stack.outputs)))
        rows = torch.cat((x[at], x.new_zeros(padding, inputs)))
        lora = replace(tiled([slots[each] for each in at], 3, device, padding, fixed=True), beside=None)
        lora.begin(rows, stack).add(found)
        return found[: len(at)]

    whole = added([*range(size)])
    assert (whole.double() - wanted).abs().max() <= max(PRECISION.get(dtype, 2e-2), 2e-6) * wanted.abs().max()
    assert few < size
    for count, padding in ((1, 0), (1, 7), (few, 0), (few + 1, 0), (size - 3, 3)):
        at = draw.permutation(size)[:count].tolist()
        assert torch.equal(added(at, padding), whole[at]), (count, padding)


@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize("inputs", [96, 1100])
def test_fixed_tiles_give_a_token_the_same_bits_in_any_step(
    dtype: torch.dtype, inputs: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shrink of few tokens is cut among programs, if there are enough inputs. That of many is not."""
    for module in ("groups", "shrink_expand"):
        monkeypatch.setattr(f"holdfast.lm.kernels.lora.{module}.FEW_TOKENS", 12)
    check_same_bits(device, dtype, inputs=inputs, widths=[40, 24, 24], few=12, size=40)


def test_fixed_tiles_of_many_tokens_are_small_and_never_gate(device: str) -> None:
    stack = stack_of([[4, 4]], 64, [32, 32], 4, device, torch.float32)
    assert tile_size(5000, fixed=True) == 16
    lora = tiled([0] * 520, 1, device, fixed=True)
    assert lora.begin(torch.randn(520, 64, device=device), stack).gated is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_compiled_fixed_tiles_give_a_token_the_same_bits_in_any_step(dtype: torch.dtype) -> None:
    for inputs, widths in ((4096, [4096, 1024, 1024]), (14336, [4096]), (1000, [300, 300])):
        check_same_bits("cuda", dtype, inputs=inputs, widths=widths, few=512, size=1500)


GATED: dict[str, dict[str, Any]] = {
    "with and without adapters": dict(ranks=[[4, 4], [16, 16], [7, 12]], most_ranks=16, slots=[0, 1, -1, 2, 0, -1, 2]),
    "rank 128 and parts without": dict(
        ranks=[[128, 128], [0, 5], [64, 0], [0, 0]], most_ranks=128, slots=[0, 2, 1, 2, 3, -1, 0, 1]
    ),
    "several tiles of each": dict(ranks=[[8, 3], [4, 8]], most_ranks=8, slots=[0] * 70 + [1, -1] * 67),
    "one adapter for all": dict(ranks=[[4, 4]], most_ranks=4, slots=[0] * 5),
    "no adapter": dict(ranks=[[4, 4]], most_ranks=4, slots=[-1] * 70),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", list(PRECISION))
@pytest.mark.parametrize("programs", [1, 2048])
@pytest.mark.parametrize("padding", [0, 3, 80])
@pytest.mark.parametrize("case", GATED)
def test_a_gated_expand_gates_every_token_with_its_own_adapter(
    case: str, padding: int, programs: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FEW_TOKENS", 1)
    monkeypatch.setattr("holdfast.lm.kernels.lora.shrink_expand.PROGRAMS", programs)
    torch.manual_seed(0)
    settings = dict(GATED[case])
    slots: list[int] = settings.pop("slots")
    stack = stack_of(inputs=96, widths=[72, 72], device=device, dtype=dtype, **settings)
    tokens = len(slots) + padding
    x = torch.randn(tokens, 96, device=device).to(dtype)
    gate_up = torch.randn(tokens, 144, device=device).to(dtype)
    before = gate_up.clone()
    finish = tiled(slots, len(stack.rank), device, padding).begin(x, stack)
    assert finish.gated is not None
    torch.use_deterministic_algorithms(True, warn_only=True)  # new tensors are NaN
    try:
        inner = finish.gated(gate_up)
    finally:
        torch.use_deterministic_algorithms(False)
    gate, up = expected(gate_up, x, stack, slots + [-1] * padding).chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate) * up
    assert inner.dtype == dtype and inner.shape == wanted.shape
    assert (inner.double() - wanted).abs().max() <= PRECISION[dtype] * wanted.abs().max()
    assert torch.equal(gate_up, before)


def test_only_gate_and_up_of_many_tokens_are_gated_while_they_are_added(device: str) -> None:
    x, pair, one = torch.randn(520, 64, device=device), [[4, 4]], [[4]]
    gate_up = stack_of(pair, 64, [32, 32], 4, device, torch.float32)
    assert tiled([0] * 520, 1, device).begin(x, gate_up).gated is not None
    assert tiled([0] * 500, 1, device).begin(x[:500], gate_up).gated is None
    assert tiled([0] * 520, 1, device).begin(x, stack_of(one, 64, [32], 4, device, torch.float32)).gated is None


@pytest.mark.gpu
def test_a_captured_graph_reads_the_tiles_of_each_step() -> None:
    stack = stack_of([[4, 8], [16, 16]], 512, [256, 128], 16, "cuda", torch.bfloat16)
    x, out = torch.randn(24, 512, device="cuda").bfloat16(), torch.zeros(24, 384, device="cuda").bfloat16()
    lora = tiled([0] * 24, 2, "cuda")
    lora.add(out, x, stack)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lora.add(out, x, stack)
    for slots in ([0, 1] * 12, [-1] * 24, [1] * 20 + [-1] * 4, [0] * 3 + [1]):
        fresh = tiled(slots, 2, "cuda", padding=24 - len(slots))
        for name in ("order", "slot", "start", "count", "used"):
            getattr(lora, name).copy_(getattr(fresh, name))
        out.zero_()
        wanted = expected(out, x, stack, slots)
        graph.replay()
        assert (out.double() - wanted).abs().max() <= 1.6e-2 * wanted.abs().max().clamp(min=1e-30)


@given(st.lists(st.integers(-1, 5), max_size=200), st.sampled_from([0, 7, 100]), st.booleans(), st.booleans())
def test_tiles_hold_each_token_once_and_are_of_one_slot(
    slots: list[int], padding: int, many: bool, fixed: bool
) -> None:
    """Large tiles hold all tokens and the padding. Small tiles hold the tokens that have an adapter."""
    tokens = len(slots) + padding
    with patch.object(groups, "FEW_TOKENS", 0 if many else 512):
        tiles, size, room = (
            tiles_of(groups_of(np.array(slots, np.int64)), tokens, fixed=fixed),
            tile_size(tokens, fixed=fixed),
            most_tiles(tokens, 6, fixed=fixed),
        )
    used, everything = tiles.used
    assert (tiles.slot[:used] >= 0).all() and (tiles.slot[used:] == -1).all()
    assert everything == len(tiles.slot) <= room and len(tiles.order) <= tokens
    held = [
        (int(token), int(slot))
        for slot, start, count in zip(tiles.slot, tiles.start, tiles.count, strict=True)
        for token in tiles.order[start : start + count]
        if 1 <= count <= size
    ]
    wanted = list(enumerate(slots + [-1] * padding))
    assert sorted(held) == (wanted if many and not fixed else [(token, slot) for token, slot in wanted if slot >= 0])


@given(st.integers(1, 3000), st.integers(1, 40), st.booleans(), st.randoms())
def test_no_step_has_more_tiles_than_there_is_room_for(tokens: int, slots: int, fixed: bool, draw: Any) -> None:
    given, most = (
        [draw.randrange(-1, slots) for _ in range(tokens - draw.randrange(tokens))],
        most_tiles(tokens, slots, fixed=fixed),
    )
    assert len(tiles_of(groups_of(np.array(given)), tokens, fixed=fixed).slot) <= most
    assert most <= most_tiles(tokens + 1, slots, fixed=fixed)
