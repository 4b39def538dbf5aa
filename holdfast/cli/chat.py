"""`holdfast chat`: a conversation in the terminal, or through a pipe."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass

import httpx
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from rich.console import Console
from rich.text import Text

from holdfast.cli.talkers import ChatError, LocalTalker, Message, RemoteTalker, Settings, Talker
from holdfast.core.config import EngineConfig, option
from holdfast.engine.client import EngineClient, Usage

HELP = """\
/help           this list
/clear          forget the conversation and begin a new one
/undo           take back the last turn
/system TEXT    tell the model how to behave (without TEXT: show it); begins a new conversation
/stats          what this conversation has cost so far
/exit           end (Ctrl-D does as well)
Ctrl-C while an answer comes stops it and takes the turn back."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would take for a command; a model must not send any."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """How to converse, and with whom. Raises ValueError for what cannot be."""

    url: str | None = option(None, "talk to the server at this URL; MODEL is then a name that it serves")
    api_key: str | None = option(None, "key for that server; default: HOLDFAST_API_KEY")
    system: str | None = option(None, "system message: how the model is to behave")
    temperature: float = option(0.0, "0 always takes the likeliest token; more is more random")
    max_tokens: int | None = option(None, "longest answer in tokens; default: what the context leaves")

    def __post_init__(self) -> None:
        if self.url is not None and not re.match(r"https?://\S+$", self.url):
            raise ValueError(f"url is {self.url}; it must look like http://127.0.0.1:8000")
        if not 0 <= self.temperature <= 2:
            raise ValueError(f"temperature is {self.temperature}; it must lie between 0 and 2")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")


async def run(config: ChatConfig, engine: EngineConfig, model: str | None) -> int:
    """Converse until the end of input. `model` is a name that the server at the URL serves, None for its first.

    Returns the exit code: through a pipe 1 when a turn failed. Raises ChatError, EngineStartError.
    """
    piped = not sys.stdin.isatty()
    console = Console(highlight=False)
    notes = Console(highlight=False, stderr=True) if piped else console
    async with talker(config, engine, model, notes) as who:
        notes.print(Text.assemble("talking to ", (who.name, "bold"), ("  /help lists the commands", "dim")))
        conversation = Conversation(who, config.system, console, notes)
        failed = False
        async for line in lines(piped):
            if not line.strip():
                continue
            if line.startswith("/"):
                if not conversation.command(line.strip()):
                    break
            elif not await conversation.turn(line.strip()):
                failed = True
        return int(piped and failed)


@asynccontextmanager
async def talker(config: ChatConfig, engine: EngineConfig, model: str | None, notes: Console) -> AsyncIterator[Talker]:
    """Who answers, for as long as the conversation lasts."""
    settings = Settings(temperature=config.temperature, max_tokens=config.max_tokens, seed=None)
    if config.url is not None:
        base = config.url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"authorization": f"Bearer {config.api_key}"} if config.api_key else {}
        async with httpx.AsyncClient(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=None)) as http:
            yield await RemoteTalker.connect(http, model, settings)
        return
    with notes.status("starting") if notes.is_terminal else nullcontext() as status:
        client = await EngineClient.start(engine, on_progress=status.update if status else None)
    try:
        yield LocalTalker(client, settings)
    finally:
        await client.close()


async def lines(piped: bool) -> AsyncIterator[str]:
    """What the user says, line by line, until the end of input."""
    if piped:
        while line := await asyncio.to_thread(sys.stdin.readline):
            yield line
        return
    session: PromptSession[str] = PromptSession(reserve_space_for_menu=0)
    while True:
        try:
            yield await session.prompt_async(FormattedText([("bold", "> ")]))
        except EOFError:
            return


@dataclass
class Tally:
    """What the turns of a conversation have cost."""

    turns: int = 0
    prompt: int = 0
    generated: int = 0
    cached: int = 0


class Conversation:
    """The turns so far. A turn that fails or is stopped leaves no trace in them."""

    def __init__(self, who: Talker, system: str | None, console: Console, notes: Console) -> None:
        self.who = who
        self.system = system
        self.console = console
        self.notes = notes
        self.messages: list[Message] = []
        self.tally = Tally()

    def command(self, line: str) -> bool:
        """Obey a line that begins with a slash. False ends the conversation."""
        name, _, rest = line.partition(" ")
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                self.note(HELP)
            case "/clear":
                self.clear("a new conversation")
            case "/undo":
                del self.messages[-2:]
                self.note(f"turns left: {len(self.messages) // 2}")
            case "/system" if rest.strip():
                self.system = rest.strip()
                self.clear("a new conversation, with that system message")
            case "/system":
                self.note(self.system or "there is no system message")
            case "/stats":
                tally = self.tally
                self.note(
                    f"turns: {tally.turns}; {tally.prompt} prompt tokens of which {tally.cached} came from the cache, "
                    f"{tally.generated} generated"
                )
            case _:
                self.note(f"there is no {name}; /help lists what there is")
        return True

    def clear(self, note: str) -> None:
        """Begin again."""
        self.messages.clear()
        self.tally = Tally()
        self.note(note)

    def note(self, text: str) -> None:
        """Say something that is not the model's."""
        self.notes.print(Text(text, style="dim"))

    async def turn(self, said: str) -> bool:
        """Say one thing and print the answer as it comes. Whether it came to its end; Ctrl-C stops it."""
        answering = asyncio.create_task(self._answer(said))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, answering.cancel)
        try:
            answer = await answering
        except ChatError as error:
            self.notes.print(Text(str(error), style="red"))
            return False
        except asyncio.CancelledError:
            if not answering.cancelled():  # it is us who are told to end, not the answer
                answering.cancel()
                raise
            self.console.print()
            self.note("stopped; the turn is taken back")
            return False
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        self.messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
        return True

    async def _answer(self, said: str) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self.messages, {"role": "user", "content": said}]
        began = time.monotonic()
        first: float | None = None
        last = began
        texts: list[str] = []
        usage: Usage | None = None
        async with aclosing(self.who.answer(messages)) as pieces:
            async for piece in pieces:
                usage = piece.usage or usage
                if piece.text:
                    last = time.monotonic()
                    first = first or last
                    texts.append(piece.text)
                    self.console.out(CONTROL.sub("", piece.text), end="", highlight=False)
                    self.console.file.flush()
        self.console.print()
        self.note(self._status(usage, (first or last) - began, last - (first or last)))
        return "".join(texts)

    def _status(self, usage: Usage | None, ttft: float, seconds: float) -> str:
        """How the turn went, in a line: times in seconds."""
        parts = [f"first token {ttft * 1e3:.0f} ms"]
        if usage is not None:
            self.tally.turns += 1
            self.tally.prompt += usage.prompt_tokens
            self.tally.generated += usage.completion_tokens
            self.tally.cached += usage.cached_tokens
            if usage.completion_tokens > 1 and seconds > 0:
                parts.append(f"{(usage.completion_tokens - 1) / seconds:.0f} tokens/s")
            parts.append(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached")
        return "  ·  ".join(parts)
