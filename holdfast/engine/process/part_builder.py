"""PartBuilder: the steps by which one part joins an engine. EXCLUSIONS: which parts exclude each other."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

from holdfast.core.stages import Stages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.handler import Handler, Refusal
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.ranks import AnyRanks
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.models.base import Model
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.parts.planning import Planning
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.part import Part
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import EngineShape, LanguageDevice, StepPlan, StepResult
from holdfast.loop.contracts import Clock, Observer

if TYPE_CHECKING:
    from holdfast.lm.padded.device import PaddedDevice  # it imports Transformers, which takes a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How to build an engine and whom it serves, besides its configuration."""

    stages: Stages
    """Records when each stage of the start begins and ends."""
    measure: bool = False
    """Measure the cost profile in full."""
    priced: bool = False
    """Find the cost profile even if the engine needs none."""
    on_progress: Callable[[str], None] = lambda stage: None
    """Gets the name of each stage, for people."""
    chunk_secret: bytes = b""
    """Shared secret of engines that move blocks between them. Empty: no other engine knows this one's."""
    ledger: str = ""
    """Path of the page in which the engine reports its work to applications on its device; empty: there are none."""
    wake: Callable[[], None] = lambda: None
    """Ends a wait of the loop's thread. Called in any thread."""


@dataclass(frozen=True, slots=True)
class Site:
    """Resources that all parts of one engine are built over: its configuration, and its model on a device."""

    config: EngineConfig
    checkpoint: Checkpoint
    device: LanguageDevice
    reason: str
    """Why this executor was chosen, and what it does with the model, in words that can follow "because"."""
    ranks: AnyRanks
    order: Order
    clock: Clock

    @property
    def paged(self) -> PagedDevice:
        """The device, if it is a single one with a paged cache. Raises TypeError for another."""
        if not isinstance(self.device, PagedDevice):
            raise TypeError(f"the device is a {type(self.device).__name__}, not a PagedDevice")
        return self.device

    @property
    def blocks(self) -> PagedDevice | ManyDevice:
        """The device, if it has a paged cache. Raises TypeError for one of padded rows."""
        if not isinstance(self.device, PagedDevice | ManyDevice):
            raise TypeError(f"the device is a {type(self.device).__name__}, which keeps no blocks")
        return self.device

    @property
    def rows(self) -> PaddedDevice:
        """The device, if it has padded rows. Raises TypeError for one with a paged cache."""
        if isinstance(self.device, PagedDevice | ManyDevice):
            raise TypeError(f"the device is a {type(self.device).__name__}, which has a paged cache")
        return cast("PaddedDevice", self.device)

    @property
    def decoder(self) -> Decoder:
        """The model, if it is a native decoder. Raises TypeError for another."""
        if not isinstance(self.blocks.model, Decoder):
            raise TypeError(f"the model is a {type(self.blocks.model).__name__}, not a Decoder")
        return self.blocks.model


@dataclass(slots=True)
class Served:
    """Results of the parts so far, for a loop that is about to run."""

    scheduler: Scheduler
    shape: EngineShape
    handlers: list[Handler] = field(default_factory=list)


class PartBuilder(ABC):
    """Builds one part of an engine. Its methods are called in the order in which they stand here, once each.

    A builder overrides the methods that its part needs.
    """

    name: ClassVar[str]
    """The part's name in EXCLUSIONS."""
    is_optional: ClassVar[bool] = False
    """Whether an engine that cannot have the part serves without it."""
    refusals: ClassVar[Mapping[type, Refusal]] = {}
    """Functions that answer the part's messages in an engine without a handler for them, by type of message."""

    @staticmethod
    def wanted(config: EngineConfig) -> bool:
        """Whether a configuration asks for the part."""
        return True

    @staticmethod
    def device_parts(
        config: EngineConfig, order: Order, model: Model, parts: Sequence[DevicePart]
    ) -> Sequence[DevicePart]:
        """The part's further state on the device of the engine's process.

        Its work comes before that of `parts`, which all ranks have. The weights are loaded. Other ranks have what
        `engine.ranks.paged.make_rank` gives them.
        """
        return ()

    def __init__(self, site: Site) -> None:
        """Called when the device has its parts, and there is no cache yet. Raises ValueError."""
        self.site = site

    def allocated(self, shape: EngineShape) -> EngineShape:
        """Called when the memory is allocated. Returns the engine's shape with the part's additions."""
        return shape

    def is_priced(self, shape: EngineShape) -> bool:
        """Whether the part needs the device's cost profile."""
        return False

    def planners(self, planning: Planning) -> Iterable[Part]:
        """The planner's side of the part, if it is made over the device. `lm.parts.standard` makes all others."""
        return ()

    def policy(self, policy: Policy, planning: Planning) -> Policy:
        """The policy, extended by work that the part plans. All parts have their planner's sides by then."""
        return policy

    def observers(self, served: Served) -> Iterable[Observer[StepPlan, StepResult]]:
        """Observers of every step."""
        return ()

    def handlers(self, served: Served) -> Iterable[Handler]:
        """The handlers of the part's messages. The handlers of earlier parts are in `served`."""
        return ()

    def refresh(self) -> None:  # noqa: B027
        """Called when the planner is about to plan."""

    def halted(self) -> bool:
        """Whether no step may begin now."""
        return False

    def close(self) -> None:  # noqa: B027
        """Called when the loop is closed. The executor is released next."""

    def facts(self) -> Mapping[str, Any]:
        """The part's fields of EngineInfo."""
        return {}


class Exclusion(NamedTuple):
    """A part of an engine, and another part or a property that it cannot be combined with."""

    part: str
    other: str
    """Another part or a property of the engine, one of those of `properties_of`."""
    reason: str
    """The reason, for people."""


EXCLUSIONS = (
    Exclusion(
        "tuning",
        "no native decoder",
        "tuning needs a native decoder over a paged cache, and this model has none; leave it out",
    ),
    Exclusion(
        "tuning", "layers of several sizes", "a model whose layers differ in heads cannot be tuned; leave tuning out"
    ),
    Exclusion(
        "tuning",
        "recurrent layers on several devices",
        "a model with recurrent layers is tuned on one device; leave out tp and pp, or tuning",
    ),
    Exclusion(
        "tuning",
        "layers of experts alone",
        "a model with layers that are experts alone cannot be tuned; leave tuning out",
    ),
    Exclusion("tuning", "latent attention", "a model with latent attention cannot be tuned; leave tuning out"),
    Exclusion(
        "adapters",
        "latent attention",
        "adapters of a model with latent attention run on padded rows: set executor to padded, or leave it out",
    ),
    Exclusion("sleep", "padded rows", "the memory of padded rows cannot be returned; leave out enable_sleep_mode"),
    Exclusion(
        "sleep",
        "recurrent layers",
        "enable_sleep_mode is on, and the states of recurrent layers cannot be returned; leave it out",
    ),
    Exclusion("moves", "no address", "chunk_host is not set"),
    Exclusion("moves", "padded rows", "padded rows hold no blocks that could move"),
    Exclusion("moves", "no host tier", "there is no host tier, through which blocks move"),
    Exclusion(
        "lower tiers",
        "no host tier",
        "a disk or remote cache lies behind the host tier, and there is none; set host_cache_gb",
    ),
    Exclusion(
        "lower tiers",
        "no kept states",
        "disk_cache_dir is set, and no state of this model serves a later prompt: nothing would be read; leave it out",
    ),
)
"""Combinations that are refused, each with its reason. The first that applies is given.

Options that exclude each other, whatever the model and the device, are refused by `EngineConfig`.
"""


def properties_of(site: Site, *, host_tier: bool = True) -> set[str]:
    """The properties of an engine that parts may exclude. `host_tier`: whether it has one, as far as is known."""
    device = site.device
    found = set() if host_tier else {"no host tier"}
    if not site.config.chunk_host:
        found.add("no address")
    if not isinstance(device, PagedDevice | ManyDevice):
        found.add("padded rows")
        if not site.rows.abilities.serves_others:
            found.add("no kept states")
    if not isinstance(device, PagedDevice | ManyDevice) or not isinstance(device.model, Decoder):
        found.add("no native decoder")
    else:
        found |= properties_of_decoder(device.model.decoder)
        if site.config.layout.ranks > 1 and any(device.model.decoder.recurrent):
            found.add("recurrent layers on several devices")
    return found


def properties_of_decoder(spec: DecoderSpec) -> set[str]:
    """The properties of a native decoder that parts may exclude."""
    found = {
        "layers of several sizes": bool(spec.layer_specs),
        "latent attention": bool(spec.latent),
        "layers of experts alone": bool(spec.mlps and spec.experts),
        "recurrent layers": any(spec.recurrent),
    }
    return {name for name, has in found.items() if has}


def excluded(parts: Collection[str], site: Site, *, host_tier: bool = True) -> str:
    """Why an engine cannot have these parts; empty if it can."""
    return excluded_with(parts, properties_of(site, host_tier=host_tier))


def excluded_with(parts: Collection[str], properties: Collection[str]) -> str:
    """Why an engine with these properties cannot have these parts; empty if it can."""
    for exclusion in EXCLUSIONS:
        if exclusion.part in parts and exclusion.other in properties:
            return exclusion.reason
    return ""


def refuse_excluded(parts: Iterable[type[PartBuilder]], site: Site, *, host_tier: bool = True) -> None:
    """Raise ValueError with the reason if an engine cannot have one of these parts."""
    names = {part.name for part in parts if not part.is_optional}
    if reason := excluded(names, site, host_tier=host_tier):
        raise ValueError(reason)
