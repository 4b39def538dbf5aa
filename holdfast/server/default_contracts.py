"""DefaultContracts: the contracts of requests that ask for none, as an option gives them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from holdfast.core.contract import NO_CONTRACT, TERMS, Contract
from holdfast.core.types import BATCH_CLASS
from holdfast.core.units import seconds_of

TENANT = "tenant:"
"""Beginning of an option for one tenant."""


@dataclass(frozen=True, slots=True)
class DefaultContracts:
    """The contracts of requests that ask for none, by tenant and by priority class."""

    everyone: Contract = NO_CONTRACT
    by_class: Mapping[int, Contract] = field(default_factory=dict)
    by_tenant: Mapping[str, Contract] = field(default_factory=dict)

    @classmethod
    def read(cls, options: tuple[str, ...]) -> DefaultContracts:
        """Read `--contract` options. Raises ValueError that names the value."""
        everyone, by_class, by_tenant = NO_CONTRACT, dict[int, Contract](), dict[str, Contract]()
        for option in options:
            whose, colon, terms = option.rpartition(":")
            contract = parse_contract(option, terms)
            tenant = whose.removeprefix(TENANT)
            if not colon:
                everyone = contract
            elif whose.startswith(TENANT) and tenant:
                by_tenant[tenant] = contract
            elif re.fullmatch(r"-?[0-9]{1,9}", whose):
                by_class[int(whose)] = contract
            else:
                raise ValueError(
                    f"contract is {option!r}; before the last colon stands a priority class, a whole number of at most "
                    f"9 digits, or {TENANT} and the name of a tenant"
                )
        return cls(everyone, by_class, by_tenant)

    def of(self, tenant: str, priority: int) -> Contract:
        """The contract of a request of a tenant and a class: the tenant's, or else that of its class.

        Requests of batches' classes have none unless their class is given one.
        """
        own = self.by_class.get(priority)
        if priority >= BATCH_CLASS:
            return own or NO_CONTRACT
        return self.by_tenant.get(tenant) or own or self.everyone


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
