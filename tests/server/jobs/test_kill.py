"""A real server or its engine is killed in mid-batch. The next one answers the other lines, and each line once."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_lines import jsonl, line
from served import make_checkpoint, serve

LINES = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "bytes")


def completed(client: openai.OpenAI, id: str) -> tuple[str, int]:
    batch = client.batches.retrieve(id)
    return batch.status, batch.request_counts.completed if batch.request_counts else 0


def test_a_server_killed_in_mid_batch_answers_every_line_once(checkpoint: Path, tmp_path: Path) -> None:
    options = ["--store", str(tmp_path / "store.sqlite"), "--files", str(tmp_path / "files"), "--max-sequences", "4"]
    body: dict[str, Any] = {"model": "bytes", "temperature": 0, "max_tokens": 48}
    given = [line(f"r{n}", f"Say {n}.", **body) for n in range(LINES)]
    given[-1]["body"]["max_tokens"] = 2000  # so long that the batch is not over before the test has seen its beginning
    with serve(checkpoint, *options) as server, server.client() as client:
        file = client.files.create(file=("in.jsonl", jsonl(given)), purpose="batch")
        id = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id
        while (count := completed(client, id)[1]) < LINES // 6:
            time.sleep(0.01)
        server.process.kill()
        server.process.wait()
    with serve(checkpoint, *options) as server, server.client() as client:
        while completed(client, id)[0] != "completed":
            time.sleep(0.01)
        batch = client.batches.retrieve(id)
        assert batch.request_counts is not None and batch.error_file_id is None and batch.output_file_id is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
        answers = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        assert [each["custom_id"] for each in answers] == [f"r{n}" for n in range(LINES)]
        direct = client.chat.completions.create(**given[7]["body"])
        assert answers[7]["response"]["body"]["choices"][0]["message"]["content"] == direct.choices[0].message.content
    assert count < LINES


@pytest.mark.long
def test_a_line_in_flight_when_the_engine_died_twice_is_given_up_and_the_server_serves_on(
    checkpoint: Path, tmp_path: Path
) -> None:
    options = ["--store", str(tmp_path / "store.sqlite"), "--files", str(tmp_path / "files"), "--max-sequences", "4"]
    body: dict[str, Any] = {"model": "bytes", "temperature": 0, "max_tokens": 2}
    given = [line("bad", "Long.", **body | {"max_tokens": 4000}), *(line(f"r{n}", **body) for n in range(9))]
    for life in range(2):
        with serve(checkpoint, *options) as server, server.client() as client:
            if life == 0:
                file = client.files.create(file=("in.jsonl", jsonl(given)), purpose="batch")
                made = client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            # In the second life the suspect runs alone, and the answered lines stay answered.
            while life == 0 and completed(client, made.id)[1] < 9:
                time.sleep(0.01)
            while server.gauge("generated_tokens_total") < 2:
                time.sleep(0.01)
            os.kill(server.engine_pid(), signal.SIGSEGV)
            assert server.process.wait(200) == 1
    with serve(checkpoint, *options) as server, server.client() as client:
        while completed(client, made.id)[0] != "completed":
            time.sleep(0.01)
        batch = client.batches.retrieve(made.id)
        assert batch.request_counts is not None and batch.error_file_id is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (9, 1)
        (failed,) = [json.loads(each) for each in client.files.content(batch.error_file_id).text.splitlines()]
        assert failed["custom_id"] == "bad" and failed["response"]["body"]["error"]["code"] == "engine_ended"
        assert client.chat.completions.create(**given[1]["body"]).choices
