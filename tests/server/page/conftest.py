"""A headless Chromium, and the real server over a fake engine in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_engine import FakeClient, FakeText, engine_info
from serving import listening

from holdfast.server import run

PATIENCE_MS = 60_000
"""Most milliseconds that a test waits for what a page shows. A busy machine may stand still for seconds."""
WIDE = {"width": 1280, "height": 800}
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    for item in items:
        if reason is not None and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=reason))


def program() -> str | None:
    """Return the installed browser's path."""
    found = (shutil.which(name) for name in PROGRAMS)
    return os.environ.get("HOLDFAST_TEST_CHROMIUM") or next(filter(None, found), None)


def missing() -> str | None:
    """Return why there can be no tests in a browser; None if there can."""
    if program() is None:
        return f"no {', '.join(PROGRAMS)}, and no HOLDFAST_TEST_CHROMIUM; on Debian: apt-get install chromium"
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's browser, for one module, because its loop must end before other tests begin theirs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def axe() -> Callable[[Any], list[str]]:
    """Return descriptions of the serious and critical faults that axe finds on a page."""
    from axe_playwright_python.sync_playwright import Axe

    def found(page: Any) -> list[str]:
        return [
            f"{each['id']}: {each['nodes'][0]['html']} {each['nodes'][0]['failureSummary']}"
            for each in Axe().run(page).response["violations"]
            if each["impact"] in ("serious", "critical")
        ]

    return found


@pytest.fixture
def fresh_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open an address in a fresh profile: `fresh_page(url, key, ...)`. An unexpected line in the page's log fails."""
    contexts, errors = [], []

    def open(url: str, key: str | None = None, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        contexts.append(context)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('holdfast.key', {json.dumps(key)})")
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda message: errors.append(message.text) if unexpected(message) else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        return page

    yield open
    for context in contexts:
        context.close()
    assert errors == []


def unexpected(message: Any) -> bool:
    """Whether a console message is about more than a refused request, which the page itself shows."""
    return message.type in ("error", "warning") and not re.search("status of 40[0149]", message.text)


@dataclass
class Served:
    """A running server: its address, and its engine."""

    client: FakeClient
    url: str = ""
    loop: Any = None
    up: threading.Event = field(default_factory=threading.Event)

    def hold(self) -> Callable[[], None]:
        """Let each answer wait after its first word, until the returned function is called."""
        event = self.client.hold = asyncio.Event()

        def go_on() -> None:
            self.client.hold = None
            self.loop.call_soon_threadsafe(event.set)

        return go_on


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Served]]:
    """Start servers with these settings, and end them with the module."""
    ends: list[Callable[[], None]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(run, "signals", no_signals)

    def start(**config: Any) -> Served:
        text = FakeText(opening="<assistant>")
        served = Served(FakeClient(text=text, ends=True, info=engine_info(max_model_len=100_000)))
        over = asyncio.Event()

        async def serving() -> None:
            served.loop = asyncio.get_running_loop()
            async with listening(served.client, **config) as server:
                served.url = server.url
                served.up.set()
                await over.wait()

        thread = threading.Thread(target=asyncio.run, args=(serving(),))
        thread.start()
        assert served.up.wait(200)

        def end() -> None:
            served.loop.call_soon_threadsafe(over.set)
            thread.join()

        ends.append(end)
        return served

    yield start
    for end in ends:
        end()
    patch.undo()


@contextmanager
def no_signals(_: Sequence[int]) -> Iterator[asyncio.Queue[int]]:
    """Return no signals, because only the main thread can receive them."""
    yield asyncio.Queue()
