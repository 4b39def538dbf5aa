"""The GGUF files of a model: finding them, naming them, missing parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.files.gguf import gguf_of, name_of, parts_of


def test_a_model_of_several_files_needs_all_of_them(tmp_path: Path) -> None:
    first = tmp_path / "a-00001-of-00002.gguf"
    first.touch()
    with pytest.raises(ValueError, match=r"one of 2 files, and a-00002-of-00002\.gguf is missing"):
        parts_of(first)
    (tmp_path / "a-00002-of-00002.gguf").touch()
    assert [path.name for path in parts_of(tmp_path / "a-00002-of-00002.gguf")] == [
        "a-00001-of-00002.gguf",
        "a-00002-of-00002.gguf",
    ]


def test_a_model_is_found_by_its_file_or_by_a_directory_that_holds_it_alone(tmp_path: Path) -> None:
    assert gguf_of(tmp_path) is None and gguf_of(tmp_path / "a.gguf") is None
    for number in (1, 2):
        (tmp_path / f"a-{number:05}-of-00002.gguf").touch()
    assert gguf_of(tmp_path) == tmp_path / "a-00001-of-00002.gguf"
    assert gguf_of(tmp_path / "a-00002-of-00002.gguf") == tmp_path / "a-00002-of-00002.gguf"
    assert name_of(tmp_path / "a-00002-of-00002.gguf") == "a" and name_of(tmp_path / "b-q4.gguf") == "b-q4"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"holds 2 models in GGUF; name one, such as .*a-00001-of-00002\.gguf"):
        gguf_of(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_of(tmp_path) is None, "a checkpoint of Hugging Face"
