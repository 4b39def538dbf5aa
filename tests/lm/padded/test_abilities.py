"""Probing finds the abilities that a model has, and no others."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded import driver as driver_module
from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.driver import Driver, difference
from holdfast.lm.padded.loading import as_unmodified, switches_at
from holdfast.lm.padded.state_layout import StateLayout
from tests.checkpoints import tiny
from tests.padded_checks import CACHE

ALL = {"chunks", "left_padding", "batched_decode", "shaping", "croppable", "keeps_state"}


def able(module, *, growing=True, **differences):
    """The abilities of the module, by name."""
    driver = Driver(as_unmodified(module, **differences), growing=growing)
    layout = StateLayout.discover(driver.run) if driver.keyword else StateLayout([])
    abilities = probe(driver, layout)
    return {name for name in ALL if getattr(abilities, name)}


@pytest.mark.parametrize(
    ("family", "lacks"),
    [
        ("llama", set()),
        ("falcon-alibi", set()),
        ("bloom", set()),
        ("mpt", set()),
        ("gpt-neo", set()),
        ("gemma3", {"croppable"}),
        ("llama4-chunked", {"croppable"}),
        ("mamba2", {"shaping", "croppable"}),
        ("mamba", {"chunks", "shaping", "croppable"}),
        ("jamba", {"chunks", "shaping", "croppable"}),
        ("xlstm", {"left_padding", "shaping", "croppable"}),
        ("rwkv", {"left_padding", "batched_decode", "shaping", "croppable"}),
        ("deepseek-v4", {"left_padding", "batched_decode", "shaping", "croppable"}),
        ("minimax", {"chunks", "batched_decode", "shaping", "croppable"}),
        ("openai-gpt", ALL),
    ],
)
def test_a_family_has_the_abilities_that_its_mathematics_allows(family, lacks):
    assert able(tiny(family)) == ALL - lacks


def test_a_window_that_forgets_columns_under_shaping_is_found():
    assert able(tiny("gemma3"), growing=False) == ALL - {"croppable", "shaping"}


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "mamba2", "rwkv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_changes_no_verdict(family, dtype):
    assert able(tiny(family, dtype=dtype)) == able(tiny(family))


@pytest.mark.always("mamba", "llama")
@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv"])
def test_half_precision_that_cannot_be_raised_leaves_out_wrong_ways(family, monkeypatch):
    monkeypatch.setattr(driver_module, "_free_bytes", lambda device: 0)
    found, exact = able(tiny(family, dtype=torch.bfloat16)), able(tiny(family))
    assert found <= exact
    assert "keeps_state" in found and (family != "llama" or "batched_decode" in found)


def test_code_that_cannot_run_in_float32_is_probed_in_its_own_precision():
    module = tiny("llama", dtype=torch.bfloat16)
    embed = module.model.embed_tokens

    def refuse(_, args, output):
        if output.dtype != torch.bfloat16:
            raise RuntimeError("expected BFloat16")

    embed.register_forward_hook(refuse)
    assert {"batched_decode", "keeps_state"} <= able(module)


def test_a_model_that_ignores_the_mask_is_not_given_unequal_rows(monkeypatch):
    forward = LlamaModel.forward
    monkeypatch.setattr(
        LlamaModel,
        "forward",
        lambda self, *args, attention_mask=None, **kwargs: forward(self, *args, attention_mask=None, **kwargs),
    )
    assert able(tiny("llama")) == {"chunks", "croppable", "keeps_state"}


def test_a_model_whose_positions_count_columns_is_not_given_unequal_rows(monkeypatch):
    forward = LlamaModel.forward
    monkeypatch.setattr(
        LlamaModel,
        "forward",
        lambda self, *args, position_ids=None, **kwargs: forward(
            self, *args, position_ids=self.columns(**kwargs), **kwargs
        ),
    )
    columns = lambda self, *, input_ids, **given: (  # noqa: E731
        (given[CACHE].get_seq_length() if given.get(CACHE) else 0) + torch.arange(input_ids.shape[1])
    )[None]
    monkeypatch.setattr(LlamaModel, "columns", columns, raising=False)
    module = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    found = able(module)
    # Rotary positions are relative: a row may start anywhere, but a row that another overtakes has moved.
    assert {"chunks", "croppable", "keeps_state"} <= found
    assert "shaping" not in found


def test_a_state_that_mixes_rows_is_found(monkeypatch):
    update = DynamicCache.update

    def mixed(self, keys, values, layer, *args, **kwargs):
        if len(values) > 1:
            values = values + 0.01 * values.roll(1, 0)
        return update(self, keys, values, layer, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", mixed)
    assert able(tiny("llama")) == {"chunks", "croppable", "keeps_state"}


FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + number for number in range(8)]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **FACTORS}


def phi3():
    """A tiny Phi-3 with other frequencies in sequences of more than 64 tokens."""
    sizes = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    return tiny("phi3", rope_parameters=LONGROPE, **sizes)


def test_sequences_end_where_the_frequencies_of_all_positions_change_unless_asked_to_go_on():
    module = phi3()
    model = as_unmodified(module)
    assert model.max_model_len == switches_at(module.config) == 64
    assert model.shortened.startswith("sequences end at 64 tokens") and "up to 256" in model.shortened
    assert able(module) == able(module, max_model_len=32) == ALL
    assert as_unmodified(module, max_model_len=256).shortened == ""
    assert able(module, max_model_len=65) == set(), "each row is computed anew in every step"
    with pytest.raises(ValueError, match="max_model_len is 257; the model was made for 256"):
        as_unmodified(module, max_model_len=257)


def test_keys_from_before_the_frequencies_changed_are_of_no_use():
    module = phi3()
    driver = Driver(as_unmodified(module, max_model_len=256))
    text = driver.text(1, 100)
    whole, _ = driver.forward(driver.inputs(text), None)
    for cut, right in ((70, True), (50, False)):
        _, state = driver.forward(driver.inputs(text[:, :cut]), None)
        logits, _ = driver.forward(driver.inputs(text[:, cut:], cut), state)
        assert (difference(logits, whole) < 1e-4) == right


def test_frequencies_of_the_type_dynamic_stay_up_to_the_longest_sequence():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    module = tiny("llama", rope_parameters=rope, max_position_embeddings=256)
    assert switches_at(module.config) is None and able(module) == ALL
    driver = Driver(as_unmodified(module))
    text = driver.text(1, 256)
    whole, _ = driver.forward(driver.inputs(text), None)
    state = None
    for start, stop in ((0, 40), (40, 70), (70, 255), (255, 256)):
        logits, state = driver.forward(driver.inputs(text[:, start:stop], start), state)
    assert difference(logits, whole) < 1e-4


def test_a_model_that_attends_to_later_tokens_is_refused():
    module = tiny("openai-gpt")
    for block in module.transformer.h:
        block.attn.bias.fill_(1)  # switch its causal mask off
    with pytest.raises(UnsupportedCheckpoint, match="it is no causal decoder"):
        able(module)


def test_running_out_of_memory_is_not_counted_as_a_missing_ability(monkeypatch):
    driver = Driver(as_unmodified(tiny("llama")))
    layout = StateLayout.discover(driver.run)

    def merge(states, lengths):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(layout, "merge", merge)
    with pytest.raises(torch.OutOfMemoryError):
        probe(driver, layout)


def test_the_probe_reaches_beyond_the_window():
    module = tiny("mistral-sliding", sliding_window=40)
    seen = []
    module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    able(module)
    assert max(seen) > 42
