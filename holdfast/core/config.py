"""CoreConfig and AppConfig: settings of engines, frozen. Flags, YAML keys and keywords are made from them.

A part of an engine declares its options in a subclass of CoreConfig. `lm.config.EngineConfig` collects them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, replace
from importlib.util import find_spec
from math import inf
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args

from holdfast.core.layout import Layout
from holdfast.core.types import MAX_SEED
from holdfast.core.units import bytes_of_gb, seconds_of_ms

DEFAULT_SEQUENCES = 256
"""Number of sequences that run at once unless the config gives it."""
BUILTIN_MODEL = "holdfast-tiny"
BUILTIN_HEAD = "holdfast-tiny-eagle3"
"""The draft head of the built-in model."""

SchedulerName = Literal[
    "stall-free",
    "request-level",
    "orca",
    "prefill-first",
    "chunked-only",
    "hybrid-only",
    "unified",
    "run-to-completion",
    "prefill-apart",
    "shaping",
    "embedding",
    "padded-batches",
]
AttentionBackendName = Literal["auto", "holdfast", "torch", "vllm-flash-attn"]
OrderName = Literal["fcfs", "priority", "deadline", "fair"]
QuantizationName = Literal["none", "fp8"]
CacheTypeName = Literal["auto", "fp8"]
ExecutorName = Literal["paged", "padded"]

OWN_ATTENTION: tuple[AttentionBackendName, ...] = ("auto", "holdfast")
"""Attention backends of our own kernels."""
SCHEDULERS: tuple[SchedulerName, ...] = get_args(SchedulerName)
"""Schedulers that have a name; each plans padded rows."""
ROW_SCHEDULERS: tuple[SchedulerName, ...] = (
    "run-to-completion", "prefill-apart", "shaping", "embedding", "padded-batches",
)  # fmt: skip
"""Schedulers that plan padded rows only."""
PACKED_SCHEDULERS: tuple[SchedulerName, ...] = tuple(name for name in SCHEDULERS if name not in ROW_SCHEDULERS)
"""Schedulers that plan packed steps on a paged cache too."""
AHEAD_SCHEDULERS: tuple[SchedulerName, ...] = ("prefill-apart", "embedding")
"""Schedulers that prefill prompts before there is a row for them in the batch."""
KEY_VARIABLE = "HOLDFAST_API_KEY"
"""The environment variable that holds API keys."""
OPERATOR_VARIABLE = "HOLDFAST_OPERATOR_KEY"
"""The environment variable that holds operators' keys."""


def option(
    default: Any,
    help: str,
    unit: Literal["", "ms"] = "",
    bare: str | None = None,
    named: tuple[str, ...] = (),
    *,
    between: tuple[float, float] | None = None,
    positive: bool = False,
    executor: Literal["", "paged", "padded"] = "",
) -> Any:
    """A config field with its help text. A field in the unit "ms" accepts 50, "50ms" and "0.05s".

    `bare` is the value of a flag that is given without one, where that is allowed. A field with values that are `named`
    takes these, or any `module:object`. A number lies `between` two limits, both included, or is `positive`, which is
    above 0 and finite (`check_numbers`). `executor` is the only one that reads the option, if there is such a one.
    """
    metadata = {
        "help": help,
        "unit": unit,
        "bare": bare,
        "named": named,
        "between": between,
        "positive": positive,
        "executor": executor,
    }
    return field(default=default, metadata=metadata)


def check_numbers(config: Any) -> None:
    """Raise ValueError for the first number of a config that is out of its option's range."""
    for each in fields(config):
        value, limits = getattr(config, each.name), each.metadata["between"]
        if value in (None, "auto", "large"):
            continue
        if limits is not None and not limits[0] <= value <= limits[1]:
            raise ValueError(f"{each.name} is {value}; it must lie between {limits[0]} and {limits[1]}")
        if each.metadata["positive"] and not 0 < value < inf:
            raise ValueError(f"{each.name} is {value}; it must be above 0 and finite")


def changed(config: Any, *, executor: str) -> Iterator[tuple[str, Any]]:
    """Name and value of each option that only this executor reads, and whose value is not its default."""
    for each in fields(config):
        if each.metadata["executor"] == executor and (value := getattr(config, each.name)) != each.default:
            yield each.name, value


def own_options(config: type) -> tuple[Field[Any], ...]:
    """The options that a config's class adds to those of its bases."""
    return tuple(each for each in fields(config) if each.name in vars(config).get("__annotations__", ()))


Options = TypeVar("Options", bound="CoreConfig")


@dataclass(frozen=True, kw_only=True)
class CoreConfig:
    """How the engine runs a model, apart from its parts. Raises ValueError, naming the value and the limit.

    Each part has a subclass with its own options. It extends `__post_init__` by its checks, and properties of this
    class that depend on the part.
    """

    topic: ClassVar[str] = ""
    """Title of the options that a subclass adds, in the whole help. Empty: they follow under the engine's own title."""

    model: str = option(
        BUILTIN_MODEL,
        "the built-in model by name, a Hugging Face checkpoint directory, or an id of the hub (owner/name), which is "
        "fetched once into its cache",
    )
    revision: str | None = option(None, "branch, tag or commit of a model of the hub; default: its main branch")
    served_model_name: tuple[str, ...] = option(
        (), "name that requests give for the model; repeat it for several; default: the directory's name, or the id"
    )
    chat_template: str | None = option(None, "chat template in place of the checkpoint's: a file, or its text")
    generation_config: str = option(
        "auto",
        "sampling of requests that do not say: auto takes the checkpoint's generation_config.json, none the API's own "
        "defaults; or another such file, or its directory",
    )
    override_generation_config: str | None = option(
        None, 'fields in place of that file\'s, as a JSON object: {"temperature": 0.5}'
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where to run; auto is CUDA if there is a GPU, else the CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "type of weights and cache; auto is the checkpoint's own type on CUDA and float32 on a CPU"
    )
    kv_cache_dtype: CacheTypeName = option(  # noqa: RUF009  a string
        "auto",
        "type of keys and values; auto is dtype; fp8 (e4m3) needs half the memory of 16 bits and is less exact",
        executor="paged",
    )
    load_format: Literal["auto", "random"] = option(
        "auto", "auto reads the checkpoint's weights; random draws weights and needs only config.json (benchmarks)"
    )
    quantization: QuantizationName = option(  # noqa: RUF009  a string
        "none",
        "fp8 rounds the layers' weights to 8 bits while reading them: half the memory, faster, less exact",
        executor="paged",
    )
    convert: Literal["auto", "none", "embed", "rerank"] = option(
        "auto",
        "which embeddings the model gives: auto those that its files describe, embed the last token's state of any "
        "model, none no embeddings; rerank scores documents by a causal reranker's answers yes and no",
    )
    executor: Literal["auto", "paged", "padded"] = option(
        "auto",
        "how the model runs: paged is a native decoder, or Transformers' code with its attention swapped, over a paged "
        "cache; padded is Transformers' code unmodified, on padded rows; auto is paged where it can be",
    )
    trust_remote_code: bool = option(
        False,
        "run the checkpoint's own Python code, with all rights of this process; for the padded executor",
        executor="padded",
    )
    tp: int = option(1, "devices that share each layer (tensor parallelism); one process each", between=(1, 64))
    pp: int = option(
        1, "stages that each hold a part of the layers, on tp devices each (pipeline parallelism)", between=(1, 64)
    )
    devices: str | None = option(
        None,
        "numbers of the GPUs, one for each process of tp and pp, such as 2,3; processes may share a GPU, as in 0,0, "
        "which is slow and meant for tests; default: 0, 1 and so on",
    )
    max_model_len: int | None = option(
        None, "longest sequence in tokens; default: the model's own limit", between=(2, 1 << 24)
    )
    max_sequences: int | None = option(
        None,
        f"maximum number of sequences that run at once; default: {DEFAULT_SEQUENCES}, or fewer if the recurrent states "
        "of so many would take more than a quarter of the memory for the cache",
        between=(1, 4096),
    )
    block_size: int = option(16, "tokens in one block of the KV cache", between=(1, 1024))
    cache_gb: float | None = option(
        None,
        "size of the KV cache in GB, on all devices; default: the measured free memory (at most 4 on a CPU)",
        positive=True,
    )
    host_cache_gb: float | Literal["auto"] = option(
        "auto",
        "size of the host tier in GB, for all devices, where idle conversations go; auto is a quarter of the free host "
        "memory on CUDA, at most 32, and on a CPU 0, or at most 1 with chunk_host or a lower tier; 0 is off",
    )
    chunk_size: int = option(32, "tokens that are evicted together; rounded up to whole blocks", between=(1, 1 << 24))
    eviction: Literal["retention", "pauses", "lru", "lru-conversation", "tail-first", "ttl", "hits"] = option(
        "retention",
        "which idle chunks are evicted first: retention: the lowest recomputation cost / age; pauses: the lowest cost "
        "times the chance that it is needed soon, learned by kind of pause; lru: the least recently used; "
        "lru-conversation: all of the least recently used conversation; tail-first: that conversation's end; ttl: as "
        "lru, but state is kept for as long as calls of its tool last; hits: the fewest turns so far",
    )
    swap_threshold: float = option(
        0.25,
        "idle chunks are copied to the host tier when the share of free blocks falls below this",
        between=(0.0, 1.0),
    )
    swap_in: Literal["complete", "by-layer"] = option(
        "complete",
        "when a sequence whose state comes from the host joins others: once all of it has come; or by-layer, at once, "
        "in a step whose every layer waits for its part of that state, which delays the others",
        executor="paged",
    )
    swap_in_groups: int = option(
        4,
        "groups of layers in which a step copies the state that it waits for; at most one for each layer",
        between=(1, 1024),
        executor="paged",
    )
    memory_fraction: float = option(0.9, "share of the GPU's memory that Holdfast may use", between=(0.05, 1.0))
    memory_reserved: float = option(
        0.0,
        "share of the GPU's memory, out of memory_fraction, that is left to other programs even if they do not use it "
        "yet; with --app on the same GPU: --app-memory-fraction",
        between=(0.0, 0.95),
    )
    headroom: float = option(
        0.1, "share of the blocks reserved for the growth of running sequences", between=(0.0, 0.9)
    )
    prefill_ahead: int | None = option(
        None,
        "prompts computed before there is a row for them in the batch; for the padded executor; default: max_sequences "
        "where the scheduler works so, else 0",
        between=(0, 4096),
        executor="padded",
    )
    shrink_threshold: float = option(
        0.95,
        "rows leave the batch when it fills more than this share of its memory; for the padded executor",
        between=(0.1, 1.0),
        executor="padded",
    )
    scheduler: str = option(
        "stall-free",
        "scheduling policy; all but the default are baselines for comparison; or a class of your own, as module:Class",
        named=SCHEDULERS,
    )
    order: OrderName = option(  # noqa: RUF009  a string
        "priority",
        "which request goes first: the earliest, the best priority class, the earliest deadline, or one of the "
        "tenant that was served least",
    )
    priority_aging: float = option(
        3600.0,
        "seconds of waiting that raise a request by one priority class, so that no class waits forever",
        positive=True,
    )
    ttft_target: float | None = option(
        None,
        "deadline of the first token in ms for requests that give none; needs the deadline order; default: 2000",
        unit="ms",
        positive=True,
    )
    fair_weight: float = option(2.0, "cost of a generated token in prompt tokens, for the fair order", positive=True)
    token_budget: int | Literal["auto", "large"] | None = option(
        None,
        "maximum number of tokens in one step, rounded down to whole matrix tiles; default: 2048 on CUDA, 512 on a "
        "CPU, 64 or a given max_sequences on one that computes token by token (deterministic); large is 8192 on CUDA, "
        "for work that nobody watches; auto computes it once from tbt_target and the device's profile",
        between=(1, 1 << 20),
    )
    tbt_target: float | None = option(
        None,
        "target time between tokens in ms; sets the budget of each step from the device's cost profile or an estimate, "
        "corrected by what steps take in service",
        unit="ms",
        positive=True,
    )
    steps_in_flight: int = option(
        2,
        "steps in flight at once, and one more for each stage after the first; 1 waits before planning the next",
        between=(1, 64),
    )
    cuda_graphs: bool = option(
        True, "run steps as captured CUDA graphs, if there is a GPU and the attention backend can be captured"
    )
    attention_backend: AttentionBackendName = option(  # noqa: RUF009  a string
        "auto",
        "what computes attention: auto is holdfast on a GPU, and torch on a CPU, with the library in C for steps of "
        "few tokens; holdfast is its own kernels; torch is PyTorch alone, without graphs; vllm-flash-attn is "
        "FlashAttention-3 from an installed vLLM, on Hopper",
        executor="paged",
    )
    prefix_sharing: bool = option(True, "share cached state between requests with equal prefixes")
    max_waiting: int = option(
        4096, "maximum number of waiting requests; more are refused with 503", between=(1, 1_000_000)
    )
    trace: str | None = option(None, "write a trace of every step to this file, in Chrome's trace format")
    seed: int = option(0, "seed for requests that give none", between=(0, MAX_SEED))
    deterministic: bool = option(
        False,
        "give a request the same tokens and log probabilities, bit for bit, whatever runs beside it, however its "
        "prompt is cut, and wherever its state was",
        executor="paged",
    )
    deterministic_ranks: int | None = option(
        None,
        "with deterministic, give the same bits for every tp that divides this power of two, such as 8 for 1, 2, 4 and "
        "8; each sum over ranks is cut into this number of parts, which take time; default: tp",
        between=(1, 64),
        executor="paged",
    )
    threads: int | None = option(
        None, "number of CPU threads of the engine, in all its processes; default: PyTorch's choice", between=(1, 1024)
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_names()
        self._check_devices()
        self._check_host_tier()
        self._check_executor()
        self._check_scheduling()
        if self.deterministic:
            self._check_deterministic()
        self._check_ranks()
        if self.several_devices and self.rows_only:
            raise ValueError(f"{self.several_devices}, and {self.rows_only}: padded rows run on one device; drop one")

    def _check_names(self) -> None:
        """Raises ValueError for a name of the model that is empty, too long, has a space, or is given twice."""
        for name in self.served_model_name:
            if not re.fullmatch(r"[^\s]{1,128}", name):
                raise ValueError(f"served_model_name is {name[:128]!r}; it must have 1 to 128 characters and no space")
        if len(set(self.served_model_name)) < len(self.served_model_name):
            raise ValueError("served_model_name gives a name twice; give each once")

    def _check_devices(self) -> None:
        """Raises ValueError for `devices` that are no numbers, or not one for each rank."""
        if self.devices is None:
            return
        if not re.fullmatch(r"\d{1,3}(,\d{1,3})*", self.devices):
            raise ValueError(
                f"devices is {self.devices!r}; it must be numbers of GPUs with commas between, such as 0,1"
            )
        if self.device == "cpu":
            raise ValueError(f"devices is {self.devices}, which names GPUs, and device is cpu; drop one")
        count, ranks = len(self.devices.split(",")), self.layout.ranks
        if count != ranks:
            raise ValueError(
                f"devices is {self.devices}, and tp {self.tp} times pp {self.pp} takes {ranks}; name {ranks}"
            )

    def _check_host_tier(self) -> None:
        """Raises ValueError for a host tier of size 0, and for one in which no state would ever be found again."""
        if self.host_cache_gb != "auto":
            if not 0 <= self.host_cache_gb < inf:
                raise ValueError(f"host_cache_gb is {self.host_cache_gb}; it must be auto, or at least 0, which is off")
            if self.host_cache_gb and not self.prefix_sharing:
                raise ValueError(
                    f"host_cache_gb is {self.host_cache_gb} and prefix_sharing is off: without it nothing that goes to "
                    "the host would be found again; drop one of them"
                )

    def _check_executor(self) -> None:
        """Raises ValueError for options of the other executor, and for a cache type that the backend cannot read."""
        if self.attention_backend == "vllm-flash-attn" and self.kv_cache_dtype == "fp8":
            raise ValueError(
                "attention_backend is vllm-flash-attn, which reads no FP8, and kv_cache_dtype is fp8; choose auto"
            )
        if self.executor == "paged":
            self._refuse_changed("padded")
            if self.scheduler in ROW_SCHEDULERS:
                raise ValueError(
                    f"scheduler is {self.scheduler}, which plans padded rows, and executor is paged; choose another "
                    "scheduler, or the padded executor"
                )
        elif self.executor == "padded":
            self._refuse_changed("paged")

    def _check_deterministic(self) -> None:
        """Raises ValueError for an option with which a token's bits would depend on other tokens, or on the device."""
        backend, cache = self.attention_backend, self.kv_cache_dtype
        excluded = [
            (self.rows_only, "the code of Transformers sums in an order that the size of the batch changes"),
            (f"kv_cache_dtype is {cache}" if cache != "auto" else "", "its kernels read no FP8"),
            (
                f"attention_backend is {backend}" if backend not in OWN_ATTENTION else "",
                "the batch changes the order of its sums",
            ),
        ]
        for given, reason in excluded:
            if given:
                raise ValueError(f"deterministic is on, and {given}: {reason}; drop one")

    def _check_ranks(self) -> None:
        """Raises ValueError for ranks whose sums have no tree of additions, and for their number without effect."""
        ranks = self.deterministic_ranks
        if ranks is None:
            if self.deterministic and self.tp & (self.tp - 1):
                raise ValueError(
                    f"deterministic is on, and tp is {self.tp}: ranks add their sums in a binary tree; give a power of "
                    "two"
                )
            return
        if not self.deterministic:
            raise ValueError(f"deterministic_ranks is {ranks}, which is for deterministic, and that is off; drop one")
        if ranks & (ranks - 1) or ranks % self.tp:
            raise ValueError(
                f"deterministic_ranks is {ranks}, and tp is {self.tp}; it must be a power of two, and a multiple of tp"
            )

    def _refuse_changed(self, executor: str) -> None:
        """Raises ValueError for the first changed option that only this executor reads."""
        for name, value in changed(self, executor=executor):
            raise ValueError(
                f"{name} is {value}, which is for the {executor} executor, and executor is {self.executor}; drop one"
            )

    def _check_scheduling(self) -> None:
        """Raises ValueError for targets and numbers that exclude each other, or that the scheduler or order ignores."""
        if self.ttft_target is not None and self.order != "deadline":
            raise ValueError(f"ttft_target is for the deadline order, and order is {self.order}; drop one")
        if self.scheduler not in SCHEDULERS and not re.fullmatch(r"[\w.]+:\w+", self.scheduler):
            raise ValueError(
                f"scheduler is {self.scheduler!r}; it must be one of {', '.join(SCHEDULERS)}, or a class, "
                "as module:Class"
            )
        if self.scheduler in AHEAD_SCHEDULERS:
            if self.prefill_ahead == 0:
                raise ValueError(f"prefill_ahead is 0, and scheduler is {self.scheduler}, which needs at least 1")
        elif self.prefill_ahead:
            raise ValueError(
                f"prefill_ahead is {self.prefill_ahead}, which is for {' and '.join(AHEAD_SCHEDULERS)}, and scheduler "
                f"is {self.scheduler}; drop one"
            )
        if self.tbt_target is not None and self.token_budget not in (None, "auto"):
            raise ValueError("token_budget and tbt_target both set the step's size; give one of them")
        if self.tbt_target is None and self.token_budget == "auto":
            raise ValueError("token_budget is auto, which is computed from tbt_target; give a target or a number")
        if self.tbt_target is not None and self.scheduler != "stall-free":
            raise ValueError(f"tbt_target is for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")

    def part(self, kind: type[Options]) -> Options:
        """The options of one part, with those of the core. Raises LookupError for a part that has none here."""
        if not isinstance(self, kind):
            raise LookupError(f"the configuration has no {kind.__name__}; make it a base of {type(self).__name__}")
        return self

    @property
    def equal_ranks(self) -> int:
        """Number of ranks up to which a deterministic engine gives the same bits."""
        ranks = self.tp if self.deterministic_ranks is None else self.deterministic_ranks
        return ranks if self.deterministic else 1

    @property
    def several_devices(self) -> str:
        """Why the model is not whole on one device, in words; empty if it is."""
        name = next((name for name in ("tp", "pp") if getattr(self, name) > 1), "")
        return f"{name} is {getattr(self, name)}" if name else ""

    @property
    def rows_only(self) -> str:
        """Why the model can only run on padded rows, in words; empty if a paged cache may hold it."""
        if self.executor == "padded":
            return "executor is padded"
        return f"scheduler is {self.scheduler}" if self.scheduler in ROW_SCHEDULERS else ""

    @property
    def most_sequences(self) -> int:
        """Largest number of sequences that run at once."""
        return DEFAULT_SEQUENCES if self.max_sequences is None else self.max_sequences

    @property
    def max_samples(self) -> int:
        """Largest number of tokens that a step draws."""
        return self.most_sequences

    def draft_places(self, kind: str) -> int:
        """Number of drafted tokens whose inputs recurrent layers keep at once on a `kind` of device ("cuda", "cpu").

        0: such layers verify no drafts.
        """
        return 0

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks of the host tier are sent to other engines or to lower tiers."""
        return False

    @property
    def cache_bytes(self) -> int | None:
        """Size of the KV cache in bytes, on all devices; None: the measured free memory."""
        return None if self.cache_gb is None else bytes_of_gb(self.cache_gb)

    @property
    def host_cache_bytes(self) -> int | None:
        """Size of the host tier in bytes, for all devices; None: it is chosen by the free memory."""
        return None if self.host_cache_gb == "auto" else bytes_of_gb(self.host_cache_gb)

    @property
    def has_target(self) -> bool:
        """Whether there is a target time between tokens."""
        return self.tbt_target is not None

    @property
    def tbt_seconds(self) -> float | None:
        """Target time between tokens in seconds; None if there is no target."""
        return None if self.tbt_target is None else seconds_of_ms(self.tbt_target)

    @property
    def ttft_seconds(self) -> float | None:
        """Deadline of the first token in seconds for requests that give none; None: the order's default."""
        return None if self.ttft_target is None else seconds_of_ms(self.ttft_target)

    @property
    def layout(self) -> Layout:
        """How the engine's processes share the model."""
        return Layout(self.tp, self.pp)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Number of each rank's GPU."""
        return tuple(range(self.layout.ranks)) if self.devices is None else tuple(map(int, self.devices.split(",")))

    @property
    def first_device(self) -> str:
        """The device of the engine's first process: `cpu`, or `auto` or `cuda` with the number of a GPU (`cuda:2`)."""
        return self.device if self.device == "cpu" else f"{self.device}:{self.gpus[0]}"

    @property
    def states_ahead(self) -> int:
        """Largest number of prompts computed before the batch has a row for them; 0 on paged blocks."""
        if self.scheduler not in AHEAD_SCHEDULERS:
            return 0
        return self.most_sequences if self.prefill_ahead is None else self.prefill_ahead

    @property
    def plan_rows(self) -> int:
        """Number of rows that a plan may name: rows of the batch, and states that wait for a place in it."""
        return self.most_sequences + self.states_ahead

    @property
    def fixed_token_budget(self) -> int | None:
        """The token budget if it is given as a number, else None."""
        return self.token_budget if isinstance(self.token_budget, int) else None

    def unwatched(self) -> Self:
        """This configuration for work that nobody watches: with large steps, unless it says how large they are."""
        given = self.token_budget is not None or self.tbt_target is not None
        return self if given else replace(self, token_budget="large")


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """How applications of cells run, each in an engine process of its own. Raises ValueError as EngineConfig does."""

    app: tuple[str, ...] = option(
        (), "application of cells to serve, by its name or as module:object; repeat it for several"
    )
    app_device: tuple[str, ...] = option(
        (), "where applications run: cpu, cuda:0, …; repeat it for several workers; default: the first GPU, or the CPU"
    )
    app_planner: Literal["device", "shared"] = option(
        "device",
        "who plans for several devices: each device for itself, in a process with a share of the requests, or one "
        "planner that all share, so that one request may use several",
    )
    app_max_tasks: int = option(
        5, "most tasks that a worker gets at a time; fewer let new requests join sooner", between=(1, 1024)
    )
    app_capacity: int = option(
        16384, "nodes of one application that have a place on the device; further requests wait", between=(2, 1 << 24)
    )
    app_profile: str = option(
        "auto", "batch sizes from what holdfast profile --app measured: auto (if it fits), off, or a file of it"
    )
    app_share: float = option(
        0.25,
        "share of a device's time that applications take at most while a language model has work on it, of the same "
        "server; 1: no bound",
        between=(0.01, 1.0),
    )
    app_memory_fraction: float = option(
        0.1,
        "share of a GPU's memory for applications, if a language model of the same server may use it, too",
        between=(0.01, 0.9),
    )
    app_max_requests: int = option(
        4096, "most requests of one application in progress; more are refused with 503", between=(1, 1 << 20)
    )

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.app and find_spec("numba") is None:
            raise ValueError("app needs Numba, which is not installed: pip install 'holdfast[cells]'")
        if self.app_profile not in ("auto", "off") and len(self.app) > 1:
            raise ValueError(
                f"app_profile is {self.app_profile}, and there are {len(self.app)} applications; a file is for one"
            )
        for name in self.app:
            if not re.fullmatch(r"[\w.-]+(:[\w.]+)?", name):
                raise ValueError(f"app is {name!r}; it must be a name, or look like module:object")
        for name in self.app_device:
            if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
                raise ValueError(f"app_device is {name!r}; it must be cpu, cuda, or cuda:N")

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker, as it was named. `cuda` is the first GPU."""
        return tuple("cuda:0" if device == "cuda" else device for device in self.app_device)

    @property
    def first_device(self) -> str:
        """The first GPU that an application's engine uses, `cpu` if it uses none, and `auto:0` if nothing is named."""
        return next((each for each in self.devices if each != "cpu"), "cpu") if self.app_device else "auto:0"
