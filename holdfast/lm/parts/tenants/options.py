"""Options of the limit for each tenant."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option


@dataclass(frozen=True, kw_only=True)
class TenantOptions(CoreConfig):
    """How much of the batch one tenant may have."""

    max_tenant_sequences: int | None = option(
        None,
        "maximum number of sequences of one tenant (API key) that run at once; its others wait, and hold up no other "
        "tenant's; default: max_sequences",
        between=(1, 4096),
    )
