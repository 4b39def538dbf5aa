"""The announcement of `holdfast serve` when it is ready."""

from __future__ import annotations

import io
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_app import INFO
from fake_engine import engine_info
from rich.console import Console

from holdfast.cli.command import main
from holdfast.cli.serve import announce, announce_apps, curl_line, python_lines
from holdfast.engine import spawn
from holdfast.lm.config import EngineConfig
from holdfast.server.config import ServerConfig


def announced(engine: EngineConfig, server: ServerConfig, host_blocks: int = 0) -> str:
    out = io.StringIO()
    info = engine_info(num_host_blocks=host_blocks)
    announce(Console(file=out, width=160), engine, server, info, "http://127.0.0.1:8000", "")
    return out.getvalue()


def test_the_announcement_shows_address_sizes_and_store() -> None:
    shown = announced(EngineConfig(), ServerConfig(store="/data/talks.sqlite"), host_blocks=300)
    for part in (
        "tiny", "http://127.0.0.1:8000", "a CPU", "100 blocks of 16", "1,600 tokens", "512 tokens", "curl ",
        "300 blocks of 16, 4,800 tokens", "lowest recomputation cost / age first, 32 tokens at a time",
        "/data/talks.sqlite, conversations are kept for 30 days",
    ):  # fmt: skip
        assert part in shown


@pytest.mark.parametrize(
    ("engine", "server", "part"),
    [
        (EngineConfig(), ServerConfig(), "off (--host-cache-gb GB turns it on)"),
        (EngineConfig(prefix_sharing=False), ServerConfig(), "off: with --no-prefix-sharing nothing"),
        (EngineConfig(eviction="lru", chunk_size=40), ServerConfig(), "least recently used first, 48 tokens"),
        (EngineConfig(), ServerConfig(store="postgresql://ada:secret@db/talks"), "postgresql://ada:***@db/talks"),
        (EngineConfig(), ServerConfig(store="memory"), "in memory: conversations end with the server"),
    ],
)
def test_the_announcement_names_features_that_are_off_and_hides_passwords(
    engine: EngineConfig, server: ServerConfig, part: str
) -> None:
    shown = announced(engine, server)
    assert part in shown and "secret" not in shown


def test_the_announced_commands_send_a_key_if_only_operators_keys_are_configured() -> None:
    shown = announced(EngineConfig(), ServerConfig(operator_key=("secret-of-operators",)))
    assert "Bearer $HOLDFAST_API_KEY" in shown and 'api_key=os.environ["HOLDFAST_API_KEY"]' in shown
    assert "secret" not in shown and 'api_key="none"' in announced(EngineConfig(), ServerConfig())


def test_the_announcement_shows_the_tbt_target_next_to_the_token_budget() -> None:
    assert "512 tokens at most (token budget), 50 ms while a stream decodes (TBT target)" in announced(
        EngineConfig(tbt_target=50), ServerConfig()
    )


def test_the_announcement_says_what_becomes_of_the_token_budget() -> None:
    out = io.StringIO()
    info = engine_info(token_budget=257, budget_note="256 of 257 are used")
    announce(Console(file=out, width=200), EngineConfig(), ServerConfig(), info, "http://127.0.0.1:8000", "")
    assert "257 tokens at most (token budget); 256 of 257 are used" in out.getvalue()


def test_the_announcement_says_which_executor_runs_and_counts_its_memory_in_positions() -> None:
    out = io.StringIO()
    info = engine_info(executor="padded", executor_reason="M never swaps; whole prompts", block_size=1)
    announce(Console(file=out, width=200), EngineConfig(), ServerConfig(), info, "http://127.0.0.1:8000", "")
    for part in ("padded, because M never swaps; whole prompts", "100 positions, of which each row", "a row at a time"):
        assert part in out.getvalue()
    assert "blocks" not in out.getvalue()


def test_the_announcement_gives_the_memory_of_recurrent_states() -> None:
    out = io.StringIO()
    memory = replace(engine_info().memory, rows=2_500_000_000, snapshots=1200, host_snapshots=30)
    info = engine_info(memory=memory)
    announce(Console(file=out, width=200), EngineConfig(), ServerConfig(), info, "http://127.0.0.1:8000", "")
    assert "2.50 GB for 4 running sequences (max_sequences gives another number;" in out.getvalue()
    assert ", and 1,200 snapshots on the device, 30 on the host" in out.getvalue()
    assert "snapshots" not in announced(EngineConfig(), ServerConfig())
    out = io.StringIO()
    announce(
        Console(file=out, width=200), EngineConfig(max_sequences=4), ServerConfig(), info, "http://127.0.0.1:8000", ""
    )
    assert "2.50 GB for 4 running sequences, and 1,200 snapshots" in out.getvalue(), "a given number needs no reason"


@pytest.mark.parametrize("value", ["", " ", ","])
def test_a_key_variable_without_a_key_ends_the_start_with_2(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", value)
    assert main(["serve", "/no/such/model", "--store", "memory"]) == 2
    assert "HOLDFAST_API_KEY is set but holds no key" in capsys.readouterr().err


@pytest.mark.parametrize(("keys", "variable", "sent"), [(1, "one", "one"), (2, "one,two", "one")])
def test_the_announced_examples_send_the_first_key(keys: int, variable: str, sent: str) -> None:
    command = curl_line("http://h:1", "tiny", keys).replace("curl ", "printf '%s\\n' ", 1)
    environment = {**os.environ, "HOLDFAST_API_KEY": variable}
    shown = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    lines = shown.stdout.splitlines()
    assert f"authorization: Bearer {sent}" in lines
    assert json.loads(lines[-1])["model"] == "tiny"
    key = python_lines("http://h:1", "tiny", keys).partition("api_key=")[2].partition(")\n")[0]
    assert eval(key, {"os": SimpleNamespace(environ=environment)}) == sent


def test_the_announced_examples_are_valid_without_keys() -> None:
    words = shlex.split(curl_line("http://h:1", "tiny", 0))
    assert json.loads(words[-1])["model"] == "tiny" and not any("authorization" in word for word in words)
    compile(python_lines("http://h:1", "tiny", 0), "try it", "exec")


def test_the_announcement_of_applications_shows_their_inputs_and_outputs() -> None:
    out, server = io.StringIO(), ServerConfig(api_key=("sesame",))
    announce_apps(Console(file=out, width=160), [INFO], "http://127.0.0.1:8000", server)
    shown = out.getvalue()
    for part in (
        "serves sums", "http://127.0.0.1:8000", "numbers int64[1 to 8], pairs float32[1 to 4, 2], flags bool[2]",
        "→ sum float32[1], label string[1 to 8]", "cells sums-cell; 64 places for nodes on cpu",
        "at most 4 sums-cell in a task (not measured, see holdfast profile --app)",
        'curl http://127.0.0.1:8000/v2/models/sums -H "authorization: Bearer $HOLDFAST_API_KEY"',
    ):  # fmt: skip
        assert part in shown


def test_the_announcement_of_applications_shows_the_address_of_grpc() -> None:
    pytest.importorskip("grpc")
    out = io.StringIO()
    announce_apps(Console(file=out, width=160), [INFO], "http://[::1]:8000", ServerConfig(host="::", grpc_port=8001))
    assert "gRPC     [::1]:8001  (the same protocol)" in out.getvalue()


def test_the_announcement_of_an_application_says_that_a_profile_picked_its_sizes() -> None:
    out = io.StringIO()
    measured = replace(INFO, sizes=((1, 4096),), profile_path="/cache/sums.json")
    announce_apps(Console(file=out, width=160), [measured], "http://127.0.0.1:8000", ServerConfig())
    assert "at most 4,096 sums-cell in a task (as holdfast profile measured)" in out.getvalue()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of the engine processes that the test starts."""
    pids: list[int] = []

    class Noted(spawn.EngineProcess):
        def __init__(self, device: str = "auto") -> None:
            super().__init__(device)
            pids.append(self.pid)

    monkeypatch.setattr(spawn, "EngineProcess", Noted)
    return pids


def runs(pid: int) -> bool:
    """Whether there is a process of this id, even one that has ended and was not waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_nothing_is_started_for_a_bad_option_a_missing_model_or_a_port_in_use(
    started: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--max-sequences", "-1", "--port", "0"]) == 2
    assert main(["serve", str(tmp_path / "absent"), "--port", "0"]) == 2
    assert "does not exist" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err
    assert started == []


def test_a_store_that_cannot_be_opened_ends_the_engine_and_the_start_with_2(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", "--store", "/dev/null/not/a/store"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert len(started) == 1 and not runs(started[0])


def test_ctrl_c_while_the_server_is_imported_ends_the_engine(
    started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **more: object) -> None:
        assert runs(started[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.serve.run", interrupted)
    assert main(["serve", "--port", "0"]) == 130
    assert len(started) == 1 and not runs(started[0])


@pytest.mark.parametrize(
    ("words", "contracts"),
    [([], "auto"), (["--contract", "ttft=1s"], "on"), (["--contract", "ttft=1s", "--contracts", "off"], "off")],
)
def test_a_default_contract_turns_contracts_on(
    started: list[int], monkeypatch: pytest.MonkeyPatch, words: list[str], contracts: str
) -> None:
    engines: list[EngineConfig] = []

    def interrupted(*given: object, **more: object) -> None:
        engines.extend(each for each in (*given, *more.values()) if isinstance(each, EngineConfig))
        raise KeyboardInterrupt

    monkeypatch.setattr("holdfast.cli.serve.run", interrupted)
    main(["serve", "--port", "0", *words])
    assert [engine.contracts for engine in engines] == [contracts]


def test_the_engine_is_started_before_the_server_is_imported() -> None:
    program = """
import sys
from holdfast.cli.command import main
from holdfast.engine import spawn

def begin(device):
    late = {"asyncio", "fastapi", "jinja2", "rich", "sqlalchemy", "tokenizers", "uvicorn", "zmq"} & set(sys.modules)
    print(device, sorted(late), flush=True)
    raise OSError("enough")

spawn.EngineProcess = begin
sys.exit(main(["serve", "--port", "0", "--device", "cpu"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert (done.stdout, done.stderr, done.returncode) == ("cpu []\n", "holdfast: enough\n", 1)
