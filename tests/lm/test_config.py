"""EngineConfig: the options of every part are among its own, each declared in one place."""

from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.config import CoreConfig, own_options
from holdfast.lm import parts
from holdfast.lm.config import EngineConfig
from holdfast.lm.parts.adapters.options import AdapterOptions
from holdfast.lm.parts.tuning.options import TuningOptions


def declared() -> list[type[CoreConfig]]:
    """The classes of options that the parts' folders declare."""
    files = sorted(Path(parts.__path__[0]).glob("*/options.py"))
    modules = [import_module(f"{parts.__name__}.{file.parent.name}.options") for file in files]
    return [
        found
        for module in modules
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, CoreConfig) and found.__module__ == module.__name__
    ]


def test_the_options_of_every_part_are_options_of_an_engine() -> None:
    assert len(declared()) >= 6 and holdfast.EngineConfig is EngineConfig
    assert [kind.__name__ for kind in declared() if not issubclass(EngineConfig, kind)] == []


def test_each_option_is_declared_once() -> None:
    names = [option.name for kind in (CoreConfig, *declared()) for option in own_options(kind)]
    assert sorted(names) == sorted(option.name for option in fields(EngineConfig))
    assert own_options(EngineConfig) == ()


def test_a_part_gets_its_own_view_of_the_configuration() -> None:
    config = EngineConfig(max_adapters=3)
    assert config.part(AdapterOptions).adapter_slots == 3
    with pytest.raises(LookupError, match="has no TuningOptions; make it a base of AdapterOptions"):
        AdapterOptions().part(TuningOptions)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"tp": 2}, "tp 2 times pp 1 takes 2 devices"),
        ({"pp": 3}, "tp 1 times pp 3 takes 3 devices"),
        ({"tuning": True}, "a tuning job keeps memory that cannot be returned"),
        ({"executor": "padded"}, "enable_sleep_mode is True, which is for the paged executor"),
    ],
)
def test_an_engine_that_cannot_return_its_memory_does_not_sleep(others: dict[str, Any], reason: str) -> None:
    assert EngineConfig(**others)
    with pytest.raises(ValueError, match=reason):
        EngineConfig(enable_sleep_mode=True, **others)


def test_a_part_extends_what_others_need_of_it() -> None:
    assert (AdapterOptions(max_adapters=0).adapter_slots, EngineConfig(tuning=True).adapter_slots) == (0, 8)
    assert "scheduler is orca" in EngineConfig(scheduler="orca").no_drafts and not EngineConfig(tuning=True).no_drafts
    assert not CoreConfig().moves_blocks
    assert EngineConfig(chunk_host="127.0.0.1").moves_blocks and EngineConfig(disk_cache_dir="d").moves_blocks
