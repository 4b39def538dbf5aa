"""Options of the tiers below the host tier."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import ROW_SCHEDULERS, CoreConfig, option
from holdfast.core.units import bytes_of_gb


@dataclass(frozen=True, kw_only=True)
class TierOptions(CoreConfig):
    """Where state is kept besides the device and the host: on a disk, and in a remote service."""

    disk_cache_dir: str | None = option(
        None,
        "directory of this engine's disk tier: what the host tier holds is kept there too, and survives a restart; "
        "needs a host tier, which auto then brings on a CPU as well",
    )
    disk_cache_gb: float = option(20.0, "size of the disk tier in GB", positive=True)
    remote_cache: str | None = option(
        None,
        "URL of a Redis service that several engines share as a tier below the host's: redis://HOST:PORT/DB; needs "
        "holdfast[redis]",
        executor="paged",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.disk_cache_dir is None and self.disk_cache_gb != TierOptions.disk_cache_gb:
            raise ValueError(f"disk_cache_gb is {self.disk_cache_gb}, and there is no disk_cache_dir; give one")
        for name in ("disk_cache_dir", "remote_cache"):
            if (value := getattr(self, name)) is None:
                continue
            if not value:
                raise ValueError(f"{name} is empty; give it a value, or leave it out")
            said = f"{name} is set"
            if not self.prefix_sharing:
                raise ValueError(f"{said} and prefix_sharing is off: nothing would be found there again; drop one")
            if self.host_cache_gb == 0:
                raise ValueError(f"{said} and host_cache_gb is 0: it lies below the host tier; give that a size")
            if self.scheduler in ROW_SCHEDULERS and name == "remote_cache":
                raise ValueError(f"{said}, which is for the paged executor; drop it")

    @property
    def lower_tiers(self) -> bool:
        """Whether there are tiers below the host tier."""
        return self.disk_cache_dir is not None or self.remote_cache is not None

    @property
    def disk_cache_bytes(self) -> int:
        """Size of the disk tier in bytes."""
        return bytes_of_gb(self.disk_cache_gb)

    @property
    def moves_blocks(self) -> bool:
        return self.lower_tiers or super().moves_blocks
