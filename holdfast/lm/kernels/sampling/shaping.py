"""Shaping: logits changed before a draw, on the device: penalties, biases, banned tokens, min-p, ends of reasoning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from holdfast.lm.kernels.upload import upload
from holdfast.lm.types import History, Sampling

Records = npt.NDArray[np.void]

BANNED = np.dtype([("at", "i8"), ("token", "i8")])
"""A token that may not be drawn yet. In rows with a grammar, the mask forbids it instead."""
BIASED = np.dtype([("at", "i8"), ("token", "i8"), ("bias", "f4")])
"""A bias on a token's logit."""
FOLLOWED = np.dtype(
    [
        ("at", "i8"),
        ("row", "i8"),  # the executor's row, and thus the history
        ("position", "i8"),  # number of tokens of the history so far
    ]
)
"""A row that needs its history (`Shaping.counts`)."""
PENALISED = np.dtype(
    [
        *FOLLOWED.descr,
        ("prompt", "i8"),  # number of its prompt's tokens that the history has
        *((name, "f4") for name in ("repetition", "frequency", "presence")),
    ]
)
"""A row with penalties."""
CUT = np.dtype([("at", "i8"), ("offset", "f4")])
"""A row with min-p, and the negative offset from its largest logit below which tokens are cut."""
ALLOWED = np.dtype([("at", "i8"), ("token", "i8")])
"""A token that may be drawn, in a row where only such tokens may."""
THINKING = np.dtype(
    [
        *FOLLOWED.descr,
        ("prompt", "i8"),  # number of its prompt's tokens that the history has
        *((name, "i8") for name in ("opened", "budget", "start", "end")),  # fields of ThinkingBudget
    ]
)
"""A row whose reasoning may have had its tokens."""


def word_type(width: int) -> np.dtype[np.void]:
    """The type of a bad word whose last token may not follow the others, of which there are at most `width`."""
    return np.dtype(
        [
            *((name, "i8") for name in ("at", "row", "position", "prompt", "token")),
            ("length", "i8"),  # number of tokens before the last one
            ("before", "i8", (width,)),  # those tokens, at the end of the field
        ]
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes to the logits of one step's sampled rows, on the host. `at` is an index into these rows."""

    banned: Records  # of BANNED
    biased: Records  # of BIASED
    followed: Records  # of FOLLOWED
    penalised: Records  # of PENALISED
    cut: Records  # of CUT
    words: Records  # of `word_type`
    allowed: Records  # of ALLOWED
    thinking: Records  # of THINKING

    @classmethod
    def of(cls, records: Sequence[Sampling], rows: Sequence[int], positions: Sequence[int]) -> Changes | None:
        """The changes that the records of the sampled rows ask for; None if they ask for none.

        `positions` has the number of tokens of each sequence so far.
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
        known = {at: positions[at] - shaping.history_start for at, _, shaping in asked}
        followed = [(at, rows[at], known[at]) for at, _, shaping in asked if shaping.counts]
        penalised = [
            (at, rows[at], known[at], of.prompt, of.repetition_penalty, of.frequency_penalty, of.presence_penalty)
            for at, _, of in asked
            if of.penalises
        ]
        cut = [
            (at, each.temperature * math.log(shaping.min_p))
            for at, each, shaping in asked
            if shaping.min_p > 0 and each.temperature > 0
        ]
        width = max((len(word) - 1 for _, _, shaping in asked for word in shaping.bad_words[:1]), default=0)
        words = [
            (
                at,
                rows[at],
                known[at],
                shaping.prompt - shaping.history_start,
                word[-1],
                len(word) - 1,
                (0,) * (width + 1 - len(word)) + word[:-1],
            )
            for at, _, shaping in asked
            for word in shaping.bad_words
        ]
        allowed = [(at, token) for at, _, shaping in asked for token in shaping.allowed]
        thinking = [
            (at, rows[at], known[at], of.prompt - of.history_start, limit.opened, limit.tokens, limit.start, limit.end)
            for at, _, of in asked
            if (limit := of.thinking) is not None and positions[at] - of.prompt >= limit.tokens + (not limit.opened)
        ]
        return cls(
            np.array(banned, BANNED),
            np.array(biased, BIASED),
            np.array(followed, FOLLOWED),
            np.array(penalised, PENALISED),
            np.array(cut, CUT),
            np.array(words, word_type(width)),
            np.array(allowed, ALLOWED),
            np.array(thinking, THINKING),
        )

    def part(self, rows: range) -> Changes:
        """The changes of some of the sampled rows, with indices relative to the first of them."""

        def within(records: Records) -> Records:
            chosen = records[(records["at"] >= rows.start) & (records["at"] < rows.stop)]
            chosen["at"] -= rows.start
            return chosen

        return Changes(*[within(getattr(self, each.name)) for each in fields(self)])


class Histories:
    """The tokens of the rows whose draws depend on them, on the device, from `Shaping.history_start` on.

    The host sends a row's known tokens when its sequence gets the row. Each later token is the input of the step after
    the one that sampled it, so tokens that the host does not know yet are counted as well.
    """

    def __init__(self) -> None:
        self._tokens: torch.Tensor | None = None  # [rows, positions] int64

    def enter(self, given: Sequence[History], changes: Changes, last: torch.Tensor) -> None:
        """Write the histories that the host sends, then the input token of each row that needs its history.

        `last` [R] are the last input tokens of all sampled rows.
        """
        followed = changes.followed
        if not len(followed):
            return
        tokens = self._room(int(followed["row"].max()) + 1, int(followed["position"].max()), last.device)
        if given:
            lengths = [len(each.tokens) for each in given]
            rows = np.repeat(np.array([each.row for each in given], np.int64), lengths)
            places = np.concatenate([np.arange(length) for length in lengths])
            ids = np.concatenate([np.array(each.tokens, np.int64) for each in given])
            written = upload(np.stack((rows, places, ids)), last.device)
            tokens.index_put_((written[0], written[1]), written[2])
        now = upload(np.stack((followed["row"], followed["position"] - 1, followed["at"])), last.device)
        tokens.index_put_((now[0], now[1]), last.index_select(0, now[2]))

    def counts(self, changes: Changes, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts of each token in each penalised row, in the whole sequence and in the answer: both [P, V] float32."""
        assert self._tokens is not None
        numbers = upload(_columns(changes.penalised, "row", "position", "prompt"), self._tokens.device)
        longest = int(changes.penalised["position"].max())
        tokens = self._tokens[:, :longest].index_select(0, numbers[0])
        place = torch.arange(longest, device=tokens.device)
        known = place < numbers[1][:, None]
        answered = known & (place >= numbers[2][:, None])
        tokens = torch.where(known, tokens, 0)
        empty = torch.zeros(2, len(tokens), vocab_size, device=tokens.device)
        # Sums of ones are exact in any order.
        return empty[0].scatter_add_(1, tokens, known.float()), empty[1].scatter_add_(1, tokens, answered.float())

    def completed(self, words: Records, device: torch.device) -> torch.Tensor:
        """Whether each bad word's last token would complete it now: bool [W]. Only tokens of the answer count."""
        before = words["before"]
        width = before.shape[1]
        if not width:
            return torch.ones(len(words), dtype=torch.bool, device=device)
        assert self._tokens is not None
        numbers = upload(_columns(words, "row", "position", "prompt", "length"), device)
        row, position, prompt, length = numbers[:, :, None]
        back = torch.arange(-width, 0, device=device)
        known = self._tokens[row, (position + back).clamp_min(0)]
        same = (known == upload(before.copy(), device)) | (back < -length)
        completes: torch.Tensor = same.all(-1) & (position - length >= prompt)[:, 0]
        return completes

    def overspent(self, thinking: Records) -> torch.Tensor:
        """Whether the reasoning of each row has had its tokens and has not ended: bool [T]."""
        assert self._tokens is not None
        device, longest = self._tokens.device, int(thinking["position"].max())
        names = ("row", "position", "prompt", "opened", "budget", "start", "end")
        numbers = upload(_columns(thinking, *names), device)
        tokens = self._tokens[:, :longest].index_select(0, numbers[0])
        _, position, prompt, opened, budget, start, end = numbers[:, :, None]
        place = torch.arange(longest, device=device)
        answered = (place >= prompt) & (place < position)
        # Without a first token of reasoning, it begins after all tokens, and has had none.
        first = torch.where(answered & (tokens == start), place, longest).amin(-1, keepdim=True) + 1
        begin = torch.where(opened > 0, prompt, first)
        ended = (answered & (place >= begin) & (tokens == end)).any(-1)
        spent: torch.Tensor = (position - begin >= budget)[:, 0] & ~ended
        return spent

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


def _columns(records: Records, *names: str) -> npt.NDArray[Any]:
    return np.stack([records[name] for name in names])


def _column(records: Records, name: str) -> npt.NDArray[Any]:
    return records[name].copy()  # PyTorch cannot read a field within records


def _places(records: Records, vocab_size: int) -> npt.NDArray[np.int64]:
    """The index of each record's logit in the flattened logits."""
    places: npt.NDArray[np.int64] = records["at"] * vocab_size + records["token"]
    return places


def _rounded(number: int) -> int:
    """The next power of two, at least 16."""
    return max(16, 1 << (number - 1).bit_length())


def shape(logits: torch.Tensor, changes: Changes, histories: Histories) -> torch.Tensor:
    """Return a float32 copy of logits [R, V] to which `changes` are applied. Does not wait for the device.

    Rows without changes keep their values.

    The order is vLLM's: banned tokens, biases, penalties for repetition, frequency and presence, min-p. Min-p keeps the
    tokens of at least `min_p` times the largest probability, at the row's temperature. Bad words and tokens that are
    not allowed are removed before min-p, which gives the same as removing them first. The end of reasoning that has had
    its tokens comes last, so that nothing but a mask keeps it from being drawn.
    """
    shaped, device = logits.to(torch.float32, copy=True), logits.device
    vocab_size = shaped.shape[1]
    flat = shaped.view(-1)
    if len(changes.banned):
        flat.index_fill_(0, upload(_places(changes.banned, vocab_size), device), -torch.inf)
    if len(changes.biased):
        flat.index_add_(
            0, upload(_places(changes.biased, vocab_size), device), upload(_column(changes.biased, "bias"), device)
        )
    if len(changes.penalised):
        at = upload(_column(changes.penalised, "at"), device)
        whole, answered = histories.counts(changes, vocab_size)
        factors = upload(_columns(changes.penalised, "repetition", "frequency", "presence"), device)
        repetition, frequency, presence = factors[:, :, None]
        part = shaped.index_select(0, at)
        part = torch.where(whole > 0, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= frequency * answered
        part -= presence * (answered > 0)
        shaped.index_copy_(0, at, part)
    if len(changes.words) or len(changes.allowed):
        _remove(shaped, changes, histories)
    if len(changes.cut):
        at = upload(_column(changes.cut, "at"), device)
        part = shaped.index_select(0, at)
        least = part.amax(-1, keepdim=True) + upload(_column(changes.cut, "offset"), device)[:, None]
        shaped.index_copy_(0, at, part.masked_fill(part < least, -torch.inf))
    if len(changes.thinking):
        _end_thinking(shaped, logits, changes.thinking, histories)
    return shaped


def _remove(shaped: torch.Tensor, changes: Changes, histories: Histories) -> None:
    """Set the logits [R, V] of tokens that are not allowed or complete a bad word to -inf, in place.

    A row in which nothing would be left keeps its logits: a grammar may allow only what a bad word forbids.
    """
    words, allowed, device, vocab_size = changes.words, changes.allowed, shaped.device, shaped.shape[1]
    rows = np.union1d(words["at"], allowed["at"])
    found = torch.zeros(len(rows) * vocab_size, dtype=torch.int32, device=device)
    if len(words):
        places = np.searchsorted(rows, words["at"]) * vocab_size + words["token"]
        found.index_add_(0, upload(places, device), histories.completed(words, device).int())
    unwanted = found.view(len(rows), vocab_size) > 0
    if len(allowed):
        limited = np.searchsorted(rows, allowed["at"])
        taken = torch.ones_like(unwanted)
        taken.index_fill_(0, upload(np.unique(limited), device), 0)
        taken.view(-1).index_fill_(0, upload(limited * vocab_size + allowed["token"], device), 1)
        unwanted |= ~taken
    at = upload(rows, device)
    part = shaped.index_select(0, at)
    left = (~unwanted & (part > -torch.inf)).any(-1, keepdim=True)
    shaped.index_copy_(0, at, part.masked_fill(unwanted & left, -torch.inf))


def _end_thinking(shaped: torch.Tensor, logits: torch.Tensor, thinking: Records, histories: Histories) -> None:
    """Leave only the end token in the rows of `shaped` [R, V] whose reasoning has had its tokens, in place.

    A row whose mask forbids that token, so that its `logits` have it at -inf, stays as it is.
    """
    at, end = upload(_columns(thinking, "at", "end"), shaped.device)
    forced = histories.overspent(thinking) & (logits[at, end] > -torch.inf)
    others = torch.arange(shaped.shape[1], device=shaped.device) != end[:, None]
    part = shaped.index_select(0, at)
    part = part.masked_fill(forced[:, None], 0.0).masked_fill(forced[:, None] & others, -torch.inf)
    shaped.index_copy_(0, at, part)
