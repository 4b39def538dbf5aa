"""Options of the state that comes back ahead of a turn."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class PauseOptions(CoreConfig):
    """Whether state comes back to the device before the turn that needs it."""

    swap_in_ahead: bool = option(
        True,
        "copy a conversation's state from the host tier back to the device before its next turn, when a tool call is "
        "expected to end or a client says so; it takes only blocks and bandwidth that nobody needs",
    )
