"""Shared by the engine's tests: a small random checkpoint with its tokenizer, and engines that run it."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.core.config import AppConfig
from holdfast.core.stages import Stages
from holdfast.engine.link import Parent
from holdfast.engine.messages import AppInfo, StartApp
from holdfast.engine.process import in_service
from holdfast.engine.process.apps import AppEngine, find
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import cost_profile
from tests.checkpoints import make
from tests.tokenizers_made import byte_level

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights for 4,096 tokens. Its text is gibberish, but reproducible."""
    directory = tmp_path_factory.mktemp("models") / "random-llama"
    make(directory, "Llama", max_position_embeddings=4096, eos_token_id=1)
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


SMALL: dict[str, Any] = {
    "cache_gb": 0.01,
    "threads": 1,
    "max_sequences": 8,
    "token_budget": 64,
    "max_waiting": 16,
    "device": "cpu",
}


@pytest.fixture
def small(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EngineConfig]:
    """Makes configurations of the checkpoint that start fast and cache files in the test's own directory.

    An engine in this process measures its profile as briefly as it can.
    """
    monkeypatch.setattr(cost_profile, "SECONDS_A_POINT", 0.0)
    monkeypatch.setattr(in_service, "SECONDS", 0.3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda **changes: EngineConfig(**{"model": str(checkpoint), **SMALL, **changes})


def build_app(config: AppConfig) -> AppInfo:
    """Build the engine of the one application of `config` in this process, and close it. Raises errors of its start."""
    (app,) = config.app
    unheard = cast(Parent, SimpleNamespace(send=lambda message: None))
    engine = AppEngine(StartApp(app, config, 0.0, 1), find(app), unheard)
    try:
        return engine.info(Stages(0.0, time.monotonic))
    finally:
        engine.close()


def wait_for_end(pid: int, seconds: float = 200.0) -> None:
    """Wait until a process ends, whether or not it is our child. Raises TimeoutError."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not poller.poll(seconds * 1000):
            raise TimeoutError(f"process {pid} still runs after {seconds} s")
    finally:
        os.close(handle)
