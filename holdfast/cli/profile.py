"""`holdfast profile`: measures a model's pace on this device, keeps it, and shows it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import UsageError
from holdfast.cli.reports import writable
from holdfast.cli.tables import table
from holdfast.core.config import EngineConfig, option
from holdfast.engine.client import EngineClient
from holdfast.engine.profiles import CostProfile


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What to do with the profile besides keeping it."""

    out: str | None = option(None, "write a copy of the profile to this file, for `holdfast bench --simulate`")


async def run(config: ProfileConfig, engine: EngineConfig) -> int:
    """Measure, keep, show. Returns the exit code. Raises UsageError, EngineStartError, OSError."""
    try:
        writable(config.out)
    except ValueError as error:
        raise UsageError(str(error)) from None
    console = Console(highlight=False)
    if engine.host_cache_gb == "auto":
        engine = replace(engine, host_cache_gb=0.0)  # nobody is served, so nothing needs to go there
    client = await EngineClient.start(
        engine, on_progress=lambda stage: console.print(Text(f"{stage} …", style="dim")), measure=True
    )
    await client.close()
    kept = Path(client.info.profile_path)
    profile = CostProfile.load(kept)
    show(console, profile)
    console.print(f"\nkept at {kept}", soft_wrap=True)
    if config.out is not None:
        profile.save(Path(config.out).absolute())
        console.print(f"and at {config.out}", soft_wrap=True)
    console.print(Text("holdfast serve --tbt-target MS goes by it from now on", style="dim"))
    return 0


def show(console: Console, profile: CostProfile) -> None:
    """The measured points as two tables, in milliseconds."""
    cost = profile.cost
    console.print(Text.assemble("\n", (cost.model, "bold"), f" on {cost.device}, {profile.precision}"))
    linear = table("a step without attention", ("tokens", "ms", "tokens/s"))
    for tokens, seconds in zip(cost.linear_tokens, cost.linear_seconds, strict=True):
        linear.add_row(f"{tokens:,}", f"{seconds * 1e3:.3f}", f"{tokens / seconds:,.0f}")
    console.print(linear)
    shown = range(0, len(cost.attention_contexts), 1 + len(cost.attention_contexts) // 8)
    contexts = [f"{cost.attention_contexts[index]:,}" for index in shown]
    attention = table("attention of one segment, ms: query tokens down, context across", ("", *contexts))
    for query, row in zip(cost.attention_queries, cost.attention_seconds, strict=True):
        cells = (f"{row[index] * 1e3:.3f}" if cost.attention_contexts[index] >= query else "" for index in shown)
        attention.add_row(f"{query:,}", *cells)
    console.print(attention)
