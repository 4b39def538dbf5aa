"""EngineConfig and AppConfig: all settings of the engines, frozen. Flags, YAML keys and keywords are made from them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from math import inf
from typing import Any, Literal, get_args

from holdfast.core.layout import Layout

BUILTIN_MODEL = "holdfast-tiny"

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
SpeculationName = Literal["auto", "off", "ngram", "suffix"]
DrafterName = Literal["ngram", "suffix"]

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
PADDED_OPTIONS = ("trust_remote_code", "prefill_ahead", "shrink_threshold")
"""Options that only the padded executor reads."""
PAGED_OPTIONS = (
    "quantization", "kv_cache_dtype", "attention_backend", "adapter", "max_adapters", "tuning", "speculation",
    "disk_cache_dir", "remote_cache",
)  # fmt: skip
"""Options that only the paged executor reads."""
LOWER_OPTIONS = ("disk_cache_dir", "remote_cache")
"""Options that add a tier below the host tier."""
TUNING_OPTIONS = (
    "deferral_bound", "tuning_memory_fraction", "tuning_micro_batch", "tuning_progress", "tuning_share",
    "tuning_mirror",
)  # fmt: skip
"""Options that are read only if `tuning` is set."""
LEAST_SAMPLES = 64
"""Tokens that a step may always draw if drafts are verified, however small the batch."""
DEFAULT_ADAPTERS = 8
"""Adapters that the device holds at a time, if adapters are served and no number is given."""
KEY_VARIABLE = "HOLDFAST_API_KEY"
"""The environment variable that holds API keys."""
OPERATOR_VARIABLE = "HOLDFAST_OPERATOR_KEY"
"""The environment variable that holds operators' keys."""


def option(
    default: Any, help: str, unit: Literal["", "ms"] = "", bare: str | None = None, named: tuple[str, ...] = ()
) -> Any:
    """A config field with its help text. A field in the unit "ms" accepts 50, "50ms" and "0.05s".

    `bare` is the value of a flag that is given without one, where that is allowed. A field with values that are `named`
    takes these, or any `module:object`.
    """
    return field(default=default, metadata={"help": help, "unit": unit, "bare": bare, "named": named})


def check_adapter_name(name: str) -> None:
    """Raises ValueError for a name that an adapter cannot have."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}", name):
        raise ValueError(
            f"the adapter's name is {name[:128]!r}; it must have 1 to 128 letters, digits, or . _ : / -, and begin "
            "with a letter or digit"
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model. Raises ValueError, naming the value and the limit, for a value out of range."""

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
        "auto", "type of keys and values; auto is dtype; fp8 (e4m3) needs half the memory of 16 bits and is less exact"
    )
    load_format: Literal["auto", "random"] = option(
        "auto", "auto reads the checkpoint's weights; random draws weights and needs only config.json (benchmarks)"
    )
    quantization: QuantizationName = option(  # noqa: RUF009  a string
        "none", "fp8 rounds the layers' weights to 8 bits while reading them: half the memory, faster, less exact"
    )
    convert: Literal["auto", "none", "embed"] = option(
        "auto",
        "which embeddings the model gives: auto those that its files describe, embed the last token's state of any "
        "model, none no embeddings",
    )
    executor: Literal["auto", "paged", "padded"] = option(
        "auto",
        "how the model runs: paged is a native decoder, or Transformers' code with its attention swapped, over a paged "
        "cache; padded is Transformers' code unmodified, on padded rows; auto is paged where it can be",
    )
    trust_remote_code: bool = option(
        False, "run the checkpoint's own Python code, with all rights of this process; for the padded executor"
    )
    tp: int = option(1, "devices that share each layer (tensor parallelism); one process each")
    pp: int = option(1, "stages that each hold a part of the layers, on tp devices each (pipeline parallelism)")
    max_model_len: int | None = option(None, "longest sequence in tokens; default: the model's own limit")
    max_sequences: int = option(256, "maximum number of sequences that run at once")
    block_size: int = option(16, "tokens in one block of the KV cache")
    cache_gb: float | None = option(
        None, "size of the KV cache in GB, on all devices; default: the measured free memory (at most 4 on a CPU)"
    )
    host_cache_gb: float | Literal["auto"] = option(
        "auto",
        "size of the host tier in GB, for all devices, where idle conversations go; auto is a quarter of the free host "
        "memory on CUDA, at most 32, and on a CPU 0, or at most 1 with chunk_host or a lower tier; 0 is off",
    )
    chunk_host: str = option(
        "",
        "address at which other engines fetch KV blocks from this one, as HOST or HOST:PORT; empty is off; several "
        "replicas on one machine use 127.0.0.1",
    )
    disk_cache_dir: str | None = option(
        None,
        "directory of this engine's disk tier: what the host tier holds is kept there too, and survives a restart; "
        "needs a host tier, which auto then brings on a CPU as well",
    )
    disk_cache_gb: float = option(20.0, "size of the disk tier in GB")
    remote_cache: str | None = option(
        None,
        "URL of a Redis service that several engines share as a tier below the host's: redis://HOST:PORT/DB; needs "
        "holdfast[redis]",
    )
    chunk_size: int = option(32, "tokens that are evicted together; rounded up to whole blocks")
    eviction: Literal["retention", "lru", "lru-conversation", "tail-first"] = option(
        "retention",
        "which idle chunks are evicted first: retention: the lowest recomputation cost / age; lru: the least recently "
        "used; lru-conversation: all of the least recently used conversation; tail-first: that conversation's end",
    )
    swap_threshold: float = option(
        0.25, "idle chunks are copied to the host tier when the share of free blocks falls below this"
    )
    memory_fraction: float = option(0.9, "share of the GPU's memory that Holdfast may use")
    memory_reserved: float = option(
        0.0,
        "share of the GPU's memory, out of memory_fraction, that is left to other programs even if they do not use it "
        "yet; with --app on the same GPU: --app-memory-fraction",
    )
    headroom: float = option(0.1, "share of the blocks reserved for the growth of running sequences")
    prefill_ahead: int | None = option(
        None,
        "prompts computed before there is a row for them in the batch; for the padded executor; default: max_sequences "
        "where the scheduler works so, else 0",
    )
    shrink_threshold: float = option(
        0.95, "rows leave the batch when it fills more than this share of its memory; for the padded executor"
    )
    adapter: tuple[str, ...] = option(
        (), "LoRA adapter to serve, as NAME=PATH of a directory in PEFT's format; repeat it for several"
    )
    max_adapters: int = option(
        0,
        "adapters that the device holds at a time; any number may be known; default: 8 with --adapter or --tuning, "
        "else 0, off",
    )
    max_adapter_rank: int = option(16, "largest rank of an adapter; each slot on the device has room for it")
    adapter_host_gb: float = option(4.0, "host memory in GB for adapters; those used longest ago are read again")
    tuning: bool = option(False, "take tuning jobs: train LoRA adapters on the weights that serve, next to inference")
    deferral_bound: float | None = option(
        None,
        "seconds that a request may wait for training at most, or for one iteration if that takes longer; 0 is "
        "inference first, inf training first; not with tbt_target, which trains in slices between streams; default: 1",
    )
    tuning_memory_fraction: float = option(
        0.5, "share of the KV cache that may be lent to training; inference takes it back when it needs it"
    )
    tuning_micro_batch: int | Literal["auto"] = option(
        "auto",
        "tokens that training computes at once, where a job does not say; auto: as many as fit into the target or "
        "the deferral bound, 512 to 8192",
    )
    tuning_share: float = option(
        0.05,
        "share of the device's time that training takes at most while a batch has work; 0: none, 1: no bound; beside "
        "chats alone, training takes what their target leaves",
    )
    tuning_progress: bool = option(
        False, "with tbt_target, train a little every 2 seconds even while requests take all of the device"
    )
    tuning_mirror: str = option(
        "auto",
        "directory in the host's memory where the state of jobs is stored after each step; auto is one in /dev/shm, if "
        "there is one; off: on the disk only, at least once a minute",
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
        3600.0, "seconds of waiting that raise a request by one priority class, so that no class waits forever"
    )
    ttft_target: float | None = option(
        None,
        "deadline of the first token in ms for requests that give none; needs the deadline order; default: 2000",
        unit="ms",
    )
    fair_weight: float = option(2.0, "cost of a generated token in prompt tokens, for the fair order")
    token_budget: int | Literal["auto"] | None = option(
        None,
        "maximum number of tokens in one step, rounded down to whole matrix tiles; default: 2048 on CUDA, 512 on a "
        "CPU; auto computes it once from tbt_target and the device's profile",
    )
    tbt_target: float | None = option(
        None,
        "target time between tokens in ms; sets the budget of each step from the device's cost profile or an estimate, "
        "corrected by what steps take in service",
        unit="ms",
    )
    speculation: SpeculationName = option(  # noqa: RUF009  a string
        "auto",
        "guess tokens and verify several in one step, where the cost model says that it pays; the text stays as it is; "
        "ngram guesses what followed the last three tokens before, suffix what followed the longest match, also in "
        "earlier answers; auto is suffix on a GPU or with tbt_target, where it can be",
    )
    draft_tokens: int = option(15, "most tokens guessed for a sequence in one step")
    steps_in_flight: int = option(
        2, "steps in flight at once, and one more for each stage after the first; 1 waits before planning the next"
    )
    cuda_graphs: bool = option(
        True, "run steps as captured CUDA graphs, if there is a GPU and the attention backend can be captured"
    )
    attention_backend: AttentionBackendName = option(  # noqa: RUF009  a string
        "auto",
        "what computes attention: auto is holdfast on a GPU and torch on a CPU; holdfast is its own kernels; torch is "
        "PyTorch alone, without graphs; vllm-flash-attn is FlashAttention-3 from an installed vLLM, on Hopper",
    )
    prefix_sharing: bool = option(True, "share cached state between requests with equal prefixes")
    max_waiting: int = option(4096, "maximum number of waiting requests; more are refused with 503")
    trace: str | None = option(None, "write a trace of every step to this file, in Chrome's trace format")
    seed: int = option(0, "seed for requests that give none")
    threads: int | None = option(
        None, "number of CPU threads of the engine, in all its processes; default: PyTorch's choice"
    )

    def __post_init__(self) -> None:
        self._check_names()
        self._check_ranges()
        self._check_host_tier()
        self._check_lower_tiers()
        self._check_chunk_host()
        self._check_executor()
        self._check_scheduling()
        self._check_adapters()
        self._check_tuning()
        self._check_layout()
        if self.speculation in ("ngram", "suffix") and (reason := self._no_drafts):
            raise ValueError(f"speculation is {self.speculation}, and {reason}; drop one")

    def _check_names(self) -> None:
        """Raises ValueError for a name of the model that is empty, too long, has a space, or is given twice."""
        for name in self.served_model_name:
            if not re.fullmatch(r"[^\s]{1,128}", name):
                raise ValueError(f"served_model_name is {name[:128]!r}; it must have 1 to 128 characters and no space")
        if len(set(self.served_model_name)) < len(self.served_model_name):
            raise ValueError("served_model_name gives a name twice; give each once")

    def _check_ranges(self) -> None:
        """Raises ValueError for a number out of its range."""
        for name, low, high in (
            ("tp", 1, 64),
            ("pp", 1, 64),
            ("max_sequences", 1, 4096),
            ("block_size", 1, 1024),
            ("steps_in_flight", 1, 64),
            ("max_waiting", 1, 1_000_000),
            ("max_model_len", 2, 1 << 24),
            ("token_budget", 1, 1 << 20),
            ("threads", 1, 1024),
            ("prefill_ahead", 0, 4096),
            ("max_adapters", 0, 1024),
            ("max_adapter_rank", 4, 128),
            ("tuning_micro_batch", 16, 1 << 20),
            ("draft_tokens", 1, 63),
        ):
            value = getattr(self, name)
            if value is not None and value != "auto" and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        for name, least, most in (
            ("memory_fraction", 0.05, 1.0),
            ("memory_reserved", 0.0, 0.95),
            ("headroom", 0.0, 0.9),
            ("swap_threshold", 0.0, 1.0),
            ("shrink_threshold", 0.1, 1.0),
            ("tuning_memory_fraction", 0.01, 0.95),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}; it must lie between {least} and {most}")
        for name in (
            "cache_gb",
            "tbt_target",
            "ttft_target",
            "priority_aging",
            "fair_weight",
            "adapter_host_gb",
            "disk_cache_gb",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size}; it must be at least 1")

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
            self._refuse_set(PADDED_OPTIONS, "the padded executor")
            if self.scheduler in ROW_SCHEDULERS:
                raise ValueError(
                    f"scheduler is {self.scheduler}, which plans padded rows, and executor is paged; choose another "
                    "scheduler, or the padded executor"
                )
        elif self.executor == "padded":
            self._refuse_set(PAGED_OPTIONS, "the paged executor")

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
        if self.tbt_target is not None and self.fixed_token_budget is not None:
            raise ValueError("token_budget and tbt_target both set the step's size; give one of them")
        if self.tbt_target is None and self.token_budget == "auto":
            raise ValueError("token_budget is auto, which is computed from tbt_target; give a target or a number")
        if self.tbt_target is not None and self.scheduler != "stall-free":
            raise ValueError(f"tbt_target is for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")

    def _check_chunk_host(self) -> None:
        """Raises ValueError for text that is not an address, and for an address at which nobody can reach this host."""
        found = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", self.chunk_host)
        if self.chunk_host and found is None:
            raise ValueError(f"chunk_host is {self.chunk_host!r}; it must look like HOST, HOST:PORT or [IPv6]:PORT")
        if found is not None and found[1] in ("0.0.0.0", "[::]"):
            raise ValueError(
                f"chunk_host is {self.chunk_host}, under which no other engine finds this one; name the host's address"
            )

    def _refuse_set(self, names: tuple[str, ...], owner: str) -> None:
        """Raises ValueError for the first of these options whose value is not its default."""
        default = {each.name: each.default for each in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != default[name]:
                raise ValueError(f"{name} is {value}, which is for {owner}, and executor is {self.executor}; drop one")

    def _check_adapters(self) -> None:
        """Raises ValueError for adapters that are not NAME=PATH, and for a name that is not one or is given twice."""
        names = [name for name, _ in self.adapters]
        for given, name in zip(self.adapter, names, strict=True):
            if "=" not in given or not given.partition("=")[2]:
                raise ValueError(f"adapter is {given!r}; it must look like NAME=PATH")
            check_adapter_name(name)
            if name in self.served_model_name:
                raise ValueError(f"{name} is both an adapter and a served_model_name; give each a name of its own")
            if names.count(name) > 1:
                raise ValueError(f"adapter {name} is given twice; give each a name of its own")

    def _check_tuning(self) -> None:
        """Raises ValueError for options of tuning that exclude each other or others."""
        if self.deferral_bound is not None and not self.deferral_bound >= 0:
            raise ValueError(f"deferral_bound is {self.deferral_bound}; it must be at least 0, or inf")
        if not self.tuning:
            default = {each.name: each.default for each in fields(self)}
            for name in TUNING_OPTIONS:
                if (value := getattr(self, name)) != default[name]:
                    raise ValueError(f"{name} is {value}, which is for tuning, and tuning is off; drop one")
            return
        if self.deferral_bound is not None and self.tbt_target is not None:
            raise ValueError(
                f"deferral_bound is {self.deferral_bound} and tbt_target is {self.tbt_target}: with a target, training "
                "runs in slices between streams and nothing is deferred; drop one"
            )
        if self.scheduler != "stall-free":
            raise ValueError(f"tuning is for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")
        if not 0 <= self.tuning_share <= 1:
            raise ValueError(f"tuning_share is {self.tuning_share}; it must be at least 0 and at most 1")
        if not self.tuning_mirror:
            raise ValueError("tuning_mirror is empty; it must be auto, off, or a directory")

    def _check_lower_tiers(self) -> None:
        """Raises ValueError for a disk or remote tier without a host tier or without prefix sharing."""
        if self.disk_cache_dir is None and self.disk_cache_gb != EngineConfig.disk_cache_gb:
            raise ValueError(f"disk_cache_gb is {self.disk_cache_gb}, and there is no disk_cache_dir; give one")
        for name in LOWER_OPTIONS:
            if (value := getattr(self, name)) is None:
                continue
            if not value:
                raise ValueError(f"{name} is empty; give it a value, or leave it out")
            said = f"{name} is set"
            if not self.prefix_sharing:
                raise ValueError(f"{said} and prefix_sharing is off: nothing would be found there again; drop one")
            if self.host_cache_gb == 0:
                raise ValueError(f"{said} and host_cache_gb is 0: it lies below the host tier; give that a size")
            if self.executor == "padded" or self.scheduler in ROW_SCHEDULERS:
                raise ValueError(f"{said}, which is for the paged executor; drop it")

    def _check_layout(self) -> None:
        """Raises ValueError if the model runs on several devices with an option that needs it whole on one."""
        several = next((name for name in ("tp", "pp") if getattr(self, name) > 1), None)
        if several is None:
            return
        said = f"{several} is {getattr(self, several)}"
        if self.executor == "padded" or self.scheduler in ROW_SCHEDULERS:
            name = "executor" if self.executor == "padded" else "scheduler"
            raise ValueError(f"{said}, and {name} is {getattr(self, name)}: padded rows run on one device; drop one")
        for name, given in (("tuning", self.tuning), ("adapter", self.adapter), ("max_adapters", self.max_adapters)):
            if given:
                raise ValueError(f"{said}, and {name} needs the whole model on one device; drop one")

    @property
    def _no_drafts(self) -> str:
        """The reason why no drafts can be verified; empty if they can."""
        if self.pp > 1:
            return f"pp is {self.pp}: drafts are verified on one stage"
        if self.scheduler != "stall-free":
            return f"scheduler is {self.scheduler}: drafts are for the stall-free one"
        return "executor is padded, which verifies none" if self.executor == "padded" else ""

    @property
    def drafter(self) -> DrafterName | None:
        """The method that guesses tokens; None if no drafts are verified."""
        if self.speculation == "off" or self._no_drafts:
            return None
        return "suffix" if self.speculation == "auto" else self.speculation

    @property
    def max_samples(self) -> int:
        """Largest number of tokens that a step draws."""
        return max(self.max_sequences, LEAST_SAMPLES if self.drafter else 0)

    @property
    def lower_tiers(self) -> bool:
        """Whether there are tiers below the host tier."""
        return self.disk_cache_dir is not None or self.remote_cache is not None

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks of the host tier are sent to other engines or to lower tiers."""
        return bool(self.chunk_host) or self.lower_tiers

    @property
    def layout(self) -> Layout:
        """How the engine's processes share the model."""
        return Layout(self.tp, self.pp)

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Name and directory of each adapter to serve."""
        return [(name, path) for name, _, path in (given.partition("=") for given in self.adapter)]

    @property
    def adapter_slots(self) -> int:
        """Number of adapters that the device holds at a time."""
        return self.max_adapters or (DEFAULT_ADAPTERS if self.adapter or self.tuning else 0)

    @property
    def states_ahead(self) -> int:
        """Largest number of prompts computed before the batch has a row for them; 0 on paged blocks."""
        if self.scheduler not in AHEAD_SCHEDULERS:
            return 0
        return self.max_sequences if self.prefill_ahead is None else self.prefill_ahead

    @property
    def plan_rows(self) -> int:
        """Number of rows that a plan may name: rows of the batch, and states that wait for a place in it."""
        return self.max_sequences + self.states_ahead

    @property
    def fixed_token_budget(self) -> int | None:
        """The token budget if it is given as a number, else None."""
        return None if self.token_budget == "auto" else self.token_budget


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """How applications of cells run, each in an engine process of its own. Raises ValueError as EngineConfig does."""

    app: tuple[str, ...] = option(
        (), "application of cells to serve, by its name or as module:object; repeat it for several"
    )
    app_device: tuple[str, ...] = option(
        (), "where applications run: cpu, cuda:0, …; repeat it for several workers; default: the first GPU, or the CPU"
    )
    app_max_tasks: int = option(5, "most tasks that a worker gets at a time; fewer let new requests join sooner")
    app_capacity: int = option(16384, "nodes of one application that have a place on the device; further requests wait")
    app_profile: str = option(
        "auto", "batch sizes from what holdfast profile --app measured: auto (if it fits), off, or a file of it"
    )
    app_share: float = option(
        0.25,
        "share of a device's time that applications take at most while a language model has work on it, of the same "
        "server; 1: no bound",
    )
    app_memory_fraction: float = option(
        0.1, "share of a GPU's memory for applications, if a language model of the same server may use it, too"
    )
    app_max_requests: int = option(4096, "most requests of one application in progress; more are refused with 503")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("app_max_tasks", 1, 1024),
            ("app_capacity", 2, 1 << 24),
            ("app_max_requests", 1, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        if not 0 < self.app_share <= 1:
            raise ValueError(f"app_share is {self.app_share}; it must be above 0 and at most 1")
        if not 0.01 <= self.app_memory_fraction <= 0.9:
            raise ValueError(f"app_memory_fraction is {self.app_memory_fraction}; it must lie between 0.01 and 0.9")
        if self.app and find_spec("numba") is None:
            raise ValueError("app needs Numba, which is not installed: pip install 'holdfast[cells]'")
        if self.app_profile not in ("auto", "off", "") and len(self.app) > 1:
            raise ValueError(
                f"app_profile is {self.app_profile}, and there are {len(self.app)} applications; a file is for one"
            )
        if not self.app_profile:
            raise ValueError("app_profile is empty; it must be auto, off, or a file")
        for name in self.app:
            if not re.fullmatch(r"[\w.-]+(:[\w.]+)?", name):
                raise ValueError(f"app is {name!r}; it must be a name, or look like module:object")
        for name in self.app_device:
            if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
                raise ValueError(f"app_device is {name!r}; it must be cpu, cuda, or cuda:N")
