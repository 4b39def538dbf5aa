"""The trainer: slices, memory that is lent and given back, states, reports, checkpoints."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import Halves
from holdfast.lm.models.loader import load
from holdfast.lm.models.peft_files import CONFIG_FILE, read_peft
from holdfast.lm.types import TrainingSlice
from holdfast.training.data import EXAMPLES_FILE, write_examples
from holdfast.training.iteration import arena_of, workspace_bytes
from holdfast.training.state import State, StateFiles, newest
from holdfast.training.trainer import JobFailure, StepReport, Trainer
from tests.tuning import (
    BLOCKS,
    act,
    advance,
    arena_for,
    cache_of,
    drawn_examples,
    finish,
    native,
    new_job,
    trainer_for,
    vectors_of,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native("llama", tmp_path_factory.mktemp("base"))[1]


@pytest.fixture
def opened(model: Decoder, tmp_path: Path) -> Trainer:
    """A trainer with the job "job" resident."""
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    return trainer


def step_reports(trainer: Trainer) -> list[StepReport]:
    reports = trainer.reports()
    assert not [report for report in reports if isinstance(report, JobFailure)]
    return [report for report in reports if isinstance(report, StepReport)]


def test_a_job_learns_its_examples(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path, epochs=20, examples=drawn_examples(4), learning_rate=0.02, rank=8))
    act(trainer, "job", "restore")
    losses = finish(trainer, "job")
    assert losses[-1] < 0.4 * losses[0]


def test_results_say_where_a_micro_batch_and_a_step_end(opened: Trainer) -> None:
    batches = opened.steps("job").micro_batches(0)
    assert len(batches) > 1
    for index, batch in enumerate(batches):
        first = advance(opened, "job", 3)
        assert (first.tokens, first.loss, first.stop) == (0, None, 3)
        rest = advance(opened, "job")
        assert rest.tokens == batch.tokens and (rest.first, rest.stop) == (3, len(batch.units))
        assert (rest.loss is not None) == (index == len(batches) - 1)
    assert opened.next_slice("job") == (1, 0, 0)


def test_base_weights_are_neither_changed_nor_moved(model: Decoder, tmp_path: Path) -> None:
    tensors = [model.embedding, model.norm, *(t for w in model.layers for t in (w.qkv, w.o, w.gate_up, w.down))]
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors if isinstance(tensor, torch.Tensor)]
    trainer = trainer_for(model)
    for name in ("one", "two"):
        trainer.open(new_job(tmp_path, name=name))
    for name in ("one", "two", "one"):
        act(trainer, name, "restore")
        advance(trainer, name)
        act(trainer, name, "offload")
    assert all(
        tensor.data_ptr() == place and torch.equal(tensor, copy)
        for tensor, (place, copy) in zip(tensors, before, strict=True)
    )


@pytest.mark.parametrize("keep", [False, True])
def test_nothing_is_written_below_the_blocks_that_a_job_asks_for(model: Decoder, keep: bool, tmp_path: Path) -> None:
    cache = cache_of(model)
    cache.data.fill_(7.0)
    trainer = Trainer(model, arena_of(cache), base_digest="base-digest", mirror=None)
    trainer.open(new_job(tmp_path, epochs=1))
    lent = max(
        trainer.blocks("job", batch.tokens, keep=keep)
        for s in range(3)
        for batch in trainer.steps("job").micro_batches(s)
    )
    act(trainer, "job", "restore", lent)
    while trainer.next_slice("job")[0] < 3:
        advance(trainer, "job", keep=keep, lent=lent)
    assert (cache.data[:, :, : BLOCKS - lent] == 7.0).all() and not (cache.data[:, :, BLOCKS - lent] == 7.0).all()


def test_fewer_blocks_than_a_slice_needs_are_refused_with_both_numbers(opened: Trainer) -> None:
    tokens = opened.steps("job").micro_batches(0)[0].tokens
    kept, inputs, vectors = (
        opened.blocks("job", tokens, keep=True),
        opened.blocks("job", tokens),
        opened.blocks("job"),
    )
    assert kept > inputs >= vectors > 0
    with pytest.raises(ValueError, match=rf"needs {kept} blocks; lent are {kept - 1} of {BLOCKS}"):
        advance(opened, "job", 1, lent=kept - 1)
    advance(opened, "job", 2, lent=kept)
    with pytest.raises(ValueError, match=rf"needs {kept} blocks; lent are {inputs} of"):
        advance(opened, "job", 1, keep=False, lent=inputs)
    act(opened, "job", "release", inputs)
    advance(opened, "job", 1, keep=False, lent=inputs)
    act(opened, "job", "drop", vectors)
    act(opened, "job", "offload", 0)


@pytest.mark.parametrize(
    ("slice_", "words"),
    [
        (TrainingSlice("other", 0, 0, "run", 0, 1), "no open job 'other'"),
        (TrainingSlice("job", 1, 0, "run", 0, 1), "slice of step 1, micro-batch 0; job job is at step 0"),
        (TrainingSlice("job", 0, 1, "run", 0, 1), "slice of step 0, micro-batch 1"),
        (TrainingSlice("job", 0, 0, "run", 2, 3), "units 2 to 3 cannot run: the next is 0"),
        (TrainingSlice("job", 0, 0, "run", 0, 999), "units up to 999"),
    ],
)
def test_a_slice_that_does_not_follow_is_refused(opened: Trainer, slice_: TrainingSlice, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        opened.run(slice_, BLOCKS)


def test_only_one_job_is_resident_and_only_it_runs(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model)
    for name in ("one", "two"):
        trainer.open(new_job(tmp_path, name=name))
    act(trainer, "one", "restore")
    with pytest.raises(ValueError, match="one is resident; offload it before two"):
        act(trainer, "two", "restore")
    with pytest.raises(ValueError, match="two is not resident"):
        advance(trainer, "two")


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


def test_a_slow_disk_delays_reports_and_no_step(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path, epochs=6))
    act(trainer, "job", "restore")
    write, free, written = StateFiles.write, threading.Event(), list[int]()

    def slow(self: StateFiles, state: State) -> None:
        assert free.wait(20)
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


def test_a_job_is_settled_when_its_last_state_is_written_and_whoever_waits_is_woken_after_that(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path))
    act(trainer, "job", "restore")
    write, free, found = StateFiles.write, threading.Event(), list[tuple[bool, bool]]()

    def slow(self: StateFiles, state: State) -> None:
        assert free.wait(20)
        write(self, state)

    woken = threading.Event()

    def wake() -> None:
        found.append((trainer.settled("job"), trainer.has_reports))
        woken.set()

    trainer.wake = wake
    monkeypatch.setattr(StateFiles, "write", slow)
    while trainer.settled("job"):
        advance(trainer, "job", 1)
    assert trainer.next_slice("job")[0] == 1 and not trainer.has_reports and trainer.is_resident("job")
    free.set()
    assert woken.wait(20) and found == [(True, True)]
    act(trainer, "job", "offload")
    assert not trainer.is_resident("job")


class HeldWriter:
    """Lets no state be written until it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.steps = threading.Event(), list[int]()
        write = StateFiles.write

        def held(files: StateFiles, state: State) -> None:
            assert self.free.wait(20)
            self.steps.append(state.step)
            write(files, state)

        monkeypatch.setattr(StateFiles, "write", held)


def test_a_state_is_copied_to_the_host_piece_by_piece_beside_the_slices_of_the_next_step(opened: Trainer) -> None:
    while opened.next_slice("job")[0] < 1:
        advance(opened, "job")
    known = opened._jobs["job"]
    assert known.resident is not None
    after = [piece.clone() for piece in known.resident.vectors["params"]]
    host = known.spare["params"].chunk(len(after))
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


def test_room_for_a_job_is_known_before_it_is_open(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model)
    steps = trainer.open(new_job(tmp_path))
    for keep in (False, True):
        assert trainer.blocks_for(steps.job.hyperparameters, 50, keep=keep) == trainer.blocks("job", 50, keep=keep)
    assert trainer.newest_checkpoint("job") == ""
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.host_vector("job", "params")
    assert trainer.newest_checkpoint("job") == str(tmp_path / "job" / "checkpoints" / "6")


def test_steps_that_no_file_took_are_reported_with_the_next_stored_one(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.training.trainer.DISK_SECONDS", float("inf"))
    monkeypatch.setattr("holdfast.training.trainer.DISK_SHARE", 0.0)
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


def test_validation_is_reported_and_does_not_change_what_is_learned(model: Decoder, tmp_path: Path) -> None:
    outcomes = []
    for name, validation in (("without", []), ("with", drawn_examples(5, seed=9))):
        trainer = trainer_for(model)
        trainer.open(new_job(tmp_path, name=name, validation=validation))
        act(trainer, name, "restore")
        losses = finish(trainer, name)
        vectors = vectors_of(trainer, name)
        outcomes.append((losses, vectors, [record.validation for record in trainer.records(name)]))
    (losses, vectors, none), (same, others, found) = outcomes
    assert losses == same and all(torch.equal(a, b) for a, b in zip(vectors, others, strict=True))
    assert none == [None] * 6
    assert [value is not None for value in found] == [step % 3 == 2 for step in range(6)]
    assert all(0.0 < value < 20.0 for value in found if value is not None)


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
        monkeypatch.setattr(Halves, "head", lambda *args, **named: head(*args, **named) + torch.nan)
    else:
        monkeypatch.setattr("holdfast.training.trainer.learning_rate", lambda *_, **__: float("inf"))
    finish(trainer, "job")
    trainer.close("job")
    failures = [report for report in trainer.reports() if isinstance(report, JobFailure)]
    assert failures and "lower the learning rate" in failures[0].reason
    again = trainer_for(model)
    again.open(directory)
    assert again.records("job") == () and torch.isfinite(again.host_vector("job", "params")).all()


@pytest.mark.parametrize("change", ["base", "data", "twice", "none"])
def test_a_job_that_cannot_go_on_is_refused_with_the_reason(model: Decoder, change: str, tmp_path: Path) -> None:
    directory = new_job(tmp_path)
    trainer = trainer_for(model)
    prepare: dict[str, tuple[Callable[[], object], str]] = {
        "base": (lambda: None, "begun over another base model"),
        "data": (lambda: write_examples(directory / EXAMPLES_FILE, drawn_examples(9)), "not the file that the job"),
        "twice": (lambda: trainer.open(directory), "open already"),
        "none": (lambda: (directory / "job.json").write_text("{}"), "not a job"),
    }
    before, words = prepare[change]
    before()
    if change == "base":
        trainer = Trainer(model, arena_for(model), base_digest="another", mirror=None)
    with pytest.raises(ValueError, match=words):
        trainer.open(directory)


def test_a_discarded_job_leaves_its_checkpoints_and_no_state(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model, mirror=tmp_path / "mirror")
    directory = new_job(tmp_path)
    trainer.open(directory)
    act(trainer, "job", "restore")
    finish(trainer, "job")
    trainer.discard("job")
    assert not [*tmp_path.glob("**/state.*")] and (directory / "checkpoints" / "6" / CONFIG_FILE).exists()


def test_tuning_in_16_bits_follows_tuning_in_32(tmp_path: Path) -> None:
    native("llama", tmp_path / "base")
    losses = []
    for dtype in ("float32", "bfloat16"):
        model = load(tmp_path / "base", device="cpu", dtype=dtype)
        assert isinstance(model, Decoder)
        trainer = trainer_for(model, arena=arena_for(model, 2 * BLOCKS))
        trainer.open(new_job(tmp_path, name=dtype, epochs=4))
        act(trainer, dtype, "restore", 2 * BLOCKS)
        losses.append(finish(trainer, dtype))
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < 0.05
    assert losses[0] != losses[1] and losses[0][-1] < losses[0][0]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-3), ("bfloat16", 0.05)])
def test_tuning_on_a_gpu_with_interruptions_follows_tuning_on_a_cpu(dtype: str, limit: float, tmp_path: Path) -> None:
    native("qwen3", tmp_path / "base")
    losses = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        model = load(tmp_path / "base", device=device, dtype=kind)
        assert isinstance(model, Decoder)
        trainer = trainer_for(model, arena=arena_for(model, 2 * BLOCKS), mirror=tmp_path / "mirror")
        trainer.open(new_job(tmp_path, name=device, epochs=3, micro_batch=40))
        act(trainer, device, "restore", 2 * BLOCKS)
        found = []
        while trainer.next_slice(device)[0] < trainer.steps(device).count:
            if device == "cuda":
                advance(trainer, device, 3)
                act(trainer, device, "release")
                advance(trainer, device, 4, keep=False)
                act(trainer, device, "offload")
                act(trainer, device, "restore", 2 * BLOCKS)
            if (loss := advance(trainer, device).loss) is not None:
                found.append(loss)
        trainer.close(device)
        losses.append(found)
        assert [report.record.loss for report in step_reports(trainer)] == found
    assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < limit


@pytest.mark.gpu
def test_units_take_no_more_workspace_than_was_measured(tmp_path: Path) -> None:
    native("llama", tmp_path / "base")
    model = load(tmp_path / "base", device="cuda", dtype="bfloat16")
    assert isinstance(model, Decoder)
    length = 120
    example = ([1 + n % 90 for n in range(length)], [1.0] * length)
    trainer = trainer_for(model, arena=arena_for(model, 4 * BLOCKS))
    trainer.open(new_job(tmp_path, examples=[example], batch_size=1, micro_batch=length))
    act(trainer, "job", "restore", 4 * BLOCKS)
    measured = workspace_bytes(model, length, 4)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        advance(trainer, "job", keep=False, lent=4 * BLOCKS)
        # Ids, weights and angles of the tokens, and the optimizer's sums of norms, are small beside it.
        assert torch.cuda.max_memory_allocated() - before <= 1.2 * measured
    assert measured > 0
