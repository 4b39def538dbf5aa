"""`holdfast profile`: measures the cost profile of a model on this device, caches it and prints it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.cli.output import require_writable, stage_printer
from holdfast.core.config import EngineConfig, option
from holdfast.engine.client import EngineClient
from holdfast.engine.profiles import CostProfile
from holdfast.lab.reports.tables import table


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """The options of `holdfast profile`. Raises ValueError for a file that cannot be written."""

    out: str | None = option(None, "write a copy of the profile to this file, for `holdfast bench --simulate`")

    def __post_init__(self) -> None:
        require_writable(self.out)


async def run(config: ProfileConfig, engine: EngineConfig) -> int:
    """Measure, cache and print the profile. Returns the exit code. Raises EngineStartError, OSError."""
    console = Console(highlight=False)
    if engine.host_cache_gb == "auto":
        engine = replace(engine, host_cache_gb=0.0)  # nothing is served, so the host tier is not needed
    client = await EngineClient.start(engine, on_progress=stage_printer(console), measure=True)
    await client.close()
    cached = Path(client.info.profile_path)
    profile = CostProfile.load(cached)
    show(console, profile)
    console.print(f"\nsaved to {cached}", soft_wrap=True)
    if config.out is not None:
        profile.save(Path(config.out).absolute())
        console.print(f"and to {config.out}", soft_wrap=True)
    console.print(Text("holdfast serve --tbt-target MS uses it from now on", style="dim"))
    return 0


def show(console: Console, profile: CostProfile) -> None:
    """Print the measured points as two tables, in milliseconds."""
    cost = profile.cost
    console.print(Text.assemble("\n", (cost.model, "bold"), f" on {cost.device}, {profile.precision}"))
    linear = table("a step without attention", ("tokens", "ms", "tokens/s"))
    for tokens, seconds in zip(cost.linear_tokens, cost.linear_seconds, strict=True):
        linear.add_row(f"{tokens:,}", f"{seconds * 1e3:.3f}", f"{tokens / seconds:,.0f}")
    console.print(linear)
    shown = range(0, len(cost.attention_contexts), 1 + len(cost.attention_contexts) // 8)
    contexts = [f"{cost.attention_contexts[index]:,}" for index in shown]
    attention = table("attention of one segment, ms: query tokens (rows) by context (columns)", ("", *contexts))
    for query, row in zip(cost.attention_queries, cost.attention_seconds, strict=True):
        cells = (f"{row[index] * 1e3:.3f}" if cost.attention_contexts[index] >= query else "" for index in shown)
        attention.add_row(f"{query:,}", *cells)
    console.print(attention)
