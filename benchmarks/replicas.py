"""Routing policies on real replicas, beside the simulator: conversations on several CPU engines of the built-in model.

usage: python benchmarks/replicas.py [--policies NAME ...] [--replicas 4] [--conversations 24] [--rate 1.0] [--think 2]
                                     [--long 0.15] [--json FILE]

Each policy gets engines of its own, one CPU thread each, with small caches in both tiers, and the same conversations:
of ShareGPT-like lengths, shortened to the model's context, of which a share is long. A turn holds all turns before it,
with the answers that came. Measured by the client, in this process, over `cluster.replicas.Replicas`: time until the
first token, throughput, and the share of reusable prompt tokens that came from a cache, of all that one engine with
endless memory would have found. Spread: how far the busiest and the idlest replica are apart, as a share of the mean.

Then the simulator runs the same conversations with the same router over the engine's cost profile. Several engines
share few cores here, and the profile was taken on an idle machine; so all times of the profile are stretched by one
factor, such that the simulated devices are busy for as long as the real ones were. The rest is the simulator's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

from invocation import provenance

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.routing import POLICIES, RoutingRules, make_router
from holdfast.core.config import EngineConfig
from holdfast.core.types import SamplingParams
from holdfast.engine.profiles import CostProfile
from holdfast.lab import workloads
from holdfast.lab.metrics import Record, percentile
from holdfast.lab.simulator.cluster import simulate_cluster
from holdfast.lab.simulator.devices import Link
from holdfast.lab.workloads import Conversation, PromptTokens, Turn
from holdfast.lm.memory.digests import block_digests

CONTEXT = 2000
"""Most tokens of a conversation."""
SHORTER = 12
"""ShareGPT's lengths are divided by this."""
COPY_RATE = 5e9
"""Bytes a second between the two tiers of an engine on a CPU, where they are not measured."""
LOOPBACK = Link("loopback", 1e9, 1e-4)


def conversations(args: argparse.Namespace) -> list[Conversation]:
    """The same for each policy."""
    made = workloads.skewed(args.conversations, args.think, args.seed, long_share=args.long)
    short = [
        replace(one, turns=tuple(
            Turn(max(4, turn.prompt // SHORTER), max(4, turn.output // SHORTER), turn.think) for turn in one.turns
        ))
        for one in made
    ]  # fmt: skip
    return workloads.gamma_arrivals(workloads.fit_context(short, CONTEXT), args.rate, args.seed)


class Client:
    """Sends the conversations to replicas, and notes what comes back."""

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


async def serve(args: argparse.Namespace, policy: str) -> tuple[dict[str, Any], CostProfile, EngineConfig]:
    """One policy on real engines."""
    config = EngineConfig(device="cpu", threads=args.replicas, cache_gb=args.cache_gb, host_cache_gb=args.host_gb)
    cluster = ClusterConfig(replicas=args.replicas, routing=policy)  # type: ignore[arg-type]
    spawner = LocalSpawner(config, args.replicas)
    replicas = await Replicas.start(cluster, spawner)
    try:
        busy = [0.0] * args.replicas
        for replica in replicas.members:
            assert replica.engine is not None
            replica.engine.on_steps = lambda tokens, seconds, number=replica.number: busy.__setitem__(
                number, busy[number] + sum(seconds)
            )
        client, began = Client(replicas), time.monotonic()
        work = conversations(args)
        await asyncio.gather(*(client.converse(number, one, began) for number, one in enumerate(work)))
        seconds = time.monotonic() - began
        await replicas.health()  # the last steps are told before the answer
        figures = of_records(client.records, client.reusable, seconds) | dict(
            busy_s=[round(each, 2) for each in busy],
            busy_spread=round((max(busy) - min(busy)) * len(busy) / sum(busy), 3),
            routed=[replica.taken for replica in replicas.members], moves=replicas.counts.moves,
            moved_tokens=replicas.counts.moved_tokens,
        )  # fmt: skip
        profile, memory = CostProfile.load(Path(replicas.info.profile_path)), replicas.info.memory
        profile = replace(
            profile, token_bytes=memory.block // replicas.info.block_size, copy_rate=profile.copy_rate or COPY_RATE
        )
        return figures, profile, replicas.config
    finally:
        await replicas.close()


def of_records(records: Sequence[Record], reusable: int, seconds: float) -> dict[str, Any]:
    first = sorted(1e3 * (record.token_times[0] - record.arrival) for record in records)
    tokens = sum(len(record.token_times) for record in records)
    found = sum(record.cached_tokens for record in records)
    return dict(
        requests=len(records), seconds=round(seconds, 2), median_ttft_ms=round(percentile(first, 0.5), 1),
        mean_ttft_ms=round(sum(first) / len(first), 1), p99_ttft_ms=round(percentile(first, 0.99), 1),
        output_tokens_per_s=round(tokens / seconds, 1), reusable_tokens=reusable,
        found=round(found / reusable, 4) if reusable else None,
    )  # fmt: skip


def simulate(args: argparse.Namespace, policy: str, profile: CostProfile, config: EngineConfig, busy: float) -> Any:
    """The same in virtual time, with devices that are busy for `busy` seconds in all."""
    factor, figures = 1.0, dict[str, Any]()
    for _ in range(3):
        slower = replace(profile, cost=profile.cost.slower(factor, factor))
        rules = RoutingRules(block_size=config.block_size, step_tokens=profile.token_budget)
        outcome = simulate_cluster(
            config, slower, conversations(args), make_router(policy, profile.cost, rules),  # type: ignore[arg-type]
            replicas=args.replicas, link=LOOPBACK, asks=False,
        )  # fmt: skip
        figures = of_records(outcome.records, outcome.reusable_tokens, outcome.seconds) | dict(
            busy_s=[round(each, 2) for each in outcome.busy], busy_spread=round(outcome.spread, 3),
            routed=outcome.routed, stretched=round(factor, 2),
        )  # fmt: skip
        factor *= busy / sum(outcome.busy)
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
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for policy in args.policies:
        real, profile, config = asyncio.run(serve(args, policy))
        simulated = simulate(args, policy, profile, config, sum(real["busy_s"]))
        pairs = ("median_ttft_ms", "mean_ttft_ms", "p99_ttft_ms", "output_tokens_per_s", "found")
        off = {name: round(simulated[name] / real[name] - 1, 3) for name in pairs if real[name]}
        rows.append(dict(policy=policy, real=real, simulated=simulated, simulated_off_by=off))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(provenance() | {"runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
