"""The workers of a run share the rewriting of asserts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.assertion import rewrite

from tests.rewriting import keep_rewritten, modules_of, rewrite_a_share


def test_a_module_is_rewritten_once_and_imported_from_the_cache(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "test_kept.py"
    module.write_text("def test_sum():\n    three = 3\n    assert three == 4\n")
    keep_rewritten(module, request.config)
    (kept,) = (tmp_path / "__pycache__").iterdir()
    assert kept == rewrite.get_cache_dir(module) / f"test_kept{rewrite.PYC_TAIL}"
    code = rewrite._read_pyc(module, kept)
    assert code is not None and "@pytest_ar" in code.co_names
    monkeypatch.setattr(rewrite, "_rewrite_test", lambda *_: pytest.fail("rewritten again"))
    keep_rewritten(module, request.config)


def test_an_import_says_what_is_wrong_with_a_module(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    module = tmp_path / "test_wrong.py"
    module.write_text("assert (")
    keep_rewritten(module, request.config)
    assert not [*tmp_path.glob("__pycache__/*")]


def test_every_worker_lists_the_modules_in_one_order(request: pytest.FixtureRequest) -> None:
    listed = [*modules_of(request.config)]
    assert Path(__file__) in listed and len({*listed}) == len(listed)


def test_two_workers_rewrite_each_module_once(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (tmp_path / f"test_{number}.py").write_text("def test_two():\n    assert 2 == 2\n")
    work, done = rewrite._rewrite_test, list[str]()

    def noted(module: Path, config: pytest.Config) -> Any:
        done.append(module.name)
        return work(module, request.config)

    monkeypatch.setattr(rewrite, "_rewrite_test", noted)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    counts = []
    for worker in ("gw0", "gw1"):
        rewrite_a_share(worker_of(request.config, tmp_path, workerid=worker, workercount=2))
        counts.append(len(done))
    assert counts == [3, 5] and sorted(done) == [f"test_{number}.py" for number in range(5)]


def worker_of(config: pytest.Config, directory: Path, **worker: Any) -> Any:
    """The configuration of a worker of a run of these tests."""
    return SimpleNamespace(
        args=[str(directory)],
        invocation_params=config.invocation_params,
        stash=config.stash,
        workerinput=worker,
    )
