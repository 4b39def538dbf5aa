"""Settings that every test runs under."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import certifi
import httpx
import pytest
import torch
from hypothesis import HealthCheck, settings

from holdfast.engine import spawn
from holdfast.engine.ranks import ranks
from tests.after_failure import pytest_runtest_makereport, pytest_runtest_teardown  # noqa: F401  # hooks
from tests.forked import Forking
from tests.long import mark_long
from tests.rewriting import rewrite_a_share

# A slow machine must not fail a test: none is timed. Runs are derandomized so that a failure repeats. `make test-long`
# has more examples. `make fuzz` has another profile, in which --hypothesis-seed says which examples are drawn.
settings.register_profile(
    "holdfast",
    deadline=None,
    derandomize=True,
    print_blob=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("long", settings.get_profile("holdfast"), max_examples=200)
settings.register_profile("fuzz", settings.get_profile("holdfast"), derandomize=False, database=None, max_examples=2000)
settings.load_profile("holdfast")

# Triton's kernels are compiled where there is a GPU and interpreted elsewhere; Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Share the rewriting of asserts, and keep Python's garbage collector from looking at all modules and tests.

    It would do so again and again, now and later. Later it looks more seldom: by default, it took up to a fifth of the
    time of tests of whole servers.
    """
    gc.disable()
    rewrite_a_share(session.config)
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 10)
        gc.enable()
        if "triton" in sys.modules and not torch.cuda.is_available():
            from tests.interpreter import remember_the_language

            remember_the_language()
        if "fastapi" in sys.modules:
            from tests import quick_apps

            quick_apps.make_routes_when_asked()
            quick_apps.copy_empty_stores()
            quick_apps.end_soon()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long(items, whole=not config.getoption("lf", False) and not any("::" in each for each in config.args))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="session")
def data_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests, and the processes that they start, leave the user's data alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(autouse=True, scope="session")
def one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients load one authority's certificate. All would take each client 20 ms, and tests make thousands."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    file = tmp_path_factory.mktemp("authorities") / "one.pem"
    file.write_text(f"{first}{end}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        patch.delenv("SSL_CERT_DIR", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_clients() -> Iterator[None]:
    """HTTP clients that name no limit wait for as long as pytest does, and not for 5 s: a machine may be that slow."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("connect", "read", "write", "pool"):
            patch.setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, limit, 300.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def patient_remote_tier() -> Iterator[None]:
    """Services of the remote tier, which tests run in their own process, may answer late on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("CONNECT_SECONDS", "ANSWER_SECONDS"):
            patch.setattr(f"holdfast.lm.execution.remote_store.{limit}", 120.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_engines() -> Iterator[Forking]:
    """Engines, ranks and servers that tests start are forked.

    With a GPU all start as usual: CUDA may not work after a fork.
    """
    forking = Forking()
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            for module in (spawn, ranks):
                patch.setattr(module, "subprocess", forking)
            for name in ("served", "tests.served"):  # tests import it by either name
                patch.setattr(f"{name}.processes", forking)
        yield forking
    forking.close()


@pytest.fixture
def started_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and ranks of the test start as users' do, in new processes."""
    for module in (spawn, ranks):
        monkeypatch.setattr(module, "subprocess", subprocess)
