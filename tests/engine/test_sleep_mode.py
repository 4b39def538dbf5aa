"""Sleep mode of a real engine: its memory is given back, and answers and kept conversations are the same after it."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from holdfast.core.config import BUILTIN_MODEL
from holdfast.core.types import Grammar, Identity, Request, SamplingParams
from holdfast.engine.checkpoint import Checkpoint
from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.process.parts.grammars import GrammarHandler
from holdfast.engine.process.parts.sleep import SleepHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.sleep.messages import Asleep, Sleep, SleepRefused, Slept, WakeUp
from tests.lm.execution.test_returnable_memory import resident

OPTIONS: dict[str, Any] = {
    "device": "cpu", "enable_sleep_mode": True, "cache_gb": 0.05, "host_cache_gb": 0.05, "max_model_len": 512,
    "eviction": "lru",  # without a cost model: it may find a loaded machine faster at computing than at copying
}  # fmt: skip
PROMPTS = [tuple((17 * row + at * at) % 3000 + 5 for at in range(length)) for row, length in enumerate((200, 97, 33))]


class Running:
    """A real engine, whose loop and handlers are driven by the test."""

    def __init__(self, **options: Any) -> None:
        self.woken = threading.Event()
        self.engine: Engine = build_engine(EngineConfig(**OPTIONS | options), wake=self.woken.set)
        self.handler = self.engine.handler(SleepHandler)
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.numbers = 0

    def turn(self) -> list[Any]:
        answers = [answer for handler in self.engine.handlers for answer in handler.answers()]
        if self.engine.loop.has_work():
            for output in self.engine.loop.step() or ():
                self.tokens[output.request_id] += output.tokens
        elif self.handler.busy and not self.handler.ready:
            assert self.woken.wait(60)
            self.woken.clear()
        return answers

    def order(self, kind: type[Sleep | WakeUp], *fields: Any) -> Any:
        self.numbers += 1
        self.handler.receive(kind(self.numbers, *fields))
        answers: list[Any] = []
        while not any(isinstance(answer, Slept | SleepRefused) for answer in answers):
            answers += self.turn()
        return next(answer for answer in answers if isinstance(answer, Slept | SleepRefused))

    def submit(self, prefix: str, most: int = 12) -> None:
        info = self.engine.info
        for place, prompt in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
            identity = Identity(info.model, "", info.precision)
            name = f"{prefix}{place}"
            self.tokens[name] = ()
            self.engine.loop.add(Request(id=name, prompt=prompt, params=params, identity=identity))

    def answers(self, prefix: str, most: int = 12) -> list[tuple[int, ...]]:
        self.submit(prefix, most)
        while self.engine.loop.has_work():
            self.turn()
        return [self.tokens[f"{prefix}{place}"] for place in range(len(PROMPTS))]

    @property
    def stats(self) -> Any:
        return self.engine.loop.stats()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    engine = Running()
    yield engine
    engine.engine.close()


@pytest.mark.parametrize("level", [1, 2])
def test_answers_are_equal_after_a_sleep_and_conversations_are_found_on_the_host(running: Running, level: int) -> None:
    expected = running.answers(f"first {level} ")
    before = running.stats
    assert running.order(Sleep, level, "abort") == Slept(running.numbers)
    assert running.stats.blocks_cached == 0
    assert running.order(WakeUp, []) == Slept(running.numbers)
    assert running.answers(f"second {level} ") == expected
    after = running.stats
    assert after.prefix_hits_on_host - before.prefix_hits_on_host == 192 + 96 + 32
    assert after.tokens_dropped == 0


def test_suspended_answers_go_on_where_they_were(running: Running) -> None:
    expected = running.answers("whole ", 40)
    running.submit("kept ", 40)
    while not all(running.tokens[f"kept {place}"] for place in range(len(PROMPTS))):
        running.turn()
    assert running.order(Sleep, 1, "keep") == Slept(running.numbers)
    held = [len(running.tokens[f"kept {place}"]) for place in range(len(PROMPTS))]
    assert all(0 < count < 40 for count in held)
    running.order(WakeUp, ["kv_cache"])
    running.turn()
    assert [len(running.tokens[f"kept {place}"]) for place in range(len(PROMPTS))] == held, "the weights are absent"
    running.order(WakeUp, ["weights"])
    while running.engine.loop.has_work():
        running.turn()
    assert [running.tokens[f"kept {place}"] for place in range(len(PROMPTS))] == expected


def test_a_request_whose_grammar_is_compiled_when_the_order_comes_is_refused(running: Running) -> None:
    """It has not begun, and nothing would end it while the engine sleeps."""
    grammars, info = running.engine.handler(GrammarHandler), running.engine.info
    params = SamplingParams(max_tokens=8, grammar=Grammar("regex", "[ab]{3}"))
    request = Request("ruled", PROMPTS[2], params, identity=Identity(info.model, "", info.precision))
    assert grammars.take(request)
    running.handler.receive(Sleep(0, 1, "wait"))
    answers: list[Any] = []
    while grammars.busy or Slept(0) not in answers:
        answers += running.turn()
    answers += running.turn()
    assert Asleep("ruled") in answers and not running.engine.loop.has_work()
    running.order(WakeUp, [])
    assert not running.engine.loop.has_work()
    assert grammars.take(request)
    running.tokens["ruled"] = ()
    while len(running.tokens["ruled"]) < 3:
        running.turn()


def test_memory_of_weights_and_cache_is_given_back_to_the_system(running: Running) -> None:
    running.answers("full ")
    executor: Any = running.engine.loop.executor
    parts = [executor._model.embedding, executor._model.layers[0].gate_up, *executor.memory.cache.groups]
    assert all(map(resident, parts))
    for level in (1, 2):
        running.order(Sleep, level, "abort")
        assert not any(map(resident, parts))
    running.order(WakeUp, [])
    assert resident(parts[0])


def test_weights_that_have_changed_meanwhile_are_not_served_with_old_conversations(tmp_path: Path) -> None:
    builtin, own = Checkpoint.find(BUILTIN_MODEL).directory, tmp_path / "own"
    shutil.copytree(builtin, own)
    file = own / "model.safetensors"
    running = Running(model=str(own))
    try:
        expected = running.answers("before ")
        assert running.order(Sleep, 2, "abort") == Slept(1)
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("up_proj.weight"))
        save_file(tensors | {name: tensors[name] * 1.5}, file, {"format": "pt"})
        refused = running.order(WakeUp, ["weights"])
        assert isinstance(refused, SleepRefused) and "weights have changed" in refused.reason
        assert running.handler.halted
        shutil.copy(builtin / "model.safetensors", file)
        assert running.order(WakeUp, []) == Slept(3)
        assert running.answers("after ") == expected
    finally:
        running.engine.close()


def test_a_checkpoint_that_is_gone_leaves_the_engine_asleep_until_it_is_back(tmp_path: Path) -> None:
    own, away = tmp_path / "own", tmp_path / "away"
    shutil.copytree(Checkpoint.find(BUILTIN_MODEL).directory, own)
    running = Running(model=str(own))
    try:
        expected = running.answers("before ")
        running.order(Sleep, 2, "abort")
        own.rename(away)
        refused = running.order(WakeUp, [])
        assert isinstance(refused, SleepRefused) and "cannot be read again" in refused.reason
        assert str(tmp_path) not in refused.reason
        away.rename(own)
        assert running.order(WakeUp, []) == Slept(3)
        assert running.answers("after ") == expected
    finally:
        running.engine.close()
