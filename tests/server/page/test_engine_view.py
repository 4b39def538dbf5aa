"""The engine view in a real headless Chromium, over a real engine: the visible steps, blocks and traces."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Serving, started

from holdfast.cli.targets import simulated_engine
from holdfast.lab.simulator.deployment import deploy
from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.config import EngineConfig
from holdfast.lm.scheduler.queue_report import REASONS

pytestmark = pytest.mark.browser

TINY = ("--cache-gb", "0.004", "--host-cache-gb", "0.004", "--store", "memory", "--max-sequences", "9")
"""30 blocks of 16 tokens on the device, and as many on the host."""


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The built-in model with a cache of a few conversations."""
    trace = tmp_path_factory.mktemp("trace") / "live.json"
    with started("holdfast-tiny", *TINY, "--trace", str(trace), "--token-budget", "64") as serving:
        serving.trace = trace  # type: ignore[attr-defined]
        yield serving


@pytest.fixture
def page(fresh_page: Callable[..., Any], serving: Serving) -> Any:
    """The engine view, following the engine. Any error in the page's log fails the test."""
    return engine_view(fresh_page, serving.url)


def engine_view(fresh_page: Callable[..., Any], url: str) -> Any:
    page = fresh_page(f"{url}/#engine", viewport={"width": 1200, "height": 900}, reduced_motion="no-preference")
    page.wait_for_selector(".e-status.on")
    return page


def until(page: Any, expression: str) -> None:
    """Wait for a condition in the page, whose policy forbids Playwright's own way."""
    for _ in range(1200):  # a busy machine may need a minute
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(expression)


def ask(url: str, words: str, tokens: int) -> None:
    body = {"model": "holdfast-tiny", "prompt": words, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


@contextmanager
def streams(url: str, *asks: tuple[str, int]) -> Iterator[None]:
    """Streams of these words and numbers of tokens. At the end of the block, unfinished streams leave."""
    over = threading.Event()

    def read(words: str, tokens: int) -> None:
        body = {"model": "holdfast-tiny", "prompt": words, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            assert reply.status_code == 200
            for _ in reply.iter_lines():
                if over.is_set():
                    return

    with ThreadPoolExecutor(len(asks)) as threads:
        reading = [threads.submit(read, *each) for each in asks]
        try:
            yield
        finally:
            over.set()
    for each in reading:
        each.result()


def table(page: Any, summary: str, shown: Callable[[list[list[str]]], bool] = bool) -> list[list[str]]:
    """Return the rows of one of the tables that can be opened, once they are as `shown` says."""
    details = page.locator("details.e-more", has_text=summary)
    if not details.evaluate("each => each.open"):
        # A key, because the page may move under a mouse between its press and its release.
        details.locator("summary").press("Enter")
    for _ in range(600):  # on a busy machine, rows may come a minute later
        getattr(page, "page", page).wait_for_timeout(100)
        rows: list[list[str]] = details.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].map(cell => cell.innerText))"
        )
        if shown(rows):
            return rows
    raise AssertionError(rows)


MIXED_STEPS = """() => {
  const frame = document.querySelector('.e-frame'), words = document.querySelector('.e-words'), found = [];
  for (let before = ''; words.textContent !== before; ) {
    before = words.textContent;
    if (before.includes('8 decodes, positions')) found.push(before);
    else if (found.length) break;
    frame.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft', cancelable: true }));
  }
  return found;
}"""
"""Function in the page that goes back from the chosen step, and returns the words of the latest mixed steps in a row.

A fast machine makes thousands of steps before the streams leave, and the browser takes milliseconds for a key.
"""


def test_a_long_prompt_is_seen_to_join_eight_streams_in_chunks(fresh_page: Callable[..., Any]) -> None:
    with started("holdfast-tiny", "--store", "memory", "--token-budget", "64", "--cache-gb", "0.3") as roomy:
        look_at_a_long_prompt(engine_view(fresh_page, roomy.url), roomy.url)


def look_at_a_long_prompt(page: Any, url: str) -> None:
    with streams(url, *((f"Hello {number}", 3500) for number in range(8))):
        until(page, "document.querySelectorAll('.e-queues tbody')[1].rows.length === 8")
        ask(url, "A long story. " * 12, 2)
    until(page, "document.querySelector('.e-headline').textContent.includes('idle')")
    page.focus(".e-frame")
    page.keyboard.press("ArrowLeft")
    mixed = page.evaluate(MIXED_STEPS)
    assert mixed, "steps with a decode of each stream and a chunk of the prompt"
    assert any("of request" in words and "room for 64 tokens" in words for words in mixed)
    assert page.inner_text(".e-status") == "Paused"
    page.keyboard.press(" ")
    page.wait_for_selector(".e-status.on")


def test_chunks_are_seen_to_go_to_the_host_to_be_dropped_in_front_and_to_come_back(page: Any, serving: Serving) -> None:
    def ask_about(number: int, more: str = "") -> None:
        ask(serving.url, f"Story {number} tells of mountains and of the snow upon them in winter. " * 8 + more, 1)

    def newest(rows: list[list[str]]) -> int:
        return max((int(row[0]) for row in rows), default=-1)

    ask_about(0)
    first = newest(table(page, "Conversations as a table"))
    places: list[str] = []
    for number in range(1, 8):
        ask_about(number)
        if number > 3:
            seen = number
            rows = table(page, "Conversations as a table", lambda rows, seen=seen: newest(rows) >= first + seen)
            places += [row[4] for row in rows]
    assert any(place.endswith(" host") for place in places), places
    assert any(place.partition(",")[0].endswith(" dropped") and "," in place for place in places), places
    on_host = [int(row[0]) - first for row in rows if "host" in row[4] and int(row[0]) >= first]
    ask_about(on_host[0], "The end.")

    def copied(steps: list[list[str]]) -> bool:
        """Whether blocks were copied to the device, and others to the host."""
        return any(int(row[4]) > 0 for row in steps) and any(int(row[5]) > 0 for row in steps)

    table(page, "The latest steps as a table", copied)


def test_a_waiting_request_has_its_reason(page: Any, serving: Serving) -> None:
    with streams(serving.url, *((f"Wait {number}", 400) for number in range(40))):
        until(page, "document.querySelectorAll('.e-queues tbody')[0].rows.length > 0")
        waiting = page.locator(".e-queues tbody").first.inner_text().splitlines()
        assert {line.split("\t")[1].partition(":")[0] for line in waiting} <= set(REASONS)


def test_the_view_can_be_paused_zoomed_and_left_and_the_engine_stops_reporting(page: Any, serving: Serving) -> None:
    page.get_by_role("button", name="Pause").click()
    before = page.evaluate("document.querySelector('.engine').dataset.frames")
    page.wait_for_timeout(300)
    assert int(page.evaluate("document.querySelector('.engine').dataset.frames")) - int(before) <= 6
    page.get_by_role("button", name="Go on").click()
    page.hover(".e-lanes")
    page.mouse.wheel(0, -400)
    page.get_by_role("tab", name="Chat").click()
    page.wait_for_selector("#view-engine", state="hidden")
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector(".e-status.on")


def simulated(path: Path, **options: Any) -> Path:
    """Return the trace of a simulated run."""
    config = EngineConfig(trace=str(path), **options)
    deployment = deploy("llama-3-8b", "h200")
    workload = [Conversation(0.2 * number, (Turn(900, 40),)) for number in range(20)]
    simulated_engine(config, deployment.profile, None, 0.0, None).run(workload, "")
    return path


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs of one workload, under two policies."""
    folder = tmp_path_factory.mktemp("traces")
    return [simulated(folder / f"{name}.json", scheduler=name) for name in ("stall-free", "prefill-first")]


def test_two_traces_are_played_together_with_one_clock(page: Any, traces: list[Path]) -> None:
    page.set_input_files("input[type=file]", [str(path) for path in traces])
    until(page, "document.querySelectorAll('.e-panel').length === 2")
    until(page, "[...document.querySelectorAll('.e-name')].every(name => name.textContent.includes(' · '))")
    names = page.locator(".e-name").all_inner_texts()
    assert "· stall-free" in names[0] and "· prefill-first" in names[1]
    titles = page.locator(".e-blocks-section h3").all_inner_texts()
    assert all(re.fullmatch(r"State of \d+ conversations: [\d,]+ blocks", title) for title in titles), titles
    clock = page.locator("input[type=range]")
    clock.fill("0.3")
    page.wait_for_timeout(700)
    assert page.locator("output").inner_text().startswith("0.3 of ")
    page.get_by_role("button", name="Play").click()
    until(page, "parseFloat(document.querySelector('.e-player output').textContent) > 0.4")
    page.get_by_role("button", name="Pause").click()
    assert len(page.locator(".e-panel").all()) == 2
    steps = table(page.locator(".e-panel").first, "The latest steps as a table")
    assert steps and int(steps[0][0]) >= 0
    page.get_by_role("button", name="Back to live").click()
    page.wait_for_selector(".e-status.on")


def test_an_idle_engine_says_so_and_counts_completions_and_chats_among_what_it_keeps(
    fresh_page: Callable[..., Any], serving: Serving
) -> None:
    ask(serving.url, "A plain completion about the mountains in winter. " * 4, 2)
    said = [{"role": "user", "content": "A chat about the sea and its ships in winter. " * 4}]
    chat = {"model": "holdfast-tiny", "messages": said, "max_tokens": 2}
    assert httpx.post(f"{serving.url}/v1/chat/completions", json=chat, timeout=60).status_code == 200
    page = engine_view(fresh_page, serving.url)
    until(page, "/^State of [1-9]/.test(document.querySelector('.e-blocks-section h3').textContent)")
    conversations, blocks = map(int, re.findall(r"\d+", page.inner_text(".e-blocks-section h3")))
    names, values = (page.locator(f".e-story {each}").all_inner_texts() for each in ("dt", ".e-value"))
    parts = dict(zip(names, values, strict=True))
    assert page.inner_text(".e-headline") == "The engine is idle: there is nothing to compute."
    assert conversations >= 2 and blocks >= conversations
    assert parts["Kept state"] == f"{conversations} conversations" and parts["Waiting"] == "Nobody"
    assert page.inner_text(".e-words").startswith("No step yet")


STORY_STATS = {
    "waiting": 3, "running": 2, "blocks_total": 400, "blocks_used": 9, "blocks_cached": 100, "prefix_queries": 2000,
    "prefix_hits": 500, "host_blocks_total": 50, "host_blocks_cached": 20,
}  # fmt: skip


def test_the_state_of_the_engine_is_told_in_words(page: Any, tmp_path: Path) -> None:
    step = {"tokens": 2, "decodes": 2, "prefill tokens": 0, "segments": 2, "preempted": []}
    steps = [
        {
            "ph": "X",
            "pid": 0,
            "tid": 0,
            "ts": number * 1e5,
            "dur": 9e4 if number == 9 else 2e4,
            "name": "step",
            "args": step,
        }
        for number in range(10)
    ]
    queues = {
        "waiting": 3, "running": 2, "free_rows": 0, "rows": [["a", 40, 41, 8], ["b", 8, 99, 99]],
        "first": [["c", "no row", 5, 0.1], ["d", "no row", 5, 0.2], ["e", "order", 5, 0.3]],
    }  # fmt: skip
    marks = {
        "engine": {"model": "m", "target": 0.05, "block_size": 16}, "queues": queues, "stats": STORY_STATS,
        "blocks": {"rows": [[1, "x", "idle", 0.5, 2, [["-", 2], ["d", 3]]], [2, "y", "running", 0.5, 2, [["u", 4]]]]},
    }  # fmt: skip
    events = [{"ph": "i", "pid": 3, "tid": 0, "ts": 8e5, "name": name, "args": args} for name, args in marks.items()]
    path = tmp_path / "story.json"
    path.write_text(json.dumps([*steps, *events]))
    page.set_input_files("input[type=file]", str(path))
    page.wait_for_selector(".e-player:not([hidden])")
    until(page, "document.querySelectorAll('.e-story .e-value').length === 5")
    shown = [each.split("\n") for each in page.locator(".e-story > div").all_inner_texts()]
    assert {name: value for name, value, _ in shown} == {
        "Work": "27% busy", "Pace": "A token every 20.0\N{NO-BREAK SPACE}ms", "Waiting": "3 requests",
        "Kept state": "1 conversation", "Saved": "25% of prompt tokens",
    }  # fmt: skip
    texts = {name: text for name, _, text in shown}
    assert texts["Work"] == "1 stream at 20.2 tokens a second in all; 1 prompt is being read."
    assert texts["Pace"] == "90.0% of the 10 steps in the last minute kept the target of 50.0 ms."
    assert texts["Waiting"].startswith("2: all rows are taken; 1: others are ahead of it.")
    assert texts["Kept state"] == "1,600 tokens on the device (25% of its blocks), 320 on the host."
    assert texts["Saved"].startswith("500 of 2,000 so far")
    assert page.inner_text(".e-blocks-section h3") == "State of 2 conversations: 7 blocks"
    page.focus(".e-frame")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".e-words").endswith("The target is 50.0 ms: it was missed.")
    prompt = {"step": 1, "seconds": 0.09, "tokens": 64, "decodes": 0, "chunks": [["a", 0, 64]]}
    said = page.evaluate(
        """async (step) => {
          const main = document.querySelector('script[type=module]').src;
          const { sentence } = await import(main.replace('main.js', 'engine_words.js'));
          return sentence(step, { target: 0.05 });
        }""",
        prompt,
    )
    assert said.endswith("The target is 50.0 ms, and no stream waited for this step.")


def test_an_engine_that_cannot_be_reached_is_not_called_idle(
    fresh_page: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    """The stream reports once and ends, as with its server. It stays empty when the page connects again."""
    idle = {"waiting": 0, "running": 0, "free_rows": 8, "rows": [], "first": []}
    activity = {"at": 5.0, "begins": True, "steps": [], "blocks": [], "queues": idle}
    events = {"engine": {"model": "m", "block_size": 16}, "activity": activity}
    bodies = ["".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events.items())]

    def answer(route: Any) -> None:
        body = bodies.pop() if bodies else ""
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page = fresh_page(f"{serve(store='memory').url}/#engine", routes={"**/v1/engine/events*": answer})
    until(
        page,
        "/^These are the last figures, from [0-9.]+ s ago/.test(document.querySelector('.e-headline')?.textContent)",
    )
    assert page.inner_text(".e-story .e-value >> nth=0") == "Unknown"
    assert page.inner_text(".e-status") == "The stream ended. Connecting again…"


def test_words_are_explained_at_the_focus_and_closed_parts_stay_closed(page: Any) -> None:
    page.get_by_role("button", name="Kept state").focus()
    assert "need not compute it again" in page.inner_text(".e-gloss")
    page.keyboard.press("Escape")
    assert not page.is_visible(".e-gloss")
    page.locator(".e-steps-section > summary").press("Enter")
    page.locator(".e-words-section > summary").press("Enter")
    page.wait_for_selector(".e-terms dd:has-text('One run of the model')")
    page.reload()
    page.wait_for_selector(".e-status.on")
    assert not page.is_visible(".e-lanes") and page.is_visible(".e-terms")


LIVE_LOOKS, SIDE_BY_SIDE_LOOKS = (("light", 1280), ("dark", 390)), (("dark", 1280), ("light", 390))
"""Schemes and widths in which a view is checked. Each view has each of both; axe takes a second for one look."""


def test_axe_finds_nothing_serious_live_and_side_by_side(
    page: Any, serving: Serving, traces: list[Path], axe: Any
) -> None:
    def check(looks: Iterable[tuple[str, int]]) -> None:
        for scheme, width in looks:
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": 800})
            page.wait_for_timeout(50)
            assert axe(page) == [], (scheme, width)
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (scheme, width)

    with streams(serving.url, *((f"Wait {number}, and tell of mountains. " * 9, 200) for number in range(20))):
        until(page, "document.querySelectorAll('.e-queues tbody')[0].rows.length > 0")
    page.focus(".e-frame")
    page.keyboard.press("ArrowLeft")
    for summary in ("The latest steps as a table", "Conversations as a table"):
        assert table(page, summary)
    page.locator(".e-words-section > summary").press("Enter")
    page.locator(".e-figures-section > summary").press("Enter")
    page.get_by_role("button", name="Saved").focus()
    check(LIVE_LOOKS)
    page.set_input_files("input[type=file]", [str(path) for path in traces])
    until(page, "document.querySelectorAll('.e-panel').length === 2")
    page.locator("input[type=range]").fill("0.3")
    check(SIDE_BY_SIDE_LOOKS)


def test_a_trace_of_the_running_engine_opens_although_it_is_cut_off(
    page: Any, serving: Serving, tmp_path: Path
) -> None:
    ask(serving.url, "Hello", 30)
    cut = tmp_path / "cut.json"
    text = serving.trace.read_text()  # type: ignore[attr-defined]
    cut.write_text(text[: text.rindex("\n") - 20])
    page.set_input_files("input[type=file]", str(cut))
    page.wait_for_selector(".e-player:not([hidden])")
    assert "holdfast-tiny" in page.inner_text(".e-name") or "cut.json" in page.inner_text(".e-name")
    assert table(page, "The latest steps as a table")


def test_an_exported_trace_can_be_opened_again(page: Any, serving: Serving, tmp_path: Path) -> None:
    ask(serving.url, "Hello", 12)
    table(page, "The latest steps as a table", lambda rows: len(rows) >= 12)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    path = tmp_path / "exported.json"
    download.value.save_as(path)
    events = json.loads(path.read_text())
    bars = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    assert len(bars) >= 12 and all({"ts", "dur", "name", "tid", "args"} <= set(bar) for bar in bars)
    assert all(event["ph"] in "XMCi" for event in events)
    page.set_input_files("input[type=file]", str(path))
    page.wait_for_selector(".e-player:not([hidden])")
    page.get_by_role("button", name="Latest").click()
    latest = str(max(bar["args"]["step"] for bar in bars))
    table(page, "The latest steps as a table", lambda rows: bool(rows) and rows[0][0] == latest)


def test_blocks_on_the_disk_and_in_the_remote_tier_are_shown_and_explained(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiers.json"
    step = {"step": 0, "tokens": 1, "decodes": 1, "prefill tokens": 0, "segments": 1, "preempted": []}
    row = [1, "a", "idle", 0.5, 2.0, [["k", 3], ["r", 2], ["f", 1], ["h", 1]]]
    events = [
        {"ph": "X", "pid": 0, "tid": 0, "ts": 1e6, "dur": 1e6, "name": "step 0", "args": step},
        {"ph": "i", "pid": 3, "tid": 0, "ts": 1e6, "name": "blocks", "args": {"rows": [row]}},
    ]
    path.write_text(json.dumps(events))
    assert "disk" not in page.inner_text(".e-legend")
    page.set_input_files("input[type=file]", str(path))
    page.wait_for_selector(".e-player:not([hidden])")
    places = ["3 disk, 2 remote, 1 coming back, 1 host"]
    table(page, "Conversations as a table", lambda rows: [row[4] for row in rows] == places)
    assert {"disk", "remote", "coming back"} <= set(page.inner_text(".e-legend").split("\n"))
    page.locator(".e-map").hover(position={"x": 4, "y": 4})
    assert "tokens 0 to 16 are on the disk" in page.locator(".e-tip").last.inner_text()


def test_a_file_that_is_not_a_trace_is_refused_with_a_message(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "letter.json"
    path.write_text('{"dear": "reader"}')
    page.set_input_files("input[type=file]", str(path))
    page.wait_for_selector(".toast.error")
    assert "letter.json has no steps of Holdfast in it" in page.inner_text(".toast.error")


def test_a_tenant_sees_no_engine_and_an_operator_does(
    fresh_page: Callable[..., Any], serve: Callable[..., Any]
) -> None:
    served = serve(api_key=("one",), operator_key=("boss",), store="memory")
    page = fresh_page(f"{served.url}/#engine")
    page.fill("#key", "one")
    page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector(".e-gate")
    assert "operator's key" in page.inner_text(".e-gate")
    assert page.locator(".e-panel").count() == 0
    page.get_by_role("button", name="Enter an operator’s key").click()
    page.fill("#key", "boss")
    page.get_by_role("button", name="Use this key").click()
    page.wait_for_selector(".e-gate", state="hidden")
    for _ in range(1200):
        if served.client.watched:
            break
        page.wait_for_timeout(50)
    assert served.client.watched
