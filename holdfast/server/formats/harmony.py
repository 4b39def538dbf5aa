"""GPT-OSS's answers (OpenAI's Harmony format): messages in channels, separated by special tokens.

<|channel|>analysis<|message|>They ask for the weather.<|end|><|start|>assistant<|channel|>commentary
to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

The prompt ends with <|start|>assistant. Messages in the analysis channel are reasoning. A message with a recipient is a
call. All other messages are text: the final channel, and commentary without a recipient. vLLM reads them the same way.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from holdfast.server.formats.parts import Parser, held_back

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
CALL, RETURN, CONSTRAIN = "<|call|>", "<|return|>", "<|constrain|>"
TAGS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ENDS = (END, CALL, RETURN, START, CHANNEL)
"""Tags that end the text of a message. The last two do so when a model omits the end tag."""
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAMESPACE = "functions."


class HarmonyMessages(Parser):
    """Reads messages of GPT-OSS.

    Calls of tools that are not in `names` count as reasoning, because they are the model's built-in tools.
    """

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = names
        self._kind = "final"
        self._thoughts = 0
        """Number of reasoning messages so far."""
        self._begun = False
        """Whether the current message has had any text."""
        self.state = self._opening

    def _opening(self) -> bool:
        """Read the beginning of an answer: a header, or plain text if the model wrote no header."""
        begun = self.rest.lstrip()
        if not begun and not self.last:
            return False
        tags = (CHANNEL, START, MESSAGE, "to=")
        if any(begun.startswith(tag) for tag in tags):
            self.state = self._header
        elif any(tag.startswith(begun) for tag in tags) and not self.last:
            return False
        else:
            self.state = self._body
        return True

    def outside(self) -> bool:
        """Skip everything up to the next header."""
        found = [at for tag in (START, CHANNEL, MESSAGE) if (at := self.rest.find(tag)) >= 0]
        if not found:
            self.rest = "" if self.last else self.rest[len(self.rest) - held_back(self.rest, TAGS) :]
            return False
        self.rest = self.rest[min(found) :]
        self.state = self._header
        return True

    def _header(self) -> bool:
        """Read a message's header, which names its channel and recipient."""
        header, found, rest = self.rest.partition(MESSAGE)
        if not found:
            if self.last:  # The answer was cut.
                self.rest = ""
            return False
        self.rest = rest
        channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
        recipient = RECIPIENT.search(header)
        self._begun = False
        if recipient is not None and (name := self._function(recipient[1])) is not None:
            self._kind = "call"
            self.begin(name)
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._kind = "analysis"
        else:
            self._kind = "final"
            self.trim()
        self.thinking = self._kind == "analysis"
        self.state = self._body
        return True

    def _function(self, recipient: str) -> str | None:
        """Return the name of the function that is the recipient; None if it is not one of the tools."""
        name = recipient.removeprefix(NAMESPACE)
        return name if recipient.startswith(NAMESPACE) or name in self._names else None

    def _body(self) -> bool:
        """Read the text of a message as it comes."""
        found = [at for tag in ENDS if (at := self.rest.find(tag)) >= 0]
        size = min(found) if found else len(self.rest) - (0 if self.last else held_back(self.rest, ENDS))
        self._give(self.rest[:size], last=bool(found) or self.last)
        self.rest = self.rest[size:]
        if not found:
            return False
        for tag in (END, CALL, RETURN):
            self.rest = self.rest.removeprefix(tag)
        self.thinking = False
        self.state = self.outside
        return True

    def _give(self, text: str, *, last: bool) -> None:
        if self._kind == "final":
            self.speak(text)
        elif self._kind == "call":
            if text or (last and not self._begun):
                self.argue(text or "{}")
        elif text:
            if not self._begun and self._thoughts:
                text = "\n" + text
            self._thoughts += not self._begun
            self.think(text)
        self._begun = self._begun or bool(text)
