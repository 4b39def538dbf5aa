"""/v1/fine_tuning/jobs over a fake engine: OpenAI's client end to end, wrong data, tenants, pauses, restarts."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from batch_lines import jsonl
from fake_engine import FakeClient, engine_info
from fake_tuning import STATE
from looked_after import looked_after

from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs import tuning, tuning_runner
from holdfast.server.jobs.attempt_table import WHOLE, AttemptTable
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.tuning import Tuning, TuningRequest
from holdfast.server.jobs.values import Attempt, TuningJob
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store
from holdfast.server.service import Service
from holdfast.training.data import Examples

Listening = Callable[..., Any]
ENDED = ("succeeded", "failed", "cancelled")


def chat(answer: str = "Ahoy!", **message: Any) -> dict[str, Any]:
    """Return a line of a training file."""
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer, **message}]}


def tuning_client(**changes: Any) -> FakeClient:
    return FakeClient(info=engine_info(adapter_slots=8, **changes), config=EngineConfig(tuning=True))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_runner, "COMMIT_SECONDS", 0.01)


@pytest.fixture
def client() -> FakeClient:
    return tuning_client()


class Server:
    """Tuning jobs over a fake engine, without HTTP. Its clock is `now`."""

    def __init__(self, directory: Path, client: FakeClient, **config: Any) -> None:
        self.client = client
        self.now = 1000.0
        places = {"store": str(directory / "store.sqlite"), "files": str(directory / "files")}
        settings = ServerConfig(**places | {"tuning_state": str(directory / "tuning")} | config)
        self.store = AsyncStore(open_store(settings))
        self.service = Service(client, settings)  # type: ignore[arg-type]
        self.files = Files(self.store, settings, self.time)
        self.owner = Owner(self.files.directory)
        self.lines_cleared = asyncio.Event()
        self.lines_cleared.set()
        cleared: Callable[[], Any] = self.lines_cleared.wait
        self.tuning = Tuning(self.service, self.files, self.owner, self.time, tick=0.01, lines_cleared=cleared)

    def time(self) -> float:
        self.now += 0.001
        return self.now

    async def submit(self, lines: list[Any], tenant: str = "", **wanted: Any) -> str:
        file = await self.files.copy(tenant, "fine-tune", "in.jsonl", io.BytesIO(jsonl(lines)))
        fields = {"model": "tiny", "training_file": file.id, **wanted}
        return (await self.tuning.create(TuningRequest(**fields), tenant)).id

    async def until(self, id: str, done: Callable[[TuningJob], bool], tenant: str = "") -> TuningJob:
        while not done(job := await self.tuning.retrieve(tenant, id)):
            await asyncio.sleep(0.01)
        return job

    async def ended(self, id: str, tenant: str = "") -> TuningJob:
        return await self.until(id, lambda job: job.ended and id not in self.tuning.runner.running, tenant)

    async def steps(self, id: str, tenant: str = "") -> list[int]:
        events, _ = await self.tuning.events(tenant, id, limit=1000, after=None)
        return [each["data"]["step"] for each in reversed(events) if each["data"]]

    def attempt(self, id: str) -> Attempt | None:
        return AttemptTable(self.store._store.database).found(id).get(WHOLE)

    async def kill(self) -> None:
        """End as if the process were killed: nothing more is stored, and its lock is free."""
        tasks = [running.task for running in self.tuning.runner.running.values()]
        self.tuning.runner.running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.close()

    async def close(self) -> None:
        await self.tuning.close()
        self.owner.close()
        self.files.close()
        await asyncio.to_thread(self.store.close)


@asynccontextmanager
async def server(directory: Path, client: FakeClient | None = None, **config: Any) -> AsyncIterator[Server]:
    made = Server(directory, client or tuning_client(), **config)
    try:
        await made.tuning.start()
        yield made
    finally:
        await made.close()


async def uploaded(api: openai.AsyncOpenAI, lines: list[Any]) -> str:
    return (await api.files.create(file=("in.jsonl", jsonl(lines)), purpose="fine-tune")).id


async def ended(api: openai.AsyncOpenAI, id: str) -> Any:
    while (job := await api.fine_tuning.jobs.retrieve(id)).status not in ENDED:
        await asyncio.sleep(0.02)
    return job


async def test_openais_client_tunes_a_model_and_uses_it(listening: Listening, client: FakeClient) -> None:
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        jobs = api.fine_tuning.jobs
        training, validation = await uploaded(api, [chat(str(n)) for n in range(10)]), await uploaded(api, [chat()])
        given = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5, "use_dora": True}
        job = await jobs.create(
            model="tiny",
            training_file=training,
            validation_file=validation,
            method={"type": "supervised", "supervised": {"hyperparameters": {**given, "lora_rank": 4}}},  # type: ignore[typeddict-unknown-key]
            suffix="pirate",
            seed=7,
            metadata={"kind": "test"},
        )
        assert (job.object, job.status, job.model, job.seed) == ("fine_tuning.job", "validating_files", "tiny", 7)
        assert job.fine_tuned_model is None and job.finished_at is None and job.result_files == []
        done = await ended(api, job.id)
        assert done.status == "succeeded" and done.error is None and done.metadata == {"kind": "test"}
        assert done.fine_tuned_model.startswith("ft:tiny:pirate:") and done.trained_tokens == 60
        assert done.method.supervised.hyperparameters.n_epochs == done.hyperparameters.n_epochs == 2
        assert done.method.supervised.hyperparameters.use_dora is True
        events = [event async for event in jobs.list_events(job.id, limit=4)]
        texts = [event.message for event in reversed(events)]
        assert texts[0] == f"Created fine-tuning job: {job.id}" and texts[-1] == "The job has successfully completed"
        metrics: list[Any] = [event.data for event in reversed(events) if event.type == "metrics"]
        assert [each["step"] for each in metrics] == [1, 2, 3, 4, 5, 6]
        assert metrics[2] == {
            "step": 3, "total_steps": 6, "train_loss": 1 / 3, "tokens": 10, "trained_tokens": 30, "valid_loss": 2 / 3,
        }  # fmt: skip
        checkpoints = [each async for each in jobs.checkpoints.list(job.id, limit=1)]
        assert [(each.step_number, each.metrics.train_loss) for each in checkpoints] == [(6, 1 / 6), (3, 1 / 3)]
        rows = (await api.files.content(done.result_files[0])).text.splitlines()
        assert rows[:4:3] == ["step,train_loss,valid_loss,tokens", f"3,{1 / 3},{2 / 3},10"] and len(rows) == 7
        models = [model.id async for model in api.models.list()]
        names = [done.fine_tuned_model, *(each.fine_tuned_model_checkpoint for each in checkpoints)]
        assert models[0] == "tiny" and sorted(models[1:]) == sorted(names)
        answer = await api.chat.completions.create(
            model=done.fine_tuned_model, messages=[{"role": "user", "content": "hi"}]
        )
        assert (
            answer.choices[0].message.content == "Ahoy, sailor!" and client.asked[-1].adapter == done.fine_tuned_model
        )
        assert [each.id async for each in jobs.list()] == [job.id]
        assert [each.id async for each in jobs.list(metadata={"kind": "other"})] == []
        async with httpx.AsyncClient() as plain:
            adapter = await plain.get(f"{server.url}/v1/fine_tuning/jobs/{job.id}/adapter/adapter_config.json")
            assert adapter.json() == {"step": 6}
        async with httpx.AsyncClient() as plain:
            series = [line for line in (await plain.get(f"{server.url}/metrics")).text.splitlines() if line[:1] != "#"]
            names = [line.rpartition(" ")[0] for line in series]
            assert f'holdfast_training_loss{{job="{job.id}"}}' in names and len(names) == len(set(names))
        assert (await api.models.delete(done.fine_tuned_model)).deleted
        assert [model.id async for model in api.models.list()] == ["tiny"] and list(client.adapters) == []
    (order,) = client.tuner.orders
    assert (order.learning_rate, order.rank, order.seed, order.dora) == (1e-4, 4, 7, True)


async def test_wrong_lines_are_reported_by_number_and_nothing_is_tuned(
    listening: Listening, client: FakeClient
) -> None:
    lines = [
        chat(),
        {"messages": []},
        {"messages": [{"role": "user", "content": "hi"}]},
        chat(weight=0),
        chat(weight=2),
        {"messages": [{"role": "pirate", "content": "hi"}]},
        chat("x" * 300),
        {"prompt": "a"},
        {"prompt": "a", "completion": "b", "extra": 1},
        chat("mutiny"),
        {"messages": [{"role": "user", "content": "hi", "weight": 1}, {"role": "assistant", "content": "x"}]},
    ]
    reasons = [
        (2, "messages must be a list of 1 to 4096 messages"),
        (3, "the last message's role is user; it must be the assistant's"),
        (4, "there is nothing to learn: each of the assistant's messages has weight 0"),
        (5, "messages[1].weight is 2; it must be 0 or 1"),
        (6, 'messages[0].role is "pirate"; supported: system, developer, user, assistant'),
        (7, "the example has 319 tokens; at most 200 are taken, which is the model's context; shorten it"),
        (8, "a line has messages, or prompt and completion; completion must be a text that is not empty"),
        (9, "unknown field: extra; a line has messages, or prompt and completion"),
        (10, "the chat template refuses this conversation: mutiny"),
        (11, "messages[0].weight is for the assistant's messages; leave it out"),
    ]
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        jobs = api.fine_tuning.jobs
        good = await uploaded(api, [chat()])
        raw = (await api.files.create(file=("x", b'{"messages": 1}\n\n{oops\n'), purpose="fine-tune")).id
        job = await ended(api, (await jobs.create(model="tiny", training_file=await uploaded(api, lines))).id)
        assert job.status == "failed" and job.finished_at is not None and job.fine_tuned_model is None
        assert (job.error.code, job.error.param) == ("invalid_training_file", "training_file")
        assert job.error.message == f"training file, line 2: {reasons[0][1]}; and 9 more, in the job's events"
        assert [(fault["line"], fault["message"]) for fault in job.error.data] == reasons
        events = [event async for event in jobs.list_events(job.id) if event.level == "error"]
        assert [event.message for event in reversed(events)] == [f"training file, line {n}: {x}" for n, x in reasons]
        other = await jobs.create(model="tiny", training_file=good, validation_file=raw)
        other = await ended(api, other.id)
        assert other.error.code == "invalid_validation_file"
        assert [fault["line"] for fault in other.error.data] == [1, 3]
        assert await api.files.delete(raw)
    assert client.tuner.orders == []


async def test_a_wrong_job_is_refused_by_name(listening: Listening) -> None:
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        good = await uploaded(api, [chat()])
        batch = (await api.files.create(file=("x", b"{}"), purpose="batch")).id

        def supervised(**given: Any) -> dict[str, Any]:
            return {"method": {"type": "supervised", "supervised": {"hyperparameters": given}}}

        for changes, param in (
            ({"training_file": batch}, "training_file"),
            ({"validation_file": batch}, "validation_file"),
            ({"method": {"type": "dpo"}}, "method.type"),
            ({"method": {"type": "magic"}}, "method.type"),
            ({"method": {"type": "supervised", "reinforcement": {}}}, "method.type"),
            ({"integrations": [{"type": "wandb", "wandb": {"project": "x"}}]}, "integrations"),
            ({"suffix": "a b"}, "suffix"),
            ({"suffix": "x" * 65}, "suffix"),
            ({"seed": -1}, "seed"),
            ({"metadata": {"x": "y" * 513}}, "metadata"),
            ({"hyperparameters": {"n_epochs": 0}}, "hyperparameters.n_epochs"),
            ({"hyperparameters": {"lora_rank": 4}}, "hyperparameters.lora_rank"),
            ({"hyperparameters": {"n_epochs": 1}, **supervised(n_epochs=1)}, "hyperparameters"),
            (supervised(n_epochs="many"), "method.supervised.hyperparameters.n_epochs"),
            (supervised(lora_rank=17), "method.supervised.hyperparameters.lora_rank"),
            (supervised(target_modules=["q_proj", "nose"]), "method.supervised.hyperparameters.target_modules"),
            (supervised(use_dora="maybe"), "method.supervised.hyperparameters.use_dora"),
            (supervised(learning_rate_multiplier=0), "method.supervised.hyperparameters.learning_rate_multiplier"),
        ):
            wanted: Any = {"model": "tiny", "training_file": good, **changes}
            with pytest.raises(openai.BadRequestError) as refused:
                await api.fine_tuning.jobs.create(**wanted)
            assert str(refused.value.param).startswith(param), refused.value
        for missing in ({"training_file": "file-x"}, {"model": "other"}):
            with pytest.raises(openai.NotFoundError):
                await api.fine_tuning.jobs.create(**{"model": "tiny", "training_file": good, **missing})  # type: ignore[arg-type]
        assert [job.id async for job in api.fine_tuning.jobs.list()] == []


async def test_a_server_without_tuning_says_how_to_turn_it_on(tmp_path: Path) -> None:
    async with server(tmp_path, FakeClient()) as here:
        with pytest.raises(ApiError, match="this server takes no tuning jobs; start it with --tuning") as off:
            await here.submit([chat()])
        assert off.value.status == 400
        assert await here.tuning.page("", limit=10, after=None, metadata={}) == ([], False)


async def test_a_job_pauses_resumes_and_counts_every_step_once(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        here.client.tuner.waits_at = 6
        id = await here.submit([chat(str(n)) for n in range(30)], hyperparameters=tuning.Parameters(n_epochs=10))
        await here.until(id, lambda job: job.step >= 2)
        assert (await here.tuning.ask("", id, "pause")).status == "paused"
        with pytest.raises(ApiError, match="the job is paused; only one that waits or runs can be paused"):
            await here.tuning.ask("", id, "pause")
        while "pause" not in [action for _, action in here.client.tuner.changes]:
            await asyncio.sleep(0.01)
        here.client.tuner.goes_on.set()
        count = len(here.client.tuner.steps)
        await looked_after(here.tuning)
        assert [action for _, action in here.client.tuner.changes] == ["pause"]
        assert len(here.client.tuner.steps) == count and (await here.tuning.retrieve("", id)).status == "paused"
        assert (await here.tuning.ask("", id, "resume")).status in ("queued", "running")
        with pytest.raises(ApiError, match="only a paused one can be resumed"):
            await here.tuning.ask("", id, "resume")
        job = await here.ended(id)
        assert job.status == "succeeded" and job.steps == 40
        assert await here.steps(id) == list(range(1, 41))
        with pytest.raises(
            ApiError, match="the job is succeeded; only one that has not ended can be cancelled"
        ) as late:
            await here.tuning.ask("", id, "cancel")
        assert late.value.status == 409


async def test_a_cancelled_job_keeps_its_checkpoints(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        here.client.tuner.waits_at = 15
        id = await here.submit([chat(str(n)) for n in range(16)], hyperparameters=tuning.Parameters(n_epochs=50))
        await here.until(id, lambda job: len(job.checkpoints) >= 5)
        assert (await here.tuning.ask("", id, "cancel")).status == "cancelled"
        job = await here.ended(id)
        assert job.status == "cancelled" and job.finished is not None and job.shown()["fine_tuned_model"] is None
        assert list(job.served) == sorted(here.client.adapters, key=lambda name: int(name.rpartition("-")[2]))
        assert len(job.served) == 3
        assert sorted(path.name for path in (tmp_path / "tuning" / id).iterdir()) == ["checkpoints"]
        with pytest.raises(ApiError, match="is not served here"):
            here.service.check_model(job.name, "")


async def test_a_checkpoint_cannot_be_deleted_without_its_model(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        wanted = {"hyperparameters": tuning.Parameters(n_epochs=3)}
        job = await here.ended(await here.submit([chat(str(n)) for n in range(4)], **wanted))
        first = next(iter(job.served))
        with pytest.raises(ApiError, match=f"delete {job.name}"):
            await here.tuning.delete_model("", first)
        assert {job.name, first} <= {*here.client.adapters}
        await here.tuning.delete_model("", job.name)
        assert here.client.adapters == {}


async def test_another_tenant_finds_neither_job_nor_file_nor_model(tmp_path: Path) -> None:
    async with server(tmp_path, api_key=("one", "two")) as here:
        id = await here.submit([chat()], "one")
        job = await here.ended(id, "one")
        assert job.status == "succeeded"
        calls: list[Any] = [
            here.tuning.retrieve("two", id),
            here.tuning.events("two", id, limit=1, after=None),
            here.tuning.checkpoints("two", id, limit=1, after=None),
            here.tuning.adapter_file("two", id, "adapter_config.json"),
            here.tuning.delete_model("two", job.name),
            *(here.tuning.ask("two", id, verb) for verb in ("pause", "resume", "cancel")),
            here.tuning.create(TuningRequest(model="tiny", training_file=job.training_file), "two"),
        ]
        for call in calls:
            with pytest.raises(ApiError) as hidden:
                await call
            assert hidden.value.status == 404
        assert await here.tuning.page("two", limit=10, after=None, metadata={}) == ([], False)
        assert here.service.models("two") == ["tiny"]
        assert job.name in here.service.models("one")
        for name in job.served:
            here.service.check_model(name, "one")
            with pytest.raises(ApiError, match="is not served here") as unknown:
                here.service.check_model(name, "two")
            assert unknown.value.status == 404


async def test_a_name_of_a_tuned_model_cannot_be_loaded_over_or_unloaded(listening: Listening, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    keys = {"adapter_root": str(tmp_path), "api_key": ("one", "two")}
    async with listening(**keys) as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="one") as api:
        job = await ended(
            api,
            (await api.fine_tuning.jobs.create(model="tiny", training_file=await uploaded(api, [chat()]))).id,
        )
        for key, path, body, status in (
            ("two", "load", {"lora_path": "other", "load_inplace": True}, 400),
            ("two", "unload", {}, 404),
            ("one", "unload", {}, 400),
        ):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(headers=headers) as plain:
                named = {"lora_name": job.fine_tuned_model, **body}
                answer = await plain.post(f"{server.url}/v1/{path}_lora_adapter", json=named)
            assert answer.status_code == status, answer.text
        assert job.fine_tuned_model in [model.id async for model in api.models.list()]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
async def test_a_stopped_server_continues_after_the_last_step(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    config = {} if database == "sqlite" else {"store": request.getfixturevalue("postgresql_schema")}
    client = tuning_client()
    client.tuner.waits_at = 12
    async with server(tmp_path, client, **config) as here:
        id = await here.submit([chat(str(n)) for n in range(40)], hyperparameters=tuning.Parameters(n_epochs=6))
        await here.until(id, lambda job: job.step >= 8)
    assert client.tuner.changes[-1] == (id, "pause")
    stored = len(client.tuner.steps)
    again = tuning_client()
    async with server(tmp_path, again, **config) as here:
        job = await here.ended(id)
        assert job.status == "succeeded" and job.step == job.steps == 30
        assert await here.steps(id) == list(range(1, 31))
        assert again.tuner.steps[0] == (id, stored + 1)
        assert await here.tuning.page("", limit=1, after=None, metadata={}) == ([job], False)
        assert await here.tuning.page("", limit=1, after=id, metadata={}) == ([], False)
        await here.tuning.delete_model("", job.name)
        assert again.adapters == {} and not (tmp_path / "tuning" / id).exists()
        with pytest.raises(ApiError, match="there is no adapter file") as gone:
            await here.tuning.adapter_file("", id, "adapter_config.json")
        assert gone.value.status == 404
        here.now += 40 * 86400
        await here.tuning._clean()
        with pytest.raises(ApiError, match="was not found"):
            await here.tuning.retrieve("", id)


async def test_steps_that_a_killed_engine_stored_are_not_computed_again(tmp_path: Path) -> None:
    client = tuning_client()
    client.tuner.untold = 4
    here = Server(tmp_path, client)
    await here.tuning.start()
    id = await here.submit([chat(str(n)) for n in range(8)], hyperparameters=tuning.Parameters(n_epochs=9))
    while len(client.tuner.steps) < 9:
        await asyncio.sleep(0.01)
    client.die("killed")
    while here.tuning.runner.running:
        await asyncio.sleep(0.01)
    await here.close()
    again = tuning_client()
    async with server(tmp_path, again) as here:
        job = await here.ended(id)
        assert (job.status, job.step, again.tuner.steps) == ("succeeded", 9, [])
        events, _ = await here.tuning.events("", id, limit=100, after=None)
        assert "Steps 4 to 9 were computed before the server ended" in [each["message"] for each in events]
        assert await here.steps(id) == [*range(1, 10)] and job.trained_tokens == 90
        assert job.result_file is not None
        _, results = await here.tuning.files.open("", job.result_file)
        with results:
            rows = results.read().decode().splitlines()
        assert rows[1:] == [f"{step},{1 / step},,10" for step in range(1, 10)]
        assert {*job.served} <= {*again.adapters}


async def test_steps_that_were_lost_are_computed_again_and_counted_once(tmp_path: Path) -> None:
    client = tuning_client()
    client.tuner.waits_at = 10
    wanted = {"hyperparameters": tuning.Parameters(n_epochs=1, batch_size=1)}
    async with server(tmp_path, client) as here:
        id = await here.submit([chat(str(n)) for n in range(20)], **wanted)
        await here.until(id, lambda job: job.step >= 6)
    (tmp_path / "tuning" / id / STATE).write_text('{"step": 2}')  # The host lost the contents of its memory.
    again = tuning_client()
    async with server(tmp_path, again) as here:
        job = await here.ended(id)
        assert (job.status, again.tuner.steps[0]) == ("succeeded", (id, 3))
        assert await here.steps(id) == list(range(1, 21)) and job.trained_tokens == 200


async def test_an_outdated_request_for_a_change_has_no_effect(tmp_path: Path) -> None:
    client = tuning_client()
    client.tuner.waits_at = 10
    async with server(tmp_path, client) as here:
        id = await here.submit([chat(str(n)) for n in range(40)])
        await here.until(id, lambda job: job.step >= 1)
        await here.tuning.ask("", id, "pause")
        here.tuning.runner.want(id, "cancel", asks=0)  # It was read from the store before a client paused it.
        await looked_after(here.tuning)
        assert (await here.tuning.retrieve("", id)).status == "paused"
        assert ("cancel" not in {action for _, action in client.tuner.changes}) and client.tuner.changes


async def test_adapters_of_ended_jobs_are_served_after_a_restart(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        job = await here.ended(await here.submit([chat()]))
    again = tuning_client()
    async with server(tmp_path, again) as here:
        while {*again.adapters} != {*job.served}:
            await asyncio.sleep(0.01)
        here.service.check_model(job.name, "")
        assert [name for name, *_ in again.loaded] == list(job.served)
    async with server(tmp_path, tuning_client(model="another")) as here:
        await looked_after(here.tuning)
        assert here.client.adapters == {}


async def test_an_adapter_that_kills_its_engine_twice_is_not_loaded_again_and_others_are(
    tmp_path: Path,
) -> None:
    async with server(tmp_path) as here:
        job = await here.ended(await here.submit([chat()]))
        other = await here.ended(await here.submit([chat()]))
    deadly = f"{job.id}/checkpoints/{job.served[job.name]}"
    for _ in range(2):
        client = tuning_client()
        client.deadly_adapter = deadly
        async with server(tmp_path, client):
            await client.dead.wait()
    client = tuning_client()
    client.deadly_adapter = deadly
    async with server(tmp_path, client) as here:
        async with asyncio.timeout(200):
            while not {*other.served} <= {*client.adapters}:
                await asyncio.sleep(0.01)
        assert not client.dead.is_set() and job.name not in {name for name, *_ in client.loaded}
        assert {*job.served} & {*client.adapters}  # Its earlier checkpoints are harmless.
        with pytest.raises(ApiError):
            here.service.check_model(job.name, "")


async def test_an_adapter_deleted_at_another_server_is_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SERVE_SECONDS", 0.01)
    async with server(tmp_path) as first, server(tmp_path) as second:
        job = await first.ended(await first.submit([chat()]))
        while {*second.client.adapters} != {*job.served}:
            await asyncio.sleep(0.01)
        await first.tuning.delete_model("", job.name)
        while second.client.adapters:
            await asyncio.sleep(0.01)
        assert second.service.tuned == {}


async def test_a_request_for_an_adapter_that_is_being_loaded_is_asked_to_retry(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        here.service.tuned["ft:x"] = "", "job"
        here.service.loading.add("ft:x")
        with pytest.raises(ApiError) as waits:
            here.service.check_model("ft:x", "")
        assert (waits.value.status, waits.value.retry_after) == (503, 1)
        with pytest.raises(ApiError) as hidden:
            here.service.check_model("ft:x", "other")
        assert hidden.value.status == 404


async def test_a_paused_job_stays_paused_over_a_restart(tmp_path: Path) -> None:
    client = tuning_client()
    client.tuner.waits_at = 10
    async with server(tmp_path, client) as here:
        id = await here.submit([chat(str(n)) for n in range(40)])
        await here.until(id, lambda job: job.step >= 2)
        await here.tuning.ask("", id, "pause")
    async with server(tmp_path, tuning_client(model="another")) as other:
        await looked_after(other.tuning)
        assert not other.tuning.runner.running, "it is left to a server of its model"
    again = tuning_client()
    async with server(tmp_path, again) as here:
        await looked_after(here.tuning)
        assert again.tuner.orders == [] and (await here.tuning.retrieve("", id)).status == "paused"
        await here.tuning.ask("", id, "resume")
        assert (await here.ended(id)).status == "succeeded"
        assert (await here.steps(id)) == list(range(1, 51))


async def test_a_job_that_the_engine_refuses_or_cannot_continue_fails_with_its_reason(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        here.client.tuner.refuse = "the longest example has 22 tokens; micro_batch is 16: make it 22"
        job = await here.ended(await here.submit([chat()]))
        assert job.error is not None and job.error.code == "tuning_refused" and "make it 22" in job.error.message
        assert not (tmp_path / "tuning" / job.id).exists()
        here.client.tuner.refuse, here.client.tuner.breaks_at = "", 2
        here.client.tuner.breaks_with = "[Errno 28] No space left on device: '/home/me/state.a'"
        job = await here.ended(await here.submit([chat()]))
        assert job.error is not None and job.error.code == "tuning_failed" and job.step == 1
        assert job.error.message == "[Errno 28] No space left on device: a file"


async def test_a_file_cannot_be_deleted_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = asyncio.Event()
    loop = asyncio.get_running_loop()
    original = tuning_runner.write_examples

    def slow(*given: Any) -> str:
        asyncio.run_coroutine_threadsafe(reads.wait(), loop).result()
        return original(*given)

    monkeypatch.setattr(tuning_runner, "write_examples", slow)
    async with server(tmp_path) as here:
        id = await here.submit([chat()])
        file = (await here.tuning.retrieve("", id)).training_file
        with pytest.raises(ApiError, match="a tuning job that validates its files reads this one") as busy:
            await here.files.delete("", file)
        assert busy.value.status == 409
        reads.set()
        assert (await here.ended(id)).status == "succeeded"
        await here.files.delete("", file)


async def test_open_jobs_are_limited_by_tenant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_OPEN", 4)
    async with server(tmp_path, api_key=("one", "two")) as here:
        here.client.tuner.seconds = 10
        for _ in range(2):
            await here.submit([chat()], "one")
        with pytest.raises(ApiError, match="this API key has 2 tuning jobs that have not ended") as full:
            await here.submit([chat()], "one")
        assert full.value.status == 429
        await here.submit([chat()], "two")


async def test_only_the_newest_jobs_without_adapters_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MOST_KEPT", 2)
    async with server(tmp_path) as here:
        ids = []
        for _ in range(4):
            ids.append(await here.submit([{"prompt": "a"}]))
            await here.ended(ids[-1])
        last = await here.submit([chat()])
        found, _ = await here.tuning.page("", limit=10, after=None, metadata={})
        assert [job.id for job in found] == [last, ids[3], ids[2]]


async def test_examples_give_weight_to_the_answers_tokens(tmp_path: Path) -> None:
    async with server(tmp_path) as here:
        here.client.tuner.seconds = 10
        id = await here.submit([chat("Ahoy"), {"prompt": "a", "completion": "bc"}])
        while not here.client.tuner.orders:
            await asyncio.sleep(0.01)
        examples = Examples(tmp_path / "tuning" / id / "examples.bin")
        ids, weights = examples.example(0)
        learned = "".join(chr(token) for token, weight in zip(ids, weights, strict=True) if weight)
        assert "".join(map(chr, ids)) == "<user>hi<assistant>Ahoy" and learned == "<assistant>Ahoy"
        ids, weights = examples.example(1)
        assert (list(map(chr, ids)), list(weights)) == (["a", "b", "c"], [0, 1, 1])


def killer(kills_at: int = 1) -> FakeClient:
    """Return an engine that dies at a step of a job with "plague" among its answers."""
    client = tuning_client()
    client.tuner.poison, client.tuner.kills_at, client.tuner.seconds = "plague", kills_at, 0.002
    return client


async def over(here: Server) -> None:
    """Wait until the engine has died and its server has noticed."""
    await here.client.dead.wait()
    while here.tuning.runner.running:
        await asyncio.sleep(0.005)


async def test_a_job_that_kills_its_engine_twice_without_a_step_is_given_up_and_others_continue(tmp_path: Path) -> None:
    async with server(tmp_path, killer()) as here:
        good = await here.submit([chat(str(n)) for n in range(8)])
        bad = await here.submit([chat("plague")])
        await over(here)
        assert here.attempt(bad) == Attempt(died=1)
    async with server(tmp_path, killer()) as here:
        await over(here)
        assert here.attempt(bad) == Attempt(died=2)
    async with server(tmp_path, killer()) as here:
        job = await here.ended(bad)
        assert job.status == "failed" and job.error is not None and job.error.code == "engine_ended"
        assert "the engine ended 2 times while it had this job" in job.error.message
        assert (await here.ended(good)).status == "succeeded" and not here.client.dead.is_set()
        assert here.attempt(bad) is None is here.attempt(good)


async def test_a_job_that_gets_further_each_time_is_not_given_up(tmp_path: Path) -> None:
    for life, kills_at in enumerate((3, 6, 9)):
        async with server(tmp_path, killer(kills_at)) as here:
            if life == 0:
                parameters = tuning.Parameters(n_epochs=12, batch_size=1)
                id = await here.submit([chat("plague")], hyperparameters=parameters)
            await over(here)
            assert here.attempt(id) == Attempt(died=1)
    async with server(tmp_path, tuning_client()) as here:
        assert (await here.ended(id)).status == "succeeded"


async def test_suspected_jobs_are_tried_one_at_a_time_after_suspected_batch_lines(
    tmp_path: Path,
) -> None:
    first = tuning_client()
    first.tuner.seconds = 3600
    async with server(tmp_path, first) as here:
        ids = [await here.submit([chat(str(n))]) for n in range(3)]
        while len(first.tuner.orders) < 3:
            await asyncio.sleep(0.005)
        first.die("killed")
        await over(here)
    second = tuning_client()
    made = Server(tmp_path, second)
    made.lines_cleared.clear()
    second.tuner.untold = 1  # No step is reported.
    await made.tuning.start()
    try:
        while len(made.tuning.runner._suspects) < 3:
            await asyncio.sleep(0.005)
        assert not second.tuner.orders
        made.lines_cleared.set()
        while not second.tuner.orders:
            await asyncio.sleep(0.005)
        await made.tuning.ask("", ids[2], "cancel")
        assert (await made.until(ids[2], lambda job: job.ended)).status == "cancelled"
        assert [order.id for order in second.tuner.orders] == ids[:1]
        second.tuner.untold = 0
        await made.tuning.ask("", ids[0], "pause")
        while len(second.tuner.orders) < 2:
            await asyncio.sleep(0.005)
        assert (await made.ended(ids[1])).status == "succeeded"
    finally:
        await made.close()


async def test_a_paused_job_and_one_of_a_server_that_stops_normally_are_not_suspected(tmp_path: Path) -> None:
    client = tuning_client()
    client.tuner.seconds = 3600
    async with server(tmp_path, client) as here:
        id = await here.submit([chat()])
        while not client.tuner.orders:
            await asyncio.sleep(0.005)
    second = tuning_client()
    second.tuner.seconds = 3600
    async with server(tmp_path, second) as here:
        assert here.attempt(id) is None
        while not second.tuner.orders:
            await asyncio.sleep(0.005)
        await here.tuning.ask("", id, "pause")
        while (running := here.tuning.runner.running[id]).begun:
            await asyncio.sleep(0.005)
        await here.tuning.ask("", id, "resume")
        while not running.sent:
            await asyncio.sleep(0.005)
        await here.tuning.ask("", id, "pause")
        while running.begun:
            await asyncio.sleep(0.005)
        second.die("killed")
        await over(here)
        assert here.attempt(id) is None


async def test_a_job_is_given_up_after_three_kills_of_the_whole_server(tmp_path: Path) -> None:
    for life in range(3):
        client = tuning_client()
        client.tuner.seconds = 3600
        here = Server(tmp_path, client)
        await here.tuning.start()
        if life == 0:
            id = await here.submit([chat()])
        while not client.tuner.orders:
            await asyncio.sleep(0.005)
        assert here.attempt(id) == (None if life == 0 else Attempt(cut=life))
        await here.kill()
    async with server(tmp_path) as here:
        job = await here.ended(id)
        assert job.error is not None and "the server ended 3 times" in job.error.message
