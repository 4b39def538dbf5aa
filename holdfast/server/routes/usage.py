"""Routes with the usage of all keys, in the form of OpenAI's API for organizations. They are for operators."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from fastapi import FastAPI, Request

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.keys.ring import KeyRing
from holdfast.server.keys.usage_table import DAY, HOUR, MINUTE, Bucketed, UsageTable, total
from holdfast.server.protocol import invalid
from holdfast.server.routes.http import query_integer
from holdfast.server.routes.operators import check_operator

WIDTHS = {"1m": (MINUTE, 60, 1440), "1h": (HOUR, 24, 168), "1d": (DAY, 7, 31)}
"""Seconds, default number and largest number of buckets of a page, by `bucket_width`."""
GROUPS = ("api_key_id", "project_id", "model")
"""Values of `group_by`. A key's id is its name, and its project is its tenant."""
LATEST = 1 << 40
"""Largest time that is accepted, in seconds since 1970."""


class UsageQuery(NamedTuple):
    """Query parameters of a page of usage."""

    start: int
    """Beginning of the first bucket, in seconds since 1970."""
    end: int
    """Time before which all buckets begin."""
    width: int
    limit: int
    groups: tuple[str, ...]
    keys: tuple[str, ...]
    """Names of the keys that are counted; empty: all."""
    models: tuple[str, ...]
    projects: tuple[str, ...]


def add_usage_routes(app: FastAPI, store: AsyncStore, ring: KeyRing, config: ServerConfig) -> None:
    """Add GET /v1/organization/usage/completions and /v1/organization/usage/embeddings."""

    async def usage(request: Request, kind: str) -> dict[str, Any]:
        check_operator(request, config)
        query = usage_query(request, int(time.time()))
        last = min(query.end, query.start + query.limit * query.width)
        rows = await store.read(partial(_rows, kind, query.width, query.start, last))
        return page(kind, query, rows, ring.tenants())

    @app.get("/v1/organization/usage/completions")
    async def completions(request: Request) -> dict[str, Any]:
        """Tokens and requests of completions, chats, messages and responses, by time, key and model. For operators."""
        return await usage(request, "completions")

    @app.get("/v1/organization/usage/embeddings")
    async def embeddings(request: Request) -> dict[str, Any]:
        """Tokens and requests of embeddings, by time, key and model. For operators."""
        return await usage(request, "embeddings")


def _rows(kind: str, width: int, start: int, end: int, store: Store) -> list[Bucketed]:
    return UsageTable(store.database).buckets(kind, width, start, end)


def usage_query(request: Request, now: int) -> UsageQuery:
    """Parse the query. Raises ApiError, which names the invalid parameter."""
    given = request.query_params
    name = given.get("bucket_width", "1d")
    if name not in WIDTHS:
        raise invalid(f"bucket_width is {name[:32]!r}; it must be one of {', '.join(WIDTHS)}", "bucket_width")
    width, default, most = WIDTHS[name]
    if "start_time" not in given:
        raise invalid("start_time is missing; give a time in seconds since 1970", "start_time")
    start, end = seconds(request, "start_time", 0), seconds(request, "end_time", now + 1)
    if start >= end:
        raise invalid(f"start_time is {start} and end_time {end}; it must be earlier", "start_time")
    if "page" in given:
        start = seconds(request, "page", start)
    groups = values(request, "group_by")
    for group in groups:
        if group not in GROUPS:
            raise invalid(f"group_by has {group[:32]!r}; it must be one of {', '.join(GROUPS)}", "group_by")
    limit = query_integer(request, "limit", 1, most)
    return UsageQuery(
        start // width * width, end, width, default if limit is None else limit, groups,
        values(request, "api_key_ids"), values(request, "models"), values(request, "project_ids"),
    )  # fmt: skip


def seconds(request: Request, name: str, default: int) -> int:
    """Return a query parameter that is a time in seconds since 1970. Raises ApiError."""
    given = request.query_params.get(name)
    if given is None:
        return default
    if not re.fullmatch(r"[0-9]{1,12}", given) or int(given) > LATEST:
        raise invalid(f"{name} is {given[:32]!r}; it must be seconds since 1970, and at most {LATEST}", name)
    return int(given)


def values(request: Request, name: str) -> tuple[str, ...]:
    """Return a query parameter that is a list, written as name=a&name=b, name[]=a or name=a,b."""
    given = [*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]")]
    return tuple(each for text in given for each in text.split(",") if each)


def page(kind: str, query: UsageQuery, rows: Iterable[Bucketed], tenants: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of buckets, each with a result for each group. A bucket without usage has no result."""
    by_start: dict[int, dict[tuple[str | None, ...], list[Bucketed]]] = {}
    for row in rows:
        owner = {"api_key_id": row.key, "model": row.model, "project_id": tenants.get(row.key, "")}
        wanted = {"api_key_id": query.keys, "model": query.models, "project_id": query.projects}
        if all(not named or owner[field] in named for field, named in wanted.items()):
            group = tuple(owner[field] if field in query.groups else None for field in GROUPS)
            by_start.setdefault(row.start, {}).setdefault(group, []).append(row)
    last = min(query.end, query.start + query.limit * query.width)
    data = [
        {
            "object": "bucket",
            "start_time": start,
            "end_time": start + query.width,
            "results": [result(kind, group, found) for group, found in by_start.get(start, {}).items()],
        }
        for start in range(query.start, last, query.width)
    ]
    more = query.start + query.limit * query.width < query.end
    return {"object": "page", "data": data, "has_more": more, "next_page": str(last) if more else None}


def result(kind: str, group: tuple[str | None, ...], rows: Iterable[Bucketed]) -> dict[str, Any]:
    """Return OpenAI's object for the usage of one group in one bucket."""
    used = total(row.used for row in rows)
    found: dict[str, Any] = {
        "object": f"organization.usage.{kind}.result",
        "input_tokens": used.prompt,
        "num_model_requests": used.requests,
        "user_id": None,
        **dict(zip(GROUPS, group, strict=True)),
    }
    if kind == "completions":
        found |= {
            "output_tokens": used.output, "input_cached_tokens": used.cached,
            "input_audio_tokens": 0, "output_audio_tokens": 0, "batch": None,
        }  # fmt: skip
    return found
