"""The dialogues that train holdfast-tiny: repeatable, correct, and held out where they must be."""

from pathlib import Path
from random import Random

import pytest

from holdfast.engine.client.text import Text
from tools.tiny.dialogues import Dialogue, write_dialogue, write_text, write_tool_dialogue
from tools.tiny.facts import ME, attributes_of
from tools.tiny.language import Sentence, Style, expand
from tools.tiny.sums import draw_sum
from tools.tiny.tokens import dialogue_texts, encode_dialogue, save_tokenizer, train_tokenizer
from tools.tiny.words import NAMES, Split, belongs, proper
from tools.tiny.writer import Check, Writer


def written(split: Split, count: int = 150, seed: int = 3) -> list[Dialogue]:
    rng = Random(seed)
    return [write_dialogue(rng, split) for _ in range(count)]


def test_equal_seeds_write_equal_dialogues() -> None:
    assert written("train", 20) == written("train", 20)
    assert written("train", 20) != written("train", 20, seed=4)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_answer_passes_its_own_check(split: Split) -> None:
    checked = [turn for dialogue in written(split) for turn in dialogue.turns if turn.check]
    assert len(checked) > 400
    assert [turn for turn in checked if turn.check and not turn.check.passes(turn.assistant)] == []


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_no_template_field_or_alternative_is_left_in_the_text(split: Split) -> None:
    for dialogue in written(split):
        for turn in dialogue.turns:
            assert turn.user.strip() == turn.user != ""
            assert turn.assistant.strip() == turn.assistant != ""
            assert not set("{}|()") & set(turn.user + turn.assistant)


def test_over_100_facts_are_asked_six_or_more_turns_later() -> None:
    distances = [
        t.check.turns for d in written("heldout") for t in d.turns if t.check and t.check.kind.startswith("recall")
    ]
    assert sum(distance >= 6 for distance in distances) > 100


def test_heldout_dialogues_have_no_name_of_the_training_dialogues() -> None:
    def told(split: Split) -> set[str]:
        rng, names = Random(11), set()
        for _ in range(400):
            writer = Writer(rng, split)
            drawn = [writer.draw_fact(ME) for _ in range(4)]
            names |= {
                value.lower() for _, attribute, value in filter(None, drawn) if attribute.proper and " " not in value
            }
        return names

    train, heldout = told("train"), told("heldout")
    assert len(train) > 100 and len(heldout) > 100
    assert not train & heldout


def test_every_name_and_every_sum_is_in_exactly_one_split() -> None:
    rng = Random(2)
    for split in ("train", "heldout"):
        other: Split = "heldout" if split == "train" else "train"
        for _ in range(200):
            name = proper(rng, split, NAMES)
            assert belongs(split, name) and not belongs(other, name)
    train = {draw_sum(rng, "train").question for _ in range(2000)}
    heldout = {draw_sum(rng, "heldout").question for _ in range(2000)}
    assert not {q for q in train & heldout if any(op in q for op in ("+ ", "plus", "times"))}


def test_an_answer_with_a_wrong_value_and_the_right_one_fails() -> None:
    check = Check("recall about me", expect=("Ada",), forbid=("Tom",))
    assert check.passes("Your name is Ada.")
    assert not check.passes("Your name is Ada, not Tom.")
    assert not check.passes("Your name is Adam.")
    assert not check.passes("You have not told me your name.")


def test_an_answer_must_admit_that_a_fact_was_never_stated() -> None:
    check = Check("unknown fact", forbid=("Lisbon",), unknown=True)
    assert check.passes("You have not told me where you live.")
    assert not check.passes("You live in Porto.")
    assert not check.passes("You have not told me, but it may be Lisbon.")


def test_the_last_number_of_an_answer_is_the_result_of_a_sum() -> None:
    check = Check("addition", result="12")
    assert check.passes("7 + 5 = 12.")
    assert not check.passes("12 is 7 plus 6.")
    assert not check.passes("7 + 5 = 112.")


def test_expand_handles_nested_and_empty_alternatives() -> None:
    drawn = {expand(Random(seed), "(hi|hello( there|)) you") for seed in range(60)}
    assert drawn == {"hi you", "hello you", "hello there you"}


def test_a_careless_style_keeps_the_case_of_names() -> None:
    style = Style(lower=True, no_stop=True, no_apostrophe=True)
    sentence = Sentence("I'm {v}", ".", {"v": "Ada"})
    assert style.write(Random(0), [sentence]) == "im Ada"
    assert Style(lower=True, lower_values=True).value("Ada") == "ada"


def test_every_attribute_can_be_stated_asked_and_answered() -> None:
    for attribute in attributes_of(ME):
        assert "{v}" in attribute.clause and "{v}" not in attribute.ask
        drawn = [expand(Random(seed), attribute.tell) for seed in range(20)]
        assert all("{v}" in text for text in drawn), attribute.key


def test_plain_text_has_no_template_fields() -> None:
    rng = Random(5)
    assert all("{" not in write_text(rng, "train") for _ in range(50))


def with_tools(split: Split, count: int = 150) -> list[Dialogue]:
    rng = Random(3)
    return [write_tool_dialogue(rng, split) for _ in range(count)]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_call_is_of_an_offered_tool_with_its_arguments_and_has_a_result(split: Split) -> None:
    calls = 0
    for dialogue in with_tools(split):
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        for turn in dialogue.turns:
            assert len(turn.calls) == len(turn.results)
            calls += len(turn.calls)
            for name, arguments in turn.calls:
                kinds = {"string": str, "integer": int, "number": int}
                properties = tools[name]["properties"]
                assert set(tools[name].get("required", properties)) <= {*arguments, "unit"}
                assert all(type(value) is kinds[properties[key]["type"]] for key, value in arguments.items())
            if turn.calls:
                assert turn.check is not None and turn.check.passes(turn.assistant), turn
    assert calls > 100


def test_a_dialogue_with_tools_is_learned_in_the_tokens_that_the_template_gives(tmp_path: Path) -> None:
    sample = with_tools("train", 60)
    tokenizer = train_tokenizer((text for dialogue in sample for _, text in dialogue_texts(dialogue)), 600)
    save_tokenizer(tokenizer, tmp_path, 4096)
    text = Text.from_directory(tmp_path)
    for dialogue in sample[:20]:
        rendered = text.render_chat(dialogue.messages(), add_generation_prompt=False, tools=dialogue.tools)
        ids, said = encode_dialogue(tokenizer, dialogue)
        assert ids == text.encode(rendered, add_special_tokens=False)
        begun = [at for at, token in enumerate(ids) if token == text.token_id("<|assistant|>")]
        assert all(not said[at] and said[at + 1] for at in begun)
    text.close()
