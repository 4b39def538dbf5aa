"""The messages between the API process and the engine process: typed, in MessagePack. No pickle anywhere."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import AppConfig, ExecutorName
from holdfast.core.contract import Refusal
from holdfast.core.stages import Stage
from holdfast.core.types import AdapterInfo, FinishReason, Identity, Request, SequenceOutput, TokenLogprobs
from holdfast.engine.activity import StepRecord
from holdfast.lm.config import EngineConfig
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_map import ConversationBlocks
from holdfast.lm.parts.adapters import messages as adapters
from holdfast.lm.parts.message import Message
from holdfast.lm.parts.moves import messages as moves
from holdfast.lm.parts.pauses import messages as pauses
from holdfast.lm.parts.sleep import messages as sleep
from holdfast.lm.parts.tuning import messages as tuning
from holdfast.lm.scheduler.queue_report import QueueReport
from holdfast.lm.types import MemoryMeasurement, SchedulerStats

MESSAGE_LIMIT = 128 << 20
"""Largest size of one message in bytes. The longest prompt that a configuration allows fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The model, device and sizes of an engine that is ready."""

    model: str
    """The name under which the model is served."""
    precision: str
    """The type of weights, activations and cache, in words. It names the parts that are in FP8."""
    memory: MemoryMeasurement
    num_blocks: int
    """Number of blocks in the KV cache. On padded rows: positions, or rows if a state does not grow."""
    block_size: int
    """Number of tokens in a block; 1 on padded rows."""
    token_budget: int
    max_model_len: int
    max_sequences: int
    max_waiting: int
    vocab_size: int
    started_in: float
    """Seconds from the client's call until the engine was ready."""
    executor: ExecutorName = "paged"
    executor_reason: str = ""
    """Why this executor was chosen, and what it does with this model, in words."""
    num_host_blocks: int = 0
    """Number of blocks in the host tier."""
    adapters: tuple[AdapterInfo, ...] = ()
    """The adapters that are served from the start."""
    adapter_slots: int = 0
    """Number of adapters that the device holds at a time; 0 if none are served."""
    gives_hidden: bool = False
    """Whether the engine can give hidden states: for log probabilities of prompts, and for embeddings."""
    tp: int = 1
    """Number of devices that share each layer. `memory` is the sum over all devices."""
    pp: int = 1
    """Number of stages that share the layers."""
    profile_path: str = ""
    """The file with the device's cost profile; empty if the engine needed none."""
    stages: tuple[Stage, ...] = ()
    """The stages of the start, counted from the client's call. They may overlap."""
    chunk_address: str = ""
    """Address at which other engines fetch this one's KV blocks, as `host:port`; empty if blocks are not moved."""
    chunk_reason: str = ""
    """The reason why blocks are not moved, in words; empty if they are."""
    remote_trouble: str = ""
    """The reason why the remote tier did not work at the start, in words; empty if it did, or if there is none."""
    budget_note: str = ""
    """The difference between the configured token budget and what steps hold, in words; empty if there is none."""

    @property
    def limits(self) -> RequestLimits:
        """The sizes that bound a request."""
        served = Identity(self.model, dtype=self.precision)
        # On padded rows the longest sequence is one that fits.
        positions = self.num_blocks * self.block_size if self.executor == "paged" else self.max_model_len
        return RequestLimits(self.max_model_len, self.vocab_size, positions, served, self.gives_hidden)


@dataclass(frozen=True, slots=True)
class TensorField:
    """An input or output of an application, as clients see it: cells.cell.Field without NumPy."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Size of each dimension; -1 is a dimension of any size from 1 to `limit`."""
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
    """The supported batch sizes of each cell type."""
    devices: tuple[str, ...]
    """The device of each worker."""
    capacity: int
    started_in: float
    """Seconds from the client's call until the engine was ready."""
    stages: tuple[Stage, ...] = ()
    profile_path: str = ""
    """The file with the measured times that picked the sizes; empty if the sizes are the cells' own."""


@dataclass(frozen=True, slots=True)
class CellTypeStats:
    """The present state of one cell type of an application."""

    cell: str
    ready: int
    """Number of nodes that could run now."""
    tasks: int
    """Number of tasks in flight."""
    batches: dict[int, int]
    """Number of tasks planned since the start, by batch size without padding."""


@dataclass(frozen=True, slots=True)
class AppStats:
    """The present state of an application's planner."""

    waiting: int
    """Number of requests that have no rows yet."""
    running: int
    """Number of requests that have rows."""
    rows_used: int
    rows_total: int
    cells: tuple[CellTypeStats, ...]


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
    """Time at which the first of its nodes was planned, on the clock that both processes share."""


class Start(Message, tag="start"):
    """To the engine, after its Hello: build this. `began` is when the client's start began, on the shared clock."""

    config: EngineConfig
    began: float
    measure: bool = False
    """Measure the cost profile again, even if it is not needed or was kept from before."""
    chunk_secret: bytes = b""
    """Secret by which engines recognise each other before KV blocks move between them."""
    priced: bool = False
    """Find the cost profile even if the engine needs none: its client prices requests."""
    ledger: str = ""
    """Path of the page in which it reports its work to applications on its device (`engine.ledger`); empty: none."""
    listen: str = ""
    """Address at which further clients attach, as `engine.address` reads it; empty: none can."""
    listen_key: str = ""
    """The secret key that these clients share with the engine, in Z85; empty for an address on this machine."""


class Attach(Message, tag="attach"):
    """To an engine that listens at an address: a new client's first message. The answer is Attached or Failure."""

    version: str
    """The client's version of Holdfast."""
    wire: int = 1
    """The version of the client's messages (`engine.wire`)."""


class Detach(Message, tag="detach"):
    """To an engine that listens at an address: an attached client's last message. Its requests are aborted."""


class Drain(Message, tag="drain"):
    """To an engine that listens at an address, from the client that started it: take no new clients from now on.

    The attached clients get Draining. The answer is Drained, once all have left.
    """

    number: int
    seconds: float
    """Time that the attached clients have."""


class StartApp(Message, tag="start-app"):
    """To the engine, after its Hello: build the workers of this application, one of `config.app`."""

    app: str
    config: AppConfig
    began: float
    threads: int | None = None
    measure: int = 0
    """Measure the cells first, at sizes up to this one, and store their times. 0 measures nothing."""
    ledger: str = ""
    """Path of the page in which a language model on the same device reports its work; empty: there is none."""


class Submit(Message, tag="submit"):
    """To the engine: queue a request."""

    request: Request
    note: bytes = b""
    """Data with which another client can continue the request. Not empty: an engine that listens holds the request's
    tokens for a while, and the request outlives its client (`engine.process.held`)."""


class Infer(Message, tag="infer"):
    """To the engine of an application: unfold these inputs, which fit its fields, and run the graph."""

    request_id: str
    inputs: dict[str, Tensor]
    arrival: float


class Abort(Message, tag="abort"):
    """To the engine: drop a request. Ignored if it has ended."""

    request_id: str
    complete: bool = False
    """Whether the answer is complete: it has a stop string, which only the client looks for."""


class Introduce(Message, tag="introduce"):
    """To an engine that listens at an address: the name of this client's server. The engine sends Servers to all."""

    server: str


class Adopt(Message, tag="adopt"):
    """To an engine that listens at an address: give this client a request whose own client is lost.

    It answers Adopted. The outputs of the request then come to this client.
    """

    number: int
    tenant: str
    request_id: str
    """The id that the lost client gave to the request."""


class Ask(Message, tag="ask"):
    """To the engine: answer with Stats between two steps."""

    number: int


class CountClients(Message, tag="count-clients"):
    """To an engine that listens at an address: answer with ClientCount."""

    number: int


class Watch(Message, tag="watch"):
    """To the engine: send Activity for `seconds` seconds from now on; 0 stops it."""

    seconds: float


class TokenWaits(Message, tag="token-waits"):
    """To an engine with a latency target: times between two tokens since the last such message. There is no answer.

    Only streams count, and only times in which the stream's reader waited for the engine. Late tokens that no smaller
    step would have mended are left out.
    """

    count: int
    late: int
    """Number of times above the target."""


class Shutdown(Message, tag="shutdown"):
    """To the engine: end now, even while requests run."""


class Hello(Message, tag="hello"):
    """From the engine, its first message: the process runs and the socket is connected."""

    now: float = 0.0
    """The engine's monotonic clock in seconds. Another host does not share it."""


class Progress(Message, tag="progress"):
    """From the engine while it starts: its next stage, in words."""

    stage: str


class Ready(Message, tag="ready"):
    """From the engine: it takes requests from now on."""

    info: EngineInfo


class Attached(Message, tag="attached"):
    """From an engine that listens at an address: what a new client must know. It may send requests from now on."""

    config: EngineConfig
    info: EngineInfo
    profile_content: bytes = b""
    """The content of the file `info.profile_path`, for clients on other hosts; empty if there is none."""
    now: float = 0.0
    """The engine's monotonic clock in seconds. Another host does not share it."""
    version: str = ""
    """The engine's version of Holdfast; empty if it is too old to say so."""
    wire: int = 1
    """The version of the engine's messages (`engine.wire`)."""


class Draining(Message, tag="draining"):
    """From an engine that listens at an address: it ends soon. Send no new requests, and leave once yours have ended.

    It is also the answer to Attach, and then nobody is attached.
    """

    seconds: float
    """Time until the engine ends in any case."""


class Drained(Message, tag="drained"):
    """From an engine: the answer to Drain. All clients have left."""

    number: int


class Servers(Message, tag="servers"):
    """From an engine that listens at an address: which servers are attached, and which have left lately."""

    present: list[str]
    left: list[str]


class Held(Message):
    """A held request, and its answer so far. Token ids are 32-bit numbers in native order."""

    request: Request
    """The request without its prompt."""
    prompt: bytes
    note: bytes
    tokens: bytes
    """Tokens of the answer since the request came to this engine."""
    logprobs: list[TokenLogprobs]
    """Log probabilities of `tokens`, if the request asks for them."""
    cached_tokens: int
    cached_by_tier: tuple[int, int, int]
    scheduled_at: float
    finish_reason: FinishReason | None
    ended: bool
    """Whether no more tokens come."""


class Adopted(Message, tag="adopted"):
    """From an engine that listens at an address: the answer to Adopt."""

    number: int
    held: Held | None = None
    """The request, if its client is lost or it has ended. None: it is not held, or its client is there."""
    yours: bool = False
    """Whether it belongs to this client from now on. An ended request stays with its client while that is there."""


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
    logprobs: list[tuple[TokenLogprobs, ...]]
    prompt_logprobs: list[tuple[TokenLogprobs, ...]]
    vector: list[bytes]
    cached_by_tier: list[tuple[int, int, int]]
    prompt_ranks: list[tuple[int, ...]] = msgspec.field(default_factory=list)
    """Empty if the engine has an older version."""
    sent_at: float = 0.0
    """When the engine sent them, in seconds on its monotonic clock; 0: unknown."""

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The columns by name."""
        columns = msgspec.structs.asdict(self)
        del columns["sent_at"]
        columns["prompt_ranks"] = self.prompt_ranks or [()] * len(self.request_id)
        return columns

    @property
    def outputs(self) -> Columns[SequenceOutput]:
        """The outputs as one SequenceOutput for each sequence."""
        return Columns(SequenceOutput, **self.columns)


class Results(Message, tag="results"):
    """From the engine of an application: requests that have ended."""

    results: list[AppResult]


class Refused(Message, tag="refused"):
    """From the engine: a request that it refuses, with the reason."""

    request_id: str
    reason: str
    param: str = "prompt"
    """The field of the request that is at fault, as `RequestRefused` names it."""


class ContractRefusal(Message, tag="contract-refusal"):
    """From the engine: a request that it refuses because it cannot keep its contract."""

    request_id: str
    refusal: Refusal


class Failed(Message, tag="failed"):
    """From the engine of an application, whose code failed on this request. The trace is in the log."""

    request_id: str


class Tick(Message, tag="tick"):
    """To an engine on another host, from time to time: report your clock, and that you are there. It answers Clock."""


class Clock(Message, tag="clock"):
    """From the engine: the answer to Tick."""

    now: float


class Stats(Message, tag="stats"):
    """From the engine: the answer to Ask."""

    number: int
    stats: SchedulerStats


class ClientCount(Message, tag="client-count"):
    """From an engine that listens at an address: the answer to CountClients."""

    number: int
    count: int
    """Number of attached clients. The process that started the engine is none of them."""


class Steps(Message, tag="steps"):
    """From the engine: the steps that computed tokens since the last such message, oldest first."""

    tokens: list[int]
    """Number of query tokens in each step."""
    seconds: list[float]
    """Seconds that the device spent on each step."""
    under_way: float = 0.0
    """Seconds of this time in which steps were in flight."""
    stages: tuple[float, ...] = ()
    """Seconds in which each stage of the pipeline computed. One stage is the whole device. Empty: no step ended."""


class Activity(Message, tag="activity"):
    """From an engine that is watched: its activity since the last such message, and its present state."""

    at: float
    """Time at which it was sent, in seconds on the clock of the records."""
    begins: bool
    """Whether it is the first since watching began. The client then discards all earlier ones."""
    steps: list[StepRecord]
    blocks: list[ConversationBlocks]
    """The conversations whose blocks have changed."""
    queues: QueueReport | None = None
    stats: SchedulerStats | None = None
    costs: list[tuple[int, float]] | None = None
    """Cost of computing a chunk again, by block of its conversation, at some places. Only in the first message.
    """


class AppAnswer(Message, tag="app-stats"):
    """From the engine of an application: the answer to Ask."""

    number: int
    stats: AppStats


class Failure(Message, tag="failure"):
    """From the engine, its last message: the reason why it ends, in one line."""

    reason: str


class Submitted(Message, tag="submit"):
    """The encoded form of Submit. Its prompt is 32-bit numbers in native order, far faster than a MessagePack array."""

    request: Request
    prompt: bytes
    note: bytes = b""

    @classmethod
    def of(cls, submit: Submit) -> Submitted:
        """Pack a request. Raises OverflowError for tokens that exceed 32 bits."""
        request = submit.request
        return cls(replace(request, prompt=()), array("I", request.prompt).tobytes(), submit.note)

    def submit(self) -> Submit:
        """Unpack the request. Raises ValueError if the bytes end within a number."""
        data = self.prompt
        if len(data) % 4:
            raise ValueError(f"a prompt of {len(data)} bytes, which is not a whole number of tokens")
        return Submit(replace(self.request, prompt=array("I", data)), self.note)


ToEngine = (
    Start | StartApp | Attach | Detach | Introduce | Drain | Submit | Infer | Abort | Adopt | Ask | CountClients
    | Watch | TokenWaits | Tick | Shutdown | adapters.ToEngine | tuning.ToEngine | moves.ToEngine | pauses.ToEngine
    | sleep.ToEngine
)  # fmt: skip
FromEngine = (
    Hello | Progress | Ready | Attached | Draining | Drained | Servers | Adopted | AppReady | Outputs | Results
    | Refused | ContractRefusal | Failed | Stats | Clock | ClientCount | Steps | Activity | AppAnswer | Failure
    | adapters.FromEngine | tuning.FromEngine | moves.FromEngine | sleep.FromEngine
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_EncodedToEngine = (
    Start | StartApp | Attach | Detach | Introduce | Drain | Submitted | Infer | Abort | Adopt | Ask | CountClients
    | Watch | TokenWaits | Tick | Shutdown | adapters.ToEngine | tuning.ToEngine | moves.ToEngine | pauses.ToEngine
    | sleep.ToEngine
)  # fmt: skip
_to_engine: msgspec.msgpack.Decoder[_EncodedToEngine] = msgspec.msgpack.Decoder(_EncodedToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: Message) -> bytes:
    """A message as bytes. Raises ValueError beyond MESSAGE_LIMIT."""
    return _bounded(_encode(Submitted.of(message) if isinstance(message, Submit) else message))


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
