"""`holdfast serve` as a process with a real engine: from HTTP to kernel and back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Serving, environment, eventually, serve

from holdfast.cli.command import main

HELLO: list[Any] = [{"role": "user", "content": "Hello! This is a prompt of more than one block."}]


@pytest.fixture(scope="module")
def serving(checkpoint: Path) -> Iterator[Serving]:
    with serve(checkpoint, anew=True) as process:
        yield process
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(timeout=200) == 0


def test_streams_equal_answers_and_the_prompt_is_cached_within_its_tenant(serving: Serving) -> None:
    asked: dict[str, Any] = {"model": "bytes", "messages": HELLO, "temperature": 0, "max_tokens": 24}
    with serving.client() as client, serving.client("two") as other:
        whole = client.chat.completions.create(**asked)
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        foreign = other.chat.completions.create(**asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == foreign.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert [cached_tokens(reply.usage) for reply in (whole, chunks[-1], foreign)] == [0, 48, 0]


def test_a_repeated_bench_warns_that_prompts_came_from_the_cache(
    serving: Serving, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [
        "bench",
        "--url",
        serving.url,
        "--api-key",
        "one",
        "--requests",
        "3",
        "--output-tokens",
        "2",
        "--seed",
        "7",
    ]
    shown = []
    for _ in range(2):
        assert main(given) == 0
        shown.append(capsys.readouterr().out)
    assert "from the cache" not in shown[0]
    assert "prompt tokens came from the cache" in shown[1] and "give another --seed" in shown[1]


def cached_tokens(usage: Any) -> int:
    assert usage.completion_tokens == 24
    return int(usage.prompt_tokens_details.cached_tokens)


def test_choices_share_their_prompt_and_are_reproducible_by_seed(serving: Serving) -> None:
    prompt = "Three ways to go on from here, all of them from one prompt."
    asked: dict[str, Any] = {"model": "bytes", "prompt": prompt, "max_tokens": 8, "n": 3, "seed": 5}
    hits = serving.gauge("prefix_tokens_hit_total")
    with serving.client() as client:
        first, second = client.completions.create(**asked), client.completions.create(**asked)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) == 3
    assert serving.gauge("prefix_tokens_hit_total") - hits == 5 * 48


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_blocks(serving: Serving, stream: bool) -> None:
    body = {"model": "bytes", "messages": HELLO, "stream": stream}
    headers = {"authorization": "Bearer one"}
    patience = httpx.Timeout(30, read=30 if stream else 0.2)
    with httpx.Client(base_url=serving.url, headers=headers, timeout=patience) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                assert next(lines).startswith("data: ")
                assert serving.gauge("blocks_used") > 0
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body)
    eventually(lambda: serving.gauge("blocks_used") == 0 and serving.gauge("requests_running") == 0)


def test_unknown_tokens_and_prompts_that_are_too_long_are_refused(serving: Serving) -> None:
    with serving.client() as client:
        with pytest.raises(openai.BadRequestError, match="token id 256") as refused:
            client.completions.create(model="bytes", prompt=[1, 256])
        assert refused.value.param == "prompt"
        with pytest.raises(openai.BadRequestError, match="your prompt resulted in 5000 tokens") as refused:
            client.completions.create(model="bytes", prompt="a" * 5000)
        assert refused.value.code == "context_length_exceeded"


def test_chat_through_a_pipe_answers_each_line(serving: Serving) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "chat", "--url", serving.url, "--max-tokens", "8"]
    env = {**environment(), "HOLDFAST_API_KEY": "two"}
    done = subprocess.run(command, input="hi\nagain\n", capture_output=True, text=True, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("first token") == 2


def test_sigterm_lets_a_stream_finish_and_ends_with_0(checkpoint: Path) -> None:
    with serve(checkpoint) as serving, serving.client() as client:
        stream = client.chat.completions.create(model="bytes", messages=HELLO, max_tokens=200, stream=True)
        next(iter(stream))
        serving.process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert serving.process.wait(timeout=200) == 0


def test_an_engine_that_is_killed_ends_the_server_with_1_and_a_reason(checkpoint: Path) -> None:
    with serve(checkpoint) as serving, serving.client() as client:
        stream = client.chat.completions.create(model="bytes", messages=HELLO, stream=True)
        next(iter(stream))
        os.kill(serving.engine_pid(), signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine has stopped"):
            list(stream)
        assert serving.process.wait(timeout=200) == 1
        assert serving.process.stderr is not None
        (reason,) = serving.process.stderr.read().splitlines()
        assert reason.startswith("holdfast: the engine has ended")
