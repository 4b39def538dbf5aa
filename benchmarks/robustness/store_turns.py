"""Turns per second that a store takes, by the number of processes that write to it.

    python -m benchmarks.robustness.store_turns --processes 1,2,4 --clients 64 --json result.json

Each process has a store of its own on the same database, as API processes have, and clients in it store turns one after
another, without HTTP and without a model. Half of the turns continue a conversation, which takes its lock before and
gives it up after; the others are responses without one. A line gives the turns per second of all processes, the ratio
to the first number of processes, the times of a turn, the processor time for each turn, and how many turns failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import platform
import resource
import shlex
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from holdfast.core.version import __version__
from holdfast.server.conversations.leases import conversation_key
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import Bounds, Context, Turn
from holdfast.server.jobs.tables import create_indexes
from holdfast.server.protocol import ApiError
from holdfast.server.schema import SCHEMA

SAID = "Tell me more about the sea, please, and about all the ships that you have seen on it."
WARM_UP = 0.2
"""Share of the time whose turns are not counted."""


def opened(where: str) -> Store:
    """Open the store, without bounds."""
    bounds = Bounds(seconds=1e9, threads=math.inf, bytes=math.inf)
    return Store.open(where, bounds, more=SCHEMA, additions=[create_indexes])


def message(role: str) -> dict[str, Any]:
    """Return a message with an id of its own."""
    content = [{"type": "output_text", "text": SAID, "annotations": [], "logprobs": []}]
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "status": "completed", "role": role, "content": content}


def new_turn(context: Context, conversation: str | None, tenant: str) -> Turn:
    """Return a turn after `context`, with an input and an answer of 20 words each."""
    response = {
        "id": f"resp_{uuid.uuid4().hex}", "object": "response", "status": "completed", "created_at": 0,
        "model": "tiny", "metadata": {}, "output": [message("assistant")], "tools": [], "temperature": 1.0,
        "usage": {"total_tokens": 60},
    }  # fmt: skip
    tokens = [*context.tokens, *[1] * 60]
    return Turn(response=response, tenant=tenant, input=[message("user")], context=context, conversation=conversation,
                known=len(context.tokens), tokens=tokens)  # fmt: skip


async def talk(store: AsyncStore, tenant: str, until: float, took: list[tuple[float, float]]) -> int:
    """Store turns one after another. Adds the end and the duration of each. Returns how many failed."""
    conversation, failed = f"conv_{uuid.uuid4().hex}", 0
    await store.run(lambda store: store.conversations.create(tenant, conversation, {}, []))
    key = conversation_key(tenant, conversation)
    while time.monotonic() < until:
        for inside in (None, conversation):
            began = time.monotonic()
            try:
                await one(store, tenant, inside, key)
            except ApiError:
                failed += 1
            else:
                took.append((time.monotonic(), time.monotonic() - began))
    return failed


async def one(store: AsyncStore, tenant: str, conversation: str | None, key: str) -> None:
    """Store one turn, as a request does."""
    if conversation is None:
        turn = new_turn(Context(), None, tenant)
        await store.commit(turn)
        return
    await store.run(lambda store: store.leases.lock(key))
    context = await store.read(lambda store: store.conversations.context(tenant, conversation))
    if len(context.tokens) > 2000:
        context = Context(thread=context.thread, parent=context.parent, items=[], size=0)
    turn = new_turn(context, conversation, tenant)
    await store.commit(turn)
    await store.run(lambda store: store.leases.unlock(key))


def process(where: str, clients: int, begin: float, seconds: float, results: Any) -> None:
    """Store turns with some clients at once. Puts the times, the processor time, and the number of failed turns."""

    async def work() -> tuple[list[tuple[float, float]], float, int]:
        store = AsyncStore(opened(where))
        took: list[tuple[float, float]] = []
        await asyncio.sleep(max(0.0, begin - time.monotonic()))
        before = resource.getrusage(resource.RUSAGE_SELF)
        failed = await asyncio.gather(
            *(talk(store, f"tenant{number % 8}", begin + seconds, took) for number in range(clients))
        )
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        await asyncio.to_thread(store.close)
        return took, used, sum(failed)

    results.put(asyncio.run(work()))


def measured(where: str, processes: int, clients: int, seconds: float) -> dict[str, float]:
    """Return the figures of some processes that share the clients."""
    opened(where).close()
    results: Any = multiprocessing.Queue()
    begin = time.monotonic() + 2.0
    each = [
        multiprocessing.Process(target=process, args=(where, clients // processes, begin, seconds, results))
        for _ in range(processes)
    ]
    for one_process in each:
        one_process.start()
    found = [results.get(timeout=seconds + 60) for _ in each]
    for one_process in each:
        one_process.join()
    counted = [took for all_took, _, _ in found for end, took in all_took if begin + WARM_UP * seconds < end]
    done = sum(len(all_took) for all_took, _, _ in found)
    counted.sort()
    last = max(end for all_took, _, _ in found for end, _ in all_took)
    return {
        "processes": processes, "turns_per_second": len(counted) / (last - begin - WARM_UP * seconds),
        "median_ms": 1e3 * counted[len(counted) // 2], "p99_ms": 1e3 * counted[math.ceil(0.99 * len(counted)) - 1],
        "most_ms": 1e3 * counted[-1], "processor_ms_per_turn": 1e3 * sum(used for _, used, _ in found) / done,
        "failed": sum(failed for _, _, failed in found),
    }  # fmt: skip


def main() -> None:
    """Measure each number of processes, print a line for each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="1,2,4", help="numbers of processes")
    parser.add_argument("--clients", type=int, default=64, help="clients in total")
    parser.add_argument("--seconds", type=float, default=8.0, help="seconds of each measurement")
    parser.add_argument("--store", help="postgresql://…, or a SQLite file; by default new files in --folder")
    parser.add_argument("--folder", type=Path, help="folder for new SQLite files; by default a temporary one")
    parser.add_argument("--json", type=Path, help="file for the result")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="store-turns-", dir=asked.folder))
    rows = []
    for count in map(int, asked.processes.split(",")):
        row = measured(asked.store or str(folder / f"{count}.sqlite"), count, asked.clients, asked.seconds)
        rows.append(row)
        print(
            f"{count} processes: {row['turns_per_second']:8.1f} turns/s "
            f"({row['turns_per_second'] / rows[0]['turns_per_second']:.2f} times)   "
            f"median {row['median_ms']:7.1f} ms   "
            f"P99 {row['p99_ms']:7.1f} ms   most {row['most_ms']:7.1f} ms   "
            f"processor {row['processor_ms_per_turn']:.2f} ms a turn   failed {row['failed']:.0f}",
            flush=True,
        )
    shutil.rmtree(folder)
    if asked.json is not None:
        kind = "postgresql" if (asked.store or "").startswith("postgres") else "sqlite"
        result = {
            "command": shlex.join(["python", "-m", "benchmarks.robustness.store_turns", *sys.argv[1:]]),
            "version": __version__, "python": platform.python_version(), "processors": os.cpu_count(),
            "database": kind, "clients": asked.clients, "rows": rows,
        }  # fmt: skip
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
