"""The test process of grammars: does with a grammar all that an engine will do, where a crash does no harm.

llguidance compiles grammars by recursion, so a hostile one can overflow its stack, take all memory, or take for ever.
`main` runs in a process of its own, reads the vocabulary, and then only forks. Each child tests one grammar after
another, under limits of time, memory and stack that are below an engine's own. The kernel ends a child that exceeds a
limit. A fork takes milliseconds, so a crash costs the next grammar nothing. `Trials` is the other side.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from holdfast.core.types import Grammar, GrammarKind
from holdfast.lm.grammar.sources import (
    GrammarError,
    begun,
    check_matcher,
    check_references,
    in_brief,
    read_vocabulary,
)

COMPILE_STACK = 8 << 20
"""Bytes of stack for compiling a grammar. Engines have ENGINE_STACK for it."""
ENGINE_STACK = 32 << 20
FOLLOW_STACK = 1 << 20
"""Bytes of stack for following a grammar. The threads of an engine that do it have 2 MiB or more."""
MEMORY_LIMIT = 512 << 20
"""Most bytes that a grammar takes, with all the memory of its compilation."""
SPENT = 64 << 20
"""Bytes of address space that a child may keep after a grammar. It ends then, so that each has the same room."""
WALK_TOKENS = 64
"""Tokens of an answer, drawn at random, that a grammar must follow in the test."""
WALK_SECONDS = 0.5
"""Most processor time of that walk. Masks hold up all other rows of a step, so a slow grammar is refused."""
GROWTH, GROWTH_LIMIT = 32, 48 << 20
"""Expected growth of a compiled grammar, as a multiple of that in a second walk; most bytes of it (LEXER_STATES)."""
NICENESS = 10
"""Nice value of tests and compilations of grammars. An engine's own threads come first."""
MESSAGE_LIMIT = 1 << 28
"""Most bytes of a message. The largest one is a tokenizer."""
PR_SET_PDEATHSIG = 1


class Vocabulary(msgspec.Struct, array_like=True):
    """The first message: the vocabulary with which grammars are tested."""

    tokenizer: str
    vocab_size: int
    ends: list[int]


class Fork(msgspec.Struct, array_like=True, tag="fork"):
    """Fork a child. The answer is its process id, with the socket to it."""

    seconds: float
    """Most processor time of each of its tests."""


class Reap(msgspec.Struct, array_like=True, tag="reap"):
    """Kill a child unless it has ended. The answer is how it ended, as `os.waitstatus_to_exitcode` says."""

    pid: int


class Try(msgspec.Struct, array_like=True):
    """Test a grammar; for a child."""

    kind: GrammarKind
    text: str


class Passed(msgspec.Struct, array_like=True, tag="passed"):
    """A grammar can be followed."""

    size: int
    """Bytes of the compiled grammar, including its expected growth while it is followed."""
    spent: bool = False
    """Whether the child ends after this test."""


class Refused(msgspec.Struct, array_like=True, tag="refused"):
    """Why a grammar cannot be followed, in words for people."""

    reason: str
    spent: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_verdict = msgspec.msgpack.Decoder(Passed | Refused).decode
decode_number = msgspec.msgpack.Decoder(int).decode
_decode_vocabulary = msgspec.msgpack.Decoder(Vocabulary).decode
_decode_order = msgspec.msgpack.Decoder(Fork | Reap).decode
_decode_try = msgspec.msgpack.Decoder(Try).decode


def send(connection: socket.socket, message: bytes, *files: int) -> None:
    """Send a message, with open files."""
    head = len(message).to_bytes(4, "big")
    connection.sendmsg([head], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else [])
    connection.sendall(message)


def receive(connection: socket.socket) -> tuple[bytes, int | None] | None:
    """The next message, with an open file if one came; None at the end. Raises ValueError for one beyond the limit."""
    head, files, _, _ = socket.recv_fds(connection, 4, 1)
    while 0 < len(head) < 4:
        head += connection.recv(4 - len(head)) or b"\xff" * 4
    if not head:
        return None
    size = int.from_bytes(head[:4], "big")
    if size > MESSAGE_LIMIT:
        raise ValueError(f"a message of {size} bytes; at most {MESSAGE_LIMIT} are taken")
    message = bytearray()
    while len(message) < size:
        if not (piece := connection.recv(min(size - len(message), 1 << 20))):
            return None
        message += piece
    return bytes(message), files[0] if files else None


def main() -> None:
    """Read the vocabulary and fork children as ordered, on the socket that is standard input, until it ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    with socket.socket(fileno=0) as orders:
        if (first := receive(orders)) is None:
            return
        vocabulary = _decode_vocabulary(first[0])
        try:
            tokenizer = read_vocabulary(vocabulary.tokenizer, vocabulary.vocab_size, vocabulary.ends)
        except GrammarError:  # the engine has found out, too
            return
        ends = vocabulary.ends
        del first, vocabulary
        Tester(tokenizer, ends, 0.0).test(Grammar("regex", "a*"))  # what the first one alone takes, children share
        gc.collect()
        gc.freeze()  # so that children share it
        children = set[int]()
        try:
            while (order := receive(orders)) is not None:
                match _decode_order(order[0]):
                    case Fork(seconds):
                        ours, theirs = socket.socketpair()
                        if (pid := os.fork()) == 0:
                            _be_child(orders, ours, theirs, Tester(tokenizer, ends, seconds))
                        children.add(pid)
                        with ours, theirs:
                            send(orders, encode(pid), ours.fileno())
                    case Reap(pid) if pid in children:
                        children.remove(pid)
                        send(orders, encode(_reap(pid)))
                    case _:
                        send(orders, encode(0))
        finally:
            for pid in children:
                _reap(pid)


def _reap(pid: int) -> int:
    """Kill one of our children, if it has not ended, and return how it ended."""
    found, status = os.waitpid(pid, os.WNOHANG)
    if not found:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _be_child(orders: socket.socket, ours: socket.socket, theirs: socket.socket, tester: Tester) -> None:
    """Test grammars until no further one comes; never returns."""
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        orders.close()
        ours.close()
        tester.limit()
        while (message := receive(theirs)) is not None:
            wanted = _decode_try(message[0])
            verdict = tester.test(Grammar(wanted.kind, wanted.text))
            send(theirs, encode(verdict))
            if verdict.spent:
                break
        status = 0
    finally:
        os._exit(status)


class Tester:
    """Tests grammars in this process, which a hostile grammar ends."""

    def __init__(self, tokenizer: LLTokenizer, ends: list[int], seconds: float) -> None:
        """`ends` are the end-of-sequence tokens. A test may take `seconds` of processor time."""
        self._tokenizer, self._seconds = tokenizer, seconds
        self._ends = sum(1 << token for token in set(ends))
        self._begun = address_space()

    def limit(self) -> None:
        """Bound this process's address space for good."""
        room = self._begun + MEMORY_LIMIT + SPENT + COMPILE_STACK + FOLLOW_STACK
        if sys.platform == "linux":  # other systems do not enforce it
            resource.setrlimit(resource.RLIMIT_AS, (room, room))

    def test(self, grammar: Grammar) -> Passed | Refused:
        """Compile a grammar, follow it for a while, copy it and free it."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)  # SIGPROF ends the process, wherever it is
        try:
            size = self._size(grammar)
            return Passed(size, self._spent)
        except GrammarError as error:
            return Refused(str(error), self._spent)
        except MemoryError:
            return Refused(too_large(grammar), True)
        except BaseException as error:  # llguidance's panics, too
            return Refused(f"the {grammar.kind} grammar cannot be followed: {in_brief(error)}", True)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    @property
    def _spent(self) -> bool:
        return address_space() - self._begun > SPENT

    def _size(self, grammar: Grammar) -> int:
        """Bytes that a grammar takes. Raises the errors of its test."""
        kept: list[LLMatcher] = []
        before = allocated()

        def compile() -> None:
            check_references(grammar)
            kept.append(begun(self._tokenizer, grammar))

        def follow() -> None:
            walk(grammar, kept[0].deep_copy(), self._ends, 0)
            once = allocated()
            walk(grammar, kept[0].deep_copy(), self._ends, 1)
            sizes.append(once - before + min(GROWTH * max(allocated() - once, 0), GROWTH_LIMIT))
            kept.clear()

        sizes: list[int] = []
        on_stack(COMPILE_STACK, compile)
        on_stack(FOLLOW_STACK, follow)
        return max(sizes[0], len(grammar.text))


def walk(grammar: Grammar, matcher: LLMatcher, ends: int, seed: int) -> None:
    """Write an answer of random tokens, with a mask for each.

    `ends` is a mask of the end tokens, which are drawn only where nothing else can be.

    Raises GrammarError for a grammar that nothing matches, or that takes WALK_SECONDS.
    """
    choose, began, tokens = random.Random(seed), time.thread_time(), 0
    while tokens < WALK_TOKENS and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not tokens:
            check_matcher(grammar, matcher)
        if (token := drawn(mask & ~ends or mask, choose)) is None:
            break
        matcher.compute_ff_tokens()
        matcher.consume_token(token)
        tokens += 1
        if time.thread_time() - began > WALK_SECONDS:
            raise GrammarError(
                f"the {grammar.kind} grammar is too slow to follow: {tokens} tokens took over {WALK_SECONDS:g} s of "
                f"processor time, and {WALK_TOKENS} may; make it less ambiguous"
            )
    matcher.deep_copy()


def drawn(mask: int, choose: random.Random) -> int | None:
    """The first token that a mask allows after a random place in it; None if it allows none."""
    if not mask:
        return None
    behind = mask >> (at := choose.randrange(mask.bit_length()))
    return at + (behind & -behind).bit_length() - 1


def on_stack(size: int, work: Callable[[], None]) -> None:
    """Do work in a thread with a stack of `size` bytes. Raises the work's error."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    with _starting:
        before = threading.stack_size(size)
        try:
            thread = threading.Thread(target=run, name="holdfast-compile-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]


_starting = threading.Lock()
"""Held while a thread starts with another stack size. Python has one setting for all threads."""


def too_large(grammar: Grammar) -> str:
    """The refusal of a grammar that takes too much memory."""
    return f"the {grammar.kind} grammar took over {MEMORY_LIMIT >> 20} MiB of memory to compile"


def address_space() -> int:
    """Bytes of this process's address space; 0 where that is not known."""
    return _pages(0) * resource.getpagesize()


def _pages(field: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[field])
    return 0


class _Allocated(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


def allocated() -> int:
    """Bytes that are allocated, by glibc's own count; elsewhere the bytes in memory."""
    count: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if count is None:
        return _pages(1) * resource.getpagesize()
    count.restype = _Allocated
    found = count()
    return int(found.uordblks + found.hblkhd)
