"""The axes of a state are found whatever class it has, and its verbs do to rows what their names say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.growing_layer import let_grow
from holdfast.lm.padded.loading import as_unmodified
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import RowBytes
from tests.checkpoints import tiny

WINDOW = 4
"""Number of positions that the windowed leaves of the states below keep."""


@pytest.fixture(autouse=True, scope="module")
def inference():
    """States are written to only where no gradients are kept, as in an executor."""
    with torch.inference_mode():
        yield


def layout_of(family):
    return StateLayout.discover(Driver(as_unmodified(tiny(family))).run)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", {"time"}),
        ("bloom", {"time"}),
        ("gemma3", {"time", "counter", "constant"}),
        ("cohere2", {"time", "counter", "constant"}),
        ("mamba", {"row", "constant"}),
        ("mamba2", {"row", "constant"}),
        ("jamba", {"row", "time", "constant"}),
        ("falcon-h1", {"row", "time", "constant"}),
        ("lfm2", {"row", "time", "constant"}),
        ("rwkv", {"row"}),
        ("xlstm", {"row", "counter", "rows", "constant"}),
        ("kimi-linear", {"row", "time", "constant"}),
    ],
)
def test_each_kind_of_cache_has_the_leaves_that_its_model_needs(family, kinds):
    layout = layout_of(family)
    found = {leaf.kind for leaf in layout.leaves}
    assert found - {"rows", "constant"} == kinds - {"rows", "constant"}
    assert layout.batches


def test_a_cache_that_grows_by_another_number_than_one_a_token_is_known_as_such():
    layout = layout_of("deepseek-v4")
    assert not layout.batches
    with pytest.raises(ValueError, match="follows neither rows nor tokens"):
        layout.merge([None], [1])


def test_bytes_of_a_row_count_windows_and_parts_without_positions():
    heads, size, width = 2, 16, 4  # of float32; keys and values
    assert layout_of("llama").row_bytes() == RowBytes(growing=((2 * 2 * heads * size * width, None),))
    one = 2 * heads * size * width
    assert layout_of("gemma3").row_bytes() == RowBytes(growing=((one, None), (one, 7)))
    mamba = layout_of("mamba").row_bytes()
    assert mamba.growing == () and mamba.fixed == 2 * (128 * 4 + 128 * 16) * width


def test_only_a_state_that_keeps_all_positions_can_be_cut_to_fewer():
    assert {family for family in ("llama", "bloom", "gemma3", "mamba", "jamba") if layout_of(family).croppable} == {
        "llama",
        "bloom",
    }


# ---- States without a model. A position is a number, so that what a row holds can be read. -----------------------


class Pair(NamedTuple):
    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class Layer:
    pair: Pair
    latent: torch.Tensor
    """[positions, rows, 2]."""


class Custom:
    """A state of an unusual class: tuples in a list, the time axis before the row axis, and a counter."""

    def __init__(self, numbers):
        rows, positions = numbers.shape
        keys = numbers[:, None, :, None].expand(rows, 2, positions, 3).clone()
        self.layers = [Layer(Pair(keys, keys + 0.5), numbers.t()[..., None].repeat(1, 1, 2))]
        self.seen, self.rows, self.name = positions, rows, "custom"

    @staticmethod
    def read(state, layout):
        numbers = state.layers[0].pair.keys[:, 0, :, 0]
        assert torch.equal(state.layers[0].pair.values[:, 1, :, 2] - 0.5 * (numbers != 0), numbers)
        assert torch.equal(state.layers[0].latent[..., 1].t(), numbers)
        assert (state.rows, state.seen) == tuple(numbers.shape)
        return numbers

    @staticmethod
    def append(state, numbers):
        new = Custom(numbers)
        mine, theirs = state.layers[0], new.layers[0]
        joined = Pair(*(torch.cat(both, 2) for both in zip(mine.pair, theirs.pair, strict=True)))
        state.layers[0] = Layer(joined, torch.cat([mine.latent, theirs.latent]))
        state.seen += numbers.shape[1]
        return state


class Recurrent:
    """A state with a part without positions and one with them: the sum of all tokens of a row, written in place."""

    def __init__(self, numbers):
        self.parts = {"sum": numbers.sum(1)[:, None].repeat(1, 3), "keys": numbers[..., None].clone()}

    @staticmethod
    def read(state, layout):
        numbers = state.parts["keys"][..., 0]
        assert torch.allclose(state.parts["sum"][:, 0], numbers.sum(1))
        return numbers

    @staticmethod
    def append(state, numbers):
        state.parts["sum"] += numbers.sum(1, keepdim=True)
        state.parts["keys"] = torch.cat([state.parts["keys"], numbers[..., None]], 1)
        return state


class Cache:
    """Transformers' own cache: a full layer and one with a window; `grows` for layers that grow in place."""

    grows = False

    @classmethod
    def make(cls, numbers):
        cache = DynamicCache()
        cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=WINDOW + 1)]
        cls.append(cache, numbers)
        return let_grow(cache) if cls.grows else cache

    @staticmethod
    def append(state, numbers):
        keys = numbers[:, None, :, None].expand(-1, 2, -1, 3)
        for layer in range(2):
            state.update(keys, keys.clone(), layer)
        return state

    @staticmethod
    def read(state, layout):
        full, window = (layer.keys[:, 1, :, 2] for layer in state.layers)
        last = min(WINDOW, full.shape[1])
        assert torch.equal(window[:, window.shape[1] - last :], full[:, full.shape[1] - last :])
        assert state.layers[1].cumulative_length == full.shape[1]
        return full


class Growing(Cache):
    grows = True


MAKES: dict[str, Any] = {"custom": Custom, "recurrent": Recurrent, "cache": Cache, "growing": Growing}


def made(kind, numbers):
    numbers = torch.as_tensor(numbers, dtype=torch.float32)
    return getattr(MAKES[kind], "make", MAKES[kind])(numbers)


def layout(kind):
    return StateLayout.discover(lambda rows, tokens: made(kind, 1.0 + torch.arange(rows * tokens).view(rows, tokens)))


def check(kind, state, own, rows):
    """The state holds exactly these rows, right-aligned, zeros before them."""
    numbers = MAKES[kind].read(state, own)
    width = max(map(len, rows))
    assert numbers.tolist() == [[0.0] * (width - len(row)) + row for row in rows]
    assert own.width(state) == width
    assert all(torch.isfinite(tensor).all() for tensor in own.tensors(state))


@pytest.mark.parametrize("kind", MAKES)
@settings(max_examples=40)
@given(data=st.data())
def test_after_any_order_of_verbs_each_row_has_the_tokens_it_has_seen(kind, data):
    own, batch, rows = layout(kind), None, []
    aside: list[tuple[Any, list[float]]] = []  # states alone, and what they hold
    numbers = iter(range(1, 10_000))

    def draw_row():
        return [float(next(numbers)) for _ in range(data.draw(st.integers(1, 9)))]

    for _ in range(data.draw(st.integers(1, 12))):
        verbs = ["merge"] if batch is None else ["embed", "decode", "filter", "extract", "copy", "embed again"]
        match data.draw(st.sampled_from(verbs)):
            case "merge":
                rows = [draw_row() for _ in range(data.draw(st.integers(1, 3)))]
                batch = own.merge([made(kind, [row]) for row in rows], [len(row) for row in rows])
            case "embed":
                row, place = draw_row(), data.draw(st.integers(0, len(rows)))
                batch = own.embed(batch, max(map(len, rows)), place, made(kind, [row]), len(row))
                rows[place : place + 1] = [row]
            case "embed again" if aside:
                state, row = aside.pop()
                batch = own.embed(batch, max(map(len, rows)), len(rows), state, len(row))
                rows.append(row)
            case "decode":
                new = [[float(next(numbers))] for _ in rows]
                batch = MAKES[kind].append(batch, torch.tensor(new))
                rows = [[*row, *more] for row, more in zip(rows, new, strict=True)]
            case "filter":
                kept = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, max_size=4, unique=True))
                batch, rows = own.filter(batch, kept), [rows[row] for row in kept]
            case "extract":
                row = data.draw(st.integers(0, len(rows) - 1))
                aside.append((own.extract(batch, row, len(rows[row])), rows[row]))
            case "copy":
                other = own.copy(batch)
                batch, other = other, batch
                MAKES[kind].append(other, torch.full((len(rows), 1), 7.0))  # is not seen in the copy
        if own.width(batch) > max(map(len, rows)):
            batch = own.release(batch, max(map(len, rows)))
        check(kind, batch, own, rows)
    for state, row in aside:
        check(kind, state, own, [row])


@pytest.mark.parametrize("kind", MAKES)
def test_a_newcomer_that_is_not_longer_leaves_the_others_where_they_are(kind):
    own = layout(kind)
    batch = own.merge([made(kind, [[1.0, 2, 3, 4]]), made(kind, [[5.0, 6]])], [4, 2])
    before = [tensor.data_ptr() for tensor in own.tensors(batch)]
    batch = own.embed(batch, 4, 1, made(kind, [[7.0, 8, 9]]), 3)
    assert [tensor.data_ptr() for tensor in own.tensors(batch)] == before, "nothing but the row itself is written"
    check(kind, batch, own, [[1, 2, 3, 4], [7, 8, 9]])


@pytest.mark.parametrize("kind", MAKES)
def test_a_row_that_leaves_is_replaced_by_the_last_without_a_copy_of_the_others(kind):
    own = layout(kind)
    batch = own.merge([made(kind, [[1.0 + row, 2, 3]]) for row in range(4)], [3] * 4)
    before = [tensor.data_ptr() for tensor in own.tensors(batch)]
    batch = own.filter(batch, [0, 3, 2])
    check(kind, batch, own, [[1, 2, 3], [4, 2, 3], [3, 2, 3]])
    assert [tensor.data_ptr() for tensor in own.tensors(batch)] == before


@pytest.mark.parametrize("kind", MAKES)
def test_an_extracted_row_does_not_change_with_the_batch(kind):
    own = layout(kind)
    batch = own.merge([made(kind, [[1.0, 2, 3]]), made(kind, [[4.0]])], [3, 1])
    alone = own.extract(batch, 1, 1)
    for tensor in own.tensors(batch):
        tensor.fill_(99)
    check(kind, alone, own, [[4]])


def test_a_blank_row_is_all_placeholders():
    own = layout("growing")
    batch = own.merge([made("growing", [[1.0, 2, 3]])], [3])
    batch = own.blank(batch, 3, 1)
    check("growing", batch, own, [[1, 2, 3], []])
    check("growing", own.blank(batch, 3, 0), own, [[0, 0, 0], []])


@pytest.mark.parametrize("kind", ["custom", "cache", "growing"])
def test_a_state_without_parts_of_no_position_is_cut_to_its_first_positions(kind):
    own = layout(kind)
    state = made(kind, [[1.0, 2, 3, 4]])
    check(kind, own.cut(state, 3), own, [[1, 2, 3]])


def test_a_window_that_has_moved_on_cannot_be_cut_unless_its_layer_still_has_the_positions():
    kept = layout("growing")
    state = MAKES["growing"].append(made("growing", [[1.0, 2, 3]]), torch.tensor([[4.0, 5, 6, 7]]))
    check("growing", kept.cut(state, 4), kept, [[1, 2, 3, 4]])
    lost = layout("cache")
    state = MAKES["cache"].append(made("cache", [[1.0, 2, 3]]), torch.tensor([[4.0, 5, 6, 7]]))
    with pytest.raises(ValueError, match="has 1 of the last 4 positions before position 4"):
        lost.cut(state, 4)


def test_a_recurrent_state_cannot_be_cut():
    own = layout("recurrent")
    with pytest.raises(ValueError, match="parts without positions"):
        own.cut(made("recurrent", [[1.0, 2, 3]]), 2)


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        (lambda own, batch: own.embed(batch, 2, 3, None, 1), "row is 3; the batch has rows 0 to 1, and the next is 2"),
        (lambda own, batch: own.extract(batch, 2, 1), "row is 2; the batch has rows 0 to 1"),
        (lambda own, batch: own.filter(batch, []), "at least one must stay"),
        (lambda own, batch: own.filter(batch, [0, 2]), r"rows are \[0, 2\]; the batch has rows 0 to 1"),
        (lambda own, batch: own.cut(batch, 3), "width is 3; the state has 2 positions"),
        (lambda own, batch: own.merge([batch], [1, 2]), "1 states have 2 lengths"),
    ],
)
def test_a_row_or_width_that_a_batch_lacks_is_refused_with_its_number(verb, message):
    own = layout("custom")
    with pytest.raises(ValueError, match=message):
        verb(own, made("custom", [[1.0, 2], [3, 4]]))


@pytest.mark.parametrize("kind", MAKES)
def test_a_state_comes_back_unchanged_from_another_device(kind):
    own = layout(kind)
    state = made(kind, [[1.0, 2, 3, 4, 5]])
    away = own.to(state, torch.device("cpu"), pinned=True)
    for tensor in own.tensors(state):
        tensor.fill_(99)
    check(kind, away, own, [[1, 2, 3, 4, 5]])
    check(kind, own.embed(made(kind, [[6.0]]), 1, 1, away, 5), own, [[6], [1, 2, 3, 4, 5]])


def test_a_state_with_one_tensor_in_two_places_is_not_batched():
    def run(rows, tokens):
        keys = torch.zeros(rows, tokens)
        return {"keys": keys, "again": keys}

    assert not StateLayout.discover(run).batches


def test_a_state_with_a_part_that_comes_only_after_some_tokens_is_not_batched():
    own = StateLayout.discover(
        lambda rows, tokens: [torch.zeros(rows, tokens), torch.zeros(rows) if tokens > 6 else None]
    )
    assert not own.batches
