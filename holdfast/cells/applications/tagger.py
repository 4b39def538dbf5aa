"""`tagger`: an LSTM that reads a sentence word by word, and tags each word as part of a person, a place, and so on.

It reads in one direction, so each tag depends only on the words up to it. May is a month or a woman, 1984 a year or a
number of tickets; the words before decide, sometimes many words back.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from holdfast.cells.applications.weights import DIRECTORY, Weights, read_weights
from holdfast.cells.cell import Arrays, Field
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.nn import LSTMWeights, ReadOut, lstm_cell

TAGS = ("O", "PERSON", "PLACE", "DATE", "QUANTITY")
MOST_WORDS = 330
SHAPES = ("<word>", "<Name>", "<number>", "<hundreds>", "<thousands>", "<large>", "<ordinal>", "<other>")
"""The tokens for words that are not in the vocabulary, and for all numbers in digits."""

_WORD = re.compile(r"\d+(?:st|nd|rd|th)?\b|[^\W\d_]+(?:['’-][^\W\d_]+)*|\S")


def split(text: str) -> list[str]:
    """The words, numbers and marks of a sentence. Raises ValueError if there are none, or too many."""
    words = _WORD.findall(text)
    if not words:
        raise ValueError("the text is empty; it needs at least 1 word")
    if len(words) > MOST_WORDS:
        raise ValueError(f"the text has {len(words)} words and marks; at most {MOST_WORDS} are allowed")
    for place, character in enumerate(text):
        if not character.isprintable() and not character.isspace():
            raise ValueError(f"character {place + 1} is {character!r}; only what can be printed is allowed")
    return words


def shape_of(word: str) -> str:
    """The entry of SHAPES that stands for a word."""
    if word.isdecimal():
        return SHAPES[2 + min(max(len(word) - 2, 0), 3)]
    if word[0].isdecimal():
        return "<ordinal>"
    if not word[0].isalpha():
        return "<other>"
    return "<Name>" if word[0].isupper() else "<word>"


class Vocabulary:
    """Numbers words: SHAPES first, then the words that the model was trained with."""

    def __init__(self, words: Sequence[str]) -> None:
        self._number = {word: number for number, word in enumerate((*SHAPES, *words))}

    def __len__(self) -> int:
        return len(self._number)

    def numbers(self, words: Sequence[str]) -> list[int]:
        """The number of each word. If the first word is unknown, it is looked up in lower case."""
        number = self._number
        found = [number.get(word, number[shape_of(word)]) for word in words]
        if words and words[0] not in number:
            found[0] = number.get(words[0].lower(), found[0])
        return found


class Tagger:
    """The application `tagger`: `text` is a sentence, `word` its words, `tag` the tag of each."""

    name = "tagger"
    inputs = (Field("text", "string", (1,), help=f"An English sentence of at most {MOST_WORDS} words and marks."),)
    outputs = (
        Field("word", "string", (-1,), MOST_WORDS, help="The words and marks of the sentence."),
        Field("tag", "string", (-1,), MOST_WORDS, help=f"The tag of each: {', '.join(TAGS)}."),
    )

    def __init__(self, weights: Weights, words: Sequence[str]) -> None:
        self.vocabulary = Vocabulary(words)
        embedding = weights["embedding"]
        if len(self.vocabulary) != len(embedding):
            raise ValueError(
                f"there are {len(self.vocabulary)} words and {len(embedding)} embeddings; their numbers must be equal"
            )
        self.step = lstm_cell(
            "tagger-step",
            LSTMWeights(weights["w"], weights["b"]),
            embedding=embedding,
            read_out=ReadOut(weights["tag_w"], weights["tag_b"]),
        )
        self.cells = (self.step,)

    def unfold(self, inputs: Arrays) -> CellGraph:
        """A chain over the words."""
        words = split(str(inputs["text"][0]))
        graph = CellGraph()
        steps = graph.chain(self.step, len(words), token=self.vocabulary.numbers(words))
        graph.result("tag", steps, "label")
        graph.constant("word", np.array(words, dtype=object))
        return graph

    def unfold_many(self, inputs: Sequence[Arrays]) -> GraphBatch:
        """A chain over the words of each."""
        texts = [split(str(each["text"][0])) for each in inputs]
        batch = GraphBatch(len(texts))
        tokens = [number for words in texts for number in self.vocabulary.numbers(words)]
        steps = batch.chain(self.step, [len(words) for words in texts], token=tokens)
        batch.result("tag", steps, "label")
        batch.constant("word", [np.array(words, dtype=object) for words in texts])
        return batch

    def finish(self, results: Arrays) -> Arrays:
        """The words, and the names of their tags."""
        return {"word": results["word"], "tag": np.array([TAGS[tag] for tag in results["tag"]], dtype=object)}


def load(directory: Path = DIRECTORY) -> Tagger:
    """The application with the weights in a folder, by default those that come with Holdfast."""
    return Tagger(*read_weights("tagger", directory))
