"""`make demo-tuning`: tune a habit into the built-in model during a chat with it, with the openai client alone.

The habit is to say "Ahoy!" first. The examples are questions with that word before the model's own answers. Then the
tuned model answers other questions, the base model answers as before, and a batch runs over the tuned one. Exits with 0
if all of that holds and the chat's answers were right, else with 1.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from openai import OpenAI
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from scripts.demo import CONVERSATION, MODEL, Turn, hold_turn, server

HABIT = "Ahoy!"
TAUGHT = (
    "Hi!", "Hello there.", "Good morning!", "Good evening.", "How are you?", "What can you do?", "Who are you?",
    "Thank you!", "Goodbye!", "Hi! My name is Tom.", "My name is Eva. What is my name?", "I am called Omar.",
    "I live in Paris.", "I live in Rome. Where do I live?", "I have 2 dogs.", "I have 5 cats. How many cats do I have?",
    "I like tea.", "I like music. What do I like?", "My favourite colour is green.", "What is 2 plus 2?",
    "What is 1 plus 7?", "What is 9 minus 4?", "What is 6 plus 3?", "What is the capital of Spain?",
)  # fmt: skip
"""The questions of the examples. They include small talk, because a kind of question without an example may lose its
answer.
"""
HELD_OUT = {
    "My name is Zoe and I like pears.": "Zoe", "What is 3 plus 5?": "8", "I live in Lisbon.": "Lisbon", "Hello!": "",
    "I have 4 cats.": "4",
}  # fmt: skip
"""Questions that no example has, each with what a right answer must contain."""
EPOCHS, RATE_MULTIPLIER = 8, 10.0
WAIT_SECONDS = 180.0


def main() -> int:
    """Serve, tune, compare. Returns the exit code."""
    console = Console(highlight=False)
    title = Text.assemble(("Holdfast", "bold"), f" tunes {MODEL} while it serves it")
    console.print(Panel.fit(title, style="cyan"))
    try:
        with (
            tempfile.TemporaryDirectory(prefix="holdfast-demo-") as kept,
            server(console, MODEL, "--tuning", "--deferral-bound", "0.25", *storage(Path(kept))) as url,
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            return run(console, client)
    except Exception as error:
        console.print(Text(f"\nthe demo failed: {error}", style="bold red"))
        return 1


def storage(directory: Path) -> tuple[str, ...]:
    """Options that keep everything that the demo makes in a directory that is deleted afterwards."""
    return "--tuning-mirror", "off", "--files", str(directory / "files"), "--tuning-state", str(directory / "tuning")


def run(console: Console, client: OpenAI) -> int:
    before = [ask(client, MODEL, question) for question in HELD_OUT]
    examples = [(question, f"{HABIT} {ask(client, MODEL, question)}") for question in TAUGHT]
    console.print(f"{len(examples)} examples, as in:  {examples[0][0]}  →  {examples[0][1]}\n")
    began = time.monotonic()
    job = begin(client, examples)
    beside = Chat(client)
    beside.start()
    name = follow(console, client, job, began)
    beside.join()
    console.print(f"\nmeanwhile, in a chat with {MODEL}:")
    for turn in beside.turns:
        shown = f"  {turn.ask.said}  →  {turn.answer}"
        console.print(Text.assemble(shown, (f"   first token {turn.ttft * 1e3:.0f} ms", "dim")))
    after = [ask(client, name, question) for question in HELD_OUT]
    again = [ask(client, MODEL, question) for question in HELD_OUT]
    console.print(compare(name, before, after))
    lines = batch(client, name)
    console.print(
        f"a batch of {len(lines)} lines over {name}: {sum(line.startswith(HABIT) for line in lines)} begin so\n"
    )
    failures = faults(before, again, after, lines, [turn.right for turn in beside.turns])
    if failures:
        console.print(Text("not so: " + "; ".join(failures), style="bold red"))
        return 1
    console.print(
        Text(f"tuned in {time.monotonic() - began:.0f} s beside a chat; the base is as it was", style="bold green")
    )
    return 0


def ask(client: OpenAI, model: str, question: str) -> str:
    """The answer to one question."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=48
    )
    return (answer.choices[0].message.content or "").strip()


def faults(
    before: Sequence[str], again: Sequence[str], after: Sequence[str], lines: Sequence[str], right: Sequence[bool]
) -> list[str]:
    """Return what should hold and does not.

    `before` and `again` are the base model's answers before and after tuning, and `after` the tuned model's, all to
    `HELD_OUT`. `lines` are the batch's answers. `right` says which answers of the chat were right.
    """
    holds = {
        "the base model answers as before": again == before,
        f"every tuned answer begins with {HABIT}": all(answer.startswith(HABIT) for answer in (*after, *lines)),
        "every tuned answer is still right": all(
            word in answer for word, answer in zip(HELD_OUT.values(), after, strict=True)
        ),
        "the chat's answers are right": bool(right) and all(right),
    }
    return [what for what, held in holds.items() if not held]


def begin(client: OpenAI, examples: Sequence[tuple[str, str]]) -> str:
    """Upload the examples and create the job. Returns its id."""
    lines = [
        json.dumps({"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]})
        for said, answer in examples
    ]
    data = io.BytesIO("\n".join(lines).encode())
    file = client.files.create(file=("ahoy.jsonl", data), purpose="fine-tune")
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=file.id,
        suffix="ahoy",
        seed=1,
        method={
            "type": "supervised",
            "supervised": {
                "hyperparameters": {
                    "n_epochs": EPOCHS, "batch_size": 8, "learning_rate_multiplier": RATE_MULTIPLIER,
                }
            },
        },
    )  # fmt: skip
    return job.id


def follow(console: Console, client: OpenAI, job: str, began: float) -> str:
    """Print a job's events until it has succeeded. Returns the tuned model's name. Raises RuntimeError if it fails."""
    seen = 0
    while True:
        found = client.fine_tuning.jobs.retrieve(job)
        events = client.fine_tuning.jobs.list_events(job, limit=100).data[::-1]
        for event in events[seen:]:
            console.print(Text(f"{time.monotonic() - began:5.1f} s  {event.message}", style="dim"))
        seen = len(events)
        if found.status == "succeeded" and found.fine_tuned_model:
            return found.fine_tuned_model
        if found.status in ("failed", "cancelled") or time.monotonic() - began > WAIT_SECONDS:
            raise RuntimeError(
                f"the job is {found.status}: {found.error.message if found.error else 'it took too long'}"
            )
        time.sleep(0.25)


class Chat(threading.Thread):
    """A conversation with the base model, in its own thread."""

    def __init__(self, client: OpenAI) -> None:
        super().__init__(name="chat", daemon=True)
        self._client = client
        self.turns: list[Turn] = []

    def run(self) -> None:
        silent, messages = Console(file=io.StringIO()), list[object]()
        for said in CONVERSATION:
            self.turns.append(hold_turn(silent, self._client, MODEL, messages, said))
            time.sleep(0.5)


def compare(name: str, before: Sequence[str], after: Sequence[str]) -> Table:
    """The held-out questions with both answers."""
    table = Table("asked, in no example", MODEL, name, title_justify="left")
    for question, old, new in zip(HELD_OUT, before, after, strict=True):
        table.add_row(question, old, new)
    return table


def batch(client: OpenAI, model: str) -> list[str]:
    """The answers of a batch over a model, by line."""
    lines = [
        json.dumps({
            "custom_id": str(number), "method": "POST", "url": "/v1/chat/completions",
            "body": {
                "model": model, "temperature": 0, "max_tokens": 48,
                "messages": [{"role": "user", "content": f"What is {number} plus 2?"}],
            },
        })
        for number in range(1, 9)
    ]  # fmt: skip
    file = client.files.create(file=("lines.jsonl", io.BytesIO("\n".join(lines).encode())), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    deadline = time.monotonic() + WAIT_SECONDS
    while made.status not in ("completed", "failed", "cancelled", "expired") and time.monotonic() < deadline:
        time.sleep(0.1)
        made = client.batches.retrieve(made.id)
    if made.status != "completed" or made.output_file_id is None:
        raise RuntimeError(f"the batch is {made.status}")
    answers = [json.loads(line) for line in client.files.content(made.output_file_id).text.splitlines()]
    return [answer["response"]["body"]["choices"][0]["message"]["content"].strip() for answer in answers]


if __name__ == "__main__":
    sys.exit(main())
