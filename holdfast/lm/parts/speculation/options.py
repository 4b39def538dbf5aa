"""Options of speculation: the drafts that one step verifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.core.config import BUILTIN_HEAD, BUILTIN_MODEL, CoreConfig, option

SpeculationName = Literal["auto", "off", "ngram", "suffix", "eagle3"]
DrafterName = Literal["ngram", "suffix", "eagle3"]

LEAST_SAMPLES = 64
"""Tokens that a step may always draw if drafts are verified, however small the batch."""


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(CoreConfig):
    """Which method guesses tokens, and how many."""

    speculation: SpeculationName = option(  # noqa: RUF009  a string
        "auto",
        "guess tokens and verify several in one step, where the cost model says that it pays; the text stays as it is; "
        "ngram guesses what followed the last three tokens before, suffix what followed the longest match, also in "
        "earlier answers; eagle3 guesses with draft_model; auto is eagle3 with draft_model, else suffix on a GPU or "
        "with tbt_target, where it can be",
        executor="paged",
    )
    draft_model: str = option(
        "",
        "draft head that guesses tokens: a directory or a hub id of an EAGLE-3 head made for the model, or "
        f"{BUILTIN_HEAD} for {BUILTIN_MODEL}",
        executor="paged",
    )
    draft_tokens: int = option(15, "most tokens guessed for a sequence in one step", between=(1, 63))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculation in ("ngram", "suffix", "eagle3") and (reason := self.no_drafts):
            raise ValueError(f"speculation is {self.speculation}, and {reason}; drop one")
        if self.speculation == "eagle3" and not self.draft_model:
            raise ValueError("speculation is eagle3, which takes a draft head: give draft_model")
        if not self.draft_model:
            return
        reason = self.no_drafts
        if self.speculation not in ("auto", "eagle3"):
            reason = f"speculation is {self.speculation}"
        elif self.layout.ranks > 1:
            reason = f"tp is {self.layout.tp} and pp is {self.layout.pp}: a draft head runs on one device"
        if reason:
            raise ValueError(f"draft_model is {self.draft_model}, and {reason}; drop one")

    @property
    def no_drafts(self) -> str:
        """The reason why no drafts can be verified; empty if they can."""
        if self.scheduler != "stall-free":
            return f"scheduler is {self.scheduler}: drafts are for the stall-free one"
        return "executor is padded, which verifies none" if self.executor == "padded" else ""

    @property
    def drafter(self) -> DrafterName | None:
        """The method that guesses tokens; None if no drafts are verified."""
        if self.speculation == "off" or self.no_drafts:
            return None
        if self.speculation == "auto":
            return "eagle3" if self.draft_model else "suffix"
        return self.speculation

    @property
    def max_samples(self) -> int:
        return max(super().max_samples, LEAST_SAMPLES if self.drafter else 0)

    def drafter_on(self, kind: str) -> DrafterName | None:
        """The drafter on a `kind` of device ("cuda", "cpu").

        A drafter needs a cost profile to judge by, whose estimate takes seconds on a CPU. So "auto" is off on a CPU,
        unless a latency target needs the profile in any case.
        """
        unasked = self.drafter == "suffix" and self.speculation == "auto" and kind == "cpu" and self.tbt_target is None
        return None if unasked else self.drafter

    def draft_places(self, kind: str) -> int:
        """As many as a step draws at most, if a drafter is named."""
        return self.max_samples if self.drafter_on(kind) else 0
