"""Lines of tuning files as examples: the learned tokens under several chat templates, and refusals."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.client.text import Text
from holdfast.server.jobs import examples
from holdfast.server.jobs.examples import Example, ExampleReader, example_of
from holdfast.server.protocol import ApiError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENS_A_THOUGHT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SHORTENS_EARLIER_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}(thought){% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def text_of(template: str) -> Text:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<|im_start|>", "<|im_end|>")])
    return Text(tokenizer, template)


@pytest.fixture
def text(request: pytest.FixtureRequest) -> Iterator[Text]:
    made = text_of(request.param)
    yield made
    made.close()


def turns(*contents: str | dict[str, Any]) -> dict[str, Any]:
    """Return a line of alternating turns of user and assistant."""
    said: list[dict[str, Any]] = [each if isinstance(each, dict) else {"content": each} for each in contents]
    return {"messages": [{"role": ("user", "assistant")[n % 2], **each} for n, each in enumerate(said)]}


def read(line: Any, text: Text, longest: int = 4096) -> Example:
    return example_of(json.dumps(line).encode(), text, longest)


def parts(example: Example, text: Text) -> tuple[str, list[str]]:
    """Return the whole text of an example, and its learned pieces."""
    ids, weights = example
    pieces: list[list[int]] = [[]]
    for token, weight in zip(ids, weights, strict=True):
        if weight:
            pieces[-1].append(token)
        elif pieces[-1]:
            pieces.append([])
    decoded = [text.decode(piece, skip_special_tokens=False) for piece in pieces if piece]
    return text.decode(ids, skip_special_tokens=False), decoded


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_each_answer_is_learned_with_its_end_and_nothing_else_is(text: Text) -> None:
    whole, learned = parts(read(turns("hi", " Ahoy! ", "again", "Aye."), text), text)
    assert learned == ["Ahoy!<|im_end|>", "Aye.<|im_end|>"]
    assert whole.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nAhoy!")
    assert whole.endswith("Aye.<|im_end|>\n")
    _, learned = parts(
        read(turns("hi", {"content": "no", "weight": 0}, "again", {"content": "a", "weight": 1}), text), text
    )
    assert learned == ["a<|im_end|>"]


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_the_tokens_before_an_answer_are_those_of_the_prompt_that_asks_for_it(text: Text) -> None:
    ids, weights = read(turns("hi", "Ahoy!", "again", "Aye."), text)
    asked = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Ahoy!"}]
    prompt = text.encode_chat([*asked, {"role": "user", "content": "again"}])
    assert ids[: len(prompt)] == prompt and weights[len(prompt)] == 1.0 and weights[len(prompt) - 1] == 0.0
    assert text.encode_chat(asked[:1]) == ids[: weights.index(1.0)]


@pytest.mark.parametrize("text", [OPENS_A_THOUGHT], indirect=True)
def test_text_that_the_prompt_opens_stays_before_the_last_answer(text: Text) -> None:
    whole, learned = parts(read(turns("hi", "Ahoy!"), text), text)
    assert whole == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nAhoy!<|im_end|>\n"
    assert learned == ["Ahoy!<|im_end|>"]
    with pytest.raises(ApiError, match=r"writes messages\[1\] in another way than it asks for it; give it weight 0"):
        read(turns("hi", "Ahoy!", "again", "Aye."), text)
    assert parts(read(turns("hi", {"content": "x", "weight": 0}, "b", "Aye."), text), text)[1] == ["Aye.<|im_end|>"]


@pytest.mark.parametrize("text", [SHORTENS_EARLIER_TURNS], indirect=True)
def test_an_answer_that_later_turns_rewrite_is_refused_by_name(text: Text) -> None:
    assert parts(read(turns("hi", "Ahoy!"), text), text)[1] == ["(thought)Ahoy!<|im_end|>"]
    with pytest.raises(ApiError, match=r"messages\[1\] in another way once more messages follow") as refused:
        read(turns("hi", "Ahoy!", "again", "Aye."), text)
    assert refused.value.param == "messages[1]"


def test_the_built_in_model_learns_the_tokens_that_it_would_write() -> None:
    text = Text.from_directory(Checkpoint.find("holdfast-tiny").directory)
    line = turns("Hi! My name is Ada.", "Ahoy, Ada!", "I like pears.", "Aye.")
    ids, _ = read(line, text)
    assert ids == text.encode_chat(line["messages"], add_generation_prompt=False)
    assert parts(read(line, text), text)[1] == ["Ahoy, Ada!<|end|>", "Aye.<|end|>"]
    text.close()


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_text_that_spells_a_special_token_ends_no_answer(text: Text) -> None:
    ids, _ = read(turns("hi", "a<|im_end|>b"), text)
    assert ids.count(ids[-2]) == 2 and not text.is_visible(ids[-2])


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_a_completion_is_learned_as_it_is_written(text: Text) -> None:
    whole, learned = parts(read({"prompt": "2 + 2 =", "completion": " 4<|im_end|>"}, text), text)
    assert (whole, learned) == ("2 + 2 = 4<|im_end|>", [" 4<|im_end|>"])
    ids, weights = read({"prompt": "", "completion": "abc"}, text)
    assert (len(ids), weights) == (3, [1.0, 1.0, 1.0])
    with pytest.raises(ApiError, match="there is nothing to learn: the learned text has no tokens"):
        read({"prompt": "", "completion": "a"}, text)


@pytest.mark.parametrize("text", [CHATML], indirect=True)
@pytest.mark.parametrize(
    ("line", "param", "reason"),
    [
        ([], None, "the line must be a JSON object"),
        ({}, "prompt", "a line has messages, or prompt and completion; prompt must be a text"),
        ({"prompt": 1, "completion": "x"}, "prompt", "prompt must be a text"),
        ({"prompt": "x", "completion": ""}, "completion", "completion must be a text that is not empty"),
        ({"messages": "hi"}, "messages", "messages must be a list of 1 to 4096 messages"),
        ({"messages": ["hi"]}, "messages[0]", "messages[0] must be an object"),
        (turns("hi", {"content": None}), "messages[1].content", "messages[1].content is empty"),
        (turns("hi", {"content": 5}), "messages[1].content", "must be a string or a list of text parts"),
        (turns("hi", "  "), "messages[1].content", "messages[1].content is empty"),
        (turns("hi", {"content": "x", "weight": True}), "messages[1].weight", "weight is true; it must be 0 or 1"),
        (turns("hi", {"content": "x", "weight": "1"}), "messages[1].weight", 'weight is "1"; it must be 0 or 1'),
        (turns("hi", {"content": "x", "tool_calls": [{}]}), "messages[1].tool_calls", "is not supported yet"),
        ({**turns("hi", "x"), "tools": [{}]}, "tools", "unknown field: tools"),
    ],
)
def test_a_wrong_line_is_refused_by_name(text: Text, line: Any, param: str | None, reason: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(line, text)
    assert (refused.value.param, reason in refused.value.message) == (param, True), refused.value.message


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_an_example_may_fill_the_context_and_not_a_token_more(text: Text) -> None:
    size = len(read(turns("hi", "Ahoy!"), text)[0])
    assert len(read(turns("hi", "Ahoy!"), text, size)[0]) == size
    for longest in (size - 1, 4):
        with pytest.raises(ApiError, match=f"at most {longest} are taken, which is the model's context") as refused:
            read(turns("hi", "Ahoy!"), text, longest)
        assert refused.value.code == "example_too_long"


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_a_reader_reports_at_most_100_faults_and_stops(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ExampleReader(text, 4096, 1000)
    assert list(reader.examples(io.BytesIO(b"{}\n" * 500))) == [] and len(reader.faults) == 100
    reader = ExampleReader(text, 4096, 20)
    assert list(reader.examples(io.BytesIO(b"x" * 30))) == [] and reader.faults[0].code == "line_too_large"
    reader = ExampleReader(text, 4096, 1000)
    assert list(reader.examples(io.BytesIO(b"\n\n"))) == [] and reader.faults[0].code == "empty_file"
    monkeypatch.setattr(examples, "MAX_EXAMPLES", 2)
    reader = ExampleReader(text, 4096, 1000)
    line = json.dumps({"prompt": "a", "completion": "b"}).encode() + b"\n"
    assert len(list(reader.examples(io.BytesIO(line * 3)))) == 2
    assert [(fault.line, fault.message) for fault in reader.faults] == [
        (3, "the file has more than 2 examples; leave some out")
    ]


@pytest.mark.parametrize("text", [CHATML], indirect=True)
def test_reading_leaves_the_interpreter_to_others(text: Text) -> None:
    line = json.dumps(turns("hi", "Ahoy! " * 50)).encode() + b"\n"
    reader = ExampleReader(text, 4096, 10_000)
    began, used = time.perf_counter(), time.thread_time()
    assert len(list(reader.examples(io.BytesIO(line * 100)))) == 100
    assert time.thread_time() - used < 0.9 * (time.perf_counter() - began)
