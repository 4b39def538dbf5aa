"""What requests ask of sampling, through a real engine process, beside Transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from holdfast import LLM, SamplingParams
from holdfast.engine.llm import Completion
from tests.engine.conftest import SMALL

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [f"{number} hello world " * (number % 5 + 1) for number in range(1, 13)]


@pytest.fixture(scope="module", params=[2, 1], ids=["overlapped", "in turn"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(checkpoint), **SMALL, steps_in_flight=request.param) as llm:
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


def test_the_token_that_ends_an_answer_is_not_told(llm: LLM) -> None:
    (whole,) = llm.generate("hello world", replace(GREEDY, logprobs=1), progress=False)
    end = whole.token_ids[5]
    at = whole.token_ids.index(end)
    (stopped,) = llm.generate("hello world", replace(GREEDY, logprobs=1, stop_token_ids=(end,)), progress=False)
    assert stopped.token_ids == whole.token_ids[: at + 1]
    assert len(stopped.logprobs) == at
