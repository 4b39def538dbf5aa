"""Grammars on the executor: masks wait for tokens, forwards do not, and forced tokens come as a segment."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore
from typing import Any

import pytest
import torch

from holdfast.core.types import Grammar, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution import executor as module
from holdfast.lm.execution.executor import PagedExecutor
from holdfast.lm.grammar.compiler import GrammarCompiler
from holdfast.lm.grammar.rows import Answer, ConstrainedRow
from holdfast.lm.models.loader import load
from holdfast.lm.padded.row_parts import DrawnRows
from holdfast.lm.parts.grammars.device import GrammarDevice, GrammarExecutor, constrained_rows
from holdfast.lm.parts.grammars.values import GrammarPlan, GrammarResult
from holdfast.lm.types import PENDING, Sampling, Segment, StepPlan, StepResult, TableWrite
from tests.lm.execution.test_batch import GREEDY, make_batch, segment
from tests.lm.execution.test_executor import CONFIG
from tests.paged import allocated
from tests.tokenizers_made import byte_level

PROMPT = (3, 1, 4, 1, 5)
GRAMMAR = Grammar("regex", "(hello |this is ){3}[a-f]{4}")
END = 1


class Event:
    """A CUDA event of a device that has always done its work. Notes the waits."""

    waits: list[int]

    def __init__(self, **_: Any) -> None:
        self.recorded = False

    def record(self) -> None:
        self.recorded = True

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        assert self.recorded, "the step was not launched to its end"

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@pytest.fixture(params=["cpu", "as on cuda"])
def executor(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PagedExecutor]:
    """An executor that follows grammars; also one that launches steps as on CUDA, over a CPU that computes at once."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 330}))
    model = load(tmp_path, device="cpu", load_format="random")
    grammars = GrammarDevice(GrammarCompiler(byte_level().to_str, 330, (END,)), 1)
    config = EngineConfig(max_sequences=4, block_size=4, token_budget=16)
    device = allocated(model, config, 64, parts=[grammars])
    executor = device.executor
    if request.param == "as on cuda":
        assert executor._worker is not None
        executor._worker.shutdown()
        executor._worker = None
        monkeypatch.setattr(module.torch.cuda, "Event", Event)
    yield executor
    if executor._worker is not None:
        executor.close()


def record(seed: int, **params: Any) -> Sampling:
    given = SamplingParams(temperature=1.0, seed=seed, max_tokens=50, **params)
    return Sampling.of(given, seed, prompt=len(PROMPT), ends=(END,))


def prefill(step: int, *rows: tuple[int, Sampling]) -> StepPlan:
    return StepPlan(
        step,
        tuple(Segment(str(row), row, 0, len(PROMPT), PROMPT, sampling) for row, sampling in rows),
        tuple(TableWrite(row, 0, tuple(range(row * 12, row * 12 + 12))) for row, _ in rows),
        parts=(
            GrammarPlan(
                answers=tuple(Answer(row, len(PROMPT), ()) for row, sampling in rows if sampling.grammar is not None)
            ),
        ),
    )


def decode(step: int, *rows: tuple[int, Sampling]) -> StepPlan:
    at = len(PROMPT) + step - 1
    return StepPlan(step, tuple(Segment(str(row), row, at, at + 1, (PENDING,), sampling) for row, sampling in rows))


def run(executor: PagedExecutor, depth: int, count: int, *rows: tuple[int, Sampling]) -> list[StepResult]:
    """The results of a prompt and of `count` decodes, with `depth` steps in flight."""
    plans = [prefill(0, *rows), *(decode(step, *rows) for step in range(1, count + 1))]
    results, in_flight = [], 0
    for plan in plans:
        executor.submit(plan)
        in_flight += 1
        if in_flight == depth:
            results.append(executor.collect())
            in_flight -= 1
    return results + [executor.collect() for _ in range(in_flight)]


def run_in_two_threads(
    executor: PagedExecutor, depth: int, count: int, *rows: tuple[int, Sampling]
) -> list[StepResult]:
    """The results of `run`, if one thread submits the steps and another collects them, like a rank."""
    submitted, room = SimpleQueue[None](), Semaphore(depth)

    def collect() -> Iterator[StepResult]:
        for _ in range(count + 1):
            submitted.get(timeout=60)
            yield executor.collect()
            room.release()

    with ThreadPoolExecutor(1) as pool:
        collecting = pool.submit(lambda: list(collect()))
        for plan in (prefill(0, *rows), *(decode(step, *rows) for step in range(1, count + 1))):
            assert room.acquire(timeout=60)
            executor.submit(plan)
            submitted.put(None)
        return collecting.result()


def test_a_row_with_a_grammar_is_found_after_drafts() -> None:
    masked = replace(GREEDY, grammar=Grammar("regex", "[a-z]*"))
    batch, writes = make_batch(rows=5), (TableWrite(0, 0, (5, 2)), TableWrite(2, 0, (7,)), TableWrite(3, 0, (6,)))
    segments = (segment(0, 4, (1, 2, 3), GREEDY), segment(2, 0, (6, 7)), segment(2, 2, (8,), GREEDY))
    segments = (*segments, segment(3, 0, (4, 9), masked))
    for samples, at in ((3, 1, 1), 4), (None, 2):
        staged = batch.stage(StepPlan(0, segments, writes, samples=samples))
        assert constrained_rows(staged) == (ConstrainedRow(at, 3, 0, 2, (4, 9), masked, place=2),)


def test_the_tokens_are_the_same_with_any_number_of_steps_in_flight(executor: PagedExecutor) -> None:
    rows = (0, record(1, grammar=GRAMMAR)), (1, record(2)), (3, record(3, grammar=GRAMMAR, logprobs=2))
    runs = [[result.tokens for result in run(executor, depth, 20, *rows)] for depth in (1, 2, 3)]
    assert runs[0] == runs[1] == runs[2]
    alone = [result.tokens for result in run(executor, 2, 20, rows[1])]
    assert [(tokens[1],) for tokens in runs[0]] == alone, "a row without a grammar draws what it draws alone"
    tokenizer = byte_level()
    for place in (0, 2):
        answer = [tokens[place] for tokens in runs[0]]
        text = tokenizer.decode(answer[: answer.index(END)] if END in answer else answer)
        assert text.startswith(("hello ", "this is "))


def test_a_forward_is_launched_before_the_tokens_that_its_masks_need(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list[str]()
    matchers = executor.part(GrammarExecutor).matchers
    forward, masks, read = executor._forward, matchers.masks, matchers.read
    monkeypatch.setattr(executor, "_forward", lambda *given: [happened.append("forward"), forward(*given)][1])
    monkeypatch.setattr(matchers, "masks", lambda *given: [happened.append("masks"), masks(*given)][1])
    monkeypatch.setattr(matchers, "read", lambda *given: [happened.append("read"), read(*given)][1])
    run(executor, 2, 2, (0, record(1, grammar=GRAMMAR)))
    later = ["forward", "masks", "read"] * 3 if executor._worker is not None else [
        "forward", "masks", "forward", "read", "masks", "forward", "read", "masks", "read"
    ]  # fmt: skip
    assert happened == later


def test_the_tokens_are_the_same_where_another_thread_collects(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, count = [(row, record(row, grammar=None if row == 1 else GRAMMAR)) for row in range(3)], 20
    expected = run(executor, 1, count, *rows)
    matchers, using, choose = executor.part(GrammarExecutor).matchers, Lock(), random.Random(2)

    def watched(work: Callable[..., Any], *given: Any) -> Any:
        assert using.acquire(blocking=False), "two threads use the matchers"
        time.sleep(choose.choice((0, 0, 1e-3)))
        try:
            return work(*given)
        finally:
            using.release()

    for name in ("masks", "read", "forced"):
        monkeypatch.setattr(matchers, name, partial(watched, getattr(matchers, name)))
    found = run_in_two_threads(executor, 3, count, *rows)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert all(
        result.part(GrammarResult).forced in (each.part(GrammarResult).forced, ())
        for result, each in zip(found, expected, strict=True)
    )


def test_forced_tokens_follow_as_a_segment_and_give_what_single_steps_give(executor: PagedExecutor) -> None:
    each = [result.tokens[0] for result in run(executor, 1, 12, (0, record(5, grammar=GRAMMAR, logprobs=0)))]
    row = 0, record(5, grammar=GRAMMAR)
    executor.submit(prefill(0, row))
    first = executor.collect()
    (forced,) = first.part(GrammarResult).forced
    assert forced.at == 0 and list(forced.tokens) == each[1 : 1 + len(forced.tokens)]
    known = (first.tokens[0], *forced.tokens)
    start = len(PROMPT)
    executor.submit(decode(1, row))  # was in flight already
    executor.submit(StepPlan(2, (Segment("0", 0, start + 1, start + len(known), known[1:], row[1]),)))
    assert executor.collect().tokens == (forced.tokens[0],)
    assert executor.collect().tokens == (each[len(known)],)


def test_a_step_that_fails_late_raises_where_it_is_collected(
    executor: PagedExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no mask")

    row = 0, record(1, grammar=GRAMMAR)
    executor.submit(prefill(0, row))
    executor.collect()
    executor.submit(decode(1, row))
    if executor._worker is not None:
        executor.collect()
    monkeypatch.setattr(executor.part(GrammarExecutor).matchers, "masks", fail)
    executor.submit(decode(2, row))
    if executor._worker is None:
        executor.collect()
    with pytest.raises(RuntimeError, match="no mask"):
        executor.collect()


@pytest.mark.gpu
def test_a_gpu_draws_the_same_by_grammars_with_any_number_of_steps_in_flight(tmp_path: Path) -> None:
    shape = {"vocab_size": 330, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | shape))
    rows = [(row, record(row, grammar=GRAMMAR if row % 2 else None, top_k=(0, 5)[row // 2])) for row in range(4)]
    found = []
    for depth, run_all in ((1, run), (2, run), (3, run), (3, run_in_two_threads)):
        model = load(tmp_path, device="cuda", load_format="random")
        grammars = GrammarDevice(GrammarCompiler(byte_level().to_str, 330, (END,)), 2)
        config = EngineConfig(max_sequences=4, block_size=16, token_budget=64)
        device = allocated(model, config, 64, parts=[grammars])
        found.append([result.tokens for result in run_all(device.executor, depth, 20, *rows)])
        device.executor.close()
    assert found[0] == found[1] == found[2] == found[3]
    tokenizer = byte_level()
    for place in (1, 3):
        assert tokenizer.decode([tokens[place] for tokens in found[0]]).startswith(("hello ", "this is "))


def test_on_padded_rows_each_draw_gets_the_answers_of_its_own_rows_once() -> None:
    (grammars,) = GrammarDevice(GrammarCompiler(byte_level().to_str, 330, (END,)), 1).row_rules(4, torch.device("cpu"))
    free, bound = replace(GREEDY, grammar=None), replace(GREEDY, grammar=GRAMMAR)
    first, other, last = (Segment(name, row, 0, 5, PROMPT, how) for name, row, how in (
        ("a", 0, bound), ("b", 1, free), ("c", 2, bound),
    ))  # fmt: skip
    answers = (Answer(0, 5, ()), Answer(2, 5, ()))
    grammars.begin(StepPlan(0, (first, other, last), parts=(GrammarPlan(answers),)))
    rules = grammars.of([other, first])
    assert [(each.at, each.row) for each in rules.rows] == [(1, 0)]
    begin = rules.masks().clone()
    assert begin.shape == (1, 12) and begin.any()
    allowed = next(token for token in range(330) if int(begin[0, token // 32]) >> token % 32 & 1)
    rules.drawn(DrawnRows(torch.tensor([7, allowed])))
    rest = grammars.of([last])
    assert [(each.at, each.row) for each in rest.rows] == [(0, 2)] and rest.masks().equal(begin)
    following = first._replace(start=5, stop=6, tokens=(PENDING,))
    assert not grammars.of([following]).masks().equal(begin), "the draw before is read first"
