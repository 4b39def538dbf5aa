"""Models in GGUF files: the directory that stands for a file, with its configuration and its tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SECONDS = 300
"""Most seconds that reading a file's metadata may take."""
LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")


def gguf_of(place: Path) -> Path | None:
    """The GGUF file that a path names; of a directory without config.json, the one that it holds. None: there is none.

    Raises ValueError for a directory that holds several models.
    """
    if place.suffix == ".gguf" and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").is_file():
        return None
    found = sorted(path for path in place.glob("*.gguf") if not LATER_PART.fullmatch(path.name))
    if len(found) > 1:
        raise ValueError(f"{place} holds {len(found)} models in GGUF; name one, such as {found[0]}")
    return found[0] if found else None


def name_of(path: Path) -> str:
    """The name of the model in a GGUF file: the file's, without its ending and the number of its part."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)


def described(path: Path) -> Path:
    """A directory with config.json and the tokenizer's files of a GGUF file. It is made once and kept in the cache.

    A process of its own reads the file. Raises ValueError with the reason if it cannot.
    """
    stat = path.stat()
    key = hashlib.sha256(json.dumps([str(path), stat.st_size, stat.st_mtime_ns]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "gguf"
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
