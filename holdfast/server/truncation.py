"""Truncation: leaves turns out of the prompt when a conversation exceeds the context.

System messages and the last turn stay. When the rest does not fit, whole turns are left out, the oldest first, until
the prompt fills half of its room. So the next turns have the same beginning, which is in the cache. If a little were
cut at each turn, every position would shift each time, and nothing could be reused. The rule depends only on the
messages and on the sizes of the context and the answer, so it finds the same cut again without stored state.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence, Sized
from typing import Any, TypeVar

from holdfast.engine.client.text import Text
from holdfast.lm.limits import RequestRefused
from holdfast.server.formats.toolset import Toolset

Message = dict[str, Any]
Composed = TypeVar("Composed", bound=Sized)

ANSWER_SHARE = 8
"""Divisor of the context length that gives the minimum room for the answer. A longer answer gets more room."""
KNOWN_SIZES = 1 << 16
"""Maximum number of messages whose sizes are cached."""
MARGIN = 8
"""Number of tokens by which a message may be larger within a prompt than alone."""


class Truncation:
    """Shortens conversations to fit one model's context. Methods may be called from several threads."""

    def __init__(self, text: Text, context: int) -> None:
        self._text, self._context = text, context
        self._overhead: int | None = None
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """Number of tokens of each message, by digest. The most recently used is last."""
        self._lock = threading.Lock()

    def compose(
        self,
        messages: Sequence[Message],
        answer: int | None,
        build: Callable[[Sequence[Message]], Composed],
        toolset: Toolset | None = None,
    ) -> Composed:
        """Call `build` with the messages that stay. Returns its result, whose length is the prompt's in tokens.

        `answer` is the maximum number of tokens of the answer; None if it is unknown. The prompt also contains the
        tools of `toolset`. If not even the last turn fits, the result is a prompt that is too long. Raises the
        exceptions of `build`, and ValueError if a message's text cannot be tokenized.
        """
        room = self._context - (answer or 1)
        budget = self._context - max(answer or 0, self._context // ANSWER_SHARE)
        sizes = [self._size(message) for message in messages]
        tools = () if toolset is None else toolset.tools
        fixed = sum(self._size({"content": json.dumps(tool.shown())}) for tool in tools)
        while True:
            first = first_kept([message["role"] for message in messages], sizes, budget - fixed)
            kept = [each for at, each in enumerate(messages) if at >= first or each["role"] == "system"]
            last = first >= last_turn([message["role"] for message in messages])
            try:
                composed = build(kept)
                excess = len(composed) - room
            except RequestRefused:  # The prompt is too long for any tokenization.
                if last:
                    raise
                excess = max(budget // 2, 1)
            if excess <= 0 or last:
                return composed
            budget -= excess

    def _size(self, message: Message) -> int:
        """Return an upper estimate of the number of tokens that a message adds to a prompt."""
        content = message.get("content")
        rest = {name: value for name, value in message.items() if name not in ("role", "content") and value}
        written = content if isinstance(content, str) else json.dumps(content) if content else ""
        written += json.dumps(rest) if rest else ""
        digest = self._text.digest(written)
        with self._lock:
            if digest in self._sizes:
                self._sizes.move_to_end(digest)
                return self._sizes[digest]
        size = len(self._text.encode(written, add_special_tokens=False)) + self._of_template() + MARGIN
        with self._lock:
            self._sizes[digest] = size
            while len(self._sizes) > KNOWN_SIZES:
                self._sizes.popitem(last=False)
        return size

    def _of_template(self) -> int:
        """Return the number of tokens that the template adds around a message and before an answer."""
        if self._overhead is None:
            rendered = self._text.render_chat([{"role": "user", "content": "x"}])
            self._overhead = len(self._text.encode(rendered, add_special_tokens=False))
        return self._overhead


def first_kept(roles: Sequence[str], sizes: Sequence[int], budget: int) -> int:
    """Return the index of the first message to keep within `budget` tokens. System messages are always kept.

    The message begins a turn: a user's message with the answers and calls up to the next one. The function replays the
    conversation in order. Whenever a message that the model did not write exceeds the budget, it drops earlier turns
    until half of the budget is full. It never drops that message's own turn.
    """
    first, turn, total = 0, 0, sum(size for role, size in zip(roles, sizes, strict=True) if role == "system")
    for at, (role, size) in enumerate(zip(roles, sizes, strict=True)):
        if role == "system":
            continue
        if role == "user":
            turn = at
        total += size
        if role == "assistant" or total <= budget:
            continue
        while first < turn and total > budget // 2:
            stop = next((later for later in range(first + 1, turn) if roles[later] == "user"), turn)
            total -= sum(sizes[left] for left in range(first, stop) if roles[left] != "system")
            first = stop
    return first


def last_turn(roles: Sequence[str]) -> int:
    """Return the index of the message that begins the last turn."""
    return max((at for at, role in enumerate(roles) if role == "user"), default=0)
