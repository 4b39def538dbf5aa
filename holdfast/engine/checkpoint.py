"""A checkpoint's files: the directory of a model name, bounded reading, and tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.config import BUILTIN_HEAD, BUILTIN_MODEL
from holdfast.engine import hub
from holdfast.engine.gguf import described
from holdfast.files.cache import cache_directory
from holdfast.files.gguf import gguf_of, name_of
from holdfast.files.regular import check_regular_below, create_file, open_file
from holdfast.lm.config import EngineConfig

JSON_LIMIT = 16 << 20
"""Most bytes of a configuration file."""
TOKENIZER_LIMIT = 256 << 20
"""Most bytes of tokenizer.json."""
TEMPLATE_LIMIT = 1 << 20
"""Most bytes of a chat template."""
DIGESTED = (".safetensors", ".gguf", ".bin", ".json", ".jinja")
"""Suffixes of the files that decide what a model answers."""
SAMPLES, SAMPLE_BYTES = 32, 4096
"""Number and size of the samples of each file in a checkpoint's digest, from its first bytes to its last."""
CONVERSION_SECONDS = 300
"""Most seconds that converting a tokenizer may take."""

_CONVERT = """\
import sys
try:
    from transformers import AutoTokenizer
except ImportError:
    sys.exit("Transformers is not installed (pip install 'holdfast[hf]')")
try:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
except Exception as error:
    sys.exit(f"{type(error).__name__}: {error}")
if backend is None:
    sys.exit(f"{type(tokenizer).__name__} has no fast form")
backend.save(sys.argv[2])
"""


class NoTokenizer(ValueError):
    """A checkpoint without any tokenizer file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A directory that holds a model."""

    name: str
    """The name under which the model is served; never a path."""
    directory: Path

    @classmethod
    def of(cls, config: EngineConfig) -> Checkpoint:
        """The checkpoint that a configuration names. Its name is the first of the configuration's served names."""
        found = cls.find(
            config.model,
            config.revision,
            weights=config.load_format != "random",
            code=config.trust_remote_code,
        )
        return replace(found, name=config.served_model_name[0]) if config.served_model_name else found

    @classmethod
    def find(cls, model: str, revision: str | None = None, *, weights: bool = True, code: bool = False) -> Checkpoint:
        """The checkpoint of a model name: the built-in one, else a directory or a GGUF file, else one of the hub.

        `revision`, `weights` and `code` are those of `hub.snapshot`. Raises ValueError, in one line, with the directory
        that it looked for, or with the reason why the hub's model is unavailable.
        """
        if model in (BUILTIN_MODEL, BUILTIN_HEAD):
            directory = Path(__file__).resolve().parent.parent / "builtin" / model
        else:
            directory = Path(model).expanduser().resolve()
        if not directory.exists() and hub.is_id(model):
            return cls(model, hub.snapshot(model, revision, weights=weights, code=code))
        if revision is not None:
            raise ValueError(f"revision is {revision}, which is for a model of the hub, and {model!r} is here; drop it")
        if (file := gguf_of(directory)) is not None:
            return cls(name_of(file), described(file))
        if not (directory / "config.json").is_file():
            there = "has no config.json" if directory.is_dir() else "is not a directory"
            what = there if directory.exists() else "does not exist"
            raise ValueError(
                f"model {model!r}: {directory} {what}; give a Hugging Face checkpoint directory, a GGUF file, an id "
                f"of the hub (owner/name), or {BUILTIN_MODEL!r}"
            )
        try:
            check_regular_below(directory)  # libraries open some of these files themselves
        except OSError as error:
            raise ValueError(f"model {model!r}: {error.filename}: {error.strerror}") from None
        return cls(BUILTIN_MODEL if model == BUILTIN_MODEL else directory.name, directory)


def weights_digest(directory: Path) -> str:
    """A digest of a checkpoint's files: their names and sizes, and samples of their bytes. Empty without a directory.

    Reading all bytes of a large model would take minutes. Weights that differ at all differ nearly everywhere, so the
    samples show it.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if path.suffix not in DIGESTED or not path.is_file():
            continue
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            for part in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * part // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def settled(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration, with the checkpoint's directory in place of a hub id: other processes need not look it up."""
    if config.model == BUILTIN_MODEL or Path(config.model).expanduser().exists():
        return config
    names = config.served_model_name or (checkpoint.name,)
    return replace(config, model=str(checkpoint.directory), revision=None, served_model_name=names)


def for_other_hosts(config: EngineConfig, checkpoint: Checkpoint) -> EngineConfig:
    """The configuration for an engine on another host, which finds the model and adapters itself.

    Paths are absolute: they must lead to the same files there. A hub model is named by id and commit; the host fetches
    that commit if its cache lacks it.
    """
    adapters = tuple(f"{name}={Path(path).expanduser().resolve()}" for name, path in config.adapters)
    config = replace(config, adapter=adapters, served_model_name=config.served_model_name or (checkpoint.name,))
    if config.draft_model and (head := Path(config.draft_model).expanduser()).exists():
        config = replace(config, draft_model=str(head.resolve()))
    if config.model == BUILTIN_MODEL:
        return config
    if not Path(config.model).expanduser().exists():
        # In the hub's cache, snapshots/<commit> holds the files of a commit.
        commit = checkpoint.directory.name if checkpoint.directory.parent.name == "snapshots" else config.revision
        return replace(config, revision=commit)
    return replace(config, model=str(Path(config.model).expanduser().resolve()))


def read_json(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The object in a JSON file. With `missing_ok`, a missing file reads as empty. Raises ValueError."""
    if missing_ok and not path.is_file():
        return {}
    text = read_text(path, JSON_LIMIT)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; a JSON object was expected")
    return value


def read_text(path: Path, limit: int) -> str:
    """The text of a file of at most `limit` bytes. Raises ValueError for a larger or unreadable one."""
    try:
        with open_file(path) as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise ValueError(f"{path} is larger than {limit} bytes, the limit for such a file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: byte {error.start} is not UTF-8") from error


def tokenizer_file(directory: Path) -> Path:
    """The checkpoint's tokenizer.json. If it is missing, it is converted once and kept in the user's cache.

    The conversion loads Transformers and so torch, in a process of its own. Raises NoTokenizer if there is none to
    convert, and ValueError with the reason if the conversion fails.
    """
    own = directory / "tokenizer.json"
    if own.is_file():
        return own
    sources = sorted(p for pattern in ("tokenizer*", "vocab*", "merges*", "*.model") for p in directory.glob(pattern))
    if not sources:
        raise NoTokenizer(f"{directory} has no tokenizer.json and no other tokenizer file")
    state = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in sources]
    key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
    cache = cache_directory() / "tokenizers"
    converted = cache / f"{key}.json"
    if not converted.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache) as nameless:  # nameless, so that nothing is left after a kill
            _convert(directory, nameless.fileno())
            nameless.seek(0)
            fresh = cache / f"{key}.{os.getpid()}"
            with create_file(fresh) as file:
                file.write(nameless.read())
            fresh.replace(converted)
    return converted


def _convert(directory: Path, target: int) -> None:
    """Write the checkpoint's tokenizer.json into a file that is open. Raises ValueError."""
    command = [sys.executable, "-P", "-c", _CONVERT, str(directory), f"/dev/fd/{target}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CONVERSION_SECONDS,
            check=False,
            pass_fds=(target,),
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"{directory} has no tokenizer.json, and converting took over {CONVERSION_SECONDS} s"
        ) from error
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"{directory} has no tokenizer.json, and its tokenizer cannot be converted: {reason}")
