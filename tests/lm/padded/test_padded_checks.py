"""The tests' own checks: tiny models generate what their logits say, and a plan that cannot be followed is refused."""

from types import SimpleNamespace

import pytest
import torch

from holdfast.lm.types import Forward, RowMove, RowPlan, Segment, StepPlan
from tests.padded_checks import FAMILIES, VOCAB, StatePlaces, check_batch, draw_prompts, generate_alone, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_gives_the_argmax_of_one_forward_over_all_tokens(family):
    module, said = tiny(family), set()
    for prompt in draw_prompts(3, 9, 14, 6):
        tokens = generate_alone(module, prompt, 8)
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert logits.shape == (8, VOCAB)
        assert torch.allclose(logits[torch.arange(8), torch.tensor(tokens)], logits.amax(1), rtol=1e-3, atol=1e-4)
        said.add(tokens)
    assert len(said) == 4, "a model that says the same after every prompt would hide faults"


def test_the_oracle_ends_with_the_first_of_the_ends():
    module = tiny("llama")
    (prompt,) = draw_prompts(9)
    tokens = generate_alone(module, prompt, 8)
    end = tokens[3]
    assert generate_alone(module, prompt, 8, ends=[end]) == tokens[: tokens.index(end) + 1]


def segment(row, start, stop):
    return Segment(str(row), row, start, stop, (1,) * (stop - start), None)


def follow(*steps):
    """Apply plans given as (segments, forwards, moves); the places afterwards."""
    places = StatePlaces()
    for number, (segments, forwards, moves) in enumerate(steps):
        places.apply(StepPlan(number, segments, parts=(RowPlan(forwards=tuple(forwards), moves=tuple(moves)),)))
    return places


JOINED = (
    [segment(0, 0, 5), segment(1, 0, 3), segment(0, 5, 6), segment(1, 3, 4)],
    [Forward(2, apart=True), Forward(4)],
    [RowMove(1, "embed", 0, length=5), RowMove(1, "embed", 1, length=3)],
)
"""Two prompts computed apart, embedded, and decoded in the same step."""


def test_rows_are_followed_through_embedding_shaping_a_slot_and_back():
    places = follow(
        JOINED,
        ([segment(0, 6, 7), segment(1, 4, 5), segment(2, 0, 4)], [Forward(3)], []),
        ([segment(1, 5, 6)], [Forward(1, ended=(2,))], [RowMove(0, "store", 0, slot=9, length=7)]),
        (
            [segment(0, 7, 8), segment(1, 6, 7)],
            [Forward(2)],
            [
                RowMove(0, "drop", 2),
                RowMove(0, "load", 0, slot=9, length=7),
                RowMove(0, "forget", slot=9),
                RowMove(0, "embed", 0, length=7),
                RowMove(1, "keep", 1, slot=3, length=6),
                RowMove(1, "offload", slot=3),
            ],
        ),
    )
    assert (places.batch, places.apart, places.slots, places.on_host) == ({0: 8}, {}, {3: 6}, {3})


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (([segment(0, 6, 7)], [Forward(1)], []), "a forward of the batch of rows"),
        (([segment(0, 6, 7), segment(1, 4, 5)], [Forward(2, ended=(1,))], []), "a forward of the batch of rows"),
        (([segment(0, 6, 7), segment(1, 5, 6)], [Forward(2)], []), "does not follow"),
        (([segment(0, 6, 8), segment(1, 4, 5)], [Forward(2)], []), "more than one token"),
        (([segment(0, 6, 7)], [Forward(1, apart=True)], []), "does not follow"),
        (([segment(2, 3, 4)], [Forward(1, apart=True)], []), "does not follow"),
        (([segment(2, 0, 4)], [], []), "behind its last forward"),
        (([], [], [RowMove(0, "embed", 0, length=6)]), "the row's states"),
        (([], [], [RowMove(0, "drop", 7)]), "has no state"),
        (([], [], [RowMove(0, "load", 5, slot=1, length=2)]), "the slot has None"),
        (([], [], [RowMove(0, "store", 0, slot=1, length=9)]), "has 6 positions"),
        (([], [], [RowMove(0, "keep", 0, slot=1, length=6), RowMove(0, "keep", 1, slot=1, length=4)]), "the slot 6"),
        (([], [], [RowMove(0, "forget", slot=2)]), "the slot has no state"),
        (([], [], [RowMove(0, "offload", slot=2)]), "no state on the device"),
    ],
)
def test_a_plan_that_no_executor_could_follow_is_refused(step, reason):
    with pytest.raises(RuntimeError, match=reason):
        follow(JOINED, step)


def test_a_chunk_of_a_started_prompt_is_a_forward_of_its_own():
    start = ([segment(0, 0, 4)], [Forward(1, apart=True)], [])
    assert follow(start, ([segment(0, 4, 6)], [Forward(1, apart=True)], [])).apart == {0: 6}
    with pytest.raises(RuntimeError, match="in a group of 2"):
        follow(start, ([segment(0, 4, 6), segment(1, 0, 2)], [Forward(2, apart=True)], []))


def batch(**changes):
    """What `check_batch` reads of two rows in order."""
    tensors = changes.pop("tensors", [torch.zeros(2, 3)])
    layout = SimpleNamespace(tensors=lambda state: tensors)
    good = dict(rows=[4, 2], lengths=[3, 5], width=5, compact=True, state="any", layout=layout)
    return SimpleNamespace(**good | changes)


def test_a_batch_that_disagrees_with_itself_is_refused():
    check_batch(batch())
    check_batch(batch(rows=[], lengths=[], width=0, state=None))
    for changes in (
        {"rows": [4, 4]},
        {"lengths": [3]},
        {"width": 6},
        {"state": None},
        {"tensors": [torch.tensor([1.0, float("nan")])]},
    ):
        with pytest.raises(RuntimeError):
            check_batch(batch(**changes))
