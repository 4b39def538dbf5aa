"""`holdfast serve --replicas`: one address over several engines that die, drain and join while clients talk."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from served import Serving, eventually, make_checkpoint, serve

HEADERS = {"authorization": "Bearer one"}
OPERATOR = {"authorization": "Bearer op"}
ASKED: dict[str, Any] = {
    "model": "tiny", "prompt": "it was a dark and stormy night; ", "max_tokens": 800, "temperature": 0.9, "seed": 11,
    "presence_penalty": 0.5, "logprobs": 1,
}  # fmt: skip
PATIENT = {
    "holdfast.cluster.moving.PATIENCE_SECONDS": 200.0,
    "holdfast.cluster.moving.WEIGHT": 0.0,
    "holdfast.cluster.fleet.MOVE_SECONDS": 200.0,
}
"""A busy machine moves state so slowly that it would be given up, and that computing it again would be cheaper."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("replicas") / "tiny")
    options = ["--replicas", "2", "--max-replicas", "3", "--operator-key", "op", "--store", "memory"]
    with serve(checkpoint, *options, "--host-cache-gb", "0.02", constants=PATIENT) as served:
        yield served


def members(served: Serving) -> list[dict[str, Any]]:
    found = httpx.get(f"{served.url}/replicas", headers=OPERATOR).json()["data"]
    assert isinstance(found, list)
    return found


def await_ready(served: Serving, *names: str) -> None:
    eventually(lambda: {each["name"] for each in members(served) if each["state"] == "ready"} == {*names})


def read(served: Serving, kill_at: int | None = None) -> tuple[str, list[float], Any, Any]:
    """Stream a completion. Returns its text, log probabilities, finish reason and usage.

    After `kill_at` tokens, its engine is killed if it still computes.
    """
    stream = served.client().completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    text, logprobs, reason, usage = "", list[float](), None, None
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
            if choice.logprobs is not None:
                logprobs += [each for each in choice.logprobs.token_logprobs or () if each is not None]
        usage = chunk.usage or usage
        if kill_at is not None and len(logprobs) >= kill_at:
            with served.standstill():
                for each in members(served):
                    if each["requests"]:
                        os.kill(each["pid"], signal.SIGKILL)
            kill_at = None
    return text, logprobs, reason, usage


def test_responses_and_conversations_work_through_the_router(served: Serving) -> None:
    client = served.client()
    conversation = client.conversations.create()
    said = ["my name is Ada. " * 100, "what is my name?"]
    texts = []
    for text in said:
        turn = client.responses.create(
            model="tiny", input=text, conversation=conversation.id, temperature=0, max_output_tokens=40
        )
        texts.append(turn.output_text)
    assert turn.usage is not None and turn.usage.input_tokens_details.cached_tokens > 0
    first = client.responses.create(model="tiny", input=said[0], temperature=0, max_output_tokens=40)
    second = client.responses.create(
        model="tiny", input=said[1], previous_response_id=first.id, temperature=0, max_output_tokens=40
    )
    assert [first.output_text, second.output_text] == texts
    assert len(client.conversations.items.list(conversation.id).data) == 2 * len(said)


def test_a_stream_outlives_its_engine_without_a_difference(served: Serving) -> None:
    text, logprobs, reason, usage = read(served)
    for _ in range(20):
        after = read(served, kill_at=3)
        assert (after[0], after[2]) == (text, reason) == (text, "length")
        assert after[1] == pytest.approx(logprobs, abs=1e-4) and len(logprobs) == ASKED["max_tokens"]
        assert (after[3].prompt_tokens, after[3].completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
        if "holdfast_requests_resumed_total 1.0" in httpx.get(f"{served.url}/metrics", headers=OPERATOR).text:
            break  # on a busy machine, an engine may have all tokens before it is killed
        await_ready(served, "0", "1")
    health = httpx.get(f"{served.url}/health", headers=OPERATOR)
    assert health.status_code == 200 and len(health.json()["replicas"]) == 2
    await_ready(served, "0", "1")
    assert httpx.get(f"{served.url}/health").json()["status"] == "ok"
    metrics = httpx.get(f"{served.url}/metrics", headers=OPERATOR).text
    assert "holdfast_requests_resumed_total 1.0" in metrics and 'holdfast_replica_up{replica="1"} 1.0' in metrics
    assert "holdfast_engine_up 1.0" in metrics


def test_a_conversation_is_followed_across_three_replicas_with_the_same_answers(served: Serving) -> None:
    client = served.client()
    story = "tell me a long story. " * 60

    def turns(before_each: Any) -> tuple[list[str], list[int], list[str]]:
        conversation = client.conversations.create()
        answers, cached, places = list[str](), list[int](), list[str]()
        for number, text in enumerate([story, "go on. " * 20, "and then? " * 20]):
            before_each(number, places)
            taken = {each["name"]: each["taken"] for each in members(served)}
            turn = client.responses.create(
                model="tiny", input=text, conversation=conversation.id, temperature=0, max_output_tokens=60
            )
            answers.append(turn.output_text)
            assert turn.usage is not None
            cached.append(turn.usage.input_tokens_details.cached_tokens)
            places += [each["name"] for each in members(served) if each["taken"] > taken[each["name"]]]
        return answers, cached, places

    def drain(number: int, places: list[str]) -> None:
        """Drain the replica of the last turn. Its conversations move first."""
        if number:
            assert httpx.post(f"{served.url}/replicas/{places[-1]}/drain", headers=OPERATOR).status_code == 200
            eventually(lambda: places[-1] not in {each["name"] for each in members(served)})

    resting, _, _ = turns(lambda number, places: None)
    assert httpx.post(f"{served.url}/replicas", headers=OPERATOR).json()["name"] == "2"
    await_ready(served, "0", "1", "2")
    moved, cached, places = turns(drain)
    assert len({*places}) == 3
    assert moved == resting
    assert cached[1] > 1200 and cached[2] > cached[1], "state came along, and not only text"
    last = places[-1]
    refused = httpx.post(f"{served.url}/replicas/{last}/drain", headers=OPERATOR)
    assert refused.status_code == 409 and "only one that serves" in refused.json()["error"]["message"]


def test_the_engine_view_shows_the_replica_that_is_asked_for(served: Serving) -> None:
    url = f"{served.url}/v1/engine/events"
    (name, *_) = [each["name"] for each in members(served) if each["state"] == "ready"]
    with httpx.stream("GET", url, params={"replica": name}, headers=OPERATOR, timeout=200) as response:
        assert response.status_code == 200
        kind, data = next(response.iter_text()).split("\n")[:2]
        about = json.loads(data.removeprefix("data: "))
        assert kind == "event: engine" and about["replica"] == name in about["replicas"]
    missing = httpx.get(url, params={"replica": "99"}, headers=OPERATOR)
    assert missing.status_code == 404 and "99" in missing.json()["error"]["message"]


def test_only_the_operator_changes_the_replicas(served: Serving) -> None:
    assert httpx.post(f"{served.url}/replicas", headers=HEADERS).status_code == 403
    assert httpx.post(f"{served.url}/replicas/7/drain", headers=OPERATOR).status_code == 404
