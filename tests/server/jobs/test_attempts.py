"""Batch lines that kill the engine are given up after the second death, and no other line with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from batch_lines import line
from batch_server import Server, server
from fake_engine import FakeClient, engine_info

from holdfast.server.jobs import attempt_table
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable, Found
from holdfast.server.jobs.lines import check
from holdfast.server.jobs.tables import BatchTable
from holdfast.server.jobs.values import AnsweredLine, Attempt, Batch

POISON = "a schema that overflows the stack"


class Stuck(FakeClient):
    """An engine whose requests wait for `hold` before their first word."""

    async def _alive(self, number: int) -> None:
        await super()._alive(1)


def poisoned(**fields: Any) -> FakeClient:
    return FakeClient(info=engine_info(max_sequences=4, max_waiting=16), poison=POISON, **fields)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def live(directory: Path, client: FakeClient, id: str, **config: Any) -> Batch | None:
    """Run a server until its batch or its engine has ended. Returns the batch in the first case."""
    async with server(directory, client, **config) as here:
        ended, died = asyncio.create_task(here.ended(id)), asyncio.create_task(client.dead.wait())
        await asyncio.wait({ended, died}, return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, died):
            task.cancel()
        return None if client.dead.is_set() else ended.result()


async def errors(directory: Path, batch: Batch) -> list[dict[str, Any]]:
    async with server(directory) as here:
        return here.read(batch.error_file)


def prompts(client: FakeClient) -> list[str]:
    return ["".join(map(chr, asked.prompt)).removeprefix("<user>") for asked in client.asked]


def attempts(here: Server, id: str) -> Found:
    return AttemptTable(here.store._store.database).found(id)


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_line_that_kills_its_engine_twice_is_answered_with_an_error_and_the_others_are_answered(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    config = {} if database == "sqlite" else {"store": request.getfixturevalue("postgresql_schema")}
    given = [line(f"r{n}", f"say {n}", max_tokens=2) for n in range(20)]
    given.insert(9, line("bad", POISON))
    first = poisoned()
    async with server(tmp_path, first, **config) as here:
        id = await here.submit(given)
        await first.dead.wait()
    lives = [poisoned() for _ in range(3)]
    ended = [await live(tmp_path, client, id, **config) for client in lives[:2]]
    assert lives[0].dead.is_set() and ended[0] is None, "the second life has one more try"
    batch = ended[1]
    assert batch is not None and (batch.status, batch.completed, batch.failed) == ("completed", 20, 1)
    assert not any(POISON in prompt for prompt in prompts(lives[1]))
    (failed,) = await errors(tmp_path, batch)
    assert failed["custom_id"] == "bad" and failed["response"]["status_code"] == 500
    error = failed["response"]["body"]["error"]
    assert error["code"] == "engine_ended" and "ended 2 times while it had this line" in error["message"]


async def test_suspects_run_first_and_alone_so_that_a_second_death_has_one_suspect(tmp_path: Path) -> None:
    async with server(tmp_path, Stuck(hold=asyncio.Event())) as here:
        id = await here.submit([line(f"r{n}", f"say {n}", max_tokens=1) for n in range(1, 13)])
        await until(lambda: here.client.asked)
    late = Server(tmp_path, FakeClient(info=engine_info(model="other")))
    table = AttemptTable(late.store._store.database)
    table.begin([(id, 9), (id, 11)])
    table.end({id: [9, 11]}, {})
    await late.close()
    client = Stuck(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        running = here.batches.runner.running[id]
        for number in (9, 11):
            hold = client.hold
            assert hold is not None
            await until(lambda number=number: f"say {number}" in prompts(client)[-1:])
            for _ in range(20):  # Other lines could begin meanwhile.
                await asyncio.sleep(0.001)
                assert [*running.in_flight] == [number]
            client.hold = asyncio.Event() if number == 9 else None
            hold.set()
        assert (await here.ended(id)).completed == 12
        assert len(client.asked) == 12


async def test_only_lines_that_the_engine_had_are_suspects(tmp_path: Path) -> None:
    client = Stuck(info=engine_info(max_sequences=4, max_waiting=16), hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = await here.submit([line(f"r{n}", f"say {n}") for n in range(12)])
        running = here.batches.runner.running[id]
        await until(lambda: len(client.asked) == 4 and len(running.in_flight) > 4)
        client.die("killed")
    async with server(tmp_path, FakeClient(hold=asyncio.Event())) as here:
        assert attempts(here, id) == dict.fromkeys(range(1, 5), Attempt(died=1))


async def test_lines_of_a_server_that_stops_normally_are_not_suspects(tmp_path: Path) -> None:
    for _ in range(4):
        client = poisoned(hold=asyncio.Event())
        async with server(tmp_path, client) as here:
            if not here.batches.runner.running:
                id = await here.submit([line(f"r{n}") for n in range(3)])
            await until(lambda client=client: len(client.asked) == 3)
    async with server(tmp_path, poisoned()) as here:
        assert (await here.ended(id)).completed == 3


async def test_a_line_survives_two_kills_of_the_whole_server_and_is_given_up_at_the_third(tmp_path: Path) -> None:
    found: list[Found] = []
    for life in range(3):
        client = poisoned(hold=asyncio.Event())
        async with server(tmp_path, client) as here:
            if life == 0:
                id = await here.submit([line("a"), line("b")])
            # A single kill is no suspicion. After the second one, the lines run one at a time.
            await until(lambda client=client, count=2 if life < 2 else 1: len(client.asked) == count)
            await here.kill()
        late = Server(tmp_path, FakeClient(info=engine_info(model="other")))
        found.append(attempts(late, id))
        await late.close()
    assert found == [{}, dict.fromkeys((1, 2), Attempt(cut=1)), dict.fromkeys((1, 2), Attempt(cut=2))]
    async with server(tmp_path, poisoned()) as here:
        batch = await here.ended(id)
        assert (batch.completed, batch.failed) == (1, 1)
        (failed,) = here.read(batch.error_file)
        assert failed["custom_id"] == "a" and "3 times" in failed["response"]["body"]["error"]["message"]


async def test_a_start_is_stored_before_the_engine_gets_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.jobs.files.RETRY_SECONDS", (0.01, 0.02))
    client, failures = poisoned(), 0
    begin = AttemptTable.begin

    def full(table: AttemptTable, work: Any) -> None:
        nonlocal failures
        assert not client.asked
        failures += 1
        if failures < 4:
            raise sqlalchemy.exc.OperationalError("INSERT", {}, Exception("database or disk is full"))
        begin(table, work)

    monkeypatch.setattr(AttemptTable, "begin", full)
    async with server(tmp_path, client) as here:
        assert (await here.ended(await here.submit([line("a")]))).completed == 1
    assert failures >= 4


async def test_attempts_are_forgotten_with_the_answer_and_with_the_batch(tmp_path: Path) -> None:
    client = poisoned(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = await here.submit([line("a")])
        await until(lambda: client.asked)
        client.die("killed")
    async with server(tmp_path, poisoned(hold=asyncio.Event())) as here:
        await until(lambda: here.client.asked)
        assert attempts(here, id) == {1: Attempt(died=1)}
        await here.batches.cancel("", id)
        assert (await here.ended(id)).status == "cancelled"
        assert attempts(here, id) == {}
        here.client.hold = None
        await here.submit([line("b"), line("c")])
        await until(lambda: len(here.client.asked) == 3 and not here.batches.runner.running)
        with here.store._store.database.read() as db:
            assert db.execute(sqlalchemy.select(attempt_table.attempts)).all() == []


async def test_a_line_that_ends_several_replicas_is_not_tried_again(tmp_path: Path) -> None:
    from holdfast.cluster.replicas import ReplicaLost

    client = FakeClient(refuse=ReplicaLost("2 replicas ended while they had this request"))
    async with server(tmp_path, client) as here:
        batch = await here.ended(await here.submit([line("a")]))
        (failed,) = here.read(batch.error_file)
        assert failed["response"]["body"]["error"]["code"] == "replica_lost"


async def test_a_batch_whose_check_ends_several_servers_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = asyncio.Event()

    def kills(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(reading.set)
        raise ConnectionAbortedError("the process was killed")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr("holdfast.server.jobs.batch_runner.check", kills)
    for life in range(3):
        async with server(tmp_path) as here:
            if life == 0:
                id = await here.submit([line("a")])
            await asyncio.wait_for(reading.wait(), 60)
            reading.clear()
            await here.kill()
    monkeypatch.setattr("holdfast.server.jobs.batch_runner.check", check)
    async with server(tmp_path) as here:
        batch = await here.ended(id)
        assert batch.status == "failed" and batch.faults[0].code == "engine_ended"
        assert "3 times while it had this batch" in batch.faults[0].message
        assert attempts(here, id).get(WHOLE) is None


async def test_waiting_for_suspects_ends_with_the_last_of_them_and_with_the_server(tmp_path: Path) -> None:
    client = poisoned(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        id = await here.submit([line("a"), line("b")])
        await until(lambda: len(client.asked) == 2)
        client.die("killed")
    second = poisoned(hold=asyncio.Event())
    async with server(tmp_path, second) as here:
        cleared = asyncio.create_task(here.batches.cleared())
        await until(lambda: len(second.asked) == 1)
        assert not cleared.done()
        assert second.hold is not None
        second.hold.set()
        await cleared
        await here.ended(id)


async def test_a_start_waits_for_a_look_at_earlier_batches_that_has_begun(tmp_path: Path) -> None:
    async with server(tmp_path, poisoned(hold=asyncio.Event())) as here:
        await here.submit([line("a")])
        await until(lambda: here.client.asked)
        await here.kill()
    late = Server(tmp_path, poisoned(hold=asyncio.Event()))
    run, taken, goes_on = late.store.run, asyncio.Event(), asyncio.Event()

    async def run_late(work: Any, *given: Any) -> Any:
        found = await run(work, *given)
        taken.set()
        await goes_on.wait()
        return found

    late.batches._store.run = run_late  # type: ignore[method-assign]
    looking = asyncio.create_task(late.batches._adopt())
    await taken.wait()
    starting = asyncio.create_task(late.batches.start())
    await asyncio.sleep(0.1)
    assert not starting.done()
    goes_on.set()
    await starting
    assert late.batches.runner.running
    await looking
    await late.close()


def test_an_attempt_is_suspected_or_given_up_by_its_counts() -> None:
    def said(died: int, cut: int) -> tuple[bool, bool]:
        attempt = Attempt(died=died, cut=cut)
        return attempt.suspect, attempt.given_up

    assert [said(0, 0), said(0, 1), said(0, 2), said(0, 3)] == [
        (False, False), (False, False), (True, False), (True, True),
    ]  # fmt: skip
    assert [said(1, 0), said(1, 1), said(1, 2), said(2, 0)] == [
        (True, False), (True, False), (True, True), (True, True),
    ]  # fmt: skip
    assert "the engine ended 2 times" in Attempt(died=2).reason("line")
    assert "the engine or the server ended 3 times" in Attempt(died=1, cut=2).reason("line")


def test_attempts_at_many_lines_are_counted_in_parts(tmp_path: Path) -> None:
    from holdfast.server.config import ServerConfig
    from holdfast.server.run import open_store

    store = open_store(ServerConfig(store=str(tmp_path / "store.sqlite")))
    table = AttemptTable(store.database)
    table.begin([("batch_a", number) for number in range(1, 1300)] + [("batch_b", 1)])
    table.begin([("batch_a", 5), ("batch_a", 1300)])
    table.end({"batch_a": range(2, 1300)}, {"batch_a": [1], "batch_b": [1]})
    assert table.found("batch_a") == dict.fromkeys(range(2, 1300), Attempt(died=1)) and not table.found("batch_b")
    table.end({"batch_a": range(1, 1301)}, {})  # Only the last of these still runs.
    assert table.found("batch_a")[5] == Attempt(died=1) == table.found("batch_a")[1300]
    table.clear("batch_a")
    assert not table.found("batch_a")
    store.close()


async def test_a_line_that_was_answered_is_no_suspect_whatever_its_attempts_say(tmp_path: Path) -> None:
    async with server(tmp_path, Stuck(hold=asyncio.Event())) as here:
        id = await here.submit([line(f"r{n}", f"say {n}", max_tokens=1) for n in range(1, 4)])
        await until(lambda: here.client.asked)
    late = Server(tmp_path, FakeClient(info=engine_info(model="other")))
    database = late.store._store.database
    BatchTable(database).answer(id, [AnsweredLine(batch=id, number=2, completed=True, text=b'{"custom_id": "r2"}')])
    table = AttemptTable(database)
    table.begin([(id, 2)])
    table.end({id: [2]}, {})
    await late.close()
    client = Stuck(hold=asyncio.Event())
    async with server(tmp_path, client) as here:
        await until(lambda: len(client.asked) == 2)
        await asyncio.wait_for(here.batches.cleared(), 60)
        assert here.batches.runner.running[id].suspects == set()
        assert client.hold is not None
        client.hold.set()
        assert (await here.ended(id)).completed == 3 and sorted(prompts(client)) == ["say 1", "say 3"]
