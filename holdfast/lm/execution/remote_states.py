"""RemoteStateStore: recurrent states in a Redis service that several engines share."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from holdfast.lm.execution.remote_store import RemoteStore
from holdfast.lm.tiers import Outcome, Pieces, StateAbout, TierBlock

DIGEST_BYTES = 32
MOST_AFTER = 4
"""Most states that are listed after one block, the last ones written: several answers may end in one block."""
MOST_FOUND = 8
"""Most states that a question finds: those after the last blocks."""


class RemoteStateStore(RemoteStore):
    """Recurrent states by digest, each as one value: its description, then its bytes.

    A state is found by the full block before it: under that block's digest is a list of the keys of the states after
    it. The description (`StateAbout.key`) has this digest, then the key. A state is listed once it is there. One that
    is listed and not there was evicted.
    """

    def write(self, blocks: Sequence[TierBlock], data: Sequence[Pieces]) -> list[Outcome]:
        """Store these states, and list them. A state that the service already has gets a new lifetime."""
        outcomes = super().write(blocks, data)
        with self._client.pipeline(transaction=False) as pipeline:
            for parent, key in described(outcomes, data):
                name = self._list(parent)
                pipeline.zadd(name, {key: time.time()})
                pipeline.zremrangebyrank(name, 0, -MOST_AFTER - 1)
                pipeline.expire(name, self._lifetime)
            answers = self._execute(pipeline)
        return outcomes if answers is not None and not any_errors(answers) else ["failed"] * len(blocks)

    def read(self, blocks: Sequence[TierBlock], targets: Sequence[Pieces]) -> list[Outcome]:
        """Read these states into `targets`. Their lists get a new lifetime, too."""
        outcomes = super().read(blocks, targets)
        with self._client.pipeline(transaction=False) as pipeline:
            for parent, _ in described(outcomes, targets):
                pipeline.expire(self._list(parent), self._lifetime)
            self._execute(pipeline)
        return outcomes

    def find(self, blocks: Sequence[TierBlock]) -> tuple[list[Outcome], tuple[bytes, ...]]:
        """For each of these full blocks, whether states after it are listed; and the keys of the last of them."""
        with self._client.pipeline(transaction=False) as pipeline:
            for block in blocks:
                pipeline.zrevrange(self._list(block.digest), 0, MOST_AFTER - 1)
            answers = self._execute(pipeline)
        if answers is None or any_errors(answers):
            return ["failed"] * len(blocks), ()
        found = [key for keys in reversed(answers) for key in keys]
        return ["done" if keys else "missing" for keys in answers], tuple(found[:MOST_FOUND])

    def _list(self, parent: bytes) -> bytes:
        """The name of the list of the states after a block."""
        return self._prefix + b"after:" + parent


def described(outcomes: Sequence[Outcome], data: Sequence[Pieces]) -> Iterable[tuple[bytes, bytes]]:
    """For each state that is done: the digest of the block before it, and its key, from its description."""
    for outcome, pieces in zip(outcomes, data, strict=True):
        if outcome == "done":
            key = StateAbout.unpacked(bytes(pieces[0])).key
            yield key[:DIGEST_BYTES], key[DIGEST_BYTES:]


def any_errors(answers: Iterable[object]) -> bool:
    """Whether the service refused a command."""
    return any(isinstance(answer, Exception) for answer in answers)
