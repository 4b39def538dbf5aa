"""`holdfast chat`: through a pipe to a server, its commands, saved conversations, failed turns."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, FakeText
from rich.console import Console
from serving import listening

from holdfast.cli import chat
from holdfast.cli.chat import Bookmarks
from holdfast.cli.talkers import (
    ChatError,
    Head,
    Messages,
    Piece,
    Settings,
    Talker,
    Turn,
    answer_of,
    connect,
    piece_of,
    piece_of_response,
    reason_of,
    server_events,
)
from holdfast.engine.client.stream import Usage
from holdfast.lm.config import EngineConfig
from holdfast.server.conversations.values import StoreError


class Echo:
    """Answers with the last message; its heads are all messages so far."""

    name = "echo"

    def __init__(self) -> None:
        self.shown: list[tuple[str | None, Head]] = []
        self.error: Exception | None = None
        self.writing = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()

    async def answer(self, said: str, system: str | None, head: Head) -> AsyncGenerator[Piece, None]:
        self.shown.append((system, head))
        yield Piece("you said ")
        self.writing.set()
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4)
        yield Piece(said, usage, f"{head}/{said}" if head else said)

    async def recall(self, head: str | Messages) -> Turn:
        if self.error is not None:
            raise self.error
        before, _, said = str(head).rpartition("/")
        return Turn(said, f"you said {said}", before or None)


class Talk:
    """A conversation with its answers and notes in buffers."""

    def __init__(self, talker: Talker, directory: Path, system: str | None = None) -> None:
        self.out, self.notes = io.StringIO(), io.StringIO()
        bookmarks = Bookmarks(directory / "chats.json", "here")
        notes = Console(file=self.notes, width=200)
        self.it = chat.Conversation(talker, system, Console(file=self.out), notes, bookmarks)

    async def hear(self, *lines: str) -> str:
        """Send or run each line. Returns the notes printed meanwhile."""
        begin = len(self.notes.getvalue())
        for line in lines:
            assert await (self.it.command(line) if line.startswith("/") else self.it.turn(line))
        return self.notes.getvalue()[begin:]


async def test_each_turn_continues_the_one_before(tmp_path: Path) -> None:
    echo = Echo()
    talk = Talk(echo, tmp_path, system="be kind")
    notes = await talk.hear("hello", "again")
    assert echo.shown == [("be kind", None), ("be kind", "hello")]
    assert talk.it.head == "hello/again"
    assert talk.out.getvalue() == "you said hello\nyou said again\n"
    assert "first token" in notes
    assert "4 of 10 prompt tokens cached" in notes


async def test_chat_commands_show_clear_undo_and_end(tmp_path: Path) -> None:
    echo = Echo()
    talk = Talk(echo, tmp_path)
    stats = await talk.hear("hello", "/stats")
    assert "turns: 1; 10 prompt tokens of which 4 came from the cache, 3 generated" in stats
    assert "turns left: 0" in await talk.hear("/undo")
    assert talk.it.head is None
    await talk.hear("hello", "again", "/undo")
    assert talk.it.head == "hello"
    await talk.hear("/system be brief", "hello")
    assert echo.shown[-1] == ("be brief", None)
    await talk.hear("/clear")
    assert talk.it.head is None
    assert "/system TEXT" in await talk.hear("/help")
    assert "there is no /sing" in await talk.hear("/sing")


async def test_the_list_of_saved_conversations_shows_the_message_that_each_goes_on_after(tmp_path: Path) -> None:
    talk = Talk(Echo(), tmp_path)
    await talk.hear("hello", "again", "/undo", "/save sea", "farewell", "/undo", "/branch land")
    shown = (await talk.hear("/conversations")).splitlines()
    assert shown == ["last  ·  turns: 2  ·  farewell", "sea  ·  turns: 2  ·  farewell", "land  ·  turns: 1  ·  hello"]


async def test_the_list_of_commands_keeps_its_columns_in_a_narrow_window(tmp_path: Path) -> None:
    talk = Talk(Echo(), tmp_path)
    talk.it.notes.width = 60
    commands, keys = (await talk.hear("/help")).split("A message of several lines")
    beginnings = {line[:16].strip() for line in commands.splitlines()}
    assert beginnings == {*chat.HELP, ""} and max(map(len, commands.splitlines())) <= 60
    assert "Tab completes commands" in keys
    assert {"/help", "/batch", "/quit"} < set(chat.COMMANDS)
    assert not await talk.it.command("/exit")


async def test_a_saved_conversation_follows_later_turns_and_a_branch_does_not_change_it(tmp_path: Path) -> None:
    talk = Talk(Echo(), tmp_path, system="be kind")
    await talk.hear("one", "/save sea", "two", "/branch land", "three", "/branch", "four")
    listed = await talk.hear("/conversations")
    assert listed.splitlines() == [
        "last  ·  turns: 4  ·  four",
        "sea  ·  turns: 2  ·  two",
        "land  ·  turns: 3  ·  three",
    ]
    later = Talk(Echo(), tmp_path)
    assert "> three\nyou said three\n\ngoing on after turn 3" in await later.hear("/load land")
    await later.hear("five")
    assert later.it.head == "one/two/three/five"
    assert later.it.system == "be kind"
    assert "you said five" in await later.hear("/load last")
    assert "going on after turn 2" in await later.hear("/load sea")


async def test_an_error_in_saving_or_loading_is_shown(tmp_path: Path) -> None:
    echo = Echo()
    talk = Talk(echo, tmp_path)
    assert "nothing is saved yet" in await talk.hear("/conversations")
    assert "say something first" in await talk.hear("/save sea")
    assert "say something first" in await talk.hear("/branch")
    assert "/load needs a name" in await talk.hear("/load")
    assert "there is no conversation 'sea'" in await talk.hear("/load sea")
    assert "visible characters" in await talk.hear("hello", "/save " + "x" * 65)
    assert "/save needs a name" in await talk.hear("/save")
    await talk.hear("/save sea", "/clear")
    echo.error = ChatError("it was deleted")
    assert "it was deleted" in await talk.hear("/load sea")
    assert talk.it.head is None
    for damage in ("{", '{"sea":' * 100_000):
        (tmp_path / "chats.json").write_text(damage)
        assert "cannot be read" in await talk.hear("/conversations")


async def test_a_failed_turn_leaves_the_conversation_unchanged(tmp_path: Path) -> None:
    echo = Echo()
    talk = Talk(echo, tmp_path)
    echo.error = ChatError("too long")
    assert not await talk.it.turn("hello")
    assert "too long" in talk.notes.getvalue()
    assert talk.it.head is None and not talk.it.bookmarks.all()


async def test_ctrl_c_stops_the_answer_and_takes_the_turn_back(tmp_path: Path) -> None:
    echo = Echo()
    talk = Talk(echo, tmp_path)
    await talk.hear("hello")
    echo.writing.clear()
    echo.hold.clear()
    turn = asyncio.create_task(talk.it.turn("more"))
    await echo.writing.wait()
    os.kill(os.getpid(), signal.SIGINT)
    assert not await turn
    assert "taken back" in talk.notes.getvalue()
    assert talk.it.head == "hello"


async def test_control_characters_are_removed_from_answers(tmp_path: Path) -> None:
    talk = Talk(Echo(), tmp_path)
    await talk.hear("\x1b[2Jbell\x07")
    assert talk.out.getvalue() == "you said [2Jbell\n"


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def keeping_client() -> FakeClient:
    return FakeClient(text=FakeText(opening="<assistant>"), ends=True)


async def test_a_pipe_talks_to_a_server_and_goes_on_where_it_left_off(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    store = str(tmp_path / "server.sqlite")
    async with listening(keeping_client(), api_key=("sesame",), store=store) as server:
        say(monkeypatch, "hello", "", "and again", "/save sea", "/exit", "never")
        first = server.url
        config = chat.ChatConfig(url=first, api_key="sesame", system="be kind")
        assert await chat.run(config, EngineConfig(), None) == 0
    out, err = capsys.readouterr()
    assert out == "Ahoy, sailor!\nAhoy, sailor!\n"
    assert "talking to tiny" in err
    client = keeping_client()
    async with listening(client, api_key=("sesame",), store=store) as server:  # both sides were restarted
        marks = tmp_path / "holdfast" / "chats.json"
        marks.write_text(marks.read_text().replace(first, server.url))  # on another port
        say(monkeypatch, "and on")
        config = chat.ChatConfig(url=server.url, api_key="sesame", load="sea")
        assert await chat.run(config, EngineConfig(), None) == 0
    assert client.text.decode(client.asked[-1].prompt) == (
        "<system>be kind<user>hello<assistant>Ahoy, sailor!<user>and again<assistant>Ahoy, sailor!<user>and on"
        "<assistant>"
    )


async def test_one_prompt_is_answered_on_standard_output_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    say(monkeypatch, "never")
    client = keeping_client()
    async with listening(client) as server:
        config = chat.ChatConfig(url=server.url, prompt="hello", system="be kind")
        assert await chat.run(config, EngineConfig(), None) == 0
        refused = chat.ChatConfig(url=server.url, prompt="mutiny")
        assert await chat.run(refused, EngineConfig(), None) == 1
    out, err = capsys.readouterr()
    assert out == "Ahoy, sailor!\n"
    assert "talking to" not in err and "the chat template refuses this conversation" in err
    assert client.text.decode(client.asked[0].prompt) == "<system>be kind<user>hello<assistant>"
    assert len(client.asked) == 1


async def test_several_lines_between_quotes_are_one_turn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    say(monkeypatch, '"""/help me', "with this", '"""', "/exit")
    client = keeping_client()
    async with listening(client) as server:
        assert await chat.run(chat.ChatConfig(url=server.url), EngineConfig(), None) == 0
    assert client.text.decode(client.asked[0].prompt) == "<user>/help me\nwith this<assistant>"
    assert len(client.asked) == 1


async def test_in_a_terminal_words_wrap_and_turns_have_a_blank_line_between_them(tmp_path: Path) -> None:
    talk = Talk(Echo(), tmp_path)
    talk.it.console = Console(file=talk.out, width=12, force_terminal=True)
    talk.it.notes = talk.it.console
    await talk.hear("the sea is wide", "and on")
    shown = re.sub(r"\x1b\[[0-9;]*m", "", talk.out.getvalue())
    assert shown.startswith("you said the\nsea is wide\nfirst token")
    assert "\n\nyou said and\non\n" in shown and shown.endswith("\n\n")


async def test_a_refused_turn_in_a_pipe_shows_the_reason_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say(monkeypatch, "mutiny")
    async with listening(FakeClient()) as server:
        assert await chat.run(chat.ChatConfig(url=f"{server.url}/v1/"), EngineConfig(), None) == 1
    assert "the chat template refuses this conversation" in capsys.readouterr().err


async def test_a_wrong_key_raises_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch)
    async with listening(FakeClient(), api_key=("sesame",)) as server:
        with pytest.raises(ChatError, match="a valid API key is needed"):
            await chat.run(chat.ChatConfig(url=server.url), EngineConfig(), None)


async def test_our_own_engine_stores_conversations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    clients = [keeping_client(), keeping_client()]
    starting = iter(clients)

    async def start(*given: Any, **named: Any) -> FakeClient:
        return next(starting)

    monkeypatch.setattr(chat.EngineClient, "start", start)
    config = chat.ChatConfig(temperature=0, max_tokens=2)
    say(monkeypatch, "hello", "a" * 300)
    assert await chat.run(config, EngineConfig(), None) == 1  # the second turn was refused
    out, err = capsys.readouterr()
    assert out == "Ahoy, \n"
    assert "/clear begins a new one" in err
    say(monkeypatch, "/load last", "and on", "/undo", "/undo")
    assert await chat.run(config, EngineConfig(), None) == 0
    prompt = clients[1].text.decode(clients[1].asked[0].prompt)
    assert prompt == "<user>hello<assistant>Ahoy, <user>and on<assistant>"
    assert "turns left: 0" in capsys.readouterr().err


async def test_a_home_that_cannot_be_written_is_noted_and_the_conversation_goes_on_in_memory(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in place of the home")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    client = keeping_client()

    async def start(*given: Any, **named: Any) -> FakeClient:
        return client

    monkeypatch.setattr(chat.EngineClient, "start", start)
    say(monkeypatch, "hello", "/save sea", "and on", "/conversations")
    assert await chat.run(chat.ChatConfig(), EngineConfig(), None) == 0
    out, err = capsys.readouterr()
    assert out == "Ahoy, sailor!\n" * 2
    assert err.count("this conversation is not kept: ") == 1 and "cannot be written" not in err
    assert "sea  ·  turns: 2  ·  and on" in err
    assert client.text.decode(client.asked[-1].prompt) == "<user>hello<assistant>Ahoy, sailor!<user>and on<assistant>"
    with pytest.raises(StoreError, match=r"chat\.sqlite cannot be opened: .*: Not a directory"):
        await chat.run(chat.ChatConfig(load="last"), EngineConfig(), None)


async def test_turns_that_cannot_be_saved_say_so_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in place of the directory")
    talk = Talk(Echo(), tmp_path / "file")
    notes = await talk.hear("one", "two")
    assert notes.count("chats.json cannot be") == 1


async def test_a_server_without_a_store_is_sent_the_whole_conversation(tmp_path: Path) -> None:
    bodies: list[Any] = []

    def reply(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "elsewhere"}]})
        bodies.append(json.loads(request.content))
        events = [{"choices": [{"delta": {"content": text}}]} for text in ("Ahoy", "!")]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return httpx.Response(200, text="".join(lines) + "data: [DONE]\n")

    async with httpx.AsyncClient(base_url="http://there/v1", transport=httpx.MockTransport(reply)) as http:
        talker = await connect(http, None, Settings(temperature=0, max_tokens=None))
        await Talk(talker, tmp_path, system="be kind").hear("hello", "/save sea")
        later = Talk(talker, tmp_path)
        await later.hear("/load sea", "again")
        assert [message["content"] for message in bodies[-1]["messages"]] == ["be kind", "hello", "Ahoy!", "again"]
        await later.hear("/undo", "/undo")
        assert later.it.head is None
        assert not any("max_tokens" in body for body in bodies), "the server's own limit holds"
        short = await connect(http, None, Settings(temperature=0.5, max_tokens=7))
        await Talk(short, tmp_path).hear("hello")
        assert (bodies[-1]["max_tokens"], bodies[-1]["temperature"]) == (7, 0.5)


@pytest.mark.parametrize(
    "event",
    [{"nothing": 1}, {"type": "response.completed", "response": {}}, {"type": "response.output_text.delta"}],
)
def test_an_event_that_is_not_openais_raises_chat_error(event: dict[str, Any]) -> None:
    for read in (piece_of_response, piece_of):
        with pytest.raises(ChatError, match="not OpenAI's"):
            read(event)


def test_a_failed_response_raises_chat_error_with_its_reason() -> None:
    with pytest.raises(ChatError, match="the engine has stopped"):
        piece_of_response({"type": "response.failed", "response": {"error": {"message": "the engine has stopped"}}})


async def test_answers_and_events_that_nest_too_deeply_are_no_ones_of_openai() -> None:
    deep = b'{"a":' * 100_000
    request = httpx.Request("GET", "http://server/v1/models")
    with pytest.raises(ChatError, match="not as a server with OpenAI's API"):
        answer_of(httpx.Response(200, content=deep, request=request))
    assert reason_of(500, deep) == "the server answered with status 500"
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=b"data: " + deep + b"\n\n"))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
        with pytest.raises(ChatError, match="an event that is not OpenAI's"):
            async for _ in server_events(http, "responses", {}):
                pass
