"""ChunkService: the threads that move KV blocks between this engine's host tier and those of others, over sockets.

One thread listens, and each connection has a thread that answers it. Each fetch from another engine has a thread, of
which a few run at a time. Bytes go between the socket and the host tier's memory directly. The threads do not change
the memory's bookkeeping: `Moves` does so between two steps.

A fetch asks the other engine which blocks it has, then goes on in batches: host blocks are reserved for the next batch
while the last one comes in. A block counts once its checksum is right and requests can find it. If the other engine
ends, the blocks that have come stay.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Protocol, TypeVar

from holdfast.engine.process.block_moves import LOOP_SECONDS, Loan, Moves, Room
from holdfast.engine.process.chunk_wire import (
    DIGEST,
    MAX_DIGESTS,
    ChunkPeer,
    Kind,
    PeerError,
    Terms,
    digests_in,
    join_address,
    split_address,
)
from holdfast.engine.process.state_moves import MovedStates, Pairs, Start
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from holdfast.lm.tiers import Pieces

T = TypeVar("T")

BATCH_BYTES = 128 << 20
"""Bytes that a fetch asks for at a time. Host blocks are reserved for two of these batches."""
LOAN_BYTES = 32 << 20
"""Bytes of one loan to a reader. It has two: the next blocks are looked up while the last ones are sent."""
MOST_BLOCKS = 512
"""Most blocks of a batch or a loan, however small they are: the loop looks at each block between two steps."""
MAX_CONNECTIONS = 16
"""Most readers at a time. More are turned away."""
MAX_FETCHES = 4
"""Most fetches that run at a time."""
MAX_QUEUED = 64
"""Most fetches that wait. More are refused."""
IDLE_SECONDS = 60.0
"""Seconds after which a reader that asks for nothing is given up."""
RATE_WEIGHT = 0.3
"""Weight of the last batch in the moving average of the rate."""
LEAST_TIMED = 1 << 16
"""Fewest bytes of a batch that counts for the rate."""

log = logging.getLogger("holdfast.engine")


class Blocks(Protocol):
    """The host tier: `holdfast.lm.execution.host_memory.HostBlocks`."""

    def __getitem__(self, block: int) -> Pieces:
        """The bytes of a block, in place."""
        ...


class ChunkService:
    """Serves the host tier's blocks to other engines, and fetches theirs. Its methods are for the loop's thread."""

    def __init__(self, moves: Moves, terms: Terms, blocks: Blocks, address: str, states: MovedStates) -> None:
        """Listen at `address` (`host` or `host:port`, port 0 is any). `states` moves what is not in blocks.

        Raises OSError, ValueError.
        """
        self._moves, self._terms, self._blocks, self._states = moves, terms, blocks, states
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
        self.address = join_address(host, self._listener.getsockname()[1])
        """Where other engines find this one."""
        self._lock = threading.Lock()
        self._readers: set[socket.socket] = set()
        """Connections of other engines."""
        self._sources: set[ChunkPeer] = set()
        """Connections to other engines."""
        self._closing = False
        self._fetches: dict[int, threading.Event] = {}
        """The event that stops each fetch, by number."""
        self._bytes_in = self._bytes_out = self._failed = 0
        self._rate = 0.0
        self._pool = ThreadPoolExecutor(MAX_FETCHES, "holdfast-fetch")
        threading.Thread(target=self._listen, name="holdfast-chunks", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a fetch is under way."""
        return bool(self._fetches)

    def fetch(self, message: FetchChunks) -> None:
        """Begin a fetch."""
        if len(self._fetches) >= MAX_FETCHES + MAX_QUEUED:
            refusal = f"{len(self._fetches)} fetches run or wait; at most {MAX_FETCHES + MAX_QUEUED} may"
            self._moves.report(ChunksFetched(message.number, 0, refusal))
            return
        stop = self._fetches[message.number] = threading.Event()
        self._pool.submit(self._fetch, message, stop)

    def stop(self, number: int) -> None:
        """Give up the rest of a fetch."""
        with contextlib.suppress(KeyError):  # it has ended
            self._fetches[number].set()

    def stats(self) -> Mapping[str, float]:
        """The figures of moves, by their names in SchedulerStats."""
        states = self._states.stats()
        return {
            "chunk_bytes_in": self._bytes_in + states["chunk_bytes_in"],
            "chunk_bytes_out": self._bytes_out + states["chunk_bytes_out"],
            "chunk_rate": self._rate,
            "chunk_failures": self._failed,
        }

    def close(self) -> None:
        """End all connections without waiting: the process ends."""
        with self._lock:
            self._closing = True
            for connection in self._readers:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for peer in self._sources:
                peer.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stop in tuple(self._fetches.values()):
            stop.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            with self._lock:
                if self._closing or len(self._readers) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._readers.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="holdfast-chunk-reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one reader until it asks for nothing further."""
        try:
            with ChunkPeer.accept(connection, self._terms) as peer:
                while peer.wait(IDLE_SECONDS):
                    self._answer(peer)
        except OSError as error:
            if str(error):
                log.debug("holdfast: a reader of chunks ended: %s", error)
        finally:
            with self._lock:
                self._readers.discard(connection)
            connection.close()

    def _answer(self, peer: ChunkPeer) -> None:
        kind, payload = peer.receive(most=MAX_DIGESTS * DIGEST)
        if kind is Kind.HOLDS:
            peer.send(Kind.HELD, self._ask(partial(self._moves.which, digests_in(payload))))
        elif kind is Kind.FETCH:
            self._give(peer, digests_in(payload))
        elif kind is Kind.ARRIVED:
            self._moves.call(partial(self._moves.give_way, digests_in(payload)))
            self._states.give_way(digests_in(payload))
        elif not self._states.answer(peer, kind, payload):
            raise PeerError(f"the peer sends a {kind.name} in place of a question")

    def _give(self, peer: ChunkPeer, digests: Sequence[bytes]) -> None:
        """Send blocks. The blocks of the next loan are looked up meanwhile."""
        size = max(1, min(LOAN_BYTES // self._terms.block_bytes, MOST_BLOCKS, self._moves.most_lent))
        parts = [digests[at : at + size] for at in range(0, len(digests), size)]
        loans: list[Loan] = []
        try:
            for number in range(len(parts)):
                while len(loans) < min(number + 2, len(parts)):
                    loans.append(Loan(self._moves, parts[len(loans)]))
                    self._moves.begin(loans[-1])
                for block in loans[number].given.result(LOOP_SECONDS):
                    if block is None:
                        peer.send(Kind.MISSING)
                    else:
                        self._bytes_out += self._terms.block_bytes  # counted by the time that the other engine has them
                        peer.send(Kind.CHUNK, *self._blocks[block])
                self._moves.call(loans[number].end)
        finally:
            for loan in loans:
                self._moves.call(loan.end)

    def _ask(self, work: Callable[[], T]) -> T:
        answer: Future[T] = self._moves.call(work)
        return answer.result(LOOP_SECONDS)

    def _fetch(self, message: FetchChunks, stop: threading.Event) -> None:
        """Bring blocks from another engine, and report how many tokens have come."""
        came, reason = _Count(), ""
        try:
            with ChunkPeer.connect(message.source, self._terms) as peer:
                with self._lock:
                    if self._closing:
                        return
                    self._sources.add(peer)
                try:
                    pairs = list(zip(message.indices, message.digests, strict=True))
                    with self._states.begin(peer, pairs) as start:
                        reason = start.reason or self._bring(peer, start, stop, came)
                finally:
                    with self._lock:
                        self._sources.discard(peer)
        except (OSError, ValueError) as error:
            self._failed += 1
            reason = f"{type(error).__name__}: {error}" if type(error) not in (PeerError, ValueError) else str(error)
            log.warning("holdfast: a move from %s ended after %d blocks: %s", message.source, came.blocks, reason)
        except Exception:
            self._failed += 1
            reason = "the move failed; the log says why"
            log.exception("holdfast: a move from %s failed", message.source)
        finally:
            self._fetches.pop(message.number, None)
            self._moves.report(ChunksFetched(message.number, came.tokens(message.block_size), reason))

    def _found(self, peer: ChunkPeer, pairs: Pairs) -> tuple[list[tuple[int, bytes]], bool]:
        """The blocks that the other engine has and this one lacks, and whether it has all that this one lacks."""
        here = self._ask(partial(self._moves.which, [digest for _, digest in pairs]))
        pairs = [pair for pair, is_here in zip(pairs, here, strict=True) if not is_here]
        there = b"".join(
            self._held_by(peer, [digest for _, digest in pairs[at : at + MAX_DIGESTS]])
            for at in range(0, len(pairs), MAX_DIGESTS)
        )
        found = [pair for pair, is_there in zip(pairs, there, strict=True) if is_there]
        return found, len(found) == len(pairs)

    def _bring(self, peer: ChunkPeer, start: Start, stop: threading.Event, came: _Count) -> str:
        """Bring what the other engine has of a move and this one lacks. Returns why some is missing, if any is."""
        found, is_all = self._found(peer, start.pairs)
        came.bound(start.found())
        if start.is_whole and not is_all:
            return "the source does not have all of it"
        size = max(1, min(BATCH_BYTES // self._terms.block_bytes, MOST_BLOCKS))
        batches = [found[at : at + size] for at in range(0, len(found), size)]
        rooms: list[Room] = []
        arrived: list[bytes] = []
        try:
            for number, batch in enumerate(batches):
                while len(rooms) < min(number + 2, len(batches)):
                    rooms.append(Room(self._moves, batches[len(rooms)]))
                    self._moves.begin(rooms[-1])
                places = rooms[number].given.result(LOOP_SECONDS)
                if stop.is_set():
                    return "the move was stopped"
                arrived += self._fill(peer, rooms[number], places, came)
                if len(places) < len(batch):
                    return "the host tier has no room that is worth less"
            came.add_states(start.finish())
            came.bound(start.found())
        finally:
            # All stay held until now, so that no block of a move makes room for another one of it.
            ends = [self._moves.call(room.end) for room in rooms]
            for end in ends:
                with contextlib.suppress(TimeoutError):
                    end.result(LOOP_SECONDS)
        if arrived:
            peer.send(Kind.ARRIVED, b"".join(arrived[-MAX_DIGESTS:]))
        return "" if is_all and start.found() else "the source does not have all of it"

    def _held_by(self, peer: ChunkPeer, digests: Sequence[bytes]) -> bytes:
        peer.send(Kind.HOLDS, b"".join(digests))
        kind, held = peer.receive(most=len(digests))
        if kind is not Kind.HELD or len(held) != len(digests):
            raise PeerError(f"the peer answers with {len(held)} bytes to {len(digests)} digests")
        return held

    def _fill(self, peer: ChunkPeer, room: Room, places: dict[int, tuple[int, bytes]], came: _Count) -> list[bytes]:
        """Fill these reserved blocks. Returns the digests of those that have come, which count also if this fails."""
        if not places:
            return []
        filled: list[int] = []
        began = time.monotonic()
        try:
            peer.send(Kind.FETCH, b"".join(digest for _, digest in places.values()))
            for block in places:
                if peer.receive_block(self._blocks[block]):
                    filled.append(block)
        finally:
            size, seconds = len(filled) * self._terms.block_bytes, time.monotonic() - began
            self._bytes_in += size
            if size >= LEAST_TIMED and seconds > 0:
                self._rate += (size / seconds - self._rate) * (RATE_WEIGHT if self._rate else 1.0)
            came.add(self._ask(partial(room.arrived, filled)))
        return [places[block][1] for block in filled]


class _Count:
    """Blocks and states that have come, and how many of their tokens requests find."""

    def __init__(self) -> None:
        self.blocks = self.states = 0
        self._most = inf

    def add(self, blocks: int) -> None:
        """Count this many more blocks."""
        self.blocks += blocks

    def add_states(self, states: int) -> None:
        """Count this many more states."""
        self.states += states

    def bound(self, most: float) -> None:
        """Note that requests find no more tokens than this, whatever has come."""
        self._most = most

    def tokens(self, size: int) -> int:
        """Tokens that have come and are found, with blocks of `size` tokens. A state alone counts as one block."""
        return int(min(max(self.blocks, min(self.states, 1)) * size, self._most))
