"""A hub on this machine: the part of Hugging Face's API that fetching a snapshot takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Models by id, each the files of a directory, at one commit of the branches main and v1."""

    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Method and path of each request."""

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        self.asked.append(f"{method} {path}")
        path = path.partition("?")[0]
        for model, directory in self.models.items():
            start = f"/api/models/{model}"
            revision = path.removeprefix(f"{start}/revision/")
            if path == start or revision != path:
                if revision not in (path, "main", "v1", COMMIT):
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b""
                files = [{"rfilename": str(each.relative_to(directory))} for each in files_of(directory)]
                return 200, {}, json.dumps({"id": model, "sha": COMMIT, "siblings": files}).encode()
            if path.startswith(f"{start}/tree/"):
                tree = [entry(each, directory) for each in files_of(directory)]
                return 200, {}, json.dumps(tree).encode()
            if path.startswith(f"/{model}/resolve/"):
                if model in self.gated:
                    return 403, {"X-Error-Code": "GatedRepo"}, b""
                found = directory / path.removeprefix(f"/{model}/resolve/").partition("/")[2]
                if not found.is_file():
                    return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
                data = found.read_bytes()
                return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


def files_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def entry(path: Path, directory: Path) -> dict[str, Any]:
    """A file as the hub lists it."""
    data = path.read_bytes()
    return {
        "type": "file",
        "path": str(path.relative_to(directory)),
        "size": len(data),
        "oid": hashlib.sha1(data).hexdigest(),
    }


@contextmanager
def fake_hub(**models: Path) -> Iterator[FakeHub]:
    """A hub with models of the owner "made", by name."""
    hub = FakeHub({f"made/{name}": directory for name, directory in models.items()})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.command, self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
