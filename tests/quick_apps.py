"""Servers of tests without work that each of them repeats. A test's server has over a hundred routes and needs one or
two of them, and its store in memory has the same empty tables as any other. Both took most of the time of its tests.

A server in a process of its own makes its routes when they are asked for, too, and does all other work. One that starts
anew, in a new interpreter as users start it, does all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from typing import Any

import uvicorn.server
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from holdfast.server.conversations.database import MEMORY, Database, MigrationStep
from holdfast.server.conversations.space import Bounds
from holdfast.server.conversations.store import Store

path_parts = cache(compile_path)
"""The regular expression, the format and the converters of a route's path."""


def make_routes_when_asked() -> None:
    """Let a route know its path and its methods, and make the rest of it when someone asks for that."""
    complete = APIRoute.__init__

    def begin(self: Any, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.path, self.endpoint = path, endpoint
        self.path_regex, self.path_format, self.param_convertors = path_parts(path)
        self.methods = {method.upper() for method in options.get("methods") or ["GET"]}
        self.given = options

    def finish(self: Any, name: str) -> Any:
        """Called for an attribute that the route does not have yet."""
        options = self.__dict__.pop("given", None)
        if options is None:
            raise AttributeError(f"a route has no {name}")
        complete(self, self.path, self.endpoint, **options)
        return getattr(self, name)

    APIRoute.__init__ = begin  # type: ignore[assignment]
    APIRoute.__getattr__ = finish  # type: ignore[attr-defined]


class ShortSleeps:
    """The module `asyncio` as uvicorn's server sees it. The server looks every 5 ms, instead of 100, whether to end."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


def end_soon() -> None:
    """Let servers end soon after they are told to."""
    uvicorn.server.asyncio = ShortSleeps()  # type: ignore[attr-defined]


def copy_empty_stores() -> None:
    """Make the tables of a store in memory once, and let later ones begin as a copy."""
    create = Store.open.__func__  # type: ignore[attr-defined]
    images = dict[tuple[Any, ...], bytes]()

    def open(
        cls: type[Store],
        where: str,
        bounds: Bounds,
        now: Callable[[], float] = time.time,
        more: Sequence[MigrationStep] = (),
        additions: Sequence[MigrationStep] = (),
    ) -> Store:
        steps = (*more, None, *additions)
        if where == MEMORY and steps in images:
            store = cls(Database(where), bounds, now)
            with closing(store.database.engine.raw_connection()) as connection:
                connection.driver_connection.deserialize(images[steps])  # type: ignore[union-attr]
            return store
        store = create(cls, where, bounds, now, more, additions)
        if where == MEMORY:
            with closing(store.database.engine.raw_connection()) as connection:
                images[steps] = connection.driver_connection.serialize()  # type: ignore[union-attr]
        return store

    Store.open = classmethod(open)  # type: ignore[assignment,method-assign]
