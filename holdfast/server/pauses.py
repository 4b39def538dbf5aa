"""The pause after an answer: its kind, and how long a client wants state kept."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.pause import MAX_KIND, MAX_PAUSE

PERSON, BRANCH, BATCH = "person", "branch", "batch"
"""Kinds of pauses. The kind after tool calls is `tool:NAME`, or `tool:NAME+NAME` for several."""
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)(ms|s|m|h)")
ODD = re.compile(r"[^A-Za-z0-9_.+-]")
"""Characters that a tool's name loses in a kind of pause. A colon would begin another level."""
SLACK = 60.0
"""Seconds by which a client's clock may be late: a time that has just passed is not refused."""
RETENTIONS = {"in_memory": None, "in-memory": None, "24h": "24h"}
"""OpenAI's values of `prompt_cache_retention`, each as a value of `keep_until`."""
LIVES = {"5m": 300, "1h": 3600}
"""Values of `ttl` in the Messages API's `cache_control`, in seconds."""


def kind_after(tools: Iterable[str]) -> str:
    """The kind of the pause after an answer that calls these tools: a person thinks if there are none."""
    names = sorted({ODD.sub("_", name) for name in tools})
    return f"tool:{'+'.join(names)}"[:MAX_KIND] if names else PERSON


def keep_seconds(wish: float | str | None, now: float) -> float | None:
    """Seconds for which a client wants state kept. `now` is the time in Unix seconds.

    `wish` is a time in Unix seconds, or a duration such as 5m or 24h. Raises ValueError for any other, and beyond a
    day.
    """
    if wish is None:
        return None
    if isinstance(wish, str):
        found = DURATION.fullmatch(wish)
        seconds = float(found[1]) * UNITS[found[2]] if found else -1.0
    else:
        seconds = wish - now
        seconds = max(seconds, 0.0) if seconds >= -SLACK else seconds
    if not 0.0 <= seconds <= MAX_PAUSE:
        given = repr(wish[:32]) if isinstance(wish, str) else f"{wish:.15g}"
        raise ValueError(
            f"keep_until is {given}; it must be a time in Unix seconds from now to {MAX_PAUSE:.0f} s ahead, or a "
            f"duration such as 30s, 5m or 24h"
        )
    return seconds


def cache_ttl(parts: Iterable[Any]) -> str | None:
    """The longest `ttl` among the `cache_control` marks of the Messages API in these objects; None without a mark.

    A mark without a `ttl` means 5 minutes, as in that API. Raises ValueError for an unknown one.
    """
    found = [mark for part in parts if isinstance(part, Mapping) and (mark := part.get("cache_control")) is not None]
    given = [mark.get("ttl", "5m") if isinstance(mark, Mapping) else mark for mark in found]
    for ttl in given:
        if not isinstance(ttl, str) or ttl not in LIVES:
            raise ValueError(f"cache_control.ttl is {str(ttl)[:32]!r}; it must be one of {', '.join(LIVES)}")
    return max(given, key=LIVES.__getitem__, default=None)
