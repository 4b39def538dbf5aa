"""Smoothness of the chat page with many stored conversations, and the time of lists and searches.

`python -m benchmarks.engine.chat_page --out FILE` serves the built-in model over a store with 1,000 conversations of 10
messages, opens the page in a headless Chromium (Debian: apt-get install chromium), and measures frames while the whole
list is scrolled, while a long conversation is scrolled, and while an answer streams.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.conversation_store import append
from holdfast.server.conversations.database import conversations, threads
from holdfast.server.run import open_store

FRAMES = """(what) => new Promise((resolve) => {
  const element = document.querySelector(what.scroll);
  const times = [];
  const began = performance.now();
  const frame = (now) => {
    times.push(now);
    element.scrollTop += what.pixels;
    const more = what.rows === null ? true : document.querySelectorAll('.item').length < what.rows
      || element.scrollTop + element.clientHeight < element.scrollHeight - 1;
    if (more && performance.now() - began < what.ms) requestAnimationFrame(frame);
    else resolve(times.slice(1).map((time, at) => time - times[at]));
  };
  requestAnimationFrame(frame);
})"""
PARAGRAPH = "A paged cache keeps keys and values in **blocks** of equal size. " * 6
CODE = "\n\n```python\n" + "def f(x: int) -> int:\n    return x + 1  # one more\n" * 8 + "```\n\n"


def main() -> int:
    """Measure, print, and write the result. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the chat page.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--conversations", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "conversations.sqlite")
        seed(store, options.conversations)
        result = measure(store, options.conversations)
    print(json.dumps(result, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def seed(path: Path, count: int) -> None:
    """Store `count` conversations of ten messages."""
    store = open_store(ServerConfig(store=str(path)))
    now = int(time.time())
    with store.database.write() as db:
        for number in range(count):
            id = f"conv_{number}"
            db.execute(threads.insert().values(id=id, tenant="", active=now - 60 * number, bytes=1000))
            title = json.dumps({"title": f"Conversation {number} about ships and the sea"}).encode()
            db.execute(conversations.insert().values(id=id, thread=id, tenant="", created=now, metadata=title))
            said = [
                {"id": f"i{number}_{at}", "type": "message", "role": ("user", "assistant")[at % 2],
                 "content": [{"type": "text", "text": PARAGRAPH}]}
                for at in range(10)
            ]  # fmt: skip
            append(db, id, said)
    store.close()


def measure(store: Path, count: int) -> dict[str, Any]:
    """The figures of one run."""
    log = subprocess.DEVNULL
    command = [sys.executable, "-m", "holdfast.cli", "serve", "holdfast-tiny", "--port", "0", "--store", str(store)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        url = next(line.split()[1].rstrip("/") for line in process.stdout if line.split()[:1] == ["page"])
        machine = f"{platform.machine()}, {platform.system()}, {os.cpu_count()} CPUs"
        figures: dict[str, Any] = {"machine": machine, "load": os.getloadavg()[0], "conversations": count}
        figures["list_ms"] = timed(f"{url}/v1/conversations?limit=100")
        figures["search_ms"] = timed(f"{url}/v1/conversations?limit=100&search=nothing+like+it")
        turns = [
            {"id": f"t{at}", "parent": f"t{at - 1}" if at else None, "input": [{"role": "user", "content": PARAGRAPH}],
             "output": [{"role": "assistant", "content": PARAGRAPH + CODE}]}
            for at in range(100)
        ]  # fmt: skip
        long = send(f"{url}/v1/conversations/copies", {"turns": turns, "head": "t99", "metadata": {"title": "long"}})
        with sync_playwright() as playwright:
            program = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            began = time.perf_counter()
            page.goto(url)
            page.wait_for_selector(".item")
            figures["open_ms"] = round((time.perf_counter() - began) * 1000)
            figures["scroll_list"] = frames(page, ".list-scroll", 40, rows=count, ms=60_000)
            began = time.perf_counter()
            page.goto(f"{url}/#chat/{long['id']}")
            page.wait_for_selector(".turn:nth-child(100) .code")
            figures["open_100_turns_ms"] = round((time.perf_counter() - began) * 1000)
            figures["scroll_100_turns"] = frames(page, ".thread", -60, rows=None, ms=5000)
            page.goto(f"{url}/#chat")
            page.wait_for_selector(".welcome")
            page.fill(".message", "Hi! My name is Ada.")
            page.keyboard.press("Enter")
            figures["while_an_answer_streams"] = frames(page, ".thread", 0, rows=None, ms=1500)
            browser.close()
        return figures
    finally:
        process.terminate()
        process.wait()


def frames(page: Page, scroll: str, pixels: int, *, rows: int | None, ms: int) -> dict[str, float]:
    """Frames per second and the longest frames, while an element is scrolled by `pixels` per frame.

    `cpu_ms` is the processor time of all the browser's processes per frame, whatever else the machine does.
    """
    before = browser_seconds()
    times = page.evaluate(FRAMES, {"scroll": scroll, "pixels": pixels, "rows": rows, "ms": ms})
    used = browser_seconds() - before
    ranked = sorted(times)
    return {
        "frames": len(times),
        "per_second": round(1000 * len(times) / sum(times), 1),
        "p99_ms": round(ranked[int(0.99 * (len(ranked) - 1))], 1),
        "longest_ms": round(ranked[-1], 1),
        "cpu_ms": round(1000 * used / len(times), 1),
    }


def browser_seconds() -> float:
    """Processor time, in seconds, of the browsers that this process has started."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            stats[int(path.parent.name)] = (name, int(fields[1]), int(fields[11]) + int(fields[12]))

    def ours(pid: int) -> bool:
        while pid in stats:
            pid = stats[pid][1]
            if pid == os.getpid():
                return True
        return False

    ticks = sum(ticks for pid, (name, _, ticks) in stats.items() if name.startswith("chrom") and ours(pid))
    return ticks / os.sysconf("SC_CLK_TCK")


def timed(url: str) -> float:
    """The median of nine answers, in milliseconds."""
    taken = []
    for _ in range(9):
        began = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            answer.read()
        taken.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(taken), 1)


def send(url: str, body: Any) -> Any:
    """The answer to a POST."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
