"""GBNF as Lark: it means the same, and takes time by its length alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark as converted_by_llguidance

from holdfast.core.types import Grammar
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.gbnf import MOST_CHARACTERS, any_to_lark, gbnf_to_lark
from tests.lm.grammar.test_compiler import accepts
from tests.tokenizers_made import byte_level


@pytest.fixture(scope="module")
def plain() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(byte_level().to_str, 330, (1,))
    yield compiler
    compiler.close()


CASES = {
    "root ::= greeting \" \" name\ngreeting ::= \"hello\" | \"bye\"\nname ::= [A-Z] [a-z]*": "hello Ada|bye B",
    'root ::= ("a" | "b")+ "c"? # the end\n': "ab|abbac|b",
    "# first\n\n  root ::=\n  fooBar-baz |\n\n  [0-9]{2} # or\nfooBar-baz ::= ( \"x\"\n | \"y\" ){1, 2}": "x|yx|42",
    'root ::= "\\x41\\u00e9\\n\\"\\\\"': 'Aé\n"\\',
    "root ::= [^\\\"\\\\/\\[&&~b-d]+ [\\]\\x2d/-]": "a]|x/|aa-|A]",
    'root ::= "" | . root': "|ab",
    'root ::= a\na ::= "x" a "y" | ""\n': "xxyy|",
    'root ::= ("a"*)+ ("b" "c"){2,} "d"{0,1}': "aabcbcd|bcbc",
    'root::="a"\nunused::=root': "a",
    'root ::= "a"\r\nroot ::= "b"\r\n': "b",
}  # fmt: skip
WRONG = ["hello ada", "c", "xxx", "A", "&]", "cc", "xyy", "4", "abcd ", "\\]"]


@pytest.mark.parametrize("text", CASES)
def test_a_grammar_takes_the_answers_that_it_describes(plain: GrammarCompiler, text: str) -> None:
    grammar, right = Grammar("lark", any_to_lark(text)), CASES[text].split("|")
    assert [answer for answer in right if not accepts(plain, grammar, answer)] == []
    wrong = [each for each in WRONG if not ("." in text and len(each) > 0)]
    assert [answer for answer in wrong if accepts(plain, grammar, answer)] == []


def test_lark_stays_as_it_is_wherever_its_start_stands() -> None:
    for text in ('start: "a"', '\n\n  start : "a"', "// x\n%llguidance {}\nstart: /a/", 'A: "x"\n\tstart: A'):
        assert any_to_lark(text) == text
    with pytest.raises(ValueError, match="line 1"):
        any_to_lark('restart: "a"')


def test_random_grammars_mean_what_llguidance_takes_them_for(plain: GrammarCompiler) -> None:
    choose = random.Random(5)

    def element(depth: int) -> str:
        kind = choose.randrange(5 if depth else 3)
        times = choose.choice(["", "", "", "*", "+", "?", "{1,2}", "{2}"])
        if kind == 0:
            return choose.choice(['"a"', '"b"', '"ab"']) + times
        if kind == 1:
            return choose.choice(["[ab]", "[^a]", "[b-c]"]) + times
        if kind == 2:
            return choose.choice(["one", "two-Of"]) + times
        return f"( {alternatives(depth - 1)} ){times}"

    def alternatives(depth: int) -> str:
        return " | ".join(" ".join(element(depth) for _ in range(choose.randrange(1, 4))) for _ in range(2))

    words = ["a", "b", "ab", "ba", "aab", "abab", "bb", "c", "bcab", "ababab", ""]
    for _ in range(25):
        text = f'root ::= {alternatives(2)}\none ::= [ab] | two-Of\ntwo-Of ::= "b" "a"? | "cc"\n'
        mine, theirs = (Grammar("lark", each(text)) for each in (gbnf_to_lark, converted_by_llguidance))
        assert [accepts(plain, mine, word) for word in words] == [accepts(plain, theirs, word) for word in words], text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('root ::= "a', "line 1"),
        ('root ::= "a"\nb "c"', "line 2.*::= is expected"),
        ('root ::= "a" )', "not '\\)'"),
        ("root ::= ( a", "not ''"),
        ("root ::= *", "not '\\*'"),
        ('root ::= "a"* *', "not '\\*'"),
        ("root ::= missing", "'missing' is mentioned and not defined"),
        ('rot ::= "a"', "no rule is named root"),
        ('root ::= "\\q"', "no character"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "\\udbff"', "no character"),
        ('root ::= "\\udc00"', "no character"),
        ('root ::= "\\udfff"', "no character"),
        ('root ::= "\\U00110000"', "no character"),
        ("root ::= []", "a set with characters"),
        ('root ::= a-b a_b\na-b ::= "a"\na_b ::= "b"', "named as another"),
        ("root ::= " + "(" * 65 + '"a"' + ")" * 65, "at most 64 parentheses"),
        ("#" * (MOST_CHARACTERS + 1), f"65537 characters; at most {MOST_CHARACTERS}"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        any_to_lark(text)
    assert len(str(refused.value)) < 300


def test_the_characters_next_to_those_that_are_none_are_taken(plain: GrammarCompiler) -> None:
    for code in ("ud7ff", "ue000", "U0010FFFF"):
        grammar = Grammar("lark", any_to_lark(f'root ::= "\\{code}"'))
        assert accepts(plain, grammar, chr(int(code[1:], 16)))


@pytest.mark.parametrize(
    "piece",
    ["\n", " \n", '"a" ', "#\n", "\\", "[", "root ::= ", "a{1", "(", "x ::= y\n", "start \n", "| ", '"\\"', "a?\n"],
)
def test_each_character_is_read_a_bounded_number_of_times(piece: str) -> None:
    # By a quadratic scan this takes minutes. `any_to_lark` looks for Lark in texts of any length.
    for begin in ("", "root ::= "):
        text = begin + piece * ((MOST_CHARACTERS - len(begin)) // len(piece))
        for given in (text, text * 4):
            with suppress(ValueError):
                any_to_lark(given)


def test_a_rule_that_mentions_the_root_is_no_terminal() -> None:
    assert "\nagain: start\n" in gbnf_to_lark('root ::= "a"\nagain ::= root\n')


def test_a_long_chain_of_rules_is_converted_in_one_pass() -> None:
    count = 4000
    text = "root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(count)) + f'r{count} ::= "a"\n'
    assert f'R{count - 1}: R{count}\nR{count}: "a"\n' in gbnf_to_lark(text)
