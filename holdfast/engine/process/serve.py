"""The engine process, started by `Child`: take messages, do a step, send its outputs, until the client ends it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from holdfast.core.stages import Stage, Stages
from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.link import (
    FAILED,
    Parent,
    await_link,
    die_with_parent,
    end_process,
    exit_at_end_of_input,
    one_line,
)
from holdfast.engine.logs import log_as_parent
from holdfast.engine.process.clients import Clients
from holdfast.engine.process.door import Door
from holdfast.engine.process.handler import Gate, Handler, Router
from holdfast.engine.process.requests import ClockHandler, RequestHandler, StatsHandler
from holdfast.engine.process.step_log import StepLog
from holdfast.engine.process.watched import Watched
from holdfast.engine.ranks.ranks import start_ranks
from holdfast.engine.spawn import BUILD
from holdfast.engine.wire import WIRE
from holdfast.files.regular import read_bytes
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import LanguageLoop
from holdfast.loop.contracts import Clock

T = TypeVar("T")
Admit = Callable[[Parent, messages.EngineInfo], Parent | Clients]
"""Joins the parent and the clients that attach, once the engine is built."""

STEPS_PER_COLLECTION = 64
"""Steps between two collections of Python's new garbage. A pause collects it too. Survivors are not scanned again."""
MESSAGE_SECONDS = 0.004
"""Seconds between two steps after which no further message is taken. A step on a device takes longer in most cases."""
SWITCH_SECONDS = 1e-4
"""In an engine of cells: how long one thread may keep another from running Python. Several threads plan and submit."""
STEPS_PER_MESSAGE = 256
"""Number of steps after which they are reported. They are also reported before each answer to Ask."""
LULL_SECONDS = 0.2
"""Seconds without a step before a pause is used to prepare something: a client that sends its next request at once
would wait for it, up to 70 ms for a large graph. Other messages, such as questions about the engine's health, neither
begin a lull nor end it: a server that is asked every 0.1 s whether it is ready would never become so."""
QUIET_SECONDS = 1.0
"""Length of a pause in which all garbage is collected. That takes as long as several steps."""
WATCHED_SECONDS = 0.05
"""Seconds between two reports of an idle engine to a client that watches."""
FLUSH_SECONDS = 3.0
"""Most seconds for which an engine that must end goes on to write state to the tiers below the host."""
AWAITED_SECONDS = 0.05
"""Seconds between two checks of requests that all wait for a part's threads: they may have waited long enough."""
STUCK_SECONDS = 5.0
"""Seconds that a process has to end after another rank has failed."""

log = logging.getLogger("holdfast.engine")


def main(parent_pid: int, device: str, builder: str) -> int:
    """Build the engine that the client asks for and run it until the client ends it. Returns the exit status."""
    die_with_parent(parent_pid)
    log_as_parent()
    loading = Loading(device, builder)
    parent = Parent(await_link())
    exit_at_end_of_input()
    try:
        parent.send(messages.Hello(time.monotonic()))
        begin_as_told(parent, loading)
        return 0
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exc()
        parent.send(messages.Failure(one_line(error)))
        return FAILED
    finally:
        parent.close()


def begin_as_told(parent: Parent, loading: Loading) -> None:
    """Build and serve the engine that the first message asks for."""
    (start,) = parent.receive()
    match start:
        case messages.Start():
            run(start, parent, loading)
        case messages.StartApp():
            run_app(start, parent, loading)
        case _:
            raise RuntimeError(f"the first message was {type(start).__name__}, not Start")


class Loading:
    """Imports PyTorch and the builder's module in a thread, while the client prepares its first message."""

    def __init__(self, device: str, builder: str = BUILD) -> None:
        """Begin. `builder` is the module to load.

        `device` is `cpu`, or ends with the number of a GPU. The context of that GPU, if it exists, is made meanwhile.
        """
        self.began = time.monotonic()
        self.ended = self.began
        self._gpus = [] if device == "cpu" else [int(device.partition(":")[2])]
        self._builder = builder
        self._errors: list[BaseException] = []
        for gpu in self._gpus:
            threading.Thread(target=make_context, args=(gpu,), name="holdfast-make-context", daemon=True).start()
        self._thread = threading.Thread(target=self._load, name="holdfast-load", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all modules are imported. Raises the error of an import."""
        self._thread.join()
        for error in self._errors:
            raise error

    def _load(self) -> None:
        gc.disable()  # the collector would scan all modules again and again, a quarter of the import's time
        try:
            # This import takes seconds, so it is not at the top.
            import torch

            for gpu in self._gpus if torch.cuda.is_available() else ():
                threading.Thread(target=wake_gpu, args=(gpu,), name="holdfast-wake-gpu", daemon=True).start()
            importlib.import_module(self._builder)
        except BaseException as error:
            self._errors.append(error)
        finally:
            gc.freeze()
            gc.enable()
        self.ended = time.monotonic()


def run(start: messages.Start, parent: Parent, loading: Loading | None = None) -> None:
    """Build the engine and serve its client until the client ends it. Raises the errors of building and of steps.

    `loading` has begun to import PyTorch; by default that begins now.
    """
    with entrance(start) as admit:
        build_and_serve(start, parent, loading, admit)


@contextlib.contextmanager
def entrance(start: messages.Start) -> Iterator[Admit]:
    """Listen at the engine's address, if it has one. Inside the block, the function admits the clients that come.

    When the block ends, all attached clients get the reason. Raises ValueError, OSError.
    """
    if not start.listen:
        yield lambda parent, info: parent
        return
    opened: list[Clients] = []

    def admit(parent: Parent, info: messages.EngineInfo) -> Clients:
        opened.append(Clients(parent, door, welcome_of(start, info)))
        return opened[0]

    with contextlib.closing(Door(start.listen, start.listen_key)) as door:
        reason = "the engine was stopped"
        try:
            yield admit
        except Exception as error:
            reason = one_line(error)
            raise
        finally:
            for clients in opened:
                clients.end(reason)


def welcome_of(start: messages.Start, info: messages.EngineInfo) -> messages.Attached:
    """The first message to a client that attaches."""
    return messages.Attached(start.config, info, profile_of(info), version=__version__, wire=WIRE)


def profile_of(info: messages.EngineInfo) -> bytes:
    """The content of an engine's cost profile; empty if it has none."""
    with contextlib.suppress(OSError):
        return read_bytes(info.profile_path) if info.profile_path else b""
    return b""


def build_and_serve(start: messages.Start, parent: Parent, loading: Loading | None, admit: Admit) -> None:
    """Do the work of `run`. `admit` gives all clients once the engine is built."""
    last_resort = LastResort(parent.wake)
    ranks = start_ranks(start.config, last_resort)  # they load PyTorch meanwhile
    stages = begin(start.began, parent, loading or Loading(start.config.first_device))
    from holdfast.engine.process.build import build_engine

    build = partial(
        build_engine,
        start.config,
        stages=stages,
        ranks=ranks,
        measure=start.measure,
        priced=start.priced,
        on_progress=lambda stage: parent.send(messages.Progress(stage)),
        chunk_secret=start.chunk_secret,
        ledger=start.ledger,
        wake=parent.wake,
    )
    engine = build() if computes_on_gpu(start.config) else apart(build)
    # All objects so far live as long as the process, so no collection need scan them. `serve` decides when to collect.
    gc.collect()
    gc.freeze()
    gc.disable()
    last_resort.arm()
    clients = admit(parent, engine.info)
    parent.send(messages.Ready(engine.info))
    try:
        serve(engine.loop, clients, engine.handlers)
        for handler in engine.handlers:
            handler.flush(engine.loop, FLUSH_SECONDS)
    finally:
        engine.close()


def computes_on_gpu(config: EngineConfig) -> bool:
    """Whether steps run on a GPU."""
    import torch

    return config.device != "cpu" and torch.cuda.is_available()


def apart(build: Callable[[], T]) -> T:
    """The result of `build`, or its error, from a thread that then ends.

    OpenMP keeps a team of threads for each thread that has computed. Steps on a CPU run in a thread of their own. With
    a second team, OpenMP would count more threads than cores, and let its threads sleep between two products.
    """
    with ThreadPoolExecutor(1, "holdfast-build") as thread:
        return thread.submit(build).result()


def run_app(start: messages.StartApp, parent: Parent, loading: Loading) -> None:
    """Build the engine of an application of cells and serve its client until it ends. Raises errors as `run` does."""
    stages = begin(start.began, parent, loading)
    from holdfast.engine.process import apps

    sys.setswitchinterval(SWITCH_SECONDS)
    with stages.stage("application"):
        application = apps.find(start.app)
    with stages.stage("cells"):
        engine = apps.AppEngine(start, application, parent)
    gc.collect()
    gc.freeze()
    parent.send(messages.AppReady(engine.info(stages)))
    engine.serve()
    engine.close()  # not after a failure, which must be reported even if another worker hangs


def begin(began: float, parent: Parent, loading: Loading) -> Stages:
    """The stages of a start so far: the process, and `loading`. Waits until `loading` has ended."""
    stages = Stages(began, time.monotonic)
    stages.done.append(Stage("process", 0.0, stages.elapsed()))
    parent.send(messages.Progress("loading PyTorch"))
    loading.wait()
    stages.done.append(Stage("PyTorch", loading.began - began, loading.ended - began))
    return stages


def make_context(gpu: int) -> None:
    """Make the context of a GPU, by its number, with the driver alone. Does nothing for a PyTorch without CUDA.

    It takes a while, and needs neither PyTorch nor Python's lock. An error here occurs again, and is reported, at the
    first use.
    """
    found = importlib.util.find_spec("torch")  # finds it, and imports nothing
    origin = getattr(found, "origin", "") or ""
    if not (Path(origin).parent / "lib" / "libtorch_cuda.so").exists():
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before its first use
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), gpu) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def wake_gpu(gpu: int) -> None:
    """Let PyTorch begin to use a GPU. An error here occurs again, and is reported, at the first use."""
    import torch

    with contextlib.suppress(Exception):
        torch.zeros(1, device=f"cuda:{gpu}")


def serve(loop: LanguageLoop, parent: Parent | Clients, handlers: Sequence[Handler]) -> None:
    """Handle all messages that have arrived, do one step, send its outputs; wait for a message when idle.

    `handlers` are the handlers of the engine's parts. Their own work goes on between two steps. Graphs are captured one
    at a time, while no request runs.
    """
    steps, watched = StepLog(time.monotonic), Watched(loop, parent.send)
    loop.observe(steps)
    router = Router([*core_handlers(loop, parent, steps, watched, handlers), *handlers], parent.send)
    worked_at = time.monotonic()
    for step in itertools.count():
        idle = not loop.has_work()
        if idle or step % STEPS_PER_COLLECTION == 0:
            gc.collect(0)
        watched.tell_due()
        lull = worked_at + LULL_SECONDS - time.monotonic()
        if idle and not router.receive(await_messages(loop, parent, handlers, watched, lull)):
            return
        if not router.receive(for_a_while(parent.waiting(), time.monotonic)):
            return
        router.send_answers()
        if loop.has_work():
            do_step(loop, parent, handlers)
            worked_at = time.monotonic()
            if len(steps) >= STEPS_PER_MESSAGE:
                parent.send(steps.take())


def for_a_while(arrived: Iterable[messages.ToEngine], clock: Clock) -> Iterator[messages.ToEngine]:
    """The messages that have arrived, until they have taken MESSAGE_SECONDS.

    Others stay where they are until after the next step, because streams wait for that step.
    """
    end = clock() + MESSAGE_SECONDS
    for message in arrived:
        yield message
        if clock() >= end:
            return


def core_handlers(
    loop: LanguageLoop, parent: Parent | Clients, steps: StepLog, watched: Watched, handlers: Sequence[Handler]
) -> list[Handler]:
    """The handlers of the messages that every engine answers."""
    gates = [handler for handler in handlers if isinstance(handler, Gate)]
    return [
        RequestHandler(loop, parent.send, gates),
        StatsHandler(loop, parent.send, steps, handlers),
        ClockHandler(parent.send, time.monotonic),
        watched,
    ]


def do_step(loop: LanguageLoop, parent: Parent | Clients, handlers: Sequence[Handler]) -> None:
    """Do one step and send its outputs. A pause in a part's own work is used like a pause of the loop."""
    outputs = loop.step()
    if outputs:
        parent.send(messages.Outputs(**outputs.by_name, sent_at=time.monotonic()))
    elif any(handler.between_steps() for handler in handlers):
        loop.prepare()
    elif outputs is None and any(handler.awaited for handler in handlers):
        parent.wait(AWAITED_SECONDS)  # nothing can run before that has come


def await_messages(
    loop: LanguageLoop, parent: Parent | Clients, handlers: Sequence[Handler], watched: Watched, lull: float
) -> list[messages.ToEngine]:
    """Use a pause of the loop until a message or a handler needs it. Returns the messages, if any came.

    All garbage is collected if nothing comes for QUIET_SECONDS. A client that watches gets reports meanwhile. The
    loop prepares nothing in the next `lull` seconds, because that may hold up a request that comes meanwhile.
    """
    idle = not any(handler.ready or handler.busy for handler in handlers)
    if idle and not loop.prepared and lull > 0 and parent.poll(lull):
        return parent.receive()
    while loop.prepare() and not parent.poll(0):
        pass
    if any(handler.ready for handler in handlers):
        return []
    if any(handler.busy for handler in handlers):
        parent.wait()
        return []
    while watched.on:
        if parent.poll(WATCHED_SECONDS):
            return parent.receive()
        watched.tell(idle=True)
    if not parent.poll(QUIET_SECONDS):
        gc.collect()
    return parent.receive()


class LastResort:
    """Ends the process some time after a rank has failed, if `serve` cannot: it may wait for a device."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` lets `serve` see that a rank has failed."""
        self._wake, self._serving = wake, False

    def arm(self) -> None:
        """The engine serves from now on. Before, the code that builds it sees the failure."""
        self._serving = True

    def __call__(self, reason: str) -> None:
        """Called when a rank has failed; in any thread."""
        if self._serving:
            self._wake()
            timer = threading.Timer(STUCK_SECONDS, self._end, [reason])
            timer.daemon = True
            timer.start()

    def _end(self, reason: str) -> None:
        log.critical("holdfast: %s", reason)
        os._exit(FAILED)


if __name__ == "__main__":
    end_process(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
