"""Training over ranks that share a model: the losses and the adapter of one rank, and one state for any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution.stage_link import GlooLink
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import decoder_spec, load
from holdfast.lm.models.peft_files import LoraPair, read_peft
from holdfast.training.iteration import arena_of
from holdfast.training.trainer import Trainer
from tests.long import long_unless, then_long
from tests.ranks import Rank, in_ranks
from tests.tuning import BASE, act, advance, cache_of, drawn_examples, finish, native, new_job

LAYOUTS = [Layout(tp=2), Layout(tp=4), Layout(pp=2), Layout(tp=2, pp=2), Layout(pp=3)]
SIZES: dict[str, Any] = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
FAMILIES: dict[str, tuple[str, ...]] = {
    "phi3": ("qkv", "o", "gate_up", "down"),
    "gemma2": ("q", "k", "v", "o", "gate", "up", "down"),
    "opt": ("q", "k", "v", "o", "up", "down"),
    "falcon-new": ("qkv", "o", "up", "down"),
    "mixtral": ("q", "k", "v", "o"),
    "olmo2": ("q", "k", "v", "o", "gate", "up", "down"),
    "nemotron": ("q", "k", "v", "o", "up", "down"),
}
"""Families and the modules that they are tuned in."""
How = Callable[[Trainer, str], list[float]]
Pairs = dict[tuple[int, str], LoraPair]
OPEN: list[object] = []
"""Links whose messages may still be on their way."""


@pytest.fixture(scope="module", params=then_long(1, ["llama", "qwen3"]))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base") / "model"
    native(request.param, directory, **SIZES)
    return directory


def trainer_of(rank: Rank, base: Path) -> Trainer:
    """The trainer of one rank."""
    layout = rank.layout
    group = rank.group()
    link = GlooLink(rank.processes(range(layout.ranks)), layout, rank.rank) if layout.pp > 1 else None
    OPEN.append(link)
    model = load(base, device="cpu", dtype="float32", layout=layout, rank=rank.rank, group=group)
    assert isinstance(model, Decoder)
    arena = arena_of(cache_of(model), shared=layout.ranks > 1)
    return Trainer(model, arena, base_digest=BASE, mirror=None, link=link, leads=rank.rank == 0)


def interrupted(trainer: Trainer, job: str) -> list[float]:
    """The losses of a job whose slices are cut anywhere, and which is dropped, released and offloaded on its way."""
    losses, turn = [], 0
    while trainer.next_slice(job)[0] < trainer.steps(job).count:
        turn += 1
        report = advance(trainer, job, 1 + turn % 5, keep=turn % 3 > 0)
        if report.loss is not None:
            losses.append(report.loss)
        elif turn % 7 == 0:
            act(trainer, job, "release")
        elif turn % 11 == 0:
            act(trainer, job, "drop")
        elif turn % 13 == 0:
            act(trainer, job, "offload")
            act(trainer, job, "restore")
    return losses


def run(layout: Layout, base: Path, directory: Path, how: How) -> list[float]:
    """Open a job by this layout and restore it; the losses that `how` gives. The job is closed."""

    def work(rank: Rank) -> list[float]:
        torch.set_num_threads(1)
        trainer = trainer_of(rank, base)
        job = trainer.open(directory).job.id
        act(trainer, job, "restore")
        losses = how(trainer, job)
        trainer.close(job)
        assert not rank.rank or not trainer.reports()
        return losses

    return in_ranks(layout, work)[0]


def adapter_of(base: Path, directory: Path) -> Pairs:
    """The newest adapter of a job."""
    newest = max((directory / "checkpoints").iterdir(), key=lambda path: int(path.name))
    return dict(read_peft(newest, decoder_spec(base)).pairs)


def trained(layout: Layout, base: Path, directory: Path, how: How) -> tuple[list[float], Pairs]:
    """The losses of a job by this layout, and the adapter that rank 0 has written."""
    return run(layout, base, directory, how), adapter_of(base, directory)


def assert_equal_pairs(found: Pairs, expected: Pairs) -> None:
    assert found.keys() == expected.keys()
    for key, pair in expected.items():
        for one, other in zip(found[key][:2], pair[:2], strict=True):
            torch.testing.assert_close(one, other, atol=5e-4, rtol=1e-3)
        assert (found[key].magnitude is None) is (pair.magnitude is None)
        if pair.magnitude is not None:
            torch.testing.assert_close(found[key].magnitude, pair.magnitude, atol=5e-4, rtol=1e-3)


@pytest.mark.always("llama--tp4", "llama--tp2-pp2")
@pytest.mark.parametrize(
    ("base", "layout"),
    then_long(
        4,
        [
            *(("llama", layout) for layout in (LAYOUTS[1], *LAYOUTS[3:])),  # the others are parts of these
            ("qwen3", LAYOUTS[3]),
            *(("llama", layout) for layout in (LAYOUTS[0], LAYOUTS[2])),
            *(("qwen3", layout) for layout in LAYOUTS if layout != LAYOUTS[3]),
        ],
    ),
    ids=lambda each: each if isinstance(each, str) else each.suffix,
    indirect=["base"],
)
def test_losses_and_the_adapter_are_those_of_one_rank(layout: Layout, base: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = dict(validation=drawn_examples(5, seed=2), epochs=3)
    expected, pairs = trained(Layout(), base, new_job(tmp_path, name="alone", **options), finish)
    found, theirs = trained(layout, base, new_job(tmp_path, name="shared", **options), interrupted)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0]
    assert_equal_pairs(theirs, pairs)


@pytest.mark.always("phi3-*", "gemma2-*", "falcon-new-*", "mixtral-*")
@pytest.mark.parametrize(("family", "modules"), FAMILIES.items())
def test_other_families_are_tuned_alike(family: str, modules: tuple[str, ...], tmp_path: Path) -> None:
    native(family, tmp_path / "base")
    jobs = [new_job(tmp_path, name=name, modules=modules) for name in ("alone", "shared")]
    expected, pairs = trained(Layout(), tmp_path / "base", jobs[0], finish)
    found, theirs = trained(Layout(tp=2, pp=2), tmp_path / "base", jobs[1], interrupted)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_equal_pairs(theirs, pairs)


@pytest.mark.always("-tp4")
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4)], ids=lambda layout: layout.suffix)
def test_norms_over_the_heads_of_all_ranks_are_tuned_as_on_one_rank(layout: Layout, tmp_path: Path) -> None:
    """With four ranks, two hold each of the two KV heads."""
    native("olmo2", tmp_path / "base", initializer_range=0.5)
    jobs = [new_job(tmp_path, name=name, modules=("q", "k", "v")) for name in ("alone", "shared")]
    expected, pairs = trained(Layout(), tmp_path / "base", jobs[0], finish)
    found, theirs = trained(layout, tmp_path / "base", jobs[1], interrupted)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_equal_pairs(theirs, pairs)


@pytest.mark.always("llama--tp4")
@pytest.mark.parametrize("layout", long_unless(lambda at: at in (1, 3), LAYOUTS), ids=lambda layout: layout.suffix)
@pytest.mark.parametrize("family", then_long(1, ["llama", "phi3"]))
def test_a_dora_is_tuned_as_on_one_rank(family: str, layout: Layout, tmp_path: Path) -> None:
    """With four ranks, two hold each KV head; each rank has a part of each row of o and down."""
    native(family, tmp_path / "base", **SIZES)
    modules = FAMILIES.get(family, ("q", "k", "v", "o", "gate", "up", "down"))
    jobs = [new_job(tmp_path, name=name, modules=modules, dora=True) for name in ("alone", "shared")]
    expected, pairs = trained(Layout(), tmp_path / "base", jobs[0], finish)
    found, theirs = trained(layout, tmp_path / "base", jobs[1], interrupted)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_equal_pairs(theirs, pairs)


def test_a_job_goes_on_under_another_layout(base: Path, tmp_path: Path) -> None:
    """The vectors in its state are whole, whichever ranks computed them."""
    expected, pairs = trained(Layout(), base, new_job(tmp_path, name="alone"), finish)
    directory, found = new_job(tmp_path, name="moved"), []
    for layout in (Layout(tp=2), Layout(pp=2), Layout(tp=2, pp=2)):
        found += run(layout, base, directory, two_steps)
    assert found == pytest.approx(expected, rel=1e-4)
    assert_equal_pairs(adapter_of(base, directory), pairs)


def two_steps(trainer: Trainer, job: str) -> list[float]:
    """The losses of the next two steps of a job."""
    losses: list[float] = []
    while len(losses) < 2:
        if (loss := advance(trainer, job).loss) is not None:
            losses.append(loss)
    return losses
