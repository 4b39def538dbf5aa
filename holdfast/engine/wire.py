"""The version of the messages between an engine with an address and its clients, and which versions work together.

Peers one version apart work together, so servers and engines can be upgraded one after another. These rules keep that:

- A message is an array. A new field goes to its end, with a default. No field is removed, moved or given another type.
- A named tuple within a message never changes: it is an array, too, but a peer takes no more fields than it knows.
- A configuration, a description and a request are maps. A new field has a default.
- A new kind of message is sent only to a peer whose version knows it: the number in `SINCE`.
- `WIRE` grows by one, at most once in a release, with the first such change.

`tests/engine/test_wire.py` compares all messages with those that were recorded for the version before.
"""

from __future__ import annotations

WIRE = 2
"""The version of the messages. Peers that send none, as they had no version yet, count as 1."""
SINCE = dict.fromkeys(
    (
        "adopt", "adopted", "asleep", "client-count", "count-clients", "drain", "drained", "draining",
        "driven-progress", "driven-started", "introduce", "run-call", "servers", "sleep", "sleep-refused", "slept",
        "start-driven", "token-waits", "wake-up",
    ),
    2,
)  # fmt: skip
"""The version in which each kind of message came, by its tag. All others are of version 1."""


def mismatch(theirs: int) -> str:
    """The reason why a peer of this version is refused, in words; empty if it is at most one version apart."""
    if abs(theirs - WIRE) <= 1:
        return ""
    return (
        f"its messages have version {theirs} and these have {WIRE}; at most one version may lie between a server and "
        "an engine, so upgrade by way of the versions between"
    )


def knows(wire: int, tag: str) -> bool:
    """Whether a peer of this version knows a kind of message."""
    return wire >= SINCE.get(tag, 1)
