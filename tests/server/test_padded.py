"""Models that only Transformers' unmodified code runs, served over HTTP: streams, stops, aborts, conversations."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import openai
import pytest
import torch
import transformers
from served import Serving, eventually, started, write_tokenizer
from tokenizers import Tokenizer

from tests.padded_checks import FAMILIES, generate_alone

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz ,."


@dataclass
class Served:
    """A served model with random weights, and the model itself."""

    serving: Serving
    module: Any
    tokenizer: Tokenizer

    def alone(self, prompt: str, max_tokens: int) -> str:
        """Return the answer of the model's own `generate`, alone and greedily."""
        tokens = generate_alone(self.module, self.tokenizer.encode(prompt).ids, max_tokens)
        return str(self.tokenizer.decode(list(tokens)))


@pytest.fixture(scope="module", params=["falcon-alibi", "mamba"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("models") / request.param
    stem, differences = FAMILIES[request.param]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{stem}Config")(**SIZES | differences)
    module = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    module.save_pretrained(directory)
    tokenizer = write_tokenizer(directory)
    options = ["--cache-gb", "0.2", "--max-sequences", "16", "--max-model-len", "2048", "--store", "memory"]
    keys = ["--api-key", "one", "--api-key", "two"]
    with started(str(directory), *options, *keys) as serving:
        yield Served(serving, module, tokenizer)


@pytest.mark.always("mamba")
def test_the_start_reports_that_rows_are_padded_and_why(served: Served) -> None:
    shown = " ".join(served.serving.announced.split())
    assert "executor padded, because" in shown and type(served.module).__name__ in shown
    assert "decoded together" in shown
    chunks = "whole prompts" if served.module.config.model_type == "mamba" else "prompts in chunks"
    assert chunks in shown


def test_a_stream_and_an_answer_equal_those_of_the_model_alone(served: Served) -> None:
    asked: dict[str, Any] = {"model": "m", "prompt": "Tell me of the sea.", "temperature": 0, "max_tokens": 200}
    with served.serving.client() as client:
        asked["model"] = client.models.list().data[0].id
        whole = client.completions.create(**asked)
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True) if chunk.choices]
    assert "".join(pieces) == whole.choices[0].text == served.alone(asked["prompt"], 200)
    assert whole.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_answer_before_it(served: Served) -> None:
    prompts = [f"Once upon a time, {number}" for number in range(9)]
    prompt, text, at = next(
        (prompt, text, at)
        for prompt in prompts
        for text in [served.alone(prompt, 40)]
        for at in range(6, len(text))
        if text[at].isascii() and text.index(text[at]) == at
    )
    with served.serving.client() as client:
        model = client.models.list().data[0].id
        answer = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=40, stop=[text[at]])
    assert answer.choices[0].text == text[:at]
    assert answer.choices[0].finish_reason == "stop"


def test_a_client_that_leaves_frees_its_row(served: Served) -> None:
    with served.serving.client() as client:
        model = client.models.list().data[0].id
        streams = [
            client.completions.create(model=model, prompt="Go on", max_tokens=1900, stream=True, temperature=0)
            for _ in range(3)
        ]
        for stream in streams:
            next(iter(stream))
        assert served.serving.gauge("requests_running") == 3
        for stream in streams:
            stream.close()
        eventually(lambda: served.serving.gauge("requests_running") == served.serving.gauge("blocks_used") == 0)
        answer = client.completions.create(model=model, prompt="Still here?", max_tokens=8, temperature=0)
    assert answer.choices[0].text == served.alone("Still here?", 8)


def test_a_hundred_concurrent_requests_each_get_the_answer_that_they_get_alone(served: Served) -> None:
    choose = random.Random(3)
    prompts = ["".join(choose.choices(LETTERS, k=length)) for length in (1, 3, 7, 12, 20, 33, 50, 64, 90, 140)]
    lengths = (1, 5, 9, 14, 24)

    @cache
    def alone(prompt: str) -> tuple[int, ...]:
        return generate_alone(served.module, served.tokenizer.encode(prompt).ids, max(lengths))

    async def ask() -> list[tuple[str, int, str]]:
        async with openai.AsyncOpenAI(base_url=f"{served.serving.url}/v1", api_key="one", max_retries=0) as client:
            model = (await client.models.list()).data[0].id

            async def one(index: int) -> tuple[str, int, str]:
                prompt, length = prompts[index % len(prompts)], lengths[index // 2 % len(lengths)]
                await asyncio.sleep(choose.random())
                answer = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=length, temperature=0, timeout=120
                )
                return prompt, length, answer.choices[0].text

            return await asyncio.gather(*map(one, range(100)))

    answers = asyncio.run(ask())
    assert len(answers) == 100
    for prompt, length, text in answers:
        assert text == served.tokenizer.decode(list(alone(prompt)[:length]))
    assert served.serving.gauge("forwards_total") > 0
    eventually(lambda: served.serving.gauge("requests_running") == 0)


def test_the_next_turn_of_a_conversation_finds_the_state_of_the_last(served: Served) -> None:
    opening = "Hi! My name is Ada, and I have a long story to tell you about my three cats and their dog."
    with served.serving.client() as client:
        model = client.models.list().data[0].id
        first = client.responses.create(model=model, input=opening, max_output_tokens=24, temperature=0)
        again = client.responses.create(
            model=model, input="And then?", previous_response_id=first.id, max_output_tokens=8, temperature=0
        )
        other = client.responses.create(model=model, input=opening, max_output_tokens=24, temperature=0)
    assert first.usage is not None and again.usage is not None and other.usage is not None
    assert first.usage.input_tokens_details.cached_tokens == 0
    cached = again.usage.input_tokens_details.cached_tokens
    # Every token of the turn before except its last one, which was sampled and never computed.
    assert first.usage.total_tokens - 2 <= cached < again.usage.input_tokens
    assert other.output_text == first.output_text == served.alone(f"<user>{opening}<assistant>", 24)


def test_a_prompt_that_goes_on_from_an_answer_is_computed_from_its_state(served: Served) -> None:
    prompt = served.tokenizer.encode("Of a town by the sea, and of those who live there and fish.").ids
    with served.serving.client() as client:
        model = client.models.list().data[0].id
        known = 0
        for length in (12, 9, 15):
            answer = client.completions.create(model=model, prompt=prompt, max_tokens=length, temperature=0)
            tokens = generate_alone(served.module, prompt, length)
            assert answer.choices[0].text == served.tokenizer.decode(list(tokens))
            found = answer.usage.prompt_tokens_details.cached_tokens  # type: ignore[union-attr]
            assert found == known, "all that the answer before has computed"
            known = len(prompt) + length - 1
            prompt = [*prompt, *tokens, *served.tokenizer.encode(" Then?").ids]


def test_another_key_finds_nothing_of_the_first(served: Served) -> None:
    asked: dict[str, Any] = {"prompt": "A prompt that is long enough to be kept for later." * 2, "max_tokens": 4}
    with served.serving.client() as client, served.serving.client("two") as other:
        model = client.models.list().data[0].id
        for each in (client, other):
            answer = each.completions.create(model=model, temperature=0, **asked)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A served T5 without a chat template."""
    directory = tmp_path_factory.mktemp("models") / "t5"
    torch.manual_seed(0)
    settings = transformers.T5Config(
        vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, initializer_factor=3.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    module = transformers.AutoModelForSeq2SeqLM.from_config(settings, dtype=torch.float32).eval()
    module.save_pretrained(directory)
    tokenizer = write_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text("{}")
    with started(str(directory), "--cache-gb", "0.1", "--max-model-len", "512", "--api-key", "one") as serving:
        yield Served(serving, module, tokenizer)


def test_an_encoder_decoder_answers_completions_as_its_own_generate_does(translator: Served) -> None:
    def alone(prompt: str, max_tokens: int) -> str:
        ids = torch.tensor([translator.tokenizer.encode(prompt).ids])
        given = translator.module.generate(input_ids=ids, do_sample=False, num_beams=1, max_new_tokens=max_tokens)
        return str(translator.tokenizer.decode(given[0, 1:].tolist()))

    async def ask(prompts: list[str]) -> list[str]:
        url = f"{translator.serving.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="one", max_retries=0) as client:
            model = (await client.models.list()).data[0].id
            asked = [
                client.completions.create(model=model, prompt=prompt, max_tokens=12 + at % 7, temperature=0, timeout=90)
                for at, prompt in enumerate(prompts)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert "executor padded, because" in " ".join(translator.serving.announced.split())
    prompts = [f"translate to {number}: {'the sea ' * number}" for number in range(12)]
    answers = asyncio.run(ask(prompts))
    assert answers == [alone(prompt, 12 + at % 7) for at, prompt in enumerate(prompts)]
    assert len({*answers}) == len(prompts)
    with translator.serving.client() as client:
        model = client.models.list().data[0].id
        stream = client.completions.create(model=model, prompt=prompts[3], max_tokens=20, temperature=0, stream=True)
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces) == alone(prompts[3], 20)


def test_a_chat_with_a_model_that_has_no_template_is_refused_with_the_reason(translator: Served) -> None:
    with translator.serving.client() as client:
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError, match="no chat template; use plain completions"):
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hello"}])


def test_penalties_on_padded_rows_are_those_of_transformers(served: Served) -> None:
    if served.module.config.model_type == "mamba":
        pytest.skip("its generate gives the processors the tokens differently")
    prompts = ["Tell me of the sea.", "Once upon a time"]
    ids = [served.tokenizer.encode(prompt).ids for prompt in prompts]
    with served.serving.client() as client:
        model = client.models.list().data[0].id
        named = {"logprob_token_ids": [9, 3], "return_tokens_as_token_ids": True}
        extra = {"repetition_penalty": 1.4, "ignore_eos": True, **named}
        answers = client.completions.create(
            model=model, prompt=prompts, temperature=0, max_tokens=30, extra_body=extra, logprobs=1
        )
    for tokens, choice in zip(ids, answers.choices, strict=True):
        whole = served.module.generate(
            torch.tensor([tokens]), max_new_tokens=30, min_new_tokens=30, do_sample=False, repetition_penalty=1.4
        )
        assert choice.text == served.tokenizer.decode(whole[0, len(tokens) :].tolist())
        scores = served.module(whole).logits[0, len(tokens) - 1 : -1].log_softmax(-1)
        own = scores.gather(1, whole[0, len(tokens) :, None])[:, 0]
        assert choice.logprobs.token_logprobs == pytest.approx(own.tolist(), abs=1e-4)
        for row, told in zip(scores, choice.logprobs.top_logprobs, strict=True):
            assert [told[f"token_id:{each}"] for each in (9, 3)] == pytest.approx(row[[9, 3]].tolist(), abs=1e-4)
