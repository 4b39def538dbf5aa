"""Finding an application, built in or in a module of the user's; and the application that docs/cells.md shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.cells import applications
from holdfast.cells.applications import find
from holdfast.cells.applications.weights import DIRECTORY
from holdfast.cells.cell import FIELD_DTYPES, Field
from holdfast.cells.executor import CpuExecutor
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.plan import CellRequests
from holdfast.cells.planner import CellPlanner
from scripts.train_cells import run_together
from tests.cells.models import WORDS, Tagger

PAGE = Path(__file__).parents[3] / "docs" / "cells.md"
SHOWN = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("name", applications.BUILT_IN)
def test_a_built_in_application_is_found_by_name(name: str) -> None:
    found = find(name)
    assert found.name == name
    assert [(field.name, field.dtype, field.shape) for field in found.inputs] == [("text", "string", (1,))]


@pytest.mark.parametrize("name", applications.BUILT_IN)
def test_weights_that_are_shipped_are_small(name: str) -> None:
    assert (DIRECTORY / f"{name}.safetensors").stat().st_size <= 1_500_000


def test_the_application_that_the_docs_show_has_less_than_60_lines_and_forecasts(folder: Path) -> None:
    code, _ = SHOWN
    assert len(code.splitlines()) < 60
    (folder / "forecast.py").write_text(code)
    application = find("forecast:Forecast")
    series = [np.array(values, np.float32) for values in ([5.0], [1, 2, 3, 4], [3, 1, 4, 1, 5, 9, 2, 6], [2.5] * 40)]
    found = run_together(application, [application.unfold({"series": values}) for values in series])
    for values, results in zip(series, found, strict=True):
        level, trend, expected = float(values[0]), 0.0, [float(values[0])]
        for x in values[1:].tolist():
            level, before = 0.5 * x + 0.5 * (level + trend), level
            trend = 0.3 * (level - before) + 0.7 * trend
            expected.append(level + trend)
        np.testing.assert_allclose(application.finish(results)["next"], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="the largest number is nan; it must be below 1e9"):
        application.unfold({"series": np.array([1, np.nan], np.float32)})


def test_the_unfold_many_that_the_docs_show_gives_the_labels_of_each_alone() -> None:
    namespace: dict[str, Any] = {"np": np, "GraphBatch": GraphBatch}
    exec(SHOWN[1], namespace)
    model, random = Tagger(), np.random.default_rng(0)
    sentences = [random.integers(0, WORDS, length) for length in (3, 1, 5)]
    batch = namespace["unfold_many"](model, [{"tokens": tokens} for tokens in sentences])
    planner = CellPlanner(model.cells)
    executor = CpuExecutor(model.cells, planner.types, capacity=50)
    planner.add(CellRequests(["0", "1", "2"], batch))
    found = {}
    while (plan := planner.schedule(0, 0.0)) is not None:
        executor.submit(plan)
        found |= {output.request_id: output.results["label"] for output in planner.update(plan, executor.collect())}
    with torch.no_grad():
        for name, tokens in enumerate(sentences):
            h, _ = model.lstm(model.embedding(torch.from_numpy(tokens))[None])
            assert found[str(name)].tolist() == model.out(h[0]).argmax(1).tolist()


def test_an_object_in_a_module_may_be_the_application_or_a_function_that_gives_it(folder: Path) -> None:
    code = (
        SHOWN[0] + "\n\nmade = Forecast()\n\n\ndef make():\n    return Forecast()\n\n\nclass Inside:\n    it = made\n"
    )
    (folder / "several.py").write_text(code)
    names = [find(f"several:{path}").name for path in ("Forecast", "made", "make", "Inside.it")]
    assert names == ["forecast"] * 4
    assert find("several:made") is find("several:made")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tager", "application 'tager' is not built in; give one of tagger, dates, listops, or module:object"),
        ("", "application '' is not built in; give one of tagger, dates, listops, or module:object"),
        (":x", "application is ':x'; give one of tagger, dates, listops, or module:object"),
        ("module:", "application is 'module:'; give one of tagger, dates, listops, or module:object"),
        ("nowhere_at_all:x", "application nowhere_at_all:x: there is no module nowhere_at_all"),
        ("./mine.py:x", "application ./mine.py:x: './mine.py' is no name of a module; give one such as package.module"),
        ("mine:missing", "application mine:missing: 'missing' is not in mine"),
        ("mine:number.real.missing", "application mine:number.real.missing: 'missing' is not in mine"),
        ("mine:number", "application mine:number: int has no name, cells, inputs, outputs, unfold, finish"),
        ("mine:fails", "application mine:fails: fails() failed: KeyError: 'weights'"),
        (
            "mine:gives_none",
            "application mine:gives_none: NoneType has no name, cells, inputs, outputs, unfold, finish",
        ),
        ("mine:Unnamed", "application mine:Unnamed: its name is 'a/b'; it needs letters, digits, dots, hyphens and"),
        ("mine:Listed", "application mine:Listed: its cells must be a tuple of at least one Cell"),
        ("mine:Empty", "application mine:Empty: its outputs must be a tuple of at least one Field"),
        ("mine:Uncallable", "application mine:Uncallable: its finish cannot be called"),
        ("broken:x", "application broken:x: module broken cannot be imported: ZeroDivisionError: division by zero"),
        ("needs:x", "application needs:x: there is no module not_installed_anywhere"),
    ],
)
def test_the_error_names_the_missing_or_wrong_part(folder: Path, name: str, reason: str) -> None:
    mine = """
        number = 3
        def fails(): return {}["weights"]
        def gives_none(): return None
        class Unnamed(Forecast): name = "a/b"
        class Listed(Forecast):
            def __init__(self):
                super().__init__()
                self.cells = list(self.cells)
        class Empty(Forecast): outputs = ()
        class Uncallable(Forecast): finish = None
    """
    (folder / "mine.py").write_text(SHOWN[0] + "\n" + re.sub(r"^ {8}", "", mine, flags=re.MULTILINE))
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "needs.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ValueError) as caught:
        find(name)
    assert str(caught.value).startswith(reason)


def test_a_field_may_be_of_strings_but_of_no_unknown_type() -> None:
    assert "string" in FIELD_DTYPES
    with pytest.raises(ValueError, match="dtype of field text is 'bfloat16'; it must be one of float32"):
        Field("text", "bfloat16", (1,))
