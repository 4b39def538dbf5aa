"""EngineConfig: every choice of the engine, frozen; flags, YAML keys and `LLM(...)` keywords are made from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

BUILTIN_MODEL = "holdfast-tiny"

SchedulerName = Literal[
    "stall-free", "request-level", "orca", "prefill-first", "chunked-only", "hybrid-only", "unified"
]


AttentionBackendName = Literal["auto", "holdfast", "torch", "vllm-flash-attn"]

OrderName = Literal["fcfs", "priority", "deadline", "fair"]

QuantizationName = Literal["none", "fp8"]

CacheTypeName = Literal["auto", "fp8"]


def option(default: Any, help: str, unit: Literal["", "ms"] = "") -> Any:
    """A config field with its one help text. In the unit "ms" it may be given as 50, as "50ms" or as "0.05s"."""
    return field(default=default, metadata={"help": help, "unit": unit})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model. Raises ValueError, naming the value and the limit, for what cannot be."""

    model: str = option(BUILTIN_MODEL, "the built-in model by name, or a Hugging Face checkpoint directory")
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where to run; auto takes CUDA when there is a GPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "weights and cache; auto is the checkpoint's own on CUDA and float32 on a CPU"
    )
    kv_cache_dtype: CacheTypeName = option(  # noqa: RUF009  a string
        "auto", "keys and values in the cache; auto is dtype, fp8 (e4m3) takes half of 16 bits and is less exact"
    )
    load_format: Literal["auto", "random"] = option(
        "auto", "auto reads the checkpoint's weights; random draws them, from its config.json alone (benchmarks)"
    )
    quantization: QuantizationName = option(  # noqa: RUF009  a string
        "none", "fp8 rounds the layers' weights to 8 bits as they are read: half the memory, faster, less exact"
    )
    max_model_len: int | None = option(None, "longest sequence in tokens; default: what the model was made for")
    max_sequences: int = option(256, "most sequences that run at once")
    block_size: int = option(16, "tokens in one block of the KV cache")
    cache_gb: float | None = option(
        None, "size of the KV cache in GB; default: measured free memory (at most 4 on CPU)"
    )
    host_cache_gb: float | Literal["auto"] = option(
        "auto",
        "size of the host tier in GB, where idle conversations go; auto is a quarter of the free host memory on CUDA, "
        "at most 32, and none on a CPU; 0 is off",
    )
    chunk_size: int = option(32, "tokens that are given up together; a multiple of the block size")
    eviction: Literal["retention", "lru", "lru-conversation", "tail-first"] = option(
        "retention",
        "which idle chunks go first: those of the lowest recomputation cost / age, the least recently used ones, "
        "all of such a conversation, or such a one's from its end",
    )
    swap_threshold: float = option(0.25, "share of free blocks below which idle chunks are copied to the host tier")
    memory_fraction: float = option(0.9, "share of the GPU's memory that Holdfast may use")
    headroom: float = option(0.1, "share of the blocks kept for running sequences to grow")
    scheduler: SchedulerName = option(  # noqa: RUF009  a string
        "stall-free", "what runs next; all but the default are there to compare with"
    )
    order: OrderName = option(  # noqa: RUF009  a string
        "priority",
        "who goes first: first come, the priority class, the earliest deadline, or the tenant that was served least",
    )
    priority_aging: float = option(
        3600.0, "seconds of waiting that lift a request by one priority class, so that no class waits for ever"
    )
    ttft_target: float | None = option(
        None,
        "deadline of the first token in ms, for requests that name none, with the deadline order; default: 2000",
        unit="ms",
    )
    fair_weight: float = option(2.0, "prompt tokens that a generated one counts, with the fair order")
    token_budget: int | None = option(None, "most tokens in one step; default: 2048 on CUDA, 512 on a CPU")
    tbt_target: float | None = option(
        None,
        "aim for this time between tokens in ms: sets each step's budget by the device's profile, measured once",
        unit="ms",
    )
    steps_in_flight: int = option(2, "steps planned ahead of the device; 1 waits for each")
    cuda_graphs: bool = option(
        True, "run steps as captured CUDA graphs, where there is a GPU and the attention backend can be captured"
    )
    attention_backend: AttentionBackendName = option(  # noqa: RUF009  a string
        "auto",
        "what computes attention: auto is holdfast's own kernels on a GPU and torch on a CPU; torch is PyTorch alone, "
        "without graphs; vllm-flash-attn is FlashAttention-3 as an installed vLLM brings it, on Hopper",
    )
    prefix_sharing: bool = option(True, "share the cache of equal prefixes between requests")
    max_waiting: int = option(4096, "requests that may wait; further ones are refused with 503")
    trace: str | None = option(None, "write what each step does to this file, in Chrome's trace format")
    seed: int = option(0, "seed for requests that bring none")
    threads: int | None = option(None, "CPU threads of the engine; default: PyTorch's choice")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_sequences", 1, 4096),
            ("block_size", 1, 1024),
            ("steps_in_flight", 1, 64),
            ("max_waiting", 1, 1_000_000),
            ("max_model_len", 2, 1 << 24),
            ("token_budget", 1, 1 << 20),
            ("threads", 1, 1024),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must lie between {low} and {high}")
        for name, least, most in (("memory_fraction", 0.05, 1.0), ("headroom", 0.0, 0.9), ("swap_threshold", 0.0, 1.0)):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name} is {value}; it must lie between {least} and {most}")
        for name in ("cache_gb", "tbt_target", "ttft_target", "priority_aging", "fair_weight"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} is {value}; it must be above 0 and finite")
        if self.ttft_target is not None and self.order != "deadline":
            raise ValueError(f"ttft_target is for the deadline order, and order is {self.order}; drop one")
        if self.host_cache_gb != "auto":
            if not 0 <= self.host_cache_gb < inf:
                raise ValueError(f"host_cache_gb is {self.host_cache_gb}; it must be auto, or at least 0, which is off")
            if self.host_cache_gb and not self.prefix_sharing:
                raise ValueError(
                    f"host_cache_gb is {self.host_cache_gb} and prefix_sharing is off: without it nothing that goes to "
                    "the host would be found again; drop one of them"
                )
        if self.chunk_size < 1:
            raise ValueError(f"chunk_size is {self.chunk_size}; it must be at least 1")
        if self.attention_backend == "vllm-flash-attn" and self.kv_cache_dtype == "fp8":
            raise ValueError(
                "attention_backend is vllm-flash-attn, which reads no FP8, and kv_cache_dtype is fp8; choose auto"
            )
        if self.tbt_target is not None and self.token_budget is not None:
            raise ValueError("token_budget and tbt_target both set the step's size; give one of them")
        if self.tbt_target is not None and self.scheduler != "stall-free":
            raise ValueError(f"tbt_target is for the stall-free scheduler, and scheduler is {self.scheduler}; drop one")
