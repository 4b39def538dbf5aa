"""Runs the cases of a client: functions that return or raise. Prints a line of JSON for each case.

It runs in the client's own environment, so it imports nothing else. SERVER_URL, SERVER_MODEL and SERVER_KEY name the
server, its model and the key.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable
from typing import Any

URL = f"{os.environ['SERVER_URL']}/v1"
MODEL = os.environ["SERVER_MODEL"]
KEY = os.environ["SERVER_KEY"]
SECONDS = 60
"""Time limit of each case, in seconds."""
CASES: list[Callable[[], Any]] = []


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a case, whose name is the first line of its docstring. It may be a coroutine function."""
    CASES.append(function)
    return function


def equal(found: object, wanted: object) -> None:
    """Raise AssertionError, naming both, unless they are equal."""
    if found != wanted:
        raise AssertionError(f"got {found!r}, not {wanted!r}")


def holds(text: str | None, word: str) -> None:
    """Raise AssertionError unless a text has this word."""
    if word.lower() not in (text or "").lower():
        raise AssertionError(f"{word!r} is not in {text!r}")


def main() -> None:
    """Run all cases."""
    signal.signal(signal.SIGALRM, too_long)
    with asyncio.Runner() as runner:  # one event loop for all cases, because clients keep their connections
        for function in CASES:
            told = {"case": (function.__doc__ or function.__name__).splitlines()[0], "outcome": "passed"}
            signal.alarm(SECONDS)
            try:
                result = function()
                if inspect.iscoroutine(result):
                    runner.run(result)
            except Exception as error:
                told |= {"outcome": "failed", "reason": reason(error)}
            finally:
                signal.alarm(0)
            print(json.dumps(told), flush=True)


def too_long(*_: object) -> None:
    raise TimeoutError(f"took more than {SECONDS} s")


def reason(error: BaseException) -> str:
    """The type and the first line of an error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
