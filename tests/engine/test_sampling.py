"""Sampling options through a real engine process, compared with Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from holdfast import LLM, SamplingParams
from holdfast.engine.client.llm import Completion
from tests.engine.conftest import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=150, repetition_penalty=1.5, frequency_penalty=0.2)
PROMPTS = [f"{number} hello world " * (number % 5 + 1) for number in range(1, 13)]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"steps_in_flight": 2}, id="overlapped"),
        pytest.param({"steps_in_flight": 1}, id="in turn", marks=pytest.mark.long),
        pytest.param({"device": "cuda"}, id="on a GPU", marks=pytest.mark.gpu),
    ],
)
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SMALL | request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.inference_mode()
def distribution(model: transformers.PreTrainedModel, completion: Completion) -> torch.Tensor:
    """The log probabilities [n, V] at the place of each generated token."""
    ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    logits = model(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def test_log_probabilities_are_those_of_transformers(llm: LLM, model: transformers.PreTrainedModel) -> None:
    asked = [
        replace(GREEDY, logprobs=(None, 0, 5, 20)[index % 4], temperature=(0.0, 1.2)[index % 2], seed=index, top_p=0.9)
        for index in range(len(PROMPTS))
    ]
    completions = llm.generate(PROMPTS, asked, progress=False)
    plain = llm.generate(PROMPTS, [replace(each, logprobs=None) for each in asked], progress=False)
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    for params, completion in zip(asked, completions, strict=True):
        if params.logprobs is None:
            assert completion.logprobs == ()
            continue
        expected = distribution(model, completion)
        assert len(completion.logprobs) == len(completion.token_ids)
        for row, token, told in zip(expected, completion.token_ids, completion.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert len(told.top_ids) == params.logprobs
            assert told.top_logprobs == pytest.approx(row.topk(params.logprobs).values.tolist(), abs=1e-4)
            assert [float(row[each]) for each in told.top_ids] == pytest.approx(list(told.top_logprobs), abs=1e-4)


def test_named_tokens_have_the_log_probabilities_of_transformers_at_each_position(
    llm: LLM, model: transformers.PreTrainedModel
) -> None:
    names = (9, 3, 5), (), (4,), tuple(range(60))
    asked = [
        replace(
            GREEDY, logprob_token_ids=names[at % 4], logprobs=(None, 2, 1, None)[at % 4], temperature=at % 3, seed=at
        )
        for at in range(len(PROMPTS))
    ]
    completions = llm.generate(PROMPTS, asked, progress=False)
    plain = llm.generate(
        PROMPTS, [replace(each, logprob_token_ids=(), logprobs=None) for each in asked], progress=False
    )
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    for params, completion in zip(asked, completions, strict=True):
        expected = distribution(model, completion)
        for row, token, told in zip(expected, completion.token_ids, completion.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
            ids = params.logprob_token_ids or tuple(row.topk(2).indices.tolist())
            assert told.top_ids == ids
            assert told.top_logprobs == pytest.approx([float(row[each]) for each in ids], abs=1e-4)
    (whole,) = llm.generate(PROMPTS[:1], replace(GREEDY, max_tokens=1), progress=False)
    ends = replace(GREEDY, stop_token_ids=whole.token_ids, logprob_token_ids=(3, 9))
    (ended,) = llm.generate(PROMPTS[:1], ends, progress=False)
    assert ended.token_ids == whole.token_ids and [each.top_ids for each in ended.logprobs] == [(3, 9)]
    with pytest.raises(ValueError, match="logprob_token_ids holds token id 1000000"):
        llm.generate(PROMPTS[:1], replace(GREEDY, logprob_token_ids=(10**6,)), progress=False)


def test_the_token_that_ends_an_answer_is_not_reported(llm: LLM) -> None:
    (whole,) = llm.generate("hello world", replace(GREEDY, logprobs=1), progress=False)
    end = whole.token_ids[5]
    at = whole.token_ids.index(end)
    (stopped,) = llm.generate("hello world", replace(GREEDY, logprobs=1, stop_token_ids=(end,)), progress=False)
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert len(stopped.logprobs) == at


KINDS = [
    dict(repetition_penalty=1.4),
    dict(frequency_penalty=1.5),
    dict(presence_penalty=1.1, frequency_penalty=-0.3),
    dict(logit_bias=((5, 6.0), (9, -100.0))),
    dict(temperature=0.9, min_p=0.2, top_k=30, seed=4),
    dict(temperature=1.3, repetition_penalty=1.2, presence_penalty=0.4, seed=11, logprobs=3),
]


@torch.inference_mode()
def penalised(model: transformers.PreTrainedModel, prompt: list[int], params: SamplingParams) -> list[int]:
    """The greedy answer, by the formulas of the OpenAI API and of the repetition penalty."""
    tokens = list(prompt)
    for _ in range(params.max_tokens):
        logits = model(torch.tensor([tokens])).logits[0, -1]
        for token, bias in params.logit_bias:
            logits[token] += bias
        for token in set(tokens):
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        for token in set(tokens[len(prompt) :]):
            count = tokens[len(prompt) :].count(token)
            logits[token] -= params.frequency_penalty * count + params.presence_penalty
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_greedy_answers_with_penalties_and_biases_are_those_of_the_formulas(
    llm: LLM, model: transformers.PreTrainedModel
) -> None:
    asked = [replace(GREEDY, **KINDS[index % 4]) for index in range(len(PROMPTS))]
    completions = llm.generate(PROMPTS, asked, progress=False)
    for params, completion in zip(asked, completions, strict=True):
        assert list(completion.token_ids) == penalised(model, list(completion.prompt_token_ids), params)


def test_a_repetition_penalty_gives_the_answer_of_transformers_generate(
    llm: LLM, model: transformers.PreTrainedModel
) -> None:
    (completion,) = llm.generate(PROMPTS[7], replace(GREEDY, repetition_penalty=1.3), progress=False)
    ids = torch.tensor([completion.prompt_token_ids])
    expected = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, repetition_penalty=1.3)
    assert list(completion.token_ids) == expected[0, ids.shape[1] :].tolist()


def test_a_request_draws_the_same_tokens_alone_and_among_others(llm: LLM) -> None:
    asked = [replace(GREEDY, **KINDS[index % len(KINDS)]) for index in range(len(PROMPTS))]
    together = llm.generate(PROMPTS, asked, progress=False)
    plain = llm.generate(PROMPTS, GREEDY, progress=False)
    mixed = llm.generate(PROMPTS + PROMPTS, asked + [GREEDY] * len(PROMPTS), progress=False)
    for prompt, params, completion in zip(PROMPTS, asked, together, strict=True):
        (alone,) = llm.generate(prompt, params, progress=False)
        assert alone.token_ids == completion.token_ids, params
    assert [each.token_ids for each in mixed] == [each.token_ids for each in together + plain]
    assert [each.token_ids for each in together] != [each.token_ids for each in plain]


@pytest.fixture(scope="module")
def expected_beside_others(checkpoint: Path, model: transformers.PreTrainedModel) -> dict[str, list[int]]:
    """The answers of the next test, by their prompts."""
    prompts = ["hello world " * 3, "hello world " * 3 + "again", "hello", "world"]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    return {prompt: penalised(model, tokenizer.encode(prompt).ids, LONG) for prompt in prompts}


@pytest.mark.parametrize(("host", "steps"), [(0.0, 2), (0.001, 1)], ids=["computed again", "swapped"])
def test_penalties_are_exact_where_memory_makes_sequences_wait_and_come_back(
    checkpoint: Path, expected_beside_others: dict[str, list[int]], host: float, steps: int
) -> None:
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    # These positions hold fewer than all sequences at their ends.
    block = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 16 * 4
    options = SMALL | {"cache_gb": 26.5 * block / 1e9, "host_cache_gb": host, "steps_in_flight": steps}
    with LLM(str(checkpoint), **options) as llm:
        assert llm.info.memory.block == block
        completions = llm.generate(list(expected_beside_others), LONG, progress=False)
        stats = llm._thread.run(llm._client.health())
    assert stats.preemptions > 0
    assert [list(each.token_ids) for each in completions] == list(expected_beside_others.values())


def test_no_end_token_or_stop_string_counts_before_the_answer_is_long_enough(llm: LLM) -> None:
    (plain,) = llm.generate("hello world", GREEDY, progress=False)
    end = plain.token_ids[3]
    asked = replace(GREEDY, stop_token_ids=(end,), min_tokens=10)
    (later,) = llm.generate("hello world", asked, progress=False)
    assert end not in later.token_ids[:10] and len(later.token_ids) > 10
    (stopped,) = llm.generate("hello world", replace(GREEDY, stop=(plain.text[2],), min_tokens=10), progress=False)
    assert stopped.text.startswith(llm.text.decode(plain.token_ids[:9]))


@torch.inference_mode()
def test_log_probabilities_of_prompts_are_those_of_transformers(llm: LLM, model: transformers.PreTrainedModel) -> None:
    asked = [
        replace(GREEDY, max_tokens=3, prompt_logprobs=(None, 0, 5, 20)[index % 4], logprobs=(None, 2)[index % 2])
        for index in range(len(PROMPTS))
    ]
    for cached in (False, True):  # a prompt that is cached is computed again
        for params, completion in zip(asked, llm.generate(PROMPTS, asked, progress=False), strict=True):
            if params.prompt_logprobs is None:
                assert completion.prompt_logprobs == ()
                continue
            ids = torch.tensor([completion.prompt_token_ids])
            expected = model(ids).logits[0, :-1].double().log_softmax(-1)
            assert completion.cached_tokens == 0, f"cached before: {cached}"
            assert len(completion.prompt_logprobs) == len(completion.prompt_ranks) == ids.shape[1] - 1
            assert len(completion.logprobs) == (3 if params.logprobs else 0)
            for row, token, rank in zip(expected, ids[0, 1:].tolist(), completion.prompt_ranks, strict=True):
                certainly, perhaps = (int((row > row[token] + by).sum()) + 1 for by in (1e-4, -1e-4))
                assert certainly <= rank <= perhaps, "rounding may swap tokens whose log probabilities are that close"
            for row, token, told in zip(expected, ids[0, 1:].tolist(), completion.prompt_logprobs, strict=True):
                assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
                assert told.top_logprobs == pytest.approx(row.topk(params.prompt_logprobs).values.tolist(), abs=1e-4)
                assert [float(row[each]) for each in told.top_ids] == pytest.approx(list(told.top_logprobs), abs=1e-4)


@torch.inference_mode()
def test_named_tokens_of_prompts_have_the_log_probabilities_of_transformers(
    llm: LLM, model: transformers.PreTrainedModel
) -> None:
    named = ((), (3, 9), (4,))
    asked = replace(GREEDY, max_tokens=2, prompt_logprobs=1, prompt_targets=named)
    (completion,) = llm.generate(PROMPTS[-1:], asked, progress=False)
    expected = model(torch.tensor([completion.prompt_token_ids])).logits[0, :-1].double().log_softmax(-1)
    for number, (row, told) in enumerate(zip(expected, completion.prompt_logprobs, strict=True)):
        wanted = named[number] if number < 3 else ()
        assert told.top_ids == (int(row.argmax()), *wanted)
        assert told.top_logprobs[1:] == pytest.approx([float(row[each]) for each in wanted], abs=1e-4)
    with pytest.raises(ValueError, match="prompt_targets"):
        llm.generate(PROMPTS[-1:], replace(asked, prompt_targets=((10**6,),)), progress=False)


def test_a_prompt_of_one_token_has_no_log_probabilities(llm: LLM) -> None:
    (completion,) = llm.generate([[5]], replace(GREEDY, prompt_logprobs=2), progress=False)
    assert completion.prompt_logprobs == () and len(completion.token_ids) == 24
