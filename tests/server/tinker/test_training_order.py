"""Requests of one model: each is carried out once, in the order of its number, whatever the order of arrival."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tinker_server import TrainingServer, refusal, training_client, training_server

from holdfast.server.tinker import futures, order, runner
from holdfast.server.tinker.values import Future


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.01)


async def numbers(server: TrainingServer, made: list[Future]) -> list[int | None]:
    return [(await server.ended(each)).call for each in made]


async def test_requests_in_any_order_become_calls_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        order = [*range(1, 21)]
        random.Random(3).shuffle(order)
        made = {seq: await server.forward(model, seq, data=[[seq]]) for seq in order}
        assert await numbers(server, [made[seq] for seq in sorted(made)]) == [*range(20)]
        assert server.driver.computed == [(model.replace(":", "-"), number) for number in range(20)]
        body, media = await server.training.result(await server.ended(made[7]))
        assert media == "application/x-protobuf" and len(body) > 20
        assert not [*server.directory.glob("*/held/*")]


async def test_a_request_that_is_sent_again_is_carried_out_once_and_keeps_its_id(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        first = await server.forward(model, 1)
        again = await asyncio.gather(*(server.forward(model, 1) for _ in range(5)))
        held = await server.update(model, 3)
        assert (await server.update(model, 3)).id == held.id
        assert {each.id for each in again} == {first.id}
        await server.forward(model, 2)
        await server.ended(held)
        assert (await server.update(model, 3)).id == held.id
        assert server.job(model).updates == 1 and len(server.driver.computed) == 3


async def test_a_number_is_refused_for_another_content_before_and_after_its_turn(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        await server.ended(await server.forward(model, 1))
        held = await server.forward(model, 3)
        for seq in (1, 3):
            assert await refusal(server.forward(model, seq, data=[[9]])) == (400, "seq_id_reused")
        await server.forward(model, 2)
        assert (await server.ended(held)).state == "done"
        assert [number for _, number in server.driver.computed] == [0, 1, 2]


async def test_a_request_that_cannot_be_carried_out_fails_in_its_turn_and_later_ones_go_on(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        late = await server.update(model, 4)
        wrong: list[tuple[int, dict[str, Any]]] = [(1, {"data": [[256]]}), (2, {"loss": "nothing"})]
        failed = [await server.forward(model, seq, **fields) for seq, fields in wrong]
        good = await server.forward(model, 3)
        ended = [await server.ended(each) for each in failed]
        assert [(each.state, each.category) for each in ended] == [("failed", "user")] * 2
        assert "256" in ended[0].error and "'nothing'" in ended[1].error
        assert [(await server.ended(each)).call for each in (good, late)] == [0, 1]
        assert server.job(model).updates == 1


async def test_requests_behind_one_that_never_arrives_fail_and_the_next_numbers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "GAP_SECONDS", 0.0)
    async with training_server(tmp_path) as server:
        model = await server.model()
        stuck = await server.ended(await server.forward(model, 2))
        assert (stuck.state, stuck.category) == ("failed", "user") and "seq_id 1 has not arrived" in stuck.error
        assert await refusal(server.forward(model, 1)) == (400, "seq_id_passed")
        assert (await server.ended(await server.forward(model, 3))).state == "done"
        assert not server.runner(model).order.held


async def test_a_call_that_the_engine_refuses_fails_alone(tmp_path: Path) -> None:
    client = training_client()
    client.tuner.refused_call = lambda call: "datum 0 does not fit '/secret/place'" if call.number == 1 else ""  # type: ignore[attr-defined]
    async with training_server(tmp_path, client) as server:
        model = await server.model()
        made = [await server.forward(model, seq) for seq in (1, 2, 3)]
        ended = [await server.ended(each) for each in made]
        assert [each.state for each in ended] == ["done", "failed", "done"]
        assert ended[1].error == "datum 0 does not fit a file"


async def test_a_model_takes_only_so_many_waiting_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MOST_PENDING", 2)
    async with training_server(tmp_path) as server:
        model = await server.model()
        server.driver.hold.clear()
        made = [await server.forward(model, seq) for seq in (1, 2)]
        assert await refusal(server.forward(model, 3)) == (429, "too_many_requests")
        assert (await server.forward(model, 2)).id == made[1].id, "one that waits may be sent again"
        server.driver.hold.set()
        for each in made:
            await server.ended(each)
        assert (await server.ended(await server.forward(model, 3))).call == 2


async def test_requests_that_another_server_accepts_are_carried_out_by_the_models_own(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server, training_server(tmp_path) as other:
        model = await server.model()
        first = await server.forward(model, 1)
        made = [await other.update(model, 3), await other.forward(model, 2)]
        assert [(await other.ended(each)).call for each in made] == [2, 1]
        assert (await other.forward(model, 1)).id == first.id
        assert server.job(model).updates == 1 and not other.driver.jobs
        body, _ = await other.training.result(await other.ended(made[1]))
        assert body
        await other.training.unload("", model)
        await server.until_released(model)


async def test_a_request_that_has_ended_keeps_its_first_result(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        made, _ = await server.futures.begin("a", "item", 1, "sample", "digest")
        await server.futures.finish(made.id, b"first", "text/plain")
        await server.futures.finish(made.id, b"second", "text/plain")
        await server.futures.fail(made.id, "too late", "server")
        assert (await server.futures.get("a", made.id)).state == "done"
        assert await server.futures.body("a", made.id) == b"first"
        assert await refusal(server.futures.get("b", made.id)) == (404, "future_not_found")
