"""State files: the newest complete state is found, whichever files are cut off or damaged."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.training.jobs import Hyperparameters, TrainingJob
from holdfast.training.state import (
    State,
    StateFiles,
    StepRecord,
    clear_mirror,
    mirror_directory,
    newest,
    read_job,
    rows_of,
    write_job,
)

JOB = b"j" * 32


def state_of(step: int, numbers: int = 10) -> State:
    records = tuple(StepRecord(1 / (3 + n), None if n % 2 else 0.1 * n, 100 + n) for n in range(step))
    vectors = (torch.randn(numbers, generator=torch.Generator().manual_seed(3 * step + n)) for n in range(3))
    return State(rows_of(records), *vectors)


def same(found: State | None, wanted: State) -> bool:
    return (
        found is not None
        and found.records == wanted.records
        and all(torch.equal(a, b) for a, b in zip(found.vectors, wanted.vectors, strict=True))
    )


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    return StateFiles(tmp_path / "job", JOB, durable=True)


def test_the_last_state_is_read_back_exactly(files: StateFiles) -> None:
    assert files.read() is None
    for step in range(5):
        files.write(state_of(step))
        assert same(files.read(), state_of(step))
    assert {path.name for path in files.directory.iterdir()} == {"state.a", "state.b"}


def test_a_step_without_validation_is_read_back_as_one_and_a_loss_of_zero_as_zero(files: StateFiles) -> None:
    records = (StepRecord(0.5, None, 7), StepRecord(0.25, 0.0, 9))
    files.write(State(rows_of(records), *state_of(2).vectors))
    found = files.read()
    assert found is not None and found.records == records


@given(kept=st.integers(0, 10_000), flipped=st.integers(0, 10_000), cut=st.booleans())
def test_a_damaged_newest_file_gives_way_to_the_one_before(
    tmp_path_factory: pytest.TempPathFactory, kept: int, flipped: int, cut: bool
) -> None:
    files = StateFiles(tmp_path_factory.mktemp("job"), JOB, durable=False)
    for step in (1, 2):
        files.write(state_of(step))
    path = files.directory / "state.b"
    data = bytearray(path.read_bytes())
    if cut:
        path.write_bytes(data[: kept % len(data)])
    else:
        data[flipped % len(data)] ^= 1 << flipped % 8
        path.write_bytes(data)
    assert same(files.read(), state_of(1))
    files.write(state_of(2))
    assert same(files.read(), state_of(2))


def test_a_failed_write_leaves_both_files_as_they_are(files: StateFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        files.write(state_of(step))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr("os.fsync", full)
        files.write(state_of(3))
    assert same(files.read(), state_of(2))
    assert {path.name for path in files.directory.iterdir()} == {"state.a", "state.b"}


def test_a_state_of_another_job_is_not_found(files: StateFiles) -> None:
    files.write(state_of(4))
    assert StateFiles(files.directory, b"k" * 32, durable=True).read() is None


def test_states_of_another_job_give_way_and_never_a_job_s_own_two_last_ones(files: StateFiles) -> None:
    other = StateFiles(files.directory, b"k" * 32, durable=True)
    for step in (8, 9):
        other.write(state_of(step))
    for step in (1, 2):
        files.write(state_of(step))
        assert same(files.read(), state_of(step))
    (files.directory / "state.b").write_bytes(b"damaged")
    assert same(files.read(), state_of(1)), "the state before the newest is still there"


def test_the_newest_of_several_directories_counts(tmp_path: Path) -> None:
    several = [StateFiles(tmp_path / name, JOB, durable=False) for name in ("disk", "mirror")]
    assert newest(several) is None
    several[0].write(state_of(2))
    assert same(newest(several), state_of(2))
    several[1].write(state_of(3))
    assert same(newest(several), state_of(3))
    several[0].write(state_of(5))
    assert same(newest(several), state_of(5))


def test_removed_states_are_gone(files: StateFiles) -> None:
    for step in (1, 2):
        files.write(state_of(step))
    files.remove()
    assert files.read() is None and not [*files.directory.iterdir()]


def test_a_job_is_written_once_and_read_back(tmp_path: Path) -> None:
    chosen = Hyperparameters(epochs=1, batch_size=1)
    job = TrainingJob(id="j", hyperparameters=chosen, base_model="b", base_digest="c", data_digest="d")
    with pytest.raises(FileNotFoundError):
        read_job(tmp_path)
    write_job(tmp_path, job)
    assert read_job(tmp_path) == job
    with pytest.raises(FileExistsError, match="holds a job already"):
        write_job(tmp_path, job)


def test_old_states_in_shared_memory_are_deleted_and_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("holdfast.training.state.SHARED_MEMORY", tmp_path)
    path = mirror_directory("auto")
    assert path is not None and path.stat().st_mode & 0o777 == 0o700
    for name, age in (("old", 8 * 86_400), ("young", 60)):
        (path / name).mkdir()
        os.utime(path / name, (time.time() - age,) * 2)
    assert mirror_directory("auto") == path and [each.name for each in path.iterdir()] == ["young"]
    assert mirror_directory("off") is None
    path.chmod(0o777)
    assert mirror_directory("auto") is None


def test_states_in_the_hosts_memory_go_with_their_job(tmp_path: Path) -> None:
    mirror, homes = tmp_path / "mirror", {name: tmp_path / name for name in ("kept", "deleted", "moved")}
    for name, home in homes.items():
        home.mkdir()
        (home / "job.json").write_text("{}")
        (mirror / name).mkdir(parents=True)
        (mirror / name / "home").write_text(str(home))
    for name in ("of an older version", "half written"):
        (mirror / name).mkdir()
    (mirror / "half written" / "home").write_text("")
    (homes["deleted"] / "job.json").unlink()
    homes["moved"].rename(tmp_path / "elsewhere")
    clear_mirror(mirror)
    assert {each.name for each in mirror.iterdir()} == {"kept", "of an older version", "half written"}
    clear_mirror(tmp_path / "nowhere")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_directory_of_states_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    chosen = tmp_path / "mirror"
    chosen.mkdir()
    chosen.chmod(mode)
    with pytest.raises(ValueError, match="cannot be used: it is a link, or others may write to it"):
        mirror_directory(str(chosen))
    chosen.chmod(0o755)
    assert mirror_directory(str(chosen)) == chosen
    link = tmp_path / "link"
    link.symlink_to(chosen)
    with pytest.raises(ValueError, match="it is a link"):
        mirror_directory(str(link))
