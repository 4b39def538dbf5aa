"""The drafter that a configuration asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.speculation.choice import make_drafter
from holdfast.lm.parts.speculation.drafts import NgramDrafter, SuffixDrafter
from holdfast.lm.types import StateShape
from tests.lm.test_choice import SHAPE


@pytest.mark.parametrize(
    ("speculation", "kind", "drafter"),
    [("ngram", "cpu", NgramDrafter), ("suffix", "cpu", SuffixDrafter), ("auto", "cuda", SuffixDrafter)],
)
def test_a_drafter_is_made_as_the_configuration_says(speculation: Any, kind: str, drafter: type) -> None:
    assert isinstance(make_drafter(EngineConfig(speculation=speculation), SHAPE, kind), drafter)


@pytest.mark.parametrize(("speculation", "kind"), [("off", "cuda"), ("auto", "cpu")])
def test_no_drafter_is_made_where_none_is_wanted(speculation: Any, kind: str) -> None:
    assert make_drafter(EngineConfig(speculation=speculation), SHAPE, kind) is None


@pytest.mark.parametrize(
    ("options", "kind", "places"),
    [
        ({}, "cuda", 200),
        ({}, "cpu", 0),
        ({"tbt_target": 50.0}, "cpu", 200),
        ({"speculation": "ngram"}, "cpu", 200),
        ({"speculation": "off"}, "cuda", 0),
    ],
)
def test_inputs_of_drafts_have_places_where_drafts_are_verified(options: Any, kind: str, places: int) -> None:
    assert EngineConfig(max_sequences=200, **options).draft_places(kind) == places


@pytest.mark.parametrize(("places", "drafted"), [(0, False), (64, True)])
def test_recurrent_layers_verify_drafts_if_they_have_places_for_their_inputs(places: int, drafted: bool) -> None:
    shape = replace(SHAPE, states=StateShape(snapshots=3, slot_bytes=1, places=places))
    drafter = make_drafter(EngineConfig(speculation="suffix"), shape, "cuda")
    assert isinstance(drafter, SuffixDrafter) is drafted


def test_a_draft_head_guesses_where_one_is_named_on_any_device() -> None:
    for kind in ("cpu", "cuda"):
        for options in ({}, {"speculation": "eagle3"}):
            config = EngineConfig(draft_model="head", **options)  # type: ignore[arg-type]
            assert (config.drafter_on(kind), config.max_samples) == ("eagle3", 256)
            assert make_drafter(config, SHAPE, kind) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "eagle3"}, "speculation is eagle3, which takes a draft head: give draft_model"),
        ({"speculation": "off", "draft_model": "h"}, "draft_model is h, and speculation is off; drop one"),
        ({"speculation": "ngram", "draft_model": "h"}, "draft_model is h, and speculation is ngram; drop one"),
        (
            {"executor": "padded", "draft_model": "h"},
            "draft_model is h, which is for the paged executor, and executor is padded",
        ),
        ({"scheduler": "orca", "draft_model": "h"}, "draft_model is h, and scheduler is orca: drafts are for the"),
        ({"tp": 2, "draft_model": "h"}, "draft_model is h, and tp is 2 and pp is 1: a draft head runs on one device"),
        ({"pp": 2, "draft_model": "h"}, "draft_model is h, and tp is 1 and pp is 2: a draft head runs on one device"),
    ],
)
def test_a_draft_head_is_refused_where_nothing_would_verify_its_guesses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)
