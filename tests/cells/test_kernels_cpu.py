"""The compiled kernels of gated cells on CPUs, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.cells import kernels_cpu

HIDDEN, WIDTH = 21, 2


def test_tanh_and_sigmoid_are_within_4e_7_of_float64_everywhere() -> None:
    x = np.concatenate([np.linspace(-30, 30, 20001), [-np.inf, np.inf, 0, 1e-30, -1e-30]]).astype(np.float32)
    exact = x.astype(np.float64)
    tanh = np.array([kernels_cpu.tanh(each) for each in x])
    sigmoid = np.array([kernels_cpu.sigmoid(each) for each in x])
    assert np.abs(tanh - np.tanh(exact)).max() < 4e-7
    with np.errstate(over="ignore"):
        assert np.abs(sigmoid - 1 / (1 + np.exp(-exact))).max() < 2e-7
    assert np.isnan(kernels_cpu.tanh(np.float32(np.nan)))


def test_gather_copies_items_to_its_columns_and_zeros_for_none() -> None:
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    target = np.full((5, 7), 9, np.float32)
    items = np.array([3, -1, 0, 3], np.int32)
    assert kernels_cpu.gather(table, items, kernels_cpu.NOWHERE, target, 2) == 3
    expected = np.full((5, 7), 9, np.float32)
    expected[:4, 2:5] = table[items] * (items >= 0)[:, None]
    assert target.tolist() == expected.tolist()


@pytest.mark.parametrize(("items", "first", "position"), [([0, 4], -1, 1), ([-1, 0], 0, 0), ([0, 1, -2], -1, 2)])
def test_gather_names_the_first_item_that_the_table_lacks(items: list[int], first: int, position: int) -> None:
    table, target = np.zeros((4, 3), np.float32), np.zeros((5, 3), np.float32)
    assert kernels_cpu.gather(table, np.array(items, np.int32), first, target, 0) == -1 - position


def squashed(x: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1 / (1 + np.exp(-x))
    return found


@pytest.mark.parametrize("order", ["iou", "ifuo", "iouff", "fuofi"])
def test_gates_are_those_of_an_lstm_and_of_a_tree_lstm_in_any_order(order: str) -> None:
    random = np.random.default_rng(0)
    nodes, children = 6, order.count("f")
    products = random.normal(size=(8, len(order) * HIDDEN), scale=3).astype(np.float32)
    cells = random.normal(size=(20 * WIDTH + 1, HIDDEN)).astype(np.float32)
    sources = random.integers(0, 20 * WIDTH, (4, nodes)).astype(np.int32)
    sources[:, 2] = -1
    places = [at for at, gate in enumerate(order) if gate == "f"]
    gate = dict(zip("iou", (products[:nodes].astype(np.float64).reshape(nodes, -1, HIDDEN)[:, order.index(each)] for each in "iou"), strict=True))  # fmt: skip # noqa: E501
    c = squashed(gate["i"]) * np.tanh(gate["u"])
    for child, place in enumerate(places):
        old = np.where(sources[2 + child, :, None] < 0, 0, cells[sources[2 + child]])
        c += squashed(products[:nodes, place * HIDDEN : (place + 1) * HIDDEN].astype(np.float64)) * old
    h = squashed(gate["o"]) * np.tanh(c)
    rows = np.array([4, 1, 19, 7, 0, 2], np.int32)
    first = np.array([HIDDEN * at for at in (*map(order.index, "iou"), *places)])
    expected = cells.copy()
    expected[rows * WIDTH + 1], expected[rows * WIDTH] = h, c
    every = np.zeros((nodes, HIDDEN), np.float32)
    kernels_cpu.gates(products, first, sources, np.arange(2, 2 + children), cells, np.array([1, 0, WIDTH]), rows, every)
    np.testing.assert_allclose(cells, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(every, h, rtol=0, atol=1e-6)


def test_a_row_that_another_node_writes_is_read_before() -> None:
    cells = np.arange(6, dtype=np.float32).reshape(6, 1) / 10
    products = np.zeros((2, 4), np.float32)
    products[:, 1] = 50.0
    rows, sources = np.array([1, 2], np.int32), np.array([[4, 2]], np.int32)
    no_h = np.zeros((0, 1), np.float32)
    kernels_cpu.gates(products, np.arange(0, 4)[[0, 3, 2, 1]], sources, np.array([0]), cells, np.array([1, 0, 2]), rows, no_h)  # fmt: skip # noqa: E501
    assert cells[[2, 4], 0].tolist() == pytest.approx([0.4, 0.2])
