"""Synthetic sessions of agents and of chats: tools, people, sub-agents that fork, branches that are replaced."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import NamedTuple

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.lab.workloads.values import NOTHING_COMMON, Common, Conversation, Lengths, Turn

PERSON, BRANCH = "person", "branch"
"""Kinds of pauses: a person reads and writes, or sub-agents work. A tool's kind is "tool:" and its name."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """A lognormal distribution of seconds, clipped to at most `most`."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""
    most: float = 3600.0

    def draw(self, choose: random.Random) -> float:
        """Draw one duration."""
        return min(self.most, choose.lognormvariate(log(self.median), self.sigma))


class Tool(NamedTuple):
    """A tool that an agent calls."""

    name: str
    weight: float
    """Share of the calls that are of this tool, up to a common factor."""
    seconds: Seconds
    """Duration of a call."""
    result: Lengths
    """Tokens of a result."""


@dataclass(frozen=True, slots=True)
class SubAgents:
    """The sub-agents of a session. They fork from a turn, work by themselves, and the next turn waits for them."""

    share: float
    """Share of the sessions that have any."""
    count: Lengths
    """Number of sub-agents in a session that has some."""
    together: int
    """Largest number of sub-agents that fork from one turn."""
    inherits: float
    """Share of the sub-agents that begin with their parent's history. The others begin with a prompt of their own."""
    turns: Lengths
    report: Lengths
    """Tokens that a sub-agent's report adds to its parent's next prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Distributions from which sessions of one kind are drawn."""

    name: str
    """Name of the kind. All its sessions begin with the same system prompt."""
    system: int
    """Tokens of the system prompt, which all sessions share."""
    task: Lengths
    """Tokens of the first message after the system prompt."""
    turns: Lengths
    """Number of turns. A session ends earlier where its context would grow beyond `context`."""
    context: int
    """Largest number of tokens in a session's context."""
    message: Lengths
    """Tokens of each later message of a person."""
    output: Lengths
    """Tokens of each answer."""
    person: float
    """Share of the pauses in which a person reads and writes. In the others, a tool works."""
    thinks: Seconds
    """Duration of a person's pause."""
    tools: tuple[Tool, ...] = ()
    """Tools; at least one unless `person` is 1."""
    retries: float = 0.0
    """Share of the turns that replace one to three turns before them."""
    subagents: SubAgents | None = None
    contracts: Mapping[str, Contract] = field(default_factory=dict)
    """Contract of a turn by what came before it: "person", "tool" or "branch". A sub-agent's turns are all of
    "branch"."""

    def draw(self, count: int, seed: int) -> list[Conversation]:
        """Draw `count` sessions, all arriving at once. Equal seeds give equal sessions."""
        choose = random.Random(f"{self.name}/{seed}")
        return [self.session(choose) for _ in range(count)]

    def session(self, choose: random.Random) -> Conversation:
        """Draw one session."""
        common = Common(self.name, self.system)
        begun = self._turns(choose, self.system + self.task.draw(choose), self.turns.draw(choose), common)
        return replace(begun, turns=self._forked(choose, begun))

    def _turns(
        self,
        choose: random.Random,
        prompt: int,
        count: int,
        common: Common,
        *,
        before: str = PERSON,
        inherited: int = 0,
    ) -> Conversation:
        """A conversation of `count` turns, or fewer if its context ends. `before` is the kind of what comes first.

        Its history has `inherited` tokens before the first turn.
        """
        turns: list[Turn] = []
        begins, length, think, kind = list[int](), inherited, 0.0, before
        branch = before == BRANCH
        for number in range(count):
            replaces = choose.randint(1, min(3, len(begins) - 1)) if self._retries(choose, begins) else 0
            if replaces:
                length = begins[-replaces]
                del begins[-replaces:]
            output = self.output.draw(choose)
            if length + prompt + output > self.context and turns:
                break
            pause = self._pause(choose, branch=branch) if number + 1 < count else _Pause("", 0.0, None, 0)
            turns.append(
                Turn(
                    prompt, output, think, common=NOTHING_COMMON if turns else common, replaces=replaces,
                    contract=self.contracts.get(BRANCH if branch else kind.partition(":")[0], NO_CONTRACT),
                    pause=pause.kind, expected_pause=pause.expected,
                )
            )  # fmt: skip
            begins.append(length)
            length += prompt + output
            think, kind, prompt = pause.seconds, pause.kind, pause.tokens
        turns[-1] = replace(turns[-1], pause="", expected_pause=None)
        return Conversation(0.0, tuple(turns))

    def _retries(self, choose: random.Random, begins: list[int]) -> bool:
        """Whether the next turn replaces some of the turns before it. The first turn is never replaced."""
        return choose.random() < self.retries and len(begins) > 1

    def _pause(self, choose: random.Random, *, branch: bool) -> _Pause:
        """Draw one pause. Nobody reads what a sub-agent writes."""
        if (not branch and choose.random() < self.person) or not self.tools:
            return _Pause(PERSON, self.thinks.draw(choose), None, self.message.draw(choose))
        (tool,) = choose.choices(self.tools, [tool.weight for tool in self.tools])
        seconds = tool.seconds
        return _Pause(f"tool:{tool.name}", seconds.draw(choose), seconds.median, tool.result.draw(choose))

    def _forked(self, choose: random.Random, session: Conversation) -> tuple[Turn, ...]:
        """The turns of a session, with sub-agents forking from some of them. A session of one turn has none."""
        sub, made = self.subagents, list(session.turns)
        if sub is None or len(made) < 2 or choose.random() >= sub.share:
            return session.turns
        histories, left = [*session.histories()], sub.count.draw(choose)
        while left > 0:
            at = choose.randrange(len(made) - 1)
            end = histories[at] + made[at].prompt + made[at].output
            forks = tuple(self._fork(choose, sub, end) for _ in range(min(left, sub.together)))
            report = sum(sub.report.draw(choose) for _ in forks)
            made[at] = replace(made[at], forks=made[at].forks + forks, pause=BRANCH, expected_pause=None)
            made[at + 1] = replace(made[at + 1], prompt=made[at + 1].prompt + report, think=0.0)
            left -= len(forks)
        return tuple(made)

    def _fork(self, choose: random.Random, sub: SubAgents, history: int) -> Conversation:
        """One sub-agent, which forks from a turn that ends after `history` tokens."""
        inherits, count, task = choose.random() < sub.inherits, sub.turns.draw(choose), self.task.draw(choose)
        if inherits:
            return self._turns(choose, task, count, NOTHING_COMMON, before=BRANCH, inherited=history)
        common = Common(f"{self.name}/sub-agent", self.system // 2)
        own = self._turns(choose, common.tokens + task, count, common, before=BRANCH)
        return replace(own, inherits=False)


class _Pause(NamedTuple):
    """A pause between two turns."""

    kind: str
    seconds: float
    expected: float | None
    """Seconds that the client expects."""
    tokens: int
    """Length of the next prompt."""


TOOLS = (
    Tool("read_file", 0.30, Seconds(0.05, 0.8), Lengths(4500, 1.0, 20, 32_000)),
    Tool("search", 0.20, Seconds(0.4, 1.0), Lengths(1600, 1.0, 20, 16_000)),
    Tool("edit_file", 0.18, Seconds(0.08, 0.7), Lengths(500, 0.8, 20, 4_000)),
    Tool("shell", 0.22, Seconds(2.5, 1.6), Lengths(1200, 1.3, 10, 24_000)),
    Tool("run_tests", 0.06, Seconds(25.0, 1.0), Lengths(2500, 1.1, 50, 24_000)),
    Tool("web_fetch", 0.04, Seconds(1.8, 0.8), Lengths(6000, 0.9, 100, 32_000)),
)
"""Tools of a coding agent."""

AGENTS = Sessions(
    # SemiAnalysis' AgentX, as vLLM's post of 2026-09-08 on agents describes it: a median of 43 turns a session, of 142k
    # tokens in and 444 out a request, over 95% of the input seen before, sub-agents in 44% of the sessions, a median of
    # four of them. Durations and results of tools are assumptions.
    name="agents",
    system=24_576,
    task=Lengths(16_000, 1.0, 100, 80_000),
    turns=Lengths(43, 0.9, 2, 400),
    context=400_000,
    message=Lengths(120, 1.0, 4, 4_000),
    output=Lengths(444, 1.0, 8, 8_000),
    person=0.06,
    thinks=Seconds(45.0, 1.2),
    tools=TOOLS,
    retries=0.03,
    subagents=SubAgents(
        share=0.44,
        count=Lengths(4, 0.7, 1, 24),
        together=4,
        inherits=0.5,
        turns=Lengths(10, 0.7, 1, 60),
        report=Lengths(600, 0.7, 20, 6_000),
    ),
    contracts={
        "person": Contract(ttft=5.0, tbt=0.2),
        "tool": Contract(ttft=10.0, complete=60.0),
        "branch": Contract(complete=120.0),
    },
)

CHAT = Sessions(
    # Turns and lengths have the means of ShareGPT (Pensieve, Table 2).
    name="chat",
    system=512,
    task=Lengths.of_mean(60, 1.0, 4, 4_096),
    turns=Lengths.of_mean(5.56, 0.8, 1, 40),
    context=32_000,
    message=Lengths.of_mean(37.77, 1.0, 4, 2_048),
    output=Lengths.of_mean(204.58, 0.8, 4, 1_024),
    person=1.0,
    thinks=Seconds(25.0, 1.0),
    retries=0.04,
    contracts={"person": Contract(ttft=1.0, tbt=0.1)},
)


def shorter(kind: Sessions, factor: float) -> Sessions:
    """Sessions of this kind whose texts are `factor` times as short. Times, turns and shares stay as they are.

    Raises ValueError if `factor` is below 1.
    """
    if not factor >= 1:
        raise ValueError(f"factor is {factor:g}; it must be at least 1")

    def cut(lengths: Lengths) -> Lengths:
        least, most = max(1, int(lengths.least / factor)), max(1, int(lengths.most / factor))
        return replace(lengths, median=lengths.median / factor, least=least, most=most)

    sub = kind.subagents
    return replace(
        kind,
        name=f"{kind.name}/{factor:g}",
        system=int(kind.system / factor),
        task=cut(kind.task),
        context=int(kind.context / factor),
        message=cut(kind.message),
        output=cut(kind.output),
        tools=tuple(tool._replace(result=cut(tool.result)) for tool in kind.tools),
        subagents=None if sub is None else replace(sub, report=cut(sub.report)),
    )


AGENTS_SHORT = shorter(AGENTS, 16)
"""Agents for a model with a context of 16k tokens."""

SESSIONS: dict[str, tuple[tuple[Sessions, float], ...]] = {
    "agents": ((AGENTS, 1.0),),
    "agents-short": ((AGENTS_SHORT, 1.0),),
    "chat": ((CHAT, 1.0),),
    "mixed": ((CHAT, 0.7), (AGENTS_SHORT, 0.3)),
}
"""Kinds of sessions by the name of their workload, each with its share of the sessions."""


def sessions(name: str, count: int, seed: int) -> list[Conversation]:
    """Draw sessions of the kinds that SESSIONS names, all arriving at once. Raises ValueError for an unknown name."""
    if name not in SESSIONS:
        raise ValueError(f"sessions {name} are unknown; there are {', '.join(SESSIONS)}")
    choose, kinds = random.Random(f"sessions/{name}/{seed}"), SESSIONS[name]
    drawn = choose.choices([kind for kind, _ in kinds], [share for _, share in kinds], k=count)
    return [kind.session(choose) for kind in drawn]
