"""The storage of jobs: states stored during later steps, reports, checkpoints, and slow or full disks."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import Halves
from holdfast.lm.models.peft_files import CONFIG_FILE, read_peft
from holdfast.training.done import DoneStep, JobFailure, StepReport
from holdfast.training.state import JOB_FILE, State, StateFiles, newest
from holdfast.training.trainer import Trainer
from tests.tuning import (
    act,
    advance,
    diverge,
    drawn_examples,
    finish,
    new_job,
    step_reports,
    trainer_for,
    vectors_of,
)


def test_every_step_is_reported_once_with_its_loss_and_after_it_was_stored(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model, mirror=tmp_path / "mirror")
    directory = new_job(tmp_path, epochs=3)
    trainer.open(directory)
    act(trainer, "job", "restore")
    reports: list[StepReport] = []
    job = trainer.steps("job").job.digest()

    def look() -> None:
        for report in step_reports(trainer):
            files = [StateFiles(path, job, durable=False) for path in (directory, tmp_path / "mirror" / "job")]
            state = newest(files)
            assert state is not None and state.records[report.step] == report.record
            reports.append(report)

    losses = finish(trainer, "job", look)
    trainer.close("job")
    look()
    assert [report.step for report in reports] == [*range(9)] and {report.steps for report in reports} == {9}
    assert [report.record.loss for report in reports] == losses
    assert [report.checkpoint is not None for report in reports] == [step % 3 == 2 for step in range(9)]
    assert not [*(tmp_path / "mirror").iterdir()]  # the disk has it all


def test_a_killed_engines_state_leaves_the_hosts_memory_once_its_job_is_deleted(model: Decoder, tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    killed = trainer_for(model, mirror=mirror)
    for name in ("goes", "stays"):
        killed.open(new_job(tmp_path, name=name))
        act(killed, name, "restore")
        finish(killed, name)
        act(killed, name, "offload")
    while not all(killed.settled(name) for name in ("goes", "stays")):
        time.sleep(0.001)
    # The engine ends here without closing its jobs, and the owner of one deletes it.
    (tmp_path / "goes" / JOB_FILE).unlink()
    assert {each.name for each in mirror.iterdir()} == {"goes", "stays"}
    trainer = trainer_for(model, mirror=mirror)
    trainer.open(new_job(tmp_path, name="next"))
    assert [each.name for each in mirror.iterdir()] == ["stays"]
    trainer.open(tmp_path / "stays")
    assert trainer.next_slice("stays")[0] == trainer.steps("stays").count, "the state that was kept is whole"


def test_a_slow_disk_delays_reports_and_no_step(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path, epochs=6))
    act(trainer, "job", "restore")
    write, free, written = StateFiles.write, threading.Event(), list[int]()

    def slow(self: StateFiles, state: State) -> None:
        assert free.wait(60)
        written.append(state.step)
        write(self, state)

    monkeypatch.setattr(StateFiles, "write", slow)
    losses = []
    while trainer.next_slice("job")[0] < 3:
        losses.append(advance(trainer, "job").loss)
    assert not trainer.reports()
    threading.Timer(0.2, free.set).start()  # the next step waits for it, as a checkpoint waits for the disk
    losses += finish(trainer, "job")
    trainer.close("job")
    reports = step_reports(trainer)
    assert [report.record.loss for report in reports] == [loss for loss in losses if loss is not None]
    assert [report.step for report in reports if report.checkpoint is not None] == [2, 5, 8, 11, 14, 17]
    assert written[0] == 1 and 2 not in written and written[-1] == 18


def test_a_job_is_settled_when_its_last_state_is_written_and_waiters_are_woken_after_that(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, free, found = StateFiles.write, threading.Event(), list[tuple[bool, bool]]()

    def slow(self: StateFiles, state: State) -> None:
        assert free.wait(60)
        write(self, state)

    woken = threading.Event()

    def wake() -> None:
        found.append((trainer.settled("job"), trainer.has_reports))
        woken.set()

    trainer = trainer_for(model, wake=wake)
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    monkeypatch.setattr(StateFiles, "write", slow)
    while trainer.settled("job"):
        advance(trainer, "job", 1)
    assert trainer.next_slice("job")[0] == 1 and not trainer.has_reports and trainer.is_resident("job")
    free.set()
    assert woken.wait(60) and found == [(True, True)]
    act(trainer, "job", "offload")
    assert not trainer.is_resident("job")


class HeldWriter:
    """A writer that stores no state until the test releases it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.steps = threading.Event(), list[int]()
        write = StateFiles.write

        def held(files: StateFiles, state: State) -> None:
            assert self.free.wait(60)
            self.steps.append(state.step)
            write(files, state)

        monkeypatch.setattr(StateFiles, "write", held)


def test_a_state_is_copied_to_the_host_piece_by_piece_during_the_slices_of_the_next_step(opened: Trainer) -> None:
    while opened.next_slice("job")[0] < 1:
        advance(opened, "job")
    known = opened._jobs["job"]
    assert known.resident is not None
    after = [piece.clone() for piece in known.resident.vectors["params"]]
    host = known.stored.spare["params"].chunk(len(after))
    layers = list[int]()
    while not layers or layers[-1] < len(after):
        advance(opened, "job", 1)
        layers.append(sum(bool((piece == copied).all()) for piece, copied in zip(after, host, strict=True)))
    assert layers[0] == 1 and len(layers) > 1, "a small slice copies a part"
    assert opened.next_slice("job")[0] == 1, "all is copied long before the update"
    assert torch.equal(opened.host_vector("job", "params"), torch.cat(after))
    assert [report.step for report in step_reports(opened)] == [0]


def test_a_step_whose_state_finds_no_room_is_stored_with_a_later_one(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, trainer = HeldWriter(monkeypatch), trainer_for(model)
    trainer.open(new_job(tmp_path, epochs=1, batch_size=1))
    act(trainer, "job", "restore")
    while trainer.next_slice("job")[0] < 8:
        assert trainer.keeps_up("job")
        advance(trainer, "job")
    assert not trainer.has_reports
    writer.free.set()
    finish(trainer, "job")
    trainer.close("job")
    assert [report.step for report in step_reports(trainer)] == [*range(10)]
    assert writer.steps[0] == 1 and {*writer.steps} < {1, 8, 9, 10} and writer.steps[-1] == 10


def test_the_next_step_may_begin_only_when_there_is_room_for_an_adapter_that_is_to_be_written(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, trainer = HeldWriter(monkeypatch), trainer_for(model)
    trainer.open(new_job(tmp_path, epochs=4, batch_size=10, micro_batch=1000))  # a step is an epoch
    act(trainer, "job", "restore")
    kept_up = []
    for _ in range(3):
        kept_up.append(trainer.keeps_up("job"))
        advance(trainer, "job")
    assert kept_up == [True, True, True] and not trainer.keeps_up("job"), "two states fill the host's room"
    writer.free.set()
    trainer.host_vector("job", "params")  # waits for the writer
    assert trainer.keeps_up("job")
    finish(trainer, "job")
    trainer.close("job")
    assert [report.checkpoint is not None for report in step_reports(trainer)] == [True] * 4


def test_a_job_closed_between_an_update_and_its_validation_goes_on_from_the_last_whole_state(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, Any] = dict(epochs=2, batch_size=5, micro_batch=1000, validation=drawn_examples(5, seed=9))
    alone, trainer = trainer_for(model), trainer_for(model)
    alone.open(new_job(tmp_path / "alone", **chosen))
    act(alone, "job", "restore")
    finish(alone, "job")
    writer = HeldWriter(monkeypatch)
    directory = new_job(tmp_path / "closed", **chosen)
    trainer.open(directory)
    act(trainer, "job", "restore")
    while trainer.next_slice("job") != (3, 1, 0):  # the state of step 2 has found no room, and its vectors are gone
        advance(trainer, "job")
    threading.Timer(0.2, writer.free.set).start()
    trainer.close("job")
    trainer.open(directory)
    assert trainer.next_slice("job") == (2, 0, 0)
    act(trainer, "job", "restore")
    finish(trainer, "job")
    assert all(torch.equal(*pair) for pair in zip(vectors_of(trainer, "job"), vectors_of(alone, "job"), strict=True))


def test_a_state_that_is_on_the_disk_is_not_written_again(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = StateFiles.write, list[int]()

    def counted(self: StateFiles, state: State) -> None:
        written.append(state.step)
        write(self, state)

    monkeypatch.setattr(StateFiles, "write", counted)
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.host_vector("job", "params")  # waits for the writer
    before = [*written]
    act(trainer, "job", "offload")
    trainer.close("job")
    assert before[-1] == 6 and written == before


def test_steps_that_no_file_took_are_reported_with_the_next_stored_one(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.training.storage.DISK_SECONDS", float("inf"))
    monkeypatch.setattr("holdfast.training.storage.DISK_SHARE", 0.0)
    trainer = trainer_for(model)
    directory = new_job(tmp_path)  # steps 2 and 5 end an epoch; the first of all is stored at once
    trainer.open(directory)
    act(trainer, "job", "restore")
    told: dict[int, list[int]] = {}
    while (step := trainer.next_slice("job")[0]) < 6:
        if advance(trainer, "job").loss is not None:
            trainer.host_vector("job", "params")  # waits for the writer
            told[step] = [report.step for report in step_reports(trainer)]
    assert told == {0: [], 1: [0], 2: [], 3: [1, 2], 4: [], 5: [3, 4, 5]}


def test_checkpoints_are_the_adapter_after_each_epoch(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model)
    directory = new_job(tmp_path, modules=("q", "down"))
    trainer.open(directory)
    act(trainer, "job", "restore")
    finish(trainer, "job")
    params = vectors_of(trainer, "job")[0]
    assert sorted(path.name for path in (directory / "checkpoints").iterdir()) == ["3", "6"]
    weights = read_peft(directory / "checkpoints" / "6", model.decoder)
    assert (weights.rank, weights.modules) == (4, ("q", "down"))
    assert {pair.scale for pair in weights.pairs.values()} == {2.0}
    flat = [t.flatten() for layer in range(2) for m in ("q", "down") for t in weights.pairs[layer, m][:2]]
    assert torch.equal(torch.cat(flat), params)


def test_a_checkpoint_that_a_killed_engine_did_not_finish_is_written_at_the_next_start(
    model: Decoder, tmp_path: Path
) -> None:
    directory = new_job(tmp_path)
    trainer = trainer_for(model)
    trainer.open(directory)
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.close("job")
    whole = {path.name: path.read_bytes() for path in (directory / "checkpoints" / "6").iterdir()}
    shutil.rmtree(directory / "checkpoints" / "6")
    trainer.open(directory)
    assert {path.name: path.read_bytes() for path in (directory / "checkpoints" / "6").iterdir()} == whole
    assert json.loads(whole[CONFIG_FILE])["base_model_name_or_path"] == "base"


def test_a_mirror_without_space_is_given_up_and_the_disk_takes_over(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mirror").write_text("not a directory")
    trainer = trainer_for(model, mirror=tmp_path / "mirror")
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.close("job")
    assert [report.step for report in step_reports(trainer)] == [*range(6)]
    assert "go to the disk only" in caplog.text


def test_a_disk_that_refuses_a_state_fails_the_job_with_the_reason(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(model)
    directory = new_job(tmp_path)
    trainer.open(directory)
    act(trainer, "job", "restore")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("holdfast.training.state.StateFiles.write", full)
    finish(trainer, "job")
    trainer.close("job")
    (failure,) = trainer.reports()
    assert isinstance(failure, JobFailure) and "No space left" in failure.reason


@pytest.mark.parametrize("wrong", ["loss", "parameters"])
def test_numbers_that_are_not_finite_fail_the_job_and_are_not_stored(
    model: Decoder, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(model)
    directory = new_job(tmp_path)
    trainer.open(directory)
    act(trainer, "job", "restore")
    advance(trainer, "job")
    if wrong == "loss":
        head = Halves.head
        monkeypatch.setattr(Halves, "head", lambda *args, **named: [each + torch.nan for each in head(*args, **named)])
    else:
        monkeypatch.setattr("holdfast.training.sources.adamw_step", diverge)
    finish(trainer, "job")
    trainer.close("job")
    failures = [report for report in trainer.reports() if isinstance(report, JobFailure)]
    assert failures and "lower the learning rate" in failures[0].reason
    again = trainer_for(model)
    again.open(directory)
    assert again.records("job") == () and torch.isfinite(again.host_vector("job", "params")).all()


def test_a_discarded_job_leaves_its_checkpoints_and_no_state(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model, mirror=tmp_path / "mirror")
    directory = new_job(tmp_path)
    trainer.open(directory)
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.discard("job")
    assert not [*tmp_path.glob("**/state.*")] and (directory / "checkpoints" / "6" / CONFIG_FILE).exists()


def test_a_state_that_was_to_be_on_the_disk_and_is_overtaken_takes_a_newer_one_there(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, trainer = HeldWriter(monkeypatch), trainer_for(model, mirror=tmp_path / "mirror")
    directory = new_job(tmp_path, epochs=1, batch_size=1)
    trainer.open(directory)
    stored = trainer._jobs["job"].stored
    stored.disk_seconds, stored.disk_at = 1e9, time.monotonic()  # the disk is slow, and was written to just now
    act(trainer, "job", "restore")
    while trainer.next_slice("job")[0] < 3:
        advance(trainer, "job")
    act(trainer, "job", "offload")  # its state waits until the previous write has ended
    act(trainer, "job", "restore")
    while trainer.next_slice("job")[0] < 5:
        advance(trainer, "job")
    writer.free.set()
    trainer.host_vector("job", "params")  # waits for the writer
    assert 3 not in writer.steps
    on_disk = StateFiles(directory, trainer.steps("job").job.digest(), durable=False).read()
    assert on_disk is not None and on_disk.step >= 3
    trainer.close("job")


def test_a_step_takes_the_time_since_the_one_before_it(opened: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = opened._jobs["job"].stored
    seconds = iter((100.0, 103.0, 108.0))
    for expected in (None, 3.0, 5.0):
        with monkeypatch.context() as patch:
            patch.setattr("holdfast.training.storage.time", SimpleNamespace(monotonic=seconds.__next__))
            done = DoneStep("job", stored.step, 9, 1, torch.tensor(0.5), None)
            opened._storage.end_step(stored, done, changes=True)
        assert expected is None or stored.step_seconds == expected
    stored.done.clear()
    stored.step = 0
