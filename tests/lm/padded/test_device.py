"""The device of padded rows: what it probes and measures, and the engine that it allocates."""

from dataclasses import replace

import pytest
import torch

from holdfast.lm import devices
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded import device as padded_device
from holdfast.lm.padded.device import PaddedDevice
from holdfast.lm.types import Forward, MemoryMeasurement, RowMove, RowPlan, StepPlan
from tests.lm.padded.histories import model_of
from tests.lm.padded.test_executor import segment
from tests.padded_checks import LONGEST, VOCAB, draw_prompts, generate_alone, tiny

BYTES = 2 * 2 * 2 * 16 * 4
"""Of one position of the tiny Llama: 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes."""


@pytest.fixture(scope="module")
def llama():
    return tiny("llama")


@pytest.fixture(scope="module")
def mamba():
    return tiny("mamba")


def device_of(module, **options):
    config = EngineConfig(device="cpu", executor="padded", **{"max_sequences": 3, "token_budget": 32} | options)
    return PaddedDevice(model_of(module), config, name="tiny")


def test_the_shape_says_what_planning_needs_to_know(llama):
    device = device_of(llama, cache_gb=0.01, host_cache_gb=0.001)
    sizes = device.measure()
    shape = device.allocate(sizes)
    assert (sizes.cache, sizes.host_cache, sizes.block) == (10_000_000, 1_000_000, BYTES)
    assert (shape.model, shape.precision, shape.executor) == ("tiny", "float32", "padded")
    assert (shape.num_blocks, shape.num_host_blocks) == (10_000_000 // BYTES, 1_000_000 // BYTES)
    assert (shape.token_budget, shape.max_step_tokens, shape.max_model_len, shape.vocab_size) == (
        32,
        32,
        LONGEST,
        VOCAB,
    )
    assert (shape.rows.memory, shape.rows.host_memory, shape.rows.quantum) == (10_000_000, 1_000_000, 256)
    assert shape.rows.bytes.of(10) == 10 * BYTES
    assert shape.rows.abilities == device.abilities
    assert device.abilities.chunks and device.abilities.shaping and device.abilities.croppable
    assert (device.kind, device.captures, device.host) == ("cpu", False, None)


def test_a_second_device_takes_what_the_first_has_probed(llama, monkeypatch):
    first = device_of(llama, cache_gb=0.01)
    monkeypatch.setattr(padded_device, "probe", None)
    shorter = replace(first.model, max_model_len=20)
    second = PaddedDevice(shorter, first.config, probed=first.probed)
    assert second.abilities == first.abilities
    assert (second.driver.model, first.driver.model) == (shorter, first.model)
    assert second.allocate(second.measure()).max_model_len == 20


def test_the_executor_generates_what_the_model_does_alone(llama):
    device = device_of(llama, cache_gb=0.01)
    with pytest.raises(RuntimeError, match="call allocate first"):
        _ = device.executor
    device.allocate(device.measure())
    assert device.executor is device.executor
    (prompt,) = draw_prompts(9)
    plan = StepPlan(
        0,
        [segment(2, 0, prompt)],
        parts=(RowPlan(forwards=(Forward(1, apart=True),), moves=(RowMove(1, "embed", 2, length=9),)),),
    )
    device.executor.submit(plan)
    tokens = [*device.executor.collect().tokens]
    for step in range(1, 5):
        device.executor.submit(
            StepPlan(step, [segment(2, 8 + step, tokens[-1:])], parts=(RowPlan(forwards=(Forward(1),)),))
        )
        tokens += device.executor.collect().tokens
    device.executor.close()
    assert tuple(tokens) == generate_alone(llama, prompt, 5)


def test_captured_decodes_get_a_part_of_the_memory_for_states(llama, monkeypatch):
    device = device_of(llama, cache_gb=0.01)
    plain = device.measure()
    monkeypatch.setattr(device, "_masks", "columns")  # as the probe finds on a GPU
    sizes = device.measure()
    assert sizes.cache == plain.cache - 4 * LONGEST * BYTES  # 3 rows are padded to 4
    shape = device.allocate(sizes)
    assert (shape.rows.memory, shape.rows.settled, shape.rows.longest) == (sizes.cache, 4 * LONGEST, LONGEST)
    (prompt,) = draw_prompts(9)
    moves = (RowMove(1, "embed", 2, length=9),)
    device.executor.submit(
        StepPlan(0, [segment(2, 0, prompt)], parts=(RowPlan(forwards=(Forward(1, apart=True),), moves=moves),))
    )
    tokens = [*device.executor.collect().tokens]
    for step in range(1, 5):
        device.executor.submit(
            StepPlan(step, [segment(2, 8 + step, tokens[-1:])], parts=(RowPlan(forwards=(Forward(1),)),))
        )
        tokens += device.executor.collect().tokens
    assert device.executor.graphs is not None
    device.executor.close()
    assert tuple(tokens) == generate_alone(llama, prompt, 5)


def test_decodes_are_measured_with_a_mask_and_prompts_without_as_they_run(llama, monkeypatch):
    device, seen = device_of(llama, cache_gb=0.01), []
    forward = device.driver.forward

    def watched(inputs, state):
        seen.append((inputs.ids.shape[1] > 1, inputs.padded))
        return forward(inputs, state)

    monkeypatch.setattr(device.driver, "forward", watched)
    device.allocate(device.measure())
    assert (False, True) in seen and (True, True) not in seen
    seen.clear()
    (prompt,) = draw_prompts(9)
    moves = (RowMove(1, "embed", 2, length=9),)
    device.executor.submit(
        StepPlan(0, [segment(2, 0, prompt)], parts=(RowPlan(forwards=(Forward(1, apart=True),), moves=moves),))
    )
    (token,) = device.executor.collect().tokens
    device.executor.submit(StepPlan(1, [segment(2, 9, (token,))], parts=(RowPlan(forwards=(Forward(1),)),)))
    device.executor.collect()
    device.executor.close()
    assert seen[-1] == (False, True)


def test_recurrent_states_of_captured_decodes_are_taken_out_of_the_memory_for_states(mamba, monkeypatch):
    device = device_of(mamba, cache_gb=0.01)
    plain = device.measure()
    monkeypatch.setattr(device, "_masks", "columns")
    sizes = device.measure()
    assert plain.cache - sizes.cache == 4 * device.row_bytes.fixed > 0  # 3 rows are padded to 4
    assert device.allocate(sizes).rows.settles(3, 100)
    device.executor.close()


def test_too_little_memory_for_a_captured_decode_is_all_left_for_states(llama, monkeypatch):
    device = device_of(llama, cache_gb=0.00014)
    monkeypatch.setattr(device, "_masks", "columns")
    sizes = device.measure()
    device.allocate(sizes)
    assert (sizes.cache, device.executor.graphs) == (140_000, None)
    device.executor.close()


@pytest.mark.parametrize(("options", "rows"), [({}, 3), ({"scheduler": "embedding"}, 6)])
def test_there_are_rows_for_the_batch_and_for_states_ahead_of_it(llama, options, rows):
    device = device_of(llama, cache_gb=0.01, **options)
    device.allocate(device.measure())
    assert len(device.executor.rows.last_token) == rows
    device.executor.close()


@pytest.mark.parametrize(
    ("scheduler", "tokens"),
    [
        ("stall-free", 32),
        ("chunked-only", 32),
        ("embedding", LONGEST + 3),
        ("shaping", LONGEST + 3),
        ("run-to-completion", 3 * LONGEST),
        ("orca", 3 * LONGEST),
    ],
)
def test_steps_are_larger_where_prompts_are_computed_whole(llama, scheduler, tokens):
    device = device_of(llama, cache_gb=0.01, scheduler=scheduler)
    sizes = MemoryMeasurement("cpu", 0, 0, 0, cache=10_000_000, block=BYTES)
    assert device.allocate(sizes).max_step_tokens == tokens


def test_many_prompts_in_a_step_are_bounded_by_their_activations(llama):
    device = device_of(llama, cache_gb=0.01, scheduler="orca")
    sizes = MemoryMeasurement("cpu", 0, 0, LONGEST * 10_000, cache=4_000_000, block=BYTES)
    assert device.allocate(sizes).max_step_tokens == 200


def test_prompts_are_computed_whole_where_a_model_cannot_compute_chunks(mamba):
    device = device_of(mamba, cache_gb=0.01)
    shape = device.allocate(device.measure())
    assert not device.abilities.chunks
    assert shape.max_step_tokens == LONGEST + 3
    assert shape.rows.bytes.growing == () and shape.rows.bytes.fixed > 0


def test_the_longest_sequence_is_what_memory_holds(llama, monkeypatch):
    monkeypatch.setattr(padded_device, "QUANTUM", 16)
    monkeypatch.setattr(padded_device, "whole_quanta", lambda length: -(-length // 16) * 16)
    device = device_of(llama, cache_gb=70 * BYTES / 1e9)
    assert device.allocate(device.measure()).max_model_len == 64


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_gb": 1e-5}, "0.0000 GB are left for the states of rows, and one row takes at least 0.0001 GB"),
        ({"cache_gb": 1e6}, "cache_gb is 1000000.0: of .* are free; lower it"),
        ({"cache_gb": 0.01, "host_cache_gb": 1e6}, "host_cache_gb is 1000000.0: of .* of host memory .* are free"),
    ],
)
def test_memory_that_is_not_there_is_refused_with_the_numbers(llama, options, reason):
    with pytest.raises(MemoryError, match=reason):
        device_of(llama, **options).measure()


def test_states_get_half_of_the_free_memory_of_a_cpu_at_most_four_gigabytes(llama, monkeypatch):
    device = device_of(llama)
    for free, expected in ((10_000_000, 5_000_000), (80_000_000_000, 4_000_000_000)):
        monkeypatch.setattr(padded_device, "memory_of", lambda place, free=free: (free, 2 * free))
        sizes = device.measure()
        assert (sizes.cache, sizes.total, sizes.host_cache) == (expected, 2 * free, 0)


def test_on_a_gpu_states_get_what_the_fraction_and_the_steps_leave(llama, monkeypatch):
    device = device_of(llama, max_sequences=4)
    monkeypatch.setattr(type(device), "kind", "cuda")
    monkeypatch.setattr(padded_device, "memory_of", lambda place: (800_000_000, 1_000_000_000))
    for module in (padded_device, devices):
        monkeypatch.setattr(module, "taken_memory", lambda place: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    taken = {(1, 32, 0): 1000, (1, 32, 32): 3000, (1, 1, 1): 0}
    # A decode of 4 rows takes 500 bytes, and an eighth of its states.
    width = LONGEST // 2 - 1
    taken |= {(4, 1, wide): 500 + 4 * wide * BYTES // 8 for wide in (width, 2 * width)}
    monkeypatch.setattr(device, "_forward_bytes", lambda rows, tokens, start=0: taken[rows, tokens, start])
    sizes = device.measure()
    assert sizes.activations == 3000 + 2000 * 2  # 64 columns were measured, and there may be 128
    assert sizes.cache == int((700_000_000 - 7000) / 1.125)
    assert sizes.host_cache > 0


def test_probing_is_noted_as_a_stage(llama):
    device = device_of(llama)
    assert [stage.name for stage in device._stages.done] == ["probes"]
