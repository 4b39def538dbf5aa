"""Contracts over HTTP: the times that a request asks for, and the answer to one that is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.contract import MAX_CONTRACT, TERMS, Contract, Refusal
from holdfast.core.units import seconds_of_ms
from holdfast.server.protocol import ApiError, invalid

CONTRACT_REFUSED = "contract_refused"
"""Code of the error for a contract that the engine cannot keep."""
HEADERS = {term: f"x-holdfast-{term}-ms" for term in TERMS}
"""Header of each term, for clients that cannot add fields to the body. A field goes before its header."""


def header_fields(headers: Mapping[str, str]) -> dict[str, float]:
    """The body fields that a request's headers stand for. Raises ApiError for a header that is no time."""
    found = {}
    for term, name in HEADERS.items():
        if (text := headers.get(name)) is not None:
            found[f"{term}_ms"] = header_ms(name, text)
    return found


def header_ms(name: str, text: str) -> float:
    """The number of milliseconds in a header. Raises ApiError for anything but a time of a contract."""
    most = MAX_CONTRACT * 1000
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise invalid(f"{name} is {text[:64]!r}; it must be a number above 0 and at most {most:.0f}", name)
    return value


def contract_of(wanted: Any, default: Contract) -> Contract:
    """The contract that a request asks for: each term from its field, or else from the `default`."""
    given = {term: getattr(wanted, f"{term}_ms") for term in TERMS}
    own = {term: seconds_of_ms(time) for term, time in given.items() if time is not None}
    return replace(default, **own) if own else default


def contract_refused(refusal: Refusal) -> ApiError:
    """The error for a contract that cannot be kept, with the times that could be promised now."""
    predicted = {term: getattr(refusal.predicted, term) for term in TERMS}
    known = {f"{term}_ms": round(time * 1000, 3) for term, time in predicted.items() if time is not None}
    could = ", ".join(f"{name} {time:.0f}" for name, time in known.items())
    message = refusal.reason + (f"; now it could promise {could}" if could else "")
    seconds = refusal.retry_after if math.isfinite(refusal.retry_after) else None
    return ApiError(
        message, status=429, code=CONTRACT_REFUSED, retry_seconds=seconds, details={"predicted": known or None}
    )
