"""A chat template in its own process, with limits on its time, its memory and its output.

A template is a program that comes with a checkpoint. The sandbox keeps it from our files and objects, but not from an
endless loop or from `'a' * 3_000_000_000`, not even while it is compiled. So this file is also a script that imports
nothing of Holdfast. It reads a Start and then Renders, and answers each with Rendered or Refused.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from io import BufferedRWPair
from typing import Any, NoReturn

import jinja2
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEXT_LIMIT = 8 << 20
"""Largest number of characters in one text to tokenize, given by a client or rendered by a template."""
CPU_SECONDS = 2.0
"""Processor time of one rendering in seconds, after which the kernel ends the process."""
MEMORY_LIMIT = 1 << 30
"""Limit of the address space in bytes. A conversation of TEXT_LIMIT characters of four bytes takes half of it."""
ANSWER_SECONDS = 30.0
"""Wall-clock limit of an answer in seconds, for a machine that gives the process no processor time."""
REASON_LIMIT = 1000
"""Largest number of characters in the reason why messages are refused."""
REPLY_LIMIT = 4 * TEXT_LIMIT + 1024
"""Largest answer in bytes."""


class Start(msgspec.Struct, array_like=True):
    """The first message: the template and its settings."""

    template: str
    special_tokens: dict[str, str]


class Render(msgspec.Struct, array_like=True):
    """Request to render these messages."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = {}
    """Further variables of the template."""


class Rendered(msgspec.Struct, array_like=True, tag="rendered"):
    """The text of the messages."""

    text: str


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """The reason why there is no text, in words."""

    reason: str


_encode = msgspec.msgpack.Encoder().encode
_start: msgspec.msgpack.Decoder[Start] = msgspec.msgpack.Decoder(Start)
_render: msgspec.msgpack.Decoder[Render] = msgspec.msgpack.Decoder(Render)
_reply: msgspec.msgpack.Decoder[Rendered | Refused] = msgspec.msgpack.Decoder(Rendered | Refused)


class ChatTemplate:
    """A chat template. Its process starts with the first rendering and stays. Safe to use from several threads."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of the template: bos_token, eos_token and the like."""
        self._start = Start(template, dict(special_tokens))
        self._turn = threading.Lock()
        self._process: _Process | None = None
        self._closed = threading.Event()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Render messages. Raises ValueError with the reason: the template's own, or the limit that it exceeds."""
        said, known = [dict(message) for message in messages], None if tools is None else [dict(tool) for tool in tools]
        try:
            request = _encode(Render(said, add_generation_prompt, known, dict(options or {})))
        except UnicodeEncodeError:
            raise ValueError("the messages hold an unpaired surrogate") from None
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the messages are not plain data: {error}") from None
        with self._turn:
            reply = self._answer(request)
        if isinstance(reply, Refused):
            raise ValueError(reply.reason)
        return reply.text

    def close(self) -> None:
        """End the process, even while it renders. Later renderings, and those that wait, are refused."""
        self._closed.set()
        if process := self._process:
            process.kill()

    def _answer(self, request: bytes) -> Rendered | Refused:
        process = self._process
        if not process or not process.runs:  # or it was killed from outside while it was idle
            process = self._process = _Process(_encode(self._start))
        if self._closed.is_set():
            process.kill()
            return Refused("the chat template was closed")
        try:
            return process.ask(request)
        except (OSError, ValueError) as error:
            self._process = None
            how = process.end()
            if self._closed.is_set():
                return Refused("the chat template was closed")
            if how == -signal.SIGPROF:
                return Refused(f"the chat template took over {CPU_SECONDS:g} s of processor time for these messages")
            return Refused(f"the chat template's process gave no answer (status {how}): {error}")


class _Process:
    """The process and the socket to it. The process ends when this object is collected, and with the interpreter."""

    def __init__(self, start: bytes) -> None:
        """Start the process. Raises OSError."""
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(CPU_SECONDS)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that the terminal's Ctrl-C reaches only us
            )
        self._file = self._socket.makefile("rwb")
        self._finalizer = weakref.finalize(self, _end, self._process, self._file, self._socket)
        self._unsent: list[bytes] = [start]

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def ask(self, request: bytes) -> Rendered | Refused:
        """Send a request and wait for its answer. Raises OSError or ValueError if there is none."""
        for message in (*self._unsent, request):
            _send(self._file, message)
        self._unsent.clear()
        reply = _receive(self._file, REPLY_LIMIT)
        if reply is None:
            raise ValueError("it has ended")
        return _reply.decode(reply)

    def kill(self) -> None:
        """Kill the process. May be called from any thread, while another waits for an answer."""
        self._process.kill()

    def end(self) -> int:
        """Kill the process if it still runs. Returns how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._finalizer()
        return int(self._process.returncode)


def _end(process: subprocess.Popen[bytes], file: BufferedRWPair, connection: socket.socket) -> None:
    process.kill()
    process.wait()
    with contextlib.suppress(OSError):  # output that could not be sent is dropped
        file.close()
    connection.close()


def _send(file: BufferedRWPair, message: bytes) -> None:
    file.write(len(message).to_bytes(4, "big"))
    file.write(message)
    file.flush()


def _receive(file: BufferedRWPair, limit: int) -> bytes | None:
    """The next message; None at the end. Raises ValueError for a message beyond the limit."""
    head = file.read(4)
    size = int.from_bytes(head, "big")
    if size > limit:
        raise ValueError(f"a message of {size} bytes; at most {limit} are taken")
    message = file.read(size)
    return message if len(head) == 4 and len(message) == size else None


def main() -> None:
    """Answer the messages that arrive on standard input until it ends."""
    if sys.platform == "linux":  # other systems do not enforce it
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = float(sys.argv[1])
    with socket.socket(fileno=0).makefile("rwb") as file:
        compiled: jinja2.Template | None = None
        if (first := _receive(file, MEMORY_LIMIT)) is None:
            return
        start = _start.decode(first)
        while (data := _receive(file, MEMORY_LIMIT)) is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, whatever it does
            reply: Rendered | Refused
            what = "this model's chat template cannot be compiled"
            try:
                compiled = compiled or _environment().from_string(start.template)
                what = "the chat template refused the messages"
                reply = Rendered(_rendered(compiled, start.special_tokens, _render.decode(data)))
                answer = _encode(reply)
            except Exception as error:  # any error means that the template refuses these messages
                text = str(error) or type(error).__name__
                if isinstance(error, MemoryError):
                    text = f"it takes over {MEMORY_LIMIT >> 20} MiB of memory"
                answer = _encode(Refused(f"{what}: {text[:REASON_LIMIT].encode(errors='replace').decode()}"))
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(file, answer)


def _rendered(template: jinja2.Template, special_tokens: Mapping[str, str], wanted: Render) -> str:
    variables = {
        "documents": None,
        **wanted.options,
        **special_tokens,
        "messages": wanted.messages,
        "tools": wanted.tools,
        "add_generation_prompt": wanted.add_generation_prompt,
    }
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > TEXT_LIMIT:
            raise ValueError(f"the rendered text is longer than {TEXT_LIMIT} characters")
    return "".join(pieces)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's text for training. When serving, its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment like the one of Transformers for chat templates: sandboxed, with a few extra names."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter without the escaping of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


if __name__ == "__main__":
    main()
