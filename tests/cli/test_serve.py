"""The announcement of `holdfast serve` when it is ready."""

from __future__ import annotations

import io
import json
import shlex

import pytest
from fake_engine import engine_info
from rich.console import Console

from holdfast.cli.command import main
from holdfast.cli.serve import announce, curl_line, python_lines
from holdfast.core.config import EngineConfig
from holdfast.server.config import ServerConfig


def announced(engine: EngineConfig, server: ServerConfig, host_blocks: int = 0) -> str:
    out = io.StringIO()
    info = engine_info(num_host_blocks=host_blocks)
    announce(Console(file=out, width=160), engine, server, info, "http://127.0.0.1:8000")
    return out.getvalue()


def test_the_announcement_shows_address_sizes_and_store() -> None:
    shown = announced(EngineConfig(), ServerConfig(store="/data/talks.sqlite"), host_blocks=300)
    for part in (
        "tiny", "http://127.0.0.1:8000", "a CPU", "100 blocks of 16", "1,600 tokens", "512 tokens", "curl ",
        "300 blocks of 16, 4,800 tokens", "lowest recomputation cost / age first, 32 tokens at a time",
        "/data/talks.sqlite, kept for 30 days, at most 8 GB",
    ):  # fmt: skip
        assert part in shown


@pytest.mark.parametrize(
    ("engine", "server", "part"),
    [
        (EngineConfig(), ServerConfig(), "off (--host-cache-gb GB turns it on)"),
        (EngineConfig(prefix_sharing=False), ServerConfig(), "off: with --no-prefix-sharing nothing"),
        (EngineConfig(eviction="lru", chunk_size=40), ServerConfig(), "least recently used first, 48 tokens"),
        (EngineConfig(), ServerConfig(store="postgresql://ada:secret@db/talks"), "postgresql://ada:***@db/talks"),
        (EngineConfig(), ServerConfig(store="memory"), "memory, kept"),
    ],
)
def test_the_announcement_says_what_is_off_and_hides_passwords(
    engine: EngineConfig, server: ServerConfig, part: str
) -> None:
    shown = announced(engine, server)
    assert part in shown and "secret" not in shown


def test_the_announcement_shows_the_tbt_target_beside_the_token_budget() -> None:
    assert "512 tokens at most (token budget), 50 ms while a stream decodes (TBT target)" in announced(
        EngineConfig(tbt_target=50), ServerConfig()
    )


@pytest.mark.parametrize("value", ["", " ", ","])
def test_a_key_variable_without_a_key_ends_the_start_with_2(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", value)
    assert main(["serve", "/no/such/model", "--store", "memory"]) == 2
    assert "HOLDFAST_API_KEY is set but holds no key" in capsys.readouterr().err


def test_the_announced_examples_are_valid() -> None:
    words = shlex.split(curl_line("http://h:1", "tiny", keyed=True))
    assert json.loads(words[-1])["model"] == "tiny"
    assert "authorization: Bearer $HOLDFAST_API_KEY" in words
    for keyed in (False, True):
        compile(python_lines("http://h:1", "tiny", keyed), "try it", "exec")
