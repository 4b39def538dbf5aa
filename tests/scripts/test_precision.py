"""What keys and values in FP8 do to the answers of the built-in model."""

from random import Random

from holdfast import LLM
from scripts.tiny.dialogues import write_dialogue
from scripts.tiny.precision import likeliest_tokens, options_of, right, share_same


def test_with_keys_and_values_in_fp8_the_likeliest_token_is_nearly_always_the_same() -> None:
    rng = Random(7)
    dialogues = [write_dialogue(rng, "heldout", 8) for _ in range(6)]
    tokens = []
    for kv_cache_dtype in ("auto", "fp8"):
        with LLM(kv_cache_dtype=kv_cache_dtype, device="cpu", cache_gb=0.2, threads=1) as llm:
            tokens.append(likeliest_tokens(llm, dialogues))
    assert len(tokens[0]) > 700
    assert share_same(*tokens) >= 0.996  # with one bit of fraction less it is 0.9947


def test_the_share_is_that_of_equal_tokens_in_equal_places() -> None:
    assert share_same([1, 2, 3, 4], [1, 3, 2, 4]) == 0.5


def test_answers_are_counted_by_kind_or_all_at_once() -> None:
    checked = {
        kind: {"right": passed, "of": 4, "share": passed / 4}
        for kind, passed in {"recall two": 3, "counting": 4, "RECALL, all": 3}.items()
    }
    assert right(checked) == (7, 8)
    assert right(checked, "RECALL, all") == (3, 4)


def test_options_are_words_or_json() -> None:
    given = ["kv_cache_dtype=fp8", "block_size=8", "prefix_sharing=false"]
    assert options_of(given) == {"kv_cache_dtype": "fp8", "block_size": 8, "prefix_sharing": False}
