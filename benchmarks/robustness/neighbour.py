"""A served built-in model, and an ordinary stream of one client during whatever else its server must bear.

The stream is read by its own process (this file as a script), so that the load of an attacking script does not count as
a gap. It asks for answers of thousands of tokens, one after another, and writes down each gap between tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import httpx

from benchmarks.lib.invocation import command

OURS, THEIRS = "of-the-neighbour", "of-the-attacker"
"""API keys."""
ROOT = Path(__file__).parents[2]
HOLDFAST = (sys.executable, "-m", "holdfast.cli")


class Served:
    """A `holdfast serve` process that takes requests."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.host, port = url.removeprefix("http://").split(":")
        self.port = int(port)

    def get(self, path: str) -> httpx.Response:
        """A GET with our key."""
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {OURS}"}, timeout=10)

    def gauge(self, name: str) -> float:
        """A value of /metrics."""
        found = re.search(rf"^holdfast_{name} (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return float(found[1]) if found else float("nan")

    @property
    def files(self) -> int:
        """Number of open files of the API process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))  # noqa: PTH208 (many calls)

    def memory(self) -> tuple[float, float]:
        """Resident MB of the API process, and of its children: the engine and the chat template."""
        pid = self.process.pid
        children: list[str] = []
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                children += (thread / "children").read_text().split()
        return resident(pid), sum(resident(int(child), pid) for child in children)


def resident(pid: int, parent: int | None = None) -> float:
    """Resident MB of a process; 0 if it has ended, or if it is still a copy of its parent."""
    try:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        if parent and Path(f"/proc/{pid}/cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes():
            return 0.0
    except OSError:
        return 0.0
    return int(found[1]) / 1e3 if found else 0.0


def start(
    arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None, files: int | None = None
) -> subprocess.Popen[str]:
    """Start `holdfast serve ARGUMENTS`. `files` is its limit of open files."""

    process = subprocess.Popen(
        [*HOLDFAST, "serve", "--port", "0", "--store", "memory", "--threads", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=log.open("w"),
        text=True,
        env={**os.environ, **(variables or {})},
    )
    if files is not None:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
    return process


@contextlib.contextmanager
def serving(arguments: Sequence[str], variables: Mapping[str, str], files: int | None = None) -> Iterator[Served]:
    """A server for the time of the context. Raises RuntimeError if it does not start."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with start(arguments, log, variables, files) as process:
            try:
                assert process.stdout is not None
                address = next((line for line in process.stdout if "address" in line), "")
                if not address:
                    raise RuntimeError(f"the server does not start: {log.read_text()}")
                yield Served(process, address.split()[1], log)
            finally:
                process.kill()


class Gap(NamedTuple):
    """A pause between tokens: when it ended, on the monotonic clock, and its length, both in seconds."""

    end: float
    length: float


class Neighbour:
    """The ordinary stream. `wrong` is the answer that came instead of tokens."""

    def __init__(self, served: Served, tokens: int) -> None:
        self.gaps: list[Gap] = []
        self.wrong: list[str] = []
        client = [sys.executable, "-m", "benchmarks.robustness.neighbour", served.host, str(served.port), str(tokens)]
        self.process = subprocess.Popen(client, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.reader = Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            end, length, *wrong = line.split(maxsplit=2)
            self.wrong += wrong
            self.gaps.append(Gap(float(end), float(length)))

    def longest(self, begin: float, end: float | None = None) -> float:
        """The longest gap, in seconds, that ended after `begin` and by `end`, or still lasts if no end is given."""
        gaps = [gap.length for gap in self.gaps if begin <= gap.end <= (end or gap.end)]
        if end is None:
            gaps.append(time.monotonic() - max([begin, *(gap.end for gap in self.gaps[-1:])]))
        return max(gaps, default=0.0)

    def wait(self) -> None:
        """Wait until there are tokens."""
        while len(self.gaps) < 10 and self.process.poll() is None:
            time.sleep(0.05)

    def close(self) -> None:
        """End the stream."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def beside(served: Served, tokens: int = 3900) -> Iterator[Neighbour]:
    """An ordinary stream for the time of the context. Each of its answers has this many tokens."""
    neighbour = Neighbour(served, tokens)
    try:
        neighbour.wait()
        yield neighbour
    finally:
        neighbour.close()


def post(path: str, body: object, key: str | None = THEIRS, extra: str = "") -> bytes:
    """An HTTP request with a JSON body; bytes are sent as they are."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    return head("POST", path, key, f"content-length: {len(content)}\r\n{extra}") + content


def head(method: str, path: str, key: str | None = THEIRS, extra: str = "") -> bytes:
    """The head of an HTTP request."""
    kind = "content-type: application/json\r\n" if method == "POST" else ""
    allowed = f"authorization: Bearer {key}\r\n" if key else ""
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{kind}{allowed}{extra}\r\n".encode()


def about() -> str:
    """Command, date, versions and commit of this run."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    versions = " ".join(f"{name} {version(name)}" for name in ("uvicorn", "httptools", "fastapi", "torch"))
    return (
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC. {command()}\nCommit "
        f"{subprocess.run(git, capture_output=True, text=True).stdout.strip()}, Python {platform.python_version()}, "
        f"{versions}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the start."
    )


def stream(host: str, port: int, tokens: int, tell: Callable[[str], None]) -> None:
    """Stream answers without end, and report each gap."""
    body = {"model": "holdfast-tiny", "prompt": [5, 6, 7], "max_tokens": tokens, "ignore_eos": True, "stream": True}
    while True:
        with socket.create_connection((host, port)) as connection:
            connection.sendall(post("/v1/completions", body, OURS))
            last, seen, ends = None, b"", b""
            while b"0\r\n\r\n" not in ends:
                data = connection.recv(1 << 16)
                now = time.monotonic()
                ends = ends[-8:] + data
                seen += data[: 15 - len(seen)]
                if not data or not seen.startswith(b"HTTP/1.1 200"[: len(seen)]) or b'"error"' in data:
                    tell(f"{now} 0 {(data or b'closed')[:200].decode(errors='replace').split()!r}")
                    time.sleep(0.1)
                    break
                if last is not None:
                    tell(f"{now} {now - last}")
                last = now


if __name__ == "__main__":
    with contextlib.suppress(OSError, KeyboardInterrupt):
        stream(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), lambda line: print(line, flush=True))
