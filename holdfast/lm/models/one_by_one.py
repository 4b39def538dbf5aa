"""Steps of a decoder on a CPU, computed one token after the other.

PyTorch's sums on a CPU depend on the sizes of a tensor and on the threads that share it. A token alone has one size, so
its bits depend on the tokens before it alone, whatever kinds of layers the decoder has. Every token reads all weights,
so a prompt takes as long as as many decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.attention.torch_attention import TileMetadata
from holdfast.lm.kernels.lora.groups import groups_of
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.kernels.lora.torch_lora import TorchLora
from holdfast.lm.kernels.recurrent.torch_recurrence import RoundMetadata, TorchRecurrence
from holdfast.lm.models.base import RecurrentStep, StepInput

Rows = tuple[torch.Tensor, ...]


def token_by_token(body: Callable[[StepInput], Rows], step: StepInput) -> Rows:
    """The result of `body` for the step's sampled tokens, each tensor [R, ...], from a step for each token.

    A token reads the keys of earlier positions. The step may hold them anywhere, also in the segment of another
    sequence that begins alike and computes the shared blocks.
    """
    found: dict[int, Rows] = {}
    of_rows = _rows_of(step).tolist()
    with _moving_states(step.recurrent) as recurrent:
        for token in np.argsort(step.positions.numpy(), kind="stable").tolist():
            found[token] = body(_alone(step, token, of_rows[token], recurrent))
    wanted = range(len(step.positions)) if step.sample_at is None else step.sample_at.tolist()
    if not len(wanted):  # no row, of the right width
        return tuple(each[:0] for each in found[0])
    return tuple(torch.cat(each) for each in zip(*(found[token] for token in wanted), strict=True))


def row_by_row(
    compute: Callable[[Rows, StepAdapters | None], torch.Tensor], rows: Rows, adapters: StepAdapters | None
) -> torch.Tensor:
    """compute(rows, adapters), one row after the other. `adapters` are those of the step that sampled these rows."""
    slots = None if adapters is None else _slots_of(adapters.rows)
    found = [
        compute(
            tuple(each[row : row + 1].clone() for each in rows),
            None if adapters is None or slots is None else _adapter_alone(adapters, slots, row),
        )
        for row in range(len(rows[0]))
    ]
    return torch.cat(found) if found else compute(rows, None)


def _alone(step: StepInput, token: int, row: int, recurrent: RecurrentStep | None) -> StepInput:
    """The step of one token, whose blocks are in this row of the block tables."""
    own = slice(token, token + 1)
    position = int(step.positions[token])
    segment = Segments(*(np.array(numbers, np.int32) for numbers in ([0, 1], [position + 1], [row])))
    adapters = step.adapters
    return replace(
        step,
        ids=step.ids[own].clone(),
        positions=step.positions[own].clone(),
        slot_mapping=step.slot_mapping[own].clone(),
        sample_at=None,
        metadata=step.attention.make_metadata(segment),
        adapters=None if adapters is None else _adapter_alone(adapters, _slots_of(adapters.tokens), token),
        stream=None if step.stream is None else step.stream[own].clone(),
        recurrent=None if recurrent is None else _recurrent_alone(recurrent, token),
        taps=None if step.taps is None else step.taps._replace(into=step.taps.into[own]),
    )


def _rows_of(step: StepInput) -> npt.NDArray[np.int64]:
    """Each token's row of the block tables, [T]."""
    metadata: TileMetadata = step.metadata[0] if isinstance(step.metadata, tuple) else step.metadata
    return np.repeat(metadata.row, metadata.queries)


def _slots_of(lora: object) -> npt.NDArray[np.int64]:
    assert isinstance(lora, TorchLora)
    return lora.slots


def _adapter_alone(adapters: StepAdapters, slots: npt.NDArray[np.int64], token: int) -> StepAdapters | None:
    """The adapters of a step of one token; None if it has none, so that it is computed as in a step without any."""
    if slots[token] < 0:
        return None
    lora = TorchLora(groups_of(slots[token : token + 1]), torch.device("cpu"))
    return replace(adapters, tokens=lora, rows=lora)


def _recurrent_alone(step: RecurrentStep, token: int) -> RecurrentStep:
    """The recurrent layers' input for one token of a step. The state moves, also if the token is of a draft."""
    whole: RoundMetadata = step.metadata
    slot = whole.slots[whole.segment[token]].reshape(1).numpy().astype(np.int32)
    segment = Segments(np.array([0, 1], np.int32), np.array([1], np.int32), slot)
    place = whole.places[whole.kept == token]
    alone = step.recurrence.make_metadata(segment)
    return replace(step, metadata=replace(alone, kept=torch.zeros(len(place), dtype=torch.int64), places=place))


@contextmanager
def _moving_states(step: RecurrentStep | None) -> Iterator[RecurrentStep | None]:
    """The recurrent layers' input. At the end, sequences that verify a draft get back the states that they had."""
    if step is None:
        yield None
        return
    assert isinstance(step.recurrence, TorchRecurrence)
    slots = step.metadata.unmoved
    before = [[tensor[slots].clone() for tensor in layer] for layer in step.states]
    yield step
    for layer, saved in zip(step.states, before, strict=True):
        for tensor, numbers in zip(layer, saved, strict=True):
            tensor[slots] = numbers
