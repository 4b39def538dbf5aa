"""Compares holdfast-tiny with options that make the engine less exact to the engine without them.

It takes two measures on held-out dialogues. First, at each token of the scripted answers, after the scripted text
before it: the share of equal argmaxes. Second, with the dialogues held live, as in `evaluate`: the number of right
answers.

    python -m tools.tiny.precision --set kv_cache_dtype=fp8 --dialogues 40
"""

import argparse
import time
from functools import partial
from random import Random

from benchmarks.lib.invocation import add_engine_options
from holdfast import LLM, SamplingParams

from .dialogues import Dialogue, write_dialogue
from .evaluate import hold, table

LONGEST_ANSWER = 200  # tokens, as in `evaluate`


def argmax_tokens(llm: LLM, dialogues: list[Dialogue]) -> list[int]:
    """The argmax at each position of each scripted answer, and after its end."""
    prompts = []
    for dialogue in dialogues:
        messages = dialogue.messages()
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                asked, answer = llm.text.encode_chat(messages[:place]), llm.text.encode(message["content"])
                prompts += [asked + answer[:known] for known in range(len(answer) + 1)]
    greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    return [completion.token_ids[0] for completion in llm.generate(prompts, greedy, progress=False)]


def answer_all(llm: LLM, histories: list[list[dict[str, str]]]) -> list[str]:
    """Greedy answers to chats."""
    greedy = SamplingParams(temperature=0, max_tokens=LONGEST_ANSWER)
    return [completion.text for completion in llm.chat(histories, greedy, progress=False)]


def share_same(one: list[int], other: list[int]) -> float:
    """Share of positions with equal tokens."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def right(checked: dict[str, dict[str, float]], kind: str = "") -> tuple[int, int]:
    """Numbers of right and of all answers of one kind in `evaluate`'s table; without a kind, of all but totals."""
    rows = [row for name, row in checked.items() if (name == kind if kind else not name.startswith("RECALL"))]
    return int(sum(row["right"] for row in rows)), int(sum(row["of"] for row in rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "--set", "an engine option to examine")
    add_engine_options(parser, "--beside", "an engine option of both")
    parser.add_argument("--dialogues", type=int, default=40)
    parser.add_argument("--turns", type=int, nargs=2, default=(8, 16), help="least and most turns of a dialogue")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.monotonic()
    rng = Random(given.seed)
    dialogues = [write_dialogue(rng, "heldout", rng.randint(*given.turns)) for _ in range(given.dialogues)]
    both = dict(given.beside)
    tokens = []
    for options in (both, both | dict(given.set)):
        with LLM(**options) as llm:
            tokens.append(argmax_tokens(llm, dialogues))
            checked = table(hold(partial(answer_all, llm), dialogues))
        print(f"{options or 'without options'}: {llm.info.precision}, {llm.info.memory.device}")
        for name, kind in (("facts recalled", "RECALL, all"), ("all answers", "")):
            passed, count = right(checked, kind)
            print(f"  {name}: {passed} of {count} ({passed / count:.2%})")
    same = share_same(*tokens)
    print(f"the same argmax at {same:.3%} of {len(tokens[0])} positions")
    print(f"{given.dialogues} dialogues, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
