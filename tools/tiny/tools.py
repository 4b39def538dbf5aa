"""Turns in which the assistant calls tools: the names of tools, how a user asks for them, and their results."""

# ruff: noqa: E501  -- templates read best one to a line

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from . import words
from .language import Sentence, expand, fill
from .sums import ASKS, Sum
from .words import belongs
from .writer import Call, Check, Writer

_STRING, _INTEGER, _NUMBER = "string", "integer", "number"
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "stormy", "snowy", "clear", "hazy", "overcast", "dry", "humid")
OPERATIONS = {"+": "add|add_numbers|sum|plus|addition", "-": "subtract|minus|difference|subtraction", "*": "multiply|times|product|multiplication", "/": "divide|division|quotient"}  # fmt: skip
SUMMARIES = {"+": "Add two numbers|The sum of two numbers|Adds numbers|", "-": "Subtract one number from another|The difference of two numbers|", "*": "Multiply two numbers|The product of two numbers|", "/": "Divide one number by another|"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """One question that needs a tool: its calls and their results, the answer, and what the answer must hold."""

    question: str
    values: dict[str, str]
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    answer: str
    expect: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of tool: its offer, and the function that draws its uses.

    `clashes`: what the assistant would do without it.
    """

    tool: dict[str, Any]
    draw: Callable[[Writer], Use]
    clashes: str


def draw_kinds(writer: Writer) -> list[Kind]:
    """One to five tools with different names."""
    rng = writer.rng
    count = rng.choice((1, 1, 2, 2, 3, 4, 5))
    kinds = [make(writer) for make in rng.sample(_MAKERS, count)]
    if rng.random() < 0.15:
        kinds += [_arithmetic(writer) for _ in range(2)]
    named = {kind.tool["function"]["name"]: kind for kind in kinds}
    return list(named.values())


def use(writer: Writer, kinds: list[Kind]) -> None:
    """Write a turn that asks for something that one of the tools can do; sometimes twice at once."""
    kind = writer.rng.choice(kinds)
    drawn = kind.draw(writer)
    lead = expand(writer.rng, "||||||||please,|hey,|okay,|now|quick question:|by the way,|can you help me?")
    if "{" not in drawn.question and not writer.chance(0.5):
        lead = ""
    end = "" if drawn.question[-1:] in "=?" else writer.rng.choice("?.")
    sentence = Sentence(f"{lead} {drawn.question}".strip(), end, drawn.values)
    writer.say(
        [sentence], drawn.answer, Check("answer from a tool", drawn.expect), calls=drawn.calls, results=drawn.results
    )


def offered(rng: Random, name: str, about: str, arguments: dict[str, str]) -> dict[str, Any]:
    """A tool in the form of chat templates."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.7:
        parameters["required"] = list(properties)
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def written_call(call: Call) -> str:
    """A call between its tags, as the template writes it."""
    name, arguments = call
    return f'{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}'


def _result(rng: Random, value: Any, *keys: str) -> str:
    """A value in the form of a tool's result: alone, or in an object."""
    if rng.random() < 0.5:
        return str(value)
    return json.dumps({rng.choice((*keys, "result", "value", "answer")): value}, ensure_ascii=False)


def _city(writer: Writer) -> str:
    return writer.style.value(words.proper(writer.rng, writer.split, words.CITIES))


def _weather(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(
        rng,
        "get_weather|get_weather|get_weather|weather|current_weather|get_current_weather|get_forecast|weather_in|lookup_weather|fetch_weather",
    )
    key = rng.choice(("city", "city", "location", "place", "town"))
    about = expand(
        rng, f"Get the (current|) weather( in a {key}| for a {key}|)|(Current|) weather of a {key}|Returns the weather|"
    )
    more = {"unit": _STRING} if rng.random() < 0.15 else {}
    tool = offered(rng, name, about, {key: _STRING, **more})
    if more:
        tool["function"]["parameters"]["required"] = [key]

    def result(sky: str, degrees: int) -> str:
        return rng.choice(
            (
                f"{sky}, {degrees} degrees", f"{degrees} degrees and {sky}", f"{sky} {degrees}",
                json.dumps({"temperature": degrees, "sky": sky}), json.dumps({"condition": sky, "temperature": degrees}),
                json.dumps({"temp": degrees, "weather": sky}),
            )
        )  # fmt: skip

    def draw(writer: Writer) -> Use:
        count = rng.choice((1, 1, 1, 1, 2))
        cities = list(dict.fromkeys(_city(writer) for _ in range(count)))
        found = [(city, rng.choice(SKIES), rng.randint(-15, 42)) for city in cities]
        fields = {f"c{at}": city for at, city in enumerate(cities)}
        places = " and {c1}".join(["{c0}", ""]) if len(cities) == 2 else "{c0}"
        question = expand(
            rng,
            "(what is|how is|what's|how's) the weather( like|) in @( now| today| right now|)|(tell me|give me|get|check|show me) the weather in @|weather in @|do i need an umbrella in @|is it (cold|warm|hot|raining|sunny) in @|what is it like (outside|) in @|@ weather",
        )
        answers = [f"It is {sky} in {city}, {degrees} degrees." for city, sky, degrees in found]
        return Use(
            question.replace("@", places), fields, tuple((name, {key: city}) for city in cities),
            tuple(result(sky, degrees) for _, sky, degrees in found), " ".join(answers),
            tuple(text for _, sky, degrees in found for text in (sky, str(degrees))),
        )  # fmt: skip

    return Kind(tool, draw, "world")


def _time(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "get_time|current_time|get_current_time|time_in|local_time|clock")
    key = rng.choice(("city", "city", "place", "location", "timezone"))
    tool = offered(rng, name, expand(rng, f"Get the (current|local|) time in a {key}|The time|"), {key: _STRING})

    def draw(writer: Writer) -> Use:
        city, time = _city(writer), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        question = expand(
            rng,
            "what time is it in {c}( now|)|what's the time in {c}|(tell me|get) the time in {c}|time in {c}|how late is it in {c}",
        )
        answer = expand(rng, "It is @ in {c}.|In {c} it is @.")
        return Use(question, {"c": city}, ((name, {key: city}),), (_result(rng, time, "time"),),
                   fill(answer, {"c": city}).replace("@", time), (time,))  # fmt: skip

    return Kind(tool, draw, "world")


def _arithmetic(writer: Writer) -> Kind:
    rng = writer.rng
    op = rng.choice("++-*/")
    name, about = expand(rng, OPERATIONS[op]), expand(rng, SUMMARIES[op])
    one, two = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("n1", "n2")))
    kind = rng.choice((_INTEGER, _NUMBER))
    tool = offered(rng, name, about, {one: kind, two: kind})

    def draw(writer: Writer) -> Use:
        a, b = _numbers(writer, op)
        drawn = Sum.make(rng, a, op, b, ASKS)
        result = str(drawn.result)
        return Use(
            drawn.question,
            {},
            ((name, {one: a, two: b}),),
            (_result(rng, drawn.result, "sum"),),
            drawn.answer,
            (result,),
        )

    return Kind(tool, draw, "sums")


def _numbers(writer: Writer, op: str) -> tuple[int, int]:
    rng = writer.rng
    while True:
        top = 10 ** rng.choice((1, 2, 2, 3, 4, 5))
        a, b = rng.randint(0, top), rng.randint(1, rng.choice((10, top)))
        if op == "/":
            a *= b
        if belongs(writer.split, f"{a}{op}{b}"):
            return a, b


def _calculator(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "calculator|calculate|calc|evaluate|compute")
    key = rng.choice(("expression", "expression", "formula", "input"))
    about = expand(rng, "(Evaluate|Compute|Calculate) an expression|A calculator|Evaluates arithmetic|")
    tool = offered(rng, name, about, {key: _STRING})

    def draw(writer: Writer) -> Use:
        op = rng.choice("++-**/")
        a, b = _numbers(writer, op)
        drawn = Sum.make(rng, a, op, b, ASKS)
        result = _result(rng, drawn.result)
        return Use(drawn.question, {}, ((name, {key: f"{a} {op} {b}"}),), (result,), drawn.answer, (str(drawn.result),))

    return Kind(tool, draw, "sums")


def _search(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "search|web_search|search_web|lookup|find|search_documents")
    key = rng.choice(("query", "query", "q", "text", "term"))
    tool = offered(
        rng, name, expand(rng, "Search the (web|internet|documents)|(Look up|Find) something|"), {key: _STRING}
    )

    def draw(writer: Writer) -> Use:
        text = " ".join(writer.some_word() for _ in range(rng.choice((1, 1, 2, 3))))
        text = writer.style.value(words.proper(rng, writer.split, words.NAMES) if writer.chance(0.2) else text)
        found = " ".join(writer.some_word() for _ in range(rng.randint(1, 5)))
        question = expand(
            rng,
            "(search|look) for {t}|look up {t}|find {t}|search the web for {t}|(can you|please) (search for|look up|find) {t}|google {t}",
        )
        answer = expand(rng, "I found this: @.|Here is what I found: @.")
        return Use(
            question,
            {"t": text},
            ((name, {key: text}),),
            (_result(rng, found, "text"),),
            answer.replace("@", found),
            (found,),
        )

    return Kind(tool, draw, "search")


def _timer(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "set_timer|start_timer|timer|set_alarm")
    key = rng.choice(("minutes", "minutes", "duration", "time"))
    tool = offered(rng, name, expand(rng, "(Set|Start) a timer( in minutes|)|A timer|"), {key: _INTEGER})

    def draw(writer: Writer) -> Use:
        minutes = rng.randint(1, 180)
        question = expand(
            rng,
            f"(set|start) a timer (for|of) {minutes} minutes|(set|start) a {minutes} minute timer|timer for {minutes} minutes|wake me in {minutes} minutes|remind me in {minutes} minutes",
        )
        result = rng.choice(("ok", "done", "set", '{"ok": true}', '{"status": "ok"}', "The timer is set."))
        return Use(
            question,
            {},
            ((name, {key: minutes}),),
            (result,),
            f"The timer is set for {minutes} minutes.",
            (str(minutes),),
        )

    return Kind(tool, draw, "timer")


def _message(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "send_message|send_text|text|send_mail|send_email|message")
    to, what = rng.choice((("to", "text"), ("to", "message"), ("recipient", "text"), ("name", "text"), ("to", "body")))
    tool = offered(
        rng, name, expand(rng, "Send (a message|an email|a text) to somebody|"), {to: _STRING, what: _STRING}
    )

    def draw(writer: Writer) -> Use:
        who = writer.style.value(words.proper(rng, writer.split, words.NAMES))
        text = expand(
            rng,
            "hello|see you (soon|tomorrow|later)|i am late|happy birthday|good luck|call me (back|)|thank you|dinner is ready|",
        ) or " ".join(writer.some_word() for _ in range(3))
        question = expand(
            rng,
            "(send|write) {n} (a message|a text|an email): {t}|(text|message|tell) {n}: {t}|send a message to {n}: {t}",
        )
        result = rng.choice(("sent", "ok", "done", '{"sent": true}', '{"status": "sent"}'))
        return Use(
            question,
            {"n": who, "t": text},
            ((name, {to: who, what: text}),),
            (result,),
            fill("I sent it to {n}.", {"n": who}),
            (who,),
        )

    return Kind(tool, draw, "message")


def _dice(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "roll_dice|roll|roll_die|dice|random_number")
    key = rng.choice(("sides", "sides", "faces", "max"))
    tool = offered(rng, name, expand(rng, "Roll a die|Rolls dice|A random number|"), {key: _INTEGER})

    def draw(writer: Writer) -> Use:
        sides = rng.choice((6, 6, 6, 4, 8, 10, 12, 20, 100))
        rolled = rng.randint(1, sides)
        question = expand(
            rng,
            f"roll a (die|dice) with {sides} sides|roll a {sides} sided (die|dice)|throw a {sides} sided (die|dice)",
        )
        if sides == 6 and rng.random() < 0.5:
            question = expand(rng, "roll a (die|dice)( for me|)|throw (the|a) dice")
        return Use(
            question,
            {},
            ((name, {key: sides}),),
            (_result(rng, rolled, "roll"),),
            f"You rolled {rolled}.",
            (str(rolled),),
        )

    return Kind(tool, draw, "dice")


def _population(writer: Writer) -> Kind:
    rng = writer.rng
    name = expand(rng, "get_population|population|population_of|count_people")
    key = rng.choice(("country", "city", "place", "name"))
    tool = offered(rng, name, expand(rng, f"(Get the population|Number of people) of a {key}|"), {key: _STRING})

    def draw(writer: Writer) -> Use:
        place, count = _city(writer), rng.randint(100, 10_000_000)
        question = expand(
            rng, "what is the population of {c}|how many people live in {c}|population of {c}|how big is {c}"
        )
        answer = fill("{c} has @ people.", {"c": place}).replace("@", str(count))
        return Use(
            question, {"c": place}, ((name, {key: place}),), (_result(rng, count, "population"),), answer, (str(count),)
        )

    return Kind(tool, draw, "world")


_MAKERS = (
    _weather, _weather, _weather, _arithmetic, _arithmetic, _arithmetic, _calculator, _calculator, _time, _search,
    _timer, _message, _dice, _population,
)  # fmt: skip
