"""The options of a command that choose its workload."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.core.config import option
from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.lab.workloads.agents import SESSIONS, sessions
from holdfast.lab.workloads.azure import azure_csv
from holdfast.lab.workloads.chats import chats_json
from holdfast.lab.workloads.fields import estimate_tokens
from holdfast.lab.workloads.generated import DATASETS, fixed, multi_turn, sample_dataset
from holdfast.lab.workloads.mooncake import mooncake_jsonl
from holdfast.lab.workloads.values import Workload, hint_pauses, promise
from holdfast.server.default_contracts import parse_contract

DEFAULT_REQUESTS = 100
"""Default number of conversations in a generated workload."""
NO_CONTRACTS = "none"
"""Value of the option `contract` with which no request asks for a contract."""
MAX_COUNT = 10_000_000
"""Bound of the number of conversations, and of their lengths in tokens. Conversations are held in memory."""
MIN_VARIATION, MAX_VARIATION = 0.01, 100.0
"""Bounds of the variation of arrivals. Beyond them, the gamma distribution leaves the range of floats."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """The workload that the options of a command describe. Raises ValueError for invalid values."""

    workload: str = option(
        "fixed",
        f"fixed, multi-turn, {', '.join((*SESSIONS, *DATASETS))}, or a file: an Azure .csv, a .jsonl of Mooncake or "
        "AIPerf, a .json of ShareGPT or of vLLM's multi-turn benchmark",
    )
    requests: int | None = option(None, "number of conversations; default: 100, or the whole file")
    prompt_tokens: int = option(256, "length of each prompt, for fixed")
    output_tokens: int = option(64, "length of each answer, for fixed, and where an AIPerf trace does not say it")
    think: float = option(5.0, "mean think time in seconds, for multi-turn")
    variation: float = option(
        1.0, "standard deviation of the intervals between arrivals, divided by their mean; above 1 gives bursts"
    )
    longer: Literal["cut", "drop"] = option(
        "cut", "a conversation longer than the context: cut before the turn that exceeds it, or drop it whole"
    )
    contract: str | None = option(
        None,
        "contract that each request asks for: ttft=500ms,tbt=50ms,complete=20s, or some of them; or none; default: "
        "the workload's own",
    )
    pause_noise: float | None = option(
        None,
        "clients say how long the pause before the next turn lasts: the true time, times a lognormal factor with this "
        "standard deviation of its logarithm; default: only what the workload itself says",
    )
    pause_liars: float = option(
        0.0, "share of conversations whose clients promise any pause instead, with --pause-noise"
    )

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
            if value is not None and value > MAX_COUNT:
                raise ValueError(f"{name} is {value}; it must be at most {MAX_COUNT:,}")
        if not 0 < self.think < float("inf"):
            raise ValueError(f"think is {self.think}; it must be above 0")
        if not MIN_VARIATION <= self.variation <= MAX_VARIATION:
            raise ValueError(
                f"variation is {self.variation}; it must lie between {MIN_VARIATION} and {MAX_VARIATION:g}"
            )
        contract_of(self.contract or NO_CONTRACTS)
        hint_pauses((), self.pause_noise or 0.0, self.pause_liars, 0)
        if self.pause_liars and self.pause_noise is None:
            raise ValueError(
                f"pause_liars is {self.pause_liars:g}, and nobody says anything of pauses; set pause_noise"
            )

    @property
    def title(self) -> str:
        """The workload's name for a report; a file without its directory."""
        return "fixed lengths" if self.workload == "fixed" else self.workload.rpartition("/")[2]

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts of one run have tokens in common."""
        return self.workload != "fixed" and self.workload not in DATASETS

    def read(self, seed: int) -> Workload:
        """Read or generate the conversations. Raises ValueError, naming the file if there is one."""
        workload = self._conversations(seed)
        if self.pause_noise is not None:
            workload = hint_pauses(workload, self.pause_noise, self.pause_liars, seed)
        if self.contract is None:
            return workload
        contract = contract_of(self.contract)
        return promise(workload, lambda turn, history: contract)

    def _conversations(self, seed: int) -> Workload:
        """The conversations as the file or the generator gives them."""
        name, count = self.workload, self.requests or DEFAULT_REQUESTS
        if name == "fixed":
            return fixed(count, self.prompt_tokens, self.output_tokens)
        if name == "multi-turn":
            return multi_turn(count, self.think, seed)
        if name in SESSIONS:
            return sessions(name, count, seed)
        if name in DATASETS:
            return sample_dataset(name, count, seed)
        match Path(name).suffix:
            case ".csv":
                workload: Workload = azure_csv(name)
            case ".jsonl":
                workload = mooncake_jsonl(name, output=self.output_tokens)
            case ".json":
                workload = chats_json(name, estimate_tokens, seed)
            case _:
                known = ", ".join(("fixed", "multi-turn", *SESSIONS, *DATASETS))
                raise ValueError(f"workload {name} is unknown; there are {known}, and .csv, .jsonl and .json files")
        if not workload:
            raise ValueError(f"{name} holds no requests")
        return workload[: self.requests]


def contract_of(text: str) -> Contract:
    """Read `ttft=500ms,tbt=50ms,complete=20s`, or `none`. Raises ValueError that names the value."""
    return NO_CONTRACT if text == NO_CONTRACTS else parse_contract(text, text)
