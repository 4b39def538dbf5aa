"""Shaped logits equal those of Transformers' processors, and a plain count for penalties that Transformers lacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from holdfast.core.types import ThinkingBudget
from holdfast.lm.kernels.collectives.torch_group import TorchGroup
from holdfast.lm.kernels.sampling.sampler import Sampler, Wishes
from holdfast.lm.kernels.sampling.shaping import Changes, Histories, shape
from holdfast.lm.types import History, Sampling, Shaping
from tests.ranks import in_group

VOCAB, PROMPT = 60, 7
PLAIN = Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=5)


def record(temperature: float = 1.0, **fields: Any) -> Sampling:
    return Sampling(temperature, 0, 1.0, 5, None, Shaping(prompt=PROMPT, **fields))


def history(row: int, tokens: list[int], of: Sampling) -> History:
    return History(row, tuple(tokens[of.shaping.history_start if of.shaping else 0 :]))


def sequences(count: int, length: int) -> list[list[int]]:
    """The tokens of sequences; each holds some tokens twice, and some of its prompt in its answer."""
    random = np.random.default_rng(3)
    return [random.integers(0, 20, length).tolist() for _ in range(count)]


def shaped(records: list[Sampling], tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of rows, before and after shaping."""
    logits = 3 * torch.randn(len(records), VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [2 * row + 1 for row in range(len(records))]
    changes, histories = Changes.of(records, rows, [len(each) for each in tokens]), Histories()
    assert changes is not None
    given = [history(*each) for each in zip(rows, tokens, records, strict=True) if each[2].counts]
    histories.enter(given, changes, torch.tensor([each[-1] for each in tokens]))
    return logits, shape(logits, changes, histories)


def test_a_repetition_penalty_is_transformers() -> None:
    tokens = sequences(3, 15)
    logits, got = shaped([record(repetition_penalty=penalty) for penalty in (1.3, 0.7, 2.0)], tokens)
    for row, penalty in enumerate((1.3, 0.7, 2.0)):
        processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
        expected = processor(torch.tensor(tokens[row : row + 1]), logits[row : row + 1].clone())
        assert torch.allclose(got[row], expected[0], atol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.02, 0.4, 1.0])
def test_min_p_is_transformers_at_the_rows_temperature(temperature: float, min_p: float) -> None:
    logits, got = shaped([record(temperature, min_p=min_p)] * 2, sequences(2, 9))
    processor = transformers.MinPLogitsWarper(min_p)
    expected = processor(torch.empty(0), logits / temperature)
    assert torch.equal(got.isinf(), expected.isinf())
    assert expected.isinf().any() and not expected.isinf().all()


def test_min_p_leaves_greedy_rows_as_they_are() -> None:
    logits, got = shaped([record(0.0, min_p=0.5), record(bias=((1, 1.0),))], sequences(2, 9))
    assert torch.equal(got[0], logits[0])


def test_a_logit_bias_is_transformers_sequence_bias() -> None:
    biases = ((3, 4.5), (0, -100.0), (59, 0.5))
    logits, got = shaped([record(bias=biases), record(bias=((7, 1.0),))], sequences(2, 9))
    processor = transformers.SequenceBiasLogitsProcessor({(token,): value for token, value in biases})
    assert torch.allclose(got[0], processor(torch.zeros(1, 4, dtype=torch.int64), logits[:1])[0], atol=1e-6)
    assert got[1, 7] == logits[1, 7] + 1


@pytest.mark.parametrize(("length", "banned"), [(PROMPT, True), (PROMPT + 2, True), (PROMPT + 3, False)])
def test_end_tokens_are_banned_until_the_answer_has_enough_tokens(length: int, banned: bool) -> None:
    logits, got = shaped([record(min_tokens=3, ends=(4, 9))], sequences(1, length))
    processor = transformers.MinNewTokensLengthLogitsProcessor(PROMPT, 3, [4, 9], device="cpu")
    expected = processor(torch.zeros(1, length, dtype=torch.int64), logits.clone())
    assert torch.equal(got, expected)
    assert bool(got[0, 4].isinf()) is banned


def test_presence_and_frequency_penalties_count_the_answer_alone() -> None:
    tokens = sequences(2, 30)
    logits, got = shaped([record(presence_penalty=0.5, frequency_penalty=0.25), PLAIN], tokens)
    counts = Counter(tokens[0][PROMPT:])
    taken = [0.25 * counts[token] + 0.5 * (counts[token] > 0) for token in range(VOCAB)]
    expected = [value - less for value, less in zip(logits[0].tolist(), taken, strict=True)]
    assert got[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert max(counts.values()) > 1 and torch.equal(got[1], logits[1])


def test_biases_come_before_penalties_and_min_p_after_them() -> None:
    tokens = sequences(1, 12)
    how = dict(bias=((tokens[0][0], 5.0),), repetition_penalty=1.5, min_p=0.1)
    logits, got = shaped([record(**how)], tokens)
    scores = logits.clone()
    scores[0, tokens[0][0]] += 5.0
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor(tokens), scores)
    assert torch.allclose(got, transformers.MinPLogitsWarper(0.1)(torch.empty(0), scores), atol=1e-6)


def test_histories_grow_by_input_tokens_and_a_row_given_anew_forgets_the_old_one() -> None:
    records, rows = [record(frequency_penalty=1.0)] * 2, [4, 0]
    histories, tokens = Histories(), sequences(2, 14)
    random = np.random.default_rng(8)
    for step in range(40):
        given = [History(row, tuple(each)) for row, each in zip(rows, tokens, strict=True)] if step == 0 else []
        if step == 20:  # another sequence gets the row of the first
            tokens[0] = sequences(3, 9)[2]
            given = [History(4, tuple(tokens[0][:-1]))]
        changes = Changes.of(records, rows, [len(each) for each in tokens])
        assert changes is not None
        histories.enter(given, changes, torch.tensor([each[-1] for each in tokens]))
        whole, answered = histories.counts(changes, VOCAB)
        for row, each in enumerate(tokens):
            assert whole[row].tolist() == [each.count(token) for token in range(VOCAB)]
            assert answered[row].tolist() == [each[PROMPT:].count(token) for token in range(VOCAB)]
        for each in tokens:
            each.append(int(random.integers(0, VOCAB)))


@pytest.mark.parametrize("size", [2, 4])
def test_devices_of_a_group_draw_the_tokens_of_one_device(size: int) -> None:
    tokens = sequences(6, 20)
    records = [
        record(repetition_penalty=3.0, bad_words=((tokens[0][-1], 3), (7,))), PLAIN, record(1.5, min_p=0.3),
        record(0.0, bias=((5, 9.0),)),
        record(0.7, presence_penalty=2.0, frequency_penalty=1.0, allowed=tuple(range(9))),
        record(thinking=ThinkingBudget(13, 30, 31, opened=True)),
    ]  # fmt: skip
    logits = 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))
    columns = {
        "temperature": torch.tensor([each.temperature for each in records]),
        "top_k": torch.zeros(6, dtype=torch.int64),
        "top_p": torch.ones(6),
        "seed": torch.arange(6),
        "position": torch.full((6,), 20),
    }
    given = [history(row, each, records[row]) for row, each in enumerate(tokens)]
    wishes, share = Wishes.of(records, range(6), [20] * 6, given), -(-VOCAB // size)
    last = torch.tensor([each[-1] for each in tokens])

    def draw(sampler: Sampler, logits: torch.Tensor) -> list[int]:
        drawn = sampler.draw(logits, columns, wishes, any_random=True, any_filtered=False, last=last)
        return list(drawn.tokens.tolist())

    def work(group: TorchGroup) -> list[int]:
        return draw(Sampler(group, VOCAB), logits[:, group.rank * share : (group.rank + 1) * share].contiguous())

    expected = draw(Sampler(), logits)
    assert (expected[3], expected[5]) == (5, 31)
    assert in_group(size, work) == [expected] * size


def test_a_bad_word_is_transformers_no_bad_words() -> None:
    tokens = sequences(3, 20)
    words = ((tokens[0][-2], tokens[0][-1], 41), (tokens[0][-1], 42), (43,), (50, 51, 52), (51, 44))
    logits, got = shaped([record(bad_words=words[:3]), PLAIN, record(bad_words=words)], tokens)
    for row in (0, 2):
        given = words[:3] if row == 0 else words
        processor = transformers.NoBadWordsLogitsProcessor([list(word) for word in given], eos_token_id=99)
        expected = processor(torch.tensor(tokens[row : row + 1]), logits[row : row + 1].clone())
        assert torch.equal(got[row].isinf(), expected[0].isinf())
        assert torch.equal(got[row].nan_to_num(neginf=0), logits[row].masked_fill(got[row].isinf(), 0))
    assert got[0, [41, 42, 43]].isinf().all() and not got[2, 41].isinf()
    assert torch.equal(got[1], logits[1])


def test_a_bad_word_that_begins_in_the_prompt_may_go_on() -> None:
    tokens = sequences(1, PROMPT + 1)
    word = (*tokens[0][-2:], 33)
    assert shaped([record(bad_words=(word,))], tokens)[1][0, 33].isfinite()
    assert shaped([record(bad_words=(word[1:],))], tokens)[1][0, 33].isinf()


def test_only_allowed_tokens_remain_and_bad_words_leave_them() -> None:
    logits, got = shaped([record(allowed=(3, 8, 9), bad_words=((8,), (11,))), record(allowed=(0,))], sequences(2, 9))
    assert got[0].isfinite().nonzero().flatten().tolist() == [3, 9]
    assert got[1].isfinite().nonzero().flatten().tolist() == [0]
    assert torch.equal(got[0, [3, 9]], logits[0, [3, 9]])


def test_a_row_without_any_other_token_may_draw_a_bad_word() -> None:
    logits, got = shaped([record(allowed=(7,), bad_words=((7,),)), record(bad_words=((5,),))], sequences(2, 9))
    assert torch.equal(got[0], logits[0]) and got[1, 5].isinf()
    only = torch.full((2, VOCAB), -torch.inf)
    only[:, 5] = 1.0
    changes = Changes.of([record(bad_words=((5,),))] * 2, [0, 1], [9, 9])
    assert changes is not None and torch.equal(shape(only, changes, Histories()), only)


@pytest.mark.parametrize("opened", [True, False])
def test_reasoning_that_has_had_its_tokens_ends_with_the_next_one(opened: bool) -> None:
    """Each row is a step of one of several answers, which hold the tags at random or not at all."""
    random, start, end = np.random.default_rng(4), 3, 4
    records, tokens, forced = [], [], []
    for _ in range(300):
        answer = random.integers(0, 12, random.integers(0, 14)).tolist()
        budget = int(random.integers(0, 9))
        tokens.append([start, end, start, *[9] * (PROMPT - 3), *answer])  # tags of the prompt have no effect
        records.append(record(thinking=ThinkingBudget(budget, start, end, opened)))
        begin = 0 if opened else answer.index(start) + 1 if start in answer else len(answer) + 1
        forced.append(end not in answer[begin:] and len(answer) - begin >= budget)
    assert 20 < sum(forced) < 280
    logits, got = shaped(records, tokens)
    for row, each in enumerate(forced):
        if each:
            assert got[row].argmax() == end and got[row].isfinite().sum() == 1
        else:
            assert torch.equal(got[row], logits[row])


def test_the_end_of_reasoning_goes_before_other_wishes_and_after_a_mask() -> None:
    limit = ThinkingBudget(2, 3, 4, opened=True)
    asked = record(
        0.5, thinking=limit, min_p=0.9, bias=((4, -100.0),), bad_words=((4,),), allowed=(7,), min_tokens=99, ends=(4,)
    )
    tokens = sequences(1, PROMPT + 2)
    assert 4 not in tokens[0][PROMPT:]
    _, got = shaped([asked], tokens)
    assert got[0].argmax() == 4 and got[0].isfinite().sum() == 1
    alone = record(thinking=limit)
    changes, histories = Changes.of([alone], [0], [len(tokens[0])]), Histories()
    assert changes is not None
    histories.enter([history(0, tokens[0], alone)], changes, torch.tensor([tokens[0][-1]]))
    masked = torch.zeros(1, VOCAB)
    masked[0, 4] = -torch.inf
    assert torch.equal(shape(masked, changes, histories), masked)
