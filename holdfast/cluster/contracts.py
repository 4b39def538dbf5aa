"""Contracts over several engines: which engines refused one, and what became of those whose engine ended."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from math import inf

from holdfast.cluster.replica import Replica
from holdfast.core.contract import TERMS, ContractRefused, Refusal, Term
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.stream import Stream
from holdfast.lm.types import SchedulerStats


class Refusals:
    """The engines that refused the contract of one request."""

    def __init__(self) -> None:
        self._refusals: dict[EngineClient, Refusal] = {}
        """The refusal of each engine. An engine that takes the place of an ended one was not asked."""

    def add(self, engine: EngineClient, refusal: Refusal) -> None:
        """Note that an engine refused the contract."""
        self._refusals[engine] = refusal

    def without(self, replicas: Collection[Replica]) -> list[Replica]:
        """The replicas that can still be asked. With a refusal, those with full queues cannot."""
        asked = self._refusals
        return [each for each in replicas if not asked or (each.engine not in asked and not each.full)]

    def clear(self) -> None:
        """Forget all refusals, because the request has another contract now."""
        self._refusals.clear()

    @property
    def error(self) -> ContractRefused:
        """The refusal of the engine that expects to accept the contract first. There must be one."""
        refusals = self._refusals.values()
        return ContractRefused(min(refusals, key=lambda each: (each.retry_after, each.predicted.ttft or inf)))


@dataclass(slots=True)
class ContractCounts:
    """Contracts whose outcome no single engine knows, counted since the server's start."""

    refused: int = 0
    """Number of requests whose contract no engine accepted."""
    kept: int = 0
    """Number of kept contracts that no engine promised any more, because the engine that did had ended."""
    broken: dict[Term, int] = field(default_factory=lambda: dict.fromkeys(TERMS, 0))
    """Number of broken ones among them, by the first broken term."""
    on_count: Callable[[str, str], None] = lambda outcome, term: None
    """Called for each of them with the outcome (kept, refused or broken) and the broken term; empty if none is."""

    def refuse(self) -> None:
        """Count a contract that no engine accepted."""
        self.refused += 1
        self.on_count("refused", "")

    def ended(self, stream: Stream) -> None:
        """Count the contract of an answer that has ended, unless an engine promised it to the end."""
        if not stream.contract or stream.request.contract:
            return
        if (term := stream.broken()) is None:
            self.kept += 1
            self.on_count("kept", "")
        else:
            self._break(term)

    def lost(self, stream: Stream) -> None:
        """Count the contract of a request that no engine continues: the tokens that are due never come."""
        if (term := stream.broken(at=inf)) is not None:
            self._break(term)

    def _break(self, term: Term) -> None:
        self.broken[term] += 1
        self.on_count("broken", term)

    def added_to(self, stats: SchedulerStats) -> SchedulerStats:
        """The sums of all engines' figures, with these counts.

        A request that one engine refuses and another accepts counts as accepted alone.
        """
        figures = {f"contracts_broken_{term}": count for term, count in self.broken.items()}
        figures["contracts_kept"] = self.kept
        sums = {name: getattr(stats, name) + count for name, count in figures.items()}
        return replace(stats, contracts_refused=self.refused, **sums)
