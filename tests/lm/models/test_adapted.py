"""The modules that adapters may change, by family: names, places in fused weights, and the order of outputs."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.models.adapted import SHORT_NAMES, AdaptedModules, adapted_modules
from holdfast.lm.models.loader import native_spec
from tests.adapted_families import HYBRID_FAMILIES, NATIVE_FAMILIES, every_hybrid_linear, every_linear
from tests.checkpoints import tiny


def modules_of(name: str) -> tuple[AdaptedModules, list[str]]:
    """The modules of a family, and the names of those that PEFT finds in Transformers' module."""
    architecture, stem, differences = NATIVE_FAMILIES[name]
    module = tiny(stem, **differences)
    return adapted_modules(native_spec({**module.config.to_dict(), "architectures": [architecture]})), every_linear(
        module
    )


@pytest.mark.parametrize("name", NATIVE_FAMILIES)
def test_every_linear_module_of_peft_is_known_and_the_fields_are_covered_once(name: str) -> None:
    base, linear = modules_of(name)
    found = {base.names.modules[short] for short in (base.modules if base.of_layers else base.everywhere)}
    assert found == {*linear} and {*base.modules} <= {*SHORT_NAMES}
    for layer in range(base.num_layers):
        for names in base.fields(layer).values():
            columns = [base.of_layer(layer)[short].columns for short in names]
            assert [part.start for part in columns] == [0, *(part.stop for part in columns[:-1])]


@pytest.mark.parametrize("name", [name for name in HYBRID_FAMILIES if name != "nemotron-3"])
def test_tuning_changes_the_modules_of_hybrid_models_that_peft_takes_adapters_of(name: str) -> None:
    architecture, stem, differences = HYBRID_FAMILIES[name]
    module = tiny(stem, **differences)
    base = adapted_modules(native_spec({**module.config.to_dict(), "architectures": [architecture]}))
    assert {base.names.modules[short] for short in base.tunable} == {*every_hybrid_linear(module)}
    assert {*base.tunable} - {*base.scalable} == ({"o"} if name == "falcon-h1" else set())
    assert base.names.of(0, "down" if name == "nemotron-h" else base.tunable[0]).startswith("model.layers.0.")


@pytest.mark.parametrize("name", [name for name in NATIVE_FAMILIES if not name.startswith("gemma4")])
def test_tuning_changes_the_modules_that_every_layer_of_other_models_has(name: str) -> None:
    base, _ = modules_of(name)
    assert base.tunable == base.everywhere


@pytest.mark.parametrize("name", ["phi3-partial", "falcon", "falcon-rw", "gpt2"])
def test_outputs_that_are_placed_in_a_field_come_back_in_their_own_order(name: str) -> None:
    base, _ = modules_of(name)
    for module in base.modules.values():
        own = torch.randn(module.outputs, 2)
        assert torch.equal(module.own(module.placed(own)), own)
    assert base.modules["qkv"].rows is not None or name == "gpt2"


def test_keys_that_are_values_have_one_module_over_both() -> None:
    base, _ = modules_of("gemma4-dense")
    window, full = base.of_layer(0), base.of_layer(2)
    assert [*window][:3] == ["q", "k", "v"] and [*full][:2] == ["q", "k"] and "v" not in full
    assert full["k"].columns == slice(4 * 32, 4 * 32 + 2 * 32) and full["k"].outputs == 32
    own = torch.randn(32, 2)
    assert torch.equal(full["k"].placed(own), torch.cat((own, own)))


def test_a_layer_that_reads_earlier_keys_has_no_module_of_keys() -> None:
    base, _ = modules_of("gemma4")
    assert base.fields(5)["qkv"] == ("q",) and base.fields(2)["qkv"] == ("q", "k", "v")
    assert not base.has(5, "k") and base.everywhere == ("q", "o", "gate", "up", "down")
    assert base.of_layer(5)["gate"].outputs == 2 * base.of_layer(2)["gate"].outputs
