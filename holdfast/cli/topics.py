"""Topics of options: which options the short help shows, and how the full help groups them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.core.config import CoreConfig, own_options
from holdfast.lm.config import EngineConfig

COMMON: Mapping[str, Sequence[str]] = {
    "ClusterConfig": ("replicas",),
    "EngineConfig": (
        "device", "dtype", "quantization", "max_model_len", "max_sequences", "cache_gb", "adapter", "tbt_target",
    ),
    "ServerConfig": ("host", "port", "api_key", "log_level", "store"),
    "AppConfig": ("app",),
}  # fmt: skip
"""Options that the short help shows, by config. For a config that is not listed, it shows all options."""


def topics_of_parts() -> dict[str, list[str]]:
    """Return the options of each part that has its own topic, by topic."""
    parts = [
        kind for kind in reversed(EngineConfig.__mro__) if issubclass(kind, CoreConfig) and vars(kind).get("topic")
    ]
    return {part.topic: [option.name for option in own_options(part)] for part in parts}


TOPICS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "EngineConfig": {
        "the model": (
            "device", "devices", "dtype", "quantization", "executor", "trust_remote_code", "load_format", "convert",
            "max_model_len", "seed",
        ),
        "memory": (
            "max_sequences", "max_waiting", "cache_gb", "memory_fraction", "memory_reserved",
            "headroom", "block_size", "kv_cache_dtype",
            "prefix_sharing", "host_cache_gb", "chunk_size", "eviction", "swap_threshold",
            "swap_in", "swap_in_groups",
        ),
        "pace and order": (
            "tbt_target", "token_budget", "scheduler", "order", "ttft_target", "priority_aging", "fair_weight",
        ),
        **topics_of_parts(),
        "padded rows": ("prefill_ahead", "shrink_threshold"),
        "how steps run": ("steps_in_flight", "cuda_graphs", "attention_backend", "threads", "trace"),
    },
    "ServerConfig": {
        "the address": (
            "host", "port", "grpc_port", "api_processes", "api_key", "allowed_host", "allowed_origin", "root_path",
            "ssl_certfile", "ssl_keyfile",
        ),
        "tools and reasoning": ("tool_call_parser", "reasoning_parser"),
        "limits of requests and connections": (
            "max_choices", "tenant_share", "max_body_mb", "max_bodies_mb", "max_connections", "header_seconds",
            "body_seconds", "idle_seconds", "write_seconds", "health_seconds", "lame_duck_seconds",
            "drain_seconds",
        ),
        "logs and traces": ("log_level", "log_format", "slow_ms", "otlp_traces_endpoint"),
        "what is kept": (
            "store", "store_days", "store_conversations", "store_gb", "files", "max_file_mb", "files_gb",
            "tuning_state", "adapter_root",
        ),
    },
}  # fmt: skip
"""Groups of options in the full help, by config and title. Options without a group come under the config's title."""


def titled(config: type, title: str, names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return these options of a config by topic, with the topics' titles. `title` is for options without a topic."""
    topics = TOPICS.get(config.__name__, {})
    known = {name for members in topics.values() for name in members}
    prefix = f"{title}: " if config is EngineConfig else ""
    found = [(f"{prefix}{topic}", [name for name in members if name in names]) for topic, members in topics.items()] + [
        (title, [name for name in names if name not in known])
    ]
    return [(topic, members) for topic, members in found if members]


def common(config: type, names: Sequence[str]) -> list[str]:
    """Return the fields in `names` that the short help shows, in its order."""
    return [name for name in COMMON.get(config.__name__, names) if name in names]
