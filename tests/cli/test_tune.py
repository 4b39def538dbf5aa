"""`holdfast tune`: at a server, with a model that runs here, stopped and begun again, and refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from batch_lines import jsonl
from fake_engine import FakeClient, engine_info
from rich.console import Console
from rich.progress import Progress
from safetensors.numpy import load_file
from served import command
from serving import listening

from holdfast.cli import tune
from holdfast.cli.command import main
from holdfast.cli.flags import UsageError
from holdfast.cli.tune import Bar, TuneConfig, bar
from holdfast.lm.config import EngineConfig
from holdfast.server.jobs import tuning_runner


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ASK_SECONDS", 0.01)
    monkeypatch.setattr(tuning_runner, "COMMIT_SECONDS", 0.01)


def tuning_client() -> FakeClient:
    return FakeClient(info=engine_info(adapter_slots=8), config=EngineConfig(tuning=True))


def written(directory: Path, *lines: Any, name: str = "data.jsonl") -> str:
    (directory / name).write_bytes(jsonl(lines))
    return str(directory / name)


def examples(count: int) -> list[Any]:
    return [{"prompt": f"{number}", "completion": f" Ahoy {number}"} for number in range(count)]


async def test_a_server_tunes_an_adapter_which_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = tuning_client()
    file, held_out = written(tmp_path, *examples(6)), written(tmp_path, *examples(2), name="held.jsonl")
    async with listening(client) as server:
        config = TuneConfig(url=server.url, validation=held_out, epochs=3, batch_size=2, rank=4, seed=5, dora=True)
        assert await tune.run(config, EngineConfig(), file, None) == 0
    assert json.loads((tmp_path / "data.adapter" / "adapter_config.json").read_text()) == {"step": 9}
    assert (tmp_path / "data.adapter" / "adapter_model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.adapter", "data.jsonl", "held.jsonl"]
    printed = " ".join(capsys.readouterr().err.split())
    assert "9 steps, 90 tokens, loss 0.1111; the adapter is in" in printed and "serves it as ft:tiny::" in printed
    (order,) = client.tuner.orders
    assert (order.epochs, order.batch_size, order.rank, order.seed) == (3, 2, 4, 5) and order.validation_digest
    assert order.dora


async def test_a_run_that_is_stopped_pauses_at_the_server_and_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = tuning_client()
    client.tuner.waits_at = 10
    file, held_out = written(tmp_path, *examples(80)), written(tmp_path, *examples(2), name="held.jsonl")
    async with listening(client) as server:
        config = TuneConfig(url=server.url, epochs=5, validation=held_out)
        running = asyncio.create_task(tune.run(config, EngineConfig(), file, "tiny"))
        while len(client.tuner.steps) < 5:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "paused; the same command goes on with it" in capsys.readouterr().err
        while [action for _, action in client.tuner.changes] != ["pause"]:
            await asyncio.sleep(0.01)
        client.tuner.goes_on.set()
        with pytest.raises(UsageError, match="or an option, has changed since"):
            await tune.run(TuneConfig(url=server.url, epochs=6), EngineConfig(), file, "tiny")
        written(tmp_path, *examples(3), name="held.jsonl")
        with pytest.raises(UsageError, match="or an option, has changed since"):
            await tune.run(config, EngineConfig(), file, "tiny")
        written(tmp_path, *examples(2), name="held.jsonl")
        with pytest.raises(UsageError, match="was begun at a server"):
            await tune.run(TuneConfig(epochs=5), EngineConfig(), file, None)
        assert await tune.run(config, EngineConfig(), file, "tiny") == 0
    assert [step for _, step in client.tuner.steps] == list(range(1, 51)) and len(client.tuner.orders) == 1


async def test_wrong_lines_are_reported_with_their_numbers_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, *examples(1), {"prompt": "a"}, {"messages": []})
    good = written(tmp_path, *examples(1), name="good.jsonl")
    async with listening(tuning_client()) as server:
        assert await tune.run(TuneConfig(url=server.url), EngineConfig(), file, None) == 2
        printed = capsys.readouterr().err.replace("\n", " ")
        assert f"{file}:2: a line has messages, or" in printed and f"{file}:3: messages must be" in printed
        assert await tune.run(TuneConfig(url=server.url, validation=file), EngineConfig(), good, None) == 2
        assert f"{file}:3: messages must be" in capsys.readouterr().err.replace("\n", " ")
        with pytest.raises(UsageError, match="lora_rank is 64"):
            await tune.run(TuneConfig(url=server.url, rank=64), EngineConfig(), good, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "good.jsonl"]


async def test_a_job_that_fails_ends_with_1_and_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = tuning_client()
    client.tuner.breaks_at = 2
    async with listening(client) as server:
        config = TuneConfig(url=server.url, epochs=3)
        assert await tune.run(config, EngineConfig(), written(tmp_path, *examples(9)), None) == 1
    assert "the loss is not a number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name the DATA to learn"),
        (["missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["data.jsonl", "--validation", "missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["data.jsonl", "more.jsonl"], "tune takes one DATA, and there is more.jsonl besides"),
        (["data.jsonl", "--url", "http://x", "--max-sequences", "3"], "--max-sequences is for a model that runs here"),
        (["data.jsonl", "--out", "data.jsonl"], "data.jsonl exists; choose another --out"),
        (["data.jsonl", "--out", "none/adapter"], "cannot be written"),
        (["data.jsonl", "--out", "/proc/adapter"], "/proc/adapter.partial cannot be made: "),
        (["data.jsonl", "--model", "/nowhere"], "/nowhere does not exist"),
        (["data.jsonl", "--epochs", "51"], "epochs is 51; it must lie between 1 and 50"),
        (["data.jsonl", "--epochs", "0"], "epochs is 0; it must lie between 1 and 50"),
        (["data.jsonl", "--rank", "129"], "rank is 129; it must be a whole number from 1 to 128"),
        (["data.jsonl", "--target-module", "nose"], "modules are nose; choose each once from q, k, v"),
        (["data.jsonl", "--tuning"], "unknown option --tuning"),
    ],
)
def test_a_wrong_command_ends_with_2_and_a_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, *examples(1))
    assert main(["tune", *words]) == 2
    assert reason in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def state_of(step: int, tokens: int, **more: Any) -> dict[str, Any]:
    return {"status": "running", "progress": {"step": step, "total_steps": 8, "trained_tokens": tokens, **more}}


def test_the_bar_shows_steps_loss_rate_and_time_left() -> None:
    notes, now = Console(width=120, force_terminal=True), [0.0]
    with notes.capture() as shown, bar(notes) as update:
        update._clock = update._progress.get_time = lambda: now[0]
        for step in range(4):
            update(state_of(step, 100 * step, train_loss=2.5))
            now[0] += 0.5
        update._progress.refresh()
    last = shown.get().rpartition("running")[2]
    assert "3/8" in last and "loss 2.5000" in last and "200 tokens/s" in last
    assert "0:00:03" in last, "five steps of half a second are left, rounded up"


def test_without_a_terminal_a_line_is_printed_at_each_tenth() -> None:
    notes = Console(width=120, force_terminal=False)
    with notes.capture() as shown, bar(notes) as update:
        for progress in (None, {"step": 0, "total_steps": None}):
            update({"status": "queued", "progress": progress})
        for step in (0, 1, 1, 2, 3, 7, 8):
            update(state_of(step, 100 * step, train_loss=2.5 if step > 1 else None))
    assert shown.get().splitlines() == [
        "step 1 of 8, 100 tokens",
        "step 2 of 8, 200 tokens, loss 2.5000",
        "step 3 of 8, 300 tokens, loss 2.5000",
        "step 7 of 8, 700 tokens, loss 2.5000",
    ]


def test_the_rate_is_that_of_the_last_ten_seconds_and_of_the_time_since_tokens_came() -> None:
    now, progress = [100.0], Progress(disable=True)
    update = Bar(progress, progress.add_task("", loss="", rate=""), lambda: now[0])

    def rate(seconds: float, tokens: int) -> str:
        now[0] += seconds
        update(state_of(1, tokens))
        return str(progress.tasks[0].fields["rate"])

    assert rate(0.0, 5000) == "", "they were trained before"
    assert rate(1.0, 5100) == "100 tokens/s"
    assert rate(1.0, 5100) == "50 tokens/s", "none came meanwhile"
    assert [rate(5.0, 5100 + 1000 * number) for number in range(1, 6)][-1] == "200 tokens/s"
    update({"status": "validating_files", "progress": None})
    task = progress.tasks[0]
    assert (task.description, task.completed) == ("validating files", 0)
    assert task.fields["loss"] == ""


def test_ctrl_c_pauses_a_run_and_the_same_command_goes_on_with_it(checkpoint: Path, tmp_path: Path) -> None:
    file = written(tmp_path, *examples(30))
    options = ["--load-format", "random", "--cache-gb", "0.05", "--threads", "1", "--tuning-mirror", "off"]
    more = ["--epochs", "16", "--batch-size", "3", "--rank", "4", "--learning-rate-multiplier", "10"]
    words = ["tune", file, "--model", str(checkpoint), *options, *more]
    store = tmp_path / "data.adapter.partial" / "store.sqlite"

    def steps() -> list[int]:
        try:
            with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
                rows = db.execute("SELECT event FROM tuning_events ORDER BY number").fetchall()
        except sqlite3.OperationalError:
            return []
        return [data["step"] for (row,) in rows if (data := json.loads(row).get("data"))]

    with command(*words) as process:
        while len(steps()) < 10 and process.poll() is None:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 130 and "paused; the same command goes on with it" in printed, printed
    found = steps()
    assert found == list(range(1, len(found) + 1)) and len(found) < 160
    with command(*words) as done:
        _, printed = done.communicate()
    assert done.returncode == 0, printed
    assert "160 steps, " in printed
    adapter = load_file(tmp_path / "data.adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2 and any(abs(matrix).max() > 0 for name, matrix in adapter.items() if "_B" in name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.adapter", "data.jsonl"]
