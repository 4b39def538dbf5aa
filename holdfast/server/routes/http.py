"""Code that routes share: bounded bodies, JSON, pages, event streams, and work that stops if the client leaves."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.protocol import item_list
from holdfast.server.conversations.store import not_found
from holdfast.server.conversations.values import Item
from holdfast.server.protocol import ApiError, Body, RequestBody, invalid, parse, read_object, typed, with_more
from holdfast.server.replies import encode
from holdfast.server.service import LARGE, Service

T = TypeVar("T")

ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""zlib's window bits by content encoding."""
SMALL = 1 << 14
"""Number of bytes from which a body is parsed off the event loop. Converting a grammar takes up to 1 us per byte."""
NUMBER = re.compile(r"-?\d{1,20}(\.\d{1,9})?")
LEAST_COMPRESSED = 1024
"""Number of bytes from which a body is compressed, if the client accepts it."""


class JSON(Response):
    """A JSON body, encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(encode(body), status, headers)


VERSION = "anthropic-version"
"""Header that all clients of Anthropic's API send."""


def error_body(error: ApiError, scope: Scope) -> dict[str, Any]:
    """Return an error in the form that the client of a request reads.

    The path says which, except for the routes of models, which clients of OpenAI's and of Anthropic's API share.
    """
    path = scope["path"]
    shared = path == "/v1/models" or path.startswith("/v1/models/")
    if shared and any(name == VERSION.encode() for name, _ in scope["headers"]):
        return error.message_body()
    return error.body_for(path)


class ReadBody(NamedTuple):
    """A JSON body that was read before its route was known."""

    fields: dict[str, Any]
    size: int
    """Number of bytes of the JSON."""


class EventStream(StreamingResponse):
    """Server-sent events. Their source is closed when the response ends, also if it fails or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], failed: Callable[[Exception], bytes]) -> None:
        async def body() -> AsyncGenerator[bytes, None]:
            yield first
            try:
                async for chunk in rest:
                    yield chunk
            except Exception as error:
                yield failed(error)

        super().__init__(body(), headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            pass
        finally:
            await self.rest.aclose()


class LineStream(EventStream):
    """JSON objects, one a line."""

    media_type = "application/x-ndjson"


async def start_stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    failed: Callable[[Exception], bytes],
    kind: type[EventStream] = EventStream,
) -> EventStream:
    """Wait for the first event and then return the stream. An earlier error raises, so that it gets its own status.

    A later error becomes the last event, made by `failed`.
    """

    async def begin() -> bytes:
        return await anext(events, b"")

    return kind(await while_connected(request.receive, begin()), events, failed)


def tenant_of(request: Request) -> str:
    """Return the request's tenant. Requests of one tenant may share cached prefixes."""
    tenant: str = request.state.tenant
    return tenant


WISHES = {
    f"x-holdfast-{name.replace('_', '-')}".encode(): name
    for name in ("expected_pause_ms", "keep_until", "ttft_ms", "tbt_ms", "complete_ms")
}
"""Fields of requests that a client may also give as headers, by the header's name. A field goes before its header."""


def wishes(request: Request) -> dict[str, Any]:
    """Return the fields that the request's headers give. A number stays a number."""
    found: dict[str, Any] = {}
    for name, value in request.scope["headers"]:
        if (field := WISHES.get(name)) is not None:
            text = value.decode("latin-1").strip()
            found[field] = float(text) if NUMBER.fullmatch(text) else text
    return found


class BodyBudget:
    """Counts the bytes of bodies that are being received, up to `limit` in total and `tenant_limit` per tenant."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self.held: Counter[str] = Counter()
        """Number of bytes held by each tenant."""

    @classmethod
    def of(cls, config: ServerConfig) -> BodyBudget:
        """Create the configured budget. With several keys, each key may use its share, but at least one body."""
        limit, one = config.max_bodies_bytes, config.max_body_bytes
        return cls(limit, max(int(limit * config.share), min(limit, one)))

    def add(self, size: int, tenant: str) -> None:
        """Count more bytes of a tenant. Raises ApiError beyond the limits, but counts them nevertheless."""
        self.held[tenant] += size
        if self.held.total() > self.limit:
            reason = f"more than {self.limit} bytes of request bodies are being received; try again"
            raise ApiError(reason, status=503, code="overloaded", retry_after=1)
        if self.held[tenant] > self.tenant_limit:
            reason = f"this API key is sending more than {self.tenant_limit} bytes of request bodies at once"
            raise ApiError(f"{reason}; try again", status=429, code="rate_limit_exceeded", retry_after=1)

    def remove(self, size: int, tenant: str) -> None:
        """Subtract bytes of a tenant."""
        self.held[tenant] -= size
        if not self.held[tenant]:
            del self.held[tenant]


def too_large(limit: int) -> ApiError:
    """Return the error for a body that exceeds the limit."""
    reason = f"the body is larger than {limit} bytes; send less, or raise the server's --max-body-mb"
    return ApiError(reason, status=413, code="body_too_large")


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Read the request's body as it was sent.

    Raises ApiError: 413 if the body exceeds its limit, 429 if the tenant's bodies exceed theirs, 503 if all bodies do.
    """
    body, limit = bytearray(), config.max_body_bytes
    budget: BodyBudget = request.app.state.bodies
    tenant = tenant_of(request)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise too_large(limit)
    try:
        async for chunk in request.stream():
            body += chunk
            budget.add(len(chunk), tenant)
            if len(body) > limit:
                raise too_large(limit)
        return bytes(body)
    finally:
        budget.remove(len(body), tenant)


async def read_parsed(
    request: Request, service: Service, shape: type[Body], more: Mapping[str, Any] | None = None
) -> Body:
    """Read and parse the request's body, in a thread if it is large. `more` are fields besides. Raises ApiError.

    A body that `read_fields` has read is taken from there.
    """
    read: ReadBody | None = getattr(request.state, "read", None)
    if read is not None:

        def made() -> Body:
            return typed(with_more(read.fields, shape, more), shape)

        return made() if read.size < SMALL else await service.off_loop(read.size, made)
    return await read_with(request, service, lambda body: parse(body, shape, more))


async def read_fields(request: Request, service: Service) -> dict[str, Any]:
    """Read the request's body as a JSON object, in a thread if it is large, for a route that is not known yet.

    Raises ApiError.
    """
    fields, size = await read_with(request, service, lambda body: (read_object(body), len(body)))
    request.state.read = ReadBody(fields, size)
    return fields


async def read_with(request: Request, service: Service, use: Callable[[bytes], T]) -> T:
    """Read the request's body, and return what `use` makes of it, in a thread if it is large. Raises ApiError."""
    body, encoding = await read_body(request, service.config), encoding_of(request)
    if len(body) < SMALL and not encoding:
        return use(body)
    return await service.off_loop(
        LARGE if encoding else len(body), lambda: use(decompress(body, encoding, service.config))
    )


async def read_decoded(request: Request, config: ServerConfig) -> bytes:
    """Read the request's body, and decode it from its content encoding, in a thread. Raises ApiError, as the two do."""
    body, encoding = await read_body(request, config), encoding_of(request)
    return await asyncio.to_thread(decompress, body, encoding, config) if encoding else body


def encoding_of(request: Request) -> str:
    """Return the content encoding of a request's body; empty for none."""
    return request.headers.get("content-encoding", "")


def decompress(body: bytes, encoding: str, config: ServerConfig) -> bytes:
    """Decode a body from its content encoding.

    Raises ApiError: 413 if the result is too large, 415 for an unknown encoding, 400 for invalid data.
    """
    limit = config.max_body_bytes
    if encoding.lower() in ("", "identity"):
        return body
    if encoding.lower() not in ENCODINGS:
        reason = f"content-encoding is {encoding[:32]!r}; use {', '.join(ENCODINGS)}, or none"
        raise ApiError(reason, status=415, code="unsupported_encoding")
    stream = zlib.decompressobj(ENCODINGS[encoding.lower()])
    try:
        found = stream.decompress(body, limit + 1)
    except zlib.error:
        raise ApiError(f"the body is not in the encoding {encoding.lower()}", code="invalid_encoding") from None
    if len(found) > limit:
        raise too_large(limit)
    if not stream.eof or stream.unused_data:
        raise ApiError(f"the body's {encoding.lower()} data end too early or too late", code="invalid_encoding")
    return found


def compress(body: bytes, accepted: str) -> tuple[bytes, dict[str, str]]:
    """Compress a body in the first known encoding that the client accepts. Returns the body and its headers.

    Small bodies stay as they are. `accepted` is the value of Accept-Encoding. An encoding with weight 0 is not
    accepted.
    """
    for part in accepted.lower().split(",") if len(body) >= LEAST_COMPRESSED else ():
        name, _, weight = part.replace(" ", "").partition(";q=")
        if (name in ENCODINGS and weight.strip("0.") != "") or (name in ENCODINGS and not weight):
            stream = zlib.compressobj(1, zlib.DEFLATED, ENCODINGS[name])
            return stream.compress(body) + stream.flush(), {"content-encoding": name}
    return body, {}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`. If the client leaves, cancel it and raise ClientDisconnect."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(leave())
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({leaving, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(leaving, working, return_exceptions=True)


def page(request: Request, items: list[Item], *, order: str = "desc") -> dict[str, Any]:
    """Return the requested page of a list, by default in this order. Raises ApiError."""
    query = page_query(request, order=order)
    if query.newest_first:
        items = items[::-1]
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise not_found("item", query.after, "after")
        items = items[ids.index(query.after) + 1 :]
    return item_list(items[: query.limit], len(items) > query.limit)


def listed(items: Sequence[Mapping[str, Any]], more: bool) -> dict[str, Any]:
    """Return a page of a list of Anthropic's API."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"data": items, "has_more": more, "first_id": first, "last_id": last}


class PageQuery(NamedTuple):
    """Query parameters that select a page of a list."""

    limit: int
    newest_first: bool
    after: str | None


def page_query(request: Request, *, most: int = 100, default: int = 20, order: str = "desc") -> PageQuery:
    """Parse `limit`, `order` and `after`; `order` is the default. Raises ApiError, which names the parameter."""
    query = request.query_params
    limit, order = query_integer(request, "limit", 1, most), query.get("order", order)
    if order not in ("asc", "desc"):
        raise invalid(f"order is {order[:32]}; it must be asc or desc", "order")
    return PageQuery(default if limit is None else limit, order == "desc", query.get("after"))


def query_integer(request: Request, name: str, least: int, most: int) -> int | None:
    """Return a query parameter as a number; None if missing. Raises ApiError unless it is digits and in range."""
    given = request.query_params.get(name)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= 9 and least <= int(given) <= most):
        raise invalid(f"{name} is {given[:32]!r}; it must be an integer between {least} and {most}", name)
    return int(given)


@cache
def _schemas(shape: type[RequestBody]) -> dict[str, Any]:
    """Return the JSON schemas of a request body and its parts, by name. The result is cached: do not modify it."""
    _, components = msgspec.json.schema_components([shape], ref_template="{name}")
    return components


@cache
def described(shape: type[RequestBody]) -> dict[str, Any]:
    """Return the OpenAPI entry of a request body. The result is cached: do not modify it.

    FastAPI cannot infer it, because the routes parse bodies themselves.
    """
    components = _schemas(shape)

    def inlined(schema: Any) -> Any:
        if isinstance(schema, list):
            return [inlined(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        return inlined(components[schema["$ref"]]) if "$ref" in schema else {k: inlined(v) for k, v in schema.items()}

    body = inlined(components[shape.__name__])
    more: dict[str, Any] = {name: {"description": "taken, without effect"} for name in shape.harmless}
    for name, neutral in shape.unsupported.items():
        more[name] = {"enum": [*neutral, None], "description": "not supported, except for what has no effect"}
    body["properties"] = more | body["properties"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}
