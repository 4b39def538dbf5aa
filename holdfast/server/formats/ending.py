"""The end of a chat's prompt: where an answer begins, after the last message, or within it."""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Sequence
from typing import Any

Message = dict[str, Any]


class PromptEnd(enum.Enum):
    """Where the prompt of a chat ends."""

    ANSWER = "answer"
    """After the beginning of an answer, which the template writes."""
    MESSAGE = "message"
    """After the last message."""
    OPEN = "open"
    """Within the last message, after its text: the answer goes on with it."""

    def rendered(self, render: Callable[[Sequence[Message], bool], str], messages: Sequence[Message]) -> str:
        """Return the prompt that ends here. `render` takes messages, and whether an answer begins after them.

        Raises ValueError if the template drops the end of the last message, so that the text cannot be continued.
        """
        if self is not PromptEnd.OPEN:
            return render(messages, self is PromptEnd.ANSWER)
        # The template may write the text several times, trim it or add to it, so a mark shows where it ends.
        mark = secrets.token_hex(16)
        *before, last = messages
        text = render([*before, last | {"content": f"{last['content']}{mark} "}], False)
        at = text.rfind(mark)
        if at < 0:
            raise ValueError("the chat template drops the text of the last message, so it cannot be continued")
        trims = not text.startswith(" ", at + len(mark))
        return text[:at].rstrip() if trims else text[:at]
