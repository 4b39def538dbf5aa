"""Faults of requests in words: the parameter, its value, and what it may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta, Struct, field

from holdfast.server.faults import Fault, fault_of

Label = Annotated[str, Meta(max_length=3)]


class Inner(Struct, forbid_unknown_fields=True):
    """An object within a request."""

    mode: Literal["fast", "exact"] = "fast"
    labels: dict[Label, Label] = {}


class Outer(Struct, forbid_unknown_fields=True):
    """A request."""

    text: Label
    count: Annotated[int, Meta(ge=1)] | Literal["auto"] = "auto"
    inner: Inner | None = None
    many: list[Inner] = []
    labels: dict[Label, Annotated[int, Meta(le=9)]] = {}
    named: dict[str, Label] = field(default_factory=dict, name="other-name")


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"text": None}, ("text: expected `str`, got `null`", "text")),
        ({"text": "long"}, ("text: expected `str` of length <= 3, got 4", "text")),
        ({"count": 0}, ("count: expected `int` >= 1, got 0", "count")),
        ({"count": "all"}, ("count is 'all'; it must be auto or an integer", "count")),
        ({"inner": {"mode": "slow"}}, ("inner.mode is 'slow'; it must be one of exact, fast", "inner.mode")),
        ({"many": [{}, {"mode": "x" * 99}]},
         (f"many[1].mode is '{'x' * 63}; it must be one of exact, fast", "many[1].mode")),
        ({"many": [{"made": 1}]}, ("unknown parameter: many[0].made", "many[0].made", "unknown_parameter")),
        ({"labels": {"a": 9, "b": 10}}, ("labels.b: expected `int` <= 9, got 10", "labels.b")),
        ({"labels": {"a": 9, "b": "c"}}, ("labels.b: expected `int`, got `str`", "labels.b")),
        ({"labels": {"a": 9, "long": 1}}, ("labels: expected names of length <= 3, got 4", "labels")),
        ({"other-name": {"a": "b", "c": "long"}},
         ("other-name.c: expected `str` of length <= 3, got 4", "other-name.c")),
        ({"inner": {"labels": {"a": "long"}}},
         ("inner.labels[...]: expected `str` of length <= 3", "inner.labels[...]")),
        ({"labels": [1]}, ("labels: expected `object`, got `array`", "labels")),
    ],
)  # fmt: skip
def test_a_fault_names_the_parameter_its_value_and_what_it_may_be(more: dict[str, Any], fault: Any) -> None:
    given = {"text": "abc", **more}
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(given, Outer)
    assert fault_of(str(error.value), given, Outer) == Fault(*fault)


def test_a_missing_parameter_is_named() -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({}, Outer)
    found = fault_of(str(error.value), {}, Outer)
    assert found == Fault("text is missing", "text", "missing_required_parameter")
