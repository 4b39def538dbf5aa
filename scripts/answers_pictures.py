"""Take the pictures of answers side by side in docs/page, with the built-in model.

Needs the same programs as `scripts/page_pictures.py`.
"""

from __future__ import annotations

import shutil
import sys

from playwright.sync_api import Page, sync_playwright
from rich.console import Console

from scripts.demo import MODEL, server
from scripts.page_pictures import SIZES, save


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
                context = browser.new_context(
                    viewport=size, color_scheme=scheme, reduced_motion="reduce", device_scale_factor=1
                )
                page = context.new_page()
                page.goto(url)
                page.wait_for_selector(".item, .list-note:not(:empty)", state="attached")
                compare(page)
                page.mouse.move(0, 0)
                page.wait_for_timeout(300)
                save(page, f"compare-{device}-{scheme}")
                context.close()
        browser.close()
    return 0


def compare(page: Page) -> None:
    """Have one message answered with two settings."""
    page.get_by_label("Answers side by side", exact=True).click()
    page.locator(".variant").nth(1).locator("[data-field=temperature]").fill("1.5")
    page.get_by_role("button", name="Use", exact=True).click()
    say(page, "Hi! My name is Ada.")


def say(page: Page, text: str) -> None:
    """Send a message, and wait for the end of its answers."""
    page.fill(".message", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".send[aria-label='Stop']")
    page.wait_for_selector(".send[aria-label='Send']")


if __name__ == "__main__":
    sys.exit(main())
