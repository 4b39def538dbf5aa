"""/v1/files: OpenAI's client end to end, limits, tenants, names, a full disk."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from holdfast.server import connection
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs import files as module
from holdfast.server.jobs.files import Files, persist
from holdfast.server.jobs.tables import FileTable
from holdfast.server.multipart import OVERHEAD, FormReader, base_name
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store

Http = Callable[..., httpx.AsyncClient]
BATCH = {"purpose": "batch"}


async def upload(api: httpx.AsyncClient, data: bytes = b"{}\n", name: str = "in.jsonl", **form: Any) -> httpx.Response:
    """POST a form, with the header that the client creates for it."""
    fields = BATCH | form.pop("fields", {})
    sent = {name: value for name, value in fields.items() if value is not None}
    api.headers.pop("content-type", None)
    return await api.post("/v1/files", data=sent, files={"file": (name, data)}, **form)


async def test_openais_client_uploads_lists_reads_and_deletes_files(listening: Callable[..., Any]) -> None:
    data = bytes(range(256)) * 9000  # Larger than the pieces that are read and written.
    async with listening() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        made = await client.files.create(file=("a b.jsonl", data), purpose="batch")
        assert (made.filename, made.bytes, made.purpose, made.status) == ("a b.jsonl", len(data), "batch", "processed")
        assert made.expires_at == made.created_at + 30 * 86400
        kept = await client.files.create(file=io.BytesIO(b"x"), purpose="fine-tune")
        assert kept.expires_at is None
        short = await client.files.create(
            file=b"y", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert short.expires_at == short.created_at + 3600
        assert (await client.files.content(made.id)).content == data
        assert await client.files.retrieve(made.id) == made
        assert [file.id async for file in client.files.list()] == [short.id, kept.id, made.id]
        assert [file.id async for file in client.files.list(order="asc", limit=1)] == [made.id, kept.id, short.id]
        assert [file.id async for file in client.files.list(purpose="fine-tune")] == [kept.id]
        assert (await client.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(made.id)
        with pytest.raises(openai.NotFoundError, match="gone"):
            await client.files.list(after="gone")


async def test_another_tenants_file_is_not_found(http: Http) -> None:
    async with http(api_key=("one", "two"), headers={"authorization": "Bearer one"}) as api:
        id = (await upload(api)).json()["id"]
        other = {"authorization": "Bearer two"}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            refused = await api.request(method, f"/v1/files/{id}{path}", headers=other)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
        assert (await api.get("/v1/files", headers=other)).json()["data"] == []
        assert (await api.get(f"/v1/files/{id}")).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": None}, "purpose"),
        ({"purpose": "vision"}, "purpose"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[seconds]": "3600"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "²"}, "expires_after"),
        ({"colour": "red"}, "colour"),
        ({"purpose": "x" * 2000}, "purpose"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(http: Http, fields: dict[str, Any], param: str) -> None:
    async with http() as api:
        refused = await upload(api, fields=fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await api.get("/v1/files")).json()["data"] == []


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("in.jsonl", "in.jsonl"),
        ("../../etc/passwd", "passwd"),
        ("C:\\x\\y.jsonl", "y.jsonl"),
        ("a/..", "file"),
        ("", "file"),
        ("\x00\x1b[2J\u202e.txt", "__[2J_.txt"),
        ("ü" * 300, "ü" * 255),
    ],
)
def test_a_files_name_is_its_last_part_without_control_characters(given: str, shown: str) -> None:
    assert base_name(given) == shown


def form(*parts: bytes, boundary: bytes = b"B") -> bytes:
    return b"".join(b"--" + boundary + b"\r\n" + part + b"\r\n" for part in parts) + b"--" + boundary + b"--\r\n"


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'content-disposition: form-data; name="' + name.encode() + b'"' + more + b"\r\n\r\n" + value


FILE = part("file", b"data", b'; filename="f"')


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_a_form_reads_the_same_in_pieces_of_any_size(size: int) -> None:
    data = b"\r\n--B-\r\n--" * 50
    text = b"ignored\r\n" * 0 + form(part("purpose", b"batch"), part("file", data, b'; filename="x\xc3\xa9"'))
    reader = FormReader("Multipart/Form-Data; boundary=B")
    found = b"".join(reader.feed(text[at : at + size]) for at in range(0, len(text), size))
    reader.finish()
    assert (found, reader.fields, reader.filename) == (data, {"purpose": "batch"}, "xé")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"nonsense", "invalid_form"),
        (form(FILE)[:-6], "invalid_form"),
        (form(part("purpose", b"batch")), "missing_required_parameter"),
        (form(FILE, FILE), "invalid_form"),
        (form(part("a", b""), part("a", b""), FILE), "invalid_form"),
        (form(*(part(f"p{n}", b"") for n in range(16)), FILE), "invalid_form"),
        (form(part("file", b"", b"; " + b"x" * 1100)), "invalid_form"),
        (form(b"x: y\r\n" * 9 + FILE), "invalid_form"),
        (form(b"\r\n\r\ndata"), "invalid_form"),
        (form(part("note", b"x" * 1025), FILE), "invalid_value"),
    ],
)
def test_a_form_beyond_its_limits_or_broken_is_refused(body: bytes, code: str) -> None:
    reader = FormReader("multipart/form-data; boundary=B")
    with pytest.raises(ApiError) as refused:
        reader.feed(body)
        reader.finish()
    assert (refused.value.status, refused.value.code) == (400, code)


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data", f"multipart/form-data; boundary={'x' * 71}"])
def test_a_body_that_is_not_a_form_is_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        FormReader(kind)
    assert refused.value.status == 415


async def test_a_file_that_is_too_large_is_refused_and_leaves_nothing(http: Http, tmp_path: Path) -> None:
    async with http(max_file_mb=0.01, files=str(tmp_path)) as api:
        for size, status in ((10_000, 200), (10_001, 413), (10_000 + OVERHEAD, 413), (0, 400)):
            assert (await upload(api, b"x" * size)).status_code == status

        async def undeclared() -> AsyncIterator[bytes]:
            yield form(part("file", b"", b'; filename="f"'))[:-9]
            for _ in range(20):
                yield b"x" * 1000

        kind = {"content-type": "multipart/form-data; boundary=B"}
        refused = await api.post("/v1/files", content=undeclared(), headers=kind)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "file_too_large")
        assert [path.name[:5] for path in tmp_path.iterdir() if not path.name.startswith("owner")] == ["file-"]
        assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())


async def test_files_take_at_most_their_gigabytes_and_a_key_at_most_its_share(http: Http) -> None:
    async with http(files_gb=0.001, api_key=("one", "two"), headers={"authorization": "Bearer one"}) as api:
        assert (await upload(api, b"x" * 500_000)).status_code == 200
        refused = await upload(api, b"x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "files_full")
        assert "500000" in refused.json()["error"]["message"]
        other = {"authorization": "Bearer two"}
        assert (await upload(api, b"x" * 400_000, headers=other)).status_code == 200
        (id,) = [each["id"] for each in (await api.get("/v1/files")).json()["data"]]
        assert (await api.delete(f"/v1/files/{id}")).json() == {"id": id, "object": "file", "deleted": True}
        assert (await upload(api, b"x")).status_code == 200


async def test_uploads_at_once_share_the_space_and_their_number_is_bounded(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, taken = asyncio.Event(), asyncio.Event()

    async def slow(size: int) -> AsyncIterator[bytes]:
        whole = form(part("purpose", b"batch"), part("file", b"x" * size, b'; filename="f"'))
        yield whole[:-9]
        taken.set()
        await go.wait()
        yield whole[-9:]

    kind = {"content-type": "multipart/form-data; boundary=B"}
    async with http(files_gb=0.001) as api:
        first = asyncio.create_task(api.post("/v1/files", content=slow(600_000), headers=kind))
        await taken.wait()
        assert (await api.post("/v1/files", content=slow(500_000), headers=kind)).status_code == 429
        monkeypatch.setattr(module, "MOST_UPLOADS", 1)
        refused = await upload(api)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        go.set()
        assert (await first).status_code == 200
        assert (await upload(api)).status_code == 200


async def test_idle_uploads_of_one_key_leave_places_for_others(http: Http) -> None:
    begun, go = asyncio.Semaphore(0), asyncio.Event()
    whole = form(part("purpose", b"batch"), FILE)

    async def idle() -> AsyncIterator[bytes]:
        yield whole[:60]
        begun.release()
        await go.wait()
        yield whole[60:]

    kind = {"content-type": "multipart/form-data; boundary=B", "authorization": "Bearer one"}
    async with http(api_key=("one", "two"), headers={"authorization": "Bearer two"}) as api:
        uploads = [asyncio.create_task(api.post("/v1/files", content=idle(), headers=kind)) for _ in range(20)]
        for _ in range(8):
            await begun.acquire()
        assert (await upload(api)).status_code == 200
        go.set()
        codes = [(await each).status_code for each in uploads]
        assert sorted(codes) == [200] * 8 + [429] * 12
        refused = next(each for each in uploads if each.result().status_code == 429).result()
        assert refused.headers["retry-after"] == "1" and "may send 8 at once" in refused.json()["error"]["message"]
        assert (await api.post("/v1/files", content=whole, headers=kind)).status_code == 200


async def test_an_upload_that_only_announces_bytes_ends_and_leaves_its_place(
    listening: Callable[..., Any], tmp_path: Path
) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=B\r\n"
    async with listening(body_seconds=0.1, files=str(tmp_path)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(module.MOST_UPLOADS)]
        for _, writer in opened:
            writer.write(head + b"content-length: 400000000\r\n\r\n--B\r\n")
        lines = await asyncio.wait_for(asyncio.gather(*(reader.readline() for reader, _ in opened)), 60)
        assert {line.split()[1] for line in lines} == {b"408"}
        async with httpx.AsyncClient(base_url=server.url) as api:
            while (made := await upload(api)).status_code == 503:
                pass
            assert made.status_code == 200
        for _, writer in opened:
            writer.close()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("upload-")] == []


async def test_an_upload_has_only_the_space_that_concurrent_uploads_leave(http: Http) -> None:
    go, taken = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        whole = form(part("purpose", b"batch"), part("file", b"x" * 600_000, b'; filename="f"'))
        yield whole[:200]
        taken.set()
        await go.wait()
        yield whole[200:]

    async with http(files_gb=0.001) as api:
        kind = {"content-type": "multipart/form-data; boundary=B"}
        first = asyncio.create_task(api.post("/v1/files", content=slow(), headers=kind))
        await taken.wait()
        assert (await upload(api, b"x" * 500_000)).status_code == 200
        go.set()
        assert (await first).json()["error"]["code"] == "files_full"
        assert len((await api.get("/v1/files")).json()["data"]) == 1


async def test_a_full_disk_is_a_503_that_stores_nothing_until_there_is_room(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http(files=str(tmp_path)) as api:
        with monkeypatch.context() as patch:

            def full(descriptor: int) -> None:
                raise OSError(errno.ENOSPC, "No space left on device")

            patch.setattr(module.os, "fsync", full)
            refused = await upload(api)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "files_unavailable")
            assert str(tmp_path) not in refused.text
        assert [path for path in tmp_path.iterdir() if not path.name.startswith("owner")] == []
        assert (await upload(api)).status_code == 200


async def test_an_upload_that_the_store_or_the_disk_refuses_at_its_end_leaves_no_bytes(
    http: Http, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise sqlite3.OperationalError("database is locked")

    def fail(directory: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with http(files=str(tmp_path)) as api:
        for place, name, broken in ((FileTable, "add", refuse), (module, "sync_directory", fail)):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, broken)
                assert (await upload(api)).status_code in (500, 503)
            assert [path for path in tmp_path.iterdir() if not path.name.startswith("owner")] == []
        assert (await api.get("/v1/files")).json()["data"] == []
        assert (await upload(api)).status_code == 200


async def test_bytes_that_are_gone_are_a_503_and_the_file_can_be_deleted(http: Http, tmp_path: Path) -> None:
    async with http(files=str(tmp_path)) as api:
        id = (await upload(api)).json()["id"]
        (tmp_path / id).unlink()
        assert (await api.get(f"/v1/files/{id}/content")).status_code == 503
        assert (await api.delete(f"/v1/files/{id}")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://127.0.0.1:9"}, 403),
        ({"origin": "http://[::1]:9"}, 403),
        ({"origin": "https://ship.example"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://203.0.113.9"}, 403),
        ({"origin": "http://evil.example?localhost"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "192.0.2.1:8000", "origin": "http://192.0.2.1:8000"}, 200),
    ],
)
async def test_without_keys_a_form_from_another_web_site_is_refused(
    http: Http, headers: dict[str, str], status: int
) -> None:
    async with http(allowed_host=("ship.example",)) as api:
        assert (await upload(api, headers=headers)).status_code == status


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/batches", 415), ("/v1/chat/completions", 415), ("/v1/files/x/content", 405)]
)
async def test_without_keys_a_form_is_taken_by_no_other_route(http: Http, path: str, status: int) -> None:
    async with http() as api:
        api.headers.pop("content-type")
        assert (await api.post(path, data=BATCH, files={"file": b"x"})).status_code == status


async def test_expired_files_and_abandoned_uploads_are_deleted(tmp_path: Path) -> None:
    now = [1000.0]
    config = ServerConfig(store="memory", files=str(tmp_path / "files"))
    store = AsyncStore(open_store(config))
    files = Files(store, config, lambda: now[0])

    async def pieces() -> AsyncIterator[bytes]:
        yield form(part("purpose", b"batch"), FILE)

    made = await files.receive("", "multipart/form-data; boundary=B", None, pieces())
    kept = await files.copy("", "batch", "in.jsonl", io.BytesIO(b"kept"))
    old = files.directory / "upload-old"
    for path in (old, files.directory / "upload-new"):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    for name in ("upload-0", "upload-z"):  # they have gone by the time that they are looked at
        (files.directory / name).symlink_to("nowhere")
    now[0] += 30 * 86400 - 1
    assert (await files.get("", made.id)).bytes == 4
    now[0] += 1
    with pytest.raises(ApiError, match="not found"):
        await files.get("", made.id)
    await files.clean()
    assert {path.name for path in files.directory.iterdir() if path.exists()} == {kept.id, "upload-new"}
    files.close()
    store.close()


async def test_a_necessary_write_is_retried_until_it_succeeds_unless_that_is_impossible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    errors: list[Exception] = []

    async def work() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    errors += [OSError(errno.ENOSPC, "full"), *(ApiError("full", status=503, code="store") for _ in range(6))]
    assert await persist(work) == "done"
    assert waits == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0]
    for error in (FileNotFoundError(errno.ENOENT, "gone"), ApiError("wrong", status=404, code="file_not_found")):
        errors.append(error)
        with pytest.raises(type(error)):
            await persist(work)
    assert len(waits) == 7


def test_an_unusable_directory_is_reported(tmp_path: Path) -> None:
    config = ServerConfig(store="memory", files=str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    store = AsyncStore(open_store(config))
    with pytest.raises(StoreError, match="cannot be used"):
        Files(store, config)
    store.close()


@pytest.mark.parametrize(("pause", "rate", "status"), [(0.15, 1, b"200"), (0.6, 256 * 1024, b"408")])
async def test_a_long_upload_has_time_by_its_length_and_a_stalled_one_ends(
    listening: Callable[..., Any], pause: float, rate: int, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte that came gives a body more time: at first so much that a busy machine does not use it up."""
    monkeypatch.setattr(connection, "UPLOAD_RATE", rate)
    body = form(part("purpose", b"batch"), part("file", b"x" * (128 << 10), b'; filename="f"'))
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=B\r\n"
    async with listening(body_seconds=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 20_000):
            writer.write(body[at : at + 20_000])
            await writer.drain()
            await asyncio.sleep(pause if at == 20_000 else 0)
            if pause > 0.5 and at:
                break
        assert (await asyncio.wait_for(reader.readline(), 60)).split()[1] == status
        writer.close()
