"""Beginnings of items and texts around a match, as lists of conversations show them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.json import encode

from holdfast.server.conversations.listing import BEGINNING, PREVIEW, _around, _beginning

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(text=TEXT, shift=st.integers(0, 40), role=st.sampled_from(["user", "system", "assistant"]))
def test_the_beginning_of_a_large_item_is_the_beginning_of_its_text_wherever_it_is_cut(
    text: str, shift: int, role: str
) -> None:
    whole = "x" * (BEGINNING - 120 + shift) + text + '🎈\n"é' * 900
    item = encode({"id": "msg", "type": "message", "role": role, "content": [{"type": "input_text", "text": whole}]})
    said = _beginning(item[:BEGINNING])
    assert (said.role == "system") == (role == "system")
    (part,) = said.content
    assert whole.startswith(part.text) and len(part.text) > BEGINNING - 400


@given(text=TEXT)
def test_a_small_item_is_read_whole_with_its_calls_and_results(text: str) -> None:
    message = {"role": "user", "content": [{"type": "input_text", "text": part} for part in (text, "end")]}
    assert _beginning(encode(message)).text() == f"{text}\nend"
    assert _beginning(encode({"type": "function_call", "name": "f", "arguments": '{"a": 1}'})).text() == '{"a": 1}'
    assert _beginning(encode({"type": "function_call_output", "output": "done"})).text() == "done"


def test_a_large_item_without_text_has_an_empty_beginning() -> None:
    item = encode({"role": "user", "content": [{"type": "input_image", "data": "x" * (2 * BEGINNING)}]})
    assert _beginning(item[:BEGINNING]).text() == ""


@given(before=st.text("ab ", max_size=400), after=st.text("ab ", max_size=400))
def test_the_text_around_a_match_holds_it_and_tells_what_was_left_out_before(before: str, after: str) -> None:
    shown = _around(f"{before}Needle{after}", "needle")
    assert shown is not None and "Needle" in shown and len(shown) <= PREVIEW + 1
    whole = f"{before}Needle{after}"
    assert shown.removeprefix("…") in whole
    assert shown.startswith("…") == (len(before) > PREVIEW // 3)
    assert _around(f"{before}{after}", "needle") is None
