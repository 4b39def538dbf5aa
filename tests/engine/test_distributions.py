"""Draws of whole engines are distributed as requests ask; a seed gives the same tokens wherever they are drawn.

All cases of an engine run together, shuffled, so that each batch holds rows that ask for different things. About 400
tokens are drawn for each case, 200 by engines that must give the same tokens as others; `make fuzz` draws 20,000
(HOLDFAST_DRAWS).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import LLM, SamplingParams
from holdfast.core.types import Grammar, ThinkingBudget
from holdfast.engine.process import build as build_module
from holdfast.engine.process.build import build
from holdfast.engine.profiles import CostProfile
from holdfast.lm.config import EngineConfig
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import decoder_spec, load
from holdfast.lm.types import SchedulerStats
from tests import adapters
from tests.checkpoints import SIZES, make
from tests.distributions import Allowed, Draws, faults
from tests.engine.conftest import SMALL
from tests.heads import write_head
from tests.tokenizers_made import byte_level

DRAWS, DRAWS_OF_OTHERS = (int(os.environ.get("HOLDFAST_DRAWS", default)) for default in ("400", "200"))
"""Number of tokens drawn for each case, and for each case of an engine whose sampler other engines' cases use too."""
OTHERS = ("padded", "tp 2", "pp 2")
LETTERS = "abcdefghijklmnopqrstuvwxyz "
WORDS, TEXT = (Grammar("regex", f"[{LETTERS}]{{{length}}}") for length in (8, 60))
END = 1
FEW = ((70, 60.0), (71, 60.0), (72, 59.0))
"""Biases that leave three tokens, so that answers repeat themselves and drafts come true."""


@dataclass(frozen=True)
class Case:
    """The sampling that one kind of request asks for."""

    name: str
    tokens: int = 6
    """Number of tokens in an answer."""
    adapter: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def params(self, seed: int) -> SamplingParams:
        """The parameters of one request."""
        ends = "grammar" in self.options  # where the grammar says so
        return SamplingParams(seed=seed, max_tokens=self.tokens, ignore_eos=not ends, **self.options)


def case(name: str, *, tokens: int = 6, adapter: str = "", **options: Any) -> Case:
    return Case(name, tokens, adapter, options)


CASES = [
    case("plain"),
    case("cold", temperature=0.5),
    case("hot", temperature=1.8, logprobs=2),
    case("top-k", top_k=5),
    case("top-p", top_p=0.7),
    case("hot top-p", temperature=1.7, top_p=0.6),
    case("top-k and top-p", temperature=1.4, top_k=12, top_p=0.8, logprobs=0),
    case("min-p", min_p=0.15),
    case("hot min-p", temperature=1.8, min_p=0.1),
    case("hot min-p and top-k", temperature=1.6, min_p=0.1, top_k=30),
    case("repetition", repetition_penalty=2.5),
    case("frequency and presence", tokens=12, frequency_penalty=1.1, presence_penalty=0.9, top_k=6),
    case("negative frequency", tokens=12, frequency_penalty=-0.8, top_k=30),
    case("bias", temperature=2.0, logit_bias=((7, 3.0), (70, 5.0), (40, -100.0), (9, -2.0))),
    case("all", temperature=1.3, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.4, presence_penalty=0.6,
         logit_bias=((7, 2.0), (70, 3.0))),
]  # fmt: skip
MIN_TOKENS = case("no end at first", min_tokens=3)
GRAMMARS = [
    case("grammar", tokens=5, grammar=WORDS),
    case("grammar, hot top-p", tokens=5, grammar=WORDS, temperature=1.5, top_p=0.7),
    case("grammar, penalties and bias", tokens=5, grammar=WORDS, repetition_penalty=1.8, logit_bias=((70, 2.0),)),
    case("grammar, top-k, told", tokens=5, grammar=WORDS, top_k=4, logprobs=1),
]
ADAPTED = [
    case("adapter one", adapter="one"),
    case("adapter two, top-p", adapter="two", top_p=0.75, temperature=1.2),
    case("adapter one, penalties", adapter="one", repetition_penalty=2.0, min_p=0.05),
    case("adapter two, grammar", tokens=5, adapter="two", grammar=WORDS),
]
FEW_TOKENS = [
    case("few tokens", tokens=40, logit_bias=FEW),
    case("few tokens, hot top-p", tokens=40, logit_bias=FEW, temperature=1.2, top_p=0.8),
    case("few tokens, penalty", tokens=40, logit_bias=FEW, frequency_penalty=0.05, logprobs=1),
    case("few tokens, grammar", tokens=40, logit_bias=FEW, grammar=TEXT),
    case("few tokens, adapter", tokens=40, logit_bias=FEW, adapter="one"),
    case("few tokens, thinking", tokens=40, logit_bias=FEW, thinking=ThinkingBudget(5, 70, 72)),
    case("few tokens, thinking at once", tokens=40, logit_bias=FEW, logprobs=1, frequency_penalty=0.05,
         thinking=ThinkingBudget(3, 71, 70, opened=True)),
]  # fmt: skip
CASES.append(FEW_TOKENS[0])
PADDED = [*CASES, MIN_TOKENS]
WHOLE = [*CASES, MIN_TOKENS, *GRAMMARS]
ON_RANKS = [CASES[0], *CASES[5:15:3], CASES[14], MIN_TOKENS, *GRAMMARS[2:]]
"""Ranks share the draws of one process, so that a few cases show that each option reaches them."""

BLOCK = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * SIZES["head_dim"] * 16 * 4
"""Bytes of a block of 16 positions."""
DRAFTS = {"speculation": "suffix", "max_adapters": 2, "max_sequences": 8, "token_budget": 64}
HEAD = DRAFTS | {"speculation": "eagle3", "draft_model": "head"}
ENGINES: dict[str, tuple[dict[str, Any], list[Case]]] = {
    "paged": ({"max_adapters": 2}, [*WHOLE, *ADAPTED]),
    "padded": ({"executor": "padded"}, PADDED),
    "drafts": (DRAFTS, FEW_TOKENS),
    "draft head": (HEAD, FEW_TOKENS),
    "tp 2": ({"tp": 2}, ON_RANKS),
    "pp 2": ({"pp": 2}, ON_RANKS),
    "small chunks": ({"token_budget": 16, "max_adapters": 2}, []),
    "preempted": ({"cache_gb": 24.5 * BLOCK / 1e9, "host_cache_gb": 0.0, "max_sequences": 8, "max_adapters": 2}, []),
    "swapped": ({"cache_gb": 24.5 * BLOCK / 1e9, "host_cache_gb": 0.002, "max_sequences": 8, "max_adapters": 2}, []),
    "paged on a GPU": ({"device": "cuda", "max_adapters": 2}, [*WHOLE, *ADAPTED]),
    "padded on a GPU": ({"device": "cuda", "executor": "padded"}, PADDED),
    "drafts on a GPU": ({"device": "cuda"} | DRAFTS, FEW_TOKENS),
    "draft head on a GPU": ({"device": "cuda"} | HEAD, FEW_TOKENS),
}


@dataclass(frozen=True)
class Model:
    """A checkpoint whose next token is neither certain nor open, and the facts known of it."""

    directory: Path
    modules: dict[str, Any]
    """Transformers' own models in float64, by adapter; an empty name for none."""
    prompts: list[tuple[int, ...]]
    spelled: list[str]
    """The text of each token; empty for those that a grammar never allows."""

    def allowed(self, grammar: Grammar | None) -> Allowed | None:
        """The tokens that a grammar lets follow an answer."""
        if grammar is None:
            return None
        length = {WORDS: 8, TEXT: 60}[grammar]
        letters = {token: len(text) for token, text in enumerate(self.spelled) if text and set(text) <= set(LETTERS)}

        def following(answer: Sequence[int]) -> list[int]:
            left = length - sum(letters[token] for token in answer)
            return [token for token, size in letters.items() if size <= left] if left else [END]

        return following


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = tmp_path_factory.mktemp("models") / "random-llama"
    module = make(directory, "Llama", max_position_embeddings=4096, eos_token_id=END)
    tokenizer = byte_level()
    tokenizer.save(str(directory / "tokenizer.json"))
    spec = decoder_spec(directory)
    modules = {"": module.double()}
    for name, seed in (("one", 1), ("two", 2)):
        weights = adapters.drawn(spec, 4, seed=seed)
        adapters.write(directory.parent / name, weights)
        modules[name] = adapters.merged(module, weights).double()
    target = load(directory, device="cpu")
    assert isinstance(target, Decoder)
    write_head(directory.parent / "head", target, (70, 71))
    spelled = [tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
    return Model(directory, modules, repetitive(modules[""]), spelled)


@torch.inference_mode()
def repetitive(module: Any) -> list[tuple[int, ...]]:
    """Prompts of several lengths, whose next token is likely one of the prompt: then penalties make a difference."""
    choose = random.Random(5)
    prompts = []
    for length in (1, 3, 6, 9, 14, 17, 20, 33):
        tries = torch.tensor([[choose.randrange(2, 330) for _ in range(length)] for _ in range(200)])
        share = module(tries).logits[:, -1].softmax(-1)
        again = [float(share[row, tries[row].unique()].sum()) for row in range(len(tries))]
        prompts.append(tuple(tries[again.index(max(again))].tolist()))
    return prompts


@pytest.fixture(scope="module")
def stored_profile(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The cost profile makes drafts pay, whatever the pace of the machine that tests run on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        estimate = build_module.make_profile

        def cheap(*given: Any, **options: Any) -> CostProfile:
            profile = estimate(*given, **options)
            free: dict[str, Any] = dict(linear_tokens=(1, 512), linear_seconds=(1.0, 1.01))
            cost = replace(profile.cost, **free, decode_rows=(), decode_seconds=(), decode_attention=())
            return replace(profile, cost=cost)

        patch.setattr(build_module, "make_profile", cheap)
        yield


def options_of(model: Model, given: dict[str, Any]) -> dict[str, Any]:
    """The options of an engine for many short requests."""
    options = SMALL | {"max_sequences": 64, "token_budget": 512, "max_waiting": 2048} | given
    if options.get("max_adapters"):
        options["adapter"] = tuple(f"{name}={model.directory.parent / name}" for name in ("one", "two"))
    if options.get("draft_model"):
        options["draft_model"] = str(model.directory.parent / options["draft_model"])
    return options


def start(model: Model, given: dict[str, Any]) -> LLM:
    """An engine. If it drafts, its profile is made before in this process, with costs that make drafts pay."""
    options = options_of(model, given)
    if options.get("speculation"):
        build(EngineConfig(model=str(model.directory), **options))[0].close()
    return LLM(str(model.directory), **options)


def draws_of(engine: str) -> int:
    """Number of tokens that an engine draws for each case."""
    return DRAWS_OF_OTHERS if engine in OTHERS else DRAWS


def draw(llm: LLM, model: Model, cases: Sequence[Case], draws: int) -> dict[str, list[Draws]]:
    """Answers to requests of all cases, in one shuffled crowd."""
    asked: list[tuple[Case, tuple[int, ...], SamplingParams]] = []
    for number, each in enumerate(cases):
        for index in range(-(-draws // each.tokens)):
            params = each.params(number * 10**6 + index)
            prompt = model.prompts[index % len(model.prompts)]
            if each is MIN_TOKENS:
                ends = tuple(range(2, 60))
                params = replace(params, ignore_eos=False, stop_token_ids=(END, *ends))
            asked.append((each, prompt, params))
    random.Random(0).shuffle(asked)
    answers: dict[str, list[Draws]] = {each.name: [] for each in cases}

    def generate(adapter: str) -> list[Draws]:
        own = [(prompt, params) for each, prompt, params in asked if each.adapter == adapter]
        prompts, params = [list(prompt) for prompt, _ in own], [params for _, params in own]
        found = llm.generate(prompts, params, adapter=adapter, progress=False)
        return [
            Draws(prompt, each.token_ids, params, model.allowed(params.grammar))
            for (prompt, params), each in zip(own, found, strict=True)
        ]

    names = sorted({each.adapter for each in cases})
    with ThreadPoolExecutor(len(names)) as pool:  # so that rows of all adapters are in one batch
        found = dict(zip(names, pool.map(generate, names), strict=True))
    for name in names:
        own = [each for each, _, _ in asked if each.adapter == name]
        for each, one in zip(own, found[name], strict=True):
            answers[each.name].append(one)
    return answers


Known = tuple[Case, tuple[int, ...], SamplingParams, tuple[int, ...]]
"""A request's case, prompt and parameters, and its answer."""
SEEDED = [*CASES[1::3], *FEW_TOKENS, *GRAMMARS[:2], *ADAPTED[1:3]]
"""Cases of which a few requests are repeated among other requests."""


@pytest.fixture(scope="module")
def alone(model: Model, stored_profile: None) -> list[Known]:
    """Requests, and the tokens that each draws in an engine without other requests."""
    found = []
    with start(model, {"max_sequences": 1, "speculation": "off", "max_adapters": 2, "steps_in_flight": 1}) as llm:
        for index, each in enumerate(SEEDED):
            params, prompt = replace(each.params(977 * index), max_tokens=40), model.prompts[index % 8]
            (answer,) = llm.generate([list(prompt)], params, adapter=each.adapter, progress=False)
            found.append((each, prompt, params, answer.token_ids))
    return found


def among_others(llm: LLM, asked: Sequence[Known]) -> list[tuple[int, ...]]:
    """The answers to these requests, while others, with seeds of their own, are in every batch."""
    names = sorted({each.adapter for each, *_ in asked})
    crowd = [replace(params, seed=(params.seed or 0) + 1) for _, _, params, _ in asked]
    answers: dict[int, tuple[int, ...]] = {}

    def generate(adapter: str) -> None:
        own = [index for index, each in enumerate(asked) if each[0].adapter == adapter]
        prompts = [list(asked[index][1]) for index in own for _ in range(2)]
        params = [each for index in own for each in (crowd[index], asked[index][2])]
        found = llm.generate(prompts, params, adapter=adapter, progress=False)
        answers.update(zip(own, (each.token_ids for each in found[1::2]), strict=True))

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(generate, names))
    return [answers[index] for index in range(len(asked))]


@dataclass(frozen=True)
class Answered:
    """The answers of one engine."""

    drawn: dict[str, list[Draws]]
    """The answers whose distribution is tested, by case."""
    asked: list[Known]
    """The requests whose draws alone are known, as far as the engine serves them."""
    again: list[tuple[int, ...]]
    """The engine's answer to each of those, among others."""
    stats: SchedulerStats


@pytest.fixture(scope="module")
def answered_by(model: Model, alone: list[Known], stored_profile: None) -> Callable[[str], Answered]:
    """Gives all answers of an engine. Each is started once."""

    @cache
    def answered(engine: str) -> Answered:
        options, cases = ENGINES[engine]
        asked = [
            each
            for each in reversed(alone)
            if (options.get("max_adapters") or not each[0].adapter)
            and (options.get("executor") != "padded" or each[2].grammar is None)
        ]
        with start(model, options) as llm:
            drawn = draw(llm, model, cases, draws_of(engine)) if cases else {}
            again = among_others(llm, asked)
            return Answered(drawn, asked, again, llm._thread.run(llm._client.health()))

    return answered


@pytest.mark.always("paged-*", "drafts-*", "draft head-*")  # others' samplers are among these
@pytest.mark.parametrize(
    ("engine", "each"),
    [
        pytest.param(engine, each, id=f"{engine}-{each.name}", marks=[pytest.mark.gpu] if "GPU" in engine else [])
        for engine, (_, cases) in ENGINES.items()
        for each in cases
    ],
)
def test_tokens_are_drawn_with_the_chances_that_a_request_asks_for(
    model: Model, answered_by: Callable[[str], Answered], engine: str, each: Case
) -> None:
    answers = answered_by(engine).drawn[each.name]
    assert sum(len(one.answer) for one in answers) >= 0.6 * draws_of(engine)
    assert faults(model.modules[each.adapter], answers) == []


@pytest.mark.always("paged", "drafts", "draft head", "preempted", "swapped")
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if "GPU" not in engine])
def test_a_seed_gives_the_same_tokens_wherever_they_are_drawn(
    answered_by: Callable[[str], Answered], engine: str
) -> None:
    answered = answered_by(engine)
    assert answered.again == [each[3] for each in answered.asked]


@pytest.mark.parametrize(
    ("engine", "count"),
    [
        ("drafts", "drafts_accepted"),
        ("draft head", "drafts_accepted"),
        ("preempted", "preemptions"),
        ("swapped", "preemptions"),
        pytest.param("drafts on a GPU", "drafts_accepted", marks=pytest.mark.gpu),
        pytest.param("draft head on a GPU", "drafts_accepted", marks=pytest.mark.gpu),
    ],
)
def test_each_engine_runs_in_the_way_that_its_name_says(
    answered_by: Callable[[str], Answered], engine: str, count: str
) -> None:
    assert getattr(answered_by(engine).stats, count) > 0
