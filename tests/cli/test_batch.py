"""`holdfast batch`: at a server, with a local model, stopped and begun again, and refused."""

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
from batch_lines import jsonl, line
from fake_engine import FakeClient
from served import command
from serving import listening

from holdfast.cli import batch
from holdfast.cli.batch import BatchConfig
from holdfast.cli.command import main
from holdfast.cli.flags import CommandError, UsageError
from holdfast.cli.stopped import MARK
from holdfast.engine.client.connection import EngineStartError
from holdfast.lm.config import EngineConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "ASK_SECONDS", 0.01)


def written(directory: Path, *given: Any) -> str:
    (directory / "in.jsonl").write_bytes(jsonl(given))
    return str(directory / "in.jsonl")


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(each) for each in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


async def test_a_server_answers_the_lines_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, line("a"), line("b"))
    async with listening(FakeClient()) as server:
        assert await batch.run(BatchConfig(url=server.url), EngineConfig(), file) == 0
    found = answers(tmp_path / "in.output.jsonl")
    assert [each["response"]["status_code"] for each in found.values()] == [200, 200]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.output.jsonl"]
    assert "2 of 2 lines answered" in capsys.readouterr().err


async def test_lines_that_fail_are_in_a_file_of_their_own_and_the_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, line("a"), line("b", "mutiny"))
    async with listening(FakeClient()) as server:
        config = BatchConfig(url=server.url, out=str(tmp_path / "answers.jsonl"))
        assert await batch.run(config, EngineConfig(), file) == 1
    assert set(answers(tmp_path / "answers.jsonl")) == {"a"}
    assert set(answers(tmp_path / "answers.errors.jsonl")) == {"b"}
    assert "1 failed" in capsys.readouterr().err


async def test_wrong_lines_are_reported_with_their_numbers_and_the_code_is_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, line("a"), line("a"), {"custom_id": "c"})
    async with listening(FakeClient()) as server:
        assert await batch.run(BatchConfig(url=server.url), EngineConfig(), file) == 2
    printed = capsys.readouterr().err
    assert f"{file}:2: custom_id 'a' is that of line 1, too" in printed and f"{file}:3: method must be" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


async def test_a_stopped_run_follows_its_batch_at_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(hold=asyncio.Event())
    file = written(tmp_path, line("a"), line("b"))
    async with listening(client) as server:
        config = BatchConfig(url=server.url)
        running = asyncio.create_task(batch.run(config, EngineConfig(), file))
        while not (tmp_path / "in.output.jsonl.partial").exists():
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert "goes on at the server" in capsys.readouterr().err
        changed = written(tmp_path, line("other"))
        with pytest.raises(UsageError, match="has changed since"):
            await batch.run(config, EngineConfig(), changed)
        with pytest.raises(UsageError, match="was begun at a server"):
            await batch.run(BatchConfig(), EngineConfig(), changed)
        file = written(tmp_path, line("a"), line("b"))
        with pytest.raises(UsageError, match="was begun at http"):
            await batch.run(BatchConfig(url="http://127.0.0.1:9"), EngineConfig(), file)
        assert client.hold is not None
        client.hold.set()
        assert await batch.run(config, EngineConfig(), file) == 0
    assert len(client.asked) == 2
    assert set(answers(tmp_path / "in.output.jsonl")) == {"a", "b"}


async def test_a_model_that_runs_here_for_a_batch_has_large_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(config: EngineConfig, **_: Any) -> None:
        raise EngineStartError(str(config.token_budget))

    monkeypatch.setattr(batch.EngineClient, "start", start)
    with pytest.raises(EngineStartError, match="large"):
        await batch.run(BatchConfig(), EngineConfig(), written(tmp_path, line("a")))


async def test_a_server_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="broke"):
        await batch.run(BatchConfig(url="http://127.0.0.1:9"), EngineConfig(), written(tmp_path, line("a")))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name the FILE"),
        (["missing.jsonl"], "cannot read missing.jsonl: No such file"),
        (["."], "cannot read .: Is a directory"),
        (["in.jsonl", "more.jsonl"], "batch takes one FILE, and there is more.jsonl besides"),
        (["in.jsonl", "--url", "http://x", "--max-sequences", "3"], "--max-sequences is for a model that runs here"),
        (["in.jsonl", "--url", "nowhere"], "url is nowhere"),
        (["in.jsonl", "--out", "none/out.jsonl"], "cannot be written"),
        (["in.jsonl", "--out", "in.jsonl"], "is the file to read"),
        (["other.jsonl"], "names none of /v1/chat/completions, /v1/completions, /v1/responses"),
        (["bad.jsonl"], "the first line of bad.jsonl is not a request in JSON: "),
        (["empty.jsonl"], "empty.jsonl has no lines"),
        (["cut.jsonl"], "the first line of cut.jsonl is not a request in JSON: Input data was truncated"),
        (["deep.jsonl"], "the first line of deep.jsonl is not a request in JSON: "),
        (["in.jsonl", "--out", "begun.jsonl"], "begun.jsonl.partial is not from a stopped run"),
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
    written(tmp_path, line("a"))
    (tmp_path / "bad.jsonl").write_bytes(b"\xff{\n")
    (tmp_path / "other.jsonl").write_bytes(b'{"url": "/v1/other"}\n')
    (tmp_path / "cut.jsonl").write_bytes(b'{"url": "/v1/comp')
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "deep.jsonl").write_bytes(b'{"a":' * 100_000)
    (tmp_path / "begun.jsonl.partial").mkdir()
    (tmp_path / "begun.jsonl.partial" / MARK).write_bytes(b'{"a":' * 100_000)
    assert main(["batch", *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_run_that_is_killed_or_stopped_continues_here_with_the_same_command(checkpoint: Path, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "bytes", "temperature": 0, "max_tokens": 16}
    given = [line(f"r{n}", f"Say {n}.", **body) for n in range(30)]
    for last in given[-2:]:  # so long that the run is not over before the test has seen its beginning
        last["body"]["max_tokens"] = 1500
    file = written(tmp_path, *given)
    options = ["--load-format", "random", "--cache-gb", "0.02", "--max-sequences", "2", "--threads", "1"]
    words = ["batch", file, "--model", str(checkpoint), *options]
    store = tmp_path / "in.output.jsonl.partial" / "store.sqlite"

    def answered() -> int:
        try:
            with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as db:
                return int(db.execute("SELECT count(*) FROM batch_lines").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    least = 4
    for how, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        with command(*words) as process:
            while answered() < least and process.poll() is None:
                time.sleep(0.01)
            os.kill(process.pid, how)
            _, printed = process.communicate(timeout=120)
            assert process.returncode == code, printed
        assert (how is signal.SIGKILL) or "the same command goes on with it" in printed
        least = min(answered() + 4, len(given) - 2)  # the long ones still run
    with command(*words) as done:
        _, printed = done.communicate()
    assert done.returncode == 0, printed
    assert "30 of 30 lines answered" in printed
    assert list(answers(tmp_path / "in.output.jsonl")) == [f"r{n}" for n in range(30)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "in.output.jsonl"]
