"""GrammarHandler: which requests wait for which while grammars are compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from holdfast.core.types import Grammar, Identity, Request, SamplingParams
from holdfast.engine import messages
from holdfast.engine.process.handler import Gate
from holdfast.engine.process.parts.grammars import MOST_TENANTS, OWN_THREADS, GrammarHandler
from holdfast.lm.grammar.sources import GrammarError

PATIENCE = 20.0
LONGER = 90.0


class Compiler:
    """A compiler that takes as long for each grammar as the test says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.closed = False
        self._go: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def gate(self, text: str) -> threading.Event:
        with self._changed:
            return self._go.setdefault(text, threading.Event())

    def test(self, grammar: Grammar) -> None:
        self._note("test", grammar)
        if grammar.text.startswith("slow"):
            assert self.gate(grammar.text).wait(LONGER)
        if grammar.text.endswith("bad"):
            raise GrammarError("it is bad")
        if grammar.text.endswith("fault"):
            raise RuntimeError("a secret path")

    def prepare(self, grammar: Grammar) -> None:
        self._note("prepare", grammar)

    def close(self) -> None:
        self.closed = True

    def _note(self, what: str, grammar: Grammar) -> None:
        with self._changed:
            self.calls.append((what, grammar.text))
            self._changed.notify_all()

    def await_tests(self, count: int) -> list[str]:
        """The grammars whose tests have begun, once there are `count`."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._tests()) >= count, PATIENCE)
            return self._tests()

    def _tests(self) -> list[str]:
        return [text for what, text in self.calls if what == "test"]


class Closing(Gate):
    """A gate that an engine closes when it falls asleep."""

    def __init__(self) -> None:
        self.closed = False
        self.taken: list[str] = []

    def take(self, request: Request) -> bool:
        if self.closed:
            self.taken.append(request.id)
        return self.closed


class Made:
    """A handler, with the outcomes of its requests."""

    def __init__(self) -> None:
        self.compiler, self.events = Compiler(), list[str]()
        self.refused: list[messages.Refused] = []
        self._woken, self.gate = threading.Event(), Closing()
        self.handler = GrammarHandler(
            lambda request: self.events.append(f"added {request.id}"),
            self.compiler,  # type: ignore[arg-type]
            self._woken.set,
            announce=lambda grammar: self.events.append(f"announced {grammar.text}"),
            gates=[self.gate],
        )

    def submit(self, name: str, text: str, tenant: str = "") -> None:
        params = SamplingParams(grammar=Grammar("regex", text))
        assert self.handler.take(Request(name, (2, 3), params, identity=Identity(tenant=tenant)))

    def until(self, reached: Callable[[], object]) -> None:
        while True:
            self.refused += [each for each in self.handler.answers() if isinstance(each, messages.Refused)]
            if reached():
                return
            assert self._woken.wait(PATIENCE)
            self._woken.clear()


@pytest.fixture
def made() -> Iterator[Made]:
    made = Made()
    yield made
    for text in {text for _, text in made.compiler.calls} | {f"slow {n}" for n in range(40)}:
        made.compiler.gate(text).set()
    for text in ("slow x2", "slow y1"):
        made.compiler.gate(text).set()
    made.handler.stop()
    assert made.compiler.closed


def test_a_small_grammar_does_not_wait_for_the_slow_ones_of_another_tenant(made: Made) -> None:
    for number in range(6):
        made.submit(f"a{number}", f"slow {number}", "greedy")
    assert sorted(made.compiler.await_tests(OWN_THREADS)) == ["slow 0", "slow 1"]
    made.submit("b", "small", "other")
    made.until(lambda: "added b" in made.events)
    assert len(made.compiler._tests()) == OWN_THREADS + 1, "the rest of the greedy one waits"
    made.compiler.gate("slow 1").set()
    made.until(lambda: "added a1" in made.events)
    assert "slow 2" in made.compiler.await_tests(OWN_THREADS + 2)


def test_no_tenant_waits_for_others_that_are_as_many_as_there_are_threads(made: Made) -> None:
    for number in range(MOST_TENANTS - 1):
        made.submit(f"a{number}", f"slow {number}", f"t{number}")
        made.submit(f"b{number}", f"slow {number + 20}", f"t{number}")
    made.compiler.await_tests(MOST_TENANTS)
    made.submit("last", "small", "other")
    made.until(lambda: "added last" in made.events)


def test_tenants_take_turns(made: Made) -> None:
    for number in range(MOST_TENANTS):
        made.submit(f"a{number}", f"slow {number}", f"t{number}")
    made.compiler.await_tests(MOST_TENANTS)
    for name in ("x1", "x2"):
        made.submit(name, f"slow {name}", "x")
    made.submit("y1", "slow y1", "y")
    made.compiler.gate("slow 0").set()
    made.until(lambda: "added a0" in made.events)
    assert made.compiler.await_tests(MOST_TENANTS + 1)[-1] == "slow x1"
    made.compiler.gate("slow x1").set()
    made.until(lambda: "added x1" in made.events)
    assert made.compiler.await_tests(MOST_TENANTS + 2)[-1] == "slow y1", "x has had its turn"


def test_requests_with_one_grammar_wait_for_one_job_of_any_of_their_tenants(made: Made) -> None:
    made.submit("one", "slow 1", "a")
    made.compiler.await_tests(1)
    made.submit("two", "slow 1", "a")
    made.submit("three", "slow 1", "b")
    made.submit("other", "small", "a")
    made.until(lambda: "added other" in made.events)
    made.compiler.gate("slow 1").set()
    made.until(lambda: {"added one", "added two", "added three"} <= set(made.events))
    assert made.compiler.calls.count(("test", "slow 1")) == 1
    assert made.compiler.calls.count(("prepare", "slow 1")) == 3, "so that each may have a lexer of its own"
    assert not made.handler.busy


def test_a_grammar_is_announced_once_it_was_tested_and_before_its_request_is_queued(made: Made) -> None:
    made.submit("good", "slow 1")
    made.submit("bad", "slow bad")
    assert not made.events
    made.compiler.gate("slow 1").set()
    made.compiler.gate("slow bad").set()
    made.until(lambda: made.refused and "added good" in made.events)
    assert made.events == ["announced slow 1", "added good"], "one that is refused is never announced"


def test_all_requests_of_a_bad_grammar_are_refused_with_the_reason(made: Made) -> None:
    made.submit("one", "slow bad", "a")
    made.submit("two", "slow bad", "b")
    made.compiler.gate("slow bad").set()
    made.until(lambda: len(made.refused) == 2)
    assert made.refused == [messages.Refused(name, "it is bad", "grammar") for name in ("one", "two")]


def test_a_fault_refuses_its_requests_alone_and_tells_no_more_than_its_kind(made: Made) -> None:
    made.submit("one", "fault")
    made.submit("two", "small")
    made.until(lambda: made.refused and "added two" in made.events)
    (refused,) = made.refused
    assert (refused.request_id, refused.param) == ("one", "grammar") and "RuntimeError" in refused.reason
    assert "secret" not in refused.reason


def test_an_aborted_request_is_forgotten_whether_its_job_has_begun_or_not(made: Made) -> None:
    for number in range(4):
        made.submit(f"a{number}", f"slow {number}", "a")
    made.compiler.await_tests(OWN_THREADS)
    made.handler.abort("a0")
    made.handler.abort("a2")
    for number in (0, 1, 3):
        made.compiler.gate(f"slow {number}").set()
    made.until(lambda: not made.handler.busy)
    assert {event for event in made.events if event.startswith("added")} == {"added a1", "added a3"}
    assert "slow 2" not in made.compiler._tests()


def test_a_request_whose_grammar_is_compiled_while_a_gate_closes_passes_it_no_more(made: Made) -> None:
    made.submit("a", "slow 0")
    made.compiler.await_tests(1)
    made.gate.closed = True
    made.compiler.gate("slow 0").set()
    made.until(lambda: not made.handler.busy)
    assert made.gate.taken == ["a"] and made.events == ["announced slow 0"]
    made.gate.closed = False
    made.submit("b", "small")
    made.until(lambda: "added b" in made.events)
