"""Text: a stream's pieces join to the text of its tokens; templates render as in Transformers."""

import json
import random
import threading
import time

import jinja2
import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import processors

from holdfast.engine.client.text import (
    ID_LIMIT,
    REPLACEMENT,
    SPARE_IDS,
    STOP_LENGTH_LIMIT,
    STOP_LIMIT,
    TEXT_LIMIT,
    StopScanner,
    Text,
    TextStream,
)
from holdfast.lm.limits import CONTEXT_LENGTH_EXCEEDED, RequestRefused
from tests.tokenizers_made import byte_level, metaspace, word_piece

BYTES, SPACES, WORDS = Text(byte_level()), Text(metaspace()), Text(word_piece())

CHATML = (
    "{% for message in messages %}\n"
    "    {{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GREETING = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Größe <b>? "}]


def in_chunks(tokens, random_source):
    """These tokens in pushes of random sizes, including empty ones."""
    at = 0
    while at < len(tokens):
        size = random_source.randrange(0, 6)
        yield tokens[at : at + size]
        at += size


def streamed(text, tokens, stop=(), chunks=None):
    """The whole text that a stream returns."""
    stream = TextStream(text, stop)
    pieces = [stream.push(chunk) for chunk in (chunks if chunks is not None else [[token] for token in tokens])]
    return "".join([*pieces, stream.push([], last=True)])


def first_stop(text, stops):
    """The oracle: the text before the first complete stop string."""
    for end in range(1, len(text) + 1):
        hits = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(hits)]
    return text


@given(tokens=st.lists(st.integers(0, 340), max_size=60), source=st.randoms(use_true_random=False))
def test_any_tokens_in_any_chunks_stream_to_their_decoded_text(tokens, source):
    assert streamed(BYTES, tokens, chunks=in_chunks(tokens, source)) == BYTES.decode(tokens)


@given(written=st.text(max_size=30), source=st.randoms(use_true_random=False))
@example("hello  wörld 👩‍🚀!", random.Random(1))
@pytest.mark.parametrize("text", [BYTES, SPACES], ids=["byte-level", "metaspace"])
def test_any_text_streams_to_itself(text, written, source):
    tokens = text.encode(written)
    assert streamed(text, tokens, chunks=in_chunks(tokens, source)) == text.decode(tokens)


@given(tokens=st.lists(st.integers(0, 9), max_size=20))
def test_words_that_a_decoder_joins_by_spaces_stream_to_their_text(tokens):
    assert streamed(WORDS, tokens) == WORDS.decode(tokens)


@given(tokens=st.lists(st.integers(0, 280), max_size=40), source=st.randoms(use_true_random=False))
def test_invalid_bytes_stream_the_same_in_any_chunks(tokens, source):
    assert streamed(SPACES, tokens, chunks=in_chunks(tokens, source)) == streamed(SPACES, tokens)


def test_a_character_is_shown_with_its_last_byte():
    stream = TextStream(BYTES)
    tokens = BYTES.encode("🦜")
    assert len(tokens) > 2
    assert [stream.push([token]) for token in tokens] == [*[""] * (len(tokens) - 1), "🦜"]


def test_an_incomplete_character_at_the_end_is_the_replacement_character():
    stream = TextStream(BYTES)
    assert stream.push(BYTES.encode("a🦜")[:-1]) == "a"
    assert stream.push([], last=True) == REPLACEMENT


def test_text_before_an_incomplete_character_is_not_held_back():
    tokens = BYTES.encode("hi 🦜")
    assert TextStream(BYTES).push(tokens[:-1]) == "hi "


def test_special_tokens_add_neither_text_nor_space():
    tokens = [*SPACES.encode("hello"), 1, *SPACES.encode("hello")]
    assert streamed(SPACES, tokens) == SPACES.decode(tokens) == "hello hello"


def test_endless_invalid_bytes_are_shown_and_do_not_accumulate():
    stream = TextStream(SPACES)
    shown = sum(len(stream.push([3 + 0xFF])) for _ in range(10_000))
    assert shown > 9_900
    assert len(stream._window) < 100


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    source=st.randoms(use_true_random=False),
)
@example("aabaab", ["aabab", "baa"], random.Random(1))
def test_text_ends_before_the_first_complete_stop_string(text, stops, source):
    scanner = StopScanner(stops)
    shown = "".join("" if scanner.found else scanner.scan(chunk) for chunk in in_chunks(text, source))
    expected = first_stop(text, stops)
    assert scanner.found == any(stop in text for stop in stops)
    assert shown + ("" if scanner.found else scanner.flush()) == expected


@given(
    tokens=st.lists(st.integers(0, 340), max_size=60),
    at=st.integers(0, 60),
    length=st.integers(1, 4),
    source=st.randoms(use_true_random=False),
)
def test_a_stop_string_is_found_over_token_borders(tokens, at, length, source):
    text = BYTES.decode(tokens)
    stops = [text[at : at + length] or "absent"]
    assert streamed(BYTES, tokens, stops, in_chunks(tokens, source)) == first_stop(text, stops)


@pytest.mark.parametrize("stops", [["bcd", "d"], ["d", "bcd"], ["cd", "bcd", "d"]])
def test_of_stop_strings_that_are_complete_at_once_the_first_in_the_text_ends_it(stops):
    for tokens in (["abcd"], list("abcd")):
        scanner = StopScanner(stops)
        assert "".join(map(scanner.scan, tokens)) == "a"
        assert scanner.found


def test_text_is_held_back_while_it_may_begin_a_stop_string():
    stream = TextStream(BYTES, ["###"])
    assert stream.push(BYTES.encode("a##")) == "a"
    assert stream.push(BYTES.encode("b#")) == "##b"
    assert stream.push([], last=True) == "#"
    assert not stream.stopped


def test_nothing_is_shown_after_a_stop_string():
    stream = TextStream(BYTES, ["###"])
    assert stream.push(BYTES.encode("a##")) + stream.push(BYTES.encode("#b")) == "a"
    assert stream.stopped
    assert stream.push(BYTES.encode("more"), last=True) == ""


@pytest.mark.parametrize("stops", [["x"] * (STOP_LIMIT + 1), ["x" * (STOP_LENGTH_LIMIT + 1)]])
def test_stop_strings_are_bounded_in_number_and_length(stops):
    with pytest.raises(ValueError, match=r"stop holds .* at most"):
        TextStream(BYTES, stops)


def test_text_that_cannot_be_tokenized_is_refused():
    with pytest.raises(ValueError, match=f"at most {TEXT_LIMIT} are taken"):
        BYTES.encode("x" * (TEXT_LIMIT + 1))
    with pytest.raises(ValueError, match="unpaired surrogate at character 2"):
        BYTES.encode("ab\ud800")


def test_a_text_whose_tokens_begin_at_the_border_needs_no_text_before_it():
    assert BYTES.encode_after("before", " text") == BYTES.encode(" text", add_special_tokens=False)


@pytest.mark.parametrize("encode", [BYTES.encode, lambda text: BYTES.encode_after("before ", text)])
def test_other_threads_run_while_a_long_text_is_tokenized(encode):
    begun, done = threading.Event(), threading.Event()

    def work():
        begun.set()
        encode("hello world, naïve café " * 20_000)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    turns = 0
    while not done.is_set():
        time.sleep(0.001)
        turns += 1
    thread.join()
    assert turns > 4, "one or two if the thread kept Python to itself"


@pytest.mark.parametrize("text", [BYTES, SPACES], ids=["byte-level", "metaspace"])
def test_a_text_that_cannot_fit_the_context_is_refused_before_it_is_tokenized(text):
    longest = text._longest
    assert len(text.encode("x" * longest, most=1)) >= 1
    for refuse in (text.encode, lambda given, most: text.encode_after("before", given, most=most)):
        with pytest.raises(RequestRefused, match=f"{4 * longest + 1} bytes.* limited to 4 tokens") as refusal:
            refuse("x" * (4 * longest + 1), most=4)
        assert refusal.value.code == CONTEXT_LENGTH_EXCEEDED


def test_a_tokenizer_whose_unknown_token_stands_for_any_text_refuses_none_by_length():
    assert len(WORDS.encode("x" * 10_000, most=4)) == 1


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}{%- set ns.n = ns.n + 1 -%}{%- endfor -%}{{ ns.n }}",
        "{{ bos_token }}{{ messages | tojson(indent=2) }}{% if tools is none and not documents %}none{% endif %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ strftime_now('%Y') }}{{ missing }}{{ messages[0].missing is defined }}",
    ],
)
def test_templates_render_as_transformers_renders_them(template):
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    ours = Text(byte_level(), template, {"bos_token": "<s>", "eos_token": "</s>"})
    for prompt in (True, False):
        expected = theirs.apply_chat_template(GREETING, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(GREETING, add_generation_prompt=prompt) == expected
        ids = theirs.apply_chat_template(GREETING, add_generation_prompt=prompt, return_dict=False)
        assert ours.encode_chat(GREETING, add_generation_prompt=prompt) == ids


def test_documents_reach_a_template_as_transformers_gives_them():
    template = (
        "{% for each in documents or [] %}{{ each.title }}: {{ each['text'] }};{% endfor %}{{ messages[0].content }}"
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=template)
    ours, given = Text(byte_level(), template), [{"title": "Tides", "text": "The moon pulls."}]
    for documents in (given, None):
        expected = theirs.apply_chat_template(GREETING, tokenize=False, documents=documents)
        options = {} if documents is None else {"documents": documents}
        assert ours.render_chat(GREETING, options=options, add_generation_prompt=False) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "longer than"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "recursion"),
    ],
)
def test_an_error_in_a_template_refuses_the_messages(template, reason):
    with pytest.raises(ValueError, match=f"the chat template refused the messages: .*{reason}"):
        Text(byte_level(), template).render_chat(GREETING)


def test_a_chat_without_a_usable_template_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="no chat template; use plain completions"):
        Text(byte_level()).encode_chat(GREETING)
    broken = Text(byte_level(), "{% for %}")
    with pytest.raises(ValueError, match="cannot be compiled: Expected an expression"):
        broken.encode_chat(GREETING)


def write(directory, tokenizer=None, **files):
    """A checkpoint's text files."""
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_special_tokens_and_template_are_read_from_every_form(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ bos_token + eos_token }}"}]
    write(
        tmp_path,
        tokenizer_config={"bos_token": {"content": "<s>"}, "chat_template": named},
        special_tokens_map={"bos_token": "old", "eos_token": "</s>"},
    )
    assert Text.from_directory(tmp_path).render_chat(GREETING) == "<s></s>"
    (tmp_path / "chat_template.jinja").write_text("the file goes first")
    assert Text.from_directory(tmp_path).render_chat(GREETING) == "the file goes first"


def test_named_templates_without_a_default_are_refused(tmp_path):
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "rag", "template": ""}]})
    with pytest.raises(ValueError, match=r"none of the chat templates \['rag'\] is named 'default'"):
        Text.from_directory(tmp_path)


def test_only_completions_get_special_tokens_beyond_those_of_the_template(tmp_path):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    (tmp_path / "chat_template.jinja").write_text("<s>{{ messages[0].content }}")
    text = Text.from_directory(write(tmp_path, tokenizer))
    assert text.encode("hello") == [0, *text.encode("hello", add_special_tokens=False)]
    assert text.encode_chat([{"role": "user", "content": "hello"}]) == text.encode("hello")


def test_tokenizer_json_decides_on_bos_and_eos_as_in_transformers(tmp_path):
    tokenizer = byte_level()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": False}
    write(tmp_path, tokenizer, tokenizer_config={**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert Text.from_directory(tmp_path).encode("hello world") == theirs("hello world")["input_ids"]


def test_truncation_and_padding_of_a_tokenizer_are_ignored():
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    assert len(Text(tokenizer).encode("a")) == 1
    assert Text(tokenizer).decode(Text(tokenizer).encode("a long text")) == "a long text"


def test_a_file_that_is_not_a_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be read as a tokenizer"):
        Text.from_directory(tmp_path)


def remade(change):
    """The JSON of a tokenizer after a change to it."""
    content = json.loads(byte_level().to_str())
    change(content)
    return json.dumps(content)


def break_prefix(content):
    content["model"] |= {"continuing_subword_prefix": "##########", "merges": [["h", "e"]]}


def break_template(content):
    pieces = [{"SpecialToken": {"id": "<missing>", "type_id": 0}}]
    content["post_processor"] = dict(type="TemplateProcessing", single=pieces, pair=[], special_tokens={})


@pytest.mark.parametrize("damage", [break_prefix, break_template], ids=["while it is read", "while it is used"])
def test_a_tokenizer_that_panics_is_refused(tmp_path, damage):
    (tmp_path / "tokenizer.json").write_text(remade(damage))
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer: "):
        Text.from_directory(tmp_path)


@pytest.mark.parametrize(("sizes", "limit"), [({"vocab_size": 512}, 512), ({}, ID_LIMIT)])
def test_token_ids_far_beyond_the_vocabulary_are_refused(tmp_path, sizes, limit):
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    for beyond in (4_000_000_000, limit + SPARE_IDS):
        (tmp_path / "tokenizer.json").write_text(remade(lambda content: content["model"]["vocab"].update(zz=beyond)))  # noqa: B023
        with pytest.raises(ValueError, match=f"has a token of id {beyond}; the model's vocabulary has {limit}"):
            Text.from_directory(tmp_path)


def test_a_few_tokens_beyond_the_models_rows_are_taken(tmp_path):
    # Gemma 3's tokenizer has an image token one beyond the embedding of its text model.
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": byte_level().get_vocab_size() - 1}))
    text = Text.from_directory(write(tmp_path))
    assert text.decode(text.encode("hello")) == "hello"


def test_jinjas_version_has_no_known_sandbox_escape():
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= (3, 1, 6)


@pytest.mark.parametrize("written", ["Ahoy, sailor!", "naïve 🙂 text", "two  spaces\n"])
def test_the_bytes_of_tokens_are_the_bytes_of_their_text(written: str) -> None:
    for text in (Text(byte_level()), Text(metaspace())):
        ids = text.encode(written, add_special_tokens=False)
        assert b"".join(map(text.token_bytes, ids)).strip(b" ") == written.encode()
        assert text.token_bytes(1 << 20) == b""


def test_a_given_template_goes_before_the_checkpoints(tmp_path):
    write(tmp_path, tokenizer_config={"chat_template": "its own"})
    file = tmp_path / "other.jinja"
    file.write_text("from a file")
    assert Text.from_directory(tmp_path, str(file)).render_chat(GREETING) == "from a file"
    assert Text.from_directory(tmp_path, "{{ 'inline' }}").render_chat(GREETING) == "inline"
    with pytest.raises(ValueError, match=r"chat_template is '.*absent', which is neither a file nor the text"):
        Text.from_directory(tmp_path, str(tmp_path / "absent"))


def test_without_a_tokenizer_the_text_is_the_token_ids(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    text = Text.from_directory(tmp_path)
    stream = TextStream(text, [" 7"])
    assert stream.push([12, 5]) + stream.push([7, 1], last=True) == " 12 5"
    assert text.token_strings([3]) == [" 3"] and text.token_bytes(3) == b" 3"
    with pytest.raises(RequestRefused, match="give the prompt as token ids"):
        text.encode("words")
    with pytest.raises(ValueError, match="has no tokenizer"):
        Text.from_directory(tmp_path, "{{ 'a template needs a tokenizer' }}")
