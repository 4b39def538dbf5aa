"""Loads for `retention_sim`: turns at fixed times, and the true law of the gap after each of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from holdfast.core.pause import MAX_PAUSE, Pause
from holdfast.lab.workloads import SESSIONS, SHAREGPT, Conversation, gamma_arrivals, multi_turn, sessions
from holdfast.lab.workloads import Sessions as LabSessions
from holdfast.lab.workloads import Turn as LabTurn
from holdfast.lab.workloads.agents import BRANCH, PERSON
from holdfast.lab.workloads.chats import generated_chats
from holdfast.lab.workloads.values import Lengths
from holdfast.lm.memory.gaps import EDGES, LONGEST, Rates

BLOCK = 512
"""Tokens in a block of agents' loads."""
CHAT_BLOCK = 32
"""Tokens in a block of chats' loads, whose contexts are short."""
PREFILL, DECODE = 40_000.0, 150.0
"""Tokens per second of prompts and of an answer, by which turns have their times."""
SYSTEM_BLOCKS = 4
"""Blocks with which all sessions of a tenant and a persona begin."""
NEVER = math.inf
HINT_ERROR = 0.25
"""Deviation of the logarithm of a hint from the true gap."""


@dataclass(frozen=True)
class Law:
    """The distribution of a gap, by everything that an engine could know when it begins."""

    median: float
    """Median of the gaps that end, in seconds."""
    sigma: float = 0.0
    """Standard deviation of the logarithm of the gaps that end. 0: they are exponential."""
    never: float = 0.0
    """Probability that the gap never ends."""
    most: float = NEVER
    """Longest gap that ends."""

    def below(self, gap: float) -> float:
        """Probability that the gap ends within this many seconds."""
        if gap <= 0.0:
            return 0.0
        if gap >= self.most:
            return 1.0 - self.never
        if not self.sigma:
            return (1.0 - self.never) * -math.expm1(-gap * math.log(2) / self.median)
        return (1.0 - self.never) * 0.5 * (1.0 + math.erf(math.log(gap / self.median) / self.sigma / math.sqrt(2)))

    def rates(self) -> Rates:
        """The rates of these gaps, as those that an engine learns."""
        below = [self.below(edge) for edge in EDGES]
        ends = (*below[1:], self.below(2 * LONGEST))
        return Rates(
            [
                min(max(0.0, (end - start) / max(1.0 - start, 1e-12)), 1 - 1e-9)
                for start, end in zip(below, ends, strict=True)
            ]
        )

    def ended(self, chance: float) -> Law:
        """This law if no turn follows with this probability."""
        return replace(self, never=1.0 - (1.0 - self.never) * (1.0 - chance))


@dataclass
class Turn:
    """One sequence: it has its blocks from `start` to `end`, in seconds."""

    start: float
    end: float
    digests: list[bytes]
    tenant: str
    pause: Pause = field(default_factory=Pause)
    law: Law | None = None
    """The true law of the gap until its conversation goes on. None: it follows from other turns."""
    shared: int = 0
    """Number of its blocks, the first, that other conversations have, too."""


@dataclass(frozen=True)
class Load:
    """A load for the simulation."""

    name: str
    turns: Sequence[Turn]
    """Turns by their start."""
    block: int
    """Tokens in a block."""
    seconds: float
    """Time in which turns begin."""


@dataclass(frozen=True)
class Gap:
    """A log-normal gap, or none at all with probability `never`."""

    median: float
    sigma: float
    never: float = 0.0

    def draw(self, draw: random.Random) -> float:
        """Seconds; NEVER if the session ends."""
        return NEVER if draw.random() < self.never else self.median * math.exp(draw.gauss(0.0, self.sigma))


@dataclass(frozen=True)
class Persona:
    """A kind of session."""

    share: float
    """Weight among the personas of a load."""
    turns: float
    """Median number of turns."""
    first: float
    """Median tokens of the first prompt."""
    more: float
    """Median tokens that each turn adds."""
    pauses: dict[str, tuple[float, Gap]]
    """Weight and gap by kind of pause."""
    forks: float = 0.0
    """Probability that a turn hands work to sub-agents, each of which ends superseded."""
    retries: float = 0.0
    """Probability that an answer is regenerated: the old branch is superseded."""
    tenants: int = 1
    pace: float = 0.0
    """Standard deviation of the logarithm of a factor by which all tools of a session are slower than the median."""


TOOLS = {
    "tool:read": (5.0, Gap(0.3, 0.7)),
    "tool:search": (3.0, Gap(2.0, 0.6)),
    "tool:shell": (3.0, Gap(1.0, 1.4)),
    "tool:test": (1.5, Gap(25.0, 0.6)),
    "tool:build": (0.7, Gap(90.0, 0.4)),
    "person": (0.6, Gap(120.0, 1.1, never=0.35)),
}
CODER = Persona(1.0, turns=40, first=12_000, more=2_500, pauses=TOOLS)
CHATTER = Persona(1.0, turns=6, first=1_500, more=700, pauses={"person": (1.0, Gap(45.0, 1.2, never=0.15))})
BATCH = Persona(1.0, turns=1, first=6_000, more=500, pauses={"batch": (1.0, Gap(1.0, 0.1, never=1.0))})
OFFICE = {
    "tool:browse": (4.0, Gap(6.0, 1.0)),
    "tool:query": (2.0, Gap(0.15, 0.4)),
    "tool:render": (1.0, Gap(45.0, 0.2)),
    "approval": (0.4, Gap(900.0, 1.5, never=0.3)),
    "person": (1.0, Gap(60.0, 1.4, never=0.25)),
}
LOADS = {
    "agents": (CODER,),
    "people": (CHATTER,),
    "mixed": (CODER, replace(CHATTER, share=4.0), replace(BATCH, share=3.0)),
    "forks": (replace(CODER, forks=0.08, retries=0.05), replace(CHATTER, share=2.0)),
    "paced": (replace(CODER, pauses={name: (w, replace(g, sigma=0.3)) for name, (w, g) in TOOLS.items()}, pace=1.2),),
    "office": (
        Persona(1.0, turns=25, first=8_000, more=4_000, pauses=OFFICE, forks=0.05, retries=0.1, tenants=3),
        replace(CHATTER, share=2.0, turns=12, tenants=3),
    ),
    "night": (
        Persona(1.0, turns=60, first=20_000, more=1_500, pauses={"tool:exec": (1.0, Gap(8.0, 1.8, never=0.02))}),
        replace(BATCH, share=5.0, first=15_000),
        Persona(0.5, turns=10, first=3_000, more=6_000, pauses={"tool:crawl": (1.0, Gap(200.0, 0.8, never=0.05))}),
    ),
}
RATES = {"people": 3.0, "mixed": 1.0, "night": 0.6}
"""Sessions per second; others have 0.3."""
SPREAD = 0.6
"""Standard deviation of the logarithm of a persona's lengths and numbers of turns."""


def end_chance(length: Lengths, turn: int) -> float:
    """Probability that no turn follows the turn of this number, the first being 1, in a session of `length` turns."""

    def above(number: float) -> float:
        return 0.5 * math.erfc(math.log(number / length.median) / length.sigma / math.sqrt(2))

    if turn >= length.most:
        return 1.0
    if turn < length.least:
        return 0.0
    before = above(turn - 0.5) if turn > length.least else 1.0
    return 1.0 - above(turn + 0.5) / before if before > 0 else 1.0


class Session:
    """One session: its turns, those of its sub-agents, and its abandoned branches."""

    def __init__(self, name: str, start: float, persona: Persona, draw: random.Random, *, hints: bool) -> None:
        self._name, self._persona, self._draw, self._hints = name, persona, draw, hints
        self._tenant = f"tenant {draw.randrange(persona.tenants)}"
        self._pace = math.exp(draw.gauss(0.0, persona.pace)) if persona.pace else 1.0
        self._numbers = count()
        self.turns: list[Turn] = []
        self._play(start)

    def _size(self, median: float) -> int:
        return max(1, round(median * math.exp(self._draw.gauss(0.0, SPREAD))))

    def _extend(self, path: list[bytes], tokens: int) -> list[bytes]:
        """The blocks of a sequence of this many tokens that begins with those of `path`."""
        new = range(len(path), tokens // BLOCK)
        return path + [f"{self._name} {next(self._numbers)} {at}".encode() for at in new]

    def _add(self, start: float, end: float, path: list[bytes], pause: Pause, law: Law | None = None) -> None:
        self.turns.append(Turn(start, end, path, self._tenant, pause, law, SYSTEM_BLOCKS))

    def _play(self, now: float) -> None:
        persona, draw = self._persona, self._draw
        tokens = self._size(persona.first)
        path = [f"system {self._tenant} {persona.first} {at}".encode() for at in range(SYSTEM_BLOCKS)]
        last = self._size(persona.turns)
        for turn in range(last):
            tokens += self._size(persona.more) if turn else 0
            answer = self._size(250)
            length = self._size(persona.more) / PREFILL + answer / DECODE
            tokens += answer
            if draw.random() < persona.retries:
                self._add(now, now + length, self._extend(path, tokens), Pause("person", superseded=True))
                now += length + draw.expovariate(0.2)
            path, end = self._extend(path, tokens), now + length
            if draw.random() < persona.forks:
                self._add(now, end, path, Pause("branch"))
                now = 0.1 + max(self._sub_agent(path, tokens, end) for _ in range(draw.randrange(1, 4)))
                continue
            kind = draw.choices([*persona.pauses], [weight for weight, _ in persona.pauses.values()])[0]
            true = self._paced(kind, persona.pauses[kind][1])
            gap = true.draw(draw) if turn + 1 < last else NEVER
            law = Law(true.median, true.sigma, true.never).ended(end_chance(Lengths(persona.turns, SPREAD), turn + 1))
            self._add(now, end, path, Pause(kind, expected=self._hint(kind, gap)), law)
            if gap == NEVER:
                return
            now = end + gap

    def _paced(self, kind: str, gap: Gap) -> Gap:
        """The gap of a kind in this session."""
        return replace(gap, median=gap.median * self._pace) if kind.startswith("tool") else gap

    def _hint(self, kind: str, gap: float) -> float | None:
        if not (self._hints and kind.startswith("tool")):
            return None
        true = gap if gap < NEVER else self._persona.pauses[kind][1].median
        return min(MAX_PAUSE, true * math.exp(self._draw.gauss(0.0, HINT_ERROR)))

    def _sub_agent(self, path: list[bytes], tokens: int, now: float) -> float:
        """Add the turns of a sub-agent that begins with the parent's state. Returns when the last one ends."""
        turns, end = self._draw.randrange(1, 6), now
        for turn in range(turns):
            tokens += self._size(self._persona.more)
            path, end = self._extend(path, tokens), now + 0.3 + 300 / DECODE
            done = turn + 1 == turns
            self._add(now, end, path, Pause("branch" if done else "tool:read", superseded=done))
            now = end + Gap(0.3, 0.7).draw(self._draw)
        return end


def drawn(name: str, seconds: float, seed: int, *, hints: bool) -> list[Turn]:
    """The turns of one of the LOADS."""
    draw, personas = random.Random(seed), LOADS[name]
    rate, now, turns = RATES.get(name, 0.3), 0.0, list[Turn]()
    for number in count():
        now += draw.expovariate(rate)
        if now > seconds:
            break
        (persona,) = draw.choices(personas, [each.share for each in personas])
        turns += Session(f"{number}", now, persona, draw, hints=hints).turns
    return turns


class Unrolled:
    """The turns of a conversation of `holdfast.lab.workloads`, at fixed times."""

    def __init__(self, name: str, block: int, law: Callable[[LabTurn, int], Law | None]) -> None:
        """`law` gives the law of the gap after a turn, by the turn and its number, the first being 1."""
        self._name, self._block, self._law = name, block, law
        self._numbers = count()
        self.turns: list[Turn] = []

    def _extend(self, path: list[bytes], tokens: int, turn: LabTurn) -> list[bytes]:
        path, common = path[: tokens // self._block], turn.common
        for at in range(len(path), tokens // self._block):
            is_common = (at + 1) * self._block <= common.tokens
            path.append((f"{common.name} {at}" if is_common else f"{self._name} {next(self._numbers)}").encode())
        return path

    def play(
        self, talk: Conversation, now: float, path: Sequence[bytes] = (), history: int = 0, *, sub: bool = False
    ) -> float:
        """Add the turns of a conversation that begins at `now` with these blocks. Returns when the last one ends."""
        here, end, shared = list(path), now, talk.turns[0].common.tokens // self._block
        for number, (turn, begins) in enumerate(zip(talk.turns, talk.histories(history), strict=True), start=1):
            start = now + turn.think
            end = start + turn.prompt / PREFILL + turn.output / DECODE
            tokens = begins + turn.prompt + turn.output
            here = self._extend(here[: begins // self._block], tokens, turn)
            last = number == len(talk.turns)
            kind = turn.pause or (BRANCH if sub else PERSON)
            law = None if sub or kind == BRANCH else self._law(turn, number)
            self.turns.append(Turn(start, end, list(here), "", Pause(kind, superseded=sub and last), law, shared))
            forks = [self._fork(each, end, here, tokens) for each in turn.forks]
            now = max([end, *forks])
        return end

    def _fork(self, talk: Conversation, end: float, path: Sequence[bytes], tokens: int) -> float:
        kept = talk.inherits
        done = self.play(talk, end + talk.arrival, path if kept else (), tokens if kept else 0, sub=True)
        return done if talk.joins else end


def law_of(kind: LabSessions, turn: LabTurn, number: int) -> Law:
    """The law of the gap after this turn of a session. Ends for want of context are left out."""
    tools = {f"tool:{tool.name}": tool.seconds for tool in kind.tools}
    seconds = tools.get(turn.pause, kind.thinks)
    law = Law(seconds.median, seconds.sigma, most=seconds.most)
    end = end_chance(kind.turns, number)
    if turn.pause in tools:
        return law
    # A session's last answer looks like one to a person, and so do `person` of the pauses that do not end the session.
    share = kind.person if kind.tools else 1.0
    return law.ended(end / (end + (1.0 - end) * share))


VLLM = {
    "filetype": "generate_conversations",
    "num_conversations": 100_000,
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}
"""Settings of vLLM's multi-turn benchmark, as its documentation has them."""
LAB_RATES = {"agents": 0.04, "agents-short": 0.1, "chat": 1.0, "mixed": 0.2, "multi-turn": 1.0, "vllm": 0.2}
"""Conversations per second of each load of the package."""
VLLM_THINK = 20.0
"""Mean seconds of a person's pauses in vLLM's load, which has none of its own: its clients ask at once."""
THINK = 60.0
"""Mean seconds of a person's pauses in Pensieve's chats (§6.1)."""


def lab_turns(name: str, seconds: float, seed: int) -> tuple[list[Turn], int]:
    """The turns of a load of `holdfast.lab.workloads`, and the tokens in a block."""
    rate = LAB_RATES[name]
    number = max(1, int(1.5 * rate * seconds) + 20)
    block = BLOCK if name == "agents" else CHAT_BLOCK
    laws: list[Callable[[LabTurn, int], Law | None]]
    if name == "multi-turn":
        talks = multi_turn(number, THINK, seed)
        laws = [lambda turn, at: Law(THINK * math.log(2), never=1 / SHAREGPT.turns)] * number
    elif name == "vllm":
        choose = random.Random(f"think/{seed}")
        talks = [
            replace(
                talk,
                turns=tuple(
                    replace(turn, think=choose.expovariate(1 / VLLM_THINK) * (at > 0))
                    for at, turn in enumerate(talk.turns)
                ),
            )
            for talk in generated_chats("vllm", {**VLLM, "num_conversations": number}, seed)
        ]
        laws = [lambda turn, at: Law(VLLM_THINK * math.log(2), never=vllm_end(at))] * number
    else:
        talks = sessions(name, number, seed)
        kinds = {kind.name: kind for kind, _ in SESSIONS[name]}
        laws = [_law_by(kinds[talk.turns[0].common.name]) for talk in talks]
    turns = []
    for at, (talk, law) in enumerate(zip(gamma_arrivals(talks, rate, seed), laws, strict=True)):
        if talk.arrival < seconds:
            unrolled = Unrolled(f"{at}", block, law)
            unrolled.play(talk, talk.arrival)
            turns += unrolled.turns
    return turns, block


def vllm_end(turn: int) -> float:
    """Probability that no turn follows in vLLM's load: conversations have 6 to 9 turns, of 12 to 18 messages."""
    weights = {6: 1, 7: 2, 8: 2, 9: 2}
    left = sum(weight for number, weight in weights.items() if number >= turn)
    return weights.get(turn, 0) / left if left else 1.0


def _law_by(kind: LabSessions) -> Callable[[LabTurn, int], Law | None]:
    return lambda turn, number: law_of(kind, turn, number)


def mooncake(path: Path) -> Iterator[Turn]:
    """The requests of a Mooncake trace. Nothing is known of their pauses."""
    for line in path.read_text().splitlines():
        row = json.loads(line)
        start = row["timestamp"] / 1000
        digests = [f"{each}".encode() for each in row["hash_ids"][: row["input_length"] // BLOCK]]
        if digests:
            yield Turn(start, start + row["input_length"] / PREFILL + row["output_length"] / DECODE, digests, "")


def make_load(name: str, seconds: float, seed: int, *, hints: bool = False) -> Load:
    """A load by its name. After its last arrival sessions only end: that is no load to measure, and is cut.

    Raises ValueError for an unknown name.
    """
    block = BLOCK
    if name.endswith(".jsonl"):
        turns = list(mooncake(Path(name)))
    elif name in LOADS:
        turns = drawn(name, seconds, seed, hints=hints)
    elif name.removeprefix("lab:") in LAB_RATES:
        turns, block = lab_turns(name.removeprefix("lab:"), seconds, seed)
    else:
        known = ", ".join([*LOADS, *(f"lab:{each}" for each in LAB_RATES)])
        raise ValueError(f"load {name} is unknown; there are {known}, and .jsonl files of Mooncake")
    kept = sorted((turn for turn in turns if turn.start < seconds and turn.digests), key=lambda turn: turn.start)
    return Load(name.rpartition("/")[2], kept, block, seconds)
