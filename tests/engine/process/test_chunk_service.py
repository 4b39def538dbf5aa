"""Two chunk services over sockets: wherever a move is cut, both sides' memory is sound and no wrong byte is found."""

import random
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace

import pytest

from holdfast.engine.process import chunk_service
from holdfast.engine.process.block_moves import Moves
from holdfast.engine.process.chunk_service import ChunkService
from holdfast.engine.process.chunk_wire import ChunkPeer, Kind, PeerError, Terms
from holdfast.engine.process.state_moves import NoStates
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from holdfast.lm.parts.moves.planner import MovePart
from tests.invariants import check_scheduler
from tests.scheduling import create_scheduler

SIZE = 400
TERMS = Terms(b"secret", "blocks of a test", SIZE)


def digest(number):
    return number.to_bytes(32, "big")


def contents(number):
    return random.Random(number).randbytes(SIZE)


def in_parts(block):
    """A block as two ranks of unequal shares keep it."""
    return memoryview(block)[:150], memoryview(block)[150:]


class Side:
    """An engine without a model: its memory, its service, and a thread in place of its loop."""

    def __init__(self, blocks=64):
        self.memory = [bytearray(SIZE) for _ in range(blocks)]
        self.scheduler = create_scheduler(host_blocks=blocks, parts=[MovePart()])
        self.told = []
        self.turn = threading.Event()
        self.moves = Moves(self.scheduler, time.monotonic, self.turn.set)
        self.service = ChunkService(
            self.moves, TERMS, [in_parts(each) for each in self.memory], "127.0.0.1", NoStates()
        )
        self.ended = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    @property
    def host(self):
        return self.scheduler.pool.host

    def run(self):
        while not self.ended:
            self.turn.wait(0.05)
            self.turn.clear()
            self.told += self.moves.answers()

    def do(self, work):
        return self.moves.call(work).result(60)

    def keep(self, numbers):
        """Store these blocks on the host."""

        def keep():
            for number in numbers:
                block = self.scheduler.pool.reserve_on_host(0, 0.0)
                self.memory[block][:] = contents(number)
                self.scheduler.pool.cache_on_host([(block, digest(number), 0)], 0.0)

        self.do(keep)

    def fetch(self, numbers, address):
        """Fetch these blocks. Returns the answer."""
        number = len(self.told)
        message = FetchChunks(number, [digest(each) for each in numbers], list(numbers), address, 1)
        self.do(lambda: self.service.fetch(message))
        deadline = time.monotonic() + 200
        while len(self.told) <= number:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        return self.told[number]

    def check(self):
        """Check that nothing is held, and that all blocks found are right."""
        deadline = time.monotonic() + 200
        while self.do(lambda: self.host.held or self.moves._filling):
            assert time.monotonic() < deadline, "a block is held, or kept for a move that has ended"
            time.sleep(0.002)
        self.do(lambda: check_scheduler(self.scheduler))
        for found, block in self.host._index.blocks.items():
            assert self.memory[block] == contents(int.from_bytes(found, "big"))

    def close(self):
        self.moves.close()
        self.service.close()
        self.ended = True
        self.thread.join()


@pytest.fixture
def sides(monkeypatch):
    """Two sides. One has blocks 0 to 39. Batches and loans are small."""
    monkeypatch.setattr(chunk_service, "MOST_BLOCKS", 7)
    with ExitStack() as stack:
        pair = Side(), Side()
        for side in pair:
            stack.callback(side.close)
        pair[0].keep(range(40))
        yield pair


@contextmanager
def between(address, spoil):
    """Start a proxy. Returns its address. `spoil(data, at)` gives the bytes to pass on of the source's; None cuts."""
    host, port = address.split(":")
    server = socket.create_server(("127.0.0.1", 0))
    opened = []

    def pump(source, target, spoil):
        at = 0
        with suppress(OSError):
            while data := source.recv(1 << 12):
                changed = spoil(data, at)
                if changed is None:
                    break
                at += len(data)
                target.sendall(changed)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                client, _ = server.accept()
                source = socket.create_connection((host, int(port)))
                opened.extend((client, source))
                for ways in ((client, source, lambda data, at: data), (source, client, spoil)):
                    threading.Thread(target=pump, args=ways, daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for each in opened:
            each.close()


def test_all_blocks_come_in_batches_and_both_sides_forget_the_move(sides):
    source, target = sides
    assert target.fetch(range(30), source.service.address) == ChunksFetched(0, 30, "")
    assert target.fetch(range(25, 50), source.service.address) == ChunksFetched(
        1, 10, "the source does not have all of it"
    )
    for side in sides:
        side.check()


def test_what_has_moved_goes_first_at_its_source(sides):
    source, target = sides
    pool, numbers = source.scheduler.pool, range(100, 110)

    def compute():  # one sequence, and nothing was used later
        blocks = [(pool.reserve_on_host(0, 5.0), digest(number), 0) for number in numbers]
        for (block, *_), number in zip(blocks, numbers, strict=True):
            source.memory[block][:] = contents(number)
        pool.cache_on_host(blocks, 5.0)

    def order():
        digests, victims, gone = source.host._index.digests[:], source.host.victims(6.0), []
        while (chunk := victims.pop()) is not None:
            gone += [int.from_bytes(digests[block], "big") for block in chunk.blocks]
        return gone

    source.do(compute)
    assert target.fetch(numbers, source.service.address).tokens == 10
    target.fetch([999], source.service.address)  # by its answer the source has read all earlier messages
    source.check()
    assert set(source.do(order)[:10]) == set(numbers)


@pytest.mark.parametrize("seed", range(25))
def test_a_move_that_is_cut_or_spoilt_anywhere_leaks_nothing_and_what_came_is_right(sides, seed):
    source, target = sides
    choose = random.Random(seed)
    wrong, cuts = choose.randrange(32 * SIZE), choose.random() < 0.5

    def spoil(data, at):
        if not at <= wrong < at + len(data):
            return data
        place = wrong - at
        return None if cuts else data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]

    with between(source.service.address, spoil) as address:
        answered = target.fetch(range(30), address)
    assert answered.reason and answered.tokens == target.host.cached < 30
    for side in sides:
        side.check()
    assert target.fetch(range(30), source.service.address).tokens == 30 - answered.tokens
    for side in sides:
        side.check()


def test_a_reader_that_leaves_or_asks_nonsense_holds_nothing(sides):
    source, _ = sides
    for payload, kind in ((b"x" * 33, Kind.FETCH), (b"", Kind.CHUNK), (digest(3), Kind.FETCH)):
        peer = ChunkPeer.connect(source.service.address, TERMS)
        peer.send(kind, payload)
        peer.close()
    with pytest.raises((PeerError, OSError)):
        ChunkPeer.connect(source.service.address, TERMS._replace(secret=b"none"))
    source.check()


def test_readers_beyond_the_limit_are_turned_away_and_come_in_once_one_has_left(sides, monkeypatch):
    source, _ = sides
    monkeypatch.setattr(chunk_service, "MAX_CONNECTIONS", 2)
    first, second = (ChunkPeer.connect(source.service.address, TERMS) for _ in range(2))
    with pytest.raises(OSError):
        ChunkPeer.connect(source.service.address, TERMS)
    first.close()
    deadline = time.monotonic() + 200
    while True:
        try:
            ChunkPeer.connect(source.service.address, TERMS).close()
            break
        except OSError:
            assert time.monotonic() < deadline
    second.close()


def test_a_service_that_closes_ends_the_moves_from_and_to_it(sides):
    source, target = sides
    stalled = threading.Event()

    def spoil(data, at):
        if at > 10 * SIZE:
            stalled.set()
            time.sleep(0.2)
        return data

    with between(source.service.address, spoil) as address:
        message = FetchChunks(0, [digest(each) for each in range(30)], list(range(30)), address, 1)
        target.do(lambda: target.service.fetch(message))
        assert stalled.wait(60)
        source.service.close()
        target.service.close()
    with pytest.raises(OSError):
        ChunkPeer.connect(source.service.address, TERMS)
    for side in sides:
        side.check()


def test_the_rate_is_that_of_the_first_batch_and_then_a_moving_average(sides, monkeypatch):
    here, there = sides
    seconds = iter([0.0, 1.0, 10.0, 12.0])
    monkeypatch.setattr(chunk_service, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr(chunk_service, "LEAST_TIMED", 3 * SIZE)
    there.fetch(range(5), here.service.address)
    assert there.service.stats()["chunk_rate"] == 5 * SIZE
    there.fetch(range(10, 14), here.service.address)
    assert there.service.stats()["chunk_rate"] == pytest.approx(5 * SIZE + 0.3 * (2 * SIZE - 5 * SIZE))
    assert there.service.stats()["chunk_bytes_in"] == here.service.stats()["chunk_bytes_out"] == 9 * SIZE


def test_a_small_batch_says_nothing_of_the_rate(sides, monkeypatch):
    here, there = sides
    monkeypatch.setattr(chunk_service, "LEAST_TIMED", 3 * SIZE)
    there.fetch(range(2), here.service.address)
    assert there.service.stats()["chunk_rate"] == 0.0 and there.service.stats()["chunk_bytes_in"] == 2 * SIZE


@pytest.mark.parametrize("said", [b"", b"\1\1\1"])
def test_a_source_that_answers_for_more_or_fewer_blocks_than_it_was_asked_for_is_given_up_by_name(sides, said):
    _, target = sides
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with ChunkPeer.accept(connection, TERMS) as peer:
                peer.receive(most=1 << 20)
                with suppress(OSError):
                    peer.send(Kind.HELD, said)

        source = threading.Thread(target=answer)
        source.start()
        told = target.fetch([100, 101], f"127.0.0.1:{listener.getsockname()[1]}")
        source.join()
    assert told.tokens == 0 and target.service.stats()["chunk_failures"] == 1
    assert "zip" not in told.reason and told.reason
    target.check()
