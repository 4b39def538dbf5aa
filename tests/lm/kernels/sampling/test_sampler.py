"""Sampler: log probabilities are those of the model's own logits, on one device and on several."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.collectives.torch_group import TorchGroup
from holdfast.lm.kernels.sampling import logprobs, sampler
from holdfast.lm.kernels.sampling.logprobs import Logprobs
from holdfast.lm.kernels.sampling.sampler import Drawn, Sampler, Wishes
from holdfast.lm.parts.prompts.device import named_of, ranks_of, records_of
from holdfast.lm.parts.prompts.values import PromptReport
from tests.ranks import in_group

ROWS, VOCAB = 13, 101
WANTED = [None, 0, 3, 20, *[None] * 5, 1, 2, None, 7]
NAMED: list[tuple[int, ...]] = [(), (5, VOCAB - 1, 0, 5), (7,), (), *[()] * 5, tuple(range(40)), (), (), ()]


def given(rows: int = ROWS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, and the columns of rows that are drawn greedily, at random, and filtered."""
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))
    columns = {
        "temperature": torch.tensor([(0.0, 0.7, 1.5)[row % 3] for row in range(rows)]),
        "top_k": torch.tensor([(0, 0, 9)[row % 3] for row in range(rows)]),
        "top_p": torch.tensor([(1.0, 0.8)[row % 2] for row in range(rows)]),
        "seed": torch.arange(rows) * 7919,
        "position": torch.arange(rows) + 3,
    }
    return logits, columns


def drawn(sampler: Sampler, logits: torch.Tensor, columns: dict[str, Any], wishes: Wishes | None) -> Drawn:
    return sampler.draw(logits, columns, wishes, any_random=True, any_filtered=True)


@pytest.mark.parametrize("at_once", [1, 5 * VOCAB, 1 << 24])
def test_log_probabilities_are_of_the_models_own_distribution(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(logprobs, "NUMBERS_AT_ONCE", at_once)
    logits, columns = given()
    plain, wishes = drawn(Sampler(), logits, columns, None), Wishes(WANTED)
    result = drawn(Sampler(), logits, columns, wishes)
    assert torch.equal(result.tokens, plain.tokens), "what is told changes no token"
    assert plain.told(None) == ()
    expected = logits.double().log_softmax(-1)
    told = result.told(wishes)
    assert [each is None for each in told] == [count is None for count in WANTED]
    for row, (count, each) in enumerate(zip(WANTED, told, strict=True)):
        if each is not None:
            best = expected[row].topk(count or 0)
            assert each.logprob == pytest.approx(float(expected[row, result.tokens[row]]), abs=1e-5)
            assert each.top_ids == tuple(best.indices.tolist())
            assert each.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_named_tokens_follow_the_most_probable_ones_and_are_of_the_models_own_distribution(
    size: int, alone: bool
) -> None:
    logits, columns = given()
    wishes, share = Wishes(WANTED, named=NAMED), -(-VOCAB // size)
    plain = drawn(Sampler(alone=alone), logits.clone(), columns, Wishes(WANTED))

    def work(group: TorchGroup | None) -> Drawn:
        rank = 0 if group is None else group.rank
        own = logits[:, rank * share : (rank + 1) * share].contiguous()
        return drawn(Sampler(group, VOCAB, alone=alone), own.clone(), columns, wishes)

    expected = logits.double().log_softmax(-1)
    for result in [work(None)] if size == 1 else in_group(size, work):
        assert torch.equal(result.tokens, plain.tokens), "what is told changes no token"
        told, without = result.told(wishes), plain.told(Wishes(WANTED))
        for row, (each, other, names) in enumerate(zip(told, without, NAMED, strict=True)):
            if each is None or other is None:
                assert each is other
                continue
            assert (each.logprob, each.top_ids) == (other.logprob, other.top_ids + names)
            assert each.top_logprobs[: len(other.top_ids)] == other.top_logprobs
            found = each.top_logprobs[len(other.top_ids) :]
            assert found == pytest.approx(expected[row, list(names)].tolist(), abs=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("alone", [False, True])
def test_on_a_gpu_named_tokens_of_a_large_vocabulary_have_their_log_probabilities(alone: bool) -> None:
    rows, vocab = 70, 128_256
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).bfloat16()
    columns = {name: column.repeat(-(-rows // ROWS))[:rows].cuda() for name, column in given()[1].items()}
    named = [tuple(range(row, vocab, vocab // (row % 7 * 18))) if row % 7 else () for row in range(rows)]
    wishes = Wishes([0] * rows, named=named)
    found = drawn(Sampler(alone=alone), logits.cuda(), columns, wishes).on_host()
    torch.cuda.synchronize()
    expected = logits.double().log_softmax(-1)
    for row, told in enumerate(found.told(wishes)):
        assert told is not None and told.top_ids == named[row]
        assert told.logprob == pytest.approx(float(expected[row, found.tokens[row]]), abs=1e-4)
        assert told.top_logprobs == pytest.approx(expected[row, list(named[row])].tolist(), abs=1e-4)


def test_of_equally_probable_alternatives_the_lowest_ids_are_reported_to_a_row_alone() -> None:
    logits = torch.tensor([[1.0, 5.0, -2.0, 5.0, 5.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0]])
    found = logprobs.log_probabilities(logits, torch.tensor([0, 5]), 5, alone=True)
    assert found.top_ids.tolist() == [[1, 3, 4, 6, 0], [5, 6, 0, 1, 2]]
    torch.testing.assert_close(found.top, logits.log_softmax(-1).gather(1, found.top_ids))


def test_tokens_that_are_equally_probable_share_the_last_of_their_ranks() -> None:
    logits = torch.tensor([[1.0, 5.0, -2.0, 5.0], [0.0, 9.0, 2.0, 3.0], [0.0, 0.0, 0.0, -torch.inf]])
    found = logprobs.log_probabilities(logits, torch.tensor([1, 0, 3]), 1, ranked=True)
    assert found.rank is not None and found.rank.tolist() == [2, 4, 4]
    assert logprobs.log_probabilities(logits, torch.tensor([1, 0, 3]), 1).rank is None


def test_rows_that_are_computed_alone_have_the_same_results_whatever_is_drawn_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits, columns = given()
    alone, calls, log_softmax = Sampler(alone=True), list[int](), torch.Tensor.log_softmax

    def counted(rows: torch.Tensor, dim: int) -> torch.Tensor:
        calls.append(len(rows))
        return log_softmax(rows, dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", counted)
    found = drawn(alone, logits, columns, Wishes([3] * ROWS))
    assert calls == [1] * ROWS
    assert torch.equal(found.tokens, drawn(Sampler(), logits, columns, None).tokens)
    told = found.told(Wishes([3] * ROWS))
    for row in range(ROWS):
        own = slice(row, row + 1)
        # Alone, a row may be drawn without the work that the filters of others take.
        filtered = bool(columns["top_k"][row] > 0) or bool(columns["top_p"][row] < 1)
        one = {name: column[own] for name, column in columns.items()}
        result = alone.draw(logits[own], one, Wishes([3]), any_random=True, any_filtered=filtered)
        assert torch.equal(result.tokens, found.tokens[own]) and result.told(Wishes([3])) == told[own]


@pytest.mark.parametrize("rows", [1, 2, ROWS])
@pytest.mark.parametrize("size", [2, 4])
def test_each_device_of_a_group_reports_the_log_probabilities_of_one_device(size: int, rows: int) -> None:
    logits, columns = given(rows)
    wishes = Wishes([5, *WANTED[1:rows]])
    expected, share = drawn(Sampler(), logits, columns, wishes), -(-VOCAB // size)

    def work(group: TorchGroup) -> Drawn:
        own = logits[:, group.rank * share : (group.rank + 1) * share].contiguous()
        return drawn(Sampler(group, VOCAB), own, columns, wishes)

    for result in in_group(size, work):
        assert torch.equal(result.tokens, expected.tokens)
        assert result.told(wishes) == expected.told(wishes)


def test_a_group_reports_only_the_token_if_no_alternative_is_asked_for() -> None:
    logits, columns = given(3)
    wishes, share = Wishes([0, None, 0]), -(-VOCAB // 2)
    results = in_group(
        2,
        lambda group: drawn(
            Sampler(group, VOCAB),
            logits[:, group.rank * share : (group.rank + 1) * share].contiguous(),
            columns,
            wishes,
        ),
    )
    assert results[0].told(wishes) == drawn(Sampler(), logits, columns, wishes).told(wishes)


@pytest.mark.parametrize(("size", "at_once"), [(1, 1 << 24), (1, 3 * VOCAB), (2, 5 * VOCAB), (4, 3 * VOCAB)])
@pytest.mark.parametrize("most", [0, 4])
def test_prompts_are_reported_a_few_rows_at_a_time_on_one_device_and_on_several(
    monkeypatch: pytest.MonkeyPatch, size: int, at_once: int, most: int
) -> None:
    monkeypatch.setattr(sampler, "NUMBERS_AT_ONCE", at_once)
    hidden = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(2))
    head = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(3))
    targets, share = torch.arange(ROWS) * 7 % VOCAB, -(-VOCAB // size)
    named = ((3,), (), (VOCAB - 1, 3), (5,), ())
    tells = [PromptReport(0, 0, (1,) * 5, most, named), PromptReport(1, 2, (1,) * (ROWS - 5), 0)]
    others = torch.from_numpy(named_of(tells))

    def work(group: TorchGroup | None) -> Logprobs:
        seen: list[int] = []

        def logits(some: torch.Tensor) -> torch.Tensor:
            seen.append(len(some))
            rank = 0 if group is None else group.rank
            return some @ head[rank * share : (rank + 1) * share].T

        told = Sampler(group, VOCAB).tell_targets(hidden, logits, targets, most, others)
        assert max(seen) <= at_once // VOCAB
        return told

    expected = (hidden @ head.T).double().log_softmax(-1)
    for drawn in [work(None)] if size == 1 else in_group(size, work):
        first, second = records_of(drawn, tells)
        larger = expected > expected.gather(1, targets[:, None])
        assert list(chain(*ranks_of(drawn, tells))) == (larger.sum(1) + 1).tolist()
        assert (len(first), len(second)) == (5, ROWS - 5)
        for row, each in enumerate(first + second):
            best = expected[row].topk(most if row < 5 else 0)
            assert each.logprob == pytest.approx(float(expected[row, targets[row]]), abs=1e-5)
            ids = [*best.indices.tolist(), *(named[row] if row < 5 else ())]
            assert each.top_ids == tuple(ids)
            assert each.top_logprobs == pytest.approx(expected[row, ids].tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
def test_devices_report_what_one_device_reports_where_bits_must_not_depend_on_other_rows(size: int) -> None:
    """Many logits are equal, and devices have other numbers of rows than one device has."""
    logits = torch.randint(0, 3, (ROWS, VOCAB), generator=torch.Generator().manual_seed(1)).bfloat16()
    _, columns = given()
    wishes = Wishes(logprobs=[6] * ROWS)
    options: dict[str, Any] = {"any_random": True, "any_filtered": True}
    share = -(-VOCAB // size)

    def work(group: TorchGroup) -> Drawn:
        own = logits[:, group.rank * share : (group.rank + 1) * share]
        sampler = Sampler(group, VOCAB, alone=True)
        assert torch.equal(sampler.draw(own.clone(), columns, None, **options).tokens, wanted.tokens)
        return sampler.draw(own.clone(), columns, wishes, **options)

    wanted = Sampler(alone=True).draw(logits.clone(), columns, wishes, **options)
    assert wanted.logprobs is not None
    for found in in_group(size, work):
        assert torch.equal(found.tokens, wanted.tokens) and found.logprobs is not None
        for one, other in zip(found.logprobs[:3], wanted.logprobs[:3], strict=True):
            assert one is not None and other is not None and torch.equal(one, other)
