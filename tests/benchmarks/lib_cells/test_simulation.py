from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.cells.baselines import Merging, Padding
from benchmarks.lib.cells.models import decoder_cell, encoder_cell, lstm_cell, sentence, sentence_pair
from benchmarks.lib.cells.simulation import LSTM_V100, V100, Device, ManyWorkers, Ran, Served, highest, simulate
from holdfast.cells.plan import CellRequest
from holdfast.cells.planner import CellPlanner
from holdfast.core.cell_cost import CellCost

UNIT = Device({"lstm": CellCost((64,), (1.0,)), "encoder": CellCost((64,), (1.0,)), "decoder": CellCost((64,), (1.0,))})
"""A cell takes one unit of time, at any batch size."""


def no_run(weights: Any, **inputs: Any) -> Any:
    raise AssertionError("a simulated cell does not run")


LSTM = lstm_cell(1, no_run, sizes=(1, 2, 3, 4))


def serve(planner: ManyWorkers, sentences: Sequence[tuple[int, float]], device: Device = UNIT, **options: Any) -> Ran:
    """Serve sentences, as (length, arrival)."""
    requests = [
        CellRequest(str(at), sentence(LSTM, np.zeros(length, np.int64)), arrival)
        for at, (length, arrival) in enumerate(sentences, start=1)
    ]
    return simulate(planner, {0: LSTM}, device, requests, **options)


FIGURE_2_5 = ((2, 0.0), (3, 0.0), (3, 0.0), (5, 0.0), (3, 1.5), (4, 2.2), (7, 2.4), (2, 4.5))
"""The paper gives the first four. The others by its words: the fifth comes before 2, the next two before 3, 7 is the
longest."""


def test_graph_batching_ends_its_first_batch_at_5_and_the_next_at_12() -> None:
    ran = serve(Merging([LSTM], by="depth", most=4), FIGURE_2_5)
    assert ran.served.finished.tolist() == [5.0] * 4 + [12.0] * 4
    assert ran.served.scheduled.tolist() == [0.0] * 4 + [5.0] * 4


def test_padding_ends_batches_at_the_same_times_with_buckets_of_the_longest() -> None:
    first = serve(Padding([LSTM], width=5, most=4), FIGURE_2_5[:4])
    assert first.served.finished.tolist() == [5.0] * 4


def test_cellular_batching_lets_requests_join_and_leave() -> None:
    ran = serve(CellPlanner([LSTM], max_tasks=1), FIGURE_2_5)
    assert ran.served.finished[:4].tolist() == [2.0, 3.0, 3.0, 5.0]
    assert ran.served.scheduled[4:7].tolist() == [2.0, 3.0, 3.0]
    assert ran.sizes[:4] == [4, 4, 4, 4]
    assert (ran.served.finished[4:] < 12).all()


def test_a_request_waits_for_the_round_of_tasks_in_flight() -> None:
    ran = serve(CellPlanner([LSTM], max_tasks=5), [(20, 0.0), (1, 0.5)])
    assert ran.served.scheduled.tolist() == [0.0, 5.0]


def test_two_workers_serve_two_requests_side_by_side() -> None:
    alone = [LSTM]
    ran = serve(Padding(alone, width=1, most=1, workers=2), [(4, 0.0), (6, 0.0), (1, 0.0)], workers=2)
    assert ran.served.finished.tolist() == [4.0, 6.0, 5.0]


def test_state_that_moves_between_workers_takes_time() -> None:
    cells = encoder_cell(1, no_run, sizes=(1, 2)), decoder_cell(1, no_run, sizes=(1, 2))
    requests = [CellRequest(str(at), sentence_pair(*cells, np.zeros(1, np.int64), 3), 0.0) for at in range(4)]
    ended = []
    for seconds in (0.0, 10.0):
        device = Device(UNIT.costs, move_seconds=seconds)
        planner = CellPlanner(cells, workers=2, max_tasks=1)
        ended.append(simulate(planner, dict(enumerate(cells)), device, requests, workers=2).served.finished.max())
    assert ended[0] <= ended[1] <= ended[0] + 20


def test_gather_is_free_while_a_batch_stays_the_same() -> None:
    device = Device(UNIT.costs, gather_seconds=0.5)
    ran = serve(CellPlanner([LSTM], max_tasks=1), [(3, 0.0), (3, 0.0)], device)
    assert ran.unchanged == 2
    assert ran.served.finished.tolist() == [3 + 0.5 * 2 * 2] * 2  # two states of two nodes, once


def test_host_time_of_tasks_and_nodes_adds_up() -> None:
    device = Device(UNIT.costs, task_seconds=0.25, node_seconds=0.125)
    ran = serve(CellPlanner([LSTM], max_tasks=1), [(3, 0.0), (3, 0.0)], device)
    assert ran.served.finished.tolist() == [3 * (1 + 0.25 + 2 * 0.125)] * 2


def test_a_run_can_end_before_its_requests() -> None:
    ran = serve(CellPlanner([LSTM], max_tasks=1), [(3, 0.0), (30, 0.0)], until=10.0)
    assert ran.served.finished.tolist() == [3.0, np.inf]


def test_the_v100s_curve_has_the_papers_points() -> None:
    assert LSTM_V100.at(64) == pytest.approx(185e-6)
    assert LSTM_V100.at(512) == pytest.approx(784e-6)
    assert LSTM_V100.at(2) == pytest.approx(185e-6)
    assert LSTM_V100.at(1024) == pytest.approx(2 * 784e-6)
    assert 512 / LSTM_V100.at(512) == pytest.approx(1.2 * 256 / LSTM_V100.at(256), rel=0.01)
    decoding = V100.costs["decoder"].at(256)
    assert decoding / (decoding + V100.costs["encoder"].at(256)) == pytest.approx(0.75)


def test_the_highest_rate_is_found_from_either_side() -> None:
    assert 97 < highest(lambda rate: rate <= 100, 10, 20) <= 100
    assert 97 < highest(lambda rate: rate <= 100, 10, 900) <= 100


def test_throughput_counts_results_of_requests_that_came_before_the_window() -> None:
    arrival = np.arange(10.0)
    served = Served(arrival, arrival, arrival + 3)
    assert served.throughput(0.5) == 1.0
    assert served.answered(0.5) == 1.0
    behind = Served(arrival, arrival, 2 * arrival)
    assert behind.answered(0.5) == 0.5
    assert served.after(0.5).p(90) == 3.0
