"""Random histories of rows give the tokens of each row alone: joins, ends, aborts, preemption, slots, lost memory.

What happens is drawn by `histories.History`; every plan is one that plans may be, and every token is compared.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.padded.abilities import probe
from holdfast.lm.types import Abilities
from tests.late_streams import LateStream
from tests.lm.padded.histories import KINDS, History, Made
from tests.padded_checks import tiny

HISTORIES = int(os.environ.get("HOLDFAST_HISTORIES", "4"))
"""Of each family and kind; `make fuzz` draws many more."""
HOLED = ("llama", "falcon-alibi", "bloom")
"""Families that bear placeholders between the tokens of a row."""


@cache
def made(family: str, device: str = "cpu") -> tuple[Made, Abilities, dict[tuple[int, ...], tuple[int, ...]]]:
    """A tiny model, what it can do, and what it generates alone, as far as it was asked."""
    torch.set_num_threads(1)
    model = Made.of(tiny(family).to(device))
    return model, probe(model.driver, model.layout), {}


def run(family: str, seeds: range, device: str = "cpu", **options: object) -> dict[str, int]:
    """Run one history for each seed; how often each kind of event happened in all."""
    model, abilities, alone = made(family, device)
    abilities = options.pop("abilities", abilities)  # type: ignore[assignment]
    seen: dict[str, int] = {}
    for seed in seeds:
        history = History(model, abilities, seed=seed, in_flight=1 + seed % 3, alone=alone, **options)  # type: ignore[arg-type]
        for kind, times in history.run().items():
            seen[kind] = seen.get(kind, 0) + times
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "jamba", "rwkv"])
def test_each_row_gets_what_it_gets_alone(family: str) -> None:
    seen = run(family, range(4 * HISTORIES), make_queue=LateStream)
    assert {"embed", "shape", "chunk", "group", "preempt", "abort", "run_on", "keep", "store", "load", "reuse"} <= {
        *seen
    }


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2"])
def test_rows_whose_state_is_lost_start_again_and_get_the_same(family: str) -> None:
    assert run(family, range(1000, 1000 + 3 * HISTORIES), fails=0.05)["lost"] > HISTORIES


@pytest.mark.parametrize("missing", ["chunks", "left_padding", "batched_decode", "shaping", "keeps_state"])
def test_a_model_without_an_ability_gives_the_same_in_more_forwards(missing: str) -> None:
    without = replace(made("llama")[1], **{missing: False})
    if missing == "keeps_state":
        without = replace(without, batched_decode=False)
    seen = run("llama", range(2000, 2000 + HISTORIES), abilities=without)
    assert {"embed", "shape", "chunk", "group"} <= {*seen}


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


@pytest.mark.slow
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
