"""How far keys, values and weights in FP8 change the answers of the built-in model."""

from random import Random

import pytest

from holdfast import LLM
from tools.tiny.dialogues import Dialogue, write_dialogue
from tools.tiny.precision import argmax_tokens, right, share_same


@pytest.fixture(scope="module")
def dialogues() -> list[Dialogue]:
    rng = Random(7)
    return [write_dialogue(rng, "heldout", 8) for _ in range(6)]


@pytest.fixture(scope="module")
def exact(dialogues: list[Dialogue]) -> list[int]:
    """The argmax at each position, without options."""
    with LLM(device="cpu", cache_gb=0.2, threads=1) as llm:
        return argmax_tokens(llm, dialogues)


@pytest.mark.always("weights")
@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"kv_cache_dtype": "fp8"}, 0.996),  # with one bit of fraction less it is 0.9947
        ({"quantization": "fp8"}, 0.986),  # with one bit of fraction less it is 0.9841
    ],
    ids=["keys and values", "weights"],
)
def test_fp8_keeps_nearly_every_argmax_on_a_cpu(
    options: dict[str, str], least: float, dialogues: list[Dialogue], exact: list[int]
) -> None:
    with LLM(**options, device="cpu", cache_gb=0.2, threads=1) as llm:
        found = argmax_tokens(llm, dialogues)
    assert len(exact) > 700
    assert least <= share_same(exact, found) < 1.0


@pytest.mark.gpu
def test_fp8_keeps_nearly_every_argmax_on_a_gpu_with_fp8_activations(dialogues: list[Dialogue]) -> None:
    found = []
    for options in ({}, {"quantization": "fp8", "kv_cache_dtype": "fp8"}):
        with LLM(**options, device="cuda", cache_gb=0.2) as llm:
            found.append(argmax_tokens(llm, dialogues))
    assert 0.96 <= share_same(*found) < 1.0


def test_share_same_counts_equal_tokens_at_equal_positions() -> None:
    assert share_same([1, 2, 3, 4], [1, 3, 2, 4]) == 0.5


def test_right_counts_answers_of_one_kind_or_of_all() -> None:
    checked = {
        kind: {"right": passed, "of": 4, "share": passed / 4}
        for kind, passed in {"recall two": 3, "counting": 4, "RECALL, all": 3}.items()
    }
    assert right(checked) == (7, 8)
    assert right(checked, "RECALL, all") == (3, 4)
