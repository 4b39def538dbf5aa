"""Adapters that PEFT wrote, over every native family: logits and greedy tokens are those of PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.core.types import Request, SamplingParams
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.state_memory import states_of
from holdfast.lm.kernels.attention.backends import attention_of_layers
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.adapters import AdapterSlots
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.gemma4_decoder import OwnHeadsMixer
from holdfast.lm.models.loader import load, native_spec
from holdfast.lm.models.peft_files import CONFIG_FILE, WEIGHTS_FILE, UnsupportedAdapter, read_peft
from holdfast.lm.models.text_decoders import WITH_IMAGES
from holdfast.lm.parts.adapters.device import AdapterDevice, AdapterStore
from holdfast.lm.parts.adapters.inputs import AdapterInputs
from holdfast.lm.parts.adapters.values import AdapterPlan
from tests.adapted_engine import Engine
from tests.adapted_families import HYBRID_FAMILIES, NATIVE_FAMILIES, Family, family, prompts
from tests.adapters import drawn, generated, merged, write
from tests.checkpoints import tiny
from tests.long import then_long
from tests.ranks import Rank, in_ranks

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

COMPUTED_APART = (
    "llama",
    "phi3",
    "olmo2",
    "gemma2",
    "gemma4",
    "gemma4-mixture",
    "opt-350m",
    "falcon-7b",
    "gpt2",
    "stablelm-12b",
    "phimoe",
    "llama4",
    "gpt-oss",
    "qwen3.5",
    "lfm2",
    "falcon-h1",
    "nemotron-h",
)
"""Families whose layers have a kernel of their own, or another order of the same ones."""
BLOCK, BLOCKS = 4, 8
GENERATED = 6


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Gives the family of a name, which is made once. Tests leave it as it is."""
    return cache(lambda name: family(name, tmp_path_factory.mktemp("family")))


@pytest.fixture(params=[*NATIVE_FAMILIES, *HYBRID_FAMILIES])
def any_case(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    return families(request.param)


@pytest.fixture(params=NATIVE_FAMILIES)
def case(request: pytest.FixtureRequest, families: Callable[[str], Family]) -> Family:
    return families(request.param)


def slots_of(case: Family, names: tuple[str, str]) -> AdapterSlots:
    """Two slots with these adapters. They have gains if one of them is a DoRA."""
    model, spec = case.model, case.model.spec
    slots = AdapterSlots(
        adapted_modules(model.decoder), slots=2, max_rank=8, dtype=spec.dtype, device=spec.device, dora="dora" in names
    )
    for slot, name in enumerate(names):
        weights = read_peft(case.directories[name], model.decoder)
        slots.write(slot, slots.pack(weights, model.layers, pinned=False))
    return slots


def logits_of(model: Decoder, slots: AdapterSlots, given: list[tuple[int, ...]], *, tiled: bool) -> torch.Tensor:
    """The logits of all tokens of several prompts in one step: prompt i has that of slot i % 3, and every third none.

    With `tiled`, adapters are computed by the kernels of a GPU.
    """
    spec, where = model.spec, model.spec.device
    cache = KVCache.allocate_layers(
        spec.kv_shapes, num_blocks=BLOCKS * len(given), block_size=BLOCK, dtype=spec.dtype, device=where
    )
    attention = attention_of_layers(where, spec.kv_shapes, num_heads=spec.num_heads, block_size=BLOCK, backend="torch")
    lengths = [len(ids) for ids in given]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    segments = Segments(starts, np.array(lengths, np.int32), np.arange(len(given), dtype=np.int32))
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = torch.repeat_interleave(torch.arange(len(given)), torch.tensor(lengths))
    step = StepInput(
        torch.tensor([token for ids in given for token in ids]),
        positions,
        None,
        rows * BLOCKS * BLOCK + positions,
        torch.arange(BLOCKS * len(given), dtype=torch.int32).view(len(given), BLOCKS),
        [cache.layer(layer) for layer in range(spec.num_layers)],
        attention,
        attention.make_metadata(segments),
        adapters_of(slots, len(given), segments, tiled=tiled),
        recurrent=states_of(spec, TorchRecurrence(where), len(given)).step(segments),
    )
    with torch.inference_mode():
        return model.forward(step)


def adapters_of(slots: AdapterSlots, count: int, segments: Segments, *, tiled: bool) -> Any:
    """The adapters of a step of `count` segments, as the executor makes them."""
    tokens = segments.num_tokens
    where = slots.layers[0].qkv.a.device
    inputs = AdapterInputs(
        slots.layers, 2, max_tokens=tokens, samples=tokens, device=where, gains=slots.takes_gains, scaled=slots.scaled
    )
    columns = type("Columns", (), {"column": staticmethod(lambda name: [True] * count)})
    of = tuple((0, 1, -1)[number % 3] for number in range(count))
    plan: Any = type("Plan", (), {"part": staticmethod(lambda kind: AdapterPlan(slots=of)), "columns": columns})
    plan.samples = segments.query_length
    packed = inputs.pack(plan, segments, tokens)
    assert packed is not None
    arrays = {name: np.zeros(size, np.int64) for name, size in inputs.sizes.items()}
    inputs.write(packed, arrays, tokens, tokens, apart=False)
    tensors = {name: torch.from_numpy(array).to(where) for name, array in arrays.items()}
    fields: Any = type(
        "Fields", (), {"tensors": tensors, "take": staticmethod(lambda name, count: tensors[name][:count])}
    )
    found = inputs.captured(fields, tokens, None) if tiled else inputs.entered(packed, fields, tokens, None)
    assert found is not None
    return found


def assert_logits_are_peft_s(
    case: Family, names: tuple[str, str], given: list[tuple[int, ...]], *, tiled: bool
) -> None:
    assert_these_are_peft_s(logits_of(case.model, slots_of(case, names), given, tiled=tiled), case, names, given)


def assert_these_are_peft_s(
    found: torch.Tensor, case: Family, names: tuple[str, str], given: list[tuple[int, ...]]
) -> None:
    for number, (ids, own) in enumerate(zip(given, found.split([len(ids) for ids in given]), strict=True)):
        with torch.inference_mode():
            keys = (*names, "")[number % 3], ""
            expected, plain = (case.adapted[key](torch.tensor([ids])).logits[0] for key in keys)
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=2e-4)
        assert number % 3 == 2 or float((expected - plain).abs().max()) > 0.05, "an adapter must change what is said"


LATENT = {f"{name}ForCausalLM" for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Youtu", "MiniCPM3")}
"""Architectures with latent attention. Their adapters run on padded rows."""


def test_every_native_architecture_has_a_case() -> None:
    covered = {architecture for architecture, _, _ in (*NATIVE_FAMILIES.values(), *HYBRID_FAMILIES.values())}
    without = {*WITH_IMAGES, "Qwen3_5MoeForCausalLM"} | LATENT
    assert covered == {*NATIVE} - without, "those of models with images have one of these decoders inside"


@pytest.mark.each_value("llama-*", "gemma4-dora-wide", "qwen3-next-*", "bamba-*", "falcon-*")
@pytest.mark.parametrize("names", [("wide", "some"), ("dora", "wide")], ids="-".join)
def test_logits_of_a_mixed_batch_are_those_of_peft(any_case: Family, names: tuple[str, str]) -> None:
    assert_logits_are_peft_s(any_case, names, prompts(6), tiled=False)


@pytest.mark.always("llama-4", "phi3-4", "olmo2-4", "falcon-4", "gemma4-4", "qwen3-moe-4")
@pytest.mark.parametrize("tp", then_long(1, [4, 2]))
@pytest.mark.parametrize(
    "name", ["llama", "phi3", "olmo2", "falcon", "gpt2", "gemma2", "qwen3-moe", "gemma4", "gemma4-dense"]
)
def test_ranks_that_share_the_layers_give_peft_s_logits_with_a_dora(
    name: str, tp: int, families: Callable[[str], Family]
) -> None:
    """Each rank has some columns of o and down, so it has a part of the norm of every row."""
    case, names, given = families(name), ("dora", "wide"), prompts(6)

    def work(rank: Rank) -> torch.Tensor:
        model = load(case.base, device="cpu", dtype="float32", layout=rank.layout, rank=rank.rank, group=rank.group())
        assert isinstance(model, Decoder)
        device = AdapterDevice(model, EngineConfig(max_adapters=2, tp=tp, device="cpu"))
        for slot, each in enumerate(names):
            device.slots.write(slot, device.store.read(each, case.directories[each]).packed)
            device.slots.complete(slot)
        return logits_of(model, device.slots, given, tiled=False)

    found = torch.cat(in_ranks(Layout(tp=tp), work), 1)
    assert_these_are_peft_s(found, case, names, given)


def test_a_slot_of_several_ranks_that_held_a_dora_scales_nothing_for_the_next_adapter(tmp_path: Path) -> None:
    case, given = family("llama", tmp_path), prompts(3)

    def work(rank: Rank) -> torch.Tensor:
        model = load(case.base, device="cpu", dtype="float32", layout=rank.layout, rank=rank.rank, group=rank.group())
        assert isinstance(model, Decoder)
        device = AdapterDevice(model, EngineConfig(max_adapters=2, tp=2, device="cpu"))
        for slot, each in ((0, "dora"), (1, "wide"), (0, "some"), (1, "dora")):
            device.slots.write(slot, device.store.read(each, case.directories[each]).packed)
            device.slots.complete(slot)
        return logits_of(model, device.slots, given, tiled=False)

    assert_these_are_peft_s(torch.cat(in_ranks(Layout(tp=2), work), 1), case, ("some", "dora"), given)


@pytest.mark.always(*COMPUTED_APART)
def test_the_kernels_of_a_gpu_give_the_same_logits(any_case: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the layers and the adapters as a captured step on a GPU has them."""
    case = any_case
    model = case.model
    for name in ("_ops", "_local_ops"):
        monkeypatch.setattr(model, name, FusedLayerOps(getattr(model, name).shape))
    for mixer in model._mixers:
        if isinstance(mixer, OwnHeadsMixer):
            monkeypatch.setattr(mixer, "_heads", FusedLayerOps(mixer._heads.shape))
    assert_logits_are_peft_s(case, ("wide", "some"), prompts(3, longest=4), tiled=True)
    if model.decoder.parallel or model.spec.architecture in ("LlamaForCausalLM", "Gemma2ForCausalLM"):
        assert_logits_are_peft_s(case, ("dora", "wide"), prompts(3, longest=4), tiled=True)


@pytest.mark.always("llama-*", "opt-350m-*", "gpt2-*", "gemma4-*", "qwen3-moe-*")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_greedy_tokens_of_requests_with_several_adapters_and_none_are_those_of_peft(case: Family, device: str) -> None:
    torch.set_num_threads(1)
    model = case.model if device == "cpu" else load(case.base, device=device, dtype="float32")
    assert isinstance(model, Decoder)
    engine = Engine(model, slots=3, budget=24, blocks=60, dora=True)
    ids = {key: engine.register(key, directory) for key, directory in case.directories.items()} | {"": ""}
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    for key in case.directories:  # each has its slot then, so that no request waits for a load while others end
        engine.add(Request(f"first {key}", (1, 2), SamplingParams(temperature=0, max_tokens=1)), ids[key])
    engine.run()
    expected = {}
    for number, (prompt, key) in enumerate(zip(prompts(8, seed=8), 2 * [*ids], strict=True)):
        engine.add(Request(str(number), prompt, params), ids[key])
        expected[str(number)] = generated(case.adapted[key], prompt, GENERATED)
    found = engine.run()
    assert {name: found[name] for name in expected} == expected
    assert any(len({*plan.part(AdapterPlan).slots}) == 4 for plan in engine.plans), "all of them in one step"
    engine.close()


def test_the_mlp_of_a_mixture_s_dense_layers_takes_adapters(tmp_path: Path) -> None:
    case_of = tiny("qwen3-moe", mlp_only_layers=[0])
    case_of.save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", device="cpu", dtype="float32")
    assert isinstance(model, Decoder)
    weights = drawn(model.decoder, 4, seed=3)
    assert {layer for layer, module in weights.pairs if module == "gate"} == {0}
    engine = Engine(model, slots=1)
    adapter = engine.register("a", write(tmp_path / "a", weights))
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    prompt = prompts(1)[0]
    engine.add(Request("0", prompt, params), adapter)
    assert engine.run() == {"0": generated(merged(case_of, weights), prompt, GENERATED)}
    engine.close()


def test_the_mlp_beside_the_experts_of_a_gemma_4_takes_adapters(tmp_path: Path) -> None:
    _, stem, differences = NATIVE_FAMILIES["gemma4-mixture"]
    module = tiny(stem, **differences)
    module.save_pretrained(tmp_path / "base")
    model = load(tmp_path / "base", device="cpu", dtype="float32")
    assert isinstance(model, Decoder)
    weights = drawn(model.decoder, 4, seed=3)
    assert {layer for layer, name in weights.pairs if name == "gate"} == {0, 1, 2}
    engine = Engine(model, slots=1)
    adapter = engine.register("a", write(tmp_path / "a", weights))
    prompt, params = prompts(1)[0], SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    engine.add(Request("0", prompt, params), adapter)
    assert engine.run() == {"0": generated(merged(module, weights), prompt, GENERATED)}
    engine.close()


def test_a_module_that_a_layer_lacks_is_refused_by_name(tmp_path: Path) -> None:
    _, stem, differences = NATIVE_FAMILIES["gemma4"]
    spec = native_spec({**tiny(stem, **differences).config.to_dict(), "architectures": ["Gemma4ForCausalLM"]})
    path = write(tmp_path, drawn(spec, 2, seed=0)) / WEIGHTS_FILE
    tensors = load_file(path)
    save_file({**tensors, "base_model.model.model.layers.5.self_attn.k_proj.lora_A.weight": torch.zeros(2, 64)}, path)
    with pytest.raises(UnsupportedAdapter, match=r"k_proj.* of layer 5, which has no self_attn.k_proj"):
        read_peft(tmp_path, spec)


def test_a_gemma_3_that_sees_reads_the_names_of_its_language_model(tmp_path: Path) -> None:
    case = family("gemma3", tmp_path)
    whole = replace(
        case.model.decoder,
        architecture="Gemma3ForConditionalGeneration",
        names=replace(
            case.model.decoder.names, base="model.", bases=("language_model.model.", "model.language_model.")
        ),
    )
    plain = read_peft(case.directories["some"], whole)
    tensors = load_file(case.directories["some"] / WEIGHTS_FILE)
    for base in ("model.language_model.", "language_model.model."):
        moved = {
            name.replace("model.model.model.", f"model.model.{base}", 1): tensor for name, tensor in tensors.items()
        }
        save_file(moved, case.directories["some"] / WEIGHTS_FILE)
        found = read_peft(case.directories["some"], whole)
        assert found.digest() == plain.digest()
        assert found.names.of(0, "q") == "model.language_model.layers.0.self_attn.q_proj"
    with pytest.raises(UnsupportedAdapter, match="is not of a supported module"):
        read_peft(case.directories["some"], case.model.decoder)


REFUSED = {
    "q_proj of a fused layer": ("phi3", dict(target_modules=["q_proj"]), "names 'q_proj'; supported .*qkv_proj"),
    "an expert": ("mixtral", dict(target_modules=["q_proj", "w1"]), "names 'w1'; .*experts .* take no adapters"),
    "parameters": ("gpt-oss", dict(target_parameters=["mlp.experts.down_proj"]), "sets 'target_parameters'"),
    "a whole module": ("opt", dict(modules_to_save=["lm_head"]), "whole weights of its own"),
    "a magnitude that is missing": ("gemma2", dict(use_dora=True), "has no magnitudes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_family_does_not_take_is_refused_by_name(what: str, tmp_path: Path) -> None:
    name, changes, words = REFUSED[what]
    _, stem, differences = NATIVE_FAMILIES[name]
    module = tiny(stem, **differences)
    spec = native_spec({**module.config.to_dict(), "architectures": [type(module).__name__]})
    config = write(tmp_path, drawn(spec, 2, seed=0)) / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    with pytest.raises(UnsupportedAdapter, match=words):
        read_peft(tmp_path, spec)


def test_tensors_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    spec = native_spec({**tiny("mixtral").config.to_dict(), "architectures": ["MixtralForCausalLM"]})
    path = write(tmp_path, drawn(spec, 2, seed=0)) / WEIGHTS_FILE
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w2.lora_A.weight"
    save_file({**tensors, name: torch.zeros(2, 4)}, path)
    with pytest.raises(UnsupportedAdapter, match=r"experts.1.w2.*the experts of a mixture and their router"):
        read_peft(tmp_path, spec)


def test_a_dora_is_refused_where_the_slots_have_no_gains(tmp_path: Path) -> None:
    case = family("llama", tmp_path)
    device = AdapterDevice(case.model, EngineConfig(max_adapters=1, max_adapter_rank=8))
    bare = AdapterSlots(
        adapted_modules(case.model.decoder),
        slots=1,
        max_rank=8,
        dtype=torch.float32,
        device=torch.device("cpu"),
        dora=False,
    )
    assert device.store.read("x", case.directories["dora"]).packed.gains is not None
    store = AdapterStore(bare, case.model, host_bytes=1 << 30, pinned=False)
    with pytest.raises(UnsupportedAdapter, match="start it with dora"):
        store.read("x", case.directories["dora"])


def test_a_dora_of_outputs_that_mamba_adds_to_is_refused(tmp_path: Path) -> None:
    case = family("falcon-h1", tmp_path)
    tensors = load_file(case.directories["wide"] / WEIGHTS_FILE)
    for name, tensor in [*tensors.items()]:
        if name.endswith("lora_B.weight"):
            tensors[name.removesuffix("lora_B.weight") + "lora_magnitude_vector"] = torch.ones(len(tensor))
    save_file(tensors, case.directories["wide"] / WEIGHTS_FILE)
    config = case.directories["wide"] / CONFIG_FILE
    config.write_text(json.dumps({**json.loads(config.read_text()), "use_dora": True}))
    with pytest.raises(
        UnsupportedAdapter, match=r"o_proj has magnitudes \(use_dora\), and a recurrent layer adds to its"
    ):
        read_peft(case.directories["wide"], case.model.decoder)


@pytest.mark.gpu
def test_a_gpu_takes_a_dora_only_if_the_engine_was_started_for_it(tmp_path: Path) -> None:
    case = family("llama", tmp_path)
    model = load(case.base, device="cuda", dtype="float32")
    assert isinstance(model, Decoder)
    stores = [AdapterDevice(model, EngineConfig(max_adapters=1, dora=dora)).store for dora in (True, False)]
    assert stores[0].read("x", case.directories["dora"]).packed.gains is not None
    with pytest.raises(UnsupportedAdapter, match="start it with dora"):
        stores[1].read("x", case.directories["dora"])


def test_a_slot_that_held_a_dora_scales_nothing_for_the_next_adapter(tmp_path: Path) -> None:
    case = family("llama", tmp_path)
    slots = slots_of(case, ("dora", "wide"))
    weights = read_peft(case.directories["some"], case.model.decoder)
    slots.write(0, slots.pack(weights, case.model.layers, pinned=False))
    given = prompts(3)
    found = logits_of(case.model, slots, given, tiled=False)
    with torch.inference_mode():
        expected = case.adapted["some"](torch.tensor([given[0]])).logits[0]
    torch.testing.assert_close(found[: len(given[0])], expected, atol=2e-4, rtol=2e-4)
    assert slots.scaled == set()
