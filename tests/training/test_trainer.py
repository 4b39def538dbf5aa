"""The trainer: slices, lending and reclaiming memory, and refused calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.models.peft_files import read_peft
from holdfast.lm.parts.tuning.values import TrainingSlice
from holdfast.training.data import EXAMPLES_FILE, VALIDATION_FILE, write_examples
from holdfast.training.iteration import arena_of, workspace_bytes
from holdfast.training.trainer import Trainer
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
    step_reports,
    trainer_for,
    vectors_of,
)


def test_a_new_job_begins_from_its_seed(model: Decoder, tmp_path: Path) -> None:
    trainer = trainer_for(model)
    found = []
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        trainer.open(new_job(tmp_path, name=name, seed=seed))
        found.append(trainer.host_vector(name, "params"))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


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


def test_a_dora_begins_at_the_base_model_and_learns_the_lengths_of_rows(model: Decoder, tmp_path: Path) -> None:
    losses: dict[bool, list[float]] = {}
    for dora in (False, True):
        trainer = trainer_for(model)
        trainer.open(new_job(tmp_path, name=str(dora), dora=dora))
        act(trainer, str(dora), "restore")
        losses[dora] = finish(trainer, str(dora))
        trainer.close(str(dora))
    assert losses[True][0] == pytest.approx(losses[False][0], rel=1e-5) and losses[True][1:] != losses[False][1:]
    newest = tmp_path / "True" / "checkpoints" / "6"
    assert json.loads((newest / "adapter_config.json").read_text())["use_dora"] is True
    pair = read_peft(newest, model.decoder).pairs[1, "o"]
    rows = model.layers[1].o
    assert isinstance(rows, torch.Tensor) and pair.magnitude is not None
    change = (pair.magnitude / rows.norm(dim=1) - 1).abs()
    assert 0.001 < float(change.max()) < 0.5, "magnitudes are near the norms that they began at"


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


@pytest.mark.parametrize("change", ["base", "data", "validation", "twice", "none"])
def test_a_job_that_cannot_go_on_is_refused_with_the_reason(model: Decoder, change: str, tmp_path: Path) -> None:
    directory = new_job(tmp_path, validation=drawn_examples(3, seed=9))
    trainer = trainer_for(model)
    prepare: dict[str, tuple[Callable[[], object], str]] = {
        "base": (lambda: None, "begun over another base model"),
        "data": (lambda: write_examples(directory / EXAMPLES_FILE, drawn_examples(9)), "not the file that the job"),
        "validation": (
            lambda: write_examples(directory / VALIDATION_FILE, drawn_examples(3, seed=8)),
            f"{VALIDATION_FILE} of job .* is not the file that the job",
        ),
        "twice": (lambda: trainer.open(directory), "open already"),
        "none": (lambda: (directory / "job.json").write_text("{}"), "not a job"),
    }
    before, words = prepare[change]
    before()
    if change == "base":
        trainer = Trainer(model, arena_for(model), base_digest="another", mirror=None)
    with pytest.raises(ValueError, match=words):
        trainer.open(directory)


@pytest.mark.parametrize("held_out", [False, True])
def test_an_example_that_is_longer_than_the_models_context_is_refused_with_both_lengths(
    model: Decoder, held_out: bool, tmp_path: Path
) -> None:
    most = model.decoder.max_positions
    fits, long = ([([1] * length, [1.0] * length)] for length in (most, most + 1))
    trainer = trainer_for(model)
    trainer.open(new_job(tmp_path, name="fits", examples=fits, validation=fits, micro_batch=most))
    examples, validation = (fits, long) if held_out else (long, fits)
    job = new_job(tmp_path, name="long", examples=examples, validation=validation, micro_batch=most + 1)
    with pytest.raises(ValueError, match=rf"has {most + 1} tokens; the model was made for {most}"):
        trainer.open(job)


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
        # Ids, weights and angles of the tokens, and the optimizer's sums of norms, are small in comparison.
        assert torch.cuda.max_memory_allocated() - before <= 1.2 * measured
    assert measured > 0
