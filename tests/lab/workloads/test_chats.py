"""Files of chats: vLLM's multi-turn benchmark, its generator's distributions, and errors that name the place."""

import json
import random
import statistics

import pytest

from holdfast.lab.workloads import Common, Conversation, PromptTokens, Turn, chats_json
from holdfast.lab.workloads.chats import capped, distribution, poisson, zipf
from holdfast.lab.workloads.fields import Fields

SETTINGS = {
    "filetype": "generate_conversations",
    "num_conversations": 200,
    "text_files": ["pg1184.txt"],
    "prompt_input": {
        "num_turns": {"distribution": "uniform", "min": 12, "max": 18},
        "common_prefix_num_tokens": {"distribution": "constant", "value": 500},
        "prefix_num_tokens": {"distribution": "lognormal", "average": 1000, "max": 5000},
        "num_tokens": {"distribution": "uniform", "min": 120, "max": 160},
    },
    "prompt_output": {"num_tokens": {"distribution": "uniform", "min": 80, "max": 120}},
}


def words(text):
    return len(text.split())


def read(tmp_path, value, seed=0):
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(value))
    return chats_json(path, words, seed)


def test_each_answer_of_a_multi_turn_file_is_a_turn_with_what_was_said_before_it(tmp_path):
    said = [("system", "a"), ("user", "b c"), ("assistant", "d e f"), ("user", "g"), ("assistant", "h"), ("user", "i")]
    rows = [{"id": "1", "messages": [{"role": role, "content": text} for role, text in said]}]
    assert read(tmp_path, rows) == [Conversation(0.0, (Turn(3, 3), Turn(1, 1)))]


def test_settings_of_a_generator_give_conversations_of_their_lengths(tmp_path):
    found = read(tmp_path, SETTINGS)
    assert len(found) == 200
    assert {len(conversation.turns) for conversation in found} == {6, 7, 8, 9}
    assert all(80 <= turn.output <= 120 for conversation in found for turn in conversation.turns)
    assert all(120 <= turn.prompt <= 160 for conversation in found for turn in conversation.turns[1:])
    assert statistics.mean(c.turns[0].prompt for c in found) == pytest.approx(1500, rel=0.1)
    assert {c.turns[0].common for c in found} == {Common("generate_conversations", 500)}


def test_conversations_of_a_generator_share_the_tokens_of_their_common_prefix(tmp_path):
    tokens = PromptTokens(1000)
    first, second = (tokens.prompt(at, 0, c.turns[0]) for at, c in enumerate(read(tmp_path, SETTINGS)[:2]))
    assert first[:500] == second[:500] and first[500:520] != second[500:520]


def test_a_generator_draws_the_same_for_the_same_seed(tmp_path):
    assert read(tmp_path, SETTINGS, 1) == read(tmp_path, SETTINGS, 1) != read(tmp_path, SETTINGS, 2)


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({"distribution": "constant", "value": 7}, 7.0),
        ({"distribution": "uniform", "min": 1.5, "max": 2.5}, 2.0),
        ({"distribution": "lognormal", "average": 100, "median_ratio": 0.7}, 100.0),
        ({"distribution": "lognormal", "mean": 3.0, "sigma": 0.5}, 22.76),
        ({"distribution": "poisson", "alpha": 4}, 4.0),
        ({"distribution": "poisson", "alpha": 200}, 200.0),
        ({"distribution": "zipf", "alpha": 4.0}, 1.1106),
        ({"distribution": "lognormal", "average": 100, "max": 1}, 1.0),
    ],
)
def test_a_distribution_has_the_mean_that_it_names(settings, mean):
    draw, choose = distribution(Fields("x.json", {"n": settings}, "a section"), "n"), random.Random(3)
    assert statistics.mean(draw(choose) for _ in range(20_000)) == pytest.approx(mean, rel=0.02)


def test_a_poisson_distribution_has_a_variance_equal_to_its_mean():
    drawn, choose = poisson(80.0), random.Random(5)
    assert statistics.variance(drawn(choose) for _ in range(20_000)) == pytest.approx(80.0, rel=0.05)


def test_a_zipf_distribution_falls_with_the_power_of_its_value():
    draw, choose = capped(zipf(2.0), 50), random.Random(7)
    found = [draw(choose) for _ in range(40_000)]
    assert found.count(1) / found.count(2) == pytest.approx(4.0, rel=0.1)
    assert found.count(1) / found.count(3) == pytest.approx(9.0, rel=0.15)
    assert max(found) == 50


def changed(*path, value):
    settings = json.loads(json.dumps(SETTINGS))
    inner = settings
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return settings


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (changed("filetype", value="other"), 'filetype is "other"; it must be generate_conversations'),
        (changed("num_conversations", value=0), "num_conversations is 0; it must be a number from 1"),
        (changed("num_conversations", value=10**12), "num_conversations is 1000000000000"),
        (changed("prompt_output", value=None), "prompt_output is missing"),
        (changed("prompt_input", "num_tokens", value=None), "prompt_input: num_tokens is missing"),
        (
            changed("prompt_input", "num_tokens", value={"distribution": "normal"}),
            'prompt_input, num_tokens: distribution is "normal"; it must be constant',
        ),
        (
            changed("prompt_input", "num_tokens", value={"distribution": "uniform", "min": 5, "max": 4}),
            "max is 4; it must be a number from 5",
        ),
        ([{"messages": []}], r"conversation 0: messages is \[\]"),
        ([{"messages": [{"content": "a"}]}], r"messages\[0\]: role is missing"),
        ([{"messages": [{"role": "user", "content": "a"}]}, 3], "conversation 1: it is 3"),
    ],
)
def test_bad_values_of_a_file_are_named_with_their_place(tmp_path, value, reason):
    with pytest.raises(ValueError, match=rf"chats\.json.*{reason}"):
        read(tmp_path, value)


def test_a_file_that_is_not_json_is_named(tmp_path):
    path = tmp_path / "chats.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"chats\.json: it is not JSON"):
        chats_json(path, words, 0)
