"""Files at paths that somebody else chose: regular ones are opened, and the code waits for no other."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from holdfast.cells.applications.weights import read_weights
from holdfast.cli.flags import UsageError, read_file
from holdfast.cli.stopped import copy_whole
from holdfast.engine.checkpoint import Checkpoint, read_text
from holdfast.engine.profiles import StoredProfiles
from holdfast.files.regular import (
    check_regular_below,
    create_file,
    name_of_regular,
    open_file,
    open_regular,
    read_bytes,
)
from holdfast.lm.models.loader import UnsupportedCheckpoint, read_json
from holdfast.lm.models.peft_files import AdapterWeights, LoraPair, write_peft
from holdfast.server.address import check_tls
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import Database
from holdfast.server.jobs.locks import Owner
from holdfast.training.data import Examples, write_examples
from holdfast.training.jobs import Hyperparameters, TrainingJob
from holdfast.training.state import read_job, write_job

JOB = TrainingJob(
    id="j", hyperparameters=Hyperparameters(epochs=1, batch_size=1), base_model="b", base_digest="c", data_digest="d"
)
ADAPTER = AdapterWeights({(0, "q"): LoraPair(torch.ones(1, 4), torch.ones(4, 1), 1.0)})
pytestmark = pytest.mark.timeout(120)  # a test that waits for a pipe has failed


def pipe_at(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


def listen_at(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def test_a_regular_file_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"abc"
    with open_file(tmp_path / "link") as file:
        assert file.read(2) == b"ab" and os.get_blocking(file.fileno()) and not os.get_inheritable(file.fileno())


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR | os.O_CREAT])
@pytest.mark.parametrize(("make", "kind"), [(pipe_at, "a named pipe"), (listen_at, "a socket")])
def test_a_file_that_is_not_regular_is_refused_without_waiting(
    make: Callable[[Path], Path], kind: str, flags: int, tmp_path: Path
) -> None:
    make(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    before = len([*Path("/dev/fd").iterdir()])
    for name in ("there", "link"):
        with pytest.raises(OSError, match=rf"it is {kind}, not a regular file") as caught:
            open_regular(tmp_path / name, flags)
        assert caught.value.filename == str(tmp_path / name)
    assert len([*Path("/dev/fd").iterdir()]) == before, "a descriptor has stayed open"


def test_a_device_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a device"):
        read_bytes("/dev/zero")
    with pytest.raises(IsADirectoryError, match="Is a directory"):
        read_bytes(tmp_path)


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


def test_a_library_opens_a_regular_file_by_a_name_that_ends_with_it(tmp_path: Path) -> None:
    save_file({"x": torch.arange(4.0)}, tmp_path / "a.safetensors")
    with name_of_regular(tmp_path / "a.safetensors") as name:
        opened = safe_open(name, framework="pt")
    assert opened.get_tensor("x").tolist() == [0.0, 1.0, 2.0, 3.0], "what was opened stays so"
    with pytest.raises(OSError, match="a named pipe"), name_of_regular(pipe_at(tmp_path / "pipe")):
        raise AssertionError("it was opened")


def test_a_directory_that_holds_a_pipe_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    check_regular_below(tmp_path)
    pipe_at(tmp_path / "below" / "pipe")
    (tmp_path / "tokenizer.json").symlink_to("below/pipe")
    with pytest.raises(OSError, match="a named pipe") as caught:
        check_regular_below(tmp_path)
    assert caught.value.filename == str(tmp_path / "tokenizer.json")


def hold_profiles(lock: Path) -> None:
    (lock.parent / "config.json").write_text("{}")
    stored = StoredProfiles(lock.parent, "float32", "CPU")
    stored.folder = lock.parent
    with stored.held(required=True):
        pass


OPENERS: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "a YAML file of options": (UsageError, lambda path: read_file(str(path), [ServerConfig])),
    "a file that is copied": (OSError, lambda path: copy_whole(path, path.with_name("copy"))),
    "a text of a checkpoint": (ValueError, lambda path: read_text(path, 100)),
    "config.json": (UnsupportedCheckpoint, read_json),
    "the lock of profiles": (OSError, hold_profiles),
    "an SQLite store": (OSError, lambda path: Database(str(path))),
    "a certificate": (ValueError, lambda path: check_tls(ServerConfig(ssl_certfile=str(path)))),
    "examples": (OSError, Examples),
    "job.json": (OSError, lambda path: read_job(path.parent)),
    "weights of an application": (OSError, lambda path: read_weights("weights", path.parent)),
    "the lock of another server": (OSError, lambda path: Owner(path.parent).gone(path.name)),
}
NAMES = {"the lock of profiles": "lock", "job.json": "job.json", "weights of an application":
         "weights.safetensors"}  # fmt: skip


@pytest.mark.parametrize("what", OPENERS)
def test_a_pipe_in_the_place_of_a_file_is_an_error_without_waiting(what: str, tmp_path: Path) -> None:
    error, opener = OPENERS[what]
    with pytest.raises(error, match="it is a named pipe, not a regular file"):
        opener(pipe_at(tmp_path / NAMES.get(what, "pipe")))


def test_a_checkpoint_with_a_pipe_is_refused_before_any_library_opens_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    pipe_at(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.safetensors: it is a named pipe, not a regular file"):
        Checkpoint.find(str(tmp_path))


@pytest.mark.parametrize("make", [pipe_at, listen_at])
def test_nothing_is_written_to_a_file_that_is_not_regular(make: Callable[[Path], Path], tmp_path: Path) -> None:
    make(tmp_path / "there")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to("victim")
    for follow in (False, True):
        with pytest.raises(OSError, match="not a regular file"):
            create_file(tmp_path / "there", follow_links=follow)
    with pytest.raises(OSError, match="it is a symbolic link"):
        create_file(tmp_path / "link")
    assert (tmp_path / "victim").read_text() == "mine"
    with create_file(tmp_path / "link", follow_links=True) as file:
        file.write(b"me")
    assert (tmp_path / "victim").read_text() == "me"


@pytest.mark.parametrize(
    ("partial", "write"),
    [
        (".job.json.partial", lambda place: write_job(place, JOB)),
        (".examples.bin.ids", lambda place: write_examples(place / "examples.bin", [([1, 2], [0.0, 1.0])])),
        (".adapter_model.safetensors.partial", lambda place: write_peft(place, ADAPTER, base_model="b")),
        (".adapter_config.json.partial", lambda place: write_peft(place, ADAPTER, base_model="b")),
    ],
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_file_written_first_under_another_name_follows_no_link_and_waits_for_no_pipe(
    partial: str, write: Callable[[Path], object], kind: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "place").mkdir()
    if kind == "link":
        (tmp_path / "place" / partial).symlink_to(victim)
    else:
        pipe_at(tmp_path / "place" / partial)
    with pytest.raises(OSError, match="a symbolic link" if kind == "link" else "a named pipe"):
        write(tmp_path / "place")
    assert victim.read_text() == "mine"
