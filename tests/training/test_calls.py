"""Calls of a driven job: their files and results, whole or not at all; hostile files; the outline for the tuner."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.training_cost import PLAIN
from holdfast.training import calls, framed
from holdfast.training.call_files import CallFiles
from holdfast.training.calls import (
    CALL_FILE,
    Call,
    CallKind,
    CallResult,
    CallSteps,
    Datum,
    Limits,
    call_numbers,
    call_path,
    delete_calls,
    delete_results,
    read_call,
    read_result,
    result_numbers,
    result_path,
    write_call,
    write_result,
)
from holdfast.training.jobs import HEAD_ROWS, Hyperparameters, TrainingJob, Unit
from holdfast.training.losses import LOSSES, Adam, Loss

LIMITS = Limits(vocabulary=100, tokens=50)


def drawn_data(loss: str = "cross_entropy", count: int = 3, seed: int = 0) -> list[Datum]:
    """Data with all arrays of a loss."""
    chance = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = int(chance.integers(1, 40))
        tokens, targets = chance.integers(0, 100, (2, length))
        arrays = {name: chance.standard_normal(length).astype(np.float32) for name in LOSSES[loss].arrays}
        found.append(Datum(tokens, targets, arrays))
    return found


def scored(loss: str = "cross_entropy", **settings: float) -> Call:
    return Call(number=0, kind="forward_backward", loss=Loss(name=loss, settings=settings))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_call_and_its_data_come_back_as_they_were_written(tmp_path: Path, loss: str) -> None:
    data = drawn_data(loss)
    settings = {name: setting.default for name, setting in LOSSES[loss].settings.items()}
    call = replace(scored(loss, **settings), number=7)
    write_call(tmp_path, call, data)
    found, read = read_call(tmp_path, 7, LIMITS)
    assert found == call
    assert read.lengths == tuple(len(datum.tokens) for datum in data)
    np.testing.assert_array_equal(read.tokens, np.concatenate([datum.tokens for datum in data]))
    np.testing.assert_array_equal(read.targets, np.concatenate([datum.targets for datum in data]))
    assert {*read.arrays} == {*LOSSES[loss].arrays}
    for name, array in read.arrays.items():
        np.testing.assert_array_equal(array, np.concatenate([datum.arrays[name] for datum in data]))


@pytest.mark.parametrize(
    "call",
    [
        Call(
            number=0, kind="optimize", adam=Adam(learning_rate=0.5, beta1=0.1, beta2=0.2, eps=1e-3, grad_clip_norm=2.0)
        ),
        Call(number=0, kind="save", directory="/some/where"),
        Call(number=0, kind="load", directory="/some/where", moments=False),
        Call(number=0, kind="save_adapter", directory="/some/where"),
    ],
)
def test_a_call_without_data_comes_back_as_it_was_written(tmp_path: Path, call: Call) -> None:
    write_call(tmp_path, call)
    found, data = read_call(tmp_path, 0, LIMITS)
    assert found == call and data.lengths == () and not data.tokens.size


def test_a_large_call_is_mapped_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = drawn_data()
    write_call(tmp_path, scored(), data)
    assert not isinstance(read_call(tmp_path, 0, LIMITS)[1].tokens, np.memmap)
    monkeypatch.setattr(framed, "MAPPED", 100)
    monkeypatch.setattr(framed, "AT_A_TIME", 7)
    read = read_call(tmp_path, 0, LIMITS)[1]
    assert isinstance(read.tokens, np.memmap)
    np.testing.assert_array_equal(read.tokens, np.concatenate([datum.tokens for datum in data]))


def test_a_micro_batch_takes_its_own_data(tmp_path: Path) -> None:
    data = drawn_data("ppo", count=5)
    write_call(tmp_path, scored("ppo"), data)
    part = read_call(tmp_path, 0, LIMITS)[1].packed((2, 3))
    assert part.lengths == (len(data[2].tokens), len(data[3].tokens))
    np.testing.assert_array_equal(part.targets, np.concatenate([data[2].targets, data[3].targets]))
    wanted = np.concatenate([data[2].arrays["advantages"], data[3].arrays["advantages"]])
    np.testing.assert_array_equal(part.arrays["advantages"], wanted)


WRONG: dict[str, tuple[Datum, str]] = {
    "empty": (Datum([], [], {"weights": []}), "datum 1 has 0 tokens and 0 tokens"),
    "targets": (Datum([1, 2], [3], {"weights": [1.0, 1.0]}), "datum 1 has 2 tokens and 1 targets"),
    "weights": (Datum([1, 2], [3, 4], {"weights": [1.0]}), "datum 1 has 2 tokens and 1 weights"),
    "lists": (Datum([[1, 2]], [3, 4], {"weights": [1.0, 1.0]}), "tokens of datum 1 must be whole numbers in one list"),  # type: ignore[list-item]
    "ragged": (Datum([[1], [1, 2]], [3, 4], {"weights": [1.0, 1.0]}), "tokens of datum 1 must be whole numbers"),  # type: ignore[list-item]
    "fraction": (Datum([1.5, 2], [3, 4], {"weights": [1.0, 1.0]}), "tokens of datum 1 must be whole numbers"),  # type: ignore[list-item]
    "text": (Datum([1, 2], [3, 4], {"weights": ["a", "b"]}), "weights of datum 1 must be numbers"),  # type: ignore[list-item]
    "negative": (Datum([1, -2], [3, 4], {"weights": [1.0, 1.0]}), "tokens of datum 1 have -2 or 1, which is no token"),
    "huge": (Datum([1, 2], [3, 1 << 31], {"weights": [1.0, 1.0]}), "targets of datum 1 have 3 or 2147483648"),
    "wide": (Datum([1, 2], [3, 1 << 70], {"weights": [1.0, 1.0]}), "targets of datum 1 must be whole numbers"),
    "nan": (Datum([1, 2], [3, 4], {"weights": [1.0, float("nan")]}), "weights of datum 1 at position 1 is nan"),
    "overflow": (Datum([1, 2], [3, 4], {"weights": [1e300, 1.0]}), "weights of datum 1 at position 0 is inf"),
    "missing": (Datum([1, 2], [3, 4]), "datum 1 has no arrays; datum 0 has weights"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_a_loss_cannot_take_are_refused_by_their_number(tmp_path: Path, wrong: str) -> None:
    datum, message = WRONG[wrong]
    with pytest.raises(ValueError, match=message):
        write_call(tmp_path, scored(), [Datum([1], [2], {"weights": [1.0]}), datum])
    assert call_numbers(tmp_path) == []


def test_arrays_must_be_those_that_the_loss_reads(tmp_path: Path) -> None:
    datum = Datum([1], [2], {"advantages": [1.0]})
    with pytest.raises(ValueError, match="loss ppo needs logprobs for each position"):
        write_call(tmp_path, scored("ppo"), [datum])
    with pytest.raises(ValueError, match="loss cross_entropy reads weights; it cannot take advantages"):
        write_call(tmp_path, scored(), [datum])
    write_call(tmp_path, scored(), [Datum([1], [2])])
    assert read_call(tmp_path, 0, LIMITS)[1].arrays == {}


def test_a_sequence_ratio_needs_positions() -> None:
    arrays = {"logprobs": [-1.0, -1.0], "advantages": [1.0, 1.0], "sequence_ratio_mask": [0.0, 0.0]}
    with pytest.raises(ValueError, match="sequence_ratio_mask of datum 0 marks no position"):
        write_call(Path("/nowhere"), scored("gspo"), [Datum([1, 2], [2, 3], arrays)])


def test_calls_have_data_and_directories_where_their_kind_needs_them(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a call of kind forward needs data"):
        write_call(tmp_path, Call(number=0, kind="forward"))
    with pytest.raises(ValueError, match="a call of kind optimize has no data"):
        write_call(tmp_path, Call(number=0, kind="optimize"), drawn_data())
    for kind, directory in (("save", ""), ("load", ""), ("optimize", "/x"), ("forward", "/x")):
        with pytest.raises(ValueError, match=rf"a call of kind {kind} (needs a|has no) directory"):
            Call(number=0, kind=kind, directory=directory)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kind of the call is 'train'; choose from forward"):
        Call(number=0, kind="train")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of the call is -1"):
        Call(number=-1, kind="optimize")


def test_data_that_the_model_cannot_take_are_refused_when_they_are_read(tmp_path: Path) -> None:
    write_call(tmp_path, scored(), [Datum([1, 2], [2, 3]), Datum([1, 99], [98, 1])])
    assert read_call(tmp_path, 0, Limits(100, 2))[1].lengths == (2, 2)
    with pytest.raises(ValueError, match="datum 0 has 2 tokens; it may have 1"):
        read_call(tmp_path, 0, Limits(100, 1))
    with pytest.raises(ValueError, match="tokens of datum 1 have 99; the model has tokens 0 to 98"):
        read_call(tmp_path, 0, Limits(99, 2))
    write_call(tmp_path, scored(), [Datum([1, 2], [2, 3]), Datum([1, 2], [98, 1])])
    with pytest.raises(ValueError, match="targets of datum 1 have 98; the model has tokens 0 to 97"):
        read_call(tmp_path, 0, Limits(98, 2))


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_a_damaged_call_is_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, chance: random.Random) -> None:
    directory = tmp_path_factory.mktemp("job")
    write_call(directory, scored("ppo"), drawn_data("ppo"))
    path = call_path(directory, 0)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    if chance.random() < 0.5:
        at = chance.randrange(len(damaged))
        damaged[at] ^= 1 << chance.randrange(8)
    else:
        damaged = damaged[: chance.randrange(len(damaged))]
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"^00000000\.bin is .+") as error:
        read_call(directory, 0, LIMITS)
    assert "\n" not in str(error.value)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], body: Callable[[bytes], bytes] = bytes) -> None:
    """Change the header and the arrays of a call's file, with a right checksum."""
    data = path.read_bytes()
    _, _, length = framed.START.unpack(data[: framed.START.size])
    end = framed.START.size + length
    header = json.loads(data[framed.START.size : end])
    change(header)
    text = json.dumps(header).encode()
    checked = struct.pack("<I", len(text)) + text
    checked += bytes(-(framed.CHECKED + len(checked)) % framed.WIDTH) + body(data[end + -end % framed.WIDTH :])
    path.write_bytes(CALL_FILE + struct.pack("<I", zlib.crc32(checked)) + checked)


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "loss": (lambda header: header["call"]["loss"].update(name="custom"), "loss custom cannot be computed"),
    "setting": (lambda header: header["call"]["loss"].update(settings={"beta": 1}), "'beta' is no setting"),
    "kind": (lambda header: header["call"].update(kind="train"), "Invalid enum value 'train'"),
    "number": (lambda header: header["call"].update(number=1), "holds call 1"),
    "adam": (lambda header: header["call"]["adam"].update(beta1=1.0), "beta1 is 1.0"),
    "more": (lambda header: header.update(positions=1 << 60), "is damaged: "),
    "negative": (lambda header: header.update(data=-1), "is damaged: "),
    "twice": (lambda header: header.update(arrays=["weights", "weights"]), "is damaged: "),
    "array": (lambda header: header.update(arrays=["logprobs"]), "it cannot take logprobs"),
    "other": (lambda header: header.update(more=1), "contains unknown field"),
    "type": (lambda header: header.update(data="3"), r"Expected `int`, got `str`"),
    "nested": (lambda header: header.update(call=json.loads("[" * 900 + "]" * 900)), "is damaged: "),
}


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_header_is_refused_in_one_line(tmp_path: Path, hostile: str) -> None:
    change, message = HOSTILE[hostile]
    write_call(tmp_path, scored(), drawn_data())
    rewrite(call_path(tmp_path, 0), change)
    with pytest.raises(ValueError, match=message) as error:
        read_call(tmp_path, 0, LIMITS)
    assert "\n" not in str(error.value)


def test_hostile_numbers_are_refused_when_they_are_read(tmp_path: Path) -> None:
    for at, number, message in ((4, b"\x03\0\0\0", "its data do not fill"), (0, b"\0\0\0\0", "do not fill")):
        write_call(
            tmp_path, scored(), [Datum([1, 2], [3, 4], {"weights": [1.0, 1.0]}), Datum([5], [6], {"weights": [1]})]
        )
        rewrite(call_path(tmp_path, 0), lambda _: None, lambda body: body[:at] + number + body[at + 4 :])  # noqa: B023
        with pytest.raises(ValueError, match=message):
            read_call(tmp_path, 0, LIMITS)
    for at, number, message in (
        (1, struct.pack("<i", -5), "tokens have -5"),
        (5, b"\0\0\xc0\x7f", "weights have a number"),
    ):
        write_call(tmp_path, scored(), [Datum([1, 2], [3, 4], {"weights": [1.0, 1.0]})])
        rewrite(call_path(tmp_path, 0), lambda _: None, lambda body: body[: 4 * at] + number + body[4 * at + 4 :])  # noqa: B023
        with pytest.raises(ValueError, match=message):
            read_call(tmp_path, 0, LIMITS)


def test_a_file_of_another_kind_and_a_missing_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_call(tmp_path, 0, LIMITS)
    write_result(tmp_path, CallResult(0))
    call_path(tmp_path, 0).parent.mkdir()
    result_path(tmp_path, 0).rename(call_path(tmp_path, 0))
    with pytest.raises(ValueError, match="is a file of another kind"):
        read_call(tmp_path, 0, LIMITS)


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_call(tmp_path, scored(), [Datum([1], [2])])

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr("holdfast.training.framed.os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_call(tmp_path, scored(), [Datum([3], [4])])
    assert read_call(tmp_path, 0, LIMITS)[1].tokens.tolist() == [1]
    assert [path.name for path in call_path(tmp_path, 0).parent.iterdir()] == ["00000000.bin"]


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    logprobs = tuple(-np.random.default_rng(0).random(length).astype(np.float32) for length in (3, 1, 8))
    write_result(tmp_path, CallResult(3, {"loss:sum": 1.25, "updates": 2.0}, logprobs), durable=True)
    found = read_result(tmp_path, 3)
    assert found.number == 3 and found.metrics == {"loss:sum": 1.25, "updates": 2.0}
    for one, other in zip(found.logprobs, logprobs, strict=True):
        np.testing.assert_array_equal(one, other)
    write_result(tmp_path, CallResult(4))
    assert read_result(tmp_path, 4).logprobs == ()


def test_data_with_several_targets_for_a_token_come_back_as_they_were_written(tmp_path: Path) -> None:
    chance, data = np.random.default_rng(1), []
    for length in (4, 1, 7):
        tokens, targets = chance.integers(0, 100, length), chance.integers(0, 100, (length, 3))
        data.append(Datum(tokens, targets, {"weights": chance.standard_normal((length, 3)).astype(np.float32)}))
    write_call(tmp_path, scored(), data)
    part = read_call(tmp_path, 0, LIMITS)[1].packed((1, 2))
    np.testing.assert_array_equal(part.targets, np.concatenate([each.targets for each in data[1:]]))
    weights = np.concatenate([np.asarray(each.arrays["weights"]) for each in data[1:]])
    np.testing.assert_array_equal(part.arrays["weights"], weights)
    logprobs = [-chance.random((length, 3)).astype(np.float32) for length in (4, 1, 7)]
    write_result(tmp_path, CallResult(0, {}, logprobs))
    for one, other in zip(read_result(tmp_path, 0).logprobs, logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("weighted", [True, False])
def test_data_with_unequal_numbers_of_targets_are_filled_up_with_what_counts_for_nothing(
    tmp_path: Path, weighted: bool
) -> None:
    chance, data = np.random.default_rng(1), []
    for length, width in ((4, 3), (1, 1), (7, 2)):
        shape = (length, width) if width > 1 else (length,)
        weights = {"weights": chance.random(shape).astype(np.float32)} if weighted else {}
        data.append(Datum(chance.integers(0, 100, length), chance.integers(1, 100, shape), weights))
    write_call(tmp_path, scored(), data)
    read = read_call(tmp_path, 0, LIMITS)[1]
    assert read.widths == (3, 1, 2) and read.targets.shape == read.arrays["weights"].shape == (12, 3)
    filled = read.targets == 0
    assert filled.sum() == 2 + 7 and not read.arrays["weights"][filled].any() and read.packed((1, 2)).widths == (1, 2)
    assert weighted or (read.arrays["weights"] == ~filled).all()
    for one, targets, weights in zip(
        data, read.trimmed(read.targets), read.trimmed(read.arrays["weights"]), strict=True
    ):
        np.testing.assert_array_equal(targets, one.targets)
        np.testing.assert_array_equal(weights, one.arrays.get("weights", np.ones(np.shape(one.targets))))
    logprobs = [-chance.random(np.shape(each.targets)).astype(np.float32) for each in data]
    write_result(tmp_path, CallResult(0, {}, logprobs))
    for one, other in zip(read_result(tmp_path, 0).logprobs, logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("widths", [[3, 1], [3, 1, 0], [3, 1, 4], [2, 1, 2]])
def test_a_file_whose_numbers_of_targets_do_not_fit_is_damaged(
    tmp_path: Path, widths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [Datum([1], [[1, 2, 3]], {"weights": [[1, 1, 1]]}), *[Datum([1], [2], {"weights": [1]})] * 2]  # type: ignore[list-item]
    monkeypatch.setattr(calls, "_widths", lambda parts: (3, tuple(widths)))
    write_call(tmp_path, scored(), data)
    with pytest.raises(ValueError, match="is damaged: numbers of targets"):
        read_call(tmp_path, 0, LIMITS)


def test_a_call_of_one_target_is_written_as_an_older_engine_reads_it(tmp_path: Path) -> None:
    for targets in ([3, 4], [[3], [4]]):
        write_call(tmp_path, scored(), [Datum([1, 2], targets)])  # type: ignore[arg-type]
        assert b'"targets"' not in call_path(tmp_path, 0).read_bytes()
        assert read_call(tmp_path, 0, LIMITS)[1].targets.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("loss", "datum", "reason"),
    [
        (
            "cross_entropy",
            Datum([1, 2], [[3, 4], [5, 6]], {"weights": [1.0, 1.0]}),
            "weights of datum 0 have the shape",
        ),  # type: ignore[list-item]
        (
            "cross_entropy",
            Datum([1], [[3] * 129], {"weights": [[1.0] * 129]}),
            "129 targets for a token; there must be",
        ),  # type: ignore[list-item]
        ("cross_entropy", Datum([1], [[]]), "targets of datum 0 must be whole"),  # type: ignore[list-item]
        ("ppo", Datum([1], [[3, 4]], {"logprobs": [0.0], "advantages": [0.0]}), "targets of datum 0 must be whole"),  # type: ignore[list-item]
    ],
)
def test_targets_that_a_loss_cannot_take_are_refused(tmp_path: Path, loss: str, datum: Datum, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        write_call(tmp_path, scored(loss), [datum])
    assert call_numbers(tmp_path) == []


def test_a_result_that_is_not_finite_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="loss:sum is nan: training has diverged"):
        write_result(tmp_path, CallResult(0, {"loss:sum": float("nan")}))
    diverged = (np.zeros(2, np.float32), np.array([-np.inf], np.float32))
    with pytest.raises(ValueError, match="log probabilities of datum 1 are not finite"):
        write_result(tmp_path, CallResult(0, {}, diverged))
    assert result_numbers(tmp_path) == []


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    write_result(tmp_path, CallResult(0, {}, (np.zeros(4, np.float32),)))
    path = result_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"00000000\.bin is damaged: its checksum differs"):
        read_result(tmp_path, 0)


def test_deleting_leaves_later_calls_and_other_files(tmp_path: Path) -> None:
    assert call_numbers(tmp_path) == result_numbers(tmp_path) == []
    for number in (0, 1, 2, 10):
        write_call(tmp_path, Call(number=number, kind="optimize"))
        write_result(tmp_path, CallResult(number))
    (tmp_path / "calls" / "note.bin").touch()
    delete_calls(tmp_path, 2)
    delete_results(tmp_path, 10)
    assert call_numbers(tmp_path) == [2, 10] and result_numbers(tmp_path) == [10]
    assert (tmp_path / "calls" / "note.bin").exists()


@pytest.mark.parametrize("followed", [False, True])
def test_a_file_that_another_rank_may_still_read_outlasts_the_state_that_includes_its_call(
    tmp_path: Path, followed: bool
) -> None:
    for number in range(1, 5):
        write_call(tmp_path, Call(number=number, kind="optimize"))
    files = CallFiles(tmp_path, 2, followed=followed)
    files.forget(4)
    assert call_numbers(tmp_path) == ([2, 3, 4] if followed else [4])
    files.read_by_all(3)
    files.read_by_all(1)
    files.forget(4)
    assert call_numbers(tmp_path) == ([3, 4] if followed else [4])
    files.read_by_all(9)
    files.forget(4)
    assert call_numbers(tmp_path) == [4]


def steps_for(micro_batch: int = 2048, done: int = 0, alone: int = 0) -> CallSteps:
    chosen = Hyperparameters(epochs=1, batch_size=1, micro_batch=micro_batch)
    job = TrainingJob(id="job", hyperparameters=chosen, base_model="b", base_digest="d", data_digest="")
    return CallSteps(job, (PLAIN, PLAIN), done=done, alone=alone)


def kinds(steps: CallSteps, step: int) -> list[list[str]]:
    return [[unit.kind for unit in batch.units] for batch in steps.micro_batches(step)]


def call_of(number: int, kind: CallKind) -> Call:
    return Call(number=number, kind=kind, directory="/x" if kind in ("save", "save_adapter", "load") else "")


def test_calls_are_steps_and_their_units_are_those_of_jobs() -> None:
    steps = steps_for(micro_batch=HEAD_ROWS + 2)
    assert steps.count == 0 and steps.num_layers == 2
    lengths = (HEAD_ROWS, 2, 3, 5, HEAD_ROWS + 2)
    for number, kind in enumerate(("forward", "forward_backward", "optimize", "save", "load")):
        steps.add(call_of(number, kind), lengths if number < 2 else ())  # type: ignore[arg-type]
    assert steps.count == 5 and not steps.final
    halves = ["attention", "mlp"] * 2
    backward = ["mlp_backward", "attention_backward"] * 2
    assert kinds(steps, 0) == [halves + ["head"] * 2, [*halves, "head"], halves + ["head"] * 2]
    assert kinds(steps, 1) == [each + backward for each in kinds(steps, 0)]
    assert [batch.examples for batch in steps.micro_batches(1)] == [(0, 1), (2, 3), (4,)]
    assert [batch.lengths for batch in steps.micro_batches(1)] == [lengths[:2], lengths[2:4], lengths[4:]]
    assert [batch.validation for batch in steps.micro_batches(0)] == [True] * 3
    assert [batch.validation for batch in steps.micro_batches(1)] == [False] * 3
    for step in (2, 4):
        (update,) = steps.micro_batches(step)
        assert update.units == (Unit("optimizer", 0),) and update.tokens == 0
    assert steps.micro_batches(3) == ()
    assert not steps.validates(0) and not steps.checkpoint_after(3)
    assert steps.most_tokens == HEAD_ROWS + 2


def test_a_datum_above_the_micro_batch_is_one_by_itself() -> None:
    steps = steps_for(micro_batch=10, alone=30)
    steps.add(call_of(0, "forward_backward"), (4, 5, 30, 3, 7, 11, 12, 1))
    assert [batch.lengths for batch in steps.micro_batches(0)] == [(4, 5), (30,), (3, 7), (11,), (12,), (1,)]
    assert steps.most_tokens == 30
    with pytest.raises(ValueError, match="example 1 has 31 tokens; a micro-batch holds 30"):
        steps.add(call_of(1, "forward"), (3, 31))


def test_a_loss_in_two_passes_has_twice_the_units_of_the_head() -> None:
    steps = steps_for()
    for number, name in enumerate(("ppo", "gspo")):
        steps.add(Call(number=number, kind="forward_backward", loss=Loss(name=name)), (HEAD_ROWS + 1,))
    one, two = (steps.micro_batches(number)[0].units for number in range(2))
    assert [unit.number for unit in one if unit.kind == "head"] == [0, 1]
    assert [unit.number for unit in two if unit.kind == "head"] == [0, 1, 2, 3]
    assert len(two) == len(one) + 2


def test_calls_come_one_after_the_other_and_a_refused_one_is_an_empty_step() -> None:
    steps = steps_for(micro_batch=10, done=5)
    assert steps.count == 5
    with pytest.raises(ValueError, match="call 6 is not the next one, which is 5"):
        steps.add(call_of(6, "optimize"), ())
    with pytest.raises(ValueError, match="example 1 has 11 tokens; a micro-batch holds 10"):
        steps.add(call_of(5, "forward"), (3, 11))
    with pytest.raises(ValueError, match="call 4 is not the next one, which is 5"):
        steps.refuse(4)
    assert steps.count == 5
    steps.refuse(5)
    steps.add(call_of(6, "forward"), (3, 10))
    assert steps.micro_batches(5) == () and len(steps.micro_batches(6)) == 2
    assert steps.call(6).kind == "forward"
    with pytest.raises(KeyError):
        steps.call(5)
    steps.forget(6)
    assert steps.call(6).kind == "forward" and steps.count == 7
    with pytest.raises(KeyError):
        steps.micro_batches(5)


def test_a_new_folder_is_on_the_disk_with_its_first_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(framed, "sync_directory", synced.append)
    for number in range(2):
        write_call(tmp_path, Call(number=number, kind="optimize"))
        write_result(tmp_path, CallResult(number))
    assert synced == [tmp_path / "calls", tmp_path, tmp_path / "calls"]
