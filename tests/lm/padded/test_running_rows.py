"""The running batch: rows join and leave, its width stays bounded, and masked columns have no influence."""

import random

import pytest
import torch

from holdfast.lm.padded.running_rows import RunningRows
from tests.lm.padded.echo import decode, echo_rows, keys_of, shape
from tests.lm.padded.histories import CPU, Made
from tests.padded_checks import check_batch, draw_prompts, tiny

WITH_KEYS = ("llama", "falcon-alibi", "bloom", "mpt", "gpt-neo", "gemma3", "jamba")


def state_of(*tokens):
    return {"keys": torch.tensor(tokens, dtype=torch.float32)[None, :, None]}


def embedded(*lengths):
    """A batch of rows 0, 1, ... whose keys are 10, 11, ... in row 0, 20, 21, ... in row 1."""
    echo, batch = echo_rows()
    for row, length in enumerate(lengths):
        batch.embed(row, state_of(*range(10 * row + 10, 10 * row + 10 + length)), length)
    return echo, batch


def test_the_last_rows_take_the_places_of_those_that_leave():
    _, batch = embedded(2, 3, 2, 1, 2)
    batch.drop(1, 3)
    assert batch.rows == [0, 4, 2]
    assert keys_of(batch.state) == [[10, 11], [50, 51], [30, 31]]
    assert [batch.place(row) for row in range(5)] == [0, None, 2, None, 1]
    batch.check()


def test_the_batch_becomes_narrower_when_its_longest_row_leaves():
    _, batch = embedded(2, 5, 3)
    assert batch.width == 5
    batch.drop(1)
    assert batch.width == 3
    assert keys_of(batch.state) == [[0, 10, 11], [30, 31, 32]]
    batch.check()


def test_the_batch_is_empty_when_all_have_left():
    _, batch = embedded(2, 5)
    batch.drop(1, 0)
    assert (batch.rows, batch.lengths, batch.width, batch.state) == ([], [], 0, None)
    batch.check()


def test_a_row_is_taken_out_without_its_placeholders_and_stays():
    _, batch = embedded(2, 5)
    assert keys_of(batch.extract(0)) == [[10, 11]]
    assert batch.rows == [0, 1]


def test_a_row_joins_once_and_leaves_once():
    _, batch = embedded(2)
    with pytest.raises(ValueError, match="row 0 is in the batch already"):
        batch.embed(0, state_of(1), 1)
    with pytest.raises(ValueError, match=r"rows \[5\] are not in the batch"):
        batch.drop(5)


def test_a_row_with_holes_cannot_be_taken_out():
    echo, batch = echo_rows(compact=False)
    shape(echo, batch, (0, (1, 2)))
    shape(echo, batch, (1, (3, 4, 5)))
    with pytest.raises(ValueError, match="row 0 has placeholders between its tokens"):
        batch.extract(0)
    assert keys_of(batch.extract(1)) == [[3, 4, 5]]


@pytest.mark.parametrize("prompt", [(60,), (60, 61, 62), (60, 61, 62, 63, 64, 65)])
def test_a_prompt_computed_with_others_leaves_no_junk_after_their_tokens(prompt):
    echo, batch = embedded(2, 3)
    batch.set_last([0, 1], [12, 23])
    shape(echo, batch, (5, prompt))
    width = max(4, len(prompt))
    rows = ([10, 11, 12], [20, 21, 22, 23], [*prompt])
    assert keys_of(batch.state) == [[*[0] * (width - len(row)), *row] for row in rows]
    assert batch.width == width
    batch.check()


@pytest.mark.parametrize("compact", [True, False])
def test_the_width_stays_bounded_over_a_thousand_insertions(compact):
    draw, longest = random.Random(3), 0
    echo, batch = echo_rows(compact=compact)
    wanted, widths = {}, []
    for _ in range(1000):
        while len(batch.rows) == 8:
            decode(echo, batch)
            widths.append(batch.width)
            done = [row for row, length in zip(batch.rows, batch.lengths, strict=True) if length >= wanted[row]]
            if done:
                batch.drop(*done)
        row = next(row for row in range(8) if batch.place(row) is None)
        prompt = [1] * draw.randint(1, 40)
        wanted[row] = len(prompt) + draw.randint(1, 60)
        longest = max(longest, wanted[row])
        shape(echo, batch, (row, prompt))
        widths.append(batch.width)
    batch.check()
    if compact:
        assert max(widths) <= longest
    else:  # a row sees the prompts of all who join while it runs
        assert longest < max(widths) <= 8 * longest
        half = len(widths) // 2
        assert max(widths[half:]) < 1.5 * max(widths[:half])


def part_of(state, path):
    for name in path:
        state = state[name] if isinstance(state, (dict, list, tuple)) else vars(state)[name]
    return state


@pytest.mark.parametrize("family", WITH_KEYS)
@torch.inference_mode()
def test_placeholders_of_any_finite_value_do_not_move_the_logits(family):
    made = Made.of(tiny(family))
    lengths = (3, 9, 14, 6)
    logits = []
    for fill in (0.0, 50.0):
        batch = RunningRows(made.layout, 8, CPU)
        for row, prompt in enumerate(draw_prompts(*lengths)):
            _, state = made.driver.forward(made.driver.inputs(torch.tensor([prompt])), None)
            batch.embed(row, state, len(prompt))
        batch.set_last(range(4), [5, 6, 7, 8])
        filled = 0
        for leaf in made.layout.leaves:
            if leaf.kind == "time":
                part = part_of(batch.state, leaf.path)
                width = part.shape[leaf.time_axis]
                for place, length in enumerate(lengths):
                    placeholders = part.select(leaf.batch_axis, place).narrow(
                        leaf.time_axis - 1, 0, max(0, width - length)
                    )
                    filled += placeholders.numel()
                    assert not fill or not placeholders.any()
                    placeholders.fill_(fill)
        assert filled
        own = []
        for _ in range(3):
            given, state = made.driver.forward(batch.decode_inputs(), batch.state)
            batch.advance(state)
            own.append(given)
        check_batch(batch)
        logits.append(torch.stack(own))
    assert bool(torch.isfinite(logits[1]).all())
    assert torch.equal(*logits) or torch.allclose(*logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "damage",
    [
        lambda batch: setattr(batch, "width", batch.width + 1),
        lambda batch: batch.rows.reverse(),
        lambda batch: batch.lengths.pop(),
        lambda batch: batch.lengths.__setitem__(0, 1) or batch.lengths.__setitem__(1, 1),
        lambda batch: setattr(batch, "state", {"keys": torch.full((2, 5, 1), float("nan"))}),
        lambda batch: setattr(batch, "state", {"keys": torch.zeros(2, 9, 1)}),
        lambda batch: setattr(batch, "state", None),
    ],
)
def test_the_check_finds_a_batch_that_disagrees_with_itself(damage):
    _, batch = embedded(2, 5)
    batch.check()
    damage(batch)
    with pytest.raises(RuntimeError):
        batch.check()
