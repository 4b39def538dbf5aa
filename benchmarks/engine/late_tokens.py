"""Why tokens of chats come late: what each long gap between two tokens consists of, next to a batch and to training.

    python -m benchmarks.engine.late_tokens --json late.json                   # on this device; a small model on a CPU
    python -m benchmarks.engine.late_tokens --shape llama-3-8b --target 25 --chats 16 --lines 128 --max-len 4096 \
        --length 512 --micro-batch 2048 --seconds 10 --warm 5 --json late.json  # on a GPU

The loads, their options and the random weights are those of `who_goes_first`. Each of the sets chats + batch,
chats + tuning, and all three runs for --seconds. The engine writes a trace. Each gap between two tokens of a chat, as
its client sees it, is the sum of these parts:

- `device`: measured seconds of the step that gave the second token;
- `training`: measured seconds of that step's slice;
- `other steps`: measured seconds, with slices, of the steps between the two tokens that gave this chat none;
- `engine`: the rest of the time between the ends of the two steps: the device waited for the engine, or the engine came
  late to collect the step;
- `client`: how much later after the end of its step the second token came to its reader than the first one did.

The table has the means of all gaps, of the gaps above the target, and of the longest 1%. `over price` is how much
longer the step's segments took than the policy expected.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.engine.who_goes_first import NOT_COUNTED, Batch, Chats, Job, add_options, started
from benchmarks.lib.invocation import provenance
from holdfast.engine.client.client import EngineClient
from holdfast.engine.process.trace import DEVICE, ROWS, STEPS, TRAINING
from holdfast.lab.metrics import percentile

SETS = (("chats", "batch"), ("chats", "tuning"), ("chats", "batch", "tuning"))
PARTS = ("device", "training", "other steps", "engine", "client")
"""Parts of a gap. Their sum is the gap."""


class Arrivals(NamedTuple):
    """One request of a chat, with the times at which its client got its tokens."""

    request: str
    prompt: int
    """Number of tokens of the prompt."""
    times: list[float]
    """Time of each token, in seconds on the clock of this host."""


class NotedChats(Chats):
    """Chats whose requests have names that the trace shows."""

    def __init__(self, client: EngineClient, seed: str, count: int) -> None:
        self.requests: list[Arrivals] = []
        super().__init__(client, seed, count)

    def note(self, prompt: int, times: list[float]) -> str:
        name = uuid.uuid4().hex
        self.requests.append(Arrivals(name, prompt, times))
        return name


@dataclass(slots=True)
class Step:
    """One step of a trace. Times in seconds."""

    submitted: float
    """When its plan was submitted."""
    ended: float
    """When its result was collected."""
    device: float
    """Measured seconds of its segments."""
    predicted: float
    """Seconds that the policy expected of its segments."""
    tokens: int
    prefill: int
    training: float = 0.0
    """Measured seconds of its slice of training."""


@dataclass(frozen=True, slots=True)
class History:
    """The steps of a trace."""

    steps: dict[int, Step]
    sampled: dict[str, list[tuple[int, int]]]
    """For each sequence its segments: the number of the step, and the position at which the segment ends."""

    @classmethod
    def read(cls, trace: Path) -> History:
        """Read a trace, also one that is not complete."""
        steps: dict[int, Step] = {}
        segments: dict[str, list[tuple[int, int]]] = defaultdict(list)
        number = -1
        for event in events(trace):
            if event["pid"] == ROWS:
                segments[event["args"]["sequence"]].append((number, event["args"]["stop"]))
            elif event["tid"] == STEPS:
                args = event["args"]
                number = args["step"]
                ended = (event["ts"] + event["dur"]) / 1e6
                figures = args["measured"], args.get("predicted", 0.0), args["tokens"], args["prefill tokens"]
                steps[number] = Step(args["submitted"], ended, *figures)
            elif event["tid"] == TRAINING:
                step = steps.setdefault(event["args"]["plan"], Step(0.0, 0.0, 0.0, 0.0, 0, 0))
                step.training = event["dur"] / 1e6
                step.ended = (event["ts"] + event["dur"]) / 1e6
        return cls(steps, dict(segments))

    def gaps(self, chat: Arrivals) -> Iterator[dict[str, float]]:
        """The gaps between the tokens of a request, each with its time `at` and its parts in seconds."""
        given = [step for step, stop in self.sampled.get(chat.request, []) if stop >= chat.prompt]
        for at, (before, after) in enumerate(pairwise(given)):
            if at + 1 >= len(chat.times):
                return
            first, second = self.steps[before], self.steps[after]
            others = [self.steps[number] for number in range(before + 1, after) if number in self.steps]
            gap = chat.times[at + 1] - chat.times[at]
            found = {
                "device": second.device,
                "training": second.training,
                "other steps": sum(step.device + step.training for step in others),
                "client": gap - (second.ended - first.ended),
            }
            found["engine"] = gap - sum(found.values())
            found |= {"gap": gap, "at": chat.times[at + 1], "tokens": second.tokens, "prefill": second.prefill}
            found["over price"] = second.device - second.predicted if second.predicted else 0.0
            yield found


def events(trace: Path) -> Iterator[dict[str, Any]]:
    """The bars of a trace, in its order."""
    for line in trace.read_text().splitlines():
        event = json.loads(line.strip().strip(",")) if line.startswith("{") else {}
        if event.get("ph") == "X" and event["pid"] in (DEVICE, ROWS):
            yield event


async def one(client: EngineClient, chosen: Sequence[str], args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """One set for its time: what the clients of its chats saw."""
    name = f"{'-'.join(chosen)}-{time.monotonic_ns()}"
    job = await Job.start(client, scratch / name, args.length, args.micro_batch) if "tuning" in chosen else None
    chats = NotedChats(client, name, args.chats)
    loads = [chats, *([Batch(client, name, args.lines)] if "batch" in chosen else [])]
    await asyncio.sleep(NOT_COUNTED * args.seconds)
    begin = time.monotonic()
    await asyncio.sleep((1 - NOT_COUNTED) * args.seconds)
    end = time.monotonic()
    await asyncio.gather(*(load.end() for load in loads))
    if job is not None:
        await job.end()
    return dict(run=" + ".join(chosen), begin=begin, end=end, chats=chats.requests)


async def really(args: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    async with started(args, scratch) as (client, trace):
        runs = [await one(client, chosen, args, scratch) for chosen in SETS if wanted(chosen, args.only)]
    history = History.read(trace)
    rows = []
    for run in runs:
        begin, end = run["begin"], run["end"]
        gaps = [gap for chat in run["chats"] for gap in history.gaps(chat) if begin <= gap["at"] < end]
        steps = [step for step in history.steps.values() if begin <= step.ended < end]
        rows.append(dict(run=run["run"], gaps=gaps, steps=[[getattr(s, n) for n in s.__slots__] for s in steps]))
    return rows


def wanted(chosen: Sequence[str], only: Sequence[str]) -> bool:
    """Whether a set is to be run."""
    return not only or "+".join(chosen) in only


def table(rows: Sequence[dict[str, Any]], target: float) -> str:
    """A Markdown table of the parts of gaps; `target` in seconds."""
    head = ("run", "gaps", "number", "gap, ms", *PARTS, "over price", "step tokens", "prefill")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        gaps = sorted(row["gaps"], key=lambda gap: gap["gap"])
        if not gaps:
            continue
        p99 = percentile([gap["gap"] for gap in gaps], 0.99)
        above = [gap for gap in gaps if gap["gap"] > target]
        longest = [gap for gap in gaps if gap["gap"] >= p99]
        for name, some in (("all", gaps), ("above the target", above), (f"from P99 of {1e3 * p99:.1f} ms", longest)):
            if some:
                times = [mean(some, part) * 1e3 for part in ("gap", *PARTS, "over price")]
                sizes = [f"{mean(some, part):.0f}" for part in ("tokens", "prefill")]
                cells = [row["run"], name, str(len(some)), *(f"{each:.1f}" for each in times), *sizes]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(gaps: Sequence[dict[str, float]], part: str) -> float:
    return sum(gap[part] for gap in gaps) / len(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = uvloop.run(really(args, Path(scratch)))
    print(table(rows, args.target / 1e3))
    if args.json:
        args.json.write_text(json.dumps(provenance() | dict(target=args.target, rows=rows)) + "\n")


if __name__ == "__main__":
    main()
