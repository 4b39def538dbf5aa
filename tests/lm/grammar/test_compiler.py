"""GrammarCompiler: grammars that it accepts, those that it refuses and why, and that compiled ones are kept."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from holdfast.core.types import Grammar
from holdfast.engine.client.text import Text
from holdfast.lm.grammar.compiler import Compiled, GrammarCompiler
from holdfast.lm.grammar.sources import GrammarError, begun
from tests.lm.grammar.conftest import END, VOCAB
from tests.lm.grammar.test_trials import nested
from tests.tokenizers_made import byte_level, metaspace, word_piece

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def accepts(compiler: GrammarCompiler, grammar: Grammar, answer: str) -> bool:
    """Whether an answer matches from its first token to its end."""
    (matcher, _), tokens = compiler.begin(grammar), compiler.tokenizer().tokenize_str(answer)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("json", json.dumps(PERSON)), '{"name": "Ada", "age": 36}', '{"name":"Ada","age":36}'),
        (Grammar("json", json.dumps(PERSON)), '{"name": "", "age": 0}', '{"age": 36, "name": "Ada"}'),
        (Grammar("regex", "[ab]+c"), "abac", "abacd"),
        (Grammar("lark", 'start: "yes" | "no"'), "no", "maybe"),
        (Grammar("lark", "start: <|assistant|> /[0-9]+/"), "", "12"),
    ],
)
def test_an_answer_matches_as_a_whole(compiler: GrammarCompiler, grammar: Grammar, right: str, wrong: str) -> None:
    assert accepts(compiler, grammar, right) or not right
    assert not accepts(compiler, grammar, wrong)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("json", '{"type": "strin"}'), "Invalid type: strin"),
        (Grammar("json", '{"type": '), "schema cannot be read"),
        (Grammar("json", '{"not": {"type": "string"}}'), 'Unimplemented keys: ["not"]'),
        (Grammar("json", '{"$ref": "#"}'), "json grammar cannot be followed: no answer matches it"),
        (Grammar("lark", 'start: start "a"'), "lark grammar cannot be followed: no answer matches it"),
        (Grammar("json", '{"items": ' * 65 + "{}" + "}" * 65), "nests 66 levels deep; at most 64"),
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("regex", "(?=a)b"), "look-ahead"),
        (Grammar("lark", "start: missing"), 'unknown name: "missing"'),
        (Grammar("lark", "start: <no_such_token>"), 'unknown special token: "<no_such_token>"'),
        (Grammar("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
        (
            Grammar("json", json.dumps({"properties": {f"p{i}": {"type": "integer"} for i in range(5500)}})),
            "too big|too long|items",
        ),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, reason: str
) -> None:
    with pytest.raises(GrammarError) as refused:
        compiler.prepare(grammar)
    message = str(refused.value)
    assert any(part in message for part in reason.split("|"))
    assert "\n" not in message and len(message) < 1200


def test_a_long_reason_is_told_with_its_end_where_the_limit_is(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match=r"parse error.*maximum number of nested parentheses.* \(\d+\)"):
        compiler.test(Grammar("regex", "(" * 5000 + "a" + ")" * 5000))


def test_the_last_grammars_are_kept_and_each_matcher_is_its_own() -> None:
    reads = []

    def read() -> str:
        reads.append(1)
        return str(byte_level().to_str())

    compiler = GrammarCompiler(read, 330, (1,), most=2)
    made: list[Grammar] = []
    one, _ = compiler.begin(Grammar("regex", "ab"))
    assert one.consume_tokens(compiler.tokenizer().tokenize_str("ab")) and one.is_accepting()
    assert not compiler.begin(Grammar("regex", "ab"))[0].is_accepting(), "another answer begins at the beginning"
    for letter in "cde":
        compiler.prepare(Grammar("regex", letter))
        made.append(Grammar("regex", letter))
    assert list(compiler._kept) == made[1:]
    assert len(reads) == 1, "the tokenizer is read once"


def test_a_grammar_that_is_used_outlives_one_that_is_not() -> None:
    compiler = GrammarCompiler(byte_level().to_str, 330, (1,), most=2)
    used, unused, new = (Grammar("regex", letter) for letter in "abc")
    compiler.prepare(used)
    compiler.prepare(unused)
    compiler.begin(used)
    compiler.prepare(new)
    assert set(compiler._kept) == {used, new}
    compiler.close()


def test_kept_grammars_are_bounded_by_their_bytes() -> None:
    compiler = GrammarCompiler(byte_level().to_str, 330, (1,), most_bytes=1 << 21, lexers=1)
    small = [Grammar("regex", f"{number}x") for number in range(3)]
    large = Grammar("regex", "(foo|bar){3}x" * 20_000)
    for grammar in small:
        compiler.prepare(grammar)
    compiler.prepare(small[0])
    assert set(compiler._kept) == set(small)
    compiler.prepare(large)
    assert compiler._kept[large].size > 1 << 21 and list(compiler._kept) == [large], "the last one is kept in any case"
    compiler.prepare(small[1])
    assert list(compiler._kept) == [small[1]]
    compiler.close()


def test_each_lexer_of_a_grammar_counts_with_its_bytes() -> None:
    one, often = Grammar("regex", "one"), Grammar("regex", "a+b")
    compiler = GrammarCompiler(byte_level().to_str, 330, (1,), lexers=3)
    compiler.prepare(one)
    compiler.prepare(often)
    compiler._most_bytes = compiler._kept[one].size + 2 * compiler._kept[often].size
    compiler.prepare(often)
    assert set(compiler._kept) == {one, often}
    compiler.prepare(often)
    assert list(compiler._kept) == [often] and len(compiler._kept[often].matchers) == 3
    compiler.close()


def test_a_lexer_that_has_exceeded_a_limit_is_kept_no_longer() -> None:
    compiler, often = GrammarCompiler(byte_level().to_str, 330, (1,), lexers=2, tested=True), Grammar("regex", "a+b")
    compiler.prepare(often)
    compiler.prepare(often)
    lexers = [lexer for _, lexer in compiler._kept[often].matchers]
    assert len(lexers) == 2 and {compiler.begin(often)[1] for _ in range(8)} <= {*lexers}
    compiler.discard(often, lexers[0])
    assert {compiler.begin(often)[1] for _ in range(2)} == {lexers[1]}
    compiler.discard(often, lexers[1])
    assert compiler.begin(often)[1] not in lexers, "it is compiled again"
    compiler.discard(Grammar("regex", "none"), 0)


def test_answers_begin_with_the_first_mask_of_their_grammar(compiler: GrammarCompiler) -> None:
    optional = {"type": "object", "properties": {f"name{at}": {"type": "string"} for at in range(1500)}}
    grammar = Grammar("json", json.dumps(optional))
    compiler.prepare(grammar)
    fresh = begun(compiler.tokenizer(), grammar)
    began = time.thread_time()
    mask = fresh.compute_bitmask()
    alone = time.thread_time() - began
    answers = [compiler.begin(grammar)[0] for _ in range(8)]
    began = time.thread_time()
    masks = [each.compute_bitmask() for each in answers]
    assert time.thread_time() - began < alone, "eight take less than one that begins by itself"
    assert set(masks) == {mask}


def test_a_compiler_of_tested_grammars_begins_no_process() -> None:
    compiler = GrammarCompiler(byte_level().to_str, 330, (1,), tested=True)
    grammar = Grammar("regex", "[ab]+c")
    compiler.prepare(grammar)
    assert compiler._trials is None and compiler._kept[grammar].size == 400 * len(grammar.text)


def test_a_hostile_grammar_is_never_compiled_here(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_made", lambda grammar: pytest.fail("it would crash"))
    for take in (compiler.test, compiler.prepare, compiler.begin):
        with pytest.raises(GrammarError, match="nests too deeply"):
            take(nested(490, 20))


def test_a_grammar_of_many_requests_has_a_lexer_for_each_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, often = GrammarCompiler(byte_level().to_str, 330, (1,), most=5, lexers=3), Grammar("regex", "a+b")
    for requests in (1, 2, 3, 3):
        compiler.prepare(often)
        lexers = [compiler.begin(often)[1] for _ in range(6)]
        assert len(set(lexers)) == requests and lexers[:requests] == lexers[requests : 2 * requests], "in turn"
    matchers = [compiler.begin(often)[0] for _ in range(3)]
    assert all(each.consume_tokens(compiler.tokenizer().tokenize_str("aab")) for each in matchers)
    monkeypatch.setattr("holdfast.lm.grammar.compiler.SHORT", 0.0)
    dear = Grammar("regex", "c")
    for _ in range(3):
        compiler.prepare(dear)
        assert compiler.begin(dear)[1] not in lexers and len(compiler._kept[dear].matchers) == 1
    for letter in "de":
        compiler.prepare(Grammar("regex", letter))
    assert often not in compiler._kept, "all its matchers count"


def test_threads_that_need_a_new_grammar_wait_for_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, compiled = GrammarCompiler(byte_level().to_str, 330, (1,)), list[Grammar]()
    compile_one = compiler._compile

    class Watched(Future[Compiled]):
        def __init__(self) -> None:
            super().__init__()
            self.asked = threading.Semaphore(0)

        def result(self, timeout: float | None = None) -> Compiled:
            self.asked.release()
            return super().result(timeout)

    def last(grammar: Grammar) -> Compiled:
        """Compile once both other threads wait."""
        compiled.append(grammar)
        watched = compiler._compiling[grammar]
        assert isinstance(watched, Watched)
        assert all(watched.asked.acquire(timeout=60) for _ in range(2))
        return compile_one(grammar)

    monkeypatch.setattr("holdfast.lm.grammar.compiler.Future", Watched)
    monkeypatch.setattr(compiler, "_compile", last)
    good, bad = Grammar("regex", "ab"), Grammar("regex", "(a")
    with ThreadPoolExecutor(6) as threads:
        running = [threads.submit(compiler.begin, grammar) for grammar in (good, bad) * 3]
    assert compiled.count(good) == 1 and len({id(each.result()[0]) for each in running[::2]}) == 3
    assert compiled.count(bad) == 1 and all(isinstance(each.exception(), GrammarError) for each in running[1::2])
    assert list(compiler._kept) == [good], "what cannot be followed is not kept"


def test_a_grammar_that_could_not_be_compiled_is_tried_anew_when_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, grammar = GrammarCompiler(byte_level().to_str, 330, (1,)), Grammar("regex", "ab")
    compile_one, failures = compiler._compile, [MemoryError("for a moment"), GrammarError("no process")]

    def at_last(grammar: Grammar) -> Compiled:
        if failures:
            raise failures.pop(0)
        return compile_one(grammar)

    monkeypatch.setattr(compiler, "_compile", at_last)
    for expected in (MemoryError, GrammarError):
        with pytest.raises(expected):
            compiler.begin(grammar)
    assert accepts(compiler, grammar, "ab") and not compiler._compiling


def test_grammars_compile_in_several_threads_at_once(compiler: GrammarCompiler) -> None:
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(5):
                assert accepts(compiler, Grammar("regex", f"x{(number + index) % 4}"), f"x{(number + index) % 4}")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize(("make", "end"), [(byte_level, "</s>"), (metaspace, "</s>")])
def test_byte_level_and_sentencepiece_vocabularies_spell_any_text(make: object, end: str) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    compiler = GrammarCompiler(tokenizer.to_str, vocab, (tokenizer.token_to_id(end),))
    text = Text(tokenizer)
    answer = 'hello "wörld" 日本 😀'
    matcher, _ = compiler.begin(Grammar("lark", "start: " + json.dumps(answer, ensure_ascii=False)))
    tokens = list(matcher.compute_ff_tokens())
    assert tokens and matcher.consume_tokens(tokens)
    while not matcher.is_stopped() and (more := matcher.compute_ff_tokens()):
        tokens += more
        assert matcher.consume_tokens(more)
    assert matcher.is_accepting()
    assert text.decode(tokens).strip() == answer


def test_an_added_token_that_the_model_has_no_logits_for_is_left_out() -> None:
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.add_special_tokens([f"<spare{number}>" for number in range(70)])
    compiler = GrammarCompiler(tokenizer.to_str, vocab, (1,))
    assert accepts(compiler, Grammar("regex", "[a-z]+"), "hello")
    with pytest.raises(GrammarError, match="unknown special token"):
        compiler.prepare(Grammar("lark", "start: <spare3>"))


def test_a_tokenizer_that_spells_no_bytes_is_refused_by_name() -> None:
    compiler = GrammarCompiler(word_piece().to_str, 10, (5,))
    with pytest.raises(GrammarError, match="tokenizer cannot follow a grammar"):
        compiler.prepare(Grammar("regex", "a"))


def test_a_model_without_an_end_token_is_refused_by_name() -> None:
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        GrammarCompiler(byte_level().to_str, 330, ()).prepare(Grammar("regex", "a"))


def test_a_mask_has_a_bit_for_each_token_and_an_even_number_of_words(compiler: GrammarCompiler) -> None:
    assert compiler.words == VOCAB // 32 and GrammarCompiler(lambda: "", 65, (END,)).words == 4
