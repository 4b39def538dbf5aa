"""Batches of graphs: the inputs that they refuse, and what is equal to graphs that are added one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from holdfast.cells.graph import ZEROS
from holdfast.cells.graph_batch import GraphBatch
from holdfast.cells.plan import CellOutputs, CellRequests, EndedGroup
from holdfast.cells.planner import CellPlanner
from tests.cells.oracle import ONE, PAIR, integer_cell

LSTM = integer_cell("lstm", {"h": PAIR, "c": ONE}, {"h": (PAIR, False), "c": (ONE, False), "y": (ONE, True)})
LEAF = integer_cell("leaf", {}, {"h": (PAIR, True)})
INNER = integer_cell("inner", {"left": PAIR, "right": PAIR}, {"h": (PAIR, True), "y": (ONE, True)})


def leaves(*counts: int) -> GraphBatch:
    """A batch whose only block is leaves."""
    batch = GraphBatch(len(counts))
    batch.add(LEAF, counts, uid=range(sum(counts)))
    return batch


def test_a_batch_has_at_least_one_request() -> None:
    with pytest.raises(ValueError, match="a batch of 0 requests; there must be at least 1"):
        GraphBatch(0)


def test_counts_are_those_of_each_request() -> None:
    batch = GraphBatch(2)
    with pytest.raises(ValueError, match=r"counts of cell leaf are int64\[3\]; they must be int\[2\]"):
        batch.add(LEAF, [1, 1, 1], uid=[0, 1, 2])
    with pytest.raises(ValueError, match=r"counts of cell leaf are float64\[2\]; they must be int\[2\]"):
        batch.add(LEAF, [1.5, 1], uid=[0, 1])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="-1 nodes of cell leaf in a request; there must be at least 0"):
        batch.add(LEAF, [2, -1], uid=[0])
    with pytest.raises(ValueError, match="0 nodes of cell lstm in a request; there must be at least 1"):
        batch.chain(LSTM, [2, 0], uid=[0, 1])
    with pytest.raises(ValueError, match=r"value uid of cell leaf has the shape \[2\]; it needs \[3\]"):
        batch.add(LEAF, [1, 2], uid=[0, 1])
    with pytest.raises(ValueError, match="cell leaf needs the value uid"):
        batch.add(LEAF, [1, 2])
    assert not batch.blocks and batch.nodes.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("left", "reason"),
    [
        (([0, 3, 0], "h"), "names node 3, which does not come before it in its request"),
        (([0, 0, 2], "h"), "names node 2, which does not come before it in its request"),
        (([0, -2, 0], "h"), "names node -2, which does not come before it"),
        (([0, 0], "h"), "names 2 nodes; it needs 3"),
        (([0, 0, 0], "c"), "cell leaf has no output c"),
        ([0, 0, 0], "must be a pair: nodes, and their output"),
    ],
)
def test_nodes_that_are_read_come_before_their_readers_in_the_same_request(left: Any, reason: str) -> None:
    batch = leaves(2, 2)
    with pytest.raises(ValueError, match=reason):
        batch.add(INNER, [2, 1], uid=[0, 1, 2], left=left)
    assert len(batch.blocks) == 1


def test_a_batch_has_at_most_62_blocks_of_which_the_last_reads_any() -> None:
    batch = GraphBatch(1)
    for number in range(61):
        batch.add(LEAF, [1], uid=[number])
    batch.add(INNER, [1], uid=[61], left=([60], "h"))
    with pytest.raises(ValueError, match="the batch has 62 blocks; more do not fit"):
        batch.add(LEAF, [1], uid=[62])
    planner = CellPlanner([LEAF, INNER])
    planner.add(CellRequests(["a"], batch))
    plan = planner.schedule(0, 0.0)
    assert plan is not None and len(plan.tasks[0].rows) == 61


def test_nodes_of_one_call_may_read_one_another() -> None:
    batch = leaves(2, 1)
    assert batch.add(INNER, [2, 1], uid=[0, 1, 2], left=([0, 2, ZEROS], "h")) == 1
    assert batch.rows.tolist() == [4, 2]


def test_only_the_last_node_of_a_chain_is_read_and_none_of_one_that_may_stop() -> None:
    for stop, node, reason in ((None, 1, "reads node 1, which is within a chain"), (("y", 1), 2, "may stop is read")):
        batch = GraphBatch(2)
        batch.chain(LSTM, [3, 2], stop=stop, uid=range(5))
        with pytest.raises(ValueError, match=reason):
            batch.add(INNER, [1, 1], uid=[0, 1], left=([node, 1], "h"))
    with pytest.raises(ValueError, match="cell leaf has no State input with an output's name"):
        batch.chain(LEAF, [1, 1], uid=[0, 1])
    with pytest.raises(ValueError, match="cannot stop by h; it must be a returned scalar"):
        batch.chain(LSTM, [1, 1], stop=("h", 1), uid=[0, 1])


def test_results_are_returned_outputs_of_a_block() -> None:
    batch = leaves(2, 0)
    for name, block, output, last, reason in (
        ("a", 1, "h", False, "result a names block 1; there are 1"),
        ("a", 0, "y", False, "cell leaf does not return an output y"),
        ("a", 0, "h", True, "the last node of block 0; a request has none there"),
    ):
        with pytest.raises(ValueError, match=reason):
            batch.result(name, block, output, last=last)
    batch.result("a", 0, "h")
    with pytest.raises(ValueError, match="two results have one name: a"):
        batch.result("a", 0, "h")
    with pytest.raises(ValueError, match="constant b has 1 values for 2 requests"):
        batch.constant("b", [np.zeros(1)])


def test_a_planner_refuses_all_requests_of_a_batch_together() -> None:
    planner = CellPlanner([LEAF, INNER], capacity=4)
    other = integer_cell("other", {}, {"h": (PAIR, True)})
    strange = GraphBatch(1)
    strange.add(other, [1], uid=[0])
    for ids, batch, reason in (
        (["a"], leaves(1, 1), "there are 1 ids for 2 requests"),
        (["a", "a"], leaves(1, 1), "request id a is already in use"),
        (["a", "b"], leaves(1, 4), "the graph has 4 nodes, where a chain counts as one; at most 3 fit"),
        (["a", "b"], leaves(1, 0), "a request of the batch has no nodes; each needs at least 1"),
        (["a"], strange, "cell other is not one of the application's cells"),
    ):
        with pytest.raises(ValueError, match=reason):
            planner.add(CellRequests(ids, batch))
    assert not planner.has_work()
    planner.add(CellRequests(["a", "b"], leaves(1, 1)))
    with pytest.raises(ValueError, match="request id b is already in use"):
        planner.add(CellRequests(["c", "b"], leaves(1, 1)))
    assert planner.stats().waiting == 2


def test_requests_of_a_batch_get_rows_in_turn_and_leave_when_they_are_aborted() -> None:
    planner = CellPlanner([LEAF, INNER], capacity=6)
    planner.add(CellRequests(list("abcde"), leaves(2, 2, 3, 2, 1)))
    planner.abort("b")
    plan = planner.schedule(0, 0.0)
    assert plan is not None and plan.tasks[0].values[0].tolist() == [0, 1, 4, 5, 6], "b is left out"
    assert (planner.stats().waiting, planner.stats().running) == (2, 2)
    planner.abort("e")
    planner.abort("d")
    assert planner.stats().waiting == 0
    planner.abort("a")
    assert [output.request_id for output in planner.update(plan, [(np.zeros((5, 2), np.int64),)])] == ["c"]
    assert not planner.has_work() and planner.stats().rows_used == 0


def test_outputs_are_made_when_they_are_asked_for_and_in_order() -> None:
    groups = [
        EndedGroup(["a", "b"], np.array([1.0, 2.0]), {"y": (np.arange(5), np.array([2, 5]))}),
        EndedGroup(["c"], np.array([3.0]), {}, [{"z": np.array([7])}]),
    ]
    outputs = CellOutputs(groups)
    assert len(outputs) == 3 and outputs.ids == ["a", "b", "c"] and outputs.scheduled_at.tolist() == [1.0, 2.0, 3.0]
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert outputs[1].results["y"].tolist() == [2, 3, 4] and outputs[1].scheduled_at == 2.0
    assert outputs[-1].results["z"].tolist() == [7]
    assert [output.request_id for output in outputs[1:]] == ["b", "c"]
    with pytest.raises(IndexError):
        outputs[3]
    assert not CellOutputs() and CellOutputs().ids == [] and CellOutputs().scheduled_at.tolist() == []
