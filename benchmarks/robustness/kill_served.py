"""Two servers over three engines and one PostgreSQL, while servers and engines are killed: is any turn lost?

usage: python -m benchmarks.robustness.kill_served [--kills 60] [--clients 6] [--seed 0] [--json FILE]

The built-in model on a CPU, one thread for each engine, each in a process of its own (`holdfast engine --listen`). Two
processes `holdfast serve --engines` share them and the store. Each client holds one conversation after the other, up to
TURNS turns each, greedy. A turn is streamed, streamed in the background, or polled in the background. At random times
a random server or engine is killed (SIGKILL), or one of each at the same time. They are started again at once. The next
kill comes when both servers answer and all engines but one serve.

A client whose connection breaks goes to the other server. It resumes a stream whose id it knows, after its last event;
a turn whose id it never saw is asked again with the same Idempotency-Key. While another server may still write the
response, it tries again. Any other failure of a request counts as an error. So does a gap or a repetition in the
numbers of a stream's events, and a text that differs from the deltas.

At the end each conversation is read from the store: the turns that clients saw end must be there, once and in order,
and nothing else but a last turn that its client did not see end. Each turn that was resumed is asked again on quiet
engines: the answer must be the same, word for word. Exit status 1 for any difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import command, provenance
from benchmarks.lib.talks import NAMES, SAID, TURNS, Talk, Turn, said_in, spread, text_of

KINDS = ("streamed", "background stream", "background poll")
PATIENCE_SECONDS = 60.0
"""Seconds for which a client goes on after a broken connection before that counts as an error."""
PAUSE_SECONDS = 0.1
"""Seconds before a client tries the next server."""
NOTICED_SECONDS = 0.5
"""Seconds after a kill in which the other programs notice it."""
LOST = httpx.TransportError
"""A connection that is refused or breaks."""


class Passing(httpx.TransportError):
    """A refusal that ends by itself."""


class Unexpected(Exception):
    """A failure that no kill excuses."""


@contextmanager
def postgresql() -> Iterator[str]:
    """The URL of a new database, whose server ends with the block."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as folder:
        user = "nobody" if os.geteuid() == 0 else None
        if user:
            shutil.chown(folder, user)
        begin = dict(cwd=folder, user=user, check=True, stdout=subprocess.DEVNULL, timeout=120)
        subprocess.run(["initdb", "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync"], **begin)  # type: ignore[call-overload]
        options = f"-k {folder} -c listen_addresses="
        start = ["pg_ctl", "-D", "data", "-w", "-t", "100", "-l", "log", "-o", options, "start"]
        subprocess.run(start, **begin)  # type: ignore[call-overload]
        try:
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"
        finally:
            subprocess.run(["pg_ctl", "-D", "data", "-m", "immediate", "stop"], **begin)  # type: ignore[call-overload]


class Program:
    """A server or an engine, which is started again after each kill."""

    def __init__(self, name: str, words: list[str], log: Path) -> None:
        self.name, self._words, self._log = name, [sys.executable, "-m", "holdfast.cli", *words], log
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            return subprocess.Popen(
                self._words, stdout=log, stderr=log, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )

    def kill(self) -> None:
        """Kill all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_and_start(self) -> None:
        """Kill all its processes, and start it again."""
        self.kill()
        self.process = self._start()


class Bench:
    """The clients, their records, and the programs that are killed."""

    def __init__(self, args: argparse.Namespace, urls: list[str], http: httpx.AsyncClient) -> None:
        self.args, self.urls, self.http = args, urls, http
        self.talks: list[Talk] = []
        self.errors: list[str] = []
        self.waits: list[float] = []
        """Seconds from each broken stream to its next event."""
        self.counts: Counter[str] = Counter()
        self.stop = False

    async def request(self, method: str, path: str, number: int, **options: Any) -> dict[str, Any]:
        """Send a request that may be repeated, to one server after the other until one answers."""
        until = time.monotonic() + PATIENCE_SECONDS
        for attempt in range(10**6):
            url = self.urls[(number + attempt) % len(self.urls)]
            try:
                reply = await self.http.request(method, f"{url}{path}", **options)
            except LOST as error:
                if time.monotonic() > until:
                    raise Unexpected(f"{method} {path}: no server answers: {error!r}") from None
                await asyncio.sleep(PAUSE_SECONDS)
                continue
            if reply.status_code != 200:
                raise Unexpected(f"{method} {path}: status {reply.status_code}: {reply.text[:200]}")
            found: dict[str, Any] = reply.json()
            return found
        raise AssertionError

    async def client(self, number: int) -> None:
        """Hold conversations until stopped."""
        rng = random.Random(f"{self.args.seed}/{number}")
        while not self.stop:
            with self.noted():
                made = await self.request("POST", "/v1/conversations", number, json={})
                talk = Talk(made["id"])
                self.talks.append(talk)
                for said in SAID[:TURNS]:
                    turn = Turn(said.format(name=rng.choice(NAMES)), rng.choice(KINDS))
                    turn.previous = talk.turns[-1].response if talk.turns else None
                    talk.turns.append(turn)
                    await self.answer(talk, turn, rng.randrange(len(self.urls)))
                    await asyncio.sleep(rng.uniform(0.0, 0.2))
                    if self.stop:
                        return

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record an unexpected failure. Its client begins another conversation."""
        try:
            yield
        except Unexpected as error:
            self.errors.append(str(error))
            print(f"ERROR {error}", flush=True)

    async def answer(self, talk: Talk, turn: Turn, number: int) -> None:
        """Ask one turn, and follow it to its end at whichever server answers."""
        body = {
            "model": "holdfast-tiny", "input": turn.said, "conversation": talk.id, "temperature": 0,
            "max_output_tokens": self.args.tokens, "stream": turn.kind != "background poll",
            "background": turn.kind != "streamed",
        }  # fmt: skip
        headers = {"idempotency-key": uuid.uuid4().hex}
        until, broken = time.monotonic() + PATIENCE_SECONDS, 0.0
        self.counts[turn.kind] += 1
        while not turn.done:
            url = self.urls[number % len(self.urls)]
            try:
                if turn.response and turn.kind == "background poll":
                    await self.poll(url, turn)
                elif turn.kind == "background poll":
                    reply = await self.http.post(f"{url}/v1/responses", json=body, headers=headers)
                    if not self.passing(reply, talk.unseen):
                        turn.response = reply.json()["id"]
                        self.note_repeat(reply)
                else:
                    path = f"/v1/responses/{turn.response}?stream=true"
                    path += f"&starting_after={turn.last}" if turn.last >= 0 else ""
                    method, options = ("GET", {}) if turn.response else ("POST", {"json": body, "headers": headers})
                    where = f"{url}{path if turn.response else '/v1/responses'}"
                    async for _ in self.stream(method, where, turn, talk.unseen, **options):
                        if broken:
                            self.waits.append(time.monotonic() - broken)
                            broken = 0.0
                if not turn.done and turn.kind != "background poll":
                    raise httpx.ReadError("the stream ended early")
                until = time.monotonic() + PATIENCE_SECONDS
            except LOST as error:
                if time.monotonic() > until:
                    reason = f"no server goes on with it after event {turn.last}: {error!r}"
                    raise Unexpected(f"{turn.kind} {turn.response}: {reason}") from None
                talk.unseen += not turn.response and not isinstance(error, httpx.ConnectError | Passing)
                turn.resumed += bool(turn.response)
                broken, number = broken or time.monotonic(), number + 1
                await asyncio.sleep(PAUSE_SECONDS)

    def passing(self, reply: httpx.Response, unseen: int = 0) -> bool:
        """Whether a reply is no success, but a state that ends by itself. Raises Unexpected for other failures.

        A conversation is busy while a server may still write a turn whose id its client has not seen.
        """
        if reply.status_code == 200:
            return False
        code = (reply.json().get("error") or {}).get("code")
        self.counts[f"status {reply.status_code} {code}"] += 1
        if code in self.args.passing or (unseen and code == "conversation_busy"):
            raise Passing(f"status {reply.status_code} {code}")
        raise Unexpected(f"status {reply.status_code}: {reply.text[:300]}")

    def note_repeat(self, reply: httpx.Response) -> None:
        """Count a turn that was asked again, and that its first attempt had begun or stored."""
        self.counts["asked again and found"] += "idempotent-replayed" in reply.headers

    async def poll(self, url: str, turn: Turn) -> None:
        """Read the state of a background response once."""
        await asyncio.sleep(0.1)
        reply = await self.http.get(f"{url}/v1/responses/{turn.response}")
        if self.passing(reply):
            return
        response = reply.json()
        if response["status"] in ("queued", "in_progress"):
            return
        self.end(turn, response)
        turn.text = text_of(response)

    async def stream(self, method: str, url: str, turn: Turn, unseen: int, **options: Any) -> AsyncIterator[None]:
        """Read a stream's events, and yield for each."""
        async with self.http.stream(method, url, **options) as reply:
            if reply.status_code != 200:
                await reply.aread()
                self.passing(reply, unseen)
            self.note_repeat(reply)
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if event["type"] == "error":
                    raise Unexpected(f"{turn.kind} {turn.response}: {line[:300]}")
                if event["sequence_number"] != turn.last + 1:
                    raise Unexpected(f"{turn.kind} {turn.response}: event {turn.last} precedes {line[:200]}")
                turn.last += 1
                match event["type"]:
                    case "response.created":
                        turn.response = event["response"]["id"]
                    case "response.output_text.delta":
                        turn.text += event["delta"]
                    case "response.completed" | "response.incomplete":
                        self.end(turn, event["response"])
                        if turn.text != text_of(event["response"]):
                            raise Unexpected(f"{turn.response}: the deltas give {turn.text!r}, not {line[:300]}")
                    case "response.failed":
                        raise Unexpected(f"{turn.kind} {turn.response}: {line[:400]}")
                yield

    def end(self, turn: Turn, response: dict[str, Any]) -> None:
        """Record the end of a turn."""
        if response["status"] not in ("completed", "incomplete"):
            raise Unexpected(f"{turn.kind} {turn.response} is {response['status']}: {response['error']}")
        turn.done = True
        turn.count(response["usage"])

    async def audit(self) -> dict[str, int]:
        """Compare the store with the clients' records. Ask the resumed turns again."""
        lost = doubled = differ = again = done = 0
        for talk in self.talks:
            path = f"/v1/conversations/{talk.id}/items?order=asc&limit=100"
            said = rest = said_in((await self.request("GET", path, 0))["data"])
            seen, expected = talk.seen, talk.expected
            done += len(seen)
            for pair in expected:
                lost += pair not in rest
                rest = rest[rest.index(pair) + 1 :] if pair in rest else rest
            doubled += len(said) > len(expected) + 2 * sum(not turn.done for turn in talk.turns)
            for turn in seen:
                if turn.resumed:
                    body = dict(
                        model="holdfast-tiny", input=turn.said, previous_response_id=turn.previous, temperature=0,
                        store=False, max_output_tokens=self.args.tokens,
                    )  # fmt: skip
                    again += 1
                    differ += text_of(await self.request("POST", "/v1/responses", 0, json=body)) != turn.text
        return dict(
            conversations=len(self.talks), turns_done=done, turns_lost=lost, conversations_with_a_doubled_turn=doubled,
            resumed_turns_asked_again=again, resumed_turns_that_differ=differ,
        )  # fmt: skip


async def ready(http: httpx.AsyncClient, url: str, engines: int, seconds: float = 90.0) -> None:
    """Wait until a server answers and at least this number of engines serve it. Raises TimeoutError."""
    until = time.monotonic() + seconds
    while True:
        with suppress(LOST, KeyError, ValueError):
            members = (await http.get(f"{url}/replicas", headers={"authorization": "Bearer operator"})).json()["data"]
            if [each["state"] for each in members].count("ready") >= engines:
                return
        if time.monotonic() > until:
            raise TimeoutError(f"{url} does not serve with {engines} engines")
        await asyncio.sleep(0.1)


async def measure(args: argparse.Namespace, urls: list[str], programs: list[Program]) -> dict[str, Any]:
    rng, engines = random.Random(args.seed), len(programs) - len(urls)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=60, limits=limits) as http:
        bench, kills = Bench(args, urls, http), list[dict[str, Any]]()
        for url in urls:
            await ready(http, url, engines)
        clients = [asyncio.create_task(bench.client(number)) for number in range(args.clients)]
        until = time.monotonic() + 60 * args.minutes
        while len(kills) < args.kills and time.monotonic() < until:
            await asyncio.sleep(rng.uniform(0.2, 2.0))
            both = [rng.choice(programs[:2]), rng.choice(programs[2:])]
            victims = both if rng.random() < args.pairs else both[:1] if rng.random() < args.servers else both[1:]
            killed = time.monotonic()
            await asyncio.gather(*(asyncio.to_thread(victim.kill_and_start) for victim in victims))
            await asyncio.sleep(NOTICED_SECONDS)
            for url in urls:
                await ready(http, url, engines - 1)
            back = time.monotonic() - killed
            kills += [dict(killed=victim.name, back_s=round(back, 2)) for victim in victims]
            names = " and ".join(victim.name for victim in victims)
            print(f"kill {len(kills)}: {names}, back after {back:.1f} s", flush=True)
            if len(bench.errors) > args.errors:
                break
        bench.stop = True
        await asyncio.gather(*clients)
        found = await bench.audit()
    turns = [turn for talk in bench.talks for turn in talk.turns[1:] if turn.done]
    shares = [turn.cached / turn.prompt for turn in turns if turn.prompt]
    return dict(
        provenance(), command=command(), kills=len(kills), killed=dict(Counter(each["killed"] for each in kills)),
        requests=dict(bench.counts), errors=len(bench.errors), first_errors=bench.errors[:10],
        resumed=sum(turn.resumed for talk in bench.talks for turn in talk.turns),
        asked_again_without_an_id=sum(talk.unseen for talk in bench.talks),
        seconds_until_a_broken_stream_goes_on=spread(bench.waits), back_s=spread([each["back_s"] for each in kills]),
        cached_share_of_later_prompts=round(statistics.mean(shares), 3) if shares else 0.0, **found,
    )  # fmt: skip


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def programs(folder: str, store: str, engines: int, logs: Path) -> Iterator[tuple[list[str], list[Program]]]:
    """Two servers and the engines that they share, which are starting: the servers' URLs, and all, servers first."""
    addresses = [f"{folder}/{number}.sock" for number in range(engines)]
    ports = [free_port() for _ in range(2)]
    sizes = ["--cache-gb", "0.05", "--threads", "1", "--device", "cpu"]
    shared = ["--engines", ",".join(addresses), "--store", store, "--operator-key", "operator"]
    begun: list[Program] = []
    try:
        for number, port in enumerate(ports):
            words = ["serve", "--port", str(port), "--files", f"{folder}/files{number}", *shared]
            begun.append(Program(f"server {number}", words, logs / f"server{number}.log"))
        for number, address in enumerate(addresses):
            words = ["engine", "--listen", address, *sizes]
            begun.append(Program(f"engine {number}", words, logs / f"engine{number}.log"))
        yield [f"http://127.0.0.1:{port}" for port in ports], begun
    finally:
        for program in begun:
            program.kill()


def options() -> argparse.ArgumentParser:
    """The options, with their defaults."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--servers", type=float, default=0.6, help="share of the kills that hit a server")
    parser.add_argument("--pairs", type=float, default=0.2, help="share of the kills that hit a server and an engine")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=30.0, help="time after which the run ends in any case")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=80, help="most tokens of an answer")
    parser.add_argument("--errors", type=int, default=3, help="unexpected failures after which the run ends")
    passing = ["response_in_progress"]
    parser.add_argument("--passing", nargs="*", default=passing, help="codes after which to ask again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="directory for the programs' logs")
    parser.add_argument("--json", type=Path)
    return parser


BAD = ("errors", "turns_lost", "conversations_with_a_doubled_turn", "resumed_turns_that_differ")
"""Figures that must be 0."""


def main() -> None:
    args = options().parse_args()
    with postgresql() as store, tempfile.TemporaryDirectory(prefix="hf", dir="/tmp") as folder:
        logs = args.logs or Path(folder)
        logs.mkdir(exist_ok=True)
        with programs(folder, store, args.engines, logs) as (urls, begun):
            figures = asyncio.run(measure(args, urls, begun))
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    raise SystemExit(any(figures[name] for name in BAD))


if __name__ == "__main__":
    main()
