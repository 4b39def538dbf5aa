"""Encoder-decoders: T5 in batches, BART row by row, each with the tokens of its own `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers

from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from holdfast.lm.padded.encoder_decoder import EncoderDecoderDriver
from holdfast.lm.padded.loading import as_unmodified
from tests.padded_checks import VOCAB, draw_prompts

SHORT = {"vocab_size": VOCAB, "d_model": 64, "pad_token_id": 0, "eos_token_id": None, "tie_word_embeddings": False}
T5 = SHORT | {
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "initializer_factor": 3.0,
}
BART = SHORT | {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "init_std": 0.5,
}
FAMILIES = {"T5": T5, "MT5": T5, "Bart": BART}


def make(name, **differences):
    config = getattr(transformers, f"{name}Config")(**FAMILIES[name] | differences)
    torch.manual_seed(0)
    return transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A checkpoint directory and its module."""
    directory = tmp_path_factory.mktemp("models") / request.param
    module = make(request.param)
    module.save_pretrained(directory)
    return directory, module


@torch.inference_mode()
def alone(module, prompt, max_tokens):
    given = module.generate(
        input_ids=torch.tensor([list(prompt)]), do_sample=False, num_beams=1, max_new_tokens=max_tokens
    )
    return given[0, 1:].tolist()


def engine(directory, **options):
    defaults = {"threads": 1, "max_sequences": 3, "cache_gb": 0.01, "max_model_len": 128}
    return build(EngineConfig(model=str(directory), **defaults | options))


def serve(loop, prompts, max_tokens, first=0):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts, start=first):
        loop.add(Request(str(number), prompt, params))
    given = {}
    while loop.has_work():
        for output in loop.step() or ():
            given.setdefault(output.request_id, []).extend(output.tokens)
    return [given[str(number)] for number in range(first, first + len(prompts))]


@pytest.mark.each_value
@pytest.mark.parametrize("scheduler", ["stall-free", "embedding", "run-to-completion"])
def test_each_request_gets_the_tokens_of_generate(family, scheduler):
    directory, module = family
    loop, info = engine(directory, scheduler=scheduler)
    together = "row by row" if "Bart" in directory.name else "together"
    assert info.executor == "padded"
    assert ("decoded together" in info.executor_reason) == (together == "together")
    prompts = draw_prompts(5, 19, 2, 11, 30, 8)
    assert serve(loop, prompts, 9) == [alone(module, prompt, 9) for prompt in prompts]
    loop.close()


def test_a_preempted_request_goes_on_with_its_own_prompt(family):
    directory, module = family
    loop, _ = engine(directory, max_sequences=1)
    long, urgent = draw_prompts(12, 7)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    loop.add(Request("long", long, params, priority=1))
    given = {"long": [], "urgent": []}
    for _ in range(6):
        for output in loop.step() or ():
            given[output.request_id] += output.tokens
    loop.add(Request("urgent", urgent, params, priority=0))
    while loop.has_work():
        for output in loop.step() or ():
            given[output.request_id] += output.tokens
    assert given == {"long": alone(module, long, 20), "urgent": alone(module, urgent, 20)}
    assert loop.stats().preemptions == 1
    loop.close()


def test_a_prompt_that_begins_as_another_request_is_encoded_anew(family):
    directory, module = family
    loop, _ = engine(directory)
    (prompt,) = draw_prompts(20)
    (answer,) = serve(loop, [prompt], 6)
    longer = (*prompt, *answer, *draw_prompts(4)[0])
    assert serve(loop, [longer], 6, first=1) == [alone(module, longer, 6)]
    assert loop.stats().prefix_hits == 0
    loop.close()


def test_first_tokens_that_the_config_forces_are_given_to_the_decoder():
    module = make("Bart")
    module.generation_config.forced_bos_token_id = 5
    driver = EncoderDecoderDriver(as_unmodified(module))
    (prompt,) = draw_prompts(9)
    logits, state = driver.forward(driver.inputs(torch.tensor([prompt])), None)
    assert driver.first == [2, 5] and alone(module, prompt, 3)[0] == 5
    assert int(logits.argmax()) == alone(module, prompt, 3)[1]
    assert driver.layout.width(state) == 9


def test_a_model_without_a_first_token_for_its_decoder_is_refused():
    module = make("T5")
    module.config.decoder_start_token_id = module.generation_config.decoder_start_token_id = None
    with pytest.raises(ValueError, match="T5ForConditionalGeneration names no decoder_start_token_id"):
        EncoderDecoderDriver(as_unmodified(module))


@torch.inference_mode()
def test_a_decoder_may_have_more_or_fewer_layers_than_its_encoder(tmp_path):
    for encoder, decoder in ((1, 3), (3, 1)):
        directory = tmp_path / f"{encoder}-{decoder}"
        module = make("T5", num_layers=encoder, num_decoder_layers=decoder, feed_forward_proj="gated-gelu")
        module.save_pretrained(directory)
        loop, _ = engine(directory)
        (prompt,) = draw_prompts(11)
        ids = [0]  # without a cache: that of `generate` has as many layers as the encoder
        for _ in range(8):
            logits = module(
                input_ids=torch.tensor([list(prompt)]), decoder_input_ids=torch.tensor([ids]), use_cache=False
            ).logits
            ids.append(int(logits[0, -1].argmax()))
        assert serve(loop, [prompt], 8) == [ids[1:]]
        loop.close()
