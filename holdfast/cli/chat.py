"""`holdfast chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.cli.batch_input import InputError
from holdfast.cli.batch_mode import Batching, BatchPlace, LocalPlace, RemotePlace
from holdfast.cli.flags import check_url, require_at_least_1
from holdfast.cli.talkers import ChatError, Head, LocalTalker, Settings, StatefulTalker, Talker, connect, server_client
from holdfast.cli.terminal import CommandCompleter, Words, lines
from holdfast.core.config import option
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.stream import Usage
from holdfast.files.regular import read_bytes
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY, data_directory
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs.batches import Batches
from holdfast.server.jobs.files import Files
from holdfast.server.run import open_store
from holdfast.server.service import Service

HELP = {
    "/help": "this list",
    "/clear": "forget the conversation and begin a new one",
    "/undo": "take back the last turn",
    "/save NAME": "save this conversation and its later turns under a name",
    "/load NAME": "continue a saved conversation; `last` is where you left off",
    "/branch [NAME]": "continue separately; what was saved so far stays unchanged",
    "/conversations": "list the saved conversations",
    "/system TEXT": "tell the model how to behave (without TEXT: show it); begins a new conversation",
    "/stats": "token counts of this conversation",
    "/batch": 'batching mode: a line is a batch, as ["Prompt 1", "Prompt 2"] [32, 64]; finished ones are shown',
    "/batch [...]": "submit a batch; answers of at most 128 tokens, or of the lengths in the second list",
    "/batches": "list the batches in progress",
    "/chat": "back to the conversation; batches go on, and wait for batching mode when they have ended",
    "/exit": "end (/quit and Ctrl-D do as well)",
}
KEYS = """\
A message of several lines begins and ends with three quotes (\"\"\"). Tab completes commands and names.
Ctrl-C during an answer stops it and takes the turn back."""
COMMANDS = (*dict.fromkeys(name.split()[0] for name in HELP), "/quit")
NAMED = ("/save", "/load", "/branch")
"""Commands that take the name of a conversation."""

LAST = "last"
"""Name under which each turn is saved automatically."""
MAX_NAME = 64
"""Maximum number of characters in the name of a saved conversation."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal could execute. They are removed from a model's text."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Options of a conversation. Raises ValueError for an invalid option."""

    prompt: str | None = option(None, "answer this one prompt on standard output, and end")
    url: str | None = option(None, "talk to the server at this URL; MODEL is then a name that it serves")
    api_key: str | None = option(None, "key for that server; default: HOLDFAST_API_KEY")
    system: str | None = option(None, "system message, which tells the model how to behave")
    load: str | None = option(None, "continue this saved conversation; `last` is where you left off")
    temperature: float = option(0.0, "0 always takes the most likely token; higher is more random")
    max_tokens: int | None = option(None, "longest answer in tokens; default: what the context leaves")

    def __post_init__(self) -> None:
        check_url(self.url)
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature}; it must lie between 0 and 2")
        require_at_least_1(self, "max_tokens")


async def run(config: ChatConfig, engine: EngineConfig, model: str | None) -> int:
    """Converse until the input ends. `model` is a model of the server at the URL; None for its first one.

    Returns the exit code. It is 1 if a turn failed and the input is a pipe or a single prompt. Raises ChatError,
    EngineStartError.
    """
    piped = config.prompt is not None or not sys.stdin.isatty()
    console = Console(highlight=False)
    notes = Console(highlight=False, stderr=True) if piped else console
    async with open_talker(config, engine, model, notes) as (talker, place, kept):
        if config.prompt is None:
            notes.print(Text.assemble("talking to ", (talker.name, "bold"), ("  /help lists the commands", "dim")))
        bookmarks = Bookmarks(data_directory() / "chats.json" if kept else None, config.url or "here")
        conversation = Conversation(talker, config.system, console, notes, bookmarks)
        if place is not None:
            settings = Settings(temperature=config.temperature, max_tokens=config.max_tokens)
            conversation.batching = Batching(place, settings, lambda text: console.print(Text(CONTROL.sub("", text))))
        if config.load is not None:
            await conversation.load(config.load)
        if config.prompt is not None:
            return int(not await conversation.turn(config.prompt))
        failed = False
        completer = CommandCompleter(COMMANDS, NAMED, lambda: conversation.bookmarks.all())
        try:
            async for line, block in lines(piped, conversation.mark, completer):
                if not line.strip():
                    continue
                if line.startswith("/") and not block:
                    if not await conversation.command(line.rstrip()):
                        break
                elif conversation.batches_shown:
                    failed |= not await conversation.submit(line)
                elif not await conversation.turn(line.strip()):
                    failed = True
            await conversation.end(wait=piped)
        finally:
            if conversation.batching is not None:
                await conversation.batching.close()
        return int(piped and failed)


@asynccontextmanager
async def open_talker(
    config: ChatConfig, engine: EngineConfig, model: str | None, notes: Console
) -> AsyncIterator[tuple[Talker, BatchPlace | None, bool]]:
    """Open the talker that answers, and the place where batches run; None if they cannot run.

    The last value says whether conversations outlive this command.
    """
    settings = Settings(temperature=config.temperature, max_tokens=config.max_tokens)
    if config.url is not None:
        async with server_client(config.url, config.api_key, httpx.Timeout(10, read=None)) as http:
            talker = await connect(http, model, settings)
            context = talker.context if isinstance(talker, StatefulTalker) else None
            yield talker, None if context is None else RemotePlace(http, context - 1), True
        return
    with own_store(config, notes) as (server, opened):
        async with own_engine(engine, server, opened, settings, notes) as (talker, place):
            yield talker, place, server.store != MEMORY


@contextmanager
def own_store(config: ChatConfig, notes: Console) -> Iterator[tuple[ServerConfig, Store]]:
    """Open the store of conversations with our own engine, in the user's data directory.

    If it cannot be opened, as in a home that is read-only, the conversation is in memory, which is noted. Raises
    StoreError if a saved conversation was asked for.
    """
    directory = data_directory()
    server = ServerConfig(store=str(directory / "chat.sqlite"), files=str(directory / "chat-files"))
    try:
        store = open_store(server)
    except StoreError as error:
        if config.load is not None:
            raise
        notes.print(Text(f"this conversation is not kept: {error}", style="dim"), soft_wrap=True)
    else:
        yield server, store
        return
    with tempfile.TemporaryDirectory() as files:
        server = ServerConfig(store=MEMORY, files=files)
        yield server, open_store(server)


@asynccontextmanager
async def own_engine(
    engine: EngineConfig, server: ServerConfig, opened: Store, settings: Settings, notes: Console
) -> AsyncIterator[tuple[Talker, BatchPlace]]:
    """Start our own engine over a store, which is closed at the end."""
    store = AsyncStore(opened)
    try:
        with notes.status("starting") if notes.is_terminal else nullcontext() as status:
            client = await EngineClient.start(engine, on_progress=status.update if status else None)
        try:
            responses = Responses(Service(client, server), store)
            batches = Batches(responses, Files(store, server))
            try:
                await batches.start()
                yield LocalTalker(responses, settings), LocalPlace(batches, client.info.max_model_len - 1)
            finally:
                await batches.close()
        finally:
            await client.close()
    finally:
        store.close()


@dataclass
class Conversation:
    """The state of a conversation. A turn that fails or is stopped does not change it."""

    talker: Talker
    system: str | None
    console: Console
    notes: Console
    bookmarks: Bookmarks
    head: Head = None
    turns: int = 0
    name: str | None = None
    """Name under which each turn is saved, in addition to `last`."""
    used: list[Usage] = field(default_factory=list)
    """Token counts of the turns since the conversation began or was loaded."""
    batching: Batching | None = None
    """Batches of the conversation; None if they cannot run."""
    unsaved: str = ""
    """Why the last turn could not be saved; empty if it was."""

    @property
    def batches_shown(self) -> bool:
        """Whether the conversation is in batching mode."""
        return self.batching is not None and self.batching.shown

    def mark(self) -> str:
        """Return the prompt for the next line."""
        return "batch> " if self.batches_shown else "> "

    async def command(self, line: str) -> bool:
        """Run a line that begins with a slash. Returns False if it ends the conversation."""
        name = re.split(r"[\s\[]", line, maxsplit=1)[0]
        if name in ("/exit", "/quit"):
            return False
        if name == "/batch":
            await self.batch(line, len(name))
            return True
        try:
            await self._obey(name, line[len(name) :].strip())
        except ChatError as error:
            self.notes.print(Text(str(error), style="red"))
        return True

    async def _obey(self, name: str, rest: str) -> None:
        match name:
            case "/help":
                self.help()
            case "/clear":
                self.clear("a new conversation")
            case "/undo":
                await self.undo()
            case "/system" if rest:
                self.system = rest
                self.clear("a new conversation, with that system message")
            case "/system":
                self.note(self.system or "there is no system message")
            case "/save" if rest and self.head is not None:
                self.save(rest, await self.said())
                self.name = rest
                self.note(f"saved as {rest}, with the turns to come")
            case "/load" if rest:
                await self.load(rest)
            case "/branch" if self.head is not None:
                if rest:
                    self.save(rest, await self.said())
                self.name = rest or None
                self.note(f"going on as {rest}" if rest else "going on apart; /save NAME keeps it")
            case "/save" | "/branch" | "/load":
                self.note("say something first" if self.head is None and name != "/load" else f"{name} needs a name")
            case "/conversations":
                marks = self.bookmarks.all()
                if not marks:
                    self.note("nothing is saved yet")
                for saved, mark in marks.items():
                    self.note(f"{saved}  ·  turns: {mark.turns}  ·  {CONTROL.sub('', mark.said)[:60]}")
            case "/stats":
                prompt = sum(each.prompt_tokens for each in self.used)
                cached = sum(each.cached_tokens for each in self.used)
                generated = sum(each.completion_tokens for each in self.used)
                self.note(
                    f"turns: {len(self.used)}; {prompt} prompt tokens of which {cached} came from the cache, "
                    f"{generated} generated"
                )
            case "/chat":
                if self.batching is not None:
                    self.batching.hide()
                self.note(self._unfinished() or "chatting")
            case "/batches":
                self.note(self._unfinished() or "no batch is in progress")
            case _:
                self.note(f"there is no {name}; /help lists what there is")

    async def batch(self, line: str, begin: int) -> bool:
        """Switch to batching mode, and submit the batch in `line` from index `begin`, if there is one.

        Returns False if that fails.
        """
        if self.batching is None:
            self.notes.print(Text("this server takes no batches; a Holdfast server does", style="red"))
            return False
        submitted = not line[begin:].strip() or await self.submit(line, begin)
        if not self.batching.shown:
            if not line[begin:].strip():
                self.note('a line is now a batch, as ["Prompt 1", "Prompt 2"] [32, 64]; /chat goes back')
            self.batching.show()
        return submitted

    async def submit(self, line: str, begin: int = 0) -> bool:
        """Submit the batch in `line` from index `begin`. Returns whether that succeeded."""
        assert self.batching is not None
        try:
            id = await self.batching.submit(line.rstrip(), begin, self.talker.name, self.system)
        except (ChatError, InputError) as error:
            self.notes.print(Text(str(error), style="red"))
            return False
        self.note(f"submitted as {id}")
        return True

    async def end(self, *, wait: bool) -> None:
        """At the end of the input, print which batches continue without this command.

        With `wait`, and in batching mode, wait for the batches and print them instead.
        """
        if wait and self.batching is not None and self.batching.shown:
            await self.batching.finished()
        elif unfinished := self._unfinished():
            self.note(f"{unfinished}\nthese go on at the server, or at your next `holdfast chat` of this model")

    def _unfinished(self) -> str:
        """Return the batches in progress as text, one per line."""
        found = self.batching.unfinished if self.batching is not None else {}
        return "\n".join(
            f"{id}  ·  {each.status}  ·  {len(each.answers)} of {len(each.prompts)} answered"
            for id, each in found.items()
        )

    async def load(self, name: str) -> None:
        """Continue a saved conversation. Raises ChatError if it no longer exists."""
        mark = self.bookmarks.load(name)
        assert mark.head is not None  # A conversation is saved only after its first turn.
        turn = await self.talker.recall(mark.head)
        self.head, self.system, self.turns = mark.head, mark.system, mark.turns
        self.name = None if name == LAST else name
        self.used = []
        self.note(CONTROL.sub("", f"> {turn.said}\n{turn.answer}\n\ngoing on after turn {self.turns}"))

    async def said(self) -> str:
        """Return the user's last message. Raises ChatError if the turn no longer exists."""
        assert self.head is not None
        return (await self.talker.recall(self.head)).said

    def save(self, name: str, said: str) -> None:
        """Save the current point of the conversation under a name. `said` is the user's last message."""
        self.bookmarks.save(name, Bookmark(head=self.head, system=self.system, turns=self.turns, said=said))

    async def undo(self) -> None:
        """Go back by one turn."""
        if self.head is not None:
            self.head = (await self.talker.recall(self.head)).previous
            self.turns -= 1
        self.note(f"turns left: {self.turns}")

    def clear(self, note: str) -> None:
        """Begin a new conversation."""
        self.head, self.turns, self.name = None, 0, None
        self.used = []
        self.note(note)

    def help(self) -> None:
        """Print the commands, and the keys of a terminal."""
        table = Table.grid(padding=(0, 2))
        for name, what in HELP.items():
            table.add_row(Text(name, style="dim"), Text(what, style="dim"))
        self.notes.print(table)
        self.note(KEYS)

    def note(self, text: str) -> None:
        """Print a note, which is not part of the model's text."""
        self.notes.print(Text(text, style="dim"))

    async def turn(self, said: str) -> bool:
        """Send one message, and print the answer as it arrives. Ctrl-C stops it. Returns whether it is complete."""
        answering = asyncio.create_task(self._answer(said))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            self.head = await answering
        except ChatError as error:
            self.notes.print(Text(str(error), style="red"))
            return False
        except asyncio.CancelledError:
            if not answering.cancelled():  # This task was cancelled, not the answer.
                answering.cancel()
                raise
            self.console.print()
            self.note("stopped; the turn is taken back")
            return False
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self.turns += 1
        try:
            for name in filter(None, (LAST, self.name)):
                self.save(name, said)
            self.unsaved = ""
        except ChatError as error:
            if str(error) != self.unsaved:  # Each turn would say it again.
                self.notes.print(Text(str(error), style="red"))
            self.unsaved = str(error)
        return True

    async def _answer(self, said: str) -> Head:
        head: Head = None
        usage: Usage | None = None
        began = last = time.monotonic()
        first: float | None = None
        words = Words(self.console.file, self.console.width) if self.console.is_terminal else None
        async with aclosing(self.talker.answer(said, self.system, self.head)) as pieces:
            async for piece in pieces:
                usage, head = piece.usage or usage, piece.head or head
                if piece.text:
                    last = time.monotonic()
                    first = first or last
                    if words is not None:
                        words.write(CONTROL.sub("", piece.text))
                    else:
                        self.console.out(CONTROL.sub("", piece.text), end="", highlight=False)
                        self.console.file.flush()
        if words is not None:
            words.end()
        else:
            self.console.print()
        self.note(self._status(usage, (first or last) - began, last - (first or last)))
        if words is not None:
            self.console.print()  # A blank line between turns.
        if head is None:
            raise ChatError("the answer broke off; the turn is taken back")
        return head

    def _status(self, usage: Usage | None, ttft: float, seconds: float) -> str:
        """Return a line about the turn. `ttft` and `seconds` are in seconds."""
        parts = [f"first token {ttft * 1e3:.0f} ms"]
        if usage is not None:
            self.used.append(usage)
            if usage.completion_tokens > 1 and seconds > 0:
                parts.append(f"{(usage.completion_tokens - 1) / seconds:.0f} tokens/s")
            parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
        return "  ·  ".join(parts)


class Bookmark(msgspec.Struct, frozen=True, kw_only=True):
    """A saved point in a conversation."""

    head: Head
    system: str | None = None
    turns: int = 0
    said: str = ""
    """The user's last message, for the list of conversations."""


@dataclass(frozen=True)
class Bookmarks:
    """The bookmarks for one server or for our own engine. They are kept in a file of the user, if there is one."""

    path: Path | None
    place: str
    here: dict[str, Bookmark] = field(default_factory=dict)
    """The bookmarks if there is no file."""

    def all(self) -> dict[str, Bookmark]:
        """Return all bookmarks by name. Raises ChatError if the file cannot be read."""
        return self.here if self.path is None else self._read(self.path).get(self.place, {})

    def save(self, name: str, bookmark: Bookmark) -> None:
        """Save a bookmark. Replaces the file atomically. Raises ChatError."""
        if not name.isprintable() or not 1 <= len(name) <= MAX_NAME:
            raise ChatError(f"a name must have 1 to {MAX_NAME} visible characters")
        if self.path is None:
            self.here[name] = bookmark
            return
        places = self._read(self.path)
        places.setdefault(self.place, {})[name] = bookmark
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # mkstemp creates a file that only its owner can read.
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(places)))
            Path(temporary).replace(self.path)
        except OSError as error:
            raise ChatError(f"{self.path} cannot be written: {error.strerror}") from None

    def load(self, name: str) -> Bookmark:
        """Return the bookmark with this name. Raises ChatError if there is none."""
        found = self.all()
        if name not in found:
            raise ChatError(f"there is no conversation {name!r}; /conversations lists what there is")
        return found[name]

    @staticmethod
    def _read(path: Path) -> dict[str, dict[str, Bookmark]]:
        try:
            return msgspec.json.decode(read_bytes(path), type=dict[str, dict[str, Bookmark]])
        except FileNotFoundError:
            return {}
        except (OSError, RecursionError, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ChatError(f"{path} cannot be read: {error}") from None
