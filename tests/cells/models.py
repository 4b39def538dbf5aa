"""Small models as applications of cells, and the same models in plain PyTorch, one request at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.cells.cell import Arrays, Cell, Field
from holdfast.cells.graph import CellGraph
from holdfast.cells.nn import (
    LSTMWeights,
    ReadOut,
    TreeWeights,
    decoder_cell,
    encoder_cell,
    lstm_cell,
    tree_internal_cell,
    tree_leaf_cell,
)

WORDS, LABELS, EOS = 20, 5, 3
SIZES = (1, 2, 4, 8)
Results = dict[str, np.ndarray]


@dataclass(frozen=True)
class Asked:
    """A request: its graph, and the results of plain PyTorch for it."""

    graph: CellGraph
    expected: Results


class _Model:
    """The part of an application that tests do not use."""

    name = "model"
    inputs: tuple[Field, ...] = ()
    outputs: tuple[Field, ...] = ()
    cells: tuple[Cell, ...]

    def unfold(self, inputs: Arrays) -> CellGraph:
        raise NotImplementedError

    def finish(self, results: Arrays) -> Arrays:
        return results

    def ask(self, random: np.random.Generator) -> Asked:
        """A random request."""
        raise NotImplementedError


class Tagger(_Model):
    """A chain: an LSTM over words gives a label and its state at each."""

    def __init__(self, hidden: int = 12, sizes: tuple[int, ...] = SIZES) -> None:
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 7)
        self.lstm = nn.LSTM(7, hidden, batch_first=True)
        self.out = nn.Linear(hidden, LABELS)
        self.cell = lstm_cell(
            "tagger",
            LSTMWeights.of_module(self.lstm),
            embedding=self.embedding.weight,
            read_out=ReadOut.of_module(self.out),
            returns_h=True,
            sizes=sizes,
        )
        self.cells = (self.cell,)

    def ask(self, random: np.random.Generator) -> Asked:
        tokens = random.integers(0, WORDS, random.integers(1, 15))
        graph = CellGraph()
        steps = graph.chain(self.cell, len(tokens), token=tokens)
        graph.result("label", steps, "label")
        graph.result("h", steps, "h")
        with torch.no_grad():
            h, _ = self.lstm(self.embedding(torch.from_numpy(tokens))[None])
            return Asked(graph, {"label": self.out(h[0]).argmax(1).numpy(), "h": h[0].numpy()})


class Seq2Seq(_Model):
    """An encoder's chain, and a decoder's that ends at <eos> or after 12 words."""

    def __init__(self, hidden: int = 10, sizes: tuple[int, ...] = SIZES) -> None:
        torch.manual_seed(1)
        self.words, self.output_words = nn.Embedding(WORDS, 6), nn.Embedding(WORDS, 5)
        self.encoder, self.decoder = nn.LSTMCell(6, hidden), nn.LSTMCell(5, hidden)
        self.out = nn.Linear(hidden, WORDS)
        with torch.no_grad():  # so that the words differ
            for parameter in (*self.encoder.parameters(), *self.decoder.parameters(), *self.out.parameters()):
                parameter *= 8
            self.output_words.weight *= 2
        encoder, decoder = LSTMWeights.of_module(self.encoder), LSTMWeights.of_module(self.decoder)
        self.cells = (
            encoder_cell("encoder", encoder, self.words.weight, sizes=sizes),
            decoder_cell(
                "decoder", decoder, self.output_words.weight, ReadOut.of_module(self.out), sizes=sizes[:-1] or sizes
            ),
        )

    def ask(self, random: np.random.Generator) -> Asked:
        tokens = random.integers(0, WORDS, random.integers(1, 10))
        first, second = self.cells
        graph = CellGraph()
        last = graph.chain(first, len(tokens), token=tokens)[-1]
        words = graph.chain(second, 12, h=(last, "h"), c=(last, "c"), stop=("word", EOS))
        graph.result("words", words, "word")
        return Asked(graph, {"words": self.decode(tokens)})

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """The words of plain PyTorch."""
        with torch.no_grad():
            state = None
            for token in tokens:
                state = self.encoder(self.words(torch.tensor([token])), state)
            word, found = torch.tensor([0]), []
            while (len(found) < 12 and word.item() != EOS) or not found:
                state = self.decoder(self.output_words(word), state)
                word = self.out(state[0]).argmax(1)
                found.append(int(word))
        return np.array(found)


class Tree(_Model):
    """A binary TreeLSTM over trees of random shape, with a label at each internal node."""

    def __init__(self, hidden: int = 9, sizes: tuple[int, ...] = SIZES) -> None:
        made = torch.Generator().manual_seed(2)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made) / shape[-1] ** 0.5

        self.embedding = random(WORDS, 6)
        self.weights = TreeWeights(
            random(3 * hidden, 6), random(3 * hidden), random(5 * hidden, 2 * hidden), random(5 * hidden)
        )
        self.out = ReadOut(random(LABELS, hidden), random(LABELS))
        self.cells = (
            tree_leaf_cell("leaf", self.weights, self.embedding, read_out=self.out, sizes=sizes),
            tree_internal_cell("internal", self.weights, read_out=self.out, sizes=sizes),
        )

    def ask(self, random: np.random.Generator) -> Asked:
        leaf, internal = self.cells
        tokens = random.integers(0, WORDS, random.integers(2, 12))
        graph = CellGraph()
        leaves = graph.add(leaf, len(tokens), token=tokens)
        nodes = [(node, self.leaf(int(token))) for node, token in zip(leaves, tokens, strict=True)]
        labels = []
        ids = []
        while len(nodes) > 1:
            at = int(random.integers(0, len(nodes) - 1))
            (left, left_state), (right, right_state) = nodes[at], nodes[at + 1]
            (node,) = graph.add(
                internal,
                1,
                left_h=(left, "h"),
                left_c=(left, "c"),
                right_h=(right, "h"),
                right_c=(right, "c"),
            )
            state = self.internal(left_state, right_state)
            nodes[at : at + 2] = [(node, state)]
            ids.append(node)
            labels.append(int((self.out.w @ state[0] + self.out.b).argmax()))
        graph.result("labels", ids, "label")
        return Asked(graph, {"labels": np.array(labels)})

    def leaf(self, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h and c of a leaf: equations 9 to 14 of Tai et al. without children."""
        x, b = self.embedding[token], self.weights.leaf_b.chunk(3)
        w_i, w_o, w_u = self.weights.leaf_w.chunk(3)
        c = torch.sigmoid(w_i @ x + b[0]) * torch.tanh(w_u @ x + b[2])
        return torch.sigmoid(w_o @ x + b[1]) * torch.tanh(c), c

    def internal(self, left: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """h and c of an internal node: each gate has a matrix for each child."""
        b = self.weights.b.chunk(5)
        i, o, u, f_left, f_right = (
            w[:, : len(left[0])] @ left[0] + w[:, len(left[0]) :] @ right[0] + bias
            for w, bias in zip(self.weights.w.chunk(5), b, strict=True)
        )
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(f_left) * left[1] + torch.sigmoid(f_right) * right[1]
        return torch.sigmoid(o) * torch.tanh(c), c


MODELS: Mapping[str, Any] = {"tagger": Tagger, "seq2seq": Seq2Seq, "tree": Tree}


def differences(found: Mapping[str, np.ndarray], expected: Results) -> list[str]:
    """The names of results that differ from the expected ones: by more than 1e-5, or in shape."""
    assert set(found) == set(expected)
    return [
        name
        for name, values in expected.items()
        if found[name].shape != values.shape or not np.allclose(found[name], values, rtol=0, atol=1e-5)
    ]
