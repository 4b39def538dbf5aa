"""The disk tier: conversations over a restart, kills in the middle of writes, and damaged files.

usage: python -m benchmarks.robustness.disk_tier [--conversations 100] [--tokens 4000] [--kills 1000]
                                                 [--engine-kills 20]
                                                 [--directory DIR] [--json FILE] [--shape tiny | 1b] [--redis]

restart: an engine holds more conversations than its device and its host tier have room for. A turn of each is timed
warm (its state on the device), from the disk of the same engine, after a kill -9 of the engine and a new start, and
with nothing kept. Seconds are from the arrival of a turn to its first token, one turn at a time. Tokens are compared
with those of an engine that keeps nothing.

There are two new starts. Before the first, the system is made to forget the pages of the files, as a reboot does, so
that they are read from the device. Before the second it keeps them, as it does when only the engine dies. There the
conversations come in random order, each followed at once by a further turn, which is warm and in the same engine,
because the first engine's warm turns compete with its writes. A plain read of as many bytes of the same files is timed
for comparison.

kills: a process that writes blocks in four threads is killed with SIGKILL again and again. After each kill the
directory is opened, and every block in it is read and compared with the bytes written.

engine kills: the same with whole engines that serve conversations. After each kill a new one continues, and its tokens
are compared.

bad files: a bit is flipped in each of a hundred blocks, and bytes of the index are overwritten.

With --redis, the conversations also go through a Redis server (`redis-server`, which is started and ended here): a
second engine with no disk reads the blocks that the first one wrote there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.lib.invocation import provenance
from holdfast.lm.execution.disk_store import ENTRY, ENTRY_BYTES, DiskStore
from holdfast.lm.tiers import TierBlock

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "config": dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                       num_key_value_heads=2, head_dim=32, vocab_size=512),
        "engine": dict(device="cpu", threads=1, cache_gb=0.02, host_cache_gb=0.05, disk_cache_gb=2.0),
    },
    "1b": {
        "config": dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
                       num_key_value_heads=8, head_dim=64, vocab_size=128256),
        "engine": dict(device="cuda", dtype="bfloat16", cache_gb=2.0, host_cache_gb=4.0, disk_cache_gb=20.0),
    },
}  # fmt: skip
"""Llama shapes with random weights. The device has room for about 5 conversations of 4,000 tokens in the tiny one (10
in the other), and the host for about 12 (30).
"""
NEW, OUTPUT = 20, 8
"""Number of tokens of a turn, and of its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--engine-kills", type=int, default=20)
    parser.add_argument("--directory", type=Path, help="where the disk tier goes; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--redis", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        serve(json.loads(args.work))
        return
    found: dict[str, Any] = {"made by": provenance(), "shape": args.shape}
    with tempfile.TemporaryDirectory(dir=args.directory) as place:
        directory = Path(place)
        if args.conversations:
            found["restart"] = restart(args, directory)
        if args.redis:
            found["redis"] = through_redis(args, directory)
        if args.engine_kills:
            found["engine kills"] = engine_kills(args, directory)
        if args.kills:
            found["kills"] = kills(args.kills, directory / "kills")
        found["bad files"] = bad_files(directory / "bad")
        found["index"] = index_time(directory / "index")
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


class Engine:
    """An engine in its own process, which can be killed."""

    def __init__(self, args: argparse.Namespace, directory: Path, **changes: Any) -> None:
        model = directory / "model"
        if not model.exists():
            model.mkdir()
            config = dict(
                SHAPES[args.shape]["config"], architectures=["LlamaForCausalLM"], model_type="llama",
                max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, tie_word_embeddings=True,
                eos_token_id=1, hidden_act="silu", torch_dtype="bfloat16",
            )  # fmt: skip
            (model / "config.json").write_text(json.dumps(config))
        options = {"model": str(model), "load_format": "random", "max_sequences": 8, **SHAPES[args.shape]["engine"]}
        if changes.pop("plain", False):
            options = {k: v for k, v in options.items() if k not in ("host_cache_gb", "disk_cache_gb")}
            options |= {"prefix_sharing": False, "host_cache_gb": 0}
        else:
            options["disk_cache_dir"] = str(directory / "disk")
        options = {key: value for key, value in {**options, **changes}.items() if value is not None}
        own = [sys.executable, "-m", "benchmarks.robustness.disk_tier", "--work", json.dumps(options)]
        began = time.monotonic()
        self._process = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._answer()
        self.start_seconds = time.monotonic() - began

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine ended")
        return json.loads(line)

    def send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, **message: Any) -> Any:
        self.send(**message)
        return self._answer()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def serve(options: dict[str, Any]) -> None:
    """Run the engine's process: prompts come in lines, answers go out."""
    import torch

    from holdfast.core.types import Request, SamplingParams
    from holdfast.engine.process.build import build_engine
    from holdfast.engine.process.parts.tiers import TierHandler
    from holdfast.lm.config import EngineConfig

    if (threads := options.get("threads")) is not None:
        torch.set_num_threads(threads)
    woken = threading.Event()
    engine = build_engine(EngineConfig(**options), wake=woken.set)
    loop, tiers = engine.loop, [each for each in engine.handlers if isinstance(each, TierHandler)]
    lines, stages = iter(sys.stdin.readline, ""), {each.name: each.end - each.begin for each in engine.info.stages}
    print(json.dumps({"stages": stages, "disk blocks": loop.stats().disk_blocks_cached}), flush=True)
    for number, line in enumerate(lines):
        message = json.loads(line)
        if message.get("stats"):
            stats = loop.stats()
            print(json.dumps({name: getattr(stats, name) for name in stats.__slots__}), flush=True)
        elif message.get("settle"):  # a pause, in which idle state moves down
            began = time.monotonic()
            for each in tiers:
                each.flush(loop, 600)
            print(json.dumps(time.monotonic() - began), flush=True)
        else:
            params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
            began, first, tokens, cached = time.monotonic(), 0.0, [], 0
            loop.add(Request(str(number), tuple(message["prompt"]), params, arrival=began))
            while len(tokens) < OUTPUT:
                for output in loop.step() or ():
                    first = first or time.monotonic() - began
                    tokens += output.tokens
                    cached = output.cached_tokens
                if not tokens and any(each.awaited for each in tiers):
                    woken.wait(0.05)  # as the engine's process does
                    woken.clear()
            while loop.step() is not None and loop.planner.stats().running:
                pass
            print(json.dumps({"seconds": first, "tokens": tokens, "cached": cached}), flush=True)


def prompts(args: argparse.Namespace) -> list[list[int]]:
    draw, vocabulary = random.Random(1), SHAPES[args.shape]["config"]["vocab_size"]
    return [[draw.randrange(2, vocabulary) for _ in range(args.tokens)] for _ in range(args.conversations)]


def restart(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    histories, draw = prompts(args), random.Random(2)
    warm_turns, disk_turns, last_turns = (
        [history + [draw.randrange(2, 500) for _ in range(NEW)] for history in histories] for _ in range(3)
    )
    step = max(1, len(histories) // 20)
    plain = Engine(args, directory, plain=True)
    plain.ask(prompt=warm_turns[0])
    computed = [plain.ask(prompt=turn) for turn in last_turns[::step]]
    alone = [[plain.ask(prompt=turn)["tokens"] for turn in turns[::step]] for turns in (warm_turns, disk_turns)]
    alone.append([answer["tokens"] for answer in computed])
    plain.kill()

    engine = Engine(args, directory)
    warm = []
    for history, turn in zip(histories, warm_turns, strict=True):
        engine.ask(prompt=history)
        warm.append(engine.ask(prompt=turn))
    flushed = engine.ask(settle=True)
    from_disk = [engine.ask(prompt=turn) for turn in disk_turns]
    before = engine.ask(stats=True)
    engine.kill()

    order = [*range(len(histories))]
    draw.shuffle(order)
    plain_read = {"pages forgotten": read_plainly(directory / "disk", before, order, forget=True)}
    forget_pages(directory / "disk")
    engine = Engine(args, directory)
    after, warm_after = first_and_next(engine, last_turns, order, draw)
    stats = engine.ask(stats=True)
    engine.kill()
    plain_read["pages kept"] = read_plainly(directory / "disk", before, order, forget=False)
    kept_engine = Engine(args, directory)
    kept, warm_kept = first_and_next(kept_engine, last_turns, order, draw)
    kept_engine.kill()
    same = [
        [answer["tokens"] for answer in answers[::step]] == expected
        for answers, expected in zip((warm, from_disk, after, kept), [*alone, alone[-1]], strict=True)
    ]
    named = {
        "warm": warm, "from the disk": from_disk, "after the restart": after, "warm after the restart": warm_after,
        "after a restart, pages kept": kept, "warm after a restart, pages kept": warm_kept, "computed": computed,
    }  # fmt: skip
    medians = {name: median(found) for name, found in named.items()}
    return {
        "conversations": len(histories),
        "tokens": args.tokens,
        "seconds to the first token, median": medians,
        "p90": {name: p90(found) for name, found in named.items()},
        "after the restart / warm": round(medians["after the restart"] / medians["warm"], 3),
        "after the restart / warm after the restart": ratio(medians, "the restart"),
        "after a restart, pages kept / warm after it": ratio(medians, "a restart, pages kept"),
        "after the restart / computed": round(medians["after the restart"] / medians["computed"], 3),
        "seconds of a plain read of a conversation's bytes": plain_read,
        f"tokens equal to those of an engine without a cache, {len(computed)} conversations": all(same),
        "cached tokens after the restart, each": sorted({answer["cached"] for answer in after}),
        "of them from the disk": stats["prefix_hits_on_disk"],
        "seconds to write what was idle": round(flushed, 3),
        "disk GB written": round(before["disk_bytes_written"] / 1e9, 3),
        "start": {"seconds": round(engine.start_seconds, 2), **engine.ready},
        "computed though on the disk, blocks": stats["blocks_cheaper_computed"],
        "corrupt": stats["blocks_corrupt"],
    }


def ratio(medians: dict[str, float], which: str) -> float:
    return round(medians[f"after {which}"] / medians[f"warm after {which}"], 3)


def first_and_next(
    engine: Engine, turns: list[list[int]], order: list[int], draw: random.Random
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The answers to these turns, asked in this order, and to the next turn of each right after it."""
    first, after = {}, []
    for number in order:
        first[number] = engine.ask(prompt=turns[number])
        after.append(engine.ask(prompt=[*turns[number], *(draw.randrange(2, 500) for _ in range(NEW))]))
    return [first[number] for number in range(len(turns))], after


def read_plainly(directory: Path, stats: dict[str, Any], order: list[int], *, forget: bool) -> float:
    """Median seconds to read as many bytes as a conversation has, from places in this order, with one call each."""
    (path,) = directory.glob("kv-*/blocks")
    size = stats["disk_bytes_written"] // stats["disk_blocks_cached"] * (stats["disk_blocks_cached"] // len(order))
    target, found = memoryview(bytearray(b"1" * size)), []
    if forget:
        forget_pages(directory)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead for the next read
        for number in order:
            began = time.perf_counter()
            os.posix_fadvise(file.fileno(), number * size, size, os.POSIX_FADV_WILLNEED)
            assert os.preadv(file.fileno(), [target], number * size) == size
            found.append(time.perf_counter() - began)
    return round(statistics.median(found), 5)


def forget_pages(directory: Path) -> None:
    """Write the system's cached pages of these files to the device, and drop them, so that later reads are real."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def median(answers: list[dict[str, Any]]) -> float:
    return round(statistics.median(answer["seconds"] for answer in answers), 5)


def p90(answers: list[dict[str, Any]]) -> float:
    return round(statistics.quantiles([answer["seconds"] for answer in answers], n=10)[-1], 5)


def through_redis(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Let one engine write to a Redis server and another read. Then the server is ended during service."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--save", "", "--appendonly", "no", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lru"]
    server = subprocess.Popen(
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", *options], stdout=subprocess.DEVNULL
    )
    try:
        time.sleep(0.5)
        turns = [history + [7] * NEW for history in prompts(args)[:20]]
        changes = {"remote_cache": f"redis://127.0.0.1:{port}/0", "disk_cache_dir": None, "disk_cache_gb": None}
        one = Engine(args, directory, **changes)
        written = [one.ask(prompt=turn) for turn in turns]
        one.ask(settle=True)
        one.kill()
        other = Engine(args, directory, **changes)
        read = [other.ask(prompt=turn) for turn in turns]
        server.kill()
        server.wait()
        without = [other.ask(prompt=[3, *turn]) for turn in turns[:5]]
        stats = other.ask(stats=True)
        other.kill()
    finally:
        server.kill()
        server.wait()
    return {
        "conversations": len(turns),
        "seconds to the first token, median": {
            "computed": median(written), "by another engine": median(read), "after the service's death": median(without)
        },
        "tokens equal": all(a["tokens"] == b["tokens"] for a, b in zip(written, read, strict=True)),
        "cached tokens, each": sorted({answer["cached"] for answer in read}),
        "failures noted": stats["tier_failures"],
    }  # fmt: skip


def engine_kills(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Kill engines while they serve and write. The next one continues the same conversations."""
    shutil.rmtree(directory / "disk", ignore_errors=True)
    draw = random.Random(3)
    short = [history[:1000] for history in prompts(args)[:10]]
    plain = Engine(args, directory, plain=True)
    expected = [plain.ask(prompt=prompt)["tokens"] for prompt in short]
    plain.kill()
    wrong = answered = found = corrupt = 0
    for _ in range(args.engine_kills):
        engine = Engine(args, directory)
        for number in draw.sample(range(len(short)), 6):
            answer = engine.ask(prompt=short[number])
            wrong += answer["tokens"] != expected[number]
            found += answer["cached"] > 0
            answered += 1
        corrupt += engine.ask(stats=True)["blocks_corrupt"]
        engine.send(settle=True)
        time.sleep(draw.uniform(0, 0.05))
        engine.kill()
    return {"kills": args.engine_kills, "answers": answered, "wrong": wrong, "found state": found, "corrupt": corrupt}


SIZE, PLACES, NUMBERS = 20_000, 120, 200


def contents(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def open_store(directory: Path) -> DiskStore:
    return DiskStore(directory, PLACES * (20480 + ENTRY_BYTES), SIZE, {"weights": "1"})


def write_for_ever(directory: Path, known: list[bytes], seed: int) -> None:
    """Write up to 7 blocks at a time in four threads, each to its own places, until killed."""
    store = open_store(directory)
    store.stored()

    def write(thread: int) -> None:
        draw = random.Random(1000 * seed + thread)
        while True:
            count, own = draw.randrange(1, 8), PLACES // 4
            first = own * thread + draw.randrange(own - count)
            numbers = [draw.randrange(NUMBERS) for _ in range(count)]
            blocks = [TierBlock(bytes([each]) * 32, each, slot=first + at) for at, each in enumerate(numbers)]
            store.write(blocks, [(memoryview(known[each]),) for each in numbers], [time.time()] * count)

    for thread in range(4):
        threading.Thread(target=write, args=(thread,), daemon=True).start()
    time.sleep(60)


def kills(count: int, directory: Path) -> dict[str, Any]:
    known, draw = [contents(number) for number in range(NUMBERS)], random.Random(4)
    target, read, wrong, refused, least = bytearray(SIZE * PLACES), 0, 0, 0, PLACES
    for kill in range(count):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(directory, known, kill)
            finally:
                os._exit(1)
        time.sleep(draw.uniform(0.002, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        store = open_store(directory)
        stored = store.stored()
        least = min(least, len(stored)) if kill > 50 else least
        blocks = [TierBlock(each.digest, each.place, slot=each.slot) for each in stored]
        targets = [(memoryview(target)[at * SIZE : (at + 1) * SIZE],) for at in range(len(blocks))]
        for block, (data,), outcome in zip(blocks, targets, store.read(blocks, targets), strict=True):
            read += outcome == "done"
            refused += outcome != "done"
            wrong += outcome == "done" and data != known[block.digest[0]]
        store.close()
    return {
        "kills": count, "blocks read whole": read, "corrupt blocks that were read as whole": wrong,
        "blocks refused by their checksum": refused, "places in use, at least": least, "places": PLACES,
    }  # fmt: skip


def bad_files(directory: Path) -> dict[str, Any]:
    """Flip a bit in each of 100 blocks, and overwrite 10 entries of the index."""
    known, store, draw = [contents(number) for number in range(PLACES)], open_store(directory), random.Random(5)
    store.stored()
    blocks = [TierBlock(bytes([number]) * 32, number, slot=number) for number in range(PLACES)]
    store.write(blocks, [(memoryview(data),) for data in known], [time.time()] * PLACES)
    store.close()
    (own,) = directory.glob("kv-*")
    bad = draw.sample(range(PLACES - 10), 100)
    with (own / "blocks").open("r+b") as file:
        for slot in bad:
            at = slot * 20480 + draw.randrange(SIZE)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    with (own / "index").open("r+b") as file:
        for slot in range(PLACES - 10, PLACES):
            file.seek(slot * ENTRY_BYTES + draw.randrange(ENTRY.size))
            file.write(draw.randbytes(3))
    store = open_store(directory)
    stored = store.stored()
    blocks = [TierBlock(each.digest, each.place, slot=each.slot) for each in stored]
    outcomes = store.read(blocks, [(memoryview(bytearray(SIZE)),) for _ in blocks])
    left = len(store.stored())
    store.close()
    return {
        "blocks with a flipped bit": len(bad), "found corrupt at their read": outcomes.count("corrupt"),
        "entries overwritten": 10, "entries found bad at the start": PLACES - len(stored), "blocks left": left,
    }  # fmt: skip


def index_time(directory: Path, places: int = 100_000) -> dict[str, Any]:
    """Seconds in which an engine reads the index of `places` blocks."""
    store = DiskStore(directory, places * (4096 + ENTRY_BYTES), 64, {"weights": "1"})
    store.stored()
    data = (memoryview(bytes(64)),)
    blocks = [TierBlock(slot.to_bytes(32, "big"), 0, slot=slot) for slot in range(places)]
    store.write(blocks, [data] * places, [time.time()] * places)
    began = time.perf_counter()
    count = len(store.stored())
    seconds = time.perf_counter() - began
    store.close()
    return {"blocks": count, "seconds to read their index": round(seconds, 3)}


if __name__ == "__main__":
    main()
