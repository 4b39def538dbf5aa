"""Send a server requests that are almost right, during an ordinary stream of another client.

Part of them is drawn by schemathesis from the server's own OpenAPI document. The others are valid requests of every
route, with the ids of stored responses, conversations, models in training and checkpoints (also of another tenant, also
deleted ones), with odd changes to their values, their bytes, their headers, their framing, or to the connection in
mid-answer.

Prints its seed, a table of the answers by route (503 is a clear refusal, any other 5xx a defect), the server's log, and
the longest gap between tokens of the stream. Exit status 1 if there is a 5xx other than 503, a request that is never
answered, a trace in the log, or anything left in the engine at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import uvloop

from benchmarks.robustness import training_requests
from benchmarks.robustness.neighbour import OURS, Neighbour, Served, about, beside, serving

KEYS = ("of-one-fuzzer", "of-another-fuzzer")
WORKERS = 16
SILENCE = 60.0
"""Seconds after which a request counts as never answered."""
LENGTH = 128
"""Longest sequence of the server. It is short, so that requests are cheap."""
OPTIONS = (
    f"--max-model-len {LENGTH} --token-budget 128 --max-sequences 32 --max-waiting 64 --max-choices 8 --max-body-mb 1 "
    "--body-seconds 2 --header-seconds 2 --idle-seconds 30 --write-seconds 5 --store-conversations 2000 --tuning"
)
MODEL = {"model": "holdfast-tiny"}
WORDS = ("hello", "the sea", "x", "Ünï💥", "<|end|>", " ")
Body = dict[str, Any] | None


class Ids:
    """Ids that the server has given lately, by kind and tenant."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], deque[str]] = {}

    def learn(self, key: str, path: str, answer: bytes) -> None:
        """Remember the ids in an answer. Items are remembered with the conversation in their path."""
        holder = re.search(r"conv_[0-9a-f]{32}", path)
        for found in re.findall(rb"(?:resp|conv|msg)_[0-9a-f]{32}", answer)[:8]:
            id = found.decode()
            if id[:4] != "msg_" or holder:
                kept = f"{holder[0]}/items/{id}" if holder and id[:4] == "msg_" else id
                self.known.setdefault((key, id[:4]), deque(maxlen=64)).append(kept)
        for found in training_requests.IDS.findall(answer)[:8]:
            id = found.decode(errors="replace")
            self.known.setdefault((key, training_requests.kind_of(id)), deque(maxlen=64)).append(id)

    def draw(self, r: random.Random, key: str, kind: str) -> str:
        """An id of this kind: mostly the tenant's own, and mostly one of the last, which others use now too."""
        owner = key if r.random() < 0.9 else r.choice(KEYS)
        known = self.known.get((owner, kind), deque())
        if not known or r.random() < 0.03:
            return r.choice([f"{kind}_{'0' * 32}", "x", "%00", "..", "a" * 3000, quote("²💥"), kind])
        return known[-1 - r.randrange(min(4, len(known)))] if r.random() < 0.5 else r.choice(known)


def sampled(r: random.Random) -> dict[str, Any]:
    """Fields of every request for generation, drawn now and then."""
    fields: dict[str, Callable[[], Any]] = {
        "stream": lambda: r.random() < 0.5, "temperature": r.random, "top_p": lambda: 1 - r.random(),
        "top_k": lambda: r.randrange(9), "seed": lambda: r.randrange(99), "stop": lambda: r.choice(WORDS),
        "ignore_eos": lambda: True, "priority": lambda: r.randrange(-3, 3), "user": lambda: "somebody",
        "deadline_ms": lambda: 1000,
    }  # fmt: skip
    return MODEL | {name: make() for name, make in fields.items() if r.random() < 0.15}


def said(r: random.Random, kind: str) -> Any:
    """The content of a message."""
    return r.choice(WORDS) if r.random() < 0.7 else [{"type": kind, "text": r.choice(WORDS)} for _ in range(2)]


def messages(r: random.Random, kind: str = "text") -> list[dict[str, Any]]:
    roles = ("user", "assistant", "system", "developer")
    return [{"role": r.choice(roles), "content": said(r, kind)} for _ in range(r.randrange(1, 4))]


def chat(r: random.Random, key: str, ids: Ids) -> Body:
    return {**sampled(r), "messages": messages(r), "max_tokens": r.randrange(1, 4), "n": r.choice([1, 1, 1, 2])}


def completion(r: random.Random, key: str, ids: Ids) -> Body:
    prompt = r.choice([r.choice(WORDS), [5, 6], [[5], [6]], ["a", "b"]])
    return {**sampled(r), "prompt": prompt, "max_tokens": r.randrange(1, 4)}


def response(r: random.Random, key: str, ids: Ids) -> Body:
    body = {**sampled(r), "input": r.choice([r.choice(WORDS), messages(r, "input_text")])}
    body["max_output_tokens"] = r.randrange(1, 4)
    more: dict[str, Callable[[], Any]] = {
        "previous_response_id": lambda: ids.draw(r, key, "resp"), "conversation": lambda: ids.draw(r, key, "conv"),
        "background": lambda: True, "store": lambda: r.random() < 0.8, "instructions": lambda: r.choice(WORDS),
        "metadata": lambda: {"a": "b"}, "truncation": lambda: "disabled",
    }  # fmt: skip
    return body | {name: make() for name, make in more.items() if r.random() < 0.25}


def compaction(r: random.Random, key: str, ids: Ids) -> Body:
    said = [
        *messages(r, "input_text"),
        {"type": "compaction", "encrypted_content": r.choice(["eyJzdW1tYXJ5IjogIngifQ==", "x"])},
    ]
    return {**MODEL, "input": r.choice([r.choice(WORDS), said]), "max_output_tokens": r.randrange(1, 4)}


def conversation(r: random.Random, key: str, ids: Ids) -> Body:
    return {"items": messages(r, "input_text"), "metadata": {"a": r.choice(WORDS)}}


ROUTES: dict[str, Callable[[random.Random, str, Any], Any] | None] = {
    **training_requests.routes(),
    "GET /": None,
    "GET /v1/models": None,
    "GET /v1/models/{model}": None,
    "POST /v1/chat/completions": chat,
    "POST /v1/completions": completion,
    "POST /v1/responses": response,
    "POST /v1/responses/input_tokens": response,
    "POST /v1/responses/compact": compaction,
    "GET /v1/responses/{response_id}": None,
    "DELETE /v1/responses/{response_id}": None,
    "POST /v1/responses/{response_id}/cancel": None,
    "GET /v1/responses/{response_id}/input_items": None,
    "POST /v1/conversations": conversation,
    "GET /v1/conversations/{conversation_id}": None,
    "POST /v1/conversations/{conversation_id}": lambda r, key, ids: {"metadata": {"a": r.choice(WORDS)}},
    "DELETE /v1/conversations/{conversation_id}": None,
    "POST /v1/conversations/{conversation_id}/items": lambda r, key, ids: {"items": messages(r, "input_text")},
    "GET /v1/conversations/{conversation_id}/items": None,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": None,
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": None,
    "POST /tokenize": lambda r, key, ids: (
        {"prompt": r.choice(WORDS)} if r.random() < 0.5 else {"messages": messages(r)}
    ),
    "POST /detokenize": lambda r, key, ids: {"tokens": [r.randrange(99) for _ in range(r.randrange(4))]},
    "GET /version": None,
    "GET /health": None,
    "GET /metrics": None,
}
ENDLESS = ("/v1/batches/events",)
"""Routes whose answers do not end."""
KINDS = {
    "{response_id}": "resp", "{conversation_id}": "conv", "{item_id}": "msg_", "{session_id}": "session",
    "{model_id}": "model", "{sampler_id}": "sampler",
}  # fmt: skip
NUMBERS = ("1", "0", "-4", "²", "000000100999", "9" * 5000, "1e2", "", "NaN", "100", "3")
QUERY = {"limit": NUMBERS, "order": ("asc", "desc", "x"), "after": ("", "x", "\0"), "stream": ("true", "1"),
         "starting_after": NUMBERS, "\ud7ff": ("💥",)}  # fmt: skip


@dataclass
class Wanted:
    """One request before it is written as bytes."""

    route: str
    method: str
    path: str
    key: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    framing: str = "length"
    """Framing of the body: `length`, `chunked`, or a wrong length: `long` or `short`."""
    leaves: bool = False
    """Whether the client leaves in mid-answer."""

    def written(self) -> bytes:
        """The request as bytes."""
        headers = {"host": "localhost", "authorization": f"Bearer {self.key}", **self.headers}
        body = self.body
        if body is not None:
            headers.setdefault("content-type", "application/json")
            if self.framing == "chunked":
                headers["transfer-encoding"] = "chunked"
                body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
            else:
                headers["content-length"] = str(max(0, len(body) + {"long": 9, "short": -9}.get(self.framing, 0)))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{self.method} {self.path} HTTP/1.1\r\n{lines}\r\n".encode("utf-8", "replace") + (body or b"")


ODD = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, float("nan"), float("inf"), -0.0,
    0.1, "", "x", "\0", "\ud800", "a\udfff\ud800b", "a" * 5000, "💥" * 99, "²", "-4", "null", [], {}, [[]], [None],
    [1] * 999,
    {"a": 1}, {"\0": "\ud800"}, {"type": "message"}, ["a"] * 30, "@DEEP@", "@DEEP@",
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in places(inner)]


def change_value(r: random.Random, body: Any) -> None:
    """Make an odd change to one value."""
    where = places(body)
    if not where:
        return
    container, key = r.choice(where)
    what = r.random()
    if what < 0.6:
        container[key] = deepcopy(r.choice(ODD))
    elif what < 0.75:
        del container[key]
    elif isinstance(container, dict):
        container[r.choice(["unknown", "", "n", "\ud800", "stream", "background", "x" * 999])] = deepcopy(r.choice(ODD))
    else:
        container.extend([container[0]] * r.choice([2, 30, 5000]))


def change_bytes(r: random.Random, body: bytes) -> bytes:
    """Make an odd change to the bytes."""
    at = r.randrange(len(body) + 1)
    return r.choice([
        lambda: body[:at], lambda: body[:at] + bytes(r.randrange(256) for _ in range(4)) + body[at:],
        lambda: body[:at] + b"\0" + body[at:], lambda: b"\xef\xbb\xbf" + body, lambda: body + body, lambda: b"",
        lambda: body.replace(b'"model"', b'"model":"x","model"'), lambda: body.replace(b"{", b'{"n":1,"n":2,', 1),
        lambda: body + b" " * r.choice([99_999, 1_100_000]), lambda: body.decode(errors="replace").encode("utf-16"),
        lambda: b"[" * r.choice([9, 99_999, 200_000]),
    ])()  # fmt: skip


def odd_headers(r: random.Random) -> dict[str, str]:
    """Headers that few clients send."""
    return r.choice([
        {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"}, {"content-type": ""},
        {"content-type": "application/json; charset=utf-16"}, {"accept": "text/html"}, {"expect": "100-continue"},
        {"content-encoding": "gzip"}, {"authorization": "Bearer nobody"}, {"authorization": "Basic ö"},
        {"host": "ö.example"},
        {"x-long": "a" * 9000}, {"x-request-id": "\x01"}, {"x-request-id": "a" * 999},
        {"origin": "http://a.example"}, {"connection": "close"}, {"upgrade": "websocket", "connection": "upgrade"},
        {"cookie": "\x01"}, {"range": "bytes=0-1"}, {"x-http-method-override": "DELETE"},
    ])  # fmt: skip


def mutated(r: random.Random, ids: Ids, routes: list[str]) -> Wanted:
    """A request of any of the routes, valid or with up to three odd changes."""
    route = r.choice(routes)
    method, path = route.split(" ")
    key, make = r.choice(KEYS), ROUTES[route]
    if "{item_id}" in path and r.random() < 0.9:
        path = path.replace("{conversation_id}/items/{item_id}", ids.draw(r, key, "msg_"))
    if "{place}" in path:
        of_checkpoint = training_requests.checkpoint_of(ids.draw(r, key, "path"))
        for name, part in zip(("{model_id}", "{place}", "{name}"), of_checkpoint, strict=True):
            path = path.replace(name, part)
    for name, kind in KINDS.items():
        path = path.replace(name, ids.draw(r, key, kind))
    wanted = Wanted(route, method, path.replace("{model}", r.choice(["holdfast-tiny", "x/y", "%2e%2e"])), key)
    if method == "GET" and r.random() < 0.5:
        names = r.sample(list(QUERY), r.randrange(1, 4))
        wanted.path += "?" + urlencode({name: r.choice(QUERY[name]) for name in names})
    body = make(r, key, ids) if make else r.choice([None, None, None, {}]) if method != "GET" else None
    for _ in range(r.choice([0, 0, 0, 1, 1, 2, 3])) if isinstance(body, dict) else ():
        change_value(r, body)
    if isinstance(body, bytes):
        wanted.body = change_bytes(r, body) if r.random() < 0.5 else body
        wanted.headers = {"content-type": "application/x-protobuf"}
    elif body is not None:
        text = json.dumps(body)
        depth = r.choice([5, 100, 1000, 10_000, 60_000])
        text = text.replace('"@DEEP@"', "[" * depth + "]" * depth)
        wanted.body = change_bytes(r, text.encode()) if r.random() < 0.15 else text.encode()
        wanted.framing = r.choices(["length", "chunked", "long", "short"], [88, 10, 0.3, 1])[0]
    if r.random() < 0.1:
        wanted.headers |= odd_headers(r)
    if r.random() < 0.03:
        wanted.method = r.choice(["PUT", "PATCH", "HEAD", "OPTIONS", "GET", "POST", "DELETE", "TRACE"])
    wanted.leaves = r.random() < 0.05
    return wanted


def drawn(served: Served, number: int, seed: int) -> list[Wanted]:
    """About `number` requests that schemathesis draws from the server's OpenAPI document, valid and invalid ones."""
    import hypothesis
    import requests
    import schemathesis
    from schemathesis.core.errors import SerializationNotPossible

    found: list[Wanted] = []
    r = random.Random(seed)

    def collect(case: Any) -> None:
        given = case.as_transport_kwargs(base_url=served.url)
        sent = requests.Request(**{name: value for name, value in given.items() if name in TAKEN}).prepare()
        url = urlsplit(sent.url)
        path = url.path + (f"?{url.query}" if url.query else "")
        body = sent.body.encode() if isinstance(sent.body, str) else sent.body
        kind = {name: value for name, value in sent.headers.items() if name.lower() == "content-type"}
        route = f"{case.operation.method.upper()} {case.operation.path}"
        found.append(Wanted(route, str(sent.method), path, r.choice(KEYS), body, kind))

    settings = hypothesis.settings(
        max_examples=max(1, number // (2 * len(ROUTES))), database=None, deadline=None,
        phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    for result in schemathesis.openapi.from_dict(served.get("/openapi.json").json()).get_all_operations():
        if result.ok().path in ENDLESS:
            continue
        for mode in schemathesis.GenerationMode:
            cases = result.ok().as_strategy(generation_mode=mode)
            # Some routes cannot get an invalid request, and schemathesis makes no protobuf messages.
            with contextlib.suppress(hypothesis.errors.Unsatisfiable, SerializationNotPossible):
                hypothesis.seed(seed)(settings(hypothesis.given(cases)(collect)))()
    return found


TAKEN = ("method", "url", "headers", "params", "data", "json", "cookies")


class Fuzzing:
    """The requests and answers so far."""

    def __init__(self, served: Served, number: int, seed: int, requests: list[Wanted], routes: list[str]) -> None:
        self.served, self.number, self.seed, self.routes = served, number, seed, routes
        self.drawn = requests
        self.asked = 0
        self.ids = Ids()
        self.answers: dict[str, Counter[str]] = {route: Counter() for route in routes}
        self.defects: list[str] = []

    async def run(self) -> None:
        """Send all requests."""
        await asyncio.gather(*(self.work(random.Random(f"{self.seed} {worker}")) for worker in range(WORKERS)))

    async def work(self, r: random.Random) -> None:
        """Run one client: one request after another, on a connection that is kept as long as it works."""
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while self.asked < self.number:
            self.asked += 1
            wanted = self.drawn.pop() if self.drawn and r.random() < 0.3 else mutated(r, self.ids, self.routes)
            keep, kind, written = False, "closed", wanted.written()
            try:
                if connection is None:
                    connection = await asyncio.open_connection(self.served.host, self.served.port, limit=1 << 22)
                async with asyncio.timeout(SILENCE):
                    kind, keep = await self.exchange(*connection, wanted, written, r)
            except TimeoutError:
                kind = "silence"
            except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
                pass
            self.answers.setdefault(wanted.route, Counter())[kind] += 1
            if kind in ("500", "501", "502", "silence"):
                self.defects.append(f"{kind}: {written[:1500]!r}")
            if connection is not None and not (keep and wanted.framing in ("length", "chunked")):
                connection[1].transport.abort()
                connection = None

    async def exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wanted: Wanted,
        written: bytes,
        r: random.Random,
    ) -> tuple[str, bool]:
        """Send a request and read its answer. Returns the status, and whether the connection can be kept."""
        if wanted.leaves:
            writer.write(written[: r.randrange(len(written) + 1)] if r.random() < 0.5 else written)
            await asyncio.sleep(r.random() * 0.05)
            return "left", False
        writer.write(written)
        head = b"HTTP/1.1 100"
        while head.startswith(b"HTTP/1.1 100"):
            head = (await reader.readuntil(b"\r\n\r\n")).lower().replace(b"http", b"HTTP")
        status, length = head[9:12].decode(), re.search(rb"content-length: (\d+)", head)
        answer = b""
        if wanted.method == "HEAD":
            pass
        elif length:
            answer = await reader.readexactly(int(length[1]))
        elif b"chunked" in head:
            while (chunk := await reader.readuntil(b"\r\n")) != b"0\r\n":
                answer += await reader.readexactly(int(chunk, 16) + 2)
            await reader.readexactly(2)
        self.ids.learn(wanted.key, wanted.path, answer)
        return status, b"connection: close" not in head

    def table(self) -> str:
        """The answers by route."""
        kinds = ("2xx", "4xx", "503", "5xx", "left", "closed", "silence")
        lines = [f"{'route':62}{'requests':>9}" + "".join(f"{kind:>9}" for kind in kinds)]
        for route, answers in [*self.answers.items(), ("all", sum(self.answers.values(), Counter()))]:
            classes: Counter[str] = Counter()
            for status, count in answers.items():
                classes[status if status in kinds or not status.isdigit() else f"{status[0]}xx"] += count
            lines.append(f"{route:62}{answers.total():9,}" + "".join(f"{classes[kind] or '-':>9}" for kind in kinds))
        return "\n".join(lines)


def quiet(neighbour: Neighbour) -> float:
    """The longest gap in seconds while nobody else asks."""
    began = time.monotonic()
    time.sleep(20)
    return neighbour.longest(began)


def gaps(neighbour: Neighbour, began: float, ended: float, alone: float) -> str:
    """The gaps between tokens of the ordinary stream in this time."""
    lengths = sorted(gap.length for gap in neighbour.gaps if began < gap.end < ended and gap.length)
    beyond = sum(length > alone + 0.1 for length in lengths)
    return (
        f"Ordinary stream: {len(lengths):,} gaps between tokens, P50 {statistics.median(lengths):.3f} s, "
        f"P99.9 {lengths[int(len(lengths) * 0.999)]:.3f} s, longest {lengths[-1]:.3f} s; "
        f"in 20 s before and 20 s after, alone: longest {alone:.3f} s; "
        f"beyond that by over 0.1 s: {beyond}"
    )


def main() -> int:
    """Run everything. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--only", metavar="TEXT", help="only routes with this text, and none drawn by schemathesis")
    options = parser.parse_args()
    routes = [route for route in ROUTES if (options.only or "") in route]
    print(about(), f"Seed {options.seed}", sep="\n", flush=True)
    keys = {"HOLDFAST_API_KEY": ",".join((OURS, *KEYS))}
    with tempfile.TemporaryDirectory() as directory:
        places = {"store": "store.sqlite", "files": "files", "tuning-state": "tuning"}
        arguments = [*OPTIONS.split(), *(f"--{name}={directory}/{place}" for name, place in places.items())]
        with serving(arguments, keys) as served:
            with beside(served, LENGTH - 8) as neighbour:
                alone = quiet(neighbour)
                os.nice(19)  # the fuzzer's own work should leave the server's cores free
                requests = [] if options.only else drawn(served, options.requests // 10, options.seed)
                fuzzing = Fuzzing(served, options.requests, options.seed, requests, routes)
                print(f"{len(fuzzing.drawn):,} of the requests are drawn by schemathesis", flush=True)
                random.Random(options.seed).shuffle(fuzzing.drawn)
                began, load = time.monotonic(), Load()
                uvloop.run(fuzzing.run())
                ended = time.monotonic()
                seconds = ended - began
                alone = max(alone, quiet(neighbour))
                print(fuzzing.table(), gaps(neighbour, began, ended, alone), sep="\n")
                print(f"{options.requests / seconds:.0f} requests/s for {seconds:.0f} s, {WORKERS} at once; {load}")
                wrong = [f"the ordinary stream was answered {set(neighbour.wrong)}"] * bool(neighbour.wrong)
            wrong += fuzzing.defects + left(served)
    print(*dict.fromkeys(wrong), "NOT every bound holds" if wrong else "every bound holds", sep="\n")
    return bool(wrong)


class Load:
    """The machine's load since this was made."""

    def __init__(self) -> None:
        self.before = os.getloadavg()[0]

    def __str__(self) -> str:
        return f"load {self.before:.1f} before, {os.getloadavg()[0]:.1f} after"


def left(served: Served) -> list[str]:
    """The faults of the server after all clients have left. It is ended."""
    for _ in range(100):
        blocks, running = served.gauge("blocks_used"), served.gauge("requests_running")
        if not blocks and not running:
            break
        time.sleep(0.1)
    status = served.get("/health").status_code
    served.process.send_signal(signal.SIGTERM)
    code, log = served.process.wait(40), served.log.read_text()
    traces = log.count("Traceback")
    print(f"At the end: {blocks:g} blocks in use, {running:g} requests running, /health {status}, exit status {code}")
    print(f"Log: {len(log.splitlines())} lines, {traces} traces")
    first = log[log.index("Traceback") - 200 :][:6000] if traces else ""
    return [
        text
        for text, wrong in (
            (f"{blocks:g} blocks and {running:g} requests stay", blocks or running),
            (f"/health is {status}", status != 200),
            (f"exit status {code}", code),
            (f"traces in the log, the first: {first}", traces),
        )
        if wrong
    ]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
