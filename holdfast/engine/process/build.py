"""The engine's composition root, where the kinds of work meet: from a configuration to a loop and its handlers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from holdfast.core.config import ROW_SCHEDULERS, ExecutorName, changed
from holdfast.core.cost import CostModel
from holdfast.core.stages import Stages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.messages import EngineInfo
from holdfast.engine.process.handler import Found, Handler, RefusalHandler, find
from holdfast.engine.process.in_service import in_service
from holdfast.engine.process.part_builder import (
    Order,
    PartBuilder,
    Served,
    Site,
    excluded_with,
    properties_of_decoder,
    refuse_excluded,
)
from holdfast.engine.process.parts.adapters import AdapterBuilder
from holdfast.engine.process.parts.contracts import ContractBuilder
from holdfast.engine.process.parts.grammars import GrammarBuilder
from holdfast.engine.process.parts.host_tier import HostTierBuilder
from holdfast.engine.process.parts.moves import MoveBuilder
from holdfast.engine.process.parts.neighbours import NeighbourBuilder
from holdfast.engine.process.parts.pace import PaceBuilder
from holdfast.engine.process.parts.pauses import PauseBuilder
from holdfast.engine.process.parts.ranks import RankBuilder
from holdfast.engine.process.parts.sleep import SleepBuilder
from holdfast.engine.process.parts.speculation import SpeculationBuilder
from holdfast.engine.process.parts.states import StateBuilder
from holdfast.engine.process.parts.tiers import TierBuilder
from holdfast.engine.process.parts.traces import TraceBuilder
from holdfast.engine.process.parts.tuning import TuningBuilder
from holdfast.engine.profiles import CostProfile, Extent, StoredProfiles, keep
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.messages import Loaded, StartRank
from holdfast.engine.ranks.paged import (
    MoreParts,
    check_layout,
    device_of,
    grammar_compiler,
    make_paged_device,
    make_rank,
    no_more,
    threads_of,
    with_sequences,
)
from holdfast.engine.ranks.ranks import NO_RANKS, AnyRanks, Ranks, start_ranks
from holdfast.lm.choice import (
    compose_scheduler,
    describe_budget,
    describe_target,
    make_planning,
    make_scheduler,
    steps_in_flight,
)  # fmt: skip
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.cost_profile import estimate_cost, measure_cost
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.kernels.integer.library import library
from holdfast.lm.memory.retention import EVICTIONS
from holdfast.lm.models.base import Model
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, MisfitCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.hf import NotPaged
from holdfast.lm.models.loader import decoder_spec
from holdfast.lm.padded.cost_profile import estimate_padded_cost, measure_padded_cost
from holdfast.lm.padded.loading import load_unmodified
from holdfast.lm.padded.row_parts import RowPart
from holdfast.lm.parts.grammars.device import GrammarDevice
from holdfast.lm.parts.planning import Planning
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.scheduler.builder import Policy
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.types import (
    DEFAULT_TOKEN_BUDGET,
    DeviceExecutor,
    EngineShape,
    LanguageExecutor,
    LanguageLoop,
    MemoryMeasurement,
)
from holdfast.loop.contracts import Clock
from holdfast.loop.loop import Loop

if TYPE_CHECKING:
    from holdfast.lm.padded.device import PaddedDevice
    from holdfast.lm.padded.driver import Driver


clock = time.monotonic
log = logging.getLogger("holdfast.engine")

MEASURING = "measuring the device's pace, which takes a minute or two"
PARTS: tuple[type[PartBuilder], ...] = (
    HostTierBuilder,
    SleepBuilder,
    ContractBuilder,
    SpeculationBuilder,
    GrammarBuilder,
    AdapterBuilder,
    TuningBuilder,
    StateBuilder,
    TierBuilder,
    MoveBuilder,
    PauseBuilder,
    PaceBuilder,
    TraceBuilder,
    NeighbourBuilder,
    RankBuilder,
)
"""The parts that an engine may have, in the order in which they are built, are asked for answers, and see steps.

Tuning follows adapters, which it serves when a job is complete. Tiers follow the host tier, which they read. Sleep
comes before the parts that hold requests for a while, since it refuses them.
"""


class Engine(NamedTuple):
    """An engine that is ready to serve."""

    loop: LanguageLoop
    info: EngineInfo
    handlers: tuple[Handler, ...]
    """Answer the client's messages. They are stopped before the loop is closed, and closed after it."""
    ranks: AnyRanks
    """The other processes of the engine. Closing the loop ends them."""

    def handler(self, kind: type[Found]) -> Found:
        """The handler of a kind. Raises LookupError if the engine has none."""
        return find(self.handlers, kind)

    def close(self) -> None:
        """End all that the engine does. Steps in flight are abandoned."""
        with ExitStack() as closing:
            for handler in self.handlers:
                closing.callback(handler.close)
            closing.callback(self.loop.close)
            for handler in self.handlers:
                closing.callback(handler.stop)


def build(
    config: EngineConfig,
    *,
    stages: Stages | None = None,
    measure: bool = False,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> tuple[LanguageLoop, EngineInfo]:
    """`build_engine` for callers that run the loop themselves and load no adapters: the loop, and its sizes."""
    engine = build_engine(config, stages=stages, measure=measure, on_progress=on_progress)
    return engine.loop, engine.info


def build_engine(
    config: EngineConfig,
    *,
    stages: Stages | None = None,
    ranks: AnyRanks | None = None,
    parts: Sequence[type[PartBuilder]] = PARTS,
    **how: Any,
) -> Engine:
    """Load the model, measure the device, allocate its memory, and build the loop and the handlers over it.

    `stages` notes when each stage begins and ends; by default they count from this call. `ranks` are the processes of a
    configuration with several devices, if they have been started (`start_ranks`); they end if this fails. `parts` are
    those that the engine may have, in their order. `how` are fields of `Order`. Raises ValueError
    (UnsupportedCheckpoint among them), MemoryError and RankFailure with a reason for people.
    """
    order = Order(stages=stages or Stages(clock(), clock), **how)
    started = [ranks] if ranks else []
    try:
        checkpoint = Checkpoint.of(config)
        if config.layout.ranks > 1:
            check_layout(config, checkpoint)
        elif config.threads:
            torch.set_num_threads(config.threads)
        config = with_sequences(config, checkpoint)
        if not started:
            started.append(start_ranks(config))
        return compose(load(config, checkpoint, started[0], order, parts), parts)
    except BaseException:
        for each in started:
            each.close(at_once=True)
        raise


def load(
    config: EngineConfig, checkpoint: Checkpoint, ranks: AnyRanks, order: Order, parts: Sequence[type[PartBuilder]]
) -> Site:
    """The model on its device, with what these parts keep there."""
    order.on_progress(f"loading {checkpoint.name}")
    more = partial(device_parts, parts, config, order)
    with order.stages.stage("weights"):
        refusal = not_paged(config, checkpoint, parts)
        device, reason = choose_device(config, checkpoint, order.stages, ranks, more, refusal)
    if isinstance(device, PagedDevice | ManyDevice):
        return Site(config, checkpoint, device, reason, ranks, order, clock)
    return Site(config, checkpoint, device, f"{reason}; {on_rows(config, device)}", ranks, order, clock)


def not_paged(config: EngineConfig, checkpoint: Checkpoint, parts: Sequence[type[PartBuilder]]) -> str:
    """Why a native decoder does not run on the paged executor with this configuration; else empty.

    Parts that an engine can do without do not count.
    """
    try:
        properties = properties_of_decoder(decoder_spec(checkpoint.directory))
    except UnsupportedCheckpoint:  # another executor may run it
        return ""
    wanted = {part.name for part in parts if part.wanted(config) and not part.is_optional}
    return excluded_with(wanted, properties)


def device_parts(
    parts: Sequence[type[PartBuilder]],
    config: EngineConfig,
    order: Order,
    model: Model,
    of_ranks: Sequence[DevicePart],
) -> Sequence[DevicePart]:
    """The wanted parts' state on a device in addition to the parts of every rank, in the order of `parts`."""
    wanted = [part for part in parts if part.wanted(config)]
    return [each for part in wanted for each in part.device_parts(config, order, model, of_ranks)]


def compose(site: Site, parts: Sequence[type[PartBuilder]]) -> Engine:
    """Build the wanted parts over a model on its device, and the loop over them."""
    config = site.config
    wanted = [part for part in parts if part.wanted(config)]
    refuse_excluded(wanted, site)
    builders = [part(site) for part in wanted]
    memory, shape = allocate(site, builders)
    pace = pace_of(config, site.device.kind, memory.device, shape.executor)
    on_cpu = site.device.kind == "cpu"
    steps_library = library_of(site.device.kind, shape.executor, present=on_cpu and bool(library()))
    stored = StoredProfiles(site.checkpoint.directory, site.device.precision, pace, steps_library)
    profiles = find_profiles(site, shape, stored, builders)
    cost = next((profile.cost for _, profile in profiles), None)
    planning = make_planning(config, shape, cost, stages=config.pp, now=clock())
    served = Served(schedule(planning, builders), shape)
    for builder in builders:
        served.handlers.extend(builder.handlers(served))
    served.handlers.append(refusing(parts, served.handlers))
    loop = make_loop(site, served, builders, partial(keep_corrected, profiles, planning.policy))
    if too_low := describe_target(config, cost, contracts=config.contracts != "off"):
        log.warning("holdfast: %s", too_low)
    note = describe_budget(config, shape, cost) or too_low  # a target excludes a fixed budget
    profile_path = next((str(path) for path, _ in profiles if path.is_file()), "")
    info = describe(site, memory, shape, builders, profile_path, note)
    return Engine(loop, info, tuple(served.handlers), site.ranks)


def schedule(planning: Planning, builders: Sequence[PartBuilder]) -> Scheduler:
    """The scheduler with the planner's sides of all parts: first those that builders make over the device."""
    parts = [*(part for builder in builders for part in builder.planners(planning)), *standard_parts(planning)]
    policy = planning.policy
    for builder in builders:
        policy = builder.policy(policy, planning)
    return compose_scheduler(planning, policy, parts)


def refusing(parts: Sequence[type[PartBuilder]], handlers: Sequence[Handler]) -> RefusalHandler:
    """The handler of the messages of parts that none of these handlers receives."""
    received = {kind for handler in handlers for kind in handler.receives}
    refusals = {kind: answers for part in parts for kind, answers in part.refusals.items()}
    return RefusalHandler({kind: answers for kind, answers in refusals.items() if kind not in received})


def allocate(site: Site, builders: Sequence[PartBuilder]) -> tuple[MemoryMeasurement, EngineShape]:
    """Measure the memory of a step. In the rest, allocate the cache of both tiers and the graphs of steps."""
    device, order = site.device, site.order
    if device.captures:
        order.on_progress("compiling kernels")
        with order.stages.stage("kernels"):
            device.compile()
    order.on_progress("measuring memory")
    with order.stages.stage("memory"):
        memory = device.measure()
    if device.captures:
        order.on_progress("capturing graphs")
    shape = device.allocate(memory)
    if isinstance(device, PagedDevice | ManyDevice):
        shape = replace(shape, block_bytes=device.block_bytes)
    for builder in builders:
        shape = builder.allocated(shape)
    return memory, shape


def make_loop(site: Site, served: Served, builders: Sequence[PartBuilder], keep: Callable[[], None]) -> LanguageLoop:
    """The loop over a scheduler and the device's executor. `keep` is called first when it is closed."""
    config, executor = site.config, site.device.executor
    observers = [observer for builder in builders for observer in builder.observers(served)]
    refreshing = [builder.refresh for builder in builders if type(builder).refresh is not PartBuilder.refresh]
    halting = [builder.halted for builder in builders if type(builder).halted is not PartBuilder.halted]
    closing = [keep, *(builder.close for builder in builders)]
    return Loop(
        served.scheduler,
        executor,
        steps_in_flight(config, config.pp),
        clock,
        partial(call_all, refreshing),
        partial(close_all, closing),
        executor.prepare,
        partial(may_pause, executor, served.scheduler, clock),
        observers,
        lambda: any(halted() for halted in halting),
    )


def may_pause(executor: DeviceExecutor, scheduler: Scheduler, clock: Clock) -> bool:
    """Whether a pause of all streams is worth what the executor would prepare in it, and makes no token late."""
    seconds = executor.due
    return seconds > 0 and scheduler.pause(seconds, clock())


def call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call these, one after the other."""
    for call in calls:
        call()


def close_all(calls: Sequence[Callable[[], None]]) -> None:
    """Call these, one after the other, each even if one before it fails."""
    with ExitStack() as closing:
        for call in reversed(calls):
            closing.callback(call)


def describe(
    site: Site,
    memory: MemoryMeasurement,
    shape: EngineShape,
    builders: Sequence[PartBuilder],
    profile_path: str,
    budget_note: str,
) -> EngineInfo:
    """The engine as its client sees it."""
    config, facts = site.config, dict[str, Any]()
    for builder in builders:
        facts.update(builder.facts())
    return EngineInfo(
        model=shape.model,
        precision=shape.precision,
        executor=shape.executor,
        executor_reason=site.reason,
        memory=memory,
        num_blocks=shape.num_blocks,
        num_host_blocks=shape.num_host_blocks,
        block_size=config.block_size if shape.executor == "paged" else 1,
        token_budget=shape.max_step_tokens,
        max_model_len=shape.max_model_len,
        max_sequences=config.most_sequences,
        max_waiting=config.max_waiting,
        vocab_size=shape.vocab_size,
        profile_path=profile_path,
        budget_note=budget_note,
        started_in=site.order.stages.elapsed(),
        stages=tuple(site.order.stages.done),
        adapter_slots=shape.adapter_slots,
        gives_hidden=shape.gives_hidden,
        tp=config.tp,
        pp=config.pp,
        **facts,
    )


def on_rows(config: EngineConfig, device: PaddedDevice) -> str:
    """How padded rows run the model, in words, and which expected features they lack."""
    said = [device.abilities.sentence]
    if config.has_target and not device.abilities.chunks:
        said.append("the TBT target does not bind prompts, which the model cannot compute in chunks")
    return "; ".join([*said, *([device.model.shortened] if device.model.shortened else [])])


class Choice(NamedTuple):
    """A model on the device that its executor needs."""

    device: PagedDevice | PaddedDevice | ManyDevice
    reason: str
    """Why it is this executor, in words that can follow "because"."""


def choose_device(
    config: EngineConfig,
    checkpoint: Checkpoint,
    stages: Stages,
    ranks: AnyRanks = NO_RANKS,
    more: MoreParts = no_more,
    refusal: str = "",
) -> Choice:
    """The model on its device, before there is a cache: paged if it can be, else padded, or as `executor` says.

    `refusal` is a known reason why it cannot be paged; empty: none is known. With the other `ranks` it is on all their
    devices. Raises UnsupportedCheckpoint with both reasons if neither can run it, ValueError for an option that the
    executor does not read, and MemoryError.
    """
    if isinstance(ranks, Ranks):
        return make_many_device(config, ranks, stages, more)
    if config.executor == "padded":
        return Choice(make_padded_device(config, checkpoint, stages), "executor is padded")
    if config.executor == "auto" and config.scheduler in ROW_SCHEDULERS:
        reason = f"scheduler is {config.scheduler}, which plans padded rows"
        return Choice(make_padded_device(config, checkpoint, stages), reason)
    try:
        if refusal:
            raise UnsupportedCheckpoint(refusal)
        return Choice(*make_paged_device(config, checkpoint, stages, more=more))
    except UnsupportedCheckpoint as error:
        if config.executor == "paged" or isinstance(error, DamagedCheckpoint):
            raise
        unpaged = error.with_traceback(None)  # its frames hold tensors
    for name, value in changed(config, executor="paged"):
        raise UnsupportedCheckpoint(f"{unpaged}; padded rows cannot run it with {name} {value}") from None
    try:
        module = unpaged.module if isinstance(unpaged, NotPaged) else None
        device = make_padded_device(config, checkpoint, stages, module=module)
    except UnsupportedCheckpoint as error:
        if str(error) == str(unpaged):
            raise
        if isinstance(error, MisfitCheckpoint) and isinstance(unpaged, MisfitCheckpoint):
            raise unpaged from None
        raise UnsupportedCheckpoint(f"{unpaged}; on padded rows: {error}") from error
    return Choice(device, str(unpaged))


def make_many_device(config: EngineConfig, ranks: Ranks, stages: Stages, more: MoreParts = no_more) -> Choice:
    """The model on the devices of all ranks. Raises RankFailure, naming the rank."""
    torch.set_num_threads(threads_of(config))
    own, answers = ranks.together(
        StartRank(config, ranks.meeting), partial(make_rank, config, 0, ranks.meeting, stages, more=more)
    )
    ranks.met()
    loaded = [answer for answer in answers if isinstance(answer, Loaded)]
    return Choice(ManyDevice(own.device, ranks, loaded), own.reason)


def make_padded_device(
    config: EngineConfig, checkpoint: Checkpoint, stages: Stages, *, module: Any = None
) -> PaddedDevice:
    """The model as Transformers has it, for padded rows. `module` is one that was loaded for a paged cache."""
    if find_spec("transformers") is None:
        raise UnsupportedCheckpoint("padded rows need Transformers: pip install 'holdfast[hf]'")
    from holdfast.lm.padded.device import PaddedDevice  # it imports Transformers, which takes a second

    model = load_unmodified(
        checkpoint.directory,
        device=device_of(config),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        module=module,
    )
    compiler = grammar_compiler(checkpoint, model.vocab_size, model.eos_token_ids)
    parts = partial(row_parts, config, compiler)
    return PaddedDevice(model, config, name=checkpoint.name, stages=stages, parts=parts)


def row_parts(config: EngineConfig, compiler: GrammarCompiler, driver: Driver) -> Sequence[RowPart]:
    """The parts of steps of padded rows. Raises ValueError for adapters of a model that can have none."""
    from holdfast.lm.parts.adapters.rows import RowAdapters  # it imports Transformers

    adapters = [RowAdapters(driver, config)] if config.adapter_slots else []
    return (*adapters, GrammarDevice(compiler))


def pace_of(config: EngineConfig, kind: str, name: str, executor: ExecutorName = "paged") -> str:
    """The device's name, with what changes how fast steps run on a device of this kind."""
    changes = [name] if executor == "paged" else [name, "padded rows"]
    if kind == "cuda":
        changes += [] if config.attention_backend in ("auto", "holdfast") else [config.attention_backend]
        changes += [] if config.cuda_graphs else ["no graphs"]
    elif executor == "paged" and config.attention_backend == "torch":
        changes.append("torch")  # whole steps of the library are left out
    return ", ".join(changes)


def library_of(kind: str, executor: ExecutorName, *, present: bool) -> str:
    """Whether steps use the library in C, in words; empty where they never do: on GPUs and on padded rows."""
    if kind != "cpu" or executor != "paged":
        return ""
    return "library in C" if present else "no library in C"


Priced = tuple[Path, CostProfile]
"""A cost profile, and the file where it is stored."""


def find_profiles(
    site: Site, shape: EngineShape, stored: StoredProfiles, builders: Sequence[PartBuilder]
) -> list[Priced]:
    """The profile of an allocated device, if the order asks for it or something of the engine needs it.

    A latency target needs it, and so does a host tier that keeps the chunks that are dearest to compute again.
    """
    config, order = site.config, site.order
    ranks_chunks = shape.executor == "paged" and shape.num_host_blocks > 0 and EVICTIONS[config.eviction].by_cost
    needed = config.has_target or ranks_chunks or any(b.is_priced(shape) for b in builders)
    return [find_profile(site, shape, stored)] if order.measure or order.priced or needed else []


def find_profile(site: Site, shape: EngineShape, stored: StoredProfiles) -> Priced:
    """The stored profile that covers the engine's steps if there is one, else an estimate, which is stored.

    It is measured in full if the order asks for it, or if a fixed token budget is computed from it. Raises OSError if
    the order asks for a measurement that cannot be stored.
    """
    device, order = site.device, site.order
    in_full = order.measure or site.config.token_budget == "auto"
    with stored.held(required=order.measure):
        found = None if order.measure else stored.find(Extent.of(site.config, shape), in_full=in_full)
        if found:
            return found
        order.on_progress(MEASURING if in_full else "estimating the device's pace")
        with order.stages.stage("profile"):
            if isinstance(device, PagedDevice | ManyDevice):
                profile = make_profile(site.config, device, shape, in_full=in_full)
            else:
                profile = make_padded_profile(site.config, cast("PaddedDevice", device), shape, in_full=in_full)
        path = stored.path(profile)
        keep(profile, path, required=order.measure)
    stored.remove_earlier()
    return path, profile


def keep_corrected(profiles: Iterable[Priced], policy: Policy) -> None:
    """Store an estimated profile as measured steps have corrected it, for the next start."""
    for path, profile in profiles:
        if not profile.measured and isinstance(policy, LatencyTarget):
            try:
                replace(profile, cost=policy.corrected).save(path)
            except OSError as error:
                log.warning("holdfast: the corrected profile cannot be stored in %s: %s", path, error)


def make_profile(
    config: EngineConfig, device: PagedDevice | ManyDevice, shape: EngineShape, *, in_full: bool
) -> CostProfile:
    """Measure the cost profile of an allocated device, or estimate it by a few steps."""
    cost = (measure_cost if in_full else estimate_cost)(device, name=shape.model)
    if in_full and device.kind == "cpu":  # on a GPU the loop takes nothing from the device
        cost = as_in_service(cost, config, shape, device.executor)
    spec = device.model.spec
    times = device.time_links()._asdict() if in_full and isinstance(device, ManyDevice) else {}
    extent = Extent.of(config, shape)
    return CostProfile(
        cost=cost,
        dtype=str(spec.dtype).removeprefix("torch."),
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        cache_tokens=shape.num_blocks * config.block_size,
        max_model_len=extent.context,
        max_decodes=extent.decodes,
        max_step_tokens=extent.tokens,
        token_budget=DEFAULT_TOKEN_BUDGET[device.kind],
        tile=shape.tile,
        token_bytes=device.block_bytes // config.block_size,
        state_bytes=spec.state_bytes,
        measured=in_full,
        tp=config.tp,
        pp=config.pp,
        stream_bytes=spec.stream_width * spec.dtype.itemsize,
        **times,
    )


def make_padded_profile(
    config: EngineConfig, device: PaddedDevice, shape: EngineShape, *, in_full: bool
) -> CostProfile:
    """`make_profile` for padded rows. The rows are empty afterwards, as before."""
    executor = device.executor
    measure = measure_padded_cost if in_full else estimate_padded_cost
    cost: CostModel = measure(executor, shape, max_sequences=config.most_sequences, device=device.description)
    if in_full and device.kind == "cpu":
        alone = replace(config, prefix_sharing=False, host_cache_gb=0.0, disk_cache_dir=None, disk_cache_gb=20.0)
        cost = as_in_service(cost, alone, replace(shape, lower=None), executor)
        executor.clear()
    extent = Extent.of(config, shape)
    return CostProfile(
        cost=cost,
        dtype=device.precision,
        cache_tokens=shape.num_blocks,
        max_model_len=extent.context,
        max_decodes=extent.decodes,
        max_step_tokens=extent.tokens,
        token_budget=DEFAULT_TOKEN_BUDGET[device.kind],
        tile=shape.tile,
        token_bytes=device.row_bytes.position,
        measured=in_full,
        rows=shape.rows,
    )


def as_in_service(cost: CostModel, config: EngineConfig, shape: EngineShape, executor: LanguageExecutor) -> CostModel:
    """The cost model, corrected by steps in service. The states that these steps leave have no owner."""

    scheduler = make_scheduler(config, shape, None, policy=StallFree(shape.max_step_tokens), stages=config.pp)
    loop: LanguageLoop = Loop(scheduler, executor, steps_in_flight(config, config.pp), clock)
    return in_service(cost, loop, vocab_size=shape.vocab_size, clock=clock)
