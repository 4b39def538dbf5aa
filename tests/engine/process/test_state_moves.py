"""Moves of hybrid conversations between real engines: the turn at the new engine computes its new tokens only."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from holdfast.core.types import Identity, SamplingParams
from holdfast.engine.process.parts.moves import ChunkFinder, MoveHandler
from holdfast.lm.config import EngineConfig
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.snapshots import Snapshot, StateKey
from holdfast.lm.parts.moves.messages import ChunksFetched, FetchChunks
from tests.checkpoints import make
from tests.combinations.bench import Asked, Bench
from tests.engine.process.parts.test_states import SIZES, drawn, generated
from tests.engine.process.test_chunk_service import between
from tests.engine.ranks.test_hybrids import PAIRS
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


@pytest.mark.parametrize("seed", range(12))
def test_a_move_that_is_cut_or_spoilt_anywhere_costs_computing_and_no_wrong_token(
    served: tuple[Any, Path], engines: Engines, seed: int
) -> None:
    source, target = engines(), engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    choose = random.Random(seed)
    slot, pool = source.loop.planner._kind.states.slot_bytes, source.engine.info.memory.block
    wrong, cuts = choose.randrange(slot + 12 * pool), choose.random() < 0.5

    def spoil(data: bytes, at: int) -> bytes | None:
        if not at <= wrong < at + len(data):
            return data
        place = wrong - at
        return None if cuts else data[:place] + bytes([data[place] ^ 64]) + data[place + 1 :]

    with between(source.info.chunk_address, spoil) as address:
        told = fetch(target, source, prompt, address)
    assert told.reason and told.tokens == 0, "blocks without their state serve nothing"
    check_idle(source, target)
    target.run({"moved": Asked(prompt, PARAMS)})
    assert (target.tokens["moved"], target.cached["moved"]) == (generated(served[0], prompt, 9), 0)
    assert fetch(target, source, prompt).reason == "", "a second move brings the rest"
    check_idle(source, target)


def test_a_state_that_is_evicted_during_the_move_is_computed(served: tuple[Any, Path], engines: Engines) -> None:
    source, target = engines(), engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    states = source.loop.planner._kind.states
    find = states.hold

    def lose(key: StateKey) -> list[Snapshot]:
        """Evict the state when it is asked for: its blocks have moved by then."""
        (snapshot,) = find(key)
        states.release(snapshot)
        for leave in (states._leave_device, states._leave_host):
            if (snapshot.slot if leave == states._leave_device else snapshot.host) >= 0:
                leave(snapshot)
        return find(key)

    with patch.object(states, "hold", lose):
        told = fetch(target, source, prompt)
    assert (told.tokens, told.reason) == (0, "the source does not have all of it")
    check_idle(source, target)
    target.run({"moved": Asked(prompt, PARAMS)})
    assert (target.tokens["moved"], target.cached["moved"]) == (generated(served[0], prompt, 9), 0)


def test_a_source_that_has_no_state_of_a_chain_gives_no_blocks(engines: Engines) -> None:
    source, target = engines(), engines()
    source.run({"long": Asked(drawn(60, seed=4), PARAMS)})
    told = fetch(target, source, drawn(60, seed=4)[:30])
    assert (told.tokens, told.reason) == (0, "the source keeps no recurrent state after these blocks")
    assert target.stats().chunk_bytes_in == 0
    check_idle(source, target)


def test_a_target_whose_host_has_no_slot_brings_nothing(engines: Engines) -> None:
    source, target = engines(), engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    states = target.loop.planner._kind.states
    taken = [states.reserve_on_host(0.0) for _ in range(states.host_slots // 2)]
    told = fetch(target, source, prompt)
    assert (told.tokens, told.reason) == (0, "the host tier has no slot for a recurrent state")
    for slot in taken:
        states.cancel_on_host(slot)
    assert fetch(target, source, prompt).tokens == len(prompt) - 8
    check_idle(source, target)


def test_states_do_not_move_between_engines_whose_states_differ(engines: Engines, tmp_path: Path) -> None:
    make(tmp_path, "GraniteMoeHybrid")
    source, target = engines(), engines(model=str(tmp_path))
    prompt = talk(source, 1, drawn(41, seed=1))
    told = fetch(target, source, prompt)
    assert told.tokens == 0 and "its blocks are" in told.reason


def test_a_state_that_was_at_the_target_already_is_not_sent_again(served: tuple[Any, Path], engines: Engines) -> None:
    source, target = engines(), engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    assert fetch(target, source, prompt).tokens == len(prompt) - 8
    before = target.stats().chunk_bytes_in
    assert fetch(target, source, prompt) == ChunksFetched(target.sent[-1].number, 0, "")
    assert target.stats().chunk_bytes_in == before
    check_idle(source, target)


@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2)], ids=str)
def test_engines_of_several_ranks_move_the_state_of_each_rank(tmp_path: Path, layout: dict[str, int]) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path, "Qwen3_5Text", **PAIRS)
    options = SIZES | {"model": str(tmp_path), "chunk_host": "127.0.0.1", "host_cache_gb": 0.004} | layout
    source, target = Bench(EngineConfig(**options)), Bench(EngineConfig(**options))
    prompt = talk(source, 2, drawn(41, seed=1))
    assert fetch(target, source, prompt).reason == ""
    target.run({"moved": Asked(prompt, PARAMS)})
    assert (target.tokens["moved"], target.cached["moved"]) == (generated(module, prompt, 9), len(prompt) - 8)
    check_idle(source, target)
    for each in (source, target):
        each.close()


def test_an_engine_reports_only_blocks_before_a_state(engines: Engines) -> None:
    source = engines()
    prompt = talk(source, 1, drawn(41, seed=1))
    finder = source.engine.handler(ChunkFinder)
    assert finder.find(1, chain_of(prompt)).device == len(prompt) // SIZE * SIZE - 2 * SIZE, "a state of 49 tokens"
    assert finder.find(2, chain_of(prompt)[:11]).device == 0, "blocks before the end of the turn serve nothing"
