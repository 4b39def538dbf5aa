"""StageLink: the link between pipeline stages. Streams go to the next stage, sampled tokens to the first one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from holdfast.core.layout import Layout
from holdfast.lm.execution.batch import StagedStep
from holdfast.lm.models.base import ModelSpec
from holdfast.lm.types import PENDING

TOKEN_SLOTS = 16
"""Largest number of steps whose sampled tokens the last stage has sent and the first stage has not received."""
STREAM_TAG, TOKENS_TAG, BACK_TAG = 0, 1, 2


class StageLink(Protocol):
    """Messages between one device and the devices of other stages that have its share of each layer.

    Messages arrive in the order in which they were sent. Sending waits for neither a receiver nor the host; receiving
    makes the computation wait. All devices of a pipeline call this for the same steps in the same order.
    """

    def send(self, stream: torch.Tensor) -> None:
        """Send a step's stream [T, hidden] to the next stage. Later computation may overwrite it."""
        ...

    def receive(self, into: torch.Tensor) -> None:
        """Write the next stream from the previous stage into a contiguous [T, hidden]."""
        ...

    def send_back(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor to the stage before. It may be overwritten by what is computed later."""
        ...

    def receive_back(self, into: torch.Tensor) -> None:
        """Write the next tensor that the next stage sent back into a contiguous one of the same size."""
        ...

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Send a step's sampled tokens [R] int64 from the last stage to the first.

        At most TOKEN_SLOTS steps have sent tokens that are not received.
        """
        ...

    def receive_tokens(self, count: int) -> torch.Tensor:
        """Receive the next tokens [R] int64 of the last stage, on the first stage."""
        ...


class GlooLink(StageLink):
    """The link between devices that are CPUs, by messages through gloo."""

    def __init__(self, processes: dist.ProcessGroup, layout: Layout, rank: int) -> None:
        """`processes` has all ranks."""
        self._processes, self._rank, self._tp = processes, rank, layout.tp
        self._first, self._last = layout.shard_of(rank), layout.ranks - layout.tp + layout.shard_of(rank)
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()
        """Messages that are being sent. Their tensors must not change before the send is complete."""

    def send(self, stream: torch.Tensor) -> None:
        self._send(stream, self._rank + self._tp, STREAM_TAG)

    def receive(self, into: torch.Tensor) -> None:
        self._processes.recv([into], self._rank - self._tp, STREAM_TAG).wait()

    def send_back(self, tensor: torch.Tensor) -> None:
        self._send(tensor, self._rank - self._tp, BACK_TAG)

    def receive_back(self, into: torch.Tensor) -> None:
        self._processes.recv([into], self._rank + self._tp, BACK_TAG).wait()

    def send_tokens(self, tokens: torch.Tensor) -> None:
        self._send(tokens, self._first, TOKENS_TAG)

    def receive_tokens(self, count: int) -> torch.Tensor:
        tokens = torch.empty(count, dtype=torch.int64)
        self._processes.recv([tokens], self._last, TOKENS_TAG).wait()
        return tokens

    def _send(self, tensor: torch.Tensor, rank: int, tag: int) -> None:
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        kept = tensor.contiguous().clone()
        self._sending.append((self._processes.send([kept], rank, tag), kept))


class TokensUnderWay(NamedTuple):
    """Tokens that a step sampled on the last stage, and that the first stage has not received."""

    rows: torch.Tensor  # [R] int64: the row of each token
    numbers: npt.NDArray[np.int64]
    """The numbers in `rows`, on the host."""


class StageEnd:
    """One device's end of the link. On the first stage, it tracks the tokens that are under way.

    It outlives executors. Only the thread that runs the steps uses it.
    """

    def __init__(self, link: StageLink, spec: ModelSpec, max_tokens: int) -> None:
        """`spec` describes the device's part of the model. A step has at most `max_tokens` tokens."""
        self._link, self._first, self.last = link, spec.first, spec.last
        self.incoming: torch.Tensor | None = None
        """The previous stage's stream [max_tokens, width], as the last step received it; None on the first stage."""
        if not spec.first:
            self.incoming = torch.zeros(max_tokens, spec.stream_width, dtype=spec.dtype, device=spec.device)
        self._under_way: deque[TokensUnderWay] = deque()

    def enter(self, staged: StagedStep, last_token: torch.Tensor) -> None:
        """Receive a step's stream, or, on the first stage, the sampled tokens that the step needs.

        They become the last tokens of their rows, in `last_token` [rows].
        """
        if self.incoming is not None:
            self._link.receive(self.incoming[: staged.num_tokens])
            return
        for _ in range(self._needed(staged)):
            rows, numbers = self._under_way.popleft()
            last_token.index_copy_(0, rows, self._link.receive_tokens(len(numbers)))

    def leave(self, staged: StagedStep, rows: torch.Tensor, given: torch.Tensor) -> None:
        """Send on a step's results: its stream [T, width], or, on the last stage, its tokens [R].

        `rows` [R] are the rows that sampled.
        """
        if not self.last:
            self._link.send(given)
        elif staged.num_sampled:
            self._link.send_tokens(given)
        if self._first and staged.num_sampled:
            numbers = staged.host.arrays["sample_rows"][: staged.num_sampled].astype(np.int64)
            self._under_way.append(TokensUnderWay(rows.clone(), numbers))

    def drain(self) -> None:
        """Receive the tokens that are under way, on the first stage, and drop them. No step needs them."""
        while self._under_way:
            self._link.receive_tokens(len(self._under_way.popleft().numbers))

    def _needed(self, staged: StagedStep) -> int:
        """Number of steps whose tokens must be received: up to the last one that sampled for a PENDING token."""
        needed = max(0, len(self._under_way) - TOKEN_SLOTS + 1)
        if staged.has_pending and self._under_way:
            arrays, tokens = staged.host.arrays, slice(0, staged.num_tokens)
            waiting = arrays["token_rows"][tokens][arrays["ids"][tokens] == PENDING]
            for index, each in enumerate(self._under_way, start=1):
                if np.isin(each.numbers, waiting).any():
                    needed = max(needed, index)
        return needed
