"""A store behind an event loop, when its database fails."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.protocol import ApiError
from holdfast.server.run import open_store


async def test_a_database_failure_is_a_503_that_names_no_database(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = AsyncStore(open_store(ServerConfig(store=str(path))))
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE conversations")
    with pytest.raises(ApiError) as refused:
        await store.run(lambda store: store.conversations.get("tenant", "conv_a"))
    assert (refused.value.status, refused.value.code) == (503, "store_unavailable")
    assert "sqlite" not in refused.value.message
    store.close()
