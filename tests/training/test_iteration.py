"""A micro-batch in any slices: the same bits; and the memory that it lies in."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.lm.kernels.training.losses import CrossEntropy
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.halves import AdapterLayout, Halves, layer_halves
from holdfast.training.iteration import ALIGNMENT, Arena, Iteration, Places, kept_places
from holdfast.training.jobs import HEAD_ROWS, units_of
from tests.tuning import arena_for, native

LENGTHS = (19, 1, 7, 12)
TOKENS = sum(LENGTHS)
RANK = 3


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return native(request.param, tmp_path_factory.mktemp("base"))[1]


class Run:
    """An iteration over fixed numbers, in memory that begins as noise."""

    def __init__(self, model: Decoder, seed: int = 0) -> None:
        layout = AdapterLayout(model.decoder, adapted_modules(model.decoder).tunable, RANK)
        self.arena = arena_for(model)
        noise = torch.Generator().manual_seed(seed)
        for plane in self.arena.planes:
            plane.random_(generator=noise)
        fixed = torch.Generator().manual_seed(1)
        vector = torch.randn(sum(layout.sizes), generator=fixed) * 0.05
        self.grads = torch.full_like(vector, torch.nan)
        ids = torch.randint(1, 90, (TOKENS,), generator=fixed)
        halves = Halves(model, layout, 2.0)
        self.iteration = Iteration(
            halves,
            self.arena,
            self.arena.free.then([("other", 1000)]),
            units_of(layer_halves(model.decoder), TOKENS, backward=True, optimizer=False),
            halves.pack(ids, LENGTHS),
            ids.roll(-1),
            CrossEntropy(torch.rand(TOKENS, generator=fixed) / TOKENS),
            [layout.views(layer, part) for layer, part in enumerate(layout.split(vector))],
            [layout.views(layer, part) for layer, part in enumerate(layout.split(self.grads))],
        )

    def result(self) -> bytes:
        """The bits of the gradients, the loss and the log probabilities."""
        assert self.iteration.done and torch.isfinite(self.grads).all()
        numbers = self.grads, self.iteration.loss, self.iteration.logprobs
        return b"".join(each.numpy().tobytes() for each in numbers)


@pytest.fixture(scope="module")
def whole(model: Decoder) -> bytes:
    """The result of one slice that keeps everything."""
    run = Run(model)
    run.iteration.run(0, len(run.iteration.units), keep=True)
    return run.result()


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_bits_do_not_depend_on_cuts_keeping_releasing_or_other_work(
    model: Decoder, whole: bytes, chance: random.Random
) -> None:
    run = Run(model, seed=chance.randrange(1000))
    while not run.iteration.done:
        stop = min(len(run.iteration.units), run.iteration.at + chance.randint(1, 6))
        run.iteration.run(run.iteration.at, stop, keep=chance.random() < 0.5)
        if chance.random() < 0.2:
            run.iteration.release()
        torch.randn(64, 64) @ torch.randn(64, 64)
    assert run.result() == whole


def test_release_frees_most_of_the_memory_and_done_frees_what_was_kept(model: Decoder) -> None:
    run = Run(model)
    forward = 2 * model.decoder.num_layers
    run.iteration.run(0, forward, keep=True)
    kept = max(run.iteration.places.depths)
    run.iteration.release()
    assert max(run.iteration.places.depths) < 0.5 * kept
    other = Run(model)
    other.iteration.run(0, len(other.iteration.units), keep=True)
    assert max(other.iteration.places.depths) < 0.5 * kept


def test_units_run_in_order_and_once(model: Decoder) -> None:
    iteration = Run(model).iteration
    iteration.run(0, 2, keep=True)
    for first, stop in ((0, 1), (3, 4), (2, 99)):
        with pytest.raises(ValueError, match=rf"units {first} to {stop} cannot run: the next is 2"):
            iteration.run(first, stop, keep=True)


def test_the_head_is_cut_into_chunks_whose_losses_add_up(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENS < HEAD_ROWS
    run = Run(model)
    run.iteration.run(0, len(run.iteration.units), keep=True)
    for module in ("holdfast.training.iteration", "holdfast.training.jobs"):
        monkeypatch.setattr(f"{module}.HEAD_ROWS", 10)
    cut = Run(model)
    assert sum(unit.kind == "head" for unit in cut.iteration.units) == 4
    cut.iteration.run(0, len(cut.iteration.units), keep=True)
    torch.testing.assert_close(cut.iteration.loss, run.iteration.loss)
    torch.testing.assert_close(cut.iteration.logprobs, run.iteration.logprobs)
    torch.testing.assert_close(cut.grads, run.grads, atol=1e-6, rtol=1e-4)


@given(st.lists(st.integers(0, 5000), max_size=12), st.lists(st.integers(1, 5000), max_size=12))
def test_places_do_not_overlap_and_later_ones_leave_earlier_ones(first: list[int], second: list[int]) -> None:
    before = Places.none(2).then((f"a{n}", size) for n, size in enumerate(first))
    after = before.then((f"b{n}", size) for n, size in enumerate(second))
    sizes = {f"{letter}{n}": size for letter, part in (("a", first), ("b", second)) for n, size in enumerate(part)}
    assert {name: after.at[name] for name in before.at} == before.at
    spans = [(plane, -offset, -offset + sizes[name]) for name, (plane, offset) in after.at.items()]
    assert all(a[0] != b[0] or a[2] <= b[1] or b[2] <= a[1] for a, b in combinations(spans, 2))
    assert all(stop <= 0 and -start <= after.depths[plane] for plane, start, stop in spans)


@given(
    plane_bytes=st.integers(3500, 5500), offset=st.integers(0, 300), size=st.integers(0, 700), block=st.integers(1, 99)
)
def test_tensors_lie_aligned_within_the_blocks_that_are_asked_for(
    plane_bytes: int, offset: int, size: int, block: int
) -> None:
    memory = torch.zeros(offset + plane_bytes + block, dtype=torch.uint8)
    plane = memory[offset : offset + plane_bytes // block * block]
    arena = Arena([plane, plane.clone()], block)
    places = arena.free.then([("x", 4 * size), ("y", 8), ("z", 4 * size)])
    for name, count in (("x", size), ("y", 2), ("z", size)):
        tensor = arena.tensor(places, name, (count,), torch.float32)
        assert count == 0 or tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(1.0)
    blocks = arena.blocks(places)
    assert not plane[: len(plane) - blocks * block].any()
    assert max(places.depths) <= blocks * block < max(places.depths) + 2 * ALIGNMENT + block


def test_a_plane_that_is_too_small_is_refused_with_both_sizes(model: Decoder) -> None:
    halves = Halves(model, AdapterLayout(model.decoder, ("q",), 1), 1.0)
    arena = arena_for(model)
    _, everything = kept_places(halves, 100_000, arena.free)
    with pytest.raises(ValueError, match=r"bytes before the end of a plane of \d+ bytes: take fewer tokens"):
        arena.tensor(everything, (0, "mlp", "gate"), (1,), torch.float32)


def test_layers_without_a_cache_share_the_planes_of_the_others(model: Decoder) -> None:
    halves = Halves(model, AdapterLayout(model.decoder, adapted_modules(model.decoder).tunable, RANK), 1.0)
    arena = arena_for(model)
    inputs, everything = kept_places(halves, 100, arena.free)
    assert len(inputs.at) == 2 * model.decoder.num_layers
    assert {plane for plane, _ in everything.at.values()} == set(range(2 * model.spec.num_layers))
    assert max(everything.depths) < 1.5 * sum(everything.depths) / len(everything.depths)


def test_an_arena_is_the_memory_of_its_cache(model: Decoder, tmp_path: Path) -> None:
    arena = arena_for(model)
    spec = model.spec
    assert len(arena.planes) == 2 * spec.num_layers and arena.num_blocks == 400
    assert arena.block_bytes == 16 * spec.num_kv_heads * spec.head_dim * 4
