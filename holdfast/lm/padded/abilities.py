"""Finds by probing which ways to run a model give right logits. The others are not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.padded.driver import AGREES, AGREES_IN_HALF, Driver, Inputs, difference, in_float32
from holdfast.lm.padded.loading import switches_at
from holdfast.lm.padded.state_layout import State, StateLayout
from holdfast.lm.types import Abilities

TOLERANCE = 1e-4
"""Largest difference of logits in float32, as a share of the largest logit, between a right history and a row alone."""
NOISY = 2e-2
"""The tolerance for a model whose own logits differ in float32 between one forward and a prefill with decodes. Wrong
histories were seen to differ by 5e-2 and more.
"""
MOST_PROBED = 512
"""Longest probe in tokens. It reaches beyond the largest window, chunk or compression rate of the config, if it can."""
DECODES = 4
"""Number of tokens that are decoded in each history."""
_SIZES = ("window", "chunk", "rate", "conv", "stride")
"""Parts of config entry names whose value is a number of tokens after which a layer behaves differently."""


def probe(driver: Driver, layout: StateLayout) -> Abilities:
    """Run short histories of several rows, and compare their logits with those of each prompt alone.

    Parameters that fit in float32 are raised to it meanwhile. Otherwise a history counts as right only if it differs by
    at most four times the noise of a batch of equal lengths. Raises UnsupportedCheckpoint if even a prompt alone gives
    logits that are not finite, or other logits in one forward than in a prefill and decodes.
    """
    with torch.inference_mode():
        try:
            with in_float32(driver.model.module) as raised:
                return _probed(driver, layout, exact=raised)
        except UnsupportedCheckpoint:
            if driver.model.dtype == torch.float32:
                raise
        return _probed(driver, layout, exact=False)  # code of its own may not run in float32


def _probed(driver: Driver, layout: StateLayout, *, exact: bool) -> Abilities:
    """The abilities of the model in its present precision."""
    histories = _Histories(driver, layout)
    try:
        alone = histories.alone()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model's own code may raise anything
        raise UnsupportedCheckpoint(f"{driver.model.architecture} fails on a short prompt: {error}") from error
    if not alone < (AGREES if exact else AGREES_IN_HALF):
        raise UnsupportedCheckpoint(
            f"{driver.model.architecture} gives logits that differ by {alone:.1%} between one forward and a prefill "
            "with decodes of the same prompt: it is no causal decoder"
        )
    if driver.keyword is None or _switches(driver):
        no: dict[str, Any] = dict(chunks=False, left_padding=False, batched_decode=False, shaping=False)
        return Abilities(**no, croppable=False, keeps_state=False)
    if exact:
        most = max(TOLERANCE, min(4 * alone, NOISY))
    else:
        most = min(4 * max(alone, histories.equal()), AGREES_IN_HALF / 2)
    together = layout.batches and _right(histories.merged, most)
    return Abilities(
        chunks=_right(histories.chunked, most),
        left_padding=layout.batches and _right(histories.left_padded, most),
        batched_decode=together,
        shaping=together and _right(histories.shaped, most),
        croppable=layout.croppable and _right(histories.cropped, most),
    )


def _right(history: Callable[[], float], most: float) -> bool:
    """Whether a history differs by at most `most`. An error in the model's code counts as wrong."""
    try:
        return history() <= most
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False


def _switches(driver: Driver) -> bool:
    """Whether the longest sequences served have other rotary frequencies than shorter ones (`switches_at`)."""
    switch = switches_at(driver.model.module.config.get_text_config())
    return switch is not None and driver.model.max_model_len > switch


def probed_lengths(driver: Driver) -> list[int]:
    """Lengths of four prompts. The third reaches beyond the largest window, chunk or compression rate, if it can."""
    most = min(MOST_PROBED, driver.model.max_model_len - DECODES)
    sizes = sorted(size for size in _sizes(driver.model.module.config) if 2 < size + 2 <= most)
    beyond = sizes[-1] + 2 if sizes else 0
    return [min(length, max(most, 1)) for length in (3, 9, max(14, beyond), 6)]


class _Histories:
    """Four prompts, the logits of each alone, and histories of several of them. Each gives its largest difference."""

    def __init__(self, driver: Driver, layout: StateLayout) -> None:
        self.driver, self.layout = driver, layout
        self.lengths = probed_lengths(driver)
        self.text = driver.text(len(self.lengths), max(self.lengths) + DECODES)
        self.device = self.text.device
        self.right: list[torch.Tensor] = []
        """By prompt, the logits [DECODES, V] after it and after each decoded token but the last."""

    def alone(self) -> float:
        """Each prompt alone, with its decoded tokens, against one forward over all.

        The other histories compare with these.
        """
        worst = 0.0
        for row, length in enumerate(self.lengths):
            whole = torch.stack([self._whole(row, length + column) for column in (0, DECODES - 1)])
            if self.driver.keyword is None:  # then a longer forward must give the same logits for the common tokens
                own = self._logits_at(row, length + DECODES, [length - 1, length + DECODES - 2])
                worst = max(worst, difference(own, whole))
                continue
            logits, state = self._prefill(row)
            own = torch.stack([logits, *self._decoded([row], [length], state)[0]])
            self.right.append(own)
            worst = max(worst, difference(own[[0, DECODES - 1]], whole))
        return worst

    def equal(self) -> float:
        """Two rows of one length in one forward: their difference is only the noise of a batch."""
        ids = self.text[:2, : self.lengths[0]]
        logits, _ = self.driver.forward(self.driver.inputs(ids), None)
        return difference(logits, torch.stack([self._whole(row, self.lengths[0]) for row in range(2)]))

    def chunked(self) -> float:
        """A prompt in several forwards, one of them of a single token."""
        worst, row = 0.0, 2
        length, state, start = self.lengths[row], None, 0
        for stop in (4, 5, 8, max(8, length - 3), length):
            if start < (stop := min(stop, length)):
                inputs = self.driver.inputs(self.text[row : row + 1, start:stop], start)
                logits, state = self.driver.forward(inputs, state)
                start = stop
        worst = difference(logits[0], self.right[row][0])
        return max(worst, self._compared([row], [length], state))

    def left_padded(self) -> float:
        """Prompts of unequal length in one forward, and decodes of each."""
        rows = [0, 1, 3]
        lengths = [self.lengths[row] for row in rows]
        wide = max(lengths)
        mask = self._mask(lengths, wide)
        ids = torch.stack(
            [self.text[row].roll(wide - length)[:wide] for row, length in zip(rows, lengths, strict=True)]
        )
        logits, state = self.driver.forward(Inputs(ids * mask, mask, (mask.cumsum(1) - 1).clamp(min=0)), None)
        worst = difference(logits, torch.stack([self.right[row][0] for row in rows]))
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            worst = max(worst, self._compared([row], [length], self.layout.extract(state, place, length)))
        return worst

    def merged(self) -> float:
        """Rows that join and leave a batch: merge, embed in both ways, filter, extract, release."""
        layout, lengths = self.layout, self.lengths
        states = [self._prefill(row)[1] for row in range(4)]
        batch = layout.merge(states[:2], lengths[:2])
        rows, has = [0, 1], lengths[:2]
        worst, batch = self._compared_some(rows, has, batch, 1)
        batch = layout.embed(batch, max(has), 2, states[2], lengths[2])  # usually longer than the others
        rows, has = [0, 1, 2], [*has, lengths[2]]
        some, batch = self._compared_some(rows, has, batch, 1)
        worst = max(worst, some)
        first, length = layout.extract(batch, 0, has[0]), has[0]
        batch = layout.filter(batch, [1])
        batch = layout.release(batch, has[1])
        rows, has = [1], [has[1]]
        batch = layout.embed(batch, has[0], 1, first, length)
        batch = layout.embed(batch, max(has[0], length), 2, states[3], lengths[3])
        some, batch = self._compared_some([1, 0, 3], [has[0], length, lengths[3]], batch, 1)
        return max(worst, some)

    def shaped(self) -> float:
        """A prompt and a decode in one forward. Then, as the executor does, the junk is cut and the row embedded."""
        worst = 0.0
        for running, newcomer in ((0, 2), (1, 3)):  # shorter than the newcomer, longer
            layout, has, new = self.layout, self.lengths[running], self.lengths[newcomer]
            batch = layout.blank(self._prefill(running)[1], has, 1)
            ids = torch.zeros(2, new, dtype=torch.int64, device=self.device)
            ids[0, 0], ids[1] = self.text[running, has], self.text[newcomer, :new]
            mask = torch.zeros(2, has + new, dtype=torch.int64, device=self.device)
            mask[0, : has + 1], mask[1, has:] = 1, 1
            positions = torch.stack([torch.full_like(ids[0], has), torch.arange(new, device=self.device)])
            columns = torch.tensor([0, new - 1], device=self.device)
            logits, batch = self.driver.forward(Inputs(ids, mask, positions, columns), batch)
            right = torch.stack([self.right[running][1], self.right[newcomer][0]])
            worst = max(worst, difference(logits, right))
            joining = layout.extract(batch, 1, new)
            batch = layout.filter(layout.cut(batch, has + 1), [0])
            batch = layout.embed(batch, has + 1, 1, joining, new)
            worst = max(worst, self._compared([running, newcomer], [has + 1, new], batch))
        return worst

    def cropped(self) -> float:
        """A state that is cut to its first positions and then continues."""
        row = 2
        length = self.lengths[row]
        state = self.layout.cut(self._prefill(row)[1], length - 3)
        logits, state = self.driver.forward(
            self.driver.inputs(self.text[row : row + 1, length - 3 : length], length - 3), state
        )
        return max(difference(logits[0], self.right[row][0]), self._compared([row], [length], state))

    def _whole(self, row: int, length: int) -> torch.Tensor:
        """Logits [V] after the first `length` tokens of a text, in one forward."""
        return self.driver.forward(self.driver.inputs(self.text[row : row + 1, :length]), None)[0][0]

    def _logits_at(self, row: int, length: int, columns: Sequence[int]) -> torch.Tensor:
        """Logits of `columns` of one forward."""
        inputs = self.driver.inputs(self.text[row : row + 1, :length])
        at = [torch.tensor([column], device=self.device) for column in columns]
        return torch.cat([self.driver.forward(inputs._replace(columns=column), None)[0] for column in at])

    def _prefill(self, row: int) -> tuple[torch.Tensor, State]:
        """Logits [V] after a prompt, and its state."""
        logits, state = self.driver.forward(self.driver.inputs(self.text[row : row + 1, : self.lengths[row]]), None)
        return logits[0], state

    def _mask(self, lengths: Sequence[int], width: int) -> torch.Tensor:
        """[B, width]: 1 for the tokens of right-aligned rows."""
        index = torch.tensor([width - length for length in lengths], device=self.device)
        return (torch.arange(width, device=self.device) >= index[:, None]).long()

    def _decodes(self, rows: Sequence[int], lengths: list[int], state: State) -> Iterator[tuple[torch.Tensor, State]]:
        """Decode the rows' texts token by token: logits [B, V] and the state after each. Counts `lengths` up."""
        while all(length < self.lengths[row] + DECODES - 1 for row, length in zip(rows, lengths, strict=True)):
            at = torch.tensor(lengths, device=self.device)[:, None]
            ids = self.text[torch.tensor(list(rows), device=self.device)[:, None], at]
            mask = torch.nn.functional.pad(self._mask(lengths, max(lengths)), (0, 1), value=1)
            logits, state = self.driver.forward(Inputs(ids, mask, at), state)
            lengths[:] = [length + 1 for length in lengths]
            yield logits, state

    def _decoded(self, rows: Sequence[int], lengths: Sequence[int], state: State) -> list[list[torch.Tensor]]:
        """Logits after each decoded token, by row."""
        steps = [logits for logits, _ in self._decodes(rows, list(lengths), state)]
        return [[logits[place] for logits in steps] for place in range(len(rows))]

    def _compared_some(self, rows: Sequence[int], lengths: list[int], state: State, steps: int) -> tuple[float, State]:
        """Decode `steps` tokens. Returns the largest difference and the state. Counts `lengths` up."""
        worst, decodes = 0.0, self._decodes(rows, lengths, state)
        for _ in range(steps):
            logits, state = next(decodes)
            right = [self.right[row][length - self.lengths[row]] for row, length in zip(rows, lengths, strict=True)]
            worst = max(worst, difference(logits, torch.stack(right)))
        return worst, state

    def _compared(self, rows: Sequence[int], lengths: Sequence[int], state: State) -> float:
        """Decode as long as all rows have logits to compare with. Returns the largest difference."""
        left = min(self.lengths[row] + DECODES - 1 - length for row, length in zip(rows, lengths, strict=True))
        return self._compared_some(rows, list(lengths), state, left)[0]


def _sizes(config: Any) -> Iterator[int]:
    """Numbers of tokens after which a layer behaves differently, in a config and the configs and tables inside it."""
    entries: dict[str, Any] = config if isinstance(config, dict) else vars(config)
    for name, value in entries.items():
        if hasattr(value, "to_dict") or isinstance(value, dict):
            yield from (
                _sizes(value)
                if hasattr(value, "to_dict")
                else (int(size) for size in value.values() if _is_size(size) and any(part in name for part in _SIZES))
            )
        elif _is_size(value) and any(part in name for part in _SIZES):
            yield int(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
