"""The messages between the API process and the engine process: typed, in MessagePack. No pickle anywhere."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import EngineConfig
from holdfast.core.stages import Stage
from holdfast.core.types import FinishReason, Identity, Request, SequenceOutput
from holdfast.lm.limits import RequestLimits
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

MESSAGE_LIMIT = 128 << 20
"""Most bytes of one message. The longest prompt that a configuration allows fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model, device and sizes of an engine that is ready."""

    model: str
    """The name under which the model is served."""
    precision: str
    """The type of weights, activations and cache, for people; names those that are in FP8."""
    memory: MemoryMeasurement
    num_blocks: int
    block_size: int
    token_budget: int
    max_model_len: int
    max_sequences: int
    max_waiting: int
    vocab_size: int
    started_in: float
    """Seconds from the client's call until the engine was ready."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    profile_path: str = ""
    """The file with the device's cost profile; empty if the engine needed none."""
    stages: tuple[Stage, ...] = ()
    """The stages of the start, counted from the client's call. They may overlap."""

    @property
    def limits(self) -> RequestLimits:
        """The sizes that bound a request."""
        served = Identity(self.model, dtype=self.precision)
        return RequestLimits(self.max_model_len, self.vocab_size, self.num_blocks * self.block_size, served)


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""


class Start(Message, tag="start"):
    """To the engine, after its Hello: build this. `began` is when the client's start began, on the shared clock."""

    config: EngineConfig
    began: float
    measure: bool = False
    """Measure the cost profile again, even if it is not needed or was kept from before."""


class Submit(Message, tag="submit"):
    """To the engine: queue a request."""

    request: Request


class Abort(Message, tag="abort"):
    """To the engine: drop a request. Ignored if it has ended."""

    request_id: str


class Ask(Message, tag="ask"):
    """To the engine: answer with Stats between two steps."""

    number: int


class Shutdown(Message, tag="shutdown"):
    """To the engine: end now, even while requests run."""


class Hello(Message, tag="hello"):
    """From the engine, its first message: the process runs and the socket is connected."""


class Progress(Message, tag="progress"):
    """From the engine while it starts: its next stage, for people."""

    stage: str


class Ready(Message, tag="ready"):
    """From the engine: it takes requests from now on."""

    info: EngineInfo


class Outputs(Message, tag="outputs"):
    """From the engine: the outputs of one step, as one column for each field of SequenceOutput."""

    request_id: list[str]
    tokens: list[tuple[int, ...]]
    finish_reason: list[FinishReason | None]
    cached_tokens: list[int]
    scheduled_at: list[float]
    preemptions: list[int]

    @property
    def outputs(self) -> Columns[SequenceOutput]:
        """The outputs as one SequenceOutput for each sequence."""
        return Columns(SequenceOutput, **msgspec.structs.asdict(self))


class Refused(Message, tag="refused"):
    """From the engine: a request that it refuses, and why."""

    request_id: str
    reason: str


class Stats(Message, tag="stats"):
    """From the engine: the answer to Ask."""

    number: int
    stats: SchedulerStats


class Failure(Message, tag="failure"):
    """From the engine, its last message: why it ends. One line."""

    reason: str


class Submitted(Message, tag="submit"):
    """The encoded form of Submit: its prompt is 32-bit numbers in native order, far faster than a MessagePack array."""

    request: Request
    prompt: bytes

    @classmethod
    def of(cls, request: Request) -> Submitted:
        """Pack a request. Raises OverflowError for tokens that exceed 32 bits."""
        return cls(replace(request, prompt=()), array("I", request.prompt).tobytes())

    def submit(self) -> Submit:
        """Unpack the request. Raises ValueError if the bytes end within a number."""
        data = self.prompt
        if len(data) % 4:
            raise ValueError(f"a prompt of {len(data)} bytes, which is not a whole number of tokens")
        return Submit(replace(self.request, prompt=array("I", data)))


ToEngine = Start | Submit | Abort | Ask | Shutdown
FromEngine = Hello | Progress | Ready | Outputs | Refused | Stats | Failure

_encode = msgspec.msgpack.Encoder().encode
_EncodedToEngine = Start | Submitted | Abort | Ask | Shutdown
_to_engine: msgspec.msgpack.Decoder[_EncodedToEngine] = msgspec.msgpack.Decoder(_EncodedToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes. Raises ValueError beyond MESSAGE_LIMIT."""
    return _bounded(_encode(Submitted.of(message.request) if isinstance(message, Submit) else message))


def decode_to_engine(data: bytes) -> ToEngine:
    """Read a message from the client. Raises ValueError for anything else."""
    message = _to_engine.decode(_bounded(data))
    return message.submit() if isinstance(message, Submitted) else message


def decode_from_engine(data: bytes) -> FromEngine:
    """Read a message from the engine. Raises ValueError for anything else."""
    return _from_engine.decode(_bounded(data))


def _bounded(data: bytes) -> bytes:
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT} may cross between the processes")
    return data
