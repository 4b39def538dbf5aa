"""The kernel that completes a step's inputs: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.cache.step_inputs import BLOCK, write_step_inputs
from holdfast.lm.types import GUESSED, PENDING


@pytest.mark.parametrize(("tokens", "entries"), [(1, 1), (5, 2), (BLOCK, 3), (BLOCK + 7, 0), (2, BLOCK + 1)])
def test_pending_tokens_and_table_entries_are_written_to_their_places(tokens: int, entries: int, device: str) -> None:
    noise = torch.Generator().manual_seed(tokens)
    drawn = torch.arange(200, device=device).view(40, 5)
    rows = torch.randint(40, (tokens,), generator=noise).to(device)
    ids = torch.randint(7, (tokens,), generator=noise).to(device)
    ids[::2] = PENDING
    ids[1::4] = GUESSED - 2
    expected = ids.clone()
    expected[::2] = 5 * rows[::2]
    expected[1::4] = 5 * rows[1::4] + 3
    beyond = torch.full((3,), PENDING, device=device)  # entries after the step's tokens stay as they are
    whole = torch.cat((ids, beyond))
    tables = torch.full((20, 30), -5, dtype=torch.int32, device=device)
    places = torch.randperm(600, generator=noise)[:entries].to(device)
    blocks = torch.arange(entries, device=device) + 1000
    expected_tables = tables.clone().view(-1)
    expected_tables[places] = blocks.int()
    write_step_inputs(whole[:tokens], rows, drawn, tables, places, blocks)
    assert whole.tolist() == expected.tolist() + beyond.tolist()
    assert torch.equal(tables.view(-1), expected_tables)
