"""TuningHandler: the micro-batch that it chooses for a job, and the jobs that it refuses."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.engine.process.parts.tuning_handler import Notice, TuningHandler, TuningRules
from holdfast.lm.parts.tuning.messages import JobRefused, JobStart
from holdfast.training.data import EXAMPLES_FILE, digest_of, write_examples
from holdfast.training.jobs import Hyperparameters
from holdfast.training.state import JOB_FILE


def rules_of(target: float | None = None, bound: float = 1.0, *, takes_dora: bool = True) -> TuningRules:
    return TuningRules(
        base_model="m", base_digest="0", micro_batch=None, target=target, bound=bound, max_rank=16,
        takes_dora=takes_dora, modules=("q", "v"), dora_modules=("q", "v"), threads=1,
    )  # fmt: skip


def chosen(
    longest: int,
    most: int,
    *,
    target: float | None = None,
    bound: float = 1.0,
    wanted: int = 1024,
    blocks: int = 1 << 20,
    seconds: float = 0.0,
) -> int:
    """The micro-batch of a job whose tokens take `seconds` each and a tenth of a block each."""
    cost = SimpleNamespace(
        auto_micro_batch=lambda target, longest: max(wanted, longest), iteration=lambda lengths: seconds * sum(lengths)
    )
    tuner: Any = SimpleNamespace(
        cost=cost, max_blocks=blocks, max_unit_seconds=0.5, largest_unit=lambda tokens: seconds * tokens
    )
    trainer: Any = SimpleNamespace(blocks_for=lambda given, tokens: -(-tokens // 10))
    rules = rules_of(target, bound)
    handler = TuningHandler(tuner, trainer, None, rules, Notice(lambda: None))  # type: ignore[arg-type]
    return handler._sized(Hyperparameters(epochs=1, batch_size=8), longest, most=most).micro_batch


@pytest.mark.parametrize(("longest", "most", "micro_batch"), [(100, 5000, 512), (300, 5000, 512), (600, 5000, 1024)])
def test_a_micro_batch_is_halved_until_memory_holds_it_but_never_below_the_longest_example(
    longest: int, most: int, micro_batch: int
) -> None:
    assert chosen(longest, most, blocks=60) == micro_batch


def test_no_memory_is_counted_for_more_tokens_than_any_step_has() -> None:
    assert chosen(50, 400, blocks=40) == 1024
    assert chosen(50, 401, blocks=40) == 256


def test_without_a_target_an_iteration_takes_no_longer_than_the_bound() -> None:
    assert chosen(50, 5000, bound=1.0, seconds=1 / 600) == 512
    assert chosen(50, 5000, bound=2.0, seconds=1 / 600) == 1024
    for bound in (0.0, inf):
        assert chosen(50, 5000, bound=bound, seconds=1 / 600) == 512, "as long as by default"


def test_with_a_target_the_largest_unit_fits_it_whatever_the_bound_is() -> None:
    assert chosen(50, 5000, target=0.1, bound=0.01, seconds=1 / 600) == 256
    assert chosen(50, 5000, target=0.1, bound=0.01, seconds=1 / 6000) == 1024


@pytest.mark.parametrize("takes_dora", [True, False])
def test_a_dora_is_refused_before_it_is_trained_where_it_could_not_be_served(takes_dora: bool, tmp_path: Path) -> None:
    prepared: list[Path] = []
    trainer: Any = SimpleNamespace(prepare=lambda directory, known: prepared.append(directory))
    handler = TuningHandler(None, trainer, None, rules_of(takes_dora=takes_dora), Notice(lambda: None))  # type: ignore[arg-type]
    digest = write_examples(tmp_path / EXAMPLES_FILE, [([1, 2, 3], [1.0] * 3)])
    job = JobStart(id="j", directory=str(tmp_path), name="n", data_digest=digest, dora=True, micro_batch=16)
    refused = pytest.raises(ValueError, match=r"the job makes a DoRA, .* start it with dora")
    with nullcontext() if takes_dora else refused:
        handler._prepare(job)
    assert prepared == [tmp_path] * takes_dora


@pytest.mark.parametrize(
    "damage", [b"[" * 100_000, b"\xff", b'{"hyperparameters": {"modules": 1}}', b'{"id": "j", "hyperparameters": 0}']
)
def test_a_job_with_a_damaged_file_is_refused_and_the_engine_goes_on(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_bytes(damage)
    assert_refused(tmp_path, SimpleNamespace(add=None))


@pytest.mark.parametrize("error", [KeyError("rank"), ValueError("the job is that of \ud800")])
def test_a_job_that_cannot_be_prepared_is_refused_and_the_engine_goes_on(error: Exception, tmp_path: Path) -> None:
    def prepare(directory: Path, known: int) -> None:
        raise error

    write_examples(tmp_path / EXAMPLES_FILE, [([1, 2, 3], [1.0] * 3)])
    assert_refused(tmp_path, SimpleNamespace(add=None, prepare=prepare))


def assert_refused(directory: Path, trainer: Any) -> None:
    came = threading.Event()
    handler = TuningHandler(None, trainer, None, rules_of(), Notice(came.set))  # type: ignore[arg-type]
    examples = directory / EXAMPLES_FILE
    digest = digest_of(examples) if examples.exists() else "d"
    handler.start(1, JobStart(id="j", directory=str(directory), name="n", data_digest=digest, micro_batch=16))
    assert came.wait(60)
    refused = next(handler.answers())
    assert isinstance(refused, JobRefused) and refused.number == 1 and refused.reason.encode()
