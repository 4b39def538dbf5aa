"""Moves of hybrid conversations between real engines: the turn at the new engine computes its new tokens only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.types import Identity, SamplingParams
from holdfast.engine.process.parts.moves import MoveHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from tests.checkpoints import make
from tests.combinations.bench import Asked, Bench
from tests.engine.process.parts.test_states import SIZES, drawn, generated
from tests.hybrid import check_hybrid

PARAMS = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
SIZE = SIZES["block_size"]
Engines = Callable[..., Bench]


@pytest.fixture(scope="module", params=["Qwen3_5Text", "NemotronH", "Lfm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, request.param), directory


@pytest.fixture
def engines(served: tuple[Any, Path]) -> Iterator[Engines]:
    """Makes engines of the model that move blocks. All end with the test."""
    made: list[Bench] = []

    def start(**changes: Any) -> Bench:
        options = SIZES | {"model": str(served[1]), "chunk_host": "127.0.0.1", "host_cache_gb": 0.004} | changes
        made.append(Bench(EngineConfig(**options)))
        return made[-1]

    yield start
    for each in made:
        each.close()


def chain_of(prompt: tuple[int, ...]) -> list[bytes]:
    return block_digests(Identity().root(), prompt[: len(prompt) // SIZE * SIZE], SIZE)


def fetch(target: Bench, source: Bench, prompt: tuple[int, ...], address: str = "") -> ChunksFetched:
    """Move what `source` has of a prompt to `target`. Returns the answer."""
    chain, number = chain_of(prompt), len(target.sent) + 1
    target.say(FetchChunks(number, chain, list(range(len(chain))), address or source.info.chunk_address, SIZE))
    handlers = [each.engine.handler(MoveHandler) for each in (source, target)]
    target.until(lambda: bool(target.answer(number)) and not any(each.ready for each in handlers), source)
    (answer,) = target.answer(number)
    assert isinstance(answer, ChunksFetched)
    return answer


def check_idle(*benches: Bench) -> None:
    """No slot or block is held or reserved, and none is lost."""
    for each in benches:
        states, pool = each.loop.planner._kind.states, each.loop.planner.pool
        handlers = [each.engine.handler(MoveHandler)]
        each.until(lambda: not any(handler.ready for handler in handlers))  # noqa: B023
        check_hybrid(each.loop.planner)
        assert not states._host.reserved and not states._wanted
        assert all(not snapshot.holds for snapshot in states.snapshots())
        assert pool.host.held == 0


def talk(bench: Bench, turns: int, prompt: tuple[int, ...], name: str = "turn") -> tuple[int, ...]:
    """Hold a conversation of this many turns. Returns the prompt of the next one."""
    for number in range(turns):
        bench.run({f"{name}{number}": Asked(prompt, PARAMS)})
        prompt += bench.tokens[f"{name}{number}"] + drawn(7, seed=number + 2)
    return prompt


def test_the_turn_after_a_move_computes_its_new_tokens_only(served: tuple[Any, Path], engines: Engines) -> None:
    source, target = engines(), engines()
    assert source.info.chunk_reason == ""
    prompt = talk(source, 2, drawn(41, seed=1))
    told = fetch(target, source, prompt)
    assert told.reason == "" and told.tokens == len(prompt) - 8
    target.run({"moved": Asked(prompt, PARAMS)})
    assert target.tokens["moved"] == generated(served[0], prompt, 9)
    assert target.cached["moved"] == len(prompt) - 7 - 1
    state = target.loop.planner._kind.states
    assert target.stats().chunk_bytes_in == source.stats().chunk_bytes_out > state.slot_bytes
    check_idle(source, target)


def test_a_conversation_goes_there_and_back(served: tuple[Any, Path], engines: Engines) -> None:
    source, target = engines(), engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    for number, (here, there) in enumerate([(source, target), (target, source), (source, target)]):
        assert fetch(there, here, prompt).reason == ""
        there.run({f"leg{number}": Asked(prompt, PARAMS)})
        assert there.tokens[f"leg{number}"] == generated(served[0], prompt, 9)
        assert there.cached[f"leg{number}"] == len(prompt) - 8
        prompt += there.tokens[f"leg{number}"] + drawn(7, seed=number + 20)
    check_idle(source, target)
