"""Traces of Mooncake and AIPerf: sessions, delays, texts, and errors that name the place."""

import json
from pathlib import Path

import pytest

from holdfast.lab.workloads import Turn, WorkloadConfig, mooncake_jsonl


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(text):
    return len(text.split())


def test_lines_of_one_session_are_the_turns_of_one_conversation(tmp_path):
    path = write(
        tmp_path / "trace.jsonl",
        {"session_id": "a", "timestamp": 500, "input_length": 300, "output_length": 40},
        {"session_id": "b", "timestamp": 700, "input_length": 10, "output_length": 4},
        {"session_id": "a", "delay": 2000, "input_length": 150, "output_length": 20},
    )
    first, second = mooncake_jsonl(path)
    assert (first.arrival, first.turns) == (0.5, (Turn(300, 40), Turn(150, 20, think=2.0)))
    assert (second.arrival, second.turns) == (0.7, (Turn(10, 4),))


def test_lines_without_a_session_are_conversations_of_their_own(tmp_path):
    row = {"input_length": 3, "output_length": 4}
    assert [c.turns for c in mooncake_jsonl(write(tmp_path / "trace.jsonl", row, row))] == [(Turn(3, 4),)] * 2


def test_a_later_turn_with_a_timestamp_follows_by_the_difference(tmp_path):
    rows = [{"session_id": "a", "timestamp": at, "input_length": 3, "output_length": 4} for at in (1000, 4500)]
    (conversation,) = mooncake_jsonl(write(tmp_path / "trace.jsonl", *rows))
    assert conversation.turns[1].think == 3.5


def test_a_delay_of_zero_counts_as_a_delay(tmp_path):
    rows = [
        {"session_id": "a", "timestamp": 0, "input_length": 3, "output_length": 4},
        {"session_id": "a", "timestamp": 9000, "delay": 0, "input_length": 3, "output_length": 4},
    ]
    (conversation,) = mooncake_jsonl(write(tmp_path / "trace.jsonl", *rows))
    assert conversation.turns[1].think == 0.0


def test_texts_have_the_length_that_a_tokenizer_gives_them(tmp_path):
    path = write(
        tmp_path / "trace.jsonl",
        {"text_input": "a b c", "output_length": 4},
        {"text": "a b"},
        {"session_id": "s", "turns": [{"text": "a"}, {"texts": ["a b", {"contents": ["c"]}], "delay": 1500}]},
    )
    found = mooncake_jsonl(path, count_tokens=words, output=7)
    assert [c.turns for c in found] == [(Turn(3, 4),), (Turn(2, 7),), (Turn(1, 7), Turn(3, 7, think=1.5))]


def test_messages_hold_the_whole_prompt_of_a_turn(tmp_path):
    said = [{"role": "system", "content": "a b"}, {"role": "user", "content": [{"type": "text", "text": "c"}]}]
    more = [*said, {"role": "assistant", "content": "d e"}, {"role": "user", "content": "f g h"}]
    path = write(
        tmp_path / "trace.jsonl",
        {"session_id": "s", "messages": said, "output_length": 2},
        {"session_id": "s", "messages": more, "output_length": 5, "delay": 250},
    )
    (conversation,) = mooncake_jsonl(path, count_tokens=words)
    assert conversation.turns == (Turn(3, 2), Turn(3, 5, think=0.25))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"output_length": 1}, "no input; it must have exactly one of input_length"),
        ({"input_length": 1, "text_input": "a"}, "input_length and text_input; it must have exactly one"),
        ({"input_length": 0, "output_length": 1}, "input_length is 0; it must be a number from 1"),
        ({"input_length": 2.5, "output_length": 1}, "input_length is 2.5; it must be a whole number"),
        ({"input_length": True, "output_length": 1}, "input_length is true"),
        ({"input_length": 10**18, "output_length": 1}, f"input_length is {10**18}"),
        ({"input_length": 1, "output_length": "x"}, 'output_length is "x"'),
        ({"input_length": 1, "output_length": 1, "delay": -1}, "delay is -1; it must be a number from 0"),
        ({"input_length": 1, "output_length": 1, "timestamp": float("nan")}, "timestamp is NaN"),
        ({"input_length": 600, "output_length": 1, "hash_ids": [4]}, r"hash_ids is \[4\]; it must be at least 2 ids"),
        ({"input_length": 6, "output_length": 1, "hash_ids": ["4"]}, "hash_ids is .* a list of whole numbers"),
        ({"texts": ["a", {"contents": None}]}, "texts is .*; it must be a list of texts"),
        ({"texts": "a"}, 'texts is "a"; it must be a list of texts'),
        ({"text_input": ""}, 'text_input is ""; it must be a text that is not empty'),
        ({"messages": [{"content": "a"}]}, r"messages\[0\]: role is missing"),
        ({"session_id": "s", "turns": []}, r"turns is \[\]; it must be a list with at least one turn"),
        ({"text": "a", "image": "cat.png"}, "image is .*left out"),
        ([1], r"it is \[1\]; it must be a line of a Mooncake or AIPerf trace, a JSON object"),
    ],
)
def test_a_bad_field_is_named_with_its_file_line_and_value(tmp_path, row, reason):
    path = write(tmp_path / "trace.jsonl", {"input_length": 1, "output_length": 1}, row)
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 2.*{reason}"):
        mooncake_jsonl(path)


def test_an_answer_without_a_length_has_as_many_tokens_as_the_option_says(tmp_path):
    path = write(tmp_path / "trace.jsonl", {"text_input": "a"})
    (conversation,) = WorkloadConfig(workload=str(path), output_tokens=9).read(0)
    assert conversation.turns[0].output == 9
