"""Generated data for the applications of holdfast.cells: expressions, dates and tagged sentences, with their answers.

All data follows from a seed. A hash of each case decides whether it is held out of training, so no list is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import date, timedelta
from random import Random
from typing import Any, NamedTuple

from holdfast.cells.applications import dates, listops


class Case(NamedTuple):
    """A request and its right answer."""

    text: str
    answer: list[Any]
    """The answer in the form of the application's last output."""


HELD_OUT = 16
"""One case in this many is held out of training."""


def held_out(key: str) -> bool:
    """Whether a case is kept for tests."""
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT == 0


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Expressions.

EXPRESSION_DEPTH, EXPRESSION_TOKENS = 6, 100
LIST_PROBABILITY = 0.25
"""Probability that a value is a list and not a digit (Nangia and Bowman)."""


def expressions(rng: Random, depth: int = EXPRESSION_DEPTH, *, test: bool) -> Iterator[Case]:
    """Expressions whose lists are nested at most `depth` deep, with their values. For a test, only held-out ones."""
    while True:
        words: list[str] = []
        _write_list(rng, depth, words)
        text = " ".join(words)
        if len(words) <= EXPRESSION_TOKENS and held_out(text) == test:
            yield Case(text, [values_of(listops.parse(text))[-1][0]])


def _write_list(rng: Random, depth: int, words: list[str]) -> None:
    words.append(f"[{rng.choice(listops.OPERATORS)}")
    for _ in range(rng.randint(listops.LEAST_VALUES, listops.MOST_VALUES)):
        if depth > 1 and rng.random() < LIST_PROBABILITY:
            _write_list(rng, depth - 1, words)
        else:
            words.append(str(rng.randrange(10)))
    words.append("]")


def value_of(operator: int, values: list[int]) -> int:
    """The result of an operator, given by its place in `listops.OPERATORS`, for these values."""
    match listops.OPERATORS[operator]:
        case "MAX":
            return max(values)
        case "MIN":
            return min(values)
        case "MED":
            ordered = sorted(values)
            return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) // 2
        case _:
            return sum(values) % 10


def values_of(tree: listops.Tree) -> list[tuple[int, list[int], bool]]:
    """For each inner node: its value, the list's values, and whether the list is closed.

    If not, both cover it so far.
    """
    leaves = len(tree.tokens)
    found: list[tuple[int, list[int], int, bool]] = []
    for left, right in zip(tree.left, tree.right, strict=True):
        if left < leaves:
            operator, values = tree.tokens[left] - listops.DIGITS, []
        else:
            _, values, operator, _ = found[left - leaves]
        closed = right < leaves and tree.tokens[right] == listops.CLOSE
        if not closed:
            values = [*values, tree.tokens[right] if right < leaves else found[right - leaves][0]]
        found.append((value_of(operator, values), values, operator, closed))
    return [(value, values, closed) for value, values, _, closed in found]


# Dates.

FIRST_DATE = date(dates.FIRST_YEAR, 1, 1)
DATES = (date(dates.LAST_YEAR + 1, 1, 1) - FIRST_DATE).days

MONTHS = _words("january february march april may june july august september october november december")
WEEKDAYS = _words("monday tuesday wednesday thursday friday saturday sunday")
ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = _words("zero ten twenty thirty forty fifty sixty seventy eighty ninety")
ORDINALS = _words(
    "zeroth first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth "
    "fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
)


def in_words(number: int, join: str) -> str:
    """A number below 100 in words, such as `twenty-one`; `join` is the hyphen."""
    if number < 20:
        return ONES[number]
    return TENS[number // 10] + (join + ONES[number % 10] if number % 10 else "")


def ordinal_in_words(number: int, join: str) -> str:
    """An ordinal below 40 in words, such as `twenty-first`."""
    if number <= 20:
        return ORDINALS[number]
    return "thirtieth" if number == 30 else TENS[number // 10] + join + ORDINALS[number % 10]


def suffix_of(number: int) -> str:
    """The ending of an ordinal in digits, such as `st` of 1st, for a number below 100."""
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number not in (11, 12, 13) else "th"


def year_in_words(rng: Random, year: int, join: str) -> str:
    """A year in words: `nineteen eighty-four`, `nineteen oh five`, `two thousand and four`, `twenty ten`."""
    century, rest = divmod(year, 100)
    if century == 20 and (rest < 10 or rng.random() < 0.3):
        return "two thousand" + (rng.choice((" ", " and ")) + in_words(rest, join) if rest else "")
    if not rest:
        return f"{in_words(century, join)} hundred"
    return f"{in_words(century, join)} " + (f"oh {ONES[rest]}" if rest < 10 else in_words(rest, join))


def write_date(rng: Random, day: date) -> str:
    """Write a date in one of many ways."""
    join = rng.choice(" -")
    month = MONTHS[day.month - 1]
    if rng.random() < 0.35:
        month = month[:3] + rng.choice(("", "."))
    number = day.day
    suffix = suffix_of(number)
    two, four = f"{day.year % 100:02}", str(day.year)
    short = dates.FIRST_SHORT_YEAR <= day.year < dates.FIRST_SHORT_YEAR + 100
    match rng.randrange(8):
        case 0 | 1:  # the third of march nineteen eighty-four
            spelled = ordinal_in_words(number, join)
            year = year_in_words(rng, day.year, join) if rng.random() < 0.7 else four
            text = f"{rng.choice(('the ', ''))}{spelled} of {month}{rng.choice((' ', ', '))}{year}"
        case 2:  # march the third, nineteen eighty-four
            spelled = ordinal_in_words(number, join)
            year = year_in_words(rng, day.year, join) if rng.random() < 0.7 else four
            text = f"{month} {rng.choice(('the ', ''))}{spelled}{rng.choice((' ', ', '))}{year}"
        case 3:  # march 3rd, 1984
            text = f"{month} {number}{rng.choice(('', suffix))}{rng.choice((' ', ', '))}{four}"
        case 4:  # 3rd of march 1984
            text = (
                f"{number}{rng.choice(('', suffix))}{rng.choice((' ', ' of '))}{month}{rng.choice((' ', ', '))}{four}"
            )
        case 5:  # 3/3/84: the month first
            year = rng.choice((two, four)) if short else four
            padded = rng.random() < 0.5
            text = f"{day.month:02}/{number:02}/{year}" if padded else f"{day.month}/{number}/{year}"
        case 6:  # 3.3.1984: the day first
            padded = rng.random() < 0.5
            text = f"{number:02}.{day.month:02}.{four}" if padded else f"{number}.{day.month}.{four}"
        case _:  # 1984-3-3, 1984/03/03
            mark = rng.choice("-/")
            padded = rng.random() < 0.5
            text = (
                f"{four}{mark}{day.month:02}{mark}{number:02}" if padded else f"{four}{mark}{day.month}{mark}{number}"
            )
    if rng.random() < 0.2:
        weekday = WEEKDAYS[day.weekday()]
        text = f"{rng.choice((weekday, weekday[:3]))}{rng.choice((' ', ', '))}{text}"
    return text


def written_dates(rng: Random, *, test: bool) -> Iterator[Case]:
    """Dates in common forms, with ISO 8601 as the answer. For a test, dates that no form of occurs in training."""
    while True:
        day = FIRST_DATE + timedelta(rng.randrange(DATES))
        if held_out(day.isoformat()) == test:
            yield Case(write_date(rng, day), [day.isoformat()])


# Sentences.

FIRST_NAMES = _words(
    "Anna Ben Clara David Emma Frank Grace Henry Ida Jack Kate Leo Maria Noah Olga Peter Rosa Sam Tom Ursula Victor "
    "Wanda Yusuf Zoe Amir Bella Carlos Diana Elif Felix Hugo Ines Jonas Keiko Lars Mina Nadia Oscar Priya Ravi"
)
SURNAMES = _words(
    "Miller Smith Garcia Khan Novak Silva Weber Rossi Tanaka Kowalski Andersen Dubois Fischer Haddad Ivanov Jensen "
    "Kumar Lopez Moreau Nguyen Okafor Patel Quinn Romero Schmidt Turner Vargas Walsh Young Zhang"
)
PLACES = _words(
    "Berlin Lisbon Madrid Oslo Rome Vienna Prague Dublin Athens Warsaw Lima Quito Cairo Nairobi Delhi Tokyo Seoul "
    "Hanoi Toronto Boston Chicago Denver Norway Spain Brazil Kenya India Japan Canada Peru Egypt Chile"
)
PEOPLE_OR_PLACES = _words("Paris Florence Sydney Jordan Georgia Austin Chester Lincoln Houston Jackson Hamilton Nelson")
PEOPLE_OR_MONTHS = _words("April May June August")
UNITS = _words(
    "boxes bottles tickets books letters euros dollars kilograms litres metres chairs apples bags lamps pages horses "
    "photographs coins bricks tables"
)
THINGS = _words("boxes letters tickets books chairs lamps photographs coins tables bags garden museum station bridge")
PERSONS = _words("teacher brother sister neighbour doctor driver friend girl boy farmer")
WORDS_OF_PERSONS = _words("my the her his our a")
MANNERS = _words("quietly again together slowly early late often alone")
VERBS = {
    "things": _words("bought sold counted lost found carried ordered"),
    "people": _words("met called thanked visited helped followed"),
    "ways": _words("came flew travelled moved drove walked"),
    "chosen": _words("remembered chose liked mentioned described"),
}
OPEN = {*THINGS, *UNITS, *PERSONS, *MANNERS, *(verb for verbs in VERBS.values() for verb in verbs)}
"""Words in lower case that a reader may not know, because the words around them are enough."""
KINDS = {
    "person": _words("guests players writers teachers winners"),
    "place": _words("towns stops places cities destinations"),
    "date": _words("years"),
    "quantity": _words("totals sums amounts"),
}
"""For each kind of list, the words that name it.

The items come many words later, and only this word shows their kind.
"""

Words = list[tuple[str, str]]
"""A sentence: words, and the tag of each."""


class SentenceWriter:
    """Writes sentences in which each word's tag follows from it and the words before it, but often not from it alone.

    May is a month or a woman, Lincoln a town or a man, 1984 a year or a number of tickets. The head of a list says what
    its items are.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def sentence(self) -> Words:
        """A sentence, of at most 60 words."""
        while True:
            words = self._sentence()
            if len(words) <= 60:
                return words

    def _sentence(self) -> Words:
        rng, words = self._rng, []
        if rng.random() < 0.3:
            words += [*self._when(), (",", "O")]
        elif rng.random() < 0.2:
            words += [*self._where(), (",", "O")]
        words += self._clause()
        while rng.random() < 0.3:
            words += [*_plain(rng.choice((", and", ", but", "because", "while"))), *self._clause()]
        first, tag = words[0]
        return [(first[0].upper() + first[1:], tag), *words[1:], (".", "O")]

    def _clause(self) -> Words:
        rng = self._rng
        match rng.randrange(7):
            case 0 | 1:
                return self._list()
            case 2:
                words = [*self._subject(), *_plain(rng.choice(VERBS["things"]))]
                words += self._quantity()
                return words + self._ending()
            case 3:
                words = [*self._subject(), *_plain(rng.choice(VERBS["people"]))]
                return [*words, *self._subject(), *self._ending()]
            case 4:
                words = [*self._subject(), *_plain(rng.choice(VERBS["ways"]))]
                return [*words, *self._journey(), *self._ending()]
            case 5:
                words = [*_plain(f"a {rng.choice(('letter', 'gift', 'call', 'message'))} from"), *self._person()]
                words += _plain("reached") + self._person()
                return words + self._ending()
            case _:
                words = [*self._subject(), *_plain(f"looked at the {rng.choice(THINGS)}")]
                return words + self._ending()

    def _list(self) -> Words:
        """A list of names: `the towns that Anna saw on 3 May with the books were Chester , Lincoln and Florence`."""
        rng = self._rng
        kind = rng.choice((*KINDS, "person", "place"))
        words = [*_plain(f"the {rng.choice(KINDS[kind])} that"), *self._subject()]
        words += _plain(rng.choice(VERBS["chosen"])) + self._ending()
        words += _plain("were")
        count = rng.randint(2, 4)
        for number in range(count):
            if number:
                words += _plain("and" if number == count - 1 else ",")
            match kind:
                case "person":
                    words += self._person()
                case "place":
                    words += self._place()
                case "date":
                    words.append((self._year(), "DATE"))
                case _:
                    words.append((rng.choice((self._year(), str(rng.randrange(2, 1000)))), "QUANTITY"))
        return words

    def _ending(self) -> Words:
        """The end of a sentence: nothing, or some of a place, a time, companions, and a number of things."""
        rng, words = self._rng, []
        choices = [self._where, self._when, self._with_whom, self._with_things, self._with_amount, self._manner]
        rng.shuffle(choices)
        for choice in choices[: rng.choice((0, 1, 1, 2, 2, 3))]:
            words += choice()
        return words

    def _subject(self) -> Words:
        """A person, with or without a name."""
        rng = self._rng
        if rng.random() < 0.8:
            return self._person()
        return _plain(f"{rng.choice(WORDS_OF_PERSONS)} {rng.choice(PERSONS)}")

    def _manner(self) -> Words:
        return _plain(self._rng.choice(MANNERS))

    def _person(self) -> Words:
        rng = self._rng
        ambiguous = (*PEOPLE_OR_PLACES, *PEOPLE_OR_MONTHS)
        first = rng.choice(ambiguous if rng.random() < 0.4 else FIRST_NAMES)
        last = rng.choice(PEOPLE_OR_PLACES if rng.random() < 0.3 else SURNAMES)
        match rng.randrange(5):
            case 0 | 1:
                return [(first, "PERSON")]
            case 2 | 3:
                return [(first, "PERSON"), (last, "PERSON")]
            case _:
                return [(rng.choice(("Dr", "Mrs", "Mr", "Professor")), "O"), (last, "PERSON")]

    def _place(self) -> Words:
        rng = self._rng
        name = rng.choice(PEOPLE_OR_PLACES if rng.random() < 0.5 else PLACES)
        prefix = rng.choice(("New", "North", "South")) if rng.random() < 0.15 else ""
        return [*([(prefix, "PLACE")] if prefix else []), (name, "PLACE")]

    def _where(self) -> Words:
        return [*_plain(self._rng.choice(("in", "near", "outside"))), *self._place()]

    def _journey(self) -> Words:
        rng = self._rng
        words = [*_plain("from"), *self._place()] if rng.random() < 0.5 else []
        return [*words, *_plain("to"), *self._place()] if rng.random() < 0.7 or not words else words

    def _with_whom(self) -> Words:
        return [*_plain("with"), *self._person()]

    def _with_things(self) -> Words:
        rng = self._rng
        return _plain(f"{rng.choice(('with', 'behind', 'despite'))} the {rng.choice(THINGS)}")

    def _with_amount(self) -> Words:
        return [*_plain(self._rng.choice(("for", "carrying", "with"))), *self._quantity()]

    def _quantity(self) -> Words:
        rng = self._rng
        match rng.randrange(4):
            case 0:
                number = [str(rng.randrange(2, 100))]
            case 1:
                number = [rng.choice((self._year(), str(rng.randrange(100, 10000))))]
            case 2:
                number = [rng.choice(ONES[2:])]
            case _:
                number = [rng.choice(TENS[2:]), *([rng.choice(ONES[1:10])] if rng.random() < 0.7 else [])]
        return [(word, "QUANTITY") for word in (*number, rng.choice(UNITS))]

    def _year(self) -> str:
        return str(self._rng.randrange(1900, 2031))

    def _when(self) -> Words:
        rng = self._rng
        month = rng.choice(MONTHS).capitalize()
        day = rng.randrange(1, 32)
        year = [(self._year(), "DATE")] if rng.random() < 0.4 else []
        match rng.randrange(6):
            case 0:
                return [("on", "O"), (str(day), "DATE"), (month, "DATE"), *year]
            case 1:
                spelled = ordinal_in_words(rng.randrange(1, 21), "-")
                return [("on", "O"), ("the", "O"), (spelled, "DATE"), ("of", "DATE"), (month, "DATE"), *year]
            case 2:
                return [(rng.choice(("since", "in", "before", "until")), "O"), (month, "DATE"), *year]
            case 3:
                return [(rng.choice(("since", "in", "before", "until")), "O"), (self._year(), "DATE")]
            case 4:
                spelled = [(f"{day}{suffix_of(day)}", "DATE")] if rng.random() < 0.6 else [(str(day), "DATE")]
                return [("on", "O"), (month, "DATE"), *spelled]
            case _:
                weekday = rng.choice(WEEKDAYS).capitalize()
                return [*_plain(rng.choice(("on", "since", "before", "until"))), (weekday, "DATE")]


def _plain(text: str) -> Words:
    return [(word, "O") for word in text.split()]


def sentences(rng: Random, *, test: bool) -> Iterator[Case]:
    """Sentences, and the tag of each word. For a test, only held-out ones."""
    writer = SentenceWriter(rng)
    while True:
        words = writer.sentence()
        text = " ".join(word for word, _ in words)
        if held_out(text) == test:
            yield Case(text, [tag for _, tag in words])


# Tests.

TEST_SEED = 1


def cases_of_test(name: str, count: int) -> list[Case]:
    """Held-out cases of an application, all different."""
    source = {"tagger": sentences, "dates": written_dates, "listops": expressions}[name]
    found: dict[str, Case] = {}
    for case in source(Random(TEST_SEED), test=True):
        found[case.text] = case
        if len(found) == count:
            return [*found.values()]
    raise AssertionError("the source of cases does not end")
