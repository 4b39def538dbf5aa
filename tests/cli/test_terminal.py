"""Typed input, and how answers are written: blocks, completion, wrapped words."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from holdfast.cli.chat import COMMANDS, NAMED
from holdfast.cli.terminal import CommandCompleter, Words, blocks


async def said(*lines: str) -> tuple[list[tuple[str, bool]], list[bool]]:
    """The messages that these lines make, and the value reported after each line of a block."""
    reported: list[bool] = []

    async def read() -> AsyncIterator[tuple[str, Callable[[bool], None]]]:
        for line in lines:
            yield line, reported.append

    return [each async for each in blocks(read())], reported


class TestBlocks:
    """Lines between three quotes are one message."""

    async def test_a_line_is_a_message(self) -> None:
        assert await said("one", 'say """ twice') == ([("one", False), ('say """ twice', False)], [])

    async def test_lines_between_fences_are_one_message_even_if_they_look_like_commands(self) -> None:
        found, reported = await said('"""\n', "/usr/bin\n", "\n", "  two\n", '"""\n', "next\n")
        assert found == [("/usr/bin\n\n  two", True), ("next\n", False)]
        assert reported == [True, True, True, True, False]

    async def test_text_may_stand_on_the_lines_of_the_fences(self) -> None:
        assert (await said('"""one', 'two"""'))[0] == [("one\ntwo", True)]
        assert (await said('"""one line"""'))[0] == [("one line", True)]

    async def test_the_end_of_input_ends_a_block(self) -> None:
        assert (await said('"""one', "two"))[0] == [("one\ntwo", True)]


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("/sa", ["/save"]),
        ("/batc", ["/batch", "/batches"]),
        ("/load s", ["sea", "south"]),
        ("/load x", []),
        ("/stats s", []),
        ("hello /sa", []),
        ("", []),
    ],
)
def test_tab_completes_commands_and_names(typed: str, found: list[str]) -> None:
    completer = CommandCompleter(COMMANDS, NAMED, lambda: ["last", "sea", "south"])
    completions = completer.get_completions(Document(typed), CompleteEvent(completion_requested=True))
    assert [each.text for each in completions] == found


class TestWords:
    """Words move to the next line as a whole, however their pieces arrive."""

    def written(self, text: str, width: int, piece: int = 3) -> str:
        out = io.StringIO()
        words = Words(out, width)
        for at in range(0, len(text), piece):
            words.write(text[at : at + piece])
        words.end()
        return out.getvalue()

    @pytest.mark.parametrize("piece", [1, 2, 7, 100])
    def test_a_word_that_does_not_fit_begins_a_line(self, piece: int) -> None:
        assert self.written("the sea is wide and deep", 10, piece) == "the sea is\nwide and\ndeep\n"

    def test_the_texts_own_lines_and_spaces_stay(self) -> None:
        text = "def f():\n    return 1\n\n  end"
        assert self.written(text, 40) == f"{text}\n"

    def test_a_word_longer_than_the_line_is_left_to_the_terminal(self) -> None:
        assert self.written("a " + "x" * 25 + " b", 10) == "a\n" + "x" * 25 + " b\n"

    def test_wide_characters_count_twice(self) -> None:
        assert self.written("ab 世界世 界", 8) == "ab\n世界世\n界\n"

    def test_complete_words_are_written_at_once(self) -> None:
        out = io.StringIO()
        Words(out, 40).write("one two thr")
        assert out.getvalue() == "one two"
