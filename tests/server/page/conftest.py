"""A headless Chromium, and the real server over a fake engine in a thread."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urljoin

import pytest
from fake_engine import FakeClient, FakeText, engine_info
from serving import listening

from holdfast.server import run
from tests.after_failure import FAILED

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


class Tab:
    """A page that tests use one after another, each as if its profile were new.

    A new profile takes ten times as long: it has no compiled modules, an empty cache, and a process that starts.
    """

    def __init__(self, browser: Any) -> None:
        self.errors: list[str] = []
        """Unexpected lines of the page's log since it was opened."""
        self._context = browser.new_context(viewport=WIDE)
        self.page = self._context.new_page()
        watch(self.page, self.errors)
        self._session = self._context.new_cdp_session(self.page)
        self._session.send("Page.enable")

    def open(
        self, url: str, start: str, *, viewport: Any = WIDE, color_scheme: str = "light", reduced_motion: str = "reduce"
    ) -> None:
        """Open an address without what pages have stored so far. The script `start` runs before the page's own."""
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=color_scheme, reduced_motion=reduced_motion)
        source = f"localStorage.clear(); sessionStorage.clear(); {start}"
        script = self._session.send("Page.addScriptToEvaluateOnNewDocument", {"source": source})
        self.page.goto(url)
        self._session.send("Page.removeScriptToEvaluateOnNewDocument", script)

    def leave(self) -> None:
        """End what the page does, and close the pages that it or a test has opened.

        It goes to another page of the server: for one of another origin, the browser would start a new process.
        """
        for other in self._context.pages[1:]:
            other.close()
        self.page.unroute_all()
        self.page.goto(urljoin(self.page.url, "/health/live"))
        self.errors.clear()

    def close(self) -> None:
        self._context.close()


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Iterator[list[Tab]]:
    """The tab that is free to be used again, if there is one."""
    tabs: list[Tab] = []
    yield tabs
    for tab in tabs:
        tab.close()


@pytest.fixture
def fresh_page(request: pytest.FixtureRequest, browser: Any, tabs: list[Tab]) -> Iterator[Callable[..., Any]]:
    """Open an address as in a new profile: `fresh_page(url, key, ...)`. An unexpected line in the page's log fails.

    A test's first page is that of the test before, unless that failed. Patterns in `routes` are answered by the test.
    """
    from playwright.sync_api import Error

    used: list[Tab] = []

    def open(url: str, key: str | None = None, routes: Mapping[str, Any] | None = None, **options: Any) -> Any:
        tab = tabs.pop() if tabs else Tab(browser)
        used.append(tab)
        for pattern, answer in (routes or {}).items():
            tab.page.route(pattern, answer)
        start = "" if key is None else f"sessionStorage.setItem('holdfast.key', {json.dumps(key)})"
        tab.open(url, start, **options)
        return tab.page

    yield open
    errors = [error for tab in used for error in tab.errors]
    if used and not errors and not request.node.stash.get(FAILED, False):
        with suppress(Error):  # the test has ended its server
            used[0].leave()
            tabs.append(used.pop(0))
    for tab in used:
        tab.close()
    assert errors == []


def watch(page: Any, errors: list[str]) -> None:
    """Note the unexpected lines of a page's log, and be patient with it."""
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: errors.append(message.text) if unexpected(message) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))


def unexpected(message: Any) -> bool:
    """Whether a console message is about more than a refused request, which the page itself shows."""
    return message.type in ("error", "warning") and not re.search("status of 40[01349]", message.text)


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
