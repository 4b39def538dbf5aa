"""What options that make the engine less exact do to holdfast-tiny, beside the engine without them.

Two measures on held-out dialogues. Of each token of the scripted answers, behind all that is scripted before it: how
often the likeliest is the same. And the dialogues held live, as `evaluate` holds them: how many answers are right.

    python -m scripts.tiny.precision --set kv_cache_dtype=fp8 --dialogues 40
"""

import argparse
import time
from functools import partial
from random import Random

from benchmarks.engine_options import add_engine_options
from holdfast import LLM, SamplingParams

from .dialogues import Dialogue, write_dialogue
from .evaluate import hold, table

LONGEST_ANSWER = 200  # tokens, as in `evaluate`


def likeliest_tokens(llm: LLM, dialogues: list[Dialogue]) -> list[int]:
    """The token that the engine finds likeliest at each place of each scripted answer and behind its end."""
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
    """The share of places at which both have the same token."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def right(checked: dict[str, dict[str, float]], kind: str = "") -> tuple[int, int]:
    """Right answers and all, of a kind of `evaluate`'s table; without one, of all kinds but its sums of others."""
    rows = [row for name, row in checked.items() if (name == kind if kind else not name.startswith("RECALL"))]
    return int(sum(row["right"] for row in rows)), int(sum(row["of"] for row in rows))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser, "--set", "an engine option to look at")
    add_engine_options(parser, "--beside", "one that both have")
    parser.add_argument("--dialogues", type=int, default=40)
    parser.add_argument("--turns", type=int, nargs=2, default=(8, 16), help="length of the dialogues, from and to")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    started = time.monotonic()
    rng = Random(given.seed)
    dialogues = [write_dialogue(rng, "heldout", rng.randint(*given.turns)) for _ in range(given.dialogues)]
    both = dict(given.beside)
    tokens = []
    for options in (both, both | dict(given.set)):
        with LLM(**options) as llm:
            tokens.append(likeliest_tokens(llm, dialogues))
            checked = table(hold(partial(answer_all, llm), dialogues))
        print(f"{options or 'without options'}: {llm.info.precision}, {llm.info.device}")
        for name, kind in (("facts recalled", "RECALL, all"), ("all answers", "")):
            passed, count = right(checked, kind)
            print(f"  {name}: {passed} of {count} ({passed / count:.2%})")
    same = share_same(*tokens)
    print(f"the same likeliest token at {same:.3%} of {len(tokens[0])} places")
    print(f"{given.dialogues} dialogues, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
