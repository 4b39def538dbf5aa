"""A draft head's layer as it serves: few launches, over keys and values in slots."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.sampling.sample import argmax
from holdfast.lm.models.draft_head import DraftHead

Caches = tuple[torch.Tensor, torch.Tensor]
"""Keys and values, [rows, slots, Hkv, D] each. A slot is row * slots + its number in the row."""


class HeadLayer:
    """The forward pass of a `DraftHead`, by the operations of the decoder's own layers."""

    def __init__(self, head: DraftHead) -> None:
        """`head` keeps its weights; those that one product reads are next to each other from now on."""
        self.head = head
        self._qkv, self._gate_up = head.stack()
        spec = head.spec
        self._ops, self._kept = (self._ops_of(heads) for heads in (spec.heads, 0))
        """Operations of whole passes, and of positions that only get keys and values."""
        self._kv = self._qkv[spec.heads * spec.dim :]

    def _ops_of(self, heads: int) -> LayerOps:
        spec = self.head.spec
        shape = LayerShape(
            num_heads=heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.dim,
            eps=spec.eps,
            activation="silu",
            dtype=self.head.dtype,
            inverse_frequencies=self.head.frequencies,
            amplitude=spec.rope.amplitude,
        )
        return layer_ops_for(shape) if self.head.frequencies.device.type == "cuda" else LayerOps(shape)

    def combine(self, taps: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, hidden] of tokens, from the inputs [T, layers, target hidden] of tapped layers."""
        return self._ops.linear(taps.flatten(1), self.head.tensors["fc.weight"])

    def keep(
        self,
        hidden: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: Caches,
    ) -> None:
        """Write keys and values of the positions [T] with these hidden states [T, hidden] to their `slots` [T].

        `following` [T] are the tokens after them. No slot may occur twice.
        """
        entered, _ = self._enter(hidden, following)
        kv = self._kept.linear(entered, self._kv)
        self._kept.rotate_and_write(kv, self._kept.rotation(positions), None, None, caches, slots)

    def guess(
        self,
        hidden: torch.Tensor,
        following: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        caches: Caches,
        attend: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The likeliest tokens [S] after the `following` ones [S]. `hidden` [S, hidden] becomes the next hidden states.

        `attend` is the attention of the queries [S, H, D] in these `slots` [S], once their keys and values are there. A
        negative slot is padding on a GPU.
        """
        layer, ops = self.head.layer, self._ops
        entered, normed = self._enter(hidden, following)
        stream = normed if self.head.spec.norm_before_residual else hidden
        qkv = ops.linear(entered, self._qkv)
        query = ops.rotate_and_write(qkv, ops.rotation(positions), None, None, caches, slots)
        x = ops.add_linear_norm(
            stream, attend(query).flatten(1), layer["self_attn.o_proj.weight"], None,
            layer["post_attention_layernorm.weight"],
        )  # fmt: skip
        x = ops.add_linear_norm(
            stream, ops.gated_linear(x, self._gate_up), layer["mlp.down_proj.weight"], None,
            self.head.tensors["norm.weight"],
        )  # fmt: skip
        tokens = self.head.target_tokens(argmax(ops.linear(x, self.head.tensors["lm_head.weight"])))
        if stream is not hidden:
            hidden.copy_(stream)
        return tokens

    def _enter(self, hidden: torch.Tensor, following: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's input [T, 2 hidden], and the normed hidden states [T, hidden]."""
        layer, ops = self.head.layer, self._ops
        embedded = ops.embed(following, self.head.tensors["embed_tokens.weight"])
        normed = ops.norm(hidden, layer["hidden_norm.weight"])
        return torch.cat((ops.norm(embedded, layer["input_layernorm.weight"]), normed), 1), normed
