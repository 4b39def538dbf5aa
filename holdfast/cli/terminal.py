"""The terminal side of `holdfast chat`: typed lines and blocks, completion, and word wrap."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import IO

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.patch_stdout import patch_stdout
from prompt_toolkit.shortcuts import CompleteStyle
from rich.cells import cell_len

FENCE = '"""'
"""Text that begins and ends a block of several lines."""
MORE = "... "
"""Prompt for the lines of a block after the first."""


async def lines(piped: bool, mark: Callable[[], str], completer: Completer) -> AsyncIterator[tuple[str, bool]]:
    """Yield the user's input until it ends: each line, or block of lines between fences, and whether it is a block.

    `mark` is the prompt of the next line, and `completer` completes it.
    """
    read = piped_lines() if piped else typed_lines(mark, completer)
    async for each in blocks(read):
        yield each


async def piped_lines() -> AsyncIterator[tuple[str, Callable[[bool], None]]]:
    """Yield the lines of standard input, in the form that `blocks` reads."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line, lambda inside: None


async def typed_lines(
    mark: Callable[[], str], completer: Completer
) -> AsyncIterator[tuple[str, Callable[[bool], None]]]:
    """Yield the lines that are typed at the terminal, in the form that `blocks` reads."""
    session: PromptSession[str] = PromptSession(
        reserve_space_for_menu=0,
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )
    within = False

    def set_within(inside: bool) -> None:
        nonlocal within
        within = inside

    while True:
        try:
            with patch_stdout(raw=True):  # A batch that ends is printed above the line that is being typed.
                line = await session.prompt_async(FormattedText([("bold", MORE if within else mark())]))
        except EOFError:
            return
        yield line, set_within


async def blocks(read: AsyncIterator[tuple[str, Callable[[bool], None]]]) -> AsyncIterator[tuple[str, bool]]:
    """Join the lines between fences. The function with each line must be called with whether a block continues."""
    block: list[str] | None = None
    async for line, set_within in read:
        if block is None and not line.lstrip().startswith(FENCE):
            yield line, False
            continue
        text = line.rstrip("\r\n")
        if block is None:
            block, text = [], text.lstrip()[len(FENCE) :]
        if ended := text.rstrip().endswith(FENCE):
            text = text.rstrip()[: -len(FENCE)]
        block.append(text)
        set_within(not ended)
        if ended:
            said, block = "\n".join(block).strip("\n"), None
            yield said, True
    if block is not None:  # The input ended inside a block.
        yield "\n".join(block).strip("\n"), True


class CommandCompleter(Completer):
    """Completes commands, and the names of saved conversations after commands that take a name."""

    def __init__(self, commands: Sequence[str], named: Sequence[str], names: Callable[[], Iterable[str]]) -> None:
        """`named` are the commands that take a name. `names` returns the saved conversations."""
        self.commands, self.named, self.names = commands, named, names

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        command, space, rest = text.partition(" ")
        if not text.startswith("/"):
            return
        found = self.names() if space and command in self.named else () if space else self.commands
        given = rest if space else text
        for each in found:
            if each.startswith(given):
                yield Completion(each, start_position=-len(given))


class Words:
    """Writes text that comes in pieces. Starts a new line if a word does not fit. Spaces stay unchanged."""

    def __init__(self, file: IO[str], width: int) -> None:
        """`width` is the width of the terminal in cells."""
        self.file, self.width = file, width
        self._column = 0
        self._word = ""
        self._spaces = ""

    def write(self, text: str) -> None:
        """Write a piece of text, except for a last word that may continue in the next piece."""
        for each in text:
            if each == "\n":
                self._put()
                self.file.write(self._spaces + each)
                self._column, self._spaces = 0, ""
            elif each in " \t":
                self._put()
                self._spaces += each
            else:
                self._word += each
        self.file.flush()

    def end(self) -> None:
        """Write the rest of the text, and end the line."""
        self._put()
        self.file.write("\n")
        self.file.flush()
        self._column, self._spaces = 0, ""

    def _put(self) -> None:
        """Write the current word: after its spaces, or on a new line."""
        if not self._word:
            return
        spaces = len(self._spaces.expandtabs(8))
        size = cell_len(self._word)
        if self._column and self._column + spaces + size > self.width:
            self.file.write(f"\n{self._word}")
            self._column = size
        else:
            self.file.write(f"{self._spaces}{self._word}")
            self._column += spaces + size
        if self._column > self.width > 0:  # A word longer than the line continues on the next line.
            self._column = (self._column - 1) % self.width + 1
        self._word = self._spaces = ""
