"""The tagger: each word of held-out sentences is tagged as in plain PyTorch, by the words before it."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from itertools import islice
from random import Random

import numpy as np
import pytest

from holdfast.cells.applications import tagger
from holdfast.cells.partition import Splitter
from scripts import cell_data
from scripts.train_cells import answers, run_together
from tests.cells.applications.references import TaggerReference, returning_h, text_of


@cache
def cases() -> list[cell_data.Case]:
    """The cases that the application must solve."""
    return cell_data.cases_of_test("tagger", 1000)


def tags_of(text: str) -> dict[str, str]:
    """The tag of each word. A word that occurs twice has its last tag."""
    application = tagger.load()
    outputs = application.finish(run_together(application, [application.unfold(text_of(text))])[0])
    return dict(zip(outputs["word"].tolist(), outputs["tag"].tolist(), strict=True))


def test_at_least_97_of_100_held_out_sentences_are_right_in_every_word() -> None:
    given = answers(tagger.load(), [case.text for case in cases()])
    assert sum(tags == case.answer for tags, case in zip(given, cases(), strict=True)) >= 970


def test_tags_and_states_equal_plain_pytorch() -> None:
    application, reference = tagger.load(), TaggerReference()
    application.step = returning_h(application.step)
    application.cells = (application.step,)
    graphs = [application.unfold(text_of(case.text)) for case in cases()[:60]]
    for graph in graphs:
        graph.result("h", range(graph.nodes), "h")
    for case, results in zip(cases(), run_together(application, graphs), strict=False):
        tags, h = reference.run(case.text)
        assert application.finish(results)["tag"].tolist() == tags
        np.testing.assert_allclose(results["h"], h.numpy(), atol=1e-5, rtol=0)


def test_a_tagger_that_forgets_is_wrong_in_most_sentences() -> None:
    reference = TaggerReference(remembers=False)
    assert sum(reference.run(case.text)[0] == case.answer for case in cases()[:200]) < 60


def test_no_tags_by_word_alone_are_right_in_most_sentences() -> None:
    count: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for text, tags in cases():
        for word, tag in zip(text.split(), tags, strict=True):
            count[word][tag] += 1
    usual = {word: tags.most_common(1)[0][0] for word, tags in count.items()}
    right = sum([usual[word] for word in text.split()] == tags for text, tags in cases())
    assert right < 500


def test_earlier_words_decide_between_a_month_and_a_woman_and_a_year_and_an_amount() -> None:
    assert tags_of("On 3 May 1984 , Anna met Jordan Miller .")["May"] == "DATE"
    assert tags_of("In Jordan , May sold 1984 tickets .") == {
        "In": "O",
        "Jordan": "PLACE",
        ",": "O",
        "May": "PERSON",
        "sold": "O",
        "1984": "QUANTITY",
        "tickets": "QUANTITY",
        ".": "O",
    }


def test_the_head_of_a_list_decides_many_words_later() -> None:
    middle = "that Anna Miller remembered on 3 May 1984 with the books for forty two euros near Berlin were"
    for head, tag in (("towns", "PLACE"), ("guests", "PERSON")):
        assert tags_of(f"The {head} {middle} Chester , Lincoln and Paris .")["Lincoln"] == tag


def test_unknown_names_are_tagged_by_the_words_around_them() -> None:
    tags = tags_of("Xaverine met Dr Bolokov in Tungawalla with 73 spoons .")
    assert [tags[word] for word in ("Xaverine", "Bolokov", "Tungawalla", "73", "spoons")] == [
        "PERSON",
        "PERSON",
        "PLACE",
        "QUANTITY",
        "QUANTITY",
    ]


def test_a_sentence_is_split_into_words_numbers_and_marks() -> None:
    assert tagger.split("O'Neill's twenty-one cats, on May 3rd (1984).") == [
        *("O'Neill's", "twenty-one", "cats", ",", "on", "May", "3rd", "(", "1984", ")", "."),
    ]


@pytest.mark.parametrize(
    ("word", "shape"),
    [
        ("7", "<number>"),
        ("12", "<number>"),
        ("123", "<hundreds>"),
        ("1984", "<thousands>"),
        ("123456", "<large>"),
        ("3rd", "<ordinal>"),
        ("Élodie", "<Name>"),
        ("zebra", "<word>"),
        ("%", "<other>"),
    ],
)
def test_unknown_words_and_digits_have_a_shape(word: str, shape: str) -> None:
    assert tagger.shape_of(word) == shape


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the text is empty; it needs at least 1 word"),
        (" \n\t ", "the text is empty; it needs at least 1 word"),
        ("so " * 331, "the text has 331 words and marks; at most 330 are allowed"),
        ("bad \x00 text", r"character 5 is '\x00'; only what can be printed is allowed"),
    ],
)
def test_an_unusable_text_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        tagger.load().unfold(text_of(text))
    assert str(caught.value) == reason


def test_the_longest_sentence_is_one_chain_of_330_nodes() -> None:
    application = tagger.load()
    graph = application.unfold(text_of("so " * 330))
    partition = Splitter({application.step: 0}).split([graph])
    assert partition.steps.tolist() == [330]


def test_weights_and_words_that_do_not_belong_together_are_refused() -> None:
    reference = TaggerReference()
    with pytest.raises(ValueError, match=r"there are 9 words and \d+ embeddings"):
        tagger.Tagger(reference.weights, ["one"])


def test_generated_sentences_are_as_split_as_they_were_written() -> None:
    for text, tags in islice(cell_data.sentences(Random(9), test=False), 300):
        assert tagger.split(text) == text.split()
        assert len(tags) == len(text.split())
