"""Options of contracts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class ContractOptions(CoreConfig):
    """Which times requests may be promised."""

    contracts: Literal["auto", "on", "off"] = option(
        "auto",
        "accept requests with times that they must keep (ttft_ms, tbt_ms, complete_ms), or refuse them at once; on: "
        "find the device's cost profile for it; auto: only if there is a profile anyway",
    )
    contract_confidence: float = option(
        0.99,
        "probability with which an answer is no longer than a contract allows for, by the answers so far; with 1, "
        "every answer counts as long as it may be",
        between=(0.5, 1),
    )
    contract_share: float = option(
        0.5,
        "share of the rows and blocks that the contracts of one tenant (API key) may hold, once several tenants have "
        "sent requests; more are refused",
        between=(0.01, 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.contracts == "on" and self.scheduler != "stall-free":
            raise ValueError(f"contracts are for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")
