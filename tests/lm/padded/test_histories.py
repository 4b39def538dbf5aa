"""Random histories of rows give the tokens of each row alone: joins, ends, aborts, preemption, slots, lost memory.

What happens is drawn by `histories.History`; every plan is one that plans may be, and every token is compared.
`python -m tests.lm.padded.test_histories 10000 SEED` runs as many histories of ten families, and says what was in them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler
from holdfast.lm.padded.abilities import probe
from holdfast.lm.types import Abilities
from tests.late_streams import LateStream
from tests.lm.padded.histories import KINDS, History, Made
from tests.padded_checks import FAMILIES, tiny

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "4"))
"""Of each family and kind."""
HOLED = ("llama", "falcon-alibi", "bloom")
"""Families that bear placeholders between the tokens of a row."""


Known = tuple[Made, Abilities, dict[tuple[int, ...], tuple[int, ...]]]
"""A tiny model, what it can do, and what it generates alone, as far as it was asked."""


@cache
def made(family: str, device: str = "cpu") -> Known:
    torch.set_num_threads(1)
    model = Made.of(tiny(family).to(device))
    return model, probe(model.driver, model.layout), {}


def run(family: str, seeds: range, device: str = "cpu", **options: object) -> Counter[str]:
    """Run one history for each seed; how often each kind of event happened in all."""
    model, abilities, alone = made(family, device)
    abilities = options.pop("abilities", abilities)  # type: ignore[assignment]
    seen: Counter[str] = Counter()
    for seed in seeds:
        history = History(model, abilities, seed=seed, in_flight=1 + seed % 3, alone=alone, **options)  # type: ignore[arg-type]
        seen.update(history.run())
    return seen


@pytest.mark.always("gemma3", "mamba2", "rwkv")
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "jamba", "rwkv"])
def test_each_row_gets_what_it_gets_alone(family: str) -> None:
    seen = run(family, range(10, 10 + 2 * HISTORIES), make_stream=LateStream)
    assert {"embed", "shape", "chunk", "group", "preempt", "abort", "run_on", "keep", "store", "load", "reuse"} <= {
        *seen
    }


@pytest.mark.always("llama", "mamba2")
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2"])
def test_rows_whose_state_is_lost_start_again_and_get_the_same(family: str) -> None:
    assert run(family, range(1000, 1000 + 2 * HISTORIES), fails=0.05)["lost"] > HISTORIES


@pytest.mark.parametrize("missing", ["chunks", "left_padding", "batched_decode", "shaping", "keeps_state"])
def test_a_model_without_an_ability_gives_the_same_in_more_forwards(missing: str) -> None:
    without = replace(made("llama")[1], **{missing: False})
    if missing == "keeps_state":
        without = replace(without, batched_decode=False)
    seen = run("llama", range(2000, 2000 + HISTORIES), abilities=without)
    assert {"embed", "shape", "chunk", "group"} <= {*seen}


@pytest.mark.always("llama")
@pytest.mark.parametrize("family", HOLED)
def test_rows_with_the_holes_of_shaping_as_printed_get_the_same(family: str) -> None:
    kinds = ("shape", "chunk", "group", "abort", "run_on", "again")
    seen = run(family, range(3000, 3000 + HISTORIES), kinds=kinds, compact=False)
    assert {"embed", "shape"} <= {*seen}


def test_holes_are_wrong_for_a_window() -> None:
    with pytest.raises(AssertionError, match="alone it gives"):
        run("gemma3", range(3000, 3040), kinds=("shape",), compact=False)


def test_layers_that_do_not_grow_in_place_give_the_same() -> None:
    model, abilities = Made.of(tiny("llama"), growing=False), made("llama")[1]
    for seed in range(4000, 4000 + HISTORIES):
        History(model, abilities, seed=seed, alone=made("llama")[2]).run()


@pytest.mark.gpu
@pytest.mark.parametrize("second_stream", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "jamba"])
def test_each_row_gets_what_it_gets_alone_on_a_gpu(family: str, second_stream: bool) -> None:
    assert "lost" not in run(family, range(4 * HISTORIES), "cuda", second_stream=second_stream)
    assert "lost" in run(family, range(1000, 1000 + 4 * HISTORIES), "cuda", second_stream=second_stream, fails=0.05)


@pytest.mark.gpu
def test_a_token_that_is_drawn_late_beside_the_batch_is_the_one_that_its_row_goes_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = Sampler.draw

    def late(*args: Any, **options: Any) -> Drawn:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            torch.cuda._sleep(20_000_000)
        return draw(*args, **options)

    monkeypatch.setattr(Sampler, "draw", late)
    assert "embed" in run("llama", range(HISTORIES), "cuda", second_stream=True)


@settings(max_examples=settings.default.max_examples // 4)  # each takes a fifth of a second
@given(
    st.sampled_from(["llama", "gemma3", "mamba2"]),
    st.integers(0, 2**32),
    st.lists(st.sampled_from(KINDS), unique=True),
    st.sampled_from([0.0, 0.1]),
    st.integers(1, 4),
)
def test_any_mixture_of_events_gives_each_row_what_it_gets_alone(
    family: str, seed: int, kinds: list[str], fails: float, in_flight: int
) -> None:
    model, abilities, alone = made(family)
    History(model, abilities, seed=seed, kinds=tuple(kinds), fails=fails, in_flight=in_flight, alone=alone).run()


def run_many(histories: int, first: int) -> int:
    """Run histories of each of the ten families, from one seed on, and print what was in them. Returns an exit status.

    A quarter of them run out of memory now and then, and half of them have copies that come as late as they can.
    """
    share, failed, total = histories // len(FAMILIES), 0, Counter[str]()
    print(f"`python -m tests.lm.padded.test_histories {histories} {first}`, torch {torch.__version__}, ", end="")
    print(f"transformers {transformers.__version__}", flush=True)
    for number, family in enumerate(FAMILIES):
        start, seen = time.process_time(), Counter[str]()
        for seed in range(first + number * share, first + (number + 1) * share):
            options = {"make_stream": LateStream} if seed // 4 % 2 else {}
            try:
                seen += run(family, range(seed, seed + 1), fails=0.0 if seed % 4 else 0.05, **options)
                seen["history"] += 1
            except (AssertionError, RuntimeError, ValueError) as error:
                failed += 1
                print(f"{family}, seed {seed}: {type(error).__name__}: {error}", flush=True)
        total += seen
        print(f"{family}: {told(seen)}; {time.process_time() - start:.0f} s of processor time", flush=True)
    print(f"in all: {told(total)}; {failed} failed")
    return 1 if failed else 0


def told(seen: Counter[str]) -> str:
    """Numbers of events, the most frequent first."""
    return ", ".join(f"{kind} {times}" for kind, times in seen.most_common())


if __name__ == "__main__":
    sys.exit(run_many(*map(int, sys.argv[1:])))
