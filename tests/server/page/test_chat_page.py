"""The chat in a real headless Chromium: conversations with branches, keys, injected markup, many conversations."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.server.conversations.conversation_store import append
from holdfast.server.conversations.database import conversations, threads
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 2'>\n\n"
    "[a](javascript:window.hacked=3) ![b](http://127.0.0.1:9/c.png) <svg onload=alert(1)>\n\n"
    "```html\"><img src=y onerror='window.hacked=4'>\n<b>bold</b>\n```\n\n"
    "| <i>x</i> |\n|-|\n| <a href=javascript:x>y</a> |\n"
)
NAMED = "<img src=z onerror='window.hacked=5'>"


def tenant(key: str) -> str:
    return hashlib.sha256(b"holdfast tenant\0" + key.encode()).hexdigest()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which the key `many` has 1,000 conversations."""
    path = tmp_path_factory.mktemp("store") / "conversations.sqlite"
    store = Store.open(str(path), Bounds(seconds=1e6, threads=10_000, bytes=1 << 30))
    now = int(store.space.now())
    with store.database.write() as db:
        for number in range(1000):
            id, owner = f"conv_{number}", tenant("many")
            db.execute(threads.insert().values(id=id, tenant=owner, active=now - number, bytes=100))
            title = json.dumps({"title": f"Conversation {number}"}).encode()
            db.execute(conversations.insert().values(id=id, thread=id, tenant=owner, created=now, metadata=title))
            said = [{"type": "input_text", "text": f"Let us talk about {'whales' if number == 777 else 'ships'}."}]
            append(db, id, [{"id": f"i{number}", "type": "message", "role": "user", "content": said}])
    store.close()
    return path


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], store: Path) -> Any:
    return serve(api_key=("one", "two", "many"), store=str(store))


@pytest.fixture
def opened(fresh_page: Callable[..., Any], server: Any) -> Iterator[Callable[..., Any]]:
    """Open the page in a fresh profile: `opened("key", path)`. Any error in the page's log fails the test."""

    def open(key: str | None = "one", path: str = "/", **options: Any) -> Any:
        page = fresh_page(f"{server.url}{path}", key, **options)
        if key is not None:
            page.wait_for_selector(".item, .list-note:not(:empty)", state="attached")
        return page

    yield open
    server.client.words, server.client.hold = ("Ahoy", ", ", "sailor", "!"), None


def say(page: Any, text: str) -> None:
    """Send a message, and wait until it is answered."""
    page.fill(".message", text)
    page.keyboard.press("Enter")
    answered(page)


def answered(page: Any) -> None:
    page.wait_for_selector(".turn:last-child .figures")
    page.wait_for_selector(".send[aria-label='Send']")


def questions(page: Any) -> list[str]:
    """Return the user's messages in the visible branch."""
    return [text.strip() for text in page.locator(".turn .said").all_text_contents()]


def expect_questions(page: Any, *texts: str) -> None:
    for _ in range(100):
        if questions(page) == list(texts):
            return
        page.wait_for_timeout(50)
    assert questions(page) == list(texts)


def test_five_turns_with_an_edit_and_a_second_try_are_kept_with_all_branches(opened: Any) -> None:
    page = opened()
    for number in range(1, 6):
        say(page, f"turn {number}")
    page.locator(".turn").nth(3).hover()
    page.locator(".turn").nth(3).locator("[data-action=edit]").click()
    page.locator(".editor textarea").fill("turn 4, edited")
    page.keyboard.press("Enter")
    expect_questions(page, "turn 1", "turn 2", "turn 3", "turn 4, edited")
    answered(page)
    page.locator(".turn").nth(3).locator("[data-action=retry]").click()
    page.wait_for_selector("[aria-label='Versions of the answer']")
    answered(page)
    assert page.locator("[aria-label='Versions of the answer'] .count").inner_text() == "2/2"
    page.reload()
    expect_questions(page, "turn 1", "turn 2", "turn 3", "turn 4, edited")
    page.get_by_label("Version of the question before").click()
    expect_questions(page, "turn 1", "turn 2", "turn 3", "turn 4", "turn 5")
    say(page, "turn 6")
    page.reload()
    expect_questions(page, "turn 1", "turn 2", "turn 3", "turn 4", "turn 5", "turn 6")
    page.get_by_label("Branches", exact=True).click()
    assert page.locator(".branch").count() == 8
    page.locator(".branch", has_text="turn 4, edited").first.click()
    expect_questions(page, "turn 1", "turn 2", "turn 3", "turn 4, edited")


def test_the_first_message_can_be_edited_too(opened: Any, server: Any) -> None:
    page = opened()
    say(page, "first")
    say(page, "second")
    page.locator(".turn").first.hover()
    page.locator("[data-action=edit]").first.click()
    page.locator(".editor textarea").fill("first, edited")
    page.keyboard.press("Enter")
    expect_questions(page, "first, edited")
    answered(page)
    assert server.client.text.decode(server.client.asked[-1].prompt) == "<user>first, edited<assistant>"
    page.get_by_label("Version of the question before").click()
    expect_questions(page, "first", "second")


def test_a_stopped_answer_keeps_its_text_and_the_conversation_continues_from_it(opened: Any, server: Any) -> None:
    page = opened()
    server.hold()
    page.fill(".message", "tell me")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .markdown:has-text('Ahoy')")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    assert server.client.asked[-1].ended == "aborted"
    server.client.hold = None
    page.reload()
    page.wait_for_selector("text=Stopped.")
    say(page, "go on")
    assert (
        server.client.text.decode(server.client.asked[-1].prompt)
        == "<user>tell me<assistant>Ahoy<user>go on<assistant>"
    )
    expect_questions(page, "tell me", "go on")


def test_a_page_that_is_opened_again_shows_the_answer_that_is_being_written(opened: Any, server: Any) -> None:
    page = opened()
    go_on = server.hold()
    page.fill(".message", "tell me")
    page.keyboard.press("Enter")
    page.wait_for_selector(".turn .markdown:has-text('Ahoy')")
    page.reload()
    page.wait_for_selector(".turn .markdown:has-text('Ahoy')")
    assert page.get_by_label("Stop", exact=True).is_visible()
    go_on()
    page.wait_for_selector(".turn .markdown:has-text('Ahoy, sailor!')")
    answered(page)


def test_another_key_sees_nothing_of_a_conversation(opened: Any) -> None:
    page = opened("one")
    say(page, "my secret")
    address = page.url
    assert "#chat/conv_" in address
    other = opened("two", address[address.index("/#") :])
    assert "was not found" in other.locator(".column").inner_text()
    assert other.locator(".list-note").inner_text() == "No conversations yet."
    assert "secret" not in other.content()


def test_a_wrong_key_is_asked_for_again_and_a_kept_one_outlives_the_tab(opened: Any, server: Any) -> None:
    page = opened(None)
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=The key was not accepted")
    page.fill("#key", "two")
    page.keyboard.press("Enter")
    page.wait_for_selector(".list-note:not(:empty)")
    stored = "[sessionStorage.getItem('holdfast.key'), localStorage.getItem('holdfast.key')]"
    assert page.evaluate(stored) == ["two", None]
    page.get_by_label("Forget the key").click()
    page.wait_for_selector("#key")
    page.fill("#key", "two")
    page.check("#keep-key")
    page.keyboard.press("Enter")
    page.wait_for_selector(".list-note:not(:empty)")
    again = page.context.new_page()
    again.goto(server.url)
    again.wait_for_selector(".list-note:not(:empty)")
    assert again.evaluate(stored) == [None, "two"]


def test_markup_in_an_answer_a_title_or_a_file_name_stays_text(opened: Any, server: Any) -> None:
    elsewhere: list[str] = []
    page = opened()
    page.on(
        "request", lambda request: elsewhere.append(request.url) if not request.url.startswith(server.url) else None
    )
    server.client.words = re.findall(r".{1,5}", HOSTILE, re.DOTALL)
    page.locator("input[type=file]").last.set_input_files(
        {"name": NAMED, "mimeType": "text/plain", "buffer": HOSTILE.encode()}
    )
    page.wait_for_selector(f".chip:has-text({json.dumps(NAMED)})")
    say(page, NAMED)
    for again in (False, True):
        if again:
            page.reload()
            page.wait_for_selector(".turn .markdown .code")
        shown = page.locator(".turn .answer").inner_text()
        assert "<script>window.hacked = 1</script>" in shown and "onerror='window.hacked = 2'" in shown
        assert page.locator(".thread-title").inner_text() == NAMED == page.locator(".row .title").first.inner_text()
        assert page.locator(".file summary").inner_text() == NAMED
        assert page.locator(".chat :is(img, script, iframe, [onerror], [onload], [href^=javascript])").count() == 0
    exported = json.dumps({"format": "holdfast.conversation", "version": 1, "metadata": {"title": NAMED}, "turns": []})
    page.locator("nav input[type=file]").set_input_files(
        {"name": NAMED, "mimeType": "application/json", "buffer": exported.encode()}
    )
    page.wait_for_selector(f".toast:has-text({json.dumps(NAMED)})")
    assert page.evaluate("window.hacked") is None
    assert [url for url in elsewhere if not url.startswith("blob:")] == []


def test_the_policy_refuses_markup_inline_code_and_other_hosts_even_if_the_page_had_a_hole(opened: Any) -> None:
    context = opened().context
    page = context.new_page()
    page.goto(context.pages[0].url)
    attack = """() => {
      const tried = {};
      const fail = (name, work) => {
        try { work(); tried[name] = 'done'; } catch (error) { tried[name] = error.name; }
      };
      fail('markup', () => { document.body.innerHTML = '<b>x</b>'; });
      const script = document.createElement('script');
      fail('script', () => { script.textContent = 'window.hacked = 1'; });
      fail('handler', () => { document.body.setAttribute('onclick', 'window.hacked = 2'); });
      const told = (answer) => ({...tried, answer, hacked: window.hacked ?? null});
      return fetch('http://localhost:9/').then(() => told('done'), () => told('refused'));
    }"""
    found = page.evaluate(attack)
    assert found["markup"] == found["script"] == found["handler"] == "TypeError"
    assert (found["answer"], found["hacked"]) == ("refused", None)


def test_a_conversation_is_renamed_exported_imported_and_deleted(opened: Any, tmp_path: Path) -> None:
    page = opened()
    say(page, "to be kept")
    page.locator(".turn [data-action=retry]").click()
    page.wait_for_selector("[aria-label='Versions of the answer']")
    answered(page)

    def choose(option: str) -> None:
        page.locator(".item:has([aria-current]) .row-more").click()
        page.get_by_role("button", name=option).click()

    choose("Rename")
    page.fill("#new-title", "A better name")
    page.keyboard.press("Enter")
    page.wait_for_selector(".thread-title:has-text('A better name')")
    page.reload()
    page.wait_for_selector(".thread-title:has-text('A better name')")
    page.wait_for_selector(".item:has([aria-current])")
    with page.expect_download() as download:
        choose("Export")
    assert download.value.suggested_filename == "A better name.json"
    download.value.save_as(tmp_path / "kept.json")
    choose("Delete")
    page.locator(".danger").click()
    page.wait_for_selector(".welcome")
    assert page.get_by_role("button", name="A better name").count() == 0
    page.locator("nav input[type=file]").set_input_files(tmp_path / "kept.json")
    page.wait_for_selector(".thread-title:has-text('A better name')")
    assert page.locator("[aria-label='Versions of the answer'] .count").inner_text() == "2/2"
    assert page.locator(".turn .answer").inner_text().strip() == "Ahoy, sailor!"


def test_settings_go_with_the_next_message(opened: Any, server: Any) -> None:
    page = opened()
    page.get_by_label("Settings", exact=True).click()
    page.fill("#set-instructions", "be kind")
    page.fill("#set-temperature", "0.3")
    page.fill("#set-max_output_tokens", "3")
    page.get_by_role("button", name="Save").click()
    say(page, "hello")
    asked = server.client.asked[-1]
    assert server.client.text.decode(asked.prompt) == "<system>be kind<user>hello<assistant>"
    assert (asked.params.temperature, asked.params.max_tokens) == (0.3, 3)
    assert "Cut off" in page.locator(".turn .answer").inner_text()


def test_a_thousand_conversations_are_listed_as_they_are_scrolled_and_searched(opened: Any) -> None:
    page = opened("many")
    for _ in range(60):
        page.locator(".list-scroll").evaluate("(list) => { list.scrollTop = list.scrollHeight; }")
        page.wait_for_timeout(30)
        if page.locator(".item").count() == 1000:
            break
    assert page.locator(".item").count() == 1000
    assert page.locator(".row .title").last.text_content() == "Conversation 999"
    page.keyboard.press("Control+k")
    page.keyboard.type("WHALES")
    page.wait_for_selector(".match")
    assert page.locator(".row .title").all_inner_texts() == ["Conversation 777"]
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".said:has-text('whales')")


def test_the_page_is_worked_by_keys_alone(opened: Any) -> None:
    page = opened()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answered(page)
    assert questions(page) == ["one\ntwo"]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Control+a")
    page.keyboard.type("three")
    page.keyboard.press("Enter")
    expect_questions(page, "three")
    answered(page)
    page.keyboard.press("Alt+r")
    page.wait_for_selector("[aria-label='Versions of the answer']")
    answered(page)
    page.keyboard.press("Alt+n")
    page.wait_for_selector(".welcome")
    page.locator(".thread").focus()
    page.keyboard.press("?")
    page.wait_for_selector(".shortcuts")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious(opened: Any, server: Any, axe: Any, scheme: str, width: int) -> None:
    page = opened("one", color_scheme=scheme, viewport={"width": width, "height": 800})
    server.client.words = ("# Title\n\nText with `code` and a [link](https://example.org).\n\n",
                           "```python\ndef f(x: int) -> str:\n    # why\n    return 'a'\n```\n")  # fmt: skip
    say(page, "hello")
    page.locator(".turn").hover()
    found = axe(page)
    page.get_by_label("Settings", exact=True).click()
    found += axe(page)
    page.keyboard.press("Escape")
    page.get_by_label("Show or hide the conversations").click()
    found += axe(page)
    assert found == []


def test_the_theme_is_the_systems_until_one_is_chosen(opened: Any) -> None:
    page = opened("one", color_scheme="dark")

    def ground(expected: str) -> bool:
        for _ in range(100):  # The page learns of a change a moment later.
            if page.evaluate("getComputedStyle(document.body).backgroundColor") == expected:
                return True
            page.wait_for_timeout(20)
        return False

    dark, light = "rgb(23, 23, 22)", "rgb(251, 251, 250)"
    assert ground(dark)
    page.emulate_media(color_scheme="light")
    assert ground(light)
    page.get_by_label("Theme: as the system").click()
    page.get_by_label("Theme: light").click()
    assert ground(dark)
    page.reload()
    assert ground(dark), "the choice is kept"
    page.get_by_label("Theme: dark").click()
    assert ground(light)
    page.emulate_media(color_scheme="dark")
    assert ground(dark)


def test_a_message_that_is_sent_before_the_page_has_loaded_is_answered(opened: Any, server: Any) -> None:
    page = opened().context.new_page()
    page.set_default_timeout(10_000)
    held: list[Any] = []

    def go_on(pattern: str) -> None:
        for route in [each for each in held if re.search(pattern, each.request.url)]:
            held.remove(route)
            route.continue_()

    for path in ("models", "conversations"):  # The models are listed, and the conversation is created.
        page.route(f"**/v1/{path}", lambda route: held.append(route))
    page.goto(server.url)
    page.fill(".message", "early")
    page.keyboard.press("Enter")
    page.wait_for_timeout(200)
    go_on("models")
    page.wait_for_timeout(400)
    page.unroute("**/v1/conversations")
    go_on("conversations")
    answered(page)
    assert questions(page) == ["early"] and page.input_value(".message") == ""


def test_other_tenants_keys_do_not_open_the_stored_turns_by_the_api(server: Any) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer two"}) as api:
        assert api.get("/v1/conversations/conv_1/turns").status_code == 404
