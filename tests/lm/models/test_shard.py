"""Shards of a decoder: every number of a checkpoint has a device, and no device has more than its share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from holdfast.core.layout import Layout
from holdfast.lm.models.adapted import SOURCES, adapted_modules
from holdfast.lm.models.decoder_spec import DecoderSpec, layer_shapes, shapes_of_layer
from holdfast.lm.models.families import NAMES
from holdfast.lm.models.loader import native_spec
from holdfast.lm.models.rope import Rope
from holdfast.lm.models.shard import (
    Shard,
    layer_pieces,
    module_pieces,
    own_adapter,
    own_modules,
    parts_of_layer,
    pieces_of_layer,
    shard_of,
    vocabulary_piece,
)
from tests.adapted_families import NATIVE_FAMILIES
from tests.adapters import drawn
from tests.checkpoints import DIFFERENCES, SIZES, tiny


def spec(**changes: Any) -> DecoderSpec:
    sizes = dict(
        vocab_size=101,
        hidden_size=24,
        intermediate_size=40,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        head_dim=6,
        max_positions=64,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
        windows=(None, 1, 2, 3, 4, 5),
    )
    return DecoderSpec(architecture="Made", rms_eps=1e-6, rope=Rope(1e4), names=NAMES, **{**sizes, **changes})


def shards(of: DecoderSpec, layout: Layout) -> list[Shard]:
    return [shard_of(of, layout, rank) for rank in range(layout.ranks)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_hold_every_number_of_a_split_tensor_once(tp: int) -> None:
    whole = spec(num_kv_heads=8)
    for field, shapes in layer_shapes(whole).items():
        for part, shape in enumerate(shapes):
            held = torch.zeros(shape)
            pieces = [layer_pieces(whole, shard)[field][part] for shard in shards(whole, Layout(tp=tp))]
            for piece in pieces:
                assert piece.whole == shape
                held[piece.slices] += 1
                assert held[piece.slices].shape == piece.shape
            split = field.removesuffix("_bias") in ("qkv", "gate_up") or field in ("o", "down")
            assert (held == (1 if split else tp)).all(), field


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_query_heads_lie_with_their_kv_heads(tp: int) -> None:
    for kv_heads in (1, 2, 4, 8):
        whole = spec(num_kv_heads=kv_heads)
        for shard in shards(whole, Layout(tp=tp)):
            queries, keys = shard.part(8), shard.kv_heads(kv_heads)
            # The query heads of one device share its KV heads evenly and in order, as attention computes them.
            assert [head * kv_heads // 8 for head in queries] == [
                keys[place * len(keys) // len(queries)] for place in range(len(queries))
            ]
            assert shard.own(whole).num_kv_heads == len(keys) == max(1, kv_heads // tp)


@pytest.mark.parametrize("vocab_size", [16, 97, 100, 101, 103])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_token_has_one_device(vocab_size: int, tp: int) -> None:
    pieces = [vocabulary_piece(spec(vocab_size=vocab_size), shard) for shard in shards(spec(), Layout(tp=tp))]
    assert [token for piece in pieces for token in piece.own[0]] == list(range(vocab_size))
    assert all(0 < piece.shape[0] <= -(-vocab_size // tp) for piece in pieces)


def test_stages_hold_their_layers_and_windows() -> None:
    whole = spec()
    stages = shards(whole, Layout(pp=3))
    assert [(shard.first, shard.last) for shard in stages] == [(True, False), (False, False), (False, True)]
    assert [layer for shard in stages for layer in shard.layers] == list(range(6))
    assert [window for shard in stages for window in shard.own(whole).windows] == list(whole.windows)
    assert shards(spec(windows=()), Layout(pp=3))[1].own(spec(windows=())).windows == ()


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        (dict(num_heads=6, num_kv_heads=6), 4, "must divide the model's 6 attention heads"),
        (dict(intermediate_size=42), 4, "must divide the model's 42 MLP columns"),
        (dict(num_heads=12, num_kv_heads=3), 4, "must divide, or be divided by, the model's 3 KV heads"),
        (dict(vocab_size=15), 4, "a vocabulary of at least 16 tokens, not 15"),
    ],
)
def test_a_size_that_cannot_be_split_is_named(changes: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"tp is {tp}; .*{message}"):
        shard_of(spec(**changes), Layout(tp=tp), 0)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pp is 7; the model has 6 layers"):
        shard_of(spec(), Layout(pp=7), 0)


def fused_spec(name: str) -> DecoderSpec:
    """The spec of a tiny model whose checkpoint fuses layers."""
    _, stem, differences = NATIVE_FAMILIES[name]
    module = tiny(stem, **differences)
    return native_spec({**module.config.to_dict(), "architectures": [type(module).__name__]})


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    [("", tp, pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (1, 3), (2, 3))]
    + [(name, tp, pp) for name in ("phi3-partial", "falcon", "gpt2") for tp, pp in ((2, 1), (1, 2))],
)
def test_the_parts_of_an_adapter_add_up_to_the_whole(name: str, tp: int, pp: int) -> None:
    whole, layout = fused_spec(name) if name else spec(num_kv_heads=4), Layout(tp=tp, pp=pp)
    weights, modules = drawn(whole, 4, seed=1), adapted_modules(whole).modules
    for (layer, module), pair in weights.pairs.items():
        x = torch.randn(3, pair.a.shape[1], generator=torch.Generator().manual_seed(2))
        found = torch.zeros(3, pair.b.shape[0])
        held = 0
        for shard in shards(whole, layout):
            own = own_adapter(weights, whole, shard).pairs
            assert {module for _, module in own} == {*modules}
            assert {number for number, _ in own} == {*range(len(shard.layers))}
            if layer in shard.layers:
                pieces = [*module_pieces(whole, shard)[module].values()]
                part = own[layer - shard.layers.start, module]
                rows = torch.cat([torch.arange(piece.outputs.start, piece.outputs.stop) for piece in pieces])
                found[:, rows] += x[:, pieces[0].inputs] @ part.a.t() @ part.b.t()
                placed = own_modules(whole, shard).modules[module]
                assert (placed.outputs, placed.inputs) == (len(part.b), part.a.shape[1])
                held += 1
        assert held == tp
        torch.testing.assert_close(found, modules[module].placed((x @ pair.a.t() @ pair.b.t()).t()).t())


def hybrid_spec(family: str, **differences: Any) -> DecoderSpec:
    """The spec of a small model with recurrent layers."""
    settings = {**SIZES, **DIFFERENCES[family], **differences}
    config = getattr(transformers, f"{family}Config")(**settings).to_dict()
    return native_spec({**config, "architectures": [f"{family.removesuffix('Text')}ForCausalLM"]})


MANY_HEADS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": dict(linear_num_key_heads=4, linear_num_value_heads=8),
    "Qwen3Next": dict(linear_num_key_heads=4),
    "Lfm2": dict(conv_bias=True),
    "Bamba": dict(mamba_n_groups=4, mamba_proj_bias=True),
    "GraniteMoeHybrid": dict(mamba_n_groups=4, num_local_experts=6),
    "FalconH1": dict(mamba_n_groups=8),
    "NemotronH": dict(n_groups=4, use_bias=True, mlp_bias=True),
}
"""Families, with key heads and groups for four devices."""
PAIRED = dict(num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
STAGED: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": PAIRED,
    "Qwen3Next": PAIRED,
    "Lfm2": dict(num_hidden_layers=4, layer_types=["conv", "full_attention"] * 2),
    "Bamba": dict(num_hidden_layers=4, attn_layer_indices=[1, 3]),
    "GraniteMoeHybrid": dict(num_hidden_layers=4, layer_types=["mamba", "attention"] * 2),
    "NemotronH": dict(
        num_hidden_layers=6, layers_block_type=["linear_attention", "mlp", "full_attention"] * 2, vocab_size=32
    ),
}
"""Layers for two stages, each with both kinds."""
SPLIT = {"qkv", "qkv_bias", "o", "gate_up", "down", "shared_gate_up", "shared_down", "mlp_in", "mlp_in_bias", "mlp_out"}
"""The fields that devices split besides those of recurrent layers."""


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", MANY_HEADS)
def test_shards_hold_every_number_of_a_split_recurrent_layer_once(family: str, tp: int) -> None:
    whole = hybrid_spec(family, num_key_value_heads=4, **MANY_HEADS[family])
    assert whole.recurrence is not None
    split = SPLIT | {*whole.recurrence.split()}
    for layer in range(whole.num_layers):
        found = [pieces_of_layer(whole, shard, layer) for shard in shards(whole, Layout(tp=tp))]
        for field, shapes in shapes_of_layer(whole, layer).items():
            for tensor, shape in zip(whole.names.fields[field], shapes, strict=True):
                held = torch.zeros(shape)
                for piece in [piece for pieces in found for name, piece in pieces[field] if name == tensor]:
                    assert piece.whole == shape
                    held[piece.slices] += 1
                assert (held == (1 if field in split else tp)).all(), tensor


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("family", MANY_HEADS)
def test_a_device_has_the_rows_of_its_own_part_of_recurrent_layers(family: str, tp: int) -> None:
    whole = hybrid_spec(family)  # two key heads or groups, which four devices hold twice
    for shard in shards(whole, Layout(tp=tp)):
        own = shard.own(whole).recurrence
        assert own is not None and whole.recurrence is not None
        pieces = pieces_of_layer(whole, shard, whole.recurrent.index(True))
        for field, shapes in own.shapes(whole.hidden_size).items():
            dim = int(field == "mixer_out")
            assert sum(piece.shape[dim] for _, piece in pieces[field]) == sum(shape[dim] for shape in shapes), field


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("family", MANY_HEADS)
def test_the_parts_of_an_adapter_of_recurrent_layers_add_up_to_the_whole(family: str, tp: int, pp: int) -> None:
    """The device's columns are those of its own part of the fused field, in which heads and groups may be copied."""
    whole, layout = hybrid_spec(family, **STAGED.get(family, {}) if pp > 1 else {}), Layout(tp=tp, pp=pp)
    weights, base = drawn(whole, 4, seed=1), adapted_modules(whole)
    for (layer, module), pair in weights.pairs.items():
        x = torch.randn(3, pair.a.shape[1], generator=torch.Generator().manual_seed(2))
        found, seen = torch.zeros(3, pair.b.shape[0]), torch.zeros(pair.b.shape[0])
        for shard in shards(whole, layout):
            if layer not in shard.layers:
                continue
            part = own_adapter(weights, whole, shard).pairs[layer - shard.layers.start, module]
            pieces = [*module_pieces(whole, shard)[module].values()]
            rows = torch.cat([torch.arange(piece.outputs.start, piece.outputs.stop) for piece in pieces])
            found[:, rows] += x[:, pieces[0].inputs] @ part.a.t() @ part.b.t()
            seen[rows] += 1
            placed = own_modules(whole, shard).modules[module]
            assert (placed.outputs, placed.inputs) == (len(part.b), part.a.shape[1])
            assert placed.takes_gains == base.modules[module].takes_gains
        copies = seen if pieces[0].inputs == slice(0, len(x[0])) and tp > 1 else torch.ones_like(seen)
        expected = base.modules[module].placed((x @ pair.a.t() @ pair.b.t()).t()).t()
        torch.testing.assert_close(found / copies, expected)


@pytest.mark.parametrize("family", MANY_HEADS)
def test_an_adapter_changes_the_rows_that_a_device_has_of_the_weight_itself(family: str) -> None:
    """The rows of a device's B are those of its weight: both are cut from one tensor, whose rows are numbered."""
    whole = hybrid_spec(family)
    base, layer = adapted_modules(whole), whole.recurrent.index(True)
    for shard in shards(whole, Layout(tp=2)):
        own = own_modules(whole, shard)
        for field, names in base.fields(layer).items():
            sources = [each for each in SOURCES[field] if each in pieces_of_layer(whole, shard, layer)]
            sources = sources[:1] if field == "o" else sources
            number, held = 0, list[int]()
            for source in sources:
                for shape, pieces in zip(
                    shapes_of_layer(whole, layer)[source], parts_of_layer(whole, shard, layer)[source], strict=True
                ):
                    held += [number + row for piece in pieces for row in piece.own[0]]
                    number += shape[0]
            numbered = torch.arange(number)
            for name in names:
                module, placed = base.modules[name], own.modules[name]
                rows = numbered[module.columns]
                cut = [rows[piece.outputs] for piece in module_pieces(whole, shard)[name].values()]
                assert torch.cat(cut).tolist() == held[placed.columns], (field, name)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "Qwen3_5Text",
            dict(linear_num_value_heads=6, linear_num_key_heads=6),
            "divide the model's 6 value heads of rec",
        ),
        (
            "Qwen3_5Text",
            dict(linear_num_key_heads=6, linear_num_value_heads=12),
            "must divide, or be divided by, the model's 6 key heads of recurrent layers",
        ),
        ("Bamba", dict(mamba_n_heads=6, mamba_n_groups=2, mamba_expand=3, mamba_d_head=32), "6 heads of Mamba-2"),
        (
            "Bamba",
            dict(mamba_n_heads=12, mamba_n_groups=3, mamba_expand=3),
            "must divide, or be divided by, the model's 3 groups of Mamba-2",
        ),
        ("Lfm2", dict(hidden_size=66, num_attention_heads=4), "must divide the model's 66 channels of convolutions"),
        ("Qwen3Next", dict(shared_expert_intermediate_size=42), "divide the model's 42 columns of the shared expert"),
    ],
)
def test_a_size_of_recurrent_layers_that_cannot_be_split_is_named(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"tp is 4; .*{message}"):
        shard_of(hybrid_spec(family, **changes), Layout(tp=4), 0)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [("cfff", "a stage of layers 2 to 3, none of which has a recurrent state"), ("cccf", "0 to 1, .* has attention")],
)
def test_stages_without_one_of_the_kinds_of_layers_are_refused(kinds: str, message: str) -> None:
    names = {"c": "conv", "f": "full_attention"}
    whole = hybrid_spec("Lfm2", num_hidden_layers=4, layer_types=[names[kind] for kind in kinds])
    with pytest.raises(ValueError, match=f"pp is 2; .*{message}: choose a lower pp"):
        shard_of(whole, Layout(pp=2), 0)


def test_stages_have_the_kinds_of_their_own_layers() -> None:
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention", "full_attention", "mlp"]
    whole = hybrid_spec("NemotronH", layers_block_type=kinds, vocab_size=32)
    stages = [shard.own(whole) for shard in shards(whole, Layout(pp=2))]
    assert [each.recurrent for each in stages] == [(True, False, False), (True, False, False)]
    assert [each.cached for each in stages] == [(False, False, True), (False, True, False)]
    assert [each.mlps for each in stages] == [(False, True, False), (False, False, True)]
