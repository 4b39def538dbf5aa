"""Handler: answers the client's messages about one part of an engine. Router: gives each message to its handler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from holdfast.core.types import Request
from holdfast.engine import messages
from holdfast.lm.parts.message import Message
from holdfast.lm.types import LanguageLoop

Found = TypeVar("Found", bound="Handler")


class Handler:
    """One part's side towards the client. All methods are called in the loop's thread, between two steps.

    A handler overrides the methods that it needs. When its own threads have something ready, it calls the `wake` that
    it was made with.
    """

    receives: tuple[type, ...] = ()
    """The types of the messages that it receives. No other handler of the engine receives them."""

    def receive(self, message: Any) -> None:
        """Take a message of one of these types. `answers` gives the results."""
        raise RuntimeError(f"{type(self).__name__} was given {type(message).__name__}")

    def answers(self) -> Iterable[Message]:
        """Results of messages, and of the handler's own work, since the last call."""
        return ()

    @property
    def busy(self) -> bool:
        """Whether `answers` will have something to do without any step of the loop. Then it calls `wake`."""
        return False

    @property
    def ready(self) -> bool:
        """Whether `answers` has something to do now."""
        return False

    @property
    def awaited(self) -> bool:
        """Whether a request of the loop waits for something that this handler's threads do."""
        return False

    def between_steps(self) -> bool:
        """Whether the last step, which gave no output, leaves a pause in the handler's own work."""
        return False

    def stats(self) -> Mapping[str, float]:
        """The fields of SchedulerStats that the handler knows."""
        return {}

    def flush(self, loop: LanguageLoop, seconds: float) -> None:
        """The engine is about to end: keep valuable state, within this many seconds."""

    def stop(self) -> None:
        """End the work of other threads for the handler. The loop is closed next."""

    def close(self) -> None:
        """The loop is closed: release the rest."""


class Gate(ABC):
    """A check that a new request may have to pass before it is queued. For the thread of the loop."""

    @abstractmethod
    def take(self, request: Request) -> bool:
        """Whether the gate takes this request: it queues or refuses it later, by itself."""

    def abort(self, request_id: str) -> None:  # noqa: B027
        """Forget a request that the gate has taken, if it has."""


Refusal = Callable[[Any], Iterable[Message]]
"""Gives the answers to a message whose part is off."""


def no_answer(message: Any) -> Iterable[Message]:
    """The answers to a message that needs none."""
    return ()


def refusal(answer: Callable[[int, str], Message], reason: str) -> Refusal:
    """Gives the answers to a numbered message that is refused for this reason."""
    return lambda message: (answer(message.number, reason),)


class RefusalHandler(Handler):
    """Answers the messages of parts that an engine does not have."""

    def __init__(self, refusals: Mapping[type, Refusal]) -> None:
        """`refusals` are the functions that answer a message, by its type."""
        self.receives = tuple(refusals)
        self._refusals = refusals
        self._answers: list[Message] = []

    def receive(self, message: Any) -> None:
        self._answers += self._refusals[type(message)](message)

    def answers(self) -> Iterable[Message]:
        answers, self._answers = self._answers, []
        return answers


FAULTS: Mapping[type, str] = {messages.Start: "the engine was told to start twice"}
"""The fault of a message that must not come, by the type of the message."""


class Router:
    """Gives each message to the handler of its type, and sends what the handlers answer."""

    def __init__(self, handlers: Collection[Handler], send: Callable[[Message], None]) -> None:
        self._send = send
        self._handlers = {kind: handler for handler in handlers for kind in handler.receives}
        self._answering = [each for each in handlers if type(each).answers is not Handler.answers]

    def receive(self, arrived: Iterable[Message]) -> bool:
        """Take these messages, in order. Returns False, and leaves the rest, once one asks the engine to end.

        Raises RuntimeError for a message that an engine of a language model does not know.
        """
        for message in arrived:
            kind = type(message)
            if kind in self._handlers:
                self._handlers[kind].receive(message)
            elif kind is messages.Shutdown:
                return False
            else:
                raise RuntimeError(FAULTS.get(kind, f"the engine of a language model was sent {kind.__name__}"))
        return True

    def send_answers(self) -> None:
        """Send the handlers' answers."""
        for handler in self._answering:
            for answer in handler.answers():
                self._send(answer)


def find(handlers: Iterable[Handler], kind: type[Found]) -> Found:
    """The handler of a kind. Raises LookupError if the engine has none."""
    for handler in handlers:
        if isinstance(handler, kind):
            return handler
    raise LookupError(f"the engine has no {kind.__name__}")
