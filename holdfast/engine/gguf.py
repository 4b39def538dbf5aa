"""Models in GGUF files: the directory that stands for a file, with its configuration and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.files.cache import gguf_cache
from holdfast.files.gguf import parts_of

SECONDS = 300
"""Most seconds that reading a file's metadata may take."""


def described(path: Path) -> Path:
    """A directory with config.json and the tokenizer's files of a GGUF file. It is made once and kept in the cache.

    A process of its own reads the file. Raises ValueError with the reason if it cannot. If any part of the model has
    changed, it is another directory.
    """
    state = [(str(part), (stat := part.stat()).st_size, stat.st_mtime_ns) for part in parts_of(path)]
    key, cache = hashlib.sha256(json.dumps(state).encode()).hexdigest(), gguf_cache()
    kept = cache / key
    if kept.is_dir():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=".making-", dir=cache))
    try:
        _describe(path, fresh)
        try:
            fresh.rename(kept)
        except OSError:
            if not kept.is_dir():  # another process made it meanwhile
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return kept


def _describe(path: Path, directory: Path) -> None:
    """Write the files of a directory that stands for a GGUF file. Raises ValueError."""
    command = [sys.executable, "-P", "-m", "holdfast.lm.models.gguf_metadata", str(path), str(directory)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"model {path}: reading its metadata took over {SECONDS} s") from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"the process that reads it ended with {done.returncode}"])[-1]
        raise ValueError(f"model {path}: {reason}")
