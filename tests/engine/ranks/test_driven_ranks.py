"""Driven jobs in engines of several ranks: the results of one process, saved states, refusals, and other layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.tuning.messages import CallDone, CallFailed, JobEnded
from holdfast.training.calls import Datum, read_result
from tests.checkpoints import make
from tests.driven import Writer, drawn_data
from tests.engine.conftest import SMALL
from tests.engine.test_driven import DRIVEN, DrivenBench
from tests.tokenizers_made import byte_level

Make = Callable[..., DrivenBench]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model of three layers."""
    directory = tmp_path_factory.mktemp("driven") / "model"
    make(directory, "Llama", num_hidden_layers=3, max_position_embeddings=256, eos_token_id=1)
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def bench(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes engines that take driven jobs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[DrivenBench] = []

    def make_one(**changes: Any) -> DrivenBench:
        made.append(DrivenBench(EngineConfig(**{**SMALL, **DRIVEN, "model": str(directory), **changes})))
        return made[-1]

    yield make_one
    for each in made:
        with suppress(RuntimeError):
            each.close()


def calls_of(writer: Writer, place: Path) -> list[int]:
    """A loop with a save, a load, a refused call, and log probabilities before and after the load."""
    return [
        *writer.step(seed=0),
        writer.write("save", directory=str(place / f"saved-{writer.directory.parent.name}")),
        writer.write("forward", drawn_data(seed=4)),
        *writer.step(seed=1, rate=0.05),
        writer.write("forward", [Datum([5], [5000])]),
        writer.write("load", directory=str(place / f"saved-{writer.directory.parent.name}")),
        writer.write("forward", drawn_data(seed=4)),
        *writer.step(seed=1),
    ]


def run(each: DrivenBench, writer: Writer, place: Path) -> list[list[np.ndarray[Any, Any]]]:
    """Compute the calls. Returns the log probabilities of each that has some."""
    each.drive(writer)
    numbers = calls_of(writer, place)
    for number in numbers:
        each.call("job", number)
    each.done("job", *numbers)
    assert [event.number for event in each.told("job", CallFailed)] == [6]
    done = [event.number for event in each.told("job", CallDone)]
    return [[*found] for number in done if (found := read_result(writer.directory, number).logprobs)]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=str)
def test_calls_have_the_results_of_one_process_and_continue_under_another_layout(
    bench: Make, tmp_path: Path, tp: int, pp: int
) -> None:
    alone = Writer(tmp_path / "alone" / "job")
    single = bench()
    expected = run(single, alone, tmp_path)
    each, writer = bench(tp=tp, pp=pp), Writer(tmp_path / "ranks" / "job")
    found = run(each, writer, tmp_path)
    for one, other in zip(found, expected, strict=True):
        assert all(np.allclose(a, b, atol=1e-3) for a, b in zip(one, other, strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(found[1], found[3], strict=True)), "the load brought the save back"
    number = writer.write("forward_backward", drawn_data(seed=6))
    each.call("job", number)
    each.done("job", number)
    each.change("job", "leave")
    each.until(lambda: bool(each.told("job", JobEnded)))
    each.close()
    again = bench()
    writer.write("optimize")
    writer.write("forward", drawn_data(seed=6))
    assert again.drive(writer, known=number + 1).updates == 2
    again.done("job", number + 1, number + 2)
    for call in (("forward_backward", drawn_data(seed=6)), ("optimize", ()), ("forward", drawn_data(seed=6))):
        single.call("job", alone.write(*call))
    single.done("job", number + 2)
    one, other = (read_result(each.directory, number + 2).logprobs for each in (writer, alone))
    assert all(np.allclose(a, b, atol=1e-3) for a, b in zip(one, other, strict=True))
