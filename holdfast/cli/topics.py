"""Topics of options: the options in the short help, and the groups of the whole help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.config import EngineConfig

COMMON: Mapping[str, Sequence[str]] = {
    "ClusterConfig": ("replicas",),
    "EngineConfig": (
        "device", "dtype", "quantization", "max_model_len", "max_sequences", "cache_gb", "tbt_target", "adapter",
    ),
    "ServerConfig": ("host", "port", "api_key", "store", "log_level"),
    "AppConfig": ("app",),
}  # fmt: skip
"""The options of a config that the short help shows. If a config is not listed here, all of its options are shown."""
TOPICS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "EngineConfig": {
        "the model": (
            "device", "dtype", "quantization", "executor", "trust_remote_code", "load_format", "convert",
            "max_model_len", "seed",
        ),
        "memory": (
            "max_sequences", "max_waiting", "cache_gb", "memory_fraction", "memory_reserved",
            "headroom", "block_size", "kv_cache_dtype",
            "prefix_sharing", "host_cache_gb", "chunk_size", "eviction", "swap_threshold",
        ),
        "pace and order": (
            "tbt_target", "token_budget", "scheduler", "order", "ttft_target", "priority_aging", "fair_weight",
        ),
        "adapters": ("adapter", "max_adapters", "max_adapter_rank", "adapter_host_gb"),
        "tuning": (
            "tuning", "deferral_bound", "tuning_memory_fraction", "tuning_micro_batch", "tuning_share",
            "tuning_progress", "tuning_mirror",
        ),
        "padded rows": ("prefill_ahead", "shrink_threshold"),
        "how steps run": ("steps_in_flight", "cuda_graphs", "attention_backend", "threads", "trace"),
    },
    "ServerConfig": {
        "the address": (
            "host", "port", "api_key", "allowed_host", "allowed_origin", "root_path", "ssl_certfile", "ssl_keyfile",
            "log_level",
        ),
        "tools and reasoning": ("tool_call_parser", "reasoning_parser"),
        "limits of requests and connections": (
            "max_choices", "tenant_share", "max_body_mb", "max_bodies_mb", "max_connections", "header_seconds",
            "body_seconds", "idle_seconds", "write_seconds", "health_seconds", "drain_seconds",
        ),
        "tracing": ("otlp_traces_endpoint",),
        "what is kept": (
            "store", "store_days", "store_conversations", "store_gb", "files", "max_file_mb", "files_gb",
            "tuning_state", "adapter_root",
        ),
    },
}  # fmt: skip
"""The groups of a config's options in the whole help, each with its title. Other options follow under the config's own
title.
"""


def titled(config: type, title: str, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """These options of a config by topic, each with its title. `title` is for options without a topic."""
    topics = TOPICS.get(config.__name__, {})
    known = {name for members in topics.values() for name in members}
    prefix = f"{title}: " if config is EngineConfig else ""
    found = [(f"{prefix}{topic}", [name for name in members if name in names]) for topic, members in topics.items()] + [
        (title, [name for name in names if name not in known])
    ]
    return [(topic, members) for topic, members in found if members]


def common(config: type, names: Sequence[str]) -> list[str]:
    """The fields in `names` that the short help shows."""
    shown = COMMON.get(config.__name__)
    return [name for name in names if shown is None or name in shown]
