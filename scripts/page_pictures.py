"""Take the pictures of docs/page: the page with the built-in model, at desktop and phone width, light and dark.

Needs a Chromium (Debian: apt-get install chromium) and the development environment.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from scripts.demo import CONVERSATION, MODEL, server

PICTURES = Path(__file__).parents[1] / "docs" / "page"
SIZES = {"desktop": {"width": 1200, "height": 760}, "phone": {"width": 390, "height": 780}}
TITLES = (
    "Packing for the mountains",
    "Rust or Go for the importer?",
    "Names for a small boat",
    "A letter to the landlord",
)
EXPLAINED = """\
A **paged cache** keeps each conversation's keys and values in blocks of equal size, so that no memory is lost between \
them.

```python
def blocks(tokens: int, size: int = 16) -> int:
    \"\"\"How many blocks hold so many tokens.\"\"\"
    return -(-tokens // size)  # round up
```

| tokens | blocks | unused |
|-------:|-------:|-------:|
| 100 | 7 | 12 |
| 4,096 | 256 | 0 |

1. A sequence takes a block when its last one is full.
2. Equal prefixes share their blocks.

Of \\(n\\) tokens in blocks of \\(b\\), the share \\(u\\) of unused room is

$$ u = 1 - \\frac{n}{b \\lceil n / b \\rceil} \\le \\frac{b - 1}{n + b - 1} $$
"""


def main() -> int:
    """Take all pictures. Returns the exit code."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("there is no Chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with server(Console(), MODEL) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for title in TITLES:
            send(url, "/v1/conversations", {"metadata": {"title": title}})
        copied = send(url, "/v1/conversations/copies", explained())
        called = send(url, "/v1/conversations/copies", called_tools())
        talk = None
        for device, size in SIZES.items():
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport=size, color_scheme=scheme, reduced_motion="reduce", device_scale_factor=1
                )
                page = context.new_page()
                page.goto(url)
                talk = talk or hold(page)
                page.goto(f"{url}/#chat/{talk}")
                shoot(page, f"chat-{device}-{scheme}")
                page.goto(f"{url}/#chat/{called['id']}")
                page.wait_for_selector(".approval")
                page.wait_for_timeout(300)
                save(page, f"tools-{device}-{scheme}")
                page.goto(f"{url}/#chat/{copied['id']}")
                page.wait_for_selector(".formula .katex")
                shoot(page, f"markdown-{device}-{scheme}")
                page.get_by_label("Settings", exact=True).click()
                page.wait_for_selector("#set-preset")
                shoot(page, f"settings-{device}-{scheme}")
                context.close()
        browser.close()
    return 0


def send(url: str, path: str, body: Any) -> Any:
    """The answer to a POST."""
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def explained() -> dict[str, Any]:
    """A conversation with Markdown, which the built-in model does not write."""
    turn = {
        "id": "a", "model": "elsewhere", "input": [{"role": "user", "content": "What is a paged cache?"}],
        "output": [{"role": "assistant", "content": EXPLAINED}],
    }  # fmt: skip
    return {"metadata": {"title": "What is a paged cache?"}, "turns": [turn], "head": "a"}


def called_tools() -> dict[str, Any]:
    """A conversation with a function call that was answered by hand, and a call that waits for approval."""
    days = [{"day": "Monday", "sky": "clear", "high": 21}, {"day": "Tuesday", "sky": "rain", "high": 17}]
    asked = {"type": "function_call", "call_id": "call_1", "name": "forecast"}
    turns = [
        {
            "id": "a", "input": [{"role": "user", "content": "How will the weather be?"}],
            "output": [asked | {"arguments": json.dumps({"city": "Lisbon", "days": 2})}],
        },
        {
            "id": "b", "parent": "a",
            "input": [{"type": "function_call_output", "call_id": "call_1", "output": json.dumps(days)}],
            "output": [{"role": "assistant", "content": "Clear on Monday with 21 degrees, and rain on Tuesday."}],
        },
        {
            "id": "c", "parent": "b", "input": [{"role": "user", "content": "Then I sail on Monday. Note it."}],
            "output": [
                {
                    "type": "mcp_approval_request", "server_label": "calendar", "name": "add_event",
                    "arguments": json.dumps({"day": "Monday", "title": "Sailing"}),
                },
            ],
        },
    ]  # fmt: skip
    return {"metadata": {"title": "How will the weather be?"}, "turns": turns, "head": "c"}


def hold(page: Page) -> str:
    """Hold the demo's conversation, with an edit. Returns its id."""
    for number, ask in enumerate(CONVERSATION, 1):
        page.fill(".message", ask.said)
        page.keyboard.press("Enter")
        page.wait_for_selector(f".turn:nth-child({number}) .figures")
    page.locator(".turn").last.hover()
    page.locator(".turn [data-action=edit]").last.click()
    page.locator(".editor textarea").fill("How many cats live with me?")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Versions of the question']")
    page.wait_for_selector(".turn:last-child .figures")
    return page.url.rpartition("/")[2]


def shoot(page: Page, name: str) -> None:
    """Take one picture."""
    page.wait_for_selector(".figures, .code")
    page.wait_for_selector(".item", state="attached")
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    save(page, name)


def save(page: Page, name: str) -> None:
    """Write a picture of the page as it is."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(PICTURES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    sys.exit(main())
