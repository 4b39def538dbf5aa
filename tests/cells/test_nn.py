"""The library's cells compute the results of their models (BatchMaker, section 2.2; Tai et al., 2015)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from holdfast.cells.cell import Cell
from holdfast.cells.nn import (
    LSTMWeights,
    ReadOut,
    TreeWeights,
    decoder_cell,
    encoder_cell,
    lstm_cell,
    read_out_cell,
    tree_internal_cell,
    tree_leaf_cell,
)
from holdfast.cells.types import number
from tests.cells.models import Tree

BATCH, WIDE, HIDDEN = 5, 7, 12


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def steps(cell: Cell, sequence: torch.Tensor, name: str) -> list[dict[str, torch.Tensor]]:
    """The outputs of each step over [batch, steps, ...]; the first begins with zeros."""
    state = {each: torch.zeros(len(sequence), *cell.inputs[each].shape) for each in cell.carried}
    found = []
    with torch.no_grad():
        for step in sequence.unbind(1):
            outputs = cell.run(cell.weights, **{name: step}, **state)
            state = {each: outputs[each] for each in cell.carried}
            found.append(outputs)
    return found


@pytest.mark.parametrize("bias", [True, False])
def test_the_lstm_cell_is_torchs_lstm(bias: bool) -> None:
    module = nn.LSTM(WIDE, HIDDEN, batch_first=True, bias=bias)
    x = torch.randn(BATCH, 30, WIDE)
    found = steps(lstm_cell("lstm", LSTMWeights.of_module(module)), x, "x")
    with torch.no_grad():
        h, (last_h, last_c) = module(x)
    near(torch.stack([each["h"] for each in found], 1), h)
    near(found[-1]["h"], last_h[0])
    near(found[-1]["c"], last_c[0])


def test_a_stack_of_lstm_cells_is_torchs_lstm_of_two_layers() -> None:
    module = nn.LSTM(WIDE, HIDDEN, num_layers=2, batch_first=True)
    x = torch.randn(BATCH, 10, WIDE)
    lower = steps(lstm_cell("lower", LSTMWeights.of_module(module, 0)), x, "x")
    upper = lstm_cell("upper", LSTMWeights.of_module(module, 1), x="state")
    assert upper.states == ("x", "h", "c") and upper.values == ()
    found = steps(upper, torch.stack([each["h"] for each in lower], 1), "x")
    with torch.no_grad():
        near(torch.stack([each["h"] for each in found], 1), module(x)[0])


def test_the_lstm_cell_takes_weights_of_torchs_lstm_cell() -> None:
    module = nn.LSTMCell(WIDE, HIDDEN)
    x, h, c = torch.randn(BATCH, WIDE), torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    cell = lstm_cell("lstm", LSTMWeights.of_module(module))
    with torch.no_grad():
        found, (expected_h, expected_c) = cell.run(cell.weights, x=x, h=h, c=c), module(x, (h, c))
    near(found["h"], expected_h)
    near(found["c"], expected_c)


@pytest.mark.parametrize("changes", [{"bidirectional": True}, {"proj_size": 3}])
def test_lstms_that_are_not_plain_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bidirectional or has projections"):
        LSTMWeights.of_module(nn.LSTM(WIDE, HIDDEN, **changes))


def test_an_lstm_with_embedding_and_read_out_gives_labels() -> None:
    embedding, module, out = nn.Embedding(9, WIDE), nn.LSTM(WIDE, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 4)
    nn.init.zeros_(out.bias)
    cell = lstm_cell(
        "tagger",
        LSTMWeights.of_module(module),
        embedding=embedding.weight,
        read_out=ReadOut.of_module(out),
    )
    assert cell.returned == ("label",)
    tokens = torch.randint(0, 9, (BATCH, 20), dtype=torch.int32)
    found = torch.stack([each["label"] for each in steps(cell, tokens, "token")], 1)
    with torch.no_grad():
        expected = out(module(embedding(tokens))[0]).argmax(2)
    assert found.dtype == torch.int32
    assert found.tolist() == expected.tolist()
    assert len(set(found.flatten().tolist())) > 1


def test_the_decoder_feeds_back_its_word_and_begins_with_word_0() -> None:
    embedding, module, out = nn.Embedding(9, WIDE), nn.LSTMCell(WIDE, HIDDEN), nn.Linear(HIDDEN, 9)
    cell = decoder_cell("decoder", LSTMWeights.of_module(module), embedding.weight, ReadOut.of_module(out))
    assert cell.carried == ("word", "h", "c") and cell.returned == ("word",)
    h, c = torch.randn(BATCH, HIDDEN), torch.randn(BATCH, HIDDEN)
    given = {"word": torch.zeros(BATCH, dtype=torch.int32), "h": h, "c": c}
    word = torch.zeros(BATCH, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(8):
            given = cell.run(cell.weights, **given)
            h, c = module(embedding(word), (h, c))
            word = out(h).argmax(1)
            assert given["word"].tolist() == word.tolist()
            near(given["c"], c)


def test_tree_cells_are_a_recursive_tree_lstm() -> None:
    tree = Tree()
    leaf, internal = tree.cells
    tokens = torch.randint(0, 20, (8,), dtype=torch.int32)
    level = leaf.run(leaf.weights, token=tokens)
    expected = [tree.leaf(int(token)) for token in tokens]
    while True:
        for name, place in (("h", 0), ("c", 1)):
            near(level[name], torch.stack([each[place] for each in expected]))
        if len(expected) == 1:
            break
        level = internal.run(
            internal.weights,
            left_h=level["h"][0::2],
            left_c=level["c"][0::2],
            right_h=level["h"][1::2],
            right_c=level["c"][1::2],
        )
        expected = [tree.internal(expected[at], expected[at + 1]) for at in range(0, len(expected), 2)]  # type: ignore[misc]


def test_left_and_right_of_a_tree_cell_differ() -> None:
    tree = Tree()
    cell = tree.cells[1]
    one, other = torch.randn(1, 9), torch.randn(1, 9)
    found = cell.run(cell.weights, left_h=one, left_c=one, right_h=other, right_c=other)["h"]
    swapped = cell.run(cell.weights, left_h=other, left_c=other, right_h=one, right_c=one)["h"]
    assert not torch.allclose(found, swapped)


def test_the_read_out_is_linear_and_argmax() -> None:
    out = nn.Linear(HIDDEN, 6)
    cell = read_out_cell("read out", ReadOut.of_module(out))
    h = torch.randn(50, HIDDEN)
    assert cell.run(cell.weights, h=h)["label"].tolist() == out(h).argmax(1).tolist()
    assert len(np.unique(out(h).argmax(1).numpy())) > 1


def test_encoder_cells_of_one_model_are_one_type_and_those_of_two_are_two() -> None:
    module, words = nn.LSTM(WIDE, HIDDEN), nn.Embedding(9, WIDE).weight
    other = nn.LSTM(WIDE, HIDDEN)
    cells = [encoder_cell("encoder", LSTMWeights.of_module(each), words) for each in (module, module, other)]
    assert list(number(cells).values()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda lstm, words, out: lstm_cell("lstm", lstm, embedding=words[:, 1:]),
            r"embedding of cell lstm has the shape \[9, 6\]; it needs \[9, 7\]",
        ),
        (
            lambda lstm, words, out: lstm_cell("lstm", lstm._replace(b=lstm.b[1:])),
            r"b of cell lstm has the shape \[47\]; it needs \[48\]",
        ),
        (
            lambda lstm, words, out: decoder_cell("decoder", lstm, words, out._replace(w=out.w[:, 1:])),
            r"read_out.w of cell decoder has the shape \[4, 11\]; it needs \[4, 12\]",
        ),
        (lambda lstm, words, out: lstm_cell("lstm", lstm, x="both"), "x is 'both'; it must be 'value' or 'state'"),
        (
            lambda lstm, words, out: tree_leaf_cell("leaf", TreeWeights(lstm.w, lstm.b, lstm.w, lstm.b), words),
            "leaf_w of cell leaf",
        ),
        (
            lambda lstm, words, out: tree_internal_cell("node", TreeWeights(lstm.w, lstm.b, lstm.w, lstm.b)),
            "w of cell node",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(make: Any, message: str) -> None:
    lstm = LSTMWeights.of_module(nn.LSTM(WIDE, HIDDEN))
    words, out = nn.Embedding(9, WIDE).weight, ReadOut.of_module(nn.Linear(HIDDEN, 4))
    with pytest.raises(ValueError, match=message):
        make(lstm, words, out)
