"""Baton's tables 1 and 2 and its Figures 6 to 8: simulated at full size, or run on this machine's device.

Run: python -m benchmarks.papers.baton simulate target-1        # the paper's A6000; minutes
     python -m benchmarks.papers.baton simulate target-2        # the paper's RTX 4090; seconds
     python -m benchmarks.papers.baton why                      # each cause of a difference alone; half an hour
     python -m benchmarks.papers.baton orders                   # Table 2 over orders of the same queries; minutes
     python -m benchmarks.papers.baton run target-1             # Llama-2-7B's shape, lengths / 16, here
     python -m benchmarks.papers.baton run target-2             # full size, here
     python -m benchmarks.papers.baton run preempt scale        # §4.3, which the paper leaves for later
     python -m benchmarks.papers.baton draw FILE.json           # the figures of a run

Lengths: a word is one token. With 4/3 tokens a word, eight rows of a long prompt and a long answer (10,700 tokens, of
0.5 MB each) would take 45 GB, in addition to 13.5 GB of weights on a card of 48. As tokens they take 34 GB.

The simulation runs the scheduler that serves. Times come from data sheets, as `holdfast/lab/simulator/deployment.py`
derives them, and from Transformers' software: each decode copies its cache (`torch.cat`, read and written at 80% of the
data sheet's bandwidth), and a forward takes at least `GENERATE` seconds in `generate`, and `OWN_LOOP` in Baton's loop.
These two are fitted to Table 2 at batch 2; all other figures follow. States that wait for a place do not count as
device memory, as the paper keeps them on "GPU & CPU".

`shaping` cuts the junk columns that a shaped prompt leaves, as this engine does. `shaping, literal` keeps them, as
§4.1 prints it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import paper_workloads
from benchmarks.lib.papers import RESULTS, origin, save
from holdfast.core.config import SchedulerName
from holdfast.core.version import __version__
from holdfast.lab.metrics import Record
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.simulator.devices import DEVICES
from holdfast.lab.simulator.padded import ENGINE, Batch, RowSoftware
from holdfast.lab.simulator.run import simulate
from holdfast.lab.simulator.shapes import MODELS
from holdfast.lab.workloads import Workload
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape, StepPlan, StepResult

MODEL = "llama-2-7b"
GENERATE, OWN_LOOP = 0.0667, 0.0435
"""Shortest time of a forward in seconds: 161.77 s / 2,425 steps and 83.43 s / 1,917 steps, Table 2 at batch 2."""
CAT_SHARE = 0.8
"""Share of the data sheet's bandwidth at which a cache is copied."""
ALWAYS_ROOM = 1_000_000
"""Number of positions in a simulated cache, so that no run is short of memory."""
SEED = 0


@dataclass(frozen=True)
class Method:
    """A line of the paper's tables."""

    scheduler: SchedulerName
    paper: str
    """The paper's name; empty if it is not in the paper."""
    generate: bool = False
    """Whether the method runs in Transformers' `generate`."""
    junk: bool = False


@dataclass(frozen=True)
class Cause:
    """One difference that there may be between the paper's runs and ours."""

    about: str
    words: float = 1.0
    """Number of tokens of a word."""
    seed: int = SEED
    software: Mapping[str, Any] = field(default_factory=dict)
    """Fields of RowSoftware that differ, for the methods in Baton's own loop. Rates of copies are in bytes/s."""
    cat: float = 1.0
    """Factor on the rate at which caches are copied, for every method; 0 for no copies."""
    fills: float = 0.0
    """Share of the card, besides the weights, that the batch must fill before columns are released."""


PCIE = 25e9
"""Bytes per second of a PCIe 4.0 link of 16 lanes, as reached in practice."""
CAUSES = {
    "as is": Cause("as in the tables"),
    "between": Cause("prompts are computed between decodes, not beside them", software={"beside": False}),
    "from host": Cause("a prefilled state comes from the host when it joins (25 GB/s)", software={"embed_rate": PCIE}),
    "as generate": Cause("a forward takes as long as in `generate` (66.7 ms)", software={"forward_seconds": GENERATE}),
    "host adds": Cause(
        "the host does not launch ahead: its 43.5 ms and the device add up", software={"host_adds": True}
    ),
    "joining": Cause(
        "each insertion takes 0.15 s, a forward 41.2 ms", software={"joining_seconds": 0.15, "forward_seconds": 0.0412}
    ),
    "late release": Cause("columns that all rows share are released only when the card is full", fills=1.0),
    "slow copies": Cause("caches are copied at half the rate, of any method", cat=0.5),
    "words": Cause("a word is 4/3 tokens", words=4 / 3),
    "order": Cause("the queries are drawn with seed 1", seed=1),
    "order 2": Cause("the queries are drawn with seed 2", seed=2),
    "no copies": Cause("caches are not copied, of any method", cat=0.0),
}
CELLS = (
    ("target-1", 4, ("run-to-completion", "shaping, literal", "shaping", "embedding")),
    ("target-1", 8, ("run-to-completion", "shaping, literal", "shaping", "embedding")),
    ("target-2", 10, ("run-to-completion", "shaping, literal", "embedding")),
)
"""Runs for each cause: target, batch, methods."""
METHODS = {
    "run-to-completion": Method("run-to-completion", "Benchmark", generate=True),
    "prefill-apart": Method("prefill-apart", "PD", generate=True),
    "shaping": Method("shaping", "Baton"),
    "shaping, literal": Method("shaping", "Baton", junk=True),
    "orca": Method("orca", ""),
    "embedding": Method("embedding", "Baton-PD"),
}
PAPER_1 = {4: (21901, 21781, 20549, 11771), 8: (6619, 6577, 3424, 2654)}
"""Table 1: for each batch, seconds of Benchmark, PD, Baton, Baton-PD on an A6000."""
PAPER_2 = {
    2: (161.77, None, 83.43, None), 4: (92.68, None, 49.61, None), 6: (61.70, None, 37.25, None),
    8: (50.07, None, 31.08, None), 10: (40.45, None, 30.99, None),
}  # fmt: skip
"""Table 2: for each batch, seconds of Benchmark and Baton on an RTX 4090."""
BATCHES = {"target-1": tuple(PAPER_1), "target-2": tuple(PAPER_2)}
DEVICE_OF = {"target-1": "a6000", "target-2": "rtx-4090"}
PAPER_NAMES = ("Benchmark", "PD", "Baton", "Baton-PD")


@dataclass
class Ran:
    """One method at one batch size."""

    method: str
    batch: int
    seconds: float
    steps: int
    idle_tokens: int
    preemptions: int
    widest: int
    """Largest number of columns of the batch."""
    ended: int = 0
    """Number of queries that ended."""
    cut: bool = False
    """Whether the run took longer than allowed. Seconds, steps and tokens are then those until the cut."""
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """For each name, points (time, value): queries and tokens so far, and positions of the batch."""


class Watched:
    """Observes a loop over padded rows and records the size of the batch when each step ends."""

    def __init__(self, clock: Callable[[], float], software: RowSoftware = ENGINE) -> None:
        self._clock = clock
        self._batch = Batch(junk=software.junk, kept=software.kept_columns)
        self._sizes: deque[tuple[int, int]] = deque()
        self.positions: list[tuple[float, float]] = []
        self.widest = 0

    def planned(self, plan: StepPlan) -> None:
        self._sizes.append(self._batch.follow(plan))

    def ended(self, result: StepResult) -> None:
        positions, width = self._sizes.popleft()
        self.widest = max(self.widest, width)
        self.positions.append((self._clock(), positions))

    def close(self) -> None:
        """Do nothing: the sizes stay."""


def workload_of(target: str, batch: int, scale: float = 1.0, seed: int = SEED) -> Workload:
    """The paper's queries. At a batch of 4, all lengths of Target-1 are doubled."""
    if target == "target-1":
        return paper_workloads.baton_target_1(seed, scale=scale * (2 if batch == 4 else 1))
    return paper_workloads.baton_target_2(seed, scale=scale)


def longest_row(work: Workload) -> int:
    """The longest row that a batch run to completion may have: the longest prompt and the longest answer together."""
    turns = [turn for talk in work for turn in talk.turns]
    return max(turn.prompt for turn in turns) + max(turn.output for turn in turns)


def options_of(method: Method, batch: int, count: int) -> dict[str, Any]:
    """The engine's options. Every prompt may be prefilled ahead if batches are drawn at random from all."""
    ahead = dict(prefill_ahead=count) if method.scheduler == "prefill-apart" else {}
    return dict(
        executor="padded", scheduler=method.scheduler, max_sequences=batch, headroom=0.0, shrink_threshold=1.0,
        prefix_sharing=False, **ahead,
    )  # fmt: skip


def simulated(
    target: str, name: str, batch: int, device: str, cause: Cause = CAUSES["as is"], order: int | None = None
) -> Ran:
    """One method on one derived device. Steps are run one at a time, as the paper's loop does.

    `order` is the seed by which the queries are shuffled; None leaves them as they are drawn.
    """
    method, work = METHODS[name], workload_of(target, batch, cause.words, cause.seed)
    if order is not None:
        work = random.Random(order).sample(work, len(work))
    deployed = deploy(MODEL, device).profile
    profile, shape, card = replace(deployed, cache_tokens=ALWAYS_ROOM), MODELS[MODEL], DEVICES[device]
    kept = int(cause.fills * (card.memory - shape.weight_bytes) / shape.token_bytes)
    software = RowSoftware(
        junk=method.junk,
        cat_rate=cause.cat * CAT_SHARE * card.bandwidth,
        forward_seconds=GENERATE if method.generate else OWN_LOOP,
        concurrent=True,
        kept_columns=0 if method.generate else kept,
    )
    if not method.generate:
        software = replace(software, **cause.software)
    longest = longest_row(work)
    config = EngineConfig(**options_of(method, batch, len(work)), max_model_len=longest, steps_in_flight=1)
    watched: list[Watched] = []

    def watch(scheduler: Scheduler, shape: EngineShape, clock: Callable[[], float]) -> list[Watched]:
        watched.append(Watched(clock, software))
        return watched

    outcome = simulate(config, profile, work, software=software, watch=watch)
    stats = outcome.stats
    return Ran(
        name, batch, outcome.seconds, outcome.steps, stats.idle_tokens, stats.preemptions, watched[0].widest,
        len(outcome.records), curves=curves_of(outcome.records, watched[0].positions),
    )  # fmt: skip


def curves_of(
    records: Sequence[Record], positions: Sequence[tuple[float, float]], most: int = 400
) -> dict[str, list[tuple[float, float]]]:
    """Cumulative queries and tokens and the positions of the batch over time, of at most `most` points each."""
    begin = min(record.arrival for record in records)
    ends = sorted(record.token_times[-1] - begin for record in records)
    tokens = sorted(time - begin for record in records for time in record.token_times)
    every = {
        "queries": [(time, at + 1) for at, time in enumerate(ends)],
        "tokens": [(time, at + 1) for at, time in enumerate(tokens)],
        "positions": [(time - begin, value) for time, value in positions],
    }
    return {name: thinned(points, most) for name, points in every.items()}


def thinned(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Evenly chosen points, at most `most`, with the last one."""
    step = -(-len(points) // most)
    kept = [*points[::step], *points[-1:]]
    return [(round(x, 3), round(y, 1)) for x, y in kept]


def compared(target: str, rows: Sequence[Ran], same_size: bool) -> list[str]:
    """The paper's table with our figures. Seconds are side by side only if the size is the paper's."""
    paper = PAPER_1 if target == "target-1" else PAPER_2
    lines = [
        "| batch | method | s | paper, s | off | against run to completion | paper | steps | idle tokens | widest |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for batch in sorted({row.batch for row in rows}):
        at = {row.method: row for row in rows if row.batch == batch}
        said = dict(zip(PAPER_NAMES, paper[batch], strict=True)) if batch in paper else {}
        whole = at.get("run-to-completion")
        base = whole.seconds if whole and not whole.cut else None
        base_said = said.get("Benchmark")
        for name, row in at.items():
            theirs = said.get(METHODS[name].paper)
            off = f"{row.seconds / theirs - 1:+.0%}" if theirs and same_size else "–"
            took = f"cut at {row.seconds:,.0f}, {row.ended} ended" if row.cut else f"{row.seconds:,.1f}"
            called = f"{name} ({METHODS[name].paper})" if METHODS[name].paper else name
            lines.append(
                f"| {batch} | {called} | {took} | "
                f"{f'{theirs:,}' if theirs else '–'} | {off} | "
                f"{f'{row.seconds / base - 1:+.1%}' if base and not row.cut else '–'} | "
                f"{f'{theirs / base_said - 1:+.1%}' if theirs and base_said else '–'} | {row.steps:,} | "
                f"{row.idle_tokens:,} | {row.widest:,} |"
            )
    return lines


def ratios(rows: Sequence[Ran]) -> list[str]:
    """The speed-up of embedding over shaping, and the part of it that comes from the number of steps."""
    lines = ["", "| batch | run to completion / embedding: s | steps | shaping / embedding: s | literal shaping |"]
    lines.append("|---|---|---|---|---|")
    for batch in sorted({row.batch for row in rows}):
        at = {row.method: row for row in rows if row.batch == batch and not row.cut}
        if not {"run-to-completion", "shaping", "embedding"} <= at.keys():
            continue
        best, whole = at["embedding"], at["run-to-completion"]
        literal = at.get("shaping, literal")
        lines.append(
            f"| {batch} | {whole.seconds / best.seconds:.2f} | {whole.steps / best.steps:.2f} | "
            f"{at['shaping'].seconds / best.seconds:.2f} | "
            f"{f'{literal.seconds / best.seconds:.2f}' if literal else '–'} |"
        )
    return lines if len(lines) > 3 else []


def draw(rows: Sequence[Ran], path: Path) -> None:
    """Figures 6 to 8: queries, tokens and positions of the batch over time, a column for each batch size."""
    from holdfast.lab.reports import plots

    titles = {"queries": "6 queries", "tokens": "7 output tokens", "positions": "8 cached positions"}
    batches = sorted({row.batch for row in rows})
    shown = [
        plots.Panel(
            f"{title}, batch {batch}",
            "over seconds",
            [
                plots.Line(
                    row.method, *map(list, zip(*row.curves[name], strict=True)), accent=row.method == "embedding"
                )
                for row in rows
                if row.batch == batch and row.curves and row.method in ("run-to-completion", "shaping", "embedding")
            ],
        )
        for name, title in titles.items()
        for batch in batches
    ]
    plots.png(lambda palette: plots.panels(shown, len(batches), palette), path)


def keep(stem: Path, about: Mapping[str, Any], rows: Sequence[Ran], lines: Sequence[str], *, curves: bool) -> None:
    """Write the table and its rows, with their curves if `curves`, for `draw`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    kept = [{key: value for key, value in asdict(row).items() if curves or key != "curves"} for row in rows]
    stem.with_suffix(".json").write_text(json.dumps({**about, "rows": kept}, indent=None if curves else 1) + "\n")
    head = ", ".join(f"{key} {value}" for key, value in about.items() if key not in ("command", "date") and value)
    stem.with_suffix(".md").write_text(f"`{about['command']}`, {about['date']}; {head}\n\n" + "\n".join(lines) + "\n")


def redraw(file: Path) -> None:
    """The figures of a run, from its JSON."""
    rows = [Ran(**row) for row in json.loads(file.read_text())["rows"]]
    draw(rows, file.with_suffix(".png"))


def simulate_target(
    target: str, batches: Sequence[int], names: Sequence[str], device: str, cause: str, out: Path
) -> None:
    rows = []
    for batch in batches:
        for name in names:
            rows.append(simulated(target, name, batch, device, CAUSES[cause]))
            print(f"{batch} {name}: {rows[-1].seconds:.1f} s", flush=True)
    about = origin(out) | {"holdfast": __version__, "device": f"{device}, derived from its data sheet"}
    if cause != "as is":
        about["differs"] = CAUSES[cause].about
    lines = [*compared(target, rows, same_size=True), *ratios(rows)]
    stem = out / f"baton-{target}-simulated{'' if cause == 'as is' else '-' + cause.replace(' ', '-')}"
    keep(stem, about, rows, lines, curves=False)
    print("\n".join(lines))
    draw(rows, stem.with_suffix(".png"))


def why(out: Path, names: Sequence[str]) -> None:
    """Each cause alone, and the distance of the paper's seconds from it. Written cause by cause."""
    rows: list[dict[str, Any]] = []
    heads = [f"{target[-1]}, {batch}: {name}" for target, batch, methods in CELLS for name in methods]
    theirs = [paper_seconds(target, batch, name) for target, batch, methods in CELLS for name in methods]
    lines = [
        "Seconds, and how far they are off the paper's; target, batch: method.",
        "",
        "| what differs | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
        "| the paper | " + " | ".join(f"{each:,}" if each else "–" for each in theirs) + " |",
    ]
    known: dict[Any, Ran] = {}
    for name in names:
        cause, said = CAUSES[name], []
        for target, batch, methods in CELLS:
            for method in methods:
                own = (
                    None if METHODS[method].generate else name
                )  # the cause concerns only Baton's loop, so `generate` stays unchanged
                key = target, method, batch, cause.words, cause.seed, cause.cat, own
                if key not in known:
                    known[key] = simulated(target, method, batch, DEVICE_OF[target], cause)
                ran = known[key]
                paper = paper_seconds(target, batch, method)
                off = f" ({ran.seconds / paper - 1:+.0%})" if paper else ""
                said.append(f"{ran.seconds:,.{0 if ran.seconds > 100 else 1}f}{off}")
                kept = {key: value for key, value in asdict(ran).items() if key != "curves"}
                rows.append({"cause": name, "target": target, **kept})
                print(name, target, batch, method, said[-1], flush=True)
        lines.append(f"| {cause.about} | " + " | ".join(said) + " |")
        save(out / "baton-why-simulated", rows, lines)


ORDERED = ("as is", "joining")
"""Causes under which the orders of Table 2 are run."""


def orders(out: Path, count: int) -> None:
    """Table 2 over `count` orders of the same queries: medians, and the lowest and the highest."""
    rows: list[dict[str, Any]] = []
    lines = [
        f"Target-2 as drawn, and in {count} random orders of the same queries: seconds off the paper's, and steps.",
        "",
        "| what differs | batch | method | as drawn | median | lowest to highest | steps as drawn | median | range |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for cause in ORDERED:
        for batch in BATCHES["target-2"]:
            for name in ("run-to-completion", "shaping, literal"):
                paper = paper_seconds("target-2", batch, name)
                assert paper is not None
                ran = [
                    simulated("target-2", name, batch, DEVICE_OF["target-2"], CAUSES[cause], order)
                    for order in (None, *range(count))
                ]
                off = [each.seconds / paper - 1 for each in ran]
                steps = [each.steps for each in ran]
                lines.append(
                    f"| {CAUSES[cause].about} | {batch} | {name} | {off[0]:+.0%} | {median(off[1:]):+.0%} | "
                    f"{min(off[1:]):+.0%} to {max(off[1:]):+.0%} | {steps[0]} | {median(steps[1:]):.0f} | "
                    f"{min(steps[1:])} to {max(steps[1:])} |"
                )
                print(lines[-1], flush=True)
                seconds = [round(each.seconds, 2) for each in ran]
                rows.append(dict(cause=cause, batch=batch, method=name, seconds=seconds, steps=steps))
    save(out / "baton-orders-simulated", rows, lines)


def paper_seconds(target: str, batch: int, name: str) -> float | None:
    """The paper's figure of a method, if it has one. Its shaping is the literal one."""
    if name == "shaping":
        return None
    table: Mapping[int, Sequence[float | None]] = PAPER_1 if target == "target-1" else PAPER_2
    return dict(zip(PAPER_NAMES, table[batch], strict=True)).get(METHODS[name].paper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON, the table and the figures")
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind, targets in (
        ("simulate", ("target-1", "target-2")),
        ("run", ("target-1", "target-2", "preempt", "scale")),
    ):
        each = kinds.add_parser(kind)
        each.add_argument("targets", nargs="+", choices=targets)
        each.add_argument("--batch", type=int, nargs="+", help="default: the paper's")
        each.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
        if kind == "simulate":
            each.add_argument("--device", choices=DEVICES, help="default: the paper's")
            each.add_argument("--cause", choices=CAUSES, default="as is", help="what differs, as in `why`")
        else:
            each.add_argument("--divide", type=float, default=16.0, help="divides the lengths of Target-1")
            each.add_argument("--limit", type=float, default=300.0, help="most seconds of a row; a longer one is cut")
            each.add_argument("--tiny", action="store_true", help="a model of two small layers: a trial on a CPU")
    reasons = kinds.add_parser("why", help="simulate each cause that may explain a difference, one at a time")
    reasons.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES))
    shuffled = kinds.add_parser("orders", help="simulate Table 2 over orders of the same queries")
    shuffled.add_argument("--count", type=int, default=41)
    kinds.add_parser("draw", help="the figures of a run").add_argument("file", type=Path, help="its JSON")
    args = parser.parse_args()
    if args.kind == "draw":
        redraw(args.file)
    elif args.kind == "orders":
        orders(args.out, args.count)
    elif args.kind == "why":
        why(args.out, args.causes)
    elif args.kind == "simulate":
        for target in args.targets:
            device = args.device or DEVICE_OF[target]
            simulate_target(target, args.batch or BATCHES[target], args.methods, device, args.cause, args.out)
    else:
        from benchmarks.papers.baton_runs import run_targets

        names = [name for name in args.methods if not METHODS[name].junk]  # this engine cuts the junk
        run_targets(args.targets, args.batch, names, divide=args.divide, tiny=args.tiny, limit=args.limit, out=args.out)


if __name__ == "__main__":
    main()
