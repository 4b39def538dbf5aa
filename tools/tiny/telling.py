"""Turns in which a fact is stated or changed, and how the assistant takes note."""

# ruff: noqa: E501  -- templates read best one to a line

import re

from . import phrases, words
from .facts import ME, Attribute, Entity, attributes_of, clause, count_of, sample
from .language import Sentence, capital, expand, fill
from .words import join_and
from .writer import Check, Fact, Writer

_WRAPS = (
    "(please |)remember that|(can|could) you remember that|don't forget that|(please |)note that|fun fact:|by the way,|just so you know,|I want you to know that|"
    "did you know that|let me tell you that|you should know that|well,|I think I told you that|keep in mind that|oh, and"
)

# Several facts in one sentence: the text, and for each value its subject and its kind of fact.
_INTRODUCTIONS: tuple[tuple[str, dict[str, str]], ...] = (
    (
        "(I'm|I am|my name is|this is) {a} from {b}|(I'm|I am|my name is) {a} and (I'm|I am|I come) from {b}|(I'm|I am) {a}, from {b}|(it's|this is) {a} from {b}",
        {"a": "me name", "b": "me origin"},
    ),
    (
        "(I'm|I am|my name is) {a} and (I live|I'm living|live) in {b}|(I'm|I am|my name is) {a}, I live in {b}|(I'm|I am) {a} and I am based in {b}",
        {"a": "me name", "b": "me home"},
    ),
    (
        "(I'm|I am|my name is) {a} and (I'm|I am|) {b} years old|(I'm|I am|my name is) {a}, {b} years old|(I'm|I am) {a}, {b}|my name is {a}, I'm {b}",
        {"a": "me name", "b": "me age"},
    ),
    (
        "(I'm|I am|my name is) {a}, {b} from {c}|(I'm|I am|my name is) {a}, {b}, from {c}|(I'm|I am) {a}, I'm {b} from {c}",
        {"a": "me name", "b": "me job", "c": "me origin"},
    ),
    (
        "(I'm|I am|my name is) {a}, {b} years old(,| and) from {c}|(I'm|I am) {a}, {b}, (and I'm |)from {c}",
        {"a": "me name", "b": "me age", "c": "me origin"},
    ),
    (
        "(I'm|I am|my name is) {a}, (I'm|I am|and I'm) {b}(,| and) I live in {c}|(I'm|I am|my name is) {a}, I'm {b} and I work as {d} in {c}",
        {"a": "me name", "b": "me age", "c": "me home", "d": "me job"},
    ),
    (
        "I live in {a} (and|where I) work as {b}|I'm {b} and (I |)live in {a}|I am {b}, living in {a}",
        {"a": "me home", "b": "me job"},
    ),
    ("I live in {a} with my (PET|PET named|PET called) {b}", {"a": "me home", "b": "PET name"}),
    (
        "I have a PET (called|named) {a} and a PET2 (called|named) {b}|my PET is called {a} and my PET2 is called {b}|my PET is called {a} and my PET2 {b}",
        {"a": "PET name", "b": "PET2 name"},
    ),
    (
        "my REL {a} lives in {b}|I have a REL (called|named) {a} (in|who lives in) {b}|my REL {a} is living in {b}",
        {"a": "REL name", "b": "REL home"},
    ),
    (
        "my REL {a} is {b} years old|I have a REL (called|named) {a} who is {b} years old|my REL {a} is {b}",
        {"a": "REL name", "b": "REL age"},
    ),
    (
        "my REL {a} is {b}|my REL {a} works as {b}|I have a REL (called|named) {a} who is {b}",
        {"a": "REL name", "b": "REL job"},
    ),
    (
        "my REL is called {a} and my REL2 is called {b}|my REL's name is {a} and my REL2's name is {b}|my REL is {a} and my REL2 is {b}|my REL {a} and my REL2 {b} are (here|visiting me|coming over)",
        {"a": "REL name", "b": "REL2 name"},
    ),
    ("my REL is {a} (years old |)and my REL2 is {b}( years old|)", {"a": "REL age", "b": "REL2 age"}),
    ("my REL lives in {a} and my REL2 (lives |)in {b}", {"a": "REL home", "b": "REL2 home"}),
    (
        "I have {a} COUNT and {b} COUNT2|I have {a} COUNT and I have {b} COUNT2|I own {a} COUNT and {b} COUNT2|I have got {a} COUNT and {b} COUNT2",
        {"a": "me count COUNT", "b": "me count COUNT2"},
    ),
    (
        "I have {a} COUNT, {b} COUNT2 and {c} COUNT3|at home I have {a} COUNT, {b} COUNT2 and {c} COUNT3",
        {"a": "me count COUNT", "b": "me count COUNT2", "c": "me count COUNT3"},
    ),
)


def introduce(writer: Writer) -> None:
    """State several facts in one sentence: `I'm Ada, a nurse from Lisbon`."""
    rng = writer.rng
    template, values = rng.choice(_INTRODUCTIONS)
    nouns: dict[str, str] = {}
    for word, source in (("REL", tuple(words.RELATIONS)), ("PET", words.PETS), ("COUNT", words.COUNTABLES)):
        chosen = rng.sample(source, 3)
        nouns |= {f"{word}3": chosen[2], f"{word}2": chosen[1], word: chosen[0]}
    text = _named(expand(rng, template), nouns)
    told: dict[str, tuple[Entity, Attribute, str]] = {}
    for letter, what in values.items():
        if f"{{{letter}}}" not in text:
            continue
        who, _, key = what.partition(" ")
        noun = nouns.get(who, "")
        entity = (
            ME
            if who == "me"
            else Entity("pet", noun)
            if who.startswith("PET")
            else Entity("person", noun, words.RELATIONS[noun])
        )
        attribute = (
            count_of(nouns[key.split()[1]])
            if key.startswith("count")
            else next(a for a in attributes_of(entity) if a.key == key)
        )
        value = sample(rng, writer.split, entity, attribute)
        taken = [v for _, other, v in told.values() if other.type == attribute.type] + writer.values.get(
            attribute.type, []
        )
        if (
            value is None
            or writer.style.value(value) in taken
            or (entity, attribute.key) in writer.facts
            or writer.clashes(entity)
        ):
            return tell(writer)
        told[letter] = (entity, attribute, writer.style.value(value))
    sentences = [Sentence(text, rng.choice(".!"), {letter: value for letter, (_, _, value) in told.items()})]
    if not writer.turns and writer.chance(0.6):
        sentences.insert(0, Sentence(expand(rng, "hi|hello|hey|hi there|hello there|good morning"), rng.choice("!.,")))
    acknowledge(writer, sentences, [writer.learn(*fact) for fact in told.values()])
    return None


def _named(text: str, nouns: dict[str, str]) -> str:
    return re.sub(r"\b(REL|PET|COUNT)\d?\b", lambda match: nouns[match.group()], text)


def tell(writer: Writer) -> None:
    """State one to three facts in one message."""
    told: list[Fact] = []
    sentences: list[Sentence] = []
    if (not writer.turns and writer.chance(0.6)) or writer.chance(0.04):
        sentences.append(
            Sentence(
                expand(writer.rng, "hi|hello|hey|hi there|hello there|good morning|good evening"),
                writer.rng.choice("!.,"),
            )
        )
    for index in range(writer.rng.choice((1, 1, 1, 1, 2, 2, 3))):
        same = told and told[-1].entity.kind in ("me", "person", "pet", "named") and writer.chance(0.7)
        drawn = writer.draw_fact(told[-1].entity if same else None)
        if drawn is None or (drawn[0].kind == "named" and told and told[-1].entity != drawn[0]):
            break
        entity, attribute, value = drawn
        spoken = writer.alias(entity, attribute)
        pronoun = bool(told) and told[-1].entity == entity and writer.chance(0.8)
        sentence = tell_sentence(writer, spoken, attribute, value, index, pronoun=pronoun)
        if told and writer.chance(0.5):
            joined = sentences.pop()
            sentence = Sentence(
                joined.text + writer.rng.choice((" and ", " and ", ", ", " and ")) + sentence.text,
                ".",
                {**joined.values, **sentence.values},
            )
        sentences.append(sentence)
        told.append(writer.learn(entity, attribute, value))
    if told:
        acknowledge(writer, sentences, told)


def tell_sentence(
    writer: Writer,
    entity: Entity,
    attribute: Attribute,
    value: str,
    index: int,
    template: str = "",
    pronoun: bool = False,
) -> Sentence:
    wrapped = not template and not pronoun and writer.chance(0.1)
    text = expand(writer.rng, template or (attribute.clause if wrapped else attribute.tell))
    text = fill(text, entity.fields(writer.rng, "user", pronoun))
    if wrapped:
        text = expand(writer.rng, _WRAPS) + " " + text
    text = text.replace("{v}", f"{{v{index}}}").replace("{who}", f"{{who{index}}}")
    return Sentence(text, writer.rng.choice((".", ".", ".", "!")), {f"v{index}": value, f"who{index}": entity.noun})


def acknowledge(writer: Writer, sentences: list[Sentence], told: list[Fact]) -> None:
    """Answer to stated facts; at times with a question, which the next message may answer."""
    rng = writer.rng
    answer = ""
    first = told[0]
    kind = rng.random()
    if first.attribute.ack and (kind < 0.65 or first.attribute.key == "name"):
        answer = fill(expand(rng, first.attribute.ack), {"v": first.value, "noun": first.entity.noun})
        starts_with_value = answer.startswith(first.value)
        answer = rng.choice(("Ah, ", "Oh, ", "I see, ")) + answer if starts_with_value else capital(answer)
        if kind < 0.2 and not starts_with_value:
            answer = expand(rng, phrases.ACKS) + rng.choice("!.") + " " + answer
        answer += rng.choice("!.") if answer[-1] not in "!." else ""
    echoed = told if not answer else told[1:] if len(told) > 1 else told if kind > 0.4 else []
    if echoed:
        clauses = join_and([clause(rng, fact.entity, fact.attribute, fact.value, "assistant") for fact in echoed])
        answer += " " + expand(
            rng, "I will remember that {clauses}.|I will remember that {clauses}.|I will keep in mind that {clauses}." if answer
            else phrases.ACKS + "(,|. So|, so|:) {clauses}.|" + phrases.ACKS + "(!|.) I will remember that {clauses}.",
        ).replace("{clauses}", clauses)  # fmt: skip
        answer = answer.strip()
    prompt = draw_prompt(writer) if writer.chance(0.14) else None
    if prompt is None:
        writer.say(sentences, answer)
        return
    writer.say(sentences, answer + " " + capital(expand(rng, prompt[0].prompt)) + "?", leads=True)
    attribute, value = prompt
    if writer.chance(0.8):
        sentence = tell_sentence(writer, ME, attribute, value, 0, attribute.short)
        acknowledge(writer, [sentence], [writer.learn(ME, attribute, value)])


def draw_prompt(writer: Writer) -> tuple[Attribute, str] | None:
    """A question of the assistant to the user, and the user's answer."""
    open_ = [a for a in attributes_of(ME) if a.prompt and (ME, a.key) not in writer.facts]
    if not open_:
        return None
    attribute = writer.rng.choice(open_)
    value = sample(writer.rng, writer.split, ME, attribute)
    if value is None or value in writer.values.get(attribute.type, ()):
        return None
    return attribute, writer.style.value(value)


def change(writer: Writer) -> None:
    """Change a fact that was stated earlier."""
    facts = [fact for fact in writer.facts.values() if fact.attribute.change]
    if not facts:
        return tell(writer)
    fact = writer.rng.choice(facts)
    value = sample(writer.rng, writer.split, fact.entity, fact.attribute)
    if value is None or writer.style.value(value) in writer.values[fact.attribute.type]:
        return tell(writer)
    template = fact.attribute.change if writer.chance(0.75) else fact.attribute.tell
    sentence = tell_sentence(writer, fact.entity, fact.attribute, writer.style.value(value), 0, template)
    fact = writer.learn(fact.entity, fact.attribute, writer.style.value(value))
    said = clause(writer.rng, fact.entity, fact.attribute, fact.value, "assistant")
    answer = expand(writer.rng, phrases.ACKS + "(,|:) {said} now.|(Okay|Thank you|Thanks|All right)(!|.) I will remember that {said} now.|"
                    "(Thank you|Thanks) for (the correction|telling me|the update)(!|.) I will remember that {said}.")  # fmt: skip
    writer.say([sentence], answer.replace("{said}", said))
    return None


def count_change(writer: Writer) -> None:
    """Change a number that was stated earlier: two more cats, or one less."""
    number = {word: index for index, word in enumerate(words.NUMBER_WORDS)}
    facts = [
        f
        for f in writer.facts.values()
        if f.attribute.type == "count" and f.entity is ME and (f.value in number or int(f.value) <= 20)
    ]
    if not facts:
        return tell(writer)
    fact = writer.rng.choice(facts)
    noun = fact.attribute.key.removeprefix("count ")
    old = number[fact.value] if fact.value in number else int(fact.value)
    more = writer.chance(0.6) or old < 4
    step = writer.rng.randint(2, 9) if more else writer.rng.randint(1, old - 2)
    new = old + step if more else old - step
    worded = fact.value in number and new <= 20
    values = {"n": words.NUMBER_WORDS[step] if fact.value in number else str(step)}
    new_value = words.NUMBER_WORDS[new] if worded else str(new)
    ask = expand(writer.rng, f"(I got|I just got|I bought) {{n}} more {noun}|I have {{n}} more {noun} now" if more else
                 f"I (lost|gave away|sold) {{n}} (of my|of the) {noun}|I have {{n}} {noun} less now")  # fmt: skip
    fact = writer.learn(ME, fact.attribute, new_value)
    answer = expand(
        writer.rng,
        f"(Okay|I see|Got it)(!|.) (Then|Now|So now) you have {{v}} {noun}.|(Okay|I see|Got it), (then|so|now) you have {{v}} {noun}.",
    )
    writer.say([Sentence(ask, ".", values)], fill(answer, {"v": new_value}), Check("count change", (new_value,)))
    return None
