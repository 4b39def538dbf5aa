"""Messages about the tally."""

from __future__ import annotations

from holdfast.lm.parts.message import Message


class AskTally(Message, tag="ask-tally"):
    """To the engine: answer with Tallied."""

    number: int


class Tallied(Message, tag="tallied"):
    """From the engine: the steps that were counted, and their positions."""

    number: int
    steps: int
    positions: int


class TallyRefused(Message, tag="tally-refused"):
    """From the engine: nothing is counted, with the reason."""

    number: int
    reason: str
