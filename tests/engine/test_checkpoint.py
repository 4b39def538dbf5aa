"""Checkpoint: resolving a model name, bounded files, converting a tokenizer."""

import json

import pytest

from holdfast.core.config import BUILTIN_MODEL
from holdfast.engine import checkpoint
from holdfast.engine.checkpoint import Checkpoint, for_other_hosts, read_json, read_text, tokenizer_file
from holdfast.engine.client.text import Text
from holdfast.lm.config import EngineConfig
from tests.tokenizers_made import byte_level


def test_a_directory_is_named_by_its_last_part(tmp_path, monkeypatch):
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for given in (str(model), "my-model", "./my-model/"):
        assert Checkpoint.find(given) == Checkpoint("my-model", model)


def test_a_missing_checkpoint_is_refused_with_its_directory(tmp_path):
    with pytest.raises(ValueError, match=r"^model '.*/absent': .*/absent does not exist; give .* 'holdfast-tiny'$"):
        Checkpoint.find(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match=r"has no config\.json"):
        Checkpoint.find(str(tmp_path))
    (tmp_path / "weights").write_text("")
    with pytest.raises(ValueError, match=r"/weights is not a directory; give a Hugging Face checkpoint directory"):
        Checkpoint.find(str(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [("[]", "holds a list"), ("{", "cannot be read as JSON"), ("[" * 100_000, "cannot be read as JSON")],
)
def test_a_configuration_that_is_not_an_object_is_refused(tmp_path, content, reason):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=reason):
        read_json(tmp_path / "config.json")


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{\xff}")
    with pytest.raises(ValueError, match=r"/config\.json is not a text file: byte 1 is not UTF-8"):
        read_json(tmp_path / "config.json")


def test_a_file_beyond_the_limit_is_refused(tmp_path):
    path = tmp_path / "large.json"
    path.write_text("x" * 11)
    assert read_text(path, 11) == "x" * 11
    with pytest.raises(ValueError, match="larger than 10 bytes"):
        read_text(path, 10)


@pytest.fixture
def old_checkpoint(tmp_path, monkeypatch):
    """A checkpoint without tokenizer.json, and an empty cache for the converted one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "old"
    directory.mkdir()
    model = json.loads(byte_level().to_str())["model"]
    (directory / "vocab.json").write_text(json.dumps({**model["vocab"], "<|endoftext|>": len(model["vocab"])}))
    merges = [" ".join(merge) for merge in model["merges"]]
    (directory / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (directory / "config.json").write_text('{"model_type": "gpt2"}')
    return directory


def test_a_tokenizer_without_json_is_converted_once(old_checkpoint, monkeypatch):
    text = Text.from_directory(old_checkpoint)
    assert text.decode(text.encode("hello wörld 😀")) == "hello wörld 😀"
    monkeypatch.setattr(checkpoint, "_convert", lambda *_: pytest.fail("converted again"))
    assert tokenizer_file(old_checkpoint).is_file()


def test_a_conversion_that_is_killed_leaves_nothing_behind(old_checkpoint, tmp_path, monkeypatch):
    left = []
    convert = checkpoint._convert

    def watched(*given):
        convert(*given)
        left.extend(path for path in (tmp_path / "cache").rglob("*") if path.name not in ("holdfast", "tokenizers"))

    monkeypatch.setattr(checkpoint, "_convert", watched)
    converted = tokenizer_file(old_checkpoint)
    assert left == []  # while it runs, a kill has nothing to leave
    assert list(converted.parent.iterdir()) == [converted]


def test_a_conversion_without_transformers_says_what_to_install(old_checkpoint, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, .*: Transformers is not installed"):
        tokenizer_file(old_checkpoint)


def test_a_directory_without_any_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json and no other tokenizer file"):
        tokenizer_file(tmp_path)


def test_gguf_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "model-q4.gguf").touch()
    for given in (tmp_path, tmp_path / "model-q4.gguf"):
        with pytest.raises(ValueError, match=r"model-q4.gguf is GGUF, which is not read; give the safetensors"):
            Checkpoint.find(str(given))


def test_a_revision_of_a_directory_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="revision is v1, which is for a model of the hub"):
        Checkpoint.find(str(tmp_path), "v1")


def test_another_host_gets_absolute_paths_and_the_builtin_model_by_its_name(tmp_path, monkeypatch):
    make_directory = tmp_path / "models" / "mine"
    make_directory.mkdir(parents=True)
    (make_directory / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = EngineConfig(model="models/mine", adapter=("a=adapters/a",))
    there = for_other_hosts(config, Checkpoint.of(config))
    assert (there.model, there.adapter) == (str(make_directory), (f"a={tmp_path}/adapters/a",))
    assert there.served_model_name == ("mine",)
    builtin = EngineConfig(model=BUILTIN_MODEL)
    assert for_other_hosts(builtin, Checkpoint.of(builtin)).model == BUILTIN_MODEL
