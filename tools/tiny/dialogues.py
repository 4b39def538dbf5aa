"""Writes the dialogues that train and measure holdfast-tiny, each answer with the check it must pass.

Everything is drawn from one seeded generator. Names, sums and combinations of the held-out split never occur in
training.

    python -m tools.tiny.dialogues --split heldout --count 3
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from . import asking, chatting, phrases, telling, tools, words
from .facts import ME, attributes_of, clause, sample
from .language import Style, capital, expand, fill
from .lists import Lists
from .words import Split
from .writer import Turn, Writer

# The kinds of turns, and how often each occurs.
_ACTS: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (telling.tell, 3.0),
    (telling.introduce, 0.5),
    (telling.change, 0.7),
    (telling.count_change, 0.2),
    (asking.ask, 4.0),
    (asking.tell_and_ask, 0.15),
    (chatting.greet_and_chat, 0.1),
    (asking.ask_unknown, 1.3),
    (asking.ask_two, 0.4),
    (asking.verify, 0.7),
    (asking.ask_who, 0.35),
    (asking.summary, 0.3),
    (chatting.chat, 2.6),
    (chatting.world, 1.0),
    (chatting.do_sum, 1.6),
    (chatting.number_game, 0.4),
    (chatting.repeat, 0.3),
    (chatting.story, 0.12),
)
_LISTS = 1.5
_BESIDE_TOOLS: tuple[tuple[Callable[[Writer], None], float], ...] = (
    (telling.tell, 1.0),
    (telling.introduce, 0.3),
    (asking.ask, 1.2),
    (chatting.chat, 1.5),
    (chatting.repeat, 0.2),
)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation; `system` is the system prompt or empty."""

    system: str
    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        """The dialogue as chat messages."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            asked, answer = {"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}
            messages += [asked, *turn.called(), answer]
        return messages


def write_dialogue(rng: Random, split: Split, turns: int | None = None) -> Dialogue:
    """A dialogue of at least `turns` turns (drawn if None: mostly 2 to 16, some up to 90)."""
    writer = Writer(rng, split, Style.draw(rng))
    lists = Lists(writer)
    system = _system(writer)
    length = _length(rng) if turns is None else turns
    acts = [*_ACTS, (lambda _: lists.act(), _LISTS)]
    weights = [weight * rng.choice((0.3, 1.0, 1.0, 2.0)) for _, weight in acts]
    while len(writer.turns) < length:
        early = len(writer.turns) < length / 4 and rng.random() < 0.7
        opening = telling.introduce if rng.random() < 0.3 else telling.tell
        act = opening if early else rng.choices(acts, weights)[0][0]
        act(writer)
    return Dialogue(system, tuple(writer.turns))


def write_tool_dialogue(rng: Random, split: Split, turns: int | None = None) -> Dialogue:
    """A dialogue with tools: some turns need one, others need none."""
    writer = Writer(rng, split, Style.draw(rng))
    kinds = tools.draw_kinds(writer)
    system = _system(writer)
    clashes = {kind.clashes for kind in kinds}
    others = [*_BESIDE_TOOLS]
    others += [] if "sums" in clashes else [(chatting.do_sum, 1.0), (chatting.number_game, 0.3)]
    others += [] if "world" in clashes else [(chatting.world, 1.0)]
    acts = [*others, (lambda writer: tools.use(writer, kinds), 6.0)]
    weights = [weight for _, weight in acts]
    length = rng.choice((1, 1, 2, 3, 4, 6, 8)) if turns is None else turns
    while len(writer.turns) < length:
        rng.choices(acts, weights)[0][0](writer)
    return Dialogue(system, tuple(writer.turns), tuple(kind.tool for kind in kinds))


def _length(rng: Random) -> int:
    shortest, longest = rng.choices(((2, 8), (8, 16), (16, 40), (40, 90)), (40, 45, 13.5, 1.5))[0]
    return rng.randint(shortest, longest)


def _system(writer: Writer) -> str:
    """A system prompt, or an empty text. It may name the assistant or state a fact."""
    rng = writer.rng
    kind = rng.random()
    if kind < 0.3:
        return expand(rng, phrases.SYSTEM)
    if kind < 0.34:
        writer.bot = words.proper(rng, writer.split, words.NAMES)
        return f"You are {writer.bot}" + expand(rng, "(, a helpful assistant|, a friendly robot|, an assistant|)") + "."
    if kind < 0.37:
        key, text = rng.choice(
            (("name", "You are a helpful assistant. The user's name is {v}."), ("home", "The user lives in {v}."))
        )
        attribute = next(attribute for attribute in attributes_of(ME) if attribute.key == key)
        value = sample(rng, writer.split, ME, attribute)
        if value is not None:
            writer.learn(ME, attribute, value)
            return fill(text, {"v": value})
    return ""


def write_text(rng: Random, split: Split) -> str:
    """Plain text, for completions without a chat."""
    if rng.random() < 0.5:
        return fill(expand(rng, phrases.STORY), chatting.story_fields(rng, split))
    writer = Writer(rng, split)
    drawn = [writer.draw_fact(ME) for _ in range(rng.randint(2, 5))]
    told = {fact[1].key: clause(rng, ME, fact[1], fact[2], "user") for fact in drawn if fact}
    return " ".join(capital(text) + "." for text in told.values())


def main() -> None:
    """Print dialogues, as text or as JSON lines."""
    parser = argparse.ArgumentParser(description="Print dialogues.")
    parser.add_argument("--split", choices=("train", "heldout"), default="train")
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", type=int, help="turns at least (drawn by default)")
    parser.add_argument("--tools", action="store_true", help="dialogues with tools")
    parser.add_argument("--json", action="store_true", help="one dialogue a line, with its checks")
    options = parser.parse_args()
    rng = Random(options.seed)
    for _ in range(options.count):
        dialogue = (write_tool_dialogue if options.tools else write_dialogue)(rng, options.split, options.turns)
        if options.json:
            print(json.dumps(asdict(dialogue)))
            continue
        print(f"--- system: {dialogue.system}")
        for turn in dialogue.turns:
            calls = "".join(
                f"  {tools.written_call(call)}\n  = {result}\n"
                for call, result in zip(turn.calls, turn.results, strict=True)
            )
            print(f"> {turn.user}\n{calls}  {turn.assistant}" + (f"\n      [{turn.check}]" if turn.check else ""))


if __name__ == "__main__":
    main()
