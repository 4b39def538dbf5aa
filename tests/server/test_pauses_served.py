"""Pauses from end to end: the openai client, a server process, and the built-in model with a small device cache."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.served import Serving, eventually, started

MODEL = "holdfast-tiny"
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
ASKED: list[Any] = [
    {"role": "system", "content": "You add numbers. " * 60},
    {"role": "user", "content": "What is 17 + 25?"},
]


def chat(serving: Serving, messages: list[Any], **more: Any) -> Any:
    with serving.client() as client:
        return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **more)


def fill(serving: Serving, stories: int = 8, first: int = 0) -> None:
    """Let other chats take the device's blocks, about ten for each."""
    for number in range(first, first + stories):
        chat(serving, [{"role": "user", "content": f"Story {number}. " + f"word{number} " * 150}], max_tokens=8)


def on_host(answer: Any) -> int:
    tiers = getattr(answer.usage.prompt_tokens_details, "cached_tokens_by_tier", None) or {"host": 0}
    return int(tiers["host"])


def test_the_turn_after_a_tool_call_finds_its_state_on_the_device() -> None:
    options = ("--device", "cpu", "--cache-gb", "0.012", "--host-cache-gb", "0.1", "--store", "memory")
    with started(*options) as serving:
        began = time.monotonic()
        fill(serving, first=8)
        pause = 3 + 2 * (time.monotonic() - began)  # the tool takes longer than the others' chats, on any machine
        expected = {"expected_pause_ms": 1000 * pause}
        first = chat(serving, ASKED, tools=[ADD], tool_choice="required", max_tokens=60, extra_body=expected)
        (call,) = first.choices[0].message.tool_calls
        fill(serving)
        assert serving.gauge("blocks_swapped_out_total") > 20
        eventually(lambda: serving.gauge("blocks_swapped_in_ahead_total") >= 15)
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        second = chat(serving, [*ASKED, first.choices[0].message, result], tools=[ADD], max_tokens=8)
        assert second.usage.prompt_tokens_details.cached_tokens > 200
        assert on_host(second) < 100
        assert serving.gauge("blocks_ahead_used_total") >= 10


def test_an_announced_turn_finds_its_state_on_the_device() -> None:
    options = ("--device", "cpu", "--cache-gb", "0.012", "--host-cache-gb", "0.1", "--store", "memory")
    with started(*options) as serving, serving.client() as client:
        conversation = client.conversations.create().id
        turn: dict[str, Any] = {"model": MODEL, "conversation": conversation, "max_output_tokens": 8}
        client.responses.create(input=ASKED, **turn)
        fill(serving)
        url = f"{serving.url}/v1/conversations/{conversation}/warm"
        assert httpx.post(url).json()["tokens"] > 200
        eventually(lambda: serving.gauge("blocks_swapped_in_ahead_total") >= 10)
        client.responses.create(input="Thanks.", **turn)
        assert serving.gauge("blocks_ahead_used_total") >= 10


@pytest.mark.long
def test_an_announced_turn_finds_on_the_device_what_only_the_disk_had(tmp_path: Path) -> None:
    """The device has room for 91 blocks and the host for 183. The other chats have more than 200."""
    disk = ("--disk-cache-dir", str(tmp_path / "disk"), "--disk-cache-gb", "0.5")
    options = ("--device", "cpu", "--cache-gb", "0.012", "--host-cache-gb", "0.024", "--store", "memory", *disk)
    with started(*options) as serving, serving.client() as client:
        conversation = client.conversations.create().id
        turn: dict[str, Any] = {"model": MODEL, "conversation": conversation, "max_output_tokens": 8}
        client.responses.create(input=ASKED, **turn)
        fill(serving, 24)
        assert serving.gauge("disk_bytes_read_total") == serving.gauge("blocks_swapped_in_ahead_total") == 0
        tokens = httpx.post(f"{serving.url}/v1/conversations/{conversation}/warm").json()["tokens"]
        assert tokens > 200
        eventually(lambda: serving.gauge("blocks_swapped_in_ahead_total") >= tokens // 16)
        block_bytes = serving.gauge("disk_bytes_read_total") / (tokens // 16)
        written, kept = "disk_bytes_written_total", "disk_blocks_cached"
        eventually(lambda: serving.gauge(written) == serving.gauge(kept) * block_bytes)  # others are still written
        found = client.responses.create(input="Thanks.", **turn).usage.input_tokens_details
        assert found.cached_tokens == tokens // 16 * 16
        assert getattr(found, "cached_tokens_by_tier", None) is None, "all of it was on the device"
        assert serving.gauge("prefix_tokens_hit_on_disk_total") == 0
        assert serving.gauge("blocks_ahead_used_total") == tokens // 16
