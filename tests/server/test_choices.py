"""Several choices of one prompt: n and best_of, through a real engine, with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.served import Serving, make_checkpoint, serve

PROMPT = "Tell me of the sea, of its storms and of the ships that it took. " * 4
WARM: dict[str, Any] = {"temperature": 1.0, "max_tokens": 12, "seed": 7, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serve(make_checkpoint(tmp_path_factory.mktemp("models") / "bytes"), "--store", "memory") as serving:
        yield serving


def test_four_choices_share_the_blocks_of_their_prompt(serving: Serving) -> None:
    with serving.client() as client:
        model = client.models.list().data[0].id
        before = serving.gauge("cached_tokens_total")
        answer = client.completions.create(model=model, prompt=PROMPT, n=4, **WARM)
        shared = serving.gauge("cached_tokens_total") - before
        alone = [
            client.completions.create(model=model, prompt=PROMPT, **WARM | {"seed": 7 + choice}).choices[0].text
            for choice in range(4)
        ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert shared == 3 * (len(PROMPT) // 16 * 16), "all but the first find every whole block"
    assert [choice.text for choice in answer.choices] == alone
    assert len(set(alone)) == 4


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_gives_the_answers_of_the_highest_mean_log_probability_best_first(
    serving: Serving, logprobs: int | None
) -> None:
    prompts = ["The sea", "A ship"]
    with serving.client() as client:
        model = client.models.list().data[0].id
        every = client.completions.create(model=model, prompt=prompts, n=5, logprobs=0, **WARM)
        best = client.completions.create(model=model, prompt=prompts, n=2, best_of=5, logprobs=logprobs, **WARM)
    assert every.usage is not None and best.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens == 2 * 5 * 12
    expected = []
    for start in (0, 5):
        group = every.choices[start : start + 5]
        group.sort(key=lambda choice: -sum(choice.logprobs.token_logprobs))  # type: ignore[union-attr,arg-type]
        expected += [choice.text for choice in group[:2]]
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert all((choice.logprobs is None) is (logprobs is None) for choice in best.choices)


def test_best_of_below_n_or_with_a_stream_is_refused(serving: Serving) -> None:
    with serving.client() as client:
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError, match="best_of is 1 and n is 2; it must be at least n"):
            client.completions.create(model=model, prompt="a", n=2, best_of=1)
        with pytest.raises(openai.BadRequestError, match="with stream: true they must be equal"):
            client.completions.create(model=model, prompt="a", best_of=2, stream=True)
