"""Wiring: every option of the engine changes what is built."""

from __future__ import annotations

import shutil
import time
from dataclasses import fields
from unittest.mock import create_autospec

import pytest
import torch

from holdfast.core.stages import Stages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.build import build, choose_device
from holdfast.engine.process.trace import Trace
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import paged_device
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.kernels.attention.protocol import CapturableAttention
from holdfast.lm.memory.retention import EVICTIONS, cost_by_position
from holdfast.lm.memory.turns import APPRAISALS
from holdfast.lm.models.loader import load
from holdfast.lm.parts.adapters.planner import AdapterPart
from holdfast.lm.parts.contracts.planner import ContractPart
from tests.adapters import drawn, write
from tests.built import SCHEDULING, check, settings_of
from tests.engine.conftest import SMALL

BLOCK = 2 * 2 * 16 * 2 * 16 * 4
"""Bytes of a block: layers, keys and values, tokens, heads, head size, bytes of a float32."""

REPORTED = {
    "served_model_name": ({"served_model_name": ("mine", "too")}, "model", "mine"),
    "dtype": ({"dtype": "bfloat16"}, "precision", "bfloat16"),
    "kv_cache_dtype": ({"kv_cache_dtype": "fp8"}, "precision", "float32, fp8 cache"),
    "quantization": ({"quantization": "fp8"}, "precision", "float32, fp8 weights"),
    "max_model_len": ({"max_model_len": 160}, "max_model_len", 160),
    "max_sequences": ({"max_sequences": 5}, "max_sequences", 5),
    "block_size": ({"block_size": 8}, "block_size", 8),
    "cache_gb": ({"cache_gb": 12 * BLOCK / 1e9}, "num_blocks", 12),
    "host_cache_gb": ({"host_cache_gb": 100 * BLOCK / 1e9}, "num_host_blocks", 100),
    "token_budget": ({"token_budget": 32}, "token_budget", 32),
    "max_waiting": ({"max_waiting": 9}, "max_waiting", 9),
}
"""For each option that the engine reports: what sets it, the field of EngineInfo, and its value."""
OTHERS = {
    "model", "device", "devices", "load_format", "memory_fraction", "steps_in_flight", "cuda_graphs",
    "attention_backend", "trace", "threads", "executor", "trust_remote_code", "prefill_ahead", "shrink_threshold",
    "adapter", "max_adapters", "max_adapter_rank", "adapter_host_gb", "dora", "tuning", "deferral_bound",
    "tuning_memory_fraction", "tuning_micro_batch", "tuning_progress", "tuning_mirror", "tp", "pp", "speculation",
    "tuning_share", "memory_reserved", "draft_model",
    "draft_tokens", "revision", "chat_template", "convert", "generation_config", "override_generation_config",
    "chunk_host", "swap_in_groups", "disk_cache_dir", "disk_cache_gb", "remote_cache",
    "snapshot_share", "contracts", "contract_confidence", "contract_share", "swap_in_ahead",
    "deterministic", "deterministic_ranks", "enable_sleep_mode",
}  # fmt: skip
"""Options with a test of their own below, or in test_tuning, test_many_device, test_hub, test_text, test_generation,
test_tiers, test_moving, test_states, test_speculation, test_same_bits, test_sleep_mode, test_planner of pauses or the
test of embeddings."""


@pytest.fixture(scope="module")
def built(checkpoint):
    """What the tests' own defaults build."""
    loop, info = build(EngineConfig(model=str(checkpoint), **SMALL))
    return settings_of(loop.planner), info


def test_every_option_has_a_test_of_what_it_builds():
    assert {field.name for field in fields(EngineConfig)} == {*SCHEDULING, *REPORTED, *OTHERS}


@pytest.mark.parametrize("name", SCHEDULING)
def test_every_option_of_the_scheduler_reaches_it(name, small, built):
    loop, _ = build(small(**SCHEDULING[name][0]))
    check(name, settings_of(loop.planner), built[0])


@pytest.mark.parametrize("name", REPORTED)
def test_every_option_of_the_sizes_shows_in_what_the_engine_reports(name, small, built):
    options, field, expected = REPORTED[name]
    assert getattr(built[1], field) != expected
    assert getattr(build(small(**options))[1], field) == expected


def test_the_options_of_padded_rows_reach_the_pool_and_the_queues(small):
    loop, _ = build(small(executor="padded", scheduler="embedding", shrink_threshold=0.5, prefill_ahead=3))
    queues = loop.planner._queues
    assert queues.pool._threshold == 0.5
    assert (queues.prefill_ahead, queues.max_sequences, len(queues.free_rows)) == (3, 8, 11)
    loop.close()
    loop, _ = build(small(executor="padded", eviction="lru", prefix_sharing=False, swap_threshold=0.5))
    pool = loop.planner._queues.pool
    assert pool.kept._rule.eviction == EVICTIONS["lru"] and not pool.keeps and pool._low_water == 0.5
    loop.close()


@pytest.mark.parametrize(("groups", "made"), [(1, 1), (2, 2), (64, 2)])
def test_a_swap_in_is_copied_in_as_many_groups_of_the_two_layers_as_asked_for(small, groups, made):
    loop, _ = build(small(host_cache_gb=100 * BLOCK / 1e9, swap_in_groups=groups))
    assert len(loop.executor.memory.transfers._groups) == made
    loop.close()


def test_the_engine_says_that_a_budget_is_rounded_to_whole_tiles(small):
    assert build(small(token_budget=35))[1].budget_note == "32 of 35 are used, whole matrix tiles of 16"
    assert build(small(token_budget=32))[1].budget_note == ""


def test_the_engine_warns_of_a_target_below_its_smallest_step(small, caplog):
    _, info = build(small(tbt_target=0.001, token_budget=None))
    assert info.budget_note.startswith("the TBT target of 0.001 ms is below the smallest step, which takes ")
    assert caplog.messages == [f"holdfast: {info.budget_note}"]
    assert build(small(tbt_target=10_000.0, token_budget=None))[1].budget_note == ""


def test_the_paged_executor_runs_where_it_is_asked_for(small):
    loop, _ = build(small(executor="paged"))
    assert isinstance(loop.executor, PagedExecutor)


def test_the_model_is_read_from_its_directory(small, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "another")
    assert build(small(model=str(tmp_path / "another")))[1].model == "another"


def test_random_weights_need_no_file(small, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors*"))
    assert build(small(model=str(tmp_path / "bare"), load_format="random"))[1].model == "bare"
    with pytest.raises(ValueError, match="safetensors"):
        build(small(model=str(tmp_path / "bare")))


def test_the_device_is_the_one_of_the_option(small, monkeypatch):
    asked = []
    resolve = paged_device.resolve_device
    monkeypatch.setattr(
        "holdfast.engine.ranks.paged.resolve_device", lambda name, gpu: (asked.append((name, gpu)), resolve("cpu"))[1]
    )
    for name in ("cuda", "cpu", "auto"):
        build(small(device=name))
    build(small(device="cuda", devices="3"))
    assert asked == [("cuda", None), ("cpu", None), ("auto", None), ("cuda", 3)]


def test_an_attention_backend_for_a_gpu_is_refused_on_a_cpu(small):
    for backend in ("holdfast", "vllm-flash-attn"):
        with pytest.raises(ValueError, match=f"attention_backend is {backend}, which takes a GPU"):
            build(small(attention_backend=backend))


def test_the_attention_backend_of_the_option_is_made(small, monkeypatch):
    made = []
    make = paged_device.attention_of_layers
    monkeypatch.setattr(
        paged_device,
        "attention_of_layers",
        lambda *args, **sizes: (made.append(sizes["backend"]), make(*args, **sizes))[1],
    )
    for backend in ("torch", "auto"):
        build(small(attention_backend=backend))
    assert made == ["torch", "auto"]


@pytest.fixture
def on_a_gpu(small, checkpoint, monkeypatch):
    """Makes the engine's device, which then takes itself for a GPU."""

    def make(**options):
        device, _ = choose_device(small(**options), Checkpoint.find(str(checkpoint)), Stages(0.0, time.monotonic))
        monkeypatch.setattr(device, "device", torch.device("cuda"))
        device.attention = create_autospec(CapturableAttention, instance=True)
        return device

    monkeypatch.setattr(paged_device, "describe_device", str)
    return make


def test_cuda_graphs_are_captured_unless_they_are_off(on_a_gpu):
    assert on_a_gpu().captures
    assert not on_a_gpu(cuda_graphs=False).captures


def test_the_cache_on_a_gpu_takes_the_given_share_of_memory_beside_what_others_and_a_step_take(on_a_gpu):
    for options, share in (({}, 0.9), ({"memory_fraction": 0.5}, 0.5)):
        device = on_a_gpu(cache_gb=None, **options)
        free, total, activations = 70_000_000_000, 80_000_000_000, 2_000_000_000
        assert (
            device._cache_bytes(free, total, activations, device._shared_bytes)
            == int(share * total) - 10_000_000_000 - 2_000_000_000
        )


def test_as_many_steps_are_submitted_at_once_as_the_option_says(small):
    for steps in (1, 2, 3):
        assert build(small(steps_in_flight=steps))[0]._steps_in_flight == steps


def test_contracts_are_taken_as_the_options_say(small):
    def parts(**options):
        return [each for each in build(small(**options))[0].planner.parts if isinstance(each, ContractPart)]

    assert not parts() and not parts(contracts="off", token_budget=None, tbt_target=40.0)
    (part,) = parts(contracts="on", contract_confidence=0.9, contract_share=0.25)
    assert (part._lengths._confidence, part._share) == (0.9, 0.25)


def test_drafts_are_guessed_as_the_options_say(small):
    def drafting(**options):
        settings = settings_of(build(small(**options))[0].planner)
        return settings["speculation"], settings["draft_tokens"]

    assert drafting(speculation="ngram", draft_tokens=5) == ("NgramDrafter", 5)
    assert drafting(speculation="suffix") == ("SuffixDrafter", 15)
    assert drafting(token_budget=None, tbt_target=40.0) == ("SuffixDrafter", 15)
    for off in ({}, {"token_budget": None, "tbt_target": 40.0, "speculation": "off"}):
        assert drafting(**off) == (None, None)


def test_a_trace_is_written_to_the_given_file(small, tmp_path):
    assert not build(small())[0]._observers
    path = tmp_path / "trace.json"
    loop, _ = build(small(trace=str(path)))
    loop.close()
    assert isinstance(loop._observers[0], Trace) and path.stat().st_size


def test_threads_are_set(small):
    before = torch.get_num_threads()
    try:
        for threads in (2, 1):
            build(small(threads=threads))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_adapters_are_read_and_get_slots_of_the_given_rank_and_number(small, checkpoint, tmp_path):
    sizes = load(checkpoint, device="cpu", dtype="float32").decoder
    path = write(tmp_path, drawn(sizes, 8, seed=0))
    assert build(small())[1].adapter_slots == 0
    loop, info = build(small(adapter=(f"a={path}",), max_adapters=3))
    assert [(adapter.name, adapter.rank, len(adapter.modules)) for adapter in info.adapters] == [("a", 8, 7)]
    assert info.adapter_slots == loop.planner.part(AdapterPart).pool.num_slots == 3
    wide = build(small(max_adapters=3, max_adapter_rank=32))[1].memory.adapters
    assert 2 * info.memory.adapters > wide > 1.9 * info.memory.adapters
    for options, reason in (
        ({"max_adapter_rank": 4}, "rank 8"),
        ({"adapter_host_gb": 1e-6}, "adapter_host_gb is 1e-06"),
    ):
        with pytest.raises(ValueError, match=f"adapter a in .*{reason}"):
            build(small(adapter=(f"a={path}",), **options))


@pytest.mark.parametrize(("name", "appraisal"), APPRAISALS.items())
def test_all_tiers_order_their_idle_blocks_by_the_same_turns(name, appraisal, small):
    loop, _ = build(small(eviction=name, host_cache_gb=100 * BLOCK / 1e9))
    pool = loop.planner._queues.pool
    assert pool.rule.turns._appraise is appraisal
    assert {pool._idle.retained._tracker, pool.host._retained._tracker} == {pool.rule.turns}
    assert (pool._idle.retained._capacity, pool.host._retained._capacity) == (pool.num_blocks, pool.host.num_blocks)
    loop.close()


def test_a_tier_that_keeps_what_is_dear_to_compute_has_a_cost_profile(small):
    for name, has in (("pauses", True), ("retention", True), ("ttl", False), ("lru", False)):
        loop, _ = build(small(eviction=name, host_cache_gb=100 * BLOCK / 1e9))
        cost = loop.planner._queues.pool.rule.cost
        assert (getattr(cost, "func", None) is not cost_by_position) == has
        loop.close()
