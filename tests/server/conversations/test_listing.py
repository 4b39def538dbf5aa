"""Texts around a match, as searches of conversations show them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.server.conversations.listing import PREVIEW, _around


@given(before=st.text("ab ", max_size=400), after=st.text("ab ", max_size=400))
def test_the_text_around_a_match_holds_it_and_tells_what_was_left_out_before(before: str, after: str) -> None:
    shown = _around(f"{before}Needle{after}", "needle")
    assert shown is not None and "Needle" in shown and len(shown) <= PREVIEW + 1
    whole = f"{before}Needle{after}"
    assert shown.removeprefix("…") in whole
    assert shown.startswith("…") == (len(before) > PREVIEW // 3)
    assert _around(f"{before}{after}", "needle") is None
