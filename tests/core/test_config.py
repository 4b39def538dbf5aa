"""The engine's configuration: each wrong value is refused with its name, itself and its limit."""

import dataclasses
import re
from typing import Any

import pytest

from holdfast.cli.batch import BatchConfig
from holdfast.cli.bench import BenchConfig
from holdfast.cli.chat import ChatConfig
from holdfast.cli.plan import PlanConfig
from holdfast.cli.profile import ProfileConfig
from holdfast.cli.tune import TuneConfig
from holdfast.cluster.config import ClusterConfig
from holdfast.core import config
from holdfast.core.config import ROW_SCHEDULERS, AppConfig
from holdfast.lab.workloads import WorkloadConfig
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import token_budget_of
from holdfast.server.config import ServerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("max_sequences", 0),
        ("steps_in_flight", 0),
        ("token_budget", 0),
        ("headroom", 1.0),
        ("memory_fraction", 1.5),
        ("cache_gb", 0.0),
        ("tbt_target", -5.0),
        ("ttft_target", 0.0),
        ("priority_aging", float("inf")),
        ("fair_weight", 0.0),
        ("max_model_len", 1),
        ("host_cache_gb", -1.0),
        ("host_cache_gb", float("inf")),
        ("chunk_size", 0),
        ("swap_threshold", 1.5),
        ("prefill_ahead", -1),
        ("shrink_threshold", 0.0),
        ("max_adapters", 1025),
        ("max_adapter_rank", 3),
        ("max_adapter_rank", 129),
        ("adapter_host_gb", 0.0),
        ("draft_tokens", 0),
        ("draft_tokens", 64),
    ],
)
def test_an_error_names_the_field_and_value_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"devices": "0,x"}, "devices is '0,x'; it must be numbers of GPUs"),
        ({"devices": ""}, "devices is ''; it must be numbers of GPUs"),
        ({"devices": "0,1"}, "devices is 0,1, and tp 1 times pp 1 takes 1; name 1"),
        ({"devices": "0", "tp": 2}, "devices is 0, and tp 2 times pp 1 takes 2; name 2"),
        ({"devices": "0", "device": "cpu"}, "devices is 0, which names GPUs, and device is cpu"),
    ],
)
def test_devices_are_one_gpu_for_each_rank(options, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        EngineConfig(**options)


def test_each_rank_has_the_gpu_that_devices_name_or_its_own_number():
    assert EngineConfig(tp=2, pp=2).gpus == (0, 1, 2, 3)
    assert EngineConfig(tp=2, devices="3,3").gpus == (3, 3)


@pytest.mark.parametrize(
    ("config", "device"),
    [
        (EngineConfig(), "auto:0"),
        (EngineConfig(device="cpu"), "cpu"),
        (EngineConfig(tp=2, device="cuda", devices="2,0"), "cuda:2"),
        (AppConfig(), "auto:0"),
        (AppConfig(app_device=("cpu", "cpu")), "cpu"),
        (AppConfig(app_device=("cpu", "cuda:3", "cuda:1")), "cuda:3"),
        (AppConfig(app_device=("cuda",)), "cuda:0"),
    ],
)
def test_the_first_process_begins_on_the_gpu_that_it_will_use(config, device):
    assert config.first_device == device


def test_token_budget_and_tbt_target_together_are_refused():
    with pytest.raises(ValueError, match="token_budget and tbt_target"):
        EngineConfig(token_budget=512, tbt_target=50.0)


def test_work_that_nobody_watches_has_large_steps_unless_their_size_is_given():
    assert EngineConfig().unwatched().token_budget == "large"
    assert EngineConfig(token_budget=512).unwatched().token_budget == 512
    assert EngineConfig(tbt_target=50.0).unwatched().token_budget is None
    with pytest.raises(ValueError, match="token_budget and tbt_target"):
        EngineConfig(token_budget="large", tbt_target=50.0)


@pytest.mark.parametrize(
    ("given", "kind", "budget"),
    [(None, "cuda", 2048), ("large", "cuda", 8192), ("large", "cpu", 512), (None, "cpu", 512), (100, "cuda", 100)],
)
def test_a_step_holds_what_is_given_or_what_suits_the_device(given, kind, budget):
    assert token_budget_of(EngineConfig(token_budget=given), kind) == budget


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 64),
        ({"max_sequences": 8}, 64),
        ({"max_sequences": 100}, 112),
        ({"max_sequences": 1000}, 512),
        ({"token_budget": "large"}, 64),
        ({"token_budget": 300}, 300),
    ],
)
def test_a_step_that_computes_token_by_token_is_short_unless_its_size_is_given(options, budget):
    assert token_budget_of(EngineConfig(deterministic=True, **options), "cpu", one_by_one=True) == budget


def test_an_automatic_token_budget_requires_a_target():
    assert EngineConfig(token_budget="auto", tbt_target=50.0).fixed_token_budget is None
    with pytest.raises(ValueError, match="token_budget is auto, which is computed from tbt_target"):
        EngineConfig(token_budget="auto")


def test_vllm_flash_attn_with_an_fp8_cache_is_refused():
    with pytest.raises(ValueError, match="vllm-flash-attn, which reads no FP8, and kv_cache_dtype is fp8"):
        EngineConfig(attention_backend="vllm-flash-attn", kv_cache_dtype="fp8")
    for backend in ("auto", "holdfast", "torch"):
        EngineConfig(attention_backend=backend, kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("executor", "options", "owner"),
    [
        ("paged", {"trust_remote_code": True}, "padded"),
        ("paged", {"prefill_ahead": 0}, "padded"),
        ("paged", {"shrink_threshold": 0.5}, "padded"),
        ("padded", {"quantization": "fp8"}, "paged"),
        ("padded", {"kv_cache_dtype": "fp8"}, "paged"),
        ("padded", {"attention_backend": "torch"}, "paged"),
    ],
)
def test_an_option_of_the_other_executor_is_refused(executor, options, owner):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value}, which is for the {owner} executor, and executor is"):
        EngineConfig(executor=executor, **options)
    EngineConfig(executor=owner, **options)
    EngineConfig(executor="auto", **options)


CONFIGS = (
    EngineConfig, AppConfig, ServerConfig, ClusterConfig, WorkloadConfig, BenchConfig, PlanConfig, BatchConfig,
    ChatConfig, ProfileConfig, TuneConfig,
)  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS)
def test_every_field_has_a_help_text_that_names_no_wrong_default(config):
    for field in dataclasses.fields(config):
        help = field.metadata["help"]
        assert len(help) > 10 and help == help.strip() and not help.endswith("."), field.name
        stated = re.search(r"default: (\d+(?:\.\d+)?)\b(?![.\w%]| with)", help)
        if stated and isinstance(field.default, int | float):
            assert float(stated[1]) == field.default, field.name


@pytest.mark.parametrize("config", CONFIGS)
def test_no_config_changes_after_it_was_built(config):
    """Neither by assignment, nor through a value that can be changed in place."""
    made = config()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, getattr(made, field.name))
    assert hash(made) == hash(config()), "every value is hashable"


def test_ttft_target_needs_the_deadline_order():
    assert EngineConfig(order="deadline", ttft_target=500.0).ttft_target == 500.0
    with pytest.raises(ValueError, match="ttft_target is for the deadline order, and order is priority"):
        EngineConfig(ttft_target=500.0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scheduler": "orca"}, "scheduler is orca"),
        ({"executor": "padded"}, "padded"),
    ],
)
def test_drafts_are_refused_where_none_are_verified_and_left_out_by_default(
    options: dict[str, Any], reason: str
) -> None:
    for speculation in ("ngram", "suffix"):
        with pytest.raises(ValueError, match=f"speculation is {speculation}.*{reason}"):
            EngineConfig(**options, speculation=speculation)
    assert EngineConfig(**options).drafter is None
    assert EngineConfig(speculation="ngram").drafter == "ngram"
    assert EngineConfig(speculation="ngram", tuning=True).drafter == "ngram"
    assert (EngineConfig().drafter, EngineConfig(speculation="off").drafter) == ("suffix", None)


def test_a_step_can_draw_64_tokens_where_drafts_are_verified() -> None:
    assert [EngineConfig(max_sequences=rows).max_samples for rows in (1, 200)] == [64, 200]
    assert EngineConfig(max_sequences=1, speculation="off").max_samples == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1", "node-3.cluster:7000", "[fd00::1]:7000"])
def test_an_address_for_moves_is_a_host_with_or_without_a_port(address):
    assert EngineConfig(chunk_host=address).chunk_host == address


@pytest.mark.parametrize("address", ["fd00::1", "host:", "a b", "0.0.0.0", "[::]:7000"])
def test_text_that_is_not_an_address_for_moves_is_refused(address):
    with pytest.raises(ValueError, match="chunk_host is"):
        EngineConfig(chunk_host=address)


def test_a_host_tier_without_prefix_sharing_is_refused():
    with pytest.raises(ValueError, match="prefix_sharing is off"):
        EngineConfig(host_cache_gb=1.0, prefix_sharing=False)
    EngineConfig(prefix_sharing=False)


def test_an_application_of_cells_needs_numba(monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    AppConfig()
    with pytest.raises(ValueError, match=r"pip install 'holdfast\[cells\]'"):
        AppConfig(app=("dates",))


@pytest.mark.parametrize("name", ROW_SCHEDULERS)
def test_a_scheduler_of_padded_rows_is_refused_on_the_paged_executor(name):
    assert EngineConfig(scheduler=name).scheduler == EngineConfig(scheduler=name, executor="padded").scheduler == name
    with pytest.raises(ValueError, match=f"scheduler is {name}, which plans padded rows, and executor is paged"):
        EngineConfig(scheduler=name, executor="paged")


def test_prefilled_states_are_for_schedulers_that_prefill_ahead_of_a_row():
    assert EngineConfig(scheduler="embedding", max_sequences=6).states_ahead == 6
    assert EngineConfig(scheduler="prefill-apart", max_sequences=6, prefill_ahead=2).plan_rows == 8
    assert EngineConfig(max_sequences=6).plan_rows == 6
    with pytest.raises(ValueError, match="prefill_ahead is 2, which is for prefill-apart and embedding"):
        EngineConfig(prefill_ahead=2, scheduler="shaping")
    with pytest.raises(ValueError, match="prefill_ahead is 0, and scheduler is embedding"):
        EngineConfig(prefill_ahead=0, scheduler="embedding")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (("a",), "adapter is 'a'; it must look like NAME=PATH"),
        (("a=",), "adapter is 'a='; it must look like NAME=PATH"),
        (("=x",), "the adapter's name is ''"),
        (("a b=x",), "the adapter's name is 'a b'"),
        (("a@1=x",), "the adapter's name is 'a@1'"),
        (("../a=x",), "the adapter's name is"),
        (("a=x", "b=y", "a=z"), "adapter a is given twice"),
    ],
)
def test_an_adapter_without_name_or_path_is_refused(given, reason):
    with pytest.raises(ValueError, match=reason):
        EngineConfig(adapter=given)


def test_slots_for_adapters_are_eight_where_some_are_given_and_none_otherwise():
    assert EngineConfig().adapter_slots == 0
    assert EngineConfig(max_adapters=3).adapter_slots == 3
    assert EngineConfig(adapter=("a=x=y",)).adapter_slots == 8
    assert EngineConfig(adapter=("a=x=y",)).adapters == [("a", "x=y")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deferral_bound": 1.0}, "deferral_bound is 1.0, which is for tuning, and tuning is off"),
        ({"tuning_micro_batch": 512}, "tuning_micro_batch is 512, which is for tuning"),
        ({"tuning_mirror": "off"}, "tuning_mirror is off, which is for tuning"),
        ({"tuning_progress": True}, "tuning_progress is True, which is for tuning"),
        ({"tuning": True, "deferral_bound": -1.0}, "deferral_bound is -1.0; it must be at least 0"),
        ({"tuning": True, "deferral_bound": float("nan")}, "deferral_bound is nan"),
        ({"tuning": True, "deferral_bound": 1.0, "tbt_target": 25.0}, "deferral_bound is 1.0 and tbt_target is 25.0"),
        ({"tuning_share": 0.5}, "tuning_share is 0.5, which is for tuning"),
        ({"tuning": True, "tuning_share": 1.5}, "tuning_share is 1.5; it must lie between 0.0 and 1.0"),
        ({"tuning": True, "tuning_share": float("nan")}, "tuning_share is nan"),
        ({"tuning": True, "scheduler": "orca"}, "tuning is for the stall-free scheduler, and scheduler is orca"),
        ({"tuning": True, "executor": "padded"}, "tuning is True, which is for the paged executor"),
        ({"tuning": True, "tuning_mirror": ""}, "tuning_mirror is empty"),
        ({"tuning": True, "tuning_memory_fraction": 0.0}, "tuning_memory_fraction is 0.0; it must lie between 0.01"),
        ({"tuning": True, "tuning_micro_batch": 1}, "tuning_micro_batch is 1; it must lie between 16"),
    ],
)
def test_options_of_tuning_that_cannot_go_together_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        EngineConfig(**options)


def test_tuning_brings_slots_for_the_adapters_that_it_makes() -> None:
    assert [EngineConfig(**options).adapter_slots for options in ({}, {"tuning": True})] == [0, 8]
    assert EngineConfig(tuning=True, max_adapters=3, deferral_bound=float("inf")).adapter_slots == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"served_model_name": ("a b",)}, "served_model_name is 'a b'; it must have 1 to 128 characters and no space"),
        ({"served_model_name": ("a", "b", "a")}, "served_model_name gives a name twice"),
        ({"served_model_name": ("a",), "adapter": ("a=x",)}, "a is both an adapter and a served_model_name"),
    ],
)
def test_invalid_names_of_the_model_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        EngineConfig(**options)
