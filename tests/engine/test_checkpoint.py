"""Checkpoint: resolving a model name, bounded files, converting a tokenizer."""

import json
import os

import pytest

from holdfast.core.config import BUILTIN_MODEL
from holdfast.engine import checkpoint, gguf
from holdfast.engine.checkpoint import Checkpoint, for_other_hosts, read_json, read_text, tokenizer_file
from holdfast.engine.client.text import Text
from holdfast.lm.config import EngineConfig
from holdfast.lm.models import gguf_metadata
from tests.checkpoints import make
from tests.gguf_files import write_gguf
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

    def watched(directory, target):
        os.write(target, b"{}")
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


@pytest.fixture
def gguf_model(tmp_path, monkeypatch):
    """A small model in a GGUF file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    make(tmp_path / "plain", "Llama")
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "tiny-q8.gguf"
    write_gguf(path, tmp_path / "plain", "llama", kind="Q8_0", tokenizer=byte_level())
    return path


@pytest.fixture
def described_here(monkeypatch):
    """GGUF files are read in this process: another one imports Transformers for seconds."""
    monkeypatch.setattr(gguf, "_describe", gguf_metadata.write)


def test_a_gguf_file_is_a_checkpoint_whose_metadata_is_read_once(gguf_model, described_here, monkeypatch):
    found = Checkpoint.find(str(gguf_model))
    assert found.name == "tiny-q8"
    assert json.loads((found.directory / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert Text.from_directory(found.directory).encode("hello wörld") == byte_level().encode("hello wörld").ids
    monkeypatch.setattr(gguf, "_describe", lambda *_: pytest.fail("read again"))
    assert Checkpoint.find(str(gguf_model)) == Checkpoint.find(str(gguf_model.parent)) == found
    assert [path.name for path in found.directory.parent.iterdir()] == [found.directory.name]


def test_a_gguf_file_that_was_replaced_is_read_again(gguf_model, tmp_path):
    write_gguf(gguf_model, tmp_path / "plain", "llama", kind="Q8_0")  # without a tokenizer, which takes Transformers
    first = Checkpoint.find(str(gguf_model))
    write_gguf(gguf_model, tmp_path / "plain", "llama", kind="Q4_0")
    second = Checkpoint.find(str(gguf_model))
    assert second.directory != first.directory
    configs = [json.loads((each.directory / "config.json").read_text()) for each in (first, second)]
    assert configs[0]["gguf"] != configs[1]["gguf"]


def test_a_gguf_file_that_cannot_be_read_is_refused_in_one_line(gguf_model):
    gguf_model.write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match=r"tiny-q8\.gguf: tiny-q8\.gguf cannot be read as GGUF"):
        Checkpoint.find(str(gguf_model))
    assert list((gguf_model.parent.parent / "cache" / "holdfast" / "gguf").iterdir()) == []


def test_of_several_gguf_files_one_must_be_named(gguf_model):
    (gguf_model.parent / "b-00001-of-00002.gguf").touch()
    (gguf_model.parent / "b-00002-of-00002.gguf").touch()
    with pytest.raises(ValueError, match=r"holds 2 models in GGUF; name one, such as .*b-00001-of-00002\.gguf"):
        Checkpoint.find(str(gguf_model.parent))


def test_a_model_of_which_a_later_part_was_replaced_is_read_again(gguf_model, monkeypatch):
    described = []
    monkeypatch.setattr(gguf, "_describe", lambda path, directory: described.append(path))
    parts = [gguf_model.with_name(f"b-{number:05}-of-00002.gguf") for number in (1, 2)]
    for part in parts:
        part.touch()
    first = Checkpoint.find(str(parts[0]))
    parts[1].write_bytes(b"other")
    assert Checkpoint.find(str(parts[0])).directory != first.directory and len(described) == 2


def test_another_host_gets_the_path_of_a_gguf_file(gguf_model, described_here):
    config = EngineConfig(model=str(gguf_model))
    assert for_other_hosts(config, Checkpoint.of(config)).model == str(gguf_model)


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
