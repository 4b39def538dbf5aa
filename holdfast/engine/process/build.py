"""The engine's composition root, where the kinds of work meet: from a configuration to a loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.core.config import PAGED_OPTIONS, ROW_SCHEDULERS, EngineConfig, ExecutorName
from holdfast.core.cost import CostModel
from holdfast.core.stages import Stages
from holdfast.core.training_cost import MICRO_BATCHES
from holdfast.core.types import AdapterInfo
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.messages import EngineInfo
from holdfast.engine.process.adapter_desk import AdapterDesk
from holdfast.engine.process.grammar_desk import GrammarDesk
from holdfast.engine.process.in_service import in_service
from holdfast.engine.process.move_desk import MoveDesk
from holdfast.engine.process.state_beyond import begin_moves, open_tiers
from holdfast.engine.process.tier_desk import TierDesk
from holdfast.engine.process.trace import Trace, about_engine
from holdfast.engine.process.tuning_desk import TuningDesk, TuningRules
from holdfast.engine.profiles import CostProfile, cached_profile_path, held
from holdfast.engine.ranks.many_device import ManyDevice
from holdfast.engine.ranks.messages import Loaded, StartRank
from holdfast.engine.ranks.paged import check_layout, make_paged_device, make_rank, threads_of
from holdfast.engine.ranks.ranks import Ranks
from holdfast.lm.choice import choose_policy, make_drafter, make_scheduler, make_tuner, steps_in_flight
from holdfast.lm.execution.cost_profile import estimate_cost, measure_cost
from holdfast.lm.execution.paged_device import PagedDevice, resolve_device
from holdfast.lm.execution.part import DevicePart, part_of
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.models.base import DamagedCheckpoint, MisfitCheckpoint, Model, UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.hf import NotPaged
from holdfast.lm.padded.cost_profile import estimate_padded_cost, measure_padded_cost
from holdfast.lm.padded.loading import load_unmodified
from holdfast.lm.parts.adapters.device import AdapterDevice
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.grammars.device import GrammarDevice
from holdfast.lm.parts.tuning.device import TuningDevice, TuningExecutor
from holdfast.lm.scheduler.deferral import DEFAULT_BOUND
from holdfast.lm.scheduler.policies import LatencyTarget, StallFree
from holdfast.lm.scheduler.scheduler import Scheduler
from holdfast.lm.scheduler.tuner import Tuner
from holdfast.lm.types import (
    DEFAULT_TOKEN_BUDGET,
    EngineShape,
    HostTier,
    LanguageDevice,
    LanguageExecutor,
    LanguageLoop,
    MemoryMeasurement,
)
from holdfast.loop.loop import Loop
from holdfast.training.base import digest_of_model, training_shape
from holdfast.training.iteration import arena_of, workspace_bytes
from holdfast.training.state import mirror_directory
from holdfast.training.trainer import Trainer

if TYPE_CHECKING:
    from holdfast.lm.padded.device import PaddedDevice


clock = time.monotonic
log = logging.getLogger("holdfast.engine")

HOST_BYTES_PER_SECOND = {"cuda": 40e9, "cpu": 5e9}
"""Speed of copies between the cache and the host, roughly. The planner only needs to know which slices are long."""


class Engine(NamedTuple):
    """An engine that is ready to serve."""

    loop: LanguageLoop
    info: EngineInfo
    desk: AdapterDesk | None
    """Loads and unloads adapters; None if none may be served."""
    tuning: TuningDesk | None
    """Takes tuning jobs; None if tuning is off. To be closed after the loop."""
    grammars: GrammarDesk
    """Takes requests that have a grammar. To be closed."""
    ranks: Ranks | None
    """The other processes of the engine; None if there are none. Closing the loop ends them."""
    moves: MoveDesk | None = None
    """Says where KV blocks are, and moves them between engines. To be closed before the loop."""
    tiers: TierDesk | None = None
    """Moves blocks of the tiers behind the host; None if there are none. Closing the loop ends that."""


def build(
    config: EngineConfig,
    *,
    stages: Stages | None = None,
    measure: bool = False,
    on_progress: Callable[[str], None] = lambda stage: None,
) -> tuple[LanguageLoop, EngineInfo]:
    """`build_engine` for those who run the loop themselves and load no adapters meanwhile: the loop, and its sizes."""
    engine = build_engine(config, stages=stages, measure=measure, on_progress=on_progress)
    return engine.loop, engine.info


def build_engine(
    config: EngineConfig,
    *,
    stages: Stages | None = None,
    measure: bool = False,
    priced: bool = False,
    on_progress: Callable[[str], None] = lambda stage: None,
    ranks: Ranks | None = None,
    chunk_secret: bytes = b"",
) -> Engine:
    """Load the model, measure the device, allocate its memory, and put the loop together.

    `stages` notes when each stage begins and ends; by default they count from this call. `on_progress` gets the name
    of each stage, for people. A latency target, and the host tier of a paged cache, need the device's cost profile
    (`find_profile`), `priced` finds it in any case, and `measure` measures it. `ranks` are the processes of a
    configuration with several devices, if they have been started; they end if this fails. Raises ValueError
    (UnsupportedCheckpoint among them), MemoryError and RankFailure with a reason for people. Blocks move between
    engines of one `chunk_secret`.
    """
    stages = stages or Stages(clock(), clock)
    try:
        checkpoint = Checkpoint.of(config)
        if config.layout.ranks > 1:
            check_layout(config, checkpoint)
            ranks = ranks or Ranks(config)
        elif config.threads is not None:
            torch.set_num_threads(config.threads)
        return put_together(
            config, checkpoint, ranks, stages, measure=measure, priced=priced, on_progress=on_progress,
            chunk_secret=chunk_secret,
        )  # fmt: skip
    except BaseException:
        if ranks is not None:
            ranks.close(at_once=True)
        raise


def put_together(
    config: EngineConfig,
    checkpoint: Checkpoint,
    ranks: Ranks | None,
    stages: Stages,
    *,
    measure: bool,
    priced: bool,
    on_progress: Callable[[str], None],
    chunk_secret: bytes,
) -> Engine:
    """Do what `build_engine` says. `ranks` are the processes of the other ranks, where there are any."""
    on_progress(f"loading {checkpoint.name}")
    with stages.stage("weights"):
        device, reason = choose_device(config, checkpoint, stages, ranks)
    tuned = tuned_model(config, device)
    adapters = read_adapters(config, device, stages, on_progress)
    memory, shape = allocate(device, stages, on_progress)
    threads = None
    if isinstance(device, PagedDevice | ManyDevice):
        shape = replace(shape, block_bytes=device.block_bytes)
        if config.lower_tiers:
            with stages.stage("tiers"):
                threads, shape = open_tiers(config, checkpoint, device, shape)
    pace = pace_of(config, device.kind, memory.device, shape.executor)
    path = cached_profile_path(checkpoint.directory, device.precision, pace)
    profile = None
    ranks_chunks = shape.rows is None and shape.num_host_blocks > 0 and config.eviction == "retention"
    drafter = make_drafter(config, shape, device.kind)
    needed = config.tbt_target is not None or ranks_chunks or tuned is not None or drafter is not None
    if measure or priced or needed:
        profile = find_profile(device, shape, path, stages, measure=measure, on_progress=on_progress)
    cost = profile.cost if profile is not None else None
    policy = choose_policy(config, shape, cost, stages=config.pp)
    tuner = None
    if tuned is not None and cost is not None and isinstance(device, PagedDevice):
        tuner = make_tuner(
            config,
            shape,
            cost,
            training_shape(tuned.decoder),
            memory_fraction=config.tuning_memory_fraction,
            block_seconds=device.block_bytes / HOST_BYTES_PER_SECOND[device.kind],
        )
    scheduler = make_scheduler(
        config,
        shape,
        cost,
        policy=policy,
        stages=config.pp,
        tuner=tuner,
        deferral_bound=config.deferral_bound,
        tuning_progress=config.tuning_progress,
        drafter=drafter,
        now=clock(),
    )
    desk = None
    if isinstance(device, PagedDevice) and config.adapter_slots:
        adapted = scheduler.part(AdapterPart)
        desk = AdapterDesk(adapted, device.part(AdapterDevice).store)
        for adapter in adapters:
            adapted.add(adapter.id)
    tuning = None
    if tuned is not None and tuner is not None and isinstance(device, PagedDevice) and desk is not None:
        tuning = make_tuning(config, checkpoint, device, tuner, desk)
    traces = []
    if config.trace:
        about, suspends = about_engine(config, shape), shape.num_host_blocks > 0
        traces.append(Trace(config.trace, clock, suspends=suspends, planner=scheduler, about=about))
    keep, grow = nothing, nothing
    if profile is not None and not profile.measured and isinstance(policy, LatencyTarget):
        keep = partial(keep_corrected, profile, policy, path)
    if (host := device.host) is not None:  # it becomes usable bit by bit, beside the first requests
        host.begin()
        grow = partial(grow_host_tier, scheduler, host)
    tiers = None
    if threads is not None:
        tiers = TierDesk(scheduler, threads, clock)
        grow, keep = both(grow, tiers.exchange), both(keep, tiers.close)
    loop: LanguageLoop = Loop(
        scheduler,
        device.executor,
        steps_in_flight(config, config.pp),
        clock,
        grow,
        keep,
        device.executor.prepare,
        traces,
    )
    moves = MoveDesk(scheduler, clock)
    unmoved = moves_of(config, checkpoint, device, shape, moves, chunk_secret)
    info = EngineInfo(
        model=shape.model,
        precision=shape.precision,
        executor=shape.executor,
        executor_reason=(
            reason if isinstance(device, PagedDevice | ManyDevice) else f"{reason}; {on_rows(config, device)}"
        ),
        memory=memory,
        num_blocks=shape.num_blocks,
        num_host_blocks=shape.num_host_blocks,
        block_size=config.block_size if shape.rows is None else 1,
        token_budget=shape.max_step_tokens,
        max_model_len=shape.max_model_len,
        max_sequences=config.max_sequences,
        max_waiting=config.max_waiting,
        vocab_size=shape.vocab_size,
        profile_path=str(path) if profile is not None else "",
        started_in=stages.elapsed(),
        stages=tuple(stages.done),
        adapters=tuple(adapters),
        adapter_slots=shape.adapter_slots,
        gives_hidden=shape.gives_hidden,
        tp=config.tp,
        pp=config.pp,
        chunk_address="" if moves.service is None else moves.service.address,
        chunk_reason=unmoved,
        remote_trouble="" if threads is None else threads.trouble,
    )
    grammars = make_grammars(config, checkpoint, device, shape, scheduler)
    return Engine(loop, info, desk, tuning, grammars, ranks, moves, tiers)


def moves_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: PagedDevice | PaddedDevice | ManyDevice,
    shape: EngineShape,
    moves: MoveDesk,
    secret: bytes,
) -> str:
    """Let KV blocks move between engines where the configuration and the device allow it; why none can, else empty."""
    if not config.chunk_host:
        return "chunk_host is not set"
    if not isinstance(device, PagedDevice | ManyDevice):
        return "padded rows hold no blocks that could move"
    return begin_moves(config, checkpoint, device, shape, moves, secret)


def both(first: Callable[[], object], then: Callable[[], object]) -> Callable[[], None]:
    """Do one after the other."""

    def do() -> None:
        try:
            first()
        finally:
            then()

    return do


def make_grammars(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: PagedDevice | PaddedDevice | ManyDevice,
    shape: EngineShape,
    scheduler: Scheduler,
) -> GrammarDesk:
    """The desk that compiles grammars for an allocated device. Where they cannot be followed, it refuses them all."""
    if not isinstance(device, PagedDevice | ManyDevice):
        return GrammarDesk(
            scheduler.add, None, "structured output runs on the paged executor, and this model runs on padded rows"
        )
    compiler = device.part(GrammarDevice).compiler
    if isinstance(device, ManyDevice) and config.layout.drawing_rank:
        return GrammarDesk(scheduler.add, compiler, announce=device.expect)
    return GrammarDesk(scheduler.add, compiler)


def tuned_model(config: EngineConfig, device: LanguageDevice) -> Decoder | None:
    """The model that jobs are tuned on; None if tuning is off. Raises ValueError for a model that cannot be tuned."""
    if not config.tuning:
        return None
    return tunable(device.model if isinstance(device, PagedDevice) else None)


def tunable(model: Model | None) -> Decoder:
    """This model of a paged cache, as one that can be tuned. Raises ValueError for another; None is one without."""
    if not isinstance(model, Decoder):
        raise ValueError("tuning needs a native decoder over a paged cache, and this model has none; leave it out")
    if model.decoder.experts is not None:
        raise ValueError("tuning needs a decoder without experts, and this model is a mixture of experts; leave it out")
    if not model.decoder.takes_adapters:
        name = model.spec.architecture
        raise ValueError(f"tuning is for layers like Llama's, and {name} has others; leave it out")
    return model


def tuning_parts(
    config: EngineConfig, stages: Stages, model: Model, parts: Sequence[DevicePart]
) -> Sequence[TuningDevice[Trainer]]:
    """The device's side of tuning, where a configuration asks for it. Raises ValueError as `tunable` does."""
    if not config.tuning:
        return ()
    decoder, store = tunable(model), part_of(parts, AdapterDevice).store

    def make_trainer(cache: KVCache) -> Trainer:
        with stages.stage("tuning"):
            return Trainer(
                decoder,
                arena_of(cache),
                base_digest=digest_of_model(decoder),
                mirror=mirror_directory(config.tuning_mirror),
                pinning=store.packing,
            )

    return (TuningDevice(make_trainer, partial(training_workspace, config, decoder)),)


def training_workspace(config: EngineConfig, model: Decoder) -> int:
    """Bytes that units of the largest micro-batch take beside the cache. Measured for one sequence."""
    most = config.tuning_micro_batch if config.tuning_micro_batch != "auto" else MICRO_BATCHES[-1]
    tokens = min(most, model.decoder.max_positions)
    return workspace_bytes(model, tokens, config.max_adapter_rank) * most // tokens


def make_tuning(
    config: EngineConfig, checkpoint: Checkpoint, device: PagedDevice, tuner: Tuner, desk: AdapterDesk
) -> TuningDesk:
    """The desk that takes jobs for the trainer of an allocated device."""
    trainer: Trainer = device.executor.part(TuningExecutor).training
    target = None if config.tbt_target is None else config.tbt_target / 1000
    rules = TuningRules(
        base_model=checkpoint.name,
        base_digest=trainer.base_digest,
        micro_batch=None if config.tuning_micro_batch == "auto" else config.tuning_micro_batch,
        target=target,
        bound=DEFAULT_BOUND if config.deferral_bound is None else config.deferral_bound,
        max_rank=config.max_adapter_rank,
        threads=torch.get_num_threads() if device.kind == "cpu" else 0,
    )
    return TuningDesk(tuner, trainer, desk, rules)


def read_adapters(
    config: EngineConfig, device: LanguageDevice, stages: Stages, on_progress: Callable[[str], None]
) -> list[AdapterInfo]:
    """Read the adapters that a configuration names. Raises ValueError naming the one that cannot be served."""
    found: list[AdapterInfo] = []
    if not config.adapter_slots:
        return found
    if not isinstance(device, PagedDevice):
        raise ValueError("adapters are served on the paged executor only, and this model runs on padded rows")
    store = device.part(AdapterDevice).store
    on_progress("reading adapters")
    with stages.stage("adapters"):
        for name, path in config.adapters:
            if name == device.name:
                raise ValueError(f"adapter {name} has the name of the model; give it another one")
            try:
                found.append(store.register(store.read(name, path)))
            except ValueError as error:
                raise ValueError(f"adapter {name} in {path}: {error}") from error
    return found


def on_rows(config: EngineConfig, device: PaddedDevice) -> str:
    """What padded rows do with the model, in words, and what they cannot do of what might be expected."""
    said = [device.abilities.sentence]
    if config.tbt_target is not None and not device.abilities.chunks:
        said.append("the TBT target does not bind prompts, which the model cannot compute in chunks")
    return "; ".join([*said, *([device.model.shortened] if device.model.shortened else [])])


def grow_host_tier(scheduler: Scheduler, host: HostTier) -> None:
    """Tell the scheduler how much of the host tier can be used by now."""
    scheduler.resize_host_tier(host.ready, host.blocks)


class Choice(NamedTuple):
    """A model on the device that its executor needs."""

    device: PagedDevice | PaddedDevice | ManyDevice
    reason: str
    """Why it is this executor, in words that can follow "because"."""


def choose_device(config: EngineConfig, checkpoint: Checkpoint, stages: Stages, ranks: Ranks | None = None) -> Choice:
    """The model on its device, before there is a cache: paged if it can be, else padded, or as `executor` says.

    With the other `ranks` it is on all their devices. Raises UnsupportedCheckpoint with both reasons if neither can run
    it, ValueError for an option that the executor does not read, and MemoryError.
    """
    if ranks is not None:
        return make_many_device(config, ranks, stages)
    if config.executor == "padded":
        return Choice(make_padded_device(config, checkpoint, stages), "executor is padded")
    if config.executor == "auto" and config.scheduler in ROW_SCHEDULERS:
        reason = f"scheduler is {config.scheduler}, which plans padded rows"
        return Choice(make_padded_device(config, checkpoint, stages), reason)
    try:
        return Choice(*make_paged_device(config, checkpoint, stages, more=partial(tuning_parts, config, stages)))
    except UnsupportedCheckpoint as error:
        if config.executor == "paged" or isinstance(error, DamagedCheckpoint):
            raise
        refusal = error.with_traceback(None)  # its frames hold tensors
    for name in PAGED_OPTIONS:
        if (value := getattr(config, name)) != getattr(EngineConfig, name):
            raise UnsupportedCheckpoint(f"{refusal}; padded rows cannot run it with {name} {value}") from None
    try:
        module = refusal.module if isinstance(refusal, NotPaged) else None
        device = make_padded_device(config, checkpoint, stages, module=module)
    except UnsupportedCheckpoint as error:
        if str(error) == str(refusal):
            raise
        if isinstance(error, MisfitCheckpoint) and isinstance(refusal, MisfitCheckpoint):
            raise refusal from None
        raise UnsupportedCheckpoint(f"{refusal}; on padded rows: {error}") from error
    return Choice(device, str(refusal))


def make_many_device(config: EngineConfig, ranks: Ranks, stages: Stages) -> Choice:
    """The model on the devices of all ranks. Raises RankFailure, naming the rank."""
    torch.set_num_threads(threads_of(config))
    own, answers = ranks.together(
        StartRank(config, ranks.meeting), partial(make_rank, config, 0, ranks.meeting, stages)
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
        device=resolve_device(config.device),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        trust_remote_code=config.trust_remote_code,
        module=module,
    )
    return PaddedDevice(model, config, name=checkpoint.name, stages=stages)


def allocate(
    device: LanguageDevice, stages: Stages, on_progress: Callable[[str], None]
) -> tuple[MemoryMeasurement, EngineShape]:
    """Measure what a step takes, and allocate the cache of both tiers and the graphs of steps in what is left."""
    if device.captures:
        on_progress("compiling kernels")
        with stages.stage("kernels"):
            device.compile()
    on_progress("measuring memory")
    with stages.stage("memory"):
        memory = device.measure()
    if device.captures:
        on_progress("capturing graphs")
    return memory, device.allocate(memory)


def pace_of(config: EngineConfig, kind: str, name: str, executor: ExecutorName = "paged") -> str:
    """The device's name, with what changes how fast steps run on a device of this kind."""
    changes = [name] if executor == "paged" else [name, "padded rows"]
    if kind == "cuda":
        changes += [] if config.attention_backend in ("auto", "holdfast") else [config.attention_backend]
        changes += [] if config.cuda_graphs else ["no graphs"]
    return ", ".join(changes)


def find_profile(
    device: PagedDevice | PaddedDevice | ManyDevice,
    shape: EngineShape,
    path: Path,
    stages: Stages,
    *,
    measure: bool,
    on_progress: Callable[[str], None],
) -> CostProfile:
    """The profile of an allocated device: the stored one if there is one, else an estimate, which is stored.

    It is measured in full if `measure` asks for it, or if a fixed token budget is computed from it. Raises ValueError
    for a file that is not a profile.
    """
    in_full = measure or device.config.token_budget == "auto"
    with held(path):
        if path.is_file() and not measure:
            stored = CostProfile.load(path)
            if stored.measured or not in_full:
                return stored
        on_progress(f"{'measuring' if in_full else 'estimating'} the device's pace")
        with stages.stage("profile"):
            if not isinstance(device, PagedDevice | ManyDevice):
                profile = make_padded_profile(device, shape, in_full=in_full)
            else:
                profile = make_profile(device, shape, in_full=in_full)
        profile.save(path)
    return profile


def keep_corrected(profile: CostProfile, policy: LatencyTarget, path: Path) -> None:
    """Store the profile as measured steps have corrected it, for the next start."""
    try:
        replace(profile, cost=policy.corrected).save(path)
    except OSError as error:
        log.warning("holdfast: the corrected profile cannot be stored in %s: %s", path, error)


def nothing() -> None:
    """Do nothing."""


def make_profile(device: PagedDevice | ManyDevice, shape: EngineShape, *, in_full: bool) -> CostProfile:
    """Measure the cost profile of an allocated device, or estimate it by a few steps."""
    config = device.config
    cost = (measure_cost if in_full else estimate_cost)(device, name=shape.model)
    if in_full and device.kind == "cpu":  # on a GPU the loop takes nothing from the device
        cost = as_in_service(cost, config, shape, device.executor)
    spec, links = device.model.spec, None
    if in_full and isinstance(device, ManyDevice):
        links = device.time_links()
    return CostProfile(
        cost=cost,
        dtype=str(spec.dtype).removeprefix("torch."),
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        cache_tokens=shape.num_blocks * config.block_size,
        max_model_len=shape.max_model_len,
        token_budget=DEFAULT_TOKEN_BUDGET[device.kind],
        tile=shape.tile,
        token_bytes=device.block_bytes // config.block_size,
        measured=in_full,
        tp=config.tp,
        pp=config.pp,
        stream_bytes=spec.stream_width * spec.dtype.itemsize,
        all_reduce=links.all_reduce if links is not None else None,
        send=links.send if links is not None else None,
    )


def make_padded_profile(device: PaddedDevice, shape: EngineShape, *, in_full: bool) -> CostProfile:
    """The same of padded rows, which are as they were afterwards: none has a state."""
    config, executor = device.config, device.executor
    measure = measure_padded_cost if in_full else estimate_padded_cost
    cost: CostModel = measure(executor, shape, max_sequences=config.max_sequences, device=device.description)
    if in_full and device.kind == "cpu":
        cost = as_in_service(cost, replace(config, prefix_sharing=False, host_cache_gb=0.0), shape, executor)
        executor.clear()
    return CostProfile(
        cost=cost,
        dtype=device.precision,
        cache_tokens=shape.num_blocks,
        max_model_len=shape.max_model_len,
        token_budget=DEFAULT_TOKEN_BUDGET[device.kind],
        tile=shape.tile,
        token_bytes=device.row_bytes.position,
        measured=in_full,
        rows=shape.rows,
    )


def as_in_service(cost: CostModel, config: EngineConfig, shape: EngineShape, executor: LanguageExecutor) -> CostModel:
    """The cost as steps in service correct it. The states that these steps leave have no owner."""

    scheduler = make_scheduler(config, shape, None, policy=StallFree(shape.max_step_tokens), stages=config.pp)
    loop: LanguageLoop = Loop(scheduler, executor, steps_in_flight(config, config.pp), clock)
    return in_service(cost, loop, vocab_size=shape.vocab_size, clock=clock)
