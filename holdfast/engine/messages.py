"""What crosses between the API and the engine process: typed messages in MessagePack. Nothing is ever unpickled."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import EngineConfig
from holdfast.core.types import FinishReason, Request, SequenceOutput
from holdfast.lm.limits import RequestLimits
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

MESSAGE_LIMIT = 128 << 20
"""Most bytes of one message: a prompt of the longest length that a configuration allows fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is, once it is ready."""

    model: str
    """The name under which it is served."""
    device: str
    precision: str
    """The type of weights, activations and cache, and what of them is in FP8, for people."""
    memory: MemoryMeasurement
    num_blocks: int
    block_size: int
    token_budget: int
    max_model_len: int
    max_sequences: int
    max_waiting: int
    vocab_size: int
    started_in: float
    """Seconds from the client's call until ready."""
    stages: tuple[tuple[str, float], ...] = ()
    """What these were spent on, in order: each stage of the start in words, and its seconds."""
    num_host_blocks: int = 0
    """Blocks of the host tier."""
    profile_path: str = ""
    """The file with the device's cost profile; empty if the engine needed none."""

    @property
    def limits(self) -> RequestLimits:
        """What a request must keep to."""
        return RequestLimits(self.max_model_len, self.vocab_size, self.num_blocks * self.block_size)


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""


class Start(Message, tag="start"):
    """To the engine, once it said hello: build this. `began` is when the client was asked to, on the shared clock."""

    config: EngineConfig
    began: float
    measure: bool = False
    """Measure the device's profile anew, whether it is needed or kept or not."""


class Submit(Message, tag="submit"):
    """To the engine: queue a request."""

    request: Request


class Abort(Message, tag="abort"):
    """To the engine: let go of a request. One that has ended is ignored."""

    request_id: str


class Ask(Message, tag="ask"):
    """To the engine: answer with Stats between two steps."""

    number: int


class Shutdown(Message, tag="shutdown"):
    """To the engine: end now, whatever runs."""


class Hello(Message, tag="hello"):
    """From the engine, first of all: the process runs and the socket is connected."""


class Progress(Message, tag="progress"):
    """From the engine while it starts: what it does next, in words for people."""

    stage: str


class Ready(Message, tag="ready"):
    """From the engine: requests are taken."""

    info: EngineInfo


class Outputs(Message, tag="outputs"):
    """From the engine: all that one step gave, the fields of SequenceOutput by column."""

    columns: tuple[list[str], list[tuple[int, ...]], list[FinishReason | None], list[int], list[float], list[int]]

    @property
    def outputs(self) -> Columns[SequenceOutput]:
        """The same by sequence."""
        return Columns(SequenceOutput, self.columns)


class Refused(Message, tag="refused"):
    """From the engine: a request that it does not take, and why."""

    request_id: str
    reason: str


class Stats(Message, tag="stats"):
    """From the engine: the answer to Ask."""

    number: int
    stats: SchedulerStats


class Failure(Message, tag="failure"):
    """From the engine, last of all: why it ends. One line."""

    reason: str


class Submitted(Message, tag="submit"):
    """Submit on its way: the prompt as 32-bit numbers, as both ends are one machine; a number each takes far longer."""

    request: Request
    prompt: bytes

    @classmethod
    def of(cls, request: Request) -> Submitted:
        """Pack a request. Raises OverflowError for tokens that are no 32-bit numbers."""
        return cls(replace(request, prompt=()), array("I", request.prompt).tobytes())

    def submit(self) -> Submit:
        """The message as it was meant. Raises ValueError for part of a number."""
        data = self.prompt
        if len(data) % 4:
            raise ValueError(f"a prompt of {len(data)} bytes, which is no whole number of tokens")
        return Submit(replace(self.request, prompt=array("I", data)))


ToEngine = Start | Submit | Abort | Ask | Shutdown
FromEngine = Hello | Progress | Ready | Outputs | Refused | Stats | Failure

_encode = msgspec.msgpack.Encoder().encode
_to_engine: msgspec.msgpack.Decoder[Start | Submitted | Abort | Ask | Shutdown] = msgspec.msgpack.Decoder(
    Start | Submitted | Abort | Ask | Shutdown
)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """A message as bytes. Raises ValueError beyond MESSAGE_LIMIT."""
    return _bounded(_encode(Submitted.of(message.request) if isinstance(message, Submit) else message))


def decode_to_engine(data: bytes) -> ToEngine:
    """Read what the client sent. Raises ValueError for anything but a message to the engine."""
    message = _to_engine.decode(_bounded(data))
    return message.submit() if isinstance(message, Submitted) else message


def decode_from_engine(data: bytes) -> FromEngine:
    """Read what the engine sent. Raises ValueError for anything but a message from the engine."""
    return _from_engine.decode(_bounded(data))


def _bounded(data: bytes) -> bytes:
    if len(data) > MESSAGE_LIMIT:
        raise ValueError(f"a message of {len(data)} bytes; at most {MESSAGE_LIMIT} may cross between the processes")
    return data
