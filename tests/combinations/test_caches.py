"""Caches whose layers keep latents, or heads of several sizes, work with tiers, moves and drafts as any other does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.process.build import build_engine
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.executor import PagedExecutor
from tests.checkpoints import make
from tests.combinations import place as places
from tests.combinations.effects import EFFECTS, check_tokens
from tests.combinations.place import SMALL, Place
from tests.combinations.workload import serve


class OtherPlace(Place):
    """A place whose model is of another family than Llama, and has no adapter."""

    def __init__(self, root: Path, family: str) -> None:
        super().__init__(root)
        self._family = family

    @cached_property
    def plain(self) -> Path:
        """A model of the family, and random weights."""
        make(self.root / self._family, self._family, max_position_embeddings=512, eos_token_id=1)
        return self._with_tokenizer(self._family)

    def kind(self, features: frozenset[str]) -> dict[str, Any]:
        return {"model": str(self.plain)}


@pytest.fixture(scope="module", params=["DeepseekV3", "Gemma4Text"])
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    found = OtherPlace(tmp_path_factory.mktemp(request.param), request.param)
    yield found
    found.close()


@pytest.mark.each_value
@pytest.mark.parametrize("features", [("host",), ("remote",), ("moves",), ("disk", "drafts")], ids="+".join)
def test_blocks_of_other_caches_go_where_blocks_go(
    other: Place, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(EngineConfig(model=str(other.model(frozenset())), **SMALL))
    executor = engine.loop.executor
    assert isinstance(executor, PagedExecutor)
    size = executor.memory.cache.block_bytes
    engine.close()
    monkeypatch.setattr(places, "block_bytes", lambda features: size)
    seen = serve(other, ("paged", *features))
    check_tokens(seen, features)
    for feature in ("paged", *features):
        EFFECTS[feature](seen)
