"""Measures holdfast-tiny on dialogues with names, sums and combinations that training never saw.

Each dialogue is held live: the model's own answers are its history, except where the next message takes up a scripted
answer.

    python -m tools.tiny.evaluate --model holdfast/builtin/holdfast-tiny --dialogues 200
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from .dialogues import Dialogue, write_dialogue, write_tool_dialogue
from .tools import written_call
from .writer import Check

FAR = 6  # turns


def answer_all(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    histories: list[list[dict[str, Any]]],
    rows: int,
    tools: Sequence[Sequence[dict[str, Any]]] | None = None,
) -> list[str]:
    """Greedy answers to chats, `rows` at a time, longest first. `tools` has the tools of each chat."""
    prompts = [
        tokenizer.apply_chat_template(history, tools=offered, tokenize=False, add_generation_prompt=True)
        for history, offered in zip(histories, tools or [None] * len(histories), strict=True)
    ]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    answers = [""] * len(prompts)
    for start in range(0, len(order), rows):
        chosen = order[start : start + rows]
        batch = tokenizer(
            [prompts[index] for index in chosen],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=200,
                do_sample=False,
            )
        for index, row in zip(chosen, output[:, batch["input_ids"].shape[1] :], strict=True):
            answers[index] = tokenizer.decode(row, skip_special_tokens=True)
    return answers


def hold(
    answer_all: Callable[[list[list[dict[str, Any]]]], list[str]], dialogues: list[Dialogue]
) -> list[tuple[Check, str, str]]:
    """Hold all dialogues, turn by turn. `answer_all` answers several chats.

    (check, message, answer) of checked turns.
    """
    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": d.system}] if d.system else [] for d in dialogues
    ]
    checked = []
    for number in range(max(len(d.turns) for d in dialogues)):
        going = [index for index, dialogue in enumerate(dialogues) if number < len(dialogue.turns)]
        for index in going:
            histories[index].append({"role": "user", "content": dialogues[index].turns[number].user})
        answers = answer_all([histories[index] for index in going])
        for index, answer in zip(going, answers, strict=True):
            turn = dialogues[index].turns[number]
            histories[index].append({"role": "assistant", "content": turn.assistant if turn.leads else answer})
            if turn.check is not None:
                checked.append((turn.check, turn.user, answer))
    return checked


def hold_with_tools(
    answer_all: Callable[[list[list[dict[str, Any]]], list[tuple[dict[str, Any], ...]]], list[str]],
    dialogues: list[Dialogue],
) -> list[tuple[Check, str, str]]:
    """Hold dialogues with tools, as `hold` does, but with scripted answers as history. Checks each turn's calls, too.

    A call that is not the expected one, letter for letter, is wrong.
    """
    checked: list[tuple[Check, str, str]] = []
    histories: list[list[dict[str, Any]]] = [
        [{"role": "system", "content": d.system}] if d.system else [] for d in dialogues
    ]

    def ask(which: list[int]) -> list[str]:
        return answer_all([histories[index] for index in which], [dialogues[index].tools for index in which])

    for number in range(max(len(d.turns) for d in dialogues)):
        going = [index for index, dialogue in enumerate(dialogues) if number < len(dialogue.turns)]
        turns = {index: dialogues[index].turns[number] for index in going}
        for index, turn in turns.items():
            histories[index].append({"role": "user", "content": turn.user})
        for index, answer in zip(going, ask(going), strict=True):
            calls = "".join(written_call(call) for call in turns[index].calls)
            if calls:
                checked.append((Check("tool call", (f"[{calls}]",)), turns[index].user, f"[{answer}]"))
                histories[index] += turns[index].called()
            else:
                checked.append((Check("no tool call", forbid=('"arguments"',)), turns[index].user, answer))
        called = [index for index in going if turns[index].calls]
        for index, answer in zip(called, ask(called), strict=True):
            check = turns[index].check
            assert check is not None
            checked.append((check, turns[index].user, answer))
        for index, turn in turns.items():
            histories[index].append({"role": "assistant", "content": turn.assistant})
    return checked


def table(checked: list[tuple[Check, str, str]]) -> dict[str, dict[str, float]]:
    """Share of right answers by kind, and of all recall by distance."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for check, _, answer in checked:
        passed = check.passes(answer)
        counts[check.kind].append(passed)
        if check.kind.startswith("recall"):
            counts["RECALL, all"].append(passed)
            if check.turns >= FAR:
                counts[f"RECALL over {FAR} turns and more"].append(passed)
    return {
        kind: {"right": sum(c), "of": len(c), "share": round(sum(c) / len(c), 4)} for kind, c in sorted(counts.items())
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("holdfast/builtin/holdfast-tiny"))
    parser.add_argument("--dialogues", type=int, default=200)
    parser.add_argument("--turns", type=int, nargs=2, default=(8, 16), help="length of the dialogues, from and to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=256, help="chats at a time")
    parser.add_argument("--json", type=Path, help="also write the table and every wrong answer here")
    parser.add_argument("--wrong", type=int, default=10, help="wrong answers to print")
    options = parser.parse_args()
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    rng = Random(options.seed)
    dialogues = [write_dialogue(rng, "heldout", rng.randint(*options.turns)) for _ in range(options.dialogues)]
    checked = hold(lambda chats: answer_all(model, tokenizer, chats, options.rows), dialogues)
    with_tools = [write_tool_dialogue(rng, "heldout") for _ in range(options.dialogues)]
    checked += hold_with_tools(
        lambda chats, tools: answer_all(model, tokenizer, chats, options.rows, tools), with_tools
    )
    result = table(checked)
    print(f"{'kind':34} {'right':>6} {'of':>6} {'share':>7}")
    for kind, row in result.items():
        print(f"{kind:34} {row['right']:6} {row['of']:6} {row['share']:7.1%}")
    turns, seconds = sum(len(dialogue.turns) for dialogue in (*dialogues, *with_tools)), time.monotonic() - started
    print(f"{2 * options.dialogues} dialogues, half of them with tools, {turns} turns, {device}, {seconds:.0f} s")
    wrong = [(check, user, answer) for check, user, answer in checked if not check.passes(answer)]
    for check, user, answer in wrong[: options.wrong]:
        told = " + ".join(check.expect) or check.result
        print(f"wrong ({check.kind}, told {check.turns} turns ago, {told}): {user!r} -> {answer!r}")
    if options.json:
        rows = [
            {"kind": c.kind, "expect": [*c.expect, c.result], "turns": c.turns, "user": u, "answer": a}
            for c, u, a in wrong
        ]
        options.json.write_text(json.dumps({"table": result, "wrong": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
