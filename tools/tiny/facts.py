"""Facts that people state about themselves and others: their subject, and how they are stated, asked and answered."""

# ruff: noqa: E501  -- a table of templates read best one to a line

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from . import words
from .language import expand, fill
from .words import Split

Sampler = Callable[[Random, Split], str]


@dataclass(frozen=True, slots=True)
class Entity:
    """The subject of a fact. `kind`: me, person (my sister), pet (my dog), named (Tom), thing (my locker code)."""

    kind: str
    noun: str = ""
    pronoun: str = ""  # she, he or nothing
    the: bool = False  # "the password", not "my password"

    def fields(self, rng: Random, voice: str, pronoun: bool = False) -> dict[str, str]:
        """Grammar for templates: {I} {my} {am} {was} {do} {have} {s} {Im}. `voice`: user or assistant."""
        if self.kind == "me":
            if voice == "user":
                return {"I": "I", "my": "my", "am": "am", "was": "was", "do": "do", "have": "have", "s": "",
                        "Im": "I'm" if rng.random() < 0.6 else "I am"}  # fmt: skip
            return {"I": "you", "my": "your", "am": "are", "was": "were", "do": "do", "have": "have", "s": "",
                    "Im": "you are"}  # fmt: skip
        if pronoun and self.pronoun:
            who, whose = self.pronoun, "her" if self.pronoun == "she" else "his"
        elif self.kind == "named":
            who, whose = "{who}", "{who}'s"
        else:
            mine = "the" if self.the else "my" if voice == "user" else "your"
            who = f"{mine} {self.noun}"
            whose = who + "'s"
        if self.noun in words.PLURALS:
            return {"I": who, "my": whose, "am": "are", "was": "were", "do": "do", "have": "have", "s": "",
                    "Im": who + " are", "noun": self.noun}  # fmt: skip
        return {"I": who, "my": whose, "am": "is", "was": "was", "do": "does", "have": "has", "s": "s",
                "Im": who + " is", "noun": self.noun}  # fmt: skip


ME = Entity("me")


@dataclass(frozen=True, slots=True)
class Attribute:
    """A kind of fact. Templates are in the speaker's voice; {v} is the value."""

    key: str
    type: str  # values of one type compete: a wrong one in an answer is an error
    value: Sampler
    of: str  # kinds of entity, by letter: m(e), p(erson), a(nimal), n(amed), t(hing)
    tell: str
    ask: str
    clause: str  # the fact as a clause, for answers
    about: str  # the fact as an indirect question
    change: str = ""
    ack: str = ""
    short: str = "{v}"  # the answer to `prompt`
    prompt: str = ""  # the assistant asks for it
    check: str = ""  # a yes/no question
    who: str = ""  # "who" has this value
    proper: bool = False  # values are names, which have their own split between train and heldout


def sample(rng: Random, split: Split, entity: Entity, attribute: Attribute) -> str | None:
    """A value of `split`; None if a closed list has none for this entity and attribute."""
    for _ in range(20):
        value = attribute.value(rng, split)
        if attribute.proper or words.belongs(split, entity.noun, attribute.key, value):
            return value
    return None


def clause(rng: Random, entity: Entity, attribute: Attribute, value: str, voice: str, pronoun: bool = False) -> str:
    """`you live in Lisbon`: the fact in that voice, without capital or full stop."""
    text = fill(expand(rng, attribute.clause), entity.fields(rng, voice, pronoun))
    return fill(text, {"v": value, "who": entity.noun})


# --- values ---


def _from(items: tuple[str, ...]) -> Sampler:
    return lambda rng, split: items[int(rng.random() * len(items))]


def _proper(items: tuple[str, ...]) -> Sampler:
    return lambda rng, split: words.proper(rng, split, items)


def person_name(rng: Random, split: Split) -> str:
    name = words.proper(rng, split, words.NAMES)
    if rng.random() < 0.06:
        name += " " + words.proper(rng, split, words.SURNAMES)
    return name


def small_number(rng: Random, split: Split) -> str:
    number = rng.choice(
        (
            rng.randint(2, 5),
            rng.randint(2, 12),
            rng.randint(2, 20),
            rng.randint(2, 12),
            rng.randint(2, 40),
            rng.randint(2, 400),
        )
    )
    return words.NUMBER_WORDS[number] if number <= 20 and rng.random() < 0.6 else str(number)


def _age(rng: Random, split: Split) -> str:
    number = rng.randint(2, 99)
    return words.NUMBER_WORDS[number] if number <= 20 and rng.random() < 0.3 else str(number)


def _date(rng: Random) -> str:
    day, month = rng.randint(1, 28), rng.choice(words.MONTHS)
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(day % 10 if day not in (11, 12, 13) else 0, "th")
    return rng.choice((f"{month} {day}", f"{day} {month}", f"{month} {day}{suffix}", f"the {day}{suffix} of {month}"))


def _clock(rng: Random) -> str:
    hour = rng.randint(1, 12)
    return rng.choice((f"{hour} pm", f"{hour}pm", f"{hour}am", f"{hour} am", f"{hour}:{rng.choice(('00', '15', '30', '45', '10', '20'))}",
                       f"{words.NUMBER_WORDS[hour]} o'clock", f"{rng.randint(7, 22)}:{rng.choice(('00', '15', '30', '45'))}",
                       "noon"))  # fmt: skip


def _when(rng: Random, split: Split) -> str:
    place = rng.choice(
        (
            f"in room {rng.randint(1, 400)}",
            f"in {words.proper(rng, split, words.CITIES)}",
            f"at {words.proper(rng, split, words.CITIES)}",
        )
    )
    return _time(rng) + (" " + place if rng.random() < 0.1 else "")


def _spot(rng: Random, split: Split) -> str:
    kind = rng.random()
    if kind < 0.75:
        return rng.choice(words.SPOTS)
    if kind < 0.85:
        return rng.choice(
            (
                f"on level {rng.randint(1, 9)}",
                f"in room {rng.randint(1, 400)}",
                f"on floor {rng.randint(1, 30)}",
                f"in row {rng.randint(1, 40)}",
            )
        )
    return rng.choice(("on {} Street", "in {} Street", "in {}", "at {} Square", "near {}")).format(
        words.proper(rng, split, words.CITIES)
    )


def _time(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.3:
        return f"on {rng.choice(words.DAYS)} at {_clock(rng)}"
    if kind < 0.5:
        return f"on {rng.choice(words.DAYS)}"
    if kind < 0.65:
        return "at " + _clock(rng)
    if kind < 0.8:
        return rng.choice(("tomorrow", "next week", "next month", "tonight", "on the weekend", "tomorrow morning",
                           "this evening", "tomorrow at " + _clock(rng), "next " + rng.choice(words.DAYS)))  # fmt: skip
    return "on " + _date(rng)


def _title(rng: Random, split: Split) -> str:
    adjective = rng.choice(
        [
            "Silent",
            "Golden",
            "Broken",
            "Hidden",
            "Last",
            "First",
            "Blue",
            "Red",
            "Lost",
            "Secret",
            "Old",
            "Little",
            "Burning",
            "Endless",
            "Quiet",
            "Dark",
        ]
    )
    noun = rng.choice(
        [
            "Garden",
            "River",
            "Mountain",
            "Sea",
            "House",
            "Forest",
            "Star",
            "Night",
            "Winter",
            "King",
            "Letter",
            "Bridge",
            "Window",
            "Island",
            "Dream",
            "Train",
        ]
    )
    return rng.choice((f"The {adjective} {noun}", f"{adjective} {noun}", words.proper(rng, split, words.CITIES), f"The {words.proper(rng, split, words.NAMES)}",
                       f"The {noun} of {words.proper(rng, split, words.CITIES)}"))  # fmt: skip


def _secret(rng: Random, split: Split) -> str:
    kind = rng.random()
    if kind < 0.3:
        return "".join(rng.choice("0123456789") for _ in range(rng.randint(2, 7)))
    if kind < 0.4:
        return rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") + str(rng.randint(1, 999))
    if kind < 0.45:
        return str(rng.randint(1, 99)) + rng.choice("ABCDEF")
    if kind < 0.5:
        return f"{rng.randint(100, 999)}-{rng.randint(1000, 9999)}"
    if kind < 0.7:
        return words.made_up(rng)
    if kind < 0.75:
        return f"{rng.choice(words.COLOURS)} {rng.choice(words.ANIMALS)}"
    if kind < 0.8:
        return rng.choice(words.FRUITS + words.ANIMALS + words.COLOURS)
    if kind < 0.85:
        return words.made_up(rng) + str(rng.randint(0, 99))
    return words.proper(rng, split, words.NAMES + words.CITIES)


def _coded(rng: Random, split: Split) -> str:
    while not words.belongs(split, value := _secret(rng, split)):
        pass
    return value


def _car(rng: Random, split: Split) -> str:
    brand = rng.choice(words.CARS)
    return words.a_or_an(brand) if rng.random() < 0.5 else f"a {rng.choice(words.COLOURS[:11])} {brand}"


# --- attributes ---

ATTRIBUTES: list[Attribute] = [
    Attribute(
        "name", "name", person_name, "m",
        tell="my name is {v}|my name is {v}|{Im} {v}|{Im} {v}|call me {v}|(you can|please|just) call me {v}|this is {v}|"
        "my name's {v}|the name is {v}|I go by {v}|(people|my friends|everybody) call(s|) me {v}|{v} is my name|"
        "(hi|hello|hey), {Im} {v}|my (first|full|real) name is {v}",
        ask="what is my name|what's my name|what is my name|who am I|what am I called|can you (tell me|say) my name|"
        "(and|so|now|hey|okay), what is my name|what was my name( again|)|do you (know|remember|recall) my name|"
        "(please|) tell me my name|say my name|what name did I (tell|give) you|remind me of my name|how am I called|"
        "do you (know|remember) who I am|what did I say my name was|name (please|)",
        clause="{my} name is {v}|{my} name is {v}|{my} name is {v}|{I} {am} {v}",
        about="{my} name|what {my} name is|who {I} {am}",
        change="(actually|sorry), my name is {v}|(actually|no), {Im} {v}|please call me {v} (instead|from now on)|"
        "I (changed|have changed) my name to {v}|my name is (now|really|actually) {v}|no( wait|), my name is {v}|(oh |)wait, my name is {v}",
        ack="nice to meet you, {v}|nice to meet you, {v}|(hello|hi), {v}|it is (lovely|good|great) to meet you, {v}|welcome, {v}|"
        "pleased to meet you, {v}",
        short="{v}|{v}|(it's|I'm|it is) {v}|my name is {v}", prompt="what is your name|may I ask your name|what should I call you",
        check="is my name {v}|am I {v}|am I called {v}", proper=True),
    Attribute(
        "name", "name", person_name, "p",
        tell="{my} name is {v}|{I} is (called|named) {v}|{I} is (called|named) {v}|{my} name's {v}|I have a {noun} (called|named) {v}|"
        "I have a {noun}, {v}|{v} is my {noun}|the name of my {noun} is {v}|my {noun}, {v}, is (very|really|) (nice|kind|funny|busy)|"
        "my {noun} {v} is (visiting me|here|coming over|great)",
        ask="what is {my} name|what's {my} name|what is {my} name|who is {I}|what is {I} called|do you (know|remember) {my} name|"
        "can you tell me {my} name|what did I say {my} name was|how is {I} called|what was {my} name( again|)|tell me {my} name|"
        "what is the name of {I}",
        clause="{my} name is {v}|{my} name is {v}|{I} is called {v}", about="{my} name|what {my} name is|the name of {I}",
        change="(actually|sorry), {my} name is {v}|{my} name is (really|actually) {v}|no, {I} is called {v}",
        ack="{v} is a (nice|lovely|beautiful|good) name|say hello to {v} (from|for) me|{v} sounds nice|I am glad to hear about {v}",
        short="{v}|(her|his|their|the) name is {v}|{v}", check="is {my} name {v}|is {I} called {v}", who="who is {v}", proper=True),
    Attribute(
        "name", "name", lambda rng, split: words.proper(rng, split, words.PET_NAMES), "a",
        tell="{my} name is {v}|{I} is (called|named) {v}|I have a {noun} (called|named) {v}|I have a {noun}, (its|his|her) name is {v}|"
        "the name of my {noun} is {v}|I (got|adopted|bought) a {noun} (named|called) {v}|{v} is my {noun}|my {noun}'s called {v}|"
        "I've got a {noun} (called|named) {v}|we have a {noun} called {v}|my {noun} {v} is (sleeping|cute|hungry|so funny)",
        ask="what is {my} name|what's {my} name|what is {I} called|what did I (name|call) {I}|do you (know|remember) {my} name|"
        "what was {my} name( again|)|can you tell me {my} name|what is the name of {I}|how is {I} called|who is {I}",
        clause="{my} name is {v}|{my} name is {v}|{I} is called {v}", about="{my} name|what {my} name is|the name of {I}",
        change="(actually|sorry), {my} name is {v}|I renamed {I} to {v}|{my} name is (now|really|actually) {v}",
        ack="{v} is a (nice|lovely|cute|fun) name for a {noun}|{v} sounds (adorable|lovely|cute)|give {v} a treat from me|how sweet",
        check="is {my} name {v}|is {I} called {v}", who="who is {v}", proper=True),
    Attribute(
        "home", "place", _proper(words.CITIES), "mmpn",
        tell="{I} live{s} in {v}|{I} live{s} in {v}|{I} live{s} (over |) in {v} (now|these days|with a cat|near the river|)|{my} home is in {v}|"
        "{Im} living in {v}|{Im} based in {v}|{I} {have} a (flat|house) in {v}|{I} moved to {v} (last year|years ago|recently|)",
        ask="where {do} {I} live|where {do} {I} live|where {do} {I} live (now|again|)|(which|what) (city|town|place) {do} {I} live in|"
        "in (which|what) (city|town) {do} {I} live|where is {my} home|where {am} {I} living|where did I say {I} live{s}|"
        "what is {my} home town|what is {my} (city|hometown)|where {am} {I} based",
        clause="{I} live{s} in {v}", about="where {I} live{s}|where {I} live{s}|(which|what) city {I} live{s} in",
        change="(actually|sorry), {I} live{s} in {v}|{I} moved to {v}|{I} just moved to {v}|{I} live{s} in {v} now|"
        "{I} {have} moved from there to {v}|{I} no longer live{s} there, {Im} in {v} now",
        ack="{v} sounds (lovely|wonderful|like a nice place|great)|I hear {v} is (nice|beautiful|lovely)|"
        "{v} must be a (nice|lovely|good) place to live|I would love to see {v}",
        short="{v}|in {v}|I live in {v}|{v}, (near|by) the (sea|river|park)", prompt="where do you live|which city do you live in",
        check="{do} {I} live in {v}", who="who lives in {v}|who is living in {v}", proper=True),
    Attribute(
        "origin", "place", _proper(words.CITIES), "mpn",
        tell="{Im} from {v}|{I} come{s} from {v}|{Im} originally from {v}|{I} grew up in {v}|{I} {was} born in {v}",
        ask="where {am} {I} from|where {do} {I} come from|where {am} {I} originally from|where did {I} grow up|where {was} {I} born|"
        "which (city|town|place) {am} {I} from",
        clause="{I} {am} from {v}|{I} come{s} from {v}", about="where {I} {am} from|where {I} come{s} from",
        change="(actually|sorry), {Im} from {v}|no, {I} come{s} from {v}",
        ack="{v} sounds (lovely|interesting)|I hear {v} is (nice|beautiful)|{v} must be a nice place to grow up",
        short="{v}|from {v}|I'm from {v}", prompt="where are you from", check="{am} {I} from {v}|{do} {I} come from {v}",
        who="who is from {v}|who comes from {v}", proper=True),
    Attribute(
        "job", "job", _from(words.JOBS), "mmpn",
        tell="{Im} {v}|{I} work{s} as {v}|{I} work{s} as {v}|{my} job is being {v}|{I} {am} {v} (by profession|)|{I} earn{s} a living as {v}",
        ask="what {do} {I} do for a living|what is {my} job|what's {my} job|what is {my} (profession|occupation|work)|what {do} {I} work as|"
        "what {do} {I} do for work|what kind of (work|job) {do} {I} (do|have)|what {am} {I} by profession|what {do} {I} do",
        clause="{I} {am} {v}|{I} work{s} as {v}", about="what {I} {do} for a living|what {my} job is|{my} job",
        change="{I} changed jobs, now {Im} {v}|(actually|sorry), {Im} {v}|{Im} now {v}|{I} {have} a new job as {v}",
        ack="that is (an interesting|a great|an important|a good) job|that sounds like (interesting|hard|important|fun) work|how interesting",
        short="{v}|I am {v}|I work as {v}|I'm {v}", prompt="what do you do for a living|what is your job",
        check="{am} {I} {v}|{do} {I} work as {v}", who="who is {v}|who works as {v}"),
    Attribute(
        "age", "age", _age, "mpan",
        tell="{Im} {v} years old|{Im} {v} years old|{Im} {v}|{I} turned {v} (last week|yesterday|today|this year|)|{my} age is {v}",
        ask="how old {am} {I}|what is {my} age|what's {my} age|how many years old {am} {I}|how old did I say {I} {am}",
        clause="{I} {am} {v} years old", about="how old {I} {am}|{my} age",
        change="(actually|sorry), {Im} {v} years old|{Im} {v} now|it was {my} birthday, {Im} {v} now|{I} just turned {v}",
        ack="that is a (good|great|fine|nice) age|{v} is a (good|great|fine) age",
        short="{v}|{v} years old|I am {v}|I'm {v} years old", prompt="how old are you", check="{am} {I} {v} (years old|)"),
    Attribute(
        "birthday", "date", lambda rng, split: _date(rng), "mpn",
        tell="{my} birthday is (on|) {v}|{my} birthday is {v}|{I} celebrate{s} {my} birthday on {v}",
        ask="when is {my} birthday|what day is {my} birthday|when {do} {I} celebrate {my} birthday|what is the date of {my} birthday|what is {my} birthday",
        clause="{my} birthday is on {v}", about="when {my} birthday is|{my} birthday",
        change="(actually|sorry), {my} birthday is on {v}", ack="I will remember (that|the day)|I hope there will be cake",
        short="{v}|on {v}|it is on {v}", prompt="when is your birthday", check="is {my} birthday on {v}"),
    Attribute(
        "year", "year", lambda rng, split: str(rng.randint(1920, 2020)), "mpn",
        tell="{I} {was} born in {v}|{my} birth year is {v}|{my} year of birth is {v}",
        ask="(what|which) year {was} {I} born( in|)|in (what|which) year {was} {I} born|what is {my} (birth year|year of birth)",
        clause="{I} {was} born in {v}", about="(what|which) year {I} {was} born in",
        change="(actually|sorry), {I} {was} born in {v}", ack="{v} was a good year|noted", check="{was} {I} born in {v}"),
    Attribute(
        "hobby", "hobby", _from(words.HOBBIES), "mpn",
        tell="{I} (like|love|enjoy){s} {v}|{I} really (like|love|enjoy){s} {v}|{my} hobby is {v}|{my} (main|favourite|favorite) hobby is {v}|"
        "in {my} free time {I} enjoy{s} {v}|{Im} (really|) into {v}",
        ask="what is {my} hobby|what {do} {I} like (doing|to do)|what {do} {I} enjoy (doing|)|what's {my} (favourite|favorite|) hobby|"
        "what {do} {I} do in {my} free time|what {am} {I} into|what {do} {I} like",
        clause="{I} enjoy{s} {v}|{I} like{s} {v}", about="what {I} like{s} to do|what {my} hobby is|{my} hobby",
        change="(actually|these days) {I} prefer{s} {v}|{my} new hobby is {v}",
        ack="{v} (is|sounds like) (fun|a nice hobby|a lovely hobby|great fun)|that sounds like fun",
        short="{v}|I like {v}|I enjoy {v}|{v}, mostly", prompt="what do you like to do|do you have a hobby", check="{do} {I} (like|enjoy) {v}", who="who likes {v}"),
    Attribute(
        "hobby", "liking", _from(words.FOODS + words.DRINKS + words.LIKINGS), "mpn",
        tell="{I} (like|love){s} {v}|{I} (really|) (like|love){s} {v}|{I} (like|love){s} {v} (very much|a lot|so much|)",
        ask="what {do} {I} (like|love)|what {do} {I} (really|) (like|love)|what did I say {I} like{s}", clause="{I} like{s} {v}|{I} love{s} {v}",
        about="what {I} (like|love){s}", change="(actually|these days) {I} prefer{s} {v}", ack="(good|great|nice|fine) choice|I can (see|understand) (that|why)|who does not like {v}",
        check="{do} {I} (like|love) {v}", who="who (likes|loves) {v}"),
    Attribute(
        "dislike", "dislike", _from(words.FOODS + words.DRINKS + words.LIKINGS), "mpn",
        tell="{I} hate{s} {v}|{I} {do} not like {v}|{I} dislike{s} {v}|{I} {do} not like {v} (at all|)|{I} can't stand {v}",
        ask="what {do} {I} (hate|dislike)|what {do} {I} not like|what can't {I} stand", clause="{I} {do} not like {v}", about="what {I} {do} not like",
        ack="(I see|fair enough|I understand|that is fine)|not everybody likes {v}", check="{do} {I} (hate|dislike) {v}", who="who (hates|does not like) {v}"),
    Attribute(
        "pet", "pet", _from(tuple(words.a_or_an(pet) for pet in words.PETS)), "mpn",
        tell="{I} {have} {v}|{I} {have} {v} (at home|)|{I} (got|adopted|bought) {v}|{my} pet is {v}", ask="(what|which) (pet|animal) {do} {I} have|what kind of pet {do} {I} have|what is {my} pet|{do} {I} have a pet",
        clause="{I} {have} {v}", about="(what|which) pet {I} {have}", ack="how (cute|nice|lovely)|{v} is a (good|nice|lovely) pet|what is it called", check="{do} {I} have {v}", who="who has {v}"),
    Attribute(
        "allergy", "allergy", _from(words.ALLERGIES), "mpn",
        tell="{Im} allergic to {v}|{Im} (very|really|) allergic to {v}|{I} {have} an allergy to {v}",
        ask="what {am} {I} allergic to|what allergy {do} {I} have|which allergy {do} {I} have|what is {my} allergy",
        clause="{I} {am} allergic to {v}", about="what {I} {am} allergic to",
        ack="that must be (difficult|annoying)|I will keep that in mind|thank you for telling me", check="{am} {I} allergic to {v}", who="who is allergic to {v}"),
    Attribute(
        "instrument", "instrument", _from(words.INSTRUMENTS), "mpn",
        tell="{I} play{s} {v}|{I} can play {v}|{Im} learning (to play|) {v}|{I} play{s} {v} in a band",
        ask="what instrument {do} {I} play|which instrument {do} {I} play|what {do} {I} play|what instrument can {I} play",
        clause="{I} play{s} {v}", about="(which|what) instrument {I} play{s}",
        change="{I} play{s} {v} now|(actually|sorry), {I} play{s} {v}", ack="how (nice|lovely|musical)|I love music|that takes a lot of practice",
        check="{do} {I} play {v}", who="who plays {v}"),
    Attribute(
        "language", "language", _from(words.LANGUAGES), "mpn",
        tell="{I} speak{s} {v}|{I} speak{s} {v} (at home|fluently|a little|)|{my} (native language|mother tongue) is {v}",
        ask="(what|which) language {do} {I} speak|what is {my} (native language|mother tongue)|what {do} {I} speak",
        clause="{I} speak{s} {v}", about="(which|what) language {I} speak{s}", change="(actually|sorry), {I} speak{s} {v}",
        ack="{v} is a (beautiful|lovely|interesting) language|how interesting", check="{do} {I} speak {v}", who="who speaks {v}"),
    Attribute(
        "study", "subject", _from(words.SUBJECTS), "mpn",
        tell="{Im} studying {v}|{I} studied {v} at (university|college|school)|{Im} a student of {v}",
        ask="what {am} {I} studying|what {do} {I} study|what subject {do} {I} study|what did {I} study",
        clause="{I} {am} studying {v}", about="what {I} {am} studying",
        change="{I} switched to {v}|{Im} studying {v} now", ack="{v} is (fascinating|interesting|a great subject)|good luck with that",
        short="{v}|I study {v}", prompt="what are you studying", check="{am} {I} studying {v}", who="who is studying {v}|who studies {v}"),
    Attribute(
        "car", "car", _car, "mpn",
        tell="{I} drive{s} {v}|{I} {have} {v}|{I} own{s} {v}|{I} (bought|got) {v}|{my} car is {v}",
        ask="what (kind of|) car {do} {I} (drive|have|own)|what {do} {I} drive|what is {my} car|(which|what) car {do} {I} drive",
        clause="{I} drive{s} {v}", about="what car {I} drive{s}|(which|what) car {I} {have}",
        change="{I} sold it and bought {v}|{I} (now|) drive{s} {v} now", ack="nice car|that sounds like a (good|nice) car|drive safely",
        check="{do} {I} drive {v}", who="who drives {v}"),
    Attribute(
        "company", "company", lambda rng, split: words.proper(rng, split, words.SURNAMES) + rng.choice(("", "", "", " Labs", " Books", " Systems", " Foods")), "mpn",
        tell="{I} work{s} (at|for) {v}|{I} work{s} (at|for) {v}|{my} (company|employer) is (called|) {v}|{I} {have} a job at {v}",
        ask="where {do} {I} work|(who|which company) {do} {I} work for|what company {do} {I} work (for|at)|what is {my} (company|employer)|what is the name of {my} company",
        clause="{I} work{s} at {v}|{I} work{s} for {v}", about="where {I} work{s}|which company {I} work{s} for",
        change="{I} work{s} (at|for) {v} now|{I} left, now {I} work{s} at {v}", ack="{v} sounds like a (good|nice) place to work|I hope the work is fun",
        short="{v}|at {v}|I work at {v}|for {v}", prompt="where do you work", check="{do} {I} work (at|for) {v}", who="who works (at|for) {v}", proper=True),
    Attribute(
        "trip", "place", _proper(words.CITIES), "mpn",
        tell="{Im} (going|travelling|flying) to {v} (next week|next month|in summer|on holiday|soon|tomorrow)|{my} next trip is to {v}|"
        "{Im} planning a trip to {v}",
        ask="where {am} {I} (going|travelling|flying)( to|)( soon| on holiday| next|)|where is {my} (next|) trip (to|going)|what is {my} travel destination",
        clause="{I} {am} going to {v}", about="where {I} {am} (going|travelling)",
        change="(actually|now) {Im} going to {v}( instead|)|the trip goes to {v} now", ack="have a (good|great|nice|safe) trip|{v} sounds like a (great|nice) trip",
        short="to {v}|{v}", prompt="where will you go next", check="{am} {I} (going|travelling) to {v}", who="who is going to {v}", proper=True),
    Attribute(
        "height", "height", lambda rng, split: f"{rng.randint(120, 205)} cm", "mpn",
        tell="{Im} {v} tall|{my} height is {v}", ask="how tall {am} {I}|what is {my} height", clause="{I} {am} {v} tall",
        about="how tall {I} {am}|{my} height", ack="noted|that is (good to know|quite tall)", check="{am} {I} {v} tall"),
    Attribute(
        "eyes", "colour", _from(("blue", "brown", "green", "grey", "hazel", "dark brown", "light blue", "amber")), "mpn",
        tell="{my} eyes are {v}|{I} {have} {v} eyes", ask="what (colour|color) are {my} eyes|what is {my} eye (colour|color)",
        clause="{my} eyes are {v}", about="(what|which) colour {my} eyes are", ack="how (nice|pretty)|{v} eyes are (beautiful|lovely)",
        check="are {my} eyes {v}", who="who has {v} eyes"),
    Attribute(
        "fur", "colour", _from(words.COLOURS), "a",
        tell="{I} is {v}|{my} fur is {v}|{I} is {v} (and small|and big|and very cute|)", ask="what (colour|color) is {I}|what is the (colour|color) of {I}",
        clause="{I} is {v}", about="(what|which) colour {I} is", ack="how (cute|pretty|nice)|a {v} {noun} sounds (cute|lovely)", check="is {I} {v}"),
    Attribute(
        "secret", "secret", _coded, "tttt",
        tell="{I} is {v}|{I} is {v}|{I} is (called|) {v}|{I} is {v} (by the way|, don't forget it|, please remember it|)|"
        "(please|) remember that {I} is {v}|(please|) remember {I}: {v}|{I}: {v}|{I} will be {v}|note that {I} is {v}|{v} is {I}|"
        "(please|) (keep in mind|don't forget) that {I} is {v}",
        ask="what is {I}|what's {I}|what is {I}|what was {I}( again|)|what is {I} (called|)|tell me {I}|can you (tell|give) me {I}|{I} please|do you (know|remember) {I}|"
        "what did I say {I} was|remind me of {I}|give me {I}",
        clause="{I} is {v}", about="what {I} is|{I}|what {I} is",
        change="(actually|sorry), {I} is {v}|I changed {I} to {v}|{I} is now {v}|no, {I} is {v}|{I} (has changed|changed) to {v}",
        ack="I will remember it|noted|I will keep it in mind|your (secret|information) is safe with me", check="is {I} {v}", proper=True),
    Attribute(
        "spot", "spot", _spot, "o",
        tell="{I} {am} {v}|I (put|left|placed|hid) {I} {v}|I (put|left|placed) {I} {v}|{I} {am} {v} (now|)|remember that {I} {am} {v}|I keep {I} {v}|I parked {I} {v}|I forgot {I} {v}|"
        "(please|) remember, {I} {am} {v}",
        ask="where {am} {I}|where did I (put|leave|place|hide|park) {I}|where can I find {I}|where do I keep {I}|where {was} {I}( again|)|I can't find {I}",
        clause="{I} {am} {v}", about="where {I} {am}|where {I} {am}", change="I moved {I}, now {I} {am} {v}|{I} {am} {v} now|(actually|sorry), {I} {am} {v}|now {I} {am} {v}",
        ack="I will remember that|noted|good to know|I will help you find it later", check="{am} {I} {v}"),
    Attribute(
        "when", "when", _when, "e",
        tell="{I} is {v}|{I} is {v}|I have a {noun} {v}|there is a {noun} {v}|{I} takes place {v}|remember that {I} is {v}|{I} starts {v}",
        ask="when is {I}|when is {I}|when do I have {I}|when does {I} (start|take place)|what time is {I}|when was {I}( again|)|on what day is {I}",
        clause="{I} is {v}", about="when {I} is", change="{I} (was moved|has been moved), it is {v} now|{I} is now {v}|(actually|sorry), {I} is {v}|{I} has changed, it is {v}",
        ack="I will remember that|noted|I hope it goes well|good luck|thanks for telling me", check="is {I} {v}"),
]  # fmt: skip


def _favourite(noun: str, values: Sampler, proper: bool = False, spelling: str = "") -> Attribute:
    best = f"(favourite|favorite|favourite) {spelling or noun}"
    return Attribute(
        "favourite " + noun, "favourite " + noun, values, "mpn",
        tell=f"{{my}} {best} is {{v}}|{{my}} {best} is {{v}}|{{my}} {best} has always been {{v}}|{{v}} is {{my}} {best}|"
        f"{{I}} like{{s}} {{v}} the most, it is {{my}} {best}",
        ask=f"what is {{my}} {best}|what's {{my}} {best}|what is {{my}} {best}|(which|what) {spelling or noun} {{do}} {{I}} like (best|most|the most)|"
        f"can you (tell me|remember) {{my}} {best}|tell me {{my}} {best}|what did I say {{my}} {best} was|what was {{my}} {best}( again|)",
        clause=f"{{my}} favourite {noun} is {{v}}", about=f"{{my}} favourite {noun}|what {{my}} favourite {noun} is|{{my}} favourite {noun}",
        change=f"(actually|sorry), {{my}} {best} is {{v}}|{{my}} {best} is now {{v}}|I changed my mind, {{my}} {best} is {{v}}|now {{my}} {best} is {{v}}|"
        f"no, {{my}} {best} is {{v}}",
        ack="(good|nice|great|lovely) choice|{v} is a (good|nice|great) choice|{v} sounds (nice|good|lovely)|I like the sound of that",
        short="{v}|(it's|it is) {v}|{v}, (I think|of course)|probably {v}", prompt=f"what is your favourite {noun}",
        check=f"is {{my}} {best} {{v}}|is {{v}} {{my}} {best}", who=f"whose {best} is {{v}}", proper=proper)  # fmt: skip


FAVOURITES = [
    _favourite("colour", _from(words.COLOURS), spelling="(colour|color)"), _favourite("food", _from(words.FOODS)),
    _favourite("fruit", _from(words.FRUITS)), _favourite("drink", _from(words.DRINKS)), _favourite("animal", _from(words.ANIMALS)),
    _favourite("sport", _from(words.SPORTS)), _favourite("season", _from(words.SEASONS)), _favourite("day", _from(words.DAYS)),
    _favourite("number", lambda rng, split: str(rng.randint(1, rng.choice((10, 100, 1000))))), _favourite("subject", _from(words.SUBJECTS)),
    _favourite("city", _proper(words.CITIES), proper=True), _favourite("country", _proper(words.COUNTRIES), proper=True),
    _favourite("book", _title), _favourite("movie", _title, spelling="(movie|film)"), _favourite("song", _title), _favourite("band", _title),
    _favourite("dish", _from(words.FOODS)), _favourite("month", _from(words.MONTHS)), _favourite("hobby", _from(words.HOBBIES)),
    _favourite("ice cream", _from(("vanilla", "strawberry", "chocolate", "lemon", "mango", "pistachio", "hazelnut", "mint", "coffee"))),
]  # fmt: skip
ATTRIBUTES += FAVOURITES


def count_of(noun: str) -> Attribute:
    """The number of things that somebody has: `you have three cats`."""
    return Attribute(
        "count " + noun, "count", small_number, "mpn",
        tell=f"{{I}} {{have}} {{v}} {noun}|{{I}} {{have}} {{v}} {noun}|{{I}} {{have}} {{v}} {noun} (at home|in total|)|{{I}} own{{s}} {{v}} {noun}|"
        f"{{I}} {{have}} got {{v}} {noun}",
        ask=f"how many {noun} {{do}} {{I}} have|how many {noun} {{do}} {{I}} have|how many {noun} {{do}} {{I}} (own|have got)|what number of {noun} {{do}} {{I}} have|"
        f"how many {noun} did I say {{I}} {{have}}|how many {noun}",
        clause=f"{{I}} {{have}} {{v}} {noun}", about=f"how many {noun} {{I}} {{have}}",
        change=f"(actually|sorry), {{I}} {{have}} {{v}} {noun}|now {{I}} {{have}} {{v}} {noun}|{{I}} {{have}} {{v}} {noun} now",
        ack=f"{{v}} {noun}, how (nice|lovely)|{{v}} {noun}! That sounds (nice|fun|lovely)|wow, {{v}} {noun}|that is a lot of {noun}",
        short=f"{{v}}|I have {{v}}|{{v}} {noun}", check=f"{{do}} {{I}} have {{v}} {noun}", who=f"who has {{v}} {noun}")  # fmt: skip


def _meal(meal: str) -> Attribute:
    return Attribute(
        meal, "food", _from(words.FOODS), "m",
        tell=f"I had {{v}} for {meal}|I ate {{v}} for {meal}|{meal} was {{v}} (today|)|for {meal} I had {{v}}",
        ask=f"what did I (have|eat) for {meal}|what was (my|for) {meal}|do you remember what I (ate|had) for {meal}",
        clause=f"{{I}} had {{v}} for {meal}", about=f"what {{I}} had for {meal}", change=f"(actually|sorry), I had {{v}} for {meal}",
        ack="that sounds (tasty|delicious|yummy)|yum|I hope it was tasty", check=f"did I have {{v}} for {meal}")  # fmt: skip


ATTRIBUTES += [_meal(meal) for meal in ("breakfast", "lunch", "dinner")]

_KINDS = {"me": "m", "person": "p", "pet": "a", "named": "n", "thing": "t", "object": "o", "event": "e"}


def attributes_of(entity: Entity) -> list[Attribute]:
    """The attributes that this entity can have. More likely ones appear more than once."""
    return _BY_KIND[_KINDS[entity.kind]]


_BY_KIND = {
    letter: [attribute for attribute in ATTRIBUTES for _ in range(attribute.of.count(letter))] for letter in "mpantoe"
}
