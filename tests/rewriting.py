"""pytest's rewriting of asserts, which the workers of a run share: each worker imports all modules of tests.

Without this, each would rewrite all of them in a fresh clone, in the same order and at the same time: a minute of
processor time for four workers. What is rewritten goes to pytest's own cache, where the other workers find it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_a_share(config: pytest.Config) -> None:
    """Rewrite this worker's share of the modules of tests, unless the cache has them."""
    worker = getattr(config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    own, count = int(worker["workerid"].removeprefix("gw")), int(worker["workercount"])
    for module in [*modules_of(config)][own::count]:
        keep_rewritten(module, config)


def modules_of(config: pytest.Config) -> Iterator[Path]:
    """The modules of tests in the files and directories that the run was given, in the same order for every worker."""
    for each in config.args:
        place = Path(config.invocation_params.dir, each.partition("::")[0])
        yield from sorted(place.rglob("test_*.py")) if place.is_dir() else [place]


def keep_rewritten(module: Path, config: pytest.Config) -> None:
    """Put a module with rewritten asserts into the cache, unless it is there. Leaves errors to the import."""
    kept = rewrite.get_cache_dir(module) / f"{module.stem}{rewrite.PYC_TAIL}"
    try:
        if rewrite._read_pyc(module, kept) is None and rewrite.try_makedirs(kept.parent):
            source_hash, code = rewrite._rewrite_test(module, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, kept)
    except (OSError, SyntaxError):
        return
