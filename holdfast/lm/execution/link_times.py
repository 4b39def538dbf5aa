"""Times the links between the ranks that share a model: sums over a group, and sends from stage to stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from holdfast.core.cost import LinkCost
from holdfast.lm.execution.stage_link import StageLink
from holdfast.lm.kernels.collectives.protocol import Group

TOKENS = (1, 16, 128, 512, 2048)
"""Token counts of the timed messages. Counts that no step reaches are left out."""
WARM_UP, REPEATS = 3, 20


class LinkTimes(NamedTuple):
    """Measured costs of the links; None for a link that does not exist."""

    all_reduce: LinkCost | None
    send: LinkCost | None


@torch.inference_mode()
def time_links(
    group: Group | None,
    link: StageLink | None,
    *,
    first: bool,
    last: bool,
    stages: int,
    width: int,
    max_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LinkTimes:
    """Time messages of activations [T, width] of this dtype. All ranks call this at the same time, with equal sizes.

    `first` and `last` say whether this rank is in the first or the last of the `stages`. A send is timed as a round
    through all stages, with a token back to the first stage. Sending a token is assumed to cost as much as sending the
    activations of one token. Only the first stage's ranks return valid times.
    """
    sizes = [tokens for tokens in TOKENS if tokens <= max_tokens]
    bytes_of = tuple(tokens * width * dtype.itemsize for tokens in sizes)
    all_reduce = send = None
    if group is not None:
        summed = group

        def add_up(tokens: int) -> None:
            summed.all_reduce(summed.room((tokens, width), dtype).zero_())

        all_reduce = LinkCost(bytes_of, tuple(_seconds(add_up, tokens, device) for tokens in sizes))
    if link is not None:
        passed = link
        into, token = torch.zeros(sizes[-1], width, dtype=dtype, device=device), torch.zeros(1, dtype=torch.int64)
        token = token.to(device)

        def go_round(tokens: int) -> None:
            stream = into[:tokens]
            if not first:
                passed.receive(stream)
            if last:
                passed.send_tokens(token)
            else:
                passed.send(stream)
            if first:
                passed.receive_tokens(1)

        rounds = [_seconds(go_round, tokens, device) for tokens in sizes]
        back = rounds[0] / stages
        send = LinkCost(bytes_of, tuple(max(back, (seconds - back) / (stages - 1)) for seconds in rounds))
    return LinkTimes(all_reduce, send)


def _seconds(message: Callable[[int], None], tokens: int, device: torch.device) -> float:
    """Mean seconds of one message of this many tokens. Messages are sent one after the other."""
    for _ in range(WARM_UP):
        message(tokens)
    _finish(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        message(tokens)
    _finish(device)
    return (time.perf_counter() - began) / REPEATS


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
