"""The link between GPUs, over memory of the host in place of a device's: what arrives, in which order, in pieces."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.execution import peer_link
from holdfast.lm.execution.peer_link import PeerLink

WIDTH, MAX_TOKENS = 16, 8
SPEC: Any = SimpleNamespace(stream_width=WIDTH, dtype=torch.bfloat16)


class FakeStream:
    """A stream whose work is done at once."""

    def wait_stream(self, other: object) -> None:
        pass


def wait(address: int, number: int, stream: object) -> None:
    deadline = time.monotonic() + 200
    while ctypes.c_uint32.from_address(address).value < number:
        assert time.monotonic() < deadline, f"the counter never reaches {number}"
        time.sleep(0.0001)


def signal(address: int, number: int, stream: object) -> None:
    ctypes.c_uint32.from_address(address).value = number


def copy(to: int, source: int, num_bytes: int, stream: object) -> None:
    ctypes.memmove(to, source, num_bytes)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PeerLink]]:
    """The links of three stages."""
    for each in (wait, signal, copy):
        monkeypatch.setattr(peer_link, each.__name__, each)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream())
    size = PeerLink.num_bytes(SPEC, MAX_TOKENS, 4, back=True)
    memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(3)]
    addresses = [each.data_ptr() for each in memory]
    device = torch.device("cpu")
    ranks: list[Any] = [
        SimpleNamespace(rank=rank, device=device, address=addresses[rank], open=lambda: addresses) for rank in range(3)
    ]
    yield [PeerLink(rank, Layout(pp=3), SPEC, MAX_TOKENS, 4, back=True) for rank in ranks]
    del memory  # the links know its addresses alone


def test_streams_tensors_of_any_size_and_tokens_pass_both_ways_in_order(links: list[PeerLink]) -> None:
    def stage(number: int) -> list[Any]:
        link, found = links[number], list[Any]()
        for step in range(1, 12):
            stream = torch.full((step, WIDTH), float(step), dtype=torch.bfloat16)  # from 9 rows on in two pieces
            if number:
                stream.zero_()
                link.receive(stream)
                assert (stream == step).all()
            if number < 2:
                link.send(stream)
                stream.fill_(-1.0)  # it belongs to the sender again
            back = torch.arange(100.0 * step)  # float32: more than a slot from the second on
            if number < 2:
                link.receive_back(back)
            if number:
                link.send_back(back + 1)
            found.append(back)
            if number == 2:
                link.send_tokens(torch.tensor([step, step + 1]))
            elif not number:
                found[-1] = (found[-1], link.receive_tokens(2).tolist())
        return found

    with ThreadPoolExecutor(3) as pool:
        first, _, _ = pool.map(stage, range(3))
    for step, (back, tokens) in enumerate(first, start=1):
        assert torch.equal(back, torch.arange(100.0 * step) + 2)
        assert tokens == [step, step + 1]


def test_memory_for_tensors_that_go_back_is_taken_only_where_they_do() -> None:
    with_it, without = (PeerLink.num_bytes(SPEC, MAX_TOKENS, 4, back=back) for back in (True, False))
    assert with_it - without == 2 * MAX_TOKENS * WIDTH * 2
