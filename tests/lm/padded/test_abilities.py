"""What a model is found to be able to do is what it does right, and what it does wrong is found."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.padded import driver as driver_module
from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.loading import as_unmodified
from holdfast.lm.padded.state_layout import StateLayout
from tests.checkpoints import tiny

ALL = {"chunks", "left_padding", "batched_decode", "shaping", "croppable", "keeps_state"}


def able(module, *, growing=True, **differences):
    """What the module can do, by name."""
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
def test_a_family_can_do_what_its_mathematics_allows(family, lacks):
    assert able(tiny(family)) == ALL - lacks


def test_a_window_that_forgets_what_shaping_covers_is_found():
    assert able(tiny("gemma3"), growing=False) == ALL - {"croppable", "shaping"}


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba", "mamba2", "rwkv"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_changes_no_verdict(family, dtype):
    assert able(tiny(family, dtype=dtype)) == able(tiny(family))


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv"])
def test_half_precision_that_cannot_be_raised_leaves_out_what_is_wrong(family, monkeypatch):
    monkeypatch.setattr(driver_module, "_free_bytes", lambda device: 0)
    found, exact = able(tiny(family, dtype=torch.bfloat16)), able(tiny(family))
    assert found <= exact
    assert "keeps_state" in found and (family != "llama" or "batched_decode" in found)


def test_code_that_cannot_run_in_float32_is_probed_as_it_is():
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
    columns = lambda self, *, input_ids, past_key_values=None, **_: (  # noqa: E731
        (past_key_values.get_seq_length() if past_key_values else 0) + torch.arange(input_ids.shape[1])
    )[None]
    monkeypatch.setattr(LlamaModel, "columns", columns, raising=False)
    module = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    found = able(module)
    # Rotary positions are relative: a row may start anywhere, but one that another overtakes is not where it was.
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


@pytest.mark.parametrize(
    ("rope", "served", "expected"),
    [
        ({"rope_type": "dynamic", "factor": 4.0}, 256, {"keeps_state"}),
        ({"rope_type": "dynamic", "factor": 4.0}, 64, ALL),
        ({"rope_type": "default"}, 256, ALL),
    ],
)
def test_frequencies_that_change_with_the_longest_row_keep_rows_alone(rope, served, expected):
    module = tiny(
        "llama",
        rope_parameters={"rope_theta": 1e4, "original_max_position_embeddings": 64, **rope},
        max_position_embeddings=256,
    )
    assert able(module, max_model_len=served) == expected


def test_a_model_that_sees_what_comes_is_refused():
    module = tiny("openai-gpt")
    for block in module.transformer.h:
        block.attn.bias.fill_(1)  # its causal mask
    with pytest.raises(UnsupportedCheckpoint, match="it is no causal decoder"):
        able(module)


def test_memory_that_runs_out_is_no_lack_of_ability(monkeypatch):
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
