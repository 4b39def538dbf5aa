"""A deterministic engine gives a request the tokens and log probabilities that it gives it alone, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.types import Identity, SamplingParams
from holdfast.engine.process.parts.moves import MoveHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.kernels.integer.library import library as own_library
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from tests.combinations.bench import Asked, Bench
from tests.combinations.effects import EFFECTS, check_deterministic
from tests.combinations.place import BLOCK, SMALL, Answer, Place
from tests.combinations.workload import Seen, Work, tokens
from tests.compiled import integer_library

TOGETHER = frozenset(
    {"host", "disk", "moves", "drafts", "grammars", "priorities", "tenants", "adapters", "tuning", "deterministic"}
)
"""What moves, cuts, suspends, adapts and verifies the work of one engine: all that a deterministic one may have."""
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)
TOLD = SamplingParams(temperature=0.7, top_k=20, seed=6, max_tokens=5, ignore_eos=True, prompt_logprobs=2)


class Telling(Work):
    """The work of one engine, in which most talks draw at random."""

    def asked(self, number: int, length: int, params: SamplingParams, **values: Any) -> Asked:
        drawn = params.max_tokens == 6 and number % 3 > 0
        return super().asked(number, length, DRAWN if drawn else params, **values)


@pytest.fixture(scope="module")
def by_library(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place where plain decoders are computed by the library in C.

    If the install lacks it, it is a place of these tests alone. Engines that other tests keep in theirs compute by
    PyTorch, which gives other bits.
    """
    if own_library() is not None:
        found, own = own_library(), None
    else:
        found, own = integer_library(), Place(tmp_path_factory.mktemp("by-library"))
    if not found.level:
        pytest.skip("needs a CPU with AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("holdfast.lm.kernels.integer.library.library", lambda: found)
        yield own or place
        if own is not None:
            own.close()


def test_drawn_tokens_of_an_engine_that_does_everything_are_those_of_one_that_does_nothing_else(
    by_library: Place,
) -> None:
    work = Telling(by_library, TOGETHER, 1)
    try:
        seen = work.do()
    finally:
        work.bench.close()
    for feature in TOGETHER - {"adapters"}:  # a plain engine may draw other tokens
        EFFECTS[feature](seen)
    assert any(asked.adapted and asked.params == replace(DRAWN, logprobs=2) for asked in work.bench.asked.values())
    assert work.bench.info.limits.served.dtype.startswith("float32, deterministic (AVX")  # others' state is not found


@pytest.mark.parametrize("budget", [16, 48, 200])
def test_the_chunks_of_a_prompt_and_its_batch_leave_all_bits_as_they_are(by_library: Place, budget: int) -> None:
    """Some prompts begin alike, so that a chunk begins where the cached state ends. Then some of them go on."""
    features = frozenset({"deterministic"})
    bench = by_library.start(SMALL | by_library.kind(features) | {"token_budget": budget, "max_sequences": 8})
    lengths, shared = (3, 150, 17, 90, 64, 130, 33, 100, 5, 128), tokens(7, 50)
    crowd = {
        f"{budget}-{number}": Asked(
            shared * (number % 2) + tokens(number, length),
            replace(TOLD if number % 3 == 0 else DRAWN, logprobs=1),
            adapted=number % 4 > 1,
        )
        for number, length in enumerate(lengths)
    }
    try:
        bench.run(crowd)
        on = {name: replace(crowd[name], prompt=crowd[name].prompt + bench.tokens[name]) for name in [*crowd][1:4]}
        bench.run({f"{name}-on": asked for name, asked in on.items()})
    finally:
        bench.close()
    assert sum(bench.cached.values()) > 0
    check_deterministic(Seen(features, bench, alone=by_library.alone(features).told(bench.asked)))


def test_a_conversation_has_the_same_bits_after_a_restart_and_after_a_move_to_another_engine(
    by_library: Place, tmp_path: Path
) -> None:
    """Each turn is at another engine. The second one finds state on the disk, and the third one fetches it."""
    features = frozenset({"deterministic"})
    options = SMALL | by_library.kind(features) | {"chunk_host": "127.0.0.1", "host_cache_gb": 0.002}
    on_disk = {"disk_cache_dir": str(tmp_path), "disk_cache_gb": 0.01}
    params = [replace(DRAWN, logprobs=2, temperature=temperature) for temperature in (0.0, 0.9)]
    talks = [Asked(tokens(70 + number, 75 + 9 * number), each) for number, each in enumerate(params)]
    asked, told, cached = dict[str, Asked](), dict[str, Answer](), dict[str, int]()

    def turn(bench: Bench, place: str) -> None:
        """The next turn of all talks."""
        now = {f"{place}-{number}": each for number, each in enumerate(talks)}
        bench.run(now)
        bench.settle()
        asked.update(now)
        cached.update(bench.cached)
        told.update({name: bench.answer_of(name) for name in now})
        for number, (name, each) in enumerate(now.items()):
            prompt = each.prompt + bench.tokens[name] + tokens(90 + len(asked) + number, 21)
            talks[number] = replace(each, prompt=prompt)

    with closing(by_library.start(options | on_disk)) as first:
        turn(first, "first")
    with closing(by_library.start(options | on_disk)) as second, closing(by_library.start(options)) as third:
        turn(second, "second")
        assert second.stats().prefix_hits_on_disk >= 8 * BLOCK
        came = [moved(second, third, number, each.prompt) for number, each in enumerate(talks)]
        turn(third, "third")
    assert [cached[f"third-{number}"] for number in range(2)] == came and min(came) >= 6 * BLOCK
    assert told == by_library.alone(features).told(asked)


def moved(source: Bench, target: Bench, number: int, prompt: tuple[int, ...]) -> int:
    """Fetch a prompt's blocks from another engine. Returns the number of tokens that have come."""
    chain = block_digests(Identity().root(), prompt[: len(prompt) // BLOCK * BLOCK], BLOCK)
    target.say(FetchChunks(number, chain, list(range(len(chain))), source.info.chunk_address, BLOCK))
    both = [each for bench in (source, target) for each in bench.engine.handlers if isinstance(each, MoveHandler)]
    target.until(lambda: bool(target.answer(number)) and not any(each.ready for each in both), source)
    (answer,) = target.answer(number)
    assert isinstance(answer, ChunksFetched)  # the source lacks the new tokens
    return answer.tokens


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
