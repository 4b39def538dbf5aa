"""Turns that tests store, and what a process of its own does that stores them. It imports little, so it starts soon."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from holdfast.server.conversations.leases import conversation_key
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import Bounds, Context, Turn
from holdfast.server.protocol import ApiError

AMPLE = Bounds(seconds=1e6, threads=1000, bytes=1 << 30)
CLIENTS = 64
"""Number of turns that a process stores at the same time."""
BUSY = "busy"
"""Conversation that another server locks all the time."""


def item(text: str, role: str = "user") -> dict[str, Any]:
    return {"id": f"msg_{text}", "type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def turn(
    name: str,
    context: Context | None = None,
    *,
    tokens: list[int] | None = None,
    tenant: str = "a",
    status: str = "completed",
    **fields: Any,
) -> Turn:
    """Return a turn that says `name` and is answered in capitals."""
    output = [item(name.upper(), "assistant")] if status in ("completed", "incomplete") else []
    response = {"id": name, "status": status, "output": output}
    return Turn(
        response=response,
        tenant=tenant,
        input=[item(name)],
        context=context or Context(),
        tokens=tokens if tokens is not None else [*(context.tokens if context else ()), len(name)],
        characters=7,
        digest=b"digest",
        **fields,
    )


async def talk(store: AsyncStore, name: str, turns: int) -> None:
    """Store turns of a conversation, and print the id of each once it is stored. Tries to lock BUSY before each."""
    key, busy = conversation_key("a", name), conversation_key("a", BUSY)
    await store.run(lambda store: store.conversations.create("a", name, {}, []))
    for number in range(turns):
        try:
            await store.run(lambda store: store.leases.lock(busy))
            print("the busy conversation was not locked", flush=True)
        except ApiError as error:
            assert (error.status, error.code) == (409, "conversation_busy")
        await store.run(lambda store: store.leases.lock(key))
        context: Context = await store.read(lambda store: store.conversations.context("a", name))
        answered = turn(f"{name}_{number}", context, conversation=name)
        await store.run(lambda store, answered=answered: store.turns.commit(answered))
        print(answered.id, flush=True)
        await store.run(lambda store: store.leases.unlock(key))


async def serve(where: str, process: str) -> None:
    """Store the turns of CLIENTS clients at once. A line on the standard input says how many turns each stores."""
    store = AsyncStore(Store.open(where, AMPLE))
    print("ready", flush=True)
    turns = int(await asyncio.to_thread(sys.stdin.readline))
    await asyncio.gather(*(talk(store, f"p{process}c{number}", turns) for number in range(CLIENTS)))
    await asyncio.to_thread(store.close)
