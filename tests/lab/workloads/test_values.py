"""Turns and conversations: histories, replaced branches, forks, and how they are cut to a context."""

from math import log
from statistics import stdev

import pytest

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.core.pause import MAX_PAUSE
from holdfast.lab.workloads import Common, Conversation, History, PromptTokens, Turn, fit_context, num_requests, promise
from holdfast.lab.workloads.values import SHORTEST_LIE, hint_pauses


def forked(fork, *, prompt=10, output=5):
    return Conversation(0.0, (Turn(prompt, output, forks=(fork,)), Turn(1, 1)))


def test_a_turn_follows_all_turns_before_it_except_for_those_that_it_replaces():
    turns = (Turn(10, 5), Turn(3, 2), Turn(4, 1), Turn(7, 1, replaces=2), Turn(1, 1))
    assert [*Conversation(0.0, turns).histories()] == [0, 15, 20, 15, 23]
    assert [*Conversation(0.0, turns).histories(100)] == [100, 115, 120, 115, 123]
    twice = (Turn(10, 5), Turn(3, 2), Turn(4, 1, replaces=1), Turn(7, 1, replaces=2))
    assert [*Conversation(0.0, twice).histories()] == [0, 15, 15, 0]


@pytest.mark.parametrize(
    "turns",
    [
        (Turn(1, 1, replaces=1),),
        (Turn(1, 1), Turn(1, 1, replaces=2)),
        (Turn(1, 1), Turn(1, 1), Turn(1, 1, replaces=2), Turn(1, 1, replaces=2)),
        (Turn(1, 1), Turn(1, 1, replaces=-1)),
    ],
)
def test_a_turn_cannot_replace_more_turns_than_there_are(turns):
    with pytest.raises(ValueError, match=r"replaces -?\d turns; it must replace at least 0 and at most"):
        Conversation(0.0, turns)


def test_tokens_of_replaced_turns_are_no_longer_in_the_history():
    history, turn = History((1,)), Turn(1, 1)
    assert history.ask(turn, (2,)) == (1, 2)
    history.answer((3,))
    assert history.ask(turn, (4,)) == (1, 2, 3, 4)
    history.answer((5,))
    assert history.ask(Turn(1, 1, replaces=1), (6,)) == (1, 2, 3, 6)
    history.answer((7,))
    assert history.ask(Turn(1, 1, replaces=2), (8,)) == (1, 8)


def test_requests_are_counted_with_those_of_forks():
    inner = forked(Conversation(0.0, (Turn(1, 1), Turn(1, 1))))
    assert num_requests([forked(inner), inner]) == 2 + 4 + 4


@pytest.mark.parametrize(("inherits", "kept"), [(True, 1), (False, 2)])
def test_a_fork_is_cut_with_the_history_that_it_inherits(inherits, kept):
    fork = Conversation(0.0, (Turn(2, 2), Turn(2, 2)), inherits=inherits)
    (cut,) = fit_context([forked(fork)], 20)
    assert [len(each.turns) for each in cut.turns[0].forks] == [kept]
    assert len(cut.turns) == 2


def test_a_fork_without_a_turn_that_fits_is_left_out():
    (cut,) = fit_context([forked(Conversation(0.0, (Turn(20, 2),)))], 20)
    assert cut.turns[0].forks == ()
    assert fit_context([forked(Conversation(0.0, (Turn(20, 2),)))], 20, "drop") == []


def test_a_turn_must_fit_with_the_longest_answer_that_its_client_allows():
    assert fit_context([Conversation(0.0, (Turn(4, 4, limit=9),))], 12) == []
    assert len(fit_context([Conversation(0.0, (Turn(4, 4, limit=8),))], 12)) == 1


def test_a_turn_after_a_replaced_one_is_cut_by_its_own_history():
    talk = Conversation(0.0, (Turn(2, 2), Turn(9, 2), Turn(9, 2, replaces=1)))
    assert fit_context([talk], 15) == [talk]


def test_each_turn_is_promised_what_its_history_gives_also_in_forks():
    talk = forked(Conversation(0.0, (Turn(2, 2),)))
    (promised,) = promise([talk], lambda turn, history: Contract(ttft=1.0 + history))
    assert [turn.contract.ttft for turn in promised.requests()] == [1.0, 16.0, 16.0]
    assert {turn.contract for turn in talk.requests()} == {NO_CONTRACT}


def test_prompts_share_what_they_have_in_common_and_nothing_else():
    tokens = PromptTokens(1000)
    turn = Turn(60, 1, common=Common("system", 40))
    first, second = tokens.prompt(0, 0, turn), tokens.prompt("0.1.2", 0, turn)
    assert (len(first), first[:40]) == (60, second[:40])
    assert first[40:] != second[40:]
    assert tokens.prompt(0, 0, Turn(60, 1, common=Common("other", 40)))[:40] != first[:40]
    assert len(tokens.prompt(0, 0, Turn(5, 1, common=Common("system", 40)))) == 5


def paused(count=200, think=10.0):
    return [Conversation(0.0, (Turn(10, 4), Turn(5, 2, think=think), Turn(5, 2, think=think))) for _ in range(count)]


def test_hints_without_noise_are_the_true_pauses_and_nothing_is_said_after_the_last_turn():
    hinted = hint_pauses(paused(3), 0.0, 0.0, seed=1)
    assert [[turn.expected_pause for turn in each.turns] for each in hinted] == [[10.0, 10.0, None]] * 3


def test_noise_spreads_hints_about_the_true_pause_and_the_seed_decides():
    hinted = hint_pauses(paused(), 0.5, 0.0, seed=1)
    said = sorted(log(turn.expected_pause / 10.0) for each in hinted for turn in each.turns[:2])
    assert abs(said[len(said) // 2]) < 0.1 and 0.4 < stdev(said) < 0.6
    assert hinted == hint_pauses(paused(), 0.5, 0.0, seed=1) != hint_pauses(paused(), 0.5, 0.0, seed=2)


def test_liars_promise_a_turn_after_their_last_one_too():
    hinted = hint_pauses(paused(), 0.0, 0.25, seed=1)
    liars = [each for each in hinted if each.turns[-1].expected_pause is not None]
    assert 30 < len(liars) < 70
    assert all(SHORTEST_LIE <= turn.expected_pause <= MAX_PAUSE for each in liars for turn in each.turns)


def test_nothing_is_said_before_a_turn_that_waits_for_forks():
    fork = Conversation(0.0, (Turn(5, 2), Turn(5, 2, think=3.0)))
    talk = Conversation(0.0, (Turn(10, 4, forks=(fork,)), Turn(5, 2, think=10.0)))
    (hinted,) = hint_pauses([talk], 0.0, 0.0, seed=1)
    assert [turn.expected_pause for turn in hinted.requests()] == [None, 3.0, None, None]


@pytest.mark.parametrize(("noise", "liars"), [(-1.0, 0.0), (float("nan"), 0.0), (0.1, 1.5), (0.1, -0.1)])
def test_hints_out_of_range_are_refused_with_the_value(noise, liars):
    with pytest.raises(ValueError, match=r"pause_(noise|liars) is (-1|nan|1\.5|-0\.1); it must"):
        hint_pauses([], noise, liars, seed=1)
