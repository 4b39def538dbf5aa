"""The messages between the API process and the engine process: typed, in MessagePack. No pickle anywhere."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import AppConfig, EngineConfig, ExecutorName
from holdfast.core.stages import Stage
from holdfast.core.types import AdapterInfo, FinishReason, Identity, Request, SequenceOutput, TokenLogprobs
from holdfast.engine.activity import StepRecord
from holdfast.lm.limits import RequestLimits
from holdfast.lm.memory.block_map import ConversationBlocks
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


JobAction = Literal["pause", "resume", "cancel", "leave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStart:
    """A tuning job as its owner asks for it. JobInfo has the values that the engine chose."""

    id: str
    """Letters, digits, and . _ -; at most 128. A job that continues keeps its id."""
    directory: str
    """Directory of this job alone. It holds examples.bin, and validation.bin if there is a `validation_digest`."""
    name: str
    """Name under which the finished adapter is served, at once. It must be free at the start and at the end."""
    tenant: str = ""
    """The owner. Jobs of several tenants take turns. The caller decides who may name the adapter."""
    data_digest: str
    """SHA-256 of examples.bin in hexadecimal, as `write_examples` returns it."""
    validation_digest: str = ""
    epochs: int | None = None
    """Number of epochs. None, here and below: chosen by the number of examples (`auto_epochs`, `auto_batch_size`)."""
    batch_size: int | None = None
    """Number of examples in an optimizer step."""
    learning_rate: float = 2e-4
    rank: int = 16
    alpha: float | None = None
    """Scale of the adapter. None: twice the rank."""
    modules: tuple[str, ...] = ()
    """Layers to adapt, out of q, k, v, o, gate, up, down. Empty: all of them."""
    micro_batch: int | None = None
    """Most tokens that are computed at once. None: the engine's configuration applies."""
    seed: int = 0
    paused: bool = False
    """Begin paused: nothing runs before `resume`."""
    known: int = 0
    """Number of finished steps whose events the owner has received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInfo:
    """A job as the engine has accepted it."""

    id: str
    step: int
    """Optimizer steps done, and stored, before it was started here."""
    steps: int
    """Number of optimizer steps in the whole job."""
    examples: int
    trained_tokens: int
    """Number of tokens trained in the finished steps."""
    loss: float | None
    """Loss of the last finished step; None before the first."""
    validation: float | None
    """Loss of the last validation; None before the first."""
    checkpoint: str
    """Directory of the adapter after the last complete epoch, in PEFT's format; empty if there is none."""
    epochs: int
    batch_size: int
    learning_rate: float
    rank: int
    alpha: float
    modules: tuple[str, ...]
    micro_batch: int
    untold: tuple[JobStep, ...] = ()
    """Steps done after those that the owner knows, in order. None of them names a checkpoint."""


class JobStep(msgspec.Struct, array_like=True, frozen=True, tag="step"):
    """An optimizer step is done and stored: a killed engine does not compute it again."""

    job: str
    step: int
    """Number of steps done including this one: 1 to `steps`, each once and in order."""
    steps: int
    """Number of optimizer steps in the whole job."""
    tokens: int
    """Number of tokens that this step trained on."""
    loss: float
    """Mean over the step's weighted tokens, before its update."""
    validation: float | None = None
    """Mean over the validation examples, after the update, at each epoch's end and every 100 steps; else None."""
    checkpoint: str = ""
    """The directory of the adapter after this step, if it ended an epoch; else empty."""


class JobStatus(msgspec.Struct, array_like=True, frozen=True, tag="status"):
    """The job has a new status. The first comes after the start."""

    job: str
    status: Literal["queued", "running", "paused"]
    """queued: another job's turn; running: its steps are computed when there is time; paused: by request."""


class JobEnded(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """The last event of a job. Its directory belongs to the caller again."""

    job: str
    outcome: Literal["succeeded", "failed", "cancelled", "left"]
    """left: its state is on the disk, and it continues when it is started again."""
    reason: str = ""
    """The reason why it failed, in one line; empty if it did not."""
    adapter: AdapterInfo | None = None
    """The adapter, if the job succeeded: requests may name it from now on."""
    checkpoint: str = ""
    """The adapter's directory, if the job succeeded."""


JobEvent = JobStep | JobStatus | JobEnded


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


class Infer(Message, tag="infer"):
    """To the engine of an application: unfold these inputs, which fit its fields, and run the graph."""

    request_id: str
    inputs: dict[str, Tensor]
    arrival: float


class Abort(Message, tag="abort"):
    """To the engine: drop a request. Ignored if it has ended."""

    request_id: str


class LoadAdapter(Message, tag="load-adapter"):
    """To the engine: read the adapter in this directory and serve it; the answer is AdapterLoaded or AdapterRefused."""

    number: int
    name: str
    path: str


class UnloadAdapter(Message, tag="unload-adapter"):
    """To the engine: forget this adapter, a content id, once its requests have ended; then answer AdapterUnloaded."""

    number: int
    adapter: str


class StartJob(Message, tag="start-job"):
    """To the engine: take this tuning job; the answer is JobStarted or JobRefused."""

    number: int
    job: JobStart


class ChangeJob(Message, tag="change-job"):
    """To the engine: pause, resume, cancel or leave this open job; the answer is JobChanged or JobRefused."""

    number: int
    job: str
    action: JobAction


class FindChunks(Message, tag="find-chunks"):
    """To the engine: report how much of this chain of block digests is here; the answer is ChunksFound."""

    number: int
    chain: list[bytes]


class FetchChunks(Message, tag="fetch-chunks"):
    """To the engine: bring these blocks of a sequence from another engine; the answer is ChunksFetched."""

    number: int
    digests: list[bytes]
    indices: list[int]
    """Index of each block in its sequence, 0 for the first block."""
    source: str
    """The other engine's `EngineInfo.chunk_address`."""
    block_size: int


class StopFetch(Message, tag="stop-fetch"):
    """To the engine: give up the rest of a fetch. Its answer comes nevertheless."""

    number: int


class Ask(Message, tag="ask"):
    """To the engine: answer with Stats between two steps."""

    number: int


class Watch(Message, tag="watch"):
    """To the engine: send Activity for `seconds` seconds from now on; 0 stops it."""

    seconds: float


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

    @property
    def outputs(self) -> Columns[SequenceOutput]:
        """The outputs as one SequenceOutput for each sequence."""
        return Columns(SequenceOutput, **msgspec.structs.asdict(self))


class Results(Message, tag="results"):
    """From the engine of an application: requests that have ended."""

    results: list[AppResult]


class Refused(Message, tag="refused"):
    """From the engine: a request that it refuses, with the reason."""

    request_id: str
    reason: str
    param: str = "prompt"
    """The field of the request that is at fault, as `RequestRefused` names it."""


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


class JobStarted(Message, tag="job-started"):
    """From the engine: the job is accepted. Its events follow."""

    number: int
    info: JobInfo


class JobChanged(Message, tag="job-changed"):
    """From the engine: it has received the change. Events report the effect."""

    number: int


class JobRefused(Message, tag="job-refused"):
    """From the engine: a job that it does not accept or change, with the reason. The reason names no directory."""

    number: int
    reason: str
    missing: bool = False
    """Whether there is no open job of this id."""


class JobProgress(Message, tag="job-progress"):
    """From the engine: events of jobs, in order."""

    events: list[JobEvent]


class ChunksFound(Message, tag="chunks-found"):
    """From the engine: tokens of a chain that it holds, counted in the fastest tier that has them."""

    number: int
    device: int
    host: int
    lower: int


class ChunksFetched(Message, tag="chunks-fetched"):
    """From the engine: the number of tokens that have come. Requests now find them."""

    number: int
    tokens: int
    reason: str = ""
    """The reason why it is less than was asked for, in one line; empty if it is not."""


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


class Steps(Message, tag="steps"):
    """From the engine: the steps that computed tokens since the last such message, oldest first."""

    tokens: list[int]
    """Number of query tokens in each step."""
    seconds: list[float]
    """Seconds that the device spent on each step."""


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


ToEngine = (
    Start | StartApp | Submit | Infer | Abort | LoadAdapter | UnloadAdapter | StartJob | ChangeJob | FindChunks
    | FetchChunks | StopFetch | Ask | Watch | Tick | Shutdown
)  # fmt: skip
AdapterAnswer = AdapterLoaded | AdapterRefused | AdapterUnloaded
TuningAnswer = JobStarted | JobChanged | JobRefused | JobProgress
FromEngine = (
    Hello | Progress | Ready | AppReady | Outputs | Results | Refused | AdapterAnswer | TuningAnswer | ChunksFound
    | ChunksFetched | Failed | Stats | Clock | Steps | Activity | AppAnswer | Failure
)  # fmt: skip

_encode = msgspec.msgpack.Encoder().encode
_EncodedToEngine = (
    Start | StartApp | Submitted | Infer | Abort | LoadAdapter | UnloadAdapter | StartJob | ChangeJob | FindChunks
    | FetchChunks | StopFetch | Ask | Watch | Tick | Shutdown
)  # fmt: skip
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
