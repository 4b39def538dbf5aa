"""docs/families.md lists the abilities of models, and how they were compared.

`make families` measures that and writes it.
"""

from __future__ import annotations

import datetime
import platform
import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from holdfast.lm.padded.device import PaddedDevice
from holdfast.lm.padded.driver import Driver
from holdfast.lm.types import Abilities
from tests.checkpoints import FAMILIES, tiny
from tests.lm.padded.histories import History, Made
from tests.lm.padded.parity import GENERATED, LONGEST_PROMPT, Case, device_of, serve

PAGE = Path(__file__).parents[3] / "docs/families.md"
COLUMNS = ("chunks", "left_padding", "batched_decode", "shaping", "croppable")
RUNS, REQUESTS, HISTORIES = 8, 10, 12
"""For each way in `make families`: number of runs, of requests in a run, and of histories."""


KINDS = (
    "llama",
    "mistral-sliding",
    "falcon-alibi",
    "bloom",
    "gpt-neo",
    "gpt2",
    "opt",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "mixtral",
    "deepseek-v3",
    "llama4-chunked",
    "minimax",
    "ctrl",
    "openai-gpt",
    "rwkv",
    "mamba",
    "mamba2",
    "jamba",
    "deepseek-v4",
    "recurrent-gemma",
    "xlstm",
)
"""A family of each kind of positions, masks and states. What others can do is probed, as that of these."""


@dataclass(frozen=True)
class Way:
    """A way to compute requests: options of the engine, the abilities it needs, and the events that must happen in it.

    Without options the plans are drawn by `histories.History`: no scheduler both shapes and computes chunks.
    """

    options: dict[str, Any]
    needs: tuple[str, ...]
    shows: tuple[str, ...]

    def possible(self, abilities: Abilities) -> bool:
        """Whether a model can be served in this way."""
        return all(getattr(abilities, need) for need in self.needs)


WAYS = {
    "embedding, whole": Way({"scheduler": "embedding"}, (), ("embed",)),
    "embedding, chunks": Way({"scheduler": "stall-free", "token_budget": 12}, ("chunks",), ("embed", "chunk")),
    "shaping, whole": Way({"scheduler": "shaping"}, ("shaping",), ("shape",)),
    "shaping, chunks": Way({}, ("shaping", "chunks"), ("embed", "shape", "chunk")),
}


@cache
def device(family: str) -> PaddedDevice:
    """A device that has probed the tiny model of a family."""
    torch.set_num_threads(1)
    return device_of(tiny(family))


@cache
def drawn(family: str, requests: int, seed: int) -> Case:
    """Random requests for a family, and the tokens that it generates for each alone."""
    return Case(device(family), requests=requests, seed=seed)


def state_of(driver: Driver) -> str:
    """The classes of the layers of a state, or of the state."""
    state = None if driver.keyword is None else driver.run(1, 5)
    names = {"GrowingLayer": "DynamicLayer", "GrowingWindowLayer": "DynamicSlidingWindowLayer"}
    layers = {type(layer).__name__ for layer in getattr(state, "layers", [])} - {"DummyLayer"}
    layers = {names.get(layer, layer) for layer in layers}
    return ", ".join(sorted(layers)) or ("none given out" if state is None else type(state).__name__)


def found(family: str) -> str:
    """The row of the first table."""
    probed = device(family)
    abilities = probed.abilities
    marks = ["yes" if getattr(abilities, column) else "-" for column in COLUMNS]
    if not abilities.keeps_state:
        marks = ["computed whole in each step", *["-"] * (len(COLUMNS) - 1)]
    with torch.inference_mode():
        state = state_of(probed.driver)
    return f"| {family} | {' | '.join([probed.model.architecture, state, *marks])} |"


def compare(family: str, way: Way, runs: int, requests: int, histories: int) -> Counter[str]:
    """Compare requests served in a way with each alone. `token`, `step` and `request` count what was compared.

    Raises AssertionError for a token that differs, and if the event that the way tests did not happen.
    """
    seen, probed = Counter[str](), device(family)
    if way.options:
        for number in range(runs):
            case = drawn(family, requests, number)
            given, watched = serve(case, seed=number, arriving=0.6, steps_in_flight=1 + number % 2, **way.options)
            for request in case.requests:
                assert given[request.id] == case.expected[request.id], f"{family}, run {number}: {request}"
            seen += watched.happened
            seen.update(request=requests, step=len(watched.plans), token=sum(map(len, given.values())))
    else:
        made, alone = Made(probed.model.module, probed.driver, probed.layout), dict[Any, tuple[int, ...]]()
        for number in range(histories):
            history = History(made, probed.abilities, seed=number, in_flight=1 + number % 3, alone=alone)
            seen.update(history.run())
            seen["request"] += len(history.by_id) - len(history.aborted)
    assert {*way.shows} <= {*seen}, f"{family}: of {way.shows} there was only {[*seen]}"
    return seen


def tables() -> list[dict[str, list[str]]]:
    """The cells of the page's tables, by family."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in PAGE.read_text().splitlines() if row[:2] == "| "]
    heads = [number for number, cells in enumerate(rows) if cells[0] == "family"]
    parts = [rows[at + 1 : end] for at, end in zip(heads, [*heads[1:], len(rows)], strict=True)]
    return [{cells[0]: cells[1:] for cells in part} for part in parts]


def test_both_tables_have_a_row_for_each_family() -> None:
    assert [[*table] for table in tables()] == [[*FAMILIES]] * 2
    assert len(FAMILIES) >= 50


@pytest.mark.always(*KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tables_list_the_abilities_of_a_family_and_all_ways_of_its_comparison(family: str) -> None:
    cells = [cell.strip() for cell in found(family).split("|")[2:-1]]
    abilities, compared = (table[family] for table in tables())
    # Versions of Transformers differ in the classes of layers without a state.
    assert abilities[2:] == cells[2:]
    for way, cell in zip(WAYS.values(), compared, strict=True):
        assert bool(re.fullmatch(r"[1-9]\d+ in [1-9]\d+", cell)) == way.possible(device(family).abilities), cell


@pytest.mark.always(*KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_get_the_tokens_of_generate_under_each_scheduler(family: str) -> None:
    for way in WAYS.values():
        if way.options and way.possible(device(family).abilities):
            compare(family, way, 1, 5, 0)


INTRODUCTION = """\
# Families of models on padded rows

The padded executor (`--executor padded`, or `auto` where a model has no paged form) runs the modules of Transformers
unmodified. At its start it probes what a model can do: it computes short histories of several rows, and compares their
logits with those of each prompt alone. What differs is not used, so a row's tokens do not depend on its neighbours.

Each row below is a tiny model with random weights in float32. `make families` writes this page, and tests compare it
with what probing finds and with the list of families.

- **in chunks**: a prompt may be computed in several forwards, so that a long one does not hold up the other rows.
- **left-padded**: prompts of unequal length may be computed in one forward. If not, only those of equal length are.
- **decoded together**: rows are decoded in one forward. If not, one after the other.
- **shaping**: a prompt may be computed in the same forward as decodes (Baton §4.1). If not, it is computed apart and
  embedded (§4.2).
- **cut to a prefix**: a state that is kept can serve a prompt that shares only its beginning. If not, only one that has
  all of its tokens.

| family | architecture | state | in chunks | left-padded | decoded together | shaping | cut to a prefix |
|---|---|---|---|---|---|---|---|
"""
REFUSED = """
Not served: XLNet and Reformer without `is_decoder`, because Transformers cannot generate with them, and checkpoints
that are quantized. Models whose rotary frequencies change for all positions once a sequence is longer than they were
first trained for (`longrope`, as in Phi-3) end sequences at that length. Where `--max-model-len` goes beyond it, each
row is computed from its first token in every step, which gives the tokens of `generate` and is slow. Dynamic NTK
scaling changes nothing up to `max_position_embeddings`, where sequences end.
Encoder-decoders (T5, mT5, BART) are compared by `tests/lm/padded/test_encoder_decoder.py`.
"""
COMPARED = """
## Compared with `generate`

Random requests (1 to {longest} prompt tokens, 1 to {most} generated, every second one ended by a token) arrive at
random. At most 4 rows run at a time, with 1 to 3 steps in flight. Every request must get the tokens that `generate` of
the unmodified model gives for it alone. (Of a model that keeps its state inside, without a cache: RecurrentGemma begins
a prompt of one token with the state that the call before has left.) A cell says how many requests were compared, in
how many steps; "-" is what the model cannot do.

- **embedding, whole**: `--scheduler embedding`; prompts are prefilled apart in groups.
- **embedding, chunks**: `--scheduler stall-free --token-budget 12`; prompts are prefilled apart in chunks.
- **shaping, whole**: `--scheduler shaping`; a prompt is computed in the forward of the decodes.
- **shaping, chunks**: plans drawn at random, in which some prompts are shaped and others computed in chunks or groups;
  rows are also preempted, aborted, kept and used again. No scheduler plans that.

{measured}

| family | {heads} |
|---|{lines}|
"""


def write() -> int:
    """Compare all families in all ways and write docs/families.md. Returns the exit status: 1 if anything differs."""
    rows, failed, total = [], 0, Counter[str]()
    for family in FAMILIES:
        cells = []
        for name, way in WAYS.items():
            if not way.possible(device(family).abilities):
                cells.append("-")
                continue
            try:
                seen = compare(family, way, RUNS, REQUESTS, HISTORIES)
            except AssertionError as error:
                failed += 1
                cells.append("differs")
                print(f"{family}, {name}: {error}", flush=True)
            else:
                total += seen
                cells.append(f"{seen['request']} in {seen['step']}")
        rows.append(f"| {family} | {' | '.join(cells)} |\n")
        print(rows[-1], end="", flush=True)
    measured = (
        f"{total['request']:,} requests with {total['token']:,} tokens in {total['step']:,} steps; `make families`, "
        f"{datetime.datetime.now(datetime.UTC).date()}, Transformers {transformers.__version__}, "
        f"PyTorch {torch.__version__}, Python {platform.python_version()}."
    )
    head = COMPARED.format(
        longest=LONGEST_PROMPT,
        most=GENERATED,
        measured=measured,
        heads=" | ".join(WAYS),
        lines="|".join("---" for _ in WAYS),
    )
    abilities = "".join(f"{found(family)}\n" for family in FAMILIES)
    PAGE.write_text(INTRODUCTION + abilities + REFUSED + head + "".join(rows))
    print(measured)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(write())
