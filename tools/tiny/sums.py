"""Simple arithmetic: sums as people type them, word problems, comparisons, counting aloud."""

# ruff: noqa: E501  -- templates read best one to a line

from dataclasses import dataclass
from random import Random

from .language import expand, fill
from .words import GOODS, NAMES, NUMBER_WORDS, Split, belongs, proper

ASKS = {
    "+": "what is {a} plus {b}|what is {a} plus {b}|what's {a} plus {b}|what is {a} + {b}|what's {a} + {b}|{a} + {b}|{a}+{b}|{a} plus {b}|how much is {a} plus {b}|how much is {a} + {b}|add {a} and {b}|calculate {a} + {b}|"
    "compute {a} + {b}|(what is|) the sum of {a} and {b}|can you add {a} and {b}|can you tell me what {a} plus {b} is|{a} + {b} =|{a}+{b}=|what do you get if you add {a} and {b}|do you know what {a} plus {b} is|"
    "what does {a} plus {b} make|{a} and {b} makes what|(add|sum) {a} and {b} (please|)|what is {a}+{b}|whats {a}+{b}|tell me {a} plus {b}",
    "-": "what is {a} minus {b}|what is {a} minus {b}|what's {a} minus {b}|what is {a} - {b}|{a} - {b}|{a}-{b}|{a} minus {b}|how much is {a} minus {b}|how much is {a} - {b}|subtract {b} from {a}|calculate {a} - {b}|"
    "take {b} away from {a}|{a} - {b} =|{a}-{b}=|what do you get if you subtract {b} from {a}|what is the difference (of|between) {a} and {b}|what is {a}-{b}|tell me {a} minus {b}",
    "*": "what is {a} times {b}|what is {a} times {b}|what's {a} times {b}|what is {a} * {b}|what is {a} x {b}|{a} * {b}|{a}*{b}|{a} x {b}|{a} times {b}|how much is {a} times {b}|multiply {a} (by|and|with) {b}|calculate {a} * {b}|"
    "what is {a} multiplied by {b}|{a} x {b} =|{a}*{b}=|the product of {a} and {b}|what is {a}*{b}|tell me {a} times {b}",
    "/": "what is {a} divided by {b}|what's {a} divided by {b}|what is {a} / {b}|{a} / {b}|{a}/{b}|{a} divided by {b}|how much is {a} divided by {b}|divide {a} by {b}|calculate {a} / {b}|{a}/{b}=|tell me {a} divided by {b}",
}  # fmt: skip
_CONTINUED = {
    "+": "(now |and |)add {b}( to that| to it|)|plus {b}|and plus {b}|(and |)what is that plus {b}|what if you add {b}",
    "-": "(now |and |)subtract {b}( from that|)|minus {b}|and minus {b}|(and |)what is that minus {b}|take {b} away from that",
    "*": "(now |and |)(multiply that by|times) {b}|(and |)what is that times {b}",
}
_WORDS = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
_KINDS = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}
_ANSWERS = (
    "{a} {word} {b} is {r}.|{a} {word} {b} is {r}.|{a} {op} {b} = {r}.|{a} {op} {b} = {r}.|{a} {word} {b} (equals|makes) {r}.|That is easy: {a} {word} {b} is {r}.|"
    "(Let me see|Sure|The answer): {a} {op} {b} = {r}.|That is {r}.|The answer is {r}.|(It is|That makes) {r}."
)


@dataclass(frozen=True, slots=True)
class Sum:
    """A question, its answer, and the number that must be the last in it."""

    kind: str
    question: str
    answer: str
    result: int

    @staticmethod
    def make(rng: Random, a: int, op: str, b: int, asks: dict[str, str]) -> "Sum":
        result = {"+": a + b, "-": a - b, "*": a * b, "/": a // max(b, 1)}[op]
        shown = [
            NUMBER_WORDS[n] if 0 <= n <= 20 and worded else str(n) for n in (a, b) for worded in (rng.random() < 0.08,)
        ]
        question = fill(expand(rng, asks[op]), {"a": shown[0], "b": shown[1]})
        fields = {"a": str(a), "b": str(b), "r": str(result), "word": _WORDS[op], "op": "x" if op == "*" else op}
        answer = fill(expand(rng, _ANSWERS), fields)
        size = "small " if max(a, b) < 10 else "two-digit " if max(a, b) < 100 else "three-digit "
        return Sum(size + _KINDS[op] if op in "+-" else _KINDS[op], question, answer, result)

    @staticmethod
    def continued(rng: Random, split: Split, last: int) -> "Sum":
        """A sum that goes on from the last result."""
        for _ in range(20):
            op, b = rng.choice("++-*"), rng.randint(1, 20)
            if op == "*":
                b = rng.randint(2, 5)
            if (
                0 <= last <= (200 if op == "*" else 999)
                and not (op == "-" and b > last)
                and belongs(split, f"{last}{op}{b}")
            ):
                return Sum.make(rng, last, op, b, _CONTINUED)
        return draw_sum(rng, split)


def draw_sum(rng: Random, split: Split) -> Sum:
    """A sum: additions and subtractions to three digits, tables to 12 and a little beyond, divisions without remainder."""
    while True:
        op = rng.choice("++++---**/")
        top = rng.choice((10, 10, 20, 100, 100, 100, 100, 1000))
        a, b = rng.randint(0 if op != "*" else 1, top), rng.randint(1, rng.choice((top, top, 10)))
        if op == "*":
            a, b = (
                (rng.randint(1, 12), rng.randint(1, 12))
                if rng.random() < 0.75
                else (rng.randint(10, 99), rng.randint(2, 9))
            )
            if rng.random() < 0.3:
                a, b = b, a
        elif op == "/":
            b = rng.randint(1, 12)
            a = b * rng.randint(1, 12)
        elif op == "-" and a < b and rng.random() < 0.85:
            a, b = b, a
        if belongs(split, f"{a}{op}{b}"):
            return Sum.make(rng, a, op, b, ASKS)


def word_problem(rng: Random, split: Split) -> tuple[str, str, str, str]:
    """A word problem: kind, question, answer, result."""
    while True:
        noun, plus = rng.choice(GOODS), rng.random() < 0.55
        a, b = rng.randint(2, rng.choice((12, 30, 80))), rng.randint(1, rng.choice((10, 20)))
        if belongs(split, f"{a}{'+' if plus else '-'}{b}") and (plus or b < a):
            break
    name = proper(rng, split, NAMES)
    who, have = rng.choice((("if I", "have"), ("if I", "have"), (name, "has"), (f"if {name}", "has")))
    if plus:
        verb = rng.choice(("get", "buy", "find")) + ("" if have == "have" else "s")
        question = f"{who} {have} {a} {noun} and {verb} {b} more, how many {noun} " + rng.choice(
            ("are there", "is that", "are there in total", "does that make")
        )
        answer, result = f"{a} + {b} = {a + b}, so there are {a + b} {noun}.", a + b
    else:
        verb = (
            rng.choice(("lose", "sell", "give away"))
            if have == "have"
            else rng.choice(("loses", "sells", "gives away"))
        )
        question = f"{who} {have} {a} {noun} and {verb} {b}, how many {noun} " + rng.choice(
            ("are left", "remain", "are there now")
        )
        answer, result = f"{a} - {b} = {a - b}, so there are {a - b} {noun} left.", a - b
    return "word problem", question, answer, str(result)


def three_numbers(rng: Random, split: Split) -> tuple[str, str, str, str]:
    """A sum of three numbers: kind, question, answer, result."""
    while True:
        a, b, c = (rng.randint(1, rng.choice((10, 20))) for _ in range(3))
        if belongs(split, f"{a}+{b}+{c}"):
            break
    question = expand(
        rng,
        f"what is {a} + {b} + {c}|{a} + {b} + {c}|{a}+{b}+{c}|what is {a} plus {b} plus {c}|add {a}, {b} and {c}|(what is|) the sum of {a}, {b} and {c}",
    )
    return "three numbers", question, f"{a} + {b} + {c} = {a + b} + {c} = {a + b + c}.", str(a + b + c)


def comparison(rng: Random, split: Split) -> tuple[str, str, str, str]:
    """A comparison: kind, question, answer, result."""
    top = rng.choice((20, 100, 1000))
    while True:
        a, b = rng.randint(0, top), rng.randint(0, top)
        if a != b and belongs(split, f"{a}>{b}"):
            break
    larger = rng.random() < 0.6
    word = rng.choice(("bigger", "larger", "greater")) if larger else rng.choice(("smaller", "less"))
    question = expand(rng, f"which (number|one|) is {word}, {a} or {b}|what is {word}, {a} or {b}|is {a} or {b} {word}")
    result = max(a, b) if larger else min(a, b)
    return (
        "comparison",
        question,
        expand(rng, f"The {'larger' if larger else 'smaller'} (number|one) is {result}.|It is {result}."),
        str(result),
    )


def count_aloud(rng: Random, split: Split) -> tuple[str, str, str, str]:
    """A task to count, such as `count from 3 to 9`: kind, question, answer, result."""
    start, step = (1, 1) if rng.random() < 0.55 else (rng.randint(0, 60), rng.choice((1, 1, 2)))
    count = rng.choice((5, 10, 10, 20, 20, 12, 15, 30, rng.randint(3, 25)))
    numbers = list(range(start, start + count * step, step))
    last = numbers[-1]
    if step == 2:
        question = expand(
            rng, f"count by twos from {start} to {last}|count from {start} to {last} (in steps of two|by twos)"
        )
    elif rng.random() < 0.25:
        question = expand(rng, f"count (down|backwards) from {last} to {start}|count backwards from {last} to {start}")
        numbers.reverse()
    elif start == 1:
        question = expand(
            rng,
            f"count to {last}|count from 1 to {last}|(please|can you) count to {last}|can you count from 1 to {last}|count up to {last}|count from one to {last}",
        )
    else:
        question = expand(rng, f"count from {start} to {last}|(please|can you) count from {start} to {last}")
    return "counting", question, ", ".join(map(str, numbers)) + ".", str(numbers[-1])
