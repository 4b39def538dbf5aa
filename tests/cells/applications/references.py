"""The built-in applications in plain PyTorch, one request at a time."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.cells.applications import dates, listops, tagger
from holdfast.cells.applications.weights import read_weights
from holdfast.cells.cell import Arrays, Cell


def lstm_of(w: Tensor, b: Tensor) -> nn.LSTMCell:
    """torch's own LSTM cell with weights as the files have them: [4 * hidden, inputs + hidden]."""
    hidden = len(b) // 4
    cell = nn.LSTMCell(w.shape[1] - hidden, hidden)
    with torch.no_grad():
        cell.weight_ih.copy_(w[:, :-hidden])
        cell.weight_hh.copy_(w[:, -hidden:])
        cell.bias_ih.copy_(b)
        cell.bias_hh.zero_()
    return cell


class TaggerReference:
    """Reads a sentence word by word. `remembers` says whether it keeps its state from word to word."""

    def __init__(self, *, remembers: bool = True) -> None:
        self.weights, words = read_weights("tagger")
        self.vocabulary = tagger.Vocabulary(words)
        self.lstm = lstm_of(self.weights["w"], self.weights["b"])
        self.remembers = remembers

    @torch.no_grad()
    def run(self, text: str) -> tuple[list[str], Tensor]:
        """The tags, and h of each word."""
        tags, hs, state = [], [], None
        for token in self.vocabulary.numbers(tagger.split(text)):
            state = self.lstm(self.weights["embedding"][token][None], state if self.remembers else None)
            hs.append(state[0][0])
            tags.append(tagger.TAGS[int((self.weights["tag_w"] @ hs[-1] + self.weights["tag_b"]).argmax())])
        return tags, torch.stack(hs)


class DatesReference:
    """Reads a text, then writes symbols until <eos>."""

    def __init__(self) -> None:
        self.weights, _ = read_weights("dates")
        self.encoder = lstm_of(self.weights["encoder.w"], self.weights["encoder.b"])
        self.decoder = lstm_of(self.weights["decoder.w"], self.weights["decoder.b"])

    @torch.no_grad()
    def run(self, text: str) -> tuple[list[str], Tensor]:
        """The date, and h of each step of the decoder, including the step that outputs <eos>."""
        state = None
        for character in text.strip().lower():
            embedding = self.weights["encoder.embedding"][dates.CHARACTERS.index(character)]
            state = self.encoder(embedding[None], state)
        word, written, hs = dates.GO, "", []
        while word != dates.EOS and len(hs) < dates.MOST_STEPS:
            state = self.decoder(self.weights["decoder.embedding"][word][None], state)
            hs.append(state[0][0])
            word = int((self.weights["decoder.word_w"] @ hs[-1] + self.weights["decoder.word_b"]).argmax())
            written += "" if word == dates.EOS else dates.SYMBOLS[word]
        return [written], torch.stack(hs)


class ListOpsReference:
    """Reads an expression by recursive descent, each list from the left, with the equations of Tai et al. (2015)."""

    def __init__(self) -> None:
        self.weights, _ = read_weights("listops")

    @torch.no_grad()
    def run(self, text: str) -> tuple[list[int], Tensor]:
        """The value, and h of the root."""
        names = re.findall(r"\[\w+|\]|\d", text)
        h, _ = self._read(names)
        assert not names
        return [int((self.weights["value_w"] @ h + self.weights["value_b"]).argmax())], h[None]

    def _read(self, names: list[str]) -> tuple[Tensor, Tensor]:
        name = names.pop(0)
        state = self._leaf(name)
        if name.startswith("["):
            while names[0] != "]":
                state = self._join(state, self._read(names))
            state = self._join(state, self._leaf(names.pop(0)))
        return state

    def _leaf(self, name: str) -> tuple[Tensor, Tensor]:
        token = [*map(str, range(10)), *(f"[{operator}" for operator in listops.OPERATORS), "]"].index(name)
        x = self.weights["embedding"][token]
        i, o, u = (self.weights["leaf_w"] @ x + self.weights["leaf_b"]).reshape(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def _join(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        size = len(left[0])
        w, b = self.weights["w"].reshape(5, size, 2 * size), self.weights["b"].reshape(5, size)
        i, o, u, forget_left, forget_right = (
            w[gate, :, :size] @ left[0] + w[gate, :, size:] @ right[0] + b[gate] for gate in range(5)
        )
        c = i.sigmoid() * u.tanh() + forget_left.sigmoid() * left[1] + forget_right.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


def returning_h(cell: Cell) -> Cell:
    """The cell, with h returned as well."""
    return replace(cell, outputs={**cell.outputs, "h": replace(cell.outputs["h"], returned=True)})


def text_of(text: str) -> Arrays:
    """The inputs of an application that takes a text."""
    return {"text": np.array([text], dtype=object)}
