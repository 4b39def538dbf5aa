"""A real server that is killed in mid-batch: the next one answers the other lines, and each line once."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_lines import jsonl, line
from served import make_checkpoint, serve

LINES = 60


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
