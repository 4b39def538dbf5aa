"""Chats, a batch and tuning on one engine: each alone, in pairs, and all three, and what each loses to the others.

    python -m benchmarks.engine.who_goes_first --json who.json              # on this device; a model of 6M on a CPU
    python -m benchmarks.engine.who_goes_first --bound 0.5                  # the deferral rule instead of a target
    python -m benchmarks.engine.who_goes_first --shape llama-3-8b --target 25 --chats 16 --lines 128 --max-len 4096 \
        --length 512 --micro-batch 2048 --repeats 2 --json who.json       # on a GPU

All random weights. --chats clients each send a prompt of 64 to 192 tokens, read 24 to 64 tokens, and pause for half
a second. The batch has --lines requests open all the time, of 128 tokens in and 64 out, of its class. One LoRA job
of rank 8 over all linear layers trains without an end. Each of the seven sets runs for --seconds, of which the first
fifth is not counted, --repeats times in turn; a figure is the median of its repeats.

`device` is the share of the time in which the device computed: inference and training. The batch's ratio compares with
the same set without tuning. Tuning's ratio compares its device time with what is left: the share that --tuning-share
gives it while a batch has work, else the time in which the device computes nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.engine.llama8b import LLAMA_3_8B
from benchmarks.engine.served_pace import give_tokenizer
from benchmarks.lib.invocation import add_engine_options, provenance
from holdfast.core.types import BATCH_CLASS, SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.tuning import EXAMPLES_FILE, JobStart, JobStep, TuningRun, write_examples
from holdfast.engine.process.trace import DEVICE, STEPS, TRAINING
from holdfast.lab.metrics import percentile
from holdfast.lm.config import EngineConfig

SMALL = LLAMA_3_8B | dict(
    hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, vocab_size=2048, torch_dtype="float32",
)  # fmt: skip
TINY = SMALL | dict(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=512,
)  # fmt: skip
SHAPES = {"tiny": TINY, "small": SMALL, "llama-3-8b": LLAMA_3_8B}
SETS = (("chats",), ("batch",), ("tuning",), ("chats", "batch"), ("chats", "tuning"), ("batch", "tuning"),
        ("chats", "batch", "tuning"))  # fmt: skip
NOT_COUNTED = 0.2
"""The share of each run, at its beginning, that is not counted."""
PAUSE_SECONDS = 0.5
BATCH_PROMPT, BATCH_OUTPUT = 128, 64
EXAMPLES = 256


class Load:
    """Requests that go on until `end`."""

    def __init__(self, client: EngineClient, seed: str, count: int) -> None:
        choose = random.Random(seed)
        self.client = client
        self._open = [asyncio.create_task(self.follow(random.Random(choose.random()))) for _ in range(count)]

    async def follow(self, choose: random.Random) -> None:
        """Send one request after the other."""
        raise NotImplementedError

    def note(self, prompt: int, times: list[float]) -> str | None:
        """The id of a request that is about to be sent, or None for any. Called with its length and its `times`."""
        return None

    async def send(self, choose: random.Random, prompt: int, output: int, priority: int, times: list[float]) -> None:
        """Send a request, and append the time of each token to `times`."""
        tokens = tuple(choose.choices(range(3, self.client.info.vocab_size), k=prompt))
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        request_id = self.note(prompt, times)
        async for delta in self.client.stream(tokens, params, priority=priority, request_id=request_id):
            times += [time.monotonic()] * len(delta.tokens)

    async def end(self) -> None:
        for each in self._open:
            each.cancel()
        for outcome in await asyncio.gather(*self._open, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


class Chats(Load):
    """Clients that read an answer, pause, and send the next prompt."""

    def __init__(self, client: EngineClient, seed: str, count: int) -> None:
        self.turns: list[tuple[float, list[float]]] = []
        """When each request was sent, and when its tokens came."""
        super().__init__(client, seed, count)

    async def follow(self, choose: random.Random) -> None:
        while True:
            times: list[float] = []
            self.turns.append((time.monotonic(), times))
            await self.send(choose, choose.randint(64, 192), choose.randint(24, 64), 0, times)
            await asyncio.sleep(PAUSE_SECONDS * choose.uniform(0.5, 1.5))

    def figures(self, begin: float, end: float) -> dict[str, float]:
        pairs = [pair for _, times in self.turns for pair in pairwise(times)]
        gaps = sorted(after - before for before, after in pairs if begin <= after < end)
        firsts = sorted(times[0] - sent for sent, times in self.turns if times and begin <= times[0] < end)
        return dict(
            chat_tok_s=(len(gaps) + len(firsts)) / (end - begin),
            ttft_p50=1e3 * percentile(firsts, 0.5),
            ttft_p99=1e3 * percentile(firsts, 0.99),
            tbt_p50=1e3 * percentile(gaps, 0.5),
            tbt_p99=1e3 * percentile(gaps, 0.99),
        )


class Batch(Load):
    """A batch without an end."""

    def __init__(self, client: EngineClient, seed: str, count: int) -> None:
        self.times: list[float] = []
        super().__init__(client, seed, count)

    async def follow(self, choose: random.Random) -> None:
        while True:
            await self.send(choose, BATCH_PROMPT, BATCH_OUTPUT, BATCH_CLASS, self.times)

    def figures(self, begin: float, end: float) -> dict[str, float]:
        return dict(batch_tok_s=sum(begin <= at < end for at in self.times) / (end - begin))


class Job:
    """A tuning job without an end."""

    def __init__(self, run: TuningRun) -> None:
        self.run = run
        self.steps: list[tuple[float, int]] = []
        """Time and tokens of each step."""
        self._following = asyncio.create_task(self._follow())

    @staticmethod
    async def start(client: EngineClient, directory: Path, length: int, micro_batch: int) -> Job:
        directory.mkdir()
        choose = random.Random(0)
        words = range(3, client.info.vocab_size)
        examples = [(choose.choices(words, k=length), [1.0] * length) for _ in range(EXAMPLES)]
        digest = write_examples(directory / EXAMPLES_FILE, examples)
        wanted = JobStart(
            id=directory.name, directory=str(directory), name=directory.name, data_digest=digest, epochs=1000,
            batch_size=max(1, micro_batch // length), rank=8, micro_batch=micro_batch,
        )  # fmt: skip
        assert client.tuning is not None
        return Job(await client.tuning.start(wanted))

    async def _follow(self) -> None:
        async for event in self.run.events():
            if isinstance(event, JobStep):
                self.steps.append((time.monotonic(), event.tokens))

    async def end(self) -> None:
        await self.run.cancel()
        await self._following


def computed(trace: Path, begin: float, end: float) -> tuple[float, float]:
    """The shares of the time that the device spent on inference and on training, by a trace on the same clock."""
    seconds = dict.fromkeys((STEPS, TRAINING), 0.0)
    for line in trace.read_text().splitlines():
        event = json.loads(line.strip().strip(",")) if line.startswith("{") else {}
        on_device = event.get("ph") == "X" and event["pid"] == DEVICE and event["tid"] in seconds
        if on_device and begin <= event["ts"] / 1e6 < end:
            seconds[event["tid"]] += event["dur"] / 1e6
    return seconds[STEPS] / (end - begin), seconds[TRAINING] / (end - begin)


async def one(client: EngineClient, chosen: Sequence[str], args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One set for its time."""
    name = f"{'-'.join(chosen)}-{time.monotonic_ns()}"
    job = await Job.start(client, scratch / name, args.length, args.micro_batch) if "tuning" in chosen else None
    chats = Chats(client, name, args.chats) if "chats" in chosen else None
    batch = Batch(client, name, args.lines) if "batch" in chosen else None
    await asyncio.sleep(NOT_COUNTED * args.seconds)
    begin = time.monotonic()
    await asyncio.sleep((1 - NOT_COUNTED) * args.seconds)
    end = time.monotonic()
    found: dict[str, Any] = dict(run=" + ".join(chosen), begin=begin, end=end)
    for load in (chats, batch):
        if load is not None:
            found |= load.figures(begin, end)
            await load.end()
    if job is not None:
        await job.end()
        found |= dict(tuning_tok_s=sum(tokens for at, tokens in job.steps if begin <= at < end) / (end - begin))
    return found


@asynccontextmanager
async def started(args: argparse.Namespace, scratch: Path) -> AsyncIterator[tuple[EngineClient, Path]]:
    """A client of a warm engine, and the path of its trace, which is complete after the block."""
    model = scratch / args.shape
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[args.shape]))
    give_tokenizer(model)
    trace = scratch / "trace.json"
    config = EngineConfig(**{
        "model": str(model), "load_format": "random", "tuning": True, "max_sequences": args.chats + args.lines,
        "max_model_len": args.max_len, "speculation": "off",
        "max_waiting": 100_000, "trace": str(trace), "tuning_share": args.tuning_share,
        **({"tbt_target": args.target} if args.bound is None else {"deferral_bound": args.bound}), **dict(args.set),
    })  # fmt: skip
    client = await EngineClient.start(config)
    try:
        warm = Chats(client, "warm", args.chats), Batch(client, "warm", args.lines)
        await asyncio.sleep(args.warm)
        await asyncio.gather(*(load.end() for load in warm))
        yield client, trace
    finally:
        await client.close()


async def really(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with started(args, scratch) as (client, trace):
        for _ in range(args.repeats):
            for chosen in SETS:
                if not args.only or "+".join(chosen) in args.only:
                    rows.append(await one(client, chosen, args, scratch))
                    print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in rows[-1].items()}))
    for row in rows:
        row["inference"], row["training"] = computed(trace, row.pop("begin"), row.pop("end"))
    return rows


def medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The medians of each set's repeats."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["run"] for row in rows):
        same = [row for row in rows if row["run"] == name]
        keys = [key for key in same[0] if key != "run"]
        found[name] = {key: statistics.median(row[key] for row in same) for key in keys}
    return found


def table(rows: Sequence[dict[str, Any]], share: float) -> str:
    """A Markdown table of the medians, with the ratios."""
    found = medians(rows)
    lines = [
        "| run | chat tok/s | TTFT P50, P99, ms | TBT P50, P99, ms | batch tok/s | of without tuning | tuning tok/s "
        "| of what is left | device: inference, training |",
        "|---" * 9 + "|",
    ]
    for name, row in found.items():
        cells = [name, "", "", "", "", "", "", ""]
        if "chats" in name:
            cells[1] = f"{row['chat_tok_s']:.0f}"
            cells[2] = f"{row['ttft_p50']:.0f}, {row['ttft_p99']:.0f}"
            cells[3] = f"{row['tbt_p50']:.0f}, {row['tbt_p99']:.0f}"
        if "batch" in name:
            cells[4] = f"{row['batch_tok_s']:.0f}"
            without = found.get(name.removesuffix(" + tuning"))
            if "tuning" in name and without:
                cells[5] = f"{row['batch_tok_s'] / without['batch_tok_s']:.2f}"
        if "tuning" in name:
            cells[6] = f"{row['tuning_tok_s']:.0f}"
            left = share if "batch" in name else 1 - row["inference"]
            if name != "tuning" and left:
                cells[7] = f"{row['training'] / left:.2f}"
        lines.append(f"| {' | '.join(cells)} | {row['inference']:.2f}, {row['training']:.2f} |")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the loads and of the engine."""
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--target", type=float, default=400.0, help="ms between tokens")
    parser.add_argument("--bound", type=float, help="the deferral rule with this bound in seconds, without a target")
    parser.add_argument("--tuning-share", type=float, default=EngineConfig.tuning_share)
    parser.add_argument("--chats", type=int, default=4)
    parser.add_argument("--lines", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens of an example")
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--max-len", type=int, default=512, help="max_model_len")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="sets to run, such as chats+batch")
    parser.add_argument("--json", type=Path)
    add_engine_options(parser)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = uvloop.run(really(args, Path(scratch)))
    print(table(rows, args.tuning_share))
    if args.json:
        args.json.write_text(json.dumps(provenance() | dict(rows=rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
