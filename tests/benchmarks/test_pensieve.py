"""Pensieve's evaluation by simulation: which conversations a run holds."""

import pytest

from benchmarks.papers.pensieve import Context, steady


@pytest.mark.parametrize("longer", ["cut", "drop"])
def test_no_conversation_under_way_is_longer_than_the_context(longer: str) -> None:
    talks, _ = steady("ShareGPT", 60.0, 2.0, 120.0, Context(1024, longer))
    assert talks and max(sum(turn.prompt + turn.output for turn in talk.turns) for talk in talks) <= 1024


def test_dropping_leaves_out_whole_conversations_and_cutting_their_last_turns() -> None:
    dropped, cut = (steady("ShareGPT", 60.0, 2.0, 120.0, Context(1024, longer))[1] for longer in ("drop", "cut"))
    assert dropped.conversations > cut.conversations and dropped.requests > cut.requests > 0


def test_the_papers_context_leaves_out_nothing_of_lengths_drawn_by_its_means() -> None:
    _, left_out = steady("ShareGPT", 60.0, 2.0, 120.0, Context(longer="drop"))
    assert (left_out.requests, left_out.conversations) == (0, 0)
