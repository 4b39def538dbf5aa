"""Messages about pauses of conversations."""

from __future__ import annotations

from holdfast.core.pause import Pause
from holdfast.lm.parts.message import Message


class NotePause(Message, tag="note-pause"):
    """To the engine: what is known of the pause after an answer that has ended. There is no answer.

    `core.pause.Pause` explains the fields. The engine ignores a request that it does not know any more.
    """

    request_id: str
    kind: str = ""
    expected: float | None = None
    """Seconds from now to the next turn, as the client expects."""
    keep: float | None = None
    """Seconds from now for which the client wants the state kept."""
    superseded: bool = False

    @classmethod
    def of(cls, request_id: str, pause: Pause, now: float) -> NotePause:
        """The note of a pause whose `keep_until` is on the clock that says `now`."""
        keep = None if pause.keep_until is None else pause.keep_until - now
        return cls(request_id, pause.kind, pause.expected, keep, pause.superseded)

    def pause(self, now: float) -> Pause:
        """The pause, with `keep_until` on the clock that says `now`."""
        until = None if self.keep is None else now + self.keep
        return Pause(self.kind, self.expected, until, self.superseded)


class WarmState(Message, tag="warm-state"):
    """To the engine: a turn that begins with this chain of block digests comes soon. There is no answer."""

    chain: list[bytes]


ToEngine = NotePause | WarmState
