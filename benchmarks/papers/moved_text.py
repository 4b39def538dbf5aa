"""Keys and values of a text reused after another beginning, at another position (the thesis, §4.1.4).

    python -m benchmarks.papers.moved_text [--count 60] [--seed 0]

A part of a chat is computed after one beginning. Its keys are then turned to their positions after another, longer
beginning, and a question is answered from them. Another answer comes from the exact keys and values. Both are
greedy, by Transformers' own code and the built-in model in float32. `facts` are parts about the user; `persons`
are parts that speak of a person whom the beginning names, and each beginning names another one.

Printed: how many answers are equal token by token, how many hold the asked fact, and by layer how far the turned keys
and the values are from the exact ones: the norm of the difference as a share of the exact norm.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from holdfast.core.config import BUILTIN_MODEL
from holdfast.engine.checkpoint import Checkpoint

THETA, MOST, END = 10_000.0, 24, 1
NAMES = ("Ada", "Ben", "Carla", "Dan", "Eva", "Finn", "Gina", "Hugo")
CITIES = ("Paris", "Rome", "Oslo", "Berlin", "Madrid", "Vienna", "Lisbon", "Dublin")
TALK = (
    ("What is 3 plus 4?", "3 plus 4 is 7."),
    ("Hello!", "Hello! How can I help you?"),
    ("Tell me a joke.", "Why did the bicycle fall over? It was two-tired."),
    ("I like chess.", "That sounds nice!"),
)


class Case(NamedTuple):
    """A part, the beginnings after which it is computed and reused, a question, and a word of the right answer."""

    first: str
    second: str
    part: str
    question: str
    fact: str


def turn(said: str, answer: str) -> str:
    return f"<|user|>{said}<|end|><|assistant|>{answer}<|end|>"


def beginning(choose: random.Random, least: int, most: int) -> str:
    return "".join(turn(*choose.choice(TALK)) for _ in range(choose.randint(least, most)))


def fact(choose: random.Random) -> Case:
    """A part about the user alone."""
    name, city = choose.choice(NAMES), choose.choice(CITIES)
    part = turn(f"My name is {name}.", f"Nice to meet you, {name}!")
    part += turn(f"I live in {city}.", f"I will remember that you live in {city}.")
    question, held = choose.choice([("What is my name?", name), ("Where do I live?", city)])
    return Case(beginning(choose, 1, 3), beginning(choose, 4, 8), part, question, held)


def person(choose: random.Random) -> Case:
    """A part that says "she" of a person whom the beginning names."""
    (before, now), city = choose.sample(NAMES, 2), choose.choice(CITIES)

    def named(name: str) -> str:
        return turn(f"My sister is called {name}.", f"Thanks, I will remember that your sister is called {name}.")

    part = turn(f"She lives in {city}.", "I will remember that.")
    first, second = beginning(choose, 1, 3) + named(before), beginning(choose, 4, 8) + named(now)
    return Case(first, second, part, f"Where does {now} live?", city)


def turned(keys: torch.Tensor, by: int) -> torch.Tensor:
    """Keys [1, heads, positions, size] moved by this many positions: RoPE turns pairs of numbers by an angle each."""
    half = keys.shape[-1] // 2
    angles = by / THETA ** (torch.arange(half) / half)
    cos, sin = torch.cat([angles.cos()] * 2), torch.cat([angles.sin()] * 2)
    return keys * cos + torch.cat([-keys[..., half:], keys[..., :half]], -1) * sin


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


class Chats:
    """The built-in model, and the comparison of one case after the other."""

    def __init__(self) -> None:
        directory = Checkpoint.find(BUILTIN_MODEL).directory
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    def ids(self, text: str) -> torch.Tensor:
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids

    def computed(self, *parts: torch.Tensor) -> DynamicCache:
        cache = DynamicCache()
        self.model(torch.cat(parts, 1), past_key_values=cache, use_cache=True)
        return cache

    def answer(self, question: torch.Tensor, cache: DynamicCache) -> str:
        tokens: list[int] = []
        given = question
        while len(tokens) < MOST and tokens[-1:] != [END]:
            logits = self.model(given, past_key_values=cache, use_cache=True).logits
            tokens.append(int(logits[0, -1].argmax()))
            given = torch.tensor([tokens[-1:]])
        return str(self.tokenizer.decode(tokens))

    def compare(self, case: Case) -> dict[str, Any]:
        first, second, part = self.ids(case.first), self.ids(case.second), self.ids(case.part)
        old, exact, reused = self.computed(first, part), self.computed(second, part), self.computed(second)
        before, after = first.shape[1], second.shape[1]
        keys, values = [], []
        for layer, (was, now) in enumerate(zip(old.layers, exact.layers, strict=True)):
            moved = turned(was.keys[:, :, before:], after - before), was.values[:, :, before:]
            keys.append(apart(moved[0], now.keys[:, :, after:]))
            values.append(apart(moved[1], now.values[:, :, after:]))
            reused.update(*moved, layer)
        question = self.ids(f"<|user|>{case.question}<|end|><|assistant|>")
        answers = [self.answer(question, cache) for cache in (exact, reused)]
        holds = [case.fact.lower() in answer.lower() for answer in answers]
        return {
            "equal": answers[0] == answers[1],
            "exact": holds[0],
            "reused": holds[1],
            "keys": keys,
            "values": values,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="cases of each kind")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chats = Chats()
    with torch.inference_mode():
        for name, draw in (("facts", fact), ("persons", person)):
            choose = random.Random(args.seed)
            rows = [chats.compare(draw(choose)) for _ in range(args.count)]
            shares = {each: sum(row[each] for row in rows) for each in ("equal", "exact", "reused")}
            layers = {
                each: [round(sum(of) / args.count, 3) for of in zip(*(row[each] for row in rows), strict=True)]
                for each in ("keys", "values")
            }
            print(json.dumps({"kind": name, "cases": args.count, **shares, **layers}), flush=True)


if __name__ == "__main__":
    main()
