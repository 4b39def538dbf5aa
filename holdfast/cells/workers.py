"""Workers: an application's cells on one or several devices, one thread and one loop for each, over one planner."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch

from holdfast.cells.application import Application
from holdfast.cells.cell import Cell, sizes_by_type
from holdfast.cells.executor import CellExecutor, Copies, CpuExecutor
from holdfast.cells.gated_check import check_gated
from holdfast.cells.plan import CellOutput, CellOutputs, CellRequest, CellRequests, Returned, Round
from holdfast.cells.planner import CAPACITY, MAX_TASKS, CellPlanner, CellStats, CellWorker, prepare
from holdfast.cells.types import number
from holdfast.loop.contracts import Clock, Observer
from holdfast.loop.loop import Loop

ROUNDS = 2
"""Number of rounds in flight by default."""
CellLoop = Loop[CellRequest | CellRequests, Round, Returned, CellOutputs, CellStats]


class Turns(Protocol):
    """Says when a worker may use a device that it shares with another process."""

    def pause(self, now: float) -> float:
        """Seconds for which no round may begin; 0 if one may."""
        ...

    def spent(self, seconds: float) -> None:
        """Note the time of a round."""
        ...


NO_TURNS: Mapping[str, Turns] = MappingProxyType({})
"""Workers that share no device."""


class RoundTimer(Observer[Round, Returned]):
    """Notes the time in which a worker has rounds in flight."""

    def __init__(self, turns: Turns, clock: Clock) -> None:
        self._turns, self._clock = turns, clock
        self._in_flight, self._since = 0, 0.0

    def planned(self, plan: Round) -> None:
        if not self._in_flight:
            self._since = self._clock()
        self._in_flight += 1

    def ended(self, result: Returned) -> None:
        now = self._clock()
        self._turns.spent(now - self._since)
        self._in_flight, self._since = self._in_flight - 1, now

    def close(self) -> None:
        pass


class Workers:
    """Runs requests of one application on its workers, until `close` or until an executor fails.

    Each worker's thread plans, runs and completes rounds, and sleeps while it has nothing to do. All threads plan under
    one lock. `submit`, `abort` and `stats` may be called from any thread. Workers on the CPU share PyTorch's threads,
    as many as the thread that makes the workers may use.
    """

    def __init__(
        self,
        application: Application,
        devices: Sequence[str],
        *,
        types: Mapping[Cell, int] | None = None,
        sizes: Sequence[tuple[int, ...]] | None = None,
        max_tasks: int = MAX_TASKS,
        capacity: int = CAPACITY,
        steps_in_flight: int = ROUNDS,
        clock: Clock,
        on_outputs: Callable[[Sequence[CellOutput]], None],
        on_failure: Callable[[str], None],
        turns: Mapping[str, Turns] = NO_TURNS,
    ) -> None:
        """Prepare every cell at every size on each of the devices, "cpu" or "cuda:N", and start the threads.

        `types` numbers the cells; by default `types.number` does. `sizes` are batch sizes by type number, by default
        those of the cells. `capacity` is in rows, on each device.

        `steps_in_flight` is in rounds. With one, nothing runs while the next round is planned, so the type of the
        highest priority keeps the worker for as long as any of its nodes is ready. With two, types take turns.
        `max_tasks` bounds the tasks of a round on GPUs. CPUs compute a round only when it is waited for. On CPUs it
        therefore bounds all tasks in flight; otherwise a request would wait twice as long until it joins.

        `turns` are those of devices that workers share with other processes.

        `on_outputs` receives the requests that have ended, in a worker's thread. `on_failure` receives the reason,
        once, if an executor or `on_outputs` raises; nothing runs after that.

        Raises ValueError for a number that is out of range, for a cell that differs from its declaration, and for a
        gated form whose results differ from those of the cell's `run`.
        """
        if not devices:
            raise ValueError("devices is empty; there must be at least one")
        if steps_in_flight < 1:
            raise ValueError(f"steps_in_flight is {steps_in_flight}; it must be at least 1")
        if max_tasks < 1:
            raise ValueError(f"max_tasks is {max_tasks}; it must be at least 1")
        self._on_outputs, self._on_failure = on_outputs, on_failure
        self._changed = threading.Condition()
        """Guards the planner and all fields below. It is notified when a sleeping worker may have something to do."""
        self._changes = 0
        self._torch_threads = max(1, torch.get_num_threads() // len(devices))
        self._ended: str | None = None
        """The reason why the workers have ended; None while they run."""
        prepare()
        if types is None:
            types = number(application.cells)
        sizes = sizes_by_type(types, sizes)
        of_a_round = tasks_of_a_round(max_tasks, devices, steps_in_flight)
        self._planner = CellPlanner(
            application.cells, types, sizes=sizes, workers=len(devices), max_tasks=of_a_round, capacity=capacity
        )
        self._executors: list[CellExecutor] = []
        self._workers: list[_Worker] = []
        for place, device in enumerate(devices):
            executor = make_executor(
                application.cells,
                types,
                device,
                capacity=capacity,
                sizes=sizes,
                max_tasks=of_a_round,
                rounds_in_flight=steps_in_flight,
            )
            check_gated(executor)
            self._executors.append(executor)
            shared = turns.get(device)
            worker = _Worker(self, self._planner.worker(place), () if shared is None else (shared,))
            self._workers.append(worker)
            timers = [RoundTimer(each, clock) for each in worker.turns]
            worker.loop = Loop(worker, executor, steps_in_flight, clock, observers=timers)
        if len(devices) > 1:
            for executor in self._executors:
                executor.connect(self._executors)
        self._threads = [
            threading.Thread(target=self._run, args=(worker, device), name=f"cells-{place}-{device}", daemon=True)
            for place, (worker, device) in enumerate(zip(self._workers, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: CellRequest | CellRequests) -> None:
        """Queue requests. Raises ValueError if one can never run, RuntimeError after a failure or `close`.

        None of them is queued then.
        """
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(f"the workers have ended: {self._ended}")
            self._planner.add(request)
            self._notify()

    def abort(self, request_id: str) -> None:
        """End a request. Its output never comes, unless it has already ended."""
        with self._changed:
            if self._ended is None:
                self._planner.abort(request_id)
                self._notify()

    def stats(self) -> CellStats:
        """The current queues and rows."""
        with self._changed:
            return self._planner.stats()

    def copies(self) -> list[Copies]:
        """Counts of how each worker read the inputs of its tasks so far."""
        return [executor.copies() for executor in self._executors]

    def close(self) -> None:
        """Stop the threads after their current round and release the devices. Requests that have not ended are lost."""
        self._end("closed")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for worker in self._workers:
            worker.loop.close()

    def _run(self, worker: _Worker, device: str) -> None:
        torch.set_num_threads(self._torch_threads)  # applies to the calling thread only
        use_device(device)
        try:
            while self._ended is None:
                outputs = worker.loop.step()
                if outputs:
                    self._on_outputs(outputs)
                elif outputs is None:
                    self._sleep(worker)
        except Exception as error:
            reason = f"the worker on {device} failed: {type(error).__name__}: {error}"
            if self._end(reason):
                self._on_failure(reason)

    def _sleep(self, worker: _Worker) -> None:
        """Wait until something has changed since the worker found nothing to plan, or until its turn comes."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != worker.seen or self._ended is not None, worker.paused)

    def _notify(self) -> None:
        self._changes += 1
        self._changed.notify_all()

    def _end(self, reason: str) -> bool:
        """End all threads. Returns whether this call was the first to do so."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = reason
            self._changed.notify_all()
            return True


class _Worker:
    """One worker's Planner, under the lock that all workers share."""

    loop: CellLoop

    def __init__(self, workers: Workers, planner: CellWorker, turns: tuple[Turns, ...] = ()) -> None:
        """`turns` are those of its device, if it shares one."""
        self._workers, self._planner, self.turns = workers, planner, turns
        self.paused: float | None = None
        """Seconds until its turn, if it had work and was not its turn when it last planned; None otherwise."""
        self._lock = workers._changed
        self.seen = -1
        """The number of changes when the worker last planned."""

    def add(self, request: CellRequest | CellRequests) -> None:
        self._workers.submit(request)

    def abort(self, request_id: str) -> None:
        self._workers.abort(request_id)

    def schedule(self, now: float) -> Round | None:
        with self._lock:
            self.seen = self._workers._changes
            pause = max((turns.pause(now) for turns in self.turns), default=0.0)
            self.paused = pause if pause and self._planner.has_work() else None
            return None if pause else self._planner.schedule(now)

    def update(self, plan: Round, result: Returned, now: float) -> CellOutputs:
        with self._lock:
            outputs = self._planner.update(plan, result, now)
            if len(self._workers._workers) > 1:
                self._workers._notify()
            return outputs

    def has_work(self) -> bool:
        with self._lock:
            return self._planner.has_work()

    def stats(self) -> CellStats:
        return self._workers.stats()


def tasks_of_a_round(max_tasks: int, devices: Sequence[str], steps_in_flight: int) -> int:
    """Largest number of tasks in a round, for workers that get `max_tasks` at a time."""
    return max(1, max_tasks // steps_in_flight) if "cpu" in devices else max_tasks


def use_device(device: str) -> None:
    """Make a GPU the calling thread's current one, so that nothing there makes a context on GPU 0. Ignores "cpu".

    Raises ValueError if there is no such device.
    """
    require_device(device)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))


def require_device(device: str) -> None:
    """Raise ValueError unless this is "cpu", or "cuda:N" of this machine."""
    number = device.removeprefix("cuda:")
    if device != "cpu" and (number == device or not number.isdecimal()):
        raise ValueError(f"device is {device!r}; it must be cpu, or cuda and a number, such as cuda:0")
    if device != "cpu" and int(number) >= torch.cuda.device_count():
        raise ValueError(f"device is {device}; this machine has {torch.cuda.device_count()} CUDA devices")


def make_executor(
    cells: Sequence[Cell],
    types: Mapping[Cell, int],
    device: str,
    *,
    capacity: int,
    sizes: Sequence[tuple[int, ...]],
    max_tasks: int,
    rounds_in_flight: int,
) -> CellExecutor:
    """The executor of a device, "cpu" or "cuda:N". Raises ValueError if there is no such device."""
    if device == "cpu":
        return CpuExecutor(cells, types, capacity=capacity, sizes=sizes)
    require_device(device)
    from holdfast.cells.executor_cuda import CudaExecutor  # imported here, so that CPUs need no Triton

    return CudaExecutor(
        cells,
        types,
        device,
        capacity=capacity,
        sizes=sizes,
        max_tasks=max_tasks,
        rounds_in_flight=rounds_in_flight,
    )
