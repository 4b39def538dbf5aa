"""TurnMemory: turns that are not stored, for the connection that made them."""

from __future__ import annotations

from collections import OrderedDict

from holdfast.server.conversations.values import Context
from holdfast.server.replies import encode

MOST_TURNS = 16
"""Maximum number of turns of one connection that are kept."""
MOST_BYTES = 16 << 20
"""Maximum number of bytes of their items, as JSON. The newest turn is kept in any case."""


class TurnMemory:
    """The latest turns of one connection that are not stored. It ends with the connection."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, tuple[Context, int]] = OrderedDict()
        """States after turns, and their sizes in bytes, by the id of the response. The oldest is first."""

    def keep(self, response: str, context: Context) -> None:
        """Keep the state after a turn. Beyond the limits, forget the oldest turns."""
        self._turns[response] = context, len(encode(list(context.items)))
        while len(self._turns) > MOST_TURNS or (len(self._turns) > 1 and self._size > MOST_BYTES):
            self._turns.popitem(last=False)

    def find(self, response: str) -> Context | None:
        """Return the state after a turn; None if it is not kept."""
        found = self._turns.get(response)
        return None if found is None else found[0]

    def forget(self, response: str) -> None:
        """Forget the state after a turn, if it is kept."""
        self._turns.pop(response, None)

    @property
    def _size(self) -> int:
        return sum(size for _, size in self._turns.values())
