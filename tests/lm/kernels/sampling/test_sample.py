"""Sampling: greedy rows, frequencies against softmax, exact support of top-k and top-p, noise of each request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.sampling import sample as module
from holdfast.lm.kernels.sampling.sample import sample
from holdfast.lm.kernels.sampling.sample_kernels import sample_rows


def draw(
    logits: torch.Tensor,
    *,
    temperature: float | torch.Tensor = 1.0,
    top_k: int | torch.Tensor = 0,
    top_p: float | torch.Tensor = 1.0,
    seed: int | torch.Tensor = 0,
    position: int | torch.Tensor = 0,
    by: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call `sample`, or a kernel with the same arguments except any_random. A number stands for a column of it."""
    rows = logits.shape[0]

    def column(value: float | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous().to(logits.device)

    temperature, top_p = column(temperature, torch.float32), column(top_p, torch.float32)
    top_k = column(top_k, torch.int32)
    rest = column(seed, torch.int64), column(position, torch.int64)
    any_filtered = bool(((top_k > 0) | (top_p < 1)).any())
    if by is not None:
        return by(logits, temperature, top_k, top_p, *rest, any_filtered=any_filtered)
    any_random = bool((temperature > 0).any())
    return sample(logits, temperature, top_k, top_p, *rest, any_random=any_random, any_filtered=any_filtered)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def support(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The tokens that remain after top-k and then top-p, by a loop in float64."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if top_k > 0:
        order = order[:top_k]
    weight = np.exp(logits[order] - logits.max())
    weight /= weight.sum()
    kept, reached = set(), 0.0
    for token, share in zip(order, weight, strict=True):
        if top_p < 1 and kept and reached >= top_p:
            break
        kept.add(token)
        reached += share
    return kept


def chi_square_per_degree(found: torch.Tensor, probability: torch.Tensor) -> float:
    """Pearson's statistic divided by its degrees of freedom (mean 1, standard deviation sqrt(2 / degrees))."""
    expected = probability * len(found)
    seen = torch.bincount(found, minlength=len(probability))
    return float(((seen - expected) ** 2 / expected).sum() / (len(probability) - 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature_zero_takes_the_argmax(dtype: torch.dtype) -> None:
    logits = normal(16, 100).to(dtype)
    assert torch.equal(draw(logits, temperature=0.0), logits.argmax(-1))


def test_greedy_rows_stay_greedy_among_random_and_filtered_ones() -> None:
    logits = normal(16, 100)
    temperature = torch.tensor([0.0, 1.3]).repeat(8)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.7]).repeat(4)
    for filters in ({}, {"top_p": top_p}, {"top_k": 5}):
        found = draw(logits, temperature=temperature, **filters)
        assert torch.equal(found[::2], logits[::2].argmax(-1))


@pytest.mark.each_pair
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("filtered", [False, True])
def test_frequencies_follow_softmax(temperature: float, vary: str, filtered: bool) -> None:
    rows = 60_000
    logits = normal(20)
    probability = (logits.double() / temperature).softmax(-1)
    # Cutting the 20th of 20 tokens off still goes through the sort, and leaves 19.
    if filtered:
        probability[logits.argmin()] = 0
        probability /= probability.sum()
    found = draw(
        logits.expand(rows, -1), temperature=temperature, top_k=19 if filtered else 0, **{vary: torch.arange(rows)}
    )
    kept = probability > 0
    relabel = torch.cumsum(kept, 0) - 1
    assert kept[found].all()
    assert chi_square_per_degree(relabel[found], probability[kept]) < 2.5


def test_draws_of_neighbouring_seeds_and_positions_are_independent() -> None:
    rows, vocab = 60_000, 8
    logits = torch.zeros(rows, vocab)
    count = torch.arange(rows)
    here = draw(logits, seed=count, position=100)
    uniform = torch.full((vocab * vocab,), 1 / vocab**2, dtype=torch.float64)
    for there in (
        draw(logits, seed=count + 1, position=100),
        draw(logits, seed=count, position=101),
        draw(logits, seed=count + 1, position=99),
    ):
        assert chi_square_per_degree(here * vocab + there, uniform) < 1.7


def test_noise_is_even_over_a_large_vocabulary() -> None:
    rows, vocab, bins = 512, 32_003, 64
    found = draw(torch.zeros(1, 1).expand(rows, vocab), seed=2**62 + 11, position=torch.arange(rows))
    share = torch.bincount(found * bins // vocab, minlength=bins).double()
    assert ((share - rows / bins) ** 2 / (rows / bins)).sum() / (bins - 1) < 1.7
    assert len(found.unique()) > 500


@given(
    vocab=st.integers(1, 60),
    top_k=st.integers(-1, 70),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 10**6),
)
def test_support_of_top_k_and_top_p_is_exact(vocab: int, top_k: int, top_p: float, seed: int) -> None:
    logits = normal(vocab, seed=seed) * 2
    allowed = support(logits.double().numpy(), top_k, top_p)
    rows = 300
    # A high temperature would change top-p's shares; instead each kept token gets its chance by the number of rows.
    found = set(
        draw(logits.expand(rows, -1), top_k=top_k, top_p=top_p, seed=seed, position=torch.arange(rows)).tolist()
    )
    assert found <= allowed
    shares = logits.double().softmax(-1)
    likely = {token for token in allowed if shares[token] > 0.08}
    assert likely <= found


def test_top_p_without_top_k_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(500, 1)
    found = draw(logits, top_p=0.65, position=torch.arange(500))
    assert set(found.tolist()) == {0, 1}


def test_equal_logits_at_the_border_keep_the_lowest_ids() -> None:
    rows = 400
    found = draw(torch.zeros(rows, 10), top_k=3, position=torch.arange(rows))
    assert set(found.tolist()) == {0, 1, 2}


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.zeros(500, 10)
    logits[:, [0, 4, 9]] = -torch.inf
    for filters in ({}, {"top_k": 8}, {"top_p": 0.999}):
        found = draw(logits, temperature=50.0, position=torch.arange(500), **filters)
        assert not set(found.tolist()) & {0, 4, 9}


@pytest.mark.parametrize("filtered", [False, True])
def test_a_draw_does_not_depend_on_its_place_in_the_batch(filtered: bool) -> None:
    logits = normal(12, 300)
    seed, position = torch.arange(12) * 10**15, torch.arange(12) * 7
    top_k = 40 if filtered else 0
    together = draw(logits, top_k=top_k, seed=seed, position=position)
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    moved = draw(logits[shuffle], top_k=top_k, seed=seed[shuffle], position=position[shuffle])
    assert torch.equal(moved, together[shuffle])
    alone = [draw(logits[i : i + 1], top_k=top_k, seed=seed[i], position=position[i]).item() for i in range(12)]
    assert alone == together.tolist()


def test_a_neighbour_with_a_filter_changes_no_draw() -> None:
    logits = normal(12, 300)
    plain = draw(logits, position=torch.arange(12))
    top_k = torch.tensor([0] * 11 + [3])
    assert torch.equal(draw(logits, top_k=top_k, position=torch.arange(12))[:11], plain[:11])


def test_of_equal_scores_the_lowest_id_is_drawn_with_and_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different logits may give one score, after the division or with the noise."""
    monkeypatch.setattr(module, "_gumbel", lambda seed, position, tokens: torch.zeros(tokens.shape))
    low = torch.tensor(1.9)
    logits = torch.stack((torch.tensor(-3.0), low, torch.nextafter(low, torch.tensor(2.0))))[None]
    heat = 1.8
    assert logits[0, 1] < logits[0, 2] and logits[0, 1] / heat == logits[0, 2] / heat
    assert draw(logits, temperature=heat, top_k=2).tolist() == [1] == draw(logits, temperature=heat).tolist()


def test_other_seeds_and_positions_give_other_draws() -> None:
    logits = torch.zeros(64, 1000)
    base = draw(logits, position=torch.arange(64))
    assert len(base.unique()) > 50
    assert (draw(logits, seed=1, position=torch.arange(64)) == base).sum() < 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 300])
def test_the_kernel_draws_the_same_tokens_as_the_cpu(dtype: torch.dtype, vocab: int, device: str) -> None:
    # bfloat16 has equal logits at the borders of top-k and top-p.
    logits = (normal(len(FILTERS), vocab) * 2).to(dtype)
    top_k, top_p, temperature = (torch.tensor(column) for column in zip(*FILTERS, strict=True))
    seed, position = torch.arange(len(FILTERS)) * 10**15, torch.arange(len(FILTERS)) * 7
    options = {"temperature": temperature, "top_p": top_p, "seed": seed, "position": position}
    assert torch.equal(draw_by_kernel(logits, device, top_k=top_k, **options), draw(logits, top_k=top_k, **options))
    unfiltered = options | {"top_p": 1.0}
    assert torch.equal(draw_by_kernel(logits, device, **unfiltered), draw(logits, **unfiltered))
    assert torch.equal(draw_by_kernel(logits, device, temperature=0.0), draw(logits, temperature=0.0))


FILTERS = [
    (0, 1.0, 0.0),
    (0, 1.0, 1.0),
    (5, 1.0, 0.7),
    (0, 0.9, 2.0),
    (3, 0.5, 1.0),
    (50, 0.95, 1.0),
    (400, 0.3, 0.5),
    (1, 0.01, 1.0),
]


def test_the_kernel_keeps_the_lowest_ids_of_equal_logits_and_masked_tokens_out(device: str) -> None:
    rows = 40
    logits = torch.zeros(rows, 10)
    logits[:, 1] = -torch.inf
    found = draw_by_kernel(logits, device, top_k=3, position=torch.arange(rows))
    assert set(found.tolist()) == {0, 2, 3}


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_compiled_draws_over_a_large_vocabulary_are_those_of_the_cpu(spread: float) -> None:
    rows = 64
    logits = (normal(rows, 128_256) * spread).bfloat16()
    options = {"position": torch.arange(rows), "temperature": torch.linspace(0, 2, rows)}
    for filters in ({}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 300, "top_p": 0.5}):
        found = draw_by_kernel(logits, "cuda", **filters, **options)
        # Sums of 128,256 shares may round to either side of a border.
        assert (found == draw(logits, **filters, **options)).sum() >= rows - 1


def draw_by_kernel(logits: torch.Tensor, device: str, **options: float | torch.Tensor) -> torch.Tensor:
    """The tokens that the Triton kernel draws, for the arguments of `draw`."""
    return draw(logits.to(device), by=sample_rows, **options).cpu()
