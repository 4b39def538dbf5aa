"""Sampler: draws a step's tokens, and computes their log probabilities for requests that ask for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from holdfast.core.types import TokenLogprobs
from holdfast.lm.kernels.collectives.protocol import Group, own_rows
from holdfast.lm.kernels.rows import each_row
from holdfast.lm.kernels.sampling.logprobs import NUMBERS_AT_ONCE, Logprobs, filled, log_probabilities
from holdfast.lm.kernels.sampling.masks import forbid
from holdfast.lm.kernels.sampling.sample import best_tokens, sample
from holdfast.lm.kernels.sampling.shaping import Changes, Histories, shape
from holdfast.lm.kernels.upload import upload
from holdfast.lm.types import History, Sampling

ToLogits = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Wishes:
    """The options of one step's sampled rows beyond drawing a token. On the host; None for a step without any."""

    logprobs: Sequence[int | None]
    """Number of alternatives to report for each sampled row; None: no log probability."""
    changes: Changes | None = None
    """The changes to logits before the draw."""
    histories: Sequence[History] = ()
    masked: Sequence[int] = ()
    """Indices of the sampled rows that have a mask."""
    embeds: Sequence[int] = ()
    """Indices of the sampled rows whose hidden states are returned."""
    named: Sequence[tuple[int, ...]] = ()
    """Tokens that each sampled row reports after its alternatives; empty: no row reports any."""

    @classmethod
    def of(
        cls,
        records: Sequence[Sampling],
        rows: Sequence[int],
        positions: Sequence[int],
        histories: Sequence[History] = (),
    ) -> Wishes | None:
        """The options of sampled rows with these records; None if they have none.

        `rows` are the rows of the executor, by which `histories` are named. `positions` are the numbers of tokens that
        each row has so far.
        """
        if not any(each.asks for each in records):
            return None
        masked = [at for at, each in enumerate(records) if each.grammar is not None]
        embeds = [at for at, each in enumerate(records) if each.embed]
        changes = Changes.of(records, rows, positions)
        named = [each.named for each in records]
        return cls([each.logprobs for each in records], changes, histories, masked, embeds, named if any(named) else ())

    @cached_property
    def reported(self) -> npt.NDArray[np.int64]:
        """Indices of the sampled rows whose log probabilities are reported."""
        return np.array([at for at, count in enumerate(self.logprobs) if count is not None], np.int64)

    @cached_property
    def masked_rows(self) -> npt.NDArray[np.int64]:
        """`masked` as an array."""
        return np.array(self.masked, np.int64)

    @cached_property
    def whole_rows(self) -> bool:
        """Whether some row needs logits of the whole vocabulary: for changes or log probabilities."""
        return self.changes is not None or len(self.reported) > 0

    @cached_property
    def most(self) -> int:
        """Largest number of alternatives that any row reports."""
        return max((count for count in self.logprobs if count is not None), default=0)

    @cached_property
    def named_tokens(self) -> npt.NDArray[np.int64] | None:
        """`named` as an array [R, most of any row], with 0 in places that a row does not have; None if empty."""
        return filled(self.named) if self.named else None


class Drawn(NamedTuple):
    """The tokens of a step's sampled rows."""

    tokens: torch.Tensor  # [R] int64
    logprobs: Logprobs | None = None
    """Log probabilities of the rows in `Wishes.reported`."""

    def told(self, wishes: Wishes | None) -> tuple[TokenLogprobs | None, ...]:
        """`StepResult.logprobs`, once all is on the host."""
        if self.logprobs is None or wishes is None:
            return ()
        return self.logprobs.of_rows(wishes.logprobs, [len(each) for each in wishes.named])

    def on_host(self) -> Drawn:
        """A copy in the host's memory. It is complete once the work on the current stream is done."""
        tokens = self.tokens
        if tokens.device.type == "cuda":
            tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
        return Drawn(tokens, None if self.logprobs is None else self.logprobs.on_host())


class Sampler:
    """Draws the tokens of steps, for rows of one device or of a group that shares the vocabulary."""

    def __init__(self, group: Group | None = None, vocab_size: int = 0, *, alone: bool = False) -> None:
        """`group` is the devices that share the vocabulary of this size, if there are several.

        With `alone`, the bits of a row's results do not depend on the other rows of the step.
        """
        self._alone = alone
        self._vocab_size, self._group = vocab_size, group
        self._histories = Histories()

    def draw(
        self,
        logits: torch.Tensor,
        columns: dict[str, Any],
        wishes: Wishes | None,
        *,
        any_random: bool,
        any_filtered: bool,
        last: torch.Tensor | None = None,
        masks: torch.Tensor | None = None,
    ) -> Drawn:
        """Draw a token for each row of the logits [R, V], or [R, V_own] in a group, by the row's own options.

        `columns` are the sampling columns and `position` of `sample`, [R] each. `last` [R] int64 are the input tokens
        that the logits follow; it is needed if a row has a history. `masks` [M, W] int32, W even, belong to
        `Wishes.masked`; the first device of a group sends them to the others. The logits may be changed. Nothing waits
        for the device.
        """
        group = self._group
        options: dict[str, Any] = {"any_random": any_random, "any_filtered": any_filtered}
        if group is not None and masks is not None:
            masks = group.gather(masks.view(torch.int64).flatten())[0].view(torch.int32).view(len(masks), -1)
        # Where a row's bits must not depend on others, every device draws from whole rows, as one device does.
        if group is not None and not self._alone and (wishes is None or not wishes.whole_rows):
            if wishes is not None and masks is not None:
                forbid(logits, masks, wishes.masked_rows, first=group.rank * -(-self._vocab_size // group.size))
            return Drawn(sample_sharded(logits, group, self._vocab_size, **columns, **options))
        changes = None if wishes is None else wishes.changes
        if wishes is not None and changes is not None and len(changes.followed):
            assert last is not None, "rows whose draws depend on earlier tokens need their input tokens"
            self._histories.enter(wishes.histories, changes, last)
        if group is not None:
            wishes = wishes or Wishes([None] * len(logits))
            return self._draw_whole_rows(logits, group, columns, wishes, options, masks)
        allowed = logits
        if wishes is not None and masks is not None:
            allowed = forbid(logits.clone() if len(wishes.reported) else logits, masks, wishes.masked_rows)
        shaped = allowed if changes is None else shape(allowed, changes, self._histories)
        tokens = self._sampled(shaped, columns, options)
        return Drawn(tokens, None if wishes is None else self._asked_logprobs(logits, tokens, wishes))

    def _sampled(self, shaped: torch.Tensor, columns: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
        """`sample` for whole rows [R, V], each by itself where its bits must not depend on the others."""
        if not (self._alone and options["any_random"]):
            return sample(shaped, **columns, **options)

        def draw(logits: torch.Tensor, *row: torch.Tensor) -> torch.Tensor:
            own: dict[str, Any] = dict(zip(columns, row, strict=True))
            return sample(logits, **own, **options)

        return each_row(draw, shaped, *columns.values())

    def _asked_logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, wishes: Wishes) -> Logprobs | None:
        """The log probabilities that the rows ask for, from whole logits [R, V] as the model computed them."""
        if not len(wishes.reported):
            return None
        if len(wishes.reported) < len(logits):
            at = upload(wishes.reported, logits.device)
            logits, tokens = logits.index_select(0, at), tokens.index_select(0, at)
        found = wishes.named_tokens
        named = None if found is None else upload(found[wishes.reported], logits.device)
        return log_probabilities(logits, tokens, wishes.most, named, alone=self._alone)

    def _draw_whole_rows(
        self,
        logits: torch.Tensor,
        group: Group,
        columns: dict[str, Any],
        wishes: Wishes,
        options: dict[str, Any],
        masks: torch.Tensor | None,
    ) -> Drawn:
        """Do the work of `draw` in a group.

        Each device draws for its share of the rows, whole. All devices get all results.
        """
        count, size = len(logits), group.size
        rows, share = own_rows(count, size, group.rank), -(-count // size)
        own = slice(rows.start, rows.stop)
        whole = group.exchange_rows(logits, self._vocab_size)
        tokens = torch.zeros(share, dtype=torch.int64, device=logits.device)
        shaped = whole
        if masks is not None and len(rows):
            mine = (wishes.masked_rows >= rows.start) & (wishes.masked_rows < rows.stop)
            start = int(np.count_nonzero(wishes.masked_rows < rows.start))
            some = masks[start : start + int(np.count_nonzero(mine))]
            shaped = forbid(
                whole.clone() if len(wishes.reported) else whole, some, wishes.masked_rows[mine] - rows.start
            )
        if wishes.changes is not None and len(rows):
            shaped = shape(shaped, wishes.changes.part(rows), self._histories)
        mine_only = {name: column[own] for name, column in columns.items()}
        tokens[: len(rows)] = self._sampled(shaped, mine_only, options)
        gathered = group.gather(tokens).flatten()[:count]
        if not len(wishes.reported):
            return Drawn(gathered)
        others = wishes.named_tokens
        named = None if others is None else upload(others[own], logits.device)
        found = self._all_logprobs(whole, tokens[: len(rows)], count, wishes.most, group, named)
        at = upload(wishes.reported, logits.device)
        return Drawn(gathered, Logprobs(*[part.index_select(0, at) for part in found if part is not None]))

    def tell_targets(
        self, hidden: torch.Tensor, logits: ToLogits, targets: torch.Tensor, most: int, named: torch.Tensor
    ) -> Logprobs:
        """Log probabilities of targets [T] int64 after hidden states [T, hidden], with the rank of each target.

        They include those of the `most` likeliest tokens. After these come those of the tokens `named` [T, N] int64.

        `logits` computes the logits [R, V], or [R, V_own] in a group, of some of the hidden states, so that few exist
        at a time. Nothing waits for the device.
        """
        rows = max(1, NUMBERS_AT_ONCE // self._vocab_size)
        split = (torch.split(each, rows) for each in (hidden, targets, named))
        parts = [
            self._some_logprobs(logits(some), chosen, most, others) for some, chosen, others in zip(*split, strict=True)
        ]
        columns = [[each for each in column if each is not None] for column in zip(*parts, strict=True)]
        return Logprobs(*[torch.cat(column) for column in columns])

    def _some_logprobs(self, logits: torch.Tensor, targets: torch.Tensor, most: int, named: torch.Tensor) -> Logprobs:
        group = self._group
        if group is None:
            return log_probabilities(logits, targets, most, named, alone=self._alone, ranked=True)
        whole, rows = group.exchange_rows(logits, self._vocab_size), own_rows(len(logits), group.size, group.rank)
        own = slice(rows.start, rows.stop)
        return self._all_logprobs(whole, targets[own], len(logits), most, group, named[own], ranked=True)

    def _all_logprobs(
        self,
        whole: torch.Tensor,
        tokens: torch.Tensor,
        count: int,
        most: int,
        group: Group,
        named: torch.Tensor | None = None,
        *,
        ranked: bool = False,
    ) -> Logprobs:
        """The log probabilities of all `count` rows. This device has whole logits and tokens only for its own rows."""
        likeliest, own, share = min(most, self._vocab_size), len(tokens), -(-count // group.size)
        most = likeliest + (0 if named is None else named.shape[1])
        numbers = torch.zeros(share, 1 + most, dtype=torch.float32, device=whole.device)
        ids = torch.zeros(share, most + ranked, dtype=torch.int64, device=whole.device)
        if own:
            part = log_probabilities(whole, tokens, likeliest, named, alone=self._alone, ranked=ranked)
            numbers[:own, 0] = part.own
            numbers[:own, 1:] = part.top
            ids[:own, :most] = part.top_ids
            if part.rank is not None:
                ids[:own, most] = part.rank
        numbers = group.gather(numbers.flatten()).view(-1, 1 + most)[:count]
        width = ids.shape[1]
        ids = group.gather(ids.flatten()).view(-1, width)[:count] if width else ids.new_zeros(count, 0)
        return Logprobs(numbers[:, 0], numbers[:, 1:], ids[:, :most], ids[:, most] if ranked else None)


def sample_sharded(
    logits: torch.Tensor,
    group: Group,
    vocab_size: int,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    any_random: bool,
    any_filtered: bool,
) -> torch.Tensor:
    """`sample` for logits [B, V_own] of this device's tokens, as in `Group.exchange_rows`: the same [B] everywhere.

    Without filters a row's token is the best of the devices' best ones. Top-k and top-p need whole rows, so if any row
    of a step has one, each device draws for a share of the rows, whole.
    """
    count, size = len(logits), group.size
    if not any_filtered:
        first = group.rank * -(-vocab_size // size)
        return group.best(*best_tokens(logits, temperature, seed, position, any_random=any_random, first=first))
    rows = own_rows(count, size, group.rank)
    own = slice(rows.start, rows.stop)
    tokens = torch.zeros(-(-count // size), dtype=torch.int64, device=logits.device)
    tokens[: len(rows)] = sample(
        group.exchange_rows(logits, vocab_size),
        temperature[own],
        top_k[own],
        top_p[own],
        seed[own],
        position[own],
        any_random=any_random,
        any_filtered=any_filtered,
    )
    return group.gather(tokens).flatten()[:count]
