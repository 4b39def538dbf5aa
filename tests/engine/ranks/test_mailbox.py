"""Mailboxes: every reader gets every message, in order, whatever its size and however slow others are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.ranks.mailbox import Bell, Mailbox

CAPACITY = 256


@pytest.fixture
def bells():
    made = tuple(Bell.new() for _ in range(3))
    yield made
    for bell in made:
        bell.close()


@pytest.fixture
def mailbox(bells):
    mailbox = Mailbox(bells, CAPACITY)
    yield mailbox
    mailbox.close()


class GaveUp(Exception):
    pass


def give_up():
    raise GaveUp


@given(st.lists(st.tuples(st.binary(max_size=60), st.sampled_from([(0,), (1,), (0, 1), ()])), max_size=60))
def test_every_reader_gets_every_message_in_order(messages):
    bells = tuple(Bell.new() for _ in range(2))
    mailbox = Mailbox(bells, CAPACITY)
    try:
        readers, got = [mailbox.reader(number) for number in range(2)], [[], []]

        def read(number):
            while (message := readers[number].poll()) is not None:
                got[number].append(message)

        for message, reading in messages:
            mailbox.send(message, lambda: (read(0), read(1)))  # it calls this where the ring is full
            for number in reading:
                read(number)
        read(0), read(1)
        assert got == [[message for message, _ in messages]] * 2
    finally:
        mailbox.close()
        for bell in bells:
            bell.close()


@pytest.mark.parametrize("size", [CAPACITY // 4, CAPACITY // 4 + 1, CAPACITY, 100_000])
def test_a_message_longer_than_the_ring_goes_in_pieces(mailbox, size):
    message = bytes(number % 251 for number in range(size))
    got = [None] * 3
    threads = [
        threading.Thread(target=lambda n=number: got.__setitem__(n, mailbox.reader(n).receive(30)))
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    mailbox.send(message)
    for thread in threads:
        thread.join()
    assert got == [message] * 3


def test_a_writer_waits_for_the_slowest_reader_and_may_give_up(mailbox):
    readers = [mailbox.reader(number) for number in range(3)]
    sent = 0
    with pytest.raises(GaveUp):
        while True:
            mailbox.send(b"x" * 50, give_up)
            sent += 1
    assert sent == 4, "58 bytes take 64"
    for reader in readers[:2]:
        assert [reader.poll() for _ in range(sent + 1)] == [b"x" * 50] * sent + [None]
    with pytest.raises(GaveUp):
        mailbox.send(b"x" * 50, give_up)
    assert readers[2].poll() == b"x" * 50
    mailbox.send(b"y", give_up)


def test_a_reader_waits_no_longer_than_it_is_told(mailbox):
    began = time.monotonic()
    assert mailbox.reader(1).receive(0.05) is None
    assert 0.05 <= time.monotonic() - began < 60


def test_a_message_wakes_its_reader(mailbox):
    reader = mailbox.reader(2)
    threading.Timer(0.05, mailbox.send, [b"up"]).start()
    began = time.monotonic()
    assert reader.receive(30) == b"up"
    assert time.monotonic() - began < 29


def test_one_bell_serves_several_mailboxes():
    bell = Bell.new()
    first, second = Mailbox((bell,), CAPACITY), Mailbox((bell,), CAPACITY)
    readers = first.reader(), second.reader()
    second.send(b"b")
    first.send(b"a")
    assert bell.sleep(0)
    assert [reader.poll() for reader in readers] == [b"a", b"b"]
    assert not bell.sleep(0), "it has rung, and nobody has rung since"
    for mailbox in (first, second):
        mailbox.close()
    bell.close()


CHILD = """\
import json, sys
from holdfast.engine.ranks.mailbox import Bell, Mailbox, Ticket
def open(ticket): return Mailbox.open(Ticket(ticket[0], tuple(Bell(*bell) for bell in ticket[1]), ticket[2]))
there, back = map(open, json.loads(sys.argv[1]))
reader = there.reader()
while (message := reader.receive(60)) != b"end":
    back.send(message[::-1])
"""


def test_a_child_process_reads_and_writes():
    bells = Bell.new(), Bell.new()
    there, back = (Mailbox((bell,), CAPACITY) for bell in bells)
    tickets = there.ticket, back.ticket
    descriptors = [descriptor for ticket in tickets for descriptor in ticket.descriptors]
    child = subprocess.Popen([sys.executable, "-c", CHILD, json.dumps(tickets)], pass_fds=descriptors)
    reader = back.reader()
    for size in (0, 1, 7, 8, 9, 200, 3000):
        message = bytes(number % 253 for number in range(size))
        there.send(message)
        assert reader.receive(60) == message[::-1]
    there.send(b"end")
    assert child.wait(60) == 0
    for mailbox in (there, back):
        mailbox.close()
    for bell in bells:
        bell.close()


def test_a_bell_of_a_process_that_has_ended_does_nothing():
    bell = Bell.new()
    os.close(bell.end)
    bell.ring()
    os.close(bell.button)


@pytest.mark.parametrize("capacity", [0, 64, 250, 1000])
def test_a_capacity_that_is_no_number_of_cache_lines_is_refused(bells, capacity):
    with pytest.raises(ValueError, match=f"capacity is {capacity} bytes"):
        Mailbox(bells, capacity)


def test_a_bell_that_nobody_rings_is_slept_on_for_as_many_seconds_as_were_asked_for():
    bell = Bell.new()
    began = time.monotonic()
    assert not bell.sleep(0.05)
    assert 0.049 < time.monotonic() - began < 60
    assert not bell.sleep(0) and not bell.sleep(-1.0)
    bell.close()
