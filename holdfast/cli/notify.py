"""Notes to systemd, for services of `Type=notify`: that the program is ready (sd_notify(3))."""

from __future__ import annotations

import os
import socket

SOCKET_VARIABLE = "NOTIFY_SOCKET"
"""Environment variable with the path of systemd's socket. A path that begins with @ has no file."""


def notify(message: str) -> bool:
    """Send a line such as READY=1 to systemd. Returns whether somebody has asked for notes and this one was sent."""
    path = os.environ.get(SOCKET_VARIABLE, "")
    if not path.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        try:
            sender.sendto(message.encode(), path.replace("@", "\0", 1) if path.startswith("@") else path)
        except OSError:  # Nobody listens any more. The service runs all the same.
            return False
    return True
