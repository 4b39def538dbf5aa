"""Decode pace on a CPU next to busy loops of other programs, by threads and by how long OpenMP's threads spin.

    python -m benchmarks.engine.threads_under_load --threads 1 2 --busy 0 1 2

For each number of busy loops: an engine over random weights answers eight requests without an end. `bounded` is how
engines run: a thread that waits for others spins for about 0.1 ms, and then sleeps. `default` is what GNU's OpenMP does
by itself (300,000 turns of a loop).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import uvloop

from benchmarks.engine.served_pace import give_tokenizer
from benchmarks.engine.who_goes_first import SMALL, Batch
from benchmarks.lib.invocation import provenance
from holdfast.engine.client.client import EngineClient
from holdfast.engine.spawn import EngineProcess
from holdfast.lm.config import EngineConfig

BUSY = "while True: pass"
STREAMS = 8


async def pace(model: Path, threads: int, spin: str, seconds: float) -> float:
    """Tokens a second."""
    config = EngineConfig(
        model=str(model), load_format="random", device="cpu", max_model_len=512, max_sequences=STREAMS,
        speculation="off", threads=threads,
    )  # fmt: skip
    environment = {"GOMP_SPINCOUNT": spin} if spin else {}
    with EngineProcess("cpu", environment=environment) as process:
        client = await EngineClient.start(config, process=process)
        batch = Batch(client, "lines", STREAMS)
        await asyncio.sleep(0.3 * seconds)
        tokens, begin = len(batch.times), time.monotonic()
        await asyncio.sleep(seconds)
        found = (len(batch.times) - tokens) / (time.monotonic() - begin)
        await batch.end()
        await client.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, os.cpu_count() or 1])
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    print(json.dumps(provenance() | {"load": os.getloadavg()}))
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SMALL))
        give_tokenizer(model)
        for busy in args.busy:
            for _ in range(args.repeats):
                for threads in args.threads:
                    for name, spin in (("bounded", ""), ("default", "300000")):
                        if threads == 1 and spin:
                            continue
                        with ExitStack() as loops:
                            for _ in range(busy):
                                loops.enter_context(process := subprocess.Popen([sys.executable, "-c", BUSY]))
                                loops.callback(process.kill)
                            found = uvloop.run(pace(model, threads, spin, args.seconds))
                        print(f"{busy} busy loops, {threads} threads, {name}: {found:.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
