"""The environment of engine processes."""

from __future__ import annotations

import pytest

from holdfast.engine.spawn import BOUNDED_WAITS, child_environment

WAITS = ("OMP_WAIT_POLICY", *BOUNDED_WAITS)


def waits() -> dict[str, str]:
    environment = child_environment()
    return {name: environment[name] for name in WAITS if name in environment}


def test_waits_of_openmp_are_bounded_unless_the_user_says_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITS:
        monkeypatch.delenv(name, raising=False)
    assert waits() == BOUNDED_WAITS
    for name, value in zip(WAITS, ("active", "300000", "200"), strict=True):
        with monkeypatch.context() as own:
            own.setenv(name, value)
            assert waits() == {name: value}
