"""The calls of a driven job, which is a tuning job whose work comes from its owner: values, files, micro-batches.

Calls have numbers from 0 without gaps. The owner writes each call to a file before the engine hears of it. The engine
writes the result to another file before it reports the call done. So both survive a killed process.

    DIRECTORY/calls/00000007.bin      call 7 with its data
    DIRECTORY/results/00000007.bin    the result of call 7
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import msgspec

from holdfast.core.training_cost import LayerHalves
from holdfast.training.framed import read_framed, write_framed
from holdfast.training.jobs import MicroBatch, TrainingJob, Unit, units_of
from holdfast.training.losses import MASK, Adam, Loss
from holdfast.training.order import pack

if TYPE_CHECKING:
    import numpy as np  # imported where it is needed, because the API process starts without it
    import numpy.typing as npt

CallKind = Literal["forward", "forward_backward", "optimize", "save", "save_adapter", "load"]
"""The kind of a call.

- forward: log probabilities of the targets.
- forward_backward: the same, and the gradients of the loss are added to those of earlier calls.
- optimize: one update by Adam from these gradients, which are zero afterwards.
- save: parameters, moments and the number of updates, to a directory.
- save_adapter: the adapter in PEFT's format, to a directory.
- load: parameters from a directory of `save`, with or without moments. Gradients are zero afterwards.
"""
SCORES = ("forward", "forward_backward")
"""Kinds of calls that have data."""
PLACED = ("save", "save_adapter", "load")
"""Kinds of calls that have a directory."""
CHANGES = ("optimize", "load")
"""Kinds of calls that change the parameters. Their only unit is that of the optimizer."""
CALLS, RESULTS = "calls", "results"
"""Names of the folders in a job's directory."""
CALL_FILE, RESULT_FILE = b"HFCALL01", b"HFRSLT01"
MOST_NUMBER = 10**8 - 1
"""The largest number of a call."""
_Header = TypeVar("_Header")


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a job's owner. Raises ValueError for values that are out of their limits."""

    number: int
    kind: CallKind
    loss: Loss = field(default_factory=Loss)
    """The loss of a forward or a forward_backward call."""
    adam: Adam = field(default_factory=Adam)
    """The parameters of an optimize call."""
    directory: str = ""
    """The directory that a save call writes, or that a load call reads."""
    moments: bool = True
    """Whether a load call reads the moments and the number of updates too; otherwise both begin at zero."""

    def __post_init__(self) -> None:
        if not 0 <= self.number <= MOST_NUMBER:
            raise ValueError(f"number of the call is {self.number}; it must be from 0 to {MOST_NUMBER}")
        if self.kind not in get_args(CallKind):
            raise ValueError(f"kind of the call is {self.kind!r}; choose from {', '.join(get_args(CallKind))}")
        if bool(self.directory) != (self.kind in PLACED):
            raise ValueError(f"a call of kind {self.kind} {'needs a' if self.kind in PLACED else 'has no'} directory")

    @property
    def scores(self) -> bool:
        """Whether the call has data, and a log probability for each of its positions."""
        return self.kind in SCORES

    @property
    def changes(self) -> bool:
        """Whether the call changes the parameters."""
        return self.kind in CHANGES


@dataclass(frozen=True, eq=False)
class Datum:
    """A sequence to score, as its owner gives it. Numbers may be lists or arrays."""

    tokens: Sequence[int] | npt.NDArray[Any]
    """The tokens that the model reads, [n]."""
    targets: Sequence[int] | npt.NDArray[Any]
    """The token that is scored at each of them, [n], or the K tokens, [n, K]. It is mostly the next one."""
    arrays: Mapping[str, Sequence[float] | npt.NDArray[Any]] = field(default_factory=dict)
    """The arrays that the loss reads, by name, [n] each; [n, K] for a number for each target (`LossKind.several`)."""


@dataclass(frozen=True)
class Limits:
    """The limits that a model sets to data."""

    vocabulary: int
    """Number of token ids."""
    tokens: int
    """Most tokens of one datum."""
    way_out: str = ""
    """Ends the message about a datum that is too long, and names what sets the limit."""


@dataclass(frozen=True, eq=False)
class CallData:
    """The data of a call, one datum after the other. T is the number of all positions."""

    lengths: tuple[int, ...]
    """Number of positions of each datum."""
    tokens: npt.NDArray[np.int32]
    """[T]"""
    targets: npt.NDArray[np.int32]
    """[T], or [T, K] if positions have several targets."""
    arrays: Mapping[str, npt.NDArray[np.float32]]
    """The arrays that the loss reads, by name, [T] each; [T, K] for a number for each target."""
    widths: tuple[int, ...] = ()
    """Number of targets of each datum's positions, if it differs. Others up to K are token 0 and have the number 0."""

    def trimmed(self, rows: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The part of each datum of an array with a row for each position, without what fills up its targets."""
        return _trimmed(_parts(rows, self.lengths), self.widths if rows.ndim == 2 else ())

    def packed(self, numbers: Sequence[int]) -> CallData:
        """The data of a micro-batch, whose numbers follow one another."""
        before = sum(self.lengths[: numbers[0]])
        lengths = self.lengths[numbers[0] : numbers[-1] + 1]
        part = slice(before, before + sum(lengths))
        arrays = {name: array[part] for name, array in self.arrays.items()}
        widths = self.widths[numbers[0] : numbers[-1] + 1]
        return CallData(lengths, self.tokens[part], self.targets[part], arrays, widths)

    def check(self, limits: Limits) -> None:
        """Raise ValueError, naming a datum, if the model cannot take the data."""
        for number, length in enumerate(self.lengths):
            if length > limits.tokens:
                raise ValueError(f"datum {number} has {length} tokens; it may have {limits.tokens}{limits.way_out}")
        for name in ("tokens", "targets"):
            ids = getattr(self, name)
            for number, part in enumerate(_parts(ids, self.lengths)) if _most(ids) >= limits.vocabulary else ():
                if _most(part) >= limits.vocabulary:
                    largest = f"{_most(part)}; the model has tokens 0 to {limits.vocabulary - 1}"
                    raise ValueError(f"{name} of datum {number} have {largest}")


@dataclass(frozen=True, eq=False)
class CallResult:
    """The result of a call."""

    number: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name. A name ends in the way in which several of them become one, as in "loss:sum"."""
    logprobs: Sequence[npt.NDArray[np.float32]] = ()
    """For each datum, the log probability of each target, [n] or [n, K]."""


class _CallHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The header of a call's file. The arrays are: lengths of data as uint32, tokens, targets, and those named here."""

    call: Call
    data: int
    positions: int
    arrays: tuple[str, ...]
    targets: int = 1
    """Number of targets of each position. An older engine reads files of one target."""
    widths: tuple[int, ...] = ()
    """As those of `CallData`."""


class _ResultHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The header of a result's file. The arrays are: lengths of data as uint32, and log probabilities."""

    number: int
    metrics: dict[str, float]
    data: int
    positions: int
    targets: int = 1
    widths: tuple[int, ...] = ()
    """Number of log probabilities of each datum's positions, if it differs. 0 fills up the others."""


def call_path(directory: Path, number: int) -> Path:
    """The file of a call, in a job's directory."""
    return directory / CALLS / f"{number:08d}.bin"


def result_path(directory: Path, number: int) -> Path:
    """The file of a call's result, in a job's directory."""
    return directory / RESULTS / f"{number:08d}.bin"


def write_call(directory: Path, call: Call, data: Sequence[Datum] = ()) -> None:
    """Write a call to its file, in place of an earlier one of this number. It is on the disk when this returns.

    If data have different numbers of targets for a token, all get the largest number. The added targets count for
    nothing: their weight is 0. Raises ValueError, naming a datum by its number from 0, for data that the loss cannot
    take. No file is written then.
    """
    import numpy as np

    if bool(data) != call.scores:
        raise ValueError(f"a call of kind {call.kind} {'needs' if call.scores else 'has no'} data")
    names = tuple(data[0].arrays) if data else ()
    if call.scores:
        call.loss.check_arrays(names)
    checked = [_checked(number, datum, names, call.loss) for number, datum in enumerate(data)]
    lengths = np.array([len(each[0]) for each in checked], "<u4")
    width, widths = _widths([each[1] for each in checked])
    for name in (call.loss.kind.several or ()) if widths else ():
        if name not in names:  # A number that is not given is 1, and must be 0 where there is no target.
            checked = [(*each, np.ones(each[1].shape, "<f4")) for each in checked]
            names = (*names, name)
    header = _CallHeader(call, len(lengths), int(lengths.sum()), names, width, widths)
    several = {"targets", *(call.loss.kind.several or ())}
    arrays = [
        np.concatenate([_filled(part, width if name in several else 1) for part in parts]).reshape(-1)
        for name, parts in zip(("tokens", "targets", *names), zip(*checked, strict=True), strict=bool(checked))
    ]
    write_framed(
        call_path(directory, call.number), CALL_FILE, msgspec.json.encode(header), [lengths, *arrays], durable=True
    )  # fmt: skip


def read_call(directory: Path, number: int, limits: Limits) -> tuple[Call, CallData]:
    """Read a call and its data, which are views of the file.

    Raises ValueError for a damaged file and for data that the model cannot take; FileNotFoundError if there is none.
    """
    path = call_path(directory, number)
    text, body = read_framed(path, CALL_FILE)
    header = _decoded(text, _CallHeader, path)
    call, count, positions = header.call, header.data, header.positions
    if call.number != number:
        raise ValueError(f"{path.name} holds call {call.number}")
    if (count > 0) != call.scores or len({*header.arrays}) != len(header.arrays):
        raise ValueError(f"{path.name} is damaged: a call of kind {call.kind} with {count} data")
    if call.scores:
        call.loss.check_arrays(header.arrays)
        call.loss.check_targets(header.targets)
    several = call.loss.kind.several or ()
    widths = [1, header.targets, *(header.targets if name in several else 1 for name in header.arrays)]
    lengths, numbers = _body(body, count, positions, widths, path)
    tokens, targets, *floats = numbers
    given = dict(zip(header.arrays, (_rows(part.view("<f4"), positions) for part in floats), strict=True))
    _check_widths(header.widths, header.targets, count, path)
    data = CallData(lengths, tokens.view("<i4"), _rows(targets.view("<i4"), positions), given, header.widths)
    _check_read(data)
    data.check(limits)
    return call, data


def write_result(directory: Path, result: CallResult, *, durable: bool = False) -> None:
    """Write the result of a call to its file. A `durable` one is on the disk when this returns.

    Raises ValueError for a number that is not finite, naming it: training has diverged.
    """
    import numpy as np

    for name, value in result.metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: training has diverged; lower the learning rate")
    for number, part in enumerate(result.logprobs):
        if not np.isfinite(part).all():
            raise ValueError(f"log probabilities of datum {number} are not finite: training has diverged")
    lengths = np.array([len(part) for part in result.logprobs], "<u4")
    width, widths = _widths(result.logprobs)
    header = _ResultHeader(result.number, {**result.metrics}, len(lengths), int(lengths.sum()), width, widths)
    flat = (_filled(part, width).reshape(-1) for part in result.logprobs)
    whole = np.concatenate([np.empty(0, "<f4"), *flat]).astype("<f4", copy=False)
    write_framed(
        result_path(directory, result.number), RESULT_FILE, msgspec.json.encode(header), [lengths, whole],
        durable=durable,
    )  # fmt: skip


def read_result(directory: Path, number: int) -> CallResult:
    """Read the result of a call. The log probabilities are views of the file.

    Raises ValueError for a damaged file, and FileNotFoundError if there is none.
    """
    path = result_path(directory, number)
    text, body = read_framed(path, RESULT_FILE)
    header = _decoded(text, _ResultHeader, path)
    if header.number != number:
        raise ValueError(f"{path.name} holds the result of call {header.number}")
    lengths, (logprobs,) = _body(body, header.data, header.positions, [header.targets], path)
    _check_widths(header.widths, header.targets, header.data, path)
    rows = _rows(logprobs.view("<f4"), header.positions)
    return CallResult(number, header.metrics, tuple(_trimmed(_parts(rows, lengths), header.widths)))


def call_numbers(directory: Path) -> list[int]:
    """The numbers of the calls in a job's directory, in order."""
    return _numbers(directory / CALLS)


def result_numbers(directory: Path) -> list[int]:
    """The numbers of the results in a job's directory, in order."""
    return _numbers(directory / RESULTS)


def delete_calls(directory: Path, stop: int) -> None:
    """Delete the files of all calls before number `stop`."""
    for number in call_numbers(directory):
        if number < stop:
            call_path(directory, number).unlink(missing_ok=True)


def delete_results(directory: Path, stop: int) -> None:
    """Delete the files of the results of all calls before number `stop`."""
    for number in result_numbers(directory):
        if number < stop:
            result_path(directory, number).unlink(missing_ok=True)


class CallSteps:
    """The steps of a driven job, of which each is one call. Their number grows with the calls that arrive.

    It is the outline that the tuner reads (`lm.parts.tuning.tuner.JobOutline`), as `JobSteps` is for a job over files.
    """

    final = False
    """Whether `count` is the number of all steps that the job will ever have."""

    def __init__(self, job: TrainingJob, layers: tuple[LayerHalves, ...], *, done: int = 0, alone: int = 0) -> None:
        """`layers` are the halves of each layer of the base model. The first `done` calls need no outline any more.

        A datum above the job's micro-batch, of up to `alone` tokens, is a micro-batch by itself.
        """
        self.job, self.layers, self._alone = job, layers, alone
        self._calls: dict[int, Call] = {}
        self._outlines: dict[int, tuple[MicroBatch, ...]] = {}
        """The micro-batches of each call that is not forgotten."""
        self._count = done

    @property
    def num_layers(self) -> int:
        """Number of layers of the base model."""
        return len(self.layers)

    @property
    def count(self) -> int:
        """Number of calls that have arrived. More may follow."""
        return self._count

    @property
    def most_tokens(self) -> int:
        """An upper bound on the tokens of any micro-batch, of later calls too."""
        return max(self.job.hyperparameters.micro_batch, self._alone)

    def add(self, call: Call, lengths: Sequence[int]) -> None:
        """Take the next call, with the number of positions of each of its data.

        Raises ValueError for a call that is not the next one, and for a datum that no micro-batch holds. The call is
        then not taken.
        """
        self._check_next(call.number)
        self._outlines[call.number] = self.outline(call, lengths)
        self._calls[call.number] = call
        self._count += 1

    def refuse(self, number: int) -> None:
        """Take the next call as one that was refused. Nothing is computed for it.

        Raises ValueError for a call that is not the next one.
        """
        self._check_next(number)
        self._outlines[number] = ()
        self._count += 1

    def forget(self, stop: int) -> None:
        """Forget the calls before number `stop`, which are done."""
        for number in [number for number in self._outlines if number < stop]:
            del self._outlines[number]
            self._calls.pop(number, None)

    def call(self, step: int) -> Call:
        """The call of a step. Raises KeyError if it has not arrived, was refused, or was forgotten."""
        return self._calls[step]

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of a step, in order. A save and a refused call have none: they compute nothing.

        A forward has no backward. An update or a load has one micro-batch without an example. Raises KeyError for a
        call that has not arrived or was forgotten.
        """
        return self._outlines[step]

    def validates(self, step: int) -> bool:
        """Whether a validation follows the step: never."""
        return False

    def checkpoint_after(self, step: int) -> bool:
        """Whether the adapter is written after the step without a call for it: never."""
        return False

    def _check_next(self, number: int) -> None:
        if number != self._count:
            raise ValueError(f"call {number} is not the next one, which is {self._count}")

    def outline(self, call: Call, lengths: Sequence[int]) -> tuple[MicroBatch, ...]:
        """The micro-batches of a call that has not arrived. Raises ValueError for a datum that none of them holds."""
        if call.changes:
            return (MicroBatch((), (), (Unit("optimizer", 0),)),)
        limit = self.job.hyperparameters.micro_batch
        packed = pack(range(len(lengths)), lengths, limit, alone=self._alone)
        return tuple(self._micro_batch(call, data, lengths) for data in packed)

    def _micro_batch(self, call: Call, data: tuple[int, ...], lengths: Sequence[int]) -> MicroBatch:
        own, backward = tuple(int(lengths[number]) for number in data), call.kind == "forward_backward"
        passes = call.loss.kind.passes
        units = units_of(self.layers, sum(own), backward=backward, optimizer=False, passes=passes)
        return MicroBatch(data, own, units, validation=not backward)


def _checked(number: int, datum: Datum, names: tuple[str, ...], loss: Loss) -> tuple[npt.NDArray[Any], ...]:
    """The arrays of a datum as they are written: tokens, targets, and those of these names.

    One target for each position may also be given as [n, 1].
    """
    if {*datum.arrays} != {*names}:
        raise ValueError(f"datum {number} has {', '.join(datum.arrays) or 'no arrays'}; datum 0 has {', '.join(names)}")
    several = loss.kind.several
    tokens = _ids(number, "tokens", datum.tokens)
    targets = _ids(number, "targets", datum.targets, most=1 if several is None else 2)
    loss.check_targets(targets.shape[1] if targets.ndim == 2 else 1)
    floats = [_floats(number, name, datum.arrays[name], most=2 if name in (several or ()) else 1) for name in names]
    found = [tokens, targets, *floats]
    for name, array in zip(("tokens", "targets", *names), found, strict=True):
        if len(array) != len(tokens) or not len(array):
            raise ValueError(f"datum {number} has {len(tokens)} tokens and {len(array)} {name}")
        if name in (several or ()) and array.shape != targets.shape:
            raise ValueError(
                f"{name} of datum {number} have the shape {list(array.shape)}; targets have {list(targets.shape)}"
            )
        if name == MASK and not array.any():
            raise ValueError(f"{name} of datum {number} marks no position")
    return tuple(found)


def _ids(number: int, name: str, given: Sequence[int] | npt.NDArray[Any], most: int = 1) -> npt.NDArray[np.int32]:
    """Token ids as int32, in at most `most` dimensions."""
    array = _array(number, name, given, "iu", "whole numbers", most)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < 1 << 31:
        raise ValueError(f"{name} of datum {number} have {array.min()} or {array.max()}, which is no token")
    return array.astype("<i4")


def _floats(number: int, name: str, given: Sequence[float] | npt.NDArray[Any], most: int) -> npt.NDArray[np.float32]:
    """Numbers as float32, all of them finite, in at most `most` dimensions."""
    import numpy as np

    with np.errstate(over="ignore"):  # a number that float32 cannot hold becomes infinite
        array: npt.NDArray[np.float32] = _array(number, name, given, "iuf", "numbers", most).astype("<f4")
    wrong = np.argwhere(~np.isfinite(array))
    if len(wrong):
        at = tuple(wrong[0])
        raise ValueError(f"{name} of datum {number} at position {at[0]} is {array[at]}; it must be finite")
    return array


def _array(number: int, name: str, given: Any, kinds: str, wanted: str, most: int) -> npt.NDArray[Any]:
    """Numbers as an array of one of these kinds of dtype, in at most `most` dimensions.

    A second one of size 1 is left out.
    """
    import numpy as np

    try:
        array: npt.NDArray[Any] = np.asarray(given) if len(given) else np.empty(0, np.int32)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} of datum {number} must be {wanted} in one list") from None
    if not 1 <= array.ndim <= most or array.dtype.kind not in kinds:
        raise ValueError(f"{name} of datum {number} must be {wanted} in one list, not {array.ndim} of {array.dtype}")
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _decoded(text: bytes, kind: type[_Header], path: Path) -> _Header:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name} is damaged: {error}") from None


def _body(
    body: npt.NDArray[np.uint8], count: int, positions: int, widths: Sequence[int], path: Path
) -> tuple[tuple[int, ...], list[npt.NDArray[np.uint8]]]:
    """The lengths of `count` data, and the bytes of the arrays. `widths` are their numbers of each position."""
    if count < 0 or positions < 0 or min(widths) < 1 or len(body) != 4 * (count + sum(widths) * positions):
        raise ValueError(f"{path.name} is damaged: {len(body)} bytes for {count} data of {positions} positions")
    lengths = tuple(body[: 4 * count].view("<u4").tolist())
    if sum(lengths) != positions or 0 in lengths:
        raise ValueError(f"{path.name} is damaged: its data do not fill {positions} positions")
    ends = [4 * (count + positions * before) for before in accumulate(widths, initial=0)]
    return lengths, [body[first:stop] for first, stop in pairwise(ends)]


def _rows(array: npt.NDArray[Any], positions: int) -> npt.NDArray[Any]:
    """An array with a row for each position; [T] if each has one number."""
    return array if len(array) == positions else array.reshape(positions, -1)


def _check_read(data: CallData) -> None:
    """Raise ValueError for numbers that `write_call` does not write."""
    import numpy as np

    for name in ("tokens", "targets"):
        ids = getattr(data, name)
        if ids.size and int(ids.min()) < 0:
            raise ValueError(f"{name} have {ids.min()}, which is no token")
    for name, array in data.arrays.items():
        if not np.isfinite(array).all():
            raise ValueError(f"{name} have a number that is not finite")


def _parts(array: npt.NDArray[Any], lengths: Sequence[int]) -> Iterator[npt.NDArray[Any]]:
    """The part of each datum, as views."""
    first = 0
    for length in lengths:
        yield array[first : first + length]
        first += length


def _widths(parts: Sequence[npt.NDArray[Any]]) -> tuple[int, tuple[int, ...]]:
    """The largest number of columns, and that of each part; none if all have equally many. [n] has one."""
    widths = tuple(part.shape[1] if part.ndim == 2 else 1 for part in parts)
    return max(widths, default=1), widths if len({*widths}) > 1 else ()


def _filled(part: npt.NDArray[Any], width: int) -> npt.NDArray[Any]:
    """A part with zeros up to a number of columns; [n] as it is if one is wanted."""
    import numpy as np

    if width == (part.shape[1] if part.ndim == 2 else 1):
        return part
    rows = part.reshape(len(part), -1)
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])))


def _trimmed(parts: Iterable[npt.NDArray[Any]], widths: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Parts without the columns that fill them up. `widths` is empty if none does."""
    if not widths:
        return [*parts]
    return [part[:, 0] if width == 1 else part[:, :width] for part, width in zip(parts, widths, strict=True)]


def _check_widths(widths: Sequence[int], most: int, count: int, path: Path) -> None:
    if widths and (len(widths) != count or min(widths) < 1 or max(widths) != most):
        raise ValueError(f"{path.name} is damaged: numbers of targets {widths[:8]} for {count} data of up to {most}")


def _most(array: npt.NDArray[Any]) -> int:
    return int(array.max()) if array.size else -1


def _numbers(folder: Path) -> list[int]:
    """The numbers of the files in a folder, in order; none if there is no folder."""
    names = (path.stem for path in folder.glob("*.bin")) if folder.is_dir() else ()
    return sorted(int(name) for name in names if len(name) == 8 and name.isdecimal() and name.isascii())
