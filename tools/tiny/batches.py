"""Streams batches of training rows: writer processes make dialogues and send them, tokenized, through pipes."""

import argparse
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .dialogues import write_dialogue, write_text, write_tool_dialogue
from .tokens import END_ID, PAD_ID, encode_dialogue

BUCKETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # lengths that rows are padded to, in tokens
PLAIN_TEXT = 0.03  # share of rows without a chat
WITH_TOOLS = 0.3  # share of the chats that have tools; they are shorter than the others
PATIENCE = 120.0  # seconds to wait for a batch before it is an error

Batch = tuple[NDArray[np.uint16], NDArray[np.bool_]]  # ids [rows, length], said by the assistant [rows, length]


def examples(tokenizer: Tokenizer, seed: int) -> Iterator[tuple[list[int], list[bool]]]:
    """An endless stream of training rows."""
    rng = Random(seed)
    while True:
        if rng.random() < PLAIN_TEXT:
            ids = [*tokenizer.encode(write_text(rng, "train"), add_special_tokens=False).ids, END_ID]
            yield ids, [True] * len(ids)
        else:
            write = write_tool_dialogue if rng.random() < WITH_TOOLS else write_dialogue
            yield encode_dialogue(tokenizer, write(rng, "train"))


def batches(tokenizer: Tokenizer, seed: int, batch_tokens: int) -> Iterator[Batch]:
    """Batches of rows of similar length, so that little is padding. Each has about `batch_tokens` tokens."""
    waiting: dict[int, list[tuple[list[int], list[bool]]]] = {length: [] for length in BUCKETS}
    for ids, said in examples(tokenizer, seed):
        length = next((length for length in BUCKETS if length >= len(ids)), BUCKETS[-1])
        rows = waiting[length]
        rows.append((ids[:length], said[:length]))
        if len(rows) < max(1, batch_tokens // length):
            continue
        batch_ids = np.full((len(rows), length), PAD_ID, np.uint16)
        batch_said = np.zeros((len(rows), length), np.bool_)
        for row, (row_ids, row_said) in enumerate(rows):
            batch_ids[row, : len(row_ids)] = row_ids
            batch_said[row, : len(row_said)] = row_said
        waiting[length] = []
        yield batch_ids, batch_said


class Writers:
    """Writer processes and the batches that are ready.

    The processes end when this one does, because their pipes break.
    """

    def __init__(self, tokenizer: Path, count: int, batch_tokens: int, seed: int) -> None:
        self._ready: queue.Queue[Batch] = queue.Queue(maxsize=64)
        command = [sys.executable, "-m", __name__, str(tokenizer), str(batch_tokens)]
        self._processes = [
            subprocess.Popen([*command, str(1 + seed * 1000 + index)], stdout=subprocess.PIPE) for index in range(count)
        ]
        for process in self._processes:
            threading.Thread(target=self._receive, args=(process.stdout,), daemon=True).start()

    def __enter__(self) -> "Writers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()

    def get(self) -> Batch:
        """The next batch. Raises queue.Empty if none came within `PATIENCE`."""
        return self._ready.get(timeout=PATIENCE)

    def _receive(self, pipe: BinaryIO) -> None:
        while header := pipe.read(8):
            rows, length = np.frombuffer(header, np.uint32).tolist()
            ids = np.frombuffer(pipe.read(2 * rows * length), np.uint16)
            said = np.frombuffer(pipe.read(rows * length), np.bool_).copy()
            self._ready.put((ids.reshape(rows, length), said.reshape(rows, length)))


def main() -> None:
    """Write batches to standard output until nobody reads: rows and length (uint32), ids (uint16), said (bool)."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("batch_tokens", type=int)
    parser.add_argument("seed", type=int)
    options = parser.parse_args()
    out = sys.stdout.buffer
    try:
        for ids, said in batches(Tokenizer.from_file(str(options.tokenizer)), options.seed, options.batch_tokens):
            out.write(np.array(ids.shape, np.uint32).tobytes() + ids.tobytes() + said.tobytes())
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone, which is the normal end


if __name__ == "__main__":
    main()
