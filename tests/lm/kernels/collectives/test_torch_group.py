"""Groups through torch.distributed: sums over devices, the best of all, rows for columns."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.collectives.protocol import halves, own_rows
from holdfast.lm.kernels.collectives.torch_group import HALVED_ROWS, TorchGroup
from tests import ranks

in_group = partial(ranks.in_group, gloo=True)
SIZES = pytest.mark.parametrize("size", [2, 3])


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@SIZES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_add_norm_adds_all_partial_sums_and_the_bias_once(size: int, bias: bool, dtype: torch.dtype) -> None:
    stream, norm = normal(5, 16, seed=1, dtype=dtype), normal(16, seed=2, dtype=dtype)
    offset = normal(16, seed=3, dtype=dtype) if bias else None
    partials = [normal(1 + rank, 5, 16, seed=10 + rank) for rank in range(size)]  # some devices have more parts

    def work(group: TorchGroup) -> tuple[torch.Tensor, torch.Tensor]:
        own = stream.clone()
        room = group.room((*partials[group.rank].shape,), torch.float32).copy_(partials[group.rank])
        return own, group.add_norm(own, room, offset, norm, 1e-5)

    results = in_group(size, work)
    expected = stream.double() + sum(part.double().sum(0) for part in partials)
    if offset is not None:
        expected += offset.double()
    expected = expected.to(dtype)
    tolerance = dict(rtol=1e-2, atol=1e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
    for own, normed in results:
        torch.testing.assert_close(own, expected, **tolerance)
        torch.testing.assert_close(normed, functional.rms_norm(expected, (16,), norm, 1e-5), **tolerance)
        assert torch.equal(own, results[0][0]) and torch.equal(normed, results[0][1])


@SIZES
@pytest.mark.parametrize("rows", [HALVED_ROWS, HALVED_ROWS + 45])
def test_a_sum_in_parts_equals_the_sum(size: int, rows: int) -> None:
    addends = [normal(rows, 6, seed=rank, dtype=torch.bfloat16) for rank in range(size)]

    def work(group: TorchGroup) -> torch.Tensor:
        sums = group.begin_sum(rows, 6, torch.bfloat16)
        assert sums is not None
        for part, held in enumerate(sums.parts):
            sums.room(part).copy_(addends[group.rank][held])
            sums.send(part)
        return torch.cat([sums.receive(part).sum(0) for part in range(len(sums.parts))])

    expected = torch.stack(addends).double().sum(0)
    results = in_group(size, work)
    for result in results:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(result, results[0])


def test_few_rows_are_not_summed_in_parts() -> None:
    assert in_group(2, lambda group: group.begin_sum(HALVED_ROWS - 1, 6, torch.float32)) == [None, None]


@pytest.mark.parametrize("rows", [257, 300, 512, 513, 8192])
def test_halves_hold_every_row_once_and_the_first_has_whole_tiles(rows: int) -> None:
    first, second = halves(rows, 256)
    assert [*range(rows)][first] + [*range(rows)][second] == [*range(rows)]
    assert first.stop % 256 == 0 and 0 < rows - first.stop <= first.stop


@SIZES
def test_all_reduce_gives_all_devices_the_sum_in_its_dtype(size: int) -> None:
    own = [normal(4, 6, seed=rank, dtype=torch.bfloat16) for rank in range(size)]
    results = in_group(size, lambda group: group.all_reduce(own[group.rank]))
    for result in results:
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, sum(each.double() for each in own).to(torch.bfloat16))


@SIZES
def test_best_is_the_lowest_id_among_equal_values(size: int) -> None:
    values = torch.tensor([[1.0, 3.0, -2.0], [1.0, -3.0, -1.0], [0.5, 3.0, -1.0]])[:size]
    ids = torch.arange(size)[:, None] * 100 + torch.tensor([7, 8, 9])
    results = in_group(size, lambda group: group.best(values[group.rank], ids[group.rank]))
    assert [result.tolist() for result in results] == [[7, 8, 109]] * size


@SIZES
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("vocab_size", [16, 17, 19])
def test_exchange_rows_turns_columns_of_all_rows_into_whole_rows(size: int, rows: int, vocab_size: int) -> None:
    whole, share = normal(rows, vocab_size, seed=1), -(-vocab_size // size)
    results = in_group(
        size,
        lambda group: group.exchange_rows(
            whole[:, group.rank * share : (group.rank + 1) * share].contiguous(), vocab_size
        ),
    )
    assert [len(result) for result in results] == [len(own_rows(rows, size, rank)) for rank in range(size)]
    assert torch.equal(torch.cat(results), whole)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_gather_returns_the_tensors_of_all_devices_by_rank(dtype: torch.dtype) -> None:
    results = in_group(3, lambda group: group.gather(torch.tensor([group.rank, 5], dtype=dtype)))
    assert [result.tolist() for result in results] == [[[0, 5], [1, 5], [2, 5]]] * 3


def test_alone_a_device_waits_for_no_other() -> None:
    def work(group: TorchGroup) -> list[tuple[int, ...]]:
        if group.rank:
            return []  # never calls anything
        stream = torch.ones(3, 8)
        with group.alone():
            given = [
                group.add_norm(stream, torch.ones(1, 3, 8), None, torch.ones(8), 1e-5),
                group.all_reduce(torch.ones(3, 8)),
                group.best(torch.ones(3), torch.arange(3)),
                group.exchange_rows(torch.ones(3, 4), 8),
                group.gather(torch.arange(4)),
            ]
            sums = group.begin_sum(HALVED_ROWS, 8, torch.float32)
            assert sums is not None
            for part in range(2):
                sums.send(part)
            given += [sums.receive(part) for part in range(2)]
        return [tuple(each.shape) for each in given]

    assert in_group(2, work)[0] == [(3, 8), (3, 8), (3,), (2, 8), (2, 4), *[(1, HALVED_ROWS // 2, 8)] * 2]


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_own_rows_share_all_rows(count: int, size: int) -> None:
    shares = [own_rows(count, size, rank) for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(count))
    assert max(map(len, shares)) == -(-count // size)
