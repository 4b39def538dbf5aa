"""Workloads: traces, drawn lengths, arrivals, and prompt tokens."""

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.lab import workloads
from holdfast.lab.workloads import DATASETS, Conversation, LeftOut, PromptTokens, Turn, WorkloadConfig

TRACES = Path(__file__).parents[4] / "shared" / "traces"


def quantile(values, share):
    return statistics.quantiles(values, n=100)[round(100 * share) - 1]


def test_an_azure_trace_is_read_with_its_arrival_times(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109\r\n"
    )
    first, second = workloads.azure_csv(path)
    assert (first.arrival, first.turns) == (0.0, (Turn(374, 44),))
    assert (second.arrival, second.turns) == (pytest.approx(4.314579), (Turn(396, 109),))


@pytest.mark.parametrize(
    "row", ["2023-11-16 18:15:46.68,many,44", "yesterday,374,44", "2023-11-16 18:15:46.68,0,4", "x", "y" * 200_000]
)
def test_an_invalid_line_of_an_azure_trace_is_named(tmp_path, row):
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{row}\n")
    with pytest.raises(ValueError, match=r"trace\.csv, line 2"):
        workloads.azure_csv(path)


def test_requests_of_a_mooncake_trace_share_the_tokens_of_equal_hash_ids(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]},
        {"timestamp": 2500, "input_length": 1200, "output_length": 7, "hash_ids": [0, 1, 9]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    conversations = workloads.mooncake_jsonl(path)
    assert [c.arrival for c in conversations] == [0.0, 2.5]
    tokens = PromptTokens(1000)
    first, second = (tokens.prompt(number, 0, c.turns[0]) for number, c in enumerate(conversations))
    assert (len(first), len(second)) == (1100, 1200)
    assert first[:1024] == second[:1024] and first[1024:] != second[1024:1100]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        '{"timestamp": 1}',
        '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}',
        '{"timestamp": 0, "input_length": 1e999, "output_length": 1, "hash_ids": []}',
        '{"timestamp": NaN, "input_length": 6, "output_length": 1, "hash_ids": []}',
        '{"timestamp": -1, "input_length": 6, "output_length": 1, "hash_ids": []}',
    ],
)
def test_an_invalid_line_of_a_mooncake_trace_is_named(tmp_path, row):
    path = tmp_path / "trace.jsonl"
    path.write_text(row)
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 1"):
        workloads.mooncake_jsonl(path)


def test_sharegpt_conversations_become_turns(tmp_path):
    path = tmp_path / "chats.json"
    said = [("human", "a b c"), ("gpt", "d e"), ("human", "f"), ("gpt", "g h i j"), ("human", "unanswered")]
    rows = [
        {"id": "1", "conversations": [{"from": who, "value": text} for who, text in said]},
        {"id": "2", "conversations": [{"from": "gpt", "value": "nobody asked"}]},
    ]
    path.write_text(json.dumps(rows))
    assert workloads.chats_json(path, lambda text: len(text.split()), 0) == [
        Conversation(0.0, (Turn(3, 2), Turn(1, 4)))
    ]
    for wrong, reason in (
        ('[{"id": 1}]', "KeyError"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "TypeError"),
    ):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=rf"chats\.json: {reason}"):
            workloads.chats_json(path, len, 0)


@pytest.mark.parametrize("name", ["trace.csv", "trace.jsonl", "chats.json"])
def test_an_empty_or_binary_workload_file_is_named(tmp_path, name):
    path, empty = tmp_path / name, "[]" if name == "chats.json" else ""
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=rf"{name} is not text"):
        WorkloadConfig(workload=str(path)).read(seed=0)
    path.write_text(empty)
    with pytest.raises(ValueError, match=rf"{name} holds no requests"):
        WorkloadConfig(workload=str(path)).read(seed=0)


@pytest.mark.parametrize(
    ("name", "prompt_median", "prompt_p90", "output_median", "output_p90"),
    [("openchat_sharegpt4", 1730, 5696, 415, 834), ("arxiv_summarization", 7059, 12985, 208, 371)],
)
def test_drawn_lengths_have_the_quantiles_of_the_paper(name, prompt_median, prompt_p90, output_median, output_p90):
    turns = [conversation.turns[0] for conversation in workloads.sample_dataset(name, 4000, seed=1)]
    prompts, outputs = [turn.prompt for turn in turns], [turn.output for turn in turns]
    assert statistics.median(prompts) == pytest.approx(prompt_median, rel=0.08)
    assert quantile(prompts, 0.9) == pytest.approx(prompt_p90, rel=0.05)
    assert statistics.median(outputs) == pytest.approx(output_median, rel=0.05)
    assert quantile(outputs, 0.9) == pytest.approx(output_p90, rel=0.06)
    assert max(turn.prompt + turn.output for turn in turns) <= DATASETS[name].limit


@pytest.mark.parametrize("means", [workloads.SHAREGPT, workloads.ULTRACHAT])
def test_multi_turn_conversations_have_the_means_of_the_paper(means):
    conversations = workloads.multi_turn(3000, think=5.0, seed=2, means=means)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    assert len(turns) / len(conversations) == pytest.approx(means.turns, rel=0.05)
    assert statistics.mean(turn.prompt for turn in turns) == pytest.approx(means.prompt, rel=0.05)
    assert statistics.mean(turn.output for turn in turns) == pytest.approx(means.output, rel=0.05)
    thinks = [turn.think for conversation in conversations for turn in conversation.turns[1:]]
    assert statistics.mean(thinks) == pytest.approx(5.0, rel=0.05)
    assert {conversation.turns[0].think for conversation in conversations} == {0.0}


def intervals(conversations):
    times = [0.0, *(conversation.arrival for conversation in conversations)]
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize("variation", [0.5, 1.0, 2.0])
def test_arrivals_have_the_given_rate_and_variation(variation):
    gaps = intervals(workloads.gamma_arrivals(workloads.fixed(5000, 10, 10), 4.0, 0, variation))
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(variation, rel=0.1)


def test_the_same_seed_gives_the_same_workload():
    def make(seed):
        return workloads.gamma_arrivals(workloads.sample_dataset("openchat_sharegpt4", 20, seed), 2.0, seed)

    assert make(1) == make(1) != make(2)


def test_a_trace_is_replayed_faster_by_the_given_factor():
    conversations = [Conversation(at, (Turn(1, 1),)) for at in (0.0, 4.0)]
    assert [c.arrival for c in workloads.speed_up(conversations, 2.0)] == [0.0, 2.0]


def test_turns_that_exceed_the_context_are_dropped():
    conversations = [Conversation(0.0, (Turn(4, 4), Turn(4, 4))), Conversation(0.0, (Turn(90, 1),))]
    assert workloads.fit_context(conversations, 15) == [Conversation(0.0, (Turn(4, 4),))]
    assert workloads.fit_context(conversations, 16)[0] == conversations[0]


def test_a_conversation_longer_than_the_context_is_dropped_whole_as_pensieve_does():
    short, long = Conversation(0.0, (Turn(4, 4), Turn(4, 4))), Conversation(1.0, (Turn(4, 4), Turn(4, 5)))
    assert workloads.fit_context([short, long], 16, "drop") == [short]
    assert workloads.fit_context([short, long], 17, "drop") == [short, long]
    assert workloads.fit_context([short, long], 16, "cut") == [short, Conversation(1.0, (Turn(4, 4),))]


def test_what_is_left_out_is_a_share_of_all_requests_and_of_all_conversations():
    drawn = [
        Conversation(0.0, (Turn(4, 4), Turn(4, 4))),
        Conversation(0.0, (Turn(4, 4),)),
        Conversation(0.0, (Turn(90, 1),)),
    ]
    cut = LeftOut.of(drawn, workloads.fit_context(drawn, 8, "cut"))
    dropped = LeftOut.of(drawn, workloads.fit_context(drawn, 8, "drop"))
    assert cut.figures() == {"left_out_requests_share": 0.5, "left_out_conversations_share": 1 / 3}
    assert dropped.figures() == {"left_out_requests_share": 0.75, "left_out_conversations_share": 2 / 3}
    assert str(dropped) == "3 of 4 requests (75.0%), 2 of 3 conversations whole (66.7%)"


def test_prompts_differ_within_their_first_tokens_and_repeat_in_every_run():
    tokens = PromptTokens(300)
    prompts = [tokens.prompt(number, 0, Turn(200, 1)) for number in range(500)]
    assert len({prompt[:16] for prompt in prompts}) == 500
    assert all(len(prompt) == 200 and min(prompt) >= 16 and max(prompt) < 300 for prompt in prompts)
    assert PromptTokens(300).prompt(3, 0, Turn(200, 1)) == prompts[3]
    assert len(tokens.prompt(0, 0, Turn(200_000, 1))) == 200_000
    assert len(tokens.prompt(0, 0, Turn(3, 1))) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: workloads.sample_dataset("nothing", 1, 0),
        lambda: workloads.gamma_arrivals([], 0.0, 0),
        lambda: workloads.gamma_arrivals([], 1.0, 0, 0.0),
        lambda: workloads.speed_up([], 0.0),
        lambda: PromptTokens(10),
    ],
)
def test_invalid_arguments_are_refused(wrong):
    with pytest.raises(ValueError, match=r"unknown|must be"):
        wrong()


@pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")
def test_the_public_traces_are_read_in_full():
    azure = workloads.azure_csv(TRACES / "azure_llm_2023_conv.csv")
    assert len(azure) == 19_366
    assert sum(conversation.turns[0].output for conversation in azure) == 4_088_665
    assert len(workloads.mooncake_jsonl(TRACES / "mooncake_synthetic.jsonl")) == 3_993
