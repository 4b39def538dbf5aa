"""Trains the built-in applications of cells from nothing, on data that it generates, then saves and tests them.

python -m scripts.train_cells                                           # all of them: minutes each, on two cores
python -m scripts.train_cells listops --steps 50 --out /tmp/trained     # a trial
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.cells.application import Application
from holdfast.cells.applications import dates, listops, tagger
from holdfast.cells.applications.weights import DIRECTORY, write_weights
from holdfast.cells.cell import Arrays
from holdfast.cells.executor import CpuExecutor
from holdfast.cells.graph import CellGraph
from holdfast.cells.nn import LSTMWeights, TreeWeights, tree_internal_cell, tree_leaf_cell
from holdfast.cells.plan import CellRequest
from holdfast.cells.planner import MAX_TASKS, CellPlanner
from holdfast.cells.types import number
from holdfast.loop.loop import Loop

from . import cell_data

SEED = 0
TESTS = 1000
"""Number of held-out cases for the test of an application."""
IGNORED = -100
"""Target that adds no loss."""
CLIP = 1.0
"""Largest norm of a gradient."""


class Training(Protocol):
    """A model in training."""

    steps: int
    rate: float
    """The highest learning rate."""
    module: nn.Module
    words: Sequence[str]
    """The words that its weights file keeps with the weights."""

    def backward(self, share: float) -> float:
        """Add the gradients of a new batch, and return its loss. `share` of all steps is done."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The tensors by the names under which the application reads them."""
        ...


class TaggerTraining:
    """Sentences in padded batches. Some names, things and verbs are unknown to the model, as they are in use."""

    steps, rate = 1200, 4e-3
    batch, hidden, embedding = 64, 128, 48
    unknown = 1 / 10
    sample = 4000
    """Number of sentences that give the vocabulary; the first word of each is left out, because its case means nothing.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._cases = cell_data.sentences(Random(seed), test=False)
        sample = islice(cell_data.sentences(Random(seed), test=False), self.sample)
        seen = {word for text, _ in sample for word in tagger.split(text)[1:]}
        self.words = sorted(word for word in seen if not word[0].isdecimal())
        self._vocabulary = tagger.Vocabulary(self.words)
        self.module = nn.ModuleDict(
            {
                "embedding": nn.Embedding(len(self._vocabulary), self.embedding),
                "lstm": make_lstm(self.embedding, self.hidden),
                "tag": nn.Linear(self.hidden, len(tagger.TAGS)),
            }
        )

    def backward(self, share: float) -> float:
        cases = list(islice(self._cases, self.batch))
        tokens, tags = [], []
        for text, answer in cases:
            words = tagger.split(text)
            shapes = self._vocabulary.numbers([tagger.shape_of(word) for word in words])
            numbers = self._vocabulary.numbers(words)
            tokens.append(
                [
                    shape if self._may_be_unknown(word, tag) and self._random.random() < self.unknown else known
                    for word, tag, known, shape in zip(words, answer, numbers, shapes, strict=True)
                ]
            )
            tags.append([tagger.TAGS.index(tag) for tag in answer])
        h, _ = self.module["lstm"](self.module["embedding"](padded(tokens, 0)))
        loss = F.cross_entropy(self.module["tag"](h).flatten(0, 1), padded(tags, IGNORED).flatten())
        loss.backward()
        return loss.item()

    def _may_be_unknown(self, word: str, tag: str) -> bool:
        return word in cell_data.OPEN or tag in ("PERSON", "PLACE")

    def weights(self) -> dict[str, Tensor]:
        w, b = LSTMWeights.of_module(self.module["lstm"])
        tag = self.module["tag"]
        return {"embedding": self.module["embedding"].weight, "w": w, "b": b, "tag_w": tag.weight, "tag_b": tag.bias}


class DatesTraining:
    """Dates in padded batches. The decoder sees the right symbol before each one (teacher forcing)."""

    steps, rate = 3000, 3e-3
    batch, hidden, embedding = 128, 192, 32
    words = ()

    def __init__(self, seed: int) -> None:
        self._cases = cell_data.written_dates(Random(seed), test=False)
        self.module = nn.ModuleDict(
            {
                "reads": nn.Embedding(len(dates.CHARACTERS), self.embedding),
                "encoder": make_lstm(self.embedding, self.hidden),
                "writes": nn.Embedding(len(dates.SYMBOLS), self.embedding),
                "decoder": make_lstm(self.embedding, self.hidden),
                "word": nn.Linear(self.hidden, len(dates.SYMBOLS)),
            }
        )

    def backward(self, share: float) -> float:
        cases = list(islice(self._cases, self.batch))
        texts = [dates.characters(text) for text, _ in cases]
        answers = [[*(dates.SYMBOLS.index(symbol) for symbol in answer), dates.EOS] for _, (answer,) in cases]
        module = self.module
        lengths = torch.tensor([len(text) for text in texts])
        packed = nn.utils.rnn.pack_padded_sequence(
            module["reads"](padded(texts, 0)), lengths, batch_first=True, enforce_sorted=False
        )
        _, state = module["encoder"](packed)
        targets = padded(answers, IGNORED)
        before = F.pad(targets[:, :-1], (1, 0), value=dates.GO)
        h, _ = module["decoder"](module["writes"](before), state)
        loss = F.cross_entropy(module["word"](h).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item()

    def weights(self) -> dict[str, Tensor]:
        module = self.module
        encoder, decoder = LSTMWeights.of_module(module["encoder"]), LSTMWeights.of_module(module["decoder"])
        return {
            "encoder.embedding": module["reads"].weight,
            "encoder.w": encoder.w,
            "encoder.b": encoder.b,
            "decoder.embedding": module["writes"].weight,
            "decoder.w": decoder.w,
            "decoder.b": decoder.b,
            "decoder.word_w": module["word"].weight,
            "decoder.word_b": module["word"].bias,
        }


class ListOpsTraining:
    """Expressions in batches, as one forest. They become deeper during training.

    Each closed list must give its value. Two extra heads, which are dropped in the end, help to learn open lists: one
    gives the value so far, and the other the values in order.
    """

    steps, rate = 3000, 3e-3
    batch, hidden, embedding = 128, 128, 32
    words = ()
    depths = ((0.1, 1), (0.25, 2), (0.4, 3), (1.0, cell_data.EXPRESSION_DEPTH))
    """(share of all steps, depth of lists up to that share)"""
    so_far_weight, ordered_weight = 0.3, 0.5

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        h, e = self.hidden, self.embedding
        self.module = nn.ModuleDict(
            {
                "embedding": nn.Embedding(listops.VOCABULARY, e),
                "leaf": nn.Linear(e, 3 * h),
                "internal": nn.Linear(2 * h, 5 * h),
                "value": nn.Linear(h, listops.DIGITS),
                "so_far": nn.Linear(h, listops.DIGITS),
                "ordered": nn.Linear(h, listops.MOST_VALUES * (listops.DIGITS + 1)),
            }
        )
        with torch.no_grad():
            self.module["internal"].bias[3 * h :] = 1.0  # both forget gates
        weights = self.weights()
        tree = TreeWeights(weights["leaf_w"], weights["leaf_b"], weights["w"], weights["b"])
        self._leaf = tree_leaf_cell("leaf", tree, weights["embedding"])
        self._internal = tree_internal_cell("internal", tree)

    def backward(self, share: float) -> float:
        depth = next(depth for until, depth in self.depths if share < until)
        texts = islice(cell_data.expressions(self._random, depth, test=False), self.batch)
        forest = Forest([listops.parse(text) for text, _ in texts])
        tape = self._forward(forest)
        h = tape.h.requires_grad_()
        closed, opened = forest.closed, ~forest.closed & (forest.value != IGNORED)
        ordered = self.module["ordered"](h[opened]).view(-1, listops.DIGITS + 1)
        loss = F.cross_entropy(self.module["value"](h[closed]), forest.value[closed])
        so_far = F.cross_entropy(self.module["so_far"](h[opened]), forest.value[opened])
        loss_ordered = F.cross_entropy(ordered, forest.ordered[opened].flatten())
        (loss + self.so_far_weight * so_far + self.ordered_weight * loss_ordered).backward()
        self._backward(forest, tape)
        return loss.item()

    def _forward(self, forest: Forest) -> Tape:
        """Run all nodes, one height after the other. Gradients of each height are kept separate, for `_backward`."""
        h, c = torch.empty(forest.nodes, self.hidden), torch.empty(forest.nodes, self.hidden)
        weights = {"embedding": self.module["embedding"].weight}
        weights |= {"w": self.module["leaf"].weight, "b": self.module["leaf"].bias}
        inputs: list[dict[str, Tensor]] = [{}]
        outputs = [self._leaf.run(weights, token=forest.tokens)]
        weights = {"w": self.module["internal"].weight, "b": self.module["internal"].bias}
        for height, nodes in enumerate(forest.heights):
            if height:
                left, right = forest.left[nodes], forest.right[nodes]
                given = {"left_h": h[left], "left_c": c[left], "right_h": h[right], "right_c": c[right]}
                inputs.append({name: tensor.requires_grad_() for name, tensor in given.items()})
                outputs.append(self._internal.run(weights, **inputs[height]))
            h[nodes], c[nodes] = outputs[height]["h"].detach(), outputs[height]["c"].detach()
        return Tape(h, inputs, outputs)

    def _backward(self, forest: Forest, tape: Tape) -> None:
        """Pass the gradients of h on, from the highest nodes to the leaves."""
        assert tape.h.grad is not None
        grad_h, grad_c = tape.h.grad, torch.zeros_like(tape.h)
        for height, nodes in reversed([*enumerate(forest.heights)]):
            outputs = [tape.outputs[height]["h"], tape.outputs[height]["c"]]
            torch.autograd.backward(outputs, [grad_h[nodes], grad_c[nodes]])
            for side, children in (("left", forest.left), ("right", forest.right)):
                for state, grad in (("h", grad_h), ("c", grad_c)):
                    if height:
                        grad.index_add_(0, children[nodes], tape.inputs[height][f"{side}_{state}"].grad)

    def weights(self) -> dict[str, Tensor]:
        module = self.module
        return {
            "embedding": module["embedding"].weight,
            "leaf_w": module["leaf"].weight,
            "leaf_b": module["leaf"].bias,
            "w": module["internal"].weight,
            "b": module["internal"].bias,
            "value_w": module["value"].weight,
            "value_b": module["value"].bias,
        }


class Tape(NamedTuple):
    """The intermediate results of a forward pass over a forest."""

    h: Tensor
    inputs: list[dict[str, Tensor]]
    outputs: list[dict[str, Tensor]]
    """Outputs and inputs, by height."""


class Forest:
    """Many trees as one set of nodes, ordered by height, so that each height is a range."""

    def __init__(self, trees: Sequence[listops.Tree]) -> None:
        tokens, left, right, height, value, ordered, closed = [], [], [], [], [], [], []
        for tree in trees:
            base, leaves = len(height), len(tree.tokens)
            here = [0] * leaves
            for first, second in zip(tree.left, tree.right, strict=True):
                here.append(1 + max(here[first], here[second]))
            height += here
            tokens += [*tree.tokens, *[0] * len(tree.left)]
            left += [*[0] * leaves, *(base + node for node in tree.left)]
            right += [*[0] * leaves, *(base + node for node in tree.right)]
            value += [token if token < listops.DIGITS else IGNORED for token in tree.tokens]
            closed += [token < listops.DIGITS for token in tree.tokens]
            ordered += [[listops.DIGITS] * listops.MOST_VALUES] * leaves
            for total, values, whole in cell_data.values_of(tree):
                value.append(total)
                closed.append(whole)
                ordered.append([*sorted(values), *[listops.DIGITS] * listops.MOST_VALUES][: listops.MOST_VALUES])
        self.nodes = len(height)
        order = np.argsort(height, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(self.nodes)
        bounds = np.searchsorted(np.array(height)[order], np.arange(max(height) + 2)).tolist()
        self.heights = [slice(first, last) for first, last in pairwise(bounds)]
        """The nodes of each height; the leaves are first."""
        self.tokens = torch.from_numpy(np.array(tokens)[order][: bounds[1]])
        self.left = torch.from_numpy(place[np.array(left)[order]])
        self.right = torch.from_numpy(place[np.array(right)[order]])
        self.value = torch.from_numpy(np.array(value)[order])
        """For an open list, the value of its items so far. IGNORED if there is none."""
        self.closed = torch.from_numpy(np.array(closed)[order])
        self.ordered = torch.from_numpy(np.array(ordered)[order])
        """[nodes, MOST_VALUES]: the values of a list in order; DIGITS after the last one."""


def make_lstm(inputs: int, hidden: int) -> nn.LSTM:
    """An LSTM layer whose forget gates are open at first."""
    lstm = nn.LSTM(inputs, hidden, batch_first=True)
    with torch.no_grad():
        lstm.bias_ih_l0[hidden : 2 * hidden] = 1.0
    return lstm


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """Rows of unequal length as one tensor."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate: it rises over the first 2% of the steps and falls to zero along a cosine."""
    return peak * min(1.0, (step + 1) / (0.02 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))


def optimize(training: Training, steps: int) -> None:
    """Take all steps, and report the progress ten times."""
    parameters = [*training.module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=training.rate, betas=(0.9, 0.98))
    started, losses = time.monotonic(), 0.0
    for step in range(steps):
        optimizer.zero_grad()
        losses += training.backward(step / steps)
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.param_groups[0]["lr"] = rate_at(step, steps, training.rate)
        optimizer.step()
        every = max(1, steps // 10)
        if step % every == every - 1:
            print(f"  step {step + 1}: loss {losses / every:.5f}, {time.monotonic() - started:.0f} s", flush=True)
            losses = 0.0


APPLICATIONS: dict[str, Callable[[Path], Application]] = {
    "tagger": tagger.load,
    "dates": dates.load,
    "listops": listops.load,
}
TRAININGS: dict[str, type[TaggerTraining] | type[DatesTraining] | type[ListOpsTraining]] = {
    "tagger": TaggerTraining,
    "dates": DatesTraining,
    "listops": ListOpsTraining,
}


def train(name: str, options: argparse.Namespace) -> None:
    """Train an application, save its weights, read them back, and test it on held-out cases."""
    torch.manual_seed(options.seed)
    training = TRAININGS[name](options.seed)
    optimize(training, options.steps or training.steps)
    path = write_weights(name, training.weights(), list(training.words), options.out)
    print(f"  saved {path}, {path.stat().st_size / 1e6:.2f} MB", flush=True)
    cases = cell_data.cases_of_test(name, TESTS)
    given = answers(APPLICATIONS[name](options.out), [case.text for case in cases])
    right = sum(answer == case.answer for answer, case in zip(given, cases, strict=True))
    print(f"  right on held-out cases: {right} of {len(cases)}", flush=True)


def answers(application: Application, texts: Sequence[str]) -> list[list[Any]]:
    """The last output of an application for each text, all run together."""
    graphs = [application.unfold({"text": np.array([text], dtype=object)}) for text in texts]
    outputs = [[*application.finish(results).values()] for results in run_together(application, graphs)]
    return [arrays[-1].tolist() for arrays in outputs]


def run_together(
    application: Application, graphs: Sequence[CellGraph], *, max_tasks: int = MAX_TASKS, capacity: int = 65536
) -> list[Arrays]:
    """The results of graphs that all arrive at once, from the planner and a CPU's executor."""
    types = number(application.cells)
    planner = CellPlanner(application.cells, types, max_tasks=max_tasks, capacity=capacity)
    loop = Loop(planner.worker(0), CpuExecutor(application.cells, types, capacity=capacity), 1, time.monotonic)
    for place, graph in enumerate(graphs):
        loop.add(CellRequest(str(place), graph))
    found: dict[str, Arrays] = {}
    while loop.has_work():
        found |= {output.request_id: output.results for output in loop.step() or ()}
    return [found[str(place)] for place in range(len(graphs))]


def main() -> None:
    """Train the named applications."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", default=[*TRAININGS], help=f"of {', '.join(TRAININGS)}; all if none is named"
    )
    parser.add_argument("--out", type=Path, default=DIRECTORY, help="the folder for the weights")
    parser.add_argument("--steps", type=int, help="steps of training, instead of each application's own number")
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    for name in options.names:
        if name not in TRAININGS:
            parser.error(f"{name} is no application; there are {', '.join(TRAININGS)}")
        print(name, flush=True)
        train(name, options)


if __name__ == "__main__":
    main()
