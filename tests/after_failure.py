"""What a failed test leaves open is freed within its own teardown, so that it does not fail the test after it.

A failed test's traceback holds its frames, with sockets and files that it had no chance to close. Python would warn of
them when they are freed, and a warning is an error of the test that runs by then.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Generator

import pytest

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """After the fixtures have ended, and before pytest looks for what was raised while objects were freed."""
    if not item.stash.get(FAILED, False):
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest keeps them until the next test
        if hasattr(sys, name):
            delattr(sys, name)
    if getattr(item, "funcargs", None):
        item.funcargs.clear()  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the test has failed already
        gc.collect()
