"""The locks of the containers: hashes for every file, and all that the package and its extras need."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from scripts.container_lock import COMMON, CUDA, EXTRAS, ROOT, command, requirements, split

HASH = "--hash=sha256:" + "0" * 64
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pinned(text: str) -> dict[str, str]:
    """Return the version of each package of a lock."""
    body = text.partition("\n")[2]
    return dict(re.findall(r"^([\w.-]+)==(\S+)", "\n".join(requirements(body)), re.MULTILINE))


def test_pytorch_and_its_cuda_libraries_are_apart() -> None:
    names = ["httpx==1", "nvidia-cublas==2", "torch==3", "torchao==4", "triton==5", "cuda-toolkit==6"]
    common, cuda = split("\n".join(f"{name} \\\n    {HASH} \\\n    {HASH}" for name in names))
    assert [each.split()[0] for each in common] == ["httpx==1", "torchao==4"]
    assert [each.split()[0] for each in cuda] == ["nvidia-cublas==2", "torch==3", "triton==5", "cuda-toolkit==6"]
    assert all(each.count("--hash") == 2 for each in common + cuda)


@pytest.mark.parametrize("lock", [f"a==1 \\\n    {HASH}\nb==2", ""])
def test_a_line_without_a_hash_is_refused(lock: str) -> None:
    with pytest.raises(ValueError, match=r"has no hash: (b==2|it is empty)"):
        list(requirements(lock))


def test_the_locks_satisfy_what_the_package_asks_for() -> None:
    found = {name.lower(): version for path in (COMMON, CUDA) for name, version in pinned(path.read_text()).items()}
    wanted = [*PROJECT["dependencies"], *(each for extra in EXTRAS for each in PROJECT["optional-dependencies"][extra])]
    for text in wanted:
        need = Requirement(text)
        version = found.get(need.name.lower().replace("_", "-"))
        assert version is not None, need.name
        assert need.specifier.contains(version), f"{need} and {version}"


def test_pytorch_and_triton_are_those_of_the_development_environment() -> None:
    makefile, cuda = (ROOT / "Makefile").read_text(), pinned(CUDA.read_text())
    for name in ("torch", "triton"):
        assert re.search(rf"^{name.upper()} := {name}=={re.escape(cuda[name])}$", makefile, re.MULTILINE)
    assert f"torch=={cuda['torch']}" in (ROOT / "docker" / "cpu.Dockerfile").read_text()


def test_the_locks_name_no_host() -> None:
    for path in (COMMON, CUDA):
        assert "://" not in path.read_text() and "index-url" not in path.read_text()


def test_the_containers_copy_only_what_reaches_their_build() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in (ROOT / "docker").iterdir():
        text = path.read_text()
        copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
        copied += re.findall(r"type=bind,source=([^,]+)", text)
        assert set(copied) <= kept, path.name
        assert "--require-hashes" in text and re.search(r"^USER 10001", text, re.MULTILINE)


def test_every_extra_is_asked_for() -> None:
    words = command("uv")
    assert [words[at + 1] for at, word in enumerate(words) if word == "--extra"] == list(EXTRAS)
    assert set(EXTRAS) <= PROJECT["optional-dependencies"].keys()
