"""Baton's data sets: lengths, kinds and scale. Lengths of requests in files that authors of papers publish."""

import json
import pickle
from itertools import pairwise

import pytest

from benchmarks.lib import paper_workloads
from holdfast.lab.workloads import Conversation, Turn


def test_batons_first_data_set_has_a_quarter_of_long_prompts_and_a_quarter_of_long_answers():
    turns = [talk.turns[0] for talk in paper_workloads.baton_target_1(0)]
    kinds = [(turn.prompt >= 3600, turn.output >= 3600) for turn in turns]
    assert [kinds.count(kind) for kind in ((True, False), (False, True), (False, False))] == [30, 30, 60]
    lengths = [length for turn in turns for length in (turn.prompt, turn.output)]
    assert all(36 <= length <= 400 or 3600 <= length <= 4400 for length in lengths)
    assert kinds != sorted(kinds), "they come in random order"


def test_batons_second_data_set_is_short_in_both_directions():
    turns = [talk.turns[0] for talk in paper_workloads.baton_target_2(0)]
    assert len(turns) == 30
    assert all(36 <= length <= 200 for turn in turns for length in (turn.prompt, turn.output))


def test_batons_data_sets_depend_on_the_seed_alone_and_scale_every_length():
    assert paper_workloads.baton_target_1(3) == paper_workloads.baton_target_1(3) != paper_workloads.baton_target_1(4)
    plain, doubled = (paper_workloads.baton_target_1(3, scale=scale) for scale in (1.0, 2.0))
    assert all(abs(two.turns[0].output - 2 * one.turns[0].output) <= 1 for one, two in zip(plain, doubled, strict=True))


@pytest.mark.parametrize(
    ("draw", "options", "message"),
    [
        (paper_workloads.baton_target_1, {"count": 30}, "count is 30"),
        (paper_workloads.baton_target_2, {"count": 0}, "count is 0"),
        (paper_workloads.baton_target_1, {"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_an_impossible_data_set_of_baton_is_refused(draw, options, message):
    with pytest.raises(ValueError, match=message):
        draw(0, **options)


def numbered(count):
    return [Conversation(0.0, (Turn(number + 1, 1),)) for number in range(count)]


def test_requests_of_the_authors_come_in_the_order_that_pandas_draws_with_their_seed():
    drawn = paper_workloads.in_authors_order(numbered(10), 10)
    assert [talk.turns[0].prompt - 1 for talk in drawn] == [8, 1, 5, 0, 7, 2, 9, 4, 3, 6]
    assert paper_workloads.in_authors_order(numbered(10), 4) == drawn[:4]
    with pytest.raises(ValueError, match="count is 11; there are 10 requests"):
        paper_workloads.in_authors_order(numbered(10), 11)


def test_arrivals_of_the_authors_scale_with_the_rate_and_no_gap_is_above_three_means():
    slow, fast = (
        [talk.arrival for talk in paper_workloads.authors_arrivals(numbered(2000), rate)] for rate in (0.5, 2.0)
    )
    assert slow == pytest.approx([4 * time for time in fast])
    gaps = [after - before for before, after in pairwise([0.0, *fast])]
    assert max(gaps) == pytest.approx(3 / 2) and min(gaps) >= 0
    assert fast[0] == pytest.approx(1.02006 / 2, rel=1e-4)  # -log(1 - random.Random(42).random()) / 2
    assert 2000 / fast[-1] == pytest.approx(2 / 0.95, rel=0.08)
    with pytest.raises(ValueError, match="rate is 0"):
        paper_workloads.authors_arrivals(numbered(1), 0)


def test_lengths_come_from_the_authors_file_but_for_requests_above_the_limit(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n10,5,2.0\n90,11,8.2\n60,40,1.5\n")
    found = paper_workloads.sarathi_lengths(path, 100)
    assert [(talk.turns[0].prompt, talk.turns[0].output) for talk in found] == [(10, 5), (60, 40)]
    path.write_text("num_prefill_tokens,tokens\n10,5\n")
    with pytest.raises(ValueError, match="no column num_decode_tokens"):
        paper_workloads.sarathi_lengths(path, 100)
    for row, reason in (("10,x", "invalid literal"), ("10", "NoneType")):
        path.write_text(f"num_prefill_tokens,num_decode_tokens\n1,2\n{row}\n")
        with pytest.raises(ValueError, match=f"lengths.csv, line 3: .*{reason}"):
            paper_workloads.sarathi_lengths(path, 100)


def test_written_lengths_are_read_again(tmp_path):
    path = tmp_path / "lengths.csv"
    paper_workloads.write_lengths(path, [Turn(3, 4), Turn(500, 1)])
    assert [talk.turns[0] for talk in paper_workloads.sarathi_lengths(path, 1000)] == [Turn(3, 4), Turn(500, 1)]


def test_a_pickle_of_pairs_gives_its_lengths_in_order(tmp_path):
    path = tmp_path / "lengths.pkl"
    path.write_bytes(pickle.dumps([(21, 518), (8, 66)]))
    assert paper_workloads.vllm_lengths(path) == [Turn(21, 518), Turn(8, 66)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps([(1, 2), (0, 5)]), r"has \(0, 5\)"),
        (pickle.dumps([(1, 2), (3, 4, 5)]), r"has \(3, 4, 5\)"),
        (pickle.dumps([([7, 7], 5)]), r"has \(\[7, 7\], 5\)"),
        (pickle.dumps([]), "not a list of pairs"),
        (pickle.dumps({"a": 1}), "not a list of pairs"),
        (pickle.dumps([(1, 2)])[:-4], "not a pickle of lengths"),
    ],
)
def test_a_pickle_of_anything_but_pairs_of_lengths_is_refused(tmp_path, content, message):
    path = tmp_path / "lengths.pkl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        paper_workloads.vllm_lengths(path)


class Touching:
    """Its pickle calls a function that makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return type(self.path).touch, (self.path,)


def test_a_pickle_that_would_run_code_is_refused_before_it_does(tmp_path):
    path, touched = tmp_path / "lengths.pkl", tmp_path / "touched"
    path.write_bytes(pickle.dumps([Touching(touched)]))
    with pytest.raises(ValueError, match="not a pickle of lengths: it names"):
        paper_workloads.vllm_lengths(path)
    assert not touched.exists()
    pickle.loads(path.read_bytes())
    assert touched.exists(), "read without care, it does run"


@pytest.fixture
def bytes_tokenizer(tmp_path):
    """A folder with a vocabulary in GPT-2's format, in which each letter is a token, and so is `ab`."""
    letters = [*"abcdefgh.", "\u0120", "\u010a"]
    (tmp_path / "vocab.json").write_text(json.dumps({text: number for number, text in enumerate([*letters, "ab"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    return tmp_path


def test_an_alpaca_prompt_is_the_instruction_and_its_input_with_a_token_in_front(tmp_path, bytes_tokenizer):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    rows = [
        {"instruction": "abc.", "input": "", "output": "d"},
        {"instruction": "cab", "input": "de", "output": "ab h"},
    ]
    one.write_text(json.dumps(rows))
    two.write_text(json.dumps([rows[1], {**rows[1], "output": "h"}]))
    found = paper_workloads.alpaca_lengths([one, two], bytes_tokenizer)
    assert found == [Turn(1 + 3, 1 + 1), Turn(1 + 2 + 1 + 2, 1 + 3), Turn(6, 2)], "what comes twice counts once"
    two.write_text('[{"instruction": "abc", "output": "d"}]')
    with pytest.raises(ValueError, match=r"two.json is not a list of instruction, input and output: KeyError, 'input'"):
        paper_workloads.alpaca_lengths([one, two], bytes_tokenizer)
    (bytes_tokenizer / "merges.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*merges.txt"):
        paper_workloads.alpaca_lengths([one], bytes_tokenizer)
