"""The browser page: files from the package, served with a strict content security policy.

The files hold no data, so they need no key. The page gets all data from the API, with the reader's key.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from fastapi import FastAPI, Request, Response
from starlette.types import Scope

from holdfast.files.regular import read_bytes

FOLDER = Path(__file__).parents[1] / "page"
PREFIX = "/page/"
INDEX = "index.html"
VERSION = "{{version}}"
"""Placeholder in the index for the digest of all files.

The digest is part of their paths, so browsers may cache them forever.
"""
COMPRESSED_KINDS = {".woff2", ".bcmap"}
"""Suffixes of files that are compressed already."""
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
    ".bcmap": "application/octet-stream",
    ".LICENSE": "text/plain; charset=utf-8",
}
"""Content types by file suffix. Files with other suffixes are not served."""
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data: blob:",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        # No string can become markup or code: the page builds each element through the DOM. The one policy returns the
        # address of the worker that reads PDF files, whatever it is given.
        "require-trusted-types-for 'script'",
        "trusted-types holdfast-worker",
    )
)
SAFETY = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


@dataclass(frozen=True)
class PageFile:
    """One file of the page."""

    kind: str
    body: bytes
    etag: str
    shrinks: bool
    """Whether compressing the file makes it smaller."""

    @cached_property
    def compressed(self) -> bytes:
        """The file as gzip. It is computed at the first use, because that takes 100 ms for the largest file."""
        return gzip.compress(self.body, mtime=0)

    def response(self, request: Request, caching: str) -> Response:
        """Return the file, compressed if the browser accepts that; 304 if the browser has it already."""
        headers = {**SAFETY, "cache-control": caching, "etag": self.etag, "vary": "accept, accept-encoding"}
        if self.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if self.shrinks and "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=self.kind)
        return Response(self.body, headers=headers, media_type=self.kind)


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the page's files by name, which may contain slashes. The files are read once."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.is_file() and path.suffix in KINDS)
    bodies = {path.relative_to(FOLDER).as_posix(): read_bytes(path) for path in paths}
    whole = hashlib.sha256()
    for name, body in bodies.items():
        whole.update(f"{name}\0{len(body)}\0".encode() + body)
    version = whole.hexdigest()[:16]
    files = {}
    for name, body in bodies.items():
        if name == INDEX:
            body = body.replace(VERSION.encode(), version.encode())
        digest = hashlib.sha256(body).hexdigest()[:32]
        kind = KINDS[Path(name).suffix]
        path = name if name == INDEX else f"{version}/{name}"
        files[path] = PageFile(kind, body, f'"{digest}"', Path(name).suffix not in COMPRESSED_KINDS)
    return files


def wants_page(request: Request) -> bool:
    """Whether a request for `/` comes from a browser, which gets the page instead of JSON."""
    return "text/html" in request.headers.get("accept", "")


def is_page(scope: Scope) -> bool:
    """Whether a request is for a file of the page or for the page of routes, which need no key."""
    if scope["method"] not in ("GET", "HEAD"):
        return False
    path: str = scope["path"]
    return path.startswith(PREFIX) or path == "/docs" or (path == "/" and wants_page(Request(scope)))


def index(request: Request) -> Response:
    """The page's index. Browsers check at each visit whether it has changed."""
    return page_files()[INDEX].response(request, "no-cache")


def add_page_routes(app: FastAPI) -> None:
    """Add GET /page/{version}/{name}.

    GET / is added by `add_root_routes`, because clients other than browsers get JSON there.
    """

    @app.get(PREFIX + "{name:path}", include_in_schema=False)
    @app.head(PREFIX + "{name:path}", include_in_schema=False)
    def page_file(name: str, request: Request) -> Response:
        """A file of the page. A thread makes the answer, because compressing a file takes time."""
        file = page_files().get(name)
        if file is None or name == INDEX:
            return Response(status_code=404, headers=SAFETY)
        return file.response(request, "public, max-age=31536000, immutable")
