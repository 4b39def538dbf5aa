"""The reason of a start that fails on a Ray node: one line with the node and the cause, without Ray's trace.

Skipped without Ray: pip install 'holdfast[ray]', then pytest -m ray.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.spawner import make_spawner
from holdfast.engine.client.connection import EngineStartError
from holdfast.lm.config import EngineConfig
from tests.cluster.ray_nodes import Nodes, ray_nodes
from tests.served import ROOT, make_checkpoint

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
MANNERS = pytest.mark.parametrize("keep", [None, "reasons"], ids=["ends", "kept"])
"""Engines that end with their server, and engines that outlive it."""
PLACE = r"Ray node [\d.]+ \(\w{8}\)"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(1) as nodes:
        yield nodes


async def reason(nodes: Nodes, model: Path | str, keep: str | None, **options: Any) -> str:
    """Start an engine that cannot start. Returns the error."""
    config = EngineConfig(model=str(model), device="cpu", **{"load_format": "random", "cache_gb": 0.02} | options)
    spawner = make_spawner(config, ClusterConfig(ray=nodes.address, ray_keep=keep))
    try:
        with pytest.raises(EngineStartError) as error:
            await spawner.start(0, lambda stage: None)
    finally:
        await spawner.close()
        await end_all(nodes)
    print(error.value)
    return str(error.value)


async def end_all(nodes: Nodes) -> None:
    """End the kept engines, whose name the next test uses."""
    from holdfast.cluster.ray_cluster import visiting
    from holdfast.cluster.ray_places import Places

    with visiting(nodes.address):
        await Places("reasons").end()


@MANNERS
async def test_a_model_that_the_node_lacks_is_named_with_the_node(
    nodes: Nodes, keep: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes share this host's files, so their engines are asked for a path that is nowhere."""
    elsewhere = tmp_path / "elsewhere"
    for module in ("holdfast.cluster.ray_kept", "holdfast.engine.client.client"):
        importlib.import_module("holdfast.cluster.ray_cluster")
        found = importlib.import_module(module)
        monkeypatch.setattr(found, "for_other_hosts", lambda config, checkpoint: replace(config, model=str(elsewhere)))
    said = await reason(nodes, make_checkpoint(tmp_path / "model"), keep)
    assert re.fullmatch(rf"{PLACE}: model '{elsewhere}': {elsewhere} does not exist; give .*", said), said


@MANNERS
async def test_a_cache_that_is_too_large_is_refused_with_the_engines_own_words(
    nodes: Nodes, keep: str | None, tmp_path: Path
) -> None:
    said = await reason(nodes, make_checkpoint(tmp_path / "model"), keep, cache_gb=100_000.0)
    assert re.match(rf"{PLACE}: ", said) and "100000" in said and "Traceback" not in said, said


@MANNERS
async def test_an_engine_that_the_system_kills_while_it_starts_may_lack_memory(
    nodes: Nodes, keep: str | None, tmp_path: Path
) -> None:
    starting = asyncio.create_task(reason(nodes, make_checkpoint(tmp_path / "model"), keep))
    while not (engines := engines_below(nodes.process_id)):
        await asyncio.sleep(0.05)
    for pid in engines:
        os.kill(pid, signal.SIGKILL)
    said = await starting
    assert re.match(PLACE, said) or f"on {PLACE}" in said or re.search(PLACE, said), said
    assert said.endswith("was killed by SIGKILL; the system may be out of memory"), said


@MANNERS
async def test_a_node_without_holdfast_is_told_apart_from_one_with_another_version(
    keep: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # Ray lets nodes import from the directory in which a server runs.
    model = make_checkpoint(tmp_path / "model")
    other = tmp_path / "other"
    shutil.copytree(ROOT / "holdfast", other / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    version = other / "holdfast" / "core" / "version.py"
    version.write_text(re.sub(r'"\d[\w.]*"', '"9.9.9"', version.read_text()))
    with ray_nodes(0) as nodes:
        bare = nodes.add(str(tmp_path))
        said = await reason(nodes, model, keep)
        expected = (
            r"Ray could not start replica 0: on [\d.]+: ModuleNotFoundError: No module named 'holdfast'; install "
            r"Holdfast there, in the same version as here \(Holdfast [\d.]+ on Python [\d.]+\)"
        )
        assert re.fullmatch(expected, said), said
        nodes.kill(bare)
        nodes.add(str(other))
        said = await reason(nodes, model, keep)
        assert re.fullmatch(rf"{PLACE} has Holdfast 9\.9\.9 on Python .*, and this host has Holdfast .*", said), said


def test_a_replica_larger_than_any_node_is_refused_with_both_sizes() -> None:
    from holdfast.cluster.ray_cluster import room_of

    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0}]
    room = room_of(EngineConfig(tp=2, pp=2, device="cuda"), 1.5, nodes)
    assert room.words == "1.5 CPUs and 4 GPUs" and room_of(EngineConfig(tp=2, device="cpu"), 1, nodes).gpus == 0
    with pytest.raises(
        EngineStartError, match=r"tp is 4 and pp is 2, so a replica needs 8 GPUs of one node, and .* has 4"
    ):
        room_of(EngineConfig(tp=4, pp=2), 1.0, nodes)
    with pytest.raises(EngineStartError, match="device is cuda, and no node of the Ray cluster has a GPU"):
        room_of(EngineConfig(device="cuda"), 1.0, [{"CPU": 8.0}])


def engines_below(process: int) -> list[int]:
    """Engine processes among the descendants of a process."""
    found, open_ = [], [process]
    while open_:
        below = [int(pid) for each in Path(f"/proc/{open_.pop()}/task").glob("*/children") for pid in words(each)]
        found += [pid for pid in below if "holdfast.engine.process.serve" in words(Path(f"/proc/{pid}/cmdline"))]
        open_ += below
    return found


def words(file: Path) -> list[str]:
    """The words of a file of the kernel; none if its process has ended."""
    with suppress(OSError):
        return file.read_text().replace("\0", " ").split()
    return []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("The actor died.\n\tip: 10.0.0.7\nWorker exit type: SYSTEM_ERROR Worker exit detail: End of file.\n" * 9,
         "on 10.0.0.7: the engine's Ray process has ended (SYSTEM_ERROR); the logs of its node may say why"),
        ("Task was killed due to the node running low on memory.\nMemory on the node (IP: 10.0.0.7) was 30GB",
         "the node was low on memory, so Ray ended the engine's process"),
        ("ray::f() (pid=1, ip=10.0.0.7, x=2)\n  File a, line 1\nOSError: no\n\nlast\nValueError: too large",
         "on 10.0.0.7: ValueError: too large"),
        ("two\n  lines", "two lines"),
    ],
)  # fmt: skip
def test_errors_of_ray_become_one_line(text: str, line: str) -> None:
    from ray.exceptions import RayError

    from holdfast.cluster.ray_cluster import one_line

    assert one_line(RayError(text)) == line
