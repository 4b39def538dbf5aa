"""Which decoders and steps the library in C computes as a whole, and that models give the same with and without it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.core.layout import Layout
from holdfast.files.cache import gguf_cache
from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.integer.weight import IntegerWeight
from holdfast.lm.kernels.lora.groups import groups_of
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.kernels.lora.torch_lora import TorchLora
from holdfast.lm.kernels.packed import Form, PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.adapters import AdapterSlots
from holdfast.lm.models.base import StepInput, StreamTaps
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.gguf_metadata import write
from holdfast.lm.models.layer_weights import LayerWeights
from holdfast.lm.models.loader import load
from holdfast.lm.models.whole_steps import (
    MOST_OF_SEGMENT,
    MOST_TOKENS,
    DecoderSteps,
    has_known_weights,
    is_known,
    is_plain,
)
from tests.adapters import drawn
from tests.checkpoints import make
from tests.compiled import integer_library
from tests.gguf_files import write_gguf
from tests.ranks import Rank, in_ranks

CPU = torch.device("cpu")
BLOCK, BLOCKS = 4, 40
TABLES = torch.arange(BLOCKS, dtype=torch.int32).flip(0).view(4, 10)


def segments(*spans: tuple[int, int, int]) -> Segments:
    """Segments of these rows, each from one position to another."""
    rows, starts, stops = (np.array(column, np.int32) for column in zip(*spans, strict=True))
    return Segments(np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int32), stops, rows)


def step_of(
    model: Decoder,
    *spans: tuple[int, int, int],
    backend: Any = "auto",
    local: int = 0,
    devices: int = 1,
    **changes: Any,
) -> StepInput:
    """A step with tokens of these rows and positions, on a cache of drawn numbers.

    The cache has the heads of device `local` among the `devices` that share the layers.
    """
    spec, batch = model.spec, segments(*spans)
    draw = torch.Generator().manual_seed(7)
    rows = torch.from_numpy(np.repeat(batch.row, batch.query_length)).long()
    positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
    sizes: dict[str, Any] = dict(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=BLOCK)
    cache = KVCache.allocate(layers=spec.num_layers, num_blocks=BLOCKS, dtype=spec.dtype, device=CPU, **sizes)
    for each in (numbers for layer in range(spec.num_layers) for numbers in cache.layer(layer)):
        *blocks, heads, dim = each.shape
        whole = torch.randn(*blocks, heads * devices, dim, generator=draw)
        each.copy_(whole[:, :, local * heads : (local + 1) * heads])
    attention = attention_for(CPU, num_heads=spec.num_heads, backend=backend, **sizes)
    usual: dict[str, Any] = dict(
        ids=torch.randint(0, spec.vocab_size, (len(rows),), generator=draw),
        positions=positions,
        sample_at=None,
        slot_mapping=TABLES[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK,
        block_tables=TABLES,
        caches=tuple(cache.layer(layer) for layer in range(spec.num_layers)),
        attention=attention,
        metadata=attention.make_metadata(batch),
    )
    return StepInput(**usual | changes)


def loaded(directory: Path, family: str, *, dtype: str = "float32", invariant: bool = False, **config: Any) -> Decoder:
    make(directory, family, **config)
    model = load(directory, device="cpu", dtype=dtype, invariant=invariant)
    assert isinstance(model, Decoder)
    return model


SPANS = (0, 11, 12), (1, 0, 1), (2, 20, 23), (3, 38, 39)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 6}),
        ("Gemma2", {"sliding_window": 6}),
        ("Gemma3Text", {"sliding_window": 6}),
        ("Phi3", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_whole_step_gives_what_pytorch_gives(
    with_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    model = loaded(tmp_path, family, **config)
    whole, plain = step_of(model, *SPANS), step_of(model, *SPANS, backend="torch")
    calls, compute = list[int](), DecoderSteps.logits

    def counted(self: DecoderSteps, stream: torch.Tensor, step: StepInput) -> torch.Tensor:
        calls.append(len(stream))
        return compute(self, stream, step)

    monkeypatch.setattr(DecoderSteps, "logits", counted)
    with torch.inference_mode():
        wanted, found = model.forward(plain), model.forward(whole)
    assert calls == [6]
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)
    for one, other in zip(whole.caches, plain.caches, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    at = torch.tensor([1, 4])
    with torch.inference_mode():
        some = model.forward(step_of(model, *SPANS, sample_at=at))
    torch.testing.assert_close(some, wanted[at], rtol=2e-4, atol=2e-4)


def test_a_model_in_bfloat16_has_whole_steps_near_those_of_pytorch(with_library: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama", dtype="bfloat16")
    with torch.inference_mode():
        wanted, found = (model.forward(step_of(model, *SPANS, backend=name)) for name in ("torch", "auto"))
    assert found.dtype == torch.bfloat16
    assert (found.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(("family", "dtype"), [("Llama", "float32"), ("Llama", "bfloat16"), ("Gemma3Text", "float32")])
def test_tapped_layers_give_the_hidden_states_of_transformers(
    with_library: None, tmp_path: Path, family: str, dtype: str, backend: str
) -> None:
    model = loaded(tmp_path, family, dtype=dtype)
    layers = 0, model.spec.num_layers - 1
    taps = StreamTaps(layers, torch.full((9, 2, model.decoder.hidden_size), 7.0, dtype=model.spec.dtype))
    step = step_of(model, (0, 0, 7), backend=backend, taps=taps)
    with torch.inference_mode():
        model.forward(step)
        module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        states = module(step.ids[None], output_hidden_states=True).hidden_states
    assert (taps.into[7:] == 7.0).all()
    for number, layer in enumerate(layers):
        near = 1e-4 if dtype == "float32" else 0.02
        found = taps.into[:7, number].float()
        assert (found - states[layer][0]).norm() < near * states[layer][0].norm(), f"layer {layer}"


def test_taps_of_another_size_and_of_missing_layers_are_refused(with_library: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama")
    hidden, count = model.decoder.hidden_size, model.spec.num_layers
    for layers, width, message in (
        ((0, 1), hidden + 1, "taps are"),
        ((0, count), hidden, f"layers .* are tapped, and there are {count}"),
    ):
        step = step_of(model, *SPANS, taps=StreamTaps(layers, torch.zeros(9, 2, width)))
        with pytest.raises(ValueError, match=message):
            model.forward(step)


def test_integers_are_read_as_whole_tiles_and_other_packed_weights_are_not() -> None:
    def integers(rows: int) -> IntegerWeight:
        return IntegerWeight(integer_library(), torch.zeros(-(-rows // 16), 2, 320), torch.zeros(1), 4, rows)

    assert is_known(integers(16)) and is_known(integers(7)) and is_known(torch.zeros(7, 64))
    assert is_known(StackedWeight((integers(16), integers(7))))
    assert not is_known(StackedWeight((integers(7), integers(16))))
    other = PackedWeight(Form.INT8, torch.zeros(16, 64, dtype=torch.int8), torch.zeros(16, 2), 32)
    assert not is_known(other) and not is_known(StackedWeight((integers(16), other)))
    weights = {name: integers(64) for name in ("qkv", "o", "gate_up", "down")}
    for inner, known in ((64, True), (72, False)):
        layer = SimpleNamespace(**weights | {"down": torch.zeros(64, inner)}, end_norm=None)
        assert has_known_weights(cast(LayerWeights, layer)) is known


def gguf(place: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> Path:
    """The directory of a Llama in a GGUF file of this kind of numbers."""
    make(place / "plain", "Llama", hidden_size=64, intermediate_size=96, head_dim=16)
    path = place / "model.gguf"
    write_gguf(path, place / "plain", "llama", kind=kind)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    directory = gguf_cache() / path.name
    directory.mkdir(parents=True)
    write(path, directory)
    return directory


def test_a_model_of_integers_has_whole_steps_as_near_to_float32_as_pytorchs(
    with_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both round activations to 8 bits. PyTorch also rounds them to bfloat16 between operations."""
    directory = gguf(tmp_path, monkeypatch, "Q8_0")
    model = load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder) and isinstance(model.layers[0].down, IntegerWeight)
    exact = load(directory, device="cpu")
    assert model.whole_steps is not None and isinstance(exact, Decoder)
    with torch.inference_mode():
        wanted = exact.forward(step_of(exact, *SPANS, backend="torch"))
        plain, found = (model.forward(step_of(model, *SPANS, backend=name)).float() for name in ("torch", "auto"))
    assert not torch.equal(plain, found)
    assert (found - wanted).norm() < 0.04 * wanted.norm() and (plain - wanted).norm() < 0.04 * wanted.norm()


def test_steps_of_other_kinds_are_left_to_pytorch(with_library: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama")
    steps = model.whole_steps
    assert steps is not None and steps.takes(step_of(model, *SPANS))
    assert not steps.takes(step_of(model, *SPANS, backend="torch"))
    assert not steps.takes(step_of(model, (0, 0, MOST_OF_SEGMENT + 1)))
    assert steps.takes(step_of(model, (0, 0, MOST_OF_SEGMENT)))
    assert not steps.takes(step_of(model, *SPANS, adapters=object()))
    assert not steps.takes(step_of(model, *SPANS, stream=torch.zeros(6, 64)))
    rows = [(row, at, at + 1) for row in range(4) for at in range(39)]
    assert steps.takes(step_of(model, *rows[:MOST_TOKENS])) and not steps.takes(
        step_of(model, *rows[: MOST_TOKENS + 1])
    )
    halves = tuple((keys.to(torch.float8_e4m3fn), values) for keys, values in step_of(model, *SPANS).caches)
    assert not steps.takes(step_of(model, *SPANS, caches=halves))


def test_no_library_and_one_without_vectors_compute_no_whole_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = integer_library()
    for found in (None, replace(library, level=0)):
        monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda found=found: found)
        assert loaded(tmp_path, "Llama").whole_steps is None


LENGTHS = (39, 24, 30, 17)
"""Tokens of each row in the tests of equal bits."""


def part_of(step: StepInput, at: torch.Tensor, batch: Segments, **changes: Any) -> StepInput:
    """The tokens `at` of a step, which are these segments, over the caches of that step."""
    names = ("ids", "positions", "slot_mapping")
    own = {name: getattr(step, name)[at] for name in names}
    return replace(step, **own, metadata=step.attention.make_metadata(batch), **changes)


SLOT_OF_ROW = (1, -1, 0, 1)
"""The slot of each row's adapter; -1: it has none."""


def adapters_of(slots: AdapterSlots, of_tokens: torch.Tensor, sample_at: torch.Tensor | None = None) -> StepAdapters:
    """The adapters of a step whose tokens have these slots."""
    tokens, rows = (
        TorchLora(groups_of(each.numpy()), CPU)
        for each in (of_tokens, of_tokens if sample_at is None else of_tokens[sample_at])
    )
    return StepAdapters(slots.layers, tokens, rows)


def filled_slots(model: Decoder, *, max_rank: int = 12) -> AdapterSlots:
    """Two adapters of other ranks, the second one of some modules only."""
    slots = AdapterSlots(adapted_modules(model.decoder), slots=2, max_rank=max_rank, dtype=model.spec.dtype, device=CPU)
    modules = tuple(adapted_modules(model.decoder).modules)
    for slot, (rank, own) in enumerate(((max_rank, ()), (5, (modules[0], modules[2], modules[-1])))):
        weights = drawn(model.decoder, rank, seed=slot, modules=own, scale=1.5 + slot)
        slots.write(slot, slots.pack(weights, model.layers, pinned=False))
    return slots


def in_random_steps(
    model: Decoder, whole: StepInput, draw: random.Random, slots: AdapterSlots | None = None
) -> torch.Tensor:
    """The logits of all tokens of a step, computed in steps of random segments, in a random order within a step.

    With `slots`, tokens have the adapters of SLOT_OF_ROW. The caches lose what an earlier step wrote.
    """
    for each in (each for layer in whole.caches for each in layer):
        each.zero_()
    starts, done = np.cumsum([0, *LENGTHS]), [0] * len(LENGTHS)
    found = torch.empty(sum(LENGTHS), model.spec.vocab_size, dtype=model.spec.dtype)
    while left := [row for row, length in enumerate(LENGTHS) if done[row] < length]:
        spans = []
        for row in draw.sample(left, draw.randint(1, len(left))):
            begin, end = done[row], draw.choice([done[row] + 1, draw.randint(done[row] + 1, LENGTHS[row])])
            done[row], cut = end, draw.randint(begin, end)
            spans += [span for span in ((row, begin, cut), (row, cut, end)) if span[1] < span[2]]
        draw.shuffle(spans)  # a segment may come before another one whose keys it reads
        at = torch.cat([torch.arange(starts[row] + begin, starts[row] + end) for row, begin, end in spans])
        changes: dict[str, Any] = {}
        if slots is not None:
            of_tokens = torch.cat([torch.full((end - begin,), SLOT_OF_ROW[row]) for row, begin, end in spans])
            changes["adapters"] = None if bool((of_tokens < 0).all()) else adapters_of(slots, of_tokens)
        step = part_of(whole, at, segments(*spans), **changes)
        found[at] = model.logits(model.hidden(step)) if draw.random() < 0.3 else model.forward(step)
    return found


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen3", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
        ("Gemma2", {"sliding_window": 6, "final_logit_softcapping": 3.0}),
    ],
    ids=["Llama", "Qwen3", "Gemma2"],
)
def test_an_invariant_model_gives_a_token_the_same_bits_in_any_step(
    with_library: None, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    model = loaded(tmp_path, family, invariant=True, **config)
    assert model.spec.arithmetic.startswith("AVX") and not model.spec.one_by_one
    whole = step_of(model, *((row, 0, length) for row, length in enumerate(LENGTHS)))
    caches = [each for layer in whole.caches for each in layer]
    for each in caches:
        each.zero_()
    with torch.inference_mode():
        wanted = model.forward(whole)  # more tokens than the library computes in one call
        written = [each.clone() for each in caches]
        for seed in range(8):
            assert torch.equal(in_random_steps(model, whole, random.Random(seed)), wanted)
            assert all(map(torch.equal, written, caches))
        some = torch.tensor([3, 70, 64, 109])
        assert torch.equal(model.forward(replace(whole, sample_at=some)), wanted[some])
    plain = loaded(tmp_path, family, **config)
    with torch.inference_mode():
        assert (plain.forward(whole).float() - wanted.float()).norm() < 0.02 * wanted.float().norm()


@pytest.mark.parametrize(
    ("family", "config", "adapted"),
    [
        ("Mixtral", {}, False),
        ("Qwen3Moe", {"dtype": "bfloat16"}, False),
        ("GptOss", {}, False),
        ("Olmo2", {}, True),
        ("Llama", {"head_dim": 12}, True),
        ("Llama", {"dtype": "float16"}, False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_decoders_and_types_that_the_library_lacks_are_computed_token_by_token(
    with_library: None, tmp_path: Path, family: str, config: dict[str, Any], adapted: bool
) -> None:
    """Each token has the same bits in any step. They are near those of a model that computes all tokens together."""
    model = loaded(tmp_path, family, invariant=True, **config)
    assert model.spec.arithmetic.startswith("token by token, PyTorch ") and model.spec.one_by_one
    slots = filled_slots(model) if adapted else None
    whole = step_of(model, *((row, 0, length) for row, length in enumerate(LENGTHS)))
    of_tokens = torch.repeat_interleave(torch.tensor(SLOT_OF_ROW), torch.tensor(LENGTHS))
    step = replace(whole, adapters=None if slots is None else adapters_of(slots, of_tokens))
    with torch.inference_mode():
        wanted = model.forward(step)
        for seed in range(2):
            assert torch.equal(in_random_steps(model, whole, random.Random(seed), slots), wanted)
        some = torch.tensor([3, 70, 64, 109])
        if slots is not None:
            step = replace(step, adapters=adapters_of(slots, of_tokens, some))
        assert torch.equal(model.forward(replace(step, sample_at=some)), wanted[some])
        assert model.forward(replace(step, sample_at=some[:0])).shape == (0, model.spec.vocab_size)
        plain = loaded(tmp_path, family, **config)
        attention = step_of(plain, *SPANS, backend="torch").attention
        together = plain.forward(replace(step, sample_at=some, attention=attention)).float()
    near = 0.05 if "dtype" in config else 1e-4
    assert (together - wanted[some].float()).norm() < near * wanted[some].float().norm()


@pytest.mark.parametrize(
    ("family", "config"),
    [("Llama", {"attention_bias": True, "mlp_bias": True}), ("Phi3", {}), ("Gemma2", {"dtype": "bfloat16"})],
    ids=["Llama", "Phi3", "Gemma2"],
)
def test_an_adapters_token_has_the_same_bits_in_any_step_and_a_token_without_one_those_of_the_model(
    with_library: None, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """The sequences of a step have one adapter, another one, and none. Adapters of float32 are near PyTorch's."""
    model = loaded(tmp_path, family, invariant=True, **config)
    slots = filled_slots(model)
    whole = step_of(model, *((row, 0, length) for row, length in enumerate(LENGTHS)))
    of_tokens = torch.repeat_interleave(torch.tensor(SLOT_OF_ROW), torch.tensor(LENGTHS))
    adapted = replace(whole, adapters=adapters_of(slots, of_tokens))
    with torch.inference_mode():
        base, wanted = model.forward(whole), model.forward(adapted)
        without = of_tokens < 0
        assert torch.equal(wanted[without], base[without]) and not torch.equal(wanted[~without], base[~without])
        for seed in range(5):
            assert torch.equal(in_random_steps(model, whole, random.Random(seed), slots), wanted)
        plain = loaded(tmp_path, family, **config)
        oracle = plain.forward(replace(adapted, attention=step_of(plain, *SPANS, backend="torch").attention))
    near = 0.03 if "dtype" in config else 2e-5
    assert (oracle.float() - wanted.float()).norm() < near * wanted.float().norm()


@pytest.mark.parametrize(
    ("family", "config"),
    [("Llama", {"attention_bias": True}), ("Qwen3", {"dtype": "bfloat16"}), ("Gemma2", {"sliding_window": 6})],
    ids=["Llama", "Qwen3", "Gemma2"],
)
def test_any_number_of_ranks_gives_a_token_the_same_bits(
    with_library: None, tmp_path: Path, family: str, config: dict[str, Any]
) -> None:
    """Sums are cut for four ranks. Each of them has its own columns of the logits."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 128}
    kind = {"dtype": config.pop("dtype", "float32")}
    make(tmp_path, family, **sizes, **config)
    spans = ((0, 0, 9), (1, 0, 20), (2, 0, 2))

    def logits(tp: int, *, alone: bool = False) -> torch.Tensor:
        """The logits of all tokens, or of those of the second span in a step of their own."""

        def of_rank(rank: Rank) -> torch.Tensor:
            options: dict[str, Any] = dict(layout=Layout(tp=tp), rank=rank.rank, group=rank.group())
            model = load(tmp_path, device="cpu", invariant=True, ranks=4, **kind, **options)
            assert isinstance(model, Decoder) and model.spec.arithmetic.endswith(", for 4 ranks")
            step = step_of(model, *spans, local=rank.rank, devices=tp)
            if alone:
                step = part_of(step, torch.arange(9, 29), segments(spans[1]))
            with torch.inference_mode():
                return model.forward(step)

        return torch.cat(in_ranks(Layout(tp=tp), of_rank), 1)

    wanted = logits(1)
    for tp in (2, 4):
        assert torch.equal(logits(tp), wanted), tp
    assert torch.equal(logits(2, alone=True), wanted[9:29])
    with torch.inference_mode():
        plain = load(tmp_path, device="cpu", **kind)
        assert isinstance(plain, Decoder)
        together = plain.forward(step_of(plain, *spans, backend="torch")).float()
    near = 1e-5 if kind["dtype"] == "float32" else 0.02
    assert (together - wanted.float()).norm() < near * together.norm()


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_0", "bfloat16"), ("Q8_0", "bfloat16"), ("Q8_0", "float32")])
def test_packed_weights_give_a_token_the_same_bits_in_any_step(
    with_library: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, dtype: str
) -> None:
    """The library multiplies integers in bfloat16. In float32 the weights are plain numbers. Both have adapters."""
    model = load(gguf(tmp_path, monkeypatch, kind), device="cpu", dtype=dtype, invariant=True)
    assert isinstance(model, Decoder)
    assert isinstance(model.layers[0].down, IntegerWeight if dtype == "bfloat16" else torch.Tensor)
    slots = filled_slots(model)
    whole = step_of(model, *((row, 0, length) for row, length in enumerate(LENGTHS)))
    of_tokens = torch.repeat_interleave(torch.tensor(SLOT_OF_ROW), torch.tensor(LENGTHS))
    with torch.inference_mode():
        wanted = model.forward(replace(whole, adapters=adapters_of(slots, of_tokens)))
        for seed in range(4):
            assert torch.equal(in_random_steps(model, whole, random.Random(seed), slots), wanted)


def test_adapters_that_do_not_fit_the_library_are_refused(with_library: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama", invariant=True)
    slots, of_tokens = filled_slots(model), torch.tensor([0, -1, 1, 0, 0, 0])
    step = step_of(model, *SPANS)

    def refused(adapters: StepAdapters, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            model.forward(replace(step, adapters=adapters))

    refused(adapters_of(slots, of_tokens + 1), "a slot, block, position or row of the step does not exist")
    refused(adapters_of(slots, of_tokens[:5]), "5 slots of adapters do not fit a step of 6 tokens")
    refused(replace(adapters_of(slots, of_tokens), layers=slots.layers[:1]), "adapters of 1 layers of 2")
    scaled = AdapterSlots(
        adapted_modules(model.decoder), slots=2, max_rank=4, dtype=torch.float32, device=CPU, dora=True
    )
    refused(adapters_of(scaled, of_tokens), "or have gains")


def test_a_step_in_several_calls_computes_shared_blocks_before_they_are_read(
    with_library: None, tmp_path: Path
) -> None:
    """The first sequence of the step reads blocks that the last one computes."""
    model = loaded(tmp_path, "Llama", invariant=True)
    tables = TABLES.clone()
    tables[0, :5] = tables[2, :5]
    spans = (0, 20, 39), (1, 0, 30), (2, 0, 39)
    rows = torch.from_numpy(np.repeat([row for row, *_ in spans], [stop - start for _, start, stop in spans]))
    whole = step_of(model, *spans, block_tables=tables)
    slots = tables[rows, whole.positions // BLOCK].long() * BLOCK + whole.positions % BLOCK
    whole = replace(whole, slot_mapping=slots)
    first = part_of(whole, torch.arange(49, 88), segments(spans[2]))
    later = part_of(whole, torch.arange(19), segments(spans[0]))
    with torch.inference_mode():
        found = model.forward(whole)
        assert torch.equal(model.forward(first), found[49:])
        assert torch.equal(model.forward(later), found[:19])


def test_a_step_in_several_calls_taps_every_token(with_library: None, tmp_path: Path) -> None:
    model = loaded(tmp_path, "Llama", invariant=True)
    spans, sizes = ((0, 0, 39), (1, 0, 30), (2, 0, 39)), (108, 2, model.decoder.hidden_size)
    whole, apart = (StreamTaps((0, 1), torch.zeros(sizes)) for _ in range(2))
    step = step_of(model, *spans, taps=whole)
    with torch.inference_mode():
        model.forward(step)
        for begin, span in zip((0, 39, 69), spans, strict=True):
            at = torch.arange(begin, begin + span[2])
            model.forward(part_of(step, at, segments(span), taps=StreamTaps((0, 1), apart.into[at[0] :])))
    assert whole.into.count_nonzero() > 0 and torch.equal(whole.into, apart.into)


CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_the_decoders_with_whole_steps_are_those_of_plain_layers() -> None:
    def plain(architecture: str, **changes: Any) -> bool:
        return is_plain(NATIVE[architecture](CONFIG | {"architectures": [architecture]} | changes))

    assert all(map(plain, ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")))
    assert not plain("LlamaForCausalLM", head_dim=24)
    assert not plain("LlamaForCausalLM", hidden_act="gelu")
    assert not any(map(plain, ("StableLmForCausalLM", "NemotronForCausalLM", "Olmo2ForCausalLM")))
    assert not plain("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
