"""Endings: the pause after an answer by its text, and answers that replace earlier ones."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from holdfast.core.pause import Pause
from holdfast.engine.client.stream import Delta
from holdfast.server.formats.parts import CallBegin
from holdfast.server.formats.reader import AnswerReader
from holdfast.server.formats.registry import Reading
from holdfast.server.pauses import kind_after

MOST_ANSWERS = 4096
"""Number of recent answers whose ids are remembered, so that later requests may replace them."""


class Ending:
    """Watches one choice of an answer for the tools that it calls, and makes the note of the pause after it."""

    def __init__(self, reading: Reading, expected: float | None, keep: float | None, kind: str = "") -> None:
        """`expected` and `keep` are in seconds, as the client asks. `kind` overrides what the answer says."""
        self._reader: list[AnswerReader] = [reading.reader()] if reading.toolset is not None and not kind else []
        self._tools: list[str] = []
        self._expected, self._keep, self._kind = expected, keep, kind

    def read(self, delta: Delta) -> None:
        """Read the next delta. The last one has a finish reason."""
        for reader in self._reader:
            parts = reader.push(delta.text, last=delta.finish_reason is not None)
            self._tools += [part.name for part in parts if isinstance(part, CallBegin)]

    def pause(self) -> Pause:
        """Return the pause as far as it is known, now that the answer has ended."""
        until = None if self._keep is None else time.monotonic() + self._keep
        return Pause(self._kind or kind_after(self._tools), self._expected, until)


class Answered:
    """The recent answers by public id, and the latest one after each turn: a further one replaces it.

    Another tenant's answers are never found.
    """

    def __init__(self) -> None:
        self._engine_ids: OrderedDict[tuple[str, str], list[str]] = OrderedDict()
        """Request ids in the engine by tenant and id of the answer, the oldest first."""
        self._latest: OrderedDict[tuple[str, str], str] = OrderedDict()
        """Id of the latest answer by tenant and id of the turn before it."""

    def add(self, tenant: str, answer: str, request_id: str) -> None:
        """Note a request that the engine gets for an answer."""
        self._engine_ids.setdefault((tenant, answer), []).append(request_id)
        bound(self._engine_ids)

    def find(self, tenant: str, answer: str) -> Sequence[str]:
        """The requests that the engine got for an answer of this tenant; empty if it is not known."""
        return self._engine_ids.get((tenant, answer), ())

    def follow(self, tenant: str, parent: str, answer: str) -> str:
        """Note that an answer follows a turn. Returns the answer that it replaces; empty if there is none.

        An answer from which the conversation went on is not replaced: the two are branches, and both may go on.
        """
        before = self._latest.get((tenant, parent), "")
        self._latest[tenant, parent] = answer
        bound(self._latest)
        return "" if (tenant, before) in self._latest else before


def bound(kept: OrderedDict[Any, Any]) -> None:
    """Forget the oldest entries beyond MOST_ANSWERS."""
    while len(kept) > MOST_ANSWERS:
        kept.popitem(last=False)
