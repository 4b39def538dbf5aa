"""RemoteStore: blocks of the KV cache in a Redis service that several engines share."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from holdfast.lm.execution.disk_store import block_checksum
from holdfast.lm.tiers import Outcome, Pieces, TierBlock

if TYPE_CHECKING:
    import redis

LIFETIME = 86_400
"""Seconds that an unused block stays in the service. Each use begins them anew."""
CONNECT_SECONDS, ANSWER_SECONDS = 0.2, 2.0
"""Longest time, in seconds, for the service to accept a connection, and to answer."""
HEAD = struct.Struct("<4sQ")
"""Header before a block's bytes: MAGIC and the checksum."""
MAGIC = b"HFK2"


class RemoteStore:
    """Blocks by digest, under names that begin with the engine's identity.

    Engines with equal model, types, layout, block size and version share their blocks. A digest begins with the tenant
    (`Identity.root`), so tenants share nothing. The service bounds its own size: each block has a lifetime, and Redis
    evicts by its `maxmemory-policy` (allkeys-lru is right).

    An error of the service is returned as an outcome, never raised. Threads may share the object.
    """

    def __init__(self, url: str, block_bytes: int, identity: dict[str, str], *, lifetime: int = LIFETIME) -> None:
        """Connects at the first use. Raises ValueError for a URL that is not Redis's, or without the extra."""
        self._client = client_of(url)
        self._block_bytes = block_bytes
        about = json.dumps({**identity, "block bytes": str(block_bytes)}, sort_keys=True)
        self._prefix = b"holdfast:" + hashlib.sha256(about.encode()).hexdigest()[:32].encode() + b":"
        self._lifetime = lifetime
        self.where = shown(url)
        """The service's address, for people."""
        self.trouble = "no answer yet"
        """The reason why the last failed call failed, for people."""

    def check(self) -> Outcome:
        """Whether the service can be written to now: failed if not, and then `trouble` gives the reason.

        Missing if no check has left its mark there: the service is new to this engine, or has lost its contents.
        """
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.exists(self._prefix + b"check")
            pipeline.set(self._prefix + b"check", b"", ex=self._lifetime)
            answers = self._execute(pipeline)
        if answers is None or answers[1] is not True:
            return "failed"
        return "done" if answers[0] == 1 else "missing"

    def probe(self, blocks: Sequence[TierBlock]) -> list[Outcome]:
        """For each of these blocks, whether the service has it."""
        with self._client.pipeline(transaction=False) as pipeline:
            for block in blocks:
                pipeline.exists(self._name(block))
            answers = self._execute(pipeline)
        if answers is None:
            return ["failed"] * len(blocks)
        return ["done" if answer == 1 else "missing" for answer in answers]

    def find(self, blocks: Sequence[TierBlock]) -> tuple[list[Outcome], tuple[bytes, ...]]:
        """For each of these blocks, that no recurrent state after it is listed here: this store has blocks alone."""
        return ["missing"] * len(blocks), ()

    def write(self, blocks: Sequence[TierBlock], data: Sequence[Pieces]) -> list[Outcome]:
        """Store these blocks. Blocks that the service already has get a new lifetime, and are not sent again."""
        with self._client.pipeline(transaction=False) as pipeline:
            for block in blocks:
                pipeline.expire(self._name(block), self._lifetime)
            there = self._execute(pipeline)
        if there is None:
            return ["failed"] * len(blocks)
        missing = [at for at, answer in enumerate(there) if answer != 1]
        with self._client.pipeline(transaction=False) as pipeline:
            for at in missing:
                value = b"".join((HEAD.pack(MAGIC, block_checksum(blocks[at], data[at])), *data[at]))
                pipeline.set(self._name(blocks[at]), value, ex=self._lifetime)
            answers = self._execute(pipeline) if missing else []
        if answers is None:
            return ["failed"] * len(blocks)
        outcomes: list[Outcome] = ["done"] * len(blocks)
        for at, answer in zip(missing, answers, strict=True):
            outcomes[at] = "done" if answer is True else "failed"
        return outcomes

    def read(self, blocks: Sequence[TierBlock], targets: Sequence[Pieces]) -> list[Outcome]:
        """Read these blocks into `targets`. The target of a block that is not `done` may hold anything."""
        with self._client.pipeline(transaction=False) as pipeline:
            for block in blocks:
                pipeline.getex(self._name(block), ex=self._lifetime)
            answers = self._execute(pipeline)
        if answers is None:
            return ["failed"] * len(blocks)
        return [self._take(*each) for each in zip(blocks, answers, targets, strict=True)]

    def _take(self, block: TierBlock, value: object, target: Pieces) -> Outcome:
        if value is None:
            return "missing"
        if not isinstance(value, bytes):
            return "failed"
        data = memoryview(value)[HEAD.size :]
        if len(data) != self._block_bytes or value[: HEAD.size] != HEAD.pack(MAGIC, block_checksum(block, (data,))):
            return "corrupt"
        for piece in target:
            piece[:], data = data[: len(piece)], data[len(piece) :]
        return "done"

    def _name(self, block: TierBlock) -> bytes:
        return self._prefix + block.digest

    def _execute(self, pipeline: redis.client.Pipeline) -> list[Any] | None:
        """The answers, each of which may be an error; None if the service gave no answer."""
        import redis

        try:
            answers = list(pipeline.execute(raise_on_error=False))
        except (redis.RedisError, OSError) as error:
            self.trouble = str(error).rstrip(".") or type(error).__name__
            return None
        except (ValueError, TypeError, AttributeError, RecursionError):  # the client's, for what no Redis answers
            self._client.connection_pool.disconnect(inuse_connections=False)  # the rest of the answer may follow
            self.trouble = "the answer is not in Redis's protocol"
            return None
        if refused := [answer for answer in answers if isinstance(answer, Exception)]:
            self.trouble = str(refused[0]).rstrip(".") or type(refused[0]).__name__
        return answers

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def client_of(url: str) -> redis.Redis:
    """A client of the service at this URL. Raises ValueError."""
    try:
        import redis
    except ImportError:
        raise ValueError(
            f"remote_cache is {shown(url)}, and its client is missing: pip install 'holdfast[redis]'"
        ) from None
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    try:
        return redis.Redis.from_url(
            url,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),  # no retry here: `LowerTiers` avoids a service that has failed
        )
    except ValueError as error:
        raise ValueError(f"remote_cache is {shown(url)!r}, which is no URL of a Redis service: {error}") from None


def shown(url: str) -> str:
    """A URL without its secrets."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
