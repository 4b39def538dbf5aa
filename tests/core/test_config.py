"""The engine's configuration: each wrong value is refused with its name, itself and its limit."""

import dataclasses

import pytest

from holdfast.core import config
from holdfast.core.config import ROW_SCHEDULERS, AppConfig, EngineConfig


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
    ],
)
def test_an_error_names_the_field_and_value_out_of_range(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        EngineConfig(**{field: value})


def test_token_budget_and_tbt_target_together_are_refused():
    with pytest.raises(ValueError, match="token_budget and tbt_target"):
        EngineConfig(token_budget=512, tbt_target=50.0)


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


def test_every_field_has_a_help_text():
    assert all(field.metadata["help"] for field in dataclasses.fields(EngineConfig))


def test_a_config_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 1


def test_ttft_target_needs_the_deadline_order():
    assert EngineConfig(order="deadline", ttft_target=500.0).ttft_target == 500.0
    with pytest.raises(ValueError, match="ttft_target is for the deadline order, and order is priority"):
        EngineConfig(ttft_target=500.0)


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
