"""Transfers between the tiers: which copies wait for which, when all are as late as they may be, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from holdfast.lm.copy_streams import CompletedCopy, CopyEvent, CopyStream, HostStream, stream_for
from holdfast.lm.execution.transfer import Transfers
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.types import BlockCopy, CopyTime, StepPlan, TierCopies
from tests.late_streams import ForgottenStream, LateStream

LAYERS = 3


def cache(num_blocks: int, fill: float, device: str = "cpu") -> KVCache:
    made = KVCache.allocate(
        layers=LAYERS,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device=device,
    )
    made.data.copy_(torch.arange(num_blocks).view(1, 1, num_blocks, 1, 1, 1) + fill)
    return made


def transfers(stream: type[LateStream] | type[HostStream], groups: int = 4) -> tuple[KVCache, KVCache, Transfers]:
    device, host = cache(6, 0.0), cache(5, 100.0)
    layers = tuple(device.layer(index) for index in range(LAYERS))
    return device, host, Transfers(device, host, layers, stream, groups)


def plan(
    step: int, swap_in: Sequence[BlockCopy] = (), swap_out: Sequence[BlockCopy] = (), awaits: int = -1
) -> StepPlan:
    return StepPlan(step, (), copies=TierCopies(swap_in=tuple(swap_in), swap_out=tuple(swap_out), awaits=awaits))


def held(data: torch.Tensor, block: int) -> float:
    """Values of one layer's keys in a block."""
    return float(data[block].mean())


@pytest.mark.parametrize("stream", [HostStream, LateStream])
def test_each_layer_is_swapped_in_when_the_model_reads_it(stream: type[LateStream]) -> None:
    device, _, copies = transfers(stream)
    layers = copies.begin(plan(0, [BlockCopy(2, 5), BlockCopy(4, 0)], awaits=0))
    for index in range(LAYERS):
        keys, values = layers[index]
        assert held(keys, 5) == held(values, 5) == 102.0
        assert held(keys, 0) == held(values, 0) == 104.0
        assert held(keys, 1) == 1.0
    assert copies.completed(wait=False)[:2] == (0, 0)
    assert float(device.data[:, :, 5].mean()) == 102.0


def test_layers_are_swapped_in_one_group_at_a_time() -> None:
    device, _, copies = transfers(LateStream)
    layers = copies.begin(plan(0, [BlockCopy(2, 5)], awaits=0))
    assert held(layers[0][0], 5) == 102.0
    assert float(device.data[1, 0, 5].mean()) == 5.0, "the second layer is still on its way"
    _, _, forgetful = transfers(ForgottenStream)
    assert held(forgetful.begin(plan(0, [BlockCopy(2, 5)], awaits=0))[0][0], 5) == 5.0


@pytest.mark.parametrize(("groups", "arrived"), [(1, 3), (2, 2), (3, 1), (64, 1)])
def test_layers_come_in_as_many_groups_as_asked_for_and_at_most_one_each(groups: int, arrived: int) -> None:
    device, _, copies = transfers(LateStream, groups)
    layers = copies.begin(plan(0, [BlockCopy(2, 5)], awaits=0))
    assert held(layers[0][0], 5) == 102.0
    assert [float(device.data[layer, 0, 5].mean()) == 102.0 for layer in range(LAYERS)].count(True) == arrived


def test_a_plan_without_swap_in_gets_the_plain_layers() -> None:
    _, _, copies = transfers(LateStream)
    assert copies.begin(plan(0, swap_out=[BlockCopy(1, 3)])) is copies.begin(plan(1))


def test_only_plans_that_await_a_swap_in_wait_for_it() -> None:
    device, _, copies = transfers(LateStream)
    usual = copies.begin(plan(0, [BlockCopy(2, 5)]))
    assert usual is copies.begin(plan(1, awaits=-1))
    assert float(device.data[:, :, 5].mean()) == 5.0, "it takes its time"
    assert usual is copies.begin(plan(2, awaits=0))
    assert float(device.data[:, :, 5].mean()) == 102.0


def test_a_swap_in_is_reported_once_it_is_complete() -> None:
    _, _, copies = transfers(LateStream)
    copies.begin(plan(0))
    copies.begin(plan(1, [BlockCopy(2, 5), BlockCopy(3, 1)]))
    assert copies.completed(wait=False) == copies.completed(wait=False) == (1, 0, ())
    bytes_of_a_block = LAYERS * 2 * 4 * 2 * 8 * 4
    assert copies.completed(wait=False) == (1, 1, (CopyTime(1, True, 2 * bytes_of_a_block, 0.25),))
    assert copies.completed(wait=False).times == ()


def test_swap_outs_are_reported_in_plan_order_once_complete() -> None:
    _, host, copies = transfers(LateStream)
    copies.begin(plan(0, swap_out=[BlockCopy(1, 3)]))
    copies.begin(plan(1))
    copies.begin(plan(2, swap_out=[BlockCopy(4, 0)]))
    assert copies.completed(wait=False)[:2] == copies.completed(wait=False)[:2] == (-1, 2)
    assert float(host.data[:, :, 3].mean()) == 103.0, "it takes its time"
    assert copies.completed(wait=False)[:2] == (1, 2)
    assert float(host.data[:, :, 3].mean()) == 1.0
    assert copies.completed(wait=True)[:2] == (2, 2)
    assert float(host.data[:, :, 0].mean()) == 4.0


def test_a_swap_out_waits_for_earlier_swap_ins() -> None:
    device, host, copies = transfers(LateStream)
    copies.begin(plan(0, [BlockCopy(3, 5)], [BlockCopy(1, 3)]))
    assert copies.completed(wait=True)[:2] == (0, 0)
    assert float(device.data[:, :, 5].mean()) == 103.0
    assert float(host.data[:, :, 3].mean()) == 1.0


@pytest.mark.gpu
def test_a_gpu_copies_both_ways_during_a_computation() -> None:
    device, host = cache(64, 0.0, "cuda"), KVCache(cache(128, 100.0).data.pin_memory())
    try:
        layers = tuple(device.layer(index) for index in range(LAYERS))
        copies = Transfers(device, host, layers, lambda: stream_for(torch.device("cuda")), 4)
        for step in range(20):
            device.data[:, :, 7] += 1.0  # the computation so far, which the swap-out must see
            arriving = copies.begin(plan(step, [BlockCopy(step, 30 + step)], [BlockCopy(7, 60 + step)], awaits=step))
            for keys, values in (arriving[index] for index in range(LAYERS)):
                assert held(keys, 30 + step) == held(values, 30 + step) == 100.0 + step
        assert copies.completed(wait=True)[:2] == (19, 19)
        assert [float(host.data[:, :, 60 + step].mean()) for step in range(20)] == [8.0 + step for step in range(20)]
    finally:
        torch.cuda.synchronize()


def test_copies_may_be_collected_while_a_plan_waits_for_them() -> None:
    """On a rank, one thread begins plans and another collects their copies."""
    made: list[Transfers] = []

    class Collected(CompletedCopy):
        def wait(self) -> None:
            made[0].completed(wait=False)

    class CollectingStream(HostStream):
        def copy(self, work: Callable[[], None], after: CopyEvent | None = None) -> CopyEvent:
            work()
            return Collected(0.0)

    device, _, copies = transfers(CollectingStream)
    made.append(copies)
    for step in (0, 1):
        copies.begin(plan(step, [BlockCopy(step, 4 + step)]))
    copies.begin(plan(2, awaits=1))
    assert [float(device.data[:, :, block].mean()) for block in (4, 5)] == [100.0, 101.0]


def test_streams_implement_the_copy_stream_protocol() -> None:
    stream: CopyStream = stream_for(torch.device("cpu"))
    assert stream.copy(lambda: None).done()
