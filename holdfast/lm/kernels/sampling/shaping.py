"""Shaping: logits changed by penalties, biases, banned tokens and min-p before a token is drawn, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.upload import upload
from holdfast.lm.types import History, Sampling

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


def _integers(values: Sequence[int]) -> Integers:
    return np.array(values, np.int64)


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, np.float32)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to the logits of one step's sampled rows. On the host; `at` is an index into these rows."""

    banned_at: Integers
    banned: Integers
    """Tokens that may not be drawn yet. In rows with a grammar, the mask forbids them instead."""
    biased_at: Integers
    biased: Integers
    bias: Floats
    penalised_at: Integers
    rows: Integers
    """The executor's row, and thus the history, of each penalised row. The arrays below are by penalised row too."""
    positions: Integers
    """Number of tokens of the sequence so far."""
    prompts: Integers
    """Number of tokens of the sequence's prompt."""
    repetition: Floats
    frequency: Floats
    presence: Floats
    cut_at: Integers
    cut: Floats
    """The offset from the row's largest logit below which min-p cuts; negative."""

    @classmethod
    def of(cls, records: Sequence[Sampling], rows: Sequence[int], positions: Sequence[int]) -> Changes | None:
        """The changes that the records of the sampled rows ask for; None if they ask for none.

        `positions` are the numbers of tokens that each sequence has so far.
        """
        asked = [(at, each, each.shaping) for at, each in enumerate(records) if each.shaping is not None]
        if not asked:
            return None
        banned = [
            (at, token)
            for at, each, shaping in asked
            if each.grammar is None and positions[at] - shaping.prompt < shaping.min_tokens
            for token in shaping.ends
        ]
        biased = [(at, token, value) for at, _, shaping in asked for token, value in shaping.bias]
        penalised = [(at, shaping) for at, _, shaping in asked if shaping.counts]
        cut = [
            (at, each.temperature * math.log(shaping.min_p))
            for at, each, shaping in asked
            if shaping.min_p > 0 and each.temperature > 0
        ]
        return cls(
            banned_at=_integers([at for at, _ in banned]),
            banned=_integers([token for _, token in banned]),
            biased_at=_integers([at for at, _, _ in biased]),
            biased=_integers([token for _, token, _ in biased]),
            bias=_floats([value for _, _, value in biased]),
            penalised_at=_integers([at for at, _ in penalised]),
            rows=_integers([rows[at] for at, _ in penalised]),
            positions=_integers([positions[at] for at, _ in penalised]),
            prompts=_integers([shaping.prompt for _, shaping in penalised]),
            repetition=_floats([shaping.repetition_penalty for _, shaping in penalised]),
            frequency=_floats([shaping.frequency_penalty for _, shaping in penalised]),
            presence=_floats([shaping.presence_penalty for _, shaping in penalised]),
            cut_at=_integers([at for at, _ in cut]),
            cut=_floats([value for _, value in cut]),
        )

    def part(self, rows: range) -> Changes:
        """The changes of some of the sampled rows, with indices relative to the first of them."""

        def within(at: Integers) -> npt.NDArray[np.bool_]:
            return (at >= rows.start) & (at < rows.stop)

        banned, biased, cut = within(self.banned_at), within(self.biased_at), within(self.cut_at)
        penalised = within(self.penalised_at)
        return Changes(
            self.banned_at[banned] - rows.start,
            self.banned[banned],
            self.biased_at[biased] - rows.start,
            self.biased[biased],
            self.bias[biased],
            self.penalised_at[penalised] - rows.start,
            self.rows[penalised],
            self.positions[penalised],
            self.prompts[penalised],
            self.repetition[penalised],
            self.frequency[penalised],
            self.presence[penalised],
            self.cut_at[cut] - rows.start,
            self.cut[cut],
        )


class Histories:
    """The tokens of the rows that have penalties, on the device, each at its position.

    The host sends a row's known tokens when its sequence gets the row. Each later token is the input of the step after
    the one that sampled it, so tokens that the host does not know yet are counted as well.
    """

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None  # [rows, positions] int64

    def enter(self, given: Sequence[History], changes: Changes, last: torch.Tensor) -> None:
        """Write the histories that the host sends, then the input token of each penalised row.

        `last` [R] are the last input tokens of all sampled rows.
        """
        if not len(changes.rows):
            return
        tokens = self._room(int(changes.rows.max()) + 1, int(changes.positions.max()), last.device)
        if given:
            lengths = [len(each.tokens) for each in given]
            rows = np.repeat(_integers([each.row for each in given]), lengths)
            places = np.concatenate([np.arange(length) for length in lengths])
            ids = np.concatenate([_integers(each.tokens) for each in given])
            written = upload(np.stack((rows, places, ids)), last.device)
            tokens.index_put_((written[0], written[1]), written[2])
        now = upload(np.stack((changes.rows, changes.positions - 1, changes.penalised_at)), last.device)
        tokens.index_put_((now[0], now[1]), last.index_select(0, now[2]))

    def counts(self, changes: Changes, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of each token in each penalised row, in the whole sequence and in the answer: both [P, V] float32."""
        assert self._tokens is not None
        numbers = upload(np.stack((changes.rows, changes.positions, changes.prompts)), self._tokens.device)
        longest = int(changes.positions.max())
        tokens = self._tokens[:, :longest].index_select(0, numbers[0])
        place = torch.arange(longest, device=tokens.device)
        known = place < numbers[1][:, None]
        answered = known & (place >= numbers[2][:, None])
        tokens = torch.where(known, tokens, 0)
        empty = torch.zeros(2, len(tokens), vocab_size, device=tokens.device)
        # Sums of ones are exact in any order.
        return empty[0].scatter_add_(1, tokens, known.float()), empty[1].scatter_add_(1, tokens, answered.float())

    def _room(self, rows: int, positions: int, device: torch.device) -> torch.Tensor:
        """The histories, with room for this many rows and positions."""
        before = self._tokens
        if before is None or before.shape[0] < rows or before.shape[1] < positions:
            old_rows, old_positions = (0, 0) if before is None else before.shape
            size = (max(old_rows, _rounded(rows)), max(old_positions, _rounded(positions)))
            self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
            if before is not None:
                self._tokens[:old_rows, :old_positions] = before
        assert self._tokens is not None
        return self._tokens


def _rounded(number: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def shape(logits: torch.Tensor, changes: Changes, histories: Histories) -> torch.Tensor:
    """Return a float32 copy of logits [R, V] to which `changes` are applied. Does not wait for the device.

    Rows without changes keep their values.

    The order is vLLM's: banned tokens, biases, penalties for repetition, frequency and presence, min-p. Min-p keeps the
    tokens of at least `min_p` times the largest probability, at the row's temperature.
    """
    shaped, device = logits.to(torch.float32, copy=True), logits.device
    vocab_size = shaped.shape[1]
    flat = shaped.view(-1)
    if len(changes.banned):
        flat.index_fill_(0, upload(changes.banned_at * vocab_size + changes.banned, device), -torch.inf)
    if len(changes.biased):
        flat.index_add_(
            0, upload(changes.biased_at * vocab_size + changes.biased, device), upload(changes.bias, device)
        )
    if len(changes.penalised_at):
        at = upload(changes.penalised_at, device)
        whole, answered = histories.counts(changes, vocab_size)
        repetition, frequency, presence = upload(
            np.stack((changes.repetition, changes.frequency, changes.presence)), device
        )[:, :, None]
        part = shaped.index_select(0, at)
        part = torch.where(whole > 0, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= frequency * answered
        part -= presence * (answered > 0)
        shaped.index_copy_(0, at, part)
    if len(changes.cut_at):
        at = upload(changes.cut_at, device)
        part = shaped.index_select(0, at)
        least = part.amax(-1, keepdim=True) + upload(changes.cut, device)[:, None]
        shaped.index_copy_(0, at, part.masked_fill(part < least, -torch.inf))
    return shaped
