"""Drafts through a whole engine: texts, log probabilities, usage and reports are those without drafts."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from holdfast import LLM, SamplingParams
from holdfast.core.config import BUILTIN_HEAD, BUILTIN_MODEL
from holdfast.core.types import Grammar, Request, TokenLogprobs
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process import build as build_module
from holdfast.engine.process.build import build
from holdfast.engine.process.parts.speculation import SpeculationBuilder
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from tests.engine.conftest import SMALL
from tests.heads import write_head

FEW = SamplingParams(temperature=0.3, max_tokens=60, ignore_eos=True, logit_bias=((70, 60.0), (71, 60.0), (72, 59.0)))
PROMPTS = [f"{number} hello world " * (number % 3 + 1) for number in range(1, 9)]
KINDS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(logprobs=2),
    dict(frequency_penalty=0.2, logprobs=0),
    dict(min_tokens=25),
    dict(logprob_token_ids=(3, 71, 9)),
]


@pytest.fixture(autouse=True)
def rows_cost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost profile makes drafts pay, whatever the pace of the machine that tests run on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    estimate = build_module.make_profile

    def cheap(*given: Any, **options: Any) -> CostProfile:
        profile = estimate(*given, **options)
        free: dict[str, Any] = dict(linear_tokens=(1, 512), linear_seconds=(1.0, 1.01))
        cost = replace(profile.cost, **free, decode_rows=(), decode_seconds=(), decode_attention=())
        return replace(profile, cost=cost)

    monkeypatch.setattr(build_module, "make_profile", cheap)


def test_texts_are_the_same_with_and_without_drafts(checkpoint: Path) -> None:
    build(EngineConfig(model=str(checkpoint), **SMALL, speculation="suffix"))[0].close()  # stores the profile
    asked = [replace(FEW, seed=number, **KINDS[number % len(KINDS)]) for number in range(len(PROMPTS))]
    with LLM(str(checkpoint), **SMALL) as llm:
        open_ended = llm.generate(PROMPTS, asked, progress=False)
        # Two characters from the middle end the text, wherever they fall in the tokens of one step.
        stops = [each.text[len(each.text) // 2 :][:2] for each in open_ended]
        asked += [replace(params, stop=(stop,)) for params, stop in zip(asked, stops, strict=True)]
        expected = llm.generate(PROMPTS * 2, asked, progress=False)
    with LLM(str(checkpoint), **SMALL, speculation="suffix") as llm:
        found = llm.generate(PROMPTS * 2, asked, progress=False)
        stats = llm._thread.run(llm._client.health())
    assert stats.drafts_accepted > 50
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.finish_reason for each in found] == [each.finish_reason for each in expected]
    assert [each.timings.tokens for each in found] == [each.timings.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert [told.top_ids for told in one.logprobs] == [told.top_ids for told in other.logprobs]
        chances, others = (
            [c for told in each.logprobs for c in (told.logprob, *told.top_logprobs)] for each in (one, other)
        )
        assert chances == pytest.approx(others, abs=1e-4)


@pytest.mark.always("options1", "options2")
@pytest.mark.parametrize("options", [{"tp": 2}, {"pp": 2}, {"max_adapters": 2}])
def test_drafts_are_verified_on_several_devices_and_with_slots_for_adapters(
    checkpoint: Path, options: dict[str, Any]
) -> None:
    answers = []
    for speculation in ("off", "ngram"):
        config = EngineConfig(model=str(checkpoint), **SMALL | options, speculation=speculation)
        loop, info = build(config)
        choose = random.Random(0)
        given: dict[str, list[int]] = {str(number): [] for number in range(3)}
        named: list[TokenLogprobs] = []
        for name in given:
            prompt = tuple(choose.randrange(info.vocab_size) for _ in range(9))
            names = (5, 71, 70) if name == "1" else ()
            loop.add(Request(name, prompt, replace(FEW, seed=int(name), logprob_token_ids=names)))
        while loop.has_work():
            for output in loop.step() or ():
                given[output.request_id] += output.tokens
                named += output.logprobs
        assert {told.top_ids for told in named} == {(5, 71, 70)} and len(named) == len(given["1"])
        for token, told in zip(given["1"], named, strict=True):
            own = dict(zip(told.top_ids, told.top_logprobs, strict=True)).get(token, told.logprob)
            assert own == told.logprob, "drafts leave each record at its token"
        assert (loop.stats().drafts_accepted > 10) == (speculation == "ngram")
        answers.append(given)
        loop.close()
    assert answers[0] == answers[1]


def test_drafts_are_verified_together_with_grammars_and_embeddings(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint), **SMALL, speculation="ngram")
    answers = []
    for speculation in ("off", "ngram"):
        loop, info = build(replace(config, speculation=speculation))
        choose = random.Random(0)

        def prompt() -> tuple[int, ...]:
            return tuple([choose.randrange(info.vocab_size) for _ in range(9)])  # noqa: B023

        spelled = Grammar("lark", 'start: /[a-c]/ " and the rest of this text is forced " /[a-z]{9}/')
        free = replace(FEW, logit_bias=(), temperature=1.0, max_tokens=40, ignore_eos=False)
        waiting = [Request(f"few {number}", prompt(), replace(FEW, seed=number)) for number in range(3)]
        waiting += [
            Request(f"grammar {number}", prompt(), replace(free, seed=number, grammar=spelled)) for number in (1, 2)
        ]
        for each in waiting:
            loop.add(each)
        embedding = SamplingParams(temperature=0.0, max_tokens=1, embed=True)
        given: dict[str, list[int]] = {}
        vectors: dict[str, bytes] = {}
        steps = 0
        while loop.has_work():
            steps += 1
            if steps % 5 == 0 and len(vectors) + 1 < 9:
                loop.add(Request(f"embedding {steps // 5}", (steps // 5, 7, 9), embedding))
            for output in loop.step() or ():
                given[output.request_id] = [*given.get(output.request_id, ()), *output.tokens]
                if output.vector:
                    vectors[output.request_id] = output.vector
        assert (loop.stats().drafts_accepted > 10) == (speculation == "ngram")
        assert len(vectors) >= 6
        answers.append((given, vectors))
        loop.close()
    (without, vectors), (found, drafted) = answers
    assert {name: tokens for name, tokens in found.items() if "embedding" not in name} == {
        name: tokens for name, tokens in without.items() if "embedding" not in name
    }
    for name in vectors.keys() & drafted.keys():
        assert np.frombuffer(drafted[name], np.float32) == pytest.approx(
            np.frombuffer(vectors[name], np.float32), abs=1e-4
        )


@pytest.fixture(scope="module")
def head(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that guesses two of the three tokens that FEW favours."""
    target = load(checkpoint, device="cpu")
    assert isinstance(target, Decoder)
    return write_head(tmp_path_factory.mktemp("head"), target, (70, 71))


@pytest.mark.parametrize("options", [{}, {"max_adapters": 2}, {"host_cache_gb": 0.01}])
def test_a_draft_head_gives_the_same_answers_next_to_grammars_and_embeddings(
    checkpoint: Path, head: Path, options: dict[str, Any]
) -> None:
    answers = []
    for draft_model in ("", str(head)):
        loop, info = build(EngineConfig(model=str(checkpoint), **SMALL | options, draft_model=draft_model))
        choose = random.Random(0)
        shared = tuple([choose.randrange(info.vocab_size) for _ in range(70)])
        spelled = Grammar("lark", 'start: /[a-c]/ " and the rest of this text is forced " /[a-z]{9}/')
        asked = [replace(FEW, seed=number) for number in range(4)]
        asked += [
            replace(FEW, logit_bias=(), seed=9, grammar=spelled, ignore_eos=False),
            replace(FEW, temperature=0.0),
            SamplingParams(temperature=0.0, max_tokens=1, embed=True),
        ]
        given: dict[str, list[int]] = {str(number): [] for number in range(len(asked))}
        for number, params in enumerate(asked):
            loop.add(Request(str(number), (*shared[: 10 * number], number), params))
        while loop.has_work():
            for output in loop.step() or ():
                given[output.request_id] += output.tokens
        assert (loop.stats().drafts_accepted > 20) == bool(draft_model)
        answers.append(given)
        loop.close()
    assert answers[0] == answers[1]


def test_a_draft_head_of_another_model_is_refused_at_the_start(checkpoint: Path, head: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    shutil.copytree(head, wrong)
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"target_hidden_size": 77}))
    for path, message in (
        (wrong, "draft_model is made for another model: its target_hidden_size is 77, and that of the model is 64"),
        (tmp_path / "none", "draft_model '.*none': .* does not exist"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            build(EngineConfig(model=str(checkpoint), **SMALL, draft_model=str(path)))
        assert "padded" not in str(error.value)  # the model itself is fine


def test_a_draft_head_is_refused_for_a_model_that_runs_on_padded_rows() -> None:
    config = EngineConfig(draft_model="h")
    site: Any = SimpleNamespace(config=config, device=object(), checkpoint=SimpleNamespace(name="t5"))
    with pytest.raises(ValueError, match="draft_model is h, and t5 runs on padded rows, which verify no drafts"):
        SpeculationBuilder(site).allocated(None)  # type: ignore[arg-type]


def test_a_fifth_of_the_guesses_of_the_built_in_models_head_are_right() -> None:
    answers = []
    for draft_model in ("", BUILTIN_HEAD):
        options = SMALL | {"model": BUILTIN_MODEL, "draft_model": draft_model, "draft_tokens": 3}
        loop, _ = build(EngineConfig(**options))
        tokenizer = Tokenizer.from_file(str(Checkpoint.find(BUILTIN_MODEL).directory / "tokenizer.json"))
        params, given = SamplingParams(temperature=0.0, max_tokens=60), dict[str, list[int]]()
        for asked in (
            "Tell me a story.",
            "My name is Ada and I live in Rome. Where do I live?",
            "Write a poem, please.",
        ):
            prompt = tokenizer.encode(f"<|user|> {asked}<|end|><|assistant|>", add_special_tokens=False).ids
            given[asked] = []
            loop.add(Request(asked, tuple(prompt), params))
        while loop.has_work():
            for output in loop.step() or ():
                given[output.request_id] += output.tokens
        stats = loop.stats()
        answers.append(given)
        loop.close()
    assert answers[0] == answers[1]
    assert stats.tokens_drafted > 60 and stats.drafts_accepted > 0.2 * stats.tokens_drafted
