"""The engine's run: take messages, do a step, send what it gave, until the client says to end."""

from __future__ import annotations

import gc
import itertools

from holdfast.engine.build import build
from holdfast.engine.messages import (
    Abort,
    Ask,
    Outputs,
    Progress,
    Ready,
    Refused,
    Shutdown,
    Start,
    Stats,
    Submit,
    ToEngine,
)
from holdfast.engine.parent import Parent
from holdfast.lm.types import LanguageLoop

STEPS_PER_COLLECTION = 4096
"""Python's garbage is collected while the engine is idle, and after this many steps without a pause."""


def run(start: Start, parent: Parent) -> None:
    """Build the engine and serve its client until told to end. Raises what building or a step raises."""
    loop, info = build(
        start.config, began=start.began, measure=start.measure, on_progress=lambda stage: parent.send(Progress(stage))
    )
    # What exists now lives as long as the process: no collection need scan it. `serve` decides when to collect.
    gc.collect()
    gc.freeze()
    gc.disable()
    parent.send(Ready(info))
    try:
        serve(loop, parent)
    finally:
        loop.close()


def serve(loop: LanguageLoop, parent: Parent) -> None:
    """Handle all messages that have arrived, do one step, send its outputs; wait for a message when idle."""
    for step in itertools.count():
        idle = not loop.has_work()
        if idle or step % STEPS_PER_COLLECTION == 0:
            gc.collect()
        if idle and not handle(parent.receive(), loop, parent):
            return
        for message in parent.waiting():
            if not handle(message, loop, parent):
                return
        if loop.has_work():
            outputs = loop.step()
            if outputs:
                parent.send(Outputs(**outputs.columns._asdict()))


def handle(message: ToEngine, loop: LanguageLoop, parent: Parent) -> bool:
    """Handle one message. False if it asks the engine to end."""
    match message:
        case Submit(request):
            try:
                loop.add(request)
            except ValueError as error:
                parent.send(Refused(request.id, str(error)))
        case Abort(request_id):
            loop.abort(request_id)
        case Ask(number):
            parent.send(Stats(number, loop.stats()))
        case Shutdown():
            return False
        case Start():
            raise RuntimeError("the engine was told to start twice")
    return True
