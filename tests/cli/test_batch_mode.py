"""The two modes of `holdfast chat`: a conversation's batches, kept or shown, over a fake engine or a server."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, engine_info
from rich.console import Console
from serving import listening

from holdfast.cli import batch_mode, chat
from holdfast.cli.batch_mode import Batching, BatchPlace, LocalPlace, RemotePlace
from holdfast.cli.chat import Bookmarks
from holdfast.cli.talkers import ChatError, LocalTalker, Settings, Talker, connect
from holdfast.core.types import AdapterInfo
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.batches import Batches
from holdfast.server.jobs.files import Files
from holdfast.server.run import open_store
from holdfast.server.service import Service

SETTINGS = Settings(temperature=0, max_tokens=None)
Place = Callable[[FakeClient, Path], Any]


class Talk:
    """A conversation with its answers and notes in buffers."""

    def __init__(self, talker: Talker, place: BatchPlace | None, directory: Path) -> None:
        self.out, self.notes = io.StringIO(), io.StringIO()
        bookmarks = Bookmarks(directory / "chats.json", "here")
        notes = Console(file=self.notes, width=300)
        self.it = chat.Conversation(talker, None, Console(file=self.out, width=300), notes, bookmarks)
        self.shown: list[str] = []
        if place is not None:
            self.it.batching = Batching(place, SETTINGS, self.shown.append)

    async def hear(self, *lines: str) -> str:
        """Run each line as the command does. Returns the notes printed meanwhile."""
        begin = len(self.notes.getvalue())
        for line in lines:
            if line.startswith("/"):
                await self.it.command(line)
            elif self.it.batches_shown:
                await self.it.submit(line)
            else:
                await self.it.turn(line)
        return self.notes.getvalue()[begin:]


@asynccontextmanager
async def local(client: FakeClient, directory: Path) -> AsyncIterator[tuple[Talker, BatchPlace]]:
    config = ServerConfig(store=str(directory / "store.sqlite"), files=str(directory / "files"))
    store = AsyncStore(open_store(config))
    responses = Responses(Service(client, config), store)  # type: ignore[arg-type]
    batches = Batches(responses, Files(store, config))
    await batches.start()
    yield LocalTalker(responses, SETTINGS), LocalPlace(batches, client.info.max_model_len - 1)
    await batches.close()
    await asyncio.to_thread(store.close)


@asynccontextmanager
async def remote(client: FakeClient, directory: Path) -> AsyncIterator[tuple[Talker, BatchPlace]]:
    async with listening(client) as server, httpx.AsyncClient(base_url=f"{server.url}/v1") as http:
        yield await connect(http, None, SETTINGS), RemotePlace(http, client.info.max_model_len - 1)


@pytest.fixture(params=[local, remote])
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_submitting_returns_at_once(place: Place, tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with place(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        notes = await talk.hear('/batch ["A", "B"] [32, 64]')
        assert "submitted as batch_" in notes and talk.shown == []
        assert talk.it.batching is not None
        (id,) = talk.it.batching.unfinished
        assert id in await talk.hear("/batches")
        await until(lambda: len(client.asked) == 2)
        assert [(asked.params.max_tokens, asked.params.temperature) for asked in client.asked] == [(32, 0), (64, 0)]
        assert client.hold is not None
        client.hold.set()
        await until(lambda: talk.shown)
        (shown,) = talk.shown
        assert shown.splitlines()[0] == f"{id}  ·  completed  ·  2 of 2 answered"
        assert shown.splitlines()[1:] == ["[1] A", "Ahoy, sailor!", "[2] B", "Ahoy, sailor!"]
        assert "no batch is in progress" in await talk.hear("/batches")
        await talk.it.batching.close()


@pytest.mark.parametrize(("given", "name"), [((), "tiny"), (("pirate",), "pirate"), (("pirate", "legal"), "pirate")])
async def test_a_chat_asks_the_first_adapter_that_it_was_given(
    given: tuple[str, ...], name: str, tmp_path: Path
) -> None:
    infos = tuple(AdapterInfo(f"{each}@1", each, 4, 100, ("q",)) for each in given)
    client = FakeClient(info=engine_info(adapters=infos, adapter_slots=len(infos)))
    client.adapters.update({info.name: info for info in infos})
    async with local(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        await talk.hear("hello", '/batch ["A"]')
        await until(lambda: len(client.asked) == 2)
        assert talker.name == name
        assert [asked.adapter for asked in client.asked] == [name if given else ""] * 2
        assert talk.it.batching is not None
        await talk.it.batching.close()


async def test_finished_batches_wait_for_batch_mode(place: Place, tmp_path: Path) -> None:
    client = FakeClient()
    async with place(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        client.hold = asyncio.Event()
        await talk.hear('/batch ["A"]', '["B"] [3]', '["C"]', "/chat")
        client.hold.set()
        batching = talk.it.batching
        assert batching is not None
        await until(lambda: not batching.unfinished)
        assert talk.shown == []
        await talk.hear("/batch")
        assert [shown.splitlines()[1:] for shown in talk.shown] == [
            ["[1] A", "Ahoy, sailor!"],
            ["[1] B", "Ahoy, sailor"],
            ["[1] C", "Ahoy, sailor!"],
        ]
        await talk.hear("/chat", "/batch")
        assert len(talk.shown) == 3
        await batching.close()


async def test_batches_go_on_during_a_chat_turn(place: Place, tmp_path: Path) -> None:
    client = FakeClient()
    async with place(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        await talk.hear('/batch ["A"]', "/chat")
        batching = talk.it.batching
        assert batching is not None
        await until(lambda: not batching.unfinished)
        client.hold = asyncio.Event()
        turn = asyncio.create_task(talk.hear("hello"))
        await until(lambda: "Ahoy" in talk.out.getvalue())
        held, client.hold = client.hold, None
        await batching.submit('["B", "C"]', 0, talker.name, "be kind")
        await until(lambda: not batching.unfinished)
        assert not turn.done() and talk.shown == []
        held.set()
        await turn
        assert "Ahoy, sailor!" in talk.out.getvalue()
        assert client.asked[-1].prompt[: len("<system>be kind")] == [ord(each) for each in "<system>be kind"]
        await batching.close()


async def test_modes_switch_and_keep_batches(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with local(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        assert talk.it.mark() == "> "
        assert "chatting" in await talk.hear("/chat")
        assert "/chat goes back" in await talk.hear("/batch")
        assert talk.it.mark() == "batch> "
        assert "column 1: a batch is a list of prompts" in await talk.hear("hello")
        assert "column 2: a prompt must be in double quotes" in await talk.hear("[hello]")
        assert "column 9: a prompt must be in double quotes" in await talk.hear("/batch [hello]")
        assert "length 200 at column 15" in await talk.hear('/batch ["A"] [200]')
        assert client.asked == [] and talk.it.head is None
        await talk.hear('/batch["A"]')
        assert "0 of 1 answered" in await talk.hear("/chat")
        assert talk.it.mark() == "> "
        assert client.hold is not None
        client.hold.set()
        await talk.hear("hello")
        assert talk.out.getvalue() == "Ahoy, sailor!\n"
        assert talk.it.batching is not None
        await talk.it.batching.close()


async def test_a_batch_of_an_earlier_session_is_shown_in_the_next(tmp_path: Path) -> None:
    async with local(FakeClient(hold=asyncio.Event()), tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        await talk.hear('/batch ["A", "B"]')
        await talk.it.end(wait=False)
        assert "your next `holdfast chat`" in talk.notes.getvalue()
        assert talk.it.batching is not None
        await talk.it.batching.close()
    client = FakeClient(hold=asyncio.Event())
    async with local(client, tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        await talk.hear("/batch")
        assert talk.it.batching is not None
        await until(lambda: talk.it.batching and talk.it.batching.unfinished)
        assert client.hold is not None
        client.hold.set()
        await talk.it.end(wait=True)
        assert talk.shown[0].splitlines()[1:] == ["[1] A", "Ahoy, sailor!", "[2] B", "Ahoy, sailor!"]
        await talk.it.batching.close()


class Scripted:
    """A place whose streams of events are given; each breaks at its end."""

    resumes = False
    longest = 100

    def __init__(self, *streams: list[dict[str, Any]]) -> None:
        self.streams = list(streams)
        self.state = "in_progress"

    async def submit(self, lines: bytes) -> str:
        return "batch_1"

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        if not self.streams:
            await asyncio.sleep(60)
        for event in self.streams.pop(0):
            yield event
        raise ChatError("broke")

    async def batch(self, id: str) -> dict[str, Any]:
        return {"id": id, "status": self.state, "output_file_id": "file-1", "error_file_id": "file-2", "errors": None}

    async def lines(self, file: str) -> list[dict[str, Any]]:
        body: dict[str, Any] = {"choices": [{"message": {"content": "good"}}]}
        if file == "file-2":
            return [{"custom_id": "2", "response": None, "error": {"code": "batch_expired", "message": "late"}}]
        return [{"custom_id": "1", "response": {"status_code": 200, "body": body}, "error": None}]


async def test_events_missed_while_the_stream_was_broken_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_mode, "AGAIN_SECONDS", 0.01)
    shown: list[str] = []
    place = Scripted([], [{"type": "batch.listening"}], [{"type": "batch.updated", "batch": {}}])
    batching = Batching(place, SETTINGS, shown.append)
    batching.show()
    await batching.submit('["A", "B", "C"]', 0, "m", None)
    place.state = "expired"
    await asyncio.wait_for(batching.finished(), 60)
    assert shown == [
        "batch_1  ·  expired  ·  2 of 3 answered\n[1] A\ngood\n[2] B\n(late)\n[3] C\n(no answer)",
    ]
    await batching.close()


async def test_a_batch_that_fails_is_shown_with_the_reason_of_each_prompt(tmp_path: Path) -> None:
    async with local(FakeClient(), tmp_path) as (talker, where):
        talk = Talk(talker, where, tmp_path)
        batching = talk.it.batching
        assert batching is not None
        batching.show()
        await batching.submit('["A", "B"]', 0, "another", None)
        await batching.finished()
        assert "failed" in talk.shown[0] and "prompt 2: the model 'another' is not served here" in talk.shown[0]
        await batching.close()


async def test_a_server_that_keeps_no_conversations_takes_no_batches(tmp_path: Path) -> None:
    class Plain:
        name = "plain"

    talk = Talk(Plain(), None, tmp_path)  # type: ignore[arg-type]
    assert "takes no batches" in await talk.hear('/batch ["A"]')
    assert talk.it.mark() == "> "


async def test_batches_through_a_pipe_are_shown_before_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    async with listening(client) as server:
        monkeypatch.setattr(sys, "stdin", io.StringIO('/batch ["A", "B"] [2]\n["C"\n'))
        code = await chat.run(chat.ChatConfig(url=server.url), EngineConfig(), None)
    shown = capsys.readouterr()
    assert code == 1 and "column 5: a comma or ] is missing" in shown.err
    assert shown.out.splitlines()[1:] == ["[1] A", "Ahoy, ", "[2] B", "Ahoy, "]
