"""The page's files: which clients get them, with which headers, and their size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import ValidationError, convert

from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.protocol import MAX_STOP_CHARACTERS, MAX_STOPS
from holdfast.server.routes.page import FOLDER, page_files

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
MOST_FIRST_BYTES, MOST_BYTES = 330_000, 3_600_000
"""Largest sizes of the files that the chat loads at once, and of all files."""


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_a_browser_gets_the_page_without_a_key(http: Callable[..., httpx.AsyncClient], keys: Any) -> None:
    async with http(api_key=keys) as api:
        index = await api.get("/", headers=BROWSER)
        files = re.findall(r'(?:href|src)="(page/[^"]+)"', index.text)
        answers = [await api.get(f"/{file}") for file in files]
    assert index.status_code == 200 and index.headers["content-type"] == "text/html; charset=utf-8"
    assert len(files) >= 5 and {answer.status_code for answer in answers} == {200}
    for answer in (index, *answers):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


async def test_other_clients_get_the_list_of_routes_and_need_a_key_where_there_are_any(
    http: Callable[..., httpx.AsyncClient],
) -> None:
    async with http() as api:
        assert (await api.get("/")).json()["name"] == "Holdfast"
        assert (await api.get("/", headers={"accept": "*/*"})).headers["vary"] == "accept"
    async with http(api_key=("secret",)) as api:
        assert (await api.get("/")).status_code == 401
        assert (await api.get("/v1/models", headers=BROWSER)).status_code == 401
        assert (await api.post("/", headers=BROWSER)).status_code == 401


async def test_files_are_cached_forever_under_their_version_and_the_page_is_revalidated(
    http: Callable[..., httpx.AsyncClient],
) -> None:
    async with http() as api:
        index = await api.get("/", headers=BROWSER)
        same = await api.get("/", headers={**BROWSER, "if-none-match": index.headers["etag"]})
        (script,) = re.findall(r'src="(page/[^"]+/main.js)"', index.text)
        answer = await api.get(f"/{script}")
        gone = await api.get("/page/0123456789abcdef/main.js")
        other = await api.get("/page/..%2Fapp.py")
        plain = await api.get(f"/{script}", headers={"accept-encoding": "identity"})
    for each in (index, same, answer, plain):  # by what a cache between may hold it apart
        assert each.headers["vary"] == "accept, accept-encoding"
    assert (index.headers["cache-control"], same.status_code, same.content) == ("no-cache", 304, b"")
    assert "immutable" in answer.headers["cache-control"] and answer.headers["content-encoding"] == "gzip"
    assert answer.content == plain.content == (FOLDER / "main.js").read_bytes()
    assert (gone.status_code, other.status_code) == (404, 404)


async def test_a_server_without_keys_does_not_serve_its_page_under_a_rebound_name(
    http: Callable[..., httpx.AsyncClient],
) -> None:
    async with http() as api:
        assert (await api.get("/", headers={**BROWSER, "host": "evil.example"})).status_code == 403


def first_files() -> set[Path]:
    """Return the files that the index and the chat load before anything is asked of them."""
    index = re.findall(r'(?:href|src)="page/{{version}}/([^"]+)"', (FOLDER / "index.html").read_text())
    waiting = [FOLDER / name for name in (*index, "chat.js")]
    found: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r"^import [^'(]*'(\./[^']+)';", path.read_text(), re.MULTILINE)
            waiting += [(path.parent / name).resolve() for name in names]
    return found


def test_what_few_need_is_not_loaded_at_first() -> None:
    first = first_files()
    names = {path.name for path in first}
    assert {"chat.js", "markdown.js", "marked.js", "prism.js", "formula.js"} <= names
    assert names.isdisjoint({"katex.js", "katex.css", "pdf_parser.js", "pdf_worker.js", "settings_dialog.js"})
    assert sum(path.stat().st_size for path in first) < MOST_FIRST_BYTES
    assert sum(len(file.body) for file in page_files().values()) < MOST_BYTES


async def test_a_font_is_sent_as_it_is(http: Callable[..., httpx.AsyncClient]) -> None:
    name = next(name for name in page_files() if name.endswith(".woff2"))
    async with http() as api:
        answer = await api.get(f"/page/{name}")
    assert answer.headers["content-type"] == "font/woff2" and "content-encoding" not in answer.headers
    assert answer.content == page_files()[name].body


NOT_FETCHED = {"http://www.w3.org/2000/svg", "http://localhost:8000/mcp"}
"""The name of SVG, and the address in the example of a tool."""


def test_the_page_has_no_inline_code_and_no_address_of_another_host() -> None:
    index = (FOLDER / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", index)
    own = [path for path in FOLDER.glob("*.*") if path.suffix in (".js", ".css", ".html")]
    assert len(own) >= 8
    for path in own:
        addresses = set(re.findall(r"https?://[^\s'\"]+", path.read_text())) - NOT_FETCHED
        assert not addresses, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", path.read_text()), path


def test_the_settings_have_the_servers_limits() -> None:
    script = (FOLDER / "settings.js").read_text()
    limits = re.findall(r"^  (\w+): \{ label: '[^']+', (min|above): ([-\d]+), max: ([\w. *]+),", script, re.MULTILINE)
    known = {"2 ** 24": 1 << 24, "Number.MAX_SAFE_INTEGER": (1 << 53) - 1}
    assert len(limits) == 9
    for name, kind, least, most in limits:
        low, high = int(least), known.get(most) or int(most)
        for value in (low if kind == "min" else low + 0.001, high):
            convert({name: value}, ResponseRequest)
        outside = [low] if kind == "above" else []
        if name not in (
            "seed",
            "max_output_tokens",
        ):  # The page allows less than the server.
            outside.append(high + 1)
        for value in outside:
            with pytest.raises(ValidationError):
                convert({name: value}, ResponseRequest)
    assert re.findall(r"const MOST_STOPS? = (\d+)", script) == [str(MAX_STOPS), str(MAX_STOP_CHARACTERS)]
