"""Conversations on `holdfast serve --replicas` while its engines are killed, drained and added: is any turn lost?

usage: python -m benchmarks.robustness.replicas_kill [--kills 30] [--replicas 3] [--clients 6] [--cycles 5]
                                                        [--json FILE]

The built-in model on a CPU, one thread for each engine, a SQLite store in a temporary file. Each client holds one
conversation after the other over the Responses API, streamed and greedy, up to TURNS turns each. Every few seconds the
engine of a replica in the middle of an answer is killed (SIGKILL), after it has come back from the last time. Then, for
`--cycles` times and under the same load, a replica is added and another one is drained.

A turn counts as done when its last event has come. At the end each conversation is read from the store: the turns that
clients saw end must be there, once and in order, and nothing else but turns that nobody saw end. Each turn that was cut
by a kill is asked again on quiet engines: the answer must be the same, word for word. Exit status 1 for any difference.

Measured for each kill: how long the streams that it cut were silent (from the kill to their next piece of text), how
long until the next turn of such a conversation was answered, and until the replica served again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.invocation import command, provenance
from benchmarks.lib.talks import NAMES, SAID, TURNS, Talk, Turn, said_in, spread, text_of

OPERATOR = "operator"
AS_OPERATOR = {"authorization": f"Bearer {OPERATOR}"}


class Bench:
    """The server, its clients, and their records."""

    def __init__(self, args: argparse.Namespace, url: str, http: httpx.AsyncClient) -> None:
        self.args, self.url, self.http = args, url, http
        self.talks: list[Talk] = []
        self.running: dict[int, Turn] = {}
        """For each client, the turn that it waits for."""
        self.errors: list[str] = []
        self.stop = False
        self.rng = random.Random(args.seed)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self.http.post(f"{self.url}/v1/responses", json={"model": "holdfast-tiny", **body})
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    async def client(self, number: int) -> None:
        """Hold conversations until stopped."""
        rng = random.Random(number)
        while not self.stop:
            made = await self.http.post(f"{self.url}/v1/conversations", json={})
            made.raise_for_status()
            talk = Talk(made.json()["id"])
            self.talks.append(talk)
            previous = None
            for said in SAID[:TURNS]:
                turn = Turn(said.format(name=rng.choice(NAMES)), previous=previous)
                talk.turns.append(turn)
                self.running[number] = turn
                try:
                    await self.answer(talk, turn)
                except (httpx.HTTPError, ValueError) as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                del self.running[number]
                if not turn.done:
                    break
                previous = turn.response
                await asyncio.sleep(rng.uniform(0.0, 0.2))
                if self.stop:
                    return

    async def answer(self, talk: Talk, turn: Turn) -> None:
        """Ask one turn and read its stream."""
        body = {
            "model": "holdfast-tiny", "input": turn.said, "conversation": talk.id, "stream": True, "temperature": 0,
            "max_output_tokens": self.args.tokens,
        }  # fmt: skip
        async with self.http.stream("POST", f"{self.url}/v1/responses", json=body) as reply:
            if reply.status_code != 200:
                raise ValueError(f"status {reply.status_code}: {(await reply.aread()).decode()[:200]}")
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event, now = json.loads(line[6:]), time.monotonic()
                match event["type"]:
                    case "response.created":
                        turn.response = event["response"]["id"]
                    case "response.output_text.delta":
                        if turn.cut and not turn.silent:
                            turn.silent = now - turn.latest
                        turn.text += event["delta"]
                        turn.latest = now
                    case "response.completed" | "response.incomplete":
                        turn.done, turn.ended = True, now
                    case "response.failed" | "error":
                        raise ValueError(line[:300])

    async def members(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get(f"{self.url}/replicas", headers=AS_OPERATOR)).json()["data"]
        return found

    async def ready(self, count: int) -> None:
        """Wait until `count` replicas serve, and no others are there."""
        while [each["state"] for each in await self.members()] != ["ready"] * count:
            await asyncio.sleep(0.05)

    async def resumed(self) -> float:
        text = (await self.http.get(f"{self.url}/metrics")).text
        found = re.search(r"^holdfast_requests_resumed_total (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    async def kill_one(self) -> dict[str, Any]:
        """Kill a replica in the middle of an answer. Returns the times until everything went on."""
        while True:
            busy = [each for each in await self.members() if each["requests"] and each["state"] == "ready"]
            writing = [turn for turn in self.running.values() if turn.text and not turn.done]
            if busy and writing:
                break
            await asyncio.sleep(0.01)
        before, victim = await self.resumed(), self.rng.choice(busy)
        under_way = list(self.running.values())
        killed = time.monotonic()
        os.kill(victim["pid"], signal.SIGKILL)
        for turn in under_way:  # the time until their next text shows which of them it cut
            if not turn.done:
                turn.cut, turn.latest = True, killed
        while victim["pid"] in {each["pid"] for each in await self.members()}:
            await asyncio.sleep(0.005)
        await self.ready(self.args.replicas)
        back = time.monotonic() - killed
        while any(not turn.done for turn in under_way) and not self.errors:
            await asyncio.sleep(0.02)
        silent = sorted(turn.silent for turn in under_way if turn.silent)
        cut = int(await self.resumed() - before)
        return dict(
            replica=victim["name"], under_way=len(under_way), went_on=cut,
            silent_s=[round(each, 3) for each in silent[-cut:]] if cut else [],
            answered_s=round(max((turn.ended - killed for turn in under_way), default=0.0), 3),
            serves_again_s=round(back, 3),
        )  # fmt: skip

    async def change(self) -> float:
        """Add a replica and drain another one under load. Returns the seconds that this took."""
        began = time.monotonic()
        (await self.http.post(f"{self.url}/replicas", headers=AS_OPERATOR)).raise_for_status()
        await self.ready(self.args.replicas + 1)
        name = self.rng.choice(await self.members())["name"]
        (await self.http.post(f"{self.url}/replicas/{name}/drain", headers=AS_OPERATOR)).raise_for_status()
        while name in {each["name"] for each in await self.members()}:
            await asyncio.sleep(0.05)
        return round(time.monotonic() - began, 2)

    async def audit(self) -> dict[str, int]:
        """Compare the store with the clients' records. Ask the cut turns again."""
        lost = doubled = differ = again = done = 0
        for talk in self.talks:
            listed = await self.http.get(
                f"{self.url}/v1/conversations/{talk.id}/items", params={"order": "asc", "limit": 100}
            )
            said, seen, expected = said_in(listed.json()["data"]), talk.seen, talk.expected
            done += len(seen)
            unseen = 2 * sum(not turn.done for turn in talk.turns)
            if said[: len(expected)] != expected:
                lost += 1
            doubled += len(said) > len(expected) + unseen
            for turn in seen:
                if turn.cut:
                    body = dict(
                        input=turn.said, previous_response_id=turn.previous, temperature=0, store=False,
                        max_output_tokens=self.args.tokens,
                    )  # fmt: skip
                    again += 1
                    differ += text_of(await self.ask(body)) != turn.text
        return dict(
            conversations=len(self.talks), turns_done=done, conversations_with_a_lost_turn=lost,
            conversations_with_a_doubled_turn=doubled, cut_turns_asked_again=again, cut_turns_that_differ=differ,
        )  # fmt: skip


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http:
        bench = Bench(args, url, http)
        clients = [asyncio.create_task(bench.client(number)) for number in range(args.clients)]
        kills: list[dict[str, Any]] = []
        for number in range(args.kills):
            kills.append(await bench.kill_one())
            print(f"kill {number + 1}: {json.dumps(kills[-1])}", flush=True)
            if bench.errors:
                break
            await asyncio.sleep(bench.rng.uniform(0, 1))
        errors = len(bench.errors)
        changes = []
        for number in range(args.cycles):
            changes.append(await bench.change())
            print(f"added and drained {number + 1}: {changes[-1]} s", flush=True)
        bench.stop = True
        await asyncio.gather(*clients)
        found = await bench.audit()
    silent = [each for kill in kills for each in kill["silent_s"]]
    return dict(
        provenance(), command=command(), replicas=args.replicas, clients=args.clients, kills=len(kills),
        streams_that_went_on=sum(kill["went_on"] for kill in kills),
        silent_s=spread(silent), answered_s=spread([kill["answered_s"] for kill in kills]),
        serves_again_s=spread([kill["serves_again_s"] for kill in kills]),
        added_and_drained_s=changes, errors_at_kills=errors, errors_at_changes=len(bench.errors) - errors,
        errors=bench.errors[:10], **found, each_kill=kills,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--cycles", type=int, default=5, help="times that a replica is added and one is drained")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=80, help="most tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = dict(
            port=0, threads=1, replicas=args.replicas, max_replicas=args.replicas + 1, scale_up_ms=3_600_000,
            scale_down_seconds=86400, cache_gb=0.05, host_cache_gb=0.05, operator_key=OPERATOR,
            store=f"{folder}/store.sqlite", files=f"{folder}/files",
        )  # fmt: skip
        words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        serve = [sys.executable, "-m", "holdfast.cli", "serve", *words]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(line for line in server.stdout if "address" in line).split()[1]
                figures = asyncio.run(measure(args, url))
            finally:
                server.terminate()
                server.wait(60)
    print(json.dumps({key: value for key, value in figures.items() if key != "each_kill"}, indent=1))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    bad = ("conversations_with_a_lost_turn", "conversations_with_a_doubled_turn", "cut_turns_that_differ")
    raise SystemExit(any(figures[name] for name in bad) or bool(figures["errors"]))


if __name__ == "__main__":
    main()
