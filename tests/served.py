"""`holdfast serve` as a process of its own, over a small random model that reads and writes bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.forked import CONSTANTS, NURSERY

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
}


processes: Any = subprocess
"""Starts servers. With the tests' fixtures it forks them; those of `anew` start as users' do."""


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "default"}


def free_port() -> int:
    """A port below those that the kernel gives to whoever asks for any, so that no other test gets it meanwhile.

    Processes look in places far from each other: two with the next port free may both get it.
    """
    with socket.socket() as probe:
        for port in range(10_000 + 101 * os.getpid() % 20_000, 32_000):
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no port is free")


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for a condition in another process, or until pytest's timeout."""
    while not condition():
        time.sleep(0.01)


def name_of(pid: int | str) -> str:
    """The kernel's name of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def make_checkpoint(directory: Path) -> Path:
    """A small Llama of random weights that reads and writes bytes."""
    directory.mkdir()
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def write_tokenizer(directory: Path) -> Tokenizer:
    """A tokenizer with a token for each byte, and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tokenizer


class Serving:
    """A `holdfast serve` process that is ready."""

    def __init__(self, process: Any, url: str, announced: str = "") -> None:
        self.process = process
        self.url = url
        self.announced = announced
        """The lines after the address, up to the end of the table."""
        self._clients: list[openai.OpenAI] = []

    def client(self, key: str = "one") -> openai.OpenAI:
        """A client, which is closed with the process. Left to Python's collector, its socket would warn in any test."""
        self._clients.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0))
        return self._clients[-1]

    def close(self) -> None:
        """Close all clients, and kill the process."""
        for client in self._clients:
            client.close()
        self.process.kill()

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics", headers={"authorization": "Bearer one"}).text
        found = re.search(rf"^holdfast_{name} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    def engine_pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split() if name_of(pid) not in ("", NURSERY)]

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """All engines stand still meanwhile, so that what runs goes on to run while a test looks at it."""
        engines = self.engine_pids()
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in engines:
                with suppress(ProcessLookupError):  # it was killed
                    os.kill(pid, signal.SIGCONT)

    def engine_pid(self) -> int:
        (pid,) = self.engine_pids()
        return pid


def serve(
    checkpoint: Path, *more: str, anew: bool = False, constants: Mapping[str, float] | None = None
) -> AbstractContextManager[Serving]:
    options = ["--cache-gb", "0.02", "--api-key", "one", "--api-key", "two", *more]
    return started(str(checkpoint), "--load-format", "random", *options, anew=anew, constants=constants)


def command(
    *arguments: str, cwd: Path | None = None, anew: bool = False, constants: Mapping[str, float] | None = None
) -> Any:
    """A process of the `holdfast` command, whose output and errors are read as text.

    `constants` are other values for constants of modules, by their full names. A new interpreter takes none.
    """
    assert not (anew and constants)
    pipe, start = subprocess.PIPE, subprocess if anew else processes
    words = [sys.executable, "-m", "holdfast.cli", *arguments]
    env = environment() | ({CONSTANTS: json.dumps(dict(constants))} if constants else {})
    return start.Popen(words, stdout=pipe, stderr=pipe, text=True, env=env, cwd=cwd or Path.cwd())


@contextmanager
def started(*options: str, anew: bool = False, constants: Mapping[str, float] | None = None) -> Iterator[Serving]:
    """`holdfast serve` with these options, where it finds the modules of this directory.

    `anew` starts a new interpreter for it, as users do. With Ray it is always a new one, as Ray starts others from it.
    """
    given = ("serve", "--port", "0", "--threads", "1", *options)
    anew = anew or "--ray" in options
    with command(*given, cwd=Path(__file__).parent, anew=anew, constants=constants) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            address = next((line for line in process.stdout if "address" in line), "")
            assert address, process.stderr.read()
            table = "".join(takewhile(str.strip, process.stdout))
            with closing(Serving(process, address.split()[1], table)) as serving:
                yield serving
        finally:
            process.kill()
