"""Pin what the containers install: `make container-lock` writes deploy/requirements.lock and its part for GPUs.

uv resolves the newest versions that pyproject.toml allows, with the hash of each file. PyTorch and what only its CUDA
build needs go to a file of their own, because the container for CPUs has another build of PyTorch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMON, CUDA = (ROOT / "deploy" / name for name in ("requirements.lock", "requirements-cuda.lock"))
EXTRAS = ("cells", "cuda", "gguf", "grpc", "hf", "otel", "postgres", "redis")
"""The extras that the containers have."""
PYTHON = "3.12"
"""Python of the containers."""
FOR_CUDA = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")
HEADER = "# {}, for Python {}, written by 'make container-lock'.\n"


def command(uv: str) -> list[str]:
    """Return uv's command line. It reads the pin of PyTorch from standard input."""
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    return [
        uv, "pip", "compile", "pyproject.toml", "-", *extras, "--python-version", PYTHON,
        "--python-platform", "x86_64-manylinux_2_28", "--generate-hashes", "--no-header", "--no-annotate",
        "--no-emit-index-url", "--no-emit-find-links", "--quiet",
    ]  # fmt: skip


def requirements(lock: str) -> Iterator[str]:
    """Yield each requirement of a lock, with the lines of its hashes. Raises ValueError for one without a hash."""
    for each in re.split(r"\n(?=\S)", lock.strip()):
        if "--hash=sha256:" not in each:
            raise ValueError(f"this line of the lock has no hash: {each.splitlines()[0] if each else 'it is empty'}")
        yield each


def split(lock: str) -> tuple[list[str], list[str]]:
    """Return the requirements of all containers, and those of the container for GPUs. Raises ValueError."""
    every = list(requirements(lock))
    return [each for each in every if not FOR_CUDA.match(each)], [each for each in every if FOR_CUDA.match(each)]


def write(path: Path, title: str, found: Iterable[str]) -> None:
    """Write a lock."""
    path.write_text(HEADER.format(title, PYTHON) + "".join(f"{each}\n" for each in found))


def main(uv: str, torch: str) -> int:
    """Resolve, and write both locks. Returns the exit code."""
    done = subprocess.run(command(uv), input=torch, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    common, cuda = split(done.stdout)
    write(COMMON, "What all containers install", common)
    write(CUDA, "PyTorch with CUDA, for the container for GPUs", cuda)
    print(f"{COMMON.relative_to(ROOT)}: {len(common)} packages; {CUDA.relative_to(ROOT)}: {len(cuda)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
