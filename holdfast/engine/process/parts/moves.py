"""Moves of KV blocks between engines: where this engine's blocks are, and how others come to it."""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from holdfast.engine import messages
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.block_moves import Moves
from holdfast.engine.process.chunk_service import ChunkService
from holdfast.engine.process.chunk_wire import Terms
from holdfast.engine.process.handler import Handler, Refusal, no_answer
from holdfast.engine.process.part_builder import PartBuilder, Served, Site, excluded
from holdfast.engine.process.parts.tiers import layout_of, layout_of_states
from holdfast.engine.process.state_moves import MovedStates, NoStates, StateMoves
from holdfast.files.regular import read_bytes, samples_of
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.host_memory import HostBlocks, HostPart, HostStates
from holdfast.lm.memory.block_pool import BlockPool
from holdfast.lm.memory.state_pool import StatePool
from holdfast.lm.parts.moves.messages import ChunksFetched, ChunksFound, FetchChunks, FindChunks, StopFetch
from holdfast.lm.scheduler.hybrid import SnapshotPart
from holdfast.lm.types import EngineShape

SAMPLES, SAMPLE_BYTES = 64, 1 << 14
"""Number and size of the samples of each file of weights. They distinguish models of one name."""


class ChunkFinder(Handler):
    """Says how much of a sequence is in this engine's memory. It is asked whether or not blocks move."""

    receives = (FindChunks,)

    def __init__(self, pool: BlockPool, reach: Callable[[Sequence[bytes]], int] = len) -> None:
        """`reach` gives the number of leading blocks of a chain that count; others serve nothing."""
        self._pool, self._reach = pool, reach
        self._found: list[messages.FromEngine] = []

    def receive(self, message: FindChunks) -> None:
        self._found.append(self.find(message.number, message.chain))

    def answers(self) -> Iterable[messages.FromEngine]:
        found, self._found = self._found, []
        return found

    def find(self, number: int, chain: Sequence[bytes]) -> ChunksFound:
        """Number of tokens of a chain of digests that are here, by tier."""
        pool, chain = self._pool, chain[: self._reach(chain)]
        tiers = pool.tiers(chain)
        nowhere = [digest for digest, tier in zip(chain, tiers, strict=True) if tier == "-"]
        on_host = tiers.count("h")
        lower = sum(map(pool.kept_below, nowhere)) if pool.kept_below else 0
        counts = len(chain) - on_host - len(nowhere), on_host, lower
        return ChunksFound(number, *(blocks * pool.block_size for blocks in counts))


class MoveHandler(Handler):
    """Brings blocks from other engines, and gives them this engine's blocks."""

    receives = (FetchChunks, StopFetch)

    def __init__(self, moves: Moves, service: ChunkService) -> None:
        """`service` has the threads that move the bytes; they change this engine's memory by `moves` alone."""
        self.moves, self._service = moves, service

    @property
    def busy(self) -> bool:
        return self._service.busy

    @property
    def ready(self) -> bool:
        return self.moves.ready

    @property
    def address(self) -> str:
        """Where other engines find this one."""
        return self._service.address

    def receive(self, message: FetchChunks | StopFetch) -> None:
        """Begin a fetch, whose answer says how many tokens have come, or give up the rest of one."""
        if isinstance(message, FetchChunks):
            self._service.fetch(message)
        else:
            self._service.stop(message.number)

    def answers(self) -> Iterable[messages.FromEngine]:
        return self.moves.answers()

    def stats(self) -> Mapping[str, float]:
        return self._service.stats()

    def stop(self) -> None:
        self.moves.close()
        self._service.close()


class MoveBuilder(PartBuilder):
    """Builds the handler that finds blocks, and the one that moves them if configuration and device allow it."""

    name = "moves"
    is_optional = True
    refusals: ClassVar[Mapping[type, Refusal]] = {
        FindChunks: lambda message: (ChunksFound(message.number, 0, 0, 0),),
        FetchChunks: lambda message: (ChunksFetched(message.number, 0, "this engine moves no state"),),
        StopFetch: no_answer,
    }

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._address = ""
        self._reason = ""
        """Why nothing moves; empty if blocks do."""

    def handlers(self, served: Served) -> Iterable[Handler]:
        """Raises ValueError for an address that cannot be listened at."""
        site, reach = self.site, state_pool(served).reach if served.shape.states else len
        finders = [ChunkFinder(pool, reach) for pool in served.scheduler.block_pools]
        self._reason = excluded({self.name}, site, host_tier=served.shape.num_host_blocks > 0)
        if self._reason:
            return finders
        parts = site.blocks.host_parts
        moves = Moves(served.scheduler, site.clock, site.order.wake)
        states = states_of(site, served, moves)
        try:
            terms = terms_of(site, served.shape, parts)
            service = ChunkService(moves, terms, HostBlocks(parts), site.config.chunk_host, states)
        except OSError as error:
            raise ValueError(f"chunk_host is {site.config.chunk_host}: {error.strerror or error}") from None
        self._address = service.address
        return *finders, MoveHandler(moves, service)

    def facts(self) -> Mapping[str, Any]:
        return {"chunk_address": self._address, "chunk_reason": self._reason}


def state_pool(served: Served) -> StatePool:
    """The recurrent states of a model that has some."""
    return served.scheduler.part(SnapshotPart).states


def states_of(site: Site, served: Served, moves: Moves) -> MovedStates:
    """The moves of what the model's recurrent layers keep, if it has any."""
    if not served.shape.states:
        return NoStates()
    return StateMoves(moves, state_pool(served), HostStates(site.blocks.state_parts), site.config.block_size)


def terms_of(site: Site, shape: EngineShape, parts: Sequence[HostPart]) -> Terms:
    """Facts in which engines must agree before blocks move between them."""
    block = layout_of(site.config, site.blocks, parts)
    if shape.states:
        block += f" with states of {layout_of_states(site.blocks, site.blocks.state_parts)}, {sys.byteorder} first"
    layout = f"{shape.model}, {shape.precision}, {block}, {digest_of_files(site.config, site.checkpoint)}"
    return Terms(site.order.chunk_secret or secrets.token_bytes(32), layout, site.blocks.block_bytes)


def digest_of_files(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """A digest of a model's configuration, and of samples of its weights' files: cheap, for engines that run now."""
    found = hashlib.sha256(f"{config.load_format} {config.quantization} {config.max_model_len}".encode())
    found.update(read_bytes(checkpoint.directory / "config.json"))
    for path in sorted(checkpoint.directory.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".pt", ".pth") and config.load_format != "random":
            found.update(f"{path.name} {path.stat().st_size}".encode())
            for sample in samples_of(path, SAMPLES, SAMPLE_BYTES):
                found.update(sample)
    return found.hexdigest()
