"""Values of workloads: turns and conversations, their lengths, and when they arrive."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal, NamedTuple

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.pause import MAX_PAUSE

HASH_BLOCK = 512
"""Number of tokens that each hash id of a Mooncake trace stands for."""


class Common(NamedTuple):
    """The first tokens of a prompt that other conversations begin with too, such as a system prompt."""

    name: str = ""
    """Equal names mean equal tokens."""
    tokens: int = 0


NOTHING_COMMON = Common()


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: new prompt tokens after the whole history, and tokens to generate."""

    prompt: int
    output: int
    think: float = 0.0
    """Seconds between the end of the previous turn, and of all forks that it waits for, and this one."""
    hashes: tuple[int, ...] = ()
    """Ids of the turn's blocks of HASH_BLOCK tokens. Equal ids mean equal tokens. If empty, no other turn has these
    tokens, except for those that are `common`."""
    common: Common = NOTHING_COMMON
    """The prompt's first tokens, if other conversations have them too."""
    contract: Contract = NO_CONTRACT
    """The times that the client asks to be promised."""
    priority: int = 0
    """Priority class of the request, for engines that order by classes."""
    deadline: float | None = None
    """Seconds from arrival until the first token is due, for engines that order by deadlines."""
    pause: str = ""
    """Kind of the pause after this turn, as the client knows it: "person", "tool:NAME" or "branch". Empty: unknown."""
    expected_pause: float | None = None
    """Seconds that the client expects the pause after this turn to last; None: it does not know."""
    limit: int | None = None
    """Largest number of tokens that the client allows for the answer. None: exactly `output`."""
    replaces: int = 0
    """Number of turns just before this one that it replaces: its prompt follows the history before them."""
    forks: tuple[Conversation, ...] = ()
    """Conversations that begin after this turn. Their arrivals are in seconds from its end."""

    @property
    def longest(self) -> int:
        """Largest number of tokens that the answer may have."""
        return self.output if self.limit is None else max(self.limit, self.output)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: turns, each of which continues the previous one.

    Raises ValueError for a turn that replaces more turns than there are before it.
    """

    arrival: float
    """Seconds from the workload's start to the first turn."""
    turns: tuple[Turn, ...]
    inherits: bool = True
    """Whether a fork begins with the history of the turn that it forks from. Without meaning outside `Turn.forks`."""
    joins: bool = True
    """Whether the turn after the fork waits until the fork has ended. Without meaning outside `Turn.forks`."""

    def __post_init__(self) -> None:
        alive = 0
        for number, turn in enumerate(self.turns):
            if not 0 <= turn.replaces <= alive:
                raise ValueError(
                    f"turn {number} replaces {turn.replaces} turns; it must replace at least 0 and at most {alive}"
                )
            alive += 1 - turn.replaces

    def requests(self) -> Iterator[Turn]:
        """All turns, each followed by those of its forks."""
        for turn in self.turns:
            yield turn
            for fork in turn.forks:
                yield from fork.requests()

    def histories(self, inherited: int = 0) -> Iterator[int]:
        """Number of tokens before each turn's prompt. `inherited` is the number before the first one."""
        begins, length = list[int](), inherited
        for turn in self.turns:
            if turn.replaces:
                length = begins[-turn.replaces]
                del begins[-turn.replaces :]
            begins.append(length)
            yield length
            length += turn.prompt + turn.output

    def changed(self, change: Callable[[Turn, int], Turn], inherited: int = 0) -> Conversation:
        """This conversation, each turn replaced by what `change` makes of it and of the number of tokens before it.

        The forks of a turn are changed first.
        """
        turns = []
        for turn, history in zip(self.turns, self.histories(inherited), strict=True):
            end = history + turn.prompt + turn.output
            forks = tuple(fork.changed(change, end if fork.inherits else 0) for fork in turn.forks)
            turns.append(change(replace(turn, forks=forks) if forks else turn, history))
        return replace(self, turns=tuple(turns))


Workload = Sequence[Conversation]

LongerName = Literal["cut", "drop"]
"""A conversation longer than the context has its later turns cut, or is dropped whole."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A lognormal distribution of lengths in tokens, clipped to [least, most]."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    least: int = 1
    most: int = 1 << 20

    @classmethod
    def of_mean(cls, mean: float, sigma: float, least: int = 1, most: int = 1 << 20) -> Lengths:
        """The distribution whose mean, before clipping, is `mean`."""
        return cls(mean / exp(sigma * sigma / 2), sigma, least, most)

    def draw(self, choose: random.Random) -> int:
        """Draw one length."""
        return max(self.least, min(self.most, round(choose.lognormvariate(log(self.median), self.sigma))))


def gamma_arrivals(workload: Workload, rate: float, seed: int, variation: float = 1.0) -> list[Conversation]:
    """These conversations, arriving at `rate` per second with gamma-distributed intervals.

    `variation` is the standard deviation of the intervals divided by their mean. 1 is a Poisson process; above it,
    arrivals come in bursts.
    """
    if not (rate > 0 and variation > 0):
        raise ValueError(f"rate is {rate} and variation {variation}; both must be above 0")
    choose, shape = random.Random(f"arrivals/{seed}"), variation**-2
    now, arriving = 0.0, []
    for conversation in workload:
        now += choose.gammavariate(shape, 1 / (shape * rate))
        arriving.append(replace(conversation, arrival=now))
    return arriving


def speed_up(workload: Workload, factor: float) -> list[Conversation]:
    """Return the conversations of a workload with all arrival times divided by `factor`."""
    if not factor > 0:
        raise ValueError(f"the factor is {factor}; it must be above 0")
    return [replace(conversation, arrival=conversation.arrival / factor) for conversation in workload]


def fit_context(workload: Workload, max_model_len: int, longer: LongerName = "cut") -> list[Conversation]:
    """Return the conversations of which each has at most `max_model_len` tokens in all.

    A longer one is cut before the first turn that exceeds the limit, and dropped if no turn is left. Or it is dropped
    whole, as in Pensieve's evaluation (§6.1).
    """
    fitting = [_within(conversation, max_model_len) for conversation in workload]
    if longer == "drop":
        pairs = zip(workload, fitting, strict=True)
        return [whole for whole, cut in pairs if num_requests([whole]) == num_requests([cut])]
    return [conversation for conversation in fitting if conversation.turns]


def _within(conversation: Conversation, most: int, inherited: int = 0) -> Conversation:
    """The first turns of a conversation, as long as none ends after `most` tokens. Its forks are cut, too."""
    turns = []
    for turn, history in zip(conversation.turns, conversation.histories(inherited), strict=True):
        if history + turn.prompt + turn.longest > most:
            break
        end = history + turn.prompt + turn.output
        forks = [_within(fork, most, end if fork.inherits else 0) for fork in turn.forks]
        turns.append(replace(turn, forks=tuple(fork for fork in forks if fork.turns)) if forks else turn)
    return replace(conversation, turns=tuple(turns))


def promise(workload: Workload, contract: Callable[[Turn, int], Contract]) -> list[Conversation]:
    """These conversations, whose clients ask for the contract that `contract` gives for each turn.

    `contract` receives the turn and the number of tokens before its prompt.
    """

    def change(turn: Turn, history: int) -> Turn:
        return replace(turn, contract=contract(turn, history))

    return [conversation.changed(change) for conversation in workload]


SHORTEST_LIE = 0.05
"""Shortest pause in seconds that a client who lies may promise."""


def hint_pauses(workload: Workload, noise: float, liars: float, seed: int) -> list[Conversation]:
    """These conversations, whose clients say after each turn how long the pause until the next one lasts.

    They say the true pause times a lognormal factor, whose logarithm has the standard deviation `noise`. Nothing is
    said before a turn that waits for forks, nor after the last turn. In a share of `liars` of the conversations each
    turn is followed by a promise that has nothing to do with the pause: any time from SHORTEST_LIE to a day, as likely
    in each doubling. So liars promise a turn after their last one, too.

    Raises ValueError for a negative noise, and for a share that does not lie between 0 and 1.
    """
    if not 0 <= noise < float("inf"):
        raise ValueError(f"pause_noise is {noise:g}; it must be at least 0 and finite")
    if not 0 <= liars <= 1:
        raise ValueError(f"pause_liars is {liars:g}; it must lie between 0 and 1")
    choose = random.Random(f"pauses/{seed}")
    return [_hinted(each, noise, choose.random() < liars, choose) for each in workload]


def _hinted(conversation: Conversation, noise: float, lies: bool, choose: random.Random) -> Conversation:
    turns = []
    for turn, after in zip(conversation.turns, (*conversation.turns[1:], None), strict=True):
        forks = tuple(_hinted(fork, noise, lies, choose) for fork in turn.forks)
        expected = None
        if lies:
            expected = exp(choose.uniform(log(SHORTEST_LIE), log(MAX_PAUSE)))
        elif after is not None and not any(fork.joins for fork in forks):
            expected = min(after.think * choose.lognormvariate(0.0, noise), MAX_PAUSE)
        turns.append(replace(turn, forks=forks, expected_pause=expected))
    return replace(conversation, turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The part of a workload that is left out because it is longer than the context."""

    requests: int
    """Number of requests that are left out."""
    of_requests: int
    """Number of requests of the whole workload."""
    conversations: int
    """Number of conversations of which no request is left."""
    of_conversations: int
    """Number of conversations of the whole workload."""

    @classmethod
    def of(cls, workload: Workload, fitting: Workload) -> LeftOut:
        """Compare a workload, which is not empty, with what `fit_context` returned for it."""
        asked = num_requests(workload)
        return cls(asked - num_requests(fitting), asked, len(workload) - len(fitting), len(workload))

    def figures(self) -> dict[str, float]:
        """The shares of the workload's requests and of its conversations, by the names that a run's metrics use."""
        return {
            "left_out_requests_share": self.requests / self.of_requests,
            "left_out_conversations_share": self.conversations / self.of_conversations,
        }

    def __str__(self) -> str:
        return (
            f"{self.requests:,} of {self.of_requests:,} requests ({self.requests / self.of_requests:.1%}), "
            f"{self.conversations:,} of {self.of_conversations:,} conversations whole "
            f"({self.conversations / self.of_conversations:.1%})"
        )


def num_requests(workload: Workload) -> int:
    """Number of requests in all conversations together, with their forks."""
    return sum(1 for conversation in workload for _ in conversation.requests())
