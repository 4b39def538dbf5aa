"""`make demo`: serve the built-in model, state facts in a conversation, and ask for them later.

Exits with 0 if every answer is right, and with 1 if one is wrong or anything fails.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

START_SECONDS = 120
MODEL = "holdfast-tiny"


@dataclass(frozen=True)
class Ask:
    """One message, and the words that its answer must contain."""

    said: str
    expected: tuple[str, ...] = ()


CONVERSATION = (
    Ask("Hi! My name is Ada."),
    Ask("I live in Lisbon."),
    Ask("I have 3 cats."),
    Ask("What is 4 plus 5?", ("9",)),
    Ask("What is my name?", ("Ada",)),
    Ask("Where do I live?", ("Lisbon",)),
    Ask("How many cats do I have?", ("3",)),
)


@dataclass(frozen=True)
class Turn:
    """The result of one turn. Times are in seconds."""

    ask: Ask
    answer: str
    ttft: float
    seconds: float
    """Seconds from the first token to the last."""
    prompt: int
    generated: int
    cached: int

    @property
    def right(self) -> bool:
        """Whether the answer contains every expected word."""
        return bool(self.answer.strip()) and all(word.lower() in self.answer.lower() for word in self.ask.expected)

    @property
    def pace(self) -> float:
        """Tokens per second after the first token."""
        return (self.generated - 1) / self.seconds if self.generated > 1 and self.seconds > 0 else 0.0


def main() -> int:
    """Serve, converse, check the answers. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Serve a model and hold a conversation with it.")
    parser.add_argument("model", nargs="?", default=MODEL)
    model = parser.parse_args().model
    console = Console(highlight=False)
    console.print(Panel.fit(Text.assemble(("Holdfast", "bold"), f" serves {model} and talks to it"), style="cyan"))
    try:
        with server(console, model) as url, OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            served = client.models.list().data[0].id
            messages: list[Any] = []
            turns = [hold_turn(console, client, served, messages, ask) for ask in CONVERSATION]
    except Exception as error:
        console.print(Text(f"\nthe demo failed: {error}", style="bold red"))
        return 1
    report(console, turns)
    return 0 if all(turn.right for turn in turns) else 1


@contextmanager
def server(console: Console, model: str, *options: str) -> Iterator[str]:
    """Run `holdfast serve` with these options on a free port. Yields its URL once it is healthy."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "holdfast.cli", "serve", model, "--port", str(port), "--store", "memory"]
    command += options
    console.print(Text(" ".join(("$ holdfast serve", model, "--port", str(port), *options)), style="dim"))
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not healthy(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {process.returncode}")
            if time.monotonic() - began > START_SECONDS:
                raise RuntimeError(f"the server was not healthy after {START_SECONDS} s")
            time.sleep(0.05)
        console.print(Text(f"healthy after {time.monotonic() - began:.1f} s\n", style="dim"))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def healthy(url: str) -> bool:
    """Whether the server and its engine answer."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(json.load(response)["status"] == "ok")
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def hold_turn(console: Console, client: OpenAI, model: str, messages: list[Any], ask: Ask) -> Turn:
    """Send one message, print the answer as it arrives, and add both to the conversation."""
    console.print(Text.assemble(("you       ", "bold cyan"), ask.said))
    console.print(Text("holdfast  ", style="bold green"), end="")
    messages.append({"role": "user", "content": ask.said})
    began = time.monotonic()
    first: float | None = None
    last = began
    answer = ""
    usage = None
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        usage = chunk.usage or usage
        piece = (chunk.choices[0].delta.content or "") if chunk.choices else ""
        if piece:
            last = time.monotonic()
            first = first or last
            answer += piece
            console.out(piece, end="", highlight=False)
            console.file.flush()
    if usage is None or first is None:
        raise RuntimeError(f"no answer came to: {ask.said}")
    messages.append({"role": "assistant", "content": answer})
    cached = (usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens) or 0
    turn = Turn(ask, answer, first - began, last - first, usage.prompt_tokens, usage.completion_tokens, cached)
    console.print()
    console.print(
        Text(
            f"          first token {turn.ttft * 1e3:.0f} ms · {turn.pace:.0f} tokens/s · "
            f"{turn.cached} of {turn.prompt} prompt tokens cached\n",
            style="dim",
        )
    )
    return turn


def report(console: Console, turns: list[Turn]) -> None:
    """Print all turns in a table, and the result."""
    table = Table(title_justify="left")
    table.add_column("said")
    table.add_column("must hold")
    for name in ("TTFT ms", "tokens/s", "prompt", "cached"):
        table.add_column(name, justify="right")
    table.add_column("right")
    for turn in turns:
        table.add_row(
            turn.ask.said,
            ", ".join(turn.ask.expected),
            f"{turn.ttft * 1e3:.0f}",
            f"{turn.pace:.0f}",
            str(turn.prompt),
            str(turn.cached),
            Text("yes", style="green") if turn.right else Text("no", style="bold red"),
        )
    console.print(table)
    wrong = sum(not turn.right for turn in turns)
    asked = sum(bool(turn.ask.expected) for turn in turns)
    if wrong:
        console.print(Text(f"{wrong} of {len(turns)} answers are wrong", style="bold red"))
    else:
        console.print(Text(f"all {asked} questions answered rightly", style="bold green"))


if __name__ == "__main__":
    sys.exit(main())
