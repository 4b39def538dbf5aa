"""Attack `holdfast serve` over HTTP, each attack during an ordinary stream of another client.

Each attack is a number of connections that send some bytes, and then perhaps others again and again, until the server
closes them. While they do, new clients ask for one token. Then everything must be as before: no running request but the
ordinary one, no open file, no process ended. Before each attack the stream has a second without one as its control: its
longest gap may be 0.2 s longer during the attack. The attacker shares the server's cores, so an attack that only held
the stream or a new client up runs again, twice at most.

For each attack, the table has what it sent, its duration, the growth of memory, the number of open files, the answers
(`closed`: ended without an answer, `open`: not ended in time, `unread`: the attack reads nothing), the wait of a new
client, and the longest gap between tokens of the stream, idle and during the attack. Then come the scenarios, in which
servers are killed and started, the attacks by grammars with their own table, and starts that must be refused. Exit
status 1 if anything is beyond its bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import attack_grammars
import hostile_files
import httpx
import uvloop
from attack_grammars import GRAMMARS
from attack_restarts import SCENARIOS
from neighbour import OURS, THEIRS, Neighbour, Served, about, beside, head, post, serving, start

import holdfast

OPERATOR = "of-the-operator"
LAST = 30.0
"""Most seconds of one attack. The server's own times below are far shorter."""
DRAIN = 3.0
HELD = 0.2
"""Most seconds by which the longest gap of the ordinary stream may be longer than without an attack."""
IDLE = 1.0
"""Seconds without an attack before each one, for the control."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODEL = {"model": "holdfast-tiny"}
SAY = {**MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
CHUNKED = "transfer-encoding: chunked\r\n"
FORM = b"multipart/form-data; boundary=B"
SITE = "origin: https://evil.example\r\ncontent-length: 0\r\n"
POUR = b"186a0\r\n" + b"x" * 100_000 + b"\r\n"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """The bytes of an attack, and the bounds that must hold."""

    name: str
    first: bytes = b""
    again: bytes = b""
    connections: int = 1
    reads: bool = True
    answers: tuple[str, ...]
    """Allowed answers."""
    each: int = 1
    """Number of answers on each connection."""
    least: int = 1
    """Smallest number of the first one of `answers`."""
    server: str = "with keys"
    grown: float = 100.0
    """Most MB by which the processes together may grow."""
    waited: float = 2.0
    """Most seconds that a new client may wait longer than without an attack."""
    pace: float = 0.0
    """Seconds between the pieces that are sent again."""
    before: tuple[tuple[str, Mapping[str, object]], ...] = ()
    """Path and body of requests that are posted before."""
    hides: bytes = b""
    """Bytes that no answer may contain."""
    routes: bool = False
    """Whether `first` is sent once for each method and path of the server that may change something."""
    others: tuple[str, ...] = ("200",)
    """Allowed answers to new clients meanwhile."""
    logged: str = ""
    """Text that the server must have logged."""
    ends: bool = False
    """Whether the server gets SIGTERM during one more of these connections, and must end within its drain time."""


def text(prompt: object, key: str | None = THEIRS, **more: object) -> bytes:
    return post(TEXT, {**MODEL, "prompt": prompt, "max_tokens": 4, **more}, key)


def chat(key: str | None = THEIRS, **more: object) -> bytes:
    return post(CHAT, {**SAY, **more}, key)


def query(path: str, *queries: str) -> bytes:
    return b"".join(head("GET", f"{path}?{query}") for query in queries)


def every(names: Mapping[str, object]) -> dict[str, Any]:
    """The bounds of an attack whose only connection asks for all of these."""
    return dict(each=len(names), least=len(names))


BUILTIN = Path(holdfast.__file__).parent / "builtin" / "holdfast-tiny"
PARTS = [{"role": "user", "content": [{"type": "text", "text": ""}] * 290_000}]
SILENT = dict(answers=("closed", "503"), others=("200", "503"), logged="connections are open")
TEMPLATES = dict(first=chat(None), answers=("400",), ends=True)
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"
HUNGRY = "{% set all = namespace(x='a') %}{% for a in range(99) %}{% set all.x = all.x + all.x %}{% endfor %}"
HUGE = "{{ 'a' * 3000000000 }}"
TIMES = [
    f"--{name}-seconds={seconds}" for name, seconds in dict(header=2, body=3, write=2, idle=2, drain=DRAIN).items()
]
SERVERS: dict[str, tuple[list[str], bool, int | None]] = {
    "with keys": (
        [
            "--max-sequences",
            "65",
            "--max-waiting",
            "64",
            "--max-adapters",
            "2",
            "--adapter-root",
            tempfile.gettempdir(),
        ],
        True,
        None,
    ),
    "two replicas, with keys": (["--replicas", "2", "--max-replicas", "3"], True, None),
    "two replicas": (["--replicas", "2", "--max-replicas", "3"], False, None),
    "256 files": ([], True, 256),
    "without keys": ([], False, None),
    "hostile adapters": (["--max-adapters", "2"], True, None),
    SLOW: ([], False, None),
    HUNGRY: ([], False, None),
    HUGE: ([], False, None),
}
"""For each name or chat template: options of serve, whether there are keys, the limit of open files."""
PLAIN = (
    "with keys",
    "SIGTERM",
    "256 files",
    "without keys",
    "two replicas, with keys",
    "two replicas",
    "hostile adapters",
)
ATTACKS = [
    Attack(name="endless trailers", first=head("POST", CHAT, None, CHUNKED) + b"0\r\n", again=b"x-1: vvv\r\n" * 9999,
           answers=("401", "431", "closed"), least=0),
    Attack(name="the same, with a key", first=head("POST", CHAT, THEIRS, CHUNKED) + b"0\r\n",
           again=b"x-1: vvv\r\n" * 9999, answers=("431", "closed"), least=0),
    Attack(name="an endless header", first=b"GET / HTTP/1.1\r\nx: ", again=b"a" * 100_000,
           answers=("431", "closed"), least=0),
    Attack(name="an endless body after a 401", first=head("POST", CHAT, None, CHUNKED), again=POUR,
           answers=("401", "closed"), least=0),
    Attack(name="an endless body after a 413", first=head("POST", CHAT, THEIRS, CHUNKED), again=POUR,
           answers=("413", "closed"), least=0),
    Attack(name="3 MB of requests at once", first=head("GET", "/v1/models", THEIRS, f"x: {'x' * 900}\r\n") * 3000,
           answers=("200",), each=3000, least=3000),
    Attack(name="500 half-sent headers", first=b"GET / HTTP/1.1\r\nx: ", connections=500, answers=("408",),
           least=500),
    Attack(name="3,000 silent connections", connections=3000, **SILENT),
    # One key may send 128 MB of bodies at once, half of --max-bodies-mb. The more of a body has come, the more time it
    # has.
    Attack(name="200 half-sent bodies of 1 MB", connections=200, answers=("408", "429"), least=100, grown=400.0,
           first=head("POST", CHAT, THEIRS, "content-length: 8000000\r\n") + b" " * 1_000_000),
    Attack(name="a client that reads nothing", reads=False, answers=("unread",),
           first=text([5], stream=True, n=64, max_tokens=4000, ignore_eos=True)),
    Attack(name="the same, with 400 requests", reads=False, answers=("unread",),
           first=query("/openapi.json", "") * 400),
    Attack(name="50 times 300 tiny requests", answers=("401",), connections=50, each=300, least=15_000,
           first=b"GET / HTTP/1.1\r\n\r\n" * 300),
    Attack(name="a prompt of 1 MB", first=text("x" * 1_000_000), answers=("400",)),
    Attack(name="a prompt of 7.9 MB", first=text("word " * 1_580_000), answers=("400",), grown=200.0),
    Attack(name="1.9 million prompts of one token", first=text([[5]] * 1_900_000),
           answers=("400",)),
    Attack(name="290,000 text parts", answers=("400",), grown=200.0,
           first=post(CHAT, {**SAY, "messages": PARTS})),
    Attack(name="a user name of 7.9 MB", first=chat(user="u" * 7_900_000), answers=("200",)),
    Attack(name="one key takes all places", first=text([5], max_tokens=30, ignore_eos=True), connections=300,
           answers=("429", "200"), least=100),
    Attack(name="integers in queries", answers=("400",), each=5, least=5, first=query(
        "/v1/conversations/CONVERSATION/items", "limit=000000100999", "limit=-4") + query(
        "/v1/responses/RESPONSE", *(f"stream=true&starting_after={n}" for n in ("%C2%B2", "-4", "9" * 5000)))),
    Attack(name="200 bodies that trickle", connections=200, answers=("408", "429"), least=200, again=b" ", pace=0.25,
           first=head("POST", CHAT, THEIRS, "content-length: 1000\r\n")),
    Attack(name="200 headers that trickle", connections=200, answers=("408",), least=200, again=b"a", pace=0.25,
           first=b"GET / HTTP/1.1\r\nx: "),
    Attack(name="20 idle uploads of 400 MB", connections=20, answers=("408", "429"), least=8,
           first=head("POST", "/v1/files", THEIRS, "content-length: 400000000\r\n").replace(b"application/json", FORM)
           + b"--B\r\n"),
    Attack(name="names of tuning jobs' results", connections=50, answers=("400",), least=50,
           first=post("/v1/load_lora_adapter", {"lora_name": "ft:x", "lora_path": "x", "load_inplace": True}, THEIRS)),
    Attack(name="replicas, seen by an ordinary key", connections=50, answers=("403",), least=50,
           server="two replicas, with keys", first=head("GET", "/replicas", THEIRS)),
    Attack(name="metrics, seen by an ordinary key", answers=("200",), server="two replicas, with keys",
           first=head("GET", "/metrics", THEIRS) + head("GET", "/health", THEIRS), each=2, least=2, hides=b"replica"),
    Attack(name="every route, from another site", answers=("403",), server="without keys", routes=True,
           first=b"host: localhost\r\norigin: https://evil.example\r\n"),
    Attack(name="every route, from no origin", answers=("403",), server="two replicas", routes=True,
           first=b"host: localhost\r\norigin: null\r\nsec-fetch-site: cross-site\r\n"),
    Attack(name="every route, by a rebound name", answers=("403",), server="two replicas", routes=True,
           first=b"host: evil.example\r\norigin: http://evil.example\r\nsec-fetch-site: same-origin\r\n"),
    Attack(name="replicas, added by another site", connections=50, answers=("403",), least=50,
           server="two replicas", first=head("POST", "/replicas", None, SITE)),
    Attack(name="replicas, drained by another site", connections=50, answers=("403",), least=50,
           server="two replicas", first=head("POST", "/replicas/1/drain", None, SITE)),
    Attack(name="1,000 silent, at most 256 files", connections=1000, server="256 files", **SILENT),
    Attack(name="1,000 half-sent, at most 256 files", connections=1000, server="256 files", first=chat()[:-1],
           answers=("408", "429", "503", "closed"), others=("200", "503"), logged="connections are open"),
    Attack(name="a foreign Host", server="without keys", answers=("403",),
           first=chat(None).replace(b"localhost", b"rebound.example")),
    Attack(name="a post of another site", server="without keys", answers=("415",),
           first=chat(None).replace(b"application/json", b"text/plain")),
    Attack(name="adapters of impossible configs", server="hostile adapters", answers=("400",),
           first=hostile_files.loads(hostile_files.CONFIGS), **every(hostile_files.CONFIGS)),
    Attack(name="adapters of impossible tensors", server="hostile adapters", answers=("400",),
           first=hostile_files.loads(hostile_files.NUMBERS), **every(hostile_files.NUMBERS)),
    Attack(name="pipes as files of adapters", server="hostile adapters", answers=("400",),
           first=hostile_files.loads(hostile_files.PIPES), **every(hostile_files.PIPES)),
    Attack(name="another key's adapter", server="hostile adapters", answers=("404", "400"), each=4, least=2,
           first=post(UNLOAD, {"lora_name": "ours"}) + text([5], model="ours") + post(
               LOAD, {"lora_name": "ours", "lora_path": "right"}) + post(
               LOAD, {"lora_name": "ours", "lora_path": "right", "load_inplace": True}),
           before=((LOAD, {"lora_name": "ours", "lora_path": "right", "load_inplace": True}),)),
    Attack(name="an adapter that answers NaN", server="hostile adapters", answers=("200",), each=4, least=4,
           first=post(LOAD, {"lora_name": "nan", "lora_path": "nan-answers"}) + text([5] * 300, model="nan") + text(
               [5], model="nan", logprobs=2, top_p=0.5) + post(UNLOAD, {"lora_name": "nan"})),
    Attack(name="a slow chat template, SIGTERM", server=SLOW, connections=2, least=2, **TEMPLATES),
    Attack(name="a hungry chat template, SIGTERM", server=HUNGRY, connections=8, least=8, grown=1500.0, **TEMPLATES),
    Attack(name="a template of 3 GB, SIGTERM", server=HUGE, connections=8, least=8, **TEMPLATES),
]  # fmt: skip

ATTACKS += [
    *(Attack(name=f"two replicas: {name}"[:33], server="two replicas, with keys", connections=4, answers=("400",),
             first=text([5], **GRAMMARS[name][0]), grown=700.0)
      for name in ("a chain of 1,000 $refs", "$refs that overflow a stack", "a chain of 4,000 rules")),
]  # fmt: skip


OTHERS: list[Callable[[str], bool]] = [partial(attack_grammars.run, regexes=16)]
"""Attacks with their own servers and bounds. They get --only, and return whether all bounds hold."""


class Running:
    """One attack in progress."""

    def __init__(self, served: Served, attack: Attack) -> None:
        self.served, self.attack = served, attack
        self.sent = 0
        self.answers: Counter[str] = Counter()
        self.others: Counter[str] = Counter()
        self.longest_wait = 0.0
        """Longest wait of a new client, in seconds."""
        self.each = attack.each
        self.shown = b""
        """The last bytes of the answers, if they may not contain something."""
        self.engines = engines(served)
        self.before, self.files_before = served.memory(), served.files
        self.grown = [0.0, 0.0]
        """Growth in MB of the API process, and of its children."""
        self.files = 0
        self.first = self.prepared()

    def prepared(self) -> bytes:
        """The first bytes of a connection, with the ids of a running response and of a conversation filled in."""
        first = self.attack.first
        for path, body in self.attack.before:
            ours = {"authorization": f"Bearer {OURS}"}
            httpx.post(self.served.url + path, json=body, headers=ours, timeout=LAST).raise_for_status()
        if self.attack.routes:
            described = self.served.get("/openapi.json").json()["paths"]
            changing = [
                (method.upper(), re.sub(r"{[^}]*}", "0", path))
                for path, methods in described.items()
                for method in methods
                if method not in ("get", "head", "options")
            ]
            self.each = len(changing)
            return b"".join(
                f"{method} {path} HTTP/1.1\r\n".encode() + first + b"content-length: 0\r\n\r\n"
                for method, path in changing
            )
        if b"RESPONSE" in first:
            api = httpx.Client(base_url=self.served.url, headers={"authorization": f"Bearer {THEIRS}"})
            wanted = {**MODEL, "input": "hello", "background": True, "ignore_eos": True, "max_output_tokens": 200}
            response = api.post("/v1/responses", json=wanted).json()["id"].encode()
            conversation = api.post("/v1/conversations").json()["id"].encode()
            first = first.replace(b"RESPONSE", response).replace(b"CONVERSATION", conversation)
        return first

    async def run(self) -> None:
        """Attack until every connection has ended. Meanwhile ask as new clients, and measure."""
        measuring = asyncio.create_task(self.measure())
        attacking = asyncio.gather(*(self.connect() for _ in range(self.attack.connections)))
        while not (attacking.done() and self.others):
            await self.ask()
        await attacking
        measuring.cancel()

    async def ask(self) -> None:
        """Ask for one token, as a new client with our key."""
        began, answer = time.monotonic(), "silence"
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST):
                try:
                    reader, writer = await asyncio.open_connection(self.served.host, self.served.port)
                    writer.write(text([5], OURS, max_tokens=1))
                    answer = (await reader.readuntil(b"\r\n"))[9:12].decode()
                    writer.transport.abort()
                except (OSError, EOFError):
                    answer = "closed"
        self.others[answer] += 1
        self.longest_wait = max(self.longest_wait, time.monotonic() - began)
        await asyncio.sleep(0.2)

    async def measure(self) -> None:
        """Sample memory and open files, without end."""
        while True:
            now = self.served.memory()
            self.grown = [
                max(grown, after - before) for grown, after, before in zip(self.grown, now, self.before, strict=True)
            ]
            self.files = max(self.files, self.served.files)
            await asyncio.sleep(0.05)

    async def connect(self) -> None:
        """Run one connection, until it is answered or, if it would send without end, until it is closed."""
        told, tail, attack = 0, b"", self.attack
        raw = socket.socket()
        raw.setblocking(False)
        if not attack.reads:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        try:
            async with asyncio.timeout(LAST):
                await asyncio.get_running_loop().sock_connect(raw, (self.served.host, self.served.port))
                reader, writer = await asyncio.open_connection(sock=raw)
                sending = asyncio.create_task(self.send(writer))
                try:
                    while attack.reads and (attack.again or told < self.each):
                        data = await reader.read(1 << 16)
                        if not data:
                            break
                        found = re.findall(rb"HTTP/1.1 (\d{3})", tail + data)
                        if attack.hides:
                            self.shown += data
                        tail = (tail + data)[-11:]
                        self.answers.update(code.decode() for code in found)
                        told += len(found)
                    if not attack.reads:
                        await sending
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                    writer.transport.abort()
        except TimeoutError:
            self.answers["open"] += 1
            return
        except OSError:
            pass
        if not told:
            self.answers["closed" if attack.reads else "unread"] += 1

    async def send(self, writer: asyncio.StreamWriter) -> None:
        """Send everything. Raises ConnectionError, or goes on without end."""
        if not self.attack.reads:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        piece = self.first
        while piece or not self.attack.reads:
            writer.write(piece or b"G")
            await writer.drain()
            self.sent += len(piece)
            piece = self.attack.again
            if self.attack.pace or not self.attack.reads:
                await asyncio.sleep(self.attack.pace or 0.1)

    async def settled(self) -> bool:
        """Whether, within a while, only the ordinary stream runs and the files of the attack are closed."""
        for _ in range(100):
            if self.served.gauge("requests_running") <= 1 and self.served.files <= self.files_before + 4:
                return True
            await asyncio.sleep(0.1)
        return False

    async def end(self) -> float:
        """Send SIGTERM during one more connection of the attack. Returns the seconds until the server has ended."""
        last = asyncio.create_task(self.connect())
        await asyncio.sleep(0.3)
        began = time.monotonic()
        self.served.process.send_signal(signal.SIGTERM)
        while self.served.process.poll() is None and time.monotonic() < began + 20:
            await asyncio.sleep(0.02)
        await last
        return time.monotonic() - began


def engines(served: Served) -> object:
    """The process of each replica, as its operator sees it. None with one engine, whose end ends the server."""
    found = httpx.get(f"{served.url}/replicas", headers={"authorization": f"Bearer {OPERATOR}"}, timeout=10)
    return [(each["name"], each["pid"]) for each in found.json()["data"]] if found.status_code == 200 else []


async def attack(served: Served, neighbour: Neighbour, wanted: Attack) -> tuple[str, list[str]]:
    """Measure the control, and run one attack. Returns its row, and the exceeded bounds."""
    running, began = Running(served, wanted), time.monotonic()
    await running.ask()
    await asyncio.sleep(IDLE - 0.2)
    idle_wait, running.longest_wait = running.longest_wait, 0.0
    quiet, began = neighbour.longest(began), time.monotonic()
    running.others.clear()
    await running.run()
    seconds = time.monotonic() - began
    wrong = [] if await running.settled() else ["its requests or files stay"]
    held, answers = neighbour.longest(began), running.answers.copy()
    calm = held <= quiet + HELD
    if wanted.ends and calm:
        took = await running.end()
        seconds = took
        if took > DRAIN + 5 or served.process.returncode != 0:
            wrong.append(f"ended after {took:.1f} s with {served.process.returncode}")
    elif neighbour.wrong:
        wrong.append(f"the stream got {neighbour.wrong}")
    log, least = served.log.read_text(), running.each if wanted.routes else wanted.least
    checks = {
        f"answers beyond {', '.join(wanted.answers)}": not set(answers) - set(wanted.answers),
        f"fewer than {wanted.least} of {wanted.answers[0]}": answers[wanted.answers[0]] >= least,
        f"a new client waited {wanted.waited:g} s more": running.longest_wait <= idle_wait + wanted.waited,
        f"an answer shows {wanted.hides.decode()}": not wanted.hides or wanted.hides not in running.shown,
        "an engine has ended": wanted.ends or engines(served) == running.engines,
        "the server has ended": wanted.ends or served.process.poll() is None,
        f"new clients may get {', '.join(wanted.others)}": not set(running.others) - set(wanted.others),
        f"grown by over {wanted.grown:g} MB": sum(running.grown) <= wanted.grown,
        f"stream held by over {quiet + HELD:.3f} s": calm,
        f"no log of {wanted.logged!r}": wanted.logged in log,
        "a trace in the log": "Traceback" not in log,
    }
    wrong += [what for what, well in checks.items() if not well]
    told = " ".join(f"{count}x{code}" for code, count in sorted(answers.items()))
    others = " ".join(f"{count}x{code}" for code, count in sorted(running.others.items()))
    row = (
        f"{wanted.name:34}{running.sent / 1e6:8.1f}{seconds:6.1f}{running.grown[0]:7.0f}{running.grown[1]:7.0f}"
        f"{running.files:6}  {told:22} {others:14}{running.longest_wait:6.2f}{quiet:7.3f}"
        f"{held:7.3f}"
    )
    return row, wrong


HEAD = (
    f"{'attack':34}{'MB sent':>8}{'s':>6}{'API MB':>7}{'engine':>7}{'files':>6}  {'answers':22} {'new clients':14}"
    f"{'wait':>6}{'idle':>7}{'gap':>7}"
)


async def attack_all(served: Served, name: str) -> bool:
    """Run the attacks on one server.

    Attacks that only held the stream up run again, because a busy machine does that too.
    """
    good = True
    with beside(served) as neighbour:
        os.nice(19)  # the attacker's own work should not take the server's cores
        await asyncio.sleep(2)
        api, engine = served.memory()
        kind = name if name in PLAIN else "a chat template"
        print(f"-- {kind}: {api:.0f} MB resident in the API process, {engine:.0f} MB in its engines", flush=True)
        for wanted in [attack for attack in ATTACKS if attack.server == name]:
            for left in (2, 1, 0):
                row, wrong = await attack(served, neighbour, wanted)
                timed = [each for each in wrong if each.startswith(("stream held", "a new client waited"))]
                again = left and wrong and timed == wrong
                print(row, "again: " * bool(again) + ("NOT: " + "; ".join(wrong) if wrong else "ok"), flush=True)
                if not again:
                    break
            good = good and not wrong
    return good


def attack_server(name: str, arguments: list[str], keyed: bool, files: int | None) -> None:
    """Start one server and attack it. Exits with 1 if a bound is exceeded."""
    with tempfile.TemporaryDirectory() as directory:
        model = [] if name in PLAIN else [hostile(name, Path(directory))]
        keys = {"HOLDFAST_API_KEY": f"{OURS},{THEIRS}", "HOLDFAST_OPERATOR_KEY": OPERATOR} if keyed else {}
        if name == "hostile adapters":
            hostile_files.write_adapters(Path(directory), BUILTIN)
            arguments = [*arguments, "--adapter-root", directory]
        with serving([*model, *TIMES, *arguments], keys, files) as served:
            good = uvloop.run(attack_all(served, name))
    sys.exit(not good)


def hostile(template: str, directory: Path) -> str:
    """A copy of the built-in model with this chat template."""
    config = json.loads((BUILTIN / "tokenizer_config.json").read_text())
    shutil.copytree(BUILTIN, directory / "holdfast-tiny")
    (directory / "holdfast-tiny" / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template})
    )
    return str(directory / "holdfast-tiny")


def refused(name: str, arguments: list[str], variables: Mapping[str, str], directory: Path, says: str) -> bool:
    """Whether a start ends with exit code 2 and one line with the reason."""
    log, began = directory / "log", time.monotonic()
    with start(arguments, log, variables) as process:
        try:
            code: int | str = process.wait(30)
        except subprocess.TimeoutExpired:
            code = "none"
            process.kill()
    told = log.read_text()
    good = code == 2 and says in told and "Traceback" not in told
    print(
        f"{name:34}{time.monotonic() - began:14.1f}{'':22}exit {code}{'':51}",
        "ok" if good else f"NOT: {told}",
        flush=True,
    )
    return good


def scenario(name: str, run: Callable[[], tuple[list[str], str]]) -> bool:
    """Run a scenario that starts its own servers, and print its row. Returns whether all its bounds hold."""
    began = time.monotonic()
    try:
        wrong, told = run()
    except (RuntimeError, TimeoutError, httpx.HTTPError) as error:
        wrong, told = [f"{type(error).__name__}: {error}"], ""
    taken = f"{name:34}{time.monotonic() - began:14.1f}  {told}"
    print(f"{taken:134}", "NOT: " + "; ".join(wrong) if wrong else "ok", flush=True)
    return not wrong


def main() -> int:
    """Run everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only attacks whose names hold this")
    options = parser.parse_args()
    ATTACKS[:] = [attack for attack in ATTACKS if options.only in attack.name]
    print(about(), HEAD, sep="\n", flush=True)
    good = True
    for name, (arguments, keyed, files) in SERVERS.items():
        if not any(attack.server == name for attack in ATTACKS):
            continue
        process = multiprocessing.get_context("fork").Process(
            target=attack_server, args=(name, arguments, keyed, files)
        )
        process.start()
        process.join()
        good = good and process.exitcode == 0
    for others in OTHERS:
        good = others(options.only) and good
    for name, run in SCENARIOS.items():
        good = (options.only not in name or scenario(name, run)) and good
    if options.only:
        print("every bound holds" if good else "NOT every bound holds")
        return not good
    with tempfile.TemporaryDirectory() as directory:
        torn = Path(directory) / "torn.sqlite"
        torn.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 64)
        here = Path(directory)
        good = refused("an empty HOLDFAST_API_KEY", [], {"HOLDFAST_API_KEY": " , "}, here, "HOLDFAST_API_KEY") and good
        good = refused("a damaged SQLite file", ["--store", str(torn)], {}, here, "torn.sqlite") and good
        for name, arguments, says, unchanged in hostile_files.starts(here, BUILTIN):
            good = refused(name, arguments, {}, here, says) and unchanged() and good
    print("every bound holds" if good else "NOT every bound holds")
    return not good


if __name__ == "__main__":
    sys.exit(main())
