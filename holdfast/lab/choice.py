"""Which workload the options ask for: lengths and number of conversations, read or drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from holdfast.core.config import option
from holdfast.lab import workloads
from holdfast.lab.workloads import DATASETS, Workload

DRAWN = 100
"""Conversations that are made where no number is said."""
CHARACTERS_A_TOKEN = 4
"""A text's length in tokens where no tokenizer is at hand."""
EVENEST, BURSTIEST = 0.01, 100.0
"""Variations of arrivals. Beyond, there is nothing to see but numbers that are out of range."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """What is sent, but for when. Raises ValueError for what cannot be."""

    workload: str = option(
        "fixed",
        f"fixed, multi-turn, {', '.join(DATASETS)}, or a file: an Azure .csv, a Mooncake .jsonl, a ShareGPT .json",
    )
    requests: int | None = option(
        None, "how many conversations; default: 100, and of a file all; else the first so many"
    )
    prompt_tokens: int = option(256, "length of each prompt, for fixed")
    output_tokens: int = option(64, "length of each answer, for fixed")
    think: float = option(5.0, "mean think time in seconds, for multi-turn")
    variation: float = option(
        1.0, "standard deviation over mean of the intervals between arrivals; above 1 comes in bursts"
    )

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if not 0 < self.think < float("inf"):
            raise ValueError(f"think is {self.think}; it must be above 0")
        if not EVENEST <= self.variation <= BURSTIEST:
            raise ValueError(f"variation is {self.variation}; it must lie between {EVENEST} and {BURSTIEST:g}")

    @property
    def lengths(self) -> str:
        """What is sent, for people: a file by its name alone."""
        return "fixed lengths" if self.workload == "fixed" else self.workload.rpartition("/")[2]

    @property
    def shares(self) -> bool:
        """Whether prompts of one run have tokens in common."""
        return self.workload != "fixed" and self.workload not in DATASETS

    def read(self, seed: int) -> Workload:
        """The conversations. Raises ValueError, for a file with its name."""
        name, count = self.workload, self.requests or DRAWN
        if name == "fixed":
            return workloads.fixed(count, self.prompt_tokens, self.output_tokens)
        if name == "multi-turn":
            return workloads.multi_turn(count, self.think, seed)
        if name in DATASETS:
            return workloads.drawn(name, count, seed)
        match Path(name).suffix:
            case ".csv":
                read: Workload = workloads.azure_csv(name)
            case ".jsonl":
                read = workloads.mooncake_jsonl(name)
            case ".json":
                read = workloads.sharegpt_json(name, lambda text: -(-len(text) // CHARACTERS_A_TOKEN))
            case _:
                known = ", ".join(("fixed", "multi-turn", *DATASETS))
                raise ValueError(f"workload {name} is unknown; there are {known}, and .csv, .jsonl and .json files")
        if not read:
            raise ValueError(f"{name} holds no requests")
        return read[: self.requests]

    def arriving(self, workload: Workload, rate: float, seed: int) -> Workload:
        """The same conversations, `rate` a second."""
        return workloads.gamma(workload, rate, self.variation, seed)
