"""Each kernel of a task against plain PyTorch: compiled on a GPU, interpreted elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from holdfast.cells import kernels
from holdfast.cells.kernels import HEADER, Signals, Source

SIZE, NODES, HIDDEN = 5, 3, 9
BEGIN = 8
"""The word at which the task begins."""


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def signals(words: list[int], device: str) -> Signals:
    """A ring with one task, which begins at BEGIN. `words` are its rows and all words after them."""
    ring = torch.zeros(256, dtype=torch.int32)
    ring[BEGIN : BEGIN + HEADER] = torch.tensor([40, NODES, 2, 0])
    ring[BEGIN + HEADER : BEGIN + HEADER + len(words)] = torch.tensor(words, dtype=torch.int32)
    on_gpu = device == "cuda"
    return Signals(
        ring.to(device),
        torch.tensor([BEGIN], dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu),
        torch.zeros(512, dtype=torch.uint8, pin_memory=on_gpu),
    )


def table(lines: list[list[int]], device: str) -> torch.Tensor:
    return torch.tensor(lines, dtype=torch.int64, device=device)


def settled(tensor: torch.Tensor) -> torch.Tensor:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tensor.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (700,), (4, 5)])
def test_gather_copies_items_by_index_and_zeros_for_none(
    dtype: torch.dtype, shape: tuple[int, ...], device: str
) -> None:
    index = [7, 0, 7, -1, 3]
    given = signals(index, device)
    arena = (torch.randn(8, *shape) * 9).to(dtype).to(device)
    found = torch.ones(SIZE, *shape, dtype=dtype, device=device)
    item = arena[0].nbytes
    entry = kernels.gather_entry(arena, found, item, HEADER, False)
    kernels.gather(given, {kernels.unit_of(item): table([entry], device)}, entry[2], SIZE)
    expected = arena[torch.tensor(index, device=device).clamp(min=0)]
    expected[3] = 0
    assert torch.equal(settled(found), expected.cpu())


def test_gather_copies_values_from_the_ring(device: str) -> None:
    values = torch.randn(SIZE, 3)
    given = signals(values.view(torch.int32).flatten().tolist(), device)
    found = torch.ones(SIZE, 3, device=device)
    entry = kernels.gather_entry(given.ring, found, 12, HEADER, True)
    kernels.gather(given, {4: table([entry], device)}, entry[2], SIZE)
    assert torch.equal(settled(found), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool])
def test_scatter_writes_rows_and_returns_only_nodes(dtype: torch.dtype, device: str) -> None:
    rows = [4, 1, 6, 0, 0]
    given = signals(rows, device)
    first, second = ((torch.randn(SIZE, 3) * 9).to(dtype).to(device) for _ in range(2))
    arena = torch.zeros(16, 3, dtype=dtype, device=device)
    item = first[0].nbytes
    unit = kernels.unit_of(item)
    lines = [kernels.scatter_entry(arena, item, 2, place, at) for place, at in ((1, 64), (0, None))]
    kernels.scatter(given, [first, second], table(lines, device), unit, item // unit, SIZE, last=False)
    expected = torch.zeros(8, 2, 3, dtype=dtype)
    expected[rows[:NODES], 1], expected[rows[:NODES], 0] = first[:NODES].cpu(), second[:NODES].cpu()
    assert torch.equal(settled(arena).view(8, 2, 3)[1:], expected[1:])
    begin = 2 * kernels.RETURNED_UNIT + 64
    host = settled(given.returned)
    returned = host[begin : begin + NODES * item].view(dtype).view(NODES, 3)
    assert torch.equal(returned, first[:NODES].cpu())
    assert not host[:begin].any() and not host[begin + NODES * item :].any()


def test_more_outputs_than_one_kernel_takes_are_written_by_several(device: str) -> None:
    given = signals([4, 1, 6, 0, 0], device)
    outputs = [torch.full((SIZE,), float(number + 1), device=device) for number in range(19)]
    arena = torch.zeros(8 * 19, device=device)
    lines = [kernels.scatter_entry(arena, 4, 19, place, None) for place in range(19)]
    kernels.scatter(given, outputs, table(lines, device), 4, 1, SIZE, last=True)
    found = settled(arena).view(8, 19)
    assert all(found[row].tolist() == list(range(1, 20)) for row in (4, 1, 6))
    assert not found[[2, 3, 5, 7]].any()


def ended(given: Signals) -> tuple[int, int, int]:
    """The cursor, the tickets and the counter."""
    return int(settled(given.cursor)), int(settled(given.tickets)[0]), int(settled(given.done))


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_last_scatter_moves_the_cursor_and_counts_the_task_once(count: int, device: str) -> None:
    given = signals([4, 1, 6, 0, 0], device)
    outputs = [torch.ones(SIZE, 700, device=device)] * count
    arena = torch.zeros(8 * count, 700, device=device)
    lines = table([kernels.scatter_entry(arena, 2800, count, place, None) for place in range(count)], device)
    kernels.scatter(given, outputs, lines, 4, 700, SIZE, last=False)
    assert ended(given) == (BEGIN, 0, 0)
    kernels.scatter(given, outputs, lines, 4, 700, SIZE, last=True)
    assert ended(given) == (40, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_move_rows_copies_them_and_no_other(dtype: torch.dtype, device: str) -> None:
    given = signals([], device)
    given.ring[50:52] = torch.tensor([6, 2], device=device)
    there, here = ((torch.randn(8, 3) * 9).to(dtype).to(device) for _ in range(2))
    before = here.cpu()
    item = there[0].nbytes
    unit = kernels.unit_of(item)
    kernels.move_rows(
        given, {unit: table([[there.data_ptr(), here.data_ptr(), item // unit]], device)}, item // unit, 50, 2
    )
    before[[6, 2]] = there[[6, 2]].cpu()
    assert torch.equal(settled(here), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("wide", [HIDDEN, 1500])
def test_concatenate_joins_items_by_index_by_word_and_values(wide: int, dtype: torch.dtype, device: str) -> None:
    index, words = [3, -1, 0, 5, 5], [2, -1, 0, 1, 2]
    values = torch.randn(SIZE, 4).to(dtype)
    flat = values.flatten().view(torch.int32).tolist()
    given = signals([*index, *words, *flat], device)
    items, embedding = (torch.randn(6, wide, device=device).to(dtype) for _ in range(2))
    arena = torch.tensor([1, 4, 5], dtype=torch.int32, device=device)
    by_index = Source(kernels.BY_INDEX, items, wide, HEADER)
    by_word = Source(kernels.BY_WORD, embedding, wide, HEADER + SIZE, arena)
    value = Source(kernels.VALUE, given.ring, 4, HEADER + 2 * SIZE)
    expected_index = items[torch.tensor(index, device=device).clamp(min=0)]
    expected_index[1] = 0
    expected_word = embedding[[5, 0, 1, 4, 5]]
    for parts, expected in (
        ([by_index, by_word], [expected_index, expected_word]),
        ([value, by_index], [values.to(device), expected_index]),
        ([by_word], [expected_word]),
    ):
        target = torch.empty(SIZE, sum(part.wide for part in parts), dtype=dtype, device=device)
        kernels.concatenate(given, parts, target, SIZE)
        assert torch.equal(settled(target), torch.cat(expected, 1).cpu())


def test_items_beyond_the_end_read_as_zeros(device: str) -> None:
    given = signals([5, 6, 1 << 30, 0, 1], device)
    items = torch.randn(6, 4, device=device)
    target = torch.empty(SIZE, 4, device=device)
    kernels.concatenate(given, [Source(kernels.BY_INDEX, items, 4, HEADER)], target, SIZE)
    assert torch.equal(settled(target)[[0, 3, 4]], items.cpu()[[5, 0, 1]])
    assert not settled(target)[1:3].any()


@pytest.mark.parametrize("hidden", [HIDDEN, 1100])
@pytest.mark.parametrize("order", ["iou", "ifuo", "iouff", "foufi"])
def test_gates_give_c_and_h_in_place(order: str, hidden: int, device: str) -> None:
    children = order.count("f")
    rows, sources = [4, 1, 6, 0, 0], [[4, 1, -1, 0, 0], [5, 2, 3, 0, -1]]
    arena = torch.randn(16, hidden, device=device)
    places = [[2 * row if row >= 0 else -1 for row in source] for source in sources]
    given = signals([*rows, *places[0], *places[1]], device)
    products, bias = (
        torch.randn(SIZE, len(order) * hidden, device=device),
        torch.randn(len(order) * hidden, device=device),
    )
    gates = dict(zip(range(len(order)), (products + bias).double().cpu().chunk(len(order), 1), strict=True))
    by_name = {name: gates[order.index(name)] for name in "iou"}
    c = by_name["i"].sigmoid() * by_name["u"].tanh()
    before = arena.double().cpu()
    for number, gate in enumerate([gates[at] for at, name in enumerate(order) if name == "f"]):
        child = torch.stack([before[at] if at >= 0 else torch.zeros(hidden).double() for at in places[number]])
        c += gate.sigmoid() * child
    h = by_name["o"].sigmoid() * c.tanh()
    dense = torch.empty(SIZE, hidden, device=device)
    offsets = [HEADER + SIZE, HEADER + 2 * SIZE][:children]
    kernels.gates(given, order, products, bias, arena, 2, (1, 0), offsets, dense, last=False)
    assert ended(given) == (BEGIN, 0, 0)
    found = settled(arena).view(8, 2, hidden)
    for node, row in enumerate(rows[:NODES]):
        np.testing.assert_allclose(found[row, 0], c[node], rtol=0, atol=2e-6)
        np.testing.assert_allclose(found[row, 1], h[node], rtol=0, atol=2e-6)
    np.testing.assert_allclose(settled(dense)[:NODES], h[:NODES], rtol=0, atol=2e-6)
    untouched = [2, 3, 5, 7]
    assert torch.equal(found[untouched].double(), before.view(8, 2, hidden)[untouched])
    kernels.gates(given, order, products, bias, arena, 2, (1, 0), offsets, None, last=True)
    assert ended(given) == (40, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("labels", [1, 7, 2048, 5000])
def test_read_out_gives_the_first_of_the_highest_scores(labels: int, dtype: torch.dtype, device: str) -> None:
    rows = [4, 1, 6, 0, 0]
    given = signals(rows, device)
    scores = torch.randn(SIZE, labels).to(dtype)
    for node, best in ((0, [labels - 1, labels // 2]), (1, [labels // 3, labels // 3 + labels // 2]), (2, [0])):
        scores[node, best] = 9
    arena = torch.zeros(16, dtype=torch.int32, device=device)
    kernels.read_out(given, scores.to(device), arena, 2, 1, 64, last=False)
    assert ended(given) == (BEGIN, 0, 0)
    expected = [labels // 2, labels // 3, 0]
    assert settled(arena).view(8, 2)[rows[:NODES], 1].tolist() == expected
    assert not settled(arena).view(8, 2)[1:, 0].any()
    begin = 2 * kernels.RETURNED_UNIT + 64
    host = settled(given.returned)
    assert host[begin : begin + 4 * NODES].view(torch.int32).tolist() == expected
    assert not host[:begin].any() and not host[begin + 4 * NODES :].any()
    given.returned.zero_()
    kernels.read_out(given, scores.to(device), arena, 2, 1, None, last=True)
    assert ended(given) == (40, 0, 1)
    assert not given.returned.any()
