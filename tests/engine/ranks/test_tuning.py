"""Tuning in engines of several ranks: the losses of one process, next to streams, and an adapter that is served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.tuning.messages import JobChanged, JobEnded, JobStatus, JobStep
from tests.checkpoints import make
from tests.engine.conftest import SMALL
from tests.engine.test_tuning import SLICES, TUNING, Bench, drawn, new_job
from tests.tokenizers_made import byte_level

EPOCHS = 5
"""Epochs of a job, each of three steps."""
LAYOUTS = [(2, 1), (1, 2), (2, 2)]
layouts = pytest.mark.parametrize(("tp", "pp"), LAYOUTS, ids=str)
Make = Callable[..., Bench]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model of three layers."""
    directory = tmp_path_factory.mktemp("tuned") / "model"
    make(directory, "Llama", num_hidden_layers=3, max_position_embeddings=256, eos_token_id=1)
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def make_bench(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """Makes engines that take tuning jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        options = {**SMALL, **TUNING, "model": str(directory), "cache_gb": 0.05}
        yield lambda **changes: Bench(EngineConfig(**{**options, **changes}))


@pytest.fixture
def bench(make_bench: Make) -> Iterator[Make]:
    """`make_bench`, of engines that are closed after the test."""
    made: list[Bench] = []

    def make_one(**changes: Any) -> Bench:
        made.append(make_bench(**changes))
        return made[-1]

    yield make_one
    for each in made:
        with suppress(RuntimeError):
            each.close()


def losses(each: Bench, job: str = "job") -> list[float]:
    return [step.loss for step in each.events(job, JobStep)]


def answer(each: Bench, adapter: str) -> list[int]:
    each.submit("answer", drawn()[0][0][:10], 12, adapter)
    each.until(lambda: "answer" in each.ended)
    return each.tokens["answer"]


@pytest.fixture(scope="module")
def alone(make_bench: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[int]]:
    """The losses of a job in an engine of one process, and a greedy answer with its adapter."""
    each = make_bench()
    each.start(new_job(tmp_path_factory.mktemp("alone"), epochs=EPOCHS))
    each.finish("job")
    found = losses(each), answer(each, each.events("job", JobEnded)[0].adapter.id)
    each.close()
    return found


@pytest.mark.always("2-1", "1-2")
@layouts
def test_a_job_has_the_losses_of_one_process_and_its_adapter_is_served_at_once(
    bench: Make, alone: tuple[list[float], list[int]], tmp_path: Path, tp: int, pp: int
) -> None:
    each = bench(tp=tp, pp=pp)
    info = each.start(new_job(tmp_path, epochs=EPOCHS))
    assert info.steps == 3 * EPOCHS
    each.finish("job")
    found = losses(each)
    assert found == pytest.approx(alone[0], rel=1e-4)
    assert found[-1] < found[0]
    (ended,) = each.events("job", JobEnded)
    assert ended.outcome == "succeeded"
    assert answer(each, ended.adapter.id) == alone[1]
    assert each.lent[-1] == 0 < max(each.lent)


@pytest.mark.always("slices-tp2")
@pytest.mark.parametrize(
    ("options", "tp", "pp"),
    [(SLICES, 2, 1), ({"deferral_bound": 0.0}, 1, 2), (SLICES, 1, 2)],
    ids=["slices-tp2", "deferral-pp2", "slices-pp2"],
)
def test_streams_next_to_a_job_get_their_tokens_and_memory_is_taken_back(
    bench: Make, tmp_path: Path, options: dict[str, Any], tp: int, pp: int
) -> None:
    """The memory is so small that the job has to leave the device."""

    def serve(each: Bench) -> None:
        for wave in range(2):
            names = [f"{wave}-{number}" for number in range(4)]
            for number, name in enumerate(names):
                each.submit(name, [3 + (wave + number * 7 + at) % 90 for at in range(60)], 20)
            each.until(lambda wanted=names: {*wanted} <= each.ended)  # type: ignore[misc]
            for _ in range(10):
                each.turn()

    each = bench(tp=tp, pp=pp, cache_gb=0.004, tuning_memory_fraction=0.9, max_adapter_rank=4, **options)
    each.start(new_job(tmp_path, epochs=3))
    serve(each)
    each.finish("job")
    assert losses(each)[-1] < losses(each)[0]
    without = bench(**{**options, "deferral_bound": None} if "tbt_target" in options else options)
    serve(without)
    assert {**each.tokens} == {**without.tokens}


def test_a_job_goes_on_in_an_engine_of_another_layout(
    bench: Make, alone: tuple[list[float], list[int]], tmp_path: Path
) -> None:
    job, done = new_job(tmp_path, epochs=EPOCHS), 0
    for tp, pp in ((1, 2), (2, 1)):
        each = bench(tp=tp, pp=pp)
        info = each.start(job)
        assert done <= info.step < info.steps
        done = info.step + 3
        if pp > 1:
            each.reach("job", done)
        else:
            each.finish("job")
            assert info.step >= 3
            assert losses(each) == pytest.approx(alone[0][info.step :], rel=1e-4)
            assert answer(each, each.events("job", JobEnded)[0].adapter.id) == alone[1]
        each.close()


def test_jobs_take_turns_pause_and_are_cancelled_on_all_ranks(bench: Make, tmp_path: Path) -> None:
    each = bench(pp=2)
    each.start_all([new_job(tmp_path, name, epochs=20 if name == "one" else 2) for name in ("one", "two")])
    each.reach("one", 2)
    assert isinstance(each.change("one", "pause"), JobChanged)
    each.until(lambda: each.events("one", JobStatus)[-1].status == "paused")
    each.finish("two")
    each.change("one", "resume")
    each.reach("one", 8)
    each.change("one", "cancel")
    each.finish("one")
    assert [each.events(name, JobEnded)[0].outcome for name in ("one", "two")] == ["cancelled", "succeeded"]
    each.start(new_job(tmp_path, "three", epochs=1))
    each.finish("three")
    assert each.events("three", JobEnded)[0].outcome == "succeeded"


def test_a_dora_is_tuned_over_ranks_and_served_at_once(bench: Make, tmp_path: Path) -> None:
    found = []
    for tp, pp in ((1, 1), (2, 2)):
        each = bench(tp=tp, pp=pp)
        assert each.start(new_job(tmp_path / f"{tp}", dora=True)).dora
        each.finish("job")
        (ended,) = each.events("job", JobEnded)
        found.append((losses(each), answer(each, ended.adapter.id)))
        assert '"use_dora": true' in (Path(ended.checkpoint) / "adapter_config.json").read_text()
        each.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][1] == found[0][1]


def test_a_model_with_norms_over_the_heads_of_all_ranks_is_tuned_with_tp(bench: Make, tmp_path: Path) -> None:
    make(tmp_path / "olmo2", "Olmo2", num_hidden_layers=2, max_position_embeddings=256, eos_token_id=1)
    byte_level().save(str(tmp_path / "olmo2" / "tokenizer.json"))
    found = []
    for tp in (1, 2):
        each = bench(model=str(tmp_path / "olmo2"), tp=tp)
        each.start(new_job(tmp_path / f"tp{tp}"))
        each.finish("job")
        found.append((losses(each), answer(each, each.events("job", JobEnded)[0].adapter.id)))
        each.close()
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][1] == found[0][1]
