"""AdapterPool: which LoRA adapters are known, which are in a slot on the device, and who uses them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from holdfast.lm.parts.adapters.values import AdapterLoad


class AdapterPool:
    """The slots 0 to `slots - 1` of the device, each empty or with one adapter. Any number of adapters may be known.

        known ──load──▶ loading ──finish_loads──▶ idle ──pin──▶ pinned
          ▲                                       │ ▲             │
          └──────────── load of another ──────────┘ └────unpin────┘

    A pinned adapter keeps its slot: running sequences use it. A load takes an empty slot first, then that of the idle
    adapter that was used longest ago. Methods raise RuntimeError for a call that would break these states.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a pool of {slots} slots for adapters; it needs at least 1")
        self.num_slots = slots
        self.users: Counter[str] = Counter()
        """Number of requests of each known adapter that have not ended."""
        self.loads = 0
        """Number of loads so far."""
        self._slots: dict[str, int] = {}
        """The slot of each adapter that has one, also while it is being loaded."""
        self._empty = list(range(slots - 1, -1, -1))
        self._loading: dict[str, int] = {}
        """Number of the plan that loads each adapter."""
        self._pins: Counter[str] = Counter()
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Adapters in a slot that no sequence uses, the one used longest ago first."""

    def __contains__(self, adapter: object) -> bool:
        """Whether an adapter is known."""
        return adapter in self.users

    def __len__(self) -> int:
        """Number of known adapters."""
        return len(self.users)

    @property
    def resident(self) -> int:
        """Number of adapters in a slot, complete."""
        return len(self._slots) - len(self._loading)

    @property
    def loading(self) -> bool:
        """Whether any load is not complete."""
        return bool(self._loading)

    @property
    def pinned(self) -> dict[str, int]:
        """Adapters in use, with the number of sequences that use each."""
        return self._pins

    def add(self, adapter: str) -> None:
        """Make an adapter known. Does nothing for a known one."""
        self.users.setdefault(adapter, 0)

    def remove(self, adapter: str) -> None:
        """Forget an adapter that no request uses. Its slot becomes empty, once a load of it is complete."""
        if self.users[adapter]:
            raise RuntimeError(f"{self.users[adapter]} requests use adapter {adapter}")
        del self.users[adapter]
        if adapter in self._idle:
            self._drop(adapter)

    def slot(self, adapter: str) -> int | None:
        """The slot of an adapter that is complete; None for any other."""
        return None if adapter in self._loading else self._slots.get(adapter)

    def is_loading(self, adapter: str) -> bool:
        """Whether a load of this adapter is not complete."""
        return adapter in self._loading

    def pin(self, adapter: str) -> int:
        """Keep an adapter in its slot for one more sequence. Returns the slot."""
        slot = self.slot(adapter)
        if slot is None:
            raise RuntimeError(f"adapter {adapter} is not in a slot")
        self._idle.pop(adapter, None)
        self._pins[adapter] += 1
        return slot

    def unpin(self, adapter: str) -> None:
        """Undo one `pin`."""
        if not self._pins[adapter]:
            raise RuntimeError(f"adapter {adapter} is not pinned")
        self._pins[adapter] -= 1
        if not self._pins[adapter]:
            del self._pins[adapter]
            self._rest(adapter)

    def load(
        self, adapter: str, step: int, spared: Callable[[str], bool] = lambda adapter: False
    ) -> tuple[AdapterLoad, str | None] | None:
        """Begin to load an adapter with the plan of this number. Returns the load, and the adapter that loses its slot.

        None if no slot is empty or idle, apart from those of `spared` adapters.
        """
        if adapter in self._slots:
            raise RuntimeError(f"adapter {adapter} has a slot")
        loser = None
        if not self._empty:
            loser = next((idle for idle in self._idle if not spared(idle)), None)
            if loser is None:
                return None
            self._drop(loser)
        slot = self._slots[adapter] = self._empty.pop()
        self._loading[adapter] = step
        self.loads += 1
        return AdapterLoad(slot, adapter), loser

    def finish_loads(self, step: int) -> Iterator[tuple[str, int]]:
        """Count the loads of all plans up to this number as complete. Yields each adapter and its slot."""
        for adapter in [adapter for adapter, begun in self._loading.items() if begun <= step]:
            del self._loading[adapter]
            self._rest(adapter)
            if adapter in self._slots:
                yield adapter, self._slots[adapter]

    def fail_load(self, adapter: str) -> None:
        """Count the load of an adapter as failed: its slot is empty."""
        del self._loading[adapter]
        self._empty.append(self._slots.pop(adapter))

    def _rest(self, adapter: str) -> None:
        """Count an adapter in a slot as idle and just used; empty the slot if the adapter was removed."""
        self._idle[adapter] = None
        if adapter not in self.users:
            self._drop(adapter)

    def _drop(self, adapter: str) -> None:
        del self._idle[adapter]
        self._empty.append(self._slots.pop(adapter))
