"""Decodes over columns that do not move give what plain decodes give, whatever rows do meanwhile."""

import dataclasses
import inspect
import re

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from holdfast.lm.padded.abilities import probe
from holdfast.lm.padded.decode_graphs import (
    Constants,
    DecodeGraphs,
    position_bytes,
    probe_graphs,
)
from holdfast.lm.padded.driver import Driver
from holdfast.lm.padded.executor import PaddedExecutor
from holdfast.lm.padded.growing_layer import FixedLayer, growing
from holdfast.lm.padded.loading import UnmodifiedModel
from holdfast.lm.padded.running_rows import RunningRows
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.types import (
    PENDING,
    BatchShape,
    Forward,
    RowMove,
    RowPlan,
    Segment,
    StepPlan,
    padded_columns,
    padded_rows,
)
from tests.lm.padded.histories import ALL, CPU, GREEDY, History, Made
from tests.padded_checks import CACHE, draw_prompts, generate_alone, tiny

MASKS = {
    "llama": "columns",
    "falcon-alibi": "columns",
    "bloom": "columns",
    "mpt": "columns",
    "gemma3": "by layer",
    "mamba": "columns",
    "mamba2": "columns",
    "jamba": "columns",
}


@pytest.fixture(scope="module")
def made():
    models = {}

    def make(family):
        if family not in models:
            models[family] = Made.of(tiny(family))
        return models[family]

    return make


def graphs_of(made, family="llama", *, rows=8, positions=8 * 1024):
    return DecodeGraphs(made.driver, made.layout, rows, positions, masks=MASKS[family])


def batch_of(made, *lengths):
    """A batch of rows 0, 1, ... with prompts of these lengths, and the same batch again."""
    batches = [RunningRows(made.layout, 8, CPU) for _ in range(2)]
    for batch in batches:
        for row, prompt in enumerate(draw_prompts(*lengths)):
            join(made, batch, row, prompt)
    return batches


@torch.inference_mode()
def join(made, batch, row, prompt):
    _, state = made.driver.forward(made.driver.inputs(torch.tensor([prompt])), None)
    batch.embed(row, state, len(prompt))
    batch.set_last([row], [prompt[0]])


@torch.inference_mode()
def check_decode(made, graphs, settled, plain):
    """Decode both batches; the shapes and logits must agree. The next tokens are the likeliest."""
    given = graphs.decode(settled)
    right, state = made.driver.forward(plain.decode_inputs(), plain.state)
    plain.advance(state)
    assert given is not None and torch.allclose(given, right, rtol=1e-4, atol=1e-4)
    assert (settled.rows, settled.lengths, settled.width) == (plain.rows, plain.lengths, plain.width)
    for batch in (settled, plain):
        batch.set_last(batch.rows, right.argmax(-1).tolist())
        batch.check()


def test_rows_are_padded_by_less_than_a_half():
    for rows in range(1, 300):
        padded = padded_rows(rows)
        assert rows <= padded < max(1.5 * rows + 1, rows + 2)
        assert padded_rows(padded) == padded


def test_sizes_are_few():
    assert [*dict.fromkeys(map(padded_rows, range(1, 41)))] == [1, 2, 4, 8, 12, 16, 24, 32, 40]
    columns = [*dict.fromkeys(padded_columns(each, 1 << 20) for each in range(1, 8193))]
    assert columns == [128 * each for each in (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)]


def test_no_shape_has_more_columns_than_the_model_has_positions():
    assert padded_columns(390, 400) == 400


@pytest.mark.parametrize("family", MASKS)
def test_the_probe_finds_the_masks_that_a_model_needs(made, family):
    assert probe_graphs(made(family).driver, made(family).layout) == (MASKS[family], "")


@pytest.mark.parametrize(
    ("family", "reason"),
    [("gpt-neo", "its logits differ by .* where the columns are fixed"), ("rwkv", "differ")],
)
def test_the_probe_refuses_with_a_reason_what_depends_on_where_columns_are(made, family, reason):
    masks, why = probe_graphs(made(family).driver, made(family).layout)
    assert masks is None
    assert re.search(reason, why)


@pytest.mark.always("llama", "bloom", "gemma3", "falcon-alibi")
@pytest.mark.parametrize("family", MASKS)
def test_decodes_are_those_of_plain_rows_while_rows_join_and_leave(made, family):
    model = made(family)
    graphs = graphs_of(model, family)
    settled, plain = batch_of(model, 5, 14, 9)
    for _ in range(3):
        check_decode(model, graphs, settled, plain)
    for batch in (settled, plain):
        batch.drop(1)
        join(model, batch, 4, draw_prompts(30)[0])
        join(model, batch, 5, draw_prompts(3)[0])
    for _ in range(12):  # beyond the window of 8
        check_decode(model, graphs, settled, plain)
    for batch in (settled, plain):
        batch.drop(4, 0)
    for _ in range(3):
        check_decode(model, graphs, settled, plain)


def test_nothing_is_copied_from_decode_to_decode(made):
    model = made("llama")
    graphs = graphs_of(model)
    settled, plain = batch_of(model, 5, 14)
    check_decode(model, graphs, settled, plain)
    at = [layer.keys.data_ptr() for layer in growing(settled.state)]
    for _ in range(5):
        check_decode(model, graphs, settled, plain)
    assert [layer.keys.data_ptr() for layer in growing(settled.state)] == at


def test_a_batch_that_outgrows_its_columns_moves_to_more(made):
    module = tiny("llama")
    model = Made.of(module)
    wide = Driver(dataclasses.replace(model.driver.model, max_model_len=600))
    model = Made(module, wide, model.layout)
    graphs = graphs_of(model)
    settled, plain = batch_of(model, 180, 4)
    for _ in range(90):
        check_decode(model, graphs, settled, plain)
    assert {shape.columns for shape in graphs._decodes} == {256, 384}
    assert max(layer.keys.shape[-2] for layer in growing(settled.state)) == 270


def test_a_batch_that_does_not_fit_is_left_to_plain_decodes(made):
    model = made("llama")
    graphs = graphs_of(model, positions=300)
    settled, _ = batch_of(model, 5, 14, 3)
    before = list(settled.lengths)
    assert graphs.decode(settled) is None
    assert settled.lengths == before
    settled.drop(1, 2)
    assert graphs.decode(settled) is not None


def test_a_batch_with_holes_is_left_to_plain_decodes(made):
    model = made("llama")
    batch = RunningRows(model.layout, 8, CPU, compact=False)
    join(model, batch, 0, (3, 4, 5))
    assert graphs_of(model).decode(batch) is None


def test_memory_for_less_than_one_row_is_refused(made):
    with pytest.raises(ValueError, match="positions is 100; a row needs at least 128"):
        graphs_of(made("llama"), positions=100)


def test_memory_has_the_bytes_that_it_says(made):
    model = made("gemma3")
    graphs = graphs_of(model, "gemma3", positions=1000)
    assert sum(each.nbytes for pair in graphs._memory for each in pair) == 1000 * position_bytes(model.layout)


def test_a_batch_stays_in_its_shape_until_that_is_twice_too_large(made):
    model = made("llama")
    graphs = graphs_of(model)
    settled, plain = batch_of(model, 5, 14, 9, 4, 3)
    check_decode(model, graphs, settled, plain)
    for batch in (settled, plain):
        batch.drop(0)
    check_decode(model, graphs, settled, plain)
    assert graphs._shape == BatchShape(8, 128)
    for batch in (settled, plain):
        batch.drop(1, 2)
    check_decode(model, graphs, settled, plain)
    assert graphs._shape == BatchShape(2, 128)


@torch.inference_mode()
def test_what_is_not_finite_in_a_row_that_left_does_not_reach_the_others(made):
    model = made("llama")
    graphs = graphs_of(model)
    settled, plain = batch_of(model, 5, 14, 9)
    check_decode(model, graphs, settled, plain)
    for layer in growing(settled.state):
        layer.keys[2].fill_(float("nan"))
        layer.values[2].fill_(float("nan"))
    for batch in (settled, plain):
        batch.drop(2)
    check_decode(model, graphs, settled, plain)
    for batch in (settled, plain):
        join(model, batch, 3, draw_prompts(6)[0])
    for _ in range(3):
        check_decode(model, graphs, settled, plain)


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma3", "jamba"])
@pytest.mark.parametrize("seed", range(5))
def test_random_histories_over_fixed_columns_give_the_tokens_of_each_row_alone(made, family, seed):
    abilities = probe(made(family).driver, made(family).layout)
    history = History(made(family), abilities, seed=seed, fails=0.05)
    graphs = history.executor.graphs = graphs_of(made(family), family)
    history.run()
    assert graphs._decodes


# On a GPU


def on_gpu(family="llama", dtype=torch.float16, **differences):
    module = tiny(family, dtype=dtype).to("cuda")
    model = UnmodifiedModel(
        module=module,
        architecture=type(module).__name__,
        vocab_size=module.config.vocab_size,
        max_model_len=128,
        eos_token_ids=(),
        dtype=dtype,
        device=torch.device("cuda:0"),
        weight_bytes=0,
    )
    driver = Driver(model)
    return driver, StateLayout.discover(driver.run)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "falcon-alibi", "bloom", "mpt", "gemma3", "mamba2"])
def test_decodes_are_captured_on_a_gpu(family):
    driver, layout = on_gpu(family)
    assert probe_graphs(driver, layout) == (MASKS[family], "")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "bloom", "gemma3"])
def test_captured_decodes_give_the_tokens_of_each_row_alone(family):
    driver, layout = on_gpu(family, torch.float32)
    graphs = DecodeGraphs(driver, layout, 8, 8 * 1024, masks=MASKS[family])
    rows = RunningRows(layout, 8, driver.model.device)
    executor = PaddedExecutor(driver, ALL, rows, None, graphs=graphs)
    prompts, tokens = draw_prompts(5, 14, 9), {row: [] for row in range(3)}
    segments = [Segment(f"s{row}", row, 0, len(prompts[row]), prompts[row], GREEDY) for row in range(3)]
    moves = tuple(RowMove(1, "embed", row, length=len(prompts[row])) for row in range(3))
    executor.submit(StepPlan(0, segments, parts=(RowPlan(forwards=(Forward(3, apart=True),), moves=moves),)))
    for step in range(1, 12):
        at = [len(prompts[row]) + step - 1 for row in range(3)]
        segments = [Segment(f"s{row}", row, at[row], at[row] + 1, (PENDING,), GREEDY) for row in range(3)]
        executor.submit(StepPlan(step, segments, parts=(RowPlan(forwards=(Forward(3),)),)))
    for _ in range(12):
        for row, token in enumerate(executor.collect().tokens):
            tokens[row].append(token)
    assert graphs.captured == (BatchShape(4, 128),)
    executor.close()
    for row in range(3):
        assert tuple(tokens[row]) == generate_alone(driver.model.module, prompts[row], 12)


@pytest.mark.gpu
def test_a_model_that_asks_the_device_for_a_number_is_not_captured(monkeypatch):
    driver, layout = on_gpu()
    embed = driver.model.module.get_input_embeddings()
    embed.register_forward_hook(lambda module, given, output: output * (1 if int(given[0].max()) >= 0 else 2))
    masks, why = probe_graphs(driver, layout)
    assert masks is None and why
    assert not torch.cuda.is_current_stream_capturing()
    driver.forward(driver.inputs(driver.text(1, 4)), None)


def test_tensors_made_of_the_hosts_numbers_are_made_once_and_given_as_copies() -> None:
    constants, made = Constants(), []
    for _ in range(2):
        with constants:
            made.append((torch.tensor([0.5, 0.25]), torch.tensor([0.5], dtype=torch.float64), torch.as_tensor(3)))
    first, again = made
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other) and one.dtype == other.dtype and one.data_ptr() != other.data_ptr()
    assert len(constants._kept) == 3
    with constants:
        assert torch.as_tensor(first[0]) is first[0], "a tensor is no number of the host's"


class FromHost(TorchFunctionMode):
    """Notes the calls that copy numbers of the host to a device, which a capture cannot."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = func(*args, **(kwargs or {}))
        made = func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        indexed = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
        listed = indexed and any(isinstance(each, list) for each in (args[1], *parts_of(args[1])))
        tensors = [each for each in tree_leaves((args, kwargs, given)) if isinstance(each, torch.Tensor)]
        if made or listed or len({each.device for each in tensors}) > 1:
            self.seen.append(str(func))
        return given


def parts_of(index):
    """The parts of an index into several dimensions."""
    return index if isinstance(index, tuple) else ()


def test_lists_of_places_and_copies_of_host_tensors_are_on_the_device_before_a_capture() -> None:
    constants, states = Constants(), torch.empty(2, 6, 4, device="meta")

    def work():
        slopes = torch.tensor([0.5, 0.25]).to(states.device, torch.float16)
        moved = torch.arange(3).to("meta"), torch.tensor([1.0]).to(device="meta"), torch.ones(2).to(states)
        taken = states[..., [-2], :], states[[1]], states[:, torch.tensor([4, 0])], states.new_tensor([3, 4])
        states[:, [0, 2]] = 1.0
        return [each.shape for each in (slopes, *moved, *taken)], slopes.dtype

    right = work()
    with FromHost() as plain:
        work()
    assert plain.seen
    with constants:
        assert work() == right
    with FromHost() as again, constants:
        assert work() == right
    assert not again.seen


def test_what_is_kept_of_the_hosts_tensors_goes_by_what_is_in_them() -> None:
    constants, values = Constants(), torch.arange(5.0)
    with constants:
        assert values[[-2, 0]].tolist() == [3.0, 0.0] and values[[1]].tolist() == [1.0]
        assert values[[True, False, False, False, True]].tolist() == [0.0, 4.0]
        for number in (1.0, 2.0, 1.0):
            assert torch.tensor([number]).to(torch.float64).tolist() == [number]
            torch.full((2,), number).to("meta")
    assert sum(key[0] is torch.Tensor.to for key in constants._kept) == 2


@pytest.mark.parametrize("family", ["llama", "falcon-alibi", "bloom", "mpt"])
def test_a_decode_touches_no_tensor_of_the_host_once_it_has_run(family, monkeypatch):
    """On a device without memory. What would copy from the host is seen without a GPU."""
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *tensor: True)  # as in a capture
    module, constants, column = tiny(family).to("meta"), Constants(), torch.zeros(1, dtype=torch.int64, device="meta")
    driver = Made.of(tiny(family)).driver
    prototype = driver.run(2, 2)
    cache = DynamicCache()
    cache.layers = [
        FixedLayer(*(torch.empty(2, each.keys.shape[1], 128, each.keys.shape[3], device="meta") for _ in "kv"), column)
        for each in growing(prototype)
    ]
    ids = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    given = {"input_ids": ids, "attention_mask": torch.ones(2, 128, dtype=torch.int64, device="meta")}
    if "position_ids" in inspect.signature(module.forward).parameters:
        given["position_ids"] = ids
    seen = []
    for _ in range(2):
        with torch.inference_mode(), FromHost() as watched, constants:
            module(**given, **{CACHE: cache}, use_cache=True, return_dict=True)
        seen.append(watched.seen)
    assert not seen[1]
    assert seen[0] or family != "falcon-alibi", "it takes keys and values by lists of places"
