"""The messages between rank 0, which plans, and the other ranks of an engine: commands, plans, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.types import Grammar, TokenLogprobs
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.values import VALUES
from holdfast.lm.types import (
    CopyTime,
    MemoryMeasurement,
    PartPlan,
    PartResult,
    Sampling,
    Segment,
    StepPlan,
    TableWrite,
    TierCopies,
)
from holdfast.lm.types.news import PartNews

WrittenParts = tuple[tuple[str, msgspec.Raw], ...]
"""Values that parts add to a plan or a result, or their news: name of the class and value in MessagePack, for each."""


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""


class StartRank(Message, tag="start"):
    """Find the other ranks, and load this rank's part of the model. Answered by Loaded."""

    config: EngineConfig
    meeting: str
    """A directory of this start alone, where each rank leaves the address at which it can be reached."""


class Compile(Message, tag="compile"):
    """Compile the kernels of captured steps. Answered by Done."""


class Measure(Message, tag="measure"):
    """Measure memory. Answered by Measured."""

    block_bytes: int
    """Bytes of a block on all ranks together. A configured size is divided by the ranks' shares of a block."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent states on all ranks together, whose memory is divided in the same way."""


class Allocate(Message, tag="allocate"):
    """Allocate the caches of both tiers. Answered by Done."""

    num_blocks: int
    num_host_blocks: int
    snapshots: int = 0
    """Number of snapshots of recurrent states on the device."""
    host_snapshots: int = 0


class TimeLinks(Message, tag="links"):
    """Send messages over the links between ranks while rank 0 times them. Answered by Done."""


class BeginHost(Message, tag="host"):
    """Begin to make the host tier usable."""


class Prepare(Message, tag="prepare"):
    """Use a pause to capture one more graph, once all steps have ended. Answered by Done: whether one was captured."""


class CompileGrammar(Message, tag="grammar"):
    """Compile a grammar of requests that will come. Takes a thread. Only the rank that draws by it compiles it."""

    grammar: Grammar


class Announce(Message, tag="announce"):
    """Let every part of the device learn this."""

    news: WrittenParts


class Plan(Message, tag="plan"):
    """Run this step. The results that the planner needs come as Stepped and Copied."""

    step: int
    rows: list[int]
    starts: list[int]
    stops: list[int]
    tokens: list[tuple[int, ...]]
    samples: bytes
    """For each segment, whether it samples."""
    drawn: dict[int, Sampling]
    """Sampling records, by index, of segments whose row had another record the last time."""
    table_writes: tuple[TableWrite, ...]
    copies: TierCopies
    most: tuple[int, ...] | None = None
    """Number of tokens that each segment samples, from `StepPlan.samples`."""
    parts: WrittenParts = ()


class End(Message, tag="end"):
    """End the process."""


class Loaded(Message, tag="loaded"):
    """The rank's part of the model is on its device."""

    block_bytes: int
    """Bytes of a block of the cache on this rank: its layers, and its heads."""
    weights: str = ""
    """A digest of this part, where there are tiers below the host tier."""
    state_bytes: int = 0
    """Bytes of a sequence's recurrent states on this rank."""
    arithmetic: str = ""
    """Name of the kernels that compute this part: `ModelSpec.arithmetic`."""


class Measured(Message, tag="measured"):
    """The rank's measurements of its device."""

    memory: MemoryMeasurement


class Done(Message, tag="done"):
    """A command is done."""

    result: bool = True


class Stepped(Message, tag="stepped"):
    """A step has ended on this rank. Only the first rank of each stage after the first says so."""

    tokens: tuple[int, ...]
    """Tokens from the last stage; empty from others."""
    seconds: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """`StepResult.logprobs`, from the last stage."""
    parts: WrittenParts = ()
    """`StepResult.parts`, from the last stage, without those that each rank reports."""
    counts: Sequence[int] | None = None
    """`StepResult.counts`, from the last stage."""


class Reported(Message, tag="reported"):
    """Results with a step of those parts whose work every rank does (`PartResult.of_each_rank`)."""

    step: int
    parts: WrittenParts


class Copied(Message, tag="copied"):
    """These copies between the tiers are complete on this rank."""

    copies: tuple[CopyTime, ...]


class Failed(Message, tag="failed"):
    """The rank cannot go on, and ends."""

    reason: str
    """The reason, in one line."""
    at: float
    """Time of the failure, on the clock that all processes share."""


Command = (
    StartRank | Compile | Measure | Allocate | TimeLinks | BeginHost | Prepare | CompileGrammar | Announce | Plan | End
)
Answer = Loaded | Measured | Done | Stepped | Reported | Copied | Failed

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_answers = msgspec.msgpack.Decoder(Answer)
_values = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in VALUES}


def encode(message: Command | Answer) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """A command from bytes."""
    command: Command = _commands.decode(data)
    return command


def decode_answer(data: bytes) -> Answer:
    """An answer from bytes."""
    answer: Answer = _answers.decode(data)
    return answer


def write_parts(parts: Iterable[PartPlan | PartResult | PartNews]) -> WrittenParts:
    """These values of parts, each with the name of its class."""
    return tuple([(type(part).__name__, msgspec.Raw(_encoder.encode(part))) for part in parts])


def read_parts(written: WrittenParts) -> tuple[Any, ...]:
    """The values that `write_parts` was given. Raises KeyError for a class that is not in `VALUES`."""
    return tuple([_values[name].decode(data) for name, data in written])


class PlanWriter:
    """Turns plans into messages. A sequence's sampling record is sent once, not with each of its tokens."""

    def __init__(self) -> None:
        self._drawn: dict[int, Sampling] = {}
        """The record that the readers have, by row."""

    def write(self, plan: StepPlan) -> Plan:
        """A plan as a message: all that an executor of a paged cache reads."""
        columns = plan.columns
        rows: list[int] = columns.column("row")
        sampling: list[Sampling | None] = columns.column("sampling")
        known, drawn = self._drawn, {}
        for index, (row, record) in enumerate(zip(rows, sampling, strict=True)):
            if record and known.get(row) is not record:
                known[row] = drawn[index] = record
        return Plan(
            step=plan.step,
            rows=rows,
            starts=columns.column("start"),
            stops=columns.column("stop"),
            tokens=columns.column("tokens"),
            samples=bytes(map(bool, sampling)),
            drawn=drawn,
            table_writes=plan.table_writes,
            copies=plan.copies,
            most=plan.samples,
            parts=write_parts(plan.parts),
        )


class PlanReader:
    """Turns the messages of one `PlanWriter` back into plans, all of them, in order."""

    def __init__(self) -> None:
        self._drawn: dict[int, Sampling] = {}

    def read(self, message: Plan) -> StepPlan:
        """The plan, without the names of its sequences."""
        known, drawn, sampling = self._drawn, message.drawn, list[Sampling | None]()
        for index, (row, samples) in enumerate(zip(message.rows, message.samples, strict=True)):
            if samples and index in drawn:
                known[row] = drawn[index]
            sampling.append(known[row] if samples else None)
        return StepPlan(
            message.step,
            segments=Columns(
                Segment,
                sequence_id=[""] * len(sampling),
                row=message.rows,
                start=message.starts,
                stop=message.stops,
                tokens=message.tokens,
                sampling=sampling,
            ),
            table_writes=message.table_writes,
            samples=message.most,
            copies=message.copies,
            parts=read_parts(message.parts),
        )
