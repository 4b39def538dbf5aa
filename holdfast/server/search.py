"""WebSearch: queries a SearXNG server for the model's web searches."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import msgspec

from holdfast.server.formats.toolset import Tool
from holdfast.server.time_spent import spending

log = logging.getLogger("holdfast.server")

SEARCH_KINDS = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
"""Types of the web search tool in the Responses API."""
RESULTS = {"low": 3, "medium": 5, "high": 10}
"""Maximum number of results of a search, by the tool's `search_context_size`."""
MOST_SEARCHES = 8
"""Maximum number of searches in one response."""
MOST_QUERY, MOST_TITLE, MOST_URL, MOST_TEXT = 512, 200, 2000, 800
"""Maximum number of characters of a query, and of each result's title, URL and text."""
MOST_BYTES = 4 << 20
"""Maximum number of bytes of a reply from the search engine."""
SECONDS = 10.0
"""Seconds to wait for a reply from the search engine."""

SEARCH_TOOL = Tool(
    "web_search",
    "Search the web. Returns titles, addresses and extracts of the pages that were found.",
    {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "What to search for.", "maxLength": MOST_QUERY}},
        "required": ["query"],
        "additionalProperties": False,
    },
)
"""The web search tool, as the model sees it."""

NOTHING, FAILED = "Nothing was found.", "The search failed."
"""Texts that the model reads instead of results."""

Result = dict[str, str]
"""A search result with the keys title, url and text."""


class SearchFailed(Exception):
    """A search gave no results. The message is the reason."""


class _Found(msgspec.Struct):
    url: str
    title: str = ""
    content: str | None = None


class _Reply(msgspec.Struct):
    results: list[_Found]


class WebSearch:
    """Client of the SearXNG server."""

    def __init__(self, url: str) -> None:
        """`url` is the address of the SearXNG server, whose settings must allow JSON. Sends no request yet."""
        self._url = f"{url.rstrip('/')}/search"
        self._http = httpx.AsyncClient(timeout=SECONDS)

    async def ask(self, query: str, most: int) -> list[Result]:
        """Return at most `most` results, shortened. Raises SearchFailed."""
        params = {"q": query[:MOST_QUERY], "format": "json"}
        try:
            with spending("search"):
                body = await self._get(params)
            found = msgspec.json.decode(body, type=_Reply).results
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeError) as error:
            log.warning("a web search failed: %s", f"{error}" or type(error).__name__)
            raise SearchFailed("the search engine cannot be used now") from None
        return [
            {"title": page.title[:MOST_TITLE], "url": page.url, "text": (page.content or "")[:MOST_TEXT]}
            for page in found
            if len(page.url) <= MOST_URL
        ][:most]

    async def _get(self, params: Mapping[str, str]) -> bytes:
        async with self._http.stream("GET", self._url, params=params) as response:
            response.raise_for_status()
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MOST_BYTES:
                    raise httpx.DecodingError(f"the reply has more than {MOST_BYTES} bytes")
            return body

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def read_query(arguments: str) -> str:
    """Return the query of a call, from the call's arguments as JSON text. Raises SearchFailed."""
    try:
        given: Any = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        given = None
    query = given.get("query") if isinstance(given, dict) else given
    if query is None and isinstance(given, dict) and len(given) == 1:
        (query,) = given.values()  # Some models name it q or input.
    if not isinstance(query, str) or not query.strip():
        raise SearchFailed("the arguments have no query")
    return query[:MOST_QUERY]


def format_results(results: Sequence[Result]) -> str:
    """Format results for the model to read."""
    if not results:
        return NOTHING
    pages = (f"{number}. {page['title']}\n{page['url']}\n{page['text']}" for number, page in enumerate(results, 1))
    return "\n\n".join(pages)
