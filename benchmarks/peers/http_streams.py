"""One server under a closed load over HTTP: requests and tokens a second, first tokens, and times between tokens.

usage: python -m benchmarks.peers.http_streams holdfast|vllm [--site DIR] [--streams 1 128 512] [--requests 10 512 1024]

`beside_vllm --parts http` runs this once for each engine. Both servers stand at their defaults, but for 512 sequences
at a time; they have one shape, and weights drawn alike. Equal processes of clients send equal requests: prompts of
token ids, each new to the server, streamed, greedy, end-of-sequence ignored. For each number of `--streams` that many
requests are kept open until all of `--requests` have ended. A line is printed as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.engine.served_pace import CLIENTS, SPAWN, checkpoint, send_part, served
from benchmarks.lib.invocation import provenance
from benchmarks.lib.vllm_server import vllm_served
from holdfast.lab.metrics import NoSuccess, Record, percentile, summary
from holdfast.lab.simulator.devices import look_up
from holdfast.lab.simulator.shapes import MODELS, ModelShape
from holdfast.lab.workloads import fixed

WORD = {"holdfast": "HOLDFAST", "vllm": "PEER"}
"""First word of a line of figures."""
SEQUENCES = 512
SMALL = ModelShape(
    name="small", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=4096,
    max_model_len=2048,
)  # fmt: skip


@contextmanager
def server(engine: str, model: str, most: int, args: argparse.Namespace) -> Iterator[str]:
    """The address of an engine's server, ready; its sequences have at most `most` tokens."""
    if engine == "holdfast":
        options = [model, "--load-format", "random", "--max-model-len", str(most), "--max-waiting", "10000"]
        with served(
            Path(__file__).resolve().parents[2], [*options, "--max-sequences", str(SEQUENCES), *args.more]
        ) as url:
            yield url
        return
    options = ["--max-model-len", str(most), "--max-num-seqs", str(SEQUENCES), "--gpu-memory-utilization", "0.9"]
    options += ["--served-model-name", Path(model).name, *args.more]
    with vllm_served(model, options, args.site, drawn=True) as url:
        yield url


def shares(streams: int, requests: int) -> list[tuple[int, int]]:
    """The open requests and all requests of each process of clients. None is without a stream."""
    parts = min(CLIENTS, streams)
    return [(len(range(part, streams, parts)), len(range(part, requests, parts))) for part in range(parts)]


def load(
    clients: ProcessPoolExecutor,
    url: str,
    model: str,
    vocabulary: int,
    streams: int,
    requests: int,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Figures of one load. Its prompts are found in no earlier one."""
    prompt, answer = lengths
    sent = [
        clients.submit(
            send_part, url, model, fixed(count, prompt, answer), vocabulary, f"{streams}/{prompt}/{part}", open
        )
        for part, (open, count) in enumerate(shares(streams, requests))
    ]
    found = [part.result() for part in sent]
    return figures(streams, [record for records, _ in found for record in records], max(late for _, late in found))


def figures(streams: int, records: Sequence[Record], late: float) -> dict[str, Any]:
    """The figures of all clients' records; `late` is how late a client's event loop was at most, in seconds."""
    row: dict[str, Any] = {"what": f"http {streams}", "requests": len(records)}
    try:
        seen = summary(records)
    except NoSuccess as failure:
        return row | {"failed": len(records), "failure": str(failure)[:300]}
    good = [record for record in records if not record.error and record.token_times]
    gaps = sorted(1e3 * (after - before) for record in good for before, after in pairwise(record.token_times))
    row |= {
        "failed": seen["failed"],
        "seconds": seen["duration"],
        "req_s": seen["request_throughput"],
        "output_tok_s": seen["output_throughput"],
        "total_tok_s": seen["total_token_throughput"],
        "ttft_ms_p50": seen["median_ttft_ms"],
        "ttft_ms_p99": seen["p99_ttft_ms"],
        "gap_ms_p50": percentile(gaps, 0.5) if gaps else None,
        "gap_ms_p99": percentile(gaps, 0.99) if gaps else None,
        "gap_ms_max": gaps[-1] if gaps else None,
        "tokens_a_chunk": sum(record.generated for record in good) / sum(len(record.token_times) for record in good),
        "client_late_ms": 1e3 * late,
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(WORD))
    parser.add_argument("--site", type=Path, help="where vLLM's packages lie")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 128, 512], help="numbers of requests kept open")
    parser.add_argument("--requests", type=int, nargs="+", default=[10, 512, 1024], help="for each number of streams")
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 128], help="tokens of a prompt and of its answer")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--most", type=int, default=16384, help="most tokens of a sequence")
    parser.add_argument(
        "--more", nargs="*", default=[], metavar="WORD", help="more options of the server, as tbt-target=25"
    )
    parser.add_argument("--small", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args()
    if len(args.streams) != len(args.requests):
        parser.error(f"{len(args.streams)} numbers of --streams and {len(args.requests)} of --requests")
    args.more = [f"--{word}" for word in args.more]
    shape = SMALL if args.small else look_up("model shape", MODELS, args.shape)
    most = min(args.most, shape.max_model_len) if args.small else args.most
    model, began = checkpoint(replace(shape, max_model_len=most)), time.monotonic()
    word, vocabulary = WORD[args.engine], json.loads((Path(model) / "config.json").read_text())["vocab_size"]
    with server(args.engine, model, most, args) as url, ProcessPoolExecutor(CLIENTS, SPAWN) as clients:
        started = {"what": "http start", "started_in": round(time.monotonic() - began, 1)}
        print(f"{word} {json.dumps(provenance() | started | {'cores': os.cpu_count()})}", flush=True)
        load(
            clients, url, Path(model).name, vocabulary, min(128, args.streams[-1]), 256, (64, 16)
        )  # nothing is cold then
        for streams, requests in zip(args.streams, args.requests, strict=True):
            row = load(clients, url, Path(model).name, vocabulary, streams, requests, args.lengths)
            print(f"{word} {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
