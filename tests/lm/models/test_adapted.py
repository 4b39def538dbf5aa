"""The modules that adapters may change, by family: names, places in fused weights, and the order of outputs."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.models.adapted import SHORT_NAMES, AdaptedModules, adapted_modules
from holdfast.lm.models.loader import native_spec
from tests.adapted_families import NATIVE_FAMILIES, every_linear
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
    everywhere = {base.names.modules[short] for short in base.everywhere}
    assert everywhere == {*linear} and {*base.modules} <= {*SHORT_NAMES}
    for layer in range(base.num_layers):
        for names in base.fields(layer).values():
            columns = [base.modules[short].columns for short in names]
            assert [part.start for part in columns] == [0, *(part.stop for part in columns[:-1])]


@pytest.mark.parametrize("name", ["phi3-partial", "falcon", "falcon-rw", "gpt2"])
def test_outputs_that_are_placed_in_a_field_come_back_in_their_own_order(name: str) -> None:
    base, _ = modules_of(name)
    for module in base.modules.values():
        own = torch.randn(module.outputs, 2)
        assert torch.equal(module.own(module.placed(own)), own)
    assert base.modules["qkv"].rows is not None or name == "gpt2"
