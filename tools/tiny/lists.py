"""Lists that a user keeps over a dialogue: stated, asked, added to, taken from; and groups of names."""

# ruff: noqa: E501  -- templates read best one to a line

from dataclasses import dataclass

from . import words
from .language import Sentence, expand, fill
from .words import NUMBER_WORDS, belongs, join_and
from .writer import Check, Writer, holds


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of list. Items are `names` (any proper name) or drawn from `items`."""

    name: str
    items: tuple[str, ...]
    names: bool = False
    tell: str = ""  # more ways to state and ask than every list has
    ask: str = ""
    has: str = "Your {name} has {all}.|Your {name} has {all}.|On your {name} you have {all}."
    about: str = "what is on your {name}"
    fixed: bool = False  # nothing is added or taken away


def _group(noun: str, names: tuple[str, ...]) -> Kind:
    return Kind(
        noun, names, names=True, fixed=True,
        tell=f"my {noun} are {{all}}|my {noun} are (called|named) {{all}}|the names of my {noun} are {{all}}|I have {{n}} {noun}: {{all}}|my {noun}'s names are {{all}}|I have {{n}} {noun} (named|called) {{all}}",
        ask=f"what are my {noun} called|what are the names of my {noun}|what are my {noun}'s names|who are my {noun}|do you (know|remember) the names of my {noun}|how are my {noun} called|tell me the names of my {noun}",
        has=f"Your {noun} are called {{all}}.|Your {noun} are {{all}}.|The names of your {noun} are {{all}}.", about=f"the names of your {noun}|what your {noun} are called")  # fmt: skip


_COMMON_TELL = (
    "my {name} is {all}|my {name} (has|contains) {all}|(please |)(make|start|create) a {name} (with|for|with) {all}|(please |)(put|add) {all} (on|to) my {name}|on my {name} (are|is|I have) {all}|"
    "(please |)remember my {name}: {all}|my {name}: {all}|I have {all} on my {name}|this is my {name}: {all}"
)
_COMMON_ASK = (
    "what is on my {name}|what's on my {name}|what is on my {name}( now| again|)|(show|read|tell|give) me my {name}|can you (show|tell|read) me my {name}|my {name} please|what did I put on my {name}|"
    "what was on my {name}|do you (know|remember) (my {name}|what is on my {name})|which things are on my {name}|what do I have on my {name}|list my {name}"
)
KINDS = (
    Kind("shopping list", words.GROCERIES, tell="I need to buy {all}|I want to buy {all}|I have to buy {all}|we need {all}|I need {all} from the shop",
         ask="what do I need to buy|what should I buy|what do I have to buy|what do I need from the shop|what is on my list"),
    Kind("to-do list", words.TASKS, tell="today I need to {all}|I have to {all} today|tomorrow I must {all}", ask="what do I (need|have) to do( today|)|what is on my todo list|what are my tasks"),
    Kind("packing list", words.GEAR, tell="for my trip I need {all}|I am packing {all}|for the trip I pack {all}", ask="what do I need for my trip|what should I pack|what am I packing"),
    Kind("guest list", words.NAMES, names=True, tell="I am inviting {all}|I want to invite {all}|{all} are coming to my party", ask="who is coming to my party|who am I inviting|who is on my guest list|who did I invite"),
    Kind("wish list", words.OBJECTS + words.FRUITS, ask="what do I wish for"),
    Kind("travel list", words.CITIES, names=True, tell="I want to visit {all}|I would like to see {all}|I plan to visit {all}", ask="which places do I want to visit|where do I want to travel|what do I want to see"),
    _group("children", words.NAMES), _group("kids", words.NAMES), _group("friends", words.NAMES), _group("cats", words.PET_NAMES), _group("dogs", words.PET_NAMES),
    _group("sisters", words.NAMES), _group("brothers", words.NAMES), _group("goldfish", words.PET_NAMES), _group("pets", words.PET_NAMES), _group("daughters", words.NAMES), _group("sons", words.NAMES),
    Kind("colours", words.COLOURS, fixed=True, tell="my favourite colours are {all}|I like the colours {all}", ask="what are my favourite colours|which colours do I like", has="Your favourite colours are {all}.", about="your favourite colours"),
    Kind("sports", words.SPORTS, fixed=True, tell="I play {all}|the sports I play are {all}", ask="which sports do I play|what sports do I play", has="You play {all}.", about="which sports you play"),
    Kind("languages", words.LANGUAGES, fixed=True, tell="I speak {all}|I can speak {all}", ask="which languages do I speak|what languages do I speak|what languages can I speak", has="You speak {all}.", about="which languages you speak"),
    Kind("hobbies", words.HOBBIES, fixed=True, tell="my hobbies are {all}|I enjoy {all}|I like {all}", ask="what are my hobbies|what do I enjoy|which hobbies do I have", has="Your hobbies are {all}.", about="your hobbies|what your hobbies are"),
    Kind("words", words.FRUITS + words.ANIMALS + words.OBJECTS + words.COLOURS + NUMBER_WORDS, fixed=True,
         tell="(please |)remember (these|the following|{n}) (words|things|items): {all}|(please |)(remember|memorize) {all}|(keep in mind|don't forget) these (words|things): {all}|here are {n} words( to remember|): {all}",
         ask="what (are|were) the (words|things|items)|which (words|things) did I tell you( to remember|)|what did I (ask|tell) you to remember|what are the {n} (words|things)|which {n} (words|things) did I say|tell me the (words|things) again",
         has="You asked me to remember {all}.|The words are {all}.", about="what to remember|any words to remember"),
    Kind("visited", words.COUNTRIES, names=True, fixed=True, tell="I have been to {all}|I (visited|have visited) {all}|I travelled to {all}", ask="which countries have I visited|where have I been|which countries have I been to", has="You have been to {all}.|You have visited {all}.", about="which countries you have visited"),
)  # fmt: skip
_SHOPPING = ("shopping list", "to-do list", "packing list")


@dataclass(slots=True)
class Kept:
    """The current state of a list, and the turn of its last change."""

    kind: Kind
    items: list[str]
    told: int


class Lists:
    """The lists of one dialogue."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.kept: dict[str, Kept] = {}
        self.seen: set[str] = set()  # every item that was ever on a list

    def act(self) -> None:
        """Write one turn about a list."""
        rng = self.writer.rng
        changing = [kept for kept in self.kept.values() if not kept.kind.fixed]
        if not self.kept or rng.random() < 0.25:
            self.tell() if rng.random() < 0.88 else self.ask_unknown()
        elif changing and rng.random() < 0.5:
            rng.choice((self.add, self.add, self.remove, self.has, self.count))(rng.choice(changing))
        else:
            self.ask(rng.choice(list(self.kept.values())))

    def _kind(self) -> Kind:
        return KINDS[0] if self.writer.chance(0.3) else self.writer.rng.choice(KINDS)

    def _item(self, kind: Kind) -> str:
        rng, writer = self.writer.rng, self.writer
        while True:
            item = words.proper(rng, writer.split, kind.items) if kind.names else rng.choice(kind.items)
            if not kind.names and writer.chance(0.06) and kind.name.endswith("list") and kind.name != "to-do list":
                item = words.made_up(rng)
            if (item := writer.style.value(item)) not in self.seen:
                self.seen.add(item)
                return item

    def _sentence(self, template: str, kind: Kind, **values: str) -> Sentence:
        text = expand(self.writer.rng, template.replace("{name}", kind.name))
        return Sentence(
            text,
            "?" if text.startswith(("what", "who", "where", "which", "do ", "can ", "is ", "how ")) else ".",
            values,
        )

    def _shown(self, items: list[str]) -> str:
        """The items as a user types them."""
        kind = self.writer.rng.random()
        if kind < 0.7 or len(items) < 2:
            return join_and(items)
        if kind < 0.85:
            return ", ".join(items)
        return ", ".join(items[:-1]) + ", and " + items[-1] if kind < 0.92 else " and ".join(items)

    def _has(self, kept: Kept) -> str:
        return fill(expand(self.writer.rng, kept.kind.has), {"name": kept.kind.name, "all": join_and(kept.items)})

    def _check(self, kind: str, kept: Kept, answer: str) -> Check:
        forbid = tuple(sorted(item for item in self.seen if not holds(answer, item)))
        return Check(kind, tuple(kept.items), forbid, len(self.writer.turns) - kept.told)

    def tell(self) -> None:
        rng, kind = self.writer.rng, self._kind()
        if kind.name in self.kept:
            return self.ask(self.kept[kind.name])
        while True:
            items = [
                self._item(kind)
                for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 5)) if not kind.fixed else rng.choice((2, 2, 3, 3, 4)))
            ]
            if kind.names or belongs(self.writer.split, kind.name, *items):
                break
            self.seen.difference_update(items)
        kept = self.kept[kind.name] = Kept(kind, items, len(self.writer.turns))
        template = kind.tell if kind.fixed or (kind.tell and self.writer.chance(0.4)) else _COMMON_TELL
        sentence = self._sentence(template, kind, all=self._shown(items), n=NUMBER_WORDS[len(items)])
        if kind.fixed or self.writer.chance(0.5):
            answer = expand(
                rng,
                "(Okay|Got it|Thank you|Noted|I see)(!|.) {has}|(Okay|Got it|Noted|Thank you), I will remember that(.|!)|(Noted|Okay|Got it)(!|.) I will remember (them|all of them|it).",
            )
        else:
            answer = "Okay! {has}"
        self.writer.say([sentence], answer.replace("{has}", self._has(kept)))
        return None

    def ask(self, kept: Kept) -> None:
        kind = kept.kind
        template = kind.ask if kind.fixed or (kind.ask and self.writer.chance(0.35)) else _COMMON_ASK
        answer = self._has(kept)
        asked = self._sentence(template, kind, n=NUMBER_WORDS[len(kept.items)])
        self.writer.say([asked], answer, self._check("list", kept, answer))

    def ask_unknown(self) -> None:
        kind = self._kind()
        if kind.name in self.kept:
            return self.ask(self.kept[kind.name])
        about = expand(self.writer.rng, kind.about).replace("{name}", kind.name)
        answer = expand(
            self.writer.rng,
            f"You have not told me {about}( yet|).|(I am sorry|Sorry), you have not told me {about}( yet|).",
        )
        self.writer.say(
            [self._sentence(kind.ask if kind.fixed else _COMMON_ASK, kind, n="three")],
            answer,
            Check("unknown fact", (), tuple(sorted(self.seen)), unknown=True),
        )
        return None

    def add(self, kept: Kept) -> None:
        new = [self._item(kept.kind) for _ in range(self.writer.rng.choice((1, 1, 1, 2)))]
        if len(kept.items) + len(new) > 9:
            return self.ask(kept)
        kept.items.extend(new)
        kept.told = len(self.writer.turns)
        template = "(please |)add {all} to my {name}|add {all} to (the|my) {name} (too|please|as well|)|put {all} on (my|the) {name}( too| as well|)|(can you |)(please |)add {all}( to the list| to my list| to it|)|{all} should be on my {name} too"
        if kept.kind.name in _SHOPPING:
            template += (
                "|I (also|still) need {all}" if kept.kind.name != "to-do list" else "|I also (need|have) to {all}"
            )
        answer = (
            expand(self.writer.rng, "(Okay|Done|Sure|All right)(!|.) {has}|I added {new}. {has}")
            .replace("{has}", self._has(kept))
            .replace("{new}", join_and(new))
        )
        self.writer.say(
            [self._sentence(template, kept.kind, all=self._shown(new))],
            answer,
            self._check("list change", kept, answer),
        )
        return None

    def remove(self, kept: Kept) -> None:
        if len(kept.items) < 2:
            return self.add(kept)
        gone = kept.items.pop(self.writer.rng.randrange(len(kept.items)))
        kept.told = len(self.writer.turns)
        template = "(please |)(remove|delete|take|cross) {all} (from|off) my {name}|(please |)(remove|delete) {all}( from the list| from it|)|take {all} off (the list|my {name})|I (no longer|don't) need {all}( any more|)"
        if kept.kind.name == "shopping list":
            template += "|I (bought|got|already have) (the |){all}"
        rest = self._has(kept)
        answer = expand(self.writer.rng, "(Okay|Done|Sure|All right)(!|.) {has}").replace("{has}", rest)
        self.writer.say(
            [self._sentence(template, kept.kind, all=gone)], answer, self._check("list change", kept, answer)
        )
        return None

    def has(self, kept: Kept) -> None:
        inside = self.writer.chance(0.5)
        item = self.writer.rng.choice(kept.items) if inside else self._item(kept.kind)
        kind = kept.kind
        answer = f"Yes, {item} is on your {kind.name}." if inside else f"No, {item} is not on your {kind.name}."
        ask = self._sentence(
            "is {all} on my {name}|do I have {all} on my {name}|did I put {all} on my {name}", kind, all=item
        )
        self.writer.say(
            [Sentence(ask.text, "?", ask.values)],
            answer,
            Check("yes or no", (answer.split(",")[0], item), (), len(self.writer.turns) - kept.told),
        )

    def count(self, kept: Kept) -> None:
        number = NUMBER_WORDS[len(kept.items)]
        answer = f"Your {kept.kind.name} has {join_and(kept.items)}: that makes {number}."
        ask = self._sentence(
            "how many (things|items|entries) are on my {name}|how long is my {name}|how many things do I have on my {name}",
            kept.kind,
        )
        self.writer.say([ask], answer, Check("list count", (number,), (), len(self.writer.turns) - kept.told))
