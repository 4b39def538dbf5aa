"""The halves of a layer against autograd in float64, over all the options that the native decoder has."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from holdfast.core.training_cost import PLAIN
from holdfast.lm.kernels.int4 import Int4Weight, pack
from holdfast.lm.kernels.training.losses import CrossEntropy
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.decoder_spec import LINEAR_FIELDS, DecoderSpec
from holdfast.lm.models.families import NAMES
from holdfast.lm.models.halves import AdapterLayout, Halves, cut
from holdfast.lm.models.layer_weights import WeightSource
from holdfast.lm.models.rope import Rope
from holdfast.lm.models.shard import Piece
from holdfast.lm.models.trained_mixers import PackedTokens

SCALE = 1.5
ALL = ("q", "k", "v", "o", "gate", "up", "down")


class Drawn(WeightSource):
    """Random weights of a moderate size, biases and norms too."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(3)

    def fill(self, name: str, piece: Piece, into: torch.Tensor) -> None:
        mean, spread = (1.0, 0.3) if "norm" in name else (0.0, 0.2)
        into.normal_(mean, spread, generator=self._generator)


def decoder_of(spec: DecoderSpec, dtype: torch.dtype = torch.float64, *, fp8: bool = False) -> Decoder:
    return Decoder(
        spec, Drawn(), device=torch.device("cpu"), dtype=dtype, max_model_len=64, eos_token_ids=(), fp8=fp8
    )  # fmt: skip


def spec_of(**differences: Any) -> DecoderSpec:
    sizes: dict[str, Any] = dict(
        architecture="LlamaForCausalLM",
        vocab_size=37,
        hidden_size=12,
        intermediate_size=20,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_positions=64,
        rms_eps=1e-5,
        rope=Rope(100.0),
        names=NAMES,
    )
    return DecoderSpec(**{**sizes, **differences})


class Reference:
    """The halves in plain PyTorch, one sequence at a time, for autograd."""

    def __init__(self, model: Decoder, scale: float) -> None:
        self.model, self.spec, self.scale = model, model.decoder, scale
        self.rows = {module: shape[0] for module, shape in adapted_modules(model.decoder).shapes().items()}

    def linear(self, x: torch.Tensor, weight: Any, bias: Any, adapter: Any, names: tuple[str, ...]) -> torch.Tensor:
        whole = functional.linear(x, weight, bias)
        changed = [
            adapter[name][1] @ (adapter[name][0] @ x.T) if name in adapter else x.new_zeros(self.rows[name], len(x))
            for name in names
        ]
        return whole + self.scale * torch.cat(changed).T

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.spec.rms_eps) * weight

    def attention(self, layer: int, x: torch.Tensor, lengths: tuple[int, ...], adapter: Any) -> torch.Tensor:
        spec, w = self.spec, self.model.layers[layer]
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self.linear(self.norm(x, w.input_norm), w.qkv, w.qkv_bias, adapter, ("q", "k", "v"))
        outs = []
        for part in qkv.split(lengths):
            q, k, v = part.view(len(part), -1, dim).split([heads, kv_heads, kv_heads], 1)
            if w.q_norm is not None and w.k_norm is not None:
                q, k = self.norm(q, w.q_norm), self.norm(k, w.k_norm)
            positions = torch.arange(len(part))
            angles = positions[:, None].float() * spec.rope.inverse_frequencies(dim)
            cos, sin = ((f(angles) * spec.rope.amplitude).double()[:, None] for f in (torch.cos, torch.sin))

            def turn(t: torch.Tensor, cos: torch.Tensor = cos, sin: torch.Tensor = sin) -> torch.Tensor:
                a, b = t.chunk(2, -1)
                return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

            q, k = turn(q), turn(k).repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("ihd,jhd->hij", q, k) * spec.scale
            age = positions[:, None] - positions
            window = (spec.windows or (None,) * spec.num_layers)[layer]
            hidden = (age < 0) | (age >= (window or len(part)))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(heads // kv_heads, 1)).flatten(1))
        return x + self.linear(torch.cat(outs), w.o, w.o_bias, adapter, ("o",))

    def mlp(self, layer: int, x: torch.Tensor, adapter: Any) -> torch.Tensor:
        w, activation = self.model.layers[layer], self.spec.activation
        normed = self.norm(x, w.post_norm)
        gate, up = self.linear(normed, w.gate_up, w.gate_up_bias, adapter, ("gate", "up")).chunk(2, -1)
        act: Callable[[torch.Tensor], torch.Tensor] = {
            "silu": functional.silu,
            "gelu": functional.gelu,
            "gelu_pytorch_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        }[activation]
        return x + self.linear(act(gate) * up, w.down, w.down_bias, adapter, ("down",))


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_module(views: Any, rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The matrices of a layer by module, in the form that the reference accepts."""
    return {
        module: (group.a[index * rank : (index + 1) * rank], b)
        for group in views.values()
        for index, (module, b) in enumerate(group.b)
    }


def backward_of_both(
    spec: DecoderSpec, half: str, modules: tuple[str, ...], rank: int, lengths: tuple[int, ...], keep: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(output, gradient of x, gradient of the adapter) of the half of layer 1: handwritten, and by autograd."""
    model = decoder_of(spec)
    layout = AdapterLayout(spec, modules, rank)
    halves = Halves(model, layout, SCALE)
    count = sum(lengths)
    vector, grads = drawn(1, layout.sizes[1]) * 0.3, torch.full((layout.sizes[1],), float("nan"), dtype=torch.float64)
    x, back = drawn(2, count, spec.hidden_size), drawn(4, count, spec.hidden_size)
    gradient, out = back.clone(), torch.empty_like(x)
    adapter, views = layout.views(1, vector), layout.views(1, grads)
    with torch.no_grad():
        tokens = halves.pack(torch.zeros(count, dtype=torch.int64), lengths)
        kept: dict[str, torch.Tensor] = {}
        if half == "attention":
            halves.mixer_forward(1, x, tokens, adapter, kept, out)
            halves.mixer_backward(1, gradient, x, tokens, adapter, views, kept if keep else None, torch.zeros_like(x))
        else:
            halves.mlp_forward(1, x, x, adapter, kept, out)
            halves.mlp_backward(1, gradient, x, x, adapter, views, kept if keep else None)
    x, vector = x.requires_grad_(), vector.requires_grad_()
    reference, given = Reference(model, SCALE), by_module(layout.views(1, vector), rank)
    wanted = reference.attention(1, x, lengths, given) if half == "attention" else reference.mlp(1, x, given)
    parts = torch.autograd.grad(wanted, (x, vector), back, allow_unused=True, materialize_grads=True)
    touched = {"attention": ("qkv", "o"), "mlp": ("gate_up", "down")}[half]
    # The gradients of the other half's matrices are not written.
    found, expected = (
        [layout.views(1, vector_of)[field] for field in touched if field in views] for vector_of in (grads, parts[1])
    )
    flat = [
        torch.cat([t.flatten() for g in groups for t in (g.a, *(b for _, b in g.b))]) for groups in (found, expected)
    ]
    return [out, gradient, flat[0]], [wanted.detach(), parts[0], flat[1]]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([2, 4, 6]))
    return dict(
        spec=spec_of(
            hidden_size=draw(st.integers(3, 12)),
            intermediate_size=draw(st.integers(3, 20)),
            num_kv_heads=kv_heads,
            num_heads=kv_heads * draw(st.integers(1, 3)),
            head_dim=head_dim,
            activation=draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"])),
            qk_norm=draw(st.booleans()),
            qkv_bias=draw(st.booleans()),
            o_bias=draw(st.booleans()),
            mlp_bias=draw(st.booleans()),
            windows=draw(st.sampled_from([(), (None, 3), (2, 1), (2, 50)])),
            rope=Rope(100.0, amplitude=draw(st.sampled_from([1.0, 1.2]))),
        ),
        rank=draw(st.integers(1, 5)),
        lengths=tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))),
        keep=draw(st.booleans()),
    )


@settings(max_examples=40)
@given(cases(), st.sets(st.sampled_from(["q", "k", "v", "o"]), min_size=1))
def test_gradients_of_the_attention_half_are_autograd_s(case: dict[str, Any], modules: set[str]) -> None:
    found, wanted = backward_of_both(half="attention", modules=tuple(modules), **case)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-7)


@settings(max_examples=40)
@given(cases(), st.sets(st.sampled_from(["gate", "up", "down"]), min_size=1))
def test_gradients_of_the_mlp_half_are_autograd_s(case: dict[str, Any], modules: set[str]) -> None:
    found, wanted = backward_of_both(half="mlp", modules=tuple(modules), **case)
    for ours, reference in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-9, rtol=1e-7)


def test_an_adapter_of_one_half_leaves_the_other_half_as_the_base_has_it() -> None:
    spec = spec_of()
    model = decoder_of(spec)
    x, out = drawn(2, 5, spec.hidden_size), torch.empty(5, spec.hidden_size, dtype=torch.float64)
    layout = AdapterLayout(spec, ("q",), 2)
    with torch.no_grad():
        Halves(model, layout, SCALE).mlp_forward(0, x, x, layout.views(0, drawn(1, layout.sizes[0])), {}, out)
        torch.testing.assert_close(out, Reference(model, SCALE).mlp(0, x, {}))


def test_the_gradient_of_the_head_is_autograd_s() -> None:
    spec = spec_of()
    model = decoder_of(spec)
    halves = Halves(model, AdapterLayout(spec, ("q",), 1), SCALE)
    x, targets = drawn(2, 6, spec.hidden_size), torch.tensor([0, 36, 4, 4, 1, 2])
    weights = torch.tensor([0.5, 0.0, -1.0, 0.25, 0.125, 1.0])
    stream = x.clone()
    with torch.no_grad():
        untouched, early = halves.head(stream, targets, CrossEntropy(weights), backward=False)
        assert torch.equal(stream, x)
        loss, logprobs = halves.head(stream, targets, CrossEntropy(weights), backward=True)
    x = x.requires_grad_()
    logits = Reference(model, SCALE).norm(x, model.norm) @ model.lm_head.T
    entropies = functional.cross_entropy(logits, targets, reduction="none")
    wanted = (entropies * weights).sum()
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(logprobs, -entropies.detach())
    assert torch.equal(loss, untouched) and torch.equal(early, logprobs)
    torch.testing.assert_close(stream, torch.autograd.grad(wanted, x)[0])


def test_tensors_that_are_given_are_written_and_used() -> None:
    spec = spec_of(num_heads=4, num_kv_heads=2)
    model, layout = decoder_of(spec), AdapterLayout(spec, ALL, 3)
    halves = Halves(model, layout, SCALE)
    lengths = (4, 3)
    adapter = layout.views(0, drawn(1, layout.sizes[0]))
    x = drawn(2, 7, spec.hidden_size)

    def run(half: str, kept: dict[str, torch.Tensor], tokens: PackedTokens) -> torch.Tensor:
        out = torch.empty_like(x)
        if half == "attention":
            halves.mixer_forward(0, x, tokens, adapter, kept, out)
        else:
            halves.mlp_forward(0, x, x, adapter, kept, out)
        return out

    with torch.no_grad():
        tokens = halves.pack(torch.zeros(7, dtype=torch.int64), lengths)
        for half in PLAIN:
            shapes = halves.kept_shapes(0, half, 7)
            given = {name: torch.full(shape, float("nan"), dtype=dtype) for name, (shape, dtype) in shapes.items()}
            places = {name: tensor.data_ptr() for name, tensor in given.items()}
            free: dict[str, torch.Tensor] = {}
            assert torch.equal(run(half, given, tokens), run(half, free, tokens))
            assert {name: tensor.data_ptr() for name, tensor in given.items()} == places
            assert all(torch.equal(given[name], tensor) for name, tensor in free.items()) and len(free) == len(given)


def test_a_layout_s_views_cover_its_vector_once() -> None:
    layout = AdapterLayout(spec_of(), ("q", "v", "up", "down"), 2)
    vector = torch.zeros(layout.sizes[1])
    for group in layout.views(1, vector).values():
        for part in (group.a, *(b for _, b in group.b)):
            part += 1
    assert torch.equal(vector, torch.ones_like(vector))


def test_a_layout_without_known_modules_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"modules to tune are lm_head; choose from q, k"):
        AdapterLayout(spec_of(), ("q", "lm_head"), 4)
    with pytest.raises(ValueError, match=r"rank is 0"):
        AdapterLayout(spec_of(), ("q",), 0)


def in_four_bits(weight: torch.Tensor) -> Int4Weight:
    """A weight of 4 bits near the given one."""
    scale = weight.abs().amax() / 7
    numbers = ((weight / scale).round() + 8).clamp(0, 15).to(torch.uint8)
    groups = len(weight), weight.shape[1] // 16
    return pack(numbers, scale.expand(groups), torch.full(groups, 8, dtype=torch.uint8), 16, 8)


@pytest.mark.parametrize("half", ["attention", "mlp"])
@pytest.mark.parametrize("bits", [8, 4])
def test_halves_over_quantized_weights_are_those_over_the_dequantized_ones(half: str, bits: int) -> None:
    spec = spec_of(hidden_size=16, intermediate_size=32, head_dim=4)
    model = decoder_of(spec, torch.float32, fp8=bits == 8)
    if bits == 4:
        fields = {field: in_four_bits(getattr(model.layers[1], field)) for field in LINEAR_FIELDS}
        model.layers = (model.layers[0], replace(model.layers[1], **fields))
    assert not isinstance(model.layers[1].down, torch.Tensor)
    plain = copy(model)
    weights = {field: getattr(model.layers[1], field).dequantized(torch.float32) for field in LINEAR_FIELDS}
    plain.layers = (plain.layers[0], replace(plain.layers[1], **weights))
    results = []
    for each in (model, plain):
        layout = AdapterLayout(spec, ALL, 2)
        halves, lengths = Halves(each, layout, SCALE), (7, 5)
        grads = torch.full((layout.sizes[1],), float("nan"))
        adapter, views = layout.views(1, drawn(1, layout.sizes[1]).float() * 0.3), layout.views(1, grads)
        x, gradient = drawn(2, 12, 16).float(), drawn(4, 12, 16).float()
        out = torch.empty_like(x)
        with torch.no_grad():
            tokens = halves.pack(torch.zeros(12, dtype=torch.int64), lengths)
            if half == "attention":
                halves.mixer_forward(1, x, tokens, adapter, {}, out)
                halves.mixer_backward(1, gradient, x, tokens, adapter, views, None, torch.zeros_like(x))
            else:
                halves.mlp_forward(1, x, x, adapter, {}, out)
                halves.mlp_backward(1, gradient, x, x, adapter, views, None)
        results.append((out, gradient, grads.nan_to_num()))
    assert results[0][2].count_nonzero() > 100
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_a_window_changes_the_attended_positions() -> None:
    found = [
        backward_of_both(spec_of(windows=windows), "attention", ("q",), 1, (8,), True)[0][0]
        for windows in ((), (None, 3))
    ]
    assert torch.equal(found[0][:3], found[1][:3]) and not torch.allclose(found[0][3:], found[1][3:])


def test_sequences_are_cut_after_every_chunk() -> None:
    assert cut((3, 9, 8, 1), 4) == (3, 4, 4, 1, 4, 4, 1)
