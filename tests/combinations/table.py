"""The table of the engine's features and of every pair of them: it works, or it does not for a reason.

`scripts/combinations.py` draws docs/combinations.md from it. The tests serve each pair that works, and have the engine
give the reason for any other. It needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple


class Feature(NamedTuple):
    """A feature of the engine, and how the page shows it."""

    title: str
    short: str
    """Heading of its column."""
    asked: str
    """What turns it on, in Markdown."""
    effect: str
    """What a test sees of it in each pair that works."""
    options: dict[str, Any]
    """Options of an engine that is asked for it. Tests that serve it choose sizes, addresses and directories."""


FEATURES = {
    "paged": Feature(
        "paged executor", "paged", "`--executor paged`",
        "a later turn finds its blocks in the cache", {"executor": "paged"},
    ),
    "padded": Feature(
        "padded rows", "rows", "`--executor padded`",
        "Transformers' own module computes rows of a batch", {"executor": "padded"},
    ),
    "encoder-decoder": Feature(
        "encoder-decoder", "T5", "a model such as T5",
        "a T5 gives the answers of an engine without other features", {"model": "t5"},
    ),
    "hybrid": Feature(
        "recurrent layers", "hybrid", "a model such as Qwen3.5 or Bamba",
        "a later turn goes on from the recurrent state at the end of the one before", {"model": "hybrid"},
    ),
    "tp": Feature(
        "tensor parallelism", "tp", "`--tp 2`",
        "each process has a part of every layer, and the answers are those of one process", {"tp": 2},
    ),
    "pp": Feature(
        "pipeline parallelism", "pp", "`--pp 2`",
        "each process has some of the layers, and the answers are those of one process", {"pp": 2},
    ),
    "host": Feature(
        "host tier", "host", "`--host-cache-gb`",
        "a later turn finds state that had left the device; a T5 goes on after it was suspended",
        {"host_cache_gb": 1.0},
    ),
    "disk": Feature(
        "disk tier", "disk", "`--disk-cache-dir`",
        "a later turn reads blocks from the disk", {"disk_cache_dir": "/var/cache/holdfast"},
    ),
    "remote": Feature(
        "remote tier", "Redis", "`--remote-cache`",
        "a later turn reads blocks from Redis", {"remote_cache": "redis://cache:6379/0"},
    ),
    "moves": Feature(
        "moves", "moves", "`--chunk-host`",
        "blocks come from another engine, and a prompt is served from them", {"chunk_host": "127.0.0.1"},
    ),
    "grammars": Feature(
        "grammars", "gram.", "a request's `response_format`",
        "the answer matches its grammar", {},
    ),
    "drafts": Feature(
        "drafts", "drafts", "`--speculation`",
        "drafts are accepted", {"speculation": "ngram"},
    ),
    "adapters": Feature(
        "adapters", "LoRA", "`--adapter`",
        "answers are those of the adapter, and most differ from the base model's", {"max_adapters": 2},
    ),
    "tuning": Feature(
        "tuning", "tuning", "`--tuning`",
        "a job's loss falls, and its adapter changes an answer", {"tuning": True, "tuning_mirror": "off"},
    ),
    "fp8-weights": Feature(
        "FP8 weights", "FP8", "`--quantization fp8`",
        "the weights are in FP8", {"quantization": "fp8"},
    ),
    "4-bit": Feature(
        "4-bit weights", "4-bit", "a checkpoint of AWQ or GPTQ",
        "the weights are in 4 bits", {"model": "4-bit"},
    ),
    "fp8-cache": Feature(
        "FP8 cache", "FP8 KV", "`--kv-cache-dtype fp8`",
        "keys and values are in FP8", {"kv_cache_dtype": "fp8"},
    ),
    "target": Feature(
        "latency target", "target", "`--tbt-target`",
        "a prompt beside a stream is cut to the target; with tuning, slices of training fit between its tokens",
        {"tbt_target": 50.0},
    ),
    "priorities": Feature(
        "priorities", "prio.", "batches, a request's `priority`",
        "a chat takes the row of a batch's line", {},
    ),
    "tenants": Feature(
        "limit of tenants", "tenants", "`--max-tenant-sequences`",
        "a key's further requests wait, and another key's pass them", {"max_tenant_sequences": 2},
    ),
    "contracts": Feature(
        "contracts", "contr.", "`--contracts`, a request's `ttft_ms`, `tbt_ms`, `complete_ms`",
        "contracts are accepted and kept, and one that no engine could keep is refused", {"contracts": "on"},
    ),
    "deterministic": Feature(
        "the same bits", "bits", "`--deterministic`",
        "the answers have the bits of a like engine that computes one request at a time", {"deterministic": True},
    ),
    "heads": Feature(
        "draft heads", "heads", "`--draft-model`",
        "drafts of an EAGLE-3 head are accepted", {"draft_model": "head"},
    ),
    "sleep": Feature(
        "sleep", "sleep", "`--enable-sleep-mode`",
        "the engine sleeps at both levels while answers are written, and they go on after it",
        {"enable_sleep_mode": True},
    ),
}  # fmt: skip

T5 = "T5ForConditionalGeneration is an encoder-decoder; only causal decoders are served"
ON_ROWS = "which is for the paged executor, and executor is padded; drop one"
NO_CONTRACTS = "contracts is on, and the model runs on padded rows"
NO_MOVES = "The engine starts, and moves nothing."
ONE_DEVICE = "an engine that sleeps has one; drop one of them"


class Refusal(NamedTuple):
    """A pair that is not served."""

    pair: tuple[str, str]
    reason: str
    """The engine's own words, or their beginning where a list of models follows."""
    starts: str = ""
    """What the engine does without the second feature, if it starts and reports the reason (`EngineInfo`)."""
    options: tuple[tuple[str, str], ...] = ()
    """Further options that ask for the pair, where those of the two features name one option twice."""


REFUSALS = (
    Refusal(
        ("paged", "padded"),
        "scheduler is run-to-completion, which plans padded rows, and executor is paged; choose another scheduler, or "
        "the padded executor",
        options=(("executor", "paged"), ("scheduler", "run-to-completion")),
    ),
    Refusal(("paged", "encoder-decoder"), T5),
    Refusal(("encoder-decoder", "hybrid"), T5, options=(("model", "t5"), ("executor", "paged"))),
    Refusal(("encoder-decoder", "tp"), T5),
    Refusal(("encoder-decoder", "pp"), T5),
    Refusal(("padded", "tp"), "tp is 2, and executor is padded: padded rows run on one device; drop one"),
    Refusal(("padded", "pp"), "pp is 2, and executor is padded: padded rows run on one device; drop one"),
    Refusal(
        ("encoder-decoder", "disk"),
        "disk_cache_dir is set, and no state of this model serves a later prompt: nothing would be read; leave it out",
    ),
    Refusal(("padded", "remote"), f"remote_cache is redis://cache:6379/0, {ON_ROWS}"),
    Refusal(
        ("encoder-decoder", "remote"), f"{T5}; padded rows cannot run it with remote_cache redis://cache:6379/0"
    ),
    Refusal(("padded", "moves"), "padded rows hold no blocks that could move", starts=NO_MOVES),
    Refusal(("encoder-decoder", "moves"), "padded rows hold no blocks that could move", starts=NO_MOVES),
    Refusal(("padded", "drafts"), f"speculation is ngram, {ON_ROWS}"),
    Refusal(("encoder-decoder", "drafts"), f"{T5}; padded rows cannot run it with speculation ngram"),
    Refusal(
        ("encoder-decoder", "adapters"),
        "adapters are those of causal models (task_type CAUSAL_LM), and T5ForConditionalGeneration is an "
        "encoder-decoder; leave out adapter and max_adapters",
    ),
    Refusal(("padded", "tuning"), f"tuning is True, {ON_ROWS}"),
    Refusal(("encoder-decoder", "tuning"), f"{T5}; padded rows cannot run it with tuning True"),
    Refusal(("padded", "fp8-weights"), f"quantization is fp8, {ON_ROWS}"),
    Refusal(("encoder-decoder", "fp8-weights"), f"{T5}; padded rows cannot run it with quantization fp8"),
    Refusal(
        ("padded", "4-bit"), "the checkpoint is quantized (awq), which runs by native decoders over a paged cache"
    ),
    Refusal(
        ("encoder-decoder", "4-bit"),
        f"{T5}; on padded rows: the checkpoint is quantized (awq), which runs by native decoders over a paged cache",
        options=(("model", "t5-4-bit"),),
    ),
    Refusal(("padded", "fp8-cache"), f"kv_cache_dtype is fp8, {ON_ROWS}"),
    Refusal(("encoder-decoder", "fp8-cache"), f"{T5}; padded rows cannot run it with kv_cache_dtype fp8"),
    Refusal(
        ("encoder-decoder", "target"),
        "the TBT target does not bind prompts, which the model cannot compute in chunks",
        starts="The engine starts, and the target bounds the number of prompts in a step, not their length.",
    ),
    Refusal(("padded", "contracts"), NO_CONTRACTS),
    Refusal(("encoder-decoder", "contracts"), NO_CONTRACTS),
    Refusal(("padded", "deterministic"), f"deterministic is True, {ON_ROWS}"),
    Refusal(("encoder-decoder", "deterministic"), f"{T5}; padded rows cannot run it with deterministic True"),
    Refusal(
        ("fp8-cache", "deterministic"),
        "deterministic is on, and kv_cache_dtype is fp8: its kernels read no FP8; drop one",
    ),
    Refusal(("padded", "heads"), f"draft_model is head, {ON_ROWS}"),
    Refusal(("encoder-decoder", "heads"), f"{T5}; padded rows cannot run it with draft_model head"),
    Refusal(
        ("hybrid", "heads"),
        "draft_model is for layers of attention, and of those of BambaForCausalLM 2 are recurrent",
    ),
    Refusal(("tp", "heads"), "draft_model is head, and tp is 2 and pp is 1: a draft head runs on one device; drop one"),
    Refusal(("pp", "heads"), "draft_model is head, and tp is 1 and pp is 2: a draft head runs on one device; drop one"),
    Refusal(("drafts", "heads"), "draft_model is head, and speculation is ngram; drop one"),
    Refusal(("padded", "sleep"), f"enable_sleep_mode is True, {ON_ROWS}"),
    Refusal(("encoder-decoder", "sleep"), f"{T5}; padded rows cannot run it with enable_sleep_mode True"),
    Refusal(
        ("hybrid", "sleep"),
        "enable_sleep_mode is on, and the states of recurrent layers cannot be returned; leave it out",
    ),
    Refusal(("tp", "sleep"), f"enable_sleep_mode is on, and tp 2 times pp 1 takes 2 devices: {ONE_DEVICE}"),
    Refusal(("pp", "sleep"), f"enable_sleep_mode is on, and tp 1 times pp 2 takes 2 devices: {ONE_DEVICE}"),
    Refusal(
        ("tuning", "sleep"),
        "enable_sleep_mode and tuning are on, and a tuning job keeps memory that cannot be returned; drop one",
    ),
    Refusal(
        ("fp8-weights", "4-bit"),
        "float32, fp8 weights",
        starts="A weight has one format. The engine starts, and rounds the layers' 4 bits again, to 8.",
    ),
)  # fmt: skip

REFUSED = {frozenset(refusal.pair): refusal for refusal in REFUSALS}


def pairs() -> Iterator[tuple[str, str]]:
    """Every pair of features, in the order of the table."""
    return combinations(FEATURES, 2)


def is_served(*features: str) -> bool:
    """Whether the table has no refusal for two of these features."""
    return not any(frozenset(pair) in REFUSED for pair in combinations(features, 2))


def served_pairs() -> list[tuple[str, str]]:
    """Every pair that works."""
    return [pair for pair in pairs() if is_served(*pair)]
