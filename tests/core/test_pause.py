"""Pause: what a client may say of the time until its next request, and what is refused."""

import math
import re

import pytest

from holdfast.core.pause import MAX_KIND, MAX_PAUSE, NO_PAUSE, Pause


@pytest.mark.parametrize("expected", [-1.0, math.nan, math.inf, MAX_PAUSE * 1.01, 1e18])
def test_an_expected_pause_out_of_range_is_refused_with_its_value_in_ms(expected):
    with pytest.raises(
        ValueError, match=re.escape(f"expected_pause_ms is {expected * 1e3:g}; it must lie between 0 and 86400000")
    ):
        Pause(expected=expected)


@pytest.mark.parametrize("until", [math.nan, math.inf, -math.inf])
def test_a_wish_to_keep_state_until_no_time_is_refused(until):
    with pytest.raises(ValueError, match=r"keep_until is .*finite"):
        Pause(keep_until=until)


@pytest.mark.parametrize("kind", ["x" * (MAX_KIND + 1), "tool:\n", "tool:\x00", "werkzeug:ß"])
def test_a_kind_that_is_too_long_or_not_printable_is_refused(kind):
    with pytest.raises(ValueError, match="kind of pause is"):
        Pause(kind)


def test_limits_themselves_are_taken():
    pause = Pause("x" * MAX_KIND, expected=MAX_PAUSE, keep_until=-5.0)
    assert pause.expected == MAX_PAUSE and Pause(expected=0.0).expected == 0.0


def test_the_parent_of_a_kind_is_what_comes_before_the_first_colon():
    kinds = {"tool:search": "tool", "tool:a:b": "tool", "person": "", "": "", ":": ""}
    assert {kind: Pause(kind).parent for kind in kinds} == kinds
    assert Pause() == NO_PAUSE and not NO_PAUSE.superseded
