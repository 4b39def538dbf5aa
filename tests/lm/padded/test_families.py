"""docs/families.md says what probing finds. `python -m tests.lm.padded.test_families` writes its table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.driver import Driver, Inputs
from holdfast.lm.padded.loading import as_unmodified
from holdfast.lm.padded.state_layout import StateLayout
from tests.checkpoints import FAMILIES, tiny
from tests.padded_checks import draw_prompts, generate_alone

PAGE = Path(__file__).parents[3] / "docs/families.md"
COLUMNS = ("chunks", "left_padding", "batched_decode", "shaping", "croppable")
HEAD = """\
| family | architecture | state | in chunks | left-padded | decoded together | shaping | cut to a prefix |
|---|---|---|---|---|---|---|---|
"""


def state_of(driver: Driver) -> str:
    """The classes of the layers of a state, or of the state."""
    state = None if driver.keyword is None else driver.run(1, 5)
    names = {"GrowingLayer": "DynamicLayer", "GrowingWindowLayer": "DynamicSlidingWindowLayer"}
    layers = {type(layer).__name__ for layer in getattr(state, "layers", [])} - {"DummyLayer"}
    layers = {names.get(layer, layer) for layer in layers}
    return ", ".join(sorted(layers)) or ("none given out" if state is None else type(state).__name__)


def line(family: str) -> str:
    """The row of the table."""
    driver = Driver(as_unmodified(tiny(family)))
    abilities = probe(driver, StateLayout.discover(driver.run) if driver.keyword else StateLayout([]))
    marks = ["yes" if getattr(abilities, column) else "-" for column in COLUMNS]
    if not abilities.keeps_state:
        marks = ["computed whole in each step", *["-"] * (len(COLUMNS) - 1)]
    return f"| {family} | {' | '.join([driver.model.architecture, state_of(driver), *marks])} |"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_says_of_a_family_what_probing_finds(family):
    with torch.inference_mode():
        found = line(family)
    # Versions of Transformers differ in the classes of layers without a state.
    cells = [cell.strip() for cell in found.split("|")]
    written = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| {family} |")]
    assert len(written) == 1, f"docs/families.md has {len(written)} rows of {family}"
    assert [cell.strip() for cell in written[0].split("|")][4:] == cells[4:]


def test_the_table_has_no_other_rows():
    rows = [row.split("|")[1].strip() for row in PAGE.read_text().splitlines() if row.startswith("| ")]
    assert rows[1:] == list(FAMILIES)


@torch.inference_mode()
def rows_together(family: str, prompts: list[tuple[int, ...]], steps: int) -> list[tuple[int, ...]]:
    """Tokens of prompts that join one batch one after the other, a step apart."""
    driver = Driver(as_unmodified(tiny(family)))
    layout = StateLayout.discover(driver.run)
    batch, lengths, said = None, list[int](), list[list[int]]()
    while min(map(len, said), default=0) < steps or len(said) < len(prompts):
        if batch is not None:
            width = max(lengths)
            mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            ids = torch.tensor([[tokens[-1]] for tokens in said])
            inputs = Inputs(ids, mask, torch.tensor(lengths)[:, None])
            logits, batch = driver.forward(inputs, batch)
            lengths = [length + 1 for length in lengths]
            for tokens, token in zip(said, logits.argmax(1).tolist(), strict=True):
                tokens.append(token)
        if len(said) < len(prompts):
            prompt = prompts[len(said)]
            logits, state = driver.forward(driver.inputs(torch.tensor([prompt])), None)
            if batch is None:
                batch = layout.merge([state], [len(prompt)])
            else:
                batch = layout.embed(batch, max(lengths), len(said), state, len(prompt))
            lengths.append(len(prompt))
            said.append([int(logits.argmax())])
    return [tuple(tokens[:steps]) for tokens in said]


TOGETHER = [
    family for family in FAMILIES if family not in ("rwkv", "minimax", "deepseek-v4", "openai-gpt", "recurrent-gemma")
]


@pytest.mark.parametrize("family", TOGETHER)
def test_rows_that_join_one_batch_get_the_tokens_of_generate(family):
    module, prompts = tiny(family), draw_prompts(5, 11, 3)
    assert rows_together(family, prompts, 8) == [generate_alone(module, prompt, 8) for prompt in prompts]


INTRODUCTION = """\
# Families of models on padded rows

The padded executor (`--executor padded`, or `auto` where a model has no paged form) runs the modules of Transformers
unmodified. At its start it probes what a model can do: it computes short histories of several rows, and compares their
logits with those of each prompt alone. What differs is not used, so a row's tokens do not depend on its neighbours.

Each row below is a tiny model with random weights in float32. `python -m tests.lm.padded.test_families` writes the
table, and a test compares it with what probing finds.

- **in chunks**: a prompt may be computed in several forwards, so that a long one does not hold up the other rows.
- **left-padded**: prompts of unequal length may be computed in one forward. If not, only those of equal length are.
- **decoded together**: rows are decoded in one forward. If not, one after the other.
- **shaping**: a prompt may be computed in the same forward as decodes (Baton §4.1). If not, it is computed apart and
  embedded (§4.2).
- **cut to a prefix**: a state that is kept can serve a prompt that shares only its beginning. If not, only one that has
  all of its tokens.

"""
REFUSED = """
Not served: XLNet and Reformer without `is_decoder`, because Transformers cannot generate with them, and checkpoints
that are quantized. Models whose rotary frequencies change for all positions once a sequence is longer than they were
first trained for (`longrope`, as in Phi-3) end sequences at that length. Where `--max-model-len` goes beyond it, each
row is computed from its first token in every step, which gives the tokens of `generate` and is slow. Dynamic NTK
scaling changes nothing up to `max_position_embeddings`, where sequences end.
"""


def write() -> None:
    """Write docs/families.md."""
    with torch.inference_mode():
        PAGE.write_text(INTRODUCTION + HEAD + "".join(f"{line(family)}\n" for family in FAMILIES) + REFUSED)


if __name__ == "__main__":
    write()
