"""A deterministic engine gives a request the tokens and log probabilities that it gives it alone, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.core.types import SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.kernels.integer.library import library as own_library
from tests.combinations.bench import Asked, Bench
from tests.combinations.effects import EFFECTS
from tests.combinations.place import SMALL, Place
from tests.combinations.workload import Work, tokens
from tests.compiled import integer_library

TOGETHER = frozenset({"host", "disk", "moves", "drafts", "grammars", "priorities", "tenants", "adapters", "tuning"})
"""What moves, cuts, suspends, adapts and verifies the work of one engine: all that a deterministic one may have."""
KINDS = {
    "plain": TOGETHER,
    "4-bit": frozenset({"4-bit", "host", "drafts", "adapters"}),
    "FP8": frozenset({"fp8-weights", "host", "drafts"}),
    "hybrid in 4 bits": frozenset({"hybrid", "4-bit", "drafts", "grammars", "adapters"}),
}
"""Features of a crowd's engine, by the kind of its model."""
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)
TOLD = SamplingParams(temperature=0.7, top_k=20, seed=6, max_tokens=5, ignore_eos=True, prompt_logprobs=2)


OF_A_JOB = ("tuned", "untuned")
"""Requests that ask for the adapter of a tuning job, which only its engine has."""


class Deterministic(Place):
    """A place whose engines are deterministic."""

    def kind(self, features: frozenset[str]) -> dict[str, Any]:
        return {**super().kind(features), "deterministic": True}


class Telling(Work):
    """The work of one engine, in which each request asks for log probabilities, and most talks draw at random."""

    def asked(self, number: int, length: int, params: SamplingParams, **values: Any) -> Asked:
        drawn = params.max_tokens == 6 and number % 3 > 0
        return super().asked(number, length, replace(DRAWN if drawn else params, logprobs=2), **values)

    def _second(self, number: int, params: SamplingParams) -> SamplingParams:
        return replace(super()._second(number, params), logprobs=2)


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory: pytest.TempPathFactory) -> Any:
    library = own_library() or integer_library()
    if not library.level:
        pytest.skip("needs a CPU with AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.lm.kernels.integer.library.library", lambda: library)
        place = Deterministic(tmp_path_factory.mktemp("same-bits"))
        yield place
        place.close()


class Alone:
    """Engines that compute one request at a time, each prompt in one step, and find no state of another."""

    def __init__(self, place: Deterministic) -> None:
        self._place, self._benches = place, dict[frozenset[str], Bench]()

    def of(self, features: frozenset[str]) -> Bench:
        """The engine with the model and the weights of a crowd's engine with these features."""
        like = features & {"4-bit", "fp8-weights", "hybrid"}
        if like not in self._benches:
            options = {"max_sequences": 1, "token_budget": 512, "prefix_sharing": False, "speculation": "off"}
            self._benches[like] = self._place.start(SMALL | self._place.kind(like) | options)
        return self._benches[like]

    def close(self) -> None:
        """End all engines."""
        for bench in self._benches.values():
            bench.close()


@pytest.fixture(scope="module")
def alone(deterministic: Deterministic) -> Any:
    found = Alone(deterministic)
    yield found
    found.close()


def check_equal(crowd: Bench, alone: Bench) -> None:
    """Raise AssertionError for a request of the crowd that has other bits alone."""
    for name, asked in crowd.asked.items():
        if name in OF_A_JOB:
            continue
        once = f"{name} of {id(crowd)}"
        alone.run({once: replace(asked, tenant="", priority=0)})
        assert crowd.tokens[name] == alone.tokens[once], name
        assert len(crowd.logprobs[name]) >= len(crowd.tokens[name]) or not asked.params.logprobs, name
        assert crowd.logprobs[name] == alone.logprobs[once], name


@pytest.mark.parametrize("kind", KINDS)
def test_what_moves_cuts_and_adapts_the_work_of_an_engine_leaves_all_bits_as_they_are(
    deterministic: Deterministic, alone: Alone, kind: str
) -> None:
    features = KINDS[kind]
    work = Telling(deterministic, features, 1)
    try:
        seen = work.do()
    finally:
        work.bench.close()
    for feature in features - {"4-bit", "fp8-weights"}:  # those weights have another form here
        EFFECTS[feature](seen)
    # The state of other engines is not found.
    arithmetic = "token by token, PyTorch" if "hybrid" in features else "AVX"
    assert f", deterministic ({arithmetic}" in work.bench.info.limits.served.dtype
    check_equal(work.bench, alone.of(features))


@pytest.mark.parametrize(("budget", "kind"), [(16, "plain"), (48, "plain"), (200, "plain"), (48, "hybrid")])
def test_the_chunks_of_a_prompt_and_its_batch_leave_all_bits_as_they_are(
    deterministic: Deterministic, alone: Alone, budget: int, kind: str
) -> None:
    """Some prompts begin alike, so that a chunk begins where the cached state ends. Prompts have log probabilities.

    A hybrid is computed token by token, and gets fewer prompts.
    """
    features = frozenset({kind} - {"plain"})
    sizes = {"token_budget": budget, "max_sequences": 8} | ({"host_cache_gb": 0.001} if features else {})
    bench = deterministic.start(SMALL | deterministic.kind(features) | sizes)
    lengths, shared = (3, 150, 17, 90, 64, 130, 33, 100, 5, 128)[: 4 if features else 10], tokens(7, 50)
    crowd = {
        f"{budget}-{number}": Asked(
            shared * (number % 2) + tokens(number, length), replace(TOLD if number % 3 == 0 else DRAWN, logprobs=1)
        )
        for number, length in enumerate(lengths)
    }
    try:
        bench.run(crowd)
        again = {
            f"{name}-again": replace(each, prompt=each.prompt + bench.tokens[name]) for name, each in crowd.items()
        }
        bench.run(again)
    finally:
        bench.close()
    assert sum(bench.cached.values()) > 0
    check_equal(bench, alone.of(features))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tp": 3}, "deterministic is on, and tp is 3: ranks add their sums in a binary tree; give a power of two"),
        ({"tp": 2, "deterministic_ranks": 6}, "deterministic_ranks is 6, and tp is 2; it must be a power of two"),
        ({"tp": 4, "deterministic_ranks": 2}, "deterministic_ranks is 2, and tp is 4; it must be a power of two"),
        ({"tp": 2, "tuning": True}, "deterministic is on for 2 ranks, and adapters are served: their products"),
        ({"deterministic_ranks": 2, "max_adapters": 2}, "deterministic is on for 2 ranks, and adapters are served"),
        ({"deterministic": False, "deterministic_ranks": 2}, "deterministic_ranks is 2, which is for deterministic"),
        ({"executor": "padded"}, "deterministic is True, which is for the paged executor"),
        ({"kv_cache_dtype": "fp8"}, "deterministic is on, and kv_cache_dtype is fp8"),
        ({"attention_backend": "torch"}, "deterministic is on, and attention_backend is torch"),
        ({"scheduler": "shaping"}, "deterministic is on, and scheduler is shaping"),
        ({"max_adapters": 2, "dora": True}, "deterministic is on, and dora is True: what a DoRA scales is rounded"),
    ],
    ids=str,
)
def test_an_option_that_would_change_bits_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as refused:
        EngineConfig(**{"deterministic": True, **options})
    assert str(refused.value).startswith(reason)
