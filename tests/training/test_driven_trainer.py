"""Calls of driven jobs in the trainer: gradients over calls, saved states, and the same bits after any interruption."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.peft_files import read_peft
from holdfast.training import storage
from holdfast.training.call_files import calls_from, refusal_of, refuse_call
from holdfast.training.calls import Datum, call_numbers, read_result, result_numbers, result_path
from holdfast.training.done import CallReport, DoneCall, JobFailure
from holdfast.training.jobs import Hyperparameters, TrainingJob
from holdfast.training.losses import Adam
from holdfast.training.saved import SAVED_FILE
from holdfast.training.state import CallCounts, StateFiles, write_job
from holdfast.training.storage import Storage
from holdfast.training.trainer import Trainer
from tests.driven import Writer, bits, drawn_data
from tests.tuning import BASE, act, advance, arena_for, diverge, native, trainer_for, vectors_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native("qwen2", tmp_path_factory.mktemp("base"))[1]


def new_driven(directory: Path, name: str = "job", **chosen: Any) -> Writer:
    """A driven job's directory, ready to be opened."""
    writer = Writer(directory / name)
    values: dict[str, Any] = dict(epochs=1, batch_size=1, micro_batch=60, rank=4, alpha=8.0)
    job = TrainingJob(
        id=name, hyperparameters=Hyperparameters(**{**values, **chosen}), base_model="base", base_digest=BASE,
        threads=torch.get_num_threads(), driven=True,
    )  # fmt: skip
    write_job(writer.directory, job)
    return writer


def take(trainer: Trainer, writer: Writer, number: int) -> None:
    """Let a job take a call from its file. A load waits until all before it is on the disk, as in an engine."""
    job = writer.directory.name
    try:
        prepared = trainer.prepare_call(job, number)
        while prepared.loads and not trainer.settled(job):
            time.sleep(0.001)
        trainer.add_call(job, trainer.prepare_load(job, prepared) if prepared.loads else prepared)
    except ValueError as refusal:
        trainer.refuse_call(job, number, str(refusal))


def compute(trainer: Trainer, job: str = "job") -> None:
    """Compute all calls that a job has taken."""
    if not trainer.is_resident(job):
        act(trainer, job, "restore")
    while trainer.next_slice(job)[0] < trainer.steps(job).count:
        advance(trainer, job)


def run(trainer: Trainer, writer: Writer, *numbers: int) -> None:
    """Take calls and compute them, one after the other."""
    for number in numbers:
        take(trainer, writer, number)
        compute(trainer, writer.directory.name)


def results(trainer: Trainer, writer: Writer) -> dict[int, tuple[dict[str, float], list[bytes]]]:
    """The results of all calls of a job."""
    trainer.host_vector(writer.directory.name, "params")  # waits for the writer
    found = {number: read_result(writer.directory, number) for number in result_numbers(writer.directory)}
    return {number: ({**each.metrics}, bits(each.logprobs)) for number, each in found.items()}


def vectors(trainer: Trainer, job: str = "job") -> list[bytes]:
    return bits([vector.numpy() for vector in vectors_of(trainer, job)])


def test_gradients_add_up_over_calls_and_a_forward_leaves_them_alone(model: Decoder, tmp_path: Path) -> None:
    data = drawn_data(4, longest=20)
    found = []
    for name, parts in (("whole", [data]), ("parts", [data[:1], data[1:3], data[3:]])):
        trainer, writer = trainer_for(model), new_driven(tmp_path, name)
        trainer.open(writer.directory)
        numbers = []
        for part in parts:
            numbers += [writer.write("forward_backward", part), writer.write("forward", drawn_data(2, seed=9))]
        numbers.append(writer.write("optimize", adam=Adam(learning_rate=0.01)))
        run(trainer, writer, *numbers)
        params = vectors_of(trainer, name)[0]
        logprobs = [part for number in numbers[:-1:2] for part in read_result(writer.directory, number).logprobs]
        found.append((logprobs, params))
    (first, params), (second, others) = found
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(first, second, strict=True))
    assert torch.allclose(params, others, atol=2e-4)
    assert trainer.counts("parts") == (7, 1)


def test_a_datum_above_the_micro_batch_trains_as_one_within_it(model: Decoder, tmp_path: Path) -> None:
    data = [drawn_data(1, longest=20)[0], Datum([3 + at % 50 for at in range(100)], [4 + at % 50 for at in range(100)])]
    found = []
    for name, size, alone in (("within", 120, 0), ("above", 60, 100)):
        trainer, writer = trainer_for(model, alone=alone), new_driven(tmp_path, name, micro_batch=size)
        trainer.open(writer.directory)
        assert trainer.most_tokens(name) == max(size, alone)
        run(trainer, writer, writer.write("forward_backward", data), writer.write("optimize"))
        params = vectors_of(trainer, name)[0]  # waits for the writer
        found.append((read_result(writer.directory, 0).logprobs, params))
    (first, params), (second, others) = found
    assert all(np.allclose(one, other, atol=1e-5) for one, other in zip(first, second, strict=True))
    assert torch.allclose(params, others, atol=2e-4)
    too_long = writer.write("forward", [Datum([5] * 101, [6] * 101)])
    with pytest.raises(ValueError, match=r"datum 0 has 101 tokens; it may have 100 \(tuning_micro_batch\)"):
        trainer.prepare_call("above", too_long)


def test_an_update_clears_the_gradients_and_one_without_gradients_changes_nothing(
    model: Decoder, tmp_path: Path
) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.step()
    writer.write("optimize", adam=Adam(learning_rate=0.01, beta1=0.0))
    run(trainer, writer, 0, 1)
    before = vectors_of(trainer, "job")[0]
    run(trainer, writer, 2)
    assert torch.equal(vectors_of(trainer, "job")[0], before)
    assert trainer.counts("job") == (3, 2)


def test_calls_that_were_offloaded_or_cut_anywhere_give_the_same_bits(model: Decoder, tmp_path: Path) -> None:
    found = []
    for name, units in (("whole", None), ("cut", 3)):
        trainer, writer = trainer_for(model), new_driven(tmp_path, name)
        trainer.open(writer.directory)
        for seed in range(2):
            writer.write("forward_backward", drawn_data(4, seed=seed))
        writer.write("optimize")
        for number in range(3):
            take(trainer, writer, number)
        act(trainer, name, "restore")
        while trainer.next_slice(name)[0] < 3:
            advance(trainer, name, units, keep=units is None)
            if units is not None:
                act(trainer, name, "drop" if trainer.next_slice(name)[2] % 2 else "release")
                if not trainer.next_slice(name)[2]:
                    act(trainer, name, "offload")
                    act(trainer, name, "restore")
                    while trainer.next_slice(name)[2] < 4 and trainer.next_slice(name)[0] < 3:
                        micro_batch = trainer.next_slice(name)[:2]
                        advance(trainer, name)
                        if trainer.next_slice(name)[:2] != micro_batch:
                            break
        found.append((results(trainer, writer), vectors(trainer, name)))
    assert found[0] == found[1] and {*found[0][0]} == {0, 1, 2}


def test_a_job_that_is_opened_again_computes_the_calls_since_its_last_update_again_with_the_same_bits(
    model: Decoder, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    trainer, writer = trainer_for(model, mirror=mirror), new_driven(tmp_path)
    trainer.open(writer.directory)
    for seed in range(3):
        writer.step(seed=seed)
    writer.write("forward_backward", drawn_data(seed=7))
    run(trainer, writer, *range(7))
    before = results(trainer, writer)
    assert [report.number for report in trainer.reports() if isinstance(report, CallReport)] == [*range(7)]
    trainer.close("job")
    assert call_numbers(writer.directory) == [6], "the state on the disk includes the others"
    again = trainer_for(model, mirror=mirror)
    again.open(writer.directory, known=7)
    assert again.counts("job") == (6, 3) and calls_from(writer.directory, 6) == 7
    writer.write("optimize")
    writer.write("forward", drawn_data(seed=8))
    run(again, writer, 6, 7, 8)
    after = results(again, writer)
    assert {number: after[number] for number in before} == before
    assert [report.number for report in again.reports() if isinstance(report, CallReport)] == [7, 8]
    undisturbed, alone = trainer_for(model), new_driven(tmp_path / "alone")
    undisturbed.open(alone.directory)
    for seed in range(3):
        alone.step(seed=seed)
    alone.write("forward_backward", drawn_data(seed=7))
    alone.write("optimize")
    alone.write("forward", drawn_data(seed=8))
    run(undisturbed, alone, *range(9))
    assert results(undisturbed, alone) == after and vectors(undisturbed) == vectors(again)


@pytest.mark.parametrize("loss", ["gone", "empty", "zeros"])
def test_results_that_the_disk_lost_with_the_power_are_written_again_with_the_same_bits(
    model: Decoder, tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, synced = tmp_path / "mirror", list[str]()
    monkeypatch.setattr(storage, "DISK_SHARE", 0.0)
    trainer, writer = trainer_for(model, mirror=mirror), new_driven(tmp_path)
    trainer.open(writer.directory)
    for seed in range(3):
        writer.step(seed=seed)
    run(trainer, writer, *range(6))
    before = results(trainer, writer)
    shutil.rmtree(mirror)
    first = trainer_for(model).prepare(writer.directory).stored.step
    for number in range(first, 6):
        path = result_path(writer.directory, number)
        size = path.stat().st_size
        path.unlink()
        if loss != "gone":
            path.write_bytes(bytes(size if loss == "zeros" else 0))
    fsync = os.fsync

    def noted(file: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{file}").readlink()))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    again = trainer_for(model)
    again.open(writer.directory, known=6)
    run(again, writer, *range(first, 6))
    assert results(again, writer) == before and not again.reports(), "the owner has had these reports"
    again.close("job")
    assert first < 5 and {str(result_path(writer.directory, number)) for number in range(first, 6)} <= {*synced}


def test_a_token_with_several_targets_counts_as_the_sum_of_its_targets(model: Decoder, tmp_path: Path) -> None:
    (one,) = drawn_data(1, longest=20)
    weights = np.linspace(0.1, 1.0, 2 * len(one.tokens), dtype=np.float32).reshape(-1, 2)
    others = (np.asarray(one.targets) + 3) % 50
    both = Datum(one.tokens, np.stack([one.targets, others], 1), {"weights": weights})
    parts = [Datum(one.tokens, [one.targets, others][k], {"weights": weights[:, k]}) for k in range(2)]
    found = []
    for name, calls in (("both", [[both]]), ("parts", [[part] for part in parts])):
        trainer, writer = trainer_for(model), new_driven(tmp_path, name)
        trainer.open(writer.directory)
        numbers = [writer.write("forward_backward", data) for data in calls]
        numbers.append(writer.write("optimize", adam=Adam(learning_rate=0.01)))
        run(trainer, writer, *numbers)
        params = vectors_of(trainer, name)[0]
        found.append(([read_result(writer.directory, number) for number in numbers[:-1]], params))
    ((whole,), params), (two, expected) = found
    assert whole.logprobs[0].shape == (len(one.tokens), 2)
    np.testing.assert_allclose(whole.logprobs[0], np.stack([each.logprobs[0] for each in two], 1), atol=1e-5)
    assert whole.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in two), rel=1e-5)
    assert torch.allclose(params, expected, atol=2e-4)


def test_data_with_unequal_numbers_of_targets_train_as_each_does_alone(model: Decoder, tmp_path: Path) -> None:
    data = []
    for one, width in zip(drawn_data(3, longest=20), (3, 1, 2), strict=True):
        targets = np.stack([(np.asarray(one.targets) + k) % 50 for k in range(width)], 1)
        weights = np.linspace(0.1, 1.0, targets.size, dtype=np.float32).reshape(targets.shape)
        data.append(Datum(one.tokens, targets, {"weights": weights}))
    found = []
    for name, calls in (("together", [data]), ("alone", [[each] for each in data])):
        trainer, writer = trainer_for(model), new_driven(tmp_path, name)
        trainer.open(writer.directory)
        numbers = [writer.write("forward_backward", each) for each in calls]
        numbers.append(writer.write("optimize", adam=Adam(learning_rate=0.01)))
        run(trainer, writer, *numbers)
        params = vectors_of(trainer, name)[0]  # waits for the writer
        scored = [read_result(writer.directory, number) for number in numbers[:-1]]
        loss = sum(each.metrics["loss:sum"] for each in scored)
        found.append(([part for each in scored for part in each.logprobs], loss, params))
    (together, loss, params), (alone, expected, others) = found
    assert [part.shape[1:] for part in together] == [(3,), (), (2,)]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert loss == pytest.approx(expected, rel=1e-5) and torch.allclose(params, others, atol=2e-4)


def test_a_saved_state_is_loaded_by_another_job_and_both_go_on_with_the_same_bits(
    model: Decoder, tmp_path: Path
) -> None:
    place = str(tmp_path / "saved")
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.step()
    writer.write("save", directory=place)
    writer.step(seed=2)
    run(trainer, writer, *range(5))
    trainer.host_vector("job", "params")  # waits for the writer
    assert {path.name for path in Path(place).iterdir()} == {SAVED_FILE}
    other = new_driven(tmp_path, "other", seed=5)
    trainer.open(other.directory)
    act(trainer, "job", "offload")
    other.write("load", directory=place)
    other.step(seed=2)
    run(trainer, other, 0, 1, 2)
    assert vectors(trainer, "other") == [
        trainer.host_vector("job", name).numpy().tobytes() for name in ("params", "means", "variances")
    ]
    assert trainer.counts("other") == (3, 2)
    fresh = new_driven(tmp_path, "fresh", seed=6)
    trainer.open(fresh.directory)
    fresh.write("load", directory=place, moments=False)
    run(trainer, fresh, 0)
    assert not any(each.any() for each in vectors_of(trainer, "fresh")[1:])
    assert trainer.counts("fresh") == (1, 0)


def test_saves_store_the_vectors_of_their_turn_even_if_updates_follow_at_once(model: Decoder, tmp_path: Path) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    for number in range(4):
        writer.step(seed=number)
        writer.write("save", directory=str(tmp_path / f"saved-{number}"))
        writer.write("save_adapter", directory=str(tmp_path / f"adapter-{number}"))
    for number in range(16):
        take(trainer, writer, number)
    compute(trainer)
    trainer.host_vector("job", "params")
    params = []
    for number in range(4):
        other = new_driven(tmp_path, f"reads-{number}")
        other.write("load", directory=str(tmp_path / f"saved-{number}"))
        act(trainer, "job", "offload") if trainer.is_resident("job") else None
        trainer.open(other.directory)
        run(trainer, other, 0)
        params.append(vectors(trainer, f"reads-{number}")[0])
        weights = read_peft(tmp_path / f"adapter-{number}", model.decoder)
        assert len(weights.pairs) == 2 * 7
    assert len({*params}) == 4
    assert params[-1] == trainer.host_vector("job", "params").numpy().tobytes()


def test_a_load_of_another_shape_or_of_nothing_is_refused_with_the_reason(model: Decoder, tmp_path: Path) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.write("save", directory=str(tmp_path / "saved"))
    run(trainer, writer, 0)
    trainer.close("job")
    other = new_driven(tmp_path, "other", rank=2)
    trainer.open(other.directory)
    other.write("load", directory=str(tmp_path / "saved"))
    other.write("load", directory=str(tmp_path / "nowhere"))
    before = trainer.host_vector("other", "params").clone()
    run(trainer, other, 0, 1)
    trainer.host_vector("other", "params")
    reports = [report for report in trainer.reports() if isinstance(report, CallReport)]
    assert [report.refusal for report in reports if report.job == "other"] == [
        "rank of the saved state is 4; the job's is 2", "the saved state cannot be read: No such file or directory"
    ]  # fmt: skip
    assert torch.equal(vectors_of(trainer, "other")[0], before)


def test_a_save_that_cannot_be_written_is_refused_alone_and_the_job_goes_on(model: Decoder, tmp_path: Path) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.write("save", directory=str(tmp_path / "nowhere" / "saved"))
    writer.write("save_adapter", directory=str(tmp_path / "nowhere" / "adapter"))
    writer.write("forward", drawn_data())
    run(trainer, writer, 0, 1, 2)
    assert {*results(trainer, writer)} == {2}
    refusals = [report.refusal for report in trainer.reports() if isinstance(report, CallReport)]
    assert refusals == ["it cannot be saved: No such file or directory"] * 2 + [""]
    assert refusal_of(writer.directory, 0) == refusal_of(writer.directory, 1) == refusals[0]


def test_an_update_that_diverges_fails_the_job_which_goes_on_without_it(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.step()
    writer.step(seed=2)
    run(trainer, writer, 0, 1)
    good = vectors(trainer)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.training.sources.adamw_step", diverge)
        run(trainer, writer, 2, 3)
        trainer.host_vector("job", "params")
    (failure,) = [report for report in trainer.reports() if isinstance(report, JobFailure)]
    assert "3" in failure.reason and "lower the learning rate" in failure.reason
    assert 3 not in results(trainer, writer), "its owner has no result of it"
    trainer.close("job")
    again = trainer_for(model)
    again.open(writer.directory, known=2)
    assert again.counts("job") == (2, 1) and refusal_of(writer.directory, 3)
    run(again, writer, 2, 3)
    assert vectors(again) == good
    refusals = [report.refusal for report in again.reports() if isinstance(report, CallReport)]
    assert refusals[0] == "" and "lower the learning rate" in refusals[1]


def test_an_update_is_reported_before_a_state_holds_it_and_a_kill_then_loses_nothing(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.step()
    writer.step(seed=2)
    monkeypatch.setattr(Storage, "_store_state", lambda *_: None)  # the writer is too late
    run(trainer, writer, 0, 1, 2, 3)
    first = results(trainer, writer)
    assert [report.number for report in trainer.reports() if isinstance(report, CallReport)] == [0, 1, 2, 3]
    assert first[1][0]["grad_norm"] > 0.0
    expected = vectors(trainer)
    monkeypatch.undo()
    again = trainer_for(model)  # of a killed engine, only the files are left
    again.open(writer.directory, known=4)
    assert again.counts("job") == (0, 0)
    run(again, writer, 0, 1, 2, 3)
    assert vectors(again) == expected and results(again, writer) == first
    assert not [report for report in again.reports() if isinstance(report, CallReport)], "its owner has them all"


def test_a_state_is_stored_only_after_the_results_of_its_calls(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.step()
    slow, found = threading.Event(), list[bool]()
    write, write_files = DoneCall.write, Storage._write_files

    def late(done: DoneCall) -> None:
        slow.wait(60)
        write(done)

    def look(storage: Storage, *given: Any) -> bool:
        found.append({*result_numbers(writer.directory)} == {0, 1})
        return write_files(storage, *given)

    monkeypatch.setattr(DoneCall, "write", late)
    monkeypatch.setattr(Storage, "_write_files", look)
    run(trainer, writer, 0, 1)
    time.sleep(0.1)  # the writer has the state by now
    assert not found
    slow.set()
    trainer.host_vector("job", "params")
    assert found and all(found)


def test_results_that_are_not_finite_fail_the_job_and_mark_their_call(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    writer.write("forward_backward", drawn_data())
    head = type(trainer._jobs["job"].halves).head
    monkeypatch.setattr(
        "holdfast.lm.models.halves.Halves.head",
        lambda *args, **named: [each + torch.nan for each in head(*args, **named)],
    )
    run(trainer, writer, 0)
    trainer.host_vector("job", "params")
    (failure,) = trainer.reports()
    assert isinstance(failure, JobFailure) and "call 0: " in failure.reason and "diverged" in failure.reason
    assert "diverged" in refusal_of(writer.directory, 0) and not result_numbers(writer.directory)


def test_a_state_on_the_disk_says_how_many_calls_and_updates_it_includes(model: Decoder, tmp_path: Path) -> None:
    trainer, writer = trainer_for(model), new_driven(tmp_path)
    trainer.open(writer.directory)
    (writer.directory / "calls").mkdir()
    refuse_call(writer.directory, 0, "bad\ndata")
    writer.next = 1
    writer.step()
    writer.write("forward", drawn_data())
    run(trainer, writer, 0, 1, 2, 3)
    trainer.close("job")
    files = StateFiles(
        writer.directory, trainer_job(writer).digest(), durable=False, ledger=CallCounts
    )  # fmt: skip
    state = files.read()
    assert state is not None and state.ledger == CallCounts(3, 1) and state.records == ()
    assert refusal_of(writer.directory, 0) == "bad data" and call_numbers(writer.directory) == [3]


def trainer_job(writer: Writer) -> TrainingJob:
    return TrainingJob.from_json((writer.directory / "job.json").read_text())


# Interrupted at random

PLAN: list[tuple[str, int]] = [
    ("forward_backward", 1), ("forward_backward", 2), ("optimize", 0), ("save", 0), ("forward", 3),
    ("forward_backward", 4), ("optimize", 0), ("load", 0), ("forward_backward", 5), ("save_adapter", 0),
    ("optimize", 0), ("forward", 6),
]  # fmt: skip


def write_plan(writer: Writer, places: Path, upto: int) -> None:
    """Write the calls of PLAN before a number."""
    while writer.next < upto:
        kind, seed = PLAN[writer.next]
        data = drawn_data(4, seed=seed) if seed else ()
        if kind in ("save", "load", "save_adapter"):
            name = "adapter" if kind == "save_adapter" else "saved"
            writer.write(kind, directory=str(places / f"{writer.directory.name}-{name}"))
        else:
            writer.write(kind, data, adam=Adam(learning_rate=0.01))


@pytest.fixture(scope="module")
def undisturbed(model: Decoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[bytes]]:
    """The results and vectors of PLAN when it runs alone."""
    root = tmp_path_factory.mktemp("alone")
    trainer, writer = trainer_for(model), new_driven(root)
    trainer.open(writer.directory)
    write_plan(writer, root, len(PLAN))
    run(trainer, writer, *range(len(PLAN)))
    return results(trainer, writer), vectors(trainer)


@settings(max_examples=settings().max_examples * 4 // 25)  # each is a long history
@given(seed=st.integers(0, 1 << 32))
def test_two_driven_jobs_interrupted_at_random_give_the_bits_of_each_alone(
    model: Decoder,
    undisturbed: tuple[Any, list[bytes]],
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
) -> None:
    """Releases, drops, offloads, switches between jobs, a new engine, calls early or late."""
    chance = random.Random(seed)
    root, arena = tmp_path_factory.mktemp("jobs"), arena_for(model)
    writers = {name: new_driven(root, name) for name in ("one", "two")}
    mirror = root / "mirror"
    trainer = trainer_for(model, arena=arena, mirror=mirror)
    known = dict.fromkeys(writers, 0)
    taken: dict[str, int] = {}
    resident: str | None = None

    def open_all() -> None:
        for name, writer in writers.items():
            trainer.open(writer.directory, known=known[name])
            taken[name] = trainer.counts(name)[0]
            known[name] = max(known[name], taken[name])

    def note() -> None:
        for report in trainer.reports():
            assert isinstance(report, CallReport) and report.number == known[report.job] and not report.refusal
            known[report.job] += 1

    open_all()
    while any(trainer.next_slice(name)[0] < len(PLAN) for name in writers):
        event = chance.random()
        name = resident or chance.choice(sorted(writers))
        writer, step = writers[name], trainer.next_slice(name)[0]
        if event < 0.35 and taken[name] < len(PLAN):
            write_plan(writer, root, max(writer.next, taken[name] + 1))
            if PLAN[taken[name]][0] != "load" or (step == taken[name] and trainer.settled(name)):
                take(trainer, writer, taken[name])
                taken[name] += 1
        elif resident is None:
            act(trainer, name, "restore")
            resident = name
        elif event < 0.8:
            if step < trainer.steps(name).count:
                advance(trainer, name, chance.choice([1, 2, 5, None]), keep=chance.random() < 0.6)
        elif event < 0.85:
            act(trainer, name, chance.choice(["release", "drop"]))
        elif event < 0.97:
            act(trainer, name, "offload")
            resident = None
            for plane in arena.planes if event > 0.93 else ():
                plane.fill_(chance.randrange(256))
        else:
            trainer.shut_down()
            note()
            trainer, resident = trainer_for(model, arena=arena, mirror=mirror), None
            open_all()
        note()
    for name, writer in writers.items():
        if resident is not None:
            act(trainer, resident, "offload")
            resident = None
        assert results(trainer, writer) == undisturbed[0]
        assert (
            bits([trainer.host_vector(name, kind).numpy() for kind in ("params", "means", "variances")])
            == (undisturbed[1])
        )


def drive_in_a_child(model: Decoder, writer: Writer, mirror: Path, known: int, pipe: int) -> int:
    """Start a process that computes all calls on the disk and writes each report to a pipe. Returns its process id."""
    with warnings.catch_warnings():
        # The child uses no lock that another thread of this process might hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    try:

        def tell() -> None:
            for report in trainer.reports():
                assert isinstance(report, CallReport)
                os.write(pipe, f"{json.dumps(report.number)}\n".encode())

        trainer = trainer_for(model, mirror=mirror)
        trainer.open(writer.directory, known=known)
        first, _ = trainer.counts("job")
        os.write(pipe, f"{json.dumps([first])}\n".encode())
        act(trainer, "job", "restore")
        for number in range(first, len(PLAN)):
            take(trainer, writer, number)
            while trainer.next_slice("job")[0] < trainer.steps("job").count:
                advance(trainer, "job", 3)
                tell()
        trainer.shut_down()
        tell()
        os._exit(0)
    finally:
        os._exit(1)


def test_an_engine_killed_at_random_points_goes_on_with_the_same_bits(
    model: Decoder, undisturbed: tuple[Any, list[bytes]], tmp_path: Path
) -> None:
    chance, mirror = random.Random(3), tmp_path / "mirror"
    writer, known, kills = new_driven(tmp_path), 0, 0
    write_plan(writer, tmp_path, len(PLAN))
    ended = False
    while not ended:  # a kill after the last report may come before its state
        reading, writing = os.pipe()
        child = drive_in_a_child(model, writer, mirror, known, writing)
        os.close(writing)
        with os.fdopen(reading) as reports:
            (first,) = json.loads(reports.readline())
            known = max(known, first)
            until = known + chance.randint(1, 3) if kills < 6 else len(PLAN) + 1
            for line in reports:
                assert json.loads(line) == known, "each call is reported once, in order"
                known += 1
                if known == until:
                    time.sleep(chance.random() * 0.01)
                    os.kill(child, signal.SIGKILL)
                    kills += 1
        ended = os.waitpid(child, 0)[1] == 0
    assert known == len(PLAN)
    trainer = trainer_for(model, mirror=mirror)
    trainer.open(writer.directory, known=known)
    first, updates = trainer.counts("job")
    run(trainer, writer, *range(first, len(PLAN)))
    assert kills and (first, updates) == (11, 2)
    assert results(trainer, writer) == undisturbed[0] and vectors(trainer) == undisturbed[1]
