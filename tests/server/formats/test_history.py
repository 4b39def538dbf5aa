"""Messages in the form that templates expect: Mistral's ids of calls."""

from __future__ import annotations

import itertools

import pytest

from holdfast.server.formats.history import short_ids

IDS = [
    *("call_weather_1", "call_weather_2", "call_weather_11"),  # they begin alike
    *("1_call_weather", "2_call_weather"),  # they end alike
    *("call-1", "call_1", "call1", "1", "01", ""),  # they have the same letters and digits
    *("a" * 64 + "b", "a" * 64 + "c", "\u00e9" * 9, "abcdefgh", "0abcdefgh", "\ud800"),
]


def shortened(id: str) -> tuple[str, str]:
    """Return a call's id in the message that makes the call, and in the message with its result."""
    made, result = short_ids(
        [
            {"role": "assistant", "content": "", "tool_calls": [{"id": id, "function": {"name": "f"}}]},
            {"role": "tool", "content": "x", "tool_call_id": id},
        ]
    )
    return made["tool_calls"][0]["id"], result["tool_call_id"]


def test_a_call_and_its_result_have_one_id_of_nine_letters_and_digits() -> None:
    for id in IDS:
        call, result = shortened(id)
        assert call == result and len(call) == 9 and call.isascii() and call.isalnum()


def test_ids_that_differ_stay_different() -> None:
    for one, other in itertools.combinations(IDS, 2):
        assert shortened(one)[0] != shortened(other)[0], (one, other)


@pytest.mark.parametrize("id", ["abcdEF789", "000000001"])
def test_an_id_that_fits_stays_as_it_is(id: str) -> None:
    assert shortened(id) == (id, id)
