"""The two halves of a decoder layer, attention and MLP, with LoRA: forward and backward over the weights that serve.

A half is x' = x + f(norm(x)). Its forward writes x', and stores the tensors that its backward needs: the `Kept`
tensors. The backward turns the gradient of x' into that of x in place and writes the gradients of the adapter's
matrices; base weights have none. Kept tensors that were freed are computed again by the same operations from the same
x, so the results have the same bits.

LoRA (Hu et al., 2021, §4.1): y = W x + s B (A x). With t = s Bᵀ dy: dB = s dy (A x)ᵀ, dA = t xᵀ, dx = Wᵀ dy + Aᵀ t.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from holdfast.lm.kernels.fp8 import Weight
from holdfast.lm.kernels.linear.layers import LayerShape, Rotation
from holdfast.lm.kernels.training import training_ops_for
from holdfast.lm.kernels.training.attention import Packing, packed_attention_for, sent
from holdfast.lm.kernels.training.ops import product_in_float32
from holdfast.lm.models.decoder import Decoder, LayerWeights
from holdfast.lm.models.peft_files import MODULES, DecoderSizes, module_shapes

GROUPS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
"""For each fused linear layer (a field of LayerWeights), the modules that read its input."""

Kept = dict[str, torch.Tensor]
"""The tensors that a half's backward needs besides its input, by name.

A forward writes into the tensors that are already there, and adds the others.
"""


@dataclass(frozen=True)
class LoraGroup:
    """The adapter of the modules that share one input."""

    a: torch.Tensor  # [modules * rank, inputs], one below the other
    b: tuple[tuple[str, torch.Tensor], ...]
    """For each module, its name and B [outputs, rank]."""


LayerAdapter = Mapping[str, LoraGroup]
"""An adapter's matrices in one layer, or their gradients, by fused linear layer.

A fused layer that the adapter does not change has no entry.
"""


@dataclass(frozen=True)
class AdapterLayout:
    """The layout of one layer's matrices in a vector. It is the same for all layers."""

    sizes: DecoderSizes
    modules: tuple[str, ...]
    """The modules that the adapter changes, as keys of MODULES."""
    rank: int

    def __post_init__(self) -> None:
        if not self.modules or (unknown := {*self.modules} - {*MODULES}):
            shown = ", ".join(sorted(unknown)) if self.modules else "none"
            raise ValueError(f"modules to tune are {shown}; choose from {', '.join(MODULES)}")
        if self.rank < 1:
            raise ValueError(f"rank is {self.rank}; it must be at least 1")

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """For each fused linear layer, those of its modules that the adapter changes."""
        chosen = {field: tuple(name for name in names if name in self.modules) for field, names in GROUPS.items()}
        return {field: names for field, names in chosen.items() if names}

    @property
    def elements(self) -> int:
        """Number of elements of one layer's matrices."""
        shapes = module_shapes(self.sizes)
        return sum(self.rank * sum(shapes[module]) for names in self.groups.values() for module in names)

    def views(self, vector: torch.Tensor) -> dict[str, LoraGroup]:
        """The matrices in a vector [elements], as views."""
        shapes, at = module_shapes(self.sizes), 0

        def part(*shape: int) -> torch.Tensor:
            nonlocal at
            at += prod(shape)
            return vector[at - prod(shape) : at].view(shape)

        return {
            field: LoraGroup(
                part(len(names) * self.rank, shapes[names[0]][1]),
                tuple((module, part(shapes[module][0], self.rank)) for module in names),
            )
            for field, names in self.groups.items()
        }


@dataclass(frozen=True)
class PackedTokens:
    """T tokens of whole sequences, packed one after the other, on the device."""

    ids: torch.Tensor  # [T] int64
    packing: Packing
    rotation: Rotation
    slots: torch.Tensor  # [T] int64: each token's own number

    @property
    def count(self) -> int:
        return len(self.ids)


class Halves:
    """The halves of a decoder's layers, and its head. Callers must turn autograd off."""

    def __init__(self, model: Decoder, layout: AdapterLayout, scale: float) -> None:
        """`scale` is LoRA's s."""
        spec = model.decoder
        self.model, self.layout, self.scale = model, layout, scale
        self._spec = spec
        device, dtype = model.spec.device, model.spec.dtype
        shape = LayerShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_eps,
            activation=spec.activation,
            dtype=dtype,
            inverse_frequencies=spec.rope.inverse_frequencies(spec.head_dim, model.spec.max_model_len).to(device),
            amplitude=spec.rope.amplitude,
        )
        self._ops = training_ops_for(shape)
        self.attention = packed_attention_for(device, dtype, spec.head_dim)
        self._windows = spec.windows or (None,) * spec.num_layers
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._columns = {
            "qkv": {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, q + 2 * kv)},
            "o": {"o": slice(0, hidden)},
            "gate_up": {"gate": slice(0, inner), "up": slice(inner, 2 * inner)},
            "down": {"down": slice(0, hidden)},
        }
        """For each fused linear layer, the output columns of its modules."""

    def pack(self, ids: torch.Tensor, lengths: tuple[int, ...]) -> PackedTokens:
        """Pack token ids [T] int64 on the device as sequences of these lengths.

        Positions begin at 0 in each sequence.
        """
        device = ids.device
        positions = sent(torch.cat([torch.arange(length) for length in lengths]), device)
        rotation = self._ops.layers.rotation(positions)
        return PackedTokens(ids, Packing.of(lengths, device), rotation, torch.arange(len(ids), device=device))

    def kept_shapes(self, half: str, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype, by name, of the tensors that `half` ("attention" or "mlp") keeps for this many tokens."""
        spec, dtype = self._spec, self.model.spec.dtype
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        groups, rank = self.layout.groups, self.layout.rank
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if half == "attention":
            sums = torch.float64 if dtype == torch.float64 else torch.float32
            shapes = {
                "qkv": ((tokens, (heads + 2 * kv_heads) * spec.head_dim), dtype),
                "attended": ((tokens, heads, spec.head_dim), dtype),
                "log_sums": ((heads, tokens), sums),
            }
        else:
            shapes = {
                "gate": ((tokens, spec.intermediate_size), dtype),
                "up": ((tokens, spec.intermediate_size), dtype),
            }
        fields = ("qkv", "o") if half == "attention" else ("gate_up", "down")
        return shapes | {
            f"shrunk_{field}": ((tokens, len(groups[field]) * rank), dtype) for field in fields if field in groups
        }

    def embed(self, tokens: PackedTokens, out: torch.Tensor) -> None:
        """Write the embeddings [T, hidden] to `out`."""
        torch.index_select(self.model.embedding, 0, tokens.ids, out=out)

    def attention_forward(
        self, layer: int, x: torch.Tensor, tokens: PackedTokens, adapter: LayerAdapter, kept: Kept, out: torch.Tensor
    ) -> None:
        """Write x + attention(x) [T, hidden] to `out`."""
        weights = self.model.layers[layer]
        attended = self._attend(layer, x, tokens, adapter, kept)
        low, columns = self._low("o", adapter, kept), self._columns["o"]
        self._project(attended, self._dense(weights.o), weights.o_bias, columns, low, out, x)

    def mlp_forward(self, layer: int, x: torch.Tensor, adapter: LayerAdapter, kept: Kept, out: torch.Tensor) -> None:
        """Write x + mlp(x) [T, hidden] to `out`."""
        weights = self.model.layers[layer]
        product = self._gate(layer, x, adapter, kept)
        low, columns = self._low("down", adapter, kept), self._columns["down"]
        self._project(product, self._dense(weights.down), weights.down_bias, columns, low, out, x)

    def attention_backward(
        self,
        layer: int,
        gradient: torch.Tensor,
        x: torch.Tensor,
        tokens: PackedTokens,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept | None,
    ) -> None:
        """Turn the gradient of `attention_forward`'s result [T, hidden] into that of x, in place.

        Writes the adapter's gradients to `grads`. `kept` holds the forward's kept tensors; if it is None, they are
        computed again.
        """
        weights = self.model.layers[layer]
        if kept is None:
            self._attend(layer, x, tokens, adapter, kept := {})
        attended = kept["attended"]
        back, t = self._project_backward("o", gradient, self._dense(weights.o), adapter, grads, kept)
        _write_grad_of_a(t, attended.flatten(1), grads, "o")
        qkv = self._rotated(weights, kept["qkv"], tokens)
        back_qkv = self.attention.backward(
            back.view_as(attended), qkv, attended, kept["log_sums"],
            tokens.packing, self._spec.scale, self._windows[layer],
        )  # fmt: skip
        del back, qkv
        together = self._ops.rotate_backward(
            *back_qkv, kept["qkv"], tokens.rotation, weights.q_norm, weights.k_norm
        )  # fmt: skip
        del back_qkv
        back, t = self._project_backward("qkv", together, self._dense(weights.qkv), adapter, grads, kept)
        if t is not None:
            _write_grad_of_a(t, self._norm(x, weights.input_norm), grads, "qkv")
        self._ops.add_norm_backward(gradient, back, x, weights.input_norm)

    def mlp_backward(
        self,
        layer: int,
        gradient: torch.Tensor,
        x: torch.Tensor,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept | None,
    ) -> None:
        """Turn the gradient of `mlp_forward`'s result [T, hidden] into that of x, as `attention_backward` does."""
        weights = self.model.layers[layer]
        if kept is None:
            self._gate(layer, x, adapter, kept := {})
        back, t = self._project_backward("down", gradient, self._dense(weights.down), adapter, grads, kept)
        together, product = self._ops.gate_backward(kept["gate"], kept["up"], back)
        _write_grad_of_a(t, product, grads, "down")
        del back, product
        back, t = self._project_backward("gate_up", together, self._dense(weights.gate_up), adapter, grads, kept)
        if t is not None:
            _write_grad_of_a(t, self._norm(x, weights.post_norm), grads, "gate_up")
        self._ops.add_norm_backward(gradient, back, x, weights.post_norm)

    def head(
        self, stream: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, *, backward: bool
    ) -> torch.Tensor:
        """The sum of the weighted cross entropies of rows [C, hidden]; with `backward`, the rows become their gradient.

        `targets` is [C] int64, `weights` is [C] float32. The result has no dimensions and stays on the device.
        """
        head, norm = self.model.lm_head, self.model.norm
        logits = self._norm(stream, norm) @ head.t()
        losses = self._ops.loss_backward(logits, targets, weights)
        if backward:
            gradient = torch.zeros_like(stream)
            self._ops.add_norm_backward(gradient, logits @ head, stream, norm)
            stream.copy_(gradient)
        return losses.sum()

    def _attend(
        self, layer: int, x: torch.Tensor, tokens: PackedTokens, adapter: LayerAdapter, kept: Kept
    ) -> torch.Tensor:
        """Compute an attention half up to the output projection, and return the projection's input [T, H D]."""
        weights = self.model.layers[layer]
        normed = self._norm(x, weights.input_norm)
        self._shrink(normed, "qkv", adapter, kept)
        low, weight = self._low("qkv", adapter, kept), self._dense(weights.qkv)
        qkv = kept["qkv"] = self._project(normed, weight, weights.qkv_bias, self._columns["qkv"], low, kept.get("qkv"))
        out, log_sums = self.attention.forward(
            self._rotated(weights, qkv, tokens), tokens.packing, self._spec.scale, self._windows[layer]
        )
        _put(kept, "attended", out)
        _put(kept, "log_sums", log_sums)
        attended = kept["attended"].flatten(1)
        self._shrink(attended, "o", adapter, kept)
        return attended

    def _gate(self, layer: int, x: torch.Tensor, adapter: LayerAdapter, kept: Kept) -> torch.Tensor:
        """Compute an MLP half up to the down projection, and return the projection's input [T, intermediate]."""
        weights = self.model.layers[layer]
        normed = self._norm(x, weights.post_norm)
        self._shrink(normed, "gate_up", adapter, kept)
        low, whole = self._low("gate_up", adapter, kept), slice(0, self._spec.intermediate_size)
        gate_up = self._dense(weights.gate_up)
        for name, rows in self._columns["gate_up"].items():
            weight = gate_up[rows]
            bias = None if weights.gate_up_bias is None else weights.gate_up_bias[rows]
            kept[name] = self._project(normed, weight, bias, {name: whole}, low, kept.get(name))
        product = self._ops.gate(kept["gate"], kept["up"])
        self._shrink(product, "down", adapter, kept)
        return product

    def _dense(self, weight: Weight) -> torch.Tensor:
        """The weight in the model's dtype. A quantized one is dequantized for this use only.

        Gradients pass through it, and it has none of its own, so a quantized base is as good as a plain one. In the
        backward, dequantizing once more costs less than keeping it.
        """
        return weight if isinstance(weight, torch.Tensor) else weight.dequantized(self.model.spec.dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.layers.norm(x, weight)

    def _rotated(
        self, weights: LayerWeights, qkv: torch.Tensor, tokens: PackedTokens
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], keys and values [T, Hkv, D].

        Queries and keys are rotated, and normed if the model norms them.
        """
        # The operation writes to a cache. Here the cache has blocks of one token, and each token has its own block.
        key, value = (qkv.new_empty(len(qkv), 1, self._spec.num_kv_heads, self._spec.head_dim) for _ in range(2))
        query = self._ops.layers.rotate_and_write(
            qkv, tokens.rotation, weights.q_norm, weights.k_norm, (key, value), tokens.slots
        )
        return query, key[:, 0], value[:, 0]

    def _shrink(self, x: torch.Tensor, field: str, adapter: LayerAdapter, kept: Kept) -> None:
        """Store x Aᵀ of a group's modules in `kept`, if the adapter changes any of them."""
        if field in adapter:
            name = f"shrunk_{field}"
            kept[name] = torch.mm(x, adapter[field].a.t(), out=kept.get(name))

    def _low(self, field: str, adapter: LayerAdapter, kept: Kept) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """For each module of a group: x Aᵀ [T, rank] and B [outputs, rank]."""
        if field not in adapter:
            return {}
        parts = torch.split(kept[f"shrunk_{field}"], self.layout.rank, dim=-1)
        return {module: (low, b) for (module, b), low in zip(adapter[field].b, parts, strict=True)}

    def _project(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        columns: Mapping[str, slice],
        low: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        out: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """residual + x weightᵀ + bias + s (x Aᵀ) Bᵀ, [T, N]. `columns` are the output columns of each module."""
        out = x.new_empty(len(x), len(weight)) if out is None else out
        start = residual if bias is None else bias if residual is None else torch.add(residual, bias, out=out)
        if columns.keys() <= low.keys():
            # The small products come first: the large one adds to them as it writes, which moves fewer bytes.
            for module, part in columns.items():
                first, beta = (out[:, part], 0.0) if start is None else (start[..., part], 1.0)
                small, b = low[module]
                torch.addmm(first, small, b.t(), beta=beta, alpha=self.scale, out=out[:, part])
            return out.addmm_(x, weight.t())
        if start is None:
            torch.mm(x, weight.t(), out=out)
        else:
            torch.addmm(start, x, weight.t(), out=out)
        for module in columns.keys() & low.keys():
            small, b = low[module]
            out[:, columns[module]].addmm_(small, b.t(), alpha=self.scale)
        return out

    def _project_backward(
        self,
        field: str,
        gradient: torch.Tensor,
        weight: torch.Tensor,
        adapter: LayerAdapter,
        grads: LayerAdapter,
        kept: Kept,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradient of a projection's input [T, K] from that of its output [T, N]. Writes dB of the group.

        Also returns t of all modules, [T, modules * rank], for `_write_grad_of_a`; None if the group has no modules.
        """
        if field not in adapter:
            return gradient @ weight, None
        group, rank = adapter[field], self.layout.rank
        shrunk = kept[f"shrunk_{field}"]
        together = torch.empty_like(shrunk)
        for (module, b), (_, grad), low, t in zip(
            group.b, grads[field].b, torch.split(shrunk, rank, dim=-1), torch.split(together, rank, dim=-1), strict=True
        ):
            part = gradient[:, self._columns[field][module]]
            torch.mm(part, b, out=t)
            product_in_float32(part.t(), low, grad, self.scale)
        together *= self.scale
        return (together @ group.a).addmm_(gradient, weight), together


def _write_grad_of_a(t: torch.Tensor | None, x: torch.Tensor, grads: LayerAdapter, field: str) -> None:
    """Write dA of a group, from its input x [T, K] and the t of `_project_backward`."""
    if t is not None:
        product_in_float32(t.t(), x, grads[field].a, 1.0)


def _put(kept: Kept, name: str, value: torch.Tensor) -> None:
    if name in kept:
        kept[name].copy_(value)
    else:
        kept[name] = value
