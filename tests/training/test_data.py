"""The file of examples: written whole, read back exactly, refused when it is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.data import Examples, digest_of, write_examples

EXAMPLES = [([5, 6, 7], [0.0, 0.5, 1.0]), ([1, 2], [1.0, 1.0]), ([2**32 - 1, 0, 3, 3], [9.0, 0.0, 0.0, 0.25])]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_examples(tmp_path / "examples.bin", EXAMPLES)
    return tmp_path / "examples.bin"


def test_examples_are_read_back_as_they_were_written(path: Path) -> None:
    examples = Examples(path)
    assert len(examples) == 3 and examples.lengths.tolist() == [3, 2, 4]
    for number, (ids, weights) in enumerate(EXAMPLES):
        found_ids, found_weights = examples.example(number)
        assert found_ids.tolist() == ids and found_weights.tolist() == weights


def test_the_digest_is_that_of_the_file_and_changes_with_a_weight(path: Path, tmp_path: Path) -> None:
    again = write_examples(tmp_path / "again.bin", EXAMPLES)
    other = write_examples(tmp_path / "other.bin", [*EXAMPLES[:2], (EXAMPLES[2][0], [9.0, 0.0, 0.0, 0.5])])
    assert again == digest_of(path) != other


def test_a_token_is_the_target_of_the_one_before_it_with_its_own_weight(path: Path) -> None:
    ids, targets, weights = Examples(path).packed([2, 0])
    assert ids.tolist() == [2**32 - 1, 0, 3, 3, 5, 6, 7]
    assert targets.tolist() == [0, 3, 3, 0, 6, 7, 0]
    assert weights.tolist() == [0.0, 0.0, 0.25, 0.0, 0.5, 1.0, 0.0]


def test_an_example_s_first_weight_does_not_count(path: Path) -> None:
    examples = Examples(path)
    assert examples.weight([0, 1, 2]) == 1.5 + 1.0 + 0.25
    assert all(examples.weight([n]) == float(examples.packed([n])[2].sum()) for n in range(3))


@given(st.lists(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(0.5, 2, width=32)), min_size=2), max_size=8))
def test_any_examples_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[tuple[int, float]]]
) -> None:
    path = tmp_path_factory.mktemp("data") / "examples.bin"
    write_examples(path, [([i for i, _ in row], [w for _, w in row]) for row in rows])
    examples = Examples(path)
    assert len(examples) == len(rows)
    for number, row in enumerate(rows):
        ids, weights = examples.example(number)
        assert [*zip(ids.tolist(), weights.tolist(), strict=True)] == row


@pytest.mark.parametrize(
    ("ids", "weights", "words"),
    [
        ([1], [1.0], "example 1 has 1 tokens"),
        ([1, 2], [1.0], "2 tokens and 1 weights"),
        ([1, 2], [1.0, 0.0], "nothing to learn"),
        ([1, 2], [1.0, float("nan")], "not from 0 to 1e6"),
        ([1, 2], [1.0, -1.0], "not from 0 to 1e6"),
    ],
)
def test_an_example_that_cannot_be_trained_on_is_refused_by_number(
    ids: list[int], weights: list[float], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        write_examples(tmp_path / "examples.bin", [EXAMPLES[0], (ids, weights)])
    assert [*tmp_path.iterdir()] == []


def test_an_interrupted_writing_leaves_the_file_of_before(path: Path) -> None:
    before = path.read_bytes()

    def broken() -> Iterator[tuple[list[int], list[float]]]:
        yield EXAMPLES[0]
        raise OSError("the source ended")

    with pytest.raises(OSError, match="the source ended"):
        write_examples(path, broken())
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


@pytest.mark.parametrize("cut", [0, 7, 23, 24, 60, -1])
def test_a_file_that_is_not_whole_is_refused(path: Path, cut: int) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"examples.bin is not a whole file of examples"):
        Examples(path)


def test_examples_that_overlap_are_refused(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[24:32] = np.uint64(2).tobytes()
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        Examples(path)
