"""Workloads: conversations with lengths and arrival times, from traces, fitted distributions or fixed lengths."""

from holdfast.lab.workloads.agents import AGENTS, AGENTS_SHORT, CHAT, SESSIONS, Sessions, sessions, shorter
from holdfast.lab.workloads.azure import azure_csv
from holdfast.lab.workloads.chats import chats_json
from holdfast.lab.workloads.config import MAX_VARIATION, MIN_VARIATION, WorkloadConfig
from holdfast.lab.workloads.generated import (
    DATASETS,
    SHAREGPT,
    ULTRACHAT,
    ConversationMeans,
    Dataset,
    fixed,
    multi_turn,
    sample_dataset,
)
from holdfast.lab.workloads.mooncake import mooncake_jsonl
from holdfast.lab.workloads.tokens import History, PromptTokens
from holdfast.lab.workloads.values import (
    HASH_BLOCK,
    Common,
    Conversation,
    LeftOut,
    Lengths,
    LongerName,
    Turn,
    Workload,
    fit_context,
    gamma_arrivals,
    num_requests,
    promise,
    speed_up,
)

__all__ = [
    "AGENTS", "AGENTS_SHORT", "CHAT", "DATASETS", "HASH_BLOCK", "MAX_VARIATION", "MIN_VARIATION", "SESSIONS",
    "SHAREGPT", "ULTRACHAT", "Common", "Conversation", "ConversationMeans", "Dataset", "History", "LeftOut", "Lengths",
    "LongerName", "PromptTokens", "Sessions", "Turn", "Workload", "WorkloadConfig", "azure_csv", "chats_json",
    "fit_context", "fixed", "gamma_arrivals", "mooncake_jsonl", "multi_turn", "num_requests", "promise",
    "sample_dataset", "sessions", "shorter", "speed_up",
]  # fmt: skip
