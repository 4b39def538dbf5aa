"""Simulated engines of models with recurrent layers: prices, memory, and turns that go on from a snapshot."""

from dataclasses import replace

import pytest

from holdfast.lab.simulator.deployment import cache_tokens, deploy, derive
from holdfast.lab.simulator.devices import DEVICES
from holdfast.lab.simulator.run import engine_shape, simulate
from holdfast.lab.simulator.shapes import BYTES, shape_from_config
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig

NINE = {
    "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 12_288,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320,
    "max_position_embeddings": 32_768, "full_attention_interval": 4,
}  # fmt: skip
"""The sizes of a Qwen3.5-9B."""
SHAPE = shape_from_config(NINE, "hybrid-9b")
MEASURED = {1: (640, 6.45e-3), 32: (576, 8.63e-3), 128: (576, 14.1e-3)}
"""By number of streams, their mean context and the seconds of a step on an H100 (docs/benchmarks/hybrids.md)."""


@pytest.mark.parametrize("streams", MEASURED)
def test_a_step_takes_the_time_that_was_measured(streams):
    cost, (context, seconds) = derive(SHAPE, DEVICES["h100"]), MEASURED[streams]
    assert cost.linear(streams) + streams * cost.attention(1, context) == pytest.approx(seconds, rel=0.12)


def test_prompts_of_8192_tokens_take_the_time_that_was_measured():
    cost = derive(SHAPE, DEVICES["h100"])
    seconds = sum(cost.linear(2048) + cost.attention(2048, stop) for stop in range(2048, 8193, 2048))
    assert 8192 / seconds == pytest.approx(31_928, rel=0.2)


def test_recurrent_layers_take_the_same_time_at_any_position_and_attention_only_its_own():
    cost = derive(SHAPE, DEVICES["h100"])
    states = 2 * SHAPE.state_bytes / (DEVICES["h100"].bandwidth * DEVICES["h100"].states)
    assert cost.attention(1, 16) == pytest.approx(states, rel=0.02)
    dense = derive(replace(SHAPE, kinds=None), DEVICES["h100"])
    grown = cost.attention(1, 32_768) - cost.attention(1, 16)
    assert grown == pytest.approx((dense.attention(1, 32_768) - dense.attention(1, 16)) / 4, rel=1e-6)


def test_states_of_running_sequences_and_of_snapshots_take_memory_from_the_cache():
    tokens = cache_tokens(SHAPE, DEVICES["h100"], devices=1)
    plain = DEVICES["h100"].memory * 0.9 - 2e9 - SHAPE.weight_bytes
    left = plain - EngineConfig().most_sequences * SHAPE.state_bytes
    assert tokens == int(left * (1 - EngineConfig().snapshot_share) / SHAPE.token_bytes)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.75])
def test_snapshots_have_their_share_of_the_simulated_cache(share):
    profile = deploy(SHAPE, "h100").profile
    shape = engine_shape(EngineConfig(model="m", snapshot_share=share), profile)
    snapshots = shape.states.snapshots * shape.states.slot_bytes
    blocks = shape.num_blocks * shape.block_bytes
    whole = profile.cache_tokens * profile.token_bytes / 0.75
    assert snapshots == pytest.approx(share * whole, rel=0.01) and blocks == pytest.approx(
        (1 - share) * whole, rel=0.01
    )
    assert shape.states.slot_bytes == SHAPE.state_bytes


def test_the_next_turn_goes_on_from_a_snapshot_and_recomputes_without_one():
    turns = (Turn(1000, 20), Turn(100, 20, think=1.0), Turn(50, 20, think=1.0))
    workload = [Conversation(arrival=0.0, turns=turns)]
    found = {}
    for sharing in (True, False):
        config = EngineConfig(model="m", prefix_sharing=sharing, host_cache_gb=0.0)
        outcome = simulate(config, deploy(SHAPE, "h100").profile, workload)
        found[sharing] = [record.cached_tokens for record in outcome.records]
    assert found[False] == [0, 0, 0]
    assert found[True][0] == 0 and all(cached >= 1000 for cached in found[True][1:])


def test_four_bits_make_a_stream_faster_and_long_prompts_slower():
    packed = shape_from_config(
        NINE | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "x"
    )
    one, other = (derive(shape, DEVICES["h100"]) for shape in (packed, SHAPE))
    assert packed.weight_bytes < 0.45 * SHAPE.weight_bytes
    saved = BYTES * sum(SHAPE.weights.values()) - packed.layer_bytes * packed.layers
    bandwidth = DEVICES["h100"].bandwidth * DEVICES["h100"].weights
    assert other.linear(1) - one.linear(1) == pytest.approx(saved / bandwidth, rel=0.1)
    assert one.linear(4096) > other.linear(4096)
