"""Ranks that die, hang or fail: all others end with them, and callers learn which rank it was, and why."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.types import SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.engine.process.build import build_engine
from holdfast.engine.ranks.mailbox import Bell, Ticket
from holdfast.engine.ranks.messages import Done, PlanWriter, Prepare
from holdfast.engine.ranks.ranks import RankFailure, Seat, remove_stale_meetings
from holdfast.lm.config import EngineConfig
from holdfast.lm.types import BlockCopy, Segment, StepPlan, TableWrite, TierCopies
from tests.engine.conftest import SMALL, wait_for_end
from tests.scheduling import create_requests

ENDLESS = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)


def children_of(pid):
    """The processes that a process has started and that have not ended."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def nameless_memory_of(pid):
    """The sizes in bytes of the shared memory that a process maps, none of which may have a name that could stay."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    shared = [line.split(maxsplit=5) for line in lines if "/memfd:" in line or "/dev/shm" in line]
    assert all(name.startswith("/memfd:") and name.endswith("(deleted)") for *_, name in shared)
    bounds = [[int(bound, 16) for bound in line[0].split("-")] for line in shared]
    return [stop - start for start, stop in bounds]


@pytest.fixture
def engine(small):
    """An engine of two shards in this process, and its ranks."""
    engine = build_engine(small(tp=2, host_cache_gb=0.01))
    yield engine
    engine.loop.close()
    for pid in engine.ranks.pids:
        wait_for_end(pid)


async def until_dead(client, harm):
    """Let two streams begin, then do `harm`. Returns the error that ended them, and after how many seconds."""

    async def read(prompt):
        async with aclosing(client.stream(prompt, ENDLESS)) as deltas:
            await anext(deltas)
            begun.release()
            async for _ in deltas:
                pass

    begun = asyncio.Semaphore(0)
    reading = asyncio.gather(read((3, 4, 5)), read((6, 7)), return_exceptions=True)
    for _ in range(2):
        await asyncio.wait_for(begun.acquire(), 60)
    harmed = time.monotonic()
    harm()
    ended = await asyncio.wait_for(reading, 60)
    return ended, time.monotonic() - harmed


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not answered for 1 s: it is stopped")],
)
async def test_streams_end_with_the_rank_that_is_killed_or_hangs(checkpoint, number, said):
    client = await EngineClient.start(EngineConfig(**{**SMALL, "model": str(checkpoint), "tp": 2}))
    try:
        (rank,) = children_of(client.pid)
        ended, seconds = await until_dead(client, lambda: os.kill(rank, number))
        for error in ended:
            assert isinstance(error, EngineDead) and f"rank 1 (process {rank}) {said}" in str(error)
        assert seconds < 30
        with pytest.raises(EngineDead, match="rank 1"):
            await client.health()
        for pid in (rank, client.pid):
            wait_for_end(pid)
    finally:
        await client.close()


async def test_an_idle_engine_ends_with_its_rank_and_ranks_with_their_engine(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for victim in ("rank", "engine"):
        options = {**SMALL, "model": str(checkpoint), "pp": 2, "chunk_host": "127.0.0.1", "host_cache_gb": 0.004}
        client = await EngineClient.start(EngineConfig(**options))
        try:
            (rank,) = children_of(client.pid)
            for pid in (rank, client.pid):
                assert client.info.num_host_blocks * client.info.memory.block // 2 in nameless_memory_of(pid)
            os.kill(rank if victim == "rank" else client.pid, signal.SIGKILL)
            await asyncio.wait_for(client.dead.wait(), 60)
            assert (f"rank 1 (process {rank}) was killed" in client.reason) == (victim == "rank")
            for pid in (rank, client.pid):
                wait_for_end(pid)
            assert list(tmp_path.iterdir()) == []
        finally:
            await client.close()


def test_a_start_removes_the_directory_of_one_that_was_killed_an_hour_ago(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name, age in (("holdfast-ranks-old", 4000), ("holdfast-ranks-new", 10), ("another", 4000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ranks").touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    remove_stale_meetings()
    assert {path.name for path in tmp_path.iterdir()} == {"holdfast-ranks-new", "another"}


async def test_a_rank_that_cannot_start_is_named(checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    tensors = load_file(damaged / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, -1] = torch.nan  # the second shard has the last column
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineStartError, match=r"^rank 1: tensor model\.layers\.1\.mlp\.down_proj\.weight holds NaN"):
        await EngineClient.start(EngineConfig(**{**SMALL, "model": str(damaged), "tp": 2}))


def test_a_step_that_raises_on_one_rank_ends_the_wait_of_the_others(engine):
    (request,) = create_requests((3, 4, 5), temperature=0.0, max_tokens=4000)
    engine.loop.add(request)
    engine.loop.step()
    without_blocks = StepPlan(99, [Segment("x", 7, 0, 1, (1,), None)], (TableWrite(7, 0, (-1,)),))
    engine.ranks.send(PlanWriter().write(without_blocks))  # rank 0 does not run it
    with pytest.raises(RankFailure, match="rank 1: step 99: row 7 has no block for position 0"):
        for _ in range(1000):
            engine.loop.step()


def test_what_rank_0_raises_by_itself_is_not_blamed_on_another(engine):
    with pytest.raises(ValueError, match="it is rank 0's own"):
        engine.ranks.do(lambda: int("it is rank 0's own"))
    with pytest.raises(RankFailure, match=r"rank 0: .*own"):  # the others must not wait for it
        engine.ranks.check()


def test_rank_0_blames_the_rank_that_failed_before_it(engine):
    def cut_off():
        os.kill(engine.ranks.pids[0], signal.SIGKILL)
        raise ConnectionError("the other side has closed the connection")

    with pytest.raises(RankFailure, match=r"rank 1 .* was killed by SIGKILL"):
        engine.ranks.do(cut_off)


def test_what_ranks_say_of_steps_is_no_answer_to_a_command(engine):
    engine.ranks.send(PlanWriter().write(StepPlan(7, (), copies=TierCopies(swap_out=(BlockCopy(0, 0),)))))
    assert engine.ranks.together(Prepare(), lambda: "own") == ("own", [Done(False)])
    ((rank, said),) = engine.ranks.of_steps()
    assert rank == 1
    assert [(copy.step, copy.inward) for copy in said.copies] == [(7, False)]


def test_after_a_failure_nothing_can_be_asked_of_the_ranks(engine):
    os.kill(engine.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RankFailure, match="SIGKILL"):
        engine.ranks.do(lambda: time.sleep(30))
    for ask in (engine.ranks.check, lambda: engine.ranks.wait(1), lambda: engine.ranks.do(int)):
        with pytest.raises(RankFailure, match="SIGKILL"):
            ask()


def test_a_seat_goes_through_a_command_line():
    seat = Seat(2, Ticket(3, (Bell(4, 5), Bell(6, 7)), 1024), Ticket(8, (Bell(9, 10),), 512), 11, 12, 4)
    assert Seat.from_json(seat.to_json()) == seat
    assert seat.descriptors == [*range(3, 13)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 3}, "tp is 3; it must divide the model's 4 attention heads"),
        ({"pp": 3}, "pp is 3; the model has 2 layers"),
        ({"tp": 0}, "tp is 0; it must lie between 1 and 64"),
        ({"tp": 2, "executor": "padded"}, "tp is 2, and executor is padded: padded rows run on one device"),
        ({"pp": 2, "scheduler": "embedding"}, "pp is 2, and scheduler is embedding: padded rows run on one device"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_name(small, options, message):
    with pytest.raises(ValueError, match=message):
        build_engine(small(**options))
