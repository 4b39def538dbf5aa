"""The measured points: what is padded costs what it is padded to."""

from __future__ import annotations

from holdfast.core.cost import interpolate
from holdfast.execution.profile import stairs


def test_a_padded_step_takes_what_its_size_takes() -> None:
    points = list(stairs((1, 32, 64, 128, 256), (1.0, 2.0, 3.0, 5.0, 6.0), padded_to={64, 128, 256}))
    tokens, seconds = zip(*points, strict=True)
    assert [interpolate(tokens, seconds, count) for count in (1, 32, 33, 64, 65, 100, 128, 129, 256)] == [
        1.0,
        2.0,
        *[3.0] * 2,
        *[5.0] * 3,
        *[6.0] * 2,
    ]


def test_without_padding_the_points_are_those_measured() -> None:
    assert list(stairs((1, 2, 4), (1.0, 2.0, 3.0), padded_to=())) == [(1, 1.0), (2, 2.0), (4, 3.0)]
