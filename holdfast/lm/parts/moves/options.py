"""Options of the moves of KV blocks between engines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class MoveOptions(CoreConfig):
    """Whether other engines may fetch this one's KV blocks, and at which address."""

    chunk_host: str = option(
        "",
        "address at which other engines fetch KV blocks from this one, as HOST or HOST:PORT; empty is off; several "
        "replicas on one machine use 127.0.0.1",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        found = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", self.chunk_host)
        if self.chunk_host and found is None:
            raise ValueError(f"chunk_host is {self.chunk_host!r}; it must look like HOST, HOST:PORT or [IPv6]:PORT")
        if found is not None and found[1] in ("0.0.0.0", "[::]"):
            raise ValueError(
                f"chunk_host is {self.chunk_host}, under which no other engine finds this one; name the host's address"
            )

    @property
    def moves_blocks(self) -> bool:
        return bool(self.chunk_host) or super().moves_blocks
