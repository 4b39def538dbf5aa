"""Fills a store with many conversations, and measures its start, its routes and its searches.

    python -m benchmarks.robustness.store_size --conversations 1000000 --store /tmp/store.sqlite --json result.json

`store_fill.py` says what is in the store. Each call is made through the store's methods, as the routes make them,
without HTTP. Upkeep runs meanwhile, as in a server. A store with this number of conversations is not filled.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import random
import shlex
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.robustness.store_fill import DAY, LARGE, RARE, Writer, fill, name, tenant_of
from holdfast.core.version import __version__
from holdfast.server.conversations.database import sqlite_path
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.upkeep import Upkeep
from holdfast.server.conversations.values import Bounds, Context, Turn
from holdfast.server.jobs.tables import create_indexes
from holdfast.server.schema import SCHEMA

CALLS = 300
"""Number of calls of each kind."""


def main() -> None:
    """Fill and measure, print a table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100_000, help="number of conversations to fill in")
    parser.add_argument("--store", required=True, help="SQLite file, or postgresql://…; empty, or filled by this")
    parser.add_argument("--words", type=int, default=30, help="number of words of each message")
    parser.add_argument("--fill-only", action="store_true", help="fill the store, and measure nothing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    try:
        filled = fill(asked.store, asked.conversations, Writer(draw, asked.words), opened)
    except ValueError as error:
        parser.error(str(error))
    if asked.fill_only:
        print(f"{asked.conversations:,} conversations, filled in {filled:.0f} s")
        return
    gc.collect()
    gc.freeze()  # As the server does.
    began = time.perf_counter()
    store = opened(asked.store)
    started = time.perf_counter() - began
    there = asked.conversations
    result = {
        "command": shlex.join(["python", *sys.argv]), "version": __version__, "python": platform.python_version(),
        "processors": os.cpu_count(), "words": asked.words, "database": described(store), "conversations": there,
        "fill_s": filled, "bytes": size_of(store), "start_s": started, "flush_ms": flushes(asked.store),
        "calls_ms": measured(store, there, asked.words, draw),
    }  # fmt: skip
    store.close()
    print(f"{there:,} conversations, start {started:.3f} s, filled in {filled:.0f} s, {result['bytes']:,} bytes")
    for kind, each in {"a flush of the disk": result["flush_ms"], **result["calls_ms"]}.items():
        print(
            f"{kind:34} median {each['median']:8.2f} ms   P99 {each['p99']:8.2f} ms   most {each['most']:8.2f} ms   "
            f"P99 of processor time {each['p99_of_processor']:8.2f} ms"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def opened(where: str) -> Store:
    """Open the store, without bounds."""
    bounds = Bounds(seconds=36500 * DAY, threads=math.inf, bytes=math.inf)
    return Store.open(where, bounds, more=SCHEMA, additions=[create_indexes])


def described(store: Store) -> str:
    """Return the kind of database and its version."""
    engine = store.database.engine
    query = "SELECT sqlite_version()" if engine.dialect.name == "sqlite" else "SHOW server_version"
    with engine.connect() as db:
        return f"{engine.dialect.name} {db.execute(text(query)).scalar_one()}"


def size_of(store: Store) -> int:
    """Return the size of the database in bytes."""
    query = "SELECT pg_database_size(current_database())"
    if store.database.engine.dialect.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    with store.database.read() as db:
        return int(db.execute(text(query)).scalar_one())


def flushes(where: str) -> dict[str, float]:
    """Return how long it takes to write 64 KiB to the disk of the store, for comparison with the writes of a store."""
    folder = (sqlite_path(where) or Path("/tmp/x")).parent
    with tempfile.TemporaryFile(dir=folder) as file:

        def flush() -> None:
            file.write(b"x" * (1 << 16))
            file.flush()
            os.fdatasync(file.fileno())

        return times(lambda: worked(flush))


def measured(store: Store, there: int, words: int, draw: random.Random) -> dict[str, dict[str, float]]:
    """Return for each kind of call its median, P99 and longest time in milliseconds."""
    drawn = Writer(random.Random(0), words)
    run = uuid.uuid4().hex[:8]  # Another run measured the same store before.
    made = (f"{run}_{number}" for number in range(1 << 30))

    def conversation() -> tuple[str, str]:
        number = draw.randrange(there)
        return tenant_of(number), name(number)

    def large() -> str:
        return name(draw.randrange(there // 2) * 2)

    def turn() -> None:
        number, fresh = draw.randrange(there // 10) * 10, f"new_{next(made)}"
        context: Context = store.conversations.context(tenant_of(number), name(number))
        response = {
            "id": fresh,
            "status": "completed",
            "created_at": 0,
            "metadata": {},
            "output": [drawn.message(f"{fresh}_b", "assistant")],
        }
        given = [drawn.message(f"{fresh}_a", "user")]
        new = Turn(
            response=response, tenant=tenant_of(number), input=given, context=context, conversation=name(number),
            tokens=[1] * 100,
        )  # fmt: skip
        store.turns.commit(new)

    def search(tenant: str, wanted: str) -> Callable[[], Any]:
        return lambda: store.listing.search(tenant, wanted, limit=20)

    def deep_search() -> None:
        store.listing.search(LARGE, "the", limit=20, after=large())

    def items_of() -> None:
        store.conversations.items(*conversation(), limit=20, newest_first=True)

    def response() -> None:
        number = draw.randrange(there // 10) * 10
        store.turns.response(tenant_of(number), f"resp_{number}")

    calls: dict[str, Callable[[], Any]] = {
        "GET conversations": lambda: store.listing.page(LARGE, limit=20),
        "GET conversations, deep": lambda: store.listing.page(LARGE, limit=20, after=large()),
        "GET conversation": lambda: store.conversations.get(*conversation()),
        "GET items": items_of,
        "GET response": response,
        "GET turns": lambda: store.tree.turns(*conversation()),
        "POST conversations": lambda: store.conversations.create(LARGE, f"fresh_{next(made)}", {"title": "new"}, []),
        "POST conversation": lambda: store.conversations.update(*conversation(), {"title": "changed"}),
        "POST items": lambda: store.conversations.add_items(
            *conversation(), [drawn.message(f"added_{next(made)}", "user")]
        ),
        "turn": turn,
        "DELETE conversation": lambda: store.conversations.delete(LARGE, f"fresh_{gone()}"),
        "search: in every conversation": search(LARGE, "the"),
        "search: in every one, deep": deep_search,
        "search: in every one, small tenant": search("tenant7", "the"),
        "search: in one of 10,000": search(LARGE, RARE),
        "search: in no conversation": search(LARGE, "aardvarkian"),
        "search: only in other tenants": search("tenant7", RARE),
        "search: beginning of a word": search(LARGE, "quok"),
        "search: one letter": search(LARGE, "q"),
        "search: two words": search(LARGE, f"number {there - 2}"),
    }
    fresh: list[str] = []

    def gone() -> str:
        if not fresh:
            fresh.extend(next(made) for _ in range(CALLS))
            for each in fresh:
                store.conversations.create(LARGE, f"fresh_{each}", {}, [drawn.message(f"gone_{each}", "user")])
        return fresh.pop()

    gone()
    writer = ThreadPoolExecutor(max_workers=1)
    upkeep = Upkeep(store.database, writer)

    def write(call: Callable[[], Any]) -> dict[str, float]:
        def once() -> float:
            took = writer.submit(worked, call).result()
            upkeep.wake()
            return took

        return times(once)

    def read(call: Callable[[], Any]) -> dict[str, float]:
        return times(lambda: worked(call))

    found = {kind: (read if kind.startswith(("GET", "search")) else write)(call) for kind, call in calls.items()}
    upkeep.close()
    writer.shutdown()
    return found


def worked(call: Callable[[], Any]) -> float:
    """Call, and return the processor time of this thread in milliseconds."""
    began = time.thread_time()
    call()
    return 1000 * (time.thread_time() - began)


def times(call: Callable[[], float]) -> dict[str, float]:
    """Call CALLS times, at most 20 s. Returns the median, P99 and longest time in milliseconds, and their number.

    `call` returns its processor time, whose P99 leaves out waits for the disk, for PostgreSQL and for other programs.
    """
    took: list[float] = []
    working: list[float] = []
    while len(took) < CALLS - 1 and sum(took) < 20_000:
        began = time.perf_counter()
        working.append(call())
        took.append(1000 * (time.perf_counter() - began))
    took.sort()
    working.sort()
    return {
        "calls": len(took), "median": took[len(took) // 2], "p99": took[math.ceil(0.99 * len(took)) - 1],
        "most": took[-1], "p99_of_processor": working[math.ceil(0.99 * len(working)) - 1],
    }  # fmt: skip


if __name__ == "__main__":
    main()
