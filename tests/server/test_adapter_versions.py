"""Versions of adapter weights: published while requests run, by a real server and over a fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, engine_info
from serving import listening

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError
from holdfast.lm.models.loader import native_spec
from holdfast.lm.models.peft_files import CONFIG_FILE, WEIGHTS_FILE
from tests.adapters import drawn, write
from tests.served import CONFIG, Serving, eventually, make_checkpoint, serve

Http = Callable[..., httpx.AsyncClient]
BINARY = {"content-type": "application/octet-stream"}
WEIGHTS = "/v1/adapters/pirate/weights"
PIRATE = {"lora_name": "pirate", "lora_path": "pirate"}
KEYS: dict[str, Any] = {"api_key": ("one", "two"), "operator_key": ("op",)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(info=engine_info(adapter_slots=2))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("pirate", "better"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / CONFIG_FILE).write_text('{"peft_type": "LORA"}')
    return tmp_path / "root"


def config_of(root: Path) -> dict[str, Any]:
    return {"adapter_root": str(root), "tuning_state": str(root.parent / "tuning")}


def kept(root: Path) -> list[Path]:
    """The directories of versions whose weights came as bodies."""
    versions = root.parent / "tuning" / "versions"
    return sorted(versions.iterdir()) if versions.is_dir() else []


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_versions_are_numbered_and_listed(http: Http, client: FakeClient, root: Path) -> None:
    async with http(**config_of(root)) as api:
        assert (await api.post("/v1/load_lora_adapter", json=PIRATE)).status_code == 200
        first = (await api.get("/v1/adapters/pirate")).json()
        second = (await api.post(WEIGHTS, json={"lora_path": "better"})).json()
        third = (await api.post(WEIGHTS, content=b"weights", headers=BINARY)).json()
        listed = (await api.get("/v1/adapters/pirate")).json()
    assert (first["object"], first["version"], first["content"]) == ("adapter", 1, "pirate@0123")
    assert [(each["object"], each["version"]) for each in (second, third)] == [
        ("adapter.version", 2),
        ("adapter.version", 3),
    ]
    assert (listed["version"], listed["current"], listed["rank"], listed["modules"]) == (3, True, 4, ["q"])
    (directory,) = kept(root)
    assert client.loaded == [
        ("pirate", str(root / "pirate"), False),
        ("pirate", str(root / "better"), True),
        ("pirate", str(directory), True),
    ]
    assert (directory / WEIGHTS_FILE).read_bytes() == b"weights"
    assert (directory / CONFIG_FILE).read_text() == '{"peft_type": "LORA"}'


@pytest.mark.parametrize("binary", [True, False])
async def test_another_version_than_the_expected_one_is_a_409_that_publishes_nothing(
    http: Http, client: FakeClient, root: Path, binary: bool
) -> None:
    def publish(api: httpx.AsyncClient, expected: int) -> Any:
        if binary:
            return api.post(f"{WEIGHTS}?expected_version={expected}", content=b"weights", headers=BINARY)
        return api.post(WEIGHTS, json={"lora_path": "better", "expected_version": expected})

    async with http(**config_of(root)) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE)
        assert (await publish(api, 1)).json()["version"] == 2
        before, files = [*client.loaded], kept(root)
        for wrong in (1, 3):
            refused = await publish(api, wrong)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (
                409,
                "version_conflict",
                "expected_version",
            )
            assert "has version 2" in error["message"] and f"expected_version is {wrong}" in error["message"]
    assert client.loaded == before and kept(root) == files


async def test_a_version_that_the_engine_refuses_leaves_no_file_and_no_number(
    http: Http, client: FakeClient, root: Path
) -> None:
    async with http(**config_of(root)) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE)
        client.refuse = AdapterError("a number is not finite")
        refused = await api.post(WEIGHTS, content=b"weights", headers=BINARY)
        client.refuse = None
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_adapter")
        assert kept(root) == [] and (await api.get("/v1/adapters/pirate")).json()["version"] == 1


async def test_a_body_that_is_empty_or_too_large_leaves_no_file(http: Http, client: FakeClient, root: Path) -> None:
    async with http(**config_of(root), max_file_mb=0.001) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE)

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield bytes(600)

        empty = await api.post(WEIGHTS, content=b"", headers=BINARY)
        declared = await api.post(WEIGHTS, content=bytes(1800), headers=BINARY)
        streamed = await api.post(WEIGHTS, content=pieces(), headers=BINARY)
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid_adapter")
    for large in (declared, streamed):
        assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
        assert "larger than 1000 bytes" in large.text
    assert kept(root) == [] and len(client.loaded) == 1


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"lora_path": 3}', b'{"lora_path": "better", "expected_version": 0}']
)
async def test_bad_requests_are_refused(http: Http, root: Path, body: bytes) -> None:
    async with http(**config_of(root)) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE)
        refused = await api.post(WEIGHTS, content=body)
        query = await api.post(f"{WEIGHTS}?expected_version=x", content=b"w", headers=BINARY)
    assert (refused.status_code, query.status_code) == (400, 400)
    assert kept(root) == []


async def test_a_name_without_an_adapter_is_a_404(http: Http, root: Path) -> None:
    async with http(**config_of(root)) as api:
        for answer in (
            await api.post(WEIGHTS, json={"lora_path": "better"}),
            await api.post(WEIGHTS, content=b"weights", headers=BINARY),
            await api.get("/v1/adapters/pirate"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_only_the_key_that_loaded_an_adapter_may_publish_or_see_its_versions(
    http: Http, client: FakeClient, root: Path
) -> None:
    async with http(**config_of(root), **KEYS) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE, headers=bearer("one"))
        body = {"lora_path": "better"}
        assert (await api.post(WEIGHTS, json=body, headers=bearer("two"))).status_code == 404
        assert (await api.get("/v1/adapters/pirate", headers=bearer("two"))).status_code == 404
        assert (await api.post(WEIGHTS, json=body, headers=bearer("one"))).status_code == 200
        client.adapters["all"] = AdapterInfo("all@1", "all", 4, 100, ("q",))
        refused = await api.post("/v1/adapters/all/weights", json=body, headers=bearer("one"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_only")
    assert [name for name, _, _ in client.loaded] == ["pirate", "pirate"]


async def test_unloading_deletes_the_files_and_a_new_load_begins_at_version_one(
    http: Http, client: FakeClient, root: Path
) -> None:
    async with http(**config_of(root)) as api:
        await api.post("/v1/load_lora_adapter", json=PIRATE)
        await api.post(WEIGHTS, content=b"weights", headers=BINARY)
        assert len(kept(root)) == 1
        assert (await api.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"})).status_code == 200
        await until(lambda: not kept(root))
        await api.post("/v1/load_lora_adapter", json=PIRATE)
        assert (await api.get("/v1/adapters/pirate")).json()["version"] == 1


@pytest.mark.usefixtures("look_often")
async def test_servers_of_the_same_engines_count_the_same_versions(root: Path) -> None:
    engines = [FakeClient(info=engine_info(adapter_slots=2), adopts=True) for _ in range(2)]
    async with AsyncExitStack() as held:
        apis = []
        for number, engine in enumerate(engines):
            fields = {"store": str(root.parent / "s.sqlite"), "files": str(root.parent / f"files {number}")}
            server = await held.enter_async_context(listening(engine, **fields, **config_of(root)))
            apis.append(await held.enter_async_context(httpx.AsyncClient(base_url=server.url)))
        await apis[0].post("/v1/load_lora_adapter", json=PIRATE)
        second = await apis[1].post(WEIGHTS, content=b"weights", headers=BINARY)
        assert second.json()["version"] == 2
        assert [(await api.get("/v1/adapters/pirate")).json()["version"] for api in apis] == [2, 2]
        directory = kept(root)[0]
        assert engines[0].loaded[-1] == ("pirate", str(directory), True)
        both = [api.post(WEIGHTS, json={"lora_path": "better", "expected_version": 2}) for api in apis]
        codes = sorted(answer.status_code for answer in await asyncio.gather(*both))
        assert codes == [200, 409], "one of two trainers comes first"
        assert [(await api.get("/v1/adapters/pirate")).json()["version"] for api in apis] == [3, 3]
        await until(lambda: not kept(root))


# A real engine


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("a", "b", "c")):
        write(directory / name, drawn(native_spec(CONFIG), 4, seed=seed, strength=3.0))
    return directory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def server(folder: Path, adapters: Path) -> Iterator[Serving]:
    options = [f"--adapter=a={adapters / 'a'}", "--max-adapters", "2", "--adapter-root", str(adapters)]
    options += ["--store", "memory", "--operator-key", "op", "--tuning-state", str(folder / "tuning")]
    with serve(make_checkpoint(folder / "model"), *options) as serving:
        yield serving


@pytest.fixture(scope="module")
def alone(server: Serving) -> dict[str, str]:
    """The greedy answer of each adapter's weights, loaded under a name of its own."""
    found = {}
    for name in ("a", "b", "c"):
        load = {"lora_name": f"only-{name}", "lora_path": name}
        assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=load, headers=bearer("op")).status_code == 200
        found[name] = chat(server, f"only-{name}")[0]
    return found


def chat(server: Serving, model: str, **more: Any) -> list[str]:
    """The greedy answers to one question."""
    question = [{"role": "user", "content": "Tell me a long story, and make it good."}]
    body = {"model": model, "messages": question, "temperature": 0, "max_tokens": 16, "ignore_eos": True, **more}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=bearer("one"), timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def publish(server: Serving, adapters: Path, source: str, name: str = "a") -> dict[str, Any]:
    """Publish the weights of one of the adapters as a body."""
    weights = (adapters / source / WEIGHTS_FILE).read_bytes()
    headers = {**BINARY, **bearer("op")}
    answer = httpx.post(f"{server.url}/v1/adapters/{name}/weights", content=weights, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def versions_of(server: Serving, name: str = "a") -> list[int]:
    found = httpx.get(f"{server.url}/v1/adapters/{name}", headers=bearer("op")).json()
    return [version["version"] for version in found["versions"]]


def test_a_stream_keeps_its_version_and_new_requests_take_the_newest(
    server: Serving, adapters: Path, alone: dict[str, str]
) -> None:
    publish(server, adapters, "a")
    question = [{"role": "user", "content": "Tell me a long story, and make it good."}]
    body = {"model": "a", "messages": question, "temperature": 0, "max_tokens": 3900, "ignore_eos": True}
    text, number = "", 0
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={**body, "stream": True}, headers=bearer("one"), timeout=60
    ) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if not number and text:
                number = publish(server, adapters, "b")["version"]
                assert chat(server, "a") == [alone["b"]]
                assert versions_of(server) == [number, number - 1], "the stream still uses the version before"
            if len(text) > 500:
                break
    whole = chat(server, "only-a", max_tokens=600)[0]
    assert text[:400] == whole[:400], "all of its tokens come from the version that it began with"
    eventually(lambda: versions_of(server) == [number])


def test_a_conversation_of_an_older_version_is_computed_again_under_the_newest(server: Serving, adapters: Path) -> None:
    def turn(model: str, text: str, before: str | None) -> dict[str, Any]:
        body = {"model": model, "input": text, "temperature": 0, "max_output_tokens": 16}
        answer = httpx.post(
            f"{server.url}/v1/responses",
            json={**body, "previous_response_id": before},
            headers=bearer("one"),
            timeout=60,
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    publish(server, adapters, "a")
    first = turn("a", "A long beginning of a conversation, which fills several blocks of the cache.", None)
    kept = turn("a", "And then?", first["id"])
    publish(server, adapters, "c")
    later = turn("a", "And then?", first["id"])
    other = turn("only-c", "And then?", first["id"])
    assert kept["usage"]["input_tokens_details"]["cached_tokens"] > 0
    assert later["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert later["output"] != kept["output"]
    assert [part["content"] for part in later["output"]] == [part["content"] for part in other["output"]]


def test_two_versions_alternate_under_load_and_no_answer_mixes_them(
    server: Serving, adapters: Path, alone: dict[str, str]
) -> None:
    publish(server, adapters, "a")
    done, mixed, seen = threading.Event(), [], set()

    def ask() -> None:
        while not done.is_set():
            answers = chat(server, "a", n=3)
            seen.update(answers)
            if len({*answers}) > 1 or not {*answers} <= {alone["a"], alone["b"]}:
                mixed.append(answers)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for number in range(200):
            publish(server, adapters, "ba"[number % 2])
            if number >= 11 and len(seen) > 1:  # on a busy machine, no answer may come between two publications
                break
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not mixed and seen == {alone["a"], alone["b"]}


def test_many_versions_leave_no_file_no_slot_and_no_adapter_behind(
    server: Serving, adapters: Path, folder: Path
) -> None:
    known = server.gauge("adapters")
    first = publish(server, adapters, "a")["version"]
    for number in range(1, 61):
        assert publish(server, adapters, "abc"[number % 3])["version"] == first + number
        if number % 20 == 0:
            chat(server, "a")
    eventually(lambda: versions_of(server) == [first + 60])
    (left,) = (folder / "tuning" / "versions").iterdir()
    assert sorted(path.name for path in left.iterdir()) == sorted([CONFIG_FILE, WEIGHTS_FILE])
    assert server.gauge("adapters") == known
    assert server.gauge("adapters_resident") <= 2
