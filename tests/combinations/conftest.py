"""The place where all engines of these tests are made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.combinations.place import Place


@pytest.fixture(scope="package")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Models, an adapter and a Redis service, which are made when an engine first needs them."""
    torch.set_num_threads(1)
    found = Place(tmp_path_factory.mktemp("combinations"))
    yield found
    found.close()
