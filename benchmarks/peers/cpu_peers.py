"""One checkpoint of 100 million parameters on a CPU, at several numbers of streams: Holdfast, Transformers, llama.cpp.

    python -m benchmarks.peers.cpu_peers --llama-server PATH [--threads 2] [--streams 1 8 32] [--repeats 3]

The checkpoint is a Llama of random weights, which this script makes, in float32 for everybody: as safetensors for
Holdfast and Transformers, as GGUF (by the `gguf` package) for llama.cpp. Holdfast and llama.cpp run as servers and
stream completions over HTTP to one client; Transformers' `generate` gets all prompts as one batch of equal lengths, its
best case, and its continuous batching (`generate_batch`) keeps its manager between runs. All prompts start at once,
each of --prompt random tokens, and all answers are greedy and have --output tokens. Each run has new prompts, so that
no cache helps. The figures are output tokens a second from the first request to the last token: the median of the
repeats, after one run that does not count. One engine runs at a time; run it on a quiet machine.

`agrees` is how many of the first tokens are equal to `generate`'s, on average: it shows that the weights are the same.

llama.cpp's server comes with the sources in llama-cpp-python's sdist on PyPI: unpack it, and in vendor/llama.cpp run
`cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_UI=OFF && cmake --build build --target llama-server`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.lib.invocation import provenance

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
SPECIAL = 3
"""Number of special tokens: <unk>, <s> and </s>. Then come the 256 bytes, then made-up words."""
Prompts = list[list[int]]
Run = Callable[[Prompts, int], list[list[int]]]
"""Function that answers all prompts with this many tokens each. Returns the tokens of each answer."""


def pieces() -> list[str]:
    """The vocabulary, in llama.cpp's spelling."""
    words = [f"▁w{number}" for number in range(SHAPE["vocab_size"] - SPECIAL - 256)]
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]


def weights() -> dict[str, torch.Tensor]:
    """Random weights by their names in a Hugging Face checkpoint."""
    torch.manual_seed(0)
    hidden, inner, size = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    queries, keys = SHAPE["num_attention_heads"] * size, SHAPE["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    made = {"model.embed_tokens.weight": torch.randn(SHAPE["vocab_size"], hidden) * 0.02}
    made["model.norm.weight"] = torch.ones(hidden)
    norms = ("input_layernorm", "post_attention_layernorm")
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        made |= {f"{prefix}.{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
        made |= {f"{prefix}.{name}.weight": torch.ones(hidden) for name in norms}
    return made


def write_checkpoint(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A Hugging Face directory with a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(SHAPE))
    tokenizer = Tokenizer(models.WordLevel({piece: id for id, piece in enumerate(pieces())}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))


def write_gguf(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write the weights as GGUF, float32.

    Rotary pairs are neighbours in llama.cpp, and halves of a head in Hugging Face.
    """
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_block_count(SHAPE["num_hidden_layers"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    writer.add_rope_dimension_count(SHAPE["head_dim"])
    writer.add_vocab_size(SHAPE["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces())
    writer.add_token_scores([0.0] * SHAPE["vocab_size"])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (SHAPE["vocab_size"] - len(kinds)))
    writer.add_bos_token_id(SHAPE["bos_token_id"])
    writer.add_eos_token_id(SHAPE["eos_token_id"])
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            rows, columns = tensor.shape
            tensor = tensor.view(-1, 2, SHAPE["head_dim"] // 2, columns).transpose(1, 2).reshape(rows, columns)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: Sequence[str], port: int, log: Path) -> Iterator[Run]:
    """A server with OpenAI's completions. Yields the function that asks it for streams. Raises RuntimeError."""
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            while not healthy(port):
                if process.poll() is not None:
                    raise RuntimeError(f"{Path(command[0]).name} ended: {log.read_text()[-500:]}")
                time.sleep(0.2)
            yield lambda prompts, output: asyncio.run(streams(port, prompts, output))
        finally:
            process.terminate()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


async def streams(port: int, prompts: Prompts, output: int) -> list[list[int]]:
    """Stream all completions at once. Raises RuntimeError if one has another number of tokens than asked for."""
    return list(await asyncio.gather(*(stream(port, prompt, output) for prompt in prompts)))


async def stream(port: int, prompt: list[int], output: int) -> list[int]:
    asked = {
        "model": "checkpoint", "prompt": prompt, "max_tokens": output, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    told = (await reader.read()).decode(errors="replace")
    writer.close()
    found = told.rpartition('"completion_tokens":')[2].partition(",")[0].strip(" }")
    if found != str(output):
        raise RuntimeError(f"asked for {output} tokens, got {found}: {told[:300]} … {told[-300:]}")
    lines = [line[6:] for line in told.splitlines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line).get("choices", [])]
    words = re.findall(r"w(\d+)", "".join(choice.get("text") or "" for choice in choices))
    return [SPECIAL + 256 + int(word) for word in words]


@contextmanager
def holdfast(checkpoint: Path, most: int, threads: int, more: Sequence[str], log: Path) -> Iterator[Run]:
    """Holdfast's server."""
    port = free_port()
    command = [sys.executable, "-m", "holdfast.cli", "serve", str(checkpoint), "--port", str(port), "--store", "memory"]
    command += ["--device", "cpu", "--threads", str(threads), "--max-sequences", str(most)]
    with server([*command, *more], port, log) as run:
        yield run


@contextmanager
def llama_cpp(binary: Path, file: Path, most: int, length: int, threads: int, log: Path) -> Iterator[Run]:
    """llama.cpp's server, with a slot for each stream."""
    port = free_port()
    command = [str(binary), "-m", str(file), "--host", "127.0.0.1", "--port", str(port), "-np", str(most)]
    command += ["-c", str(most * length), "-t", str(threads), "-tb", str(threads), "-ctk", "f32", "-ctv", "f32"]
    with server(command, port, log) as run:
        yield run


@contextmanager
def generate(checkpoint: Path) -> Iterator[Run]:
    """Transformers' `generate`, all prompts as one batch."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def run(prompts: Prompts, output: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            told = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=output, max_new_tokens=output,
                pad_token_id=0,
            )  # fmt: skip
        return [row[len(prompt) :].tolist() for row, prompt in zip(told, prompts, strict=True)]

    yield run


@contextmanager
def generate_batch(checkpoint: Path, most: int, length: int) -> Iterator[Run]:
    """Transformers' continuous batching, with a manager that stays."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    page = 16
    sizes = ContinuousBatchingConfig(
        num_blocks=most * (-(-length // page) + 1), max_batch_tokens=max(512, most), page_size=page
    )
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes, timeout=5
    ) as manager:

        def run(prompts: Prompts, output: int) -> list[list[int]]:
            ids = manager.add_requests(inputs=prompts, max_new_tokens=output)
            told: dict[str, list[int]] = {}
            while len(told) < len(ids):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    told[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("generate_batch ended")
            return [told[id] for id in ids]

        yield run


def measure(run: Run, count: int, prompt: int, output: int, repeats: int) -> tuple[dict[str, Any], list[list[int]]]:
    """Tokens per second of `count` streams, and the answers of the run that does not count."""
    draw = random.Random(count)
    low, high = SPECIAL + 256, SHAPE["vocab_size"]
    first: list[list[int]] = []
    seconds = []
    for number in range(repeats + 1):
        prompts = [[draw.randrange(low, high) for _ in range(prompt)] for _ in range(count)]
        began = time.perf_counter()
        told = run(prompts, output)
        if number:
            seconds.append(time.perf_counter() - began)
        else:
            first = told
    rate = count * output / statistics.median(seconds)
    return {"tokens_per_second": round(rate, 2), "seconds": [round(each, 3) for each in seconds]}, first


def agreement(found: list[list[int]], wanted: list[list[int]]) -> float:
    """Mean number of first tokens that are equal."""
    equal = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in zip(found, wanted, strict=True)
    ]
    return round(statistics.mean(equal), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--llama-server", type=Path, metavar="PATH", help="llama.cpp's server; without it, none runs")
    parser.add_argument("--serve", default="", metavar="OPTIONS", help="more options of `holdfast serve`")
    parser.add_argument("--json", type=Path, help="file for the results; rows of other streams stay")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    most, length = max(args.streams), args.prompt + args.output + 8
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "checkpoint"
        directory.mkdir()
        tensors = weights()
        count = sum(tensor.numel() for tensor in tensors.values())
        write_checkpoint(directory, tensors)
        log = Path(place) / "server.log"
        engines: dict[str, Any] = {
            "generate": lambda: generate(directory),
            "generate_batch": lambda: generate_batch(directory, most, length),
            "Holdfast": lambda: holdfast(directory, most, args.threads, args.serve.split(), log),
        }
        if args.llama_server is not None:
            file = Path(place) / "checkpoint.gguf"
            write_gguf(file, tensors)
            engines["llama.cpp"] = lambda: llama_cpp(args.llama_server, file, most, length, args.threads, log)
        del tensors
        print(
            f"Llama of {count / 1e6:.0f} million parameters, float32, {args.threads} thread(s), prompts of "
            f"{args.prompt} and answers of {args.output} tokens; output tok/s"
        )
        wanted: dict[int, list[list[int]]] = {}
        for name, make in engines.items():
            with make() as run:
                for streams in args.streams:
                    row, told = measure(run, streams, args.prompt, args.output, args.repeats)
                    wanted.setdefault(streams, told)
                    row["agrees"] = agreement(told, wanted[streams])
                    rows.setdefault(name, {})[streams] = row
                    print(f"{name:16} {streams:3} streams {row['tokens_per_second']:10.1f}  {row}", flush=True)
    peers = [name for name in rows if name != "Holdfast"]
    for streams in args.streams:
        ours = rows["Holdfast"][streams]["tokens_per_second"]
        ratios = {name: round(ours / rows[name][streams]["tokens_per_second"], 2) for name in peers}
        print(f"{streams} streams: Holdfast gives so many times as many: {ratios}")
    if args.json is not None:
        about = provenance() | {"threads": args.threads, "prompt": args.prompt, "output": args.output}
        before = json.loads(args.json.read_text())["rows"] if args.json.exists() else {}
        every = {
            name: before.get(name, {}) | {str(at): row for at, row in found.items()} for name, found in rows.items()
        }
        args.json.write_text(json.dumps(about | {"parameters": count, "rows": every}, indent=1) + "\n")


if __name__ == "__main__":
    main()
