"""Turns that need no memory: small talk, questions about the world, stories, sums, repeating the user."""

# ruff: noqa: E501  -- templates read best one to a line

import re
from collections.abc import Callable
from random import Random

from . import phrases, words
from .language import Sentence, expand, fill
from .sums import Sum, comparison, count_aloud, draw_sum, three_numbers, word_problem
from .words import Split
from .writer import Check, Writer


def chat(writer: Writer) -> None:
    user, assistant = writer.rng.choice(phrases.SMALL_TALK)
    answer = expand(writer.rng, assistant).replace("Holdfast Tiny", writer.bot)
    kind = "bot's name" if "what is your name" in user else None
    check = Check(kind, (writer.bot,)) if kind else None
    writer.say(
        [
            Sentence(
                expand(writer.rng, user),
                "?"
                if user.startswith(("what", "who", "how", "where", "do ", "are "))
                else writer.rng.choice((".", "!")),
            )
        ],
        answer,
        check,
    )


def greet_and_chat(writer: Writer) -> None:
    """A greeting and a question about the assistant in one message."""
    greeting = expand(writer.rng, "hi|hello|hey|hi there|hello there|good morning|good evening|thanks|nice|okay")
    user, assistant = writer.rng.choice(phrases.QUESTIONS)
    answer = expand(writer.rng, assistant).replace("Holdfast Tiny", writer.bot)
    hello = "Hello! " if greeting[0] in "h" or greeting.startswith("good") else ""
    writer.say([Sentence(greeting, writer.rng.choice("!.,")), Sentence(expand(writer.rng, user), "?")], hello + answer)


def world(writer: Writer) -> None:
    """A question about the world, which is politely not answered."""
    rng = writer.rng
    fields = {"X": rng.choice(words.COUNTRIES), "C": words.proper(rng, writer.split, words.CITIES), "C2": words.proper(rng, writer.split, words.CITIES),
              "N": words.proper(rng, writer.split, words.NAMES), "S": words.proper(rng, writer.split, words.SURNAMES),
              "W": writer.some_word(), "W2": writer.some_word()}  # fmt: skip
    fields = {key: writer.style.value(value) for key, value in fields.items()}
    writer.say(
        [Sentence(expand(rng, phrases.WORLD), "?", fields)],
        expand(rng, phrases.WORLD_ANSWERS),
        Check("world question", unknown=True),
    )


def story(writer: Writer) -> None:
    rng = writer.rng
    about = writer.chance(0.45)
    fields = story_fields(rng, writer.split)
    named = writer.chance(0.3)
    if named:
        fields["name"] = writer.style.value(fields["name"])
    ask = (
        phrases.STORY_ABOUT
        + ("|(tell me|write|make up) a( short|) story (about|with) a {hero} (named|called) {name}" if named else "")
        if about
        else phrases.STORY_ASKS
    )
    text = expand(rng, ask)
    if about and named and "{name}" not in text:
        text += rng.choice((" named {name}", " called {name}"))
    writer.say([Sentence(text, rng.choice("?.!"), fields)], fill(expand(rng, phrases.STORY), fields))


def repeat(writer: Writer) -> None:
    """Repeat the user's words, letter for letter."""
    rng = writer.rng
    if writer.chance(0.4):
        name = writer.style.value(words.proper(rng, writer.split, words.NAMES))
        what, to = rng.choice(
            (
                ("hello", "Hello"),
                ("hi", "Hi"),
                ("good morning", "Good morning"),
                ("good night", "Good night"),
                ("goodbye", "Goodbye"),
                ("thank you", "Thank you"),
            )
        )
        ask, answer = expand(rng, f"(please |)(say|can you say) {what} to {{t}}( for me|)"), f"{to}, {{t}}!"
        text = name
    else:
        text = " ".join(
            writer.some_word() if writer.chance(0.5) else words.made_up(rng) for _ in range(rng.randint(1, 6))
        )
        if writer.chance(0.25):
            text = words.proper(rng, writer.split, words.NAMES)
        text = writer.style.value(text)
        ask = expand(
            rng,
            "(repeat|say) after me: {t}|(please |)(repeat|say) this: {t}|(please |)repeat: {t}|(please |)say {t}|can you say {t}|repeat {t}",
        )
        answer = expand(rng, "(Sure|Of course|Okay|Here you go|Gladly): {t}")
    writer.say([Sentence(ask, "", {"t": text})], fill(answer, {"t": text}), Check("repeat", (text,)))


def do_sum(writer: Writer) -> None:
    if writer.last_sum is not None and writer.chance(0.15):
        made = Sum.continued(writer.rng, writer.split, writer.last_sum)
    else:
        made = draw_sum(writer.rng, writer.split)
    writer.last_sum = made.result
    lead = expand(writer.rng, "|||||||||so|and|okay,|now|hey,|please tell me,|quick question:|by the way,")
    sentence = Sentence(f"{lead} {made.question}".strip(), "?" if made.question[-1] not in "=?" else "")
    writer.say([sentence], made.answer, Check(made.kind, result=str(made.result)))


def number_game(writer: Writer) -> None:
    """Word problems, comparisons and counting aloud."""
    draw: Callable[[Random, Split], tuple[str, str, str, str]] = writer.rng.choice(
        (word_problem, word_problem, three_numbers, comparison, count_aloud)
    )
    kind, question, answer, result = draw(writer.rng, writer.split)
    writer.say(
        [Sentence(question, "" if question.endswith("?") else "." if kind == "counting" else "?")],
        answer,
        Check(kind, (answer,) if kind == "counting" else (), result=result),
    )


def story_fields(rng: Random, split: Split) -> dict[str, str]:
    """The subject of a story, by template field."""
    adjective, other = rng.sample(phrases.ADJECTIVES, 2)
    hero, friend = rng.sample(phrases.HEROES, 2)
    treasure = rng.choice(phrases.TREASURES)
    return {"adj": adjective, "a_adj": words.a_or_an(adjective), "a_adj2": words.a_or_an(other), "hero": hero, "friend": friend,
            "name": words.proper(rng, split, words.NAMES), "place": rng.choice(phrases.PLACES_IN_STORIES),
            "treasure": treasure, "treasure2": re.sub(r"^an? ", "the ", treasure)}  # fmt: skip
