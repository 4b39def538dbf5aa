"""The batches that a user may type, and the message for each wrong input."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import batch_input
from holdfast.cli.batch_input import Asked, InputError, parse_batch


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ('["A", "B"] [32, 64]', [("A", 32), ("B", 64)]),
        ('["A","B"][32,64]', [("A", 32), ("B", 64)]),
        ('  [ "A" ]  ', [("A", 128)]),
        ('["A", "B", "C"] [7]', [("A", 7), ("B", 7), ("C", 7)]),
        (r'["a \"b\" \\ \n \u00e9 [1], ]"] [1]', [('a "b" \\ \n é [1], ]', 1)]),
        ('["A"] [4095]', [("A", 4095)]),
    ],
)
def test_prompts_have_their_lengths(text: str, asked: list[tuple[str, int]]) -> None:
    assert parse_batch(text, 4095) == [Asked(*each) for each in asked]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", 'column 1: a batch is a list of prompts, as in ["Prompt 1", "Prompt 2"] [32, 64]'),
        ("hello", "column 1: a batch is a list of prompts"),
        ('"A"', "column 1: a batch is a list of prompts"),
        ("[]", "column 2: the list has no prompt"),
        ("[ ] [3]", "column 3: the list has no prompt"),
        ("[", "column 2: a prompt or ] is missing"),
        ("['A']", 'column 2: a prompt must be in double quotes, like "this"'),
        ("[“A”]", "column 2: a prompt must be in double quotes"),
        ("[A]", "column 2: a prompt must be in double quotes"),
        ('["A", 5]', "column 7: a prompt must be in double quotes"),
        ('["A", "B]', "column 7: the quotes of this prompt are not closed"),
        ('["A"', "column 5: a comma or ] is missing after this prompt"),
        ('["A" "B"]', "column 6: a comma or ] is missing after this prompt"),
        ('["A",]', "column 6: a prompt is missing after the comma"),
        ('["A",', "column 6: a prompt or ] is missing"),
        ('["A", ""]', "column 7: the prompt is empty"),
        ('["  "]', "column 2: the prompt is empty"),
        (r'["a\x"]', "column 4: invalid \\escape"),
        (r'["a\u12"]', "column 5: invalid \\uXXXX escape"),
        ('["a\tb"]', "column 4: invalid control character"),
        ('["A"] [0]', "length 0 at column 8: it must be between 1 and 4095"),
        ('["A"] [-3]', "length -3 at column 8: it must be between 1 and 4095"),
        ('["A"] [4096]', "length 4096 at column 8: it must be between 1 and 4095"),
        ('["A"] [1.5]', "column 8: a length must be a whole number between 1 and 4095"),
        ('["A"] ["32"]', "column 8: a length must be a whole number"),
        ('["A"] [9999999999999]', "column 8: a length must be a whole number"),
        ('["A"] [³]', "column 8: a length must be a whole number"),
        ('["A"] []', "column 8: the list has no length"),
        ('["A"] [3', "column 9: a comma or ] is missing after this length"),
        ('["A"] [3,]', "column 10: a length is missing after the comma"),
        ('["A"] 32', "column 7: nothing may follow after the prompts, but a list of lengths"),
        ('["A"] [3] x', "column 11: nothing may follow after the lengths"),
        ('["A", "B", "C"] [1, 2]', "3 prompts and 2 lengths: give 3, 1 or none"),
        ('["A"] [1, 2]', "1 prompt and 2 lengths: give 1 or none"),
    ],
)
def test_a_wrong_input_is_refused_with_its_column_and_reason(text: str, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_batch(text, 4095)
    assert str(refused.value).startswith(reason)


def test_columns_are_those_of_the_whole_line() -> None:
    with pytest.raises(InputError, match="column 9: a prompt must"):
        parse_batch("/batch [A]", 100, begin=len("/batch"))


def test_the_default_length_fits_a_short_context_and_lists_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_batch('["A"]', 20) == [Asked("A", 20)]
    monkeypatch.setattr(batch_input, "MOST_PROMPTS", 2)
    with pytest.raises(InputError, match="more than 2 prompts"):
        parse_batch('["A", "B", "C"]', 20)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1), st.booleans())
def test_prompts_are_read_as_any_json_writer_spells_them(prompts: list[str], ascii_only: bool) -> None:
    found = parse_batch(json.dumps(prompts, ensure_ascii=ascii_only) + json.dumps([9] * len(prompts)), 10)
    assert [each.prompt for each in found] == prompts
    assert {each.length for each in found} == {9}


@given(st.text(alphabet='[]", 1\\au-', max_size=30))
def test_any_other_text_is_refused_with_an_input_error(text: str) -> None:
    try:
        found = parse_batch(text, 10)
    except InputError:
        return
    assert found and all(1 <= each.length <= 10 and each.prompt.strip() for each in found)
