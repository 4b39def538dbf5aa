"""An API process of several on one port, started by the supervisor: `python -m holdfast.server.worker`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading

import msgspec

from holdfast.core.config import AppConfig
from holdfast.engine.client.connection import EngineStartError
from holdfast.lm.config import EngineConfig
from holdfast.server.conversations.values import StoreError
from holdfast.server.run import Engines, log_as, run
from holdfast.server.supervisor import READY, Order

FAILED = 2
"""Exit status if the process cannot start. The reason is in the log."""


def main() -> int:
    """Serve as the order on standard input says, until a signal. Returns the exit code."""
    import uvloop

    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=end_with_input, name="holdfast-parent", daemon=True).start()
    log_as(order.server)
    try:
        with socket.socket(fileno=order.listener) as listener:
            listener.setblocking(False)
            return int(
                uvloop.run(
                    run(
                        EngineConfig(), order.server, AppConfig(), listener,
                        cluster=order.cluster, supervised=True, on_progress=lambda stage: None, on_ready=report_ready,
                    )
                )
            )  # fmt: skip
    except (EngineStartError, StoreError, OSError) as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return FAILED


def report_ready(engines: Engines, url: str) -> None:
    """Let the supervisor know that this process accepts requests."""
    os.write(1, READY)


def end_with_input() -> None:
    """Drain and end this process when the supervisor has ended, and so closed our standard input."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
