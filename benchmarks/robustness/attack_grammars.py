"""Attack `holdfast serve` with structured output: by every way in, and with killed engines. Exit status 1 if it harms.

A hostile grammar crashes a compiler, stalls a step or fills a memory. Each attack runs during an ordinary stream of
another key. A row has the seconds that it took, what was answered, the longest gap of that stream, and the most MB by
which the server's processes grew. Bounds: no process ends, what cannot be followed is refused with status 400 and the
limit, no gap is 0.2 s longer than the stream's own before, or than with as many requests without a grammar, and
memory stays bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from neighbour import OURS, THEIRS, Neighbour, Served, about, beside, serving

from holdfast import LLM, SamplingParams
from holdfast.core.types import Grammar, GrammarKind
from holdfast.lm.limits import RequestRefused

Fields = Mapping[str, Any]
"""Fields of a request that ask for structured output."""
HELD = 0.2
"""Most seconds by which the longest gap of the ordinary stream may grow."""
GROWN = 900.0
"""Most MB by which all processes of a server may grow: 256 MiB of grammars, and tests of at most 512 MiB."""
TRIES = 3
"""Number of runs of an attack that only held the stream up, because a busy machine does that too."""
WAIT = 0.5
"""Most seconds that another key's small schema may wait longer because of slow grammars."""
REGEXES = 40
"""Number of different regular expressions of 250 KB. Each takes 93 MB, 3.7 GB together."""
MODEL = {"model": "holdfast-tiny"}
CHAT = {**MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
TURN = {**MODEL, "input": "hello", "max_output_tokens": 4}
PROMPT = {**MODEL, "prompt": [5], "max_tokens": 4}


def chain(links: int, levels: int = 1) -> dict[str, Any]:
    """A schema whose definitions each hold the next one, `levels` levels deep."""

    def link(at: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"$ref": f"#/$defs/d{at + 1}"}
        for _ in range(levels):
            schema = {"items": schema}
        return schema

    definitions = {f"d{at}": link(at) for at in range(links)} | {f"d{links}": {}}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def nested(word: str, levels: int) -> dict[str, Any]:
    """A schema with this keyword within itself, `levels` levels deep."""
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {word: [schema, {"type": "string"}]} if word.endswith("Of") else {word: schema}
    return schema


def circle(links: int) -> dict[str, Any]:
    """Definitions that each mention all of the next ten; the last ones mention the first."""
    of = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{(at + by) % links}"} for by in range(1, 11)]} for at in range(links)
    }
    return {"$defs": of, "$ref": "#/$defs/d0"}


def form(schema: Any) -> Fields:
    """A schema as `response_format`."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def lark(text: str) -> Fields:
    """A grammar as `structured_outputs`."""
    return {"structured_outputs": {"grammar": text}}


def rules(count: int, rule: Callable[[int], str]) -> str:
    """A Lark grammar of a chain of rules."""
    return "start: r0\n" + "".join(f"r{at}: {rule(at)}\n" for at in range(count)) + f'r{count}: "a"\n'


RULES = 4000
WIDE = {
    "type": "object",
    "properties": {f"name{at}": {"type": "string", "description": "d" * 60} for at in range(2000)},
}
AMBIGUOUS = (
    'a: a a | a a a | a a a a | "a" | b | c\nb: a b | b a | "a" | a a a | b a b | c a\n'
    'c: a b a | b b a | "a" | c c | c a b'
)
LATE = f"start: /[xyz]{{120}}/ a\n{AMBIGUOUS}"
"""An ambiguous grammar after a text that is longer than the test of a grammar follows it."""
LATE_LETTERS = "start: /[xyz]{120}/ T\nT: /((a|b|x.?)*a(a|b|.y){300}c)|(.*b.{200}d)/ & ~/.*abc.{100}/\n"
GBNF_LINES = "\n" * 240_000 + 'root ::= "a"'
GBNF_RULES = "root ::= r0\n" + "".join(f"r{at} ::= r{at + 1}\n" for at in range(3000)) + 'r3000 ::= "a"\n'
LONG = "(foo|bar){3}x" * 19_000

SCHEMAS: dict[str, dict[str, Any]] = {
    "a chain of 1,000 $refs": chain(1000),
    "a chain of 5,000 $refs": chain(5000),
    "$refs that overflow a stack": chain(490, 20),
    "allOf, 600 deep": nested("allOf", 600),
    "anyOf, 600 deep": nested("anyOf", 600),
    "items, 2,000 deep": nested("items", 2000),
    "a circle of 700 definitions": circle(700),
}
LARKS = {
    "a chain of 4,000 rules": rules(RULES, lambda at: f"r{at + 1}"),
    "a chain of 4,000 optional rules": rules(RULES, lambda at: f'"x"? (r{at + 1} | "y")'),
    "a chain of 2,000 terminals": "start: T0\n" + "".join(f"T{at}: T{at + 1}\n" for at in range(2000)) + 'T2000: "a"\n',
    "an ambiguous grammar": f"start: a\n{AMBIGUOUS}",
}
EXPRESSIONS = {
    "a bomb of repetitions": "((((a{99}){99}){99}){99}){99}",
    "5,000 parentheses": "(" * 5000 + "a" + ")" * 5000,
    "a bomb of alternatives": "(" + "|".join(f"[a-z]*{at}[a-z]{{{at}}}" for at in range(2000)) + ")*",
}
GRAMMARS: dict[str, tuple[Fields, int, tuple[str, ...]]] = {
    "a chain of 1,000 $refs": (form(SCHEMAS["a chain of 1,000 $refs"]), 4, ("400",)),
    "$refs that overflow a stack": (form(SCHEMAS["$refs that overflow a stack"]), 4, ("400",)),
    "a chain of 4,000 rules": (lark(LARKS["a chain of 4,000 rules"]), 4, ("400",)),
    "an ambiguous grammar": (lark(LARKS["an ambiguous grammar"]), 4, ("400",)),
    "240 KB of line breaks in GBNF": (lark(GBNF_LINES), 10, ("400",)),
    "60 KB of rules in GBNF": (lark(GBNF_RULES), 8, ("400",)),
    "a regular expression of 250 KB": ({"structured_outputs": {"regex": LONG}}, 2, ("200", "400")),
    "64 choices by a schema of 200 KB": ({**form(WIDE), "n": 64}, 1, ("200", "400")),
    "32 answers that grow ambiguous": (
        {**lark(LATE), "n": 32, "max_tokens": 200, "temperature": 1.0}, 1, ("200", "400")
    ),
    "32 answers that grow slow to spell": (
        {**lark(LATE_LETTERS), "n": 32, "max_tokens": 200, "temperature": 1.0}, 1, ("200", "400")
    ),
}  # fmt: skip
"""For each name, the fields, the number of connections, and the allowed answers."""


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    """A strict tool of chat completions."""
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True, **more}}


class Way(NamedTuple):
    """A route, and the request that brings a grammar there."""

    path: str
    body: Callable[[Any], dict[str, Any]]


BY_SCHEMA: dict[str, Way] = {
    "response_format": Way("/v1/chat/completions", lambda s: {**CHAT, **form(s)}),
    "response_format of completions": Way("/v1/completions", lambda s: {**PROMPT, **form(s)}),
    "structured_outputs.json": Way("/v1/chat/completions", lambda s: {**CHAT, "structured_outputs": {"json": s}}),
    "guided_json": Way("/v1/completions", lambda s: {**PROMPT, "guided_json": s}),
    "strict tools": Way("/v1/chat/completions", lambda s: {**CHAT, "tools": [tool(s)], "tool_choice": "required"}),
    "strict tools of responses": Way(
        "/v1/responses",
        lambda s: {**TURN, "tools": [{"type": "function", "name": "f", "parameters": s, "strict": True}]},
    ),
    "text.format": Way(
        "/v1/responses", lambda s: {**TURN, "text": {"format": {"type": "json_schema", "name": "x", "schema": s}}}
    ),
    "a background response": Way(
        "/v1/responses",
        lambda s: {
            **TURN, "background": True, "text": {"format": {"type": "json_schema", "name": "x", "schema": s}}
        },
    ),
    "strict tools of messages": Way(
        "/v1/messages",
        lambda s: {**CHAT, "tools": [{"name": "f", "input_schema": {"type": "object", **s}, "strict": True}]},
    ),
}  # fmt: skip
BY_LARK = {
    "structured_outputs.grammar": Way("/v1/completions", lambda g: {**PROMPT, "structured_outputs": {"grammar": g}}),
    "guided_grammar": Way("/v1/chat/completions", lambda g: {**CHAT, "guided_grammar": g}),
    "structured_outputs of a response": Way("/v1/responses", lambda g: {**TURN, "structured_outputs": {"grammar": g}}),
}
BY_EXPRESSION = {
    "structured_outputs.regex": Way("/v1/completions", lambda r: {**PROMPT, "structured_outputs": {"regex": r}}),
    "guided_regex": Way("/v1/chat/completions", lambda r: {**CHAT, "guided_regex": r}),
    "whitespace_pattern": Way(
        "/v1/completions",
        lambda r: {**PROMPT, "structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": r}},
    ),
}


class Client:
    """Sends requests of one key."""

    def __init__(self, served: Served, key: str = THEIRS) -> None:
        self._url, self._headers = served.url, {"authorization": f"Bearer {key}"}

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self._url + path, json=body, headers=self._headers, timeout=120, **more)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self._url + path, headers=self._headers, timeout=60)

    def upload(self, lines: Sequence[Any], purpose: str = "batch") -> str:
        """The id of a file of these lines."""
        content = "".join(json.dumps(line) + "\n" for line in lines)
        answer = httpx.post(
            f"{self._url}/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": purpose},
            headers=self._headers, timeout=60,
        )  # fmt: skip
        return str(answer.raise_for_status().json()["id"])

    def batch(self, bodies: Sequence[dict[str, Any]]) -> str:
        """The id of a batch of chat completions."""
        lines = [
            {"custom_id": f"r{at}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            for at, body in enumerate(bodies)
        ]
        made = {"input_file_id": self.upload(lines), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        return str(self.post("/v1/batches", made).raise_for_status().json()["id"])

    def ended(self, path: str, seconds: float = 120.0) -> dict[str, Any]:
        """A batch, job or response once it has ended. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found: dict[str, Any] = self.get(path).json()
            if found["status"] not in ("queued", "in_progress", "validating", "finalizing", "running"):
                return found
            time.sleep(0.1)
        raise TimeoutError(f"{path} has not ended within {seconds:g} s: {found}")


def refusal(answer: httpx.Response, client: Client) -> str:
    """The fault of a refusal; empty if it is status 400 with a limit. Background responses fail later."""
    if answer.status_code == 200 and answer.json().get("status") in ("queued", "in_progress"):
        found = client.ended(f"/v1/responses/{answer.json()['id']}")
        told = (found.get("error") or {}).get("message", "")
        return "" if found["status"] == "failed" and re.search(r"\d|deep", told) else f"{found['status']} {told[:200]}"
    told = (answer.json().get("error") or {}).get("message", "") if answer.status_code != 200 else "an answer"
    return "" if answer.status_code == 400 and re.search(r"\d|deep", told) else f"{answer.status_code} {told[:200]}"


class Watch:
    """The effect of one attack on a server, sampled while it runs."""

    def __init__(self, served: Served) -> None:
        self._served, self._end = served, threading.Event()
        self.before = processes(served)
        self.grown = 0.0
        begin = sum(served.memory()) + tested(served)

        def sample() -> None:
            while not self._end.wait(0.1) and served.process.poll() is None:
                self.grown = max(self.grown, sum(served.memory()) + tested(served) - begin)

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def stop(self) -> str:
        """End the sampling. Returns the fault: a process that has ended."""
        self._end.set()
        self._thread.join()
        gone = [pid for pid in self.before if not alive(pid)]
        if self._served.process.poll() is not None or gone:
            return f"processes have ended: {gone}; {self._served.log.read_text()[-300:]}"
        return ""


def processes(served: Served) -> list[int]:
    """The server and its engines."""
    return [served.process.pid, *children(served.process.pid)]


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def tested(served: Served) -> float:
    """Resident MB of the engines' test processes, beyond what they share."""
    total = 0.0
    for engine in children(served.process.pid):
        below = children(engine)
        for pid in [*below, *(child for each in below for child in children(each))]:
            with contextlib.suppress(OSError, ValueError):
                pages = Path(f"/proc/{pid}/statm").read_text().split()
                total += (int(pages[1]) - int(pages[2])) * 4096 / 1e6
    return total


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Bench:
    """One server under attack, with the ordinary stream and the faults found so far."""

    def __init__(self, served: Served, neighbour: Neighbour, only: str) -> None:
        self.served, self.neighbour, self.only = served, neighbour, only
        self.client, self.good = Client(served), True
        began = time.monotonic()
        time.sleep(3)
        self.quiet = neighbour.longest(began)
        print(f"{'nothing':48}{'':33}{self.quiet:7.3f}", flush=True)

    def attack(
        self, name: str, work: Callable[[], tuple[str, str]], control: Callable[[], object] = lambda: None
    ) -> None:
        """Run an attack, which returns the answers and their faults.

        `control` asks for as much without a grammar. It may hold the stream up, and the attack by HELD longer.
        """
        if self.only not in name:
            return
        for left in reversed(range(TRIES)):
            began = time.monotonic()
            control()
            bound = max(self.quiet, self.neighbour.longest(began)) + HELD
            watch, began = Watch(self.served), time.monotonic()
            told, wrong = work()
            seconds, gap = time.monotonic() - began, self.neighbour.longest(began)
            faults = [wrong] if wrong else []
            faults += [each] if (each := watch.stop()) else []
            faults += [f"grown by over {GROWN:g} MB"] if watch.grown > GROWN else []
            faults += [f"the stream got {self.neighbour.wrong}"] if self.neighbour.wrong else []
            slow = gap > bound
            again = slow and left and not faults
            faults += [f"the stream was held by over {bound:.3f} s"] if slow else []
            verdict = "again: " * bool(again) + ("NOT: " + "; ".join(faults) if faults else "ok")
            print(f"{name:48}{seconds:6.1f}  {told:25}{gap:7.3f}{watch.grown:7.0f}  {verdict}", flush=True)
            if not again:
                break
        self.good = self.good and not faults


def at_once(count: int, ask: Callable[[int], httpx.Response]) -> list[httpx.Response]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(ask, range(count)))


def statuses(answers: Sequence[httpx.Response]) -> str:
    counts = Counter(answer.status_code for answer in answers)
    return " ".join(f"{count}x{code}" for code, count in sorted(counts.items()))


def every_way(bench: Bench) -> None:
    """Send every hostile grammar in every way."""
    for ways, grammars in ((BY_SCHEMA, SCHEMAS), (BY_LARK, LARKS), (BY_EXPRESSION, EXPRESSIONS)):
        for name, way in ways.items():

            def work(way: Way = way, grammars: Mapping[str, Any] = grammars) -> tuple[str, str]:
                answers = [bench.client.post(way.path, way.body(grammar)) for grammar in grammars.values()]
                found = {
                    what: wrong
                    for what, answer in zip(grammars, answers, strict=True)
                    if not (grammars is EXPRESSIONS and answer.status_code == 200)  # some of them can be followed
                    and (wrong := refusal(answer, bench.client))
                }
                return statuses(answers), "; ".join(f"{what}: {wrong}" for what, wrong in found.items())

            bench.attack(f"by {name}", work)

    def batch() -> tuple[str, str]:
        # A line that is too deep to be read refuses its batch at once.
        bodies = [{**CHAT, **form(schema)} for name, schema in SCHEMAS.items() if "deep" not in name]
        bodies += [{**CHAT, **lark(text)} for text in LARKS.values()] + [CHAT]
        ended = bench.client.ended("/v1/batches/" + bench.client.batch(bodies))
        counts = ended["request_counts"]
        good = ended["status"] == "completed" and counts["completed"] == 1 and counts["failed"] == len(bodies) - 1
        return (
            f"{counts['failed']} of {counts['total']} failed",
            "" if good else f"{ended['status']} {counts} {ended['errors']}",
        )

    bench.attack("by lines of a batch", batch)


def many(bench: Bench) -> None:
    """Send the grammars that stall or fill a server, several at once."""
    for name, (fields, count, allowed) in GRAMMARS.items():

        def work(fields: Fields = fields, count: int = count, allowed: Sequence[str] = allowed) -> tuple[str, str]:
            answers = at_once(count, lambda _: bench.client.post("/v1/completions", {**PROMPT, **fields}))
            wrong = [answer for answer in answers if str(answer.status_code) not in allowed]
            return statuses(answers), f"answered {wrong[0].text[:200]}" if wrong else ""

        def control(fields: Fields = fields, count: int = count) -> None:
            plain = {name: fields[name] for name in ("n", "max_tokens") if name in fields}
            body = {**PROMPT, **plain, "user": "u" * len(json.dumps(fields)), "ignore_eos": True}
            at_once(count, lambda _: bench.client.post("/v1/completions", body))

        bench.attack(name, work, control)


def expressions(bench: Bench, count: int) -> None:
    """Send different long expressions, four at a time."""

    def work() -> tuple[str, str]:
        with ThreadPoolExecutor(4) as pool:
            asked = [{**PROMPT, "structured_outputs": {"regex": f"{LONG}{time.time_ns()}{at}"}} for at in range(count)]
            answers = list(pool.map(lambda body: bench.client.post("/v1/completions", body), asked))
        others = {answer.status_code for answer in answers} - {200, 400, 429}
        return statuses(answers), f"answered {others}" if others else ""

    def control() -> None:
        with ThreadPoolExecutor(4) as pool:
            body = {**PROMPT, "user": "u" * len(LONG)}
            list(pool.map(lambda _: bench.client.post("/v1/completions", body), range(count)))

    bench.attack(f"{count} expressions of 250 KB", work, control)


def fairness(bench: Bench) -> None:
    """Send another key's small schema after 20 slow grammars of one key."""
    ours, numbers = Client(bench.served, OURS), iter(range(10**9))

    def small() -> float:
        schema = {"type": "object", "properties": {f"a{next(numbers)}": {"type": "integer"}}}
        began = time.monotonic()
        ours.post("/v1/completions", {**PROMPT, "max_tokens": 1, **form(schema)}).raise_for_status()
        return time.monotonic() - began

    def work() -> tuple[str, str]:
        idle = max(small() for _ in range(3))
        with ThreadPoolExecutor(20) as pool:
            regexes = [f"{LONG}{time.time_ns()}{at}" for at in range(20)]
            slow = [pool.submit(bench.client.post, "/v1/completions", {**PROMPT, "guided_regex": r}) for r in regexes]
            time.sleep(0.5)
            waits = []
            while not all(each.done() for each in slow) and len(waits) < 10:
                waits.append(small())
        longest = max(waits, default=float("inf"))
        told = f"waits {longest:.2f} s, idle {idle:.2f}"
        return told, "" if longest <= idle + WAIT else f"another key waits over {WAIT:g} s longer"

    bench.attack("20 slow grammars of one key, a small one's wait", work)


def ended_by_sigterm(served: Served, drain: float) -> str:
    """Send SIGTERM during ten requests of 240 KB in GBNF. The server must end within its drain time."""
    client = Client(served)

    def ask(_: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            for _ in range(20):
                client.post("/v1/completions", {**PROMPT, **lark(GBNF_LINES)})

    with ThreadPoolExecutor(10) as pool:
        asking = [pool.submit(ask, at) for at in range(10)]
        time.sleep(0.2)
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        while served.process.poll() is None and time.monotonic() < began + drain + 20:
            time.sleep(0.02)
        took, code = time.monotonic() - began, served.process.poll()
        if code is None:
            served.process.kill()
        del asking
    good = code == 0 and took < drain + 5
    print(f"{'SIGTERM beside 10 times 240 KB of GBNF':48}{took:6.1f}  exit {code}", "ok" if good else "NOT", flush=True)
    return "" if good else "SIGTERM is not heeded"


KEYS = {"HOLDFAST_API_KEY": f"{OURS},{THEIRS}"}


def in_flight(bad: str, directory: Path) -> tuple[str, str]:
    """Kill the engine twice while it has the work `bad`. A server with the same store must then keep serving."""
    options = ["--store", str(directory / "store.sqlite"), "--files", str(directory / "files"), "--max-sequences", "4"]
    long = {**CHAT, "max_tokens": 3000, "ignore_eos": True}
    name = ""
    for _ in range(2):
        with serving(options, KEYS) as served:
            client = Client(served)
            if not name and bad == "batch":
                name = "/v1/batches/" + client.batch([long, *[CHAT] * 9])
            elif not name:
                asked = {**TURN, "max_output_tokens": 3000, "ignore_eos": True, "background": True}
                name = "/v1/responses/" + client.post("/v1/responses", asked).raise_for_status().json()["id"]
            elif bad == "response":
                break  # it is not resumed
            end, least = time.monotonic() + 60, 30
            while served.gauge("generated_tokens_total") < least and time.monotonic() < end:
                time.sleep(0.02)
            if (engine := busiest(served)) is None:
                raise ValueError("nothing runs")
            os.kill(engine, signal.SIGKILL)
            served.process.wait(30)
    with serving(options, KEYS) as served:
        client = Client(served)
        ended = client.ended(name)
        client.post("/v1/chat/completions", CHAT).raise_for_status()
        if bad == "batch":
            counts = ended["request_counts"]
            return f"{counts}", "" if (counts["completed"], counts["failed"]) == (9, 1) else f"{ended}"
        return ended["status"], "" if ended["status"] in ("failed", "incomplete") else f"{ended}"


def poisoned(work: str) -> bool:
    """Whether work in flight at two engines' deaths is given up."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        try:
            told, wrong = in_flight(work, Path(directory))
        except (OSError, TimeoutError, RuntimeError, httpx.HTTPError, ValueError) as error:
            told, wrong = "", f"{type(error).__name__}: {error}"
    verdict = f"NOT: {wrong}" if wrong else "ok"
    print(f"{f'kill -9 of the engine: a {work}':48}{time.monotonic() - began:6.1f}  {told[:60]}  {verdict}", flush=True)
    return not wrong


def replicas() -> bool:
    """Whether a request ends after a few engines were killed under it, and the server serves others."""
    began = time.monotonic()
    with serving(["--replicas", "2", "--operator-key", OPERATOR], KEYS) as served, ThreadPoolExecutor(1) as pool:
        body = {**PROMPT, "max_tokens": 3900, "ignore_eos": True}
        asked = pool.submit(Client(served).post, "/v1/completions", body)
        dead = set[int]()
        while not asked.done() and len(dead) < 6 and time.monotonic() < began + 100:
            for member in Client(served, OPERATOR).get("/replicas").json()["data"]:
                if member["pid"] not in {None, *dead} and member["requests"]:
                    dead.add(member["pid"])
                    os.kill(member["pid"], signal.SIGKILL)
            time.sleep(0.05)
        code = asked.result().status_code
        alive_yet = served.process.poll() is None
        other = Client(served, OURS).post("/v1/completions", PROMPT).status_code if alive_yet else 0
    good = other == 200 and code != 200 and len(dead) <= MOST_DEATHS
    told = f"{len(dead)} deaths, then {code}; another key {other}  {'ok' if good else 'NOT'}"
    print(f"{'two replicas, engines killed under a request':48}{time.monotonic() - began:6.1f}  {told}", flush=True)
    return good


OPERATOR = "of-the-operator"
MOST_DEATHS = 4
"""Most engines that may end under a request that gets tokens from each; two for one that gets none."""


def busiest(served: Served) -> int | None:
    """The engine that computes; None if none does."""

    def spent(pid: int) -> int:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return int(fields[11]) + int(fields[12])
        return 0

    if served.gauge("requests_running") < 1:
        time.sleep(0.1)
        return None
    before = {pid: spent(pid) for pid in children(served.process.pid)}
    time.sleep(0.3)
    used = {pid: spent(pid) - ticks for pid, ticks in before.items() if alive(pid)}
    return max(used, key=lambda pid: used[pid], default=None)


def offline() -> bool:
    """Whether an `LLM` refuses every hostile grammar and lives."""
    began, wrong = time.monotonic(), list[str]()
    grammars: list[tuple[GrammarKind, str]] = [("json", json.dumps(schema)) for schema in SCHEMAS.values()]
    grammars += [("lark", text) for text in LARKS.values()]
    grammars += [("regex", text) for text in EXPRESSIONS.values()]
    with LLM("holdfast-tiny") as llm:
        for kind, text in grammars:
            try:
                grammar = Grammar(kind, text)
                llm.generate("Hello", SamplingParams(max_tokens=4, grammar=grammar))
                if kind != "regex":  # some of them can be followed
                    wrong.append(f"followed {text[:60]}")
            except (RequestRefused, ValueError) as error:
                if not re.search(r"\d|deep", str(error)):
                    wrong.append(f"no limit in {str(error)[:200]!r}")
        llm.generate("Hello", SamplingParams(max_tokens=2))
    seconds, verdict = time.monotonic() - began, f"NOT: {wrong}" if wrong else "ok"
    print(
        f"{'by SamplingParams of an LLM':48}{seconds:6.1f}  {f'{len(grammars)} refused':25}{'':14}  {verdict}",
        flush=True,
    )
    return not wrong


@contextlib.contextmanager
def attacked(only: str) -> Iterator[Bench]:
    """A server with keys, and the ordinary stream."""
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(["--max-sequences", "65", "--files", directory, "--drain-seconds", "3"], KEYS) as served,
        beside(served) as neighbour,
    ):
        yield Bench(served, neighbour, only)


def run(only: str = "", regexes: int = REGEXES) -> bool:
    """Run every attack whose name contains `only`, with `regexes` expressions. Returns whether all bounds hold."""
    sys.setrecursionlimit(10_000)  # needed to write deep schemas
    print(f"{'attack':48}{'s':>6}  {'answers':25}{'gap':>7}{'MB':>7}", flush=True)
    with attacked(only) as bench:
        every_way(bench)
        many(bench)
        expressions(bench, regexes)
        fairness(bench)
        good = bench.good
        if only in "SIGTERM":
            good = not ended_by_sigterm(bench.served, 3.0) and good
    apart: dict[str, Callable[[], bool]] = {
        "LLM": offline,
        "batch": lambda: poisoned("batch"),
        "response": lambda: poisoned("response"),
        "replicas": replicas,
    }
    for name, work in apart.items():
        if only in name:
            good = work() and good
    print("every bound holds" if good else "NOT every bound holds", flush=True)
    return good


def main() -> int:
    """Run everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only attacks whose names hold this")
    parser.add_argument("--regexes", type=int, default=REGEXES, help="different regular expressions of 250 KB")
    options = parser.parse_args()
    print(about(), flush=True)
    return not run(options.only, options.regexes)


if __name__ == "__main__":
    sys.exit(main())
