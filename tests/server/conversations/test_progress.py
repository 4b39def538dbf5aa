"""Progress: what a server does with the records of streams that it writes, also while the store fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.progress import Progress
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.conversations.stream_records import StreamRecord, StreamRecords
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store

RECORD = StreamRecord("resp_1", "one", b"recipe", None)


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[list[Progress]]:
    """Two servers over one store, which both run."""
    stores = [AsyncStore(open_store(ServerConfig(store=str(tmp_path / "s.sqlite")))) for _ in range(2)]
    yield [Progress(store, lambda: None) for store in stores]
    for store in stores:
        await asyncio.to_thread(store.close)


async def found(progress: Progress) -> StreamRecord | None:
    return await progress.store.read(lambda store: store.streams.find("one", "resp_1"))


def failing(patch: pytest.MonkeyPatch, method: str) -> None:
    """Make one kind of write fail."""

    def fail(*_: object, **__: object) -> None:
        raise OSError("the disk is gone")

    patch.setattr(StreamRecords, method, fail)


@pytest.mark.parametrize("left", [True, False])
async def test_a_record_that_is_given_up_while_the_store_fails_is_given_up_later(
    servers: list[Progress], monkeypatch: pytest.MonkeyPatch, left: bool
) -> None:
    writer, other = servers
    await writer.begin(RECORD)
    assert writer.recorded == {"resp_1"}
    with monkeypatch.context() as patch:
        failing(patch, "leave" if left else "drop")
        await (writer.leave("resp_1") if left else writer.drop("resp_1"))
        assert writer.recorded == set()
        with pytest.raises(ApiError, match="cannot be used now"):
            await writer.settle()
    assert await found(other) == RECORD
    await writer.settle()
    assert await other.take("one", "resp_1") is left


async def test_a_record_that_is_taken_again_is_not_given_up_any_more(
    servers: list[Progress], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = servers
    await writer.begin(RECORD)
    with monkeypatch.context() as patch:
        failing(patch, "drop")
        await writer.drop("resp_1")
    assert await writer.take("one", "resp_1")
    await writer.settle()
    assert await found(other) == RECORD


async def test_a_response_in_progress_is_refused_until_it_ends(servers: list[Progress]) -> None:
    progress, _ = servers
    async with progress.noted("resp_1"):
        with pytest.raises(ApiError) as refused:
            async with progress.noted("resp_1"):
                pass
        assert (refused.value.status, refused.value.retry_after) == (409, 1)
        with pytest.raises(ApiError):
            progress.check("resp_1")
    progress.check("resp_1")


async def test_each_record_reports_that_the_lease_must_be_renewed(servers: list[Progress]) -> None:
    calls: list[str] = []
    progress = Progress(servers[0].store, lambda: calls.append("renew"))
    await progress.begin(RECORD)
    assert calls == ["renew"]
    async with progress.noted("resp_1"):
        pass
    assert progress.recorded == set()
    assert await progress.take("one", "resp_1") and calls == ["renew", "renew"]
