"""Adapters on a device: their slots, and the way there from disk over the host, which keeps the ones used last."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from holdfast.core.types import AdapterInfo
from holdfast.lm.copy_streams import CopyEvent, CopyStream
from holdfast.lm.execution.part import Allocated, DevicePart, PartExecutor
from holdfast.lm.models.adapters import AdapterSlots, PackedAdapter
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.peft_files import DecoderSizes, UnsupportedAdapter, check_effect, read_peft
from holdfast.lm.parts.adapters.inputs import AdapterInputs
from holdfast.lm.parts.adapters.options import AdapterOptions
from holdfast.lm.parts.adapters.values import AdapterPlan, AdapterResult
from holdfast.lm.types import EngineShape, PartPlan, PartResult, StepPlan

log = logging.getLogger("holdfast.engine")


class ReadAdapter(NamedTuple):
    """An adapter as read from its directory."""

    info: AdapterInfo
    directory: Path
    packed: PackedAdapter


class AdapterStore:
    """The adapters that an engine knows: the directory of each, and the ones used last, packed on the host.

    Methods may be called in any thread. An adapter that is not on the host is read again when it is needed.
    """

    def __init__(self, slots: AdapterSlots, base: DecoderSizes, *, host_bytes: int, pinned: bool) -> None:
        """Adapters of a model of these sizes. At most `host_bytes` of them are kept; `pinned`: in pinned memory."""
        self._slots, self._base, self._host_bytes, self._pinned = slots, base, host_bytes, pinned
        self._directories: dict[str, tuple[str, Path]] = {}
        """Name and directory of each adapter, by id."""
        self._packed: OrderedDict[str, PackedAdapter] = OrderedDict()
        """Packed adapters by id, the one used last at the end."""
        self._bytes = 0
        self._lock = threading.Lock()
        self.packing = threading.Lock()
        """Held while pinned memory is allocated, which must not happen while a graph is captured."""

    def read(self, name: str, directory: str | Path) -> ReadAdapter:
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

    def _read(self, name: str, directory: Path) -> ReadAdapter:
        weights = read_peft(directory, self._base, max_rank=self._slots.max_rank)
        check_effect(weights, self._slots.dtype)
        with self.packing:
            packed = self._slots.pack(weights, pinned=self._pinned)
        if packed.nbytes > self._host_bytes:
            raise UnsupportedAdapter(
                f"the adapter takes {packed.nbytes / 1e9:.3f} GB, and adapter_host_gb is {self._host_bytes / 1e9:g}"
            )
        if not bool(packed.numbers.isfinite().all()):
            raise UnsupportedAdapter(f"the adapter holds numbers that are infinite as {self._slots.dtype}")
        info = AdapterInfo(f"{name}@{weights.digest()[:16]}", name, weights.rank, packed.nbytes, weights.modules)
        return ReadAdapter(info, directory, packed)

    def register(self, read: ReadAdapter) -> AdapterInfo:
        """Keep an adapter that was read. Plans may load it from now on."""
        with self._lock:
            self._directories[read.info.id] = read.info.name, read.directory
            self._keep(read.info.id, read.packed)
        return read.info

    def forget(self, adapter: str) -> None:
        """Forget an adapter."""
        with self._lock:
            self._directories.pop(adapter, None)
            packed = self._packed.pop(adapter, None)
            self._bytes -= packed.nbytes if packed is not None else 0

    def kept(self, adapter: str) -> PackedAdapter | None:
        """An adapter that is on the host; None if it is not. It counts as used now."""
        with self._lock:
            packed = self._packed.get(adapter)
            if packed is not None:
                self._packed.move_to_end(adapter)
            return packed

    def fetch(self, adapter: str) -> PackedAdapter:
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

    def _keep(self, adapter: str, packed: PackedAdapter) -> None:
        """Keep an adapter as the one used last, and drop those that were not used for longest."""
        if adapter not in self._directories:  # it was forgotten meanwhile
            return
        before = self._packed.pop(adapter, None)
        self._bytes += packed.nbytes - (before.nbytes if before is not None else 0)
        self._packed[adapter] = packed
        while self._bytes > self._host_bytes:
            _, dropped = self._packed.popitem(last=False)
            self._bytes -= dropped.nbytes


@dataclass(slots=True)
class Load:
    """A planned copy of an adapter to a slot that is not known to be complete."""

    step: int
    slot: int
    adapter: str
    packed: Future[PackedAdapter]
    event: CopyEvent | None = None
    """The end of the copy, once it is begun."""


class AdapterExecutor(PartExecutor):
    """Begins the adapter loads of each plan, and reports which are complete.

    A copy runs on its own stream, after the computation begun so far, which may still read the slot's old contents. If
    the adapter has to be read from disk, a thread does that, and the copy begins with a later plan.
    """

    plans = (AdapterPlan,)

    def __init__(self, slots: AdapterSlots, store: AdapterStore, make_stream: Callable[[], CopyStream]) -> None:
        """`store` knows every adapter that a plan loads."""
        self.slots, self.store = slots, store
        self._stream = make_stream()
        self._reader = ThreadPoolExecutor(1, "holdfast-adapters")
        self._loads: deque[Load] = deque()
        self._begun = -1

    def before(self, plan: StepPlan) -> None:
        """Start a plan's loads. A plan that computes nothing waits until all loads are begun."""
        for slot, adapter in plan.part(AdapterPlan).loads:
            packed: Future[PackedAdapter] = Future()
            if (kept := self.store.kept(adapter)) is not None:
                packed.set_result(kept)
            else:
                packed = self._reader.submit(self.store.fetch, adapter)
            self._loads.append(Load(plan.step, slot, adapter, packed))
        self._copy(wait=not plan.computes)
        self._begun = plan.step

    def completed(self, *, wait: bool) -> Sequence[PartResult]:
        """Progress of the loads. With `wait`, block until all loads begun so far are complete.

        Raises the error that reading an adapter raised, if that was not an UnsupportedAdapter.
        """
        begun = self._begun
        lost: list[str] = []
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
        """Allocate the slots that a configuration asks for."""
        spec = model.spec
        self._device = spec.device
        self.slots = AdapterSlots(
            model.decoder,
            slots=config.adapter_slots,
            max_rank=config.max_adapter_rank,
            dtype=spec.dtype,
            device=spec.device,
        )
        host_bytes, pinned = config.adapter_host_bytes, spec.device.type == "cuda"
        self.store = AdapterStore(self.slots, model.decoder, host_bytes=host_bytes, pinned=pinned)

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes

    def inputs(self, max_tokens: int, samples: int) -> AdapterInputs:
        slots = self.slots
        return AdapterInputs(slots.layers, len(slots), max_tokens=max_tokens, samples=samples, device=self._device)

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

    def executor(self, allocated: Allocated) -> AdapterExecutor:
        return AdapterExecutor(self.slots, self.store, allocated.make_stream)


def adapter_device(model: Model, config: AdapterOptions) -> AdapterDevice:
    """The slots of adapters for a model. Raises ValueError for a model that takes no adapters."""
    if not isinstance(model, Decoder):
        raise ValueError(
            f"adapters need a native decoder, and {model.spec.architecture} runs by Transformers' code; leave out "
            f"adapter and max_adapters, or serve one of {', '.join(NATIVE)}"
        )
    name = model.spec.architecture
    if model.decoder.experts is not None:
        raise ValueError(
            f"adapters need a decoder without experts, and {name} is a mixture of experts; leave out adapter and "
            "max_adapters"
        )
    if not model.decoder.takes_adapters:
        raise ValueError(f"adapters are for layers like Llama's, and {name} has others; leave them out")
    return AdapterDevice(model, config)
