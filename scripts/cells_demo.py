"""`python -m scripts.cells_demo`: shows requests that join and leave a batch at every step, as cells are batched.

It prints one line for each task that the planner makes: the requests that have nodes in it, those that have joined
since the task before, and those that leave with their results. The application runs on the CPU, so the results are
real.
"""

from __future__ import annotations

import argparse
import itertools
import string
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.cells import applications
from holdfast.cells.application import Application
from holdfast.cells.executor import CpuExecutor
from holdfast.cells.plan import CellRequest
from holdfast.cells.planner import CellPlanner
from holdfast.cells.types import number

SAMPLES = {
    "dates": [
        "3/4/84", "the third of march nineteen eighty-four", "12 jan 1999", "july 4, 1976", "31.12.99",
        "the twenty-first of june two thousand and one", "feb 29 2024", "1/1/70",
    ],
    "listops": [
        "[MAX 2 9 [MIN 4 7 ] 0 ]", "[SM 1 2 3 4 ]", "7", "[MED [MAX 1 2 ] [MIN 8 9 ] 5 ]", "[MIN 3 [SM 9 9 ] ]",
        "[MAX [MAX 1 [MAX 2 3 ] ] 4 ]",
    ],
    "tagger": [
        "Ada flew to Boston.", "It rained.", "On Monday, Grace Hopper met forty students in New York City.",
        "They paid five dollars.", "Nobody came.", "We leave Paris in May and return in September.",
    ],
}  # fmt: skip
NAMES = string.ascii_uppercase


@dataclass(frozen=True)
class Step:
    """One task and its requests."""

    number: int
    cell: str
    nodes: Counter[str]
    """For each request, its number of nodes in the task."""
    size: int
    """The number of nodes that the task is padded to."""
    joined: list[str]
    """Requests whose first nodes are in the task."""
    left: dict[str, str] = field(default_factory=dict)
    """Requests that have ended with the task, and their results."""


def steps(application: Application, texts: Sequence[str], every: int, max_tasks: int) -> Iterator[Step]:
    """Serve the texts, one of which arrives every `every` tasks. Yields each task once it has run."""
    types = number(application.cells)
    planner = CellPlanner(application.cells, types, max_tasks=max_tasks, capacity=4096)
    executor = CpuExecutor(application.cells, types, capacity=4096)
    cells = {kind: cell.name for cell, kind in reversed(types.items())}
    (asked,) = application.inputs
    ahead = list(zip(NAMES, texts, strict=False))
    seen: set[str] = set()
    done = 0
    for turn in itertools.count():
        while ahead and (len(texts) - len(ahead)) * every <= done:
            name, text = ahead.pop(0)
            graph = application.unfold({asked.name: np.array([text], dtype=object)})
            planner.add(CellRequest(name, graph, float(turn)))
        plan = planner.schedule(0, float(turn))
        if plan is None:
            if not ahead:
                return
            done += 1
            continue
        made = [(task, Counter(planner.requests_of(task))) for task in plan.tasks]
        executor.submit(plan)
        ended = {
            output.request_id: in_words(application.finish(output.results))
            for output in planner.update(plan, executor.collect())
        }
        for place, (task, nodes) in enumerate(made):
            joined = sorted(nodes.keys() - seen)
            seen |= nodes.keys()
            done += 1
            last = place == len(made) - 1
            yield Step(done, cells[plan.type], nodes, task.size, joined, ended if last else {})


def in_words(outputs: object) -> str:
    """The outputs of a request on one line."""
    assert isinstance(outputs, dict)
    shown = []
    for name, array in outputs.items():
        values = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in array.ravel().tolist()]
        shown.append(f"{name} {' '.join(values)}")
    return ", ".join(shown)


def line(step: Step) -> str:
    """A step as one line of the table."""
    nodes = " ".join(name if count == 1 else f"{name}*{count}" for name, count in sorted(step.nodes.items()))
    total = step.nodes.total()
    size = f"{total}" if total == step.size else f"{total} of {step.size}"
    return (
        f"{step.number:>4}  {step.cell:<16} {size:>8}  {nodes:<28}  {' '.join(step.joined):<8}  {' '.join(step.left)}"
    ).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scripts.cells_demo", description=__doc__.partition(":")[2])
    parser.add_argument("texts", nargs="*", help="requests; default: some samples of the application")
    parser.add_argument("--app", default="tagger", help="an application whose only input is a text (default: tagger)")
    parser.add_argument("--every", type=int, default=2, help="tasks between two arrivals (default: 2)")
    parser.add_argument("--max-tasks", type=int, default=1, help="tasks that are planned at a time (default: 1)")
    asked = parser.parse_args(arguments)
    try:
        application = applications.find(asked.app)
        texts = asked.texts or SAMPLES.get(application.name, [])
        if [field.dtype for field in application.inputs] != ["string"] or not 1 <= len(texts) <= len(NAMES):
            raise ValueError(f"the demo needs an application with one text as input, and 1 to {len(NAMES)} texts")
        for name, text in zip(NAMES, texts, strict=False):
            print(f"{name}  {text}")
        print(f"\n{'step':>4}  {'cell':<16} {'nodes':>8}  {'requests in the task':<28}  {'joined':<8}  left")
        results: dict[str, str] = {}
        for step in steps(application, texts, max(asked.every, 0), asked.max_tasks):
            print(line(step))
            results |= step.left
    except ValueError as error:
        print(f"cells_demo: {error}", file=sys.stderr)
        return 2
    print()
    for name, result in sorted(results.items()):
        print(f"{name}  {result}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
