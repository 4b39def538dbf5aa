"""Take the pictures of answers side by side and of tools in docs/page, with the built-in model.

Needs the same programs as `scripts/page_pictures.py`.
"""

from __future__ import annotations

import json
import shutil
import sys

from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from scripts.demo import MODEL, server
from scripts.page_pictures import SIZES, save

FORECAST = {
    "name": "forecast",
    "description": "The weather of some days",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Lisbon"]}, "days": {"type": "integer", "minimum": 3, "maximum": 3}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
WEATHER = [{"day": "Monday", "sky": "clear", "high": 21}, {"day": "Tuesday", "sky": "rain", "high": 17}]


def main() -> int:
    """Take all pictures. Returns the exit code."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        print("there is no Chromium; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    with server(Console(), MODEL) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        for device, size in SIZES.items():
            for scheme in ("light", "dark"):
                for name, take in (("compare", compare), ("tools", tools)):
                    context = browser.new_context(
                        viewport=size, color_scheme=scheme, reduced_motion="reduce", device_scale_factor=1
                    )
                    page = context.new_page()
                    page.goto(url)
                    page.wait_for_selector(".item, .list-note:not(:empty)", state="attached")
                    take(page)
                    page.mouse.move(0, 0)
                    page.wait_for_timeout(300)
                    save(page, f"{name}-{device}-{scheme}")
                    context.close()
        browser.close()
    return 0


def compare(page: Page) -> None:
    """Have one message answered with two settings."""
    page.get_by_label("Answers side by side", exact=True).click()
    page.locator(".variant").nth(1).locator("[data-field=temperature]").fill("1.5")
    page.get_by_role("button", name="Use", exact=True).click()
    say(page, "Hi! My name is Ada.")


def tools(page: Page) -> None:
    """Have a function called, answer the call by hand, and have it called again."""
    page.get_by_label("Tools", exact=True).click()
    page.fill("#tools-functions", json.dumps([FORECAST], indent=1))
    page.select_option("#tools-choice", "required")
    page.get_by_role("button", name="Save").click()
    say(page, "How will the weather be?")
    page.get_by_label("Output of forecast").fill(json.dumps(WEATHER))
    page.get_by_role("button", name="Send the answer").click()
    page.wait_for_selector(".turn:nth-child(2) .figures")
    say(page, "And in three days?")
    page.wait_for_selector(".turn:nth-child(3) .answer-form")


def say(page: Page, text: str) -> None:
    """Send a message, and wait for the end of its answers."""
    page.fill(".message", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".send[aria-label='Stop']")
    page.wait_for_selector(".send[aria-label='Send']")


if __name__ == "__main__":
    sys.exit(main())
