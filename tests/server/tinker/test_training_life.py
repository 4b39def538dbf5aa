"""A model's life: created, released while its client is away, continued after a killed server, given up, unloaded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tinker_server import refusal, training_client, training_server

from holdfast.engine.client.tuning import read_call, write_call
from holdfast.server.jobs.values import Attempt
from holdfast.server.tinker import checkpoints, runner, sessions, training
from holdfast.server.tinker.order import AGAIN, split
from holdfast.server.tinker.requests import CreateModel, LoadWeights, LoraConfig, SaveForSampler, SaveWeights


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "IDLE_SECONDS", 0.02)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.01)


async def test_a_model_is_opened_with_the_clients_rank_seed_and_modules(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model("a", rank=8, seed=7, train_mlp=False)
        (opened,) = server.driver.opened
        assert (opened.tenant, opened.rank, opened.seed, opened.alpha) == ("a", 8, 7, 32.0)
        assert (opened.attention, opened.mlp, opened.modules) == (True, False, ())
        assert opened.directory == str(server.directory / model.replace(":", "-"))
        assert (await server.training.model("a", model)).modules == ["q", "k"]


async def test_creating_a_model_twice_gives_one_model_and_another_content_is_refused(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        session = (await server.session()).id
        wanted = CreateModel(
            session_id=session, model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=4, seed=1)
        )
        made = [await server.training.create(wanted, "") for _ in range(3)]
        assert len({each.id for each in made}) == 1
        other = CreateModel(session_id=session, model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=5))
        assert await refusal(server.training.create(other, "")) == (400, "seq_id_reused")
        await server.ended(made[0])
        assert len(server.driver.opened) == 1


async def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        session = (await server.session()).id
        assert await refusal(server.model(rank=65, session=session)) == (400, "invalid_value")
        assert await refusal(server.model(session=session, train_attn=False, train_mlp=False)) == (400, "invalid_value")
        assert await refusal(server.model("b", session=session)) == (404, "session_not_found")
        await server.training.finish_session("", session, "success")
        assert await refusal(server.model(session=session)) == (410, "session_finished")


async def test_a_model_that_the_engine_refuses_fails_with_the_reason(tmp_path: Path) -> None:
    client = training_client()
    client.tuner.refuse = "too little memory is lent to tuning"
    async with training_server(tmp_path, client) as server:
        session = (await server.session()).id
        wanted = CreateModel(session_id=session, model_seq_id=0, base_model="tiny", lora_config=LoraConfig(rank=4))
        ended = await server.ended(await server.training.create(wanted, ""))
        assert (ended.state, ended.error) == ("failed", "too little memory is lent to tuning")
        assert await refusal(server.forward(ended.item, 1)) == (400, "model_ended")
        await server.until_ended(ended.item)
        assert not [*server.directory.glob("*")]


async def test_a_killed_server_continues_its_models_and_every_call_is_applied_once(tmp_path: Path) -> None:
    model, made = "", []
    async with training_server(tmp_path) as server:
        model = await server.model()
        await server.ended(await server.forward(model, 1))
        made.append(await server.ended(await server.update(model, 2)))
        first = await server.training.result(made[0])
        made.append(await server.ended(await server.forward(model, 3)))
        server.driver.hold.clear()
        made += [await server.update(model, 4), await server.forward(model, 6)]
        await server.kill()
    async with training_server(tmp_path) as server:
        made.append(await server.forward(model, 5))
        ended = [await server.ended(each) for each in made]
        assert [each.call for each in ended] == [1, 2, 3, 5, 4]
        job = server.job(model)
        assert (job.updates, job.value) == (2, 0.5 * 3 + 0.5 * 3)
        assert await server.training.result(ended[0]) == first
        assert (await server.update(model, 4)).id == made[2].id


async def test_a_call_whose_file_was_written_and_not_stored_is_not_carried_out(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        await server.ended(await server.forward(model, 1))
        directory = server.directory / model.replace(":", "-")
        server.driver.hold.clear()
        waiting = await server.forward(model, 2)
        await server.kill()
    call, data = read_call(directory, 0, AGAIN)
    write_call(directory, replace(call, number=2), split(data))
    async with training_server(tmp_path) as server:
        assert (await server.ended(waiting)).call == 1
        assert (await server.ended(await server.update(model, 3))).call == 2
        assert server.job(model).value == 0.5 * (3 + 3)


async def test_a_model_whose_calls_ended_the_engine_twice_is_given_up(tmp_path: Path) -> None:
    model, ended = "", None
    for life in range(2):
        client = training_client()
        client.tuner.dies_at = 1  # type: ignore[attr-defined]
        async with training_server(tmp_path, client) as server:
            if not life:
                model = await server.model()
                await server.forward(model, 1)
                ended = await server.forward(model, 2)
            await client.dead.wait()
    async with training_server(tmp_path) as server:
        assert ended is not None
        ended = await server.ended(ended)
        assert (ended.state, ended.category) == ("failed", "server") and "the engine ended 2 times" in ended.error
        assert not server.driver.opened
        assert await refusal(server.forward(model, 3)) == (400, "model_ended")
        assert (await server.ended(await server.forward(await server.model(), 1))).state == "done"


async def test_servers_that_were_killed_while_a_model_was_idle_do_not_count(tmp_path: Path) -> None:
    model = ""
    for life in range(5):
        async with training_server(tmp_path) as server:
            model = model or await server.model()
            assert (await server.ended(await server.forward(model, life + 1))).state == "done"
            assert server.attempt(model) in (None, Attempt())
            await server.kill()


async def test_the_engine_frees_a_model_whose_client_is_away_and_a_later_call_brings_it_back(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        await server.ended(await server.forward(model, 1))
        server.now += sessions.AWAY_SECONDS - 10
        await server.training.sessions.beat("", model.partition(":")[0])
        server.now += sessions.AWAY_SECONDS - 10
        await server.update(model, 2)
        assert model.replace(":", "-") in server.driver.jobs, "a heartbeat keeps it"
        server.now += sessions.AWAY_SECONDS
        await server.until_released(model)
        assert (await server.ended(await server.forward(model, 3))).state == "done"
        assert server.job(model).value == 1.5 and len(server.driver.opened) == 2


async def test_a_day_after_the_last_heartbeat_a_model_is_unloaded_and_its_checkpoints_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CLEAN_SECONDS", 0.0)
    async with training_server(tmp_path) as server:
        model = await server.model()
        await server.ended(await server.training.save(SaveWeights(model_id=model, seq_id=1, path="kept"), ""))
        server.now += training.STATE_SECONDS + 1
        await server.until_ended(model)
        found = await server.checkpoints.find("", f"tinker://{model}/weights/kept")
        directory = server.directory / model.replace(":", "-")
        assert [path.name for path in directory.iterdir()] == ["checkpoints"] and Path(found.directory).is_dir()


async def test_unloading_ends_a_model_its_waiting_requests_and_its_files(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model("a")
        server.driver.hold.clear()
        waiting = await server.forward(model, 1, "a")
        assert await refusal(server.training.unload("b", model)) == (404, "model_not_found")
        unloaded = await server.training.unload("a", model)
        ended = [await server.ended(each) for each in (waiting, unloaded)]
        assert [each.state for each in ended] == ["failed", "done"]
        body, media = await server.training.result(ended[1])
        assert (json.loads(body), media) == ({"model_id": model, "type": "unload_model"}, "application/json")
        assert await refusal(server.forward(model, 2, "a")) == (400, "model_ended")
        await server.until_ended(model)
        assert not [*server.directory.glob("*")]


async def test_a_checkpoint_is_loaded_with_or_without_moments_into_a_new_model(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model(rank=8)
        await server.forward(model, 1)
        await server.update(model, 2)
        saved = await server.ended(await server.training.save(SaveWeights(model_id=model, seq_id=3, path="a"), ""))
        path = json.loads((await server.training.result(saved))[0])["path"]
        session = model.partition(":")[0]
        for number, (optimizer, updates) in enumerate(((True, 1), (False, 0)), 1):
            wanted = LoadWeights(path=path, optimizer=optimizer, session_id=session, model_seq_id=number)
            loaded = await server.ended(await server.training.load(wanted, ""))
            assert loaded.state == "done" and loaded.item == f"{session}:train:{number}"
            job = server.job(loaded.item)
            assert (job.value, job.updates, job.order.rank) == (1.5, updates, 8)
            assert (await server.training.load(wanted, "")).id == loaded.id
            assert (await server.ended(await server.forward(loaded.item, 1))).call == 1


async def test_a_checkpoint_is_of_its_tenant_alone_until_it_is_public(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model("a")
        await server.ended(await server.training.save(SaveWeights(model_id=model, seq_id=1, path="s"), "a"))
        path = f"tinker://{model}/weights/s"
        session = (await server.session("b")).id
        wanted = LoadWeights(path=path, optimizer=True, session_id=session, model_seq_id=0)
        assert await refusal(server.training.load(wanted, "b")) == (404, "checkpoint_not_found")
        assert await refusal(server.checkpoints.own("b", model, "weights", "s")) == (404, "checkpoint_not_found")
        await server.checkpoints.publish(await server.checkpoints.own("a", model, "weights", "s"), True)
        assert (await server.ended(await server.training.load(wanted, "b"))).state == "done"
        assert await refusal(server.checkpoints.own("b", model, "weights", "s")) == (404, "checkpoint_not_found")


async def test_a_name_is_used_once_unless_the_client_overwrites_it(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        save = server.training.save
        first = await server.ended(await save(SaveWeights(model_id=model, seq_id=1, path="s"), ""))
        place = (await server.checkpoints.find("", f"tinker://{model}/weights/s")).directory
        again = await server.ended(await save(SaveWeights(model_id=model, seq_id=2, path="s"), ""))
        assert (first.state, again.state) == ("done", "failed") and "'s' already" in again.error
        over = await server.ended(await save(SaveWeights(model_id=model, seq_id=3, path="s", overwrite=True), ""))
        assert over.state == "done"
        while Path(place).exists():
            await asyncio.sleep(0.01)
        assert (await server.checkpoints.page(""))[1] == 1
        for seq, name in ((4, "../x"), (5, ""), (6, "a/b")):
            failed = await server.ended(await save(SaveWeights(model_id=model, seq_id=seq, path=name), ""))
            assert failed.state == "failed" and "a name must begin" in failed.error


async def test_weights_for_a_sampling_session_open_it_and_are_not_listed(tmp_path: Path) -> None:
    async with training_server(tmp_path) as server:
        model = await server.model()
        wanted = SaveForSampler(model_id=model, seq_id=1, sampling_session_seq_id=5)
        saved = await server.ended(await server.training.save_for_sampler(wanted, ""))
        id = f"{model.partition(':')[0]}:sample:5"
        assert json.loads((await server.training.result(saved))[0])["sampling_session_id"] == id
        checkpoint = server.samplers.opened[id]
        assert (Path(checkpoint.directory) / "adapter_config.json").exists()
        assert (await server.checkpoints.page("")) == ([], 0)
        await server.checkpoints.drop(checkpoint)
        assert not Path(checkpoint.directory).exists()


async def test_checkpoints_and_results_are_deleted_when_their_time_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "CLEAN_SECONDS", 0.0)
    monkeypatch.setattr(checkpoints, "TTL_SECONDS", (1, 10**9))
    async with training_server(tmp_path) as server:
        model = await server.model()
        done = await server.ended(await server.forward(model, 1))
        await server.ended(
            await server.training.save(SaveWeights(model_id=model, seq_id=2, path="s", ttl_seconds=5), "")
        )
        found = await server.checkpoints.find("", f"tinker://{model}/weights/s")
        result = server.directory / model.replace(":", "-") / "results" / "00000000.bin"
        assert result.exists()
        server.now += training.RESULT_SECONDS - 100
        await server.sessions.beat("", model.partition(":")[0])
        while Path(found.directory).exists():
            await server.ended(done)
        assert await refusal(server.checkpoints.find("", found.path)) == (404, "checkpoint_not_found")
        server.now += 200
        while result.exists():
            assert await server.sessions.find("", model.partition(":")[0])
        assert await refusal(server.futures.get("", done.id)) == (410, "future_expired")
        assert (await server.ended(await server.update(model, 3))).state == "done"
