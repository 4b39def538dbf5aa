"""Malformed requests of Tinker's protocol: each gets a clear refusal, and no trace stays."""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard
from sqlalchemy import func, select
from tinker_server import forward_body, training_client

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.protocol import ApiError, typed
from holdfast.server.run import open_store
from holdfast.server.tinker.protos import MEDIA
from holdfast.server.tinker.requests import CreateModel
from holdfast.server.tinker.tables import checkpoints, futures, models, sessions

REQUESTS = 600
API = "/api/v1"
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, "nan", "", "x" * 2000, "\0", "../..", "tinker://", "tinker://a/b/c",
    [], [[]], {}, {"a": {"b": []}}, "session-0:train:0", "\ud800", 1e308,
]  # fmt: skip


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """An app in this process, with a client for it and its training."""
    places = {"store": str(directory / "store.sqlite"), "files": str(directory / "files")}
    settings = ServerConfig(**places, tuning_state=str(directory / "tuning"), max_body_mb=0.05)
    app = create_app(training_client(), settings, open_store(settings))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=200) as client:
            yield client, app.state.jobs[1]
    finally:
        for job in app.state.jobs:
            await job.close()
        app.state.jobs[0].files.close()
        await asyncio.to_thread(app.state.responses.store.close)


def bodies(model: str, session: str) -> dict[str, dict[str, Any]]:
    """A good body for each route that takes JSON."""
    adam = {"learning_rate": 0.1, "beta1": 0.9, "eps": 1e-8}
    return {
        "create_session": {"tags": ["a"], "user_metadata": {"a": "b"}, "sdk_version": "0.38", "display_name": "x"},
        "session_heartbeat": {"session_id": session},
        "create_model": {"session_id": session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"rank": 4}},
        "get_info": {"model_id": model},
        "unload_model": {"model_id": model + "x"},
        "optim_step": {"model_id": model, "seq_id": 5, "adam_params": adam},
        "save_weights": {"model_id": model, "seq_id": 5, "path": "a", "ttl_seconds": 3600, "user_metadata": {}},
        "save_weights_for_sampler": {"model_id": model, "seq_id": 5, "path": "b", "sampling_session_seq_id": 1},
        "save_weights_external": {"model_id": model, "seq_id": 5, "path": "a"},
        "load_weights": {"model_id": model, "seq_id": 5, "path": f"tinker://{model}/weights/a", "optimizer": True},
        "weights_info": {"tinker_path": f"tinker://{model}/weights/a"},
        "retrieve_future": {"request_id": "future-0", "allow_metadata_only": True},
        f"sessions/{session}x/finish": {"reason": {"type": "success"}, "detail": None},
    }


def spoiled(chance: random.Random, body: dict[str, Any]) -> bytes:
    """A body that is no longer good: a value, a name or some bytes have changed."""
    made = copy.deepcopy(body)
    place = made
    while True:
        name = chance.choice([*place, "unknown"])
        inner = place.get(name)
        if not isinstance(inner, dict) or not inner or chance.random() < 0.3:
            break
        place = inner
    place[name] = chance.choice(ODD)
    text = json.dumps(made).encode()
    if chance.random() < 0.3:
        return text[: chance.randrange(len(text))] + bytes(chance.choices(range(256), k=chance.randrange(4)))
    return text


def spoiled_forward(chance: random.Random, model: str) -> tuple[bytes, dict[str, str]]:
    """A protobuf body with changed bytes, wrong content or a wrong encoding, and its headers."""
    headers = {"content-type": MEDIA}
    fields: dict[str, Any] = chance.choice([
        {"data": []}, {"data": [[]]}, {"data": [[256]]}, {"data": [[-1]]}, {"data": [[1] * 500]}, {"loss": "gspo"},
        {"loss": ""}, {"arrays": ("advantages",)}, {"settings": {"beta": float("nan")}}, {"target_tokens": [1]},
        {"arrays": ("x" * 300,)}, {"data": [[1]] * 5000}, {},
    ])  # fmt: skip
    body = bytearray(forward_body(model, chance.choice([-1, 0, 3, 2**31 - 1]), **fields))
    if not fields:
        for _ in range(chance.randrange(1, 8)):
            body[chance.randrange(len(body))] = chance.randrange(256)
    if chance.random() < 0.4:
        headers["content-encoding"] = chance.choice(["zstd", "gzip", "zstd, zstd"])
        packed = bytearray(zstandard.ZstdCompressor().compress(bytes(body)))
        if chance.random() < 0.6:
            packed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
        body = packed
    return bytes(body), headers


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora_config": {"rank": 0}}, "lora_config.rank: expected `int` >= 1, got 0"),
        ({"model_seq_id": -1}, "model_seq_id: expected `int` >= 0, got -1"),
        ({"lora_config": {"rank": "8"}}, "lora_config.rank: expected `int`, got `str`"),
    ],
)
def test_a_value_out_of_its_limits_is_named_wherever_it_stands(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        typed(bodies("m", "s")["create_model"] | changed, CreateModel)
    assert refused.value.message == message


async def promised(client: httpx.AsyncClient, path: str, **sent: Any) -> dict[str, Any]:
    """Send a request that must be taken. Returns its result."""
    answer = await client.post(f"{API}/{path}", **sent)
    assert answer.status_code == 200, answer.text
    while found := await client.post(f"{API}/retrieve_future", json={"request_id": answer.json()["request_id"]}):
        if found.status_code != 408:
            break
    result: dict[str, Any] = {} if MEDIA in found.headers["content-type"] else found.json()
    return result


async def test_malformed_requests_are_refused_in_json_and_leave_no_trace(tmp_path: Path) -> None:
    chance = random.Random(38)
    async with serving(tmp_path) as (client, training):
        session = (await client.post(f"{API}/create_session", json={})).json()["session_id"]
        model = f"{session}:train:0"
        good = bodies(model, session)
        await promised(client, "create_model", json=good["create_model"] | {"model_seq_id": 0})
        statuses: Counter[int] = Counter()
        for number in range(REQUESTS):
            if number % 3:
                path = chance.choice([*good])
                sent = {"content": spoiled(chance, good[path]), "headers": {"content-type": "application/json"}}
            else:
                path, (content, headers) = "forward_backward", spoiled_forward(chance, model)
                sent = {"content": content, "headers": headers}
            answer = await client.post(f"{API}/{path}", **sent)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (path, sent, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error["message"] and str(tmp_path) not in error["message"], (path, sent)
        assert statuses[400] > REQUESTS / 3 and statuses[404] and statuses[415], statuses
        first = await promised(client, "optim_step", json=good["optim_step"] | {"seq_id": 1})
        assert first == {"metrics": {"updates:max": 1.0}}, "no malformed request has taken a number or trained"
        (runner,) = [each for each in training.runners.values() if each.model.id == model]
        assert all(number > 1 for number in runner.order.held), (
            "only requests that are whole but wrong wait for their turn"
        )
        for id in [*training.runners]:
            await promised(client, "unload_model", json={"model_id": id})
        while training.runners:
            await asyncio.sleep(0.01)
        database = training._store._store.database
        with database.read() as db:
            count = {
                table.name: db.execute(select(func.count()).select_from(table)).scalar_one()
                for table in (models, sessions, checkpoints)
            }
            pending = db.execute(select(func.count()).select_from(futures).where(futures.c.state == "pending"))
            assert pending.scalar_one() == 0 and count["training_checkpoints"] == 0, count
    assert not [*(tmp_path / "tuning").glob("*")]
