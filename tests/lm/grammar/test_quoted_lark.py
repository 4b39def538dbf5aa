"""Grammars inside JSON: a text follows the original exactly if its JSON string follows the rewritten grammar."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from holdfast.lm.grammar.cuts import MOST_ESCAPES, MOST_TEXT
from holdfast.lm.grammar.quoted_lark import quoted_lark

BYTES = LLTokenizer("byte")
SQL = r"""
// A part of SQL.
start: select ";"
select: "SELECT"i columns "FROM" NAME where?
columns: "*" | NAME ("," NAME)*
where: "WHERE" NAME OPERATOR (STRING | SIGNED_INT)  # one condition
OPERATOR: "<" | "=" | "!="
STRING: ESCAPED_STRING | /'[^'\\\n]*'/
%import common (CNAME, ESCAPED_STRING, SIGNED_INT)
%import common.CNAME -> NAME
%import common.WS
%ignore WS
"""
CODE = r"""
start: line+
line: indent statement NEWLINE
indent: /\t/~0..2
?statement: NAME "=" value -> assign
    | "print(" value ")"
value: /"(?:[^"\\\x00-\x1f]|\\["\\n])*"/ | "\u005c" | /\p{Lu}[[:alpha:]]{2,3}/ | "a".."f"
NAME: /[a-z_]\w*/
%import common.NEWLINE
"""
BOTH = r"""
start: BOTH END?
BOTH: (A | "-\n")~2..3 [A]
A: /a\\/ | "b"
END: /\n+/
"""
PATCH = r"""
start: begin line+ end
begin: "*** Begin" LF
line: ("+" | "-") /(.*)/ LF -> line
end: "*** End" LF?
%import common.LF
"""
EXPRESSIONS = [
    ("/./", 'a \n\\"é\x00\x7f😀'),
    ("/./s", 'a \n\\"é\x00\x7f😀'),
    ("/b|(?i)q/", "bBqQ"),
    ("/[^a]/", 'ab\n\t"\\\x01é'),
    ('/[^\\n"]/', '\n"\\a'),
    ("/[\\n\\\\-\\]a-]/", "\n\\]a-b^"),
    ("/[]x]/", "]x["),
    ("/[^]x]/", "]x[\n"),
    ("/\\s/", " \t\n\x0b\x0c\r\x1c\u00a0a"),
    ("/\\S/", ' \t\n\x0b"\\a'),
    ("/[\\W_]/", 'a_1 "\\\n'),
    ("/[^\\W\\n]/", 'a_1 "\\\n'),
    ("/\\D/", "1a\n"),
    ("/[\\x00-\\x40]/", '\x00\x1f\t\n "#@A\\'),
    ("/[^\\x00-\\x40]/", '\x00\x1f\t\n "#@A\\'),
    ("/[[:punct:]]/", '"\\!a\n'),
    ("/[[:^space:]]/", '\n\t a"\x01'),
    ("/[[:cntrl:][:digit:]]/", "\n\x00\x7f5a"),
    ("/\\P{L}/", 'a\n"1'),
    ("/[\\p{P}\\pN]/", '"\\1!a'),
    ("/[A-Z]/i", "azAZ[`n"),
    ("/[^u]/i", "uU\n\x01a"),
    ("/\\u0041|\\x{1F600}|\\U0000000a/", "A😀\nB"),
    ("/\\/|\\.|~|\\-|&/", "/.~-&\\"),
    ('"n"i', "nN\n"),
    ('"\\n"i', "nN\n"),
    ('"\\x41" | "\\u0022" | "\\\\"', 'A"\\x'),
    ('"\\u007f"', "\x7f?"),
    ('"!".."}"', '!"\\}~ '),
]


def follows(grammar: str, text: str) -> bool:
    """Whether a text follows a grammar from its beginning to its end."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_bytes(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def follows_quoted(grammar: str, text: str) -> bool:
    """Whether an object with a text follows the rewritten grammar."""
    written = f'start: "{{\\"input\\": \\"" %lark {{\n{quoted_lark(grammar)}\n}} "\\"}}"\n'
    return follows(written, json.dumps({"input": text}, ensure_ascii=False))


@pytest.mark.parametrize(("expression", "characters"), EXPRESSIONS)
def test_a_character_matches_as_it_does_outside_of_json(expression: str, characters: str) -> None:
    grammar = f"start: WHOLE\nWHOLE: {expression}\n"
    found = {character: follows(grammar, character) for character in characters}
    assert {character: follows_quoted(grammar, character) for character in characters} == found
    assert set(found.values()) == {True, False} or expression == "/./s"


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (
            SQL,
            ["SELECT * FROM a;", 'select a ,\n b FROM\tc WHERE d != "x\\"y\\n" ;', "select a FROM b WHERE c = '\"';"],
        ),
        (SQL, ["SELECT * FROM a", "SELECT\x00* FROM a;", "SELECT a b FROM c;", "select a FROM b WHERE c = '\n';"]),
        (CODE, ['a="x\\n"\n', "\t\tb=Abc\n\r\nc=\\\n", "print(f)\n", 'x_1="\\\\"\n']),
        (CODE, ['a="x\n"\n', "\t\t\tb=Abc\n", "print(g)\n", "a=\n", ""]),
        ('start: a\na: a "+" a | "x\\n"', ["x\n", "x\n+x\n", "x+x", "x\n+"]),
        (PATCH, ['*** Begin\n+a\\tb "c"\n+\n-d\n*** End\n', "*** Begin\n+\\n\n*** End", "*** Begin\n+a\n"]),
        ('start: A | B "c" | C\nA: "x"\nB: "x\\n"\nC: "x" "\\"y"', ["x", "x\nc", 'x"y', "x\n"]),
        ('start: LINE "\\n" /.*;/ LINE?\nLINE: /[a-z]+(\\t[a-z]+)*/', ['a\tb\n;x";ab', "a\t\n;", "a\n;;\\;a\tb"]),
        (
            'start: BOTH END?\nBOTH: (A | "-\\n")~2..3 [A]\nA: /a\\\\/ | "b"\nEND: /\\n+/',
            ["bb", "a\\-\nb\n", "b", "bbbbb"],
        ),
        ('start: /(\\n|"){2,3}x?/', ["\n\n", '"\n"x', "\n", "\n\n\n\n"]),
    ],
)
def test_a_text_follows_a_grammar_exactly_if_its_json_does(grammar: str, texts: list[str]) -> None:
    found = {text: follows(grammar, text) for text in texts}
    assert {text: follows_quoted(grammar, text) for text in texts} == found


def test_texts_of_the_examples_follow_their_grammars() -> None:
    assert follows_quoted(SQL, "SELECT * FROM a;") and not follows_quoted(SQL, "SELECT * FROM a")
    assert follows_quoted(CODE, 'a="x\\n"\n') and not follows_quoted(CODE, 'a="x\n"\n')


def test_an_escape_is_written_in_one_way() -> None:
    grammar = f"start: %lark {{\n{quoted_lark('start: /./s')}\n}}\n"
    assert follows(grammar, "\\n") and follows(grammar, "\\u0001")
    assert not any(follows(grammar, text) for text in ("\n", "\\u000a", "\\/", "\\u0041", '"', "\\", "\\N", "\\u00"))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("", "no rule is named start"),
        ("begin: /a/", "no rule is named start"),
        ("start: 'a'", "line 1: \"'a'\" cannot be read"),
        ('start: "a', "line 1: '\"a' cannot be read"),
        ("start: A\nA.2: /a/", "line 2: a priority of A is not supported"),
        ("start: a{X}\na{x}: x", "line 2: a template of a is not supported"),
        ("start: a\na{x}: x", "line 2: a template of a is not supported"),
        ("start: <|eos|>", "line 1: <|eos|> is not supported"),
        ("start: <[5]>", "line 1: <[5]> is not supported"),
        ("start: @other", "line 1: @other is not supported"),
        ("start: %json {}", "line 1: %json is not supported"),
        ("start: %lark { start: /a/ }", "line 1: %lark is not supported"),
        ("%declare A\nstart: A", "line 1: %declare A is not supported"),
        ('%llguidance {"no_forcing": true}\nstart: /a/', 'line 1: %llguidance {"no_forcing":true} is not supported'),
        ("%import python.NAME\nstart: NAME", "line 1: %import python.NAME is not supported"),
        ("%import common.NOTHING\nstart: NOTHING", "line 1: %import common.NOTHING is not supported"),
        ("start: ~/a/", "line 1: ~, which combines expressions, is not supported"),
        ("start[max_tokens=5]: /a/", "line 1: an attribute of start is not supported"),
        ("start: /a/ }\nTEXT: /b/", "line 1: } closes nothing"),
        ("start: (/a/", "line 1: ( is not closed"),
        ('start: "ab".."c"', "line 1: one character is expected on each side"),
        ('start: "b".."a"', "line 1: the range 'b' to 'a' is empty"),
        ('start: "\\ud83d"', "half of a surrogate pair"),
        ("start: /(?=a)a/", "line 1: (?=a… is not supported"),
        ("start: /(?<!a)b/", "line 1: (?<!… is not supported"),
        ("start: /a+?/", "line 1: +?, a lazy or possessive repetition, is not supported"),
        ("start: /\\bword/", r"line 1: \b of an expression is not supported"),
        ("start: /(a)\\1/", r"line 1: \1 of an expression is not supported"),
        ("start: /a^b/", "line 1: ^ within an expression is not supported"),
        ("start: /a$|b/", "line 1: $ within an expression is not supported"),
        ("start: /[a&&b]/", "line 1: && within a class is not supported"),
        ("start: /[a[b]]/", "line 1: [b within a class is not supported"),
        ("start: /[b-a]/", "line 1: the range from 'b' in a class has no end"),
        ("start: /[a/", "line 1: a class of an expression is not closed"),
        ("start: /(a/", "line 1: a group of an expression is not closed"),
        ("start: /a)/", "line 1: a group of an expression is closed and not open"),
        ("start: /*a/", "line 1: * of an expression repeats nothing"),
        ("start: /a{b/", "line 1: { must begin a repetition"),
        ("start: /\\p{Klingon}/", r"line 1: \p{Klingon} is not supported"),
        ("start: /\\x{D800}/", r"line 1: \x{D800} is no character"),
        ("start: /a/x", "line 1: the flag x of an expression is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_line(grammar: str, reason: str) -> None:
    with pytest.raises(ValueError) as error:
        quoted_lark(grammar)
    assert reason in str(error.value)


def test_an_anchor_at_the_end_of_an_expression_says_nothing() -> None:
    assert quoted_lark("start: /^a$/") == quoted_lark("start: /a/")


def test_a_bounded_repetition_before_an_end_that_is_escaped_is_one_terminal() -> None:
    grammar = 'start: /"[^"]{0,99}"/ | /[a-z]/'
    assert follows_quoted(grammar, '"' + "\n" * 99 + '"') and not follows_quoted(grammar, '"' + "\n" * 100 + '"')


def test_a_bounded_repetition_that_an_escape_may_follow_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=f"over {MOST_ESCAPES} places"):
        quoted_lark("start: /.{1,80}/")
    assert follows_quoted("start: /.{1,8}/ /\\n/", "12345678\n")


def test_terminals_that_double_are_refused_with_the_limit() -> None:
    doubled = "".join(f"A{number}: A{number + 1} A{number + 1}\n" for number in range(40))
    with pytest.raises(ValueError, match=f"over {MOST_TEXT} characters"):
        quoted_lark(f"start: A0\n{doubled}A40: /./\n")


def test_nested_repetitions_are_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=f"over {MOST_TEXT} characters"):
        quoted_lark("start: /" + "(" * 90 + "a" * 3000 + "|\\n" + ")*" * 90 + "/")


def test_a_grammar_that_grows_too_large_is_refused_with_the_limit() -> None:
    with pytest.raises(ValueError, match=f"over {MOST_TEXT} characters"):
        quoted_lark("start: /" + "." * (MOST_TEXT // 20) + "/")


@pytest.mark.parametrize(
    "text",
    [
        "start: /" + "(" * 30_000,
        "start: /" + "[" * 30_000,
        'start: "' + "\\" * 30_000,
        "start: " + "a" * 30_000 + "!",
        "/a\n" * 10_000,
        "start: " + "(" * 30_000,
        "start: " + "<" * 30_000,
    ],
)
def test_a_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        quoted_lark(text)
