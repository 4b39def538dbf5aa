"""Compaction within a response, when its prompt reaches the client's threshold."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient, Rounds, engine_info

from holdfast.server.conversations.items import SUMMARIZE, decode_compacted

Http = Callable[..., httpx.AsyncClient]
LONG = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "My name is Ada. " * 9},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": "What is my name?"},
]
AT = [{"type": "compaction", "compact_threshold": 100}]


@pytest.fixture
def client() -> Rounds:
    client = Rounds(engine_info(max_model_len=2000))
    client.texts = ("The user is| called Ada.", "Ada.", "You are| welcome.")
    return client


def prompt(client: FakeClient, number: int) -> str:
    return client.text.decode(client.asked[number].prompt)


async def post(api: httpx.AsyncClient, status: int = 200, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "input": LONG, "context_management": AT} | body
    response = await api.post("/v1/responses", json=asked)
    assert response.status_code == status, response.text
    return dict(response.json())


COMPACTED = (
    "<system>Be brief.<assistant>Summary of the conversation so far: The user is called Ada.<user>What is my name?"
)


async def test_a_summary_takes_the_place_of_what_was_said(http: Http, client: Rounds) -> None:
    async with http() as api:
        whole = await post(api)
    assert [item["type"] for item in whole["output"]] == ["compaction", "message"]
    assert SUMMARIZE in prompt(client, 0) and "My name is Ada. My name" in prompt(client, 0)
    assert prompt(client, 1) == COMPACTED
    assert whole["usage"]["input_tokens"] == len(client.asked[0].prompt) + len(client.asked[1].prompt)
    assert decode_compacted(whole["output"][0]["encrypted_content"], "x").last == ["What is my name?"]


async def test_the_next_turn_goes_on_from_the_summary(http: Http, client: Rounds) -> None:
    async with http() as api:
        first = await post(api)
        await post(api, input="Thanks.", previous_response_id=first["id"], context_management=[])
        history = [*LONG, *first["output"], {"role": "user", "content": "Thanks."}]
        await post(api, input=history, context_management=[])
        await post(api, input=history[len(LONG) :], context_management=[])
    assert prompt(client, 2) == f"{COMPACTED}<assistant>Ada.<user>Thanks."
    assert prompt(client, 2) == prompt(client, 3) == prompt(client, 4)


async def test_a_prompt_below_the_threshold_stays(http: Http, client: Rounds) -> None:
    async with http() as api:
        whole = await post(api, input="Hi.")
        other = await post(api, context_management=[{"type": "compaction"}])
    assert [item["type"] for item in (*whole["output"], *other["output"])] == ["message", "message"]
    assert len(client.asked) == 2


async def test_a_single_message_is_not_summarized(http: Http, client: Rounds) -> None:
    async with http() as api:
        whole = await post(api, input="My name is Ada. " * 9)
    assert [item["type"] for item in whole["output"]] == ["message"]


async def test_a_stream_reports_the_compaction(http: Http) -> None:
    async with http() as api:
        body = {"model": "tiny", "input": LONG, "context_management": AT, "stream": True}
        text = (await api.post("/v1/responses", json=body)).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:6]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.compaction.compacting",
        "response.output_item.done", "response.output_item.added",
    ]  # fmt: skip
    assert events[-1]["response"]["output"][0] == events[4]["item"]


async def test_a_conversation_beyond_the_context_is_compacted_too(http: Http, client: Rounds) -> None:
    said = [{"role": role, "content": "word " * 50} for role in ("user", "assistant")] * 8
    async with http() as api:
        whole = await post(api, input=[*said, {"role": "user", "content": "And?"}])
    assert whole["status"] == "completed"
    assert len(client.asked[0].prompt) < 2000


async def test_the_tokens_of_a_summary_do_not_count_toward_the_maximum(http: Http, client: Rounds) -> None:
    async with http() as api:
        whole = await post(api, max_output_tokens=1)
    assert whole["output"][1]["content"][0]["text"] == "Ada."


async def test_a_summary_follows_no_format_and_keeps_the_salt(http: Http, client: Rounds) -> None:
    async with http() as api:
        await post(api, text={"format": {"type": "json_object"}}, cache_salt="pepper", max_output_tokens=4)
    summary, answer = client.asked
    assert summary.params.grammar is None and answer.params.grammar is not None
    assert summary.salt == answer.salt == "pepper"


async def test_a_model_that_writes_no_summary_fails_the_response(http: Http, client: Rounds) -> None:
    client.texts = ("", "Ada.")
    async with http() as api:
        refused = await post(api, status=500)
    assert refused["error"]["code"] == "compaction_failed"


@pytest.mark.parametrize(
    "given",
    [[{"type": "other"}], [{"type": "compaction", "compact_threshold": 0}], [*AT, *AT], [{"type": 3}], "compaction"],
)
async def test_other_ways_to_manage_the_context_are_refused(http: Http, given: Any) -> None:
    async with http() as api:
        refused = await post(api, status=400, context_management=given)
    assert refused["error"]["param"].startswith("context_management")
