"""PartNews: what the planner's side of a part lets every rank that shares the model know, apart from plans."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartNews:
    """News for a part of a device. It arrives before every plan that is made after it."""
