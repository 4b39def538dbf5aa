"""Contracts over HTTP: the times that a request or an option asks for, and the answer to one that is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.contract import MAX_CONTRACT, NO_CONTRACT, TERMS, Contract, Refusal
from holdfast.core.types import BATCH_CLASS
from holdfast.core.units import seconds_of, seconds_of_ms
from holdfast.server.protocol import ApiError, invalid

CONTRACT_REFUSED = "contract_refused"
"""Code of the error for a contract that the engine cannot keep."""
HEADERS = {term: f"x-holdfast-{term}-ms" for term in TERMS}
"""Header of each term, for clients that cannot add fields to the body. A field goes before its header."""


@dataclass(frozen=True, slots=True)
class DefaultContracts:
    """The contracts of requests that ask for none, by priority class."""

    everyone: Contract = NO_CONTRACT
    by_class: Mapping[int, Contract] | None = None

    @classmethod
    def of(cls, options: tuple[str, ...]) -> DefaultContracts:
        """Read `--contract` options. Raises ValueError that names the value."""
        everyone, by_class = NO_CONTRACT, dict[int, Contract]()
        for option in options:
            number, colon, terms = option.rpartition(":")
            contract = parse_contract(option, terms)
            if not colon:
                everyone = contract
            elif number.removeprefix("-").isdecimal():
                by_class[int(number)] = contract
            else:
                raise ValueError(f"contract is {option!r}; before the colon stands a priority class, a whole number")
        return cls(everyone, by_class)

    def of_class(self, priority: int) -> Contract:
        """The contract of a request of this class. Requests of batches' classes have none unless one is given."""
        given = (self.by_class or {}).get(priority)
        return given or (self.everyone if priority < BATCH_CLASS else NO_CONTRACT)


def parse_contract(option: str, terms: str) -> Contract:
    """Read a contract like `ttft=500ms,tbt=50ms,complete=20s`. Raises ValueError that names the option's value."""
    contract = NO_CONTRACT
    for pair in terms.split(","):
        term, _, time = pair.strip().partition("=")
        if term not in TERMS:
            raise ValueError(f"contract is {option!r}; it must look like ttft=500ms,tbt=50ms,complete=20s")
        try:
            contract = replace(contract, **{term: seconds_of(time)})
        except ValueError as error:
            raise ValueError(f"contract is {option!r}: {error}") from None
    return contract


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
