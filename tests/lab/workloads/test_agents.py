"""Synthetic sessions: their medians, their reuse, tools, people, forks and replaced branches."""

import random
import statistics
from dataclasses import replace
from functools import cache

import pytest

from holdfast.lab.workloads import AGENTS, AGENTS_SHORT, CHAT, SESSIONS, WorkloadConfig, sessions, shorter
from holdfast.lab.workloads.agents import Seconds


def requests(conversation, inherited=0):
    """Each turn of a session and of its forks, with the number of tokens before its prompt."""
    for turn, history in zip(conversation.turns, conversation.histories(inherited), strict=True):
        yield turn, history
        for fork in turn.forks:
            yield from requests(fork, history + turn.prompt + turn.output if fork.inherits else 0)


@cache
def agents():
    """Sessions of agents, drawn once."""
    return sessions("agents", 400, seed=3)


@cache
def agents_requests():
    return [each for session in agents() for each in requests(session)]


def test_agents_have_the_medians_of_the_published_load():
    assert statistics.median(len(session.turns) for session in agents()) == pytest.approx(43, rel=0.15)
    inputs = [history + turn.prompt for turn, history in agents_requests()]
    assert statistics.median(inputs) == pytest.approx(142_000, rel=0.1)
    assert statistics.median(turn.output for turn, _ in agents_requests()) == pytest.approx(444, rel=0.05)
    new = sum(turn.prompt - turn.common.tokens for turn, _ in agents_requests())
    assert 1 - new / sum(inputs) > 0.95


def test_some_agents_have_sub_agents_of_which_some_inherit_their_history():
    forks = [[fork for turn in session.turns for fork in turn.forks] for session in agents()]
    some = [each for each in forks if each]
    assert len(some) / len(forks) == pytest.approx(0.44, abs=0.07)
    assert statistics.median(map(len, some)) == pytest.approx(4, abs=1)
    inherits = [fork.inherits for each in some for fork in each]
    assert sum(inherits) / len(inherits) == pytest.approx(0.5, abs=0.07)
    parents = [turn for session in agents() for turn in session.turns if turn.forks]
    assert {turn.pause for turn in parents} == {"branch"}


def test_each_tool_has_its_own_pauses_and_results():
    after: dict[str, list] = {}
    for session in agents():
        for turn, following in zip(session.turns, session.turns[1:], strict=False):
            after.setdefault(turn.pause, []).append((turn, following))
    assert {f"tool:{tool.name}" for tool in AGENTS.tools} | {"person", "branch"} == set(after)
    for tool in AGENTS.tools:
        pairs = after[f"tool:{tool.name}"]
        thinks = [following.think for _, following in pairs]
        assert statistics.median(thinks) == pytest.approx(tool.seconds.median, rel=0.25)
        assert {turn.expected_pause for turn, _ in pairs} == {tool.seconds.median}
    assert {turn.expected_pause for turn, _ in after["person"]} == {None}


def test_a_turn_asks_for_the_contract_of_what_came_before_it():
    for session in agents()[:50]:
        for before, turn in zip(session.turns, session.turns[1:], strict=False):
            if not before.forks:
                assert turn.contract == AGENTS.contracts[before.pause.partition(":")[0]]
        for fork in (fork for turn in session.turns for fork in turn.forks):
            assert {turn.contract for turn in fork.turns} == {AGENTS.contracts["branch"]}


def test_some_turns_replace_the_turns_before_them_but_never_the_first():
    replaced = [turn.replaces for turn, _ in agents_requests()]
    assert sum(map(bool, replaced)) / len(replaced) == pytest.approx(AGENTS.retries, rel=0.25)
    assert {*replaced} == {0, 1, 2, 3}
    for session in agents():
        assert all(history for history in [*session.histories()][1:])


def test_a_session_ends_before_its_context_grows_beyond_the_limit():
    narrow = replace(AGENTS, context=60_000, subagents=None)
    for session in narrow.draw(50, seed=1):
        for turn, history in requests(session):
            assert history + turn.prompt + turn.output <= 60_000 or len(session.turns) == 1


def test_the_last_turn_of_a_session_and_of_a_fork_knows_no_pause():
    for session in agents()[:50]:
        assert session.turns[-1].pause == "" and session.turns[-1].expected_pause is None
        assert {fork.turns[-1].pause for turn in session.turns for fork in turn.forks} <= {""}


def test_only_people_pause_between_the_turns_of_a_chat():
    pauses = {turn.pause for session in CHAT.draw(100, seed=0) for turn in session.turns}
    assert pauses == {"person", ""}


def test_a_mixed_workload_holds_chats_and_agents_in_their_shares():
    drawn = sessions("mixed", 500, seed=0)
    chats = sum(session.turns[0].common.name == "chat" for session in drawn)
    assert chats / len(drawn) == pytest.approx(0.7, abs=0.06)


def test_shorter_sessions_keep_their_turns_and_pauses():
    half = shorter(AGENTS, 2)
    assert (half.system, half.output.median, half.turns, half.thinks) == (12_288, 222, AGENTS.turns, AGENTS.thinks)
    assert half.tools[0].result.median == AGENTS.tools[0].result.median / 2
    assert half.tools[0].seconds == AGENTS.tools[0].seconds
    with pytest.raises(ValueError, match=r"factor is 0\.5; it must be at least 1"):
        shorter(AGENTS, 0.5)


def test_the_same_seed_gives_the_same_sessions():
    assert sessions("mixed", 20, 1) == sessions("mixed", 20, 1) != sessions("mixed", 20, 2)


def test_durations_are_clipped():
    assert Seconds(1.0, 5.0, 2.0).draw(random.Random(1)) <= 2.0
    assert max(Seconds(1.0, 5.0, 2.0).draw(random.Random(at)) for at in range(50)) == 2.0


def test_a_workload_is_named_by_its_kind_of_sessions():
    assert WorkloadConfig(workload="agents-short", requests=5).read(7) == sessions("agents-short", 5, 7)
    assert WorkloadConfig(workload="chat").shares_prefixes
    assert AGENTS_SHORT.context == AGENTS.context // 16
    with pytest.raises(ValueError, match=f"sessions robots are unknown; there are {', '.join(SESSIONS)}"):
        sessions("robots", 1, 0)
