"""`holdfast profile`: measures the cost profile of a model or of cells on this device, caches it and prints it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.cli.output import require_writable, stage_printer
from holdfast.core.config import AppConfig, option
from holdfast.core.cost import PaddedCost
from holdfast.engine.client.app_client import AppClient
from holdfast.engine.client.client import EngineClient
from holdfast.engine.profiles import CellProfile, CostProfile
from holdfast.files.results import writing
from holdfast.lab.reports.tables import table
from holdfast.lm.config import EngineConfig

LARGEST = 16384
"""Maximum number of nodes of a task that can be measured."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Options of `holdfast profile`. Raises ValueError for values out of range and files that cannot be written."""

    app: str | None = option(
        None, "measure the cells of this application instead of a model: its name, or module:object"
    )
    largest: int = option(2048, "with --app: the most nodes of a task that is measured")
    out: str | None = option(
        None,
        "write a copy of the profile to this file, for `holdfast bench --simulate` or `holdfast serve --app-profile`",
    )

    def __post_init__(self) -> None:
        require_writable(self.out)
        if not 2 <= self.largest <= LARGEST:
            raise ValueError(f"largest is {self.largest}; it must lie between 2 and {LARGEST}")


async def run(config: ProfileConfig, engine: EngineConfig) -> int:
    """Measure, cache and print the profile. Returns the exit code. Raises EngineStartError, OSError."""
    console = Console(highlight=False)
    if engine.host_cache_gb == "auto":
        engine = replace(engine, host_cache_gb=0.0)  # No requests are served, so no host tier is needed.
    client = await EngineClient.start(engine, on_progress=stage_printer(console), measure=True)
    await client.close()
    cached = Path(client.info.profile_path)
    profile = CostProfile.load(cached)
    show(console, profile)
    console.print(f"\nsaved to {cached}", soft_wrap=True)
    if config.out is not None:
        with writing(config.out):
            profile.save(Path(config.out).absolute())
        console.print(f"and to {config.out}", soft_wrap=True)
    layout = [f"--{name} {size}" for name, size in (("tp", engine.tp), ("pp", engine.pp)) if size > 1]
    executor = ["--executor padded"] if engine.executor == "padded" else []
    used = " ".join(["holdfast serve", *executor, *layout, "--tbt-target MS"])
    reach = f"up to {profile.max_decodes:,} sequences and {profile.max_step_tokens:,} tokens a step"
    console.print(Text(f"{used} uses it from now on, with {reach}", style="dim"), soft_wrap=True)
    return 0


async def run_app(config: ProfileConfig, apps: AppConfig, threads: int | None) -> int:
    """Measure, cache and print the times of the cells of the one application in `apps`. Like `run` otherwise."""
    console = Console(highlight=False)
    (app,) = apps.app
    client = await AppClient.start(app, apps, stage_printer(console), threads, measure=config.largest)
    await client.close()
    cached = Path(client.info.profile_path)
    profile = CellProfile.load(cached)
    show_cells(console, profile)
    console.print(f"\nsaved to {cached}", soft_wrap=True)
    if config.out is not None:
        with writing(config.out):
            profile.save(Path(config.out).absolute())
        console.print(f"and to {config.out}", soft_wrap=True)
    console.print(Text(f"holdfast serve --app {app} uses these sizes from now on", style="dim"))
    return 0


def show_cells(console: Console, profile: CellProfile) -> None:
    """Print the time of each cell type by batch size, and the chosen batch sizes."""
    console.print(Text.assemble("\n", (profile.app, "bold"), f" on {profile.device}, {profile.versions}"))
    for each in profile.types:
        cost, sizes = each.cost, each.sizes
        best = max(map(cost.throughput, cost.sizes))
        shown = table(f"a task of {each.name}", ("nodes", "us", "us a node", "nodes/s", "of the best", ""))
        for size, seconds in zip(cost.sizes, cost.seconds, strict=True):
            note = "knee" if size == sizes[-1] else "size" if size in sizes else ""
            shown.add_row(
                f"{size:,}",
                f"{seconds * 1e6:,.1f}",
                f"{seconds / size * 1e6:,.2f}",
                f"{size / seconds:,.0f}",
                f"{cost.throughput(size) / best:.0%}",
                note,
            )
        console.print(shown)
        console.print(f"batch sizes of {each.name}: {', '.join(map(str, sizes))}", soft_wrap=True)


def show(console: Console, profile: CostProfile) -> None:
    """Print the measured points as tables, in milliseconds."""
    cost = profile.cost
    on_rows = isinstance(cost, PaddedCost)
    where = ", padded rows" if on_rows else ""
    console.print(Text.assemble("\n", (cost.model, "bold"), f" on {cost.device}, {profile.precision}{where}"))
    first = "a forward of the first chunk of a prompt" if on_rows else "a step without attention"
    linear = table(first, ("tokens", "ms", "tokens/s"))
    for tokens, seconds in zip(cost.linear_tokens, cost.linear_seconds, strict=True):
        linear.add_row(f"{tokens:,}", f"{seconds * 1e3:.3f}", f"{tokens / seconds:,.0f}")
    console.print(linear)
    shown = range(0, len(cost.attention_contexts), 1 + len(cost.attention_contexts) // 8)
    contexts = [f"{cost.attention_contexts[index]:,}" for index in shown]
    added = "what a later chunk takes more" if on_rows else "attention of one segment"
    attention = table(f"{added}, ms: query tokens (rows) by context (columns)", ("", *contexts))
    for query, row in zip(cost.attention_queries, cost.attention_seconds, strict=True):
        cells = (f"{row[index] * 1e3:.3f}" if cost.attention_contexts[index] >= query else "" for index in shown)
        attention.add_row(f"{query:,}", *cells)
    console.print(attention)
    show_links(console, profile)
    if isinstance(cost, PaddedCost):
        decodes = table("a decode of the batch, ms: rows by width (columns)", ("", *contexts))
        for rows in cost.decode_rows:
            cells = (f"{cost.forward(rows, 1, cost.attention_contexts[index]) * 1e3:.3f}" for index in shown)
            decodes.add_row(f"{rows:,}", *cells)
        console.print(decodes)


def show_links(console: Console, profile: CostProfile) -> None:
    """Print the time of messages between devices by size, and the share of each stage in a step."""
    kinds = [("sum over devices, us", profile.all_reduce), ("to the next stage, us", profile.send)]
    there = [(name, link) for name, link in kinds if link is not None]
    if there:
        links = table("messages between devices", ("bytes", *(name for name, _ in there)))
        for size in there[0][1].sizes:
            links.add_row(f"{size:,}", *(f"{link.send(size) * 1e6:,.1f}" for _, link in there))
        console.print(links)
    if profile.pp > 1:
        shares = ", ".join(f"{share:.1%}" for share in profile.cost.shares(profile.pp))
        console.print(f"shares of the stages in a step: {shares}", soft_wrap=True)
