"""Answers side by side, and calls of tools, in a real headless Chromium over a fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from holdfast.core.types import AdapterInfo

pytestmark = pytest.mark.browser

WORDS = ("Ahoy", ", ", "sailor", "!")
ARGUMENTS = {"city": "Rome", "days": [{"day": 1, "sky": "clear"}, {"day": 2, "sky": "<b>rain</b>"}]}
CALL = ("<tool_call>", json.dumps({"name": "forecast", "arguments": ARGUMENTS}), "</tool_call>")
FUNCTION = {"name": "forecast", "description": "The weather", "parameters": {"type": "object", "properties": {}}}
PAGE = "<!doctype html><script>window.hacked = 1</script>"


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any]) -> Any:
    served = serve(store="memory")
    served.client.adapters["second"] = AdapterInfo("second@0123", "second", 4, 100, ("q",))
    return served


@pytest.fixture
def page(fresh_page: Callable[..., Any], server: Any) -> Iterator[Any]:
    page = fresh_page(server.url)
    page.wait_for_selector(".item, .list-note:not(:empty)", state="attached")
    yield page
    server.client.words, server.client.hold = WORDS, None


def compare(page: Any, *models: str) -> None:
    """Let the next messages be answered by each of these models."""
    page.locator("button[aria-label='Answers side by side']").click()
    for _ in models[2:]:
        page.get_by_role("button", name="Add an answer").click()
    for at, model in enumerate(models):
        page.locator(".variant").nth(at).locator("select").first.select_option(model)
    page.get_by_role("button", name="Use", exact=True).click()


def say(page: Any, text: str) -> None:
    page.wait_for_selector("dialog", state="detached")  # as it closes, it gives the focus back
    page.fill(".message", text)
    page.keyboard.press("Enter")


def ended(page: Any) -> None:
    page.wait_for_selector(".send[aria-label='Send']")


def columns(page: Any) -> list[str]:
    """Return the answers that are shown side by side."""
    return [text.strip() for text in page.locator(".answer-column .answer").all_inner_texts()]


def last_prompts(server: Any, count: int) -> list[str]:
    return [server.client.text.decode(asked.prompt) for asked in server.client.asked[-count:]]


def test_two_models_answer_one_message_at_once_and_the_chat_continues_with_either(page: Any, server: Any) -> None:
    compare(page, "tiny", "second")
    go_on = server.hold()
    say(page, "hello")
    page.wait_for_selector(".answer-column:nth-child(1) .markdown:has-text('Ahoy')")
    page.wait_for_selector(".answer-column:nth-child(2) .markdown:has-text('Ahoy')")
    go_on()
    ended(page)
    assert columns(page) == ["Ahoy, sailor!"] * 2
    assert [asked.adapter for asked in server.client.asked[-2:]] in (["", "second"], ["second", ""])
    assert all("tokens/s" in text for text in page.locator(".column-foot .figures").all_inner_texts())
    page.get_by_label("Continue with answer 2").click()
    page.wait_for_selector("[aria-label='Versions of the answer']")
    assert page.locator("[aria-label='Versions of the answer'] .count").inner_text() == "2/2"
    page.get_by_label("One answer again").click()
    say(page, "more")
    page.wait_for_selector(".turn:nth-child(2) .figures")
    assert last_prompts(server, 1) == ["<user>hello<assistant>Ahoy, sailor!<user>more<assistant>"]
    page.reload()
    page.wait_for_selector(".turn:nth-child(2)")
    page.get_by_label("Version of the answer before").click()
    page.wait_for_selector(".turn:nth-child(2)", state="detached")


def test_columns_are_found_again_after_a_reload_while_they_are_written(page: Any, server: Any) -> None:
    compare(page, "tiny", "second", "tiny")
    go_on = server.hold()
    say(page, "hello")
    for number in (1, 2, 3):
        page.wait_for_selector(f".answer-column:nth-child({number}) .markdown:has-text('Ahoy')")
    page.reload()
    for number in (1, 2, 3):
        page.wait_for_selector(f".answer-column:nth-child({number}) .markdown:has-text('Ahoy')")
    assert page.get_by_label("Stop", exact=True).is_visible()
    go_on()
    ended(page)
    assert columns(page) == ["Ahoy, sailor!"] * 3
    page.reload()
    page.wait_for_selector(".columns.of-3")
    assert columns(page) == ["Ahoy, sailor!"] * 3
    assert page.locator(".column-name").all_inner_texts() == ["1\ntiny", "2\nsecond", "3\ntiny"]


def test_one_answer_or_all_can_be_stopped_and_keep_their_text(page: Any, server: Any) -> None:
    compare(page, "tiny", "second")
    server.hold()
    say(page, "hello")
    for number in (1, 2):
        page.wait_for_selector(f".answer-column:nth-child({number}) .markdown:has-text('Ahoy')")
    page.get_by_label("Stop answer 1").click()
    page.wait_for_selector(".answer-column:nth-child(1):has-text('Stopped.')")
    assert page.get_by_label("Stop answer 2").is_visible(), "the other one goes on"
    page.keyboard.press("Escape")
    ended(page)
    assert [text.split() for text in columns(page)] == [["Ahoy", "Stopped."]] * 2
    assert [asked.ended for asked in server.client.asked[-2:]] == ["aborted"] * 2


def test_an_error_in_one_column_leaves_the_others_and_it_can_be_asked_again(page: Any, server: Any) -> None:
    compare(page, "tiny", "second")
    adapter = server.client.adapters.pop("second")
    say(page, "hello")
    ended(page)
    first, second = columns(page)
    assert first == "Ahoy, sailor!" and "'second' is not served here" in second
    server.client.adapters["second"] = adapter
    page.get_by_label("Try answer 2 again").click()
    page.wait_for_selector(".answer-column:nth-child(2) .column-foot .figures")
    ended(page)
    assert columns(page) == ["Ahoy, sailor!"] * 2
    page.reload()
    page.wait_for_selector(".columns.of-2")


def test_a_message_that_no_column_can_answer_stays_in_the_composer(page: Any, server: Any) -> None:
    compare(page, "tiny", "tiny")
    page.route("**/v1/responses", lambda route: route.fulfill(status=400, json={"error": {"message": "no room"}}))
    say(page, "hello")
    ended(page)
    assert columns(page) == ["no room"] * 2
    assert page.input_value(".message") == "hello"


def test_the_next_message_goes_to_all_columns_and_settings_may_differ(page: Any, server: Any) -> None:
    compare(page, "tiny", "tiny")
    page.locator("button[aria-label='Answers side by side']").click()
    page.locator(".variant").nth(1).locator("[data-field=temperature]").fill("0.25")
    page.get_by_role("button", name="Use", exact=True).click()
    say(page, "one")
    ended(page)
    page.wait_for_selector(".compare-note:has-text('follows answer 1')")
    say(page, "two")
    page.wait_for_selector(".said:has-text('two')")
    ended(page)
    assert last_prompts(server, 2) == ["<user>one<assistant>Ahoy, sailor!<user>two<assistant>"] * 2
    assert sorted(asked.params.temperature for asked in server.client.asked[-2:]) == [0.25, 1.0]
    assert page.locator(".columns").count() == 1 and page.locator(".turn").count() == 4
    page.keyboard.press("ArrowUp")
    page.locator(".editor textarea").fill("three")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said:has-text('three')")
    ended(page)
    assert last_prompts(server, 2) == ["<user>one<assistant>Ahoy, sailor!<user>three<assistant>"] * 2


def offer(page: Any, functions: str, choice: str = "auto") -> None:
    page.get_by_label("Tools", exact=False).first.click()
    page.fill("#tools-functions", functions)
    page.select_option("#tools-choice", choice)
    page.get_by_role("button", name="Save").click()


def test_a_function_call_is_shown_as_a_table_and_answered_by_hand(page: Any, server: Any) -> None:
    offer(page, json.dumps([FUNCTION]))
    server.client.words = CALL
    say(page, "weather?")
    page.wait_for_selector(".answer-form")
    shown = page.locator(".turn .call").inner_text()
    assert "Calls forecast" in shown and "city" in shown and "<b>rain</b>" in shown
    assert page.locator(".call thead th").all_inner_texts() == ["day", "sky"]
    assert page.locator(".call b, .call script").count() == 0
    server.client.words = WORDS
    page.get_by_label("Output of forecast").fill(PAGE)
    page.get_by_role("button", name="Send the answer").click()
    page.wait_for_selector(".turn:nth-child(2) .figures")
    prompt = last_prompts(server, 1)[0]
    assert '{"name": "forecast"' in prompt.partition("<user>")[0], "the tools are offered again"
    assert f"<tool_response>\n{PAGE}\n</tool_response>" in prompt
    for again in (False, True):
        if again:
            page.reload()
            page.wait_for_selector(".turn:nth-child(2) .call")
        assert page.locator(".answer-form").count() == 0
        output = page.locator(".turn:nth-child(2) .question .call")
        assert "Output of forecast" in output.inner_text() and PAGE in output.inner_text()
    with page.expect_download() as download:
        output.get_by_role("button", name="Download").click()
    assert download.value.suggested_filename == "code.html"
    assert download.value.path().read_text() == PAGE and page.evaluate("window.hacked") is None


def test_tools_that_are_not_json_are_refused_with_the_reason(page: Any, server: Any) -> None:
    for text, reason in (
        ("[{", "This is not JSON"),
        ('[{"description": "x"}]', "Tool 1 has no name"),
        ('{"type": "mcp"}', "Tool 1 has no server_label"),
    ):
        offer(page, text)
        page.wait_for_selector(f"#tools-error:has-text('{reason}')")
        page.keyboard.press("Escape")
    say(page, "hello")
    page.wait_for_selector(".turn .figures")
    assert "<tool>" not in last_prompts(server, 1)[0]


def copied(server: Any, turns: Sequence[dict[str, Any]]) -> str:
    """Store a conversation with these turns. Returns its address."""
    made = httpx.post(f"{server.url}/v1/conversations/copies", json={"turns": turns, "head": turns[-1]["id"]})
    assert made.status_code == 200, made.text
    return f"{server.url}/#chat/{made.json()['id']}"


MCP = {"type": "mcp", "server_label": "sea", "server_url": "http://sea.example/mcp", "authorization": "secret"}


def requests(*names: str) -> dict[str, Any]:
    """Return a turn that waits for approval of calls of these tools."""
    calls = [
        {"id": f"mcpr_{name}", "type": "mcp_approval_request", "server_label": "sea", "name": name, "arguments": "{}"}
        for name in names
    ]
    return {"id": "a", "input": [{"role": "user", "content": "When?"}], "output": calls}


def refuse_turns(page: Any, offered: list[dict[str, Any]]) -> None:
    """Refuse each turn that the page sends. The last response shows these tools."""
    page.route("**/v1/responses", lambda route: route.fulfill(status=400, json={"error": {"message": "no room"}}))
    page.route("**/v1/responses/*", lambda route: route.fulfill(json={"tools": offered}))


def sent_by(page: Any, label: str) -> dict[str, Any]:
    """Press a button. Returns the turn that the page sends."""
    with page.expect_request("**/v1/responses") as request:
        page.get_by_label(label).click()
    return dict(request.value.post_data_json)


def test_a_call_that_waits_for_approval_is_approved_with_the_servers_whole_address(page: Any, server: Any) -> None:
    page.goto(copied(server, [requests("tides")]))
    offer(page, json.dumps([MCP]))
    refuse_turns(page, [MCP | {"server_url": "http://sea.example", "authorization": None}])
    sent = sent_by(page, "Approve tides at sea")
    (answer,) = sent["input"]
    assert answer["approval_request_id"].startswith("mcpr_")
    assert (answer["type"], answer["approve"], sent["tools"]) == ("mcp_approval_response", True, [MCP])
    assert sent_by(page, "Deny tides at sea")["input"][0]["approve"] is False, "a refused turn can be sent again"


def test_several_approvals_are_sent_when_the_last_one_is_decided(page: Any, server: Any) -> None:
    page.goto(copied(server, [requests("tides", "winds")]))
    offer(page, json.dumps([MCP]))
    refuse_turns(page, [MCP])
    page.get_by_label("Approve tides at sea").click()
    assert page.get_by_label("Approve tides at sea").get_attribute("aria-pressed") == "true"
    answers = sent_by(page, "Deny winds at sea")["input"]
    assert [each["approve"] for each in answers] == [True, False]
    assert len({each["approval_request_id"] for each in answers}) == 2


def test_an_approval_without_the_servers_address_says_what_to_add(page: Any, server: Any) -> None:
    page.goto(copied(server, [requests("tides")]))
    refuse_turns(page, [MCP])
    page.get_by_label("Approve tides at sea").click()
    page.wait_for_selector(".toast:has-text('The MCP server sea is not among the tools')")


def test_a_form_at_the_end_of_a_conversation_is_in_sight(page: Any, server: Any) -> None:
    long = {
        "input": [{"role": "user", "content": "Go on."}],
        "output": [{"role": "assistant", "content": "A line.\n\n" * 60}],
    }
    turns = [long | {"id": f"t{at}", "parent": f"t{at - 1}" if at else None} for at in range(4)]
    page.goto(copied(server, [*turns, requests("tides", "winds") | {"parent": "t3"}]))
    page.wait_for_selector(".answer-form")
    page.wait_for_function(
        """() => document.querySelector('.answer-form').getBoundingClientRect().bottom
            <= document.querySelector('.thread').getBoundingClientRect().bottom"""
    )


def test_the_pages_of_a_web_search_are_listed_with_links(page: Any, server: Any) -> None:
    results = [
        {"title": "Tides", "url": "https://sea.example/1", "text": "High water at six."},
        {"title": "A trap", "url": "javascript:window.hacked=1", "text": "none"},
    ]
    search = {
        "id": "ws_1", "type": "web_search_call", "status": "completed", "results": results,
        "action": {"type": "search", "query": "tides in Dover", "sources": []},
    }  # fmt: skip
    said = {"role": "assistant", "content": "At six."}
    turn = {"id": "a", "input": [{"role": "user", "content": "When?"}], "output": [search, said]}
    page.goto(copied(server, [turn]))
    page.get_by_text("Searched the web for tides in Dover: 2 pages", exact=True).click()
    page.locator(".found a").first.wait_for()
    assert page.locator(".found a").all_inner_texts() == ["Tides"]
    assert page.locator(".found li").nth(1).inner_text().startswith("A trap")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_columns_and_calls_have_no_fault_for_axe_and_fit_the_screen(
    fresh_page: Callable[..., Any], server: Any, axe: Any, scheme: str, width: int
) -> None:
    page = fresh_page(server.url, color_scheme=scheme, viewport={"width": width, "height": 800})
    page.locator("button[aria-label='Answers side by side']").click()
    found = axe(page)
    page.get_by_role("button", name="Use", exact=True).click()
    say(page, "hello")
    ended(page)
    found += axe(page)
    tops = {round(each.bounding_box()["y"]) for each in page.locator(".answer-column").all()}
    assert len(tops) == (1 if width > 820 else 2), "on a phone one is below the other"
    page.get_by_label("One answer again").click()
    offer(page, json.dumps([FUNCTION]))
    server.client.words = CALL
    say(page, "weather?")
    page.wait_for_selector(".answer-form")
    server.client.words = WORDS
    found += axe(page)
    page.get_by_label("Tools: forecast").click()
    found += axe(page)
    assert found == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.keyboard.press("Escape")
    rows = [{"title": "Weatherbound", "url": "https://example.org/weather/1", "text": "It will rain. " * 20}]
    page.get_by_label("Output of forecast").fill(json.dumps(rows))
    page.get_by_role("button", name="Send the answer").click()
    page.wait_for_selector(".asked .values")
    ended(page)
    assert page.locator(".asked .call").bounding_box()["x"] >= 0, "a wide table scrolls inside itself"
    title, text = (page.locator(".asked td .said").nth(at).bounding_box() for at in (0, 2))
    assert title["height"] < 40 and text["width"] > 150, "no word is broken, and no column is squeezed"
