"""ChatTemplate: hostile templates end at a limit, with the reason, and nobody waits for them."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from holdfast.engine.client import template as module
from holdfast.engine.client.template import REASON_LIMIT, TEXT_LIMIT, ChatTemplate
from tests.engine.conftest import wait_for_end

HELLO = [{"role": "user", "content": "hello"}]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{{ messages[0].content }}"


def render(template, messages=HELLO):
    return ChatTemplate(template, {}).render(messages, add_generation_prompt=True)


def refusal(template):
    """The reason for which a template is refused, whether a ChatTemplate or its text."""
    template = template if isinstance(template, ChatTemplate) else ChatTemplate(template, {})
    with pytest.raises(ValueError) as refused:
        template.render(HELLO, add_generation_prompt=True)
    return str(refused.value)


@pytest.mark.parametrize("template", [ENDLESS, "{{ 9 ** 99999999 }}"], ids=["while it renders", "while it is compiled"])
def test_a_template_without_an_end_is_refused_at_the_time_limit(monkeypatch, template):
    monkeypatch.setattr(module, "CPU_SECONDS", 0.2)
    assert refusal(template) == "the chat template took over 0.2 s of processor time for these messages"


@pytest.mark.parametrize(
    "template",
    ["{{ 'a' * 3000000000 }}", "{% set n = messages | length * 3000000000 %}{{ 'a' * n }}"],
    ids=["while it is compiled", "while it renders"],
)
def test_a_template_that_takes_too_much_memory_is_refused(template):
    assert refusal(template).endswith("it takes over 1024 MiB of memory")


def test_a_template_that_was_refused_at_a_limit_renders_the_next_messages(monkeypatch):
    monkeypatch.setattr(module, "CPU_SECONDS", 0.2)
    template = ChatTemplate("{% if messages | length > 1 %}" + ENDLESS + "{% endif %}" + PLAIN, {})
    with pytest.raises(ValueError, match="processor time"):
        template.render(HELLO * 2, add_generation_prompt=True)
    assert template.render(HELLO, add_generation_prompt=True) == "hello"


def test_the_longest_messages_of_the_widest_characters_fit_the_limits():
    text = "😀" * TEXT_LIMIT
    template = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    assert render(template, [{"role": "user", "content": text}]) == text


def test_a_reason_is_cut_to_its_limit():
    assert len(refusal("{{ raise_exception('no ' * 9999) }}")) < REASON_LIMIT + 100


def test_closing_ends_a_rendering_and_those_that_wait(monkeypatch):
    monkeypatch.setattr(module, "CPU_SECONDS", 3600.0)
    template = ChatTemplate("{% if messages %}" + ENDLESS + "{% endif %}", {})
    reasons = []
    threads = [threading.Thread(target=lambda: reasons.append(refusal(template))) for _ in range(5)]
    for thread in threads:
        thread.start()
    while template._process is None:
        time.sleep(0.01)
    template.close()
    for thread in threads:
        thread.join()
    assert reasons == ["the chat template was closed"] * 5


def test_a_process_that_was_killed_while_idle_is_started_again():
    template = ChatTemplate(PLAIN, {})
    assert template.render(HELLO, add_generation_prompt=True) == "hello"
    first = template._process
    first.kill()
    first._process.wait()
    assert template.render(HELLO, add_generation_prompt=True) == "hello"
    assert template._process is not first


def test_one_process_serves_many_threads():
    template = ChatTemplate(PLAIN, {})
    texts = {}

    def work(number):
        messages = [{"role": "user", "content": str(number) * 1000}]
        texts[number] = [template.render(messages, add_generation_prompt=True) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {number: [str(number) * 1000] * 20 for number in range(8)}


def test_the_process_ends_when_its_template_is_collected():
    template = ChatTemplate(PLAIN, {})
    template.render(HELLO, add_generation_prompt=True)
    process = template._process._process
    del template
    assert process.returncode == -signal.SIGKILL


def test_the_process_ends_when_ours_is_killed_while_it_renders():
    script = (
        "import threading, time; from holdfast.engine.client.template import ChatTemplate\n"
        f"t = ChatTemplate({'{% if messages %}' + ENDLESS + '{% endif %}'!r}, {{}})\n"
        "threading.Thread(target=lambda: t.render([{}], add_generation_prompt=True), daemon=True).start()\n"
        "while t._process is None: time.sleep(0.01)\n"
        "print(t._process._process.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as ours:
        pid = int(ours.stdout.readline())
        ours.kill()
    wait_for_end(pid)


@pytest.mark.parametrize("value", [object(), 1 << 70, "\ud800"])
def test_messages_that_cannot_be_sent_are_refused(value):
    with pytest.raises(ValueError, match="the messages"):
        render(PLAIN, [{"role": "user", "content": value}])
