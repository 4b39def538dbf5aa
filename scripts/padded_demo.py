"""`make demo-padded`: serve two models that only Transformers' own code runs, and count idle tokens by policy.

Writes a Bloom and a Mamba of random weights, so answers are gibberish. Exits with 0 if every answer came, the second
turn of each conversation found the state of the first, and each policy gave the same tokens; 1 otherwise.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from openai import OpenAI
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from holdfast.core.config import SchedulerName
from holdfast.core.types import Request, SamplingParams
from holdfast.engine.process.build import build
from holdfast.lm.config import EngineConfig
from scripts.demo import START_SECONDS, free_port

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "random-bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "random-mamba": ("Mamba", {"num_hidden_layers": 2, "state_size": 16}),
}
POLICIES: tuple[SchedulerName, ...] = (
    "stall-free",
    "run-to-completion",
    "prefill-apart",
    "shaping",
    "embedding",
    "orca",
)
REQUESTS, BATCH = 20, 4
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OPENING = "Hi! My name is Ada. I live in Lisbon, and I have three cats who like to sleep on my desk."


def main() -> int:
    """Serve, converse, count. Returns the exit code."""
    console = Console(highlight=False)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console.print(Panel.fit("Models that only Transformers' own code runs, on padded rows", style="cyan"))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for name in MODELS:
                write_model(Path(scratch) / name, name)
                with server(console, Path(scratch) / name) as url:
                    converse(console, url)
            count_idle_tokens(console, Path(scratch) / "random-bloom")
    except Exception as error:
        console.print(Text(f"\nthe demo failed: {error}", style="bold red"))
        return 1
    return 0


def write_model(directory: Path, name: str) -> None:
    """Write a model of random weights, and a tokenizer with a token for each byte."""
    stem, differences = MODELS[name]
    torch.manual_seed(0)
    settings = getattr(transformers, f"{stem}Config")(**SIZES | differences)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


@contextmanager
def server(console: Console, directory: Path) -> Iterator[str]:
    """Run `holdfast serve` on a free port. Prints the executor from its announcement, and yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "holdfast.cli", "serve", str(directory), "--port", str(port), "--store", "memory"]
    command += ["--max-model-len", "2048", "--cache-gb", "0.2"]
    console.print(Text(f"\n$ holdfast serve {directory.name} --port {port}", style="dim"))
    began = time.monotonic()
    errors = directory.with_suffix(".log")
    with errors.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        if not any("address" in line for line in process.stdout):
            raise RuntimeError(f"the server ended with exit code {process.wait()}: {errors.read_text()}")
        lines = list(takewhile(str.strip, process.stdout))
        first = next(index for index, line in enumerate(lines) if line.split()[0] == "executor")
        rest = takewhile(lambda line: line.startswith("      "), lines[first + 1 :])
        console.print(Text(" ".join(" ".join((lines[first], *rest)).split()), style="bold"))
        if (seconds := time.monotonic() - began) > START_SECONDS:
            raise RuntimeError(f"the server took {seconds:.0f} s to start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def converse(console: Console, url: str) -> None:
    """Hold a conversation of two turns; the second must find the state of the first."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        stream = client.completions.create(model=model, prompt="Once", max_tokens=24, temperature=0, stream=True)
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
        console.print(f"a stream in {len(pieces)} piece{'s' * (len(pieces) != 1)}: ", end="")
        console.print(Text(repr("".join(pieces))))
        previous: str | None = None
        for said in (OPENING, "What is my name?"):
            given: dict[str, Any] = {} if previous is None else {"previous_response_id": previous}
            answer = client.responses.create(model=model, input=said, max_output_tokens=16, temperature=0, **given)
            if answer.usage is None:
                raise RuntimeError("an answer has no usage")
            cached = answer.usage.input_tokens_details.cached_tokens
            console.print(f"turn of {answer.usage.input_tokens} prompt tokens, of which cached_tokens = {cached}")
            if previous is not None and not cached:
                raise RuntimeError("the second turn found nothing of the first")
            previous = answer.id


def count_idle_tokens(console: Console, directory: Path) -> None:
    """Run the same requests under each policy in this process, and print the cost of padding and of ended rows."""
    choose = random.Random(0)
    requests = [
        Request(
            str(number),
            tuple(choose.choices(range(1, 256), k=choose.choice((8, 16, 120)))),
            SamplingParams(temperature=0.0, max_tokens=choose.choice((4, 16, 60)), ignore_eos=True),
            arrival=0.0,
        )
        for number in range(REQUESTS)
    ]
    table = Table(title=f"{REQUESTS} requests, {BATCH} at a time", title_justify="left")
    table.add_column("--scheduler")
    for name in ("steps", "forwards", "tokens", "idle tokens", "idle"):
        table.add_column(name, justify="right")
    answers = set()
    for policy in POLICIES:
        config = EngineConfig(
            model=str(directory), executor="padded", scheduler=policy, max_sequences=BATCH, max_model_len=512,
            cache_gb=0.2, prefix_sharing=False,
        )  # fmt: skip
        loop, _ = build(config)
        for request in requests:
            loop.add(request)
        given: dict[str, list[int]] = {}
        steps = 0
        while loop.has_work():
            for output in loop.step() or ():
                given.setdefault(output.request_id, []).extend(output.tokens)
            steps += 1
        stats = loop.stats()
        loop.close()
        answers.add(json.dumps(given, sort_keys=True))
        share = stats.idle_tokens / (stats.idle_tokens + stats.tokens_computed)
        numbers = (steps, stats.forwards, stats.tokens_computed, stats.idle_tokens)
        table.add_row(policy, *(f"{number:,}" for number in numbers), f"{share:.0%}")
    console.print()
    console.print(table)
    if len(answers) != 1:
        raise RuntimeError("the policies gave different tokens")
    console.print(Text("each policy gave the same tokens", style="bold green"))


if __name__ == "__main__":
    sys.exit(main())
