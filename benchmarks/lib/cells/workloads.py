"""Requests for cells: sentences, trees and arrivals like those of BatchMaker's evaluation (section 2.7.1).

The paper samples Europarl of WMT-15 (mean length 24, longest 330, about 99% below 100) and Stanford's TreeBank. Here
both are drawn from distributions that have the stated figures.

- Sentences: a gamma distribution with shape 2 and mean 24; one of 2,000 is between 100 and 330, each magnitude equally
  likely. 90% are below 47: the paper's p90 of 12 ms at 250 us a step says 48. 99.7% are below 100. A lognormal
  distribution with mean 24 and exactly 99% below 100 has the same p90, but enough long sentences that padding, whose
  buckets take turns, has a p90 of 0.6 s at 5,000 a second; the paper's is far lower. The lighter tail is kinder to
  padding.
- Trees: the number of leaves is normal with mean 19.1 and deviation 9.3, as TreeBank's sentences have, drawn again
  outside 2 to 56. Every binary tree with this number of leaves is equally likely. Such trees are about as high as
  binary parse trees are: 10.6 levels above the leaves at 19 leaves and 14.1 at 30, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

MEAN_LENGTH, LENGTH_SHAPE = 24, 2
LONG, LONGEST, LONG_SHARE = 100, 330, 1 / 2000
"""Lengths of very long sentences, and their share."""
MEAN_LEAVES, LEAVES_DEVIATION, LEAST_LEAVES, MOST_LEAVES = 19.1, 9.3, 2, 56


def sentence_lengths(count: int, seed: int, *, clip: int = LONGEST, fixed: int | None = None) -> np.ndarray:
    """Lengths of `count` sentences, int64. Longer ones than `clip` are drawn again; `fixed` gives all one length.

    Raises ValueError for a length below 1.
    """
    if clip < 1 or (fixed is not None and fixed < 1):
        raise ValueError(f"clip is {clip} and fixed {fixed}; a length must be at least 1")
    if fixed is not None:
        return np.full(count, fixed, np.int64)
    draw = np.random.default_rng([seed, 0])
    lengths = np.zeros(count, np.int64)
    again = np.arange(count)
    while len(again):
        body = draw.gamma(LENGTH_SHAPE, MEAN_LENGTH / LENGTH_SHAPE, len(again))
        tail = LONG * (LONGEST / LONG) ** draw.random(len(again))
        drawn = np.where(draw.random(len(again)) < LONG_SHARE, tail, body)
        lengths[again] = np.maximum(1, np.rint(drawn))
        again = again[lengths[again] > clip]
    return lengths


def poisson_arrivals(count: int, rate: float, seed: int) -> np.ndarray:
    """Seconds at which `count` requests arrive, `rate` per second. Raises ValueError for a rate of 0 or less."""
    if not rate > 0:
        raise ValueError(f"rate is {rate}; it must be above 0")
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate, count))


@dataclass(frozen=True)
class Tree:
    """A binary tree. Leaves are numbered from 0, inner nodes after them, each after both of its children."""

    leaves: int
    left: tuple[int, ...]
    """For each inner node, the number of its left child. The last inner node is the root."""
    right: tuple[int, ...]

    @cached_property
    def heights(self) -> list[int]:
        """For each node, the number of inner nodes on the longest path from a leaf to it, itself included."""
        heights = [0] * self.leaves
        for left, right in zip(self.left, self.right, strict=True):
            heights.append(1 + max(heights[left], heights[right]))
        return heights

    @cached_property
    def children(self) -> tuple[np.ndarray, np.ndarray]:
        """`left` and `right` as arrays, as a request that comes over the wire has them."""
        return np.array(self.left, np.intp), np.array(self.right, np.intp)

    @property
    def height(self) -> int:
        """The height of the root."""
        return self.heights[-1]


class Sample(NamedTuple):
    """The contents of one request: tokens, and for a tree its shape."""

    tokens: np.ndarray
    tree: Tree | None = None


class Samples(Sequence[Sample]):
    """The contents of several requests in shared arrays. A Sample is made only when it is asked for."""

    def __init__(self, lengths: np.ndarray, tokens: np.ndarray, trees: Sequence[Tree] | None = None) -> None:
        """`tokens` are those of all requests, one request after the other, and `lengths` their numbers."""
        self.lengths, self.tokens, self.trees = lengths, tokens, trees
        self._ends: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Samples:
        """These samples, in shared arrays."""
        if isinstance(samples, Samples):
            return samples
        tokens = [sample.tokens for sample in samples]
        trees = None if samples[0].tree is None else [sample.tree for sample in samples if sample.tree is not None]
        return cls(np.fromiter(map(len, tokens), np.int64, len(tokens)), np.concatenate(tokens), trees)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        if self._ends is None:
            self._ends = self.lengths.cumsum()
        at = range(len(self))[at]
        tokens = self.tokens[self._ends[at] - self.lengths[at] : self._ends[at]]
        return Sample(tokens, None if self.trees is None else self.trees[at])


def complete_tree(leaves: int = 16) -> Tree:
    """The tree whose leaves all lie at one depth. Raises ValueError unless `leaves` is a power of two, at least 2."""
    if leaves < 2 or leaves & (leaves - 1):
        raise ValueError(f"leaves is {leaves}; it must be a power of two, at least 2")
    return Tree(leaves, tuple(range(0, 2 * leaves - 2, 2)), tuple(range(1, 2 * leaves - 1, 2)))


def random_trees(count: int, seed: int) -> list[Tree]:
    """`count` random binary trees with TreeBank-like numbers of leaves."""
    draw = np.random.default_rng([seed, 2])
    found: list[Tree] = []
    while len(found) < count:
        leaves = round(draw.normal(MEAN_LEAVES, LEAVES_DEVIATION))
        if LEAST_LEAVES <= leaves <= MOST_LEAVES:
            found.append(random_tree(leaves, draw))
    return found


def random_tree(leaves: int, draw: np.random.Generator) -> Tree:
    """A tree with this many leaves, each shape equally likely (Remy's algorithm)."""
    if leaves == 1:
        return Tree(1, (), ())
    children: dict[int, list[int]] = {}
    above = {0: -1}
    root = 0
    for place, side in zip(range(1, leaves), draw.integers(0, 2, leaves - 1).tolist(), strict=True):
        node = int(draw.integers(0, 2 * place - 1))
        inner, leaf = 2 * place - 1, 2 * place
        parent = above[node]
        children[inner] = [leaf, node] if side else [node, leaf]
        above[inner], above[node], above[leaf] = parent, inner, inner
        if parent < 0:
            root = inner
        else:
            children[parent][children[parent].index(node)] = inner
    return _numbered(root, children, leaves)


def _numbered(root: int, children: dict[int, list[int]], leaves: int) -> Tree:
    """The tree with its leaves numbered from left to right, and its inner nodes from the bottom."""
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, ())
    number: dict[int, int] = {}
    left: list[int] = []
    right: list[int] = []
    found = 0
    for node in reversed(order):  # children come before their parents, left ones first
        if node in children:
            first, second = children[node]
            number[node] = leaves + len(left)
            left.append(number[first])
            right.append(number[second])
        else:
            number[node] = found
            found += 1
    return Tree(leaves, tuple(left), tuple(right))


def tokens_for(lengths: Sequence[int] | np.ndarray, vocabulary: int, seed: int) -> list[np.ndarray]:
    """Random tokens, int64, for sentences of these lengths."""
    draw = np.random.default_rng([seed, 3])
    every = draw.integers(0, vocabulary, int(np.sum(lengths)))
    return np.split(every, np.cumsum(lengths)[:-1])
