"""Trials: a hostile grammar ends its test process's child, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.core.types import Grammar
from holdfast.lm.grammar import trials as trials_module
from holdfast.lm.grammar.sources import GrammarError
from holdfast.lm.grammar.trial import COMPILE_STACK, ENGINE_STACK, Vocabulary
from holdfast.lm.grammar.trials import Trials
from tests.lm.grammar.test_references import chain
from tests.tokenizers_made import byte_level

SIMPLE = Grammar("regex", "[ab]+c")
SLOW = Grammar("lark", 'start: ((("a"{1,100}){1,100}){1,100}){1,100}')
AMBIGUOUS = Grammar(
    "lark",
    'start: a\na: a a | a a a | a a a a | "a" | b | c\nb: a b | b a | "a" | a a a | b a b | c a\n'
    'c: a b a | b b a | "a" | c c | c a b',
)


def vocabulary() -> Vocabulary:
    return Vocabulary(byte_level().to_str(), 330, [1])


def nested(links: int, levels: int) -> Grammar:
    """A schema that is within every limit but that of the stack."""

    def link(at: int) -> object:
        schema: object = {"$ref": f"#/$defs/d{at + 1}"}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    definitions = {f"d{at}": link(at) for at in range(links)} | {f"d{links}": {}}
    return Grammar("json", json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"}))


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(vocabulary, 5.0)
    yield made
    made.close()


def test_a_grammar_passes_with_its_size(trials: Trials) -> None:
    small, large = trials.test(SIMPLE), trials.test(Grammar("regex", "(foo|bar){3}x" * 4000))
    assert 0 < small < 1 << 20 < large < 64 << 20


@pytest.mark.parametrize(
    ("grammar", "limit"),
    [
        (Grammar("json", json.dumps(chain(1000))), "chain of $refs through 1000 definitions; at most 500"),
        (Grammar("lark", "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(4000)) + "r4000: /a/"),
         "chain of rules through 4002 definitions; at most 500"),
        (nested(490, 20), "nests too deeply: compiling it takes over 8 MiB of stack"),
        (AMBIGUOUS, "too slow to follow: "),
        (Grammar("json", '{"items": ' * 65 + "{}" + "}" * 65), "nests 66 levels deep; at most 64"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", "\ud800"), "unpaired surrogate"),
        (Grammar("lark", "start: /[^\\x00-\\U0010ffff]/"), "cannot be followed"),
    ],
)  # fmt: skip
def test_a_hostile_grammar_is_refused_with_its_limit_and_the_next_one_passes(
    trials: Trials, grammar: Grammar, limit: str
) -> None:
    with pytest.raises(GrammarError) as refused:
        trials.test(grammar)
    assert limit in str(refused.value) and len(str(refused.value)) < 1200
    trials.test(Grammar("regex", f"{len(grammar.text)}x"))


def test_an_engine_has_far_more_stack_than_a_test() -> None:
    assert ENGINE_STACK >= 4 * COMPILE_STACK


def test_the_limit_of_time_ends_the_work() -> None:
    hasty = Trials(vocabulary, 0.02)
    grammar = Grammar("regex", "(foo|bar){3}x" * 20_000)
    with pytest.raises(GrammarError, match=r"took over 0.02 s to compile; at most 0.02 s may be taken"):
        hasty.test(grammar)
    (process,) = {hasty._process}
    assert process is not None and process.runs and not hasty._idle, "its child has ended"
    hasty.test(SIMPLE)
    assert hasty._process is process, "only a child was lost"
    hasty.close()


def test_a_verdict_is_found_once(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    size = trials.test(SIMPLE)
    with pytest.raises(GrammarError) as first:
        trials.test(Grammar("regex", "(b"))
    monkeypatch.setattr(trials, "_child", lambda: pytest.fail("it is known"))
    assert trials.test(SIMPLE) == size
    with pytest.raises(GrammarError) as again:
        trials.test(Grammar("regex", "(b"))
    assert str(first.value) == str(again.value)


def test_one_text_of_two_kinds_has_two_verdicts(trials: Trials) -> None:
    text = 'start: "a"'
    trials.test(Grammar("lark", text))
    with pytest.raises(GrammarError):
        trials.test(Grammar("json", text))


def test_only_the_latest_verdicts_are_kept(monkeypatch: pytest.MonkeyPatch, trials: Trials) -> None:
    monkeypatch.setattr(trials_module, "KNOWN", 3)
    for number in range(5):
        trials.test(Grammar("regex", f"k{number}"))
    assert len(trials._verdicts) == 3


def test_children_and_the_process_that_are_killed_are_begun_again(trials: Trials) -> None:
    trials.test(Grammar("regex", "killed"))
    for child in trials._idle:
        os.kill(child.pid, signal.SIGKILL)
        while child.waits:
            time.sleep(0.001)
    trials.test(Grammar("regex", "killed child"))
    assert trials._process is not None
    trials._process._process.kill()
    trials._process._process.wait()
    trials.test(Grammar("regex", "killed process"))


def test_closing_ends_a_test_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, refused = Trials(vocabulary, 60.0), list[str]()
    trials.test(SIMPLE)
    begun, ask = threading.Event(), trials_module._Child.ask

    def asking(child: trials_module._Child, message: bytes) -> bytes:
        begun.set()
        return ask(child, message)

    monkeypatch.setattr(trials_module._Child, "ask", asking)

    def run() -> None:
        try:
            trials.test(AMBIGUOUS)
        except GrammarError as error:
            refused.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(200)
    trials.close()
    thread.join(200)
    assert refused and "could not be tested" in refused[0]
    with pytest.raises(GrammarError, match="the engine ends"):
        trials.test(Grammar("regex", "later"))


def test_the_test_process_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    script = (
        "from tests.lm.grammar.test_trials import *\n"
        "trials = Trials(vocabulary, 5.0)\n"
        "trials.test(SIMPLE)\n"
        "print(trials._process._process.pid, trials._idle[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = str(Path(holdfast.__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True,
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        pids = [int(each) for each in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 200
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether a process runs. A process that has ended may remain until its parent asks for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_test_process_imports_what_its_parent_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llguidance"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('of the place that comes first')\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = Trials(vocabulary, 5.0)
    try:
        with pytest.raises(GrammarError, match="could not be tested"):
            made.test(SIMPLE)
    finally:
        made.close()
