"""Samples over a fake engine: sessions, futures, options, weights, and what is refused."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_engine import END, FakeClient, engine_info
from msgspec.structs import replace

from holdfast.core.types import BATCH_CLASS
from holdfast.engine.client.connection import QueueFull
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store
from holdfast.server.tinker import sampling
from holdfast.server.tinker.protos import MEDIA, messages
from holdfast.server.tinker.sampler_weights import SamplerWeights
from holdfast.server.tinker.sampling import Samplers
from holdfast.server.tinker.tables import CheckpointTable, FutureTable
from holdfast.server.tinker.values import Checkpoint, Future

KIND = {"content-type": "application/json"}
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [65, 66]}, {"type": "encoded_text", "tokens": [67]}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


class Api:
    """A client of the server's app, in process."""

    def __init__(self, http: httpx.AsyncClient, app: Any, client: FakeClient, directory: Path) -> None:
        self.http, self.app, self.client, self._directory = http, app, client, directory

    @property
    def samplers(self) -> Samplers:
        found: Samplers = next(each for each in self.app.state.jobs if isinstance(each, Samplers))
        return found

    async def post(self, route: str, body: Any, key: str = "") -> httpx.Response:
        return await self.http.post(f"/api/v1/{route}", json=body, headers=bearer(key) if key else {})

    async def session(self, key: str = "") -> str:
        made = await self.post("create_session", {"tags": [], "sdk_version": "test"}, key)
        return str(made.json()["session_id"])

    async def sampler(self, key: str = "", session: str = "", seq: int = 0, path: str | None = None) -> str:
        body = {"session_id": session or await self.session(key), "sampling_session_seq_id": seq}
        made = await self.post("create_sampling_session", {**body, **source(path)}, key)
        assert made.status_code == 200, made.text
        return str(made.json()["sampling_session_id"])

    async def sample(self, sampler: str, seq: int = 0, key: str = "", **more: Any) -> httpx.Response:
        params = {"max_tokens": 4, **more.pop("params", {})}
        body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": PROMPT, "sampling_params": params, **more}
        return await self.post("asample", body, key)

    async def result(self, id: str, key: str = "") -> Any:
        """The result of a sample as a SampleResponse, or the JSON of its error."""
        answer = await self.post("retrieve_future", {"request_id": id}, key)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] != MEDIA:
            return answer.json()
        return messages()["SampleResponse"].FromString(answer.content)

    async def drawn(self, sampler: str, seq: int = 0, key: str = "", **more: Any) -> Any:
        promised = await self.sample(sampler, seq, key, **more)
        assert promised.status_code == 200, promised.text
        return await self.result(promised.json()["request_id"], key)

    async def saved(
        self, name: str, tenant: str = "", *, listed: bool = True, model: str = "session-1:train:0"
    ) -> Checkpoint:
        """Store a finished checkpoint of a sampler."""
        directory = self._directory / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        checkpoint = Checkpoint(
            id=f"checkpoint-{name}", tenant=tenant, model="session-1:train:0", kind="sampler", name=name, created=0.0,
            directory=str(directory), ready=True, listed=listed,
        )  # fmt: skip
        # By the server's own threads: a store in memory has one connection, which one thread uses at a time.
        await self.app.state.responses.store.run(lambda store: FutureTable(store.database).finish((), (checkpoint,)))
        return checkpoint


def source(path: str | None) -> dict[str, str]:
    return {"base_model": "tiny"} if path is None else {"model_path": path}


@asynccontextmanager
async def serving(directory: Path, client: FakeClient | None = None, **config: Any) -> AsyncIterator[Api]:
    client = client or FakeClient(info=engine_info(adapter_slots=2, max_waiting=8))
    settings = ServerConfig(**{"store": MEMORY, "files": str(directory / "files"), **config})
    store = open_store(settings)
    app = create_app(client, settings, store)  # type: ignore[arg-type]
    app.state.store = store
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KIND) as http:
        api = Api(http, app, client, directory)
        try:
            yield api
        finally:
            for job in app.state.jobs:
                await job.close()
            app.state.jobs[0].files.close()
            app.state.responses.store.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def tokens_of(sequence: Any) -> list[int]:
    return [int(each) for each in np.frombuffer(sequence.tokens, "<i4")]


async def test_a_sampling_session_of_the_base_model_is_created_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session = await api.session()
        first = await api.sampler(session=session)
        assert await api.sampler(session=session) == first != await api.sampler(session=session, seq=1)
        found = (await api.http.get(f"/api/v1/samplers/{first}")).json()
        assert found == {"sampler_id": first, "base_model": "tiny", "model_path": None}
        joined = [await api.post("join_sampling_session", {"sampling_session_id": first}) for _ in range(2)]
        assert [each.json()["client_counter"] for each in joined] == [1, 2]


async def test_a_number_is_not_used_for_other_weights(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        session, saved = await api.session(), await api.saved("one")
        await api.sampler(session=session)
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": saved.path}
        refused = await api.post("create_sampling_session", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_session_seq_id")


@pytest.mark.parametrize(
    ("source", "status", "param"),
    [
        ({"base_model": "other"}, 400, "base_model"),
        ({}, 400, "base_model"),
        ({"model_path": "tinker://session-1:train:0/sampler_weights/none"}, 404, "model_path"),
        ({"model_path": "tinker://x"}, 400, "model_path"),
        ({"model_path": "/etc"}, 400, "model_path"),
    ],
)
async def test_weights_that_do_not_exist_are_refused(
    tmp_path: Path, source: dict[str, str], status: int, param: str
) -> None:
    async with serving(tmp_path) as api:
        body = {"session_id": await api.session(), "sampling_session_seq_id": 0, **source}
        refused = await api.post("create_sampling_session", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


async def test_a_sample_has_the_tokens_with_the_one_that_ends_it_and_their_log_probabilities(tmp_path: Path) -> None:
    client = FakeClient(ends=True, cached=2)
    async with serving(tmp_path, client) as api:
        found = await api.drawn(await api.sampler(), num_samples=2, topk_sample_logprobs=2, params={"max_tokens": 9})
    assert [tokens_of(each) for each in found.sequences] == [[0, 1, 2, 3, END]] * 2
    first = found.sequences[0]
    assert np.frombuffer(first.logprobs, "<f4").tolist() == [-2.0] * 5
    top = first.topk_sampled_logprobs
    assert (top.k, top.length) == (2, 5)
    assert np.frombuffer(top.token_ids, "<i4").reshape(5, 2)[:, 0].tolist() == [ord("?")] * 5
    assert np.frombuffer(top.logprobs, "<f4").reshape(5, 2).tolist() == [[-0.25, -2.0]] * 5
    assert (first.stop_reason, found.prompt_cache_hit_tokens) == (0, 2)
    assert not found.HasField("prompt_logprobs") and not found.HasField("topk_prompt_logprobs")


async def test_a_sample_that_reaches_its_limit_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        found = await api.drawn(await api.sampler(), params={"max_tokens": 2})
    assert (tokens_of(found.sequences[0]), found.sequences[0].stop_reason) == ([0, 1], 1)


async def test_the_options_reach_the_engine_without_the_models_defaults(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        options = {"max_tokens": 3, "seed": 7, "temperature": 1.5, "top_k": -1, "top_p": 0.5, "stop": ["x", 31]}
        more = {"num_samples": 2, "prompt_logprobs": True, "record_stability_info": True}
        promised = (await api.sample(sampler, params=options, **more)).json()
        await api.result(promised["request_id"])
        assert promised["sample_sequence_ids"] == [f"{promised['request_id']}:{each}" for each in range(2)]
    first, second = (asked.params for asked in api.client.asked)
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p) == (3, 1.5, 0, 0.5)
    assert (first.seed, second.seed) == (7, 8)
    assert (first.stop, first.stop_token_ids, first.ignore_eos, first.logprobs) == (("x",), (31,), True, 0)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (0, None), "the prompt is scored once"
    assert [asked.prompt for asked in api.client.asked] == [[65, 66, 67]] * 2
    assert {asked.priority for asked in api.client.asked} == {BATCH_CLASS}, "chats come first"


async def test_named_tokens_of_the_prompt_reach_the_engine_by_rows(tmp_path: Path) -> None:
    dense = {"data": [7, -1, -1, 9], "shape": [2, 2]}
    sparse = {"data": [7, 9], "shape": [2, 2], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        for seq, given in enumerate((dense, sparse)):
            await api.sample(sampler, seq, num_samples=2, target_prompt_logprobs={"dtype": "int64", **given})
        plain = await api.sample(sampler, 2)
        assert plain.status_code == 200
        while len(api.client.asked) < 5:
            await asyncio.sleep(0.01)
    asked = [(each.params.prompt_logprobs, each.params.prompt_targets) for each in api.client.asked]
    assert sorted(asked, key=repr) == sorted([(0, ((7,), (9,))), (None, ())] * 2 + [(None, ())], key=repr)


@pytest.mark.parametrize(("stop", "ignores"), [(None, False), ([], True), ("x", True), ([31], True)])
async def test_only_the_given_stops_end_a_sample(tmp_path: Path, stop: Any, ignores: bool) -> None:
    async with serving(tmp_path) as api:
        await api.drawn(await api.sampler(), params={"stop": stop})
    assert api.client.asked[0].params.ignore_eos is ignores


async def test_a_request_that_is_sent_again_is_carried_out_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        promised = [(await api.sample(sampler, 5)).json() for _ in range(3)]
        assert promised[0] == promised[1] == promised[2]
        results = [await api.result(promised[0]["request_id"]) for _ in range(2)]
        again = (await api.sample(sampler, 5)).json()
        other = await api.sample(sampler, 5, params={"max_tokens": 3})
    assert results[0] == results[1] and again == promised[0] and len(api.client.asked) == 1
    assert other.status_code == 400


async def test_without_a_seed_a_sample_is_drawn_from_a_seed_of_its_own(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        for seq in range(3):
            await api.drawn(sampler, seq)
    assert len({asked.params.seed for asked in api.client.asked}) == 3
    assert all(asked.params.seed is not None for asked in api.client.asked)


UNFIT: tuple[dict[str, Any], ...] = (
    {"data": [1, 2], "shape": [1, 2]},
    {"data": [1, 2, 3], "shape": [2, 1]},
    {"data": [-1, -1], "shape": [2, 1]},
    {"data": [], "shape": [2, 129], "sparse_crow_indices": [0, 0, 0], "sparse_col_indices": []},
    {"data": [5], "shape": [2, 3], "sparse_crow_indices": [0, 1, 1]},
    {"data": [5], "shape": [2, 3], "sparse_crow_indices": [0, 2, 1], "sparse_col_indices": [0]},
    {"data": [5], "shape": [2, 3], "sparse_crow_indices": [0, 1], "sparse_col_indices": [0]},
    {"data": [5], "shape": [2, 3], "sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [3]},
)
"""Matrices that do not fit a prompt of three tokens."""


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": {"chunks": []}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [256]}]}}, "prompt"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1] * 200}]}}, None),
        ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "target_prompt_logprobs"),
        *(({"target_prompt_logprobs": {"dtype": "int64", **wrong}}, "target_prompt_logprobs") for wrong in UNFIT),
        ({"target_prompt_logprobs": {"dtype": "int64", "data": [1, 256], "shape": [2, 1]}}, "prompt"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"num_samples": 65}, "num_samples"),
        ({"num_samples": 0}, "num_samples"),
        ({"topk_sample_logprobs": 21}, "topk_sample_logprobs"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"params": {"max_tokens": 500}}, "sampling_params.max_tokens"),
        ({"params": {"stop": ["x"] * 17}}, "sampling_params"),
        ({"params": {"stop": [999]}}, "prompt"),
        ({"seq_id": None}, "seq_id"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_by_its_name(
    tmp_path: Path, change: dict[str, Any], param: str | None
) -> None:
    async with serving(tmp_path) as api:
        refused = await api.sample(await api.sampler(), **change)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert not api.client.asked


async def test_a_cancelled_sample_is_aborted_in_the_engine(tmp_path: Path) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with serving(tmp_path, client) as api:
        promised = (await api.sample(await api.sampler())).json()
        await until(lambda: bool(client.asked) and client.asked[0].given == 1)
        assert (await api.post("cancel_future", {"request_id": promised["request_id"]})).status_code == 204
        assert client.asked[0].ended == "aborted"
        assert (await api.result(promised["request_id"]))["category"] == "user"
        assert (await api.post("cancel_future", {"request_id": "unknown"})).status_code == 204


async def test_samples_of_a_client_without_heartbeats_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FakeClient(hold=asyncio.Event())
    async with serving(tmp_path, client) as api:
        promised = (await api.sample(await api.sampler())).json()
        await until(lambda: bool(client.asked) and client.asked[0].given == 1)
        monkeypatch.setattr("holdfast.server.tinker.sessions.AWAY_SECONDS", -1.0)
        await api.samplers._look_at(await session_of(api))
        assert client.asked[0].ended == "aborted"
        assert "no heartbeat" in (await api.result(promised["request_id"]))["error"]


async def session_of(api: Api) -> str:
    return str((await api.http.get("/api/v1/sessions")).json()["sessions"][0])


async def test_a_full_engine_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "pauses", lambda: iter([0.01] * 100))
    async with serving(tmp_path) as api:
        api.client.refuse = QueueFull("8 requests wait")
        promised = (await api.sample(await api.sampler())).json()
        await asyncio.sleep(0.05)
        api.client.refuse = None
        assert len((await api.result(promised["request_id"])).sequences) == 1


async def test_another_key_finds_neither_samplers_nor_samples(tmp_path: Path) -> None:
    async with serving(tmp_path, api_key=("one", "two")) as api:
        sampler = await api.sampler("one")
        promised = (await api.sample(sampler, key="one")).json()
        for answer in (
            await api.sample(sampler, 1, key="two"),
            await api.http.get(f"/api/v1/samplers/{sampler}", headers=bearer("two")),
            await api.post("join_sampling_session", {"sampling_session_id": sampler}, "two"),
            await api.post("retrieve_future", {"request_id": promised["request_id"]}, "two"),
        ):
            assert answer.status_code == 404, answer.text
        assert (await api.post("cancel_future", {"request_id": promised["request_id"]}, "two")).status_code == 204
        assert len((await api.result(promised["request_id"], "one")).sequences) == 1


async def test_the_tokens_of_a_sample_are_counted_for_its_key_under_the_base_model(tmp_path: Path) -> None:
    async with serving(tmp_path, api_key=("one", "two"), operator_key=("op",)) as api:
        saved = await api.saved("one", tenant=await tenant_of(api, "one"))
        sampler = await api.sampler("one", path=saved.path)
        for _ in range(2):
            await api.drawn(sampler, key="one", num_samples=2)
        exposed = (await api.http.get("/metrics", headers=bearer("op"))).text
    counted = [line for line in exposed.splitlines() if line.startswith("holdfast_key_tokens_total")]
    kinds = {line.partition('kind="')[2].partition('"')[0]: float(line.split()[-1]) for line in counted}
    assert all('model="tiny"' in line for line in counted)
    assert (kinds["prompt"], kinds["output"]) == (6.0, 12.0), "a request that is sent again counts once"


async def tenant_of(api: Api, key: str) -> str:
    """The tenant of a key, as the engine gets it."""
    await api.drawn(await api.sampler(key), key=key)
    tenant = api.client.asked[-1].tenant
    api.client.asked.clear()
    return tenant


async def test_saved_weights_are_an_adapter_of_their_own_that_no_list_shows(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        one, two = await api.saved("one"), await api.saved("two")
        for number, saved in enumerate((one, two, one)):
            sampler = await api.sampler(path=saved.path)
            found = (await api.http.get(f"/api/v1/samplers/{sampler}")).json()
            assert (found["model_path"], found["base_model"]) == (saved.path, "tiny")
            await api.drawn(sampler, number)
        listed = [each["id"] for each in (await api.http.get("/v1/models")).json()["data"]]
        taken = await api.http.post("/v1/load_lora_adapter", json={"lora_name": "tinker:x", "lora_path": "x"})
    assert listed == ["tiny"] and taken.status_code == 403
    assert [path for _, path, _ in api.client.loaded] == [one.directory, two.directory], "each is loaded once"
    names = [asked.adapter for asked in api.client.asked]
    assert names[0] == names[2] != names[1] and all(name.startswith("tinker:checkpoint-") for name in names)


async def test_weights_that_nobody_samples_from_leave_the_engine_beyond_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        api.samplers._weights = weights = SamplerWeights(api.app.state.service, most=2)
        for number in range(6):
            await api.drawn(await api.sampler(path=(await api.saved(f"w{number}")).path))
        await until(lambda: len(api.client.adapters) == 2)
        await api.drawn(await api.sampler(path="tinker://session-1:train:0/sampler_weights/w0"))
        assert [path[-2:] for _, path, _ in api.client.loaded][-1] == "w0", "it is loaded again"
        await weights.close()


async def test_deleted_weights_are_a_404_that_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        saved = await api.saved("one")
        sampler = await api.sampler(path=saved.path)
        await api.app.state.responses.store.run(lambda store: CheckpointTable(store.database).delete([saved.id]))
        gone = await api.sample(sampler)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "checkpoint_not_found")


async def test_deleted_weights_leave_the_engine(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        samplers = {name: await api.sampler(path=(await api.saved(name)).path) for name in ("goes", "stays")}
        for sampler in samplers.values():
            await api.drawn(sampler)
        await api.samplers._drop_deleted()
        assert len(api.client.adapters) == 2
        CheckpointTable(api.app.state.store.database).delete(["checkpoint-goes"])
        await api.samplers._drop_deleted()
        assert [name.split(":")[1] for name in api.client.adapters] == ["checkpoint-stays"]
        assert await api.drawn(samplers["stays"]), "the other one is served on"


async def test_ending_a_session_deletes_its_samplers_and_the_weights_without_a_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        named, unnamed = await api.saved("named"), await api.saved("unnamed-1", listed=False)
        session = await api.session()
        samplers = [await api.sampler(session=session, path=named.path)]
        samplers.append(await api.samplers.open("", session, 1, unnamed))
        assert samplers[1] == await api.samplers.open("", session, 1, unnamed), "a crash may come between"
        for sampler in samplers:
            await api.drawn(sampler)
        assert len(api.client.adapters) == 2
        await api.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        await api.samplers._look_at(session)
        for sampler in samplers:
            assert (await api.http.get(f"/api/v1/samplers/{sampler}")).status_code == 404
        assert Path(named.directory).exists() and not Path(unnamed.directory).exists()
        assert [*api.client.adapters] == [name for name in api.client.adapters if "checkpoint-named" in name]


async def test_unnamed_weights_go_when_nobody_uses_them_and_newer_ones_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as api:
        session = await api.session()
        saved = [await api.saved(f"unnamed-{number}", listed=False) for number in range(200)]
        samplers = [await api.samplers.open("", session, number, each) for number, each in enumerate(saved)]
        await api.drawn(samplers[0])
        await api.samplers._look_at(session)
        assert all(Path(each.directory).exists() for each in saved), "an older sampler keeps its weights for an hour"
        monkeypatch.setattr(sampling, "UNUSED_SECONDS", 0.0)
        await api.samplers._look_at(session)
        assert [each.name for each in saved if Path(each.directory).exists()] == ["unnamed-199"]
        assert not api.client.adapters
        assert (await api.sample(samplers[0], 1)).status_code == 404
        assert len((await api.drawn(samplers[-1])).sequences) == 1


async def test_a_sample_of_an_ended_server_is_lost_until_its_client_sends_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"store": str(tmp_path / "s.sqlite")}
    client = FakeClient(hold=asyncio.Event())
    async with serving(tmp_path, client, **options) as api:
        sampler = await api.sampler()
        promised = (await api.sample(sampler)).json()
        await until(lambda: bool(client.asked) and client.asked[0].given == 1)
        with monkeypatch.context() as impatient:
            impatient.setattr("holdfast.server.routes.tinker.POLL_SECONDS", 0.05)
            running = await api.post("retrieve_future", {"request_id": promised["request_id"]})
        assert running.status_code == 408
    async with serving(tmp_path, **options) as api:
        lost = await api.post("retrieve_future", {"request_id": promised["request_id"]})
        assert (lost.status_code, lost.json()["error"]["code"]) == (410, "future_lost")
        assert (await api.sample(sampler)).json() == promised
        assert len((await api.result(promised["request_id"])).sequences) == 1
        assert client.asked[0].params.seed == api.client.asked[0].params.seed, "it draws the same tokens"


async def test_a_sample_that_ends_while_it_is_read_is_not_lost(tmp_path: Path) -> None:
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        id = (await api.sample(sampler)).json()["request_id"]
        await api.result(id)
        await until(lambda: not api.samplers._running)
        futures = api.samplers._futures
        ended = await futures.get("", id)
        stale = replace(ended, state="pending")

        async def begin(*args: Any, **more: Any) -> tuple[Future, bool]:
            return stale, False

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(futures, "begin", begin)
            assert (await api.sample(sampler)).json()["request_id"] == id
        await until(lambda: not api.samplers._running)
        assert len(api.client.asked) == 1, "it is computed once"
        first, get = [stale], futures.get

        async def read(tenant: str, id: str) -> Future:
            return first.pop() if first else await get(tenant, id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(futures, "get", read)
            assert len((await api.result(id)).sequences) == 1


async def test_malformed_samples_are_4xx_and_leave_nothing_behind(tmp_path: Path) -> None:
    draw = random.Random(1)
    strange = [None, True, -1, 0, 1.5, 1 << 70, "", "x" * 300, "\0", [], [[]], {}, {"a": 1}, [1, "x"], float("1e300")]
    async with serving(tmp_path) as api:
        sampler = await api.sampler()
        whole = {
            "sampling_session_id": sampler, "seq_id": 0, "prompt": PROMPT, "num_samples": 1, "prompt_logprobs": False,
            "sampling_params": {"max_tokens": 4, "seed": 1, "temperature": 1, "top_k": 1, "top_p": 1, "stop": []},
        }  # fmt: skip
        for _ in range(300):
            body = dict(whole)
            where: Any = body if draw.random() < 0.6 else dict(whole["sampling_params"])  # type: ignore[call-overload]
            name = draw.choice([*where, "extra"])
            where[name] = draw.choice(strange)
            if where is not body:
                body["sampling_params"] = where
            answer = await api.post("asample", body)
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code == 200:
                await api.result(answer.json()["request_id"])
        await until(lambda: not api.samplers._running)
        assert api.app.state.service.admission.in_progress == 0
    assert all(asked.ended == "finished" for asked in api.client.asked)
