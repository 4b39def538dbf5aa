"""A vocabulary for grammars: the built-in model's."""

from __future__ import annotations

import pytest

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.text import Text, read_tokenizer
from holdfast.lm.grammar.compiler import GrammarCompiler

VOCAB = 3072
END = 1


@pytest.fixture(scope="session")
def text() -> Text:
    return Text.from_directory(Checkpoint.find("holdfast-tiny").directory)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: read_tokenizer(Checkpoint.find("holdfast-tiny").directory), VOCAB, (END,))
