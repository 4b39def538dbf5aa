"""Contracts over HTTP: the times that a request asks for, and the answer to one that is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from holdfast.core.contract import TERMS, Contract, Refusal
from holdfast.core.units import seconds_of_ms
from holdfast.server.protocol import ApiError

CONTRACT_REFUSED = "contract_refused"
"""Code of the error for a contract that the engine cannot keep."""


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
    details, final = {"predicted": known or None}, seconds is None
    return ApiError(message, status=429, code=CONTRACT_REFUSED, retry_seconds=seconds, final=final, details=details)
