"""Requests of the built-in applications that are unfolded together have the outputs that each has alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from holdfast.cells.application import UnfoldsMany
from holdfast.cells.applications import dates, listops, tagger
from holdfast.cells.executor import CpuExecutor
from holdfast.cells.plan import CellRequest, CellRequests
from holdfast.cells.planner import CellPlanner
from holdfast.loop.loop import Loop
from tests.cells.applications.references import text_of

TEXTS = {
    dates: ["the third of march nineteen eighty-four", "3/3/84", "1 may 2001", "june 30, 1999"],
    listops: ["[MAX 2 9 [MIN 4 7 ] 0 ]", "7", "[SM 1 2 ]", "[MED 5 5 1 [SM 9 9 ] 3 ]"],
    tagger: ["Ann Lee moved to Paris in May 1984 .", "Stop", "She sold 1984 tickets in the city ."],
}


def outputs_of(application: Any, requests: list[CellRequest | CellRequests]) -> dict[str, dict[str, list[Any]]]:
    types = {cell: number for number, cell in enumerate(application.cells)}
    executor = CpuExecutor(application.cells, types, capacity=200)
    loop: Any = Loop(CellPlanner(application.cells, types, capacity=200).worker(0), executor, 2, time.monotonic)
    for request in requests:
        loop.add(request)
    found = {}
    while loop.has_work():
        for output in loop.step() or ():
            found[output.request_id] = {
                name: np.asarray(value).tolist() for name, value in application.finish(output.results).items()
            }
    return found


@pytest.mark.parametrize("module", TEXTS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_requests_unfolded_together_have_the_outputs_of_each_alone(module: Any) -> None:
    application, texts = module.load(), TEXTS[module]
    assert isinstance(application, UnfoldsMany)
    inputs = [text_of(text) for text in texts]
    ids = [str(number) for number in range(len(texts))]
    alone = outputs_of(
        application, [CellRequest(*each) for each in zip(ids, map(application.unfold, inputs), strict=True)]
    )
    assert len(alone) == len(texts) and len({str(each) for each in alone.values()}) > 1
    assert outputs_of(application, [CellRequests(ids, application.unfold_many(inputs))]) == alone


@pytest.mark.parametrize("module", TEXTS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_one_unusable_text_refuses_a_batch(module: Any) -> None:
    application = module.load()
    with pytest.raises(ValueError, match="empty"):
        application.unfold_many([text_of(TEXTS[module][0]), text_of("")])
