"""Options of the tally."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class TallyOptions(CoreConfig):
    """Which steps are counted."""

    topic = "tally"

    tally_every: int = option(0, "count every n-th step; 0 counts none", between=(0, 64), executor="paged")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tally_every and self.several_devices:
            raise ValueError(f"{self.several_devices}, and tally_every counts on one device; drop one")
