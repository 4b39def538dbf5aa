"""A vocabulary for grammars: the built-in model's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.text import Text, read_tokenizer
from holdfast.lm.grammar.compiler import GrammarCompiler

VOCAB = 3072
END = 1


@pytest.fixture(scope="session")
def text() -> Text:
    return Text.from_directory(Checkpoint.find("holdfast-tiny").directory)


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(lambda: read_tokenizer(Checkpoint.find("holdfast-tiny").directory), VOCAB, (END,))
    yield made
    made.close()
