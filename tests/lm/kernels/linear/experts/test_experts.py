"""Experts by PyTorch and by Triton against each token's own sum in float64: interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.linear.experts.experts import ExpertRule, Experts, Groups, apply_experts, choose
from holdfast.lm.kernels.linear.experts.launches import (
    FEW_TOKENS,
    ExpertLaunch,
    GroupedLaunch,
    experts_of_few,
    fixed_experts,
    grouped_experts,
    grouped_launch_for,
    sort_pairs,
)
from holdfast.lm.kernels.linear.invariant_product import Gpu, partial_products
from holdfast.lm.kernels.mxfp4 import BLOCK, NUMBERS, ExpertWeights, Mxfp4Matrices
from holdfast.lm.kernels.packed import Form
from tests.lm.kernels.packed_weights import draw_packed
from tests.long import then_long

RULES = [
    ExpertRule(top_k=2),
    ExpertRule(top_k=3, normalized=False),
    ExpertRule(top_k=4, clamp=(1.7, 0.5)),
    ExpertRule(top_k=3, activation="gelu_pytorch_tanh"),
    ExpertRule(top_k=2, normalized=False, jitter=0.2),
    ExpertRule(top_k=1, normalized=False, scales_input=True, shared=True),
    ExpertRule(top_k=2, normalized=False, scales_input=True),
    ExpertRule(top_k=2, normalized=False, shared=True),
    ExpertRule(top_k=3, gated=False),
]


def first_of(few: list[Any], whole: list[Any]) -> list[Any]:
    """Parameters of the `few` cases that run always, and the other ones of the whole grid with `make test-long`."""
    return then_long(len(few), few + [case for case in whole if case not in few])


BOTH = [(rule, rule.clamp is not None or rule.scales_input) for rule in RULES]
SMALL = GroupedLaunch(16, ExpertLaunch(16, 32, 4, 2), ExpertLaunch(32, 16, 4, 2))
FEW_PACKED = (ExpertLaunch(2, 64, 4, 2), ExpertLaunch(8, 64, 4, 2), ExpertLaunch(4, 64, 4, 2))
FEW = (ExpertLaunch(2, 64, 4, 2), ExpertLaunch(8, 32, 4, 2), ExpertLaunch(4, 32, 4, 2))


def draw(
    rule: ExpertRule,
    count: int,
    hidden: int,
    inner: int,
    device: str,
    *,
    biased: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Experts:
    generator = torch.Generator(device).manual_seed(count * hidden + inner)

    def random(*shape: int, spread: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).mul_(spread).to(dtype)

    experts = Experts(
        rule=rule,
        router=random(count, hidden, spread=hidden**-0.5),
        gate_up=random(count + rule.shared, (1 + rule.gated) * inner, hidden, spread=hidden**-0.5),
        down=random(count + rule.shared, hidden, inner, spread=inner**-0.5),
    )
    if not biased:
        return experts
    return replace(
        experts,
        router_bias=random(count, spread=1.0),
        gate_up_bias=random(count + rule.shared, (1 + rule.gated) * inner, spread=1.0),
        down_bias=random(count + rule.shared, hidden, spread=1.0),
    )


def packed(experts: Experts) -> tuple[Experts, Experts]:
    """Experts of the same sizes with random MXFP4 weights, and those with the numbers that they stand for."""
    generator = torch.Generator().manual_seed(7)

    def draw_like(weights: ExpertWeights) -> tuple[Mxfp4Matrices, torch.Tensor]:
        count, rows, inputs = weights.shape
        data = torch.randint(256, (count, rows, inputs // 2), generator=generator)
        scale = torch.randint(121, 126, (count, rows, inputs // BLOCK), generator=generator)
        numbers = torch.tensor(NUMBERS)[torch.stack((data & 15, data >> 4), -1)].view(count, rows, -1, BLOCK)
        plain = (numbers * 2.0 ** (scale - 127)[..., None]).view(count, rows, inputs)
        device = experts.router.device
        return Mxfp4Matrices(data.byte().to(device), scale.byte().to(device)), plain.to(experts.router)

    (gate_up, plain_gate_up), (down, plain_down) = map(draw_like, (experts.gate_up, experts.down))
    return replace(experts, gate_up=gate_up, down=down), replace(experts, gate_up=plain_gate_up, down=plain_down)


def expected(x: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Token by token, in float64."""
    rule, rows = experts.rule, []

    def bias(tensor: torch.Tensor | None, expert: int) -> torch.Tensor | float:
        return 0.0 if tensor is None else tensor[expert].double()

    for token in x.double():
        logits = experts.router.double() @ token
        if experts.router_bias is not None:
            logits += experts.router_bias.double()
        scores = logits.sigmoid() if rule.sigmoid else logits.softmax(0)
        chosen = torch.tensor(chosen_of(scores, experts), device=scores.device)
        shares = scores[chosen]
        if rule.normalized:
            shares = shares / shares.sum()
        shares = rule.factor * shares
        if rule.jitter is not None:
            shares = torch.stack([mixer_share(logits, chosen[:rank], rule.jitter) for rank in range(len(chosen))])
        pairs = [*zip(shares, shares.new_ones(len(shares)), chosen.tolist(), strict=True)]
        if rule.scales_input:
            pairs = [(1.0, logits[expert].sigmoid(), expert) for *_, expert in pairs]
        if rule.shared:
            pairs.append((1.0, 1.0, len(logits)))
        total = torch.zeros_like(token)
        for share, factor, expert in pairs:
            first = experts.gate_up[expert].double() @ (factor * token) + bias(experts.gate_up_bias, expert)
            gate, up = first.chunk(2)
            if not rule.gated:
                inner = first.clamp(min=0.0) ** 2
            elif rule.clamp is None:
                silu = rule.activation == "silu"
                inner = (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * up
            else:
                alpha, limit = rule.clamp
                gate = gate.clamp(max=limit)
                inner = gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
            total += share * (experts.down[expert].double() @ inner + bias(experts.down_bias, expert))
        rows.append(total)
    return torch.stack(rows)


def chosen_of(scores: torch.Tensor, experts: Experts) -> list[int]:
    """The numbers of a token's experts, the best first, by its scores."""
    rule, ranks = experts.rule, scores.tolist()
    if experts.correction is not None:
        ranks = [rank + add for rank, add in zip(ranks, experts.correction.tolist(), strict=True)]
    size = len(ranks) // rule.groups.count
    sums = [sum(sorted(ranks[first : first + size])[-rule.groups.best :]) for first in range(0, len(ranks), size)]
    kept = sorted(range(len(sums)), key=sums.__getitem__)[-rule.groups.kept :]
    left = [expert for expert in range(len(ranks)) if expert // size in kept]
    return sorted(left, key=ranks.__getitem__, reverse=True)[: rule.top_k]


def mixer_share(logits: torch.Tensor, before: torch.Tensor, jitter: float) -> torch.Tensor:
    """The share of the best expert after those `before` it, as SparseMixer computes it outside of training."""
    rest = logits.clone()
    rest[before] = -torch.inf
    best = rest.max()
    near = [e for e, own in enumerate(rest) if own > -torch.inf and best - own <= 2 * jitter * max(abs(own), best)]
    return 1 / (rest[near] - best).exp().sum()


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.each_value
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_pytorch_gives_each_token_the_weighted_sum_of_its_experts(rule: ExpertRule, biased: bool) -> None:
    experts = draw(rule, 6, 24, 20, "cpu", biased=biased)
    x = torch.randn(13, 24)
    assert error(apply_experts(x, experts), expected(x, experts)) < 1e-6


@pytest.mark.each_value
@pytest.mark.parametrize(("rule", "biased"), BOTH)
@pytest.mark.parametrize(("tokens", "sizes"), [(1, (6, 64, 32)), (3, (5, 40, 20))])
def test_a_few_tokens_get_the_weighted_sum_of_their_experts(
    tokens: int, sizes: tuple[int, int, int], rule: ExpertRule, biased: bool, device: str
) -> None:
    experts = draw(rule, *sizes, device, biased=biased)
    x = torch.randn(tokens, sizes[1], device=device)
    out = torch.full_like(x, torch.nan)
    experts_of_few(x, experts, out, added=False, launches=FEW)
    assert error(out, expected(x, experts)) < 1e-6
    experts_of_few(x, experts, out, added=True, launches=FEW)
    assert error(out, 2 * expected(x, experts)) < 1e-6


def test_the_reader_of_a_norm_computes_it_if_nobody_has(device: str) -> None:
    experts = draw(RULES[0], 6, 64, 32, device)
    x, norm = 3 * torch.randn(2, 64, device=device), torch.rand(64, device=device)
    out = torch.empty_like(x)
    experts_of_few(x, experts, out, added=False, norm=norm, eps=1e-5, launches=FEW)
    assert error(out, expected(functional.rms_norm(x, (64,), norm, 1e-5), experts)) < 1e-6


@pytest.mark.each_value
@pytest.mark.parametrize(("rule", "biased"), BOTH)
@pytest.mark.parametrize(("tokens", "sizes"), [(9, (6, 64, 32)), (37, (5, 40, 20))])
def test_grouped_tokens_get_the_weighted_sum_of_their_experts(
    tokens: int, sizes: tuple[int, int, int], rule: ExpertRule, biased: bool, device: str
) -> None:
    experts = draw(rule, *sizes, device, biased=biased)
    x = torch.randn(tokens, sizes[1], device=device)
    parts = grouped_experts(x, experts, SMALL)
    assert parts.shape == (rule.per_token, *x.shape)
    assert error(parts.sum(0), expected(x, experts)) < 1e-6


GROUPED = [
    ExpertRule(top_k=3, sigmoid=True, factor=2.5, groups=Groups(4, 2, 2)),
    ExpertRule(top_k=2, sigmoid=True, groups=Groups(3, 1, 2)),
    ExpertRule(top_k=4, normalized=False, factor=16.0, groups=Groups(6, 3, 1)),
    ExpertRule(top_k=4, sigmoid=True, normalized=False),
]


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("rule", "corrected"), [(rule, False) for rule in GROUPED] + [(rule, True) for rule in GROUPED if rule.sigmoid]
)
@pytest.mark.parametrize("tokens", [3, 9, 37])
def test_tokens_choose_from_the_best_groups_by_corrected_scores(
    tokens: int, rule: ExpertRule, corrected: bool, device: str
) -> None:
    experts = draw(rule, 12, 64, 32, device)
    if corrected:
        experts = replace(experts, correction=torch.linspace(0.4, -0.4, 12, device=device)[torch.randperm(12)])
    x = torch.randn(tokens, 64, device=device)
    wanted = expected(x, experts)
    assert error(apply_experts(x, experts), wanted) < 1e-6
    assert error(grouped_experts(x, experts, SMALL).sum(0), wanted) < 1e-6
    out = torch.full_like(x, torch.nan)
    if tokens <= FEW_TOKENS:
        experts_of_few(x, experts, out, added=False, launches=FEW)
        assert error(out, wanted) < 1e-6


@pytest.mark.parametrize("rule", GROUPED)
def test_a_step_whose_tokens_are_not_sampled_chooses_no_experts(rule: ExpertRule) -> None:
    experts = draw(rule, 12, 64, 32, "cpu")
    assert apply_experts(torch.empty(0, 64), experts).shape == (0, 64)


def test_a_correction_changes_the_choice_and_not_the_shares(device: str) -> None:
    experts = draw(ExpertRule(top_k=1, sigmoid=True, normalized=False), 4, 64, 32, device)
    x = torch.randn(1, 64, device=device)
    for wanted in range(4):
        correction = torch.zeros(4, device=device)
        correction[wanted] = 2.0
        chosen, shares = choose(x, replace(experts, correction=correction))
        assert chosen.tolist() == [[wanted]]
        assert torch.allclose(shares, (x @ experts.router[wanted]).sigmoid()[None])


@pytest.mark.parametrize(("rule", "biased"), BOTH)
def test_pytorch_computes_with_packed_weights(rule: ExpertRule, biased: bool) -> None:
    experts, plain = packed(draw(rule, 6, 96, 64, "cpu", biased=biased))
    x = torch.randn(13, 96)
    assert error(apply_experts(x, experts), expected(x, plain)) < 1e-6
    assert experts.nbytes < plain.nbytes / 6


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tokens", "sizes", "rule", "biased"),
    first_of(
        [(1, (6, 64, 32), *both) for both in BOTH]
        + [(3, (5, 96, 160), *both) for both in BOTH[2::6]]
        + [(2, (4, 160, 64), *both) for both in BOTH[2::3]],
        [(*sizes, *both) for sizes in ((3, (5, 96, 160)), (2, (4, 160, 64))) for both in BOTH],
    ),
)
def test_a_few_tokens_read_packed_weights(
    tokens: int, sizes: tuple[int, int, int], rule: ExpertRule, biased: bool, device: str
) -> None:
    experts, plain = packed(draw(rule, *sizes, device, biased=biased))
    x = torch.randn(tokens, sizes[1], device=device)
    out = torch.full_like(x, torch.nan)
    experts_of_few(x, experts, out, added=False, launches=FEW_PACKED)
    assert error(out, expected(x, plain)) < 1e-6


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("tokens", "sizes", "rule", "biased", "dtype"),
    first_of(
        [(9, (6, 64, 32), *both, torch.float32) for both in BOTH]
        + [(9, (6, 64, 32), *both, torch.float16) for both in BOTH[2::3]]
        + [(37, (5, 96, 160), *both, torch.float32) for both in BOTH[2::6]]
        + [(37, (5, 96, 160), *BOTH[5], torch.float16)],
        [
            (*sizes, *both, dtype)
            for sizes in ((9, (6, 64, 32)), (37, (5, 96, 160)))
            for both in BOTH
            for dtype in (torch.float32, torch.float16)
        ],
    ),
    ids=str,
)
def test_grouped_tokens_read_packed_weights(
    tokens: int, sizes: tuple[int, int, int], rule: ExpertRule, biased: bool, dtype: torch.dtype, device: str
) -> None:
    experts, plain = packed(draw(rule, *sizes, device, biased=biased, dtype=dtype))
    x = torch.randn(tokens, sizes[1], device=device, dtype=dtype)
    found = grouped_experts(x, experts, SMALL).float().sum(0)
    assert error(found, expected(x, plain)) < (1e-6 if dtype == torch.float32 else 2e-3)


def test_one_product_may_be_packed_and_the_other_not(device: str) -> None:
    experts, plain = packed(draw(RULES[0], 4, 64, 32, device))
    mixed = replace(experts, down=plain.down)
    for tokens in (2, 9):
        x = torch.randn(tokens, 64, device=device)
        if tokens == 2:
            out = torch.empty_like(x)
            experts_of_few(x, mixed, out, added=False, launches=FEW)
        else:
            out = grouped_experts(x, mixed, SMALL).sum(0)
        assert error(out, expected(x, plain)) < 1e-6


def check_same_bits(experts: Experts, x: torch.Tensor, wanted: torch.Tensor, near: float) -> None:
    """Tokens alone, in another order, and among others have the same bits, which are near float64's."""

    def computed(rows: torch.Tensor, processors: int) -> torch.Tensor:
        return fixed_experts(rows, experts, partial_products(rows, experts.router, gpu=Gpu(processors, alike=False)))

    whole = computed(x, 1)
    assert error(whole.float().sum(0), wanted) < near
    draw = torch.Generator().manual_seed(3)
    for count, processors in ((1, 1), (1, 1000), (2, 1), (5, 1000), (len(x) - 1, 1), (len(x), 1000)):
        at = torch.randperm(len(x), generator=draw)[:count].to(x.device)
        assert torch.equal(computed(x[at], processors), whole[:, at])


SIGMOIDS = ExpertRule(top_k=3, sigmoid=True, factor=2.5, groups=Groups(2, 1, 2))


@pytest.mark.always("rule2-True", "rule5-False")
@pytest.mark.parametrize(("rule", "biased"), [*BOTH[:3], *BOTH[4:6], (SIGMOIDS, False)])
def test_fixed_launches_give_a_token_the_same_bits_among_any_others(
    rule: ExpertRule, biased: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # tiles that an interpreter computes quickly
        monkeypatch.setattr("holdfast.lm.kernels.linear.experts.launches.FIXED", SMALL)
        monkeypatch.setattr("holdfast.lm.kernels.linear.experts.launches.FIXED_ROUTED_AT_A_TIME", 4)
        monkeypatch.setattr("holdfast.lm.kernels.linear.invariant_product.BLOCK_M", 8)
        monkeypatch.setattr("holdfast.lm.kernels.linear.invariant_product.BLOCK_N", 16)
    experts, x = draw(rule, 6, 264, 40, device, biased=biased), torch.randn(19, 264, device=device)
    check_same_bits(experts, x, expected(x, experts), 1e-6)


def test_experts_with_equal_scores_are_chosen_alike_alone_and_among_others(device: str) -> None:
    """Pairs of experts have the same row in the router, so each token's second and third choice may tie."""
    experts = draw(ExpertRule(top_k=3), 6, 64, 32, device)
    experts = replace(experts, router=experts.router[:3].repeat_interleave(2, 0))
    x = torch.randn(9, 64, device=device)
    logits = partial_products(x, experts.router, gpu=Gpu(1, alike=False))
    whole = fixed_experts(x, experts, logits)
    for token in range(len(x)):
        own = slice(token, token + 1)
        assert torch.equal(fixed_experts(x[own], experts, logits[:, own].contiguous()), whole[:, own])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "MXFP4", *(form.name for form in Form)])
@pytest.mark.parametrize("rule", [ExpertRule(top_k=8), RULES[2], SIGMOIDS], ids=["softmax", "clamped", "groups"])
def test_compiled_fixed_launches_give_a_token_the_same_bits_among_any_others(rule: ExpertRule, kind: str) -> None:
    experts = draw(rule, 32, 2048, 768, "cuda", dtype=torch.bfloat16)
    if kind == "MXFP4":
        experts, _ = packed(experts)
    elif kind != "plain":
        experts, _ = in_form(experts, Form[kind])
    x = torch.randn(300, 2048, device="cuda").bfloat16()
    check_same_bits(experts, x, grouped_experts(x, experts).float().sum(0), 2e-2)


def in_form(experts: Experts, form: Form, rows: int = 1) -> tuple[Experts, Experts]:
    """Experts of the same sizes with random packed weights, and those with the numbers that they stand for."""
    device = str(experts.router.device)
    drawn = (draw_packed(form, *each.shape, device=device, rows=rows) for each in (experts.gate_up, experts.down))
    (gate_up, plain_gate_up), (down, plain_down) = drawn
    return replace(experts, gate_up=gate_up, down=down), replace(
        experts, gate_up=plain_gate_up.to(experts.router), down=plain_down.to(experts.router)
    )


FEW_FORMS = (ExpertLaunch(4, 64, 4, 2), ExpertLaunch(64, 64, 4, 2), ExpertLaunch(64, 64, 4, 2))
GROUPED_FORMS = GroupedLaunch(16, ExpertLaunch(64, 64, 4, 2), ExpertLaunch(64, 64, 4, 2))
INPUTS = {Form.FP8: (192, 64), Form.INT8: (96, 160), Form.INT6: (256, 256), Form.INT4: (160, 96), Form.FP4: (80, 112)}
"""For each form, the numbers of inputs of the two products; most fill no last block."""


@pytest.mark.each_value
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize(("rule", "biased"), [BOTH[0], BOTH[4]])
def test_a_few_tokens_read_weights_of_each_form(rule: ExpertRule, biased: bool, form: Form, device: str) -> None:
    experts, plain = in_form(draw(rule, 3, *INPUTS[form], device, biased=biased), form)
    x = torch.randn(2, INPUTS[form][0], device=device)
    out = torch.full_like(x, torch.nan)
    experts_of_few(x, experts, out, added=False, launches=FEW_FORMS)
    assert error(out, expected(x, plain)) < 1e-6
    assert error(apply_experts(x, experts), expected(x, plain)) < 1e-6


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", Form)
def test_grouped_tokens_read_weights_of_each_form(form: Form, dtype: torch.dtype, device: str) -> None:
    experts, plain = in_form(draw(RULES[0], 3, *INPUTS[form], device, biased=True, dtype=dtype), form)
    x = torch.randn(11, INPUTS[form][0], device=device, dtype=dtype)
    found = grouped_experts(x, experts, GROUPED_FORMS).float().sum(0)
    assert error(found, expected(x, plain)) < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.parametrize("tokens", [3, 9])
def test_blocks_of_rows_belong_to_one_expert(tokens: int, device: str) -> None:
    experts, plain = in_form(draw(RULES[0], 5, 192, 64, device), Form.FP8, rows=32)
    x = torch.randn(tokens, 192, device=device)
    if tokens == 3:
        out = torch.empty_like(x)
        experts_of_few(x, experts, out, added=False, launches=FEW_FORMS)
    else:
        out = grouped_experts(x, experts, GROUPED_FORMS).sum(0)
    assert error(out, expected(x, plain)) < 1e-6


@pytest.mark.always("3", "37")
@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's
@pytest.mark.parametrize("tokens", [3, 9, 37, 64])
def test_rows_of_padding_change_no_other_row_whatever_they_hold(tokens: int, device: str) -> None:
    """Threads of a GPU that compare NaN do not agree on a maximum."""
    experts = draw(RULES[0], 8, 64, 32, device)
    x = torch.randn(tokens, 64, device=device)
    for held in (torch.nan, torch.inf):
        x[1::2] = held
        if tokens > 4:
            out = grouped_experts(x, experts, SMALL).sum(0)
        else:
            out = torch.empty_like(x)
            experts_of_few(x, experts, out, added=False, launches=FEW)
        assert error(out[::2], expected(x[::2], experts)) < 1e-6
        assert out[1::2].isnan().all(), "a fault is not hidden"


@pytest.mark.parametrize("tokens", [1, 5, 32, 53, 140])
def test_pairs_are_sorted_by_expert_and_then_by_token(tokens: int, device: str) -> None:
    experts = draw(ExpertRule(top_k=2), 7, 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    sorting = sort_pairs(x, experts, 16)
    chosen = (x @ experts.router.t()).topk(2).indices.flatten()
    assert torch.equal(sorting.pairs.long(), chosen.argsort(stable=True))
    counts = torch.bincount(chosen, minlength=7)
    assert torch.equal(sorting.ends.long(), counts.cumsum(0))
    assert torch.equal(sorting.tile_ends.long(), ((counts + 15) // 16).cumsum(0))
    assert sorting.most_tiles >= int(sorting.tile_ends[-1])


@pytest.mark.parametrize("tokens", [7, 40, 45])
def test_an_experts_last_tile_may_be_half_a_tile(tokens: int, device: str) -> None:
    experts = draw(ExpertRule(top_k=2), 5, 32, 16, device, biased=True)
    x = torch.randn(tokens, 32, device=device)
    launch = replace(SMALL, block_m=32, halved=True)
    assert error(grouped_experts(x, experts, launch).sum(0), expected(x, experts)) < 1e-6


def test_all_tokens_may_choose_the_same_experts(device: str) -> None:
    experts = draw(ExpertRule(top_k=2), 6, 32, 16, device, biased=True)
    assert experts.router_bias is not None
    experts.router_bias[[1, 4]] = 100.0
    x = torch.randn(40, 32, device=device)
    assert error(grouped_experts(x, experts, SMALL).sum(0), expected(x, experts)) < 1e-5


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("tokens", [3, 20])
def test_a_token_of_nan_stays_in_its_row(tokens: int, device: str) -> None:
    experts = draw(ExpertRule(top_k=2), 5, 32, 16, device)
    x = torch.randn(tokens, 32, device=device)
    x[1] = torch.nan
    if tokens == 3:
        out = torch.empty_like(x)
        experts_of_few(x, experts, out, added=False, launches=FEW)
    else:
        out = grouped_experts(x, experts, SMALL).sum(0)
    rest = [index for index in range(tokens) if index != 1]
    assert out[1].isnan().all()
    assert error(out[rest], expected(x[rest], experts)) < 1e-6


def test_tiles_grow_with_the_pairs_of_an_expert() -> None:
    experts = draw(ExpertRule(top_k=8), 128, 16, 16, "cpu")
    sizes = [grouped_launch_for(tokens, experts).block_m for tokens in (16, 256, 512, 1024, 8192)]
    assert sizes == sorted(sizes) and sizes[0] == 16 and sizes[-1] == 128


SHAPES = {
    "qwen3-30b-a3b": (ExpertRule(top_k=8), 128, 2048, 768, False),
    "mixtral": (ExpertRule(top_k=2), 8, 1024, 1792, False),
    "gpt-oss": (ExpertRule(top_k=4, clamp=(1.702, 7.0)), 32, 2880, 2880, True),
    "nemotron-3-nano-30b-a3b": (
        ExpertRule(top_k=6, sigmoid=True, factor=2.5, gated=False),
        128,
        2688,
        1856,
        False,
    ),
    "gemma-4-26b-a4b": (ExpertRule(top_k=8, activation="gelu_pytorch_tanh"), 128, 2816, 704, False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_launches_stay_within_the_precision_of_the_type(shape: str, dtype: torch.dtype) -> None:
    rule, count, hidden, inner, biased = SHAPES[shape]
    experts = draw(rule, count, hidden, inner, "cuda", biased=biased, dtype=dtype)
    for tokens in (1, 2, 8, 9, 33, 130, 700, 2100):
        x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
        few = tokens <= 8
        if few:
            found = torch.full((tokens, hidden), torch.nan, device="cuda")
            experts_of_few(x, experts, found, added=False)
        else:
            found = grouped_experts(x, experts).float().sum(0)
        exact = replace(
            experts,
            **{
                name: value.double()
                for name in ("router", "gate_up", "down", "router_bias", "gate_up_bias", "down_bias")
                if (value := getattr(experts, name)) is not None
            },
        )
        wanted = apply_experts(x.double(), exact)
        # Where two experts have nearly the same logits, a token may take the other one.
        rows = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        limit = 1e-3 if few else 1e-2
        assert rows.median() < limit and (rows < 2 * limit).double().mean() > 0.98, (tokens, rows.max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_launches_of_packed_weights_stay_within_the_precision_of_the_type(dtype: torch.dtype) -> None:
    rule, count, hidden, inner, biased = SHAPES["gpt-oss"]
    experts, plain = packed(draw(rule, count, hidden, inner, "cuda", biased=biased, dtype=dtype))
    for tokens in (1, 2, 4, 9, 33, 130, 700, 2100):
        x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
        if few := tokens <= 4:
            found = torch.full((tokens, hidden), torch.nan, device="cuda")
            experts_of_few(x, experts, found, added=False)
        else:
            found = grouped_experts(x, experts).float().sum(0)
        wanted = expected(x[:130], plain)
        found = found[:130]
        rows = (found.double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        limit = 1e-3 if few else 1e-2
        assert rows.median() < limit and (rows < 2 * limit).double().mean() > 0.98, (tokens, rows.max())


@pytest.mark.gpu
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_compiled_launches_of_each_form_stay_within_the_precision_of_the_type(form: Form, dtype: torch.dtype) -> None:
    rule, count, hidden, inner, biased = SHAPES["qwen3-30b-a3b"]
    rows = 64 if form is Form.FP8 else 1
    experts, plain = in_form(draw(rule, count, hidden, inner, "cuda", biased=biased, dtype=dtype), form, rows)
    for tokens in (1, 2, 4, 9, 33, 130, 700, 2100):
        x = torch.randn(tokens, hidden, device="cuda", dtype=dtype)
        if few := tokens <= 4:
            found = torch.full((tokens, hidden), torch.nan, device="cuda")
            experts_of_few(x, experts, found, added=False)
        else:
            found = grouped_experts(x, experts).float().sum(0)
        wanted = expected(x[:33], plain)
        off = (found[:33].double() - wanted).norm(dim=1) / wanted.norm(dim=1)
        limit = 5e-3 if few else 1e-2
        assert off.median() < limit and (off < 2 * limit).double().mean() > 0.9, (tokens, off.max())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 100])
def test_a_graph_follows_the_tokens_choices(tokens: int) -> None:
    experts = draw(ExpertRule(top_k=4), 32, 512, 256, "cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, 512, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(tokens, 512, device="cuda")

    def work() -> None:
        if tokens <= 8:
            experts_of_few(x, experts, out, added=False)
        else:
            torch.sum(grouped_experts(x, experts), 0, dtype=torch.float32, out=out)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        again = out.clone()
        out.zero_()
        work()
        assert torch.equal(again, out)
