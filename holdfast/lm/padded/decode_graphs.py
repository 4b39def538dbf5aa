"""DecodeGraphs: decodes of the running batch as captured CUDA graphs, one launch in place of a thousand.

The batch's layers settle in memory that does not move (`growing_layer.FixedLayer`). A decode of it is captured once for
each (rows, columns): its rows are padded, and each row sees all columns under a mask. The inputs that change from step
to step are in one small tensor: the column to write, the rows, their lengths. The layers keep their types, so every
verb on the batch works on them. Parts that leave the memory (a batch that outgrew it, a row longer than the others) are
copied back before the next decode.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from holdfast.lm.kernels.capture import capture
from holdfast.lm.kernels.upload import upload
from holdfast.lm.padded.abilities import TOLERANCE, probed_lengths
from holdfast.lm.padded.driver import AGREES_IN_HALF, Driver, Inputs, difference, in_float32
from holdfast.lm.padded.growing_layer import FixedLayer, growing
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.state_layout import Leaf, State, StateLayout
from holdfast.lm.types import QUANTUM, BatchShape, padded_columns, padded_rows

MaskKind = Literal["columns", "by layer", "window"]
"""How a model is shown which columns are tokens: by a mask [rows, columns], as in any forward; by a ready mask for each
type of layer; or by one ready mask for all layers, which have the same window.
"""
ROOM = 64
"""Number of columns that a batch should be able to grow by before it must be copied, if the memory has them."""
MOST_GRAPHS = 160
"""Number of graphs that are kept. The least recently used one is dropped first."""
MOST_TOO_LARGE = 2
"""A batch stays in its shape while that computes at most this many times the columns of the smallest shape."""
_PROBED = (4, 4 * 1024)
"""Rows and positions of the memory for probing, whose longest prompt has 512 tokens."""


@dataclass(slots=True)
class _Decode:
    """A decode of one shape."""

    work: Callable[[], torch.Tensor]
    """Launches the decode. Returns the logits [rows, vocab_size]."""
    graph: Any = None
    """The CUDA graph, once it is captured."""
    ran: bool = False
    """Whether `work` has run before. The first run loads its kernels."""


FROM_HOST = (torch.tensor, torch.as_tensor, torch.scalar_tensor)
"""Functions that make a tensor from numbers."""
TO_DEVICE = (torch.Tensor.to, torch.Tensor.cuda)
"""Methods that copy a tensor to a device."""
INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
"""Methods that index a tensor. A list of places is copied to the tensor's device."""
MOST_KEPT = 1 << 16
"""Largest number of elements of a host tensor whose copy is kept."""


class Constants(TorchFunctionMode):
    """Keeps the tensors that a model makes from the host's numbers, such as ALiBi's slopes, and gives copies of them.

    A capture may copy nothing from the host's memory, so these tensors must exist before it, from an earlier launch.
    They are tensors made from numbers, copies of host tensors, and lists of places in a tensor (`keys[..., [-1], :]`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[tuple[Any, ...], torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}

        def made() -> torch.Tensor:
            tensor: torch.Tensor = func(*args, **options)
            return tensor

        if func in INDEXED:
            return func(args[0], self._places(args[0], args[1]), *args[2:], **options)
        if func in TO_DEVICE and _on_host(args[0]) and (func is torch.Tensor.cuda or _leaves_host(args[1:], options)):
            return self._keep((func, *_content(args[0]), repr(args[1:]), repr(options)), made).clone()
        if func is torch.Tensor.new_tensor and not isinstance(args[1], torch.Tensor):
            given = args[0].dtype, args[0].device
            return self._keep((func, *given, repr(args[1:]), repr(options)), made).clone()
        if func not in FROM_HOST or any(isinstance(each, torch.Tensor) for each in args):
            return made()
        return self._keep((func, repr(args), repr(options)), made).clone()

    def _keep(self, key: tuple[Any, ...], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _places(self, tensor: torch.Tensor, index: Any) -> Any:
        """An index into a tensor, with its lists and host tensors replaced by tensors on that tensor's device."""
        if isinstance(index, tuple):
            return tuple(self._place(tensor.device, each) for each in index)
        return self._place(tensor.device, index)

    def _place(self, device: torch.device, index: Any) -> Any:
        if isinstance(index, list) and index and all(type(each) is int for each in index):
            return self._keep((device, *index), lambda: torch.tensor(index, device=device))
        if isinstance(index, torch.Tensor) and index.dim() and index.device != device and _on_host(index):
            return self._keep((device, *_content(index)), lambda: index.to(device))
        return index


def _leaves_host(args: Sequence[Any], options: dict[str, Any]) -> bool:
    """Whether `Tensor.to` with these arguments copies a host tensor to a device."""
    for each in (*args[:1], options.get("device"), options.get("other")):
        if isinstance(each, torch.Tensor):
            return each.device.type != "cpu"
        if isinstance(each, (str, int, torch.device)):
            return torch.device(each).type != "cpu"
    return False


def _on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the host's memory, and small."""
    return tensor.device.type == "cpu" and tensor.numel() <= MOST_KEPT


def _content(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that identifies a host tensor's content: its type, shape and bytes."""
    return (
        tensor.dtype,
        tuple(tensor.shape),
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


class DecodeGraphs:
    """Decodes one `RunningRows` over memory of its own, of a size that the caller chooses.

    The first decode of a shape is launched kernel by kernel, which loads the kernels. The second is captured. That
    takes the host as long as one decode without a graph, so it is done within the step and delays nobody. On a CPU
    every decode is launched anew.
    """

    def __init__(
        self,
        driver: Driver,
        layout: StateLayout,
        rows: int,
        positions: int,
        *,
        masks: MaskKind = "columns",
        capture: bool = True,
    ) -> None:
        """`rows` is the largest number of rows in a batch. `positions` is rows times columns of the largest shape.

        Each position takes `position_bytes(layout)`. `capture` False launches every decode anew, as on a CPU.

        Raises ValueError for a state that cannot settle, or if one row may need more positions.
        """
        self._driver, self._layout, self._masks, self._rows = driver, layout, masks, rows
        self._device = driver.model.device
        self._most_columns = driver.model.max_model_len
        self._positions = positions
        with torch.inference_mode():
            self._prototype = driver.run(1, 2)
            if reason := why_not_settled(layout, self._prototype):
                raise ValueError(f"decodes cannot be captured: {reason}")
            layers = growing(self._prototype)
            if layers and positions < (least := padded_columns(1, self._most_columns)):
                raise ValueError(f"positions is {positions}; a row needs at least {least}")
            self._memory = [
                (_columns_of(layer.keys, positions), _columns_of(layer.values, positions)) for layer in layers
            ]
            """Memory of the keys and values of each layer."""
            self._row_parts = [
                (leaf, _rows_of(part, leaf.batch_axis or 0, padded_rows(rows)))
                for leaf, part in layout.parts(self._prototype, "row")
                if isinstance(part, torch.Tensor)
            ]
            """Memory of the parts of the state without positions, for all rows."""
            self._numbers = torch.zeros(1 + 2 * padded_rows(rows), dtype=torch.int64, device=self._device)
            """The column to write; then for each place its row in the plans; then for each place its length. Padding is
            0.
            """
        self._capture = capture and self._device.type == "cuda"
        self._shape: BatchShape | None = None
        """The shape in which the batch has settled; None if it has not."""
        self._decodes: OrderedDict[BatchShape, _Decode] = OrderedDict()
        self._logits: torch.Tensor | None = None
        """Logits [rows, vocab_size] that all graphs write. They are outside the graphs' pool, so the graphs can share
        it.
        """
        self._pool: Any = torch.cuda.graph_pool_handle() if self._capture else None
        self._constants = Constants()
        self.refused: dict[BatchShape, str] = {}
        """Shapes that could not be captured, with the reason. They are launched kernel by kernel."""

    @property
    def captured(self) -> tuple[BatchShape, ...]:
        """The shapes that have a graph."""
        return tuple(shape for shape, decode in self._decodes.items() if decode.graph is not None)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture one shape that has run without a graph so far.

        Returns whether there was one. No step may be in flight.
        """
        for shape, decode in self._decodes.items():
            if self._wants_capture(shape, decode):
                self._capture_one(shape, decode)
                return True
        return False

    @torch.inference_mode()
    def decode(self, rows: RunningRows) -> torch.Tensor | None:
        """Decode every row of the batch once. Returns the logits [B, vocab_size], valid until the next decode.

        Returns None, and does nothing, if the batch does not fit into the memory or has holes.
        """
        if not rows.compact or not rows.rows or len(rows.rows) > self._rows:
            return None
        shape, column = self._choose(rows)
        self._shape = None  # until the decode is done
        if shape is None:
            return None
        self._fill(rows, self._settle(rows, shape) if column is None else column)
        self._take_rows_in(rows)
        logits = self._run(shape, rows.last_token)
        rows.advance(self._after(rows.state))
        self._shape = shape
        return logits[: len(rows.rows)]

    def _choose(self, rows: RunningRows) -> tuple[BatchShape | None, int | None]:
        """The shape to decode in, None if none fits, and the column to write, None if the batch is not there yet."""
        count, width = len(rows.rows), rows.width
        if not self._memory:
            return BatchShape(padded_rows(count), min(QUANTUM, self._most_columns)), 0
        best = BatchShape.least(count, width + ROOM, self._most_columns)
        if best.positions > self._positions:
            best = BatchShape.least(count, width + 1, self._most_columns)
        settled = self._shape
        if settled is not None and settled.rows >= best.rows:
            column = self._column(rows.state, settled)
            small = settled.positions <= MOST_TOO_LARGE * best.positions
            if column is not None and column < settled.columns and small:
                return settled, column
        fits = best.positions <= self._positions and width < best.columns
        return best if fits else None, None

    def _column(self, state: State, shape: BatchShape) -> int | None:
        """The column after the last one, if all layers have settled in this shape and agree on it, else None."""
        columns = {
            layer.settled(self._view(keys, layer.keys, shape))
            for layer, (keys, _) in zip(growing(state), self._memory, strict=True)
        }
        return columns.pop() if len(columns) == 1 else None

    def _settle(self, rows: RunningRows, shape: BatchShape) -> int:
        """Copy the batch into the memory. Returns the column that the decode writes."""
        free = shape.columns - rows.width
        column = rows.width + max(0, free - ROOM) // 2  # columns in front are room for longer rows that join
        for layer, (keys, values) in zip(growing(rows.state), self._memory, strict=True):
            layer.settle(self._view(keys, layer.keys, shape), self._view(values, layer.values, shape), column)
        return column

    def _take_rows_in(self, rows: RunningRows) -> None:
        """Copy those parts without positions that are not in the memory into it."""
        parts = self._layout.parts(rows.state, "row")
        for (leaf, part), (_, whole) in zip(parts, self._row_parts, strict=True):
            place = whole.narrow(leaf.batch_axis or 0, 0, len(rows.rows))
            if isinstance(part, torch.Tensor) and part.data_ptr() != place.data_ptr():
                place.copy_(part)

    def _view(self, memory: torch.Tensor, like: torch.Tensor, shape: BatchShape) -> torch.Tensor:
        """Keys or values [rows, heads, columns, size] of a shape, from the start of their memory."""
        sizes = (shape.rows, *like.shape[1:-2], shape.columns, like.shape[-1])
        return memory[: torch.Size(sizes).numel()].view(sizes)

    def _fill(self, rows: RunningRows, column: int) -> None:
        """Upload the inputs of this decode to `_numbers`, in one copy."""
        most = padded_rows(self._rows)
        padding = [0] * (most - len(rows.rows))
        self._numbers.copy_(upload([column, *rows.rows, *padding, *rows.lengths, *padding], self._device))

    def _run(self, shape: BatchShape, last_token: torch.Tensor) -> torch.Tensor:
        """The logits of all rows of the shape, including padding."""
        decode = self._decodes.get(shape)
        if decode is None:
            decode = self._decodes[shape] = _Decode(self._launches(shape, last_token))
            if len(self._decodes) > MOST_GRAPHS:
                self._decodes.popitem(last=False)
        self._decodes.move_to_end(shape)
        if self._wants_capture(shape, decode):
            self._capture_one(shape, decode)
        if decode.graph is None or self._logits is None:
            with nullcontext() if decode.ran or not self._capture else self._constants:
                logits = decode.work()
            decode.ran = True
            if self._logits is None and self._capture:
                self._logits = logits.new_zeros(padded_rows(self._rows), logits.shape[1])
            return logits
        decode.graph.replay()
        return self._logits

    def _wants_capture(self, shape: BatchShape, decode: _Decode) -> bool:
        return self._capture and decode.ran and decode.graph is None and shape not in self.refused

    def _capture_one(self, shape: BatchShape, decode: _Decode) -> None:
        """Capture a decode, or record why it cannot be captured: the model reads a number from the device, say."""
        try:
            graph = torch.cuda.CUDAGraph()
            with capture(graph, self._pool), self._constants:
                logits = decode.work()
                if self._logits is not None:
                    self._logits[: shape.rows].copy_(logits)
            decode.graph = graph
        except Exception as error:  # the decode still runs without a graph, or its error comes again
            self.refused[shape] = _in_one_line(error)

    def _launches(self, shape: BatchShape, last_token: torch.Tensor) -> Callable[[], torch.Tensor]:
        """A function that launches a decode of this shape, with no host number in it."""
        most, numbers = padded_rows(self._rows), self._numbers
        column, rows, lengths = numbers[:1], numbers[1 : 1 + shape.rows], numbers[1 + most :][: shape.rows]
        state = self._stand_in(shape)
        columns = torch.arange(shape.columns, device=self._device)
        places = [whole.narrow(leaf.batch_axis or 0, 0, shape.rows) for leaf, whole in self._row_parts]

        def work() -> torch.Tensor:
            ids = last_token.index_select(0, rows)[:, None]
            tokens = (columns <= column) & (columns >= column - lengths[:, None])
            ready = None if self._masks == "columns" else self._ready_masks(tokens, columns, column)
            inputs = Inputs(ids, tokens.long(), lengths[:, None], ready=ready)
            given = self._layout.twin(
                state
            )  # a copy: notes that the model leaves in its state must not reach the next decode
            logits, new = self._driver.forward(inputs, given)
            for (_, part), place in zip(self._layout.parts(new, "row"), places, strict=True):
                if isinstance(part, torch.Tensor) and part.data_ptr() != place.data_ptr():
                    place.copy_(part)
            return logits

        return work

    def _ready_masks(self, tokens: torch.Tensor, columns: torch.Tensor, column: torch.Tensor) -> Any:
        """Masks [rows, 1, 1, columns] to be added to scores: for each type of layer, or for windows alone."""
        dtype, window = (
            self._driver.model.module.dtype,
            next((leaf.window for leaf in self._layout.leaves if leaf.window), None),
        )
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=self._device)

        def added(visible: torch.Tensor) -> torch.Tensor:
            return torch.where(visible, torch.zeros_like(hidden), hidden)[:, None, None]

        windowed = added(tokens & (columns >= column - (window or 0)))
        if self._masks == "window":
            return windowed
        return {"full_attention": added(tokens), "sliding_attention": windowed}

    def _stand_in(self, shape: BatchShape) -> State:
        """A state of the model's own class, over the memory."""
        layout, prototype = self._layout, self._prototype
        parts: list[tuple[Leaf, torch.Tensor | int]] = [
            (leaf, whole.narrow(leaf.batch_axis or 0, 0, shape.rows)) for leaf, whole in self._row_parts
        ]
        numbers = [*((each, shape.columns - 1) for each in layout.parts(prototype, "counter"))]
        numbers += [*((each, shape.rows) for each in layout.parts(prototype, "rows"))]
        for (leaf, part), number in numbers:
            parts.append((leaf, torch.full_like(part, number) if isinstance(part, torch.Tensor) else number))
        state = layout.put(layout.twin(prototype), parts)
        fixed = {
            id(layer): FixedLayer(
                self._view(keys, layer.keys, shape), self._view(values, layer.values, shape), self._numbers[:1]
            )
            for layer, (keys, values) in zip(growing(state), self._memory, strict=True)
        }
        if fixed:
            state.layers = [fixed.get(id(layer), layer) for layer in state.layers]
        return state

    def _after(self, state: State) -> State:
        """The batch's state, now that a decode has written its next column."""
        for layer in growing(state):
            layer.take_column()
        parts = [(leaf, part + 1) for leaf, part in self._layout.parts(state, "counter")]
        before = self._layout.parts(state, "row")
        for (leaf, part), (_, whole) in zip(before, self._row_parts, strict=True):
            axis = leaf.batch_axis or 0
            if isinstance(part, torch.Tensor):
                parts.append((leaf, whole.narrow(axis, 0, part.shape[axis])))
        return self._layout.put(state, parts)


def position_bytes(layout: StateLayout) -> int:
    """Bytes of one position of one row in memory that does not move. Layers with windows have all columns there."""
    return sum(leaf.bytes for leaf in layout.leaves if leaf.kind == "time")


def why_not_settled(layout: StateLayout, state: State) -> str:
    """Why the batch's state cannot settle in memory that does not move; empty if it can."""
    if not layout.batches:
        return "its rows cannot be told apart"
    held = {id(tensor) for layer in growing(state) for tensor in (layer.keys, layer.values)}
    for leaf, part in layout.parts(state, "time"):
        if id(part) not in held:
            return f"{'.'.join(map(str, leaf.path))} is not in a layer of Transformers that can be replaced"
    return ""


def probe_graphs(driver: Driver, layout: StateLayout) -> tuple[MaskKind | None, str]:
    """The kind of mask for captured decodes of this model, found by comparing with plain ones; or None, and why.

    Rows join and leave meanwhile. In float32, if the parameters fit, the same launches without a graph must give the
    same logits. On a GPU they are captured too, in the model's own precision.
    """
    if reason := why_not_settled(layout, driver.run(1, 2)):
        return None, reason
    kinds: tuple[MaskKind, ...] = ("columns",)
    if windows := {leaf.window for leaf in layout.leaves if leaf.kind == "time" and leaf.window is not None}:
        if len(windows) > 1 or getattr(driver.model.module.config.get_text_config(), "attention_chunk_size", None):
            return None, "its layers have chunks, or windows of several sizes"
        kinds = ("by layer", "window")
    for kind in kinds:
        reason = _why_not(driver, layout, kind)
        if not reason:
            return kind, ""
    return None, reason


def _why_not(driver: Driver, layout: StateLayout, masks: MaskKind) -> str:
    """Why decodes with these masks cannot be captured; empty if they can."""
    module = driver.model.module
    try:
        with in_float32(module) as exact:
            apart = _compared(driver, layout, DecodeGraphs(driver, layout, *_PROBED, masks=masks, capture=False))
        if apart > (TOLERANCE if exact else AGREES_IN_HALF / 2):
            return f"its logits differ by {apart:.1%} where the columns are fixed"
        if driver.model.device.type == "cuda":
            graphs = DecodeGraphs(driver, layout, *_PROBED, masks=masks)
            apart = _compared(driver, layout, graphs)
            if graphs.refused:
                return next(iter(graphs.refused.values()))
            if apart > AGREES_IN_HALF / 2:
                return f"its logits differ by {apart:.1%} where they are captured"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        return _in_one_line(error)
    return ""


def _compared(driver: Driver, layout: StateLayout, graphs: DecodeGraphs) -> float:
    """The largest difference between these decodes and plain ones, while rows join and leave."""
    plain, settled = (_decoded(driver, layout, each) for each in (None, graphs))
    return max(difference(given, right) for given, right in zip(settled, plain, strict=True))


@torch.inference_mode()
def _decoded(driver: Driver, layout: StateLayout, graphs: DecodeGraphs | None) -> list[torch.Tensor]:
    """Logits of three prompts that decode, of which one leaves and another joins at the end."""
    lengths, logits = probed_lengths(driver), []
    text = driver.text(4, max(lengths) + 5).tolist()
    rows = RunningRows(layout, 4, driver.model.device)

    def embed(row: int) -> None:
        ids = torch.tensor([text[row][: lengths[row]]], device=rows.device)
        rows.embed(row, driver.forward(driver.inputs(ids), None)[1], lengths[row])

    def decode() -> None:
        rows.set_last(rows.rows, [text[row][length] for row, length in zip(rows.rows, rows.lengths, strict=True)])
        if graphs is not None:
            given = graphs.decode(rows)
            if given is None:
                raise RuntimeError(f"{len(rows.rows)} rows of {rows.width} columns do not fit into the memory")
            logits.append(given.clone())
            return
        given, state = driver.forward(rows.decode_inputs(), rows.state)
        rows.advance(state)
        logits.append(given)

    for row in range(3):
        embed(row)
    for _ in range(3):
        decode()
    rows.drop(1)
    embed(3)
    decode()
    return logits


def _columns_of(like: torch.Tensor, positions: int) -> torch.Tensor:
    """Zeros for `positions` positions of keys or values [1, heads, columns, size]."""
    return like.new_zeros(positions * (like.numel() // like.shape[-2]))


def _rows_of(like: torch.Tensor, axis: int, rows: int) -> torch.Tensor:
    """Zeros for `rows` rows of a part of the state of one row."""
    sizes = list(like.shape)
    sizes[axis] = rows
    return like.new_zeros(sizes)


def _in_one_line(error: Exception) -> str:
    """The first line of an error's text."""
    said = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {said[0]}"
