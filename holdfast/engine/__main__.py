"""The engine process: `python -m holdfast.engine ADDRESS PARENT`, started by `engine.child`."""

from __future__ import annotations

import os
import sys
import traceback

from holdfast.engine.messages import Failure, Hello, Progress, Start
from holdfast.engine.parent import FAILED, Parent, die_with_parent


def main(address: str, parent_pid: int) -> int:
    """Build the engine that the client asks for and run it until told to end. Returns the exit status."""
    die_with_parent(parent_pid)
    parent = Parent(address)
    try:
        parent.send(Hello())
        start = parent.receive()
        if not isinstance(start, Start):
            raise RuntimeError(f"the first message was {type(start).__name__}, not Start")
        parent.send(Progress("loading PyTorch"))
        # Only now: the import takes seconds, and from here on the parent learns of a failure.
        from holdfast.engine.serve import run

        run(start, parent)
        return 0
    except Exception as error:
        if os.environ.get("HOLDFAST_DEBUG"):
            traceback.print_exc()
        parent.send(Failure(one_line(error)))
        return FAILED
    finally:
        parent.close()


def one_line(error: Exception) -> str:
    """An error as one line for people. Names the error's class unless its message is written for them."""
    text = " ".join(str(error).split())
    expected = isinstance(error, (ValueError, MemoryError, OSError))
    return text if expected and text else f"{type(error).__name__}: {text}" if text else type(error).__name__


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
