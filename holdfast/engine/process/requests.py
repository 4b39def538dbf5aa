"""Handlers of the messages that every engine of a language model knows: requests, figures, and the clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from holdfast.core.contract import ContractRefused
from holdfast.engine import messages
from holdfast.engine.process.handler import Gate, Handler
from holdfast.engine.process.step_log import StepLog
from holdfast.lm.limits import RequestRefused
from holdfast.lm.types import LanguageLoop
from holdfast.loop.contracts import Clock

Send = Callable[[messages.FromEngine], None]


class RequestHandler(Handler):
    """Queues and aborts requests. It answers at once."""

    receives = (messages.Submit, messages.Abort)

    def __init__(self, loop: LanguageLoop, send: Send, gates: Collection[Gate]) -> None:
        """A request is queued unless one of the `gates` takes it."""
        self._loop, self._send, self._gates = loop, send, gates

    def receive(self, message: messages.Submit | messages.Abort) -> None:
        if isinstance(message, messages.Abort):
            self._loop.abort(message.request_id)
            for gate in self._gates:
                gate.abort(message.request_id)
        elif not any(gate.take(message.request) for gate in self._gates):
            try:
                self._loop.add(message.request)
            except ContractRefused as error:
                self._send(messages.ContractRefusal(message.request.id, error.refusal))
            except RequestRefused as error:
                self._send(messages.Refused(message.request.id, str(error), error.param))
            except ValueError as error:
                self._send(messages.Refused(message.request.id, str(error)))


class StatsHandler(Handler):
    """Gives the engine's figures as they stand. It answers at once."""

    receives = (messages.Ask,)

    def __init__(self, loop: LanguageLoop, send: Send, steps: StepLog, handlers: Collection[Handler]) -> None:
        """`steps` are sent before each answer. `handlers` add what they know to the planner's figures."""
        self._loop, self._send, self._steps, self._handlers = loop, send, steps, handlers

    def receive(self, message: messages.Ask) -> None:
        self._send(self._steps.take())
        known: dict[str, Any] = {}
        for handler in self._handlers:
            known.update(handler.stats())
        stats = self._loop.stats()
        warming = not self._loop.prepared or stats.host_blocks_ready < stats.host_blocks_total
        self._send(messages.Stats(message.number, replace(stats, warming=int(warming), **known)))


class ClockHandler(Handler):
    """Gives the time. It answers at once."""

    receives = (messages.Tick,)

    def __init__(self, send: Send, clock: Clock) -> None:
        self._send, self._clock = send, clock

    def receive(self, message: messages.Tick) -> None:
        self._send(messages.Clock(self._clock()))
