"""Contracts on a live server: hostile ones during a neighbour's stream, and two replicas of which one ends."""

from __future__ import annotations

import itertools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served import Serving, eventually, make_checkpoint, serve

TEXT = "/v1/completions"
HOSTILE: list[Any] = [
    0, -1, -1e-300, 10**18, 1e308, 5e-324, 1e-9, 1e-6, 0.001, 86_400_000, "soon", "500", "", None, True, False,
    [], [500], {}, {"ms": 500}, {"tbt_ms": {"tbt_ms": 1}}, [[[[[1]]]]],
]  # fmt: skip
"""Values of a contract's time that JSON has."""
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "0x10", "1_000", "--1", "9" * 4000, "[" * 5000)
"""Texts that are no JSON, or no time."""
NUMBER = 300
OPERATOR = {"authorization": "Bearer op"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("contracts") / "tiny")


def body(serving: Serving, **more: Any) -> dict[str, Any]:
    return {"prompt": "a neighbour's text", "max_tokens": 8, "temperature": 0, **more}


def hostile_bodies() -> Iterator[bytes]:
    """Bodies of requests with hostile contracts, without end."""
    names = itertools.cycle(("ttft_ms", "tbt_ms", "complete_ms"))
    while True:
        for value in HOSTILE:
            request = httpx.Request("POST", "http://h", json={"prompt": "x", "max_tokens": 2, next(names): value})
            yield request.read()
        for text in RAW:
            yield f'{{"prompt": "x", "max_tokens": 2, "{next(names)}": {text}}}'.encode()


def counted(serving: Serving, name: str) -> float:
    """The number of contracts with this outcome."""
    return metric(serving, f'contracts_total{{outcome="{name}",term=""}}')


def metric(serving: Serving, name: str) -> float:
    text = httpx.get(f"{serving.url}/metrics", headers=OPERATOR).text
    (line,) = [line for line in text.splitlines() if line.startswith(f"holdfast_{name} ")]
    return float(line.split()[-1])


def test_300_hostile_contracts_change_no_neighbours_stream(checkpoint: Path) -> None:
    with (
        serve(checkpoint, "--contracts", "on", "--operator-key", "op") as serving,
        httpx.Client(base_url=serving.url, timeout=60.0) as api,
    ):
        api.headers["authorization"] = "Bearer one"
        long = body(serving, max_tokens=400, tbt_ms=60_000)
        alone = api.post(TEXT, json=long).json()["choices"][0]["text"]
        answers = Counter[int]()

        def attack(content: bytes) -> int:
            headers = {"authorization": "Bearer two", "content-type": "application/json"}
            return api.post(TEXT, content=content, headers=headers).status_code

        with ThreadPoolExecutor(5) as threads:
            neighbour = threads.submit(lambda: api.post(TEXT, json=long).json()["choices"][0]["text"])
            for status in threads.map(attack, itertools.islice(hostile_bodies(), NUMBER)):
                answers[status] += 1
            assert neighbour.result() == alone
        assert sum(answers.values()) == NUMBER and {*answers} == {200, 400, 429}, answers
        eventually(lambda: counted(serving, "kept") >= 2 and counted(serving, "refused") > 0)
        eventually(lambda: metric(serving, "requests_running") == 0)
        assert api.post(TEXT, json=body(serving, ttft_ms=60_000)).status_code == 200


@pytest.mark.long
def test_a_contract_goes_on_at_the_other_replica_when_an_engine_is_killed(checkpoint: Path) -> None:
    options = ("--contracts", "on", "--replicas", "2", "--store", "memory")
    with (
        serve(checkpoint, *options, "--operator-key", "op") as serving,
        httpx.Client(base_url=serving.url, timeout=60.0) as api,
    ):
        api.headers["authorization"] = "Bearer one"
        asked = body(serving, max_tokens=2500, tbt_ms=100_000, complete_ms=280_000, stream=True)
        with api.stream("POST", TEXT, json=asked) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            first = [next(lines) for _ in range(3)]
            with serving.standstill():
                replicas = api.get("/replicas", headers=OPERATOR).json()["data"]
                (busy,) = [each["pid"] for each in replicas if each["requests"]]
                os.kill(busy, signal.SIGKILL)
            rest = [*lines]
        assert len(first + rest) > 100 and '"finish_reason":"length"' in rest[-1]
        eventually(lambda: counted(serving, "kept") == 1)  # counted after the last line is sent
        assert metric(serving, "requests_resumed_total") == 1
        hasty = api.post(TEXT, json=body(serving, ttft_ms=1e-6))
        assert hasty.status_code == 429 and hasty.json()["error"]["code"] == "contract_refused"
        eventually(lambda: counted(serving, "refused") == 1)
