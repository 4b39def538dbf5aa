"""Reads one answer: its reasoning, then its text and tool calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.server.formats.custom import InputReader
from holdfast.server.formats.parts import Arguments, CallBegin, Input, Parser, Part, Reasoning, held_back

LEAST_CUT = 2
"""Minimum number of characters at an answer's end that count as a closing tag cut short."""


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """Tags around a model's reasoning."""

    open: str
    close: str
    assumed: bool = False
    """Whether an answer begins with reasoning even without an opening tag."""

    def opened_by(self, prompt: str) -> bool:
        """Whether the prompt ends with an opening tag, so that the answer begins within reasoning."""
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.assumed and not end.endswith(self.close))


class AnswerReader:
    """Separates the reasoning at the beginning of an answer from the rest, which a parser reads."""

    def __init__(
        self, rest: Parser, tags: ReasoningTags | None = None, *, opened: bool = False, one_call: bool = False,
        custom: Collection[str] = (),
    ) -> None:  # fmt: skip
        """`opened` means that the answer begins within reasoning. `one_call` drops all calls after the first.

        `custom` are the names of the tools whose input is a text.
        """
        self._custom = custom
        self._input: InputReader | None = None
        """Reader of the call in progress, if its input is a text."""
        self._thinking = opened
        self.calls = 0
        """Number of calls that have begun."""
        self._tags = tags
        self._settled = tags is None
        """Whether the end of the reasoning has been found, or there is no reasoning."""
        self._begun = False
        self._held = ""
        self._rest = rest
        self._one_call = one_call

    @property
    def thinking(self) -> bool:
        """Whether the next text belongs to the reasoning."""
        return self._thinking or self._rest.thinking

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Add text. Returns the parts that are certain; with `last`, all remaining parts."""
        parts: list[Part] = []
        if not self._settled:
            text = self._think(self._held + text, last, parts)
        if self._settled:
            for part in self._rest.push(text, last):
                self.calls += isinstance(part, CallBegin)
                if not (self._one_call and self.calls > 1 and isinstance(part, CallBegin | Arguments)):
                    self._add(part, parts)
            if last:
                self._end_input(parts)
        return parts

    def _add(self, part: Part, parts: list[Part]) -> None:
        """Add a part. The arguments of a custom tool become its input."""
        if isinstance(part, CallBegin):
            self._end_input(parts)
            if part.name in self._custom:
                part, self._input = part._replace(custom=True), InputReader()
        elif isinstance(part, Arguments) and self._input is not None:
            part = Input(self._input.push(part.text))
            if not part.text:
                return
        parts.append(part)

    def _end_input(self, parts: list[Part]) -> None:
        if self._input is not None and (rest := self._input.end()):
            parts.append(Input(rest))
        self._input = None

    def _think(self, text: str, last: bool, parts: list[Part]) -> str:
        """Read reasoning, and add it to `parts`. Returns the text that follows it, if it has ended."""
        tags, self._held = self._tags, ""
        assert tags is not None
        if not self._begun:
            begun = text.lstrip()
            if begun.startswith(tags.open):
                text, self._thinking = begun[len(tags.open) :].lstrip(), True
            elif tags.open.startswith(begun) and not last:
                self._held = text
                return ""
            elif not self._thinking:
                self._settled = True
                return text
            else:
                text = begun
            if not text and not last:  # More blanks may follow the tag.
                self._held = tags.open
                return ""
            self._begun = True
        thought, found, rest = text.partition(tags.close)
        if found:
            self._settled, self._thinking = True, False
        elif not last:
            size = len(thought) - held_back(thought, (tags.close,))
            size = len(thought[:size].rstrip())
            thought, self._held = thought[:size], thought[size:]
        elif (cut := held_back(thought, (tags.close,))) >= LEAST_CUT:
            thought = thought[:-cut]
        if found or last:
            thought = thought.rstrip()
        if thought:
            parts.append(Reasoning(thought))
        if found:
            self._rest.trim()
        return rest
