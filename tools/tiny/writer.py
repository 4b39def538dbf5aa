"""One dialogue in the making: the turns, the stated facts, and the checks that answers must pass."""

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

from . import words
from .facts import ME, Attribute, Entity, attributes_of, count_of, sample
from .language import Sentence, Style
from .words import Split

_ARTICLE = re.compile(r"^(a|an|the) ")
NOT_KNOWN = re.compile(r"not told me|n[o']t know\b|cannot (see|feel)|beyond me", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Check:
    """Words that an answer must hold, and words that it must not. `turns`: user turns since the fact (0: no recall)."""

    kind: str
    expect: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    turns: int = 0
    result: str = ""  # the last number in the answer
    unknown: bool = False  # the answer must say that it is not known

    def passes(self, answer: str) -> bool:
        """Whether an answer passes: whole words, in any case. A wrong value fails even if the right one is there."""
        if not all(holds(answer, value) for value in self.expect) or any(holds(answer, value) for value in self.forbid):
            return False
        if self.result and re.findall(r"-?\d+", answer)[-1:] != [self.result]:
            return False
        return bool(NOT_KNOWN.search(answer)) == self.unknown


def holds(answer: str, value: str) -> bool:
    """Whether the value occurs as whole words, in any case; its article may be missing."""
    text, sought = answer.lower(), _ARTICLE.sub("", value.lower())
    at = text.find(sought)
    while at >= 0:
        end = at + len(sought)
        if not (at and text[at - 1].isalnum()) and not text[end : end + 1].isalnum():
            return True
        at = text.find(sought, at + 1)
    return False


Call = tuple[str, dict[str, Any]]
"""The name of a tool, and the arguments that it is called with."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer. `leads`: the next message refers to this very answer.

    With `calls`, the assistant first calls tools, and gets one of the `results` for each.
    """

    user: str
    assistant: str
    check: Check | None = None
    leads: bool = False
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()

    def called(self) -> list[dict[str, Any]]:
        """The calls and their results as chat messages."""
        if not self.calls:
            return []
        functions = [{"name": name, "arguments": arguments} for name, arguments in self.calls]
        calls = [{"id": f"call_{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
        return [
            {"role": "assistant", "content": "", "tool_calls": calls},
            *(
                {"role": "tool", "content": result, "tool_call_id": f"call_{at}"}
                for at, result in enumerate(self.results)
            ),
        ]


@dataclass(slots=True)
class Fact:
    """A stated fact, the turn in which it was stated, and its number of versions."""

    entity: Entity
    attribute: Attribute
    value: str
    told: int


@dataclass(slots=True)
class Writer:
    """Draws from one generator. Keeps the turns and the facts that the assistant has to remember."""

    rng: Random
    split: Split
    style: Style = field(default_factory=Style)
    bot: str = "Holdfast Tiny"
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    facts: dict[tuple[Entity, str], Fact] = field(default_factory=dict)
    values: dict[str, list[str]] = field(default_factory=dict)  # all stated values, by type
    last_sum: int | None = None

    def say(
        self,
        user: list[Sentence],
        assistant: str,
        check: Check | None = None,
        leads: bool = False,
        calls: tuple[Call, ...] = (),
        results: tuple[str, ...] = (),
    ) -> None:
        """Append a turn."""
        self.turns.append(Turn(self.style.write(self.rng, user), assistant, check, leads, calls, results))

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def new_entity(self) -> Entity:
        """A subject of a fact: often the user, often somebody known already."""
        kind = self.rng.random()
        known = [fact.entity for fact in self.facts.values() if fact.entity.kind in ("person", "pet", "named")]
        if kind < 0.42:
            return ME
        if kind < 0.54 and known:
            return self.rng.choice(known)
        if kind < 0.68:
            noun = self.rng.choice(tuple(words.RELATIONS))
            return Entity("person", noun, words.RELATIONS[noun])
        if kind < 0.75:
            return Entity("pet", self.rng.choice(words.PETS))
        if kind < 0.81:
            return Entity("named", self.style.value(words.proper(self.rng, self.split, words.NAMES)))
        if kind < 0.90:
            noun = self.rng.choice(words.THINGS) if self.chance(0.8) else words.made_up(self.rng)
            return Entity("thing", noun, the=self.chance(0.3))
        if kind < 0.96:
            return Entity("object", self.rng.choice(words.OBJECTS), the=self.chance(0.3))
        return Entity("event", self.rng.choice(words.EVENTS), the=self.chance(0.3))

    def attribute_for(self, entity: Entity) -> Attribute:
        if entity.kind in ("me", "person", "named") and self.chance(0.14):
            return count_of(self.rng.choice(words.COUNTABLES))
        if entity is ME and self.chance(0.25):
            return self.rng.choice(attributes_of(entity)[:4])  # name, home
        return self.rng.choice(attributes_of(entity))

    def draw_fact(self, entity: Entity | None = None) -> tuple[Entity, Attribute, str] | None:
        """A fact that has not been stated yet; None if the drawing found none."""
        for _ in range(8):
            who = entity or self.new_entity()
            attribute = self.attribute_for(who)
            if (who, attribute.key) in self.facts or self.clashes(who):
                continue
            value = sample(self.rng, self.split, who, attribute)
            if value is not None and value not in self.values.get(attribute.type, ()):
                return who, attribute, self.style.value(value)
        return None

    def clashes(self, entity: Entity) -> bool:
        """Whether "my pin" and "the pin" would be two things."""
        return any(f.entity.noun == entity.noun and f.entity != entity for f in self.facts.values() if entity.noun)

    def learn(self, entity: Entity, attribute: Attribute, value: str) -> Fact:
        fact = Fact(entity, attribute, value, len(self.turns))
        self.facts[entity, attribute.key] = fact
        self.values.setdefault(attribute.type, []).append(value)
        return fact

    def alias(self, entity: Entity, attribute: Attribute) -> Entity:
        """The entity, sometimes by its name if that is known."""
        name = self.facts.get((entity, "name"))
        if name and entity.kind in ("person", "pet") and attribute.key != "name" and self.chance(0.25):
            return Entity("named", name.value, entity.pronoun)
        return entity

    def recall_check(self, kind: str, facts: list[Fact], answer: str) -> Check:
        forbid = {value for fact in facts for value in self.values[fact.attribute.type] if not holds(answer, value)}
        distance = len(self.turns) - min(fact.told for fact in facts)
        return Check(kind, tuple(fact.value for fact in facts), tuple(sorted(forbid)), distance)

    def some_word(self) -> str:
        if self.chance(0.4):
            return words.made_up(self.rng)
        return self.rng.choice(
            words.ANIMALS + words.FRUITS + words.SUBJECTS + words.INSTRUMENTS + words.OBJECTS + words.SPORTS
        ).removeprefix("the ")
