"""Messages about KV blocks that engines find and fetch."""

from __future__ import annotations

from holdfast.lm.parts.message import Message


class FindChunks(Message, tag="find-chunks"):
    """To the engine: report how much of this chain of block digests is here; the answer is ChunksFound."""

    number: int
    chain: list[bytes]


class FetchChunks(Message, tag="fetch-chunks"):
    """To the engine: bring these blocks of a sequence from another engine; the answer is ChunksFetched."""

    number: int
    digests: list[bytes]
    indices: list[int]
    """Index of each block in its sequence, 0 for the first block."""
    source: str
    """The other engine's `EngineInfo.chunk_address`."""
    block_size: int


class StopFetch(Message, tag="stop-fetch"):
    """To the engine: give up the rest of a fetch. Its answer comes nevertheless."""

    number: int


class ChunksFound(Message, tag="chunks-found"):
    """From the engine: tokens of a chain that it holds, counted in the fastest tier that has them."""

    number: int
    device: int
    host: int
    lower: int


class ChunksFetched(Message, tag="chunks-fetched"):
    """From the engine: the number of tokens that have come. Requests now find them."""

    number: int
    tokens: int
    reason: str = ""
    """The reason why it is less than was asked for, in one line; empty if it is not."""


ToEngine = FindChunks | FetchChunks | StopFetch
FromEngine = ChunksFound | ChunksFetched
