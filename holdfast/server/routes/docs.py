"""GET /docs: a page with all routes, made of the OpenAPI document. It loads nothing and runs no script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response

from holdfast.server.routes.openapi import METHODS
from holdfast.server.routes.page import SAFETY

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }
:root { color-scheme: light dark }
summary { cursor: pointer; padding: .3rem 0 } code, pre { font: 13px/1.4 ui-monospace, monospace }
pre { overflow: auto; max-height: 30rem } table { border-collapse: collapse } td { padding: .1rem 1rem .1rem 0 }
details { border-bottom: 1px solid #8884 } summary b { display: inline-block; min-width: 4rem }
"""


NARROW = "<meta name=viewport content='width=device-width, initial-scale=1'>"
"""Tag for telephones, which would draw the page as wide as on a desktop, and small."""


MODELS = "Models, answers, conversations, files (OpenAI's, Anthropic's and Cohere's APIs, with extensions)"
GROUPS = {
    "/v1/": MODELS,
    "/v2/rerank": MODELS,
    "/v2": "Applications of cells (Open Inference Protocol)",
    "/api/v1/": "Training from a script (Tinker's API)",
    "/api/": "Ollama's API",
    "/": "The server, and short forms of other programs",
}
"""Headings of the routes by the beginning of their paths, in the order of the page. The first one that fits counts."""


def add_docs_route(app: FastAPI) -> None:
    """Add GET /docs."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; frame-ancestors 'none'"

    @cache
    def written(keyed: bool) -> str:
        return "".join(pieces(app.openapi()))

    @app.get("/docs")
    @app.head("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        """All routes, as a page for people. `/openapi.json` is the same for programs."""
        headers = {**SAFETY, "content-security-policy": policy}
        return Response(written(request.state.keyed), media_type="text/html; charset=utf-8", headers=headers)


def pieces(document: dict[str, Any]) -> Iterator[str]:
    """Yield the page of an OpenAPI document. All of its texts are escaped."""
    title = html.escape(f"{document['info']['title']} {document['info']['version']}")
    yield f"<!doctype html><html lang=en><meta charset=utf-8>{NARROW}<title>{title}</title><style>{STYLE}</style>"
    yield f"<h1>{title}</h1><p>{html.escape(document['info'].get('summary', ''))}</p>"
    if "security" in document:
        yield "<p>Requests need a key: <code>Authorization: Bearer KEY</code>.</p>"
    groups: dict[str, list[str]] = {heading: [] for heading in GROUPS.values()}
    for path in sorted(document["paths"]):
        groups[next(heading for beginning, heading in GROUPS.items() if path.startswith(beginning))].append(path)
    for heading, paths in groups.items():
        if paths:
            yield f"<h2>{html.escape(heading)}</h2>"
        for path in paths:
            for method in METHODS:
                if (operation := document["paths"][path].get(method)) is not None:
                    yield from entry(method.upper(), path, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in document["components"]["schemas"].items():
        yield f"<details id='{html.escape(name)}'><summary>{html.escape(name)}</summary>{as_json(schema)}</details>"
    yield "</html>"


def entry(method: str, path: str, operation: dict[str, Any]) -> Iterator[str]:
    """Yield the entry of one route: what it does, its parameters, its body and its replies."""
    said = operation.get("description", "")
    yield f"<details><summary><b>{method}</b> <code>{html.escape(path)}</code> {prose(said)}</summary><table>"
    for each in operation.get("parameters", ()):
        cells = (each["name"], each["in"], each.get("description", ""))
        yield f"<tr>{''.join(f'<td>{prose(cell)}</td>' for cell in cells)}</tr>"
    yield "</table>"
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, <code>{html.escape(kind)}</code>:</p>{as_json(body['schema'])}"
    for kind, body in operation["responses"]["200"]["content"].items():
        yield f"<p>Answer, <code>{html.escape(kind)}</code>:</p>{as_json(body['schema'])}"
    yield "</details>"


def prose(text: str) -> str:
    """Return a description as HTML: escaped, with the parts between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def as_json(schema: Any) -> str:
    return f"<pre>{html.escape(json.dumps(schema, indent=2, ensure_ascii=False))}</pre>"
