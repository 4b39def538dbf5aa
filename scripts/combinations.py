"""Draw docs/combinations.md from the table of features that the tests serve (tests/combinations/table.py).

    python scripts/combinations.py

Needs only Python. `tests/scripts/test_combinations.py` compares the page with the table.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.combinations.table import FEATURES, REFUSED, Refusal  # noqa: E402

PAGE = ROOT / "docs" / "combinations.md"
HEAD = """\
# Combinations

Most features of an engine work together. **W** is a pair that works. A number is that of the
[reason](#why-a-pair-does-not-work) why a pair does not.

"""
MEANING = """
A pair **works** if a real engine has served it (`make test-long`), with the greedy answers of a plain engine, and the
effect of each feature was seen. The plain engine has the same weights, type of cache and adapter. A pair **does not
work** if the engine refuses it in the tests, with the words below. `make combinations` draws this page from the table
that the tests use (`tests/combinations/table.py`).
"""
EFFECTS = """
## What the tests look for

| feature | asked for by | effect |
|---|---|---|
"""
REASONS = """
## Why a pair does not work

These are the engine's words, for a Llama, for a T5 where the model is an encoder-decoder, or for a Bamba where it has
recurrent layers.

"""
TAIL = """
## Three and more features

Sixty random combinations of three to seven features are served in the same way
([results](../benchmarks/engine/results/{results})). A few of them run with the other tests,
and `make fuzz` runs all.

Applications of cells have engines of their own, which run next to any of these
([how](serving-cells.md#beside-a-language-model)).
"""
RESULTS = "2026-11-28-combinations-cpu.txt"


def reasons() -> dict[str, int]:
    """The number of each reason, in the order of the table."""
    found = dict.fromkeys(said(refusal) for pair in ordered() if (refusal := REFUSED.get(frozenset(pair))))
    return {reason: number for number, reason in enumerate(found, 1)}


def ordered() -> list[tuple[str, str]]:
    """All pairs, by the rows of the page."""
    return [(row, column) for row in FEATURES for column in FEATURES if row != column]


def said(refusal: Refusal) -> str:
    """A reason, as the page gives it: one that many options share names none of them."""
    reason = re.sub(r"^\w+ is [^,]+, (?=which is for the paged)", "OPTION is VALUE, ", refusal.reason)
    reason = re.sub(r"(?<=padded rows cannot run it with ).*", "OPTION VALUE", reason)
    reason = re.sub(r"^(tp|pp) is 2, ", "OPTION is 2, ", reason)
    return f"{refusal.starts} It reports `{reason}`." if refusal.starts else f"`{reason}`"


def cell(row: str, column: str, numbers: dict[str, int]) -> str:
    """The cell of a pair."""
    if row == column:
        return ""
    refusal = REFUSED.get(frozenset((row, column)))
    return "W" if refusal is None else str(numbers[said(refusal)])


def draw() -> str:
    """The page."""
    numbers = reasons()
    heads = "".join(f" {feature.short} |" for feature in FEATURES.values())
    rows = [
        f"| {feature.title} |" + "".join(f" {cell(row, column, numbers)} |" for column in FEATURES) + "\n"
        for row, feature in FEATURES.items()
    ]
    effects = [f"| {each.title} | {each.asked} | {each.effect} |\n" for each in FEATURES.values()]
    listed = [f"{number}. {reason}\n" for reason, number in numbers.items()]
    table = f"| |{heads}\n|---|{'---|' * len(FEATURES)}\n" + "".join(rows)
    parts = [HEAD, table, MEANING, REASONS, *listed, EFFECTS, *effects, TAIL.format(results=RESULTS)]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(draw())
