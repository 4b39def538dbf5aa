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

from holdfast.server.conversations import search_index
from holdfast.server.conversations.conversation_store import append
from holdfast.server.conversations.database import conversations, threads
from holdfast.server.conversations.encoded import encoded_items
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 2'>\n\n"
    "[a](javascript:window.hacked=3) ![b](http://127.0.0.1:9/c.png) <svg onload=alert(1)>\n\n"
    "```html\"><img src=y onerror='window.hacked=4'>\n<b>bold</b>\n```\n\n"
    "| <i>x</i> |\n|-|\n| <a href=javascript:x>y</a> |\n"
)
CHINESE = b"""%PDF-1.7
1 0 obj <</Type/Catalog/Pages 2 0 R>> endobj
2 0 obj <</Type/Pages/Kids[3 0 R]/Count 1>> endobj
3 0 obj <</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>> endobj
4 0 obj <</Length 27>> stream
BT /F 12 Tf <4e2d6587> Tj ET
endstream endobj
5 0 obj <</Type/Font/Subtype/Type0/BaseFont/S/Encoding/UniGB-UCS2-H/DescendantFonts[6 0 R]>> endobj
6 0 obj <</Type/Font/Subtype/CIDFontType0/BaseFont/S/FontDescriptor<</Type/FontDescriptor/FontName/S/Flags 4>>
/CIDSystemInfo<</Registry(Adobe)/Ordering(GB1)/Supplement 2>>>> endobj
trailer <</Root 1 0 R>>
"""
"""A PDF file whose text is in an encoding that the file does not contain."""
FORMULAS = """async (texts) => {
  const main = document.querySelector('script[type=module]').src;
  const { lex } = await import(main.replace('main.js', 'math_lexer.js'));
  const found = (token) => {
    if (token.type === 'formula') return [(token.display ? '= ' : '') + token.tex];
    const cells = token.type === 'table' ? [token.header, ...token.rows].flat() : [];
    return [...(token.tokens ?? []), ...(token.items ?? []), ...cells].flatMap(found);
  };
  return texts.map((text) => lex(text).flatMap(found));
}"""
"""Function in the page that returns the formulas of each text. A formula on lines of its own begins with `= `."""
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
            search_index.add_conversation(db, owner, id, title)
            said = [{"type": "input_text", "text": f"Let us talk about {'whales' if number == 777 else 'ships'}."}]
            append(db, id, encoded_items([{"id": f"i{number}", "type": "message", "role": "user", "content": said}]))
    store.close()
    return path


@pytest.fixture(scope="module")
def server(serve: Callable[..., Any], store: Path) -> Any:
    return serve(api_key=("one", "two", "many"), store=str(store), reasoning_parser="qwen3")


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
    page.wait_for_selector("dialog", state="detached")  # as it closes, it gives the focus back
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
    for _ in range(1200):  # a busy machine may need a minute
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


def test_a_message_is_sent_and_its_chat_listed_although_another_chat_is_opened_at_once(opened: Any) -> None:
    page = opened()
    say(page, "the other chat")
    other = page.url
    held: list[Any] = []

    def hold(route: Any) -> None:
        if route.request.method == "POST":
            held.append(route)
        else:
            route.continue_()

    page.route("**/v1/conversations", hold)
    page.locator(".new").click()
    with page.expect_request(lambda request: request.method == "POST"):
        page.fill(".message", f"{'⛵😀' * 30} sails on")
        page.keyboard.press("Enter")
    page.locator(".row", has_text="the other chat").first.click()
    expect_questions(page, "the other chat")
    held[0].continue_()
    page.locator(".row", has_text=f"{'⛵😀' * 28}⛵…").click()
    page.wait_for_selector(".turn .markdown:has-text('Ahoy, sailor!')")
    answered(page)
    expect_questions(page, f"{'⛵😀' * 30} sails on")
    page.goto(other)
    expect_questions(page, "the other chat")


def test_what_the_user_opened_or_writes_stays_when_an_answer_ends(opened: Any, server: Any) -> None:
    page = opened()
    say(page, "first")
    server.client.words = ("<think>Hm", ", so", "</think>", "Ahoy")
    go_on = server.hold()
    page.fill(".message", "second")
    page.keyboard.press("Enter")
    page.locator(".reasoning summary", has_text="Thinking").click()
    page.locator(".turn").first.hover()
    page.locator("[data-action=edit]").first.click()
    page.locator(".editor textarea").fill("first, with mutiny")
    page.keyboard.press("Enter")
    page.wait_for_selector(".toast:has-text('An answer is being written')")
    go_on()
    answered(page)
    shown = page.locator(".answer").last.inner_text().split("\n\n")
    assert shown == ["Reasoning", "Hm, so", "Ahoy"], "it is still open"
    assert page.input_value(".editor textarea") == "first, with mutiny"
    page.keyboard.press("Enter")
    page.wait_for_selector(".toast.error:has-text('mutiny')")
    assert page.input_value(".editor textarea") == "first, with mutiny", "a message that is refused is not lost"
    page.keyboard.press("Escape")
    expect_questions(page, "first", "second")


def test_a_conversation_that_is_slow_to_come_is_said_to_be_loading(opened: Any) -> None:
    page = opened()
    say(page, "hello")
    held: list[Any] = []
    page.route("**/turns", lambda route: held.append(route))
    page.reload()
    page.wait_for_selector(".thread .notice:has-text('Loading the conversation…')")
    page.locator(".new").click()
    page.wait_for_selector(".welcome")
    assert page.locator(".notice").count() == 0
    page.locator(".row", has_text="hello").first.click()
    page.wait_for_selector(".thread .notice:has-text('Loading the conversation…')")
    for route in held:
        route.continue_()
    expect_questions(page, "hello")
    page.unroute("**/turns")
    page.clock.install()
    page.locator(".new").click()
    page.wait_for_selector(".welcome")
    page.locator(".row", has_text="hello").first.click()
    expect_questions(page, "hello")
    page.clock.fast_forward(60_000)
    expect_questions(page, "hello")
    assert page.locator(".notice").count() == 0, "one that came at once stays"


def test_a_broken_connection_is_named_until_the_answer_goes_on(opened: Any) -> None:
    page = opened()
    page.clock.install()
    held: list[Any] = []
    breaks = 2  # The page names a break once the first new connection has failed as well.

    def begin(route: Any) -> None:
        response = route.fetch(post_data={**route.request.post_data_json, "stream": False}).json()
        event = {"type": "response.created", "sequence_number": 0, "response": response}
        route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n")

    def again(route: Any) -> None:
        nonlocal breaks
        if breaks:
            breaks -= 1
            route.fulfill(content_type="text/event-stream", body="")
        else:
            held.append(route)

    page.route(re.compile("/v1/responses$"), begin)
    page.route(re.compile(r"/v1/responses/\w+\?stream=true"), again)
    page.fill(".message", "hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".toast:has-text('The connection broke. Connecting again…')")
    while not held:
        page.wait_for_timeout(50)
    page.clock.fast_forward(60_000)
    assert page.locator(".toast").count() == 1, "it is still true"
    held[0].continue_()
    answered(page)
    assert page.locator(".toast").count() == 0 and page.inner_text(".turn .markdown") == "Ahoy, sailor!"


def test_a_text_is_copied_where_the_browser_has_no_clipboard_interface(opened: Any, server: Any) -> None:
    page = opened()
    page.evaluate("delete Navigator.prototype.clipboard")  # as on a page of another machine without TLS
    server.client.words = ("Ahoy", "\n```\nx = 1\n```")
    say(page, "tell me")
    page.get_by_label("Copy the answer").click()
    page.locator(".message").press("Control+V")
    assert page.input_value(".message") == "Ahoy\n```\nx = 1\n```"
    page.get_by_role("button", name="Copy", exact=True).click()
    page.locator(".message").fill("")
    page.locator(".message").press("Control+V")
    assert page.input_value(".message") == "x = 1"


def test_another_key_sees_nothing_of_a_conversation(opened: Any) -> None:
    page = opened("one")
    say(page, "my secret")
    address = page.url
    assert "#chat/conv_" in address
    other = opened("two", address[address.index("/#") :])
    other.wait_for_selector(".column .notice:has-text('was not found')")
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
    asked: list[str] = []

    def note(request: Any) -> None:
        asked.append(request.url)

    page = opened()
    page.on("request", note)
    server.client.words = re.findall(r".{1,5}", HOSTILE, re.DOTALL)
    page.locator(".composer input[type=file]").set_input_files(
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
        assert page.locator(".file .name").inner_text() == NAMED
        assert page.locator(".chat :is(img, script, iframe, [onerror], [onload], [href^=javascript])").count() == 0
    exported = json.dumps({"format": "holdfast.conversation", "version": 1, "metadata": {"title": NAMED}, "turns": []})
    page.locator("nav input[type=file]").set_input_files(
        {"name": NAMED, "mimeType": "application/json", "buffer": exported.encode()}
    )
    page.wait_for_selector(f".toast:has-text({json.dumps(NAMED)})")
    assert page.evaluate("window.hacked") is None
    page.remove_listener("request", note)
    assert asked and all(url.startswith((server.url, "blob:")) for url in asked)


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
      fail('policy', () => trustedTypes.createPolicy('another', { createHTML: (text) => text }));
      fail('handler', () => { document.body.setAttribute('onclick', 'window.hacked = 2'); });
      const told = (answer) => ({...tried, answer, hacked: window.hacked ?? null});
      return fetch('http://localhost:9/').then(() => told('done'), () => told('refused'));
    }"""
    found = page.evaluate(attack)
    assert found["markup"] == found["script"] == found["policy"] == found["handler"] == "TypeError"
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
    # A turn that is not drawn yet has no inner text.
    assert page.locator("[aria-label='Versions of the answer'] .count").text_content() == "2/2"
    assert page.locator(".turn .answer").text_content().strip() == "Ahoy, sailor!"


def settings(page: Any, **values: str) -> None:
    """Open the settings and fill in fields by name."""
    page.get_by_label("Settings", exact=True).click()
    page.wait_for_selector("#set-preset")
    for name, value in values.items():
        page.fill(f"#set-{name}", value)


def save(page: Any) -> None:
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector("dialog", state="detached")


def test_settings_go_with_the_next_message(opened: Any, server: Any) -> None:
    page = opened()
    settings(
        page, instructions="be kind", temperature="0.3", max_output_tokens="3", top_p="0.9", top_k="40", min_p="0.05",
        presence_penalty="-0.5", frequency_penalty="0.25", repetition_penalty="1.1", seed="7", stop="END\n\\n\\n",
    )  # fmt: skip
    save(page)
    say(page, "hello")
    asked = server.client.asked[-1]
    assert server.client.text.decode(asked.prompt) == "<system>be kind<user>hello<assistant>"
    sent = asked.params
    assert (sent.temperature, sent.max_tokens, sent.top_p, sent.top_k, sent.min_p) == (0.3, 3, 0.9, 40, 0.05)
    assert (sent.presence_penalty, sent.frequency_penalty, sent.repetition_penalty) == (-0.5, 0.25, 1.1)
    assert (sent.seed, sent.stop) == (7, ("END", "\n\n"))
    assert "Cut off" in page.locator(".turn .answer").inner_text()
    settings(page)
    page.select_option("#set-preset", "Exact")
    save(page)
    say(page, "again")
    sent = server.client.asked[-1].params
    assert (sent.temperature, sent.top_k, sent.seed, sent.stop) == (0, 0, None, ())


def test_a_setting_outside_its_limits_is_named_and_nothing_is_saved(opened: Any) -> None:
    page = opened()
    settings(page, temperature="3", top_p="0", top_k="1.5", seed="-1", stop="\n".join("abcdefghijklmnopq"))
    page.get_by_role("button", name="Save", exact=True).click()
    assert page.locator(".fault:not(:empty)").all_inner_texts() == [
        "Temperature is 3; it must be between 0 and 2",
        "Top p is 0; it must be above 0 and at most 1",
        "Top k is 1.5; it must be a whole number",
        f"Seed is -1; it must be between 0 and {2**53 - 1}",
        "There are 17 stop strings; at most 16 are allowed",
    ]
    assert page.evaluate("document.activeElement.id") == "set-temperature"
    page.fill("#set-temperature", "1")
    assert page.locator(".fault:not(:empty)").count() == 4, "a fault that is mended is taken back"
    page.keyboard.press("Escape")
    assert page.evaluate("localStorage.getItem('holdfast.settings')") is None


def test_presets_are_kept_renamed_deleted_and_taken_to_another_browser(opened: Any, tmp_path: Path) -> None:
    page = opened()
    settings(page, temperature="0.7", instructions="be brief")
    page.get_by_label("Keep these settings as a preset").click()
    page.fill("#preset-name", "Exact")
    page.keyboard.press("Enter")
    assert page.locator("#fault-preset").inner_text() == "“Exact” is built in; take another name"
    page.fill("#preset-name", "Brief")
    page.keyboard.press("Enter")
    page.get_by_label("Rename this preset").click()
    page.fill("#preset-name", "Short")
    page.keyboard.press("Enter")
    page.select_option("#set-preset", "Careful")
    assert (page.input_value("#set-temperature"), page.input_value("#set-top_p")) == ("0.3", "0.9")
    assert page.input_value("#set-instructions") == "be brief", "a built-in preset leaves the instructions"
    with page.expect_download() as download:
        page.get_by_label("Export the presets").click()
    download.value.save_as(tmp_path / "presets.json")
    save(page)
    assert page.locator(".model").inner_text().endswith(" · Careful")
    other = opened()
    settings(other)
    other.locator("dialog input[type=file]").set_input_files(tmp_path / "presets.json")
    other.wait_for_selector("#set-preset option:has-text('Short')", state="attached")
    other.select_option("#set-preset", "Short")
    assert (other.input_value("#set-temperature"), other.input_value("#set-instructions")) == ("0.7", "be brief")
    other.get_by_label("Delete this preset").click()
    assert other.locator("#set-preset optgroup").count() == 0
    (tmp_path / "presets.json").write_text(
        json.dumps({"format": "holdfast.presets", "version": 1, "presets": [{"name": "x", "settings": {"min_p": 2}}]})
    )
    other.locator("dialog input[type=file]").set_input_files(tmp_path / "presets.json")
    other.wait_for_selector("#fault-preset:has-text('“x”: Min p is 2; it must be between 0 and 1')")
    assert other.locator("#set-preset optgroup").count() == 0


def test_a_chats_own_settings_are_its_alone_and_go_with_its_file(opened: Any, server: Any, tmp_path: Path) -> None:
    page = opened()
    settings(page, temperature="0.2")
    save(page)
    page.get_by_label("Settings", exact=True).click()
    page.fill("#set-temperature", "1.5")
    page.check("#scope-chat")
    save(page)
    say(page, "first chat")
    page.keyboard.press("Alt+n")
    page.wait_for_selector(".welcome")
    say(page, "second chat")
    page.reload()
    say(page, "still the second")
    page.locator(".row", has_text="first chat").first.click()
    page.wait_for_selector(".said:has-text('first chat')")
    say(page, "again in the first")
    assert [each.params.temperature for each in server.client.asked[-4:]] == [1.5, 0.2, 0.2, 1.5]
    page.locator(".item:has([aria-current]) .row-more").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "kept.json")
    other = opened()
    other.locator("nav input[type=file]").set_input_files(tmp_path / "kept.json")
    other.wait_for_selector(".said:has-text('again in the first')")
    say(other, "elsewhere")
    assert server.client.asked[-1].params.temperature == 1.5


def test_thinking_is_offered_as_the_models_template_knows_it(opened: Any, server: Any) -> None:
    page = opened()
    settings(page)
    assert page.locator("#set-thinking").is_hidden()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    server.client.text.template = "{{ enable_thinking }}{{ reasoning_effort }}"
    try:
        off, on = "<enable_thinking=False>", "<enable_thinking=True>"
        for way, sent in (("high", f"<reasoning_effort=high>{on}"), ("none", off), ("on", on), ("", "")):
            settings(page)
            page.wait_for_selector("#set-thinking option[value=low]", state="attached")
            page.select_option("#set-thinking", way)
            save(page)
            page.keyboard.press("Alt+n")
            page.wait_for_selector(".welcome")
            say(page, "hello")
            assert server.client.text.decode(server.client.asked[-1].prompt) == f"{sent}<user>hello<assistant>"
    finally:
        server.client.text.template = ""


def test_a_thousand_conversations_are_listed_as_they_are_scrolled_and_searched(opened: Any) -> None:
    page = opened("many")
    for _ in range(2000):
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
    page.get_by_label("Version of the answer before").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".count:has-text('1/2')")
    page.keyboard.press("Enter")  # The focus is on the button for the other direction now.
    page.wait_for_selector(".count:has-text('2/2')")
    page.keyboard.press("Control+k")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # This opens the options, of which the first one is to rename.
    page.keyboard.press("Enter")
    page.wait_for_selector("#new-title:focus")
    page.locator("#new-title").fill("By keys")
    page.keyboard.press("Enter")
    page.wait_for_selector("[aria-label='Options of By keys']:focus")
    page.keyboard.press("Alt+n")
    page.wait_for_selector(".welcome")
    page.locator(".thread").focus()
    page.keyboard.press("?")
    page.wait_for_selector(".shortcuts")


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param({
            r"\(a^2\) and $b_1$": ["a^2", "b_1"],
            "\\[\na\n+ b\n=\nc\n\\]\nrest": ["= a\n+ b\n=\nc"],
            "the roots\n$$\nx\n=\ny\n$$.": ["= x\n=\ny."],
            r"mid \[ x \] line, $$E=mc^2$$": ["= x", "= E=mc^2"],
            r"rows \(\begin{matrix} a \\[2pt] b \end{matrix}\)": [r"\begin{matrix} a \\[2pt] b \end{matrix}"],
            "- $n$ of\n  - \\(m\\)\n\n    \\[\n    + x\n    \\]": ["n", "m", "= + x"],
            "| a | $b$ |\n|-|-|\n| \\(x_1\\) | $y_2$ |": ["b", "x_1", "y_2"],
            "> \\[ y \\]": ["= y"],
            r"*em $a*b$ end* **$x$** ~~$x~y$~~": ["a*b", "x", "x~y"],
            "the $n$th, 公式$x$是 and $\\$5$": ["n", "x", r"\$5"],
        }, id="formulas"),
        pytest.param({
            "costs $5 and $6, $5/$6, $1.5M–$2M, US$5 or 6$": [],
            "I paid $5. He paid 6$.": [],
            "$HOME/bin:$PATH, $A/$B, $ 5$, $5 $": [],
            "hotels: $$ - **good**, $$$ - better\n\n$$ cheap\n\n$$$ dear": [],
            "`\\(a\\)` `$x$`\n\n```\n$y$ \\[z\\]\n```\n\n    $$z$$": [],
            r"see \[1\] and \[sic\], \$x\$": [],
            "a $x\n\ny$ b": [],
        }, id="text"),
        pytest.param({
            r"half \(a^2 + *b* c": [],
            "half\n\\[\na\n+ b": [],
            "$$\na*b": [],
            r"bad \(a \(b\) c": ["b"],
            r"\(" + "x" * 1001 + r"\)": [],
        }, id="open"),
    ],
)  # fmt: skip
def test_formulas_are_told_from_prices_code_and_prose(opened: Any, cases: dict[str, list[str]]) -> None:
    found = opened().evaluate(FORMULAS, list(cases))
    assert dict(zip(cases, found, strict=True)) == cases


def test_a_formula_is_drawn_when_it_is_closed_and_shows_its_source_until_then(opened: Any, server: Any) -> None:
    page = opened()
    server.client.words = (r"Let \(a*b", r"*c\) and \(\frac{\) be", r" and `$x$`, $5 or $6.", "\n\n$$a*b*c$$")
    assert page.locator("link[href*=katex]").count() == 0
    go_on = server.hold()
    page.fill(".message", "tell me")
    page.keyboard.press("Enter")
    page.wait_for_selector(r".markdown p:has-text('Let \\(a*b')")
    go_on()
    answered(page)
    page.wait_for_selector(".formula .katex-html")
    page.wait_for_selector(".formula.display .katex-display")
    assert page.locator(".formula annotation").all_text_contents() == ["a*b*c", "a*b*c"]
    assert page.locator(".formula .katex-display").count() == 1
    faulty = page.locator(".formula.faulty")
    assert (faulty.inner_text(), "cannot be drawn" in faulty.get_attribute("title")) == (r"\(\frac{\)", True)
    assert page.locator(".markdown code").inner_text() == "$x$"
    assert "$5 or $6." in page.locator(".markdown").inner_text()
    fonts = page.evaluate(
        "document.fonts.ready.then(() => [...document.fonts].filter((f) => f.status === 'loaded').length)"
    )
    assert fonts > 0, "the policy lets the fonts be loaded"


def test_a_hostile_formula_stays_source_and_many_leave_the_page_alive(opened: Any, server: Any) -> None:
    page = opened()
    hostile = (
        r"\(\def\a{" + "x" * 500 + r"}\a\a\a\)", r"\(\href{javascript:alert(1)}{x}\)",
        r"\[" + "{" * 900 + "}" * 900 + r"\]",
        r"\(\htmlStyle{position:fixed}{x}\)", r"\(\includegraphics{http://127.0.0.1:9/x.png}\)",
    )  # fmt: skip
    many = " ".join(f"$x_{{{number}}}$" for number in range(300))
    server.client.words = tuple(f"{each}\n\n" for each in (*hostile, r"\(\rule{9999em}{9999em}\)", many))
    say(page, "tell me")
    page.wait_for_selector(".markdown > p:last-child > .formula:last-child .katex")
    assert page.locator(".formula:not(.faulty) .katex").count() == 301
    assert page.locator(".formula.faulty").count() == len(hostile)
    widest = "(all) => Math.max(...all.map((each) => each.getBoundingClientRect().width))"
    assert 100 < page.locator(".formula .katex-html").evaluate_all(widest) < 1000
    assert page.locator(".chat :is(a[href^=javascript], .answer img)").count() == 0


def test_text_and_pdf_files_are_attached_and_others_are_refused_with_a_reason(
    opened: Any, server: Any, browser: Any
) -> None:
    printed = browser.new_page()
    printed.set_content("<p>First page</p><p style='break-before: page'>Second page</p>")
    pdf = printed.pdf()
    printed.close()
    page = opened()
    files = {
        "notes.md": b"# Notes", "latin.csv": "café;1".encode("latin-1"), "wide.txt": "héllo".encode("utf-16"),
        "report.pdf": pdf, "chinese.pdf": CHINESE,
        "photo.jpg": b"\xff\xd8\xff\xe0\0\x10JFIF", "long.log": b"x" * (512 * 1024 + 1),
        "broken.pdf": b"%PDF-1.7\nnothing", "some.bin": b"\0",
    }  # fmt: skip
    page.locator(".composer input[type=file]").set_input_files(
        [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()]
    )
    page.wait_for_selector(".toast:nth-child(4)")
    assert sorted(page.locator(".toast").all_inner_texts()) == [
        "“broken.pdf” was not attached: it is a damaged PDF file",
        "“long.log” was not attached: it has 524,289 bytes; at most 524,288 are taken from a text file",
        "“photo.jpg” was not attached: models here read only text, not pictures",
        "“some.bin” was not attached: it is neither a text file nor a PDF file",
    ]
    page.wait_for_selector(".chip:nth-child(4):has-text('2 pages')")
    page.wait_for_selector(".chip:nth-child(5):has-text('1 page')")
    page.wait_for_selector(".chip:first-child:has-text('tokens')")
    assert "7 bytes" in page.locator(".chip").first.inner_text()
    page.get_by_label("Remove wide.txt").click()
    say(page, "what are these?")
    prompt = server.client.text.decode(server.client.asked[-1].prompt)
    for text in ("# Notes", "café;1", "中文", "[Page 1]\nFirst page\n\n[Page 2]\nSecond page"):
        assert f"```\n{text}\n```" in prompt
    assert "wide.txt" not in prompt and page.locator(".chip").count() == 0
    assert page.locator(".file .name").all_inner_texts() == ["notes.md", "latin.csv", "report.pdf", "chinese.pdf"]


def test_files_are_dropped_and_pasted(opened: Any) -> None:
    page = opened()
    give = """([type, name]) => {
      const data = new DataTransfer();
      data.items.add(new File(['text of ' + name], name));
      const init = { bubbles: true, cancelable: true, dataTransfer: data, clipboardData: data };
      const target = document.querySelector(type === 'drop' ? '.thread' : '.message');
      return target.dispatchEvent(type === 'drop' ? new DragEvent(type, init) : new ClipboardEvent(type, init));
    }"""
    assert page.evaluate(give, ["drop", "dropped.txt"]) is False, "the browser must not open the file instead"
    page.wait_for_selector(".chip:has-text('dropped.txt')")
    assert page.evaluate(give, ["paste", "pasted.txt"]) is False
    page.wait_for_selector(".chip:has-text('pasted.txt')")


def test_files_that_exceed_the_context_are_said_to_before_they_are_sent(opened: Any) -> None:
    page = opened()
    page.locator(".composer input[type=file]").set_input_files(
        {"name": "long.txt", "mimeType": "", "buffer": b"word " * 30_000}
    )
    page.wait_for_selector(".chips-note:has-text('the model reads at most 100,000')")
    page.get_by_label("Remove long.txt").click()
    assert page.locator(".chips-note").is_hidden()


def test_wide_content_scrolls_inside_itself_and_a_message_of_the_page_covers_no_field(opened: Any, server: Any) -> None:
    page = opened(viewport={"width": 390, "height": 800})
    server.client.words = (
        "- a\n  - b\n    1. c\n\n       ```\n       " + "x" * 300 + "\n       ```\n",
        "\n| " + "long_cell_" * 40 + " |\n|-|\n| b |\n",
        "\n\\[ " + "x + " * 60 + "y \\]\n\n" + "w" * 300,
    )  # fmt: skip
    say(page, "tell me")
    page.wait_for_selector(".formula .katex")
    for wide in ("pre", ".table", ".formula.display"):
        assert page.locator(f".markdown {wide}").evaluate("(e) => e.scrollWidth > e.clientWidth + 20"), wide
    assert page.locator(".thread").evaluate("(thread) => thread.scrollWidth - thread.clientWidth") == 0
    assert page.locator(".markdown li li li pre").count() == 1
    assert page.get_by_role("button", name="Copy", exact=True).is_visible()
    page.locator(".composer input[type=file]").set_input_files(
        [{"name": f"{number}.bin", "mimeType": "", "buffer": b"\0"} for number in range(6)]
    )
    page.wait_for_selector(".toast:nth-child(4)")
    toasts, composer = page.locator(".toasts").bounding_box(), page.locator(".composer").bounding_box()
    assert page.locator(".toast").count() == 4 and toasts["y"] + toasts["height"] < composer["y"]


@pytest.mark.parametrize("width", [280, 360])
def test_a_narrow_window_cuts_nothing_off(opened: Any, width: int) -> None:
    page = opened(viewport={"width": width, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.get_by_role("heading", name="Holdfast").count() == 1
    settings(page)
    assert page.locator("#set-preset").bounding_box()["width"] > 180
    assert page.locator(".dialog").evaluate("(dialog) => dialog.scrollWidth - dialog.clientWidth") == 0
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    keys = page.locator(".shortcuts dt", has_text="Alt")
    keys.first.wait_for()
    lines = keys.evaluate_all(
        """(all) => all.map((each) => {
          const range = document.createRange();
          range.selectNodeContents(each);
          return new Set([...range.getClientRects()].map(({ top }) => top)).size;
        })"""
    )
    assert len(lines) > 3 and set(lines) == {1}


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing_serious(opened: Any, server: Any, axe: Any, scheme: str, width: int) -> None:
    page = opened("one", color_scheme=scheme, viewport={"width": width, "height": 800})
    server.client.words = ("# Title\n\nText with `code` and a [link](https://example.org).\n\n",
                           "```python\ndef f(x: int) -> str:\n    # why\n    return 'a'\n```\n",
                           "Let \\(x\\) be\n\n$$ \\frac{1}{2} $$\n\nand \\(\\frac\\).\n\n",
                           "| a |\n|-|\n| b |\n")  # fmt: skip
    page.locator(".composer input[type=file]").set_input_files({"name": "a.txt", "mimeType": "", "buffer": b"text"})
    page.wait_for_selector(".chip")
    found = axe(page)
    say(page, "hello")
    page.wait_for_selector(".formula .katex")
    page.locator(".turn").hover()
    found += axe(page)
    settings(page, temperature="3")
    page.get_by_role("button", name="Save", exact=True).click()
    page.wait_for_selector(".fault:not(:empty)")
    found += axe(page)
    page.keyboard.press("Escape")
    page.get_by_label("Show or hide the conversations").click()
    found += axe(page)
    assert found == []


def test_a_server_without_a_language_model_is_explained(fresh_page: Any, server: Any) -> None:
    def refuse(route: Any) -> None:
        route.fulfill(status=404, json={"error": {"message": "there is no such route"}})

    page = fresh_page(
        server.url, routes={f"**/v1/{path}": refuse for path in ("models", "conversations?*", "engine/events")}
    )
    page.wait_for_selector(".welcome")
    page.get_by_text("This server has no language model.").wait_for()
    assert page.locator(".composer, .sidebar, .toast").count() == 0
    page.get_by_role("tab", name="Engine").click()
    page.wait_for_selector(".e-gate:not([hidden])")
    assert page.inner_text(".e-gate").split("\n\n") == [
        "The engine is not shown: this server has no language model.", "Recorded traces can be opened all the same.",
    ]  # fmt: skip
    page.get_by_role("tab", name="Chat").click()
    page.get_by_text("This server has no language model.").wait_for()


def test_the_theme_is_the_systems_until_one_is_chosen(opened: Any) -> None:
    page = opened("one", color_scheme="dark")

    def ground(expected: str) -> bool:
        for _ in range(3000):  # The page learns of a change a moment later.
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


def test_a_message_that_is_sent_before_the_page_has_loaded_is_answered(fresh_page: Any, server: Any) -> None:
    held: list[Any] = []

    def go_on(pattern: str) -> None:
        for route in [each for each in held if re.search(pattern, each.request.url)]:
            held.remove(route)
            route.continue_()

    late = ("models", "conversations")  # The models are listed, and the conversation is created.
    page = fresh_page(server.url, "one", routes={f"**/v1/{path}": lambda route: held.append(route) for path in late})
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
