"""The messages between rank 0, which plans, and the other ranks of an engine: commands, plans, and what they gave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from holdfast.core.columns import Columns
from holdfast.core.config import EngineConfig
from holdfast.core.types import Grammar, TokenLogprobs
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
from holdfast.lm.types.parts import VALUES

WrittenParts = tuple[tuple[str, msgspec.Raw], ...]
"""What parts add to a plan or to a result: of each, the name of its class, and its value in MessagePack."""


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""


class StartRank(Message, tag="start"):
    """Find the other ranks, and load this rank's part of the model. Answered by Loaded."""

    config: EngineConfig
    meeting: str
    """A directory of this start alone, where ranks leave word how they can be reached."""


class Compile(Message, tag="compile"):
    """Compile the kernels of captured steps. Answered by Done."""


class Measure(Message, tag="measure"):
    """Measure memory. Answered by Measured."""

    block_bytes: int
    """Bytes of a block on all ranks together: a configured size is divided among them by their shares of it."""


class Allocate(Message, tag="allocate"):
    """Allocate the caches of both tiers. Answered by Done."""

    num_blocks: int
    num_host_blocks: int


class TimeLinks(Message, tag="links"):
    """Send messages over the links between ranks while rank 0 times them. Answered by Done."""


class BeginHost(Message, tag="host"):
    """Begin to make the host tier usable."""


class Prepare(Message, tag="prepare"):
    """Use a pause to capture one more graph, once all steps have ended. Answered by Done: whether it did."""


class CompileGrammar(Message, tag="grammar"):
    """Compile a grammar, as requests with it are to come. It takes a thread; only the rank that draws by it does it."""

    grammar: Grammar


class Plan(Message, tag="plan"):
    """Run this step. What the planner needs to know of it comes as Stepped and Copied."""

    step: int
    rows: list[int]
    starts: list[int]
    stops: list[int]
    tokens: list[tuple[int, ...]]
    samples: bytes
    """For each segment, whether it samples."""
    drawn: dict[int, Sampling]
    """By index, how those segments sample whose row did not sample so the last time."""
    table_writes: tuple[TableWrite, ...]
    copies: TierCopies
    most: tuple[int, ...] | None = None
    """As `StepPlan.samples`."""
    parts: WrittenParts = ()


class End(Message, tag="end"):
    """End the process."""


class Loaded(Message, tag="loaded"):
    """The rank's part of the model is on its device."""

    block_bytes: int
    """What a block of the cache takes on this rank: its layers, and its heads."""
    weights: str = ""
    """A digest of this part, where there are tiers behind the host tier."""


class Measured(Message, tag="measured"):
    """What the rank measured of its device."""

    memory: MemoryMeasurement


class Done(Message, tag="done"):
    """A command is done."""

    result: bool = True


class Stepped(Message, tag="stepped"):
    """A step has ended on this rank. Only the first rank of each stage after the first says so."""

    tokens: tuple[int, ...]
    """From the last stage; empty from others."""
    seconds: float
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """As in `StepResult`, from the last stage."""
    parts: WrittenParts = ()
    """As in `StepResult`, from the last stage."""


class Copied(Message, tag="copied"):
    """These copies between the tiers are complete on this rank."""

    copies: tuple[CopyTime, ...]


class Failed(Message, tag="failed"):
    """The rank cannot go on, and ends."""

    reason: str
    """In one line."""
    at: float
    """When, on the clock that all processes share."""


Command = StartRank | Compile | Measure | Allocate | TimeLinks | BeginHost | Prepare | CompileGrammar | Plan | End
Answer = Loaded | Measured | Done | Stepped | Copied | Failed

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


def write_parts(parts: Iterable[PartPlan | PartResult]) -> WrittenParts:
    """These values of parts, each with the name of its class."""
    return tuple([(type(part).__name__, msgspec.Raw(_encoder.encode(part))) for part in parts])


def read_parts(written: WrittenParts) -> tuple[Any, ...]:
    """The values that `write_parts` was given. Raises KeyError for a class that is not in `VALUES`."""
    return tuple([_values[name].decode(data) for name, data in written])


class PlanWriter:
    """Turns plans into messages. A sequence's sampling record is sent once, not with each of its tokens."""

    def __init__(self) -> None:
        self._drawn: dict[int, Sampling] = {}
        """By row, the record that the readers have."""

    def write(self, plan: StepPlan) -> Plan:
        """A plan as a message: all that an executor of a paged cache reads."""
        columns = plan.columns
        rows: list[int] = columns.column("row")
        sampling: list[Sampling | None] = columns.column("sampling")
        known, drawn = self._drawn, {}
        for index, (row, record) in enumerate(zip(rows, sampling, strict=True)):
            if record is not None and known.get(row) is not record:
                known[row] = drawn[index] = record
        return Plan(
            step=plan.step,
            rows=rows,
            starts=columns.column("start"),
            stops=columns.column("stop"),
            tokens=columns.column("tokens"),
            samples=bytes([record is not None for record in sampling]),
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
        """The plan, but for the names of its sequences."""
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
