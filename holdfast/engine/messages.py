"""The messages between the API process and the engine process: typed, in MessagePack. No pickle anywhere."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import AppConfig, EngineConfig, ExecutorName
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
    """Blocks of the KV cache; on padded rows positions, or rows where a state does not grow."""
    block_size: int
    """Tokens of a block; 1 on padded rows."""
    token_budget: int
    max_model_len: int
    max_sequences: int
    max_waiting: int
    vocab_size: int
    started_in: float
    """Seconds from the client's call until the engine was ready."""
    executor: ExecutorName = "paged"
    executor_reason: str = ""
    """Why it is this executor, and what it does with this model, for people."""
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
        # On padded rows the longest sequence is one that fits.
        positions = self.num_blocks * self.block_size if self.executor == "paged" else self.max_model_len
        return RequestLimits(self.max_model_len, self.vocab_size, positions, served)


@dataclass(frozen=True, slots=True)
class TensorField:
    """An input or output of an application, as clients see it: cells.cell.Field without NumPy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """-1 is a dimension of any size from 1 to `limit`."""
    limit: int
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppInfo:
    """An application whose engine is ready, and the engine's sizes."""

    name: str
    inputs: tuple[TensorField, ...]
    outputs: tuple[TensorField, ...]
    cells: tuple[str, ...]
    """The names of the cell types."""
    sizes: tuple[tuple[int, ...], ...]
    """The batch sizes of each."""
    devices: tuple[str, ...]
    """One for each worker."""
    capacity: int
    started_in: float
    """Seconds from the client's call until the engine was ready."""
    stages: tuple[Stage, ...] = ()
    profile_path: str = ""
    """The file with the measured times that picked the sizes; empty if the sizes are the cells' own."""


@dataclass(frozen=True, slots=True)
class CellTypeStats:
    """One cell type of an application as it stands."""

    cell: str
    ready: int
    """Nodes that could run now."""
    tasks: int
    """Tasks in flight."""
    batches: dict[int, int]
    """How many tasks of each size, without padding, have been planned since the start."""


@dataclass(frozen=True, slots=True)
class AppStats:
    """The planner of an application as it stands."""

    waiting: int
    """Requests that have no rows yet."""
    running: int
    """Requests that have rows."""
    rows_used: int
    rows_total: int
    cells: tuple[CellTypeStats, ...]


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""


class Tensor(Message):
    """An array: its elements in row-major order and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class AppResult(Message):
    """A request of an application that has ended."""

    request_id: str
    outputs: dict[str, Tensor]
    scheduled_at: float
    """When the first of its nodes was planned, on the clock that both processes share."""


class Start(Message, tag="start"):
    """To the engine, after its Hello: build this. `began` is when the client's start began, on the shared clock."""

    config: EngineConfig
    began: float
    measure: bool = False
    """Measure the cost profile again, even if it is not needed or was kept from before."""


class StartApp(Message, tag="start-app"):
    """To the engine, after its Hello: build the workers of this application, one of `config.app`."""

    app: str
    config: AppConfig
    began: float
    threads: int | None = None
    measure: int = 0
    """Measure the cells first, at sizes up to this one, and store their times. 0 measures nothing."""


class Submit(Message, tag="submit"):
    """To the engine: queue a request."""

    request: Request


class Infer(Message, tag="infer"):
    """To the engine of an application: unfold these inputs, which fit its fields, and run the graph."""

    request_id: str
    inputs: dict[str, Tensor]
    arrival: float


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


class AppReady(Message, tag="app-ready"):
    """From the engine of an application: it takes requests from now on."""

    info: AppInfo


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


class Results(Message, tag="results"):
    """From the engine of an application: requests that have ended."""

    results: list[AppResult]


class Refused(Message, tag="refused"):
    """From the engine: a request that it refuses, and why."""

    request_id: str
    reason: str


class Failed(Message, tag="failed"):
    """From the engine of an application, whose code failed on this request. The trace is in the log."""

    request_id: str


class Stats(Message, tag="stats"):
    """From the engine: the answer to Ask."""

    number: int
    stats: SchedulerStats


class AppAnswer(Message, tag="app-stats"):
    """From the engine of an application: the answer to Ask."""

    number: int
    stats: AppStats


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


ToEngine = Start | StartApp | Submit | Infer | Abort | Ask | Shutdown
FromEngine = Hello | Progress | Ready | AppReady | Outputs | Results | Refused | Failed | Stats | AppAnswer | Failure

_encode = msgspec.msgpack.Encoder().encode
_EncodedToEngine = Start | StartApp | Submitted | Infer | Abort | Ask | Shutdown
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
