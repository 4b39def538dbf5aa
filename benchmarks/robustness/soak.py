"""Mixed load on `holdfast serve` for minutes or hours: does it leak, lose a turn, or get stuck?

usage: python -m benchmarks.robustness.soak --minutes 30 [--clients 6] [--pause 1] [--seed 0]

The built-in model on a CPU, one engine thread, small caches in both tiers, two API keys, a SQLite store in a temporary
file. Each client does one thing after the other (KINDS). Early on and at the end the engine is killed under load; the
server then ends with 1, and is started again on the same store as a supervisor would. In between one server runs
undisturbed, so that its memory says something.

At the end of each minute the clients pause. Then no sequence may run or wait, no block may be in use, and memory, open
files and threads are taken. At the end each turn that was reported to a client is read back. Exit status 1 for a lost
turn, an answer that should not be, an end that should not be, a block still in use, or growth beyond GROWTH or FILES.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import command, provenance

KEYS = ("soak-one", "soak-two")
NAMES = ("server", "engine", "template")
"""The processes of a server; the last one renders the chat template."""
KILLS = (0.5, 1.0, 2.0)
"""Minutes at which the engine is killed; it is killed once more at the end."""
SETTLED = 5
"""Minute after which memory counts. It counts anew from half time, when the store's cache of turns is full."""
GROWTH, FILES = 60.0, 16
"""Most growth of a process, in MB per hour in runs of ten minutes or more, and in open files."""
OPTIONS = dict(port=0, threads=1, cache_gb=0.05, host_cache_gb=0.05, header_seconds=5, body_seconds=5)
KINDS = {
    "chat": 4, "completion": 2, "slow reader": 1, "batch": 2, "large prompt": 1, "conversation": 5, "background": 2,
    "delete": 1, "leave": 3, "refused": 4, "broken": 1,
}  # fmt: skip
"""Actions of a client, with their relative frequencies."""

MODEL = {"model": "holdfast-tiny"}
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WORDS = ("my", "name", "is", "Ada", "I", "like", "ships", "what", "do", "you", "know", "about", "the", "sea", "hello")
LAST = ("response.completed", "response.incomplete")
USER = {"role": "user", "content": "Hello!"}
REFUSED: dict[str, list[dict[str, Any] | bytes]] = {
    CHAT: [
        b"", b"{", b"\xff\xfe", b"null", b"[" * 100_000, b"[1]" * 50_000, b"x" * 9_000_000, {"messages": [7]},
        b'{"model": "holdfast-tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        *({"messages": [USER | wrong]} for wrong in (
            {"role": "wizard"}, {"content": "x" * 2_000_000}, {"content": "word " * 6000},
            {"content": [{"type": "image_url"}]},
        )),
        *({"messages": [USER], **wrong} for wrong in (
            {"temperature": 9}, {"top_p": "x"}, {"n": 0}, {"n": 65}, {"max_tokens": 0}, {"max_tokens": 1 << 40},
            {"model": "other"}, {"seed": -1}, {"stop": ["x"] * 17}, {"stream": "yes"}, {"wizard": 1}, {"tools": [{}]},
        )),
    ],
    COMPLETIONS: [
        {"prompt": [1, 3072]}, {"prompt": [-1]}, {"prompt": []}, {"prompt": [[1], "x"]}, {"prompt": ["x"] * 65}, {},
        {"prompt": "x", "max_tokens": 4096}, {"prompt": "x", "logprobs": 2},
    ],
    RESPONSES: [
        {"input": ""}, {"input": [{"type": "image"}]}, *({"input": "x", **wrong} for wrong in (
            {"previous_response_id": "resp_none"}, {"previous_response_id": "a\0b"}, {"conversation": "conv_none"},
            {"previous_response_id": "a", "conversation": "b"}, {"background": True, "store": False},
            {"metadata": {"x": "y" * 513}}, {"truncation": "auto"},
        )),
    ],
    f"{RESPONSES}/resp_none/cancel": [b""],
    "/v1/conversations": [{"items": [{"type": "message", **USER}] * 21}],
    "/v1/nothing": [b""],
}  # fmt: skip
"""Bodies that must be refused, by path."""
POST = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\n".encode()
BROKEN = (
    b"GET / HT", b"\0" * 100, b"\x16\x03\x01 TLS", b"GET /health HTTP/1.1\r\nx: " + b"a" * 70_000, POST,
    POST + b"content-length: 100\r\n\r\n{", POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
)  # fmt: skip
"""Bytes that are no request, or half of one."""


class Cut(Exception):
    """An answer that was cut. Without a message, the request was not taken."""


class Server:
    """One `holdfast serve` process and its child processes."""

    def __init__(self, directory: Path, number: int) -> None:
        """Start the server and wait until it takes requests."""
        self.log = directory / f"{number}.log"
        self.killed = False
        """Whether its engine was killed, so that clients may see errors."""
        options = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        line = [sys.executable, "-m", "holdfast.cli", "serve", *options, "--store", str(directory / "store.sqlite")]
        with self.log.open("wb") as out:
            environment = {**os.environ, "HOLDFAST_API_KEY": ",".join(KEYS)}
            self.process = subprocess.Popen(line, stdout=out, stderr=out, env=environment)
        until = time.monotonic() + 120
        while not (found := re.search(r"address +(http\S+)", self.log.read_text())):
            if self.process.poll() is not None or time.monotonic() > until:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)
        self.url = found[1]

    def processes(self) -> dict[str, Path]:
        """The /proc directories of the processes: the server's own, the engine's, the chat template's, others."""
        found = {"server": Path(f"/proc/{self.process.pid}")}
        for children in (found["server"] / "task").glob("*/children"):
            for process in (Path(f"/proc/{pid}") for pid in children.read_text().split()):
                line = (process / "cmdline").read_bytes()
                kind = "engine" if b"engine.serve" in line else "template" if b"template.py" in line else str(process)
                found[kind] = process
        return found

    def sizes(self) -> dict[str, tuple[float, int, int]]:
        """For each process: resident MB, open files, threads."""
        return {
            name: (
                int(re.findall(r"VmRSS:\s+(\d+)", (process / "status").read_text())[0]) / 1e3,
                len(list((process / "fd").iterdir())),
                len(list((process / "task").iterdir())),
            )
            for name, process in self.processes().items()
        }


class Soak:
    """The clients, their records, and the violations."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.servers = [Server(directory, 0)]
        self.seen: Counter[tuple[str, str]] = Counter()
        """Number of requests by kind and by status or other end."""
        self.turns: dict[str, tuple[str, str]] = {}
        """For each response id, key and text of a turn that was reported complete to a client."""
        self.finished: list[str] = []
        """The response ids that nobody continues."""
        self.completed = self.busy = 0
        self.wrong: list[str] = []
        self.open = asyncio.Event()
        """Set while clients may begin something."""
        self.open.set()

    @property
    def server(self) -> Server:
        """The present server."""
        return self.servers[-1]

    def violation(self, what: str) -> None:
        """Record and print an event that must not happen."""
        self.wrong.append(what)
        print(f"  WRONG: {what[:800]}", flush=True)

    def client(self, key: str, **transport: Any) -> httpx.AsyncClient:
        """A client with its own connections."""
        return httpx.AsyncClient(
            base_url=self.server.url, timeout=120, transport=httpx.AsyncHTTPTransport(verify=False, **transport),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
        )  # fmt: skip

    def check(self, kind: str, response: httpx.Response, refused: bool = False) -> None:
        """Count an answer; one of the wrong status is a violation. Raises Cut if a valid request was not taken."""
        status = response.status_code
        self.seen[kind, str(status)] += 1
        if not (400 <= status < 500 if refused else status == 200) and not self.server.killed:
            self.violation(f"{kind}: {response.request.method} {response.request.url.path} gave {status}")
        if status != 200 and not refused:
            raise Cut

    async def ask(self, api: httpx.AsyncClient, kind: str, path: str, body: Any = None, method: str = "POST") -> Any:
        """The answer to a valid request. Raises Cut."""
        response = await api.request(method, path, json=body)
        self.check(kind, response)
        return response.json()

    async def stream(self, api: httpx.AsyncClient, kind: str, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The events of a valid request. Raises Cut."""
        whole = False
        async with api.stream("POST", path, json=MODEL | body | {"stream": True}) as response:
            self.check(kind, response)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event or event.get("type") == "response.failed":
                        raise Cut(line)
                    whole = event.get("type") in LAST
                    yield event
                whole = whole or line == "data: [DONE]"
        if not whole:
            raise Cut("the stream ended too early")

    async def work(self, number: int) -> None:
        """One client, until it is cancelled."""
        draw, key = random.Random(f"{self.options.seed} {number}"), KEYS[number % len(KEYS)]
        while True:
            await self.open.wait()
            self.busy += 1
            server, (kind,) = self.server, draw.choices(list(KINDS), list(KINDS.values()))
            small = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)] if kind == "slow reader" else None
            try:
                async with self.client(key, socket_options=small) as api:
                    await self.act(kind, api, draw, key)
            except (Cut, OSError, httpx.HTTPError) as error:
                if not isinstance(error, Cut) or error.args:
                    self.seen[kind, "cut"] += 1
                    if not server.killed:
                        self.violation(f"{kind}: {error!r}")
            finally:
                self.busy -= 1
            await asyncio.sleep(draw.expovariate(1 / self.options.pause))

    async def act(self, kind: str, api: httpx.AsyncClient, draw: random.Random, key: str) -> None:
        """Perform one action. Raises Cut, OSError or HTTPError."""
        said = " ".join(draw.choices(WORDS, k=draw.randint(2, 30)))
        match kind:
            case "chat" | "slow reader" | "completion":
                path = COMPLETIONS if kind == "completion" else CHAT
                body = {"prompt": said} if kind == "completion" else {"messages": [USER | {"content": said}]}
                body |= {"max_tokens": draw.randint(1, 60), "ignore_eos": draw.random() < 0.5, "stop": ["xyz"]}
                async for _ in self.stream(api, kind, path, body):
                    await asyncio.sleep(draw.uniform(0, 0.3) if kind == "slow reader" else 0)
            case "batch":
                count, n = draw.randint(1, 4), draw.randint(2, 6)
                body = {"prompt": [said] * count, "n": n, "max_tokens": draw.randint(1, 16), "seed": 1}
                if (found := len((await self.ask(api, kind, COMPLETIONS, MODEL | body))["choices"])) != n * count:
                    self.violation(f"batch: {found} choices of {n * count}")
            case "large prompt":
                body = {"prompt": [draw.randrange(10, 3000) for _ in range(draw.randint(2000, 4090))], "max_tokens": 5}
                await self.ask(api, kind, COMPLETIONS, MODEL | body)
            case "conversation":
                await self.converse(api, draw, key)
            case "background":
                body = {
                    "input": said,
                    "background": True,
                    "ignore_eos": True,
                    "max_output_tokens": draw.randint(4, 300),
                }
                response = await self.ask(api, kind, RESPONSES, MODEL | body)
                path = f"{RESPONSES}/{response['id']}"
                await asyncio.sleep(draw.random())
                if draw.random() < 0.6:
                    response = await self.ask(api, kind, f"{path}/cancel")
                while response["status"] in ("queued", "in_progress"):
                    await asyncio.sleep(0.2)
                    response = await self.ask(api, kind, path, method="GET")
                if f"response.{response['status']}" in LAST:
                    self.remember(response, key)
                elif response["status"] != "cancelled":
                    raise Cut(f"it is {response['status']}: {response['error']}")
            case "delete":
                if mine := [id for id in self.finished[-200:] if self.turns[id][0] == key]:
                    id = draw.choice(mine)
                    self.finished.remove(id)
                    del self.turns[id]
                    await self.ask(api, kind, f"{RESPONSES}/{id}", method="DELETE")
            case "leave":
                path, body = draw.choice((
                    (CHAT, {"messages": [USER], "n": 3}), (COMPLETIONS, {"prompt": [said] * 2, "max_tokens": 100}),
                    (RESPONSES, {"input": said}),
                ))  # fmt: skip
                events = self.stream(api, kind, path, body | {"ignore_eos": True})
                try:
                    async with asyncio.timeout(draw.choice((0.02, 0.2, 2))), aclosing(events):
                        async for _ in events:
                            if draw.random() < 0.1:
                                break
                except TimeoutError:
                    self.seen[kind, "left by time"] += 1
            case "refused":
                path = draw.choice((CHAT, COMPLETIONS, RESPONSES, *REFUSED))
                body = draw.choice(REFUSED[path])
                given = body if isinstance(body, bytes) else json.dumps(MODEL | body)
                self.check(kind, await api.post(path, content=given), refused=True)
                wrong = {"authorization": draw.choice(("Bearer no", "", "Basic x"))}
                self.check(kind, await api.get("/v1/models", headers=wrong), refused=True)
                if foreign := [id for id in list(self.turns)[-20:] if self.turns[id][0] != key]:
                    self.check(kind, await api.get(f"{RESPONSES}/{draw.choice(foreign)}"), refused=True)
            case "broken":
                reader, writer = await asyncio.open_connection(api.base_url.host, api.base_url.port)
                try:
                    writer.write(draw.choice(BROKEN))
                    answer = await asyncio.wait_for(reader.read(), 60) if draw.random() < 0.5 else None
                finally:
                    writer.transport.abort()
                self.seen[kind, "left at once" if answer is None else answer[9:12].decode() or "closed"] += 1

    async def converse(self, api: httpx.AsyncClient, draw: random.Random, key: str) -> None:
        """Several stored turns: in a conversation, or each on the one before. Raises Cut."""
        kind, link, ids = "conversation", {}, []
        if kept := draw.random() < 0.5:
            link = {"conversation": (await self.ask(api, kind, "/v1/conversations", {}))["id"]}
        for _ in range(draw.randint(2, 6)):
            said = " ".join(draw.choices(WORDS, k=draw.randint(2, 30)))
            body = {"input": said, "max_output_tokens": draw.randint(1, 40), **link}
            if draw.random() < 0.7:
                async for event in self.stream(api, kind, RESPONSES, body):
                    if event["type"] in LAST:
                        response = event["response"]
                        self.remember(response, key)
            else:
                response = await self.ask(api, kind, RESPONSES, MODEL | body)
                self.remember(response, key)
            ids.append(response["id"])
            link = link if kept else {"previous_response_id": response["id"]}
        self.finished += ids

    def remember(self, response: dict[str, Any], key: str) -> None:
        """Record a turn that was reported complete to a client. It must be found from now on."""
        self.completed += 1
        self.turns[response["id"]] = (key, text_of(response))

    async def quiet(self) -> dict[str, int]:
        """Pause the clients and wait until the server is idle. Returns its metrics."""
        self.open.clear()
        async with asyncio.timeout(300):
            while self.busy:
                await asyncio.sleep(0.05)
        until = time.monotonic() + 60
        async with self.client(KEYS[0]) as api:
            while True:
                found = re.findall(r"^holdfast_(\w+) (\S+)$", (await api.get("/metrics")).text, re.M)
                metrics = {name: int(float(value)) for name, value in found}
                held = {name: metrics[name] for name in ("blocks_used", "requests_running", "requests_waiting")}
                if not any(held.values()):
                    return metrics
                if time.monotonic() > until:
                    self.violation(f"a minute after its last request the server has {held}")
                    return metrics
                await asyncio.sleep(0.1)

    async def restart(self) -> None:
        """Kill the engine under load, see the server end, and start it again on the same store."""
        self.server.killed = True
        os.kill(int(self.server.processes()["engine"].name), signal.SIGKILL)
        await self.end(1)
        self.open.clear()
        self.servers.append(await asyncio.to_thread(Server, self.directory, len(self.servers)))
        self.open.set()

    async def end(self, expected: int) -> None:
        """Wait until the server has ended, and check its status and its log."""
        process, log = self.server.process, self.server.log
        try:
            await asyncio.to_thread(process.wait, 60)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.poll() != expected or "Traceback" in log.read_text():
            self.violation(f"the server ended with {process.poll()}, not plainly {expected}: {log.read_text()[-600:]}")

    async def read_back(self) -> int:
        """Read each remembered turn from the store. Returns the number of turns that differ or are missing."""
        lost = 0
        for key in KEYS:
            async with self.client(key) as api:
                for id, text in [(id, text) for id, (whose, text) in self.turns.items() if whose == key]:
                    response = await api.get(f"{RESPONSES}/{id}")
                    lost += response.status_code != 200 or text_of(response.json()) != text
        return lost


def text_of(response: dict[str, Any]) -> str:
    """The text of a response."""
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def run(options: argparse.Namespace, directory: Path) -> bool:
    """Run everything and print the tables. Returns whether all went well."""
    soak = Soak(options, directory)
    try:
        return await run_clients(soak)
    finally:
        soak.server.process.kill()


async def run_clients(soak: Soak) -> bool:
    """Run clients on servers that the caller ends."""
    options, began, kills = soak.options, time.monotonic(), [at for at in KILLS if at < soak.options.minutes]
    clients = [asyncio.create_task(soak.work(number)) for number in range(options.clients)]
    rows: list[tuple[float, dict[str, tuple[float, int, int]]]] = []
    before: Counter[tuple[str, str]] = Counter()
    print("MB, files and threads of server, engine and chat template; blocks when idle: free, with kept state, in use")
    print("minute   200  4xx  503 other  cut  turns        MB resident         files    threads    free kept used")
    for minute in range(1, options.minutes + 1):
        while (now := (time.monotonic() - began) / 60) < minute:
            if kills and now >= kills[0]:
                kills.pop(0)
                await soak.restart()
            if soak.server.process.poll() is not None:
                soak.violation(f"the server ended by itself: {soak.server.log.read_text()[-600:]}")
                return False
            for client in clients:
                if client.done():
                    client.result()
            await asyncio.sleep(0.2)
        metrics, sizes = await soak.quiet(), soak.server.sizes()
        rows.append(((time.monotonic() - began) / 3600, sizes))
        statuses = Counter[str]()
        for (_, status), count in (soak.seen - before).items():
            statuses[f"{status[0]}xx" if status.isdigit() and status not in ("200", "503") else status] += count
        before = soak.seen.copy()
        mb, files, threads = zip(*(sizes.get(name, (0.0, 0, 0)) for name in NAMES), strict=True)
        used, kept = metrics["blocks_used"], metrics["blocks_cached"]
        print(
            f"{minute:6}{statuses['200']:6}{statuses['4xx']:5}{statuses['503']:5}{statuses['5xx']:6}"
            f"{statuses['cut']:5}{soak.completed:7} {mb[0]:8.1f}{mb[1]:8.1f}{mb[2]:6.1f}"
            f" {files[0]:5}{files[1]:4}{files[2]:4} {threads[0]:4}{threads[1]:4}{threads[2]:4}"
            f" {metrics['blocks'] - used - kept:6}{kept:5}{used:5}",
            flush=True,
        )
        if other := sizes.keys() - set(NAMES):
            soak.violation(f"the server has other processes when it is idle: {other}")
        soak.open.set()
    await asyncio.sleep(5)
    await soak.restart()
    await asyncio.sleep(5)
    await soak.quiet()
    for client in clients:
        client.cancel()
    lost = await soak.read_back()
    soak.server.process.send_signal(signal.SIGTERM)
    await soak.end(0)
    report(soak, rows, lost)
    return not soak.wrong and not lost


def report(soak: Soak, rows: list[tuple[float, dict[str, tuple[float, int, int]]]], lost: int) -> None:
    """Print requests by kind and status, growth, and the sums."""
    print("\nrequests by kind and status, or how else they ended")
    for kind in KINDS:
        counts = sorted((status, count) for (name, status), count in soak.seen.items() if name == kind)
        print(f"  {kind:13} " + ", ".join(f"{status}: {count}" for status, count in counts))
    for settled in sorted({min(SETTLED, len(rows) // 2), len(rows) // 2}):
        print(f"\nfrom the end of minute {settled} to that of minute {len(rows)}; slope by least squares")
        for name in NAMES:
            taken = [(hour, sizes[name]) for hour, sizes in rows[settled - 1 :] if name in sizes]
            hours, (first, *_, last) = [hour for hour, _ in taken], [size for _, size in taken]
            slope = statistics.linear_regression(hours, [size[0] for _, size in taken]).slope
            print(
                f"  {name:9}{first[0]:6.1f} to {last[0]:6.1f} MB ({slope:+.1f} MB an hour),"
                f" {first[1]} to {last[1]} files, {first[2]} to {last[2]} threads"
            )
            if last[1] - first[1] > FILES or (settled >= SETTLED and slope > GROWTH):
                soak.violation(f"{name} grows")
    failed = sum(count for (_, status), count in soak.seen.items() if status.startswith("5") and status != "503")
    print(f"\n{soak.completed} turns completed, {len(soak.turns)} not deleted since and read back, {lost} of them lost")
    print(f"engine killed {len(soak.servers) - 1} times; 5xx other than 503: {failed}; violations: {len(soak.wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30, help="2 or more")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=1.0, help="a client's mean pause between two things, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.minutes < 2:
        parser.error(f"--minutes is {options.minutes}; give 2 or more")
    about = provenance()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"{about['date']}. {command()}, commit {commit or 'unknown'}")
    print(f"Python {about['python']}, torch {about['torch']}, {about['device']}, {about['cores']} cores\n", flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as directory:
        good = asyncio.run(run(options, Path(directory)))
    sys.exit(not good)


if __name__ == "__main__":
    main()
