"""Layers that grow in place give models the same keys and values as Transformers' own layers."""

import copy

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from holdfast.lm.padded.growing_layer import FixedLayer, GrowingLayer, GrowingWindowLayer, growing, let_grow
from holdfast.lm.types import QUANTUM
from tests.checkpoints import tiny
from tests.padded_checks import CACHE

HEADS, SIZE = 2, 4


def states(rows, positions):
    """Random keys and values of `positions` positions."""
    return torch.randn(rows, HEADS, positions, SIZE), torch.randn(rows, HEADS, positions, SIZE + 1)


@pytest.mark.parametrize(
    ("growing", "own"),
    [
        pytest.param(GrowingLayer, DynamicLayer, id="full"),
        *(
            pytest.param(
                lambda window=window: GrowingWindowLayer(sliding_window=window),
                lambda window=window: DynamicSlidingWindowLayer(sliding_window=window),
                id=f"window {window}",
            )
            for window in (2, 8, 300)
        ),
    ],
)
def test_a_layer_gives_the_same_as_the_layer_of_transformers(growing, own):
    torch.manual_seed(0)
    ours, theirs = growing(), own()
    for positions in (5, 1, 1, 13, 1, 260, 1, 1, 7, *[1] * 20):
        assert ours.get_mask_sizes(positions) == theirs.get_mask_sizes(positions)
        given = states(3, positions)
        for mine, right in zip(ours.update(*given), theirs.update(*given), strict=True):
            assert torch.equal(mine, right)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("layer", [GrowingLayer(), GrowingWindowLayer(sliding_window=8)])
def test_a_new_position_moves_no_other_until_the_buffer_is_full(layer):
    layer.update(*states(2, 3))
    place = layer.keys.untyped_storage().data_ptr()
    for _ in range(QUANTUM - 3):
        layer.update(*states(2, 1))
        assert layer.keys.untyped_storage().data_ptr() == place
    layer.update(*states(2, 1))
    assert layer.keys.untyped_storage().data_ptr() != place


def test_a_buffer_has_room_for_the_next_multiple_of_256_positions_alone():
    layer = GrowingLayer()
    for positions, room in ((200, 256), (56, 256), (1, 512), (600, 1024)):
        layer.update(*states(2, positions))
        assert layer.keys.untyped_storage().nbytes() == 2 * HEADS * room * SIZE * 4


def test_a_buffer_shrinks_with_the_next_position_once_much_of_it_is_released():
    layer = GrowingLayer()
    layer.update(*states(4, 1000))
    last = layer.keys[:2, :, -10:].clone()
    layer.reframe(2, 990, 1000)
    assert torch.equal(layer.keys, last)
    keys, _ = layer.update(*states(2, 1))
    assert torch.equal(keys[:, :, :10], last)
    assert layer.keys.untyped_storage().nbytes() == 2 * HEADS * QUANTUM * SIZE * 4


def test_columns_in_front_come_from_released_ones_and_are_zero():
    layer = GrowingLayer()
    keys, values = states(2, 20)
    layer.update(keys, values)
    layer.reframe(2, 8, 20)
    place = layer.keys.untyped_storage().data_ptr()
    layer.reframe(2, -5, 12)
    assert layer.keys.untyped_storage().data_ptr() == place, "five of eight released columns are taken back"
    assert torch.equal(layer.keys, torch.cat([torch.zeros(2, HEADS, 5, SIZE), keys[:, :, 8:]], 2))
    assert torch.equal(layer.values, torch.cat([torch.zeros(2, HEADS, 5, SIZE + 1), values[:, :, 8:]], 2))
    layer.reframe(3, -10, 15)  # there is no room for so many; the last two columns go
    assert torch.equal(layer.keys[:2], torch.cat([torch.zeros(2, HEADS, 15, SIZE), keys[:, :, 8:18]], 2))
    assert not layer.keys[2].any() and not layer.values[2].any()


def test_rows_that_left_are_zero_when_others_take_their_place():
    layer = GrowingLayer()
    layer.update(*states(3, 4))
    place = layer.keys.untyped_storage().data_ptr()
    layer.reframe(2, 0, 4)
    layer.reframe(3, 0, 4)
    assert layer.keys.untyped_storage().data_ptr() == place
    assert not layer.keys[2].any() and not layer.values[2].any()


def test_a_copied_layer_grows_apart():
    layer = GrowingLayer()
    layer.update(*states(1, 4))
    other = copy.copy(layer)
    mine, theirs = states(1, 1), states(1, 1)
    before = layer.keys.clone()
    other.update(*theirs)
    layer.update(*mine)
    assert torch.equal(layer.keys, torch.cat([before, mine[0]], 2))
    assert torch.equal(other.keys, torch.cat([before, theirs[0]], 2))


def test_keys_that_someone_else_sets_are_kept():
    layer = GrowingLayer()
    layer.update(*states(2, 4))
    keys, values = states(1, 3)
    layer.keys, layer.values = keys, values
    more = states(1, 1)
    assert torch.equal(layer.update(*more)[0], torch.cat([keys, more[0]], 2))


def test_only_exactly_transformers_dynamic_layers_are_replaced():
    class Other(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4), Other(), LinearAttentionLayer()]
    assert let_grow(cache) is cache
    assert [type(layer) for layer in cache.layers] == [GrowingLayer, GrowingWindowLayer, Other, LinearAttentionLayer]
    assert cache.layers[1].sliding_window == 4
    assert let_grow([torch.zeros(2)])[0].shape == (2,), "a state of another class stays as it is"


@torch.inference_mode()
def test_a_model_computes_the_same_with_layers_that_grow():
    module = tiny("gemma3")
    ids = torch.arange(1, 25)[None]
    logits, state = [], None
    for own in (True, False):
        output = module(input_ids=ids[:, :12], use_cache=True)
        state = output[CACHE] if own else let_grow(output[CACHE])
        logits.append([module(input_ids=ids[:, at : at + 1], **{CACHE: state}).logits for at in range(12, 24)])
    assert all(torch.equal(mine, right) for mine, right in zip(*logits, strict=True))


def buffers(rows, positions):
    """Buffers with old numbers in them."""
    return tuple(torch.full((rows, HEADS, positions, size), 9.0) for size in (SIZE, SIZE + 1))


@pytest.mark.parametrize("make", [GrowingLayer, lambda: GrowingWindowLayer(sliding_window=4)])
def test_a_settled_layer_takes_in_the_column_that_a_fixed_layer_writes(make):
    torch.manual_seed(0)
    settled, plain, (keys, values) = make(), make(), buffers(4, 32)
    first, column = states(3, 5), torch.tensor([20])
    for layer in (settled, plain):
        layer.update(*first)
    settled.settle(keys, values, 20)
    fixed = FixedLayer(keys, values, column)
    assert (fixed.get_seq_length(), fixed.get_mask_sizes(1)) == (31, (32, 0))
    for at in range(20, 26):
        assert settled.settled(keys) == at
        new = states(3, 1)
        padded = tuple(torch.cat((each, torch.zeros_like(each[:1]))) for each in new)
        assert fixed.update(*padded)[0].data_ptr() == keys.data_ptr()
        settled.take_column()
        if isinstance(settled, GrowingWindowLayer):
            settled.cumulative_length += 1
        plain.update(*new)
        column += 1
        assert torch.equal(settled.keys, plain.keys) and torch.equal(settled.values, plain.values)
    assert settled.keys.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
    assert not keys[3, :, :20].any() and not keys[:, :, 26:].any()


def test_a_layer_settles_again_within_the_same_memory():
    torch.manual_seed(0)
    layer, first = GrowingLayer(), states(2, 5)
    layer.update(*first)
    memory = buffers(1, 400)
    for rows, positions, end in ((4, 32, 20), (2, 64, 5), (2, 8, 8)):
        views = [each.view(-1)[: rows * HEADS * positions * each.shape[-1]] for each in memory]
        keys, values = (
            view.view(rows, HEADS, positions, each.shape[-1]) for view, each in zip(views, memory, strict=True)
        )
        layer.settle(keys, values, end)
        assert torch.equal(layer.keys, first[0]) and torch.equal(layer.values, first[1])
        assert layer.settled(keys) == end
    with pytest.raises(RuntimeError, match="no next column"):
        layer.take_column()
    layer.update(*states(2, 1))
    assert layer.settled(keys) is None
    assert torch.equal(layer.keys[:, :, :5], first[0])


def test_layers_without_positions_are_not_among_those_that_grow():
    cache = DynamicCache()
    cache.update(*states(1, 3), 0)
    cache.layers.append(LinearAttentionLayer())
    assert growing(let_grow(cache)) == [cache.layers[0]]
    assert growing(states(1, 1)) == []
