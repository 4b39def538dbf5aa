"""Writes what a GGUF file says of its model as the files of a Hugging Face checkpoint: all but the weights.

Run as `python -m holdfast.lm.models.gguf_metadata FILE DIRECTORY`, in a process of its own: the file is from strangers,
and reading a tokenizer loads Transformers.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.files.gguf import parts_of
from holdfast.files.regular import samples_of
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.gguf_config import config_of
from holdfast.lm.models.gguf_hybrids import HYBRIDS
from holdfast.lm.models.gguf_reader import GGUF_FILE, read_gguf
from holdfast.lm.models.gguf_values import Metadata

SAMPLES = 64
"""Number of places of a file that its digest reads."""
SAMPLE_BYTES = 4096


def metadata_of(parts: list[Path]) -> Metadata:
    """The metadata of a model, from its GGUF files. The first one has the keys."""
    readers = [read_gguf(part) for part in parts]
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    fields = {key: field.contents() for key, field in readers[0].fields.items() if not key.startswith("GGUF.")}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in tensors.items()}
    return Metadata(fields, shapes, lambda name: [float(value) for value in tensors[name].data.reshape(-1)])


def digest_of(paths: list[Path]) -> str:
    """A digest of samples of files. Models with other weights have another digest."""
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.stat().st_size).encode())
        for sample in samples_of(path, SAMPLES, SAMPLE_BYTES):
            found.update(sample)
    return found.hexdigest()


def write(path: Path, directory: Path) -> None:
    """Write config.json and the tokenizer's files. Raises UnsupportedCheckpoint."""
    parts = parts_of(path)
    path, metadata = parts[0], metadata_of(parts)
    config = config_of(metadata) | {"gguf": {"digest": digest_of(parts)}}
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / GGUF_FILE).write_text(json.dumps({"file": str(path)}))
    if "tokenizer.ggml.tokens" in metadata.fields:
        write_tokenizer(path, directory, metadata.fields)


def write_tokenizer(path: Path, directory: Path, fields: Mapping[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the chat template."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # For the others, AutoTokenizer would first read a config, which Transformers cannot do for these.
    kind = PreTrainedTokenizerFast if fields["general.architecture"] in HYBRIDS else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
        tokenizer.backend_tokenizer.save(str(directory / "tokenizer.json"))
    except Exception as error:  # Transformers raises many kinds for what it cannot read
        raise UnsupportedCheckpoint(f"the tokenizer in {path.name} cannot be read: {error}") from error
    settings = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    settings["chat_template"] = fields.get("tokenizer.chat_template")
    kept = {name: value for name, value in settings.items() if value is not None}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except UnsupportedCheckpoint as reason:
        sys.exit(str(reason))
