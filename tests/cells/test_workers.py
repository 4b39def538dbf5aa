"""Requests that run through workers give the results of plain PyTorch, whichever requests share their tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.cells.cell import Cell, Output, State, Value
from holdfast.cells.executor import CellExecutor, CpuExecutor
from holdfast.cells.graph import CellGraph
from holdfast.cells.plan import FIRST_ROW, CellOutput, CellRequest
from holdfast.cells.workers import Workers, tasks_of_a_round
from tests.cells.models import MODELS, Asked, Tagger, differences


class Outcomes:
    """The outputs and failures of workers so far."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []
        self._changed = threading.Condition()

    def take(self, outputs: Sequence[CellOutput]) -> None:
        with self._changed:
            for output in outputs:
                assert output.request_id not in self.results
                self.results[output.request_id] = output.results
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        with self._changed:
            self.failures.append(reason)
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted() or bool(self.failures), timeout=200)


@contextmanager
def running(model: Any, devices: int | list[str] = 1, **options: Any) -> Iterator[tuple[Workers, Outcomes]]:
    outcomes = Outcomes()
    workers = Workers(
        model,
        ["cpu"] * devices if isinstance(devices, int) else devices,
        clock=time.monotonic,
        on_outputs=outcomes.take,
        on_failure=outcomes.fail,
        **options,
    )
    try:
        yield workers, outcomes
    finally:
        workers.close()


def run_all(workers: Workers, outcomes: Outcomes, asked: dict[str, Asked]) -> None:
    for name, each in asked.items():
        workers.submit(CellRequest(name, each.graph))
    outcomes.wait_for(lambda: len(outcomes.results) == len(asked))
    assert not outcomes.failures
    wrong = {name: differences(outcomes.results[name], each.expected) for name, each in asked.items()}
    assert not {name: names for name, names in wrong.items() if names}


def ask(model: Any, count: int, seed: int = 0) -> dict[str, Asked]:
    random = np.random.default_rng(seed)
    return {str(number): model.ask(random) for number in range(count)}


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_share_tasks_have_the_results_of_each_alone(name: str, devices: int) -> None:
    model = MODELS[name]()
    with running(model, devices) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 60))
        while (stats := workers.stats()).rows_used:  # of a decoder that ended early, until its last round is over
            time.sleep(0.001)
        assert (stats.running, stats.waiting) == (0, 0)


@pytest.mark.parametrize("sizes", [(1,), (3,), (2, 5), (1, 2, 4, 8, 16, 32)])
@pytest.mark.parametrize("name", MODELS)
def test_batch_sizes_do_not_change_results(name: str, sizes: tuple[int, ...]) -> None:
    model = MODELS[name](sizes=sizes)
    with running(model) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 25, seed=1))


def test_sizes_given_by_type_win_over_those_of_the_cells() -> None:
    model = MODELS["tree"](sizes=(1, 2))
    with running(model, sizes=((1, 8), (1, 3))) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 60, seed=1))
        leaves, inner = (max(batches) for batches in workers.stats().batches)
    assert 3 < leaves <= 8 and inner == 3


@pytest.mark.parametrize("sizes", [((1, 2),), ((1, 2), (1,), (1,))])
def test_sizes_for_more_or_fewer_types_than_there_are_are_refused(sizes: tuple[tuple[int, ...], ...]) -> None:
    with (
        pytest.raises(ValueError, match=rf"given for {len(sizes)} types of cell; there are 2"),
        running(MODELS["tree"](), sizes=sizes),
    ):
        pass


@pytest.mark.parametrize("wrong", [(), (0, 1), (2, 1), (1, 1)])
def test_sizes_that_do_not_rise_from_1_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes of cell internal are"), running(MODELS["tree"](), sizes=((1,), wrong)):
        pass


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("max_tasks", [1, 5])
def test_rounds_in_flight_do_not_change_where_a_decoder_stops(max_tasks: int, steps_in_flight: int) -> None:
    model = MODELS["seq2seq"]()
    with running(model, max_tasks=max_tasks, steps_in_flight=steps_in_flight) as (workers, outcomes):
        asked = ask(model, 40, seed=2)
        lengths = {len(each.expected["words"]) for each in asked.values()}
        assert 12 in lengths and len(lengths) > 3, "the decoder of this test must stop early for some requests only"
        run_all(workers, outcomes, asked)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_few_rows_make_requests_wait_and_do_not_change_results(name: str, devices: int) -> None:
    model = MODELS[name]()
    with running(model, devices, capacity=30) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 40, seed=3))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_requests_that_come_and_are_aborted_at_random_leave_others_right(name: str, devices: int) -> None:
    model = MODELS[name]()
    random = np.random.default_rng(4)
    asked = ask(model, 80, seed=5)
    aborted = {name for name in asked if random.random() < 0.3}
    with running(model, devices, capacity=200) as (workers, outcomes):
        for each, request in asked.items():
            workers.submit(CellRequest(each, request.graph))
            if random.random() < 0.3:
                time.sleep(float(random.exponential(0.002)))
            if each in aborted:
                workers.abort(str(random.choice([name for name in aborted if int(name) <= int(each)])))
        for each in aborted:
            workers.abort(each)
        outcomes.wait_for(lambda: set(asked) - aborted <= set(outcomes.results))
        assert not outcomes.failures
        for each in outcomes.results:
            assert differences(outcomes.results[each], asked[each].expected) == []
        while (stats := workers.stats()).rows_used:
            time.sleep(0.001)
        assert (stats.running, stats.waiting) == (0, 0)


def wait_for_sleep(workers: Workers) -> None:
    """Wait until every worker that runs nothing has looked for work since the last change."""
    deadline = time.monotonic() + 200
    while any(worker.seen != workers._changes for worker in workers._workers if not worker.loop._plans):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_idle_workers_sleep_and_wake_for_the_next_request() -> None:
    model = Tagger()
    with running(model, 2) as (workers, outcomes):
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in workers._threads if thread.ident is not None]
        for number in range(5):
            wait_for_sleep(workers)
            outcomes.results.clear()
            before = sum(map(time.clock_gettime, clocks))
            time.sleep(0.1)
            used = sum(map(time.clock_gettime, clocks)) - before
            assert used < 0.05, "a worker computes while there is nothing to do"
            run_all(workers, outcomes, ask(model, 1, seed=number))


def test_a_worker_takes_rows_that_another_computed() -> None:
    model = MODELS["tree"](sizes=(1, 2))
    with running(model, 2, max_tasks=1) as (workers, outcomes):
        run_all(workers, outcomes, ask(model, 100, seed=6))
        assert sum(copies.moved for copies in workers.copies()) > 0


class Gate:
    """Cells that add a number, each of its own type.

    One waits until a test opens the gate. Two nodes of the next one must run at the same time.
    """

    name, inputs, outputs = "gate", (), ()

    def __init__(self) -> None:
        self.begun, self.opened, self.meeting = threading.Event(), threading.Event(), threading.Barrier(2)
        self.ready = False
        """Whether the workers are ready. Before that, cells are only tried, and wait for nothing."""

        def wait(weights: Any, n: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.ready:
                self.begun.set()
                assert self.opened.wait(60)
            return {"n": n + 1}

        def meet(weights: Any, n: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.ready:
                self.meeting.wait(200)
            return {"n": n + 2}

        def run(weights: Any, n: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"n": n + 3}

        state, output = {"n": State((), "int32")}, {"n": Output((), "int32", returned=True)}
        self.waits, self.meets, self.runs = self.cells = tuple(
            Cell(work.__name__, work, state, output, sizes=(1,)) for work in (wait, meet, run)
        )

    def unfold(self, inputs: Any) -> CellGraph:
        raise NotImplementedError

    finish = unfold

    def request(self, name: str, cell: Cell, count: int) -> CellRequest:
        """A request of `count` nodes of a cell. They read no other node and take a row each."""
        graph = CellGraph()
        graph.result("n", graph.add(cell, count), "n")
        return CellRequest(name, graph)

    @contextmanager
    def workers(self, request: CellRequest, capacity: int) -> Iterator[tuple[Workers, Outcomes]]:
        """Two workers: one is at the gate with the only node of this request that is ready, the other sleeps."""
        with running(self, 2, capacity=capacity, max_tasks=1, steps_in_flight=1) as (workers, outcomes):
            self.ready = True
            try:
                workers.submit(request)
                assert self.begun.wait(60)
                wait_for_sleep(workers)
                yield workers, outcomes
            finally:
                self.opened.set()


def test_an_abort_wakes_a_sleeping_worker_for_the_request_that_fits_now() -> None:
    model = Gate()
    with model.workers(model.request("first", model.waits, 1), FIRST_ROW + 4) as (workers, outcomes):
        workers.submit(model.request("large", model.runs, 4))
        workers.submit(model.request("small", model.runs, 1))
        wait_for_sleep(workers)
        assert not outcomes.results, "the large one waits for rows, and the small one for its turn"
        workers.abort("large")
        outcomes.wait_for(lambda: "small" in outcomes.results)
        assert {*outcomes.results} == {"small"} and not outcomes.failures


def test_the_end_of_a_round_wakes_a_worker_for_new_ready_nodes() -> None:
    model, graph = Gate(), CellGraph()
    gate = graph.add(model.waits)
    both = graph.add(model.meets, 2, n=([gate[0], gate[0]], "n"))
    graph.result("n", both, "n")
    with model.workers(CellRequest("both", graph), FIRST_ROW + 3) as (_, outcomes):
        model.opened.set()
        outcomes.wait_for(lambda: "both" in outcomes.results)
        assert not outcomes.failures, "one worker alone would wait for the other in vain"
        assert outcomes.results["both"]["n"].tolist() == [3, 3]


class TwoTypes:
    """A chain of one type, of a high or a low priority."""

    name, inputs, outputs = "two types", (), ()

    def __init__(self) -> None:
        def run(weights: Any, n: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"n": n + 1}

        state, output = {"n": State((), "int32")}, {"n": Output((), "int32", returned=True)}
        self.cells = tuple(Cell(f"priority {each}", run, state, output, priority=each, sizes=(1, 2)) for each in (0, 1))

    def unfold(self, inputs: Any) -> CellGraph:
        raise NotImplementedError

    finish = unfold

    def chain(self, priority: int, steps: int) -> CellGraph:
        graph = CellGraph()
        graph.result("n", graph.chain(self.cells[priority], steps), "n")
        return graph


def test_a_type_of_low_priority_takes_turns_with_a_long_chain_of_a_higher_one() -> None:
    model = TwoTypes()
    with running(model) as (workers, outcomes):
        workers.submit(CellRequest("long", model.chain(1, 20_000)))
        for number in range(20):
            workers.submit(CellRequest(str(number), model.chain(0, 10)))
            outcomes.wait_for(lambda number=number: str(number) in outcomes.results)  # type: ignore[misc]
        assert "long" not in outcomes.results
        outcomes.wait_for(lambda: "long" in outcomes.results)
        assert outcomes.results["long"]["n"][-1] == 20_000
        assert not outcomes.failures


@pytest.mark.parametrize(
    ("max_tasks", "devices", "steps_in_flight", "expected"),
    [(5, ["cpu"], 1, 5), (5, ["cpu"], 2, 2), (1, ["cpu", "cpu"], 2, 1), (5, ["cuda:0"], 2, 5)],
)
def test_rounds_in_flight_share_the_tasks_of_a_cpu(
    max_tasks: int, devices: list[str], steps_in_flight: int, expected: int
) -> None:
    assert tasks_of_a_round(max_tasks, devices, steps_in_flight) == expected


def test_a_request_with_a_used_id_is_refused() -> None:
    model = Tagger()
    with running(model) as (workers, outcomes):
        asked = ask(model, 1)["0"]
        with workers._changed:
            workers.submit(CellRequest("same", asked.graph))
            with pytest.raises(ValueError, match="request id same is already in use"):
                workers.submit(CellRequest("same", asked.graph))
        outcomes.wait_for(lambda: "same" in outcomes.results)


class Fragile:
    """A cell that fails at a given token."""

    def __init__(self) -> None:
        def run(weights: Any, token: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
            if bool((token == 13).any()):
                raise RuntimeError("unlucky")
            return {"h": h + token[:, None]}

        inputs = {"token": Value((), "int32"), "h": State((2,))}
        self.name = "fragile"
        self.cells = (Cell("fragile", run, inputs, {"h": Output((2,), returned=True)}, sizes=(1, 2)),)
        self.inputs = self.outputs = ()

    def request(self, name: str, *tokens: int) -> CellRequest:
        graph = CellGraph()
        graph.result("h", graph.chain(self.cells[0], len(tokens), token=tokens), "h")
        return CellRequest(name, graph)

    def unfold(self, inputs: Any) -> CellGraph:
        raise NotImplementedError

    def finish(self, results: Any) -> Any:
        return results


@pytest.mark.parametrize("devices", [1, 3])
def test_a_cell_that_fails_ends_all_workers_and_reports_once(devices: int) -> None:
    model = Fragile()
    with running(model, devices) as (workers, outcomes):
        workers.submit(model.request("good", 1, 2))
        outcomes.wait_for(lambda: "good" in outcomes.results)
        for number in range(4):
            workers.submit(model.request(f"bad {number}", 13))
        outcomes.wait_for(lambda: bool(outcomes.failures))
        for thread in workers._threads:
            thread.join(60)
            assert not thread.is_alive()
        assert outcomes.failures == ["the worker on cpu failed: RuntimeError: unlucky"]
        with pytest.raises(RuntimeError, match="the workers have ended: the worker on cpu failed"):
            workers.submit(model.request("late", 1))


def test_nothing_can_be_submitted_after_close() -> None:
    model = Fragile()
    with running(model) as (workers, _):
        workers.close()
        with pytest.raises(RuntimeError, match="the workers have ended: closed"):
            workers.submit(model.request("late", 1))


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ([], {}, "devices is empty"),
        (["gpu"], {}, "device is 'gpu'; it must be cpu, or cuda and a number, such as cuda:0"),
        (["cuda:99"], {}, "device is cuda:99; this machine has [0-9]+ CUDA devices"),
        (["cpu"], {"steps_in_flight": 0}, "steps_in_flight is 0; it must be at least 1"),
        (["cpu"], {"max_tasks": 0}, "max_tasks is 0; it must be at least 1"),
        (["cpu"], {"capacity": 1}, "capacity is 1; it must be at least 2"),
    ],
)
def test_settings_out_of_range_are_refused(devices: list[str], options: dict[str, int], message: str) -> None:
    nothing: Any = lambda _: None  # noqa: E731
    with pytest.raises(ValueError, match=message):
        Workers(Tagger(), devices, clock=time.monotonic, on_outputs=nothing, on_failure=nothing, **options)


def test_the_thread_of_a_worker_makes_its_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: dict[str, torch.device] = {}

    def on_cpu(cells: Sequence[Cell], types: dict[Cell, int], device: str, **options: Any) -> CellExecutor:
        return CpuExecutor(cells, types, capacity=options["capacity"], sizes=options["sizes"])

    monkeypatch.setattr("holdfast.cells.workers.make_executor", on_cpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(
        "torch.cuda.set_device", lambda device: chosen.update({threading.current_thread().name: device})
    )
    with running(Tagger(), ["cuda:1"]):
        pass  # closing the workers waits for the thread
    assert chosen == {"cells-0-cuda:1": torch.device("cuda:1")}


@pytest.mark.parametrize(("devices", "expected"), [(1, 2), (2, 1), (4, 1)])
def test_workers_on_the_cpu_share_the_threads_of_pytorch(devices: int, expected: int) -> None:
    seen: set[int] = set()

    def run(weights: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if threading.current_thread() is not threading.main_thread():
            seen.add(torch.get_num_threads())
        return {"y": x + 1}

    cell = Cell("threads", run, {"x": Value()}, {"y": Output(returned=True)})

    class Counting:
        cells = (cell,)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with running(Counting(), devices) as (workers, outcomes):
            for name in range(40):
                graph = CellGraph()
                graph.result("y", graph.add(cell, 1, x=[name]), "y")
                workers.submit(CellRequest(str(name), graph))
            outcomes.wait_for(lambda: len(outcomes.results) == 40)
    finally:
        torch.set_num_threads(before)
    assert seen == {expected}


@pytest.mark.parametrize("devices", [1, 2])
def test_who_receives_outputs_may_close_the_workers_from_there(devices: int) -> None:
    seen: list[str] = []
    done = threading.Event()

    def take(outputs: list[CellOutput]) -> None:
        seen.extend(output.request_id for output in outputs)
        workers.close()
        done.set()

    model = Tagger()
    (asked,) = ask(model, 1).values()
    workers = Workers(model, ["cpu"] * devices, clock=time.monotonic, on_outputs=take, on_failure=seen.append)
    workers.submit(CellRequest("a", asked.graph))
    assert done.wait(60) and seen == ["a"]
    with pytest.raises(RuntimeError, match="the workers have ended: closed"):
        workers.submit(CellRequest("b", asked.graph))
    workers.close()
