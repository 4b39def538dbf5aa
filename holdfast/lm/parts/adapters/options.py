"""Options of adapters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.core.config import CoreConfig, option
from holdfast.core.units import bytes_of_gb

DEFAULT_ADAPTERS = 8
"""Adapters that the device holds at a time, if adapters are served and no number is given."""


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(CoreConfig):
    """Which LoRA adapters are served, and the memory that they may take."""

    topic = "adapters"

    adapter: tuple[str, ...] = option(
        (),
        "LoRA adapter to serve, as NAME=PATH of a directory in PEFT's format; repeat it for several",
    )
    max_adapters: int = option(
        0,
        "adapters that the device holds at a time; any number may be known; default: 8 with --adapter or --tuning, "
        "else 0, off",
        between=(0, 1024),
    )
    max_adapter_rank: int = option(
        16, "largest rank of an adapter; each slot on the device has room for it", between=(4, 128)
    )
    adapter_host_gb: float = option(
        4.0, "host memory in GB for adapters; those used longest ago are read again", positive=True
    )
    dora: bool = option(
        False,
        "on a GPU, take DoRA adapters too; steps with adapters then add each product apart, which takes a little "
        "longer (a CPU always takes them)",
        executor="paged",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.deterministic and self.dora:
            raise ValueError(
                "deterministic is on, and dora is True: what a DoRA scales is rounded in other places if a step has "
                "adapters; drop one"
            )
        if self.equal_ranks > 1 and self.adapter_slots:
            raise ValueError(
                f"deterministic is on for {self.equal_ranks} ranks, and adapters are served: their products are not "
                "cut for ranks; leave out adapter, max_adapters and tuning, or tp and deterministic_ranks"
            )
        names = [name for name, _ in self.adapters]
        for given, name in zip(self.adapter, names, strict=True):
            if "=" not in given or not given.partition("=")[2]:
                raise ValueError(f"adapter is {given!r}; it must look like NAME=PATH")
            check_adapter_name(name)
            if name in self.served_model_name:
                raise ValueError(f"{name} is both an adapter and a served_model_name; give each a name of its own")
            if names.count(name) > 1:
                raise ValueError(f"adapter {name} is given twice; give each a name of its own")

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Name and directory of each adapter to serve."""
        return [(name, path) for name, _, path in (given.partition("=") for given in self.adapter)]

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that the device holds at a time."""
        return self.max_adapters or (DEFAULT_ADAPTERS if self.adapter else 0)

    @property
    def adapter_host_bytes(self) -> int:
        """Size in bytes of the host memory for adapters."""
        return bytes_of_gb(self.adapter_host_gb)


def check_adapter_name(name: str) -> None:
    """Raises ValueError for a name that an adapter cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", name):
        raise ValueError(
            f"the adapter's name is {name[:128]!r}; it must have 1 to 128 letters, digits, or . _ : / -, and begin "
            "with a letter or digit"
        )
