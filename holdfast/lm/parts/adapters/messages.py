"""Messages about adapters."""

from __future__ import annotations

from holdfast.core.types import AdapterInfo
from holdfast.lm.parts.message import Message


class LoadAdapter(Message, tag="load-adapter"):
    """To the engine: read the adapter in this directory and serve it; the answer is AdapterLoaded or AdapterRefused."""

    number: int
    name: str
    path: str


class UnloadAdapter(Message, tag="unload-adapter"):
    """To the engine: forget this adapter, a content id, once its requests have ended; then answer AdapterUnloaded."""

    number: int
    adapter: str


class AdapterLoaded(Message, tag="adapter-loaded"):
    """From the engine: requests may name this adapter from now on."""

    number: int
    info: AdapterInfo


class AdapterRefused(Message, tag="adapter-refused"):
    """From the engine: an adapter that it does not load, with the reason. The reason names no directory."""

    number: int
    reason: str


class AdapterUnloaded(Message, tag="adapter-unloaded"):
    """From the engine: the adapter is forgotten."""

    number: int


ToEngine = LoadAdapter | UnloadAdapter
FromEngine = AdapterLoaded | AdapterRefused | AdapterUnloaded
