"""Dates: those held out come back as ISO 8601, as plain PyTorch writes them, and end at <eos>."""

from __future__ import annotations

from datetime import date
from functools import cache
from random import Random

import numpy as np
import pytest

from holdfast.cells.applications import dates
from holdfast.cells.partition import Splitter
from scripts import cell_data
from scripts.train_cells import answers, run_together
from tests.cells.applications.references import DatesReference, returning_h, text_of


@cache
def cases() -> list[cell_data.Case]:
    """The cases that the application must solve."""
    return cell_data.cases_of_test("dates", 1000)


def test_at_least_97_of_100_held_out_dates_are_right() -> None:
    given = answers(dates.load(), [case.text for case in cases()])
    assert sum(found == case.answer for found, case in zip(given, cases(), strict=True)) >= 970


def test_dates_and_states_equal_plain_pytorch() -> None:
    application, reference = dates.load(), DatesReference()
    application.decoder = returning_h(application.decoder)
    application.cells = (application.encoder, application.decoder)
    graphs = [application.unfold(text_of(case.text)) for case in cases()[:60]]
    for graph in graphs:
        graph.result("h", range(graph.nodes - dates.MOST_STEPS, graph.nodes), "h")
    for case, results in zip(cases(), run_together(application, graphs), strict=False):
        written, h = reference.run(case.text)
        assert application.finish(results)["date"].tolist() == written
        np.testing.assert_allclose(results["h"], h.numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("the third of march nineteen eighty-four", "1984-03-03"),
        ("March 3rd, 1984", "1984-03-03"),
        ("3/4/84", "1984-03-04"),
        ("3.4.1984", "1984-04-03"),
        ("  Tuesday, the Twenty-First of Nov. two thousand and six ", "2006-11-21"),
        ("1912/12/30", "1912-12-30"),
    ],
)
def test_a_date_is_read_as_people_write_it(text: str, answer: str) -> None:
    assert answers(dates.load(), [text]) == [[answer]]


def test_the_decoder_ends_at_eos_and_gives_ten_symbols() -> None:
    application = dates.load()
    (results,) = run_together(application, [application.unfold(text_of("march 3rd, 1984"))])
    assert results["date"].tolist()[-1] == dates.EOS
    assert len(results["date"]) == len("1984-03-03") + 1


def test_a_decoder_that_never_gives_eos_ends_at_its_limit() -> None:
    application = dates.load()
    weights = DatesReference().weights
    weights["decoder.word_b"][dates.EOS] = -1e6
    application = dates.Dates(weights)
    (results,) = run_together(application, [application.unfold(text_of("march 3rd, 1984"))])
    assert len(results["date"]) == dates.MOST_STEPS
    assert len(application.finish(results)["date"][0]) == dates.MOST_STEPS


def test_the_decoder_goes_before_the_encoder_and_both_are_one_chain() -> None:
    application = dates.load()
    graph = application.unfold(text_of("3/3/84"))
    partition = Splitter({application.encoder: 0, application.decoder: 1}).split([graph])
    assert partition.types.tolist() == [0, 1]
    assert partition.steps.tolist() == [6, 11]
    assert application.decoder.priority > application.encoder.priority


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the text is empty; it needs at least 1 character"),
        ("   ", "the text is empty; it needs at least 1 character"),
        ("m" * 81, "the text has 81 characters; at most 80 are allowed"),
        ("3:3:84", "character 2 is ':'; letters from a to z, digits, spaces and , . / - are allowed"),
        ("märz 3", "character 2 is 'ä'; letters from a to z, digits, spaces and , . / - are allowed"),
    ],
)
def test_an_unusable_text_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        dates.load().unfold(text_of(text))
    assert str(caught.value) == reason


def test_no_date_of_a_test_is_ever_trained_with() -> None:
    random = Random(5)
    trained = [next(cell_data.written_dates(random, test=False)).answer[0] for _ in range(3000)]
    assert not {*trained} & {case.answer[0] for case in cases()}


@pytest.mark.parametrize(
    ("day", "words"),
    [
        (date(1984, 3, 3), {"nineteen eighty four", "nineteen eighty-four"}),
        (date(1905, 3, 3), {"nineteen oh five"}),
        (date(1900, 3, 3), {"nineteen hundred"}),
        (date(2000, 3, 3), {"two thousand"}),
        (date(2004, 3, 3), {"two thousand four", "two thousand and four"}),
    ],
)
def test_years_are_spelled_as_they_are_spoken(day: date, words: set[str]) -> None:
    random = Random(0)
    found = {cell_data.year_in_words(random, day.year, random.choice(" -")) for _ in range(200)}
    assert found == words
