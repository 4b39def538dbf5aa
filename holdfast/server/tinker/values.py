"""Sessions, models, futures and checkpoints as plain values. Times are in seconds since 1970. Imports no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, field

Kind = Literal["forward", "forward_backward", "optimize", "save", "save_adapter", "load"]
"""Kinds of calls that the engine carries out."""
State = Literal["pending", "done", "failed", "expired"]
"""State of a future. One that is expired has ended, and its result is deleted."""
Category = Literal["", "user", "server"]
"""Who is at fault for a failed future; empty for any other future."""
CheckpointKind = Literal["training", "sampler"]
PLACES: Mapping[CheckpointKind, str] = {"training": "weights", "sampler": "sampler_weights"}
"""Middle part of a checkpoint's path, by its kind."""
SCHEME = "tinker://"


class Session(Struct, frozen=True, kw_only=True):
    """A running client. It owns models and sampling sessions, and shows that it runs by heartbeats."""

    id: str
    tenant: str
    created: float
    seen: float
    """Time of the last heartbeat."""
    finished: str = ""
    """Reason that the client gave when it finished the session; empty before that."""
    name: str | None = None
    metadata: Mapping[str, Any] | None = None
    tags: Sequence[str] = ()
    sdk: str = ""
    """Version of the client's SDK."""


class Model(Struct, frozen=True, kw_only=True):
    """A LoRA adapter that a client trains, from its creation on."""

    id: str
    tenant: str
    session: str
    base: str
    """Name of the base model."""
    created: float
    rank: int
    seed: int
    attn: bool = True
    """Whether the attention's projections are trained."""
    mlp: bool = True
    unembed: bool = True
    """Whether the client asked to train the head. It is never trained; the answer of get_info says so."""
    metadata: Mapping[str, Any] | None = None
    status: Literal["open", "closed", "failed"] = "open"
    reason: str = ""
    """Reason why the model has failed."""
    modules: Sequence[str] = ()
    """Modules that have an adapter. Empty until the engine has opened the model."""

    @property
    def job(self) -> str:
        """Id of the model's driven job, which is also the name of its directory."""
        return self.id.replace(":", "-")


class Future(Struct, frozen=True, kw_only=True):
    """A request whose result the client asks for later."""

    id: str
    tenant: str
    item: str
    """Model or sampling session that the request belongs to."""
    seq: int
    """Number of the request within its item, given by the client."""
    kind: str
    """Kind of the request: a `Kind`, create_model, unload_model, or sample."""
    digest: str
    """Digest of the request's content. A request that is sent again has the same one."""
    created: float
    call: int | None = None
    """Number of the engine's call; None until the requests before it are known, or if the request needs no call."""
    state: State = "pending"
    ended: float | None = None
    error: str = ""
    category: Category = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Values that the request's end needs, for example the id of the checkpoint that it writes."""
    media: str = ""
    """Content type of the result's bytes; empty if the result is in a file of the model."""


class Checkpoint(Struct, frozen=True, kw_only=True):
    """Saved weights of a model: a state to train on from, or an adapter to sample with."""

    id: str
    tenant: str
    model: str
    kind: CheckpointKind
    name: str
    created: float
    directory: str
    ready: bool = False
    """Whether the weights are written."""
    listed: bool = True
    """Whether lists show it. The weights of a sampling client without a name are not listed."""
    bytes: int = 0
    expires: float | None = None
    public: bool = False
    metadata: Mapping[str, str] | None = None

    @property
    def path(self) -> str:
        """Path by which clients name the checkpoint."""
        return f"{SCHEME}{self.model}/{PLACES[self.kind]}/{self.name}"
