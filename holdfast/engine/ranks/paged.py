"""A model over a paged cache, on one device, or this rank's part of it where several ranks share it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, cast

import torch

from holdfast.core.config import changed
from holdfast.core.stages import Stages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.text import read_tokenizer
from holdfast.engine.ranks.tuning import following_parts
from holdfast.files.regular import read_bytes
from holdfast.lm.choice import capacity_of
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice, cache_estimate, resolve_device
from holdfast.lm.execution.part import DevicePart
from holdfast.lm.execution.place import Place
from holdfast.lm.execution.returnable_memory import SleepMemory
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.kernels.attention import backends as attention
from holdfast.lm.models.base import HiddenModel, Model
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.hf import TransformersModel
from holdfast.lm.models.loader import decoder_spec, files_of, load, state_bytes_of
from holdfast.lm.models.shard import shard_of
from holdfast.lm.parts.adapters.device import adapter_device
from holdfast.lm.parts.grammars.device import GivenGrammarDevice, GrammarDevice
from holdfast.lm.parts.prompts.device import PromptDevice
from holdfast.lm.parts.states.device import state_parts
from holdfast.lm.parts.states.options import default_sequences
from holdfast.lm.parts.vectors.device import VectorDevice
from holdfast.lm.types import DEFAULT_TOKEN_BUDGET, token_budget_of
from holdfast.training.base import digest_of_model, digest_of_module

LARGE_STEP = 16
"""Steps of many whole prompts hold at most this many default token budgets, unless the budget is configured.

By calculation, 32,768 tokens (CUDA) of an 8B model take 3 GB of activations and about a second on an H100.
"""


def check_layout(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Raise ValueError for a model or a machine that this many ranks cannot share."""
    layout = config.layout
    shard_of(decoder_spec(checkpoint.directory), layout, 0)
    found = torch.cuda.device_count()
    if device_of(config).type == "cuda" and found <= max(config.gpus):
        raise ValueError(
            f"tp is {layout.tp} and pp is {layout.pp}, which takes {layout.ranks} GPUs, and PyTorch finds {found}"
        )


def device_of(config: EngineConfig, rank: int = 0) -> torch.device:
    """The device of a rank. An engine of one rank runs on this process's current GPU unless `devices` names another.

    Raises ValueError for a GPU that does not exist.
    """
    several = config.layout.ranks > 1
    device = resolve_device(config.device, config.gpus[rank] if several or config.devices is not None else None)
    if device.type == "cuda":
        found = torch.cuda.device_count()
        if config.devices is not None and found <= max(config.gpus):
            raise ValueError(f"devices is {config.devices}, and PyTorch finds {found} GPUs, numbered from 0")
        torch.cuda.set_device(device)  # kernels are launched on the current one
    return device


def with_sequences(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration with the number of sequences that run at once, if it gives none and the model keeps states.

    The states of these sequences take a bounded share of the memory for the cache (`default_sequences`).
    """
    if config.max_sequences or config.rows_only:
        return config
    device, directory = device_of(config), checkpoint.directory
    try:
        state = state_bytes_of(directory, config.dtype, device)
        stored = files_of(directory) if state and config.load_format == "auto" else []
    except UnsupportedCheckpoint:  # another executor may run it, or loading says why none does
        return config
    if not state:
        return config
    cache = cache_estimate(device, config, sum(path.stat().st_size for path in stored))
    return replace(config, max_sequences=default_sequences(state, cache))


def weights_of(device: PagedDevice) -> str:
    """A digest of the weights on a device, which distinguishes state of other weights."""
    model = device.model
    if isinstance(model, Decoder):
        return digest_of_model(model)
    module = cast(TransformersModel, model).module
    return digest_of_module(module, f"{model.spec.architecture} by {code_of(module)}")


def code_of(module: torch.nn.Module) -> str:
    """The code that computes a module of Transformers, in words: state of other code is another state."""
    kind, found = type(module), hashlib.sha256()
    for file in sorted(Path(inspect.getfile(kind)).parent.glob("*.py")):  # it may be in several files
        found.update(read_bytes(file))
    return f"{kind.__module__}.{kind.__qualname__} {found.hexdigest()} of Transformers {version('transformers')}"


def threads_of(config: EngineConfig) -> int:
    """CPU threads of each rank: they share the cores."""
    return max(1, (config.threads or torch.get_num_threads()) // config.layout.ranks)


def make_rank(
    config: EngineConfig,
    rank: int,
    meeting: str,
    stages: Stages | None = None,
    *,
    host: int | None = None,
    more: MoreParts | None = None,
) -> PagedChoice:
    """One rank's part of the model, on its device. All ranks do this at the same time.

    `meeting` is a directory of these ranks alone, where they find each other. `host` is the file descriptor of memory
    that rank 0 can map as well: the rank lays its part of the host tier there if rank 0 moves its blocks. `more` is for
    `parts_of`; by default, a rank has what follows parts that rank 0 alone has from elsewhere.
    """
    if rank:
        torch.set_num_threads(threads_of(config))
    device = device_of(config, rank)
    place = Place(config.layout, rank, device, meeting, host if config.moves_blocks else None)
    return make_paged_device(config, Checkpoint.of(config), stages, place, more or partial(parts_of_others, config))


def parts_of_others(config: EngineConfig, model: Model, parts: Sequence[DevicePart]) -> Sequence[DevicePart]:
    """`MoreParts` of a rank other than the first, whose own come from the engine's builders."""
    return [*following_parts(config, model, parts), *state_parts(config, model)]


def grammar_compiler(
    checkpoint: Checkpoint, vocab_size: int, eos_token_ids: Collection[int], *, tested: bool = False
) -> GrammarCompiler:
    """The compiler of grammars for a checkpoint's vocabulary. `tested`: another compiler tests them first."""
    read = partial(read_tokenizer, checkpoint.directory)
    return GrammarCompiler(read, vocab_size, eos_token_ids, tested=tested)


MoreParts = Callable[[Model, Sequence[DevicePart]], Sequence[DevicePart]]
"""Makes parts of a device, from its model and the parts that come after the new ones."""


def no_more(model: Model, parts: Sequence[DevicePart]) -> Sequence[DevicePart]:
    """No part."""
    return ()


def parts_of(
    config: EngineConfig, checkpoint: Checkpoint, model: Model, rank: int, more: MoreParts
) -> list[DevicePart]:
    """Parts of steps on one rank besides their segments, in the order of their work. Raises ValueError.

    `more` makes parts whose work comes before that of the others.
    """
    parts: list[DevicePart] = []
    if config.adapter_slots:
        parts.append(adapter_device(model, config))
    if isinstance(model, HiddenModel):
        parts += [PromptDevice(model), VectorDevice()]
    spec = model.spec
    if rank in (0, config.layout.drawing_rank):  # rank 0 tests every grammar, before the one that draws has it
        compiler = grammar_compiler(checkpoint, spec.vocab_size, spec.eos_token_ids, tested=rank > 0)
        parts.append(GrammarDevice(compiler))
    else:
        parts.append(GivenGrammarDevice(spec.vocab_size))
    return [*more(model, parts), *parts]


def lengths_of(model: Model) -> str:
    """A warning about the longest sequence of a native decoder, in words that follow its name; empty if none is due."""
    if not isinstance(model, Decoder):
        return ""
    spec, length = model.decoder, model.spec.max_model_len
    kind, switch = spec.rope.kind, spec.rope.original_length
    if kind not in ("dynamic", "longrope") or max(length, spec.most_positions) <= switch:
        return ""
    if length > switch:
        return f"; all positions have the {kind} frequencies of sequences longer than {switch} tokens (max_model_len)"
    return f"; sequences end at {length} tokens, where its {kind} frequencies change: max_model_len takes them further"


class PagedChoice(NamedTuple):
    """A model over a paged cache."""

    device: PagedDevice
    reason: str
    """Why this executor was chosen, and what it does with the model (`Choice.reason`)."""


def load_part(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    place: Place | None,
    move_weights: Callable[[object], None] | None = None,
) -> Model:
    """The model on this device, or this rank's part of it. `move_weights` may move its tensors to other memory."""
    return load(
        checkpoint.directory,
        device=device,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        load_format=config.load_format,
        quantization=config.quantization,
        layout=config.layout,
        rank=0 if place is None else place.rank,
        group=None if place is None else place.group,
        invariant=config.deterministic,
        ranks=config.equal_ranks,
        move_weights=move_weights,
    )


def load_with_memory(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, place: Place | None
) -> tuple[Model, SleepMemory | None]:
    """`load_part`, and the memory of the weights if the engine can sleep."""
    if not config.enable_sleep_mode:
        return load_part(config, checkpoint, device, place), None
    sleeping = SleepMemory(device)
    read = partial(load_part, config, checkpoint, device, place, sleeping.weights.place)
    sleeping.reload_by(read)
    return read(), sleeping


def make_paged_device(
    config: EngineConfig,
    checkpoint: Checkpoint,
    stages: Stages | None,
    place: Place | None = None,
    more: MoreParts = no_more,
) -> PagedChoice:
    """The model over a paged cache: a native decoder, or Transformers' code with its attention swapped.

    With a `place`, the model is this rank's part of it. `more` is for `parts_of`.
    """
    device = device_of(config) if place is None else place.device
    if device.type == "cuda" and config.cuda_graphs:
        from holdfast.lm.kernels.compilation import prepare  # a CPU installation has no Triton

        prepare()
    attention.require(config.attention_backend, device, fp8_cache=config.kv_cache_dtype == "fp8")
    model, sleeping = load_with_memory(config, checkpoint, device, place)
    refuse_padded_options(config, model.spec.architecture)
    capacity = capacity_of(
        config.scheduler,
        token_budget=token_budget_of(config, device.type, one_by_one=model.spec.one_by_one),
        max_model_len=model.spec.max_model_len,
        max_sequences=config.most_sequences,
        limit=config.fixed_token_budget or LARGE_STEP * DEFAULT_TOKEN_BUDGET[device.type],
    )
    return PagedChoice(
        PagedDevice(
            model,
            config,
            parts=parts_of(config, checkpoint, model, 0 if place is None else place.rank, more),
            name=checkpoint.name,
            max_step_tokens=capacity,
            stages=stages,
            place=place,
            sleeping=sleeping,
        ),
        reason_of(model),
    )


def reason_of(model: Model) -> str:
    """Why a model runs on a paged cache, for `PagedChoice.reason`."""
    name = model.spec.architecture
    if isinstance(model, TransformersModel):
        return f"{name} lets Transformers swap its attention"
    return f"{name} has a native decoder{lengths_of(model)}"


def refuse_padded_options(config: EngineConfig, name: str) -> None:
    """Raise ValueError for an option of padded rows, where a model of this architecture runs on a paged cache."""
    for option, value in changed(config, executor="padded"):
        # Leave to run a checkpoint's code may be given to a model that needs none.
        if option != "trust_remote_code":
            raise ValueError(f"{option} is {value}, which is for the padded executor, and {name} runs on the paged one")
