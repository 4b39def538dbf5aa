"""Fills a store with many conversations, and measures its start, its routes and its searches.

    python benchmarks/robustness/store_size.py --conversations 1000000 --store /tmp/store.sqlite --json result.json

Half of the conversations belong to one tenant, and the others to a thousand tenants. Each conversation has two messages
of 30 words, and one in ten has a turn. The words are drawn from 20,000, the common ones more often. Each call is made
through the store's methods, as the routes make them, without HTTP. A store that this has filled is filled up.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shlex
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, select, text

from holdfast.core.version import __version__
from holdfast.server.conversations.database import conversations, items, sqlite_path, threads, turns
from holdfast.server.conversations.search_index import CONVERSATIONS, PLACES, index_of, indexed, tenants
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, Context, Turn
from holdfast.server.conversations.words import words_of
from holdfast.server.jobs.tables import STEPS, create_indexes
from holdfast.server.replies import encode

LARGE = "large"
OTHERS = 1000
AT_ONCE = 2000
"""Number of conversations that one transaction of the filling stores."""
WORDS_OF_MESSAGE = 30
RARE = "quokka"
"""Word in one of 10,000 conversations."""
CALLS = 300
"""Number of calls of each kind."""
DAY = 86400.0


def main() -> None:
    """Fill and measure, print a table, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=100_000, help="number of conversations to fill in")
    parser.add_argument("--store", required=True, help="SQLite file, or postgresql://…; empty, or filled by this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the result")
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    filled = fill(asked.store, asked.conversations, draw)
    began = time.perf_counter()
    store = opened(asked.store)
    started = time.perf_counter() - began
    there = asked.conversations
    result = {
        "command": shlex.join(["python", *sys.argv]), "version": __version__, "python": platform.python_version(),
        "processors": os.cpu_count(), "database": described(store), "conversations": there, "fill_s": filled,
        "file_bytes": size_of(asked.store), "start_s": started, "calls_ms": measured(store, there, draw),
    }  # fmt: skip
    store.close()
    print(f"{there:,} conversations, start {started:.3f} s, filled in {filled:.0f} s, {result['file_bytes']:,} bytes")
    for name, each in result["calls_ms"].items():
        print(
            f"{name:34} median {each['median']:8.2f} ms   P99 {each['p99']:8.2f} ms   most {each['most']:8.2f} ms   "
            f"P99 of processor time {each['p99_of_processor']:8.2f} ms"
        )
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


def opened(where: str) -> Store:
    """Open the store, without bounds."""
    bounds = Bounds(seconds=36500 * DAY, threads=math.inf, bytes=math.inf)
    return Store.open(where, bounds, more=STEPS, additions=[create_indexes])


def described(store: Store) -> str:
    """Return the kind of database and its version."""
    engine = store.database.engine
    query = "SELECT sqlite_version()" if engine.dialect.name == "sqlite" else "SHOW server_version"
    with engine.connect() as db:
        return f"{engine.dialect.name} {db.execute(text(query)).scalar_one()}"


def size_of(where: str) -> int | None:
    """Return the size in bytes of a SQLite file; None for another database."""
    path = sqlite_path(where)
    return None if path is None else path.stat().st_size


def name(number: int) -> str:
    """Return the id of a conversation. The ids are in no order, as real ones."""
    return f"conv_{number * 2654435761 % (1 << 32):08x}{number:08x}"


def tenant_of(number: int) -> str:
    """Return the tenant of a conversation."""
    return LARGE if number % 2 == 0 else f"tenant{number // 2 % OTHERS}"


class Writer:
    """Draws messages."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        letters = "abcdefghijklmnopqrstuvwxyz"
        self._words = ["the", *("".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(20_000))]
        self._weights = list(_running([1 / (rank + 1) for rank in range(len(self._words))]))

        self._texts = [
            " ".join(draw.choices(self._words, cum_weights=self._weights, k=WORDS_OF_MESSAGE)) for _ in range(20_000)
        ]

    def message(self, id: str, role: str, last: str = "") -> dict[str, Any]:
        """Return a message. One text in 20,000 is drawn."""
        said = f"{self._draw.choice(self._texts)} {last}"
        return {"id": id, "type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


def _running(numbers: Sequence[float]) -> Iterator[float]:
    total = 0.0
    for number in numbers:
        total += number
        yield total


def fill(where: str, count: int, draw: random.Random) -> float:
    """Store conversations until there are `count`. Returns the seconds that this took."""
    store, writer, began = opened(where), Writer(draw), time.perf_counter()
    with store.database.write() as db:
        there = db.execute(select(func.max(indexed.c.number))).scalar() or 0
        if not there:
            names = [LARGE, *(f"tenant{number}" for number in range(OTHERS))]
            db.execute(insert(tenants), [{"number": number, "tenant": each} for number, each in enumerate(names, 1)])
    for first in range(there, count, AT_ONCE):
        fill_some(store, range(first, min(count, first + AT_ONCE)), writer)
    with store.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as db:
        db.execute(text("ANALYZE"))
        if store.database.engine.dialect.name == "postgresql":
            for table in (indexed, tenants):
                given = {"last": db.execute(select(func.max(table.c.number))).scalar_one()}
                db.execute(text(f"SELECT setval(pg_get_serial_sequence('{table.name}', 'number'), :last)"), given)
    store.close()
    return time.perf_counter() - began


def fill_some(store: Store, numbers: range, writer: Writer) -> None:
    """Store some conversations in one transaction, as many calls of the API would have."""
    rows: dict[str, list[dict[str, Any]]] = {
        "threads": [],
        "conversations": [],
        "items": [],
        "turns": [],
        "indexed": [],
    }
    documents = []
    for number in numbers:
        id, tenant, title = name(number), tenant_of(number), {"title": f"number {number}"}
        of_tenant = 1 if tenant == LARGE else int(tenant.removeprefix("tenant")) + 2
        first = (of_tenant * CONVERSATIONS + number + 1) * PLACES
        said = [writer.message(f"msg_{number}_0", "user", RARE if number % 10_000 == 0 else "")]
        said.append(writer.message(f"msg_{number}_1", "assistant"))
        blobs = [encode(each) for each in said]
        documents.append((first, words_of(title["title"])))
        documents += [(first + at, words_of(each["content"][0]["text"])) for at, each in enumerate(said, 1)]
        rows["threads"].append(
            {"id": id, "tenant": tenant, "active": time.time() - DAY + number / 1000, "bytes": sum(map(len, blobs))}
        )
        rows["conversations"].append(
            {"id": id, "thread": id, "tenant": tenant, "created": int(time.time()), "metadata": encode(title),
             "head": f"resp_{number}" if number % 10 == 0 else None}
        )  # fmt: skip
        rows["items"] += [
            {"conversation": id, "position": at, "id": each["id"], "item": blob}
            for at, (each, blob) in enumerate(zip(said, blobs, strict=True))
        ]
        rows["indexed"].append({"number": number + 1, "conversation": id, "tenant": of_tenant})
        if number % 10 == 0:
            response = {
                "id": f"resp_{number}",
                "status": "completed",
                "created_at": 0,
                "metadata": {},
                "output": said[1:],
            }
            rows["turns"].append(
                {"id": f"resp_{number}", "thread": id, "tenant": tenant, "parent": None, "visible": True,
                 "status": "completed", "response": encode(response), "input": encode(said[:1]), "history": b"[]",
                 "start": 0, "tokens": b"\0" * 400, "characters": 0, "digest": b""}
            )  # fmt: skip
    with store.database.write() as db:
        tables = {"threads": threads, "conversations": conversations, "items": items, "turns": turns}
        for table, some in rows.items():
            if some:
                db.execute(insert(tables.get(table, indexed)), some)
        index_of(db).put(db, documents)


def measured(store: Store, there: int, draw: random.Random) -> dict[str, dict[str, float]]:
    """Return for each kind of call its median, P99 and longest time in milliseconds."""
    writer = Writer(random.Random(0))
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
            "output": [writer.message(f"{fresh}_b", "assistant")],
        }
        given = [writer.message(f"{fresh}_a", "user")]
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
            *conversation(), [writer.message(f"added_{next(made)}", "user")]
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
                store.conversations.create(LARGE, f"fresh_{each}", {}, [writer.message(f"gone_{each}", "user")])
        return fresh.pop()

    gone()
    return {kind: times(call) for kind, call in calls.items()}


def times(call: Callable[[], Any]) -> dict[str, float]:
    """Call CALLS times, at most 20 s. Returns the median, P99 and longest time in milliseconds, and their number.

    The P99 of the processor time leaves out waits for the disk and for other programs.
    """
    took: list[float] = []
    worked: list[float] = []
    while len(took) < CALLS - 1 and sum(took) < 20_000:
        began, began_work = time.perf_counter(), time.thread_time()
        call()
        took.append(1000 * (time.perf_counter() - began))
        worked.append(1000 * (time.thread_time() - began_work))
    took.sort()
    worked.sort()
    return {
        "calls": len(took), "median": took[len(took) // 2], "p99": took[math.ceil(0.99 * len(took)) - 1],
        "most": took[-1],
        "p99_of_processor": worked[math.ceil(0.99 * len(worked)) - 1],
    }  # fmt: skip


if __name__ == "__main__":
    main()
