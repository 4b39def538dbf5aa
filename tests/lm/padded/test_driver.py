"""A driver calls a model as its own `generate` would, and finds out how for each model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded import driver as module_under_test
from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.driver import Driver, Inputs, difference, in_float32
from holdfast.lm.padded.loading import UnmodifiedModel, as_unmodified
from holdfast.lm.padded.state_layout import StateLayout
from tests.checkpoints import tiny
from tests.padded_checks import CACHE, RECURRENT, draw_prompts, generate_alone


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def recorded(module):
    """The keywords of each call of a module from now on."""
    calls = []
    module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True)
    return calls


def test_first_forward_and_decodes_take_the_tensors_of_the_paper():
    module = tiny("llama")
    driver = Driver(as_unmodified(module))
    calls = recorded(module)
    ids, mask = torch.tensor([[0, 0, 5], [7, 8, 9]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    logits, state = driver.forward(Inputs(ids, mask, torch.tensor([[0, 0, 0], [0, 1, 2]])), None)
    mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    driver.forward(Inputs(logits.argmax(1)[:, None], mask, torch.tensor([[1], [3]])), state)
    first, decode = calls
    assert torch.equal(first["input_ids"], ids) and driver.keyword not in first
    assert first["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    assert decode["input_ids"].shape == (2, 1) and decode[driver.keyword] is state
    assert decode["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert decode["position_ids"].tolist() == [[1], [3]]
    assert state.get_seq_length() == 4


def test_positions_count_unmasked_tokens_after_shaping():
    module = tiny("llama")
    driver = Driver(as_unmodified(module))
    layout = StateLayout.discover(driver.run)
    calls = recorded(module)
    probe(driver, layout)
    masked = [call for call in calls if "attention_mask" in call]
    assert any((call["attention_mask"] == 0).any(1).all() for call in masked), (
        "both rows of a shaped forward have zeros"
    )
    for call in masked:
        mask, positions = call["attention_mask"], call["position_ids"]
        own = mask[:, -positions.shape[1] :].bool()
        counted = (mask.cumsum(1) - 1)[:, -positions.shape[1] :]
        assert torch.equal(positions[own], counted[own])


@pytest.mark.parametrize("family", ["llama", "gemma3", "bloom", "mamba2"])
def test_rows_without_placeholders_need_no_mask(family):
    driver = Driver(as_unmodified(tiny(family)))
    calls, logits = recorded(driver.model.module), []
    for padded in (False, True):
        inputs = driver.inputs(driver.text(2, 12))
        assert not inputs.padded
        logits.append(driver.forward(inputs._replace(padded=padded), None)[0])
    assert ["attention_mask" in call for call in calls] == [False, True]
    assert difference(*logits) < 1e-5


def test_a_model_that_needs_its_mask_gets_it_always(monkeypatch):
    forward = LlamaForCausalLM.forward

    def picky(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        if attention_mask is None and input_ids.shape[1] > 1 and past_key_values is not None:
            raise ValueError("a chunk needs a mask")
        return forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)

    monkeypatch.setattr(LlamaForCausalLM, "forward", picky)
    driver = Driver(as_unmodified(tiny("llama")))
    calls = recorded(driver.model.module)
    driver.forward(driver.inputs(driver.text(2, 12)), None)
    assert "attention_mask" in calls[0]


@pytest.mark.parametrize(
    ("family", "keyword", "style"),
    [
        ("llama", CACHE, "all columns"),
        ("bloom", CACHE, "all columns"),
        ("mamba", RECURRENT, "this forward's"),
        ("mamba2", RECURRENT, "all columns"),
        ("jamba", CACHE, "all columns"),
        ("rwkv", "state", "all columns"),
        ("xlstm", RECURRENT, "none"),
        ("openai-gpt", None, "all columns"),
        ("recurrent-gemma", None, "all columns"),
    ],
)
def test_the_state_and_the_mask_that_a_model_takes_are_found(family, keyword, style):
    driver = Driver(as_unmodified(tiny(family)))
    assert (driver.keyword, driver.mask_style) == (keyword, style)


@pytest.mark.parametrize("family", ["llama", "falcon-alibi", "gemma3", "mamba", "rwkv", "jamba", "openai-gpt"])
@pytest.mark.parametrize("growing", [True, False])
def test_a_row_alone_gets_the_tokens_of_generate(family, growing):
    module = tiny(family)
    driver = Driver(as_unmodified(module), growing=growing)
    for prompt in draw_prompts(3, 12):
        tokens, state, want = list(prompt), None, generate_alone(module, prompt, 12)
        for step in range(12):
            new = tokens if driver.keyword is None or not step else tokens[-1:]
            inputs = driver.inputs(torch.tensor([new]), len(tokens) - len(new))
            logits, state = driver.forward(inputs, state)
            tokens.append(int(logits.argmax()))
        assert tuple(tokens[len(prompt) :]) == want
        assert (state is None) == (driver.keyword is None)


@pytest.mark.parametrize("family", ["llama", "gptj", "xlstm"])
@pytest.mark.parametrize("columns", [[0, 3, 1], [2, 2, 2]])
def test_logits_come_from_the_columns_asked_for(family, columns):
    module = tiny(family)
    driver = Driver(as_unmodified(module))
    ids = driver.text(3, 4)
    whole = module(input_ids=ids).logits
    logits, _ = driver.forward(driver.inputs(ids)._replace(columns=torch.tensor(columns)), None)
    assert difference(logits, torch.stack([whole[row, column] for row, column in enumerate(columns)])) < 1e-5
    assert difference(driver.forward(driver.inputs(ids), None)[0], whole[:, -1]) < 1e-5


def test_a_model_computes_no_logits_that_nobody_asked_for():
    module = tiny("llama")
    driver = Driver(as_unmodified(module))
    calls = recorded(module)
    driver.forward(driver.inputs(driver.text(2, 9)), None)
    driver.forward(driver.inputs(driver.text(2, 9))._replace(columns=torch.tensor([0, 8])), None)
    assert calls[0]["logits_to_keep"] == 1 and calls[1]["logits_to_keep"].tolist() == [0, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finding_out_changes_neither_parameters_nor_attention(dtype):
    with torch.inference_mode(False):  # as a checkpoint is loaded
        module = tiny("gemma3", dtype=dtype)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    attention = module.config._attn_implementation
    driver = Driver(as_unmodified(module))
    probe(driver, StateLayout.discover(driver.run))
    assert {**dict(module.named_parameters()), **dict(module.named_buffers())}.keys() == before.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name
        assert not tensor.is_inference()
    assert module.config._attn_implementation == attention


def test_half_precision_is_raised_where_it_fits_and_only_there(monkeypatch):
    with torch.inference_mode(False):
        module = tiny("llama", dtype=torch.bfloat16)
    with in_float32(module) as raised:
        assert raised and module.lm_head.weight.dtype == torch.float32
    assert module.lm_head.weight.dtype == torch.bfloat16
    monkeypatch.setattr(module_under_test, "_free_bytes", lambda device: 1000)
    with in_float32(module) as raised:
        assert not raised and module.lm_head.weight.dtype == torch.bfloat16


class OwnCode(torch.nn.Module):
    """A model of a checkpoint's own code: no `past_key_values` class, a tuple out, a sum of embeddings as its state."""

    def __init__(self, vocab=31):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab, 16), torch.nn.Linear(16, vocab)
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=vocab))

    @property
    def device(self):
        return self.head.weight.device

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        seen = self.embed(input_ids).cumsum(1)
        if past_key_values is not None:
            seen = seen + past_key_values[0][:, None]
        return self.head(seen), (seen[:, -1],) if use_cache else None


def own_code(module):
    return UnmodifiedModel(
        module=module.eval(),
        architecture="OwnCode",
        vocab_size=31,
        max_model_len=64,
        eos_token_ids=(),
        dtype=torch.float32,
        device=torch.device("cpu"),
        weight_bytes=0,
    )


def test_code_of_a_checkpoint_may_give_tuples_and_take_no_mask():
    driver = Driver(own_code(OwnCode()))
    assert (driver.keyword, driver.mask_style) == ("past_key_values", "none")
    layout = StateLayout.discover(driver.run)
    ids = driver.text(2, 5)
    want, _ = driver.forward(driver.inputs(ids), None)
    states = [driver.forward(driver.inputs(ids[row : row + 1, :4]), None)[1] for row in range(2)]
    got, _ = driver.forward(driver.inputs(ids[:, 4:], 4), layout.merge(states, [4, 4]))
    assert difference(got, want) < 1e-6


class Output(dict):
    """A model output with named entries."""

    @property
    def logits(self):
        return self["logits"]


class Renamed(OwnCode):
    """A model whose state has an unusual name. It also gives out and takes in values that are not a state."""

    def forward(self, input_ids, router_cache=None, memory=None, use_cache=False):
        logits, kept = super().forward(input_ids, memory, use_cache)
        return Output(logits=logits, router_cache=torch.zeros(2), memory=kept)


class OfOlderCode(OwnCode):
    """A model whose output has the name that a newer Transformers gives the state."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        logits, kept = super().forward(input_ids, past_key_values, use_cache)
        return Output(logits=logits, cache=kept)


@pytest.mark.parametrize(("made", "keyword"), [(Renamed, "memory"), (OfOlderCode, "past_key_values")])
def test_a_state_is_found_under_any_name_among_outputs_that_go_in_again(made, keyword):
    driver = Driver(own_code(made()))
    assert driver.keyword == keyword
    ids = driver.text(2, 5)
    want, _ = driver.forward(driver.inputs(ids), None)
    _, state = driver.forward(driver.inputs(ids[:, :4]), None)
    got, _ = driver.forward(driver.inputs(ids[:, 4:], 4), state)
    assert difference(got, want) < 1e-6


def test_a_module_that_keeps_its_state_inside_is_computed_whole_each_time():
    class Inside(OwnCode):
        def forward(self, input_ids, past_key_values=None, use_cache=False):
            if past_key_values is not None:
                past_key_values = (self.kept[0],)
            logits, self.kept = super().forward(input_ids, past_key_values, True)
            return logits, (torch.zeros(len(input_ids)),) if use_cache else None

    driver = Driver(own_code(Inside()))
    assert driver.keyword is None
    ids = driver.text(1, 5)
    assert difference(driver.forward(driver.inputs(ids), None)[0], driver.model.module(ids)[0][:, -1]) == 0
    assert driver.forward(driver.inputs(ids), None)[1] is None


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda self, input_ids: (torch.full((1, 4, 31), float("nan")),), "logits that are not finite"),
        (lambda self, input_ids: (torch.zeros(1, 31),), r"logits of shape \(1, 31\) for 4 tokens"),
        (lambda self, input_ids: 1 / 0, "fails on a prompt of 4 tokens: division by zero"),
    ],
)
def test_a_model_without_logits_is_refused(forward, message):
    module = type("Broken", (OwnCode,), {"forward": forward})()
    with pytest.raises(UnsupportedCheckpoint, match=message):
        Driver(own_code(module))
