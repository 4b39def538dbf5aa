"""DefaultContracts: the contracts of requests that ask for none, as an option gives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.core.contract import NO_CONTRACT, TERMS, Contract
from holdfast.core.types import BATCH_CLASS
from holdfast.core.units import seconds_of


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
