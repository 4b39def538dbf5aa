"""Real models with recurrent layers give equal tokens with and without drafts, whatever happens meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.choice import compose_scheduler, make_planning
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.models.base import Model
from holdfast.lm.models.loader import load
from holdfast.lm.parts.speculation.choice import make_drafter, make_parts
from holdfast.lm.parts.speculation.verification import Verification
from holdfast.lm.parts.standard import standard_parts
from holdfast.lm.parts.states.device import StateDevice
from holdfast.lm.scheduler.entries import Entry
from holdfast.lm.scheduler.part import PartStep
from holdfast.loop.loop import Loop
from tests.checkpoints import VOCAB, make
from tests.drafted import FREE, TICKS, ticks
from tests.hybrid import check_hybrid
from tests.long import then_long
from tests.paged import sizes

__all__ = ["ticks"]
pytestmark = pytest.mark.usefixtures("ticks")

FAMILIES = ("Qwen3_5Text", "FalconH1", "Lfm2", "NemotronH", "Bamba", "GraniteMoeHybrid", "Qwen3Next")
"""Families. The first three have all kinds of recurrent layers: gated delta rules, Mamba 2, and convolutions alone."""
LONGEST, BLOCKS, HOST_BLOCKS, SNAPSHOTS = 150, 42, 60, 3
FEW = ((3, 40.0), (7, 40.0), (9, 39.5))
"""Answers of few tokens repeat themselves, but not always."""
KINDS: tuple[dict[str, Any], ...] = (
    dict(temperature=0.0, logit_bias=FEW),
    dict(temperature=0.0, logit_bias=((5, 100.0),)),
    dict(temperature=0.6, logit_bias=FEW),
    dict(temperature=0.8, logit_bias=FEW, stop_token_ids=(9,)),
    dict(temperature=0.8, frequency_penalty=0.1, repetition_penalty=1.02, logit_bias=FEW),
)


Answers = dict[str, tuple[int, ...]]
"""The answers of turns, by name."""


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: the tokens that it adds, and how its answer is drawn."""

    name: str
    after: str
    """Name of the turn that it follows; empty: it begins a conversation."""
    added: tuple[int, ...]
    params: SamplingParams
    priority: int


def script(seed: int) -> list[Turn]:
    """The turns of conversations that begin alike, go on, and branch. A turn comes after the one that it follows."""
    choose, turns = random.Random(seed), list[Turn]()
    greeting = tuple(choose.randrange(1, VOCAB) for _ in range(24))
    for number in range(16):
        after = choose.choice(turns[-5:]).name if turns and choose.random() < 0.75 else ""
        begins = () if after else greeting[: choose.choice((0, 9, 24))]
        added = begins + tuple(choose.randrange(1, VOCAB) for _ in range(choose.randint(1, 14)))
        kind: dict[str, Any] = {"seed": number, "max_tokens": choose.randint(4, 50), "ignore_eos": True}
        params = SamplingParams(**kind | choose.choice(KINDS))
        turns.append(Turn(str(number), after, added, params, choose.choice((0, 0, 1))))
    return turns


class Guessing(Verification):
    """Drafts up to six tokens of the answers that are expected. Four in ten of the drafts have a wrong token."""

    name = "guessing"

    def __init__(self, answers: Answers, choose: random.Random) -> None:
        super().__init__()
        self._answers, self._choose = answers, choose
        self.drafted = 0

    def draft(self, step: PartStep) -> dict[Entry, tuple[int, ...]]:
        return {entry: self._guess(entry) for entry, _, _ in step.decodes}

    def _guess(self, entry: Entry) -> tuple[int, ...]:
        at = entry.sequence.length - 1 - len(entry.sequence.request.prompt)
        guesses = list(self._answers[entry.id][at:][: self._choose.randint(0, 6)])
        if guesses and self._choose.random() < 0.4:
            guesses[self._choose.randrange(len(guesses))] += 1
        self.drafted += len(guesses)
        return tuple(guesses)


def play(
    model: Model,
    seed: int,
    speculation: Any,
    *,
    expected: Answers | None = None,
    aborts: bool = True,
    **options: Any,
) -> tuple[Answers, set[str], Counter[str]]:
    """The answers of a script's turns, the names of aborted ones, and what happened.

    A turn that follows an aborted one is left out. With `expected` answers, `Guessing` drafts them.
    """
    choose, seen = random.Random(seed), Counter[str]()
    host = choose.choice((0, HOST_BLOCKS))
    config = EngineConfig(
        **dict(max_sequences=5, block_size=4, token_budget=choose.choice((16, 48)), draft_tokens=6) | options,
        max_model_len=LONGEST,
        speculation=speculation,
        host_cache_gb=0.001 if host else 0,
    )
    device = PagedDevice(model, config, parts=[StateDevice(0.25)])
    shape = device.allocate(replace(sizes(BLOCKS, host, SNAPSHOTS), host_snapshots=4 if host else 0))
    if device.memory.host is not None:
        device.memory.host.begin()
        device.memory.host.wait()
    planning = make_planning(config, shape, FREE)
    guessing = Guessing(expected or {}, random.Random(seed))
    own = make_parts(planning, make_drafter(config, shape, "cpu")) if expected is None else [guessing]
    parts = [*own, *standard_parts(planning)]
    scheduler = compose_scheduler(planning, planning.policy, parts)
    loop = Loop(scheduler, device.executor, choose.choice((1, 2, 3)), TICKS.monotonic)
    waiting, texts = script(seed), dict[str, tuple[int, ...]]({"": ()})
    answers, running, aborted = Answers(), dict[str, Turn](), set[str]()
    while waiting or running:
        ready = [turn for turn in waiting if turn.after in texts]
        if ready and choose.random() < 0.4:
            turn = ready[0]
            waiting.remove(turn)
            if (prompt := texts[turn.after] + turn.added)[LONGEST - 8 :]:
                continue
            running[turn.name], answers[turn.name] = turn, ()
            loop.add(Request(turn.name, prompt, turn.params, priority=turn.priority))
        if not ready and not running:
            break
        if aborts and running and choose.random() < 0.02:
            name = choose.choice(list(running))
            loop.abort(name)
            aborted.add(name)
            del running[name]
        for output in loop.step() or ():
            name = output.request_id
            answers[name] += output.tokens
            seen["steps with several tokens"] += len(output.tokens) > 1
            seen["right guesses"] += max(0, len(output.tokens) - 1)
            if output.finish_reason:
                turn = running.pop(name)
                seen[str(output.finish_reason)] += 1
                texts[name] = texts[turn.after] + turn.added + answers[name]
        check_hybrid(scheduler)
    while loop.has_work():
        loop.step()
    stats = scheduler.stats()
    names = "drafts_accepted", "preemptions", "snapshot_hits", "snapshots_swapped_in"
    seen.update({name: getattr(stats, name) for name in names})
    seen["guessed"] = guessing.drafted
    loop.close()
    return answers, aborted, seen


@pytest.fixture(scope="module", params=then_long(3, FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    make(directory, request.param)
    return load(directory, device="cpu", dtype="float32")


@pytest.mark.always("Qwen3_5Text")
def test_random_conversations_give_the_tokens_that_they_get_without_drafts(model: Model) -> None:
    seen = Counter[str]()
    for seed in range(4):
        plain, _, _ = play(model, seed, "off", aborts=False)
        answers, aborted, events = play(model, seed, "ngram", expected=plain)
        seen += events
        check(answers, plain, aborted)
    assert seen["right guesses"] > 150
    assert seen["guessed"] > seen["right guesses"] + 60, "many guesses must be wrong"
    assert seen["preemptions"] > 2
    assert seen["snapshot_hits"] > 10


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_the_tokens_that_models_give_without_drafts(family: str, tmp_path: Path) -> None:
    make(tmp_path, family)
    on_gpu, seen = load(tmp_path, device="cuda", dtype="float32"), Counter[str]()
    for seed in range(4):
        plain, _, _ = play(on_gpu, seed, "off", aborts=False)
        answers, aborted, events = play(on_gpu, seed, "ngram", expected=plain)
        seen += events
        check(answers, plain, aborted)
    assert seen["right guesses"] > 150
    assert seen["guessed"] > seen["right guesses"] + 60, "many guesses must be wrong"


@pytest.mark.always("Qwen3_5Text-suffix")
@pytest.mark.parametrize("speculation", then_long(1, ["suffix", "ngram"]))
def test_drafters_give_the_tokens_that_models_give_without_drafts(model: Model, speculation: str) -> None:
    plain, _, _ = play(model, 6, "off", aborts=False)
    answers, aborted, seen = play(model, 6, speculation, max_sequences=2)
    check(answers, plain, aborted)
    assert seen["drafts_accepted"] > 0


def check(answers: Answers, plain: Answers, aborted: set[str]) -> None:
    """Raise AssertionError unless answers are the plain ones. An aborted answer may be shorter."""
    for name, tokens in answers.items():
        expected = plain[name]
        assert tokens == (expected[: len(tokens)] if name in aborted else expected), f"turn {name} differs"
