"""Checkpoints are loaded unmodified, once, or refused by name."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from holdfast.lm.models import hf, loader
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded.driver import Driver, difference
from holdfast.lm.padded.loading import WITHOUT_LIMIT, as_unmodified, load_unmodified
from tests.checkpoints import TINY_LONGEST, TINY_VOCAB, tiny
from tests.padded_checks import draw_prompts, generate_alone

CPU = torch.device("cpu")


def write(directory, family, **differences):
    module = tiny(family, **differences)
    module.save_pretrained(directory)
    return module


def change(directory, **entries):
    """Change entries of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.mark.parametrize("family", ["falcon-alibi", "bloom", "mamba", "rwkv", "jamba"])
def test_a_module_that_the_paged_cache_refused_is_taken_over_with_its_own_attention(tmp_path, family):
    module = write(tmp_path, family)
    with pytest.raises(hf.NotPaged, match=r"never calls Transformers' attention|do not call") as refused:
        loader.load(tmp_path, device=CPU)
    model = load_unmodified(tmp_path, device=CPU, module=refused.value.module)
    assert model.module is refused.value.module
    assert model.module.config._attn_implementation == module.config._attn_implementation
    for prompt in draw_prompts(3, 9):
        assert generate_alone(model.module, prompt, 6) == generate_alone(module, prompt, 6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba"])
def test_a_checkpoint_is_loaded_unmodified(tmp_path, family):
    module = write(tmp_path, family, dtype=torch.bfloat16)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    model = load_unmodified(tmp_path, device=CPU, dtype="bfloat16")
    assert (model.vocab_size, model.eos_token_ids, model.dtype) == (TINY_VOCAB, (5, 6), torch.bfloat16)
    assert model.architecture == type(module).__name__ and not model.module.training
    assert model.weight_bytes == sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    for name, tensor in module.state_dict().items():
        assert torch.equal(model.module.state_dict()[name], tensor)
    assert load_unmodified(tmp_path, device=CPU).dtype == torch.float32, "on a CPU, unless told otherwise"


def test_the_longest_sequence_is_the_models_own_or_less():
    assert as_unmodified(tiny("llama")).max_model_len == TINY_LONGEST
    assert as_unmodified(tiny("gpt2"), max_model_len=50).max_model_len == 50
    assert as_unmodified(tiny("mpt", max_position_embeddings=None)).max_model_len == 128
    with pytest.raises(ValueError, match="max_model_len is 200; the model was made for 128 tokens"):
        as_unmodified(tiny("llama"), max_model_len=200)


def test_a_model_without_a_limit_gets_one_unless_it_is_given():
    module = tiny("mamba", max_position_embeddings=None)
    assert as_unmodified(module).max_model_len == WITHOUT_LIMIT
    assert as_unmodified(module, max_model_len=100_000).max_model_len == 100_000


def test_random_weights_need_only_a_config(tmp_path):
    write(tmp_path, "bloom")
    (tmp_path / "model.safetensors").unlink()
    model = load_unmodified(tmp_path, device=CPU, load_format="random")
    assert all(torch.isfinite(parameter).all() for parameter in model.module.parameters())


def test_weights_that_are_not_finite_are_refused(tmp_path):
    write(tmp_path, "bloom")
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if name.endswith("dense.weight"))
    weights[name][0, 0] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedCheckpoint, match=r"dense\.weight holds NaN"):
        load_unmodified(tmp_path, device=CPU)


def test_weights_come_from_safetensors_alone(tmp_path):
    module = write(tmp_path, "bloom")
    (tmp_path / "model.safetensors").unlink()
    torch.save(module.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpoint, match="safetensors"):
        load_unmodified(tmp_path, device=CPU)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"architectures": ["XLNetLMHeadModel"]}, "XLNetLMHeadModel cannot be served: it predicts tokens in any order"),
        ({"architectures": ["ReformerModelWithLMHead"]}, "ReformerModelWithLMHead cannot be served: .* is_decoder"),
        ({"architectures": []}, "must name one architecture; it names 0"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"the checkpoint is quantized \(gptq\)"),
        ({"architectures": ["WhisperForCausalLM"]}, "is no causal decoder that Transformers .* knows"),
        ({"architectures": ["NewForCausalLM"], "is_encoder_decoder": True}, "is no encoder-decoder that Transformers"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused_by_name(tmp_path, entries, message):
    write(tmp_path, "bloom")
    change(tmp_path, **entries)
    with pytest.raises(UnsupportedCheckpoint, match=message):
        load_unmodified(tmp_path, device=CPU)


def test_an_encoder_decoder_is_loaded_as_one(tmp_path):
    config = transformers.T5Config(
        vocab_size=TINY_VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    model = load_unmodified(tmp_path, device=CPU)
    assert model.is_encoder_decoder and model.architecture == "T5ForConditionalGeneration"
    with pytest.raises(UnsupportedCheckpoint, match="is an encoder-decoder"):
        loader.load(tmp_path, device=CPU)


# ---- Code of a checkpoint --------------------------------------------------------------------------------------------

CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class SumConfig(PretrainedConfig):
    model_type = "sum"

    def __init__(self, vocab_size=31, hidden_size=16, **more):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        super().__init__(**more)


class SumForCausalLM(PreTrainedModel):
    config_class = SumConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, past_key_values=None, use_cache=None, return_dict=None):
        seen = self.embed(input_ids).cumsum(1)
        if past_key_values is not None:
            seen = seen + past_key_values["sum"][:, None]
        state = {"sum": seen[:, -1]} if use_cache else None
        return CausalLMOutputWithPast(logits=self.head(seen), past_key_values=state)
"""


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A checkpoint directory with code of its own."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "sum_model.py").write_text(CODE)
    auto_map = {"AutoConfig": "sum_model.SumConfig", "AutoModelForCausalLM": "sum_model.SumForCausalLM"}
    config = dict(architectures=["SumForCausalLM"], model_type="sum", vocab_size=31, hidden_size=16, auto_map=auto_map)
    (directory / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = {"embed.weight": (31, 16), "head.weight": (31, 16), "head.bias": (31,)}
    save_file(
        {name: torch.randn(shape) for name, shape in shapes.items()}, directory / "model.safetensors", {"format": "pt"}
    )
    return directory


def test_code_of_a_checkpoint_runs_only_when_it_is_trusted(own_code):
    for load in (loader.load, load_unmodified):
        with pytest.raises(UnsupportedCheckpoint, match=r"needs the remote code .* trust_remote_code"):
            load(own_code, device=CPU)


def test_trusted_code_of_a_checkpoint_runs_and_the_log_names_its_directory(own_code, caplog):
    with caplog.at_level(logging.WARNING):
        model = load_unmodified(own_code, device=CPU, trust_remote_code=True)
    assert f"SumForCausalLM runs the code of the checkpoint in {own_code}" in caplog.text
    driver = Driver(model)
    assert driver.keyword == "past_key_values"
    ids = driver.text(1, 6)
    _, state = driver.forward(driver.inputs(ids[:, :5]), None)
    logits, _ = driver.forward(driver.inputs(ids[:, 5:], 5), state)
    weights = load_file(own_code / "model.safetensors")
    seen = weights["embed.weight"][ids[0]].sum(0)
    assert difference(logits[0], weights["head.weight"] @ seen + weights["head.bias"]) < 1e-5


def test_code_from_elsewhere_is_refused_even_when_trusted(own_code):
    change(own_code, auto_map={"AutoModelForCausalLM": "someone/else--sum_model.SumForCausalLM"})
    with pytest.raises(UnsupportedCheckpoint, match="only code in the directory itself is run"):
        load_unmodified(own_code, device=CPU, trust_remote_code=True)
    change(own_code, auto_map={"AutoModelForCausalLM": "missing.SumForCausalLM"})
    with pytest.raises(UnsupportedCheckpoint, match=r"it has no missing\.py"):
        load_unmodified(own_code, device=CPU, trust_remote_code=True)
