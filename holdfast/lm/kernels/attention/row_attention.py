"""Attention of one query a row over the slots of that row, where only the device knows how many it has."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from holdfast.lm.kernels.attention.tiles import FIELDS


class RowAttention(ABC):
    """Attention of one query for each of S rows, over the first slots of the row's keys and values.

    `begin` says which rows these are, and the slot of each one's query, the last that it sees. `advance` moves on by
    one slot. On a GPU nothing waits for the device, and CUDA graphs may capture `attend` and `advance`.
    """

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, heads: int) -> RowAttention:
        """The backend for the device of keys and values [rows, slots, Hkv, D], with this number of query heads."""
        return (TritonRows if keys.device.type == "cuda" else TorchRows)(keys, values, heads)

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, heads: int) -> None:
        self.keys, self.values = keys, values
        self.heads, self.kv_heads, self.dim = heads, *keys.shape[2:]

    @abstractmethod
    def begin(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """The queries of a batch belong to `rows` [S] int64 and have `slots` [S] int64. No row may occur twice."""

    @abstractmethod
    def attend(self, query: torch.Tensor) -> torch.Tensor:
        """Attention [S, H, D] of the queries [S, H, D]. More queries than rows are padding."""

    @abstractmethod
    def advance(self) -> None:
        """Move on: the next queries have the slots after these."""


class TorchRows(RowAttention):
    """`RowAttention` in PyTorch, for a CPU."""

    def begin(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        self._rows, self._slots = rows, slots

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        seen = int(self._slots.max()) + 1
        keys, values = (kept[:, :seen].index_select(0, self._rows) for kept in (self.keys, self.values))
        return attend_rows(query, keys, values, torch.arange(seen) <= self._slots[:, None])

    def advance(self) -> None:
        self._slots = self._slots + 1


class TritonRows(RowAttention):
    """`RowAttention` by the kernel of paged decodes: a row is one block, and the device writes the kernel's records."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, heads: int) -> None:
        super().__init__(keys, values, heads)
        rows = len(keys)
        self._tables = torch.arange(rows, dtype=torch.int32, device=keys.device)[:, None]
        self._work = torch.zeros(rows, FIELDS, dtype=torch.int32, device=keys.device)
        """A record of `TileList.work` for each query."""
        self._first = torch.zeros_like(self._work)
        """Records of the queries of rows 0 to S - 1 in slot 0."""
        self._first[:, 0] = self._tables[:, 0]
        self._first[:, 1], self._first[:, 6] = heads // self.kv_heads, 1
        self._padding = self._first.clone()
        """Records whose queries see no key, however often they are advanced: their result is 0."""
        self._padding[:, 6] = -(1 << 30)
        self._by_slot = self._first.new_zeros(FIELDS)
        """Added to a record with each slot: to the position of its query, and to its last key."""
        self._by_slot[2] = self._by_slot[6] = 1
        self._by_row = self._first.new_zeros(FIELDS)
        """Added to a record for each row before its own: to the row of the table."""
        self._by_row[3] = 1

    def begin(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        count = len(rows)
        records = self._first[:count] + slots.to(torch.int32)[:, None] * self._by_slot
        self._work.copy_(self._padding)
        torch.addcmul(records, rows.to(torch.int32)[:, None], self._by_row, out=self._work[:count])

    def attend(self, query: torch.Tensor) -> torch.Tensor:
        import triton  # a CPU installation has none

        from holdfast.lm.kernels.attention.decode_kernel import decode_kernel
        from holdfast.lm.kernels.attention.paged import launched
        from holdfast.lm.kernels.launch import dependent_launch_options

        count, out = len(query), torch.empty_like(query)
        nothing = query.new_empty(0, dtype=torch.float32)  # no row is cut into parts
        tensors = (query, self.keys, self.values, self._tables, self._work[:count], None, out, nothing, nothing)
        block_d = max(16, triton.next_power_of_2(self.dim))
        halves = query.element_size() == 2
        decode_kernel[(self.kv_heads, count)](
            *launched(*tensors, scale=self.dim**-0.5, window=None, softcap=None),
            GROUP_SIZE=self.heads // self.kv_heads,
            HEAD_DIM=self.dim,
            BLOCK_SIZE=self.keys.shape[1],
            BLOCK_M=max(16, triton.next_power_of_2(self.heads // self.kv_heads)),
            BLOCK_N=max(16, (64 if halves else 32) * 128 // max(128, block_d)),
            BLOCK_D=block_d,
            HAS_SOFTCAP=False,
            HAS_WINDOW=False,
            CHUNKED=False,
            STAGES=3 if halves else 1,
            num_warps=4 if halves else 8,
            **dependent_launch_options(query.device),
        )
        return out

    def advance(self) -> None:
        self._work += self._by_slot


def attend_rows(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention [S, H, D] of one query [S, H, D] a row over its keys and values [S, N, Hkv, D], in PyTorch.

    `seen` [S, N] says which keys each query sees.
    """
    grouped = query.reshape(len(query), keys.shape[2], -1, query.shape[-1])
    scores = torch.einsum("skgd,snkd->skgn", grouped, keys).float() * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
    return torch.einsum("skgn,snkd->skgd", weights, values).flatten(1, 2)
