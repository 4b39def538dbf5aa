"""Whole steps by the library in C, against the same decoder in float64."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.integer.step import StepLayer, StepSizes, StepTokens, WholeSteps
from holdfast.lm.kernels.integer.weight import IntegerWeight, pack_integers
from holdfast.lm.kernels.stacked import StackedWeight
from tests.compiled import integer_library

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCABULARY, LAYERS = 4, 2, 16, 52, 72, 301, 2
BLOCKS, BLOCK = 24, 4
TABLES = torch.arange(BLOCKS, dtype=torch.int32).flip(0).view(3, 8)
CONTEXTS = (7, 1, 30)
"""Number of positions of each row before the step."""
SIZES = StepSizes(heads=HEADS, kv_heads=KV_HEADS, dim=DIM, eps=1e-5, scale=0.25, activation="silu")
ROTATIONS = tuple(
    (base ** -(torch.arange(DIM // 2) / 8), torch.full((DIM // 2,), size)) for base, size in ((1e4, 1.0), (10.0, 1.5))
)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Made:
    """A random decoder, with its caches, in the library and in float64."""

    def __init__(
        self, library: Library, *, dtype: torch.dtype = torch.float32, tied: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        small = {name: options.pop(name) for name in (*SMALL, "windows") if name in options}
        self.dtype, self.sizes = dtype, replace(SIZES, **options)
        widths = {"qkv": (HEADS + 2 * KV_HEADS) * DIM, "o": HIDDEN, "gate_up": 2 * INNER, "down": HIDDEN}
        inputs = {"qkv": HIDDEN, "o": HEADS * DIM, "gate_up": HIDDEN, "down": INNER}
        self.layers = []
        for index in range(LAYERS):
            weights = {name: self.weight(rows, inputs[name]) for name, rows in widths.items()}
            norms = {name: torch.rand(HIDDEN) + 0.5 for name in ("input_norm", "post_norm")}
            for name, present in small.items():
                if name == "biases":
                    norms |= {f"{each}_bias": torch.randn(rows) / 4 for each, rows in widths.items()}
                elif name == "windows":
                    norms["window"], norms["rotation"] = present[index], index
                elif name == "no_norms":
                    norms.pop("input_norm")
                else:
                    norms[name] = torch.rand(SMALL[name]) + 0.5
            self.layers.append(StepLayer(**weights, **norms))
        self.norm, self.bias = torch.rand(HIDDEN) + 0.5, torch.randn(VOCABULARY) if "biases" in small else None
        self.head = self.weight(VOCABULARY, HIDDEN, by_rows=tied)
        caches = torch.randn(LAYERS, 2, BLOCKS, BLOCK, KV_HEADS, DIM).to(dtype)
        self.caches = [(keys, values) for keys, values in caches]
        self.steps = WholeSteps(
            library,
            self.sizes,
            self.layers,
            head=self.head,
            head_bias=self.bias,
            dtype=dtype,
            final_norm=self.norm,
            rotations=ROTATIONS,
        )

    def weight(self, rows: int, inputs: int, *, by_rows: bool = False) -> torch.Tensor:
        whole = (torch.randn(rows, inputs) * inputs**-0.5).to(self.dtype)
        return whole if by_rows else whole.t().contiguous().t()

    def tokens(self, lengths: tuple[int, ...] = (1, 1, 1), **changes: Any) -> StepTokens:
        """So many tokens of each row, after its context."""
        rows = np.repeat(np.arange(len(lengths)), lengths)
        spans = zip(CONTEXTS, lengths, strict=True)
        positions = torch.cat([torch.arange(context, context + count) for context, count in spans])
        slots = TABLES[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
        usual = dict(
            positions=positions,
            slots=slots,
            rows=rows,
            tables=TABLES,
            caches=self.caches,
            longest=int(positions.max()) + 1,
        )
        return StepTokens(**usual | changes)

    def exact(self, stream: torch.Tensor, tokens: StepTokens) -> torch.Tensor:
        """The logits in float64, from the caches as they were before the step."""
        stream = stream.double()
        for layer, (keys, values) in zip(self.layers, self.caches, strict=True):
            frequencies, amplitudes = (each.double() for each in ROTATIONS[layer.rotation])
            angles = tokens.positions[:, None].double() * frequencies
            turn = (angles.cos() * amplitudes)[:, None], (angles.sin() * amplitudes)[:, None]
            qkv = linear(self.normed(stream, layer.input_norm), layer.qkv, layer.qkv_bias).view(len(stream), -1, DIM)
            query, key, value = torch.split(qkv, [HEADS, KV_HEADS, KV_HEADS], dim=1)
            query, key = turned(self.normed(query, layer.q_norm), turn), turned(self.normed(key, layer.k_norm), turn)
            flat = keys.double().view(-1, KV_HEADS, DIM).clone(), values.double().view(-1, KV_HEADS, DIM).clone()
            flat[0][tokens.slots], flat[1][tokens.slots] = key, value
            found = [self.attended(one, layer, tokens, at, *flat) for at, one in enumerate(query)]
            added = linear(torch.stack(found).flatten(1), layer.o, layer.o_bias)
            stream = stream + self.normed(added, layer.attention_out_norm)
            both = linear(self.normed(stream, layer.post_norm), layer.gate_up, layer.gate_up_bias)
            gate, up = both.chunk(2, dim=-1)
            activated = (
                functional.silu(gate) if self.sizes.activation == "silu" else functional.gelu(gate, approximate="tanh")
            )
            added = linear(activated * up, layer.down, layer.down_bias)
            stream = stream + self.normed(added, layer.mlp_out_norm)
        rows = stream if tokens.sample_at is None else stream[tokens.sample_at]
        return linear(self.normed(rows, self.norm), self.head, self.bias)

    def normed(self, numbers: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return (
            numbers if weight is None else functional.rms_norm(numbers, weight.shape, weight.double(), self.sizes.eps)
        )

    def attended(
        self,
        query: torch.Tensor,
        layer: StepLayer,
        tokens: StepTokens,
        at: int,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        last, first = int(tokens.positions[at]), 0
        if layer.window is not None:
            first = last // layer.window * layer.window if self.sizes.chunked else max(0, last + 1 - layer.window)
        seen = torch.arange(first, last + 1)
        slots = tokens.tables[int(tokens.rows[at]), seen // BLOCK].long() * BLOCK + seen % BLOCK
        own, shared = (
            keys[slots].repeat_interleave(HEADS // KV_HEADS, 1),
            values[slots].repeat_interleave(HEADS // KV_HEADS, 1),
        )
        scores = torch.einsum("hd,lhd->hl", query, own) * self.sizes.scale
        if self.sizes.softcap is not None:
            scores = self.sizes.softcap * torch.tanh(scores / self.sizes.softcap)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.double()[:, None]), 1)
        return torch.einsum("hl,lhd->hd", scores.softmax(1)[:, : len(seen)], shared)


SMALL = {"attention_out_norm": HIDDEN, "mlp_out_norm": HIDDEN, "q_norm": DIM, "k_norm": DIM, "sinks": HEADS} | {
    "biases": 0,
    "no_norms": 0,
}
"""Widths of small tensors that a layer may have, by the option that adds them."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight.double(), None if bias is None else bias.double())


def turned(heads: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    (cosine, sine), (first, second) = turn, heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Packed:
    """A random decoder of packed weights in the library, and the same with these weights in plain numbers."""

    def __init__(self, library: Library) -> None:
        torch.manual_seed(0)
        hidden, inner, draw = 64, 96, partial(packed, library)
        self.layers, plain = list[StepLayer](), list[StepLayer]()
        for bits in (4, 6, 8):
            qkv = draw(64, hidden, bits), draw(32, hidden, 6), draw(32, hidden, 8)
            weights = dict(qkv=StackedWeight(qkv), o=draw(hidden, 64, bits), down=draw(hidden, inner, bits % 6 + 4))
            weights["gate_up"] = draw(2 * inner, hidden, bits)
            widths = {"qkv": 128, "o": hidden, "gate_up": 2 * inner, "down": hidden}
            small = {f"{name}_bias": torch.randn(rows) / 4 for name, rows in widths.items()}
            small |= {name: torch.rand(hidden) + 0.5 for name in ("input_norm", "post_norm")}
            self.layers.append(StepLayer(**weights, **small))
            whole = {name: weight.dequantized(torch.float32) for name, weight in weights.items()}
            plain.append(StepLayer(**whole, **small))
        self.head = draw(VOCABULARY, hidden, 6)
        self.options: dict[str, Any] = dict(dtype=torch.float32, final_norm=torch.rand(hidden) + 0.5)
        self.options |= dict(head_bias=torch.randn(VOCABULARY), rotations=ROTATIONS)
        self.steps = WholeSteps(library, SIZES, self.layers, head=self.head, **self.options)
        self.plain = WholeSteps(library, SIZES, plain, head=self.head.dequantized(torch.float32), **self.options)
        caches = torch.randn(3, 2, BLOCKS, BLOCK, KV_HEADS, DIM)
        self.caches = [(keys, values) for keys, values in caches]

    def tokens(self, lengths: tuple[int, ...]) -> StepTokens:
        return Made.tokens(cast(Made, self), lengths)


def packed(library: Library, rows: int, inputs: int, bits: int) -> IntegerWeight:
    """A weight of random numbers whose products are about as large as what they multiply."""
    scale = (torch.rand(rows, inputs // (16 if bits == 6 else 32)) + 0.5) * 2 ** (2.0 - bits) * inputs**-0.5
    numbers = torch.randint(1 << bits, (rows, inputs)).to(torch.uint8)
    return pack_integers(library, numbers, scale, -8 * scale if bits == 4 else None, bits)


def test_a_step_of_packed_weights_is_that_of_plain_ones_but_for_rounding(library: Library) -> None:
    made = Packed(library)
    for lengths in ((1, 0, 0), (1, 1, 1), (6, 8, 2)):
        stream, tokens = torch.randn(sum(lengths), 64), made.tokens(lengths)
        found, wanted = made.steps.logits(stream, tokens), made.plain.logits(stream, tokens)
        for one, other in zip(found, wanted, strict=True):
            assert 1e-4 < (one - other).norm() / other.norm() < 0.03


def test_steps_of_packed_weights_have_the_same_bits_for_any_number_of_threads_and_other_rows() -> None:
    made = Packed(integer_library())
    stream, tokens = torch.randn(14, 64), made.tokens((4, 8, 2))
    wanted = made.steps.logits(stream, tokens)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        assert torch.equal(made.steps.logits(stream, tokens), wanted)
    alone = replace(tokens, **{name: getattr(tokens, name)[:1] for name in ("positions", "slots", "rows")})
    assert torch.equal(made.steps.logits(stream[:1], alone), wanted[:1])


def test_packed_weights_that_end_within_a_tile_are_refused() -> None:
    made = Packed(integer_library())
    first = made.layers[0]
    with pytest.raises(ValueError, match=r"a packed gate has 40 outputs, which is not a multiple of 16"):
        weights = dict(gate_up=packed(integer_library(), 80, 64, 4), down=torch.zeros(64, 40))
        layer = replace(first, **weights, gate_up_bias=None)
        WholeSteps(integer_library(), SIZES, [layer], head=made.head, **made.options)
    with pytest.raises(ValueError, match=r"parts of a weight have \[72\] outputs, and not all are multiples of 16"):
        parts = tuple(packed(integer_library(), rows, 64, 4) for rows in (72, 56))
        layer = replace(first, qkv=StackedWeight(parts))
        WholeSteps(integer_library(), SIZES, [layer], head=made.head, **made.options)
    with pytest.raises(ValueError, match=r"a weight \[64, 64\] is not of torch.float32 or of integers"):
        layer = replace(first, o=torch.zeros(64, 64, dtype=torch.float64))
        WholeSteps(integer_library(), SIZES, [layer], head=made.head, **made.options)


def test_caches_are_checked_when_they_change_and_not_kept() -> None:
    made = Made(integer_library())
    tokens, stream = made.tokens(), stream_of(made, 3)
    wanted = made.steps.logits(stream, tokens)
    copies = [(keys.clone(), values.clone()) for keys, values in made.caches]
    for each in (each for layer in made.caches for each in layer):
        each.zero_()
    assert torch.equal(made.steps.logits(stream, replace(tokens, caches=copies)), wanted)
    kept = weakref.ref(copies[1][1])
    del copies
    assert kept() is None


def stream_of(made: Made, rows: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN).to(made.dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": True, "biases": True},
        {"q_norm": True, "k_norm": True, "no_norms": True, "attention_out_norm": True, "mlp_out_norm": True},
        {"activation": "gelu_pytorch_tanh", "softcap": 2.0, "sinks": True, "windows": (5, None)},
        {"chunked": True, "windows": (8, None), "mlp_out_norm": True},
    ],
    ids=["llama", "biases", "norms", "window", "chunks"],
)  # fmt: skip
def test_a_step_is_that_of_float64(library: Library, options: dict[str, Any]) -> None:
    made = Made(library, **options)
    for lengths, sampled in (
        ((1, 1, 1), None),
        ((1, 0, 0), None),
        ((1, 3, 2), (0, 3, 5)),
        ((0, 8, 1), (7,)),
        ((2, 0, 0), ()),
    ):
        sample_at = None if sampled is None else torch.tensor(sampled, dtype=torch.int64)
        tokens = made.tokens(lengths, sample_at=sample_at)
        stream = stream_of(made, sum(lengths))
        wanted = made.exact(stream, tokens)
        torch.testing.assert_close(made.steps.logits(stream, tokens).double(), wanted, rtol=1e-4, atol=2e-5)
        # The step has written its keys and values, so it gives the same again.
        torch.testing.assert_close(made.exact(stream, tokens), wanted, rtol=1e-5, atol=1e-5)


def test_a_step_in_bfloat16_rounds_only_its_results_and_its_cache(library: Library) -> None:
    for tied in (False, True):
        made = Made(library, dtype=torch.bfloat16, tied=tied)
        tokens, stream = made.tokens((2, 1, 2)), stream_of(made, 5)
        wanted, found = made.exact(stream, tokens), made.steps.logits(stream, tokens)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=0.01)


def test_a_step_writes_only_its_own_slots(library: Library) -> None:
    made = Made(library)
    before = [each.clone() for layer in made.caches for each in layer]
    tokens = made.tokens((1, 2, 0))
    made.steps.logits(stream_of(made, 3), tokens)
    for old, new in zip(before, [each for layer in made.caches for each in layer], strict=True):
        changed = (old != new).view(BLOCKS * BLOCK, -1).any(1).nonzero().flatten()
        assert changed.tolist() == sorted(tokens.slots.tolist())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_have_the_same_bits_for_any_number_of_threads(threads: int) -> None:
    made = Made(integer_library(), biases=True)
    tokens, stream = made.tokens((3, 1, 1)), stream_of(made, 5)
    wanted = made.steps.logits(stream, tokens)
    torch.set_num_threads(threads)
    assert all(torch.equal(made.steps.logits(stream, tokens), wanted) for _ in range(20))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_token_has_the_same_bits_alone_and_among_others(library: Library, dtype: torch.dtype, tied: bool) -> None:
    """Sizes here are no multiple of a vector's, so the rest of each sum counts as well."""
    made = Made(library, dtype=dtype, tied=tied, biases=True, windows=(5, None))
    lengths = (9, 4, 2)
    tokens, stream = made.tokens(lengths), stream_of(made, sum(lengths))
    together, caches = made.steps.logits(stream, tokens), [each.clone() for layer in made.caches for each in layer]
    for size in (1, 2, 3, 5):
        for first in range(0, sum(lengths), size):
            own = slice(first, first + size)
            names = ("positions", "slots", "rows")
            some = replace(tokens, **{name: getattr(tokens, name)[own] for name in names})
            assert torch.equal(made.steps.logits(stream[own], some), together[own])
    assert all(map(torch.equal, caches, [each for layer in made.caches for each in layer]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_of_normed_rows_gives_the_bits_of_the_step(library: Library, dtype: torch.dtype) -> None:
    made = Made(library, dtype=dtype, mlp_out_norm=True)
    tokens, stream = made.tokens((3, 2, 1), sample_at=torch.tensor([1, 2, 5])), stream_of(made, 6)
    logits, normed = made.steps.logits(stream, tokens), made.steps.normed(stream, tokens)
    assert (normed.dtype, normed.shape) == (torch.float32, (3, HIDDEN))
    assert torch.equal(made.steps.head(normed), logits)
    assert torch.equal(made.steps.head(normed[1:2]), logits[1:2])
    assert made.steps.head(normed[:0]).shape == (0, VOCABULARY)
    with pytest.raises(ValueError, match=r"normed rows are torch.float64 \[3, 52\]; a step takes"):
        made.steps.head(normed.double())


def test_places_that_do_not_exist_are_refused_and_others_stay() -> None:
    made = Made(integer_library())
    stream, usual = stream_of(made, 3), made.tokens()
    caches = [each.clone() for layer in made.caches for each in layer]
    lost = TABLES.clone()
    lost[2, 3] = -1
    outside = TABLES.clone()
    outside[2, 3] = BLOCKS
    for changes in (
        dict(slots=torch.tensor([0, 1, BLOCKS * BLOCK])),
        dict(slots=torch.tensor([0, -1, 1])),
        dict(positions=torch.tensor([7, -1, 30])),
        dict(positions=torch.tensor([7, 1, 32]), longest=33),
        dict(longest=30),
        dict(rows=np.array([0, 1, 3])),
        dict(sample_at=torch.tensor([3])),
    ):
        with pytest.raises(ValueError, match="a step of 3 tokens cannot be computed: a slot, block, position or row"):
            made.steps.logits(stream, replace(usual, **changes))
    assert all(map(torch.equal, caches, [each for layer in made.caches for each in layer]))
    for tables in (lost, outside):
        with pytest.raises(ValueError, match="cannot be computed: a slot, block"):
            made.steps.logits(stream, replace(usual, tables=tables))


def test_tensors_of_other_types_and_shapes_are_named() -> None:
    made = Made(integer_library())
    stream, usual = stream_of(made, 3), made.tokens()
    with pytest.raises(ValueError, match=r"embeddings are torch.float64 \[3, 52\]; a step takes"):
        made.steps.logits(stream.double(), usual)
    with pytest.raises(ValueError, match=r"slots are torch.int64 \[2\]"):
        made.steps.logits(stream, replace(usual, slots=usual.slots[:2]))
    with pytest.raises(ValueError, match=r"a cache are torch.bfloat16"):
        halves = [(keys.bfloat16(), values.bfloat16()) for keys, values in made.caches]
        made.steps.logits(stream, replace(usual, caches=halves))
    with pytest.raises(ValueError, match="1 caches do not fit"):
        made.steps.logits(stream, replace(usual, caches=made.caches[:1]))
    layer = replace(made.layers[0], down=made.layers[0].down[:, :-1])
    small: dict[str, Any] = dict(head_bias=None, final_norm=made.norm, rotations=ROTATIONS)
    options = small | dict(head=made.head, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"a weight \[144, 52\] does not have the shape \[142, 52\]"):
        WholeSteps(integer_library(), SIZES, [layer], **options)
    with pytest.raises(ValueError, match=r"no whole steps for torch\.float32, heads of 24 numbers and silu"):
        WholeSteps(integer_library(), replace(SIZES, dim=24), made.layers, **options)
    with pytest.raises(ValueError, match="there are 3 kinds of rotation"):
        WholeSteps(integer_library(), SIZES, made.layers, **options | dict(rotations=[*ROTATIONS, ROTATIONS[0]]))
