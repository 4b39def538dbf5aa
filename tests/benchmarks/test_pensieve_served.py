"""Pensieve's Figure 10 over HTTP: its clients, its phases, and what is read off its curves."""

from __future__ import annotations

import json
import threading
import time
from argparse import Namespace
from typing import Any

import httpx
import pytest

from benchmarks.papers import pensieve_served


def test_phases_follow_one_another_with_their_own_rates_and_count_their_ends() -> None:
    talks = pensieve_served.arriving([2.0, 8.0], 100.0, 2.0, seed=0)
    early = [talk for talk in talks if talk["arrival_s"] <= 100.0]
    assert len(early) == pytest.approx(200, rel=0.2) and len(talks) - len(early) == pytest.approx(800, rel=0.2)
    answers = [pensieve_served.Answered(ended - 1.0, ended, 10, 20, 5) for ended in (1.0, 2.0, 2.9, 3.0)]
    found = pensieve_served.figures(answers, 4.0, 2.0, 3.0)
    assert (found["requests"], found["req_s"], found["prompt_hit"]) == (2, 2.0, 0.25)
    assert found["norm_latency_ms_mean"] == pytest.approx(100.0)


def test_clients_say_that_they_are_ready_before_they_are_given_a_run() -> None:
    ours, theirs = pensieve_served.SPAWN.Pipe()
    part = threading.Thread(target=pensieve_served.play_part, args=(theirs,))
    part.start()
    assert ours.poll(60) and ours.recv() is None
    begin = time.time()
    turns = [dict(input_tokens=4, output_tokens=2, think_s=0.0)]
    late = dict(arrival_s=0.0, turns=[dict(input_tokens=4, output_tokens=2, think_s=60.0)])
    talks = [(0, dict(arrival_s=0.0, turns=turns)), (1, late)]
    ours.send((pensieve_served.Setting("http://127.0.0.1:9", "none", 100, 64, begin, 0.5), talks))
    part.join(60)
    assert not part.is_alive(), "the run ends with its time, whatever is open"
    said: list[Any] = [ours.recv(), ours.recv()]
    assert "ConnectError" in said[0] and said[1] is None


def test_the_end_of_a_process_of_clients_is_a_failure() -> None:
    pipes = [pensieve_served.SPAWN.Pipe() for _ in range(2)]
    playing, answered, failures = [ours for ours, _ in pipes], list[pensieve_served.Answered](), list[str]()
    pipes[0][1].send(pensieve_served.Answered(0.0, 1.0, 2, 3, 0))
    pipes[0][1].send(None)
    pipes[1][1].send("500: no")
    pipes[1][1].close()
    pensieve_served.receive(playing, time.time() + 10.0, answered, failures)
    assert playing == [] and len(answered) == 1
    assert failures == ["500: no", "a process of clients ended before the run"]


async def test_a_turn_carries_the_answers_before_it() -> None:
    asked = list[dict[str, Any]]()

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        usage = {"prompt_tokens_details": {"cached_tokens": len(asked) - 1}}
        return httpx.Response(200, json={"choices": [{"token_ids": [7, 8]}], "usage": usage})

    setting = pensieve_served.Setting("http://server", "m", 100, 20, time.time(), 60.0)
    turns = [dict(input_tokens=size, output_tokens=2, think_s=0.0) for size in (4, 3, 15, 1)]
    sent = list[Any]()
    async with httpx.AsyncClient(base_url="http://server/v1/", transport=httpx.MockTransport(answer)) as http:
        await pensieve_served.converse(http, setting, 0, dict(arrival_s=0.0, turns=turns), sent.append)
    first, second = (each["prompt"] for each in asked)
    assert len(first) == 4 and second[:6] == [*first, 7, 8] and len(second) == 9, "the third turn would be too long"
    assert [(each.tokens, each.prompt, each.cached) for each in sent] == [(2, 4, 0), (2, 9, 1)]


def test_phases_share_what_a_budget_leaves() -> None:
    asked = Namespace(budget=145.0, modes=["tiers", "stateless"], rates=[1.0, 2.0, 3.0, 4.0], phase=14.0)
    phase = pensieve_served.phase_of(asked, 20.0)
    assert phase == (145 - 2 * (20 + pensieve_served.STOP_SECONDS)) / 10
    with pytest.raises(SystemExit, match=r"--budget 145 leaves .* it takes 3 or more"):
        pensieve_served.phase_of(asked, 60.0)
    assert pensieve_served.phase_of(Namespace(budget=None, phase=14.0), 0.0) == 14.0


def test_a_gain_is_read_where_both_curves_have_the_latency() -> None:
    def row(mode: str, req_s: float, latency: float) -> dict[str, Any]:
        names = ("norm_latency_ms_mean", "norm_latency_ms_p90", "prompt_hit")
        return dict(mode=mode, rate=1.0, requests=10, req_s=req_s, failed=0) | dict.fromkeys(names, latency)

    rows = [row("tiers", 10.0, 5.0), row("tiers", 20.0, 10.0), row("tiers", 22.0, 20.0)]
    rows += [row("stateless", 9.0, 7.5), row("stateless", 11.0, 15.0), row("stateless", 11.0, 40.0)]
    assert pensieve_served.compared(rows)[-1] == (
        "device and host, over no cache: 2.00 at most, 1.67 at 7.5 ms a token, 1.91 at 15.0 ms a token"
    )


def test_more_is_served_from_the_cache_by_simulation() -> None:
    sizes = dict(shape="opt-13b", context=4096, device_gb=40.0, host_gb=60.0, think=1.0, seed=0, small=False)
    asked = Namespace(**sizes, simulate="h200", rates=[2.0], phase=6.0)
    (ours,), (theirs,) = (list(pensieve_served.simulated(asked, mode)) for mode in ("tiers", "stateless"))
    assert ours["requests"] > 5 and ours["prompt_hit"] > 0.5 and theirs["prompt_hit"] == 0
    assert ours["norm_latency_ms_mean"] < theirs["norm_latency_ms_mean"]
