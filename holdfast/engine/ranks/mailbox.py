"""Mailbox: messages from one process to others of the same host, through a ring of bytes in shared memory.

    written                     by the writer: bytes that were ever written
    read[0], read[1] ...        by each reader: bytes that it has read; written - read <= capacity
    ring[capacity]              records: a word with the length of a piece, then the piece, padded to whole words

A position in the ring is such a count modulo the capacity. A message longer than a piece goes in several. After each
piece the writer also puts a byte into a pipe of each reader, which is what a reader with nothing to read sleeps on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import tempfile
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

WORD = 8
LINE = 64
"""Bytes of a cache line. Different processes write to different lines."""
CAPACITY = 1 << 20
"""Bytes of a ring. A plan takes 3 KB for 256 decodes, and 4 bytes for each token of a prompt."""
PATIENCE = 1e-4
"""Seconds that a writer sleeps at a time while the ring is full."""
WAKE_BYTES = 4096
"""Most wake-up bytes that are read at a time."""


def nameless_memory() -> int:
    """The file descriptor of memory that child processes may inherit, of no bytes yet. Raises OSError.

    It has no name, so nothing is left of it when its last process has ended, even if that was killed.
    """
    if hasattr(os, "memfd_create"):  # it needs no room in /dev/shm, of which containers have 64 MB
        return os.memfd_create("holdfast")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedWords:
    """Integers of 64 bits in memory that child processes inherit. It has no name, and goes with the last process."""

    def __init__(self, words: int, inherited: int | None = None) -> None:
        """New memory of zeros, or that of an `inherited` file descriptor. Raises OSError."""
        size = words * WORD
        if inherited is None:
            self.descriptor = nameless_memory()
            os.ftruncate(self.descriptor, size)
            # Else a lack of memory would kill the process at its first write.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, 0, size)
        else:
            self.descriptor = inherited
        self._map = mmap.mmap(self.descriptor, size)
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("q")

    def close(self) -> None:
        """Give the memory back. May be called more than once."""
        if not self._map.closed:
            self.words.release()
            self.bytes.release()
            self._map.close()
            os.close(self.descriptor)


class Bell(NamedTuple):
    """A pipe that wakes one process."""

    end: int
    """File descriptor that the process sleeps on."""
    button: int
    """File descriptor that others write to."""

    @classmethod
    def new(cls) -> Bell:
        """A new pipe. Raises OSError."""
        bell = cls(*os.pipe())
        for descriptor in bell:
            os.set_blocking(descriptor, False)
        return bell

    def ring(self) -> None:
        """Wake the process, now or when it next sleeps. Does nothing if it has ended."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a full pipe wakes it anyway
            os.write(self.button, b".")

    def sleep(self, seconds: float) -> bool:
        """Sleep until somebody rings, at most this long. Returns whether somebody did."""
        poller = select.poll()
        poller.register(self.end, select.POLLIN)
        if not poller.poll(max(0.0, seconds) * 1000):
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self.end, WAKE_BYTES)
        return True

    def close(self) -> None:
        """Close both ends."""
        for descriptor in self:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class Ticket(NamedTuple):
    """The arguments with which a child opens an inherited mailbox: file descriptors, which keep their numbers."""

    memory: int
    bells: tuple[Bell, ...]
    """One for each reader."""
    capacity: int

    @property
    def descriptors(self) -> list[int]:
        """All file descriptors that the child must inherit."""
        return [self.memory, *(descriptor for bell in self.bells for descriptor in bell)]


class Mailbox:
    """A ring with one writer and some readers, each of which gets every message, in order."""

    def __init__(self, bells: tuple[Bell, ...], capacity: int = CAPACITY, memory: int | None = None) -> None:
        """A new mailbox with a reader for each of `bells`, or the one in the memory of the file descriptor `memory`.

        A bell may serve several mailboxes of one reader; its maker closes it. Raises OSError, and ValueError for a
        capacity that is not a multiple of a cache line.
        """
        if capacity < 4 * LINE or capacity % LINE:
            raise ValueError(
                f"the capacity is {capacity} bytes; it must be a multiple of {LINE}, and at least {4 * LINE}"
            )
        self.bells, self.capacity = bells, capacity
        self._memory = SharedWords(((1 + len(bells)) * LINE + capacity) // WORD, memory)
        self._words = self._memory.words
        self._written = 0
        self._read = [LINE // WORD * (1 + reader) for reader in range(len(bells))]
        """Indices of the words with the positions of readers; the writer's is the first word."""
        start = (1 + len(bells)) * LINE
        self._ring = self._memory.bytes[start : start + capacity]
        self._piece = capacity // 4
        self._barrier = threading.Lock()

    @classmethod
    def open(cls, ticket: Ticket) -> Mailbox:
        """The mailbox that the parent process made."""
        return cls(ticket.bells, ticket.capacity, ticket.memory)

    @property
    def ticket(self) -> Ticket:
        """The ticket with which a child process opens the mailbox."""
        return Ticket(self._memory.descriptor, self.bells, self.capacity)

    def send(self, message: bytes, check: Callable[[], None] = lambda: None) -> None:
        """Write a message. Waits while the slowest reader leaves no room, and then calls `check`, which may raise."""
        view, at = memoryview(message), 0
        while True:
            piece = view[at : at + self._piece]
            at += len(piece)
            last = at == len(view)
            room = WORD + -(-len(piece) // WORD) * WORD
            while self.capacity - (self._words[0] - min(self._words[place] for place in self._read)) < room:
                check()
                time.sleep(PATIENCE)
            # An even length ends a message.
            self._put(self._words[0], (2 * len(piece) + (not last)).to_bytes(WORD, "little"))
            self._put(self._words[0] + WORD, piece)
            self._fence()  # whoever sees the new position sees the piece
            self._words[0] += room
            for bell in self.bells:
                bell.ring()
            if last:
                return

    def reader(self, number: int = 0) -> Reader:
        """The end of the reader of this number. Each has one, in the process that its bell wakes."""
        return Reader(self, number)

    def close(self) -> None:
        """Give the memory back. May be called more than once."""
        self._ring.release()
        self._memory.close()

    def _put(self, position: int, data: bytes | memoryview) -> None:
        """Copy bytes to the ring, around its end if need be."""
        start = position % self.capacity
        first = min(len(data), self.capacity - start)
        self._ring[start : start + first] = data[:first]
        self._ring[: len(data) - first] = data[first:]

    def _get(self, position: int, size: int) -> bytes:
        """A copy of bytes from the ring."""
        start = position % self.capacity
        return bytes(self._ring[start : start + size]) + bytes(self._ring[: max(0, start + size - self.capacity)])

    def _fence(self) -> None:
        """Let no processor move a read or a write of memory across this line: taking a lock does not allow it."""
        with self._barrier:
            pass


class Reader:
    """One reader's end of a mailbox."""

    def __init__(self, mailbox: Mailbox, number: int) -> None:
        self.bell = mailbox.bells[number]
        self._mailbox = mailbox
        self._place = mailbox._read[number]
        self._begun: list[bytes] = []
        """The pieces of a message that is not complete."""

    def receive(self, seconds: float) -> bytes | None:
        """The next message; None if it does not come within this time."""
        deadline = time.monotonic() + seconds
        while (message := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.bell.sleep(left)
        return message

    def poll(self) -> bytes | None:
        """The next message if it is there."""
        mailbox = self._mailbox
        words = mailbox._words
        while words[self._place] < words[0]:
            mailbox._fence()
            at = words[self._place]
            size, more = divmod(int.from_bytes(mailbox._get(at, WORD), "little"), 2)
            piece = mailbox._get(at + WORD, size)
            mailbox._fence()  # the writer may overwrite the piece once it sees the new position
            words[self._place] = at + WORD + -(-size // WORD) * WORD
            if not more and not self._begun:
                return piece
            self._begun.append(piece)
            if not more:
                message = b"".join(self._begun)
                self._begun.clear()
                return message
        return None
