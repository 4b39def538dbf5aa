"""Cells for applications, made from weights: LSTM, binary TreeLSTM, encoder, decoder, read-out.

Weights have the layout of `torch.nn.LSTM`: a matrix is [outputs, inputs], and the gates of an LSTM are i, f, g, o,
stacked by rows. All state has the weights' dtype. Tokens and labels are int32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holdfast.cells.cell import DEFAULT_SIZES, Cell, Output, State, Value
from holdfast.cells.gated import Gated

Outputs = dict[str, Tensor]


class LSTMWeights(NamedTuple):
    """One layer of an LSTM: gates = [x, h] @ w.T + b."""

    w: Tensor
    """The matrix [4 * hidden, inputs + hidden], for the gates i, f, g, o."""
    b: Tensor
    """The bias [4 * hidden]."""

    @classmethod
    def of(cls, w_x: Tensor, w_h: Tensor, bias: Tensor) -> LSTMWeights:
        """Combine matrices for x [4 * hidden, inputs] and h [4 * hidden, hidden], and the sum of their biases."""
        return cls(torch.cat([w_x, w_h], 1).detach(), bias.detach())

    @classmethod
    def of_module(cls, module: nn.LSTM | nn.LSTMCell, layer: int = 0) -> LSTMWeights:
        """The weights of a layer of torch's LSTM. Raises ValueError for one with two directions or with projections."""
        suffix = f"_l{layer}" if isinstance(module, nn.LSTM) else ""
        if isinstance(module, nn.LSTM) and (module.bidirectional or module.proj_size):
            raise ValueError("the LSTM is bidirectional or has projections; only plain ones are supported")
        w_x, w_h = getattr(module, f"weight_ih{suffix}"), getattr(module, f"weight_hh{suffix}")
        if module.bias:
            return cls.of(w_x, w_h, getattr(module, f"bias_ih{suffix}") + getattr(module, f"bias_hh{suffix}"))
        return cls.of(w_x, w_h, torch.zeros(len(w_x), dtype=w_x.dtype, device=w_x.device))

    @property
    def hidden(self) -> int:
        """The size of h and c."""
        return len(self.w) // 4


class ReadOut(NamedTuple):
    """A linear layer whose highest score is a label."""

    w: Tensor
    """The matrix [labels, hidden]."""
    b: Tensor
    """The bias [labels]."""

    @classmethod
    def of_module(cls, module: nn.Linear) -> ReadOut:
        """The weights of torch's linear layer."""
        bias = module.bias if module.bias is not None else torch.zeros(module.out_features)
        return cls(module.weight.detach(), bias.detach())


def lstm_cell(
    name: str,
    weights: LSTMWeights,
    *,
    embedding: Tensor | None = None,
    read_out: ReadOut | None = None,
    x: str = "value",
    returns_h: bool = False,
    priority: int = 0,
    sizes: tuple[int, ...] = DEFAULT_SIZES,
) -> Cell:
    """One step of an LSTM, with inputs h and c and outputs h and c.

    With `embedding` [words, inputs] the other input is `token`, an int32 value. Without it, the input is `x` [inputs],
    which is a "value", or a "state" if it comes from a layer below. With `read_out` there is an output `label`, an
    int32 that is returned.
    """
    hidden, kind = weights.hidden, _name(weights.w)
    wide = weights.w.shape[1] - hidden
    _require_shape(name, "b", weights.b, (4 * hidden,))
    tensors = {"w": weights.w, "b": weights.b}
    inputs: dict[str, State | Value] = {}
    if embedding is not None:
        _require_shape(name, "embedding", embedding, (len(embedding), wide))
        tensors["embedding"] = embedding.detach()
        inputs["token"] = Value((), "int32")
    elif x in ("value", "state"):
        inputs["x"] = Value((wide,), kind) if x == "value" else State((wide,), kind)
    else:
        raise ValueError(f"x is {x!r}; it must be 'value' or 'state'")
    inputs |= {"h": State((hidden,), kind), "c": State((hidden,), kind)}
    outputs = {"h": Output((hidden,), kind, returned=returns_h), "c": Output((hidden,), kind)}
    if read_out is not None:
        tensors |= _read_out_tensors(name, read_out, hidden)
        outputs["label"] = Output((), "int32", returned=True)

    def run(weights: Mapping[str, Tensor], h: Tensor, c: Tensor, **given: Tensor) -> Outputs:
        x = F.embedding(given["token"], weights["embedding"]) if "token" in given else given["x"]
        h, c = _lstm(weights, x, h, c)
        return {"h": h, "c": c} | ({"label": _label(weights, h)} if "label_w" in weights else {})

    x_part = "x" if embedding is None else ("token", "embedding")
    gated = Gated((x_part, "h"), "ifuo", ("c",), _label_of(read_out))
    return Cell(name, run, inputs, outputs, tensors, priority, sizes, gated)


def encoder_cell(
    name: str, weights: LSTMWeights, embedding: Tensor, *, priority: int = 0, sizes: tuple[int, ...] = DEFAULT_SIZES
) -> Cell:
    """A step of an encoder: embedding and LSTM. Its inputs are `token`, h and c; its outputs are h and c."""
    return lstm_cell(name, weights, embedding=embedding, priority=priority, sizes=sizes)


def decoder_cell(
    name: str,
    weights: LSTMWeights,
    embedding: Tensor,
    read_out: ReadOut,
    *,
    priority: int = 1,
    sizes: tuple[int, ...] = DEFAULT_SIZES[:-1],
) -> Cell:
    """A step of a decoder that feeds back its last word: embedding, LSTM, projection to the vocabulary, argmax.

    h, c and `word` (int32, returned) are inputs and outputs. The first step's word is left out and is therefore 0:
    `<go>` must be word 0. A chain of this cell should stop by ("word", <eos>).
    """
    hidden, kind = weights.hidden, _name(weights.w)
    _require_shape(name, "b", weights.b, (4 * hidden,))
    _require_shape(name, "embedding", embedding, (len(embedding), weights.w.shape[1] - hidden))
    tensors = {"w": weights.w, "b": weights.b, "embedding": embedding.detach()}
    tensors |= _read_out_tensors(name, read_out, hidden)

    def run(weights: Mapping[str, Tensor], word: Tensor, h: Tensor, c: Tensor) -> Outputs:
        h, c = _lstm(weights, F.embedding(word, weights["embedding"]), h, c)
        return {"h": h, "c": c, "word": _label(weights, h)}

    state = {"h": (hidden,), "c": (hidden,)}
    return Cell(
        name,
        run,
        {"word": State((), "int32")} | {each: State(shape, kind) for each, shape in state.items()},
        {each: Output(shape, kind) for each, shape in state.items()} | {"word": Output((), "int32", returned=True)},
        tensors,
        priority,
        sizes,
        Gated((("word", "embedding"), "h"), "ifuo", ("c",), ("word", "label_w", "label_b")),
    )


class TreeWeights(NamedTuple):
    """A binary TreeLSTM (Tai et al., 2015, section 3.2) whose words are at the leaves."""

    leaf_w: Tensor
    """The matrix [3 * hidden, inputs] for the gates i, o, u of a leaf."""
    leaf_b: Tensor
    """The bias [3 * hidden] of a leaf."""
    w: Tensor
    """The matrix [5 * hidden, 2 * hidden] over the h of left and right, for i, o, u, left f and right f."""
    b: Tensor
    """The bias [5 * hidden] of an internal node."""

    @property
    def hidden(self) -> int:
        """The size of h and c."""
        return len(self.w) // 5


TREE_SIZES = DEFAULT_SIZES[:7]
"""Batch sizes up to 64 (BatchMaker, section 2.7.5)."""


def tree_leaf_cell(
    name: str,
    weights: TreeWeights,
    embedding: Tensor,
    *,
    read_out: ReadOut | None = None,
    priority: int = 0,
    sizes: tuple[int, ...] = TREE_SIZES,
) -> Cell:
    """A leaf of a binary TreeLSTM. Input: value `token`, int32. Outputs: h and c, and `label` with `read_out`."""
    hidden, kind = weights.hidden, _name(weights.w)
    _require_shape(name, "leaf_w", weights.leaf_w, (3 * hidden, embedding.shape[1]))
    _require_shape(name, "leaf_b", weights.leaf_b, (3 * hidden,))
    tensors = {"w": weights.leaf_w.detach(), "b": weights.leaf_b.detach(), "embedding": embedding.detach()}
    outputs = {"h": Output((hidden,), kind), "c": Output((hidden,), kind)}
    if read_out is not None:
        tensors |= _read_out_tensors(name, read_out, hidden)
        outputs["label"] = Output((), "int32", returned=True)

    def run(weights: Mapping[str, Tensor], token: Tensor) -> Outputs:
        gates = F.linear(F.embedding(token, weights["embedding"]), weights["w"], weights["b"])
        i, o, u = gates.chunk(3, 1)
        c = torch.sigmoid(i) * torch.tanh(u)
        h = torch.sigmoid(o) * torch.tanh(c)
        return {"h": h, "c": c} | ({"label": _label(weights, h)} if "label_w" in weights else {})

    gated = Gated((("token", "embedding"),), "iou", (), _label_of(read_out))
    return Cell(name, run, {"token": Value((), "int32")}, outputs, tensors, priority, sizes, gated)


def tree_internal_cell(
    name: str,
    weights: TreeWeights,
    *,
    read_out: ReadOut | None = None,
    priority: int = 1,
    sizes: tuple[int, ...] = TREE_SIZES,
) -> Cell:
    """An internal node of a binary TreeLSTM. States: left_h, left_c, right_h, right_c. Outputs: h, c, maybe `label`."""
    hidden, kind = weights.hidden, _name(weights.w)
    _require_shape(name, "w", weights.w, (5 * hidden, 2 * hidden))
    _require_shape(name, "b", weights.b, (5 * hidden,))
    tensors = {"w": weights.w.detach(), "b": weights.b.detach()}
    outputs = {"h": Output((hidden,), kind), "c": Output((hidden,), kind)}
    if read_out is not None:
        tensors |= _read_out_tensors(name, read_out, hidden)
        outputs["label"] = Output((), "int32", returned=True)

    def run(weights: Mapping[str, Tensor], left_h: Tensor, right_h: Tensor, left_c: Tensor, right_c: Tensor) -> Outputs:
        gates = F.linear(torch.cat([left_h, right_h], 1), weights["w"], weights["b"])
        i, o, u, left, right = gates.chunk(5, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(left) * left_c + torch.sigmoid(right) * right_c
        h = torch.sigmoid(o) * torch.tanh(c)
        return {"h": h, "c": c} | ({"label": _label(weights, h)} if "label_w" in weights else {})

    states = {each: State((hidden,), kind) for each in ("left_h", "right_h", "left_c", "right_c")}
    children = ("left_c", "right_c")
    gated = Gated(("left_h", "right_h"), "iouff", children, _label_of(read_out))
    return Cell(name, run, states, outputs, tensors, priority, sizes, gated)


def read_out_cell(name: str, read_out: ReadOut, *, priority: int = 2, sizes: tuple[int, ...] = DEFAULT_SIZES) -> Cell:
    """A cell that reads the label of a state: linear layer and argmax. State `h`; output `label`, int32, returned."""
    hidden = read_out.w.shape[1]

    def run(weights: Mapping[str, Tensor], h: Tensor) -> Outputs:
        return {"label": _label(weights, h)}

    return Cell(
        name,
        run,
        {"h": State((hidden,), _name(read_out.w))},
        {"label": Output((), "int32", returned=True)},
        _read_out_tensors(name, read_out, hidden),
        priority,
        sizes,
    )


def _lstm(weights: Mapping[str, Tensor], x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = F.linear(torch.cat([x, h], 1), weights["w"], weights["b"]).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _label_of(read_out: ReadOut | None) -> tuple[str, str, str] | None:
    """The `read_out` of a gated form: names of the output and of its weights."""
    return None if read_out is None else ("label", "label_w", "label_b")


def _label(weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    return F.linear(h, weights["label_w"], weights["label_b"]).argmax(1).to(torch.int32)


def _read_out_tensors(name: str, read_out: ReadOut, hidden: int) -> dict[str, Tensor]:
    _require_shape(name, "read_out.w", read_out.w, (len(read_out.w), hidden))
    _require_shape(name, "read_out.b", read_out.b, (len(read_out.w),))
    return {"label_w": read_out.w.detach(), "label_b": read_out.b.detach()}


def _require_shape(cell: str, name: str, tensor: Tensor, shape: tuple[Any, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} of cell {cell} has the shape {list(tensor.shape)}; it needs {list(shape)}")


def _name(tensor: Tensor) -> str:
    """The name of a tensor's dtype in a Spec."""
    return str(tensor.dtype).removeprefix("torch.")
