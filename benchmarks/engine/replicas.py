"""Routing policies on real replicas and in the simulator: conversations on several CPU engines of the built-in model.

usage: python -m benchmarks.engine.replicas [--policies NAME ...] [--replicas 4] [--conversations 24] [--rate 1.0]
                                            [--think 2]
                                            [--long 0.15] [--shorter 12] [--least 4] [--context 2000] [--parts DIR]
                                            [--shape JSON] [--set NAME=VALUE ...] [--json FILE]

Each policy gets engines of its own, one CPU thread each, with small caches in both tiers, and the same conversations:
of ShareGPT-like lengths, shortened to the model's context, of which a share is long. A turn holds all turns before it,
with the answers that came. Measured by the client, in this process, over `cluster.replicas.Replicas`: time until the
first token, throughput, and the share of reusable prompt tokens that came from a cache, of all that one engine with
endless memory would have found. Spread: how far the busiest and the idlest replica are apart, as a share of the mean.

Then the simulator runs the same conversations with the same router over the engine's cost profile. `holdfast profile`
measures one; else the first engine estimates it by a few steps. Three things are taken from measurements. Before each
run the same short conversations run at 1, 2, ... engines at once, which shows how much engines that share cores or a
GPU slow each other; the median over the runs counts. A few short prompts measure the time of a request besides its
steps (sockets, text, planning); the least over the runs is added to each simulated time until the first token. And the
profile's times are stretched by two factors for each run, such that steps of decodes alone, and other steps, take as
long in all as they did in the real run. The rest is the simulator's own.

With --parts, real runs are kept there, and a policy that has been run is not run again. So they can be done in parts;
the last call simulates them all.

With --shape, engines run on GPUs, each on its own, a Llama-3-8B shape with these changes and random weights. Where
CUDA_VISIBLE_DEVICES names a GPU twice, two engines share it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec

from benchmarks.engine.llama8b import LLAMA_3_8B, write_shape
from benchmarks.lib import paper_workloads
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.routing import POLICIES, RoutingRules, make_router
from holdfast.core.types import SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.messages import Steps
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, percentile
from holdfast.lab.simulator.cluster import simulate_cluster
from holdfast.lab.simulator.devices import Link
from holdfast.lab.workloads import Conversation, PromptTokens, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.types import StepPlan, StepResult

MOST_DECODES = 8
"""Largest number of tokens of a step that is taken to have only decodes."""
TALK = (8, 100, 12)
"""Number of prompts, tokens of each, and tokens of each answer, for the work that measures how engines slow each other.
"""
PROBES = 15
"""Number of short prompts that measure the time of a request besides its steps."""
COPY_RATE = 5e9
"""Bytes per second between the two tiers of an engine on a CPU, if they are not measured."""
LOOPBACK = Link("loopback", 1e9, 1e-4)


def conversations(args: argparse.Namespace) -> list[Conversation]:
    """The conversations, equal for each policy."""
    made = paper_workloads.skewed(args.conversations, args.think, args.seed, long_share=args.long)

    def shorter(turn: Turn) -> Turn:
        return Turn(max(args.least, turn.prompt // args.shorter), max(4, turn.output // args.shorter), turn.think)

    short = [replace(one, turns=tuple(map(shorter, one.turns))) for one in made]
    return workloads.gamma_arrivals(workloads.fit_context(short, args.context), args.rate, args.seed)


class Client:
    """Sends the conversations to replicas, and records the answers."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.records: list[Record] = []
        self.reusable = 0
        self._seen: set[bytes] = set()
        self._tokens = PromptTokens(replicas.info.vocab_size)

    async def converse(self, number: int, conversation: Conversation, began: float) -> None:
        await asyncio.sleep(max(0.0, began + conversation.arrival - time.monotonic()))
        history: tuple[int, ...] = ()
        for index, turn in enumerate(conversation.turns):
            if index:
                await asyncio.sleep(turn.think)
            prompt = (*history, *self._tokens.prompt(number, index, turn))
            record = Record(time.monotonic(), len(prompt))
            self.records.append(record)
            self._count(prompt)
            params = SamplingParams(temperature=0.0, max_tokens=turn.output, ignore_eos=True)
            answer: list[int] = []
            deltas = self.replicas.stream(
                prompt, params, conversation=str(number) if len(conversation.turns) > 1 else ""
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    answer += delta.tokens
                    record.token_times += [time.monotonic()] * len(delta.tokens)
                    if delta.usage is not None:
                        record.cached_tokens = delta.usage.cached_tokens
            history = (*prompt, *answer)
            self._seen.update(self._chain(history[:-1]))

    def _count(self, prompt: Sequence[int]) -> None:
        """Count the tokens of a prompt whose state was computed before."""
        chain = self._chain(prompt)
        size = self.replicas.info.block_size
        self.reusable += size * sum(digest in self._seen for digest in chain[: (len(prompt) - 1) // size])
        self._seen.update(chain)

    def _chain(self, tokens: Sequence[int]) -> list[bytes]:
        size = self.replicas.info.block_size
        return block_digests(b"", tokens[: len(tokens) // size * size], size)


async def serve(args: argparse.Namespace, policy: str, directory: Path) -> None:
    """Run one policy on real engines. Its figures, and the data for the simulator, go to `directory`."""
    device: dict[str, Any] = dict(device="cpu", threads=args.replicas)
    if args.shape is not None:
        # One directory for all policies, so that they share a stored profile.
        write_shape(directory / "model", LLAMA_3_8B | json.loads(args.shape))
        device = dict(model=str(directory / "model"), load_format="random")
    sizes = dict(cache_gb=args.cache_gb, host_cache_gb=args.host_gb)
    config = EngineConfig(**device | sizes | dict(args.set))
    cluster = ClusterConfig(replicas=args.replicas, routing=policy)  # type: ignore[arg-type]
    spawner = LocalSpawner(config, args.replicas)
    replicas = await Replicas.start(cluster, spawner)
    try:
        busy, steps = [0.0] * args.replicas, list[tuple[int, float]]()
        for replica in replicas.members:
            assert replica.engine is not None
            replica.engine.on_steps = partial(add_busy, busy, steps, replica.number)
        besides = await probe(replicas, busy)
        paces = await contention(replicas, busy)
        before = [replica.taken for replica in replicas.members]
        busy[:] = [0.0] * args.replicas
        steps.clear()
        client, began = Client(replicas), time.monotonic()
        work = conversations(args)
        await asyncio.gather(*(client.converse(number, one, began) for number, one in enumerate(work)))
        seconds = time.monotonic() - began
        await replicas.health()  # the last steps are reported before the answer
        figures = of_records(client.records, client.reusable, seconds) | dict(
            busy_s=[round(each, 2) for each in busy],
            busy_spread=round((max(busy) - min(busy)) * len(busy) / sum(busy), 3),
            routed=[replica.taken - taken for replica, taken in zip(replicas.members, before, strict=True)],
            moves=replicas.counts.moves, moved_tokens=replicas.counts.moved_tokens, besides_steps_ms=round(besides, 2),
            paces=[round(each, 3) for each in paces], seconds_of_steps=[round(each, 3) for each in seconds_of(steps)],
        )  # fmt: skip
        profile, memory = CostProfile.load(Path(replicas.info.profile_path)), replicas.info.memory
        replace(
            profile, token_bytes=memory.block // replicas.info.block_size, copy_rate=profile.copy_rate or COPY_RATE
        ).save(directory / f"{policy}.profile")
        (directory / f"{policy}.config").write_text(json.dumps(asdict(replicas.config)))
        (directory / f"{policy}.json").write_text(json.dumps(figures))
    finally:
        await replicas.close()


def add_busy(busy: list[float], steps: list[tuple[int, float]], number: int, reported: Steps) -> None:
    """Record these steps of a replica."""
    busy[number] += sum(reported.seconds)
    steps += zip(reported.tokens, reported.seconds, strict=True)


async def probe(replicas: Replicas, busy: list[float]) -> float:
    """Milliseconds of a request besides its steps: the least of short prompts on idle engines.

    Some prompts may have to wait, because an engine on a GPU captures graphs in its first pauses.
    """
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    found = []
    for number in range(PROBES):
        await replicas.health()
        before, began = sum(busy), time.monotonic()
        async with aclosing(replicas.stream((*range(10 + number, 26 + number),), params)) as deltas:
            async for _ in deltas:
                pass
        seconds = time.monotonic() - began
        await replicas.health()  # its steps are reported before the answer
        found.append(1e3 * (seconds - (sum(busy) - before)))
    return min(found)


async def contention(replicas: Replicas, busy: list[float]) -> list[float]:
    """The time of the same work at 1, 2, ... engines at once divided by the time at one alone, in seconds of steps."""
    seconds = []
    for count in range(1, len(replicas.members) + 1):
        await replicas.health()
        before = sum(busy)
        engines = [replica.engine for replica in replicas.members[:count]]
        await asyncio.gather(*(talk(engine, f"{count}/{number}") for number, engine in enumerate(engines)))
        await replicas.health()  # the last steps are reported before the answer
        seconds.append((sum(busy) - before) / count)
    return [each / seconds[0] for each in seconds]


async def talk(engine: EngineClient | None, seed: str) -> None:
    """Send a few short prompts that no cache holds, with short answers, one after another."""
    assert engine is not None
    params, random = SamplingParams(temperature=0.0, max_tokens=TALK[2], ignore_eos=True), Random(seed)
    for _ in range(TALK[0]):
        prompt = tuple(random.randrange(engine.info.vocab_size) for _ in range(TALK[1]))
        async with aclosing(engine.stream(prompt, params)) as deltas:
            async for _ in deltas:
                pass


def of_records(records: Sequence[Record], reusable: int, seconds: float, besides_ms: float = 0.0) -> dict[str, Any]:
    first = sorted(1e3 * (record.token_times[0] - record.arrival) + besides_ms for record in records)
    tokens = sum(len(record.token_times) for record in records)
    found = sum(record.cached_tokens for record in records)
    return dict(
        requests=len(records), seconds=round(seconds, 2), median_ttft_ms=round(percentile(first, 0.5), 1),
        mean_ttft_ms=round(sum(first) / len(first), 1), p99_ttft_ms=round(percentile(first, 0.99), 1),
        output_tokens_per_s=round(tokens / seconds, 1), reusable_tokens=reusable,
        found=round(found / reusable, 4) if reusable else None,
    )  # fmt: skip


class Noted:
    """An observer that records the tokens and the seconds of each step."""

    def __init__(self, steps: list[tuple[int, float]]) -> None:
        self._steps = steps
        self._tokens = deque[int]()

    def planned(self, plan: StepPlan) -> None:
        self._tokens.append(plan.num_tokens)

    def ended(self, result: StepResult) -> None:
        self._steps.append((self._tokens.popleft(), result.seconds))

    def close(self) -> None:
        """Do nothing: the steps stay."""


def seconds_of(steps: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of the steps of only decodes, and of all other steps."""
    decodes = sum(seconds for tokens, seconds in steps if tokens <= MOST_DECODES)
    return decodes, sum(seconds for _, seconds in steps) - decodes


def simulate(
    args: argparse.Namespace,
    policy: str,
    real: dict[str, Any],
    besides_ms: float,
    paces: Sequence[float],
    profile: CostProfile,
    config: EngineConfig,
) -> dict[str, Any]:
    """This run in virtual time. Steps of each kind together take as long as the real ones did."""
    factors, figures = [1.0, 1.0], dict[str, Any]()
    for _ in range(5):
        slower = replace(profile, cost=profile.cost.slower(*factors))
        rules = RoutingRules(block_size=config.block_size, step_tokens=profile.token_budget)
        steps = list[tuple[int, float]]()
        outcome = simulate_cluster(
            config, slower, conversations(args), make_router(policy, profile.cost, rules),  # type: ignore[arg-type]
            replicas=args.replicas, link=LOOPBACK, asks=False, sharing=lambda computing: paces[computing - 1],
            watch=lambda scheduler, shape, clock, steps=steps: [Noted(steps)],  # type: ignore[misc]
        )  # fmt: skip
        figures = of_records(outcome.records, outcome.reusable_tokens, outcome.seconds, besides_ms) | dict(
            busy_s=[round(each, 2) for each in outcome.busy], busy_spread=round(outcome.spread, 3),
            routed=outcome.routed, stretched=[round(factor, 3) for factor in factors],
        )  # fmt: skip
        factors = [
            factor * wanted / took
            for factor, wanted, took in zip(factors, real["seconds_of_steps"], seconds_of(steps), strict=True)
        ]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--rate", type=float, default=1.0, help="conversations that begin in a second")
    parser.add_argument("--think", type=float, default=2.0, help="mean seconds before a turn")
    parser.add_argument("--long", type=float, default=0.15, help="share of the conversations that are long")
    parser.add_argument("--cache-gb", type=float, default=0.02, help="KV cache of each engine")
    parser.add_argument("--host-gb", type=float, default=0.05, help="host tier of each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shorter", type=int, default=12, help="ShareGPT's lengths are divided by this")
    parser.add_argument("--least", type=int, default=4, help="tokens that a turn adds to its prompt at least")
    parser.add_argument("--context", type=int, default=2000, help="most tokens of a conversation")
    parser.add_argument("--shape", help="engines on GPUs: changes of a Llama-3-8B shape's config.json")
    add_engine_options(parser)
    parser.add_argument("--parts", type=Path, help="where real runs are kept; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parts = args.parts or Path(temporary)
        parts.mkdir(parents=True, exist_ok=True)
        for policy in args.policies:
            if not (parts / f"{policy}.json").exists():
                asyncio.run(serve(args, policy, parts))
        real = {policy: json.loads((parts / f"{policy}.json").read_text()) for policy in args.policies}
        first = args.policies[0]
        profile = CostProfile.load(parts / f"{first}.profile")
        config = msgspec.json.decode((parts / f"{first}.config").read_bytes(), type=EngineConfig)
    pairs = ("median_ttft_ms", "mean_ttft_ms", "p99_ttft_ms", "output_tokens_per_s", "found")
    rows, besides = [], min(figures["besides_steps_ms"] for figures in real.values())
    paces = [median(each) for each in zip(*(figures["paces"] for figures in real.values()), strict=True)]
    for policy, figures in real.items():
        simulated = simulate(args, policy, figures, besides, paces, profile, config)
        off = {name: round(simulated[name] / figures[name] - 1, 3) for name in pairs if figures[name]}
        rows.append(dict(policy=policy, real=figures, simulated=simulated, simulated_off_by=off))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(provenance() | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
