"""Adapters in PEFT's format: PEFT and Holdfast read each other's files, and anything else is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.models.adapted import LLAMA, adapted_modules
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.peft_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterWeights,
    LoraPair,
    UnsupportedAdapter,
    check_effect,
    check_finite,
    read_peft,
    write_peft,
)
from tests.checkpoints import tiny

# PEFT asks Transformers by a name that is about to go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def spec_of(module: Any) -> DecoderSpec:
    """The spec of Transformers' own module."""
    return NATIVE[type(module).__name__]({**module.config.to_dict(), "architectures": [type(module).__name__]})


LLAMA_CONFIG: dict[str, Any] = dict(
    architectures=["LlamaForCausalLM"], vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def base() -> DecoderSpec:
    return NATIVE["LlamaForCausalLM"](LLAMA_CONFIG)


def adapter(base: Any, *, modules: tuple[str, ...] = tuple(LLAMA), rank: int = 4, scale: float = 2.0) -> Any:
    shapes = adapted_modules(base).shapes()
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return AdapterWeights(
        {
            (layer, module): LoraPair(draw(rank, shapes[module][1]), draw(shapes[module][0], rank), scale)
            for layer in range(base.num_layers)
            for module in modules
        }
    )


def assert_same(found: AdapterWeights, wanted: AdapterWeights) -> None:
    assert found.pairs.keys() == wanted.pairs.keys()
    for key, pair in wanted.pairs.items():
        assert torch.equal(found.pairs[key].a, pair.a) and torch.equal(found.pairs[key].b, pair.b)
        assert found.pairs[key].scale == pytest.approx(pair.scale, rel=1e-12)


def changed(directory: Path, **config: Any) -> Path:
    path = directory / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return directory


def renamed(directory: Path, old: str, new: str | None) -> Path:
    tensors = load_file(directory / WEIGHTS_FILE)
    tensor = tensors.pop(old)
    if new is not None:
        tensors[new] = tensor
    save_file(tensors, directory / WEIGHTS_FILE)
    return directory


@pytest.fixture
def written(base: Any, tmp_path: Path) -> Path:
    write_peft(tmp_path / "adapter", adapter(base), base_model="base")
    return tmp_path / "adapter"


@pytest.mark.parametrize("modules", [tuple(LLAMA), ("q", "v"), ("o", "down")])
def test_written_blocks_are_read_back(base: Any, modules: tuple[str, ...], tmp_path: Path) -> None:
    weights = adapter(base, modules=modules, scale=0.75)
    write_peft(tmp_path, weights, base_model="base")
    found = read_peft(tmp_path, base)
    assert_same(found, weights)
    assert (found.rank, found.modules) == (4, modules)
    assert found.num_bytes == sum(path.nbytes for path in load_file(tmp_path / WEIGHTS_FILE).values())


def test_pairs_of_different_ranks_and_scales_are_read_back(base: Any, tmp_path: Path) -> None:
    pairs = dict(adapter(base).pairs)
    pairs[1, "q"] = LoraPair(torch.randn(3, 32), torch.randn(32, 3), 1 / 3)
    del pairs[0, "up"]
    write_peft(tmp_path, AdapterWeights(pairs), base_model="base")
    assert_same(read_peft(tmp_path, base), AdapterWeights(pairs))


def test_a_written_adapter_changes_peft_s_model_as_its_product_says(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = tiny("llama")
    base = spec_of(module)
    pairs = dict(adapter(base, scale=0.5).pairs)
    pairs[1, "q"] = pairs[1, "q"]._replace(scale=0.25)
    write_peft(tmp_path, AdapterWeights(pairs), base_model="base")
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    merged = peft.PeftModel.from_pretrained(module, tmp_path).merge_and_unload().state_dict()
    for (layer, short), pair in pairs.items():
        name = f"model.layers.{layer}.{LLAMA[short]}.weight"
        torch.testing.assert_close(merged[name] - before[name], pair.scale * pair.b @ pair.a, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        dict(r=4, lora_alpha=8, target_modules="all-linear"),
        dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], use_rslora=True),
        dict(r=8, lora_alpha=8, target_modules=r".*\.(gate|up)_proj"),
        dict(
            r=4, lora_alpha=6, target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 2}, layers_to_transform=[1]
        ),
        dict(r=4, lora_alpha=6, target_modules="all-linear", alpha_pattern={"layers.0.self_attn.q_proj": 3}),
        dict(
            r=4,
            lora_alpha=6,
            target_modules="all-linear",
            # A key with ^ must match the whole name: the first never does, the second does in layer 1.
            alpha_pattern={
                "^self_attn.q_proj": 99,
                "^model.layers.1.self_attn.q_proj": 3,
                "q_proj": 5,
                "self_attn.q_proj": 7,
            },
            rank_pattern={"^model.layers.0.mlp.up_proj": 2},
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The following alpha_pattern keys:RuntimeWarning")
def test_files_of_peft_are_read_with_its_scales(options: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    module = tiny("llama")
    base = spec_of(module)
    model = peft.get_peft_model(module, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options))
    model.save_pretrained(tmp_path)
    found = read_peft(tmp_path, base)
    layers = {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert len(layers) == len(found.pairs) > 0
    for (layer, short), pair in found.pairs.items():
        own = layers[f"base_model.model.model.layers.{layer}.{LLAMA[short]}"]
        torch.testing.assert_close(pair.scale * pair.b @ pair.a, own.get_delta_weight("default"))


def test_the_digest_changes_with_numbers_scale_and_place_and_with_nothing_else(base: Any, written: Path) -> None:
    weights = adapter(base)
    assert read_peft(changed(written, base_model_name_or_path="other"), base).digest() == weights.digest()
    first = weights.pairs[0, "q"]
    moved = {key: pair for key, pair in weights.pairs.items() if key != (0, "gate")}
    others = [
        {**weights.pairs, (0, "q"): first._replace(scale=2.5)},
        {**weights.pairs, (0, "q"): first._replace(a=first.a + torch.eye(4, 32) * 1e-3)},
        moved,
        {**moved, (0, "gate"): weights.pairs[0, "up"], (0, "up"): weights.pairs[0, "gate"]},
    ]
    digests = {AdapterWeights(pairs).digest() for pairs in others}
    assert len(digests) == 4 and weights.digest() not in digests


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(peft_type="IA3"), "peft_type is 'IA3'"),
        (dict(task_type="SEQ_CLS"), "task_type is 'SEQ_CLS'"),
        (dict(bias="all"), "bias is 'all'"),
        (
            dict(use_dora=True),
            "down_proj has no magnitudes in adapter_model.safetensors, and adapter_config.json sets use_dora",
        ),
        (dict(use_dora=1), "use_dora is 1; it must be true or false"),
        (
            dict(modules_to_save=["lm_head"]),
            r"modules_to_save is \['lm_head'\]: the adapter brings whole weights of its own",
        ),
        (dict(layer_replication=[[0, 1]]), "sets 'layer_replication'"),
        (dict(some_new_option=3), "sets 'some_new_option'"),
        (dict(init_lora_weights="pissa_niter_4"), "init_lora_weights is 'pissa_niter_4'"),
        (dict(lora_alpha="much"), "lora_alpha is 'much'"),
        (dict(lora_alpha=float("nan")), "lora_alpha is nan"),
        (dict(lora_alpha=float("inf")), "lora_alpha is inf"),
        (dict(lora_alpha=10**400), "lora_alpha is 1000"),
        (dict(lora_alpha=True), "lora_alpha is True"),
        (dict(lora_alpha=[16]), "lora_alpha is "),
        (dict(r="4"), "r is '4'; it must be an integer of at least 1"),
        (dict(r=0), "r is 0"),
        (dict(r=True), "r is True"),
        (dict(r=4.0), "r is 4.0"),
        (dict(r=8), "has rank 4 in adapter_model.safetensors, and adapter_config.json gives it 8"),
        (dict(rank_pattern={"q_proj": 2}), "self_attn.q_proj has rank 4 in .*gives it 2"),
        (dict(rank_pattern={"q_proj": 4.5}), "rank_pattern of 'q_proj' is 4.5"),
        (dict(rank_pattern={"q_proj": -1}), "rank_pattern of 'q_proj' is -1"),
        (dict(rank_pattern=[4]), "rank_pattern is "),
        (dict(alpha_pattern="q_proj"), "alpha_pattern is 'q_proj'"),
        (dict(alpha_pattern={"q_proj": 10**400}), "alpha_pattern of 'q_proj' is 1000"),
        (dict(use_rslora="false"), "use_rslora is 'false'; it must be true or false"),
        (dict(use_rslora=1), "use_rslora is 1"),
        (dict(lora_dropout=float("nan")), "lora_dropout is nan; it must be a number from 0 to 1"),
        (dict(lora_dropout=-0.1), "lora_dropout is -0.1"),
        (dict(lora_dropout="none"), "lora_dropout is 'none'"),
        (dict(alpha_pattern={".*q_proj": 3}), "pattern '.*q_proj'"),
        (dict(alpha_pattern={"q_proj": None}), "alpha_pattern of 'q_proj' is None"),
        (dict(target_modules=["q_proj", "lm_head"]), "target_modules names 'lm_head'"),
        (dict(target_modules=["q_proj", "proj"]), "target_modules names 'proj'"),
    ],
)
def test_options_beyond_plain_lora_are_refused_by_name(
    base: Any, written: Path, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedAdapter, match=words.replace("'.*", r"'\.\*")):
        read_peft(changed(written, **config), base)


@pytest.mark.parametrize(
    "config",
    [
        dict(r=None),
        dict(lora_dropout=0),
        dict(lora_dropout=1),
        dict(use_rslora=None),
        dict(fan_in_fan_out=True),
        dict(use_dora=False),
    ],
)
def test_numbers_that_change_nothing_are_taken(base: Any, written: Path, config: dict[str, Any]) -> None:
    before = read_peft(written, base)
    if config.get("r", 4) is None:
        config_file = written / CONFIG_FILE
        told = json.loads(config_file.read_text())
        del told["r"]
        config_file.write_text(json.dumps(told))
    else:
        changed(written, **config)
    assert_same(read_peft(written, base), before)


EFFECTS: dict[str, Callable[[float], tuple[dict[str, Any], float]]] = {
    "lora_alpha": lambda most: ({"lora_alpha": 4 * most}, 1.0),
    "alpha_pattern": lambda most: ({"alpha_pattern": {"1.self_attn.v_proj": 4 * most}}, 1.0),
    "lora_alpha and use_rslora": lambda most: ({"lora_alpha": 2 * most, "use_rslora": True}, 1.0),
    "a tensor": lambda most: ({"lora_alpha": 4}, most),
}
"""Ways to make an adapter's numbers large. Each returns a config with rank 4 and a number of B, scaled to `most`."""


@pytest.mark.parametrize("what", EFFECTS)
@pytest.mark.parametrize(("dtype", "fits", "bursts"), [(torch.float32, 1e30, 1e38), (torch.float16, 1e3, 2e4)])
def test_an_adapter_whose_change_is_infinite_in_the_served_dtype_is_refused(
    base: Any, tmp_path: Path, what: str, dtype: torch.dtype, fits: float, bursts: float
) -> None:
    write_peft(tmp_path, adapter(base, modules=("v",), rank=4), base_model="base")
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    for most in (fits, bursts):
        config, number = EFFECTS[what](most)
        ones = {name: torch.ones_like(tensor) for name, tensor in tensors.items()}
        ones["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"] *= number
        save_file(ones, tmp_path / WEIGHTS_FILE)
        found = read_peft(changed(tmp_path, **config), base)
        if most == fits:
            check_effect(found, dtype)
            continue
        kind = str(dtype).removeprefix("torch.")
        words = rf"v_proj is scaled by .* changes weights by up to {4 * most:.3g}; the largest {kind}".replace(
            "+", r"\+"
        )
        with pytest.raises(UnsupportedAdapter, match=words):
            check_effect(found, dtype)


@pytest.mark.parametrize("alpha", [1e308, -1e308, 1e39])
def test_a_scale_that_float32_cannot_hold_is_refused_even_for_weights_of_zero(
    base: Any, written: Path, alpha: float
) -> None:
    tensors = load_file(written / WEIGHTS_FILE)
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, written / WEIGHTS_FILE)
    found = read_peft(changed(written, lora_alpha=alpha * 4 if alpha == 1e39 else alpha), base)
    with pytest.raises(UnsupportedAdapter, match="is scaled by"):
        check_effect(found, torch.bfloat16)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(base: Any, written: Path, name: str) -> None:
    (written / name).unlink()
    os.mkfifo(written / name)
    with pytest.raises(UnsupportedAdapter, match=rf"{name} .*it is a named pipe, not a regular file"):
        read_peft(written, base)


NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (None, "has no tensor base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        ("base_model.model.lm_head.lora_A.weight", "lm_head.lora_A.weight' is not of a supported module"),
        (NAME.replace("lora_A", "lora_embedding_A"), "is not of a supported module"),
        (NAME.replace(".0.", ".2."), "of layer 2; the base model has 2 layers"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(base: Any, written: Path, new: str | None, words: str) -> None:
    with pytest.raises(UnsupportedAdapter, match=words):
        read_peft(renamed(written, NAME, new), base)


def test_an_adapter_of_another_base_model_is_refused_with_both_shapes(base: Any, written: Path) -> None:
    wider = replace(base, hidden_size=64)
    with pytest.raises(UnsupportedAdapter, match=r"B of \(32, 4\).*takes .*\(64, rank\)"):
        read_peft(written, wider)


def test_a_rank_above_the_limit_is_refused(base: Any, written: Path) -> None:
    with pytest.raises(UnsupportedAdapter, match=r"rank 4; it must be from 1 to 2"):
        read_peft(written, base, max_rank=2)


def test_a_module_that_the_config_lists_and_the_file_lacks_is_refused(base: Any, tmp_path: Path) -> None:
    write_peft(tmp_path, adapter(base, modules=("q",)), base_model="base")
    with pytest.raises(UnsupportedAdapter, match=r"has no model.layers.0.self_attn.v_proj"):
        read_peft(changed(tmp_path, target_modules=["q_proj", "v_proj"]), base)


def test_tensors_of_another_type_are_refused_before_they_are_read(base: Any, written: Path) -> None:
    tensors = load_file(written / WEIGHTS_FILE)
    save_file({**tensors, NAME: tensors[NAME].to(torch.float8_e4m3fn)}, written / WEIGHTS_FILE)
    with pytest.raises(UnsupportedAdapter, match=r"lora_A.weight is F8_E4M3; supported are F32, BF16, F16"):
        read_peft(written, base)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(base: Any, written: Path, number: float) -> None:
    tensors = load_file(written / WEIGHTS_FILE)
    tensors[NAME][1, 3] = number
    save_file(tensors, written / WEIGHTS_FILE)
    with pytest.raises(UnsupportedAdapter, match=r"q_proj.lora_A.weight holds NaN or infinite"):
        read_peft(written, base)


def test_numbers_beyond_the_engines_type_are_refused_by_their_tensor(base: Any, written: Path) -> None:
    tensors = load_file(written / WEIGHTS_FILE)
    tensors[NAME.replace("lora_A", "lora_B")][1, 3] = 7e4
    save_file(tensors, written / WEIGHTS_FILE)
    weights = read_peft(written, base)
    check_finite(weights, torch.bfloat16)
    with pytest.raises(UnsupportedAdapter, match=r"0.self_attn.q_proj.lora_B.weight holds .* infinite as float16"):
        check_finite(weights, torch.float16)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"[1]", b'{"a":', b"[" * 100_000, b'{"r": ' + b"9" * 5000 + b"}", b" " * (2 << 20)]
)
def test_a_config_that_is_no_object_is_refused(base: Any, written: Path, data: bytes) -> None:
    (written / CONFIG_FILE).write_bytes(data)
    with pytest.raises(UnsupportedAdapter, match=CONFIG_FILE):
        read_peft(written, base)


@pytest.mark.parametrize("data", [None, b"", b"not safetensors at all", b"\x80PK"])
def test_weights_that_are_no_safetensors_are_refused_without_naming_a_directory(
    base: Any, written: Path, data: bytes | None
) -> None:
    (written / WEIGHTS_FILE).unlink()
    if data is None:
        (written / "adapter_model.bin").write_bytes(b"\x80\x02")
    else:
        (written / WEIGHTS_FILE).write_bytes(data)
    with pytest.raises(UnsupportedAdapter, match=WEIGHTS_FILE) as refused:
        read_peft(written, base)
    assert str(written.parent) not in str(refused.value)


def test_half_precision_is_kept_as_it_is_stored(base: Any, tmp_path: Path) -> None:
    weights = AdapterWeights(
        {key: LoraPair(pair.a.bfloat16(), pair.b.half(), 1.0) for key, pair in adapter(base).pairs.items()}
    )
    write_peft(tmp_path, weights, base_model="base")
    assert_same(read_peft(tmp_path, base), weights)
