"""Models by their ids: which files are fetched, which the cache has, and the message if a model is unavailable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.hub import INDEX, SINGLE, is_id, lacks
from tests.checkpoints import make
from tests.fake_hub import COMMIT, FakeHub, fake_hub

FIND = """\
import sys
from holdfast.lm.config import EngineConfig
from holdfast.engine.checkpoint import Checkpoint, for_other_hosts, settled
config = EngineConfig(model=sys.argv[1], **eval(sys.argv[2]))
try:
    found = Checkpoint.of(config)
except ValueError as error:
    sys.exit(str(error))
again = Checkpoint.of(settled(config, found))
assert again == found, again
elsewhere = for_other_hosts(config, found)
assert elsewhere.revision == found.directory.name and Checkpoint.of(elsewhere) == found, elsewhere
print(found.name, found.directory)
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    directory = tmp_path_factory.mktemp("hub")
    make(directory / "tiny", "Llama")
    make(directory / "sharded", "Llama", shard="100KB")
    (directory / "tiny" / "onnx").mkdir()
    for other in ("onnx/model.json", "pytorch_model.bin", "consolidated.safetensors", "modeling_tiny.py"):
        (directory / "tiny" / other).write_text("{}")
    make(directory / "bin", "Llama")
    (directory / "bin" / "model.safetensors").rename(directory / "bin" / "pytorch_model.bin")
    with fake_hub(**{name: directory / name for name in ("tiny", "sharded", "bin")}) as hub:
        yield hub


def find(model: str, home: Path, url: str, options: str = "{}", **environment: str) -> subprocess.CompletedProcess[str]:
    """Find a checkpoint in a process of its own, since huggingface_hub reads the environment once."""
    return subprocess.run(
        [sys.executable, "-c", FIND, model, options],
        env={**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": url, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_is_fetched_once_and_then_found_without_a_network(hub: FakeHub, tmp_path: Path) -> None:
    first = find("made/tiny", tmp_path, hub.url)
    assert first.returncode == 0, first.stderr
    name, directory = first.stdout.split()
    assert name == "made/tiny" and Path(directory).is_relative_to(tmp_path) and COMMIT in directory
    assert f"fetching made/tiny from {hub.url} to {tmp_path}" in first.stderr
    assert sorted(path.name for path in Path(directory).iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    asked = len(hub.asked)
    for url, offline in ((hub.url, ""), ("http://127.0.0.1:9", ""), (hub.url, "1")):
        again = find("made/tiny", tmp_path, url, HF_HUB_OFFLINE=offline)
        assert (again.stdout, again.stderr) == (first.stdout, "")
    assert len(hub.asked) == asked


def test_a_revision_and_the_models_own_code_are_fetched_where_asked_for(hub: FakeHub, tmp_path: Path) -> None:
    found = find("made/tiny", tmp_path, hub.url, "dict(revision='v1', trust_remote_code=True)")
    assert found.returncode == 0, found.stderr
    assert (Path(found.stdout.split()[1]) / "modeling_tiny.py").is_file()
    missing = find("made/tiny", tmp_path, hub.url, "dict(revision='v2')")
    assert f"model made/tiny at revision v2: {hub.url} has no such revision of it" in missing.stderr


def test_random_weights_take_no_weights_and_those_are_fetched_when_they_are_needed(
    hub: FakeHub, tmp_path: Path
) -> None:
    found = find("made/sharded", tmp_path, hub.url, "dict(load_format='random', served_model_name=('mine', 'too'))")
    name, directory = found.stdout.split()
    assert name == "mine" and not list(Path(directory).glob("*.safetensors"))
    assert find("made/sharded", tmp_path, hub.url).returncode == 0
    assert lacks(Path(directory), weights=True) is None
    index = Path(directory) / INDEX
    index.unlink()  # a link into the cache
    index.write_text("[" * 100_000)
    assert lacks(Path(directory), weights=True) == SINGLE, "an index that cannot be read names no file"


def test_an_unavailable_model_is_reported_with_the_way_out(hub: FakeHub, tmp_path: Path) -> None:
    def said(model: str, url: str = hub.url, **environment: str) -> str:
        found = find(model, tmp_path, url, **environment)
        assert found.returncode == 1 and "Traceback" not in found.stderr
        return found.stderr

    assert "there is no such directory, and http://127.0.0.1" in said("made/absent")
    assert "HF_HUB_OFFLINE is set; fetch it where there is a network: hf download made/tiny" in said(
        "made/tiny", HF_HUB_OFFLINE="1"
    )
    unreachable = said("made/tiny", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9 cannot be reached" in unreachable and "hf download made/tiny" in unreachable
    assert "has no model.safetensors.index.json; only safetensors are served" in said("made/bin")
    hub.gated.add("made/tiny")
    try:
        assert f"it is gated: accept its terms at {hub.url}/made/tiny" in said("made/tiny")
    finally:
        hub.gated.clear()


def test_paths_are_not_ids() -> None:
    assert is_id("org/name-1.5") and is_id("Org_2/n")
    assert not any(map(is_id, ("name", "./org/name", "/org/name", "~/name", "a/b/c", "org/", "../name", "org/..")))
