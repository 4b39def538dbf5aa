"""Fixtures of the tests of keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path

import openai
import pytest
from stored_keys import Stored

from holdfast.server.conversations.database import Database
from holdfast.server.keys import accounts, ring


@pytest.fixture
def always_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look for changed keys at each request, however long that takes, and exchange their usage all the time."""
    monkeypatch.setattr(ring, "CACHE_SECONDS", 0.0)
    monkeypatch.setattr(ring, "WAIT_SECONDS", 60.0)
    monkeypatch.setattr(accounts, "EXCHANGE_SECONDS", 0.02)


@pytest.fixture
def store(tmp_path: Path) -> str:
    """Path of a store in a file."""
    return str(tmp_path / "store.sqlite")


@pytest.fixture
def keys(store: str) -> Iterator[Stored]:
    """The keys of that store."""
    with closing(Database(store)) as database:
        yield Stored(database)


@pytest.fixture
async def official() -> AsyncIterator[Callable[[str, str], openai.AsyncOpenAI]]:
    """Makes OpenAI's clients from the server's URL and a key, and closes them at the end."""
    async with AsyncExitStack() as held:
        made: list[openai.AsyncOpenAI] = []

        def make(url: str, key: str) -> openai.AsyncOpenAI:
            made.append(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0))
            held.push_async_callback(made[-1].close)
            return made[-1]

        yield make
