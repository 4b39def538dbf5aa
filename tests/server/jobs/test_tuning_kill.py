"""A real server over the built-in model is killed in mid-job. The next one continues, and serves the result."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_lines import jsonl
from served import Serving, started

QUESTION = {"role": "user", "content": "I like pears."}
ANSWER = "Ahoy! Pears are good."
MODEL = "holdfast-tiny"


def until(client: openai.OpenAI, id: str, done: Callable[[Any], bool]) -> Any:
    while not done(job := client.fine_tuning.jobs.retrieve(id)):
        assert job.status != "failed", job.error
        time.sleep(0.02)
    return job


def steps(client: openai.OpenAI, id: str) -> list[dict[str, Any]]:
    events: list[Any] = client.fine_tuning.jobs.list_events(id, limit=100).data
    return [event.data for event in reversed(events) if event.type == "metrics"]


def answer(client: openai.OpenAI, model: str) -> str | None:
    messages: Any = [QUESTION]
    made = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=24)
    return made.choices[0].message.content


def kill_api(server: Serving) -> None:
    server.process.kill()


def kill_engine(server: Serving) -> None:
    os.kill(server.engine_pid(), signal.SIGKILL)


def test_a_server_killed_in_mid_job_continues_and_serves_the_adapter(tmp_path: Path) -> None:
    places = [f"--{name}={tmp_path / name}" for name in ("store", "files", "tuning-state", "tuning-mirror")]
    options = [*places, "--cache-gb", "0.3", "--api-key", "one", "--api-key", "two", "--tuning"]
    line = {"messages": [QUESTION, {"role": "assistant", "content": ANSWER}]}
    chosen = {"n_epochs": 8, "batch_size": 2, "learning_rate_multiplier": 10, "lora_rank": 8}
    known = 0
    id = ""
    for kill in (kill_api, kill_engine):
        with started(*options) as server, server.client() as client:
            if not id:
                assert answer(client, MODEL) != ANSWER
                file = client.files.create(file=("in.jsonl", jsonl([line] * 8)), purpose="fine-tune")
                method: Any = {"type": "supervised", "supervised": {"hyperparameters": chosen}}
                id = client.fine_tuning.jobs.create(model=MODEL, training_file=file.id, method=method, seed=3).id
            least = known + 2
            until(client, id, lambda job: len(steps(client, id)) >= least)  # noqa: B023
            known = len(steps(client, id))
            kill(server)
            server.process.wait()
    with started(*options) as server, server.client() as client, server.client("two") as other:
        job = until(client, id, lambda job: job.status == "succeeded")
        numbers = [each["step"] for each in steps(client, id)]
        assert numbers == [*range(1, 33)]
        assert job.progress["trained_tokens"] == 64 * 19
        assert answer(client, job.fine_tuned_model) == ANSWER != answer(client, MODEL)
        with pytest.raises(openai.NotFoundError):
            answer(other, job.fine_tuned_model)
    assert known < 32
