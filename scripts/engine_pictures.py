"""Take the pictures of the engine view in docs/page: of the built-in model with a tiny cache, and of two traces.

Needs the same programs as `scripts/page_pictures.py`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from holdfast.cli.targets import simulated_engine
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from scripts.demo import MODEL, server
from scripts.page_pictures import SIZES, save

OPTIONS = ("--cache-gb", "0.016", "--host-cache-gb", "0.008", "--disk-cache-gb", "0.05", "--max-sequences", "10",
           "--threads", "1", "--tbt-target", "60")  # fmt: skip
STORY = "Tell me about number {} of the ships that sailed from the north in winter, and about its crew. "


def main() -> int:
    """Take all pictures. Returns the exit code."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("there is no Chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with (
        tempfile.TemporaryDirectory() as disk,
        server(Console(), MODEL, *OPTIONS, "--disk-cache-dir", disk) as url,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        pages = {}
        for device, size in SIZES.items():
            for scheme in ("light", "dark"):
                viewport = {**size, "height": 1540 if device == "desktop" else 1500}
                page = browser.new_page(viewport=viewport, color_scheme=scheme, device_scale_factor=1)
                page.goto(f"{url}/#engine")
                page.wait_for_selector(".e-status.on")
                pages[f"engine-{device}-{scheme}"] = page
        load(url)
        for page in pages.values():
            page.focus(".e-frame")
            page.keyboard.press("ArrowLeft")  # this pauses the view
        for name, page in pages.items():
            zoom_and_choose(page)
            save(page, name)
            page.close()
        page = browser.new_page(viewport={"width": 1400, "height": 1000}, device_scale_factor=1)
        page.goto(f"{url}/#engine")
        page.wait_for_selector(".e-status.on")
        with tempfile.TemporaryDirectory() as folder:
            page.set_input_files("input[type=file]", [str(path) for path in traces(Path(folder))])
            page.wait_for_selector(".e-panels.two")
            page.wait_for_timeout(900)
            save(page, "engine-compare-desktop-light")
        browser.close()
    return 0


def load(url: str) -> None:
    """Load a server: conversations beyond the cache, eight streams that a long prompt joins, and returning turns."""
    for number in range(22):
        ask(url, STORY.format(number) * 3, 4)
    streams = [ask_beside(url, f"Story {number}", 120) for number in range(8)]
    time.sleep(1.0)
    streams.append(ask_beside(url, STORY.format(99) * 14, 4))
    streams += [ask_beside(url, STORY.format(number) * 3 + "And then?", 20) for number in (16, 17, 4, 5)]
    time.sleep(1.5)


def ask(url: str, prompt: str, tokens: int) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)).read()


def ask_beside(url: str, prompt: str, tokens: int) -> threading.Thread:
    thread = threading.Thread(target=ask, args=(url, prompt, tokens), daemon=True)
    thread.start()
    return thread


def zoom_and_choose(page: Page) -> None:
    """Show a few seconds, and choose a step with a chunk of a prompt."""
    for _ in range(4):
        page.keyboard.press("+")
    for _ in range(60):
        if "positions" in page.inner_text(".e-words"):
            break
        page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(700)


def traces(folder: Path) -> list[Path]:
    """Simulated traces of one workload under two policies."""
    paths = []
    for scheduler in ("stall-free", "prefill-first"):
        path = folder / f"{scheduler}.json"
        config = EngineConfig(
            trace=str(path), scheduler=scheduler, tbt_target=15.0 if scheduler == "stall-free" else None
        )
        talks = [Conversation(0.11 * number, (Turn(2500, 300), Turn(900, 200, 0.4))) for number in range(60)]
        simulated_engine(config, deploy("llama-3-8b", "h200").profile, None, 0.0, None).run(talks, "")
        paths.append(path)
    return paths


if __name__ == "__main__":
    sys.exit(main())
