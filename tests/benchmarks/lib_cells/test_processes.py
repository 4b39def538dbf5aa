"""Devices as processes: what travels between them, who gets a request, and how failures are reported."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe

import numpy as np
import pytest

from benchmarks.lib.cells import processes
from benchmarks.lib.cells.processes import (
    Process,
    Processes,
    SplitEngine,
    packed_group,
    packed_requests,
    serve_share,
    unpacked_group,
    unpacked_requests,
)
from benchmarks.lib.cells.workloads import Sample, complete_tree
from holdfast.cells.plan import CellOutput, CellOutputs, EndedGroup


class Echo:
    """A system whose results are the requests' tokens. It ends all requests in one step, once `go` is set."""

    def __init__(self, go: threading.Event) -> None:
        self._go = go
        self._added: list[tuple[list[str], list[Sample]]] = []
        self.drained = 0
        self.calls: list[str] = []

    def add(self, requests: Sequence[str], samples: Sequence[Sample]) -> None:
        self._added.append((list(requests), list(samples)))
        self.calls.append("add")

    def step(self, worker: int) -> Sequence[CellOutput] | None:
        self.calls.append("step")
        if not self._added:
            return None
        assert self._go.wait(60)
        requests, samples = self._added.pop(0)
        if requests == ["bad"]:
            raise ValueError("a bad request")
        tokens = [sample.tokens for sample in samples]
        results = {"tokens": (np.concatenate(tokens), np.cumsum([len(each) for each in tokens]))}
        return CellOutputs([EndedGroup(requests, np.zeros(len(requests)), results)])

    def fill(self) -> None:
        self.calls.append("fill")

    def drain(self) -> None:
        self._added.clear()
        self.drained += 1

    def watch(self, clock: str) -> None:
        assert clock == "perf_counter"

    def times(self) -> tuple[dict[str, float], int]:
        return {"update": 1.5}, 3


class EchoHost:
    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.chosen: list[str] = []
        self.engines: list[Echo] = []

    def choose(self, model: str) -> None:
        self.chosen.append(model)

    def engine(self, system: str) -> Echo:
        assert system == "echo"
        self.engines.append(Echo(self.go))
        return self.engines[-1]

    def ideal(self) -> float:
        return 12.5

    def peak(self, system: str) -> float:
        assert system == "echo"
        return 4.0


@contextmanager
def hosted(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[tuple[Processes, list[EchoHost]]]:
    """Devices whose work is done by threads of this process. The code on both sides is that of processes."""
    monkeypatch.setattr(processes, "gc", type("NoGc", (), dict.fromkeys(("collect", "freeze", "disable"), lambda: 0)))
    hosts, threads = [EchoHost() for _ in range(count)], []

    def started(self: Process, make: Callable[[], EchoHost]) -> None:
        self.connection, theirs = Pipe()

        def run() -> None:
            with theirs, suppress(ValueError):  # the other side receives it as a message
                serve_share(theirs, make)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        self._process = type("Thread", (), dict(exitcode=1))  # type: ignore[assignment]

    monkeypatch.setattr(Process, "__init__", started)
    made = Processes([lambda host=host: host for host in hosts])  # type: ignore[misc]
    try:
        yield made, hosts
    finally:
        for host in hosts:
            host.go.set()
        for process in made.all:
            process.connection.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def samples(*lengths: int) -> list[Sample]:
    return [Sample(np.arange(length, dtype=np.int32)) for length in lengths]


def results_of(engine: SplitEngine, count: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    while len(found) < count:
        found |= {each.request_id: each.results["tokens"].tolist() for each in engine.step(0) or ()}
    return found


def test_requests_arrive_as_they_were_sent() -> None:
    given = samples(3, 1, 5)
    ids, back = unpacked_requests(*packed_requests(["7", "8", "9"], given))
    assert ids == ["7", "8", "9"] and len(back) == 3
    assert [each.tokens.tolist() for each in back] == [each.tokens.tolist() for each in given]
    assert back[-1].tokens.dtype == np.int32 and [each.tokens.tolist() for each in back[1:]] == [[0], [0, 1, 2, 3, 4]]
    trees = [Sample(np.arange(each), complete_tree(each)) for each in (2, 4)]
    _, again = unpacked_requests(*packed_requests(["7", "8"], trees))
    assert [(each.tokens.tolist(), each.tree) for each in again] == [
        ([0, 1], trees[0].tree),
        ([0, 1, 2, 3], trees[1].tree),
    ]


def test_results_arrive_as_they_were_sent() -> None:
    wide = np.arange(6, dtype=np.float32).reshape(3, 2)
    group = EndedGroup(["7", "8"], np.array([1.5, 2.5]), {"wide": (wide, np.array([1, 3]))}, [{"own": wide[:1]}] * 2)
    back = unpacked_group(*packed_group(group))
    for at in range(2):
        assert back.output(at).request_id == group.ids[at] and back.output(at).scheduled_at == group.scheduled_at[at]
        for name, result in group.output(at).results.items():
            np.testing.assert_array_equal(back.output(at).results[name], result, strict=True)


def test_requests_go_to_the_process_with_the_fewest_and_their_results_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosted(monkeypatch, 2) as (made, hosts):
        assert made.ask("choose", "lstm") == [None, None]
        assert [host.chosen for host in hosts] == [["lstm"], ["lstm"]]
        engine = SplitEngine(made, "echo")
        for host in hosts:
            host.go.clear()
        engine.add(["1", "2", "3"], samples(4, 5, 6))
        engine.add(["4"], samples(2))
        engine.add(["5"], samples(1))
        assert engine._open == [3, 2]
        assert engine.step(0) is None
        for host in hosts:
            host.go.set()
        assert results_of(engine, 5) == {str(n): list(range(length)) for n, length in enumerate((4, 5, 6, 2, 1), 1)}
        assert engine._open == [0, 0]
        engine.drain()
        assert [host.engines[0].drained for host in hosts] == [1, 1]


def test_a_device_gets_work_before_results_are_sent_and_the_requests_of_one_message_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hosted(monkeypatch, 1) as (made, hosts):
        engine = SplitEngine(made, "echo")
        (echo,) = hosts[0].engines
        hosts[0].go.clear()
        sent: list[bool] = []
        fill = echo.fill

        def watched() -> None:
            sent.append(made.all[0].connection.poll(0))
            fill()

        monkeypatch.setattr(echo, "fill", watched)
        for number in range(3):
            engine.add([f"{number}"], samples(1))
        hosts[0].go.set()
        results_of(engine, 3)
        assert sent[0] is False
        assert echo.calls[:10] == ["step", *["add", "step", "fill"] * 3]


def test_the_times_of_all_processes_and_of_the_dealing_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted(monkeypatch, 2) as (made, _):
        engine = SplitEngine(made, "echo")
        engine.watch("perf_counter")
        engine.add(["1"], samples(4))
        results_of(engine, 1)
        seconds, ended = engine.times()
        assert (seconds["update"], ended) == (3.0, 6)
        assert seconds["deal"] > 0 and seconds["receive"] > 0
        assert made.ideal() == 12.5 and made.ask("peak", "echo") == [4.0, 4.0]


def test_the_failure_of_a_process_is_raised_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with hosted(monkeypatch, 1) as (made, _):
        engine = SplitEngine(made, "echo")
        engine.add(["bad"], samples(1))
        with pytest.raises(RuntimeError, match="has failed: ValueError: a bad request"):
            results_of(engine, 1)
        with pytest.raises(RuntimeError, match="has ended, with exit code 1"):
            engine.drain()
