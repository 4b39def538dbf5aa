"""Waiting until a server has looked after its jobs, so that what it would do wrongly is done."""

from __future__ import annotations

import asyncio

from holdfast.server.jobs.batches import Batches
from holdfast.server.jobs.tuning import Tuning


async def looked_after(jobs: Batches | Tuning, rounds: int = 3) -> None:
    """Wait until the loop that looks after jobs has gone round so many more times, from its begin to its end."""
    adopt, over, left = jobs._adopt, asyncio.Event(), rounds + 1

    async def counted() -> None:
        nonlocal left
        await adopt()
        left -= 1
        if not left:
            over.set()

    jobs._adopt = counted  # type: ignore[method-assign]
    try:
        await over.wait()
    finally:
        jobs._adopt = adopt  # type: ignore[method-assign]
