"""Adapters on a device: their slots, and the way there from disk over the host, which keeps the ones used last."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from holdfast.core.types import AdapterInfo
from holdfast.lm.copy_streams import CopyEvent, CopyStream
from holdfast.lm.execution.part import Allocated, DevicePart, PartExecutor
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.adapters import AdapterSlots, PackedAdapter
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.peft_files import AdapterWeights, UnsupportedAdapter, check_effect, check_finite, read_peft
from holdfast.lm.models.shard import own_adapter, own_modules
from holdfast.lm.parts.adapters.inputs import AdapterInputs
from holdfast.lm.parts.adapters.options import AdapterOptions
from holdfast.lm.parts.adapters.values import AdapterForgotten, AdapterKnown, AdapterPlan, AdapterResult
from holdfast.lm.types import EngineShape, PartPlan, PartResult, StepPlan
from holdfast.lm.types.news import PartNews

log = logging.getLogger("holdfast.engine")


class Packed(Protocol):
    """An adapter on the host, ready to be copied to a slot."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        ...


PackedT = TypeVar("PackedT", bound=Packed)
WrittenT = TypeVar("WrittenT", bound=Packed, contravariant=True)


class Slots(Protocol[WrittenT]):
    """Places for adapters on a device."""

    def write(self, slot: int, adapter: WrittenT, /) -> None:
        """Copy an adapter into a slot, on the current stream."""
        ...

    def complete(self, slot: int, /) -> None:
        """Finish a slot that all devices have written. All of them call this in the same order."""
        ...


@dataclass(frozen=True, slots=True)
class ReadAdapter(Generic[PackedT]):
    """An adapter as read from its directory."""

    info: AdapterInfo
    directory: Path
    packed: PackedT


def whole(weights: AdapterWeights) -> AdapterWeights:
    """The part of an adapter that a device holds which has the whole model: all of it."""
    return weights


class AdapterShelf(ABC, Generic[PackedT]):
    """The adapters that an engine knows: the directory of each, and the ones used last, packed on the host.

    Methods may be called in any thread. An adapter that is not on the host is read again when it is needed.
    """

    def __init__(self, host_bytes: int, devices: int = 1) -> None:
        """At most `host_bytes` of adapters are kept, by all `devices` that share the model."""
        self._host_bytes, self._own_bytes = host_bytes, host_bytes // devices
        self._directories: dict[str, tuple[str, Path]] = {}
        """Name and directory of each adapter, by id."""
        self._packed: OrderedDict[str, PackedT] = OrderedDict()
        """Packed adapters by id, the one used last at the end."""
        self._bytes = 0
        self._lock = threading.Lock()
        self.packing = threading.Lock()
        """Held while pinned memory is allocated, which must not happen while a graph is captured."""

    def read(self, name: str, directory: str | Path) -> ReadAdapter[PackedT]:
        """Read an adapter and check it against the model. Its id names its content: `name@digest`.

        Raises UnsupportedAdapter (a ValueError), which names no directory, whatever goes wrong: files that somebody
        else made must not end an engine that serves.
        """
        try:
            return self._read(name, Path(directory))
        except UnsupportedAdapter:
            raise
        except Exception as error:
            log.exception("holdfast: adapter %s cannot be read", name)
            raise UnsupportedAdapter(f"it cannot be read: {type(error).__name__}; the server's log says more") from None

    @abstractmethod
    def _read(self, name: str, directory: Path) -> ReadAdapter[PackedT]:
        """Read an adapter and check it against the model. Raises UnsupportedAdapter."""

    def _check_size(self, size: int) -> None:
        """Raise UnsupportedAdapter for an adapter that the host has no room for."""
        if size > self._host_bytes:
            raise UnsupportedAdapter(
                f"the adapter takes {size / 1e9:.3f} GB, and adapter_host_gb is {self._host_bytes / 1e9:g}"
            )

    def register(self, read: ReadAdapter[PackedT]) -> AdapterInfo:
        """Keep an adapter that was read. Plans may load it from now on."""
        with self._lock:
            self._directories[read.info.id] = read.info.name, read.directory
            self._keep(read.info.id, read.packed)
        return read.info

    def expect(self, adapter: str, name: str, directory: str | Path) -> None:
        """Let plans load an adapter that another device of the model has read. It is read when it is needed."""
        with self._lock:
            self._directories[adapter] = name, Path(directory)

    def forget(self, adapter: str) -> None:
        """Forget an adapter."""
        with self._lock:
            self._directories.pop(adapter, None)
            packed = self._packed.pop(adapter, None)
            self._bytes -= packed.nbytes if packed is not None else 0

    def kept(self, adapter: str) -> PackedT | None:
        """An adapter that is on the host; None if it is not. It counts as used now."""
        with self._lock:
            packed = self._packed.get(adapter)
            if packed is not None:
                self._packed.move_to_end(adapter)
            return packed

    def fetch(self, adapter: str) -> PackedT:
        """An adapter, from the host or from its directory. Raises UnsupportedAdapter if neither has it."""
        if (packed := self.kept(adapter)) is not None:
            return packed
        with self._lock:
            known = self._directories.get(adapter)
        if known is None:
            raise UnsupportedAdapter(f"adapter {adapter} was forgotten")
        read = self.read(*known)
        if read.info.id != adapter:
            raise UnsupportedAdapter(f"the files of adapter {known[0]} have changed since it was loaded")
        with self._lock:
            self._keep(adapter, read.packed)
        return read.packed

    def _keep(self, adapter: str, packed: PackedT) -> None:
        """Keep an adapter as the one used last, and drop those that were not used for longest."""
        if adapter not in self._directories:  # it was forgotten meanwhile
            return
        before = self._packed.pop(adapter, None)
        self._bytes += packed.nbytes - (before.nbytes if before is not None else 0)
        self._packed[adapter] = packed
        while self._bytes > self._own_bytes:
            _, dropped = self._packed.popitem(last=False)
            self._bytes -= dropped.nbytes


class AdapterStore(AdapterShelf[PackedAdapter]):
    """The adapters of a native decoder."""

    def __init__(
        self,
        slots: AdapterSlots,
        base: Decoder,
        *,
        host_bytes: int,
        pinned: bool,
        own: Callable[[AdapterWeights], AdapterWeights] = whole,
        devices: int = 1,
    ) -> None:
        """Adapters of a model. At most `host_bytes` of them are kept; `pinned`: in pinned memory.

        `own` takes this device's part of an adapter, which the slots hold. `devices` share the model and `host_bytes`.
        All of them take or refuse the same adapters.
        """
        super().__init__(host_bytes, devices)
        self._slots, self._base, self._pinned, self._own = slots, base, pinned, own

    def _read(self, name: str, directory: Path) -> ReadAdapter[PackedAdapter]:
        weights = read_peft(directory, self._base.decoder, max_rank=self._slots.max_rank)
        check_finite(weights, self._slots.dtype)
        check_effect(weights, self._slots.dtype)
        if weights.has_magnitudes and not self._slots.takes_gains:
            raise UnsupportedAdapter(
                "use_dora is true, and the engine's slots have no room for what a DoRA scales; start it with dora, and "
                "without deterministic"
            )
        with self.packing:
            packed = self._slots.pack(self._own(weights), self._base.layers, pinned=self._pinned)
        size = packed.nbytes if self._own is whole else weights.elements * self._slots.dtype.itemsize
        self._check_size(size)
        if packed.gains is not None and not bool(packed.gains.isfinite().all()):
            raise UnsupportedAdapter("a row of the changed weights is 0, so no magnitude (DoRA) can scale it")
        info = AdapterInfo(f"{name}@{weights.digest()[:16]}", name, weights.rank, size, weights.modules)
        return ReadAdapter(info, directory, packed)


@dataclass(slots=True)
class Load(Generic[PackedT]):
    """A planned copy of an adapter to a slot that is not known to be complete."""

    step: int
    slot: int
    adapter: str
    packed: Future[PackedT]
    event: CopyEvent | None = None
    """The end of the copy, once it is begun."""


class AdapterExecutor(PartExecutor, Generic[PackedT]):
    """Begins the adapter loads of each plan, and reports which are complete.

    A copy runs on its own stream, after the computation begun so far, which may still read the slot's old contents. If
    the adapter has to be read from disk, a thread does that, and the copy begins with a later plan.
    """

    plans = (AdapterPlan,)

    def __init__(
        self, slots: Slots[PackedT], store: AdapterShelf[PackedT], make_stream: Callable[[], CopyStream]
    ) -> None:
        """`store` knows every adapter that a plan loads."""
        self.slots, self.store = slots, store
        self._stream = make_stream()
        self._reader = ThreadPoolExecutor(1, "holdfast-adapters")
        self._loads: deque[Load[PackedT]] = deque()
        self._begun = -1

    def before(self, plan: StepPlan) -> None:
        """Finish the plan's complete slots, and start its loads.

        A plan that computes nothing waits until all loads are begun.
        """
        own = plan.part(AdapterPlan)
        for slot in own.complete:
            self.slots.complete(slot)
        loads: list[Load[PackedT]] = []
        for slot, adapter in own.loads:
            packed: Future[PackedT] = Future()
            if (kept := self.store.kept(adapter)) is not None:
                packed.set_result(kept)
            else:
                packed = self._reader.submit(self.store.fetch, adapter)
            loads.append(Load(plan.step, slot, adapter, packed))
        self._loads.extend(loads)  # all at once: `completed` may run in another thread
        self._copy(wait=not plan.computes)
        self._begun = plan.step

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """Progress of the loads, if any was not complete. With `wait`, block until all begun so far are.

        Raises the error that reading an adapter raised, if that was not an UnsupportedAdapter.
        """
        begun = self._begun
        lost: list[str] = []
        if not self._loads:
            return ()
        while self._loads:
            load = self._loads[0]
            error = load.packed.exception() if load.packed.done() else None
            if error is not None and not isinstance(error, UnsupportedAdapter):
                raise error
            if error is None:
                if load.event is None or not (wait or load.event.done()):
                    return (AdapterResult(load.step - 1, tuple(lost)),)
                load.event.finish()
            else:
                lost.append(load.adapter)
            begun = max(begun, load.step)
            self._loads.popleft()
        return (AdapterResult(begun, tuple(lost)),)

    def idle(self) -> AbstractContextManager[object]:
        return self.store.packing

    def close(self) -> None:
        self._reader.shutdown(wait=True, cancel_futures=True)

    def _copy(self, *, wait: bool) -> None:
        """Begin the copies of adapters that are on the host. With `wait`, begin all, once the adapters are there."""
        for load in tuple(self._loads):
            if load.event is not None or not (wait or load.packed.done()) or load.packed.exception() is not None:
                continue
            self._stream.follow()
            load.event = self._stream.copy(partial(self.slots.write, load.slot, load.packed.result()))


class AdapterDevice(DevicePart):
    """The slots of adapters on a device, and the adapters that may be loaded into them."""

    def __init__(self, model: Decoder, config: AdapterOptions) -> None:
        """Allocate the slots that a configuration asks for, for the layers, heads and columns of this device."""
        spec, shard, ranks = model.spec, model.shard, config.layout.ranks
        self._device, pinned = spec.device, spec.device.type == "cuda"
        self._fixed = bool(spec.arithmetic)
        self.slots = AdapterSlots(
            adapted_modules(model.decoder) if ranks == 1 else own_modules(model.decoder, shard),
            slots=config.adapter_slots,
            max_rank=config.max_adapter_rank,
            dtype=spec.dtype,
            device=spec.device,
            dora=config.dora or (spec.device.type == "cpu" and not config.deterministic),
            group=model.group,
        )
        self.store = AdapterStore(
            self.slots,
            model,
            host_bytes=config.adapter_host_bytes,
            pinned=pinned,
            own=whole if ranks == 1 else partial(own_adapter, spec=model.decoder, shard=shard),
            devices=ranks,
        )

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def inputs(self, max_tokens: int, samples: int) -> AdapterInputs:
        slots = self.slots
        return AdapterInputs(
            slots.layers,
            len(slots),
            max_tokens=max_tokens,
            samples=samples,
            device=self._device,
            gains=slots.takes_gains,
            scaled=slots.scaled,
            fixed=self._fixed,
        )

    def widest(self, rows: int) -> Sequence[PartPlan]:
        return (AdapterPlan(slots=tuple(row % len(self.slots) for row in range(rows))),)

    @contextmanager
    def widened(self) -> Iterator[None]:
        self.slots.fill()
        try:
            yield
        finally:
            self.slots.clear()

    def shaped(self, shape: EngineShape) -> EngineShape:
        return replace(shape, adapter_slots=len(self.slots))

    def learn(self, news: PartNews) -> None:
        if isinstance(news, AdapterKnown):
            self.store.expect(news.adapter, news.name, news.directory)
        elif isinstance(news, AdapterForgotten):
            self.store.forget(news.adapter)

    def executor(self, allocated: Allocated) -> AdapterExecutor[PackedAdapter]:
        return AdapterExecutor(self.slots, self.store, allocated.make_stream)


def adapter_device(model: Model, config: AdapterOptions) -> AdapterDevice:
    """The slots of adapters for a model. Raises ValueError for a model that takes no adapters."""
    if not isinstance(model, Decoder):
        raise ValueError(
            f"adapters on a paged cache need a native decoder, and {model.spec.architecture} runs by Transformers' "
            f"code; set executor to padded, leave out adapter and max_adapters, or serve one of {', '.join(NATIVE)}"
        )
    return AdapterDevice(model, config)
