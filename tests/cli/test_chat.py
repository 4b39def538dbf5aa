"""Conversations: through a pipe to a server, their commands, and turns that leave no trace."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence

import pytest
from fake_engine import FakeClient
from rich.console import Console
from serving import listening

from holdfast.cli import chat
from holdfast.cli.talkers import ChatError, LocalTalker, Message, Piece, Settings
from holdfast.core.config import EngineConfig
from holdfast.engine.client import Usage


class Echo:
    """Answers with what was said last; remembers what it was shown."""

    name = "echo"

    def __init__(self) -> None:
        self.shown: list[list[Message]] = []
        self.error: Exception | None = None
        self.writing = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        self.shown.append(list(messages))
        yield Piece("you said ")
        self.writing.set()
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        yield Piece(messages[-1]["content"], Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4))


def conversation(who: Echo, system: str | None = None) -> tuple[chat.Conversation, io.StringIO, io.StringIO]:
    """A conversation, and where its answers and its notes go."""
    out, notes = io.StringIO(), io.StringIO()
    return chat.Conversation(who, system, Console(file=out), Console(file=notes, width=200)), out, notes


async def test_turns_build_on_one_another() -> None:
    echo = Echo()
    talk, out, notes = conversation(echo, system="be kind")
    assert await talk.turn("hello")
    assert await talk.turn("again")
    assert echo.shown[1] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "you said hello"},
        {"role": "user", "content": "again"},
    ]
    assert out.getvalue() == "you said hello\nyou said again\n"
    assert "first token" in notes.getvalue()
    assert "4 of 10 prompt tokens cached" in notes.getvalue()


async def test_commands() -> None:
    echo = Echo()
    talk, _, notes = conversation(echo)
    await talk.turn("hello")
    assert talk.command("/stats")
    assert "turns: 1; 10 prompt tokens of which 4 came from the cache, 3 generated" in notes.getvalue()
    assert talk.command("/undo") and not talk.messages
    await talk.turn("hello")
    assert talk.command("/system be brief")
    assert not talk.messages
    await talk.turn("hello")
    assert echo.shown[-1][0] == {"role": "system", "content": "be brief"}
    assert talk.command("/clear") and not talk.messages
    assert talk.command("/help") and "/system TEXT" in notes.getvalue()
    assert talk.command("/sing") and "there is no /sing" in notes.getvalue()
    assert not talk.command("/exit")


async def test_a_turn_that_fails_leaves_no_trace() -> None:
    echo = Echo()
    talk, _, notes = conversation(echo)
    echo.error = ChatError("too long")
    assert not await talk.turn("hello")
    assert "too long" in notes.getvalue()
    assert not talk.messages


async def test_ctrl_c_stops_the_answer_and_takes_the_turn_back() -> None:
    echo = Echo()
    talk, _, notes = conversation(echo)
    echo.hold.clear()
    turn = asyncio.create_task(talk.turn("hello"))
    await echo.writing.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert not await turn
    assert "taken back" in notes.getvalue()
    assert not talk.messages


async def test_what_a_terminal_would_obey_is_left_out() -> None:
    echo = Echo()
    talk, out, _ = conversation(echo)
    await talk.turn("\x1b[2Jbell\x07")
    assert out.getvalue() == "you said [2Jbell\n"


async def test_a_pipe_talks_to_a_server(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeClient()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nand again\n/exit\nnever\n"))
    async with listening(client, api_key=("sesame",)) as server:
        config = chat.ChatConfig(url=server.url, api_key="sesame", system="be kind")
        assert await chat.run(config, EngineConfig(), None) == 0
    out, err = capsys.readouterr()
    assert out == "Ahoy, sailor!\nAhoy, sailor!\n"
    assert "talking to tiny" in err
    rendered = "".join(map(chr, client.asked[1].prompt))
    assert rendered == "<system>be kind<user>hello<assistant>Ahoy, sailor!<user>and again"


async def test_a_refused_turn_says_why_and_fails_the_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("mutiny\n"))
    async with listening(FakeClient()) as server:
        assert await chat.run(chat.ChatConfig(url=f"{server.url}/v1/"), EngineConfig(), None) == 1
    assert "the chat template refuses this conversation" in capsys.readouterr().err


async def test_a_wrong_key_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    async with listening(FakeClient(), api_key=("sesame",)) as server:
        with pytest.raises(ChatError, match="a valid API key is needed"):
            await chat.run(chat.ChatConfig(url=server.url), EngineConfig(), None)


async def test_an_engine_of_our_own_answers_within_its_context() -> None:
    client = FakeClient()
    talker = LocalTalker(client, Settings(temperature=0, max_tokens=2, seed=None))  # type: ignore[arg-type]
    pieces = [piece async for piece in talker.answer([{"role": "user", "content": "hello"}])]
    assert "".join(piece.text for piece in pieces) == "Ahoy, "
    assert pieces[-1].usage == Usage(prompt_tokens=11, completion_tokens=2, cached_tokens=0)
    with pytest.raises(ChatError, match="/clear begins a new one"):
        async for _ in talker.answer([{"role": "user", "content": "a" * 300}]):
            pass
