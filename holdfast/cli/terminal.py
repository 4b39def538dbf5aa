"""The terminal side of `holdfast chat`: typed lines and blocks, completion, and words that wrap."""

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
"""Line that begins and ends a block of several lines."""
MORE = "... "
"""Prompt for the further lines of a block."""


async def lines(piped: bool, mark: Callable[[], str], completer: Completer) -> AsyncIterator[tuple[str, bool]]:
    """The user's input until its end: a line, or a block of lines between fences, and whether it is a block.

    `mark` is the prompt of the next line, and `completer` completes it.
    """
    read = piped_lines() if piped else typed_lines(mark, completer)
    async for each in blocks(read):
        yield each


async def piped_lines() -> AsyncIterator[tuple[str, Callable[[bool], None]]]:
    """The lines of standard input, in the form that `blocks` takes."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        yield line, lambda inside: None


async def typed_lines(
    mark: Callable[[], str], completer: Completer
) -> AsyncIterator[tuple[str, Callable[[bool], None]]]:
    """The lines typed at the terminal, in the form that `blocks` takes."""
    session: PromptSession[str] = PromptSession(
        reserve_space_for_menu=0,
        completer=completer,
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )
    within = False

    def tell(inside: bool) -> None:
        nonlocal within
        within = inside

    while True:
        try:
            with patch_stdout(raw=True):  # a batch that ends is printed above the line that is typed
                line = await session.prompt_async(FormattedText([("bold", MORE if within else mark())]))
        except EOFError:
            return
        yield line, tell


async def blocks(read: AsyncIterator[tuple[str, Callable[[bool], None]]]) -> AsyncIterator[tuple[str, bool]]:
    """Join the lines between fences. Each line comes with a function to call with whether a block continues."""
    block: list[str] | None = None
    async for line, tell in read:
        if block is None and not line.lstrip().startswith(FENCE):
            yield line, False
            continue
        text = line.rstrip("\r\n")
        if block is None:
            block, text = [], text.lstrip()[len(FENCE) :]
        if ended := text.rstrip().endswith(FENCE):
            text = text.rstrip()[: -len(FENCE)]
        block.append(text)
        tell(not ended)
        if ended:
            said, block = "\n".join(block).strip("\n"), None
            yield said, True
    if block is not None:  # the input ended inside the block
        yield "\n".join(block).strip("\n"), True


class CommandCompleter(Completer):
    """Completes commands, and the name of a saved conversation after commands that take one."""

    def __init__(self, commands: Sequence[str], named: Sequence[str], names: Callable[[], Iterable[str]]) -> None:
        """`named` are the commands that take a name."""
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
    """Writes a text that comes in pieces, and begins a new line if a word would not fit. Spaces stay unchanged."""

    def __init__(self, file: IO[str], width: int) -> None:
        """`width` is in cells of the terminal."""
        self.file, self.width = file, width
        self._column = 0
        self._word = ""
        self._spaces = ""

    def write(self, text: str) -> None:
        """Write all but a last word that may continue."""
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
        """Write the rest, and end the line."""
        self._put()
        self.file.write("\n")
        self.file.flush()
        self._column, self._spaces = 0, ""

    def _put(self) -> None:
        """Write the word, with the spaces before it or on a new line."""
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
        if self._column > self.width > 0:  # a word longer than the line continues on the next one
            self._column = (self._column - 1) % self.width + 1
        self._word = self._spaces = ""
