"""`dates`: Seq2Seq with "feed previous". It reads a date in any common form and writes it in ISO 8601.

The model is the paper's (BatchMaker, section 2.7.4; Sutskever et al., 2014). One LSTM reads the characters. Another
begins with the first one's state and `<go>`, and takes its own last token as its next input until it outputs `<eos>`.
There is no attention.

`3/4/1984` has the month first and `3.4.1984` the day. A year of two digits is one of 1969 to 2068, as in POSIX.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from holdfast.cells.applications.weights import DIRECTORY, Weights, read_weights
from holdfast.cells.cell import Arrays, Field
from holdfast.cells.graph import CellGraph
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.nn import LSTMWeights, ReadOut, decoder_cell, encoder_cell

CHARACTERS = f"{string.ascii_lowercase}{string.digits} ,./-"
MOST_CHARACTERS = 80
GO, EOS = 0, 1
"""The decoder's first input, which also stands for a state of zeros, and its last output."""
SYMBOLS = ("<go>", "<eos>", *string.digits, "-")
MOST_STEPS = len("YYYY-MM-DD") + 1
FIRST_YEAR, LAST_YEAR = 1900, 2099
"""The first and last years in the training data."""
FIRST_SHORT_YEAR = 1969


def characters(text: str) -> list[int]:
    """The encoder's tokens. Raises ValueError for a text that is empty or too long, or a character that is unknown."""
    lowered = text.strip().lower()
    if not lowered:
        raise ValueError("the text is empty; it needs at least 1 character")
    if len(lowered) > MOST_CHARACTERS:
        raise ValueError(f"the text has {len(lowered)} characters; at most {MOST_CHARACTERS} are allowed")
    for place, character in enumerate(lowered):
        if character not in CHARACTERS:
            raise ValueError(
                f"character {place + 1} is {character!r}; letters from a to z, digits, spaces and , . / - are allowed"
            )
    return [CHARACTERS.index(character) for character in lowered]


class Dates:
    """The application `dates`: `text` is a date in words or numbers, `date` is the same date as YYYY-MM-DD."""

    name = "dates"
    inputs = (
        Field("text", "string", (1,), help="A date, such as the third of march nineteen eighty-four, or 3/3/84."),
    )
    outputs = (Field("date", "string", (1,), help="The same date as YYYY-MM-DD."),)

    def __init__(self, weights: Weights) -> None:
        self.encoder = encoder_cell(
            "dates-encoder",
            LSTMWeights(weights["encoder.w"], weights["encoder.b"]),
            weights["encoder.embedding"],
        )
        self.decoder = decoder_cell(
            "dates-decoder",
            LSTMWeights(weights["decoder.w"], weights["decoder.b"]),
            weights["decoder.embedding"],
            ReadOut(weights["decoder.word_w"], weights["decoder.word_b"]),
        )
        self.cells = (self.encoder, self.decoder)

    def unfold(self, inputs: Arrays) -> CellGraph:
        """A chain over the characters, and a decoder chain that begins with its state."""
        tokens = characters(str(inputs["text"][0]))
        graph = CellGraph()
        last = graph.chain(self.encoder, len(tokens), token=tokens)[-1]
        steps = graph.chain(self.decoder, MOST_STEPS, h=(last, "h"), c=(last, "c"), stop=("word", EOS))
        graph.result("date", steps, "word")
        return graph

    def unfold_many(self, inputs: Sequence[Arrays]) -> GraphBatch:
        """A chain over the characters of each, and a decoder chain that begins with its state."""
        tokens = [characters(str(each["text"][0])) for each in inputs]
        lengths = np.array([len(each) for each in tokens])
        batch = GraphBatch(len(tokens))
        batch.chain(self.encoder, lengths, token=[token for each in tokens for token in each])
        last = lengths - 1
        most = [MOST_STEPS] * len(tokens)
        steps = batch.chain(self.decoder, most, h=(last, "h"), c=(last, "c"), stop=("word", EOS))
        batch.result("date", steps, "word")
        return batch

    def finish(self, results: Arrays) -> Arrays:
        """The decoder's symbols as text."""
        text = "".join(SYMBOLS[word] for word in results["date"] if word not in (GO, EOS))
        return {"date": np.array([text], dtype=object)}


def load(directory: Path = DIRECTORY) -> Dates:
    """The application with the weights in a folder, by default those that come with Holdfast."""
    return Dates(read_weights("dates", directory)[0])
