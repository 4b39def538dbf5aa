"""Conversations over HTTP while two servers and two engines are restarted one after another: does any request fail?

usage: python -m benchmarks.robustness.rolling_upgrade [--clients 6] [--tokens 48] [--seconds 3]
                                                         [--drain-seconds 20] [--json FILE]

Two engines run on their own (`holdfast engine --listen`), and two servers are attached to both, over one SQLite store:
the built-in model on a CPU, one thread for each engine. A balancer in this process asks `/health/ready` of each server
every CHECK_SECONDS and sends each request to the next ready server in turn. As proxies do, it goes on to the next
server only if a connection is refused, so before it has sent anything. It holds a request for up to HELD_SECONDS while
no server is ready. Everything else that is not a complete answer counts as a failed request.

Each client holds one conversation after the other over the Responses API, streamed and greedy. After `--seconds` of
load, the engines and then the servers are restarted, one at a time: SIGTERM, exit status 0, the same command again, and
`--seconds` once it is ready. A last phase of the same length follows.

At the end each conversation is read from the store: its turns must be there, once and in order. For each phase the
result has the share of prompt tokens that turns found in the cache, of those that an earlier turn had computed, and how
many conversations went on with at least half of them. Exit status 1 for a failed request or a lost or doubled turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import command, provenance
from benchmarks.lib.talks import SAID, Talk, Turn, said_in

CHECK_SECONDS = 0.2
"""Seconds between two checks of a server's readiness."""
HELD_SECONDS = 10
"""Seconds for which a request is held while no server is ready, as checks of a busy machine may be late."""
LAME_DUCK_SECONDS = 1.5
"""Seconds for which a server that leaves still serves requests: several checks."""
TURNS = 8
"""Number of turns of a conversation before its client begins another."""
FIRST_WORDS = 60
"""Number of random words of 16 letters in the first message of a conversation, some 10 tokens each."""
THINK_SECONDS = 0.3
"""Seconds between an answer and the next turn."""
ROOT = Path(__file__).parents[2]


@dataclass
class Program:
    """An engine or a server that is started with the same command again and again."""

    name: str
    words: list[str]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli", *self.words], env=environment, stdout=subprocess.DEVNULL
        )

    async def stop(self) -> tuple[int, float]:
        """Send SIGTERM. Returns the exit status, and the seconds until then."""
        assert self.process is not None
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.to_thread(self.process.wait, 60), time.monotonic() - began

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Balancer:
    """Sends each request to the next server that is ready."""

    def __init__(self, urls: list[str], http: httpx.AsyncClient) -> None:
        self.urls, self.http = urls, http
        self.ready: set[str] = set()
        self.refused = 0
        """Number of connections that a server refused, after which another one was asked."""
        self._turn = itertools.count()

    async def check(self) -> None:
        """Ask the servers for their readiness, until cancelled."""
        while True:
            await asyncio.gather(*(self._check(url) for url in self.urls))
            await asyncio.sleep(CHECK_SECONDS)

    async def _check(self, url: str) -> None:
        works = False
        with contextlib.suppress(httpx.HTTPError):
            works = (await self.http.get(f"{url}/health/ready", timeout=2)).status_code == 200
        (self.ready.add if works else self.ready.discard)(url)

    @contextlib.asynccontextmanager
    async def send(self, method: str, path: str, body: Any = None) -> Any:
        """The reply of a ready server, to be read within the context. Raises httpx.HTTPError, ValueError."""
        tried: set[str] = set()
        latest = time.monotonic() + HELD_SECONDS
        while True:
            able = sorted(self.ready - tried)
            if not able:
                if time.monotonic() > latest:
                    raise ValueError("no server is ready")
                await asyncio.sleep(CHECK_SECONDS)
                tried.clear()
                continue
            url = able[next(self._turn) % len(able)]
            request = self.http.build_request(method, f"{url}{path}", json=body)
            try:
                reply = await self.http.send(request, stream=True)
                break
            except httpx.ConnectError:
                self.refused += 1
                tried.add(url)
        try:
            yield reply
        finally:
            await reply.aclose()

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON of a reply. Raises httpx.HTTPError, ValueError."""
        async with self.send(method, path, body) as reply:
            content = await reply.aread()
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {content[:200].decode()}")
            return json.loads(content)


class Bench:
    """The clients and their records."""

    def __init__(self, balancer: Balancer, tokens: int) -> None:
        self.balancer, self.tokens = balancer, tokens
        self.talks: list[Talk] = []
        self.errors: list[str] = []
        self.phase = "before"
        self.stop = False
        self.rng = random.Random(0)

    async def client(self) -> None:
        """Hold conversations until stopped."""
        while not self.stop:
            try:
                talk = Talk((await self.balancer.ask("POST", "/v1/conversations", {}))["id"])
            except (httpx.HTTPError, ValueError) as error:
                self._note(error)
                await asyncio.sleep(THINK_SECONDS)  # else a client that fails at once leaves no time for the checks
                continue
            self.talks.append(talk)
            for number in range(TURNS):
                before = talk.turns[-1].total if talk.turns else 0
                # No other conversation has such a beginning, so what is found in the cache is this one's own.
                words = [f"{self.rng.getrandbits(64):016x}" for _ in range(1 if number else FIRST_WORDS)]
                said = f"{' '.join(words)}. {SAID[number % len(SAID)].format(name='Ada')}"
                turn = Turn(said, self.phase, before=before)
                talk.turns.append(turn)
                try:
                    await self._answer(talk, turn)
                except (httpx.HTTPError, ValueError) as error:
                    self._note(error)
                    await asyncio.sleep(THINK_SECONDS)
                    break
                await asyncio.sleep(THINK_SECONDS)
                if self.stop:
                    return

    def _note(self, error: Exception) -> None:
        self.errors.append(f"{self.phase}: {type(error).__name__}: {error}")
        print(self.errors[-1], flush=True)

    async def _answer(self, talk: Talk, turn: Turn) -> None:
        """Ask one turn and read its stream."""
        body = {
            "model": "holdfast-tiny", "input": turn.said, "conversation": talk.id, "stream": True, "temperature": 0,
            "max_output_tokens": self.tokens,
        }  # fmt: skip
        last = time.monotonic()
        async with self.balancer.send("POST", "/v1/responses", body) as reply:
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {(await reply.aread())[:200].decode()}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                turn.silent, last = max(turn.silent, now - last), now
                match event["type"]:
                    case "response.output_text.delta":
                        turn.text += event["delta"]
                    case "response.completed" | "response.incomplete":
                        turn.done = True
                        turn.count(event["response"]["usage"])
                    case "response.failed" | "error":
                        raise ValueError(line[:300])
        if not turn.done:
            raise ValueError("the stream ended without its last event")

    async def audit(self) -> dict[str, int]:
        """Compare the store with the clients' records."""
        lost = doubled = done = 0
        for talk in self.talks:
            page = f"/v1/conversations/{talk.id}/items?order=asc&limit=100"
            stored, expected = said_in((await self.balancer.ask("GET", page))["data"]), talk.expected
            done += len(talk.seen)
            lost += stored[: len(expected)] != expected
            doubled += len(stored) > len(expected)
        return dict(
            conversations=len(self.talks), turns_done=done, conversations_with_a_lost_turn=lost,
            conversations_with_a_doubled_turn=doubled,
        )  # fmt: skip

    def cache(self) -> dict[str, dict[str, float]]:
        """By phase, what later turns of conversations found in the cache."""
        found = {}
        for phase in dict.fromkeys(turn.kind for talk in self.talks for turn in talk.turns):
            turns = [turn for talk in self.talks for turn in talk.turns if turn.kind == phase and turn.before]
            first = [next((turn for turn in talk.turns if turn.kind == phase), None) for talk in self.talks]
            went_on = [turn for turn in first if turn is not None and turn.done and turn.before]
            known = sum(turn.before for turn in turns if turn.done)
            found[phase] = dict(
                turns=len(turns),
                share_found=round(sum(turn.cached for turn in turns if turn.done) / max(1, known), 3),
                conversations_that_went_on=len(went_on),
                of_them_with_their_cache=sum(turn.cached >= turn.before / 2 for turn in went_on),
                longest_silence_s=round(max((turn.silent for turn in turns), default=0.0), 3),
            )
        return found


@contextlib.contextmanager
def programs(folder: str, drain_seconds: float) -> Iterator[tuple[list[Program], list[Program], list[str]]]:
    """Two engines and two servers, which are not started yet, and the servers' URLs. All are killed at the end."""
    sockets = [f"{folder}/engine-{number}.sock" for number in range(2)]
    drain = ["--drain-seconds", str(drain_seconds)]
    sizes = ["--cache-gb", "0.05", "--host-cache-gb", "0.05", "--threads", "1", "--device", "cpu"]
    sizes += ["--chunk-host", "127.0.0.1"]
    engines = [
        Program(f"engine {number}", ["engine", "--listen", path, *drain, *sizes]) for number, path in enumerate(sockets)
    ]
    ports = [free_port() for _ in range(2)]
    kept = ["--store", f"{folder}/store.sqlite", "--files", f"{folder}/files"]
    times = ["--lame-duck-seconds", str(LAME_DUCK_SECONDS), *drain]
    servers = [
        Program(f"server {number}", ["serve", "--port", str(port), "--engines", ",".join(sockets), *kept, *times])
        for number, port in enumerate(ports)
    ]
    try:
        yield engines, servers, [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for each in (*servers, *engines):
            each.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until_ready(http: httpx.AsyncClient, urls: list[str]) -> None:
    """Wait until each server is ready and has both engines."""
    for url in urls:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                ready = (await http.get(f"{url}/health/ready")).status_code == 200
                members = (await http.get(f"{url}/replicas")).json()["data"]
                if ready and [each["state"] for each in members] == ["ready"] * 2:
                    break
            await asyncio.sleep(0.05)


async def roll(bench: Bench, program: Program, http: httpx.AsyncClient, urls: list[str]) -> dict[str, Any]:
    """Restart one program under load. Returns the times."""
    bench.phase = f"{program.name} restarts"
    status, ended = await program.stop()
    program.start()
    began = time.monotonic()
    await until_ready(http, urls)
    return dict(
        program=program.name, exit_status=status, left_in_s=round(ended, 2),
        ready_again_in_s=round(time.monotonic() - began, 2),
    )  # fmt: skip


async def measure(clients: int, tokens: int, seconds: float, drain_seconds: float = 20.0) -> dict[str, Any]:
    """Run the whole upgrade. Returns the figures."""
    with (
        tempfile.TemporaryDirectory(prefix="roll-") as folder,
        programs(folder, drain_seconds) as (engines, servers, urls),
    ):
        for each in (*engines, *servers):
            each.start()
        async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=None)) as http:
            await until_ready(http, urls)
            balancer = Balancer(urls, http)
            checking = asyncio.create_task(balancer.check())
            while len(balancer.ready) < 2:
                await asyncio.sleep(0.01)
            bench = Bench(balancer, tokens)
            running = [asyncio.create_task(bench.client()) for _ in range(clients)]
            await asyncio.sleep(seconds)
            rolled = []
            for program in (*engines, *servers):
                rolled.append(await roll(bench, program, http, urls))
                print(json.dumps(rolled[-1]), flush=True)
                bench.phase = f"after {program.name}"
                await asyncio.sleep(seconds)
            bench.stop = True
            await asyncio.gather(*running)
            found = await bench.audit()
            checking.cancel()
    return dict(
        failed_requests=len(bench.errors), **found, connections_refused_and_sent_elsewhere=balancer.refused,
        restarts=rolled, cache_by_phase=bench.cache(), errors=bench.errors[:10],
    )  # fmt: skip


def fine(figures: dict[str, Any]) -> bool:
    """Whether nothing failed, was lost or came twice, and each program left with status 0."""
    bad = ("failed_requests", "conversations_with_a_lost_turn", "conversations_with_a_doubled_turn")
    return not any(figures[name] for name in bad) and all(each["exit_status"] == 0 for each in figures["restarts"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time of load before, between and after the restarts"
    )
    parser.add_argument("--drain-seconds", type=float, default=20.0, help="time in which running requests may finish")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures = asyncio.run(measure(args.clients, args.tokens, args.seconds, args.drain_seconds))
    figures = dict(provenance(), command=command(), clients=args.clients, **figures)
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(not fine(figures))


if __name__ == "__main__":
    main()
