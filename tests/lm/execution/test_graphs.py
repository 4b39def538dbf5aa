"""Which sizes are captured. The parity tests on a GPU show that graphs compute the model's results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from holdfast.core.layout import Layout
from holdfast.lm.config import EngineConfig
from holdfast.lm.execution.batch import Batch
from holdfast.lm.execution.capture_queue import GraphSize
from holdfast.lm.execution.graphs import KINDS, MAX_TOKENS, GraphSizes, StepGraphs, StepMetadata
from holdfast.lm.execution.paged_device import PagedDevice
from holdfast.lm.execution.state_memory import RecurrentStates
from holdfast.lm.kernels.attention.paged import PagedAttention
from holdfast.lm.kernels.attention.torch_attention import TorchAttention
from holdfast.lm.kernels.cache.kv_cache import KVCache
from holdfast.lm.kernels.collectives.protocol import Group
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps
from holdfast.lm.kernels.lora.protocol import StepAdapters
from holdfast.lm.kernels.lora.torch_lora import TorchLora
from holdfast.lm.kernels.recurrent.torch_recurrence import TorchRecurrence
from holdfast.lm.kernels.recurrent.triton_recurrence import TritonRecurrence
from holdfast.lm.models.adapted import adapted_modules
from holdfast.lm.models.adapters import AdapterSlots
from holdfast.lm.models.base import StepInput
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from holdfast.lm.parts.adapters.inputs import AdapterInputs
from holdfast.lm.parts.adapters.values import AdapterPlan
from holdfast.lm.types import Sampling, Segment, StepPlan, TableWrite
from tests.adapters import drawn
from tests.checkpoints import make
from tests.paged import sizes

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def repeated(self: StepGraphs, work: Any, size: int, metadata: StepMetadata, memsets: Any) -> Any:
    """A stand-in for a graph: it launches the work again."""
    return SimpleNamespace(replay=lambda: work(size, metadata))


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 300, 512, 1000])
def test_every_batch_is_padded_to_a_size_not_much_larger(most: int) -> None:
    sizes = GraphSizes.of(most, 2048).decodes
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count <= max(7, count // 8)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 100, 256, 300, 512, 1000])
@pytest.mark.parametrize("budget", [1, 64, 100, 600, 2048, 16_640])
def test_a_start_captures_few_sizes_close_to_each_other(most: int, budget: int) -> None:
    sizes = GraphSizes.of(most, budget)
    first = sizes.first
    assert set(first.bodies()) <= set(sizes.bodies()) and first.bodies()[0] == sizes.bodies()[0]
    for few, all_of_kind in ((first.decodes, sizes.decodes), (first.tokens, sizes.tokens), (first.rows, sizes.rows)):
        assert set(few) <= set(all_of_kind) and few[-1] == all_of_kind[-1] and list(few) == sorted(set(few))
    assert all(following <= (2 if size <= 16 else 1.5) * size for size, following in pairwise(first.decodes))
    assert all(following <= (2 if size < 512 else 1.5) * size for size, following in pairwise(first.tokens))
    assert all(following <= 4 * size for size, following in pairwise(first.rows))
    few = sizes.segments[0]
    assert {body for body in sizes.bodies() if body[0] >= 512 and body[1] == few} <= set(sizes.first_bodies)
    assert set(first.bodies()) <= set(sizes.first_bodies) <= set(sizes.bodies())


def test_a_start_with_256_sequences_captures_half_of_all_graphs() -> None:
    sizes = GraphSizes.of(256, 2048)
    assert [len(sizes.first_bodies), len(sizes.first.rows), len(sizes.first.decodes)] == [25, 5, 13]
    assert [len(sizes.bodies()), len(sizes.rows), len(sizes.decodes)] == [41, 17, 35]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[StepGraphs, list[Any], list[Any], MagicMock]:
    """Graphs that are not captured. Returns them, lists of the captured and the run work, and the batch."""
    captured: list[Any] = []
    run: list[Any] = []

    def rehearse(self: StepGraphs, work: Any, size: int, segments: int | None = None) -> Any:
        return work.__name__, size, segments

    def capture(self: StepGraphs, work: Any, size: int, metadata: Any, memsets: Any) -> Any:
        captured.append(metadata)
        return SimpleNamespace(name=metadata, replay=lambda: run.append(("_head", size)))

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "_rehearse", rehearse)
    monkeypatch.setattr(StepGraphs, "_captured", capture)
    spec, batch = (
        SimpleNamespace(own_vocab_size=8, last=True, dtype=torch.float32, device=torch.device("cpu")),
        MagicMock(),
    )
    sizes = GraphSizes.of(200, 1024)
    graphs = StepGraphs(SimpleNamespace(spec=spec), MagicMock(), batch, [], sizes)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "_start", lambda staged, graph, size, head=None: run.append(graph.graph.name) or ())
    graphs.capture()
    return graphs, captured, run, batch


def staged(rows: int, tokens: int, segments: int) -> Any:
    return SimpleNamespace(num_sampled=rows, num_tokens=tokens, segments=SimpleNamespace(row=range(segments)))


def test_a_step_whose_own_graph_is_not_there_yet_runs_the_next_larger_one(recorded: Any) -> None:
    graphs, _, run, _ = recorded
    for step in (staged(36, 36, 36), staged(3, 3, 3), staged(130, 130, 130), staged(5, 300, 9), staged(90, 520, 90)):
        graphs.run(step)
    assert run == [
        ("_decode", 48, None),
        ("_decode", 4, None),
        ("_decode", 192, None),
        ("_body", 512, 64),
        ("_head", 16),
        ("_body", 768, 200),
        ("_head", 200),
    ]


def test_decodes_with_drafts_run_as_a_step_of_as_many_decodes(recorded: Any) -> None:
    graphs, _, run, _ = recorded
    graphs.run(staged(16, 16, 3))
    assert run == [("_decode", 16, None)]


def test_other_sizes_are_rehearsed_and_captured_one_at_a_time_and_then_used(recorded: Any) -> None:
    graphs, captured, run, batch = recorded
    first = list(captured)
    captured.clear()
    count = 0
    while graphs.capture_next():
        count += 1
        assert len(captured) == count // 2
        assert batch.clear.call_count == 1 + (count + 1) // 2, "the rehearsal must not run the last step again"
    assert count == 2 * len(captured)
    bodies = [("_body", *body) for body in graphs.sizes.bodies()]
    others = [("_head", size, None) for size in graphs.sizes.rows]
    others += [("_decode", size, None) for size in graphs.sizes.decodes]
    assert sorted([*first, *captured], key=str) == sorted([*bodies, *others], key=str)
    for step in (staged(36, 36, 36), staged(5, 300, 9), staged(90, 520, 90)):
        graphs.run(step)
    assert run == [("_decode", 40, None), ("_body", 320, 64), ("_head", 8), ("_body", 640, 200), ("_head", 96)]


def test_the_size_that_would_have_saved_most_padding_is_captured_first(recorded: Any) -> None:
    graphs, captured, run, _ = recorded
    captured.clear()
    for step in (staged(36, 36, 36), *[staged(90, 520, 90)] * 3):
        graphs.run(step)
    while len(captured) < 2:
        assert graphs.capture_next()
    assert captured == [("_body", 640, 200), ("_decode", 40, None)]
    run.clear()
    graphs.run(staged(90, 520, 90))
    assert run == [("_body", 640, 200), ("_head", 200)] and graphs.take_missed() is None


def test_a_step_says_once_which_graph_it_missed_and_what_share_of_it_was_padding(recorded: Any) -> None:
    graphs, *_ = recorded
    graphs.run(staged(36, 36, 36))
    assert graphs.take_missed() == (GraphSize("decode", 40), 1 - 40 / 48) and graphs.take_missed() is None
    graphs.run(staged(5, 300, 9))
    assert graphs.take_missed() == (GraphSize("body", 320, 64), 1 - 320 / 512)
    graphs.run(staged(5, 60, 9))
    assert graphs.take_missed() is None


@pytest.mark.parametrize("half", ["_rehearse", "_captured"])
def test_capturing_ends_where_memory_does(recorded: Any, half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs, _, run, _ = recorded
    if half == "_captured":
        assert graphs.capture_next()
    monkeypatch.setattr(StepGraphs, half, fail)
    assert not graphs.capture_next() and not graphs.capture_next()
    assert not graphs.left and not graphs.left.due
    graphs.run(staged(36, 36, 36))
    assert run == [("_decode", 48, None)]


def test_decodes_of_a_size_that_is_slower_than_a_larger_one_run_as_the_larger_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: list[int] = []

    def seconds(graph: Any) -> float:
        timed.append(graph.size)
        return {448: 0.017, 432: 0.013}.get(graph.size, graph.size / 32_000)

    def capture(self: StepGraphs, work: Any, size: int, metadata: Any, memsets: Any) -> Any:
        return SimpleNamespace(size=size, replay=lambda: None)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "_rehearse", lambda *given: None)
    monkeypatch.setattr(StepGraphs, "_captured", capture)
    monkeypatch.setattr("holdfast.lm.execution.graphs.replay_seconds", seconds)
    spec = SimpleNamespace(own_vocab_size=8, last=True, dtype=torch.float32, device=torch.device("cpu"))
    run: list[int] = []

    def captured(group: Group | None = None) -> StepGraphs:
        batch, sizes = MagicMock(device=torch.device("cpu")), GraphSizes.of(512, 1024)
        graphs = StepGraphs(SimpleNamespace(spec=spec), MagicMock(), batch, [], sizes, group=group)  # type: ignore[arg-type]
        monkeypatch.setattr(graphs, "_start", lambda staged, graph, size, head=None: run.append(size) or ())
        graphs.capture()
        while graphs.capture_next():
            pass
        return graphs

    graphs = captured()
    for rows in (250, 260, 431, 440, 449, 500):
        graphs.run(staged(rows, rows, rows))
    assert run == [256, 272, 432, 464, 464, 512]
    assert sorted(timed) == [*range(272, 513, 16)]
    run.clear()
    captured(Others()).run(staged(440, 440, 440))
    assert run == [448] and sorted(timed) == [*range(272, 513, 16)], "devices of a group capture the same sizes"


class Others(Group):
    """A group whose other device answers `done` for each size."""

    def __init__(self, done: int = 1) -> None:
        self._done = done
        self.is_alone = False

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack((x, torch.full_like(x, self._done)))

    @contextmanager
    def alone(self) -> Iterator[None]:
        assert not self.is_alone
        self.is_alone = True
        yield
        self.is_alone = False


@pytest.mark.parametrize("done", [0, 1])
def test_a_size_is_used_once_every_device_of_the_group_has_captured_it(
    recorded: Any, done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, captured, run, batch = recorded
    batch.device = torch.device("cpu")
    monkeypatch.setattr(graphs, "_group", Others(done))
    captured.clear()
    while graphs.capture_next():
        pass
    assert len(captured) > 1 if done else not captured
    graphs.run(staged(36, 36, 36))
    assert run == [("_decode", 48 if done == 0 else 40, None)]


def test_a_device_rehearses_alone_and_captures_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group, seen = Others(), []
    spec = SimpleNamespace(own_vocab_size=8, last=True, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", MagicMock)
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **options: nullcontext())
    monkeypatch.setattr(StepGraphs, "_decode", lambda *given: seen.append(group.is_alone))
    sizes = GraphSizes(decodes=(4,), tokens=(), rows=(4,), segments=())
    model = SimpleNamespace(spec=spec)
    graphs = StepGraphs(model, MagicMock(), MagicMock(), [], sizes, group=group)  # type: ignore[arg-type]
    graphs._rehearse_size(GraphSize("decode", 4))
    graphs._capture_size(GraphSize("decode", 4))()
    assert seen == [True, False]


def test_memsets_of_large_steps_are_replaced_before_their_graph_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, bool]] = []

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            self.kept = keep_graph

        def instantiate(self) -> None:
            done.append(("instantiated", self.kept))

    memsets = SimpleNamespace(replace=lambda graph: done.append(("replaced", graph.kept)))
    spec = SimpleNamespace(own_vocab_size=8, last=True, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr("holdfast.lm.execution.graphs.memset_nodes", lambda device: memsets)
    monkeypatch.setattr("holdfast.lm.execution.graphs.capture", lambda *given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    few, many = KINDS[-1], KINDS[-1] + 8
    sizes = GraphSizes(decodes=(few, many), tokens=(), rows=(many,), segments=())
    model = SimpleNamespace(spec=spec)
    plain = StepGraphs(model, MagicMock(), MagicMock(), [], sizes)  # type: ignore[arg-type]
    for graphs in (plain, StepGraphs(model, MagicMock(), MagicMock(), [], sizes, plain=plain)):  # type: ignore[arg-type]
        monkeypatch.setattr(graphs, "_decode", lambda *given: None)
        for size in (few, many):
            assert done == []
            graphs._rehearse_size(GraphSize("decode", size))
            graphs._capture_size(GraphSize("decode", size))
        assert done == [("replaced", True), ("instantiated", True)]
        done.clear()


def test_a_graph_is_captured_again_with_its_memsets_if_they_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    captured: list[bool] = []

    class Graph:
        def __init__(self, keep_graph: bool) -> None:
            captured.append(keep_graph)

    def replace(graph: Graph) -> int:
        raise RuntimeError("cuGraphAddKernelNode failed with CUDA_ERROR_NOT_SUPPORTED on a captured graph")

    spec = SimpleNamespace(own_vocab_size=8, last=True, dtype=torch.float32, device=torch.device("cpu"))
    nodes = SimpleNamespace(replace=replace)
    monkeypatch.setattr("holdfast.lm.execution.graphs.memset_nodes", lambda device: nodes)
    monkeypatch.setattr("holdfast.lm.execution.graphs.capture", lambda *given: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    many = KINDS[-1] + 8
    sizes = GraphSizes(decodes=(many, many + 8), tokens=(), rows=(many,), segments=())
    graphs = StepGraphs(SimpleNamespace(spec=spec), MagicMock(), MagicMock(), [], sizes)  # type: ignore[arg-type]
    monkeypatch.setattr(graphs, "_decode", lambda *given: None)
    for size in (many, many + 8):
        graphs._rehearse_size(GraphSize("decode", size))
        graphs._capture_size(GraphSize("decode", size))
    assert captured == [True, False, False]
    assert [record.getMessage() for record in caplog.records if "CUDA_ERROR_NOT_SUPPORTED" in record.getMessage()]


@pytest.mark.parametrize("budget", [1, 16, 64, 100, 512, 2048, 5000, 16_640])
def test_mixed_steps_are_padded_by_an_eighth_or_a_tile(budget: int) -> None:
    sizes = GraphSizes.of(256, budget).tokens
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(budget, MAX_TOKENS)
    for count in range(1, sizes[-1] + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count <= max(127, count // 8)
    assert len(sizes) <= 60


def test_no_more_rows_sample_than_there_are_tokens() -> None:
    sizes = GraphSizes.of(256, 48)
    assert sizes.decodes[-1] == sizes.rows[-1] == sizes.tokens[-1] == 48


@pytest.mark.parametrize("most", [1, 3, 16, 20, 512])
def test_each_kind_of_size_is_captured(most: int) -> None:
    sizes, kinds = GraphSizes.of(most, 600), GraphSizes.of(most, 600).kinds()
    assert set(kinds.decodes) <= set(sizes.decodes)
    assert list(kinds.decodes) == sorted({size for size in (1, 4, 16, 32, 64, 128) if size <= most} | {most})
    assert kinds.bodies() == [(600, most)]
    assert set(kinds.bodies()) <= set(sizes.bodies())


def test_the_largest_sizes_are_the_last_of_each_kind() -> None:
    assert GraphSizes.of(20, 600).largest() == GraphSizes((20,), (600,), (20,), (20,))
    assert GraphSizes.of(200, 600).largest().bodies() == GraphSizes.of(200, 600).bodies()[:1] == [(600, 200)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding attends to uninitialized memory
def test_a_rehearsal_changes_neither_cache_nor_tables(checkpoint: Path) -> None:
    on = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(checkpoint, device=on, load_format="random", dtype="float32")
    assert isinstance(model, Decoder)
    model._ops = FusedLayerOps(model._ops.shape)  # also where a CPU interprets it: PyTorch's own knows no padding
    spec, where = model.spec, model.spec.device
    shape = dict(num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, block_size=4)
    attention = PagedAttention(device=where, num_processors=4, num_heads=spec.num_heads, **shape)
    cache = KVCache.allocate(layers=2, num_blocks=3, dtype=spec.dtype, device=where, **shape)
    layers = [cache.layer(index) for index in range(2)]
    for layer in layers:
        for part in layer:
            part.fill_(torch.nan)
    batch = Batch(rows=6, max_blocks=16, max_tokens=20, block_size=4, device=where)
    graphs = StepGraphs(model, attention, batch, layers, GraphSizes.of(6, 20).kinds())
    rehearsals = graphs.rehearsals()
    assert len(rehearsals) == 4  # 20 tokens of any step; 1, 4 and 6 decodes
    with torch.inference_mode():
        for rehearse in rehearsals:
            rehearse()
    assert all(part.isnan().all() for layer in layers for part in layer)
    assert not batch.block_tables[:6].any()


@pytest.mark.gpu
def test_a_step_larger_than_any_graph_runs_without_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoint, device="cuda", load_format="random", dtype="float32")
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    plan = StepPlan(0, (Segment("a", 0, 0, 20, tuple(range(20)), greedy),), (TableWrite(0, 0, tuple(range(5))),))
    tokens = []
    for most in (MAX_TOKENS, 16):
        monkeypatch.setattr("holdfast.lm.execution.graphs.MAX_TOKENS", most)
        device = PagedDevice(model, EngineConfig(max_sequences=8, block_size=4, token_budget=64))
        device.allocate(sizes(5))
        assert [graphs.sizes.tokens[-1] for graphs in device.memory.graphs] == [min(most, 64)]
        executor = device.executor
        executor.submit(plan)
        tokens.append(executor.collect().tokens)
        executor.close()
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
def test_graphs_captured_in_a_pause_leave_the_cache_and_give_the_same_tokens(checkpoint: Path) -> None:
    model = load(checkpoint, device="cuda", load_format="random", dtype="float32")
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    device = PagedDevice(model, EngineConfig(max_sequences=160, block_size=4, token_budget=256))
    device.allocate(sizes(400, 8))
    executor, host = device.executor, device.memory.host
    assert host is not None
    host.begin()
    rows = range(70)
    prompts = StepPlan(
        0,
        tuple(Segment(str(row), row, 0, 3, (row % 60, 1, 2), greedy) for row in rows),
        tuple(TableWrite(row, 0, (2 * row, 2 * row + 1)) for row in rows),
    )
    executor.submit(prompts)
    first = executor.collect().tokens
    decodes = StepPlan(1, tuple(Segment(str(row), row, 3, 4, (first[row],), greedy) for row in rows))
    executor.submit(decodes)
    assert not executor.prepare(), "a step is in flight"
    before = executor.collect().tokens
    kept = device.memory.cache.data[:, :, :140].clone()
    count = 0
    while executor.prepare():
        count += 1
    assert count > 5
    assert torch.equal(device.memory.cache.data[:, :, :140].nan_to_num(), kept.nan_to_num())
    executor.submit(decodes)
    assert executor.collect().tokens == before
    executor.close()


@pytest.mark.gpu
def test_compiling_in_parallel_does_not_change_tokens(checkpoint: Path) -> None:
    model = load(checkpoint, device="cuda", load_format="random", dtype="float32")
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    plan = StepPlan(0, (Segment("a", 0, 0, 5, (3, 1, 4, 1, 5), greedy),), (TableWrite(0, 0, (1, 0)),))
    tokens = []
    for compiled in (False, True):
        device = PagedDevice(model, EngineConfig(max_sequences=20, block_size=4, token_budget=64))
        if compiled:
            device.compile()
        device.allocate(sizes(2))
        executor = device.executor
        executor.submit(plan)
        tokens.append(executor.collect().tokens)
        executor.close()
    assert tokens[0] == tokens[1]


def test_a_step_of_few_segments_runs_the_body_for_few() -> None:
    sizes = GraphSizes.of(256, 2048)
    bodies = sorted(sizes.bodies())
    assert sizes.body(900, 33, bodies) == (960, 64)
    assert sizes.body(900, 65, bodies) == sizes.body(900, 256, bodies) == (960, 256)
    assert sizes.body(900, 300, bodies) == (960, 256), "several ranges of one sequence: attention says whether they fit"


@pytest.mark.parametrize("most", [1, 20, 64, 65, 512])
def test_there_is_a_body_for_every_step_also_before_all_are_captured(most: int) -> None:
    sizes = GraphSizes.of(most, 300)
    for captured in (sizes, sizes.first):
        bodies = captured.bodies()
        assert bodies == sorted(set(bodies), reverse=True)
        for tokens in range(1, 301):
            for segments in range(1, min(most, tokens) + 1):
                body = sizes.body(tokens, segments, bodies[::-1])
                assert body in bodies and body[0] >= tokens and body[1] >= segments


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding attends to uninitialized memory
def test_graphs_of_stages_give_the_logits_of_the_whole_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured work runs here without a graph, padded. The oracle computes the unpadded step in PyTorch."""

    def rehearse(self: StepGraphs, work: Any, size: int, segments: int | None = None) -> StepMetadata:
        return StepMetadata(self._attention.reserve(min(segments or size, 6), size if segments else None), None)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "_rehearse", rehearse)
    monkeypatch.setattr(StepGraphs, "_captured", repeated)
    path = checkpoint / "config.json"
    path.write_text(json.dumps(CONFIG | dict(num_hidden_layers=3)))
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options: dict[str, Any] = dict(device=where, load_format="random", dtype="float32")
    heads = dict(num_kv_heads=2, head_dim=16, block_size=4)

    def parts(model: Any) -> tuple[Batch, list[Any]]:
        cache = KVCache.allocate(
            layers=model.spec.num_layers, num_blocks=12, dtype=torch.float32, device=where, **heads
        )
        batch = Batch(rows=6, max_blocks=16, max_tokens=20, block_size=4, device=where)
        return batch, [cache.layer(index) for index in range(model.spec.num_layers)]

    stages: list[tuple[Batch, StepGraphs, torch.Tensor | None]] = []
    for rank in range(3):
        model = load(checkpoint, layout=Layout(pp=3), rank=rank, **options)
        assert isinstance(model, Decoder)
        model._ops = FusedLayerOps(model._ops.shape)
        attention = PagedAttention(device=where, num_processors=4, num_heads=4, **heads)
        incoming = torch.zeros(20, model.spec.stream_width, device=where) if rank else None
        batch, layers = parts(model)
        graphs = StepGraphs(model, attention, batch, layers, GraphSizes.of(6, 20).kinds(), incoming=incoming)
        graphs.capture()
        stages.append((batch, graphs, incoming))
    plain = load(checkpoint, **options)
    assert isinstance(plain, Decoder)
    plain._ops = LayerOps(plain._ops.shape)
    whole, whole_layers = parts(plain)
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    prompts = StepPlan(
        0,
        tuple(Segment(str(row), row, 0, 5, (row, 3, 1, 4, 1), None if row == 1 else greedy) for row in range(3)),
        tuple(TableWrite(row, 0, (2 * row, 2 * row + 1)) for row in range(3)),
    )
    decodes = StepPlan(1, tuple(Segment(str(row), row, 5, 6, (7,), greedy) for row in range(3)))
    oracle = TorchAttention(device=where, num_heads=4, **heads)
    with torch.inference_mode():
        for plan in (prompts, decodes):
            given: torch.Tensor | None = None
            for batch, graphs, incoming in stages:
                staged = batch.stage(plan)
                if incoming is not None and given is not None:
                    assert len(given) == staged.num_tokens
                    incoming[: len(given)] = given
                started = graphs.run(staged)
                assert started is not None
                given = started[1]
            staged = whole.stage(plan)
            packed = whole.enter(staged)
            expected = plain.forward(
                StepInput(
                    packed.ids, packed.positions, packed.sample_at, packed.slot_mapping, whole.block_tables,
                    whole_layers, oracle, oracle.make_metadata(staged.segments),
                )
            )  # fmt: skip
            torch.testing.assert_close(given, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding attends to uninitialized memory
@pytest.mark.parametrize("few", [3, 512])
def test_graphs_compute_each_uploaded_step_with_its_own_adapters(
    few: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The captured work runs here without a graph, padded. The oracle computes the unpadded step in PyTorch.

    Steps of more than `few` tokens gate while they add adapters.
    """
    monkeypatch.setattr("holdfast.lm.kernels.lora.groups.FEW_TOKENS", few)

    def rehearse(self: StepGraphs, work: Any, size: int, segments: int | None = None) -> StepMetadata:
        return StepMetadata(self._attention.reserve(min(segments or size, 6), size if segments else None), None)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "_rehearse", rehearse)
    monkeypatch.setattr(StepGraphs, "_captured", repeated)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models = [load(checkpoint, device=where, load_format="random", dtype="float32") for _ in range(2)]
    model, plain = models
    assert isinstance(model, Decoder) and isinstance(plain, Decoder)
    model._ops, plain._ops = FusedLayerOps(model._ops.shape), LayerOps(plain._ops.shape)
    heads = dict(num_kv_heads=2, head_dim=16, block_size=4)
    slots = AdapterSlots(adapted_modules(model.decoder), slots=3, max_rank=8, dtype=torch.float32, device=where)
    for slot, rank in enumerate((4, 8, 3)):
        slots.write(slot, slots.pack(drawn(model.decoder, rank, seed=slot), model.layers, pinned=where.type == "cuda"))
    attention = PagedAttention(device=where, num_processors=4, num_heads=4, **heads)
    caches = [KVCache.allocate(layers=2, num_blocks=12, dtype=torch.float32, device=where, **heads) for _ in models]
    layers = [[cache.layer(index) for index in range(2)] for cache in caches]
    inputs = [AdapterInputs(slots.layers, 3, max_tokens=20, samples=6, device=where) for _ in models]
    batches = [Batch(rows=6, max_blocks=16, max_tokens=20, block_size=4, device=where, inputs=each) for each in inputs]
    bare = StepGraphs(model, attention, batches[0], layers[0], GraphSizes.of(6, 20).kinds())
    graphs = StepGraphs(model, attention, batches[0], layers[0], GraphSizes.of(6, 20).kinds(), plain=bare)
    for each in (bare, graphs):
        each.capture()
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    prompts = StepPlan(
        0,
        tuple(Segment(str(row), row, 0, 5, (row, 3, 1, 4, 1), None if row == 1 else greedy) for row in range(3)),
        tuple(TableWrite(row, 0, (2 * row, 2 * row + 1)) for row in range(3)),
        parts=(AdapterPlan(slots=(2, 0, -1)),),
    )
    decodes = StepPlan(
        1, tuple(Segment(str(row), row, 5, 6, (7,), greedy) for row in range(3)), parts=(AdapterPlan(slots=(-1, 1, 2)),)
    )
    for plan in (prompts, decodes, replace(decodes, parts=(AdapterPlan(slots=(0, 0, 0)),))):
        staged = [batch.stage(plan) for batch in batches]
        with torch.inference_mode():
            started = graphs.run(staged[0])
            assert started is not None
            packed = batches[1].enter(staged[1])
            assert [each.kind for each in staged] == [1, 1]
            by_adapter = [TorchLora(groups, where) for groups in staged[1].more]
            oracle = TorchAttention(device=where, num_heads=4, **heads)
            expected = plain.forward(
                StepInput(
                    packed.ids, packed.positions, packed.sample_at, packed.slot_mapping, batches[1].block_tables,
                    layers[1], oracle, oracle.make_metadata(staged[1].segments),
                    StepAdapters(slots.layers, *by_adapter),
                )
            )  # fmt: skip
        torch.testing.assert_close(started[1], expected, rtol=0, atol=1e-4)


@pytest.mark.always("FalconH1", "Qwen3_5Text")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding attends to uninitialized memory
@pytest.mark.parametrize("family", ["Qwen3_5Text", "Lfm2", "GraniteMoeHybrid", "NemotronH", "FalconH1"])
def test_graphs_of_recurrent_layers_give_the_logits_of_unpadded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The captured work runs here without a graph, padded. The oracle computes the unpadded step in PyTorch."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(StepGraphs, "_captured", repeated)
    make(tmp_path, family)
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, plain = (load(tmp_path, device=where, dtype="float32") for _ in range(2))
    assert isinstance(model, Decoder) and isinstance(plain, Decoder)
    model._ops, plain._ops = FusedLayerOps(model._ops.shape), LayerOps(plain._ops.shape)
    heads = dict(num_kv_heads=2, head_dim=16, block_size=4)

    def parts() -> tuple[Batch, list[Any]]:
        count = model.spec.num_layers
        cache = KVCache.allocate(layers=count, num_blocks=12, dtype=torch.float32, device=where, **heads)
        return Batch(rows=6, max_blocks=16, max_tokens=20, block_size=4, device=where), [
            cache.layer(layer) for layer in range(count)
        ]

    attention, oracle = (
        PagedAttention(device=where, num_processors=4, num_heads=4, **heads),
        TorchAttention(device=where, num_heads=4, **heads),
    )
    states = RecurrentStates(model.spec, TritonRecurrence(where), 8)
    exact = RecurrentStates(plain.spec, TorchRecurrence(where), 8)
    (batch, layers), (whole, whole_layers) = parts(), parts()
    graphs = StepGraphs(model, attention, batch, layers, GraphSizes.of(6, 20).kinds(), states=states)
    with torch.inference_mode():
        graphs.capture()
    greedy = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
    rows = (4, 0, 2)
    prompts = StepPlan(
        0,
        tuple(Segment(str(row), row, 0, 5, (row, 3, 1, 4, 1), None if row == 0 else greedy) for row in rows),
        tuple(TableWrite(row, 0, (2 * row, 2 * row + 1)) for row in rows),
    )
    decodes = StepPlan(1, tuple(Segment(str(row), row, 5, 6, (7,), greedy) for row in rows))
    mixed = StepPlan(2, (Segment("0", 0, 6, 7, (3,), greedy), Segment("2", 2, 6, 8, (5, 9), greedy)))
    with torch.inference_mode():
        for plan in (prompts, decodes, mixed):
            started = graphs.run(batch.stage(plan))
            assert started is not None
            staged = whole.stage(plan)
            packed = whole.enter(staged)
            expected = plain.forward(
                StepInput(
                    packed.ids, packed.positions, packed.sample_at, packed.slot_mapping, whole.block_tables,
                    whole_layers, oracle, oracle.make_metadata(staged.segments), recurrent=exact.step(staged.segments),
                )
            )  # fmt: skip
            torch.testing.assert_close(started[1], expected, rtol=0, atol=1e-3)
        for ours, theirs in zip(states.layers, exact.layers, strict=True):
            for found, wanted in zip(ours, theirs, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-3)
                assert not found[[1, 3, 5, 6, 7]].any(), "a row without a segment, or a snapshot, was written"
