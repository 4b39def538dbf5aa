"""The engine process, started by `Child`: take messages, do a step, send what it gave, until the client says to end."""

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from holdfast.core.config import EngineConfig
from holdfast.core.stages import Stage, Stages
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
from holdfast.engine.process.step_log import StepLog
from holdfast.engine.process.watched import Watched
from holdfast.engine.ranks.ranks import Ranks
from holdfast.engine.spawn import BUILD
from holdfast.lm.types import LanguageLoop

if TYPE_CHECKING:
    from holdfast.engine.process.adapter_desk import AdapterDesk  # it imports PyTorch
    from holdfast.engine.process.grammar_desk import GrammarDesk
    from holdfast.engine.process.move_desk import MoveDesk
    from holdfast.engine.process.tier_desk import TierDesk
    from holdfast.engine.process.tuning_desk import TuningDesk

T = TypeVar("T")

STEPS_PER_COLLECTION = 64
"""Python's new garbage is collected after this many steps, and at each pause. What survives is not looked at again."""
SWITCH_SECONDS = 1e-4
"""In an engine of cells: how long one thread may keep another from running Python. Several threads plan and submit."""
STEPS_PER_MESSAGE = 256
"""Steps are told after so many of them, and before each answer to Ask."""
QUIET_SECONDS = 1.0
"""All garbage is collected in a pause of this length. That takes as long as several steps."""
WATCHED_SECONDS = 0.05
"""How often somebody who watches is told of an idle engine."""
FLUSH_SECONDS = 3.0
"""How long an engine that is told to end goes on to write state to the tiers behind the host."""
TIER_SECONDS = 0.05
"""How often an engine that only waits for blocks of these tiers looks whether it has waited long enough."""
STUCK_SECONDS = 5.0
"""Time to end for a process of which another rank has failed."""

log = logging.getLogger("holdfast.engine")


def main(parent_pid: int, device: str, builder: str) -> int:
    """Build the engine that the client asks for and run it until told to end. Returns the exit status."""
    die_with_parent(parent_pid)
    loading = Loading(device, builder)
    parent = Parent(await_link())
    exit_at_end_of_input()
    try:
        parent.send(messages.Hello(time.monotonic()))
        match start := parent.receive():
            case messages.Start():
                run(start, parent, loading)
            case messages.StartApp():
                run_app(start, parent, loading)
            case _:
                raise RuntimeError(f"the first message was {type(start).__name__}, not Start")
        return 0
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exc()
        parent.send(messages.Failure(one_line(error)))
        return FAILED
    finally:
        parent.close()


class Loading:
    """Imports PyTorch and what builds the engine, in a thread, while the client gets ready to say what it wants."""

    def __init__(self, device: str, builder: str = BUILD) -> None:
        """Begin. `builder` is the module to load. On a GPU, unless `device` is cpu, its context is made meanwhile."""
        self.began = time.monotonic()
        self.ended = self.began
        self._device, self._builder = device, builder
        self._error: BaseException | None = None
        if device != "cpu":
            threading.Thread(target=make_context, name="holdfast-make-context", daemon=True).start()
        self._thread = threading.Thread(target=self._load, name="holdfast-load", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until all is imported. Raises what an import raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _load(self) -> None:
        gc.disable()  # it would look at all modules again and again, which is a quarter of the import's time
        try:
            # The import takes seconds.
            import torch

            if self._device != "cpu" and torch.cuda.is_available():
                threading.Thread(target=wake_gpu, name="holdfast-wake-gpu", daemon=True).start()
            importlib.import_module(self._builder)
        except BaseException as error:
            self._error = error
        finally:
            gc.freeze()
            gc.enable()
        self.ended = time.monotonic()


def run(start: messages.Start, parent: Parent, loading: Loading | None = None) -> None:
    """Build the engine and serve its client until told to end. Raises what building or a step raises.

    `loading` is what has begun to import PyTorch; by default it begins now.
    """
    ranks = Ranks(start.config) if start.config.layout.ranks > 1 else None  # they load PyTorch meanwhile
    stages = begin(start.began, parent, loading or Loading(start.config.device))
    from holdfast.engine.process.build import build_engine

    build = partial(
        build_engine,
        start.config,
        stages=stages,
        measure=start.measure,
        priced=start.priced,
        on_progress=lambda stage: parent.send(messages.Progress(stage)),
        ranks=ranks,
        chunk_secret=start.chunk_secret,
    )
    loop, info, desk, tuning, grammars, _, moves, tiers = build() if computes_on_gpu(start.config) else apart(build)
    # What exists now lives as long as the process: no collection need scan it. `serve` decides when to collect.
    gc.collect()
    gc.freeze()
    gc.disable()
    parent.send(messages.Ready(info))
    try:
        serve(loop, parent, desk, tuning, ranks, grammars, moves, tiers)
        if tiers is not None:
            tiers.flush(loop, FLUSH_SECONDS)
    finally:
        if moves is not None:
            moves.close()
        if grammars is not None:
            grammars.close()
        if desk is not None:
            desk.close()
        loop.close()
        if tuning is not None:
            tuning.close()


def computes_on_gpu(config: EngineConfig) -> bool:
    """Whether steps run on a GPU."""
    import torch

    return config.device != "cpu" and torch.cuda.is_available()


def apart(build: Callable[[], T]) -> T:
    """What `build` returns, or raises, in a thread that ends.

    OpenMP keeps a team of threads for each thread that has computed. Steps on a CPU run in a thread of their own. Were
    there a second team, OpenMP would count more threads than cores, and let its threads sleep between two products.
    """
    with ThreadPoolExecutor(1, "holdfast-build") as thread:
        return thread.submit(build).result()


def run_app(start: messages.StartApp, parent: Parent, loading: Loading) -> None:
    """Build the engine of an application of cells and serve its client until told to end. Raises as `run` does."""
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
    engine.close()  # not after a failure, which must be told even if another worker hangs


def begin(began: float, parent: Parent, loading: Loading) -> Stages:
    """The stages of a start so far: those of the process and of `loading`, whose end it waits for."""
    stages = Stages(began, time.monotonic)
    stages.done.append(Stage("process", 0.0, stages.elapsed()))
    parent.send(messages.Progress("loading PyTorch"))
    loading.wait()
    stages.done.append(Stage("PyTorch", loading.began - began, loading.ended - began))
    return stages


def make_context() -> None:
    """Make the context of the GPU that PyTorch will use, by the driver alone. Does nothing for a PyTorch without CUDA.

    It takes a while, and needs neither PyTorch nor Python's lock. An error here comes again, and is reported, at the
    first use.
    """
    torch = importlib.util.find_spec("torch")  # finds it, and imports nothing
    if torch is None or torch.origin is None or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as PyTorch does before its first use
    device, context = ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(OSError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def wake_gpu() -> None:
    """Let PyTorch begin to use the GPU. An error here comes again, and is reported, at the first use."""
    import torch

    with contextlib.suppress(Exception):
        torch.zeros(1, device="cuda")


def serve(
    loop: LanguageLoop,
    parent: Parent,
    desk: AdapterDesk | None = None,
    tuning: TuningDesk | None = None,
    ranks: Ranks | None = None,
    grammars: GrammarDesk | None = None,
    moves: MoveDesk | None = None,
    tiers: TierDesk | None = None,
) -> None:
    """Handle all messages that have arrived, do one step, send its outputs; wait for a message when idle.

    `desk` answers messages about adapters, and `tuning` those about tuning jobs, where there may be some. While a job
    can run, the loop is never idle. So graphs are captured between two of its steps, one at a time, while no request
    runs. `ranks` are the other processes of the engine; if one fails, this raises RankFailure at once. `grammars` takes
    the requests that have a grammar, where there may be some. `moves` says where KV blocks are, and moves them between
    engines; `tiers` moves blocks of the tiers behind the host.
    """
    if ranks is not None:
        ranks.on_failure = partial(end_soon, parent, ranks)
    desks = [each for each in (desk, tuning, grammars, moves, tiers) if each is not None]
    for each in desks:
        each.wake = parent.wake
    steps = StepLog()
    loop.observe(steps)
    watched = Watched(loop, parent.send)

    def handled(message: messages.ToEngine) -> bool:
        if isinstance(message, messages.Watch):
            watched.watch(message.seconds)
            return True
        if isinstance(message, messages.Ask):
            parent.send(steps.take())
        return handle(message, loop, parent, desk, tuning, grammars, moves)

    for step in itertools.count():
        if ranks is not None:
            ranks.check()
        idle = not loop.has_work()
        if idle or step % STEPS_PER_COLLECTION == 0:
            gc.collect(0)
        if watched.on:
            watched.tell()
        if idle:
            while loop.prepare() and not parent.poll(0):
                pass
            if (tuning is not None and tuning.ready) or (moves is not None and moves.ready):
                pass
            elif any(each.busy for each in desks):
                parent.wait()
            elif (message := await_message(parent, watched)) is not None and not handled(message):
                return
        for message in parent.waiting():
            if not handled(message):
                return
        for each in desks:
            for answer in each.answers():
                parent.send(answer)
        if loop.has_work():
            outputs = loop.step()
            if outputs:
                parent.send(messages.Outputs(**outputs.by_name))
            elif tuning is not None and tuning.between_steps():
                loop.prepare()
            elif outputs is None and tiers is not None and tiers.awaited:
                parent.wait(TIER_SECONDS)  # nothing can run before blocks have come
            if len(steps) >= STEPS_PER_MESSAGE:
                parent.send(steps.take())


def end_soon(parent: Parent, ranks: Ranks) -> None:
    """Let `serve` see that a rank has failed. If it cannot, as it waits for a device, the process ends all the same."""

    def end() -> None:
        log.critical("holdfast: %s", ranks.failure)
        os._exit(FAILED)

    parent.wake()
    timer = threading.Timer(STUCK_SECONDS, end)
    timer.daemon = True
    timer.start()


def await_message(parent: Parent, watched: Watched) -> messages.ToEngine | None:
    """The next message; None if `parent` is woken. All garbage is collected if it takes QUIET_SECONDS to come.

    While somebody watches, they are told meanwhile how things stand.
    """
    while watched.on:
        if parent.poll(WATCHED_SECONDS):
            return parent.receive()
        watched.tell(idle=True)
    if not parent.poll(QUIET_SECONDS):
        gc.collect()
    return parent.receive()


def handle(
    message: messages.ToEngine,
    loop: LanguageLoop,
    parent: Parent,
    desk: AdapterDesk | None = None,
    tuning: TuningDesk | None = None,
    grammars: GrammarDesk | None = None,
    moves: MoveDesk | None = None,
) -> bool:
    """Handle one message. False if it asks the engine to end."""
    match message:
        case messages.Submit(request) if request.params.grammar is not None and grammars is not None:
            grammars.submit(request)
        case messages.Submit(request):
            try:
                loop.add(request)
            except ValueError as error:
                parent.send(messages.Refused(request.id, str(error)))
        case messages.Abort(request_id):
            loop.abort(request_id)
            if grammars is not None:
                grammars.abort(request_id)
        case messages.LoadAdapter(number, name, path) if desk is not None:
            desk.load(number, name, path)
        case messages.UnloadAdapter(number, adapter) if desk is not None:
            desk.unload(number, adapter)
        case messages.LoadAdapter(number) | messages.UnloadAdapter(number):
            parent.send(messages.AdapterRefused(number, "this engine serves no adapters; give it max_adapters"))
        case messages.StartJob(number, job) if tuning is not None:
            tuning.start(number, job)
        case messages.ChangeJob(number, job, action) if tuning is not None:
            tuning.change(number, job, action)
        case messages.StartJob(number) | messages.ChangeJob(number):
            parent.send(messages.JobRefused(number, "this engine takes no tuning jobs; give it tuning"))
        case messages.FindChunks(number, chain) if moves is not None:
            parent.send(moves.find(number, chain))
        case messages.FetchChunks() if moves is not None:
            moves.fetch(message)
        case messages.StopFetch(number) if moves is not None:
            moves.stop(number)
        case messages.Ask(number):
            stats = loop.stats()
            parent.send(messages.Stats(number, stats if moves is None else moves.with_stats(stats)))
        case messages.Tick():
            parent.send(messages.Clock(time.monotonic()))
        case messages.Shutdown():
            return False
        case messages.Start():
            raise RuntimeError("the engine was told to start twice")
        case _:
            raise RuntimeError(f"the engine of a language model was sent {type(message).__name__}")
    return True


if __name__ == "__main__":
    end_process(main(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
