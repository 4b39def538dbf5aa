"""Adapters over HTTP: requested by name, listed, loaded and unloaded, in process and by `openai` over a real engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import FakeClient, engine_info

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError
from holdfast.lm.models.loader import native_spec
from holdfast.server.routes import adapters as adapters_module
from tests.adapters import drawn, write
from tests.served import CONFIG, Serving, make_checkpoint, serve

Http = Callable[..., httpx.AsyncClient]
HELLO = {"model": "pirate", "messages": [{"role": "user", "content": "hello"}]}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(info=engine_info(adapter_slots=2))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "pirate").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "root"


async def test_a_loaded_adapter_is_requested_and_listed_by_its_name(http: Http, client: FakeClient, root: Path) -> None:
    async with http(adapter_root=str(root)) as api:
        before = await api.post("/v1/chat/completions", json=HELLO)
        loaded = await api.post(LOAD, json={"lora_name": "pirate", "lora_path": "pirate"})
        chat = (await api.post("/v1/chat/completions", json=HELLO)).json()
        text = (await api.post("/v1/completions", json={"model": "pirate", "prompt": "hi"})).json()
        turn = (await api.post("/v1/responses", json={"model": "pirate", "input": "hi"})).json()
        base = (await api.post("/v1/chat/completions", json={**HELLO, "model": "tiny"})).json()
        listed = (await api.get("/v1/models")).json()["data"]
        one = (await api.get("/v1/models/pirate")).json()
        unloaded = await api.post(UNLOAD, json={"lora_name": "pirate"})
        after = await api.post("/v1/chat/completions", json=HELLO)
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'pirate' added successfully.")
    assert client.loaded == [("pirate", str(root / "pirate"), False)]
    assert [answer["model"] for answer in (chat, text, turn, base)] == ["pirate"] * 3 + ["tiny"]
    assert [asked.adapter for asked in client.asked] == ["pirate"] * 3 + [""]
    assert [(each["id"], each.get("parent"), each.get("root")) for each in listed] == [
        ("tiny", None, None),
        ("pirate", "tiny", "pirate"),
    ]
    assert one == listed[1]
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'pirate' removed successfully.")
    for refused in (before, after):
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert refused.json()["error"]["param"] == "model"


@pytest.mark.parametrize("path", ["..", "../outside", "link", "link/x", "/etc", ".", "a\0b", "pirate/../.."])
async def test_a_path_that_is_not_below_the_root_is_a_403_that_names_no_directory(
    http: Http, client: FakeClient, root: Path, path: str
) -> None:
    async with http(adapter_root=str(root)) as api:
        response = await api.post(LOAD, json={"lora_name": "x", "lora_path": path})
    assert (response.status_code, response.json()["error"]["param"]) == (403, "lora_path")
    assert str(root.parent) not in response.text
    assert client.loaded == []


async def test_without_a_root_nothing_is_loaded(http: Http, client: FakeClient, root: Path) -> None:
    async with http() as api:
        response = await api.post(LOAD, json={"lora_name": "x", "lora_path": str(root / "pirate")})
    assert (response.status_code, client.loaded) == (403, [])
    assert "--adapter-root is not set" in response.text


async def test_a_server_without_adapters_names_the_flag(http: Http, client: FakeClient, root: Path) -> None:
    client.info = engine_info()
    async with http(adapter_root=str(root)) as api:
        load = await api.post(LOAD, json={"lora_name": "x", "lora_path": "pirate"})
        unload = await api.post(UNLOAD, json={"lora_name": "x"})
    for response in (load, unload):
        assert response.status_code == 400 and "--max-adapters" in response.text


async def test_a_refusal_by_the_engine_is_a_400_with_its_reason(http: Http, client: FakeClient, root: Path) -> None:
    client.refuse = AdapterError("model.layers.0.mlp.down_proj has rank 32; it must be from 1 to 16")
    async with http(adapter_root=str(root)) as api:
        response = await api.post(LOAD, json={"lora_name": "x", "lora_path": "pirate"})
    assert response.status_code == 400 and "rank 32" in response.json()["error"]["message"]


async def test_unloading_an_unknown_adapter_is_a_404(http: Http) -> None:
    async with http() as api:
        response = await api.post(UNLOAD, json={"lora_name": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "lora_name")


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"lora_name": 3, "lora_path": "x"}', b'{"lora_name": "a", "q": 1}']
)
async def test_bad_bodies_are_refused(http: Http, path: str, body: bytes) -> None:
    async with http() as api:
        response = await api.post(path, content=body)
    assert response.status_code == 400 and set(response.json()["error"]) == {"message", "type", "param", "code"}


async def test_vllms_other_fields_are_accepted(http: Http, client: FakeClient, root: Path) -> None:
    async with http(adapter_root=str(root)) as api:
        load = {"lora_name": "x", "lora_path": "pirate", "base_model_name": "tiny", "load_inplace": True}
        assert (await api.post(LOAD, json=load)).status_code == 200
        assert (await api.post(LOAD, json=load)).status_code == 200
        assert (await api.post(UNLOAD, json={"lora_name": "x", "lora_int_id": 1})).status_code == 200
    assert client.loaded == [("x", str(root / "pirate"), False), ("x", str(root / "pirate"), True)]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


KEYS: dict[str, Any] = {"api_key": ("one", "two"), "operator_key": ("op",)}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("/v1/chat/completions", HELLO),
        ("/v1/completions", {"model": "pirate", "prompt": "hi"}),
        ("/v1/responses", {"model": "pirate", "input": "hi"}),
        ("/v1/messages", {**HELLO, "max_tokens": 4}),
        ("/tokenize", {"model": "pirate", "prompt": "hi"}),
    ],
)
async def test_an_adapter_answers_only_the_key_that_loaded_it(
    http: Http, client: FakeClient, root: Path, api: str, body: dict[str, Any]
) -> None:
    async with http(adapter_root=str(root), **KEYS) as server:
        await server.post(LOAD, json={"lora_name": "pirate", "lora_path": "pirate"}, headers=bearer("one"))
        assert (await server.post(api, json=body, headers=bearer("one"))).status_code == 200
        for other in ("two", "op"):
            assert (await server.post(api, json=body, headers=bearer(other))).status_code == 404
            assert (await server.get("/v1/models/pirate", headers=bearer(other))).status_code == 404
    assert {asked.adapter for asked in client.asked} <= {"pirate"}


async def test_a_key_lists_its_own_adapters_and_those_for_all(http: Http, client: FakeClient, root: Path) -> None:
    async with http(adapter_root=str(root), **KEYS) as api:
        for name, key in (("mine", "one"), ("yours", "two"), ("ours", "op")):
            await api.post(LOAD, json={"lora_name": name, "lora_path": "pirate"}, headers=bearer(key))
        listed = {
            key: [each["id"] for each in (await api.get("/v1/models", headers=bearer(key))).json()["data"]]
            for key in ("one", "two", "op")
        }
    assert listed == {"one": ["tiny", "mine", "ours"], "two": ["tiny", "yours", "ours"], "op": ["tiny", "ours"]}


async def test_another_key_can_neither_unload_nor_replace_an_adapter(
    http: Http, client: FakeClient, root: Path
) -> None:
    load = {"lora_name": "pirate", "lora_path": "pirate"}
    async with http(adapter_root=str(root), **KEYS) as api:
        await api.post(LOAD, json=load, headers=bearer("one"))
        unload = await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("two"))
        missing = await api.post(UNLOAD, json={"lora_name": "parrot"}, headers=bearer("two"))
        taken = [
            await api.post(LOAD, json={**load, "load_inplace": inplace}, headers=bearer("two"))
            for inplace in (False, True)
        ]
        assert len(client.loaded) == 1 and [*client.adapters] == ["pirate"]
        assert (await api.post(LOAD, json={**load, "load_inplace": True}, headers=bearer("one"))).status_code == 200
        assert (await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("one"))).status_code == 200
        again = await api.post(LOAD, json=load, headers=bearer("two"))
        mine = await api.get("/v1/models/pirate", headers=bearer("one"))
    assert (unload.status_code, unload.json()["error"]["code"]) == (404, "model_not_found")
    assert unload.text.replace("pirate", "parrot") == missing.text
    assert [(each.status_code, "is taken" in each.text) for each in taken] == [(400, True)] * 2
    assert (again.status_code, mine.status_code) == (200, 404)


@pytest.mark.parametrize("loaded_by", ["the start", "the operator"])
async def test_only_operators_change_the_adapters_for_all_keys(
    http: Http, client: FakeClient, root: Path, loaded_by: str
) -> None:
    load = {"lora_name": "pirate", "lora_path": "pirate"}
    async with http(adapter_root=str(root), **KEYS) as api:
        if loaded_by == "the start":
            await client.load_adapter("pirate", "there")
        else:
            await api.post(LOAD, json=load, headers=bearer("op"))
        assert (await api.post("/v1/chat/completions", json=HELLO, headers=bearer("one"))).status_code == 200
        replaced = await api.post(LOAD, json={**load, "load_inplace": True}, headers=bearer("one"))
        unloaded = await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("one"))
        for refused in (replaced, unloaded):
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
            assert "--operator-key" in refused.text
        assert (await api.post(LOAD, json={**load, "load_inplace": True}, headers=bearer("op"))).status_code == 200
        assert (await api.post("/v1/chat/completions", json=HELLO, headers=bearer("two"))).status_code == 200
        assert (await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("op"))).status_code == 200
    assert client.adapters == {}


async def test_an_operator_may_unload_a_keys_adapter_or_take_its_name_for_all(
    http: Http, client: FakeClient, root: Path
) -> None:
    load = {"lora_name": "pirate", "lora_path": "pirate"}
    async with http(adapter_root=str(root), **KEYS) as api:
        await api.post(LOAD, json=load, headers=bearer("one"))
        assert (await api.post(LOAD, json={**load, "load_inplace": True}, headers=bearer("op"))).status_code == 200
        assert (await api.post("/v1/chat/completions", json=HELLO, headers=bearer("two"))).status_code == 200
        assert (await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("op"))).status_code == 200
        await api.post(LOAD, json=load, headers=bearer("one"))
        assert (await api.post(UNLOAD, json={"lora_name": "pirate"}, headers=bearer("op"))).status_code == 200


@pytest.mark.parametrize("keys", [{}, {"api_key": ("one",)}, {"operator_key": ("op", "po")}])
async def test_without_several_keys_every_client_may_change_every_adapter(
    http: Http, client: FakeClient, root: Path, keys: dict[str, Any]
) -> None:
    load = {"lora_name": "pirate", "lora_path": "pirate", "load_inplace": True}
    await client.load_adapter("pirate", "there")
    async with http({"authorization": "Bearer one"}, adapter_root=str(root), **keys) as api:
        assert (await api.post(LOAD, json=load)).status_code == 200
        assert (await api.post("/v1/chat/completions", json=HELLO)).status_code == 200
        assert (await api.post(UNLOAD, json={"lora_name": "pirate"})).status_code == 200
    assert client.adapters == {}


@pytest.mark.parametrize("key", ["one", "op"])
async def test_no_adapter_may_take_the_name_of_a_tuning_jobs_result(
    http: Http, client: FakeClient, root: Path, key: str
) -> None:
    load = {"lora_name": "ft:tiny::0123abcd", "lora_path": "pirate"}
    async with http(adapter_root=str(root), **KEYS) as api:
        for inplace in (False, True):
            refused = await api.post(LOAD, json={**load, "load_inplace": inplace}, headers=bearer(key))
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
            assert "begin with ft:" in refused.text
    assert client.loaded == []


async def test_a_name_that_another_key_takes_meanwhile_is_not_replaced(
    http: Http, client: FakeClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = {"lora_name": "pirate", "lora_path": "pirate", "load_inplace": True}
    async with http(adapter_root=str(root), **KEYS) as api:
        looked_up = adapters_module.below

        def slowly(root: str | None, path: str) -> Path:
            client.adapters["pirate"] = AdapterInfo("pirate@9", "pirate", 4, 100, ("q",))  # Another key loaded it.
            return looked_up(root, path)

        monkeypatch.setattr(adapters_module, "below", slowly)
        refused = await api.post(LOAD, json=load, headers=bearer("one"))
    assert refused.status_code == 403 and client.loaded == []


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters for the served model: three that differ, one of a rank above the limit, one of another model."""
    directory = tmp_path_factory.mktemp("adapters")
    spec = native_spec(CONFIG)
    for seed, name in enumerate(("a", "b", "c")):
        write(directory / name, drawn(spec, 4 << seed, seed=seed, strength=3.0))
    write(directory / "wide", drawn(spec, 32, seed=4))
    write(directory / "other", drawn(replace(spec, hidden_size=48), 4, seed=5))
    (directory / "broken").mkdir()
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, adapters: Path) -> Iterator[Serving]:
    model = make_checkpoint(tmp_path_factory.mktemp("served") / "model")
    named = [f"--adapter={name}={adapters / name}" for name in ("a", "b")]
    options = ["--max-adapters", "2", "--adapter-root", str(adapters), "--store", "memory", "--operator-key", "op"]
    with serve(model, *named, *options) as serving:
        yield serving


def said(api: openai.OpenAI, model: str, tokens: int = 24) -> tuple[str, int]:
    """Return a greedy answer, and the number of cached tokens of its prompt."""
    messages: Any = [{"role": "user", "content": "Tell me a long story, and make it good."}]
    options: Any = {"model": model, "messages": messages, "temperature": 0, "max_tokens": tokens}
    answer = api.chat.completions.create(**options, extra_body={"ignore_eos": True})
    assert answer.model == model and answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens_details.cached_tokens or 0


def post(server: Serving, path: str, key: str = "one", **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=bearer(key), timeout=60)


def test_openai_speaks_with_adapters_that_come_and_go_while_streams_run(server: Serving) -> None:
    api = server.client()
    assert [model.id for model in api.models.list()] == ["model", "a", "b"]
    alone = {name: said(api, name)[0] for name in ("model", "a", "b")}
    assert len({*alone.values()}) == 3
    assert [said(api, name) for name in alone] == [(text, 48) for text in alone.values()]

    beside: dict[str, str] = {}
    threads = [
        threading.Thread(target=lambda name=name: beside.update({name: said(api, name, tokens=600)[0]}))
        for name in alone
    ]
    for thread in threads:
        thread.start()
    assert post(server, LOAD, lora_name="c", lora_path="c").status_code == 200
    first, cached = said(api, "c")
    assert first not in alone.values() and cached == 0
    assert post(server, LOAD, lora_name="c", lora_path="b").status_code == 400
    assert post(server, LOAD, lora_name="c", lora_path="b", load_inplace=True).status_code == 200
    assert said(api, "c") == (alone["b"], 0)
    assert post(server, UNLOAD, lora_name="a").status_code == 403
    assert post(server, UNLOAD, key="op", lora_name="a").status_code == 200
    with pytest.raises(openai.NotFoundError):
        said(api, "a")
    for thread in threads:
        thread.join()
    # The last bytes of an answer may be the beginning of a character.
    assert {name: text[:16] for name, text in beside.items()} == {name: text[:16] for name, text in alone.items()}
    assert [model.id for model in server.client("one").models.list()] == ["model", "b", "c"]
    assert [model.id for model in server.client("two").models.list()] == ["model", "b"]
    with pytest.raises(openai.NotFoundError):
        said(server.client("two"), "c")
    # A replaced adapter keeps its slot until its streams have ended, so the owners of slots depend on them.
    assert server.gauge("adapters") == 2 and 1 <= server.gauge("adapters_resident") <= 2
    assert server.gauge("adapter_loads_total") >= 4


@pytest.mark.parametrize(
    ("name", "path", "reason"),
    [
        ("wide", "wide", "rank 32"),
        ("other", "other", "the base model takes"),
        ("broken", "broken", "adapter_config.json"),
        ("model", "a", "taken"),
        ("b", "c", "taken"),
        ("no spaces", "c", "must have 1 to 128"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused_with_the_reason(
    server: Serving, adapters: Path, name: str, path: str, reason: str
) -> None:
    response = post(server, LOAD, lora_name=name, lora_path=path)
    assert response.status_code == 400 and reason in response.json()["error"]["message"]
    assert str(adapters) not in response.text
