"""Turns in which the user asks for a fact that was stated, or for one that was not."""

# ruff: noqa: E501  -- templates read best one to a line

from . import phrases
from .facts import ME, Attribute, Entity, clause, sample
from .language import Sentence, capital, expand, fill
from .sums import draw_sum
from .telling import tell, tell_sentence
from .words import join_and
from .writer import Check, Fact, Writer, holds


def ask(writer: Writer) -> None:
    """Ask for a fact stated earlier. The distance in turns varies from one to the whole dialogue."""
    if not writer.facts:
        return tell(writer)
    fact = writer.rng.choice(list(writer.facts.values()))
    if writer.chance(0.25) and len(writer.facts) > 3:
        fact = list(writer.facts.values())[writer.rng.randrange(3)]  # the oldest facts, more often
    answer_about(writer, fact, question(writer, writer.alias(fact.entity, fact.attribute), fact.attribute))
    if writer.chance(0.1) and fact.entity.kind in ("me", "person"):
        follow_up(writer, fact)
    return None


def ask_two(writer: Writer) -> None:
    """Ask two questions in one message."""
    mine = [fact for fact in writer.facts.values() if fact.entity.kind in ("me", "person", "pet", "thing", "object")]
    if len(mine) < 2:
        return ask(writer)
    first, second = writer.rng.sample(mine, 2)
    texts = [fill(expand(writer.rng, f.attribute.ask), f.entity.fields(writer.rng, "user")) for f in (first, second)]
    clauses = [clause(writer.rng, f.entity, f.attribute, f.value, "assistant") for f in (first, second)]
    answer = recalled(writer, ME, join_and(clauses))
    writer.say(
        [Sentence(f"{texts[0]} and {texts[1]}", "?")],
        answer,
        writer.recall_check("recall two", [first, second], answer),
    )
    return None


def verify(writer: Writer) -> None:
    """Ask a yes/no question about a fact."""
    facts = [fact for fact in writer.facts.values() if fact.attribute.check]
    if not facts:
        return tell(writer)
    fact = writer.rng.choice(facts)
    value, true = fact.value, writer.chance(0.5)
    if not true:
        other = sample(writer.rng, writer.split, fact.entity, fact.attribute)
        if other is None or writer.style.value(other) == value:
            return ask(writer)
        value = writer.style.value(other)
        old = [v for v in writer.values[fact.attribute.type] if v != fact.value]
        if old and writer.chance(0.4):
            value = writer.rng.choice(old)
    template = f"{fact.attribute.check}|is it (true|right|correct) that ({fact.attribute.clause})|did I (say|tell you) that ({fact.attribute.clause})"
    text = fill(expand(writer.rng, template), fact.entity.fields(writer.rng, "user"))
    said = clause(writer.rng, fact.entity, fact.attribute, fact.value, "assistant")
    answer = f"{'Yes' if true else 'No'}, {said}."
    check = writer.recall_check("yes or no", [fact], answer)
    writer.say(
        [Sentence(text, "?", {"v": value, "who": fact.entity.noun})],
        answer,
        Check("yes or no", (answer.split(",")[0], fact.value), check.forbid, check.turns),
    )
    return None


def ask_who(writer: Writer) -> None:
    """Ask who has a value: `who lives in Rome?`."""
    facts = [fact for fact in writer.facts.values() if fact.attribute.who]
    if not facts:
        return ask(writer)
    fact = writer.rng.choice(facts)
    said = clause(writer.rng, fact.entity, fact.attribute, fact.value, "assistant")
    answer = recalled(writer, fact.entity, said)
    expect = (fact.value,) if fact.entity is ME else (fact.entity.noun, fact.value)
    distance = len(writer.turns) - fact.told
    writer.say(
        [Sentence(expand(writer.rng, fact.attribute.who), "?", {"v": fact.value})],
        answer,
        Check("who", expect, (), distance),
    )
    return None


def ask_unknown(writer: Writer) -> None:
    """Ask for a fact that was never stated, often of somebody who is known. The answer must not invent one."""
    for _ in range(8):
        entity = writer.new_entity()
        attribute = writer.attribute_for(entity)
        named_pet = attribute.key == "pet" and any(fact.entity.kind == "pet" for fact in writer.facts.values())
        if (entity, attribute.key) not in writer.facts and not writer.clashes(entity) and not named_pet:
            return deny(writer, entity, attribute, question(writer, entity, attribute))
    return None


def summary(writer: Writer) -> None:
    """Ask for all facts: `what do you know about me?`."""
    entity = (
        writer.rng.choice([f.entity for f in writer.facts.values() if f.entity.kind in ("person", "pet")] or [ME])
        if writer.chance(0.3)
        else ME
    )
    facts = [fact for fact in writer.facts.values() if fact.entity == entity]
    if len(facts) > 6:
        return ask(writer)
    who = "me" if entity is ME else "my " + entity.noun
    asked = Sentence(expand(writer.rng, f"what do you know about {who}|tell me (everything|what|all) you know about {who}|what (have I told|did I tell) you about {who}( so far|)|"
                          f"(please |)(summarize|sum up) what you know about {who}|what can you say about {who}"), "?")  # fmt: skip
    if not facts:
        answer = f"You have not told me anything about {'yourself' if entity is ME else 'your ' + entity.noun} yet."
        writer.say([asked], answer, Check("unknown fact", unknown=True))
        return None
    clauses = [
        clause(writer.rng, entity, f.attribute, f.value, "assistant", pronoun=index > 0)
        for index, f in enumerate(facts)
    ]
    opening = expand(writer.rng, "You told me that|I know that|Here is what I know:|I remember that|So far I know that")
    writer.say(
        [asked],
        f"{opening} {join_and(clauses)}.",
        writer.recall_check("summary", facts, join_and([f.value for f in facts] + clauses)),
    )
    return None


def question(writer: Writer, entity: Entity, attribute: Attribute) -> Sentence:
    rng = writer.rng
    fields = entity.fields(rng, "user")
    if rng.random() < 0.72:
        text = expand(rng, attribute.ask)
        if rng.random() < 0.2:
            text = (
                expand(
                    rng,
                    "so|and|hey|okay|now|by the way,|one more question,|tell me,|please tell me,|I forgot,|remind me,|hm,|well,",
                )
                + " "
                + text
            )
    else:
        text = expand(rng, f"do you (remember|know|still know|recall) ({attribute.about})|(can|could) you tell me ({attribute.about})|(please |)tell me ({attribute.about})|"
                      f"I (forgot|don't remember) ({attribute.about})|(please |)remind me ({attribute.about})|have I told you ({attribute.about})")  # fmt: skip
    return Sentence(fill(text, fields), "?" if writer.chance(0.93) else ".", {"who": entity.noun})


def recalled(writer: Writer, entity: Entity, said: str, openings: bool = True) -> str:
    """The answer that states a clause.

    A sentence never starts with a name, whose letters stay as the user typed them.
    """
    rng = writer.rng
    if entity.kind == "named":
        opening = expand(
            rng,
            "You told me that|You told me that|You said that|I remember that|As you told me,|I remember:|If I remember well,|Yes, I remember that",
        )
    else:
        opening = expand(rng, phrases.RECALL_OPENINGS) if openings and rng.random() < 0.6 else ""
    answer = (
        f"{opening} {said if opening and opening[-1] not in '.!' else capital(said)}{rng.choice(('.', '.', '.', '!'))}"
    )
    return answer.strip()


def answer_about(writer: Writer, fact: Fact, asked: Sentence) -> None:
    spoken = Entity("named", asked.values["who"]) if "{who}" in asked.text else fact.entity
    said = clause(writer.rng, spoken, fact.attribute, fact.value, "assistant")
    answer = recalled(writer, spoken, said)
    lead = (
        [
            Sentence(
                expand(writer.rng, "thanks|thank you|great|okay|nice|cool|good|perfect|ok|alright|wow"),
                writer.rng.choice("!.,"),
            )
        ]
        if writer.chance(0.05)
        else []
    )
    kind = {"me": "about me", "person": "about others", "pet": "about others", "named": "about others"}.get(
        fact.entity.kind, "about things"
    )
    writer.say([*lead, asked], answer, writer.recall_check("recall " + kind, [fact], answer))


def follow_up(writer: Writer, fact: Fact) -> None:
    """Ask the last question about somebody else: `and my brother?`."""
    others = [f.entity for f in writer.facts.values() if f.entity.kind in ("me", "person") and f.entity != fact.entity]
    if not others or fact.attribute.key == "name":
        return
    entity = writer.rng.choice(others)
    who = "me" if entity is ME else "my " + entity.noun
    asked = Sentence(
        expand(writer.rng, f"and {who}|what about {who}|and what about {who}|how about {who}"), "?", {"who": ""}
    )
    other = writer.facts.get((entity, fact.attribute.key))
    if other:
        answer_about(writer, other, asked)
    else:
        deny(writer, entity, fact.attribute, asked)


def deny(writer: Writer, entity: Entity, attribute: Attribute, asked: Sentence) -> None:
    about = fill(expand(writer.rng, attribute.about), entity.fields(writer.rng, "assistant"))
    answer = fill(fill(expand(writer.rng, phrases.UNKNOWN_ANSWERS), {"about": about}), {"who": entity.noun})
    forbid = tuple(value for value in dict.fromkeys(writer.values.get(attribute.type, ())) if not holds(answer, value))
    writer.say([asked], answer, Check("unknown fact", (), forbid, unknown=True))


def tell_and_ask(writer: Writer) -> None:
    """State a fact and, in the same message, ask about it, an older fact, a sum or the assistant."""
    drawn = writer.draw_fact()
    if drawn is None:
        return ask(writer)
    told = tell_sentence(writer, *drawn, index=0)
    older = writer.rng.choice(list(writer.facts.values())) if writer.facts and writer.chance(0.4) else None
    new = writer.learn(*drawn)
    kind = writer.rng.random()
    if kind < 0.4:
        fact = older or new
        asked = question(writer, fact.entity, fact.attribute)
        asked = Sentence(asked.text.replace("{who}", "{who1}"), "?", {"who1": fact.entity.noun})
        said = clause(writer.rng, fact.entity, fact.attribute, fact.value, "assistant")
        answer = recalled(writer, fact.entity, said)
        writer.say([told, asked], answer, writer.recall_check("recall at once", [fact], answer))
        return None
    first = fill(expand(writer.rng, new.attribute.ack), {"v": new.value, "noun": new.entity.noun})
    if not first or first.startswith(new.value) or writer.chance(0.5):
        first = (
            expand(writer.rng, phrases.ACKS)
            + ", "
            + clause(writer.rng, new.entity, new.attribute, new.value, "assistant")
        )
    first = capital(first) + writer.rng.choice("!.")
    if kind < 0.7:
        made = draw_sum(writer.rng, writer.split)
        writer.say(
            [told, Sentence(made.question, "?" if made.question[-1] not in "=?" else "")],
            f"{first} {made.answer}",
            Check(made.kind, result=str(made.result)),
        )
    else:
        user, assistant = writer.rng.choice(phrases.QUESTIONS)
        writer.say(
            [told, Sentence(expand(writer.rng, user), "?")],
            f"{first} {expand(writer.rng, assistant).replace('Holdfast Tiny', writer.bot)}",
        )
    return None
