"""Packed tokens: no token outside the vocabulary gets through, in whatever form it comes."""

import random
from array import array

import pytest

from holdfast.core.tokens import VOCABULARY_LIMIT, packed


@pytest.mark.parametrize("tokens", [[0, 99, 5], (7,), (), array("I", [3, 99]), array("q", [3, 99])])
def test_tokens_of_the_model_are_packed(tokens):
    numbers = packed(tokens, 100)
    assert numbers.typecode == "I" and numbers.tolist() == list(tokens)


def test_a_packed_array_is_returned_unchanged():
    numbers = packed([1, 2, 3], 100)
    assert packed(numbers, 100) is numbers


@pytest.mark.parametrize(
    ("tokens", "unknown"),
    [
        ([5, 100, 7], 100),
        ((5, -1), -1),
        (array("I", [100]), 100),
        (array("q", [1, -3, 200]), -3),
        ([7] * 1000 + [100], 100),
        ([100] + [7] * 1000, 100),
        ([7, (1 << 32) - 1, 8], (1 << 32) - 1),
        ([7, 1 << 31, 8], 1 << 31),
        ([1 << 32], 1 << 32),
        ([1 << 70], 1 << 70),
    ],
)
def test_an_error_names_the_token_out_of_range(tokens, unknown):
    with pytest.raises(ValueError, match=rf"token id {unknown}; .* between 0 and 99$"):
        packed(tokens, 100)


@pytest.mark.parametrize("tokens", [["a"], [None], [1.5], "text"])
def test_a_non_number_raises_type_error(tokens):
    with pytest.raises(TypeError):
        packed(tokens, 100)


@pytest.mark.parametrize("seed", range(20))
def test_packed_accepts_exactly_the_tokens_below_the_vocabulary_size(seed):
    draw = random.Random(seed)
    for _ in range(200):
        size = draw.choice((1, 2, 100, 1 << 16, 128256, VOCABULARY_LIMIT - 1, VOCABULARY_LIMIT))
        near = (0, 1, size - 2, size - 1, *([size, size + 1, 2 * size, (1 << 32) - 1] if draw.random() < 0.5 else []))
        tokens = [min(max(draw.choice(near), 0), (1 << 32) - 1) for _ in range(draw.randrange(40))]
        if max(tokens, default=0) < size:
            assert packed(tokens, size).tolist() == tokens
        else:
            with pytest.raises(ValueError, match=f"token id {max(tokens)};"):
                packed(tokens, size)
